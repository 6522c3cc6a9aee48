"""`moonep trace`: what a routing trace holds, as text or as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from moonep.trace import Trace

__all__ = ["trace_command"]


class _InfoByDefault(click.Group):
    """`moonep trace FILE` is `moonep trace info FILE`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["info", *args])


@click.group("trace", cls=_InfoByDefault)
def trace_command() -> None:
    """Show what a routing trace holds: moonep trace FILE, or one of these.

    FILE is a .npz file, or the name of a built-in trace: pydoc.
    """


_RANKS = click.option(
    "--ranks", type=click.IntRange(min=1), metavar="N", default=8, show_default=True, help="That share the experts."
)


@trace_command.command("info")
@click.argument("file")
@_RANKS
def info(file: str, ranks: int) -> None:
    """Imbalance step by step, over experts and over ranks."""
    from moonep.policy import Home
    from moonep.sizing.loads import load
    from moonep.sizing.routing import Recorded

    trace = _load(file)
    click.echo(trace.description or "(no description)")
    click.echo(
        f"steps {trace.num_steps}, tokens {trace.num_tokens}, experts {trace.num_experts}, top-k {trace.top_k}; "
        f"mean {trace.num_tokens * trace.top_k / trace.num_experts:.1f} rows an expert\n"
    )
    over = f"over even, {ranks} ranks"
    click.echo(f"step  maxvio  idle experts  {over}")
    routing = Recorded(trace, file)
    for step, maxvio in enumerate(trace.maxvio_of_step()):
        totals_E = routing.totals(step, trace.num_tokens)
        fullest = load(totals_E, ranks, Home(), trace.num_tokens * trace.top_k).imbalance
        click.echo(f"{step:4d}  {maxvio:6.2f}  {int((totals_E == 0).sum()):12d}  {fullest:>{len(over)}.1%}")


@trace_command.command("plot")
@click.argument("file")
@click.argument("picture")
@_RANKS
def plot(file: str, picture: str, ranks: int) -> None:
    """Draw it to PICTURE, *.png or *.svg (needs matplotlib).

    Load of every expert and rank, imbalance over steps, and which ranks'
    experts are chosen together.
    """
    from moonep.bench.options import check_files

    try:
        check_files(None, picture)
    except ValueError as error:
        raise click.UsageError(str(error).replace("--plot", "PICTURE")) from None
    trace = _load(file)
    from moonep.sizing.trace_plot import draw

    draw(trace, ranks, picture)
    click.echo(f"wrote {picture}", err=True)


def _load(file: str) -> Trace:
    from moonep.trace import load_trace

    try:
        return load_trace(file)
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None
