"""`moonep plan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from moonep.cli.options import Listed
from moonep.sizing.hardware import ACCELERATORS, FABRICS
from moonep.sizing.models import DTYPE_BYTES, MODELS

__all__ = ["plan_command"]

_ROWS = ["bfloat16", "float16", "float32"]


_Command = TypeVar("_Command", bound=Callable[..., Any])


def _count(*names: str, least: int = 1, **more: Any) -> Callable[[_Command], _Command]:
    return click.option(*names, type=click.IntRange(min=least), metavar="N", **more)


@click.command("plan")
@click.option("--model", type=click.Choice([*MODELS]), help="A published shape.  [default: kimi-k3]")
@_count("--experts", help="Experts of a layer, in all.  [default: the model's, or the trace's]")
@_count("--topk", help="Experts of a token.  [default: the model's, or the trace's]")
@_count("--hidden", help="Width of a row.  [default: the model's]")
@_count("--width", help="Width of an expert's hidden layer.  [default: the model's]")
@_count("--layers", help="Layers with experts.  [default: the model's]")
@_count("--tokens", default=4096, show_default=True, help="Tokens of each rank in a step.")
@_count("--ranks", default=8, show_default=True, help="Ranks in all.")
@_count("--ranks-per-host", help="That share a host, or a rack of one fabric.  [default: the machine's, or 8]")
@click.option("--dtype", type=click.Choice(_ROWS), default="bfloat16", show_default=True, help="Of the rows.")
@click.option(
    "--weight-dtype", type=click.Choice([*DTYPE_BYTES]), default="bfloat16", show_default=True, help="Of the weights."
)
@click.option(
    "--combine-wire",
    type=click.Choice(["float32", "payload"]),
    default="float32",
    show_default=True,
    help="Sums as they cross: payload is the rows' dtype.",
)
@_count("--alignment", default=1, show_default=True, help="Every expert's rows are padded to a multiple of this many.")
@click.option(
    "--policy",
    "policies",
    type=Listed(str, "NAME,...", "some of home, capacity, balanced"),
    default="home,capacity,balanced",
    show_default=True,
    help="Where rows may go; a list.",
)
@click.option(
    "--factor",
    type=click.FloatRange(min=0, min_open=True),
    default=1.25,
    show_default=True,
    metavar="X",
    help="Of Capacity.",
)
@click.option(
    "--slack", type=click.FloatRange(min=0), default=0.05, show_default=True, metavar="X", help="Of Balanced."
)
@_count("--max-replicas", least=0, help="Of Balanced, on a rank.  [default: as many as it takes]")
@click.option(
    "--maxvio",
    type=Listed(float, "X,...", "numbers separated by commas, such as 0.5,1", 0),
    default=(),
    help="Lognormal routing of this imbalance, max load / mean - 1; a list.  [default: 1]",
)
@click.option("--trace", metavar="FILE", help="A recorded trace instead: a file or a built-in name.")
@click.option(
    "--drop",
    type=click.FloatRange(0, 1),
    default=0.01,
    show_default=True,
    metavar="X",
    help="Share of the routes that may be dropped.",
)
@click.option("--training", is_flag=True, help="Count gradients and backward too.")
@click.option("--recompute", is_flag=True, help="In training, hold the rows of one layer, not of all.")
@_count("--optimizer-bytes", least=0, default=0, help="State of a parameter: 12 for Adam with a float32 copy.")
@click.option(
    "--memory-gib", type=click.FloatRange(min=0, min_open=True), metavar="X", help="What a rank has for this."
)
@click.option("--machine", type=click.Choice([*ACCELERATORS]), help="Rates and memory of a rank, as its maker says.")
@click.option("--doctor", metavar="FILE", help="Rates of this machine instead: what moonep doctor --json printed.")
@click.option(
    "--fabric", type=click.Choice([*FABRICS]), default="400g", show_default=True, help="Between hosts, for each rank."
)
@click.option("--tflops", type=click.FloatRange(min=0, min_open=True), metavar="X", help="Of a rank, 1e12 a second.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; its keys name their units.")
@click.option("--plot", "plot_path", metavar="FILE", help="Draw a picture: *.png or *.svg (needs matplotlib).")
def plan_command(as_json: bool, plot_path: str | None, **options: Any) -> None:
    """Say what a layer needs on so many ranks, before there are any.

    How many rows and replicas every policy makes of a routing, how many bytes
    that takes in memory and between ranks; with --machine or --doctor also the
    least time of every phase, and from where on balancing pays. Counts only
    the routed experts: attention, dense layers and caches come on top.
    """
    from moonep.sizing.asked import ask

    try:
        if plot_path is not None:
            from moonep.bench.options import check_files

            check_files(None, plot_path)
        asked = ask(**options)
        report = asked.report()
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None

    from moonep.cli.plan_table import as_dict, table

    if as_json:
        import json

        click.echo(json.dumps(as_dict(report), indent=2, allow_nan=False))
    else:
        click.echo(table(report))
    if plot_path is not None:
        from moonep.sizing.plot import draw

        draw(asked, report, plot_path)
        click.echo(f"wrote {plot_path}", err=True)
