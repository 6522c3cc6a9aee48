"""The definition: dispatch and combine over plain `all_to_all_single`, the way one writes them by hand.

Every routed row is sent on its own; nothing is deduplicated, nothing is native. The transports give the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from moonep.plan import Received, first_expert

__all__ = ["ReferencePlan", "combine", "dispatch", "plan"]


@dataclass(frozen=True, eq=False)
class ReferencePlan:
    """The public fields mean what they mean in `moonep.Plan`."""

    num_tokens: int  # T
    num_rows: int  # N
    num_groups: int  # G
    group_experts: torch.Tensor  # [G]
    group_sizes: torch.Tensor  # [G]
    group_ends: torch.Tensor  # [G] int32
    replicas: torch.Tensor  # [R, 0]
    rank_rows: torch.Tensor  # [R]
    dst_rank: torch.Tensor  # [T, K]
    dst_row: torch.Tensor  # [T, K]
    num_dropped: int
    group: dist.ProcessGroup | None = field(repr=False)
    sent_sizes: list[int] = field(repr=False)  # [R] routes to each rank
    received_sizes: list[int] = field(repr=False)  # [R] routes from each rank
    sent_routes: torch.Tensor = field(repr=False)  # [M] flat t * K + k, by (destination, t, k)
    received_rows: torch.Tensor = field(repr=False)  # [M'] the row of each route that comes, by (source, t, k)
    rank_order: list[tuple[int, bool]] = field(repr=False)  # ranks as they are summed, and whether one opens a host


def _exchange(
    data: torch.Tensor, received_sizes: list[int], sent_sizes: list[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """data [sum of sent_sizes, ...] to every rank; what came [sum of received_sizes, ...]."""
    if group is None:
        return data
    received = data.new_empty(sum(received_sizes), *data.shape[1:])
    dist.all_to_all_single(received, data.contiguous(), received_sizes, sent_sizes, group=group)
    return received


def plan(
    topk_idx: torch.Tensor,
    *,
    num_experts: int,
    group: dist.ProcessGroup | None = None,
    expert_alignment: int = 1,
    hosts: Sequence[int] | None = None,
) -> ReferencePlan:
    """Where the routes of `topk_idx` [T, K] (-1: no route) go under `Home`. Collective.

    `hosts` [R] is a number per rank; ranks of equal number are on one host (None: all are). It only orders sums.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    top_k = topk_idx.shape[1]
    ids = topk_idx.reshape(-1).long()

    counts_RE = _all_counts(ids, num_experts, group, ranks)
    firsts = [first_expert(r, num_experts, ranks) for r in range(ranks + 1)]
    home_of_expert = torch.repeat_interleave(torch.arange(ranks), torch.tensor(firsts).diff())
    routes_RR = torch.stack([part.sum(1) for part in counts_RE.split(torch.tensor(firsts).diff().tolist(), 1)], 1)

    # Groups start at multiples of the alignment, on every home.
    sizes_E = counts_RE.sum(0)
    padded_E = (sizes_E + expert_alignment - 1) // expert_alignment * expert_alignment
    ends_E = torch.cat([padded_E[a:b].cumsum(0) for a, b in itertools.pairwise(firsts)])
    starts_RE = (ends_E - padded_E) + counts_RE.cumsum(0) - counts_RE  # where each source's rows of an expert begin

    # Sending: stable by destination. Expert ids go along, so that the receiver can sort.
    real = (ids >= 0).nonzero().squeeze(1)
    home = home_of_expert[ids[real]]
    sent_routes = real[home.argsort(stable=True)]
    sent_sizes, received_sizes = routes_RR[rank].tolist(), routes_RR[:, rank].tolist()
    received_ids = _exchange(ids[sent_routes], received_sizes, sent_sizes, group)

    # Receiving: stable by expert, so (expert, source, t, k).
    source = torch.repeat_interleave(torch.arange(ranks), torch.tensor(received_sizes))
    received_rows = _numbered(received_ids, source, starts_RE)

    dst_rank, dst_row = torch.full_like(ids, -1), torch.full_like(ids, -1)
    dst_rank[real] = home
    dst_row[real] = _numbered(ids[real], torch.full_like(real, rank), starts_RE)
    mine = slice(firsts[rank], firsts[rank + 1])
    group_ends = ends_E[mine]
    return ReferencePlan(
        num_tokens=topk_idx.shape[0],
        num_rows=int(group_ends[-1]) if len(group_ends) else 0,
        num_groups=len(group_ends),
        group_experts=torch.arange(num_experts)[mine],
        group_sizes=sizes_E[mine],
        group_ends=group_ends.int(),
        replicas=torch.empty(ranks, 0, dtype=torch.int64),
        rank_rows=routes_RR.sum(0),
        dst_rank=dst_rank.view(-1, top_k),
        dst_row=dst_row.view(-1, top_k),
        num_dropped=0,
        group=group,
        sent_sizes=sent_sizes,
        received_sizes=received_sizes,
        sent_routes=sent_routes,
        received_rows=received_rows,
        rank_order=_rank_order(hosts if hosts is not None else [0] * ranks),
    )


def _all_counts(ids: torch.Tensor, num_experts: int, group: dist.ProcessGroup | None, ranks: int) -> torch.Tensor:
    """Routes per expert [R, E] of every rank."""
    counts_E = torch.bincount(ids[ids >= 0], minlength=num_experts)
    if group is None:
        return counts_E[None]
    counts_RE = [torch.empty_like(counts_E) for _ in range(ranks)]
    dist.all_gather(counts_RE, counts_E, group=group)
    return torch.stack(counts_RE)


def _numbered(ids: torch.Tensor, source: torch.Tensor, starts_RE: torch.Tensor) -> torch.Tensor:
    """The row of each route: where its source's rows of its expert begin, plus how many came before it."""
    key = source * starts_RE.shape[1] + ids
    order = key.argsort(stable=True)
    sorted_key = key[order]
    before = torch.arange(len(key)) - torch.searchsorted(sorted_key, sorted_key)
    rows = torch.empty_like(key)
    rows[order] = starts_RE.reshape(-1)[sorted_key] + before
    return rows


def _rank_order(hosts: Sequence[int]) -> list[tuple[int, bool]]:
    """Ranks ascend within a host; hosts go by their lowest rank."""
    by_host: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    return [(rank, i == 0) for ranks in by_host.values() for i, rank in enumerate(ranks)]


def dispatch(x: torch.Tensor, plan: ReferencePlan, topk_weights: torch.Tensor | None = None) -> Received:
    """Rows [N, H] of `x` [T, H], and weights [N] of `topk_weights` [T, K] (None: 1). Collective, differentiable."""
    if topk_weights is None:
        topk_weights = torch.ones(plan.dst_row.shape)
    rows, weights = _Dispatch.apply(x, topk_weights.float(), plan)  # type: ignore[no-untyped-call]
    return Received(rows, weights)


def combine(expert_out: torch.Tensor, plan: ReferencePlan, weights: torch.Tensor | None = None) -> torch.Tensor:
    """For every token the sum of its rows [N, H] times `weights` [N] (None: 1). Collective, differentiable."""
    if weights is not None:
        weights = weights.float()
    y: torch.Tensor = _Combine.apply(expert_out, weights, plan)  # type: ignore[no-untyped-call]
    return y


def _send_out(values: torch.Tensor, plan: ReferencePlan) -> torch.Tensor:
    """One value per sent route, to its row; padding is zero."""
    received = _exchange(values, plan.received_sizes, plan.sent_sizes, plan.group)
    rows = received.new_zeros(plan.num_rows, *received.shape[1:])
    rows[plan.received_rows] = received
    return rows


def _bring_home(rows: torch.Tensor, plan: ReferencePlan) -> torch.Tensor:
    """The value of each sent route, from its row: the inverse of `_send_out`."""
    return _exchange(rows[plan.received_rows], plan.sent_sizes, plan.received_sizes, plan.group)


def _sum_at_home(rows: torch.Tensor, weights: torch.Tensor | None, plan: ReferencePlan) -> torch.Tensor:
    """float32: rows of a rank in the order of k, then the ranks of a host, then hosts; rounded once."""
    values = _bring_home(rows, plan)
    factors = None if weights is None else _bring_home(weights, plan)
    token = plan.sent_routes // plan.dst_row.shape[1]
    starts = [0, *torch.tensor(plan.sent_sizes).cumsum(0).tolist()]
    total = torch.zeros(plan.num_tokens, rows.shape[1])
    host = torch.zeros_like(total)
    for rank, opens_host in plan.rank_order:
        part = slice(starts[rank], starts[rank + 1])
        wide = values[part].float()
        if factors is not None:
            wide *= factors[part, None]
        if opens_host:
            total += host
            host.zero_()
        host += torch.zeros_like(total).index_add_(0, token[part], wide)
    return (total + host).to(rows.dtype)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, topk_weights: torch.Tensor, plan: ReferencePlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.plan = plan
        rows = _send_out(x[plan.sent_routes // topk_weights.shape[1]], plan)
        return rows, _send_out(topk_weights.reshape(-1)[plan.sent_routes], plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor, grad_weights: torch.Tensor) -> tuple[Any, ...]:
        grad_topk = torch.zeros(ctx.plan.dst_row.numel())
        grad_topk[ctx.plan.sent_routes] = _bring_home(grad_weights, ctx.plan)
        return _sum_at_home(grad_rows, None, ctx.plan), grad_topk.view(ctx.plan.dst_row.shape), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor | None, plan: ReferencePlan) -> torch.Tensor:
        ctx.plan, ctx.weighted = plan, weights is not None
        ctx.save_for_backward(*((rows, weights) if weights is not None else ()))
        return _sum_at_home(rows, weights, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[Any, ...]:
        plan = ctx.plan
        grad = _send_out(grad_y[plan.sent_routes // plan.dst_row.shape[1]], plan)
        if not ctx.weighted:
            return grad, None, None
        rows, weights = ctx.saved_tensors
        dots = torch.zeros(plan.num_rows)
        real = plan.received_rows
        dots[real] = (rows[real].float() * grad[real].float()).sum(1)
        return (grad.float() * weights[:, None]).to(grad.dtype), dots, None
