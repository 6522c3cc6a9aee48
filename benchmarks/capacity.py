"""The table of docs/capacity.md: published models on 8, 64 and 128 ranks.

    python benchmarks/capacity.py

Counted and computed, not measured: see moonep/sizing.
"""

from __future__ import annotations

import itertools

import click

from moonep.policy import Balanced, Home
from moonep.sizing.hardware import ACCELERATORS, FABRICS
from moonep.sizing.models import MODELS
from moonep.sizing.report import Cluster, examine
from moonep.sizing.routing import Lognormal
from moonep.sizing.setting import Setting

RANKS = (8, 64, 128)
HEADING = (
    "model",
    "R",
    "expert MB",
    "experts at home",
    "GiB at home",
    "rows, even",
    "rows, Home",
    "N, Balanced",
    "GiB of rows",
    "replicas",
    "MB sent",
    "of that across",
    "factor for 1%",
    "pays from T",
)


def row(name: str, num_ranks: int, tokens: int, maxvio: float, machine: str, fabric: str) -> list[str]:
    model = MODELS[name]
    setting = Setting(model, num_ranks, 8, tokens, Home())
    routing = Lognormal(model.num_experts, model.top_k, maxvio)
    cluster = Cluster(ACCELERATORS[machine], FABRICS[fabric], None)
    report = examine(setting, [Home(), Balanced()], [routing], cluster, 0.01)
    figures = report.routings[0]
    home, balanced = figures.policies
    sent = next(each for each in home.traffic if each.way == "rank")
    sent_bytes = sent.inside_bytes + sent.across_bytes
    return [
        name,
        str(num_ranks),
        f"{setting.expert_bytes / 1e6:.1f}",
        str(-(-model.num_experts // num_ranks)),
        f"{home.memory.home_bytes / 2**30:.2f}",
        f"{tokens * model.top_k:,}",
        f"{home.rows_mean:,.0f}",
        f"{balanced.num_rows:,}",
        f"{(balanced.memory.rows_in_bytes + balanced.memory.rows_out_bytes) / 2**30:.3f}",
        f"{balanced.replicas_mean:.1f}",
        f"{sent_bytes / 1e6:.0f}",
        f"{sent.across_bytes / max(1, sent_bytes):.0%}",
        f"{figures.least_factor:.2f}",
        "-" if figures.break_even_tokens is None else f"{figures.break_even_tokens:,}",
    ]


@click.command()
@click.option("--tokens", default=4096, show_default=True)
@click.option("--maxvio", default=1.0, show_default=True)
@click.option("--machine", default="h200", show_default=True)
@click.option("--fabric", default="400g", show_default=True)
def main(tokens: int, maxvio: float, machine: str, fabric: str) -> None:
    """Tabulate what published models need."""
    click.echo("\n".join("| " + " | ".join(cells) + " |" for cells in (HEADING, ["---"] * len(HEADING))))
    for name, num_ranks in itertools.product(MODELS, RANKS):
        click.echo("| " + " | ".join(row(name, num_ranks, tokens, maxvio, machine, fabric)) + " |")


if __name__ == "__main__":
    main()
