"""What crosses between ranks: counted route by route, where the planner sends each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moonep import _C
from moonep.policy import Capacity, Policy
from moonep.sizing.loads import Load, home_of_expert, load
from moonep.sizing.routing import Tokens

__all__ = ["Crossings", "Links", "count", "destinations", "split"]

Counts = npt.NDArray[np.int64]
Pairs = npt.NDArray[np.int64] | npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Crossings:
    """Of one step, by source and destination rank [R, R]; the diagonal stays at home and crosses nothing."""

    routes: Counts  # every routed row on its own: without dedup
    per_rank: Counts  # a token once to each rank: what MoonEP sends
    per_host: (
        Counts  # a token once to each other host, to the rank that has the source's place there, which hands it on
    )
    load: Load  # that was planned for
    host_of_rank: tuple[int, ...]
    tokens_per_rank: int  # T' of every rank


@dataclass(frozen=True, eq=False)
class Links:
    """Pieces that each rank sends and receives [R], by the way they take."""

    inside_sent: Pairs
    inside_received: Pairs
    across_sent: Pairs  # to other hosts
    across_received: Pairs


def count(
    tokens: Tokens,
    policy: Policy,
    num_experts: int,
    host_of_rank: Sequence[int],
    expert_alignment: int = 1,
    whole: Load | None = None,
) -> Crossings:
    """Plans the step and counts what crosses. Ranks of a host stand side by side; hosts are numbered in their order.

    `whole`: the load of a step that `tokens` are some of. Its replicas are taken, and of the routes that are looked at
    the same shares go to them. None: `tokens` are planned on their own.
    """
    idx_RTK, num_routes = _kept(tokens, policy, num_experts, expert_alignment), tokens.topk_idx.size
    num_ranks, num_tokens, _ = idx_RTK.shape
    routed = tokens.topk_idx[tokens.topk_idx >= 0]
    totals_E = np.bincount(routed, minlength=num_experts).astype(np.int64)
    if whole is None:
        loads = load(totals_E, num_ranks, policy, num_routes, expert_alignment)
    else:
        experts_RS = whole.replica_experts
        share_of = np.maximum(whole.totals[experts_RS], 1)
        rows_RS = np.where(experts_RS >= 0, whole.replica_rows * totals_E[experts_RS] // share_of, 0)
        loads = replace(whole, replica_rows=rows_RS)
    to_RTK = destinations(idx_RTK, loads, num_experts, host_of_rank)
    source_RTK = np.broadcast_to(np.arange(num_ranks)[:, None, None], to_RTK.shape)
    host_R = np.asarray(host_of_rank)
    place_R = np.arange(num_ranks) - np.searchsorted(host_R, host_R)  # within its host

    first_RTK = _first_of_token(to_RTK)
    per_rank = _pairs(source_RTK[first_RTK], to_RTK[first_RTK], num_ranks)

    # Once per host: across, to the rank of the source's place (the last one, where a host is smaller), then on.
    to_host_RTK = np.where(to_RTK >= 0, host_R[to_RTK], -1)
    away = _first_of_token(to_host_RTK) & (to_host_RTK != host_R[source_RTK])
    first_rank_H = np.searchsorted(host_R, np.arange(host_R[-1] + 1))
    last_rank_H = np.append(first_rank_H[1:], num_ranks) - 1

    def entry(source: Counts, host: Counts) -> Counts:
        rank: Counts = np.minimum(first_rank_H[host] + place_R[source], last_rank_H[host])
        return rank

    per_host = _pairs(source_RTK[away], entry(source_RTK[away], to_host_RTK[away]), num_ranks)
    source, to = source_RTK[first_RTK], to_RTK[first_RTK]
    same = host_R[source] == host_R[to]
    per_host += _pairs(np.where(same, source, entry(source, host_R[to])), to, num_ranks)

    routes = _pairs(source_RTK[to_RTK >= 0], to_RTK[to_RTK >= 0], num_ranks)
    return Crossings(routes, per_rank, per_host, loads, tuple(host_of_rank), num_tokens)


def split(pairs_RR: Pairs, host_of_rank: Sequence[int]) -> Links:
    """What goes between ranks of a host, and between hosts; what stays on its rank is left out."""
    host_R = np.asarray(host_of_rank)
    same_RR = host_R[:, None] == host_R
    inside_RR, across_RR = np.where(same_RR, pairs_RR, 0), np.where(same_RR, 0, pairs_RR)
    np.fill_diagonal(inside_RR, 0)
    return Links(inside_RR.sum(1), inside_RR.sum(0), across_RR.sum(1), across_RR.sum(0))


def destinations(
    idx_RTK: npt.NDArray[np.int32], loads: Load, num_experts: int, host_of_rank: Sequence[int]
) -> npt.NDArray[np.int64]:
    """The rank of each route [R, T, K], -1: none. `moonep.plan.share_out` defines who gets what.

    A source's routes to an expert go, in their order, to the replica on its own rank, then to those on its host; what
    is left goes, sources in rank order, to the instances in rank order until they are full.
    """
    num_ranks = len(idx_RTK)
    home_E = home_of_expert(num_experts, num_ranks)
    to_RTK = np.where(idx_RTK >= 0, home_E[idx_RTK], -1)
    used_RS = loads.replica_experts >= 0
    if not used_RS.any():
        return to_RTK
    copied = np.unique(loads.replica_experts[used_RS])
    rank_of, rows_of = np.nonzero(used_RS)[0], loads.replica_rows[used_RS]
    expert_of = loads.replica_experts[used_RS]
    hosts = np.asarray(host_of_rank)

    # The routes to experts that have replicas, by expert and source; within these in their order.
    source, place = np.nonzero(np.isin(idx_RTK, copied).reshape(num_ranks, -1))
    expert = idx_RTK.reshape(num_ranks, -1)[source, place]
    order = np.lexsort((source, expert))  # stable
    source, place, expert = source[order], place[order], expert[order]
    begins = np.searchsorted(expert, copied)
    ends = np.searchsorted(expert, copied, side="right")
    for e, begin, end in zip(copied.tolist(), begins, ends, strict=True):
        replica = expert_of == e
        ranks = np.append(rank_of[replica], home_E[e])
        rows = np.append(rows_of[replica], end - begin - rows_of[replica].sum())
        by_rank = np.argsort(ranks)
        routes_R = np.bincount(source[begin:end], minlength=num_ranks)
        to_RTK.reshape(num_ranks, -1)[source[begin:end], place[begin:end]] = _share_out(
            routes_R, ranks[by_rank], rows[by_rank], hosts
        )
    return to_RTK


def _share_out(routes_R: Counts, ranks_I: Counts, rows_I: Counts, hosts: Counts) -> Counts:
    """The ranks that the routes of one expert go to, sources in rank order. Instances: their ranks and rows [I]."""
    left, room = routes_R.astype(np.int64), rows_I.astype(np.int64)
    pieces: list[tuple[Counts, Counts, Counts]] = []  # source, instance, rows

    def fill(sources: Counts, instances: Counts) -> None:
        # In order, as much as fits: where the stretches of routes and of room overlap.
        route_ends, room_ends = left[sources].cumsum(), room[instances].cumsum()
        filled = min(route_ends[-1], room_ends[-1])
        if filled == 0:
            return
        edges = np.unique(np.concatenate([route_ends, room_ends, [0]]))
        edges = edges[edges <= filled]
        source = sources[np.searchsorted(route_ends, edges[:-1], side="right")]
        instance = instances[np.searchsorted(room_ends, edges[:-1], side="right")]
        rows = np.diff(edges)
        pieces.append((source, instance, rows))
        np.subtract.at(left, source, rows)
        np.subtract.at(room, instance, rows)

    own = np.minimum(left[ranks_I], room)  # an expert has one instance on a rank at most
    pieces.append((ranks_I, np.arange(len(room)), own))
    left[ranks_I] -= own
    room -= own
    for host in np.unique(hosts[ranks_I]):
        fill(np.flatnonzero(hosts == host), np.flatnonzero(hosts[ranks_I] == host))
    fill(np.arange(len(left)), np.arange(len(room)))
    source, instance, rows = (np.concatenate(each) for each in zip(*pieces, strict=True))
    by_source = np.argsort(source, kind="stable")
    to: Counts = np.repeat(ranks_I[instance[by_source]], rows[by_source])
    return to


def _kept(tokens: Tokens, policy: Policy, num_experts: int, expert_alignment: int) -> npt.NDArray[np.int32]:
    """The choices that a policy leaves: Capacity drops, by the planner's own code."""
    if not isinstance(policy, Capacity):
        return tokens.topk_idx
    num_ranks, num_tokens, top_k = tokens.topk_idx.shape
    idx = np.array(tokens.topk_idx, np.int32)  # a copy, which is written to
    weights = None if tokens.topk_weights is None else np.ascontiguousarray(tokens.topk_weights, np.float32)
    room = policy.rows_per_expert(num_ranks * num_tokens, top_k, num_experts, expert_alignment)
    counts_RE = np.stack([np.bincount(each[each >= 0], minlength=num_experts) for each in idx]).astype(np.int32)
    _C.drop_overflow(
        [each.ctypes.data for each in idx],
        [0 if weights is None else weights[rank].ctypes.data for rank in range(num_ranks)],
        [each.ctypes.data for each in counts_RE],
        [num_tokens] * num_ranks,
        top_k,
        num_experts,
        room,
    )
    return idx


def _first_of_token(to_RTK: Counts) -> npt.NDArray[np.bool_]:
    """True where a token names a rank or host (not -1) that none of its earlier choices did."""
    order = np.argsort(to_RTK, axis=-1, kind="stable")
    ordered = np.take_along_axis(to_RTK, order, axis=-1)
    first = ordered >= 0
    first[..., 1:] &= ordered[..., 1:] != ordered[..., :-1]
    unsorted = np.empty_like(first)
    np.put_along_axis(unsorted, order, first, axis=-1)
    return unsorted


def _pairs(source: Counts, to: Counts, num_ranks: int) -> Counts:
    """How often each pair comes, [R, R]."""
    return np.bincount(source * num_ranks + to, minlength=num_ranks**2).reshape(num_ranks, num_ranks)
