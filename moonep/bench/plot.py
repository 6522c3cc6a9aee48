"""Figures -> a picture (matplotlib)."""

from __future__ import annotations

import importlib
import math
from typing import Any

from moonep.bench.config import Settings, Way
from moonep.bench.results import CaseResult, Figures
from moonep.bench.table import routing_name
from moonep.bench.timing import STEP, TRAIN_STEP, phases_of

__all__ = ["draw"]

_COLORS = {"reference": "#8c8c8c", "collective": "#e69f00", "shm": "#0072b2", "local": "#009e73"}
_FLOOR_COLOR = "#b00020"
# Policies differ by these, in the order they were asked for.
_HATCHES, _LINES, _MARKS = ("", "//", "..", "xx"), ("-", "--", ":", "-."), "osD^"
_FLOORS_BELOW = 30  # a floor so many times below all that was measured is left out


def draw(settings: Settings, results: list[CaseResult], path: str) -> None:
    """A panel for every routing: over T where there are several, else a group of bars for every phase.

    Where experts compute, and there are several imbalances: time and memory over these.
    """
    if settings.width is not None and len(settings.maxvio) > 1:
        _draw_over_maxvio(settings, results, path)
        return
    figure_module = importlib.import_module("matplotlib.figure")
    routings = list(dict.fromkeys(result.case.maxvio for result in results))
    over_tokens = len(settings.tokens) > 1
    figure = figure_module.Figure(figsize=(1.5 + 6.0 * len(routings), 5.2), layout="constrained", dpi=120)
    panels = figure.subplots(1, len(routings), sharey=True, squeeze=False)[0]
    for panel, maxvio in zip(panels, routings, strict=True):
        of_routing = [result for result in results if result.case.maxvio == maxvio]
        if over_tokens:
            _lines(panel, settings, of_routing)
        else:
            _bars(panel, settings, of_routing[0])
        measured = of_routing[-1].any_traffic.maxvio
        panel.set_title(f"routing: {routing_name(settings, of_routing[0])} (maxvio {measured:.1f})", fontsize=11)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.grid(axis="y", which="major", color="#dddddd")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(bottom=_lowest_ms(results))
    panels[0].set_ylabel("ms, slowest rank, log scale")
    handles = dict(sorted(zip(*panels[0].get_legend_handles_labels()[::-1], strict=True), key=_floor_last))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    tokens = "" if over_tokens else f", T {settings.tokens[0]}"
    figure.suptitle(f"{_shape(settings)}{tokens}: median, whisker to p95", fontsize=12)
    figure.savefig(path)


def _draw_over_maxvio(settings: Settings, results: list[CaseResult], path: str) -> None:
    """Two panels for every T: how long a step takes, and how much memory, with a line for every way."""
    figure_module = importlib.import_module("matplotlib.figure")
    figure = figure_module.Figure(figsize=(12.5, 1.2 + 4.0 * len(settings.tokens)), layout="constrained", dpi=120)
    rows = figure.subplots(len(settings.tokens), 2, squeeze=False)
    phase = TRAIN_STEP if settings.backward else STEP
    for (time_panel, memory_panel), num_tokens in zip(rows, settings.tokens, strict=True):
        cases = sorted((each for each in results if each.case.num_tokens == num_tokens), key=_measured_maxvio)
        places = [_measured_maxvio(case) for case in cases]
        for way in settings.ways:
            figures = [_of(case, way, phase) for case in cases]
            heights = [each.p50_secs * 1e3 for each in figures]
            look = _look(settings, way)
            time_panel.errorbar(places, heights, _p95_errors(figures), capsize=3, label=_name(settings, way), **look)
            known = [
                (place, case.peak_bytes[way] / 1e6)
                for place, case in zip(places, cases, strict=True)
                if way in case.peak_bytes
            ]
            memory_panel.plot([place for place, _ in known], [value for _, value in known], **look)
        time_panel.set_ylabel(f"{phase}, ms, slowest rank" + (f", T {num_tokens}" if len(settings.tokens) > 1 else ""))
        memory_panel.set_ylabel("peak memory of a step, MB, rank with most")
        for panel in (time_panel, memory_panel):
            panel.set_ylim(bottom=0)
            panel.set_xlabel("maxvio, measured")
            panel.grid(axis="y", color="#dddddd")
            panel.set_axisbelow(True)
            panel.spines[["top", "right"]].set_visible(False)
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)
    tokens = f", T {settings.tokens[0]}" if len(settings.tokens) == 1 else ""
    figure.suptitle(f"{_shape(settings)}, width {settings.width}{tokens}: median, whisker to p95", fontsize=12)
    figure.savefig(path)


def _measured_maxvio(result: CaseResult) -> float:
    return result.any_traffic.maxvio


def _shape(settings: Settings) -> str:
    return (
        f"{settings.num_ranks} ranks, {settings.num_experts} experts, top-{settings.top_k}, hidden "
        f"{settings.hidden}, {settings.dtype}"
    )


def _name(settings: Settings, way: Way) -> str:
    return way.method if len(settings.policies) == 1 else f"{way.method}, {way.policy}"


def _look(settings: Settings, way: Way) -> dict[str, str]:
    place = settings.policies.index(way.policy) % len(_LINES)
    return {"color": _COLORS[way.method], "linestyle": _LINES[place], "marker": _MARKS[place]}


def _lowest_ms(results: list[CaseResult]) -> float:
    """Where the axis begins: below all times, and below floors that are not too far from them."""
    figures = [figures for result in results for figures in result.figures]
    lowest_secs = min(each.p50_secs for each in figures)
    floors = [each.floor_secs for each in figures if each.floor_secs and each.floor_secs * _FLOORS_BELOW > lowest_secs]
    return min([lowest_secs, *floors]) * 1e3 / 1.5


def _floor_last(item: tuple[str, Any]) -> bool:
    return item[0].startswith("floor")


def _of(result: CaseResult, way: Way, phase: str) -> Figures:
    return next(each for each in result.figures if (each.method, each.policy, each.phase) == (*way, phase))


def _p95_errors(figures: list[Figures]) -> list[list[float]]:
    return [[0.0] * len(figures), [max(0.0, each.p95_secs - each.p50_secs) * 1e3 for each in figures]]


def _bars(panel: Any, settings: Settings, result: CaseResult) -> None:
    phases = [*phases_of(settings), STEP] + ([TRAIN_STEP] if settings.backward else [])
    width = 0.8 / len(settings.ways)
    for i, way in enumerate(settings.ways):
        figures = [_of(result, way, phase) for phase in phases]
        places = [place - 0.4 + (i + 0.5) * width for place in range(len(phases))]
        heights = [each.p50_secs * 1e3 for each in figures]
        hatch = _HATCHES[settings.policies.index(way.policy) % len(_HATCHES)]
        panel.bar(places, heights, 0.92 * width, color=_COLORS[way.method], hatch=hatch, label=_name(settings, way))
        panel.errorbar(places, heights, _p95_errors(figures), fmt="none", ecolor="#333333", elinewidth=1, capsize=2)
        for place, figure in zip(places, figures, strict=True):
            panel.annotate(
                f"{figure.p50_secs * 1e3:.3g}",
                (place, max(figure.p50_secs, figure.p95_secs) * 1e3),
                (0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
    for place, phase in enumerate(phases):
        floor_secs = _of(result, settings.ways[0], phase).floor_secs
        if floor_secs:
            label = "floor: memory bandwidth" if phase == "combine" else None
            panel.hlines(
                floor_secs * 1e3, place - 0.42, place + 0.42, colors=_FLOOR_COLOR, linestyles="dashed", label=label
            )
    panel.set_xticks(range(len(phases)), phases)


def _lines(panel: Any, settings: Settings, results: list[CaseResult]) -> None:
    tokens = [result.case.num_tokens for result in results]
    for way in settings.ways:
        figures = [_of(result, way, STEP) for result in results]
        heights = [each.p50_secs * 1e3 for each in figures]
        label = f"{_name(settings, way)}, step"
        panel.errorbar(tokens, heights, _p95_errors(figures), capsize=3, label=label, **_look(settings, way))
    floors = [(_of(result, settings.ways[0], STEP).floor_secs or math.nan) * 1e3 for result in results]
    panel.plot(tokens, floors, color=_FLOOR_COLOR, linestyle="dashed", label="floor: memory bandwidth")
    panel.set_xscale("symlog", base=2, linthresh=1)  # T may be 0
    panel.set_xticks(tokens, [str(each) for each in tokens])
    panel.minorticks_off()
    panel.set_xlabel("T, tokens of a rank")
