"""`moonep trace`."""

from __future__ import annotations

import click

__all__ = ["trace_command"]


@click.command("trace")
@click.argument("file")
def trace_command(file: str) -> None:
    """Says what a routing trace holds.

    FILE is a .npz file, or the name of a built-in trace: pydoc.
    """
    from moonep.trace import load_trace

    try:
        trace = load_trace(file)
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    click.echo(trace.description or "(no description)")
    click.echo(
        f"steps {trace.num_steps}, tokens {trace.num_tokens}, experts {trace.num_experts}, top-k {trace.top_k}; "
        f"mean {trace.num_tokens * trace.top_k / trace.num_experts:.1f} rows an expert\n"
    )
    click.echo("step  maxvio")
    for step, maxvio in enumerate(trace.maxvio_of_step()):
        click.echo(f"{step:4d}  {maxvio:6.2f}")
