"""`moonep bench`."""

from __future__ import annotations

from typing import Any

import click

from moonep.cli.options import Listed

__all__ = ["bench_command"]


@click.command("bench")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ranks to start on this machine.  [default: one per GPU, at least 2]",
)
@click.option(
    "--tokens",
    type=Listed(int, "T,...", "whole numbers separated by commas, such as 128,512", 0),
    default="512",
    show_default=True,
    help="Tokens of each rank; a list.",
)
@click.option(
    "--maxvio",
    type=Listed(float, "X,...", "numbers separated by commas, such as 0.5,1", 0),
    default=(),
    help="Lognormal routing of this imbalance, max load / mean - 1, instead of a trace; a list.",
)
@click.option("--hot-together", is_flag=True, help="With --maxvio: hot experts are at home on the first ranks.")
@click.option("--trace", metavar="FILE", help="Routing to replay: a file or a built-in name.  [default: pydoc]")
@click.option("--experts", type=click.IntRange(min=1), metavar="N", help="Experts in all.  [default: the trace's, 896]")
@click.option("--topk", type=click.IntRange(min=1), metavar="N", help="Experts of a token.  [default: the trace's, 16]")
@click.option(
    "--hidden", type=click.IntRange(min=1), metavar="N", default=3584, show_default=True, help="Width of a row."
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Of the rows.",
)
@click.option(
    "--policy",
    type=Listed(str, "POLICY,...", "policies separated by commas, such as home,balanced:0.05"),
    default="home",
    show_default=True,
    help="Where rows may go; a list of home, capacity:FACTOR, balanced, balanced:SLACK, balanced:SLACK:MAX_REPLICAS.",
)
@click.option(
    "--experts-compute",
    is_flag=True,
    help="Time the whole layer: experts compute, replicas get their weights; also its memory.",
)
@click.option(
    "--width",
    type=click.IntRange(min=1),
    metavar="N",
    default=64,
    show_default=True,
    help="Of an expert's hidden layer, for --experts-compute.",
)
@click.option(
    "--transport",
    type=Listed(str, "NAME,...", "names separated by commas, such as reference,shm"),
    default=(),
    help="Methods to compare; a list of reference, collective, shm, local (one rank).  [default: all that work]",
)
@click.option(
    "--iterations",
    type=click.IntRange(min=1),
    metavar="N",
    default=15,
    show_default=True,
    help="Timed blocks of many steps, of each method.",
)
@click.option(
    "--threads", type=click.IntRange(min=1), metavar="N", default=1, show_default=True, help="Threads of each rank."
)
@click.option("--backward", is_flag=True, help="Also time forward and backward together.")
@click.option("--json", "json_path", metavar="FILE", help="Write JSON lines: one per method, phase and configuration.")
@click.option("--plot", "plot_path", metavar="FILE", help="Draw a picture: *.png or *.svg (needs matplotlib).")
def bench_command(json_path: str | None, plot_path: str | None, **options: Any) -> None:
    """Times dispatch and combine against plain torch, side by side.

    Starts its ranks itself, or uses those of torchrun (torchrun -m moonep
    bench). Checks every method's results against the reference before timing
    any, then prints a table for every combination of --tokens and routing.
    """
    from moonep.bench.options import check_files, make_settings

    try:
        check_files(json_path, plot_path)
        settings = make_settings(**options)
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None

    # Only now torch is loaded.
    from moonep.bench.command import bench
    from moonep.bench.verify import VerificationError
    from moonep.errors import MoonEPError
    from moonep.testing import RankFailure

    try:
        bench(settings, json_path, plot_path)
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    except (MoonEPError, RankFailure, VerificationError) as error:
        raise click.ClickException(str(error)) from None
