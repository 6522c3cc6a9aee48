"""A report -> a picture of four panels (matplotlib)."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import numpy as np

from moonep.policy import Balanced, Home, Policy
from moonep.sizing import loads
from moonep.sizing.asked import Asked
from moonep.sizing.memory import worst_memory
from moonep.sizing.report import Report
from moonep.sizing.routing import Routing
from moonep.sizing.times import SLACKS, Steps

__all__ = ["draw"]

_COLORS = {"Home": "#e69f00", "Capacity": "#8c8c8c", "Balanced": "#0072b2"}
_LIMIT_COLOR = "#b00020"
_SHADES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#8c8c8c")
_TOKENS = tuple(2**power for power in range(4, 17))


def draw(asked: Asked, report: Report, path: str) -> None:
    """Load per rank, dropped routes, time over tokens (or replicas over slack), memory over ranks."""
    figure_module = importlib.import_module("matplotlib.figure")
    figure = figure_module.Figure(figsize=(12.5, 9), layout="constrained", dpi=110)
    panels = figure.subplots(2, 2)
    _loads(panels[0, 0], asked)
    _dropped(panels[0, 1], asked)
    if asked.cluster.hardware is not None:
        _times(panels[1, 0], asked)
    else:
        _replicas(panels[1, 0], asked)
    _memory(panels[1, 1], asked)
    for panel in panels.flat:
        panel.grid(axis="y", which="major", color="#dddddd")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    setting, hardware = asked.setting, report.hardware
    figure.suptitle(
        f"{setting.model.name}: {setting.num_experts} experts, top-{setting.top_k}, {setting.num_ranks} ranks, T "
        f"{setting.max_tokens}" + (f", {hardware.name}" if hardware else ""),
        fontsize=13,
    )
    figure.savefig(path)


def _color(policy: Policy) -> str:
    return _COLORS[type(policy).__name__]


def _name(policy: Policy) -> str:
    if isinstance(policy, Home):
        return "Home"
    return f"Balanced, slack {policy.slack:g}" if isinstance(policy, Balanced) else f"Capacity {policy.factor:g}"


def _balanced(asked: Asked) -> Balanced:
    return next((policy for policy in asked.policies if isinstance(policy, Balanced)), Balanced())


def _loads(panel: Any, asked: Asked) -> None:
    """The last routing's worst draw under Home, rank by rank."""
    setting, routing = asked.setting, asked.routings[-1]
    totals = [routing.totals(draw, setting.num_ranks * setting.max_tokens) for draw in range(routing.num_draws)]
    homes = [loads.load(each, setting.num_ranks, Home(), setting.num_routes) for each in totals]
    worst = max(range(len(homes)), key=lambda draw: int(homes[draw].rank_rows.max()))
    policy = _balanced(asked)
    after = loads.load(totals[worst], setting.num_ranks, policy, setting.num_routes)
    before_R, after_R = (np.append(each.rank_rows, each.rank_rows[-1:]) for each in (homes[worst], after))
    edges = np.arange(setting.num_ranks + 1) - 0.5
    panel.fill_between(edges, before_R, step="post", color=_COLORS["Home"], alpha=0.45, linewidth=0, label="Home")
    panel.step(edges, after_R, where="post", color=_COLORS["Balanced"], label=_name(policy), linewidth=1.8)
    panel.axhline(before_R[:-1].mean(), color="#333333", linestyle="dashed", linewidth=1, label="even share")
    panel.set_ylim(bottom=0)
    panel.set_xlim(edges[0], edges[-1])
    panel.set_xlabel("rank")
    panel.set_ylabel("rows")
    panel.set_title(f"Load of every rank, {routing.name}, {after.num_replicas} replicas", fontsize=11)
    panel.legend(frameon=False, fontsize=9)


def _dropped(panel: Any, asked: Asked) -> None:
    setting = asked.setting
    factors = np.round(np.arange(0.5, 4.01, 0.05), 2)
    for color, routing in zip(_SHADES, asked.routings, strict=False):
        totals = _totals(routing, setting.num_ranks * setting.max_tokens)
        shares = [
            100 * float(np.mean([loads.dropped_share(each, float(factor), setting.num_routes) for each in totals]))
            for factor in factors
        ]
        panel.plot(factors, shares, color=color, label=routing.name)
    panel.axhline(
        100 * asked.drop_share, color=_LIMIT_COLOR, linestyle="dashed", linewidth=1, label=f"{asked.drop_share:.0%}"
    )
    panel.set_ylim(bottom=0)
    panel.set_xlabel("capacity factor")
    panel.set_ylabel("% of the routes")
    panel.set_title("Dropped by Capacity", fontsize=11)
    panel.legend(frameon=False, fontsize=9)


def _times(panel: Any, asked: Asked) -> None:
    setting, cluster, routing = asked.setting, asked.cluster, asked.routings[-1]
    assert cluster.hardware is not None
    assert cluster.across_bytes_per_sec is not None
    steps = Steps(setting, routing, cluster.hardware, cluster.across_bytes_per_sec)
    for policy in asked.policies:
        ms = [steps.secs(policy, num_tokens) * 1e3 for num_tokens in _TOKENS]
        panel.plot(_TOKENS, ms, color=_color(policy), label=_name(policy), marker=".")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(_TOKENS[::2], [str(each) for each in _TOKENS[::2]])
    panel.minorticks_off()
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    threshold = steps.break_even_tokens(_balanced(asked)) if setting.num_ranks > 1 else None
    if threshold is not None and _TOKENS[0] <= threshold <= _TOKENS[-1]:
        panel.axvline(
            threshold, color="#333333", linestyle="dotted", linewidth=1, label=f"Balanced pays from {threshold}"
        )
    panel.set_xlabel("tokens of a rank")
    panel.set_ylabel("ms, log scale")
    panel.set_title(f"Least time of a layer's step, {routing.name}", fontsize=11)
    panel.legend(frameon=False, fontsize=9)


def _replicas(panel: Any, asked: Asked) -> None:
    setting, most = asked.setting, _balanced(asked).max_replicas
    for color, routing in zip(_SHADES, asked.routings, strict=False):
        totals = _totals(routing, setting.num_ranks * setting.max_tokens)
        means = [
            np.mean(
                [
                    loads.load(each, setting.num_ranks, Balanced(slack, most), setting.num_routes).num_replicas
                    for each in totals
                ]
            )
            for slack in SLACKS
        ]
        panel.plot([100 * slack for slack in SLACKS], means, color=color, marker="o", label=routing.name)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("slack, %")
    panel.set_ylabel("replicas in all ranks")
    panel.set_title("Replicas that Balanced makes", fontsize=11)
    panel.legend(frameon=False, fontsize=9)


def _memory(panel: Any, asked: Asked) -> None:
    """From one rank, or one host, doubled up to a rank for each expert."""
    setting, routing = asked.setting, asked.routings[-1]
    counts = [setting.num_ranks]
    while counts[0] > 1:
        counts.insert(0, counts[0] // 2)
    while 2 * counts[-1] <= setting.num_experts:
        counts.append(2 * counts[-1])
    lines = []
    for policy in asked.policies:
        gib = [
            worst_memory(replace(setting, policy=policy, num_ranks=ranks), routing).total_bytes / 2**30
            for ranks in counts
        ]
        lines.append(gib)
        panel.plot(counts, gib, color=_color(policy), marker=".", label=_name(policy))
    if asked.cluster.memory_bytes is not None:
        limit = asked.cluster.memory_bytes / 2**30
        panel.axhline(limit, color=_LIMIT_COLOR, linestyle="dashed", linewidth=1, label=f"{limit:.0f} GiB")
    panel.axvline(setting.num_ranks, color="#333333", linestyle="dotted", linewidth=1)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(counts, [str(each) for each in counts])
    panel.minorticks_off()
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_xlabel("ranks")
    panel.set_ylabel("GiB of a rank, log scale")
    panel.set_title(f"Memory of the fullest rank, T {setting.max_tokens}, {routing.name}", fontsize=11)
    panel.legend(frameon=False, fontsize=9)


def _totals(routing: Routing, num_tokens: int) -> list[loads.Counts]:
    return [routing.totals(draw, num_tokens) for draw in range(routing.num_draws)]
