"""Figures -> text of 80 columns, and JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict

from moonep.bench.config import HOME, Settings, Way
from moonep.bench.machine import machine, versions
from moonep.bench.results import CaseResult, Figures, Traffic
from moonep.bench.timing import STEP, TRAIN_STEP

__all__ = ["FOOTNOTE", "case_table", "configuration", "footnotes", "json_lines", "missed_maxvio", "routing_name"]

_COLUMNS = "{:<11}{:<9}{:>9}{:>9}{:>10}{:>10}{:>11}{:>10}"

FOOTNOTE = """\
Times are the slowest rank's: of every step for plan, dispatch and combine, of
blocks of many steps for the whole step. GB/s = 1e9 bytes a second, per rank:
logical counts every routed row, wire what crossed between ranks (partial sums
as float32). x ref: times faster than the reference. x floor: times the least
that memory allows, which is to write and to read every received row once at
the copy bandwidth above (a copy of B bytes reads B and writes B, B counted
once): half for dispatch, half for combine; rows of the fullest rank."""

EXPERTS_FOOTNOTE = """\
A step is plan, dispatch, replicate, experts (grouped products of moonep.nn),
combine; replicate is what fetching the weights of replicas takes. Memory is
what one step makes resident on a rank that has tokens and weights, at its peak
(VmHWM); the rank that takes most."""

POLICIES_FOOTNOTE = """\
Experts of a lognormal routing are popular whatever their ids, the same ones on
all ranks: hot ones are at home where chance puts them (with --hot-together, on
the first ranks). Rows over the mean: of the fullest rank. A policy is compared
with home, of the same method: time over time, medians; 95 % confidence over
rounds in brackets. Without --experts-compute no weights are replicated, and a
step is cheaper than in a layer where the policy makes replicas."""


def configuration(settings: Settings) -> str:
    """What is going to be measured, and where."""
    v, m = versions(), machine()
    memory_bytes = m["memory_bytes"]
    peers = (
        [f"and of its peers: {', '.join(f'{p.package} {p.version}' for p in settings.peers)}"] if settings.peers else []
    )
    memory = f", {memory_bytes / 2**30:.0f} GiB" if isinstance(memory_bytes, int) else ""
    return "\n".join(
        (
            f"moonep {v['moonep']}, torch {v['torch']}, numpy {v['numpy']}, Python {v['python']}",
            f"{m['cpu']}, {m['cores']} cores{memory}, {m['system']}, {m['row_kernels']}",
            f"ranks {settings.num_ranks}, threads a rank {settings.threads}, {_policies(settings)}",
            f"experts {settings.num_experts}, top-k {settings.top_k}, hidden {settings.hidden}, {settings.dtype}",
            *([f"every step computes experts of width {settings.width}"] if settings.width else []),
            f"{settings.rounds} block{'s' * (settings.rounds > 1)} of each of: {', '.join(settings.methods)}; in turn",
            *peers,
        )
    )


def footnotes(settings: Settings) -> str:
    """What the tables mean."""
    notes = [FOOTNOTE]
    if settings.width is not None:
        notes.append(EXPERTS_FOOTNOTE)
    if settings.policies != (HOME,):
        notes.append(POLICIES_FOOTNOTE)
    return "\n\n".join(notes)


def _policies(settings: Settings) -> str:
    names = settings.policies
    return f"policy {names[0]}" if len(names) == 1 else f"policies {', '.join(names)}"


def routing_name(settings: Settings, result: CaseResult) -> str:
    """Where a case's routing comes from, and how uneven it was to be."""
    return _source(settings, result) + ("" if result.case.maxvio is None else f" {result.case.maxvio:g}")


def _source(settings: Settings, result: CaseResult) -> str:
    lognormal = "lognormal, hot together" if settings.hot_together else "lognormal"
    return f"trace {settings.trace_name}" if result.case.maxvio is None else lognormal


def _achieved(result: CaseResult) -> str:
    """The imbalance, beside what was asked for."""
    traffic = result.any_traffic
    achieved = f"{traffic.maxvio:.2f}" if traffic.routed_rows else "-"
    return achieved if result.case.maxvio is None else f"asked {result.case.maxvio:g}, achieved {achieved}"


def missed_maxvio(result: CaseResult) -> str:
    """What to say when the routing is not as uneven as was asked for; empty when it is, or has no rows."""
    asked, achieved = result.case.maxvio, result.any_traffic.maxvio
    if asked is None or not result.any_traffic.routed_rows or abs(achieved - asked) <= max(0.1 * asked, 0.05):
        return ""
    return (
        f"T {result.case.num_tokens}, --maxvio {asked:g}: the routing has {achieved:.2f}; few tokens are uneven by "
        "chance, more --tokens come nearer"
    )


def case_table(settings: Settings, result: CaseResult) -> str:
    """One case: what it is, and for every policy a line for every phase of every method."""
    lines = [
        f"T {result.case.num_tokens}, routing {_source(settings, result)}: maxvio {_achieved(result)}",
        f"copy bandwidth {result.copy_bytes_per_sec / 1e9:.1f} GB/s a rank, all ranks at once",
        "results: equal to the reference's, bit for bit"
        + ("; peers': within rounding" if settings.peers else "")
        + ("; experts': within rounding" if settings.width else ""),
    ]
    for policy, traffic in result.traffic.items():
        lines += [
            "",
            *([f"policy {policy}"] if len(settings.policies) > 1 else []),
            f"rows a rank: {traffic.routed_rows:.0f} sent, at most {traffic.slowest_rows} received; "
            f"tokens crossing: {traffic.crossings:.0f}",
            *_balance(settings, result, policy, traffic),
            _COLUMNS.format("method", "phase", "p50 ms", "p95 ms", "logical", "wire", "x ref", "x floor"),
            _COLUMNS.format("", "", "", "", "GB/s", "GB/s", "", "").rstrip(),
        ]
        previous = ""
        for figures in result.figures:
            if figures.policy == policy:
                lines.append(_line(figures, figures.method if figures.method != previous else ""))
                previous = figures.method
    return "\n".join(lines)


def _balance(settings: Settings, result: CaseResult, policy: str, traffic: Traffic) -> list[str]:
    """What a policy makes of the ranks' load, and at what price."""
    if settings.policies == (HOME,) and settings.width is None:
        return []
    lines = [f"rows of the fullest rank over the mean: {traffic.rank_imbalance:.3f}"]
    if traffic.replicas:
        weights = f", {traffic.replicas * settings.expert_bytes / 1e6:.1f} MB of weights" if settings.width else ""
        lines.append(f"replicas: {traffic.replicas}, at most {traffic.most_replicas} on a rank{weights}")
    elif policy.startswith("balanced"):
        lines.append("replicas: none")
    if traffic.dropped_rows:
        lines.append(f"rows dropped, of all ranks: {traffic.dropped_rows}")
    memory = {way.method: num_bytes for way, num_bytes in result.peak_bytes.items() if way.policy == policy}
    if memory:
        lines.append("MB for a step: " + ", ".join(f"{name} {value / 1e6:.0f}" for name, value in memory.items()))
    for figures in result.figures:
        if figures.policy == policy and figures.phase in (STEP, TRAIN_STEP) and figures.over_home_ci95:
            low, high = figures.over_home_ci95
            lines.append(
                f"{figures.method} {figures.phase} over home's: {figures.over_home:.3f} ({low:.3f} to {high:.3f})"
            )
    return lines


def _line(figures: Figures, method: str) -> str:
    def rate(num_bytes: float | None) -> str:
        return "" if num_bytes is None else _digits(num_bytes / figures.p50_secs / 1e9)

    reference, floor_secs = figures.times_reference, figures.floor_secs
    return _COLUMNS.format(
        method,
        figures.phase,
        f"{figures.p50_secs * 1e3:.3f}",
        f"{figures.p95_secs * 1e3:.3f}",
        rate(figures.logical_bytes),
        rate(figures.wire_bytes),
        "" if reference is None else _digits(reference),
        "" if floor_secs is None else _digits(figures.p50_secs / floor_secs if floor_secs else 0.0),
    ).rstrip()


def _digits(value: float) -> str:
    """Three significant digits; "-" for 0, where there is nothing to relate."""
    if value == 0:
        return "-"
    exponent = math.floor(math.log10(value))
    if not -5 <= exponent <= 8:
        return f"{value:.1e}"
    return f"{round(value, 2 - exponent):.{max(0, 2 - exponent)}f}"


def json_lines(settings: Settings, result: CaseResult) -> Iterator[str]:
    """One object for every phase of every method, complete in itself."""
    about = {
        "ranks": settings.num_ranks,
        "threads": settings.threads,
        "num_tokens": result.case.num_tokens,
        "num_experts": settings.num_experts,
        "top_k": settings.top_k,
        "hidden": settings.hidden,
        "dtype": settings.dtype,
        "width": settings.width,
        "routing": routing_name(settings, result),
        "maxvio_asked": result.case.maxvio,
        "copy_bytes_per_sec": result.copy_bytes_per_sec,
        "versions": versions() | {peer.package: peer.version for peer in settings.peers},
        "machine": machine(),
    }
    for figures in result.figures:
        rates = {
            f"{kind}_gb_per_sec": num_bytes and num_bytes / figures.p50_secs / 1e9
            for kind, num_bytes in (("logical", figures.logical_bytes), ("wire", figures.wire_bytes))
        }
        times_floor = figures.p50_secs / figures.floor_secs if figures.floor_secs else None
        way, traffic = Way(figures.method, figures.policy), result.traffic[figures.policy]
        of_way = {
            "steps_per_block": result.steps_per_block[way],
            "replicated_bytes": traffic.replicas * settings.expert_bytes if settings.width else None,
            "peak_bytes": result.peak_bytes.get(way),
            **asdict(traffic),
        }
        yield json.dumps({**asdict(figures), **rates, "times_floor": times_floor, **of_way, **about}, allow_nan=False)
