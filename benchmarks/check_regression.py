"""Holds the ratios of a run of `moonep bench --json` against recorded ones.

    moonep bench --json run.jsonl
    python benchmarks/check_regression.py run.jsonl benchmarks/recorded.jsonl

Times belong to a machine, ratios less so: for every method and phase in both files, at the same shape, two ratios are
compared, each with its own threshold: times faster than the reference, and times the floor. What became slower by more
than the threshold is a regression. What became faster by more is pointed out too: a large gain is to be recorded, or is
a sign that less is done than before. A regression exits with 1, a gain alone with 0, nothing to compare with 2.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

SHAPE = ("ranks", "threads", "num_tokens", "num_experts", "top_k", "hidden", "dtype", "policy", "routing")
KEYS = ("method", "phase", *SHAPE)


@dataclass(frozen=True)
class Change:
    """One ratio, then and now."""

    name: str  # what was measured
    ratio: str  # "x ref" or "x floor"
    recorded: float
    now: float
    threshold: float

    @property
    def gain(self) -> float:
        """By which factor it became better; below 1: worse."""
        return self.now / self.recorded if self.ratio == "x ref" else self.recorded / self.now

    @property
    def verdict(self) -> str:
        """In one word."""
        if self.gain < 1 / (1 + self.threshold):
            return "SLOWER"
        return "faster" if self.gain > 1 + self.threshold else "same"


def load(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The lines of a result file, by what was measured."""
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            result = json.loads(line)
            # Only steps that compute have a width.
            found[(*(result[key] for key in KEYS), result.get("width"))] = result
        except (KeyError, TypeError, ValueError) as error:
            raise click.ClickException(f"{path}, line {number}: not a result of moonep bench: {error!r}") from None
    return found


def compare(
    run: dict[tuple[Any, ...], dict[str, Any]],
    recorded: dict[tuple[Any, ...], dict[str, Any]],
    thresholds: dict[str, float],
) -> list[Change]:
    """All ratios that both have; the reference's own are the measure and are left out."""
    fields = {"x ref": "times_reference", "x floor": "times_floor"}
    changes = []
    for key in recorded:
        if key not in run or key[0] == "reference":
            continue
        name = f"{key[0]} {key[1]}, {key[2]} ranks, T {key[4]}"
        for ratio, field in fields.items():
            then, now = recorded[key].get(field), run[key].get(field)
            if then and now:
                changes.append(Change(name, ratio, then, now, thresholds[ratio]))
    return changes


@click.command()
@click.argument("run", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("recorded", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--reference-threshold", default=0.25, show_default=True, help="For times faster than the reference.")
@click.option("--floor-threshold", default=0.40, show_default=True, help="For times the floor.")
def main(run: Path, recorded: Path, reference_threshold: float, floor_threshold: float) -> None:
    """Hold the ratios of RUN against those of RECORDED, both written by moonep bench --json.

    A threshold of 0.25 lets a ratio become 1.25 times worse.
    """
    changes = compare(load(run), load(recorded), {"x ref": reference_threshold, "x floor": floor_threshold})
    if not changes:
        click.echo(f"nothing to compare: {run} and {recorded} share no method and phase at one shape", err=True)
        sys.exit(2)
    click.echo(f"{'what':42}{'ratio':>9}{'recorded':>10}{'now':>9}  verdict")
    for change in changes:
        click.echo(f"{change.name:42}{change.ratio:>9}{change.recorded:>10.2f}{change.now:>9.2f}  {change.verdict}")
    slower = sum(change.verdict == "SLOWER" for change in changes)
    faster = sum(change.verdict == "faster" for change in changes)
    click.echo(f"{len(changes)} ratios: {slower} slower, {faster} faster than recorded")
    if faster:
        click.echo("Large gains: check that as much is done as before, then record them.")
    sys.exit(1 if slower else 0)


if __name__ == "__main__":
    main()
