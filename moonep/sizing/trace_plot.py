"""A trace -> a picture of four panels (matplotlib)."""

from __future__ import annotations

import importlib

import numpy as np
import numpy.typing as npt

from moonep.policy import Home
from moonep.sizing.loads import home_of_expert, load
from moonep.sizing.routing import Recorded
from moonep.trace import Trace

__all__ = ["chosen_together", "draw"]

_COLOR, _EVEN_COLOR, _BARS_COLOR = "#0072b2", "#333333", "#e69f00"


def chosen_together(trace: Trace, num_ranks: int) -> npt.NDArray[np.float64]:
    """How much more often than by chance a token that has a route to rank r has one to rank s, [R, R].

    The share of all steps' tokens with routes to both, over the product of the shares with routes to each; 1: as if
    ranks were chosen independently. NaN where a rank is never chosen; the diagonal is NaN.
    """
    to = np.append(home_of_expert(trace.num_experts, num_ranks), num_ranks)  # -1 takes the last
    hit = np.zeros((trace.num_steps * trace.num_tokens, num_ranks + 1))
    np.put_along_axis(hit, to[trace.topk_idx.reshape(len(hit), -1)], 1.0, axis=1)
    hit = hit[:, :num_ranks]
    share_R = hit.mean(axis=0)
    by_chance_RR = np.outer(share_R, share_R)
    found = np.full((num_ranks, num_ranks), np.nan)
    np.divide(hit.T @ hit / len(hit), by_chance_RR, out=found, where=by_chance_RR > 0)
    np.fill_diagonal(found, np.nan)
    return found


def draw(trace: Trace, num_ranks: int, path: str) -> None:
    """Load of every expert and of every rank (last step), imbalance over steps, ranks chosen together."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(12.5, 9), layout="constrained", dpi=110)
    (experts, ranks), (steps, together) = figure.subplots(2, 2)
    routing, last = Recorded(trace, ""), trace.num_steps - 1
    totals_E, routes = routing.totals(last, trace.num_tokens), trace.num_tokens * trace.top_k

    experts.fill_between(np.arange(trace.num_experts), np.sort(totals_E)[::-1], step="mid", color=_COLOR, alpha=0.6)
    experts.axhline(totals_E.mean(), color=_EVEN_COLOR, linestyle="dashed", linewidth=1, label="mean")
    experts.set_title(f"Rows of every expert, step {last}, most first", fontsize=11)
    experts.set_xlabel("experts")
    experts.set_ylim(bottom=0)
    experts.legend(frameon=False)

    rank_rows_R = load(totals_E, num_ranks, Home(), routes).rank_rows
    ranks.bar(np.arange(num_ranks), rank_rows_R, 0.9, color=_BARS_COLOR)
    ranks.axhline(rank_rows_R.mean(), color=_EVEN_COLOR, linestyle="dashed", linewidth=1, label="even share")
    ranks.set_title(f"Rows of every rank at home, step {last}", fontsize=11)
    ranks.set_xlabel("rank")
    ranks.legend(frameon=False)

    at = list(range(trace.num_steps))
    totals = [routing.totals(step, trace.num_tokens) for step in at]
    steps.plot(at, trace.maxvio_of_step(), color=_COLOR, marker="o", label="experts")
    imbalances = [load(each, num_ranks, Home(), routes).imbalance for each in totals]
    steps.plot(at, imbalances, color=_BARS_COLOR, marker="o", label=f"{num_ranks} ranks")
    steps.set_ylim(bottom=0)
    steps.set_xticks(at if len(at) <= 16 else at[:: len(at) // 16])
    steps.set_title("Imbalance, max / mean - 1", fontsize=11)
    steps.set_xlabel("step")
    steps.legend(frameon=False)

    found_RR = chosen_together(trace, num_ranks)
    away = max(0.01, float(np.nanmax(np.abs(found_RR - 1)))) if np.isfinite(found_RR).any() else 1.0
    image = together.imshow(found_RR, cmap="RdBu_r", vmin=1 - away, vmax=1 + away)
    figure.colorbar(image, ax=together, label="1: as by chance")
    together.set_title("Ranks that tokens choose together, all steps", fontsize=11)
    together.set_xlabel("rank")
    together.set_ylabel("rank")

    for panel in (experts, ranks, steps):
        panel.grid(axis="y", color="#dddddd")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{trace.num_tokens} tokens, top-{trace.top_k} of {trace.num_experts} experts", fontsize=13)
    figure.savefig(path)
