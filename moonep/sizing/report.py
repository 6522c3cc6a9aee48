"""Everything that `moonep plan` tells, as one value: its fields are the keys of `moonep plan --json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moonep.policy import Balanced, Policy
from moonep.sizing import loads, wire
from moonep.sizing.hardware import Hardware
from moonep.sizing.memory import RankMemory, most_tokens_that_fit, rank_memory, ranks_that_fit
from moonep.sizing.routing import Recorded, Routing, Tokens
from moonep.sizing.setting import Setting
from moonep.sizing.times import Phases, Steps, break_even_maxvio

__all__ = ["FACTORS", "Cluster", "Fit", "PolicyFigures", "Report", "RoutingFigures", "Traffic", "examine"]

FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)


@dataclass(frozen=True)
class Cluster:
    """What a rank has. None: not told.

    Attributes:
        hardware: rates; None: no times are told.
        across_bytes_per_sec: between hosts, of one rank, one direction.
        memory_bytes: for the experts and the steps of a rank.
    """

    hardware: Hardware | None
    across_bytes_per_sec: float | None
    memory_bytes: int | None


@dataclass(frozen=True)
class Traffic:
    """Bytes of rows that a rank sends in one layer's dispatch or combine, means over ranks.

    Attributes:
        way: "none": every routed row on its own; "rank": a token once to each rank, as MoonEP sends; "host": once to
            each other host, which hands it on to its ranks.
        inside_bytes, across_bytes: of dispatch, to ranks of the same host, and to other hosts.
        combine_inside_bytes, combine_across_bytes: of combine, the same way back.
        most_over_mean: pieces that the busiest rank sends or receives, over the mean; 0 where nothing crosses.
    """

    way: str
    inside_bytes: float
    across_bytes: float
    combine_inside_bytes: float
    combine_across_bytes: float
    most_over_mean: float


@dataclass(frozen=True)
class Fit:
    """Whether a rank's memory holds it.

    Attributes:
        over_bytes: what is wanted above what there is; 0 or less: it fits.
        most_tokens: the most tokens of a rank that fit on these ranks; 0: none.
        fewest_ranks: the fewest ranks, in whole hosts, that fit with these tokens; 0: not even one for each expert.
    """

    over_bytes: int
    most_tokens: int
    fewest_ranks: int


@dataclass(frozen=True)
class PolicyFigures:
    """What a policy makes of a routing.

    Attributes:
        policy: as it is written in Python.
        rows_mean, rows_worst: rows of the fullest rank, mean over draws and of the worst draw.
        over_even: mean of the fullest rank's rows over the mean rank's, minus 1.
        num_rows: N, rows that memory is taken for on the rank that takes most, worst draw.
        dropped_share: of the routes, mean over draws.
        replicas_mean, replicas_at_least: in all ranks, and what any rule needs (means over draws).
        most_received, most_sent: replicas of the rank that gets most, and of the home that gives most; worst draws.
        memory: of the rank that holds most, worst draw.
        traffic: by way of sending.
        replica_bytes_received: weights that the rank with most replicas receives in a layer; worst draw.
        phases: None: no hardware given.
        fit: None: no memory given.
    """

    policy: str
    rows_mean: float
    rows_worst: int
    over_even: float
    num_rows: int
    dropped_share: float
    replicas_mean: float
    replicas_at_least: float
    most_received: int
    most_sent: int
    memory: RankMemory
    traffic: list[Traffic]
    replica_bytes_received: int
    phases: Phases | None
    fit: Fit | None


@dataclass(frozen=True)
class RoutingFigures:
    """All of one routing.

    Attributes:
        routing: its name.
        maxvio: imbalance over experts, mean over draws.
        draws: how many: popularities, or steps of the trace.
        tokens_counted: of each rank, whose crossings were counted one by one.
        policies: in the order asked for.
        dropped_share_by_factor: of Capacity(factor), means over draws.
        least_factor: that drops no more than the share asked for.
        break_even_tokens: from so many tokens of a rank on Balanced is faster than Home; None: never, or no hardware.
        best_slack: with the shortest step; None: no hardware.
    """

    routing: str
    maxvio: float
    draws: int
    tokens_counted: int
    policies: list[PolicyFigures]
    dropped_share_by_factor: dict[str, float]
    least_factor: float
    break_even_tokens: int | None
    best_slack: float | None


@dataclass(frozen=True)
class Report:
    """Everything.

    Attributes:
        setting: what was asked for; its policy is not meant.
        home_rows_worst: rows of a rank under Home at worst, whatever the routing.
        replicas_always_enough, replicas_worst_input: the theory's bounds on a rank's replicas at exact balance.
        hardware: None: not given.
        memory_bytes: of a rank; None: not given.
        drop_share: the most that Capacity may drop for `least_factor`.
        routings: one or more.
        break_even_maxvio: of lognormal routing, with the tokens given; None: at none, not looked for, or no hardware.
    """

    setting: Setting
    home_rows_worst: int
    replicas_always_enough: int
    replicas_worst_input: int
    hardware: Hardware | None
    across_bytes_per_sec: float | None
    memory_bytes: int | None
    drop_share: float
    routings: list[RoutingFigures]
    break_even_maxvio: float | None


def examine(
    setting: Setting, policies: Sequence[Policy], routings: Sequence[Routing], cluster: Cluster, drop_share: float
) -> Report:
    """Every routing under every policy. `setting.policy` does not count."""
    balanced = next((policy for policy in policies if isinstance(policy, Balanced)), Balanced())
    threshold = None
    lognormal = not any(isinstance(routing, Recorded) for routing in routings)
    across = cluster.across_bytes_per_sec
    if cluster.hardware is not None and across is not None and lognormal and setting.num_ranks > 1:
        threshold = break_even_maxvio(setting, cluster.hardware, across, balanced)
    experts, ranks = setting.num_experts, setting.num_ranks
    return Report(
        setting=setting,
        home_rows_worst=loads.most_home_rows(ranks, setting.max_tokens, setting.top_k, experts),
        replicas_always_enough=loads.replicas_always_enough(experts, ranks),
        replicas_worst_input=loads.replicas_worst_input(experts, ranks),
        hardware=cluster.hardware,
        across_bytes_per_sec=cluster.across_bytes_per_sec,
        memory_bytes=cluster.memory_bytes,
        drop_share=drop_share,
        routings=[_routing(setting, policies, balanced, each, cluster, drop_share) for each in routings],
        break_even_maxvio=threshold,
    )


def _routing(
    setting: Setting,
    policies: Sequence[Policy],
    balanced: Balanced,
    routing: Routing,
    cluster: Cluster,
    drop_share: float,
) -> RoutingFigures:
    all_tokens, routes = setting.num_ranks * setting.max_tokens, setting.num_routes
    totals = [routing.totals(draw, all_tokens) for draw in range(routing.num_draws)]
    steps = threshold = slack = None
    if cluster.hardware is not None and cluster.across_bytes_per_sec is not None:
        steps = Steps(setting, routing, cluster.hardware, cluster.across_bytes_per_sec)
        if setting.num_ranks > 1:
            threshold, slack = steps.break_even_tokens(balanced), steps.best_slack(balanced.max_replicas)
    last = routing.num_draws - 1
    tokens = routing.tokens(last, setting.num_ranks, setting.max_tokens) if steps is None else steps.tokens
    return RoutingFigures(
        routing=routing.name,
        maxvio=float(np.mean([routing.maxvio(draw, all_tokens) for draw in range(routing.num_draws)])),
        draws=routing.num_draws,
        tokens_counted=tokens.topk_idx.shape[1],
        policies=[
            _policy(setting.with_policy(policy), routing, totals, tokens, steps, cluster.memory_bytes)
            for policy in policies
        ],
        dropped_share_by_factor={
            f"{factor:g}": float(np.mean([loads.dropped_share(each, factor, routes) for each in totals]))
            for factor in FACTORS
        },
        least_factor=loads.least_factor(totals, drop_share, routes),
        break_even_tokens=threshold,
        best_slack=slack,
    )


def _policy(
    setting: Setting,
    routing: Routing,
    totals: Sequence[loads.Counts],
    tokens: Tokens,
    steps: Steps | None,
    memory_bytes: int | None,
) -> PolicyFigures:
    policy, ranks, routes = setting.policy, setting.num_ranks, setting.num_routes
    found = [loads.load(each, ranks, policy, routes, setting.expert_alignment) for each in totals]
    at_least = [0]
    if isinstance(policy, Balanced):
        at_least = [loads.fewest_replicas(each, ranks, policy.row_limit(int(each.sum()), ranks)) for each in totals]
    memory = max((rank_memory(setting, each) for each in found), key=lambda each: each.total_bytes)
    fit = None
    if memory_bytes is not None:
        over_bytes = memory.total_bytes - memory_bytes
        fit = Fit(over_bytes, setting.max_tokens, ranks)
        if over_bytes > 0:
            fit = Fit(
                over_bytes,
                most_tokens_that_fit(setting, routing, memory_bytes),
                ranks_that_fit(setting, routing, memory_bytes),
            )
    hosts, alignment = setting.host_of_rank, setting.expert_alignment
    step = None if steps is None else steps.step(policy)
    if step is None:
        crossings = wire.count(tokens, policy, setting.num_experts, hosts, alignment, found[-1])
    else:
        crossings = step.crossings
    most_received = max(each.most_received for each in found)
    return PolicyFigures(
        policy=str(policy),
        rows_mean=float(np.mean([each.rank_rows.max() for each in found])),
        rows_worst=max(int(each.rank_rows.max()) for each in found),
        over_even=float(np.mean([each.imbalance for each in found])),
        num_rows=max(int(each.num_rows.max()) for each in found),
        dropped_share=float(
            np.mean([each.num_dropped / max(1, int(total.sum())) for each, total in zip(found, totals, strict=True)])
        ),
        replicas_mean=float(np.mean([each.num_replicas for each in found])),
        replicas_at_least=float(np.mean(at_least)),
        most_received=most_received,
        most_sent=max(each.most_sent(setting.num_experts) for each in found),
        memory=memory,
        traffic=_traffic(setting, crossings),
        replica_bytes_received=most_received * setting.expert_bytes,
        phases=None if step is None else step.phases(setting.max_tokens),
        fit=fit,
    )


def _traffic(setting: Setting, crossings: wire.Crossings) -> list[Traffic]:
    scale = setting.max_tokens / crossings.tokens_per_rank
    found = []
    for way, pairs_RR in (
        ("none", crossings.routes),
        ("rank", crossings.per_rank),
        ("host", crossings.per_host),
    ):
        links = wire.split(pairs_RR, crossings.host_of_rank)
        inside, across = (float(each.mean()) * scale for each in (links.inside_sent, links.across_sent))
        sent, received = links.inside_sent + links.across_sent, links.inside_received + links.across_received
        most = max(int(sent.max()), int(received.max()))
        row_bytes, back_bytes = setting.row_bytes, setting.row_bytes if way == "none" else setting.sum_bytes
        found.append(
            Traffic(
                way=way,
                inside_bytes=inside * row_bytes,
                across_bytes=across * row_bytes,
                combine_inside_bytes=inside * back_bytes,
                combine_across_bytes=across * back_bytes,
                most_over_mean=most * len(sent) / max(1, int(sent.sum())),
            )
        )
    return found
