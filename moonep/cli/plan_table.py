"""The answer of `moonep plan` as text of 80 columns, or as what JSON holds."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from moonep.sizing.memory import RankMemory
from moonep.sizing.report import PolicyFigures, Report, RoutingFigures
from moonep.sizing.times import Phases

__all__ = ["as_dict", "table"]

_WIDTH = 80
_GIB = 2**30
_MEMORY_NAMES = {
    "home_bytes": "experts at home",
    "home_grad_bytes": "their gradients",
    "optimizer_bytes": "optimizer state",
    "replica_bytes": "replicas in use",
    "replica_grad_bytes": "their gradients ",
    "staging_bytes": "staging",
    "messages_bytes": "messages, at most",
    "rows_in_bytes": "rows received",
    "rows_out_bytes": "experts' results",
    "inner_bytes": "rows inside experts",
    "plan_bytes": "plan",
}
_WAYS = {"none": "every row", "rank": "once a rank", "host": "once a host"}


def as_dict(report: Report) -> dict[str, Any]:
    """Fields as keys; with sums that are properties, too."""
    found = asdict(report)
    found["setting"].pop("policy")
    for routing, figures in zip(found["routings"], report.routings, strict=True):
        for policy, each in zip(routing["policies"], figures.policies, strict=True):
            policy["memory"]["total_bytes"] = each.memory.total_bytes
            if each.phases is not None:
                policy["phases"]["total_secs"] = each.phases.total_secs
    return found


def table(report: Report) -> str:
    """Everything, as text."""
    parts = [_heading(report)]
    parts += [_routing(report, figures) for figures in report.routings]
    parts.append(_footnote(report))
    return "\n\n".join(parts)


def _heading(report: Report) -> str:
    setting, model = report.setting, report.setting.model
    local = -(-model.num_experts // setting.num_ranks)
    hosts = f"{setting.num_hosts} host{'s' * (setting.num_hosts > 1)}"
    kind = "inference" if not setting.training else "training, rows kept" if not setting.recompute else "training"
    lines = [
        f"{model.name}: {model.num_experts} experts, top-{model.top_k}, rows of {model.hidden} {setting.dtype}, width "
        f"{model.width}, {model.layers} layers",
        f"{setting.num_ranks} ranks on {hosts}, {setting.max_tokens} tokens a rank, {kind}: {local} experts at home of "
        f"{setting.expert_bytes / 1e6:.1f} MB",
        f"routes of a rank {setting.max_tokens * setting.top_k}; rows of a rank under Home at worst "
        f"{report.home_rows_worst}",
        f"replicas of a rank, exact balance: {report.replicas_always_enough} always do, the worst input takes "
        f"{report.replicas_worst_input}",
    ]
    if report.hardware is not None and report.across_bytes_per_sec is not None:
        hardware = report.hardware
        flops = "" if hardware.flops_per_sec is None else f", {hardware.flops_per_sec / 1e12:.3g} TFLOPS"
        lines.append(
            f"{hardware.name}: memory {hardware.memory_bytes_per_sec / 1e9:.4g} GB/s, between ranks "
            f"{hardware.inside_bytes_per_sec / 1e9:.4g} GB/s, across hosts {report.across_bytes_per_sec / 1e9:g} "
            f"GB/s{flops}"
        )
    return _wrapped(lines)


def _wrapped(lines: Sequence[str]) -> str:
    return "\n".join("\n".join(textwrap.wrap(line, _WIDTH, subsequent_indent="  ")) for line in lines)


def _routing(report: Report, figures: RoutingFigures) -> str:
    sources = "steps" if figures.routing.startswith("trace") else "draws"
    imbalance = "" if figures.routing.startswith("maxvio") else f", maxvio {figures.maxvio:.2f}"
    parts = [
        f"=== Routing: {figures.routing}{imbalance} ({figures.draws} {sources}) ===",
        _loads(figures.policies),
        _memory(report, figures.policies),
        _traffic(figures),
    ]
    if figures.policies[0].phases is not None:
        parts.append(_times(figures.policies))
    parts.append(_answers(report, figures))
    return "\n\n".join(parts)


def _short(policy: str) -> str:
    """Without what is as always."""
    for told in (", overflow='drop'", ", max_replicas=None", "factor=", "slack=", "max_replicas="):
        policy = policy.replace(told, "")
    return policy


def _loads(policies: Sequence[PolicyFigures]) -> str:
    line = "{:<22}{:>8}{:>8}{:>7}{:>8}{:>8}{:>9}{:>9}"
    lines = [
        line.format("rows of the fullest", "mean", "worst", "over", "N", "dropped", "replicas", "most on"),
        line.format("rank", "", "", "even", "", "", "(least)", "a rank").rstrip(),
    ]
    for each in policies:
        replicas = f"{each.replicas_mean:.0f} ({each.replicas_at_least:.0f})" if each.replicas_mean else "-"
        lines.append(
            line.format(
                _short(each.policy),
                f"{each.rows_mean:.0f}",
                each.rows_worst,
                f"{each.over_even:.1%}" if each.over_even < 9.995 else f"{each.over_even:.0%}",
                each.num_rows,
                f"{each.dropped_share:.2%}" if each.dropped_share else "-",
                replicas,
                each.most_received or "-",
            )
        )
    return "\n".join(lines)


def _columns(heading: str, policies: Sequence[PolicyFigures], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A column for every policy."""
    line = "{:<24}" + "{:>18}" * len(policies)
    names = [_short(each.policy) for each in policies]
    return "\n".join([line.format(heading, *names), *(line.format(name, *cells).rstrip() for name, cells in rows)])


def _memory(report: Report, policies: Sequence[PolicyFigures]) -> str:
    rows = []
    for field in fields(RankMemory):
        values = [getattr(each.memory, field.name) for each in policies]
        if any(values):
            rows.append((_MEMORY_NAMES[field.name], [f"{value / _GIB:.3f}" if value else "-" for value in values]))
    rows.append(("together", [f"{each.memory.total_bytes / _GIB:.3f}" for each in policies]))
    return _columns("GiB of a rank", policies, rows)


def _traffic(figures: RoutingFigures) -> str:
    rows = []
    for verb, prefix in (("dispatch", ""), ("combine", "combine_")):
        for i, (way, name) in enumerate(_WAYS.items()):
            cells = []
            for each in figures.policies:
                traffic = next(found for found in each.traffic if found.way == way)
                inside, across = (getattr(traffic, f"{prefix}{where}_bytes") / 1e6 for where in ("inside", "across"))
                cells.append(f"{inside:.1f} + {across:.1f}")
            rows.append((f"{verb if i == 0 else '':<9}{name}", cells))
    rows.append(
        (
            "busiest rank / mean",
            [f"{next(t for t in each.traffic if t.way == 'rank').most_over_mean:.2f}" for each in figures.policies],
        )
    )
    replicas = [each.replica_bytes_received for each in figures.policies]
    if any(replicas):
        rows.append(("replicas, most of a rank", [f"{value / 1e6:.1f}" if value else "-" for value in replicas]))
    return _columns("MB sent: inside + across", figures.policies, rows)


def _times(policies: Sequence[PolicyFigures]) -> str:
    rows = []
    for field in fields(Phases):
        values = [getattr(each.phases, field.name) * 1e6 for each in policies]
        rows.append((field.name.removesuffix("_secs"), [f"{value:.1f}" if value else "-" for value in values]))
    rows.append(("together", [f"{each.phases.total_secs * 1e6:.1f}" for each in policies if each.phases]))
    return _columns("least us of a layer", policies, rows)


def _answers(report: Report, figures: RoutingFigures) -> str:
    lines = []
    shares = ", ".join(f"{factor}: {share:.2%}" for factor, share in figures.dropped_share_by_factor.items())
    lines.append(f"dropped by capacity factor: {shares}")
    lines.append(f"least factor that drops at most {report.drop_share:.2%}: {figures.least_factor:g}")
    if report.hardware is not None and report.setting.num_ranks > 1:
        tokens = figures.break_even_tokens
        lines.append(
            "Balanced is faster than Home "
            + ("at no number of tokens" if tokens is None else f"from about {tokens} tokens a rank on")
        )
        lines.append(f"slack with the shortest step: {figures.best_slack:g}")
    for each in figures.policies:
        if each.fit is not None and report.memory_bytes is not None:
            lines.append(_fit(report, each))
    return _wrapped(lines)


def _fit(report: Report, figures: PolicyFigures) -> str:
    fit, name = figures.fit, _short(figures.policy)
    assert fit is not None
    assert report.memory_bytes is not None
    if fit.over_bytes <= 0:
        return f"{name} fits into {report.memory_bytes / _GIB:.1f} GiB, {-fit.over_bytes / _GIB:.1f} are left"
    ways = []
    if fit.most_tokens:
        ways.append(f"{fit.most_tokens} tokens a rank on {report.setting.num_ranks} ranks")
    if fit.fewest_ranks:
        ways.append(f"{fit.fewest_ranks} ranks with {report.setting.max_tokens} tokens")
    nearest = f"what fits: {', or '.join(ways)}" if ways else "neither fewer tokens nor more ranks fit"
    return (
        f"{name} does not fit into {report.memory_bytes / _GIB:.1f} GiB: {fit.over_bytes / _GIB:.1f} GiB too much; "
        + nearest
    )


def _footnote(report: Report) -> str:
    setting, counted = report.setting, min(figures.tokens_counted for figures in report.routings)
    lines = []
    if report.hardware is not None and setting.num_ranks > 1 and not report.routings[0].routing.startswith("trace"):
        lines.append(
            f"With {setting.max_tokens} tokens a rank, Balanced is faster than Home "
            + (
                "at no imbalance"
                if report.break_even_maxvio is None
                else f"from about maxvio {report.break_even_maxvio:.2g} on"
            )
        )
    lines.append(
        "1 MB = 1e6 bytes, 1 GiB = 2^30. Rows and replicas are the planner's own. N: rows that memory is taken for. "
        "Bytes of rows sent are means over ranks in one layer; every row: without dedup; once a rank: what MoonEP "
        "sends."
    )
    if counted < setting.max_tokens:
        lines.append(f"What crosses was counted for {counted} tokens of each rank and taken in proportion.")
    if report.hardware is not None:
        lines.append(
            "Times are the least that the stated rates allow, without any delay; compare policies by them, expect more."
        )
        if report.hardware.flops_per_sec is None:
            lines.append("How fast it multiplies is not known (--tflops): experts' time is that of reading weights.")
    return _wrapped(lines)
