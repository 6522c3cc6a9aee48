"""Routing -> Plan: where every (token, expert) route goes. Index arithmetic only; nothing moves here.

`plan_plain` is the definition, in loops; the native planner (`transport/planner.py`, `csrc/cpu/plan.h`) gives the same
Plan, field by field.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from moonep.balance import balance_plain
from moonep.policy import Balanced, Capacity, Home, Policy, first_expert, home_rank

__all__ = [
    "Crossings",
    "Group",
    "Plan",
    "Received",
    "first_expert",
    "home_rank",
    "lay_out",
    "plan_plain",
    "share_out",
]


@dataclass(frozen=True, eq=False)
class Crossings:
    """The tokens that go to each peer (outbox) or come from each peer (inbox), each once, and what they stand for.

    A token whose K experts live on two ranks makes two crossings. All tensors are int32.
    """

    first: torch.Tensor  # [R + 1]  crossings of peer p are first[p] .. first[p + 1], by token
    token: torch.Tensor  # [C]      outbox: the token. inbox: where its row stands in what the source sent
    start: torch.Tensor  # [C + 1]  routes of crossing c are start[c] .. start[c + 1], by k
    route: torch.Tensor  # [M]      outbox: t * K + k. inbox: where its weight stands in what the source sent
    row: torch.Tensor  # [M]        the row on the receiving rank

    @cached_property
    def addresses(self) -> tuple[int, int, int, int, int]:
        """Where the arrays are, as the native module takes them."""
        tensors = (self.first, self.token, self.start, self.route, self.row)
        return tuple(tensor.data_ptr() for tensor in tensors)  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class Plan:
    """Where the routes of one `topk_idx` go. Made by `Buffer.plan`; lives until the Buffer is closed.

    Rows within a group are ordered by (source rank, token, k). A group is padded to `expert_alignment` rows.
    Tensors are int64 unless said.
    """

    num_tokens: int  # T, on this rank
    num_rows: int  # N, rows received here, padding included
    num_groups: int  # G
    group_experts: torch.Tensor  # [G]     the expert of each group, -1: idle
    group_sizes: torch.Tensor  # [G]       real rows of each group
    group_ends: torch.Tensor  # [G] int32  where each padded group ends: torch._grouped_mm's offs
    replicas: torch.Tensor  # [R, slots]   experts copied to each rank for this step, -1: idle slot
    rank_rows: torch.Tensor  # [R]         real rows received by every rank
    dst_rank: torch.Tensor  # [T, K]       the rank that each route goes to, -1: none
    dst_row: torch.Tensor  # [T, K]        its row there, -1: none
    num_dropped: int  # routes of this rank that were dropped
    num_tokens_of_rank: tuple[int, ...] = field(repr=False)  # [R] T of every rank
    most_rows: int = field(repr=False)  # the largest N of any rank
    outbox: Crossings = field(repr=False)  # what this rank sends
    inbox: Crossings = field(repr=False)  # what this rank receives
    layout: tuple[torch.Tensor, torch.Tensor] = field(repr=False)  # group_sizes and group_ends, for the transport alone
    plan_id: int = -1  # which plan of its Buffer this is; the same on every rank
    buffer_number: int = field(default=-1, repr=False)  # of its Buffer; the same on every rank
    key: torch.Tensor = field(default_factory=lambda: torch.empty(0), repr=False)  # for torch operators; see ops.py


@dataclass(frozen=True, eq=False)
class Received:
    """What `dispatch` brought to this rank. Padding rows are zeros of weight 0."""

    x: torch.Tensor  # [N, H]   rows, in the payload dtype
    weights: torch.Tensor  # [N] float32: the routing weight of each row


def _align_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def plan_plain(
    topk_idx_of_rank: Sequence[torch.Tensor],
    rank: int,
    *,
    num_experts: int,
    expert_alignment: int = 1,
    policy: Policy = Home(),  # noqa: B008 (frozen)
    topk_weights_of_rank: Sequence[torch.Tensor] | None = None,
    host_of_rank: Sequence[int] | None = None,
) -> Plan:
    """The Plan of `rank` from the routing of all ranks. The definition: slow, in loops.

    `topk_idx_of_rank[r]` is rank r's [T, K], integer, -1 for no route; `topk_weights_of_rank[r]` its weights [T, K],
    which `Capacity` goes by in dropping; `host_of_rank[r]` tells its host from others (None: all on one).
    """
    num_ranks = len(topk_idx_of_rank)
    ids = [idx.tolist() for idx in topk_idx_of_rank]
    top_k = topk_idx_of_rank[rank].shape[1]

    room = None
    routed = sum(expert >= 0 for ids_K in ids[rank] for expert in ids_K)
    if isinstance(policy, Capacity):
        room = policy.rows_per_expert(sum(map(len, ids)), top_k, num_experts, expert_alignment)
        weights = None if topk_weights_of_rank is None else [each.float().tolist() for each in topk_weights_of_rank]
        _drop_overflow(ids, weights, num_experts, room)
    kept_routes = sum(expert >= 0 for ids_K in ids[rank] for expert in ids_K)

    counts = [[0] * num_experts for _ in ids]
    for source, ids_TK in enumerate(ids):
        for ids_K in ids_TK:
            for expert in ids_K:
                if expert >= 0:
                    counts[source][expert] += 1
    sizes = [sum(of_source[expert] for of_source in counts) for expert in range(num_experts)]

    groups, places = lay_out(sizes, num_ranks, policy, room, expert_alignment)

    # Number the rows in their order: source rank, token, k.
    hosts = [0] * num_ranks if host_of_rank is None else host_of_rank
    destinations = [
        _destinations([of_source[expert] for of_source in counts], places[expert], hosts)
        for expert in range(num_experts)
    ]
    dst_rank = [[-1] * top_k for _ in ids[rank]]
    dst_row = [[-1] * top_k for _ in ids[rank]]
    outbox: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(num_ranks)]
    inbox: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(num_ranks)]
    for source, ids_TK in enumerate(ids):
        for t, ids_K in enumerate(ids_TK):
            for k, expert in enumerate(ids_K):
                if expert < 0:
                    continue
                to, row = next(destinations[expert][source])
                if source == rank:
                    dst_rank[t][k], dst_row[t][k] = to, row
                    outbox[to].setdefault(t, []).append((t * top_k + k, row))
                if to == rank:
                    inbox[source].setdefault(t, []).append((t * top_k + k, row))

    group_sizes = torch.tensor([group.rows for group in groups[rank]], dtype=torch.int64)
    group_ends = torch.tensor([group.end for group in groups[rank]], dtype=torch.int32)
    num_rows = groups[rank][-1].end if groups[rank] else 0
    most_rows = max(each[-1].end if each else 0 for each in groups)
    if isinstance(policy, Balanced) and policy.max_replicas is None:
        num_rows = most_rows = policy.rows_per_rank(sum(map(len, ids)), top_k, num_experts, num_ranks, expert_alignment)
    first = [first_expert(r, num_experts, num_ranks) for r in range(num_ranks + 1)]
    return Plan(
        num_tokens=len(ids[rank]),
        num_rows=num_rows,
        num_groups=len(groups[rank]),
        group_experts=torch.tensor([group.expert for group in groups[rank]], dtype=torch.int64),
        group_sizes=group_sizes,
        group_ends=group_ends,
        replicas=torch.tensor(
            [[group.expert for group in each[first[r + 1] - first[r] :]] for r, each in enumerate(groups)],
            dtype=torch.int64,
        ),
        rank_rows=torch.tensor([sum(group.rows for group in each) for each in groups], dtype=torch.int64),
        dst_rank=torch.tensor(dst_rank, dtype=torch.int64).reshape(len(ids[rank]), top_k),
        dst_row=torch.tensor(dst_row, dtype=torch.int64).reshape(len(ids[rank]), top_k),
        num_dropped=routed - kept_routes,
        num_tokens_of_rank=tuple(len(ids_TK) for ids_TK in ids),
        most_rows=most_rows,
        outbox=_crossings(outbox),
        inbox=_crossings(inbox),
        layout=(group_sizes, group_ends),
    )


class Group(NamedTuple):
    """Rows of an expert on one rank, at home or at a replica. An idle slot has expert -1 and no rows."""

    rank: int
    number: int  # among the groups of its rank
    expert: int
    rows: int
    start: int
    end: int  # padded


def lay_out(
    sizes: Sequence[int], num_ranks: int, policy: Policy, room: int | None, expert_alignment: int
) -> tuple[list[list[Group]], list[list[Group]]]:
    """The groups of every rank, one behind the other, experts at home first, then replicas; and those of every expert.

    `sizes` [E] are the rows of every expert in all ranks together; `room`: rows of every group, None: as it has.
    """
    num_experts = len(sizes)
    kept = list(sizes)
    slots: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    if isinstance(policy, Balanced):
        replicas = balance_plain(sizes, num_ranks, policy)
        slots = [list(zip(*each, strict=True)) for each in zip(replicas.experts, replicas.rows, strict=True)]
    for expert, rows in itertools.chain.from_iterable(slots):
        if expert >= 0:
            kept[expert] -= rows
    of_rank: list[list[Group]] = [[] for _ in range(num_ranks)]
    of_expert: list[list[Group]] = [[] for _ in range(num_experts)]
    for rank in range(num_ranks):
        home = range(first_expert(rank, num_experts, num_ranks), first_expert(rank + 1, num_experts, num_ranks))
        start = 0
        for number, (expert, rows) in enumerate([*((expert, kept[expert]) for expert in home), *slots[rank]]):
            end = start + (_align_up(rows, expert_alignment) if room is None else room)
            group = Group(rank, number, expert, rows, start, end)
            of_rank[rank].append(group)
            if expert >= 0:
                of_expert[expert].append(group)
            start = end
    return of_rank, of_expert


def share_out(
    routes_of_source: Sequence[int], groups: Sequence[Group], hosts: Sequence[int]
) -> list[list[tuple[int, int]]]:
    """For every source, how many of its routes to one expert go to which of its groups, in their order: (place, rows).

    Each source fills the group on its own rank, then those on its host; what is left goes, sources in rank order, to
    the groups in rank order until they are full.
    """
    left, room = list(routes_of_source), [group.rows for group in groups]
    taken: list[list[tuple[int, int]]] = [[] for _ in left]

    def fill(may_take: Callable[[int, int], bool]) -> None:
        for source in range(len(left)):
            for i, group in enumerate(groups):
                rows = min(left[source], room[i])
                if rows and may_take(source, group.rank):
                    taken[source].append((i, rows))
                    left[source] -= rows
                    room[i] -= rows

    fill(lambda source, rank: source == rank)
    fill(lambda source, rank: hosts[source] == hosts[rank])
    fill(lambda source, rank: True)
    return taken


def _destinations(
    routes_of_source: Sequence[int], groups: Sequence[Group], hosts: Sequence[int]
) -> list[Iterator[tuple[int, int]]]:
    """For every source, where its routes to one expert go, in their order: (rank, row)."""
    next_row = [group.start for group in groups]
    found = []
    for pieces in share_out(routes_of_source, groups, hosts):
        rows_of_source: list[tuple[int, int]] = []
        for i, rows in pieces:
            rows_of_source += [(groups[i].rank, row) for row in range(next_row[i], next_row[i] + rows)]
            next_row[i] += rows
        found.append(iter(rows_of_source))
    return found


def _drop_overflow(
    ids: list[list[list[int]]], weights: list[list[list[float]]] | None, num_experts: int, room: int
) -> None:
    """Leaves every expert `room` routes: sets the ids of the others to -1, the lowest weight first, then the latest."""
    for expert in range(num_experts):
        ranked = []
        for rank, ids_TK in enumerate(ids):
            for t, ids_K in enumerate(ids_TK):
                for k, chosen in enumerate(ids_K):
                    if chosen == expert:
                        weight = 0.0 if weights is None else weights[rank][t][k]
                        ranked.append((math.inf if math.isnan(weight) else -weight, rank, t, k))
        for _, rank, t, k in sorted(ranked)[room:]:
            ids[rank][t][k] = -1


def _crossings(peers: list[dict[int, list[tuple[int, int]]]]) -> Crossings:
    """Crossings from, per peer, token -> [(route, row)]."""
    first, token, start, route, row = [0], [], [0], [], []
    for tokens in peers:
        for t, routes in tokens.items():
            token.append(t)
            route += [each[0] for each in routes]
            row += [each[1] for each in routes]
            start.append(len(row))
        first.append(len(token))
    return Crossings(*(torch.tensor(values, dtype=torch.int32) for values in (first, token, start, route, row)))
