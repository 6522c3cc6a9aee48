"""The definition: expert parallelism the way one writes it by hand over plain torch.distributed.

Every routed row is permuted by destination rank, sent with `all_to_all_single`, and sorted by expert at the receiver;
results go home raw and are summed there. No dedup, no native code, nothing cached: right first, and the baseline of the
benchmark. All functions are collective, and differentiable: while gradients are enabled every output hangs on the
graph, so that every rank takes part in the backward, whatever its inputs need. All ranks must agree on the grad mode
and on which weights are passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from moonep.plan import Received, first_expert, home_rank, lay_out, share_out
from moonep.policy import Balanced, Capacity, Home, Policy

__all__ = ["ReferencePlan", "combine", "dispatch", "plan", "replicate"]

# Sums go block by block, so that what is added to stays in the cache.
_BLOCK_ELEMENTS = 2**16


@dataclass(frozen=True, eq=False)
class ReferencePlan:
    """Where the routes of one `topk_idx` go. The public fields are those of `moonep.Plan`; int64 unless said."""

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
    num_dropped: int  # 0
    # Routes (t * K + k) in the order they are sent: by (destination rank, t, k).
    sent_route: torch.Tensor = field(repr=False)  # [M]
    sent_token: torch.Tensor = field(repr=False)  # [M] their tokens
    send_sizes: list[int] = field(repr=False)  # [R]
    # Rows in the order they come: by (source rank, t, k).
    receive_sizes: list[int] = field(repr=False)  # [R]
    row_of_received: torch.Tensor = field(repr=False)  # [M']
    received_of_row: torch.Tensor = field(repr=False)  # [N], M' for padding
    num_experts: int = field(repr=False)
    group: dist.ProcessGroup | None = field(repr=False)  # None: one process alone
    combine_wire: str = field(repr=False)
    ranks_of_host: list[list[int]] = field(repr=False)  # hosts by their lowest rank


def plan(
    topk_idx: torch.Tensor,
    *,
    num_experts: int,
    group: dist.ProcessGroup | None = None,
    expert_alignment: int = 1,
    hosts: Sequence[int] | None = None,
    combine_wire: str = "float32",
    policy: Policy = Home(),  # noqa: B008 (frozen)
    topk_weights: torch.Tensor | None = None,
) -> ReferencePlan:
    """Decides where every route goes.

    Args:
        topk_idx: [T, K] int32 or int64; -1 for no route.
        num_experts: E, in all ranks together.
        group: None: the default group, or one process alone when torch.distributed is not initialised.
        expert_alignment: every expert's rows are padded to a multiple of this many.
        hosts: [R] the host of every rank, for the order of sums and which replica is near; None: one host.
        policy: where rows may go.
        topk_weights: [T, K], by which `Capacity` drops; None on all ranks: the latest go first.
        combine_wire: "float32", or "payload": each rank's sum is rounded to the rows' dtype before it is added.

    Raises:
        TypeError: another dtype (on this rank only).
        ValueError: an id that is neither -1 nor an expert, on every rank.
    """
    if topk_idx.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_idx: expected int32 or int64, got {topk_idx.dtype}")
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    num_ranks = dist.get_world_size(group) if group is not None else 1
    rank = dist.get_rank(group) if group is not None else 0
    (num_tokens, top_k), device = topk_idx.shape, topk_idx.device
    ids = topk_idx.reshape(-1).long()
    counts_RE = _gather_counts(ids, top_k, num_experts, group, num_ranks)
    num_routed = int(counts_RE[rank].sum())
    room = None
    if isinstance(policy, Capacity):
        all_ids = _gather_ragged(ids, -1, group, num_ranks)
        room = policy.rows_per_expert(sum(map(len, all_ids)) // top_k, top_k, num_experts, expert_alignment)
        weights = torch.zeros_like(ids, dtype=torch.float32) if topk_weights is None else topk_weights.reshape(-1)
        all_weights = _gather_ragged(weights.detach().float(), 0.0, group, num_ranks)
        ids = _within_room(all_ids, all_weights, room)[rank]
        counts_RE = _gather_counts(ids, top_k, num_experts, group, num_ranks)

    # Groups, in all ranks one after the other: every expert at its home, padded, and behind them replicas.
    hosts = [0] * num_ranks if hosts is None else hosts
    first = [first_expert(r, num_experts, num_ranks) for r in range(num_ranks + 1)]
    group_experts = torch.arange(num_experts, device=device)
    group_of_route, counts_RG = ids, counts_RE
    num_slots = 0
    if isinstance(policy, Balanced):
        num_slots = policy.slots_per_rank(num_experts, num_ranks)
        first = [begin + r * num_slots for r, begin in enumerate(first)]
        group_experts, group_of_route, counts_RG = _with_replicas(ids, counts_RE, rank, policy, hosts, first)
    mine = slice(first[rank], first[rank + 1])
    rank_G = torch.repeat_interleave(torch.arange(num_ranks), torch.tensor(first).diff()).to(device)
    sizes_G = counts_RG.sum(0)
    padded_G = (sizes_G + expert_alignment - 1) // expert_alignment * expert_alignment
    if room is not None:
        padded_G = torch.full_like(sizes_G, room)
    ends_G = padded_G.cumsum(0)
    rows_before_R = torch.nn.functional.pad(ends_G, (1, 0))[first[:-1]]  # of the ranks before
    ends_G = ends_G - rows_before_R[rank_G]
    num_rows = int(ends_G[first[rank + 1] - 1]) if mine.stop > mine.start else 0
    if isinstance(policy, Balanced) and policy.max_replicas is None:
        tokens = _sum_over_ranks(num_tokens, device, group)
        num_rows = policy.rows_per_rank(tokens, top_k, num_experts, num_ranks, expert_alignment)

    # Routes by destination rank. Within a group, rows go by (source rank, t, k).
    routes = (group_of_route >= 0).nonzero().squeeze(1)
    groups = group_of_route[routes]
    dst_rank = torch.full_like(ids, -1).index_copy_(0, routes, rank_G[groups])
    sent_route = routes[rank_G[groups].argsort(stable=True)]
    by_group = groups.argsort(stable=True)
    before_G = counts_RG[rank].cumsum(0) - counts_RG[rank]
    starts_G = ends_G - padded_G + counts_RG[:rank].sum(0)
    place = torch.arange(len(routes), device=device) + (starts_G - before_G)[groups[by_group]]
    dst_row = torch.full_like(ids, -1).index_copy_(0, routes[by_group], place)

    per_rank_RR = torch.stack([counts_RG[:, first[r] : first[r + 1]].sum(1) for r in range(num_ranks)], dim=1)
    send_sizes, receive_sizes = per_rank_RR[rank].tolist(), per_rank_RR[:, rank].tolist()
    received_groups = torch.empty(sum(receive_sizes), dtype=torch.int32, device=device)
    _exchange(received_groups, group_of_route[sent_route].int(), receive_sizes, send_sizes, group)
    received_by_row = received_groups.argsort(stable=True)
    padding = (padded_G - sizes_G)[mine]
    shift = padding.cumsum(0) - padding  # of a group's rows, by the padding before it
    rows = torch.arange(len(received_by_row), device=device) + shift.repeat_interleave(sizes_G[mine])
    return ReferencePlan(
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_groups=mine.stop - mine.start,
        group_experts=group_experts[mine],
        group_sizes=sizes_G[mine],
        group_ends=ends_G[mine].int(),
        replicas=torch.stack([group_experts[end - num_slots : end] for end in first[1:]]),
        rank_rows=per_rank_RR.sum(0),
        dst_rank=dst_rank.view(num_tokens, top_k),
        dst_row=dst_row.view(num_tokens, top_k),
        num_dropped=num_routed - len(routes),
        sent_route=sent_route,
        sent_token=sent_route // top_k,
        send_sizes=send_sizes,
        receive_sizes=receive_sizes,
        row_of_received=torch.empty_like(rows).index_copy_(0, received_by_row, rows),
        received_of_row=torch.full((num_rows,), len(rows), device=device).index_copy_(0, rows, received_by_row),
        num_experts=num_experts,
        group=group,
        combine_wire=combine_wire,
        ranks_of_host=_ranks_of_host(hosts),
    )


def dispatch(x: torch.Tensor, plan: ReferencePlan, topk_weights: torch.Tensor | None = None) -> Received:
    """Carries tokens to their experts' ranks.

    Args:
        x: [T, H] bfloat16, float16 or float32.
        plan: of this rank.
        topk_weights: [T, K], any floating dtype; None: 1 for every route.

    Returns:
        Received: x [N, H] grouped by expert, and weights [N] float32; padding is zeros of weight 0.
    """
    if topk_weights is not None:
        topk_weights = topk_weights.float()
    rows, weights = _Dispatch.apply(_anchor(), x, topk_weights, plan)  # type: ignore[no-untyped-call]
    return Received(rows, weights)


def combine(expert_out: torch.Tensor, plan: ReferencePlan, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Brings results home and sums them.

    Sums start at +0 in float32, k ascending within a rank, ranks ascending within a host, hosts by their lowest rank;
    a weighted row is rounded to float32 before it is added, and the sum once at the end.

    Args:
        expert_out: [N, H], rows as `dispatch` gave them. Padding rows are not read.
        plan: of this rank.
        weights: [N], any floating dtype; None: the plain sum.

    Returns:
        [T, H] in the dtype of `expert_out`; zeros for a token without routes.
    """
    if weights is not None:
        weights = weights.float()
    y: torch.Tensor = _Combine.apply(_anchor(), expert_out, weights, plan)  # type: ignore[no-untyped-call]
    return y


def replicate(plan: ReferencePlan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The weights of the plan's groups: home experts, then replicas; idle slots are zeros.

    Args:
        plan: of this rank.
        tensors: [L, ...], the experts at home here, of any dtype.

    Returns:
        [G, ...] for each. In backward, gradients are added at home in float32, the home's first, then those of the
        replicas by rank, and rounded once.
    """
    return tuple(_Replicate.apply(_anchor(), tensor, plan) for tensor in tensors)  # type: ignore[no-untyped-call]


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor, plan: ReferencePlan) -> torch.Tensor:
        ctx.plan = plan
        if not tensor.is_floating_point():
            ctx.set_materialize_grads(False)
        to_ranks, send_sizes, slots, receive_sizes = _blocks_to_copy(plan)
        whole = tensor.new_zeros(plan.num_groups, *tensor.shape[1:])
        whole[: len(tensor)] = tensor
        received = tensor.new_empty(len(slots), *tensor.shape[1:])
        _exchange(received, tensor[to_ranks], receive_sizes, send_sizes, plan.group)
        whole[slots] = received
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        from_ranks, receive_sizes, slots, send_sizes = _blocks_to_copy(ctx.plan)
        received = grad.new_empty(len(from_ranks), *grad.shape[1:])
        _exchange(received, grad[slots], receive_sizes, send_sizes, ctx.plan.group)
        total = grad[: ctx.plan.num_groups - ctx.plan.replicas.shape[1]].float()
        for of_rank, experts in zip(
            torch.split(received, receive_sizes), torch.split(from_ranks, receive_sizes), strict=True
        ):
            total[experts] += of_rank.float()  # a rank has one replica of an expert at most
        return None, total.to(grad.dtype), None


def _blocks_to_copy(plan: ReferencePlan) -> tuple[torch.Tensor, list[int], torch.Tensor, list[int]]:
    """Which home experts go out, by rank, and how many to each; which slots are filled, and how many from each rank."""
    num_ranks, num_slots = plan.replicas.shape
    num_home = plan.num_groups - num_slots
    home, slots = plan.group_experts[:num_home], plan.group_experts[num_home:]
    first = int(home[0]) if num_home else 0
    wanted = [each[(each >= first) & (each < first + num_home)] - first for each in plan.replicas]
    filled = (slots >= 0).nonzero().squeeze(1)
    from_rank = torch.tensor([home_rank(int(e), plan.num_experts, num_ranks) for e in slots[filled]], dtype=torch.int64)
    return (
        torch.cat(wanted),
        [len(each) for each in wanted],
        filled + num_home,
        torch.bincount(from_rank, minlength=num_ranks).tolist(),
    )


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, x: torch.Tensor, topk_weights: torch.Tensor | None, plan: ReferencePlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.plan, ctx.weighted = plan, topk_weights is not None
        rows = _to_rows(_send(x, plan.sent_token, plan), plan)
        if topk_weights is None:
            weights = torch.ones(len(plan.row_of_received) + 1, device=x.device)
            weights[-1] = 0
        else:
            weights = _send(topk_weights.reshape(-1), plan.sent_route, plan)
        return rows, _to_rows(weights, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor, grad_weights: torch.Tensor) -> tuple[Any, ...]:
        plan: ReferencePlan = ctx.plan
        grad_x = _sum_at_home(_send_home(grad_rows, plan), None, plan)
        if not ctx.weighted:
            return None, grad_x, None, None
        grad_topk = torch.zeros(plan.dst_row.numel(), device=grad_rows.device)
        grad_topk[plan.sent_route] = _send_home(grad_weights, plan)
        return None, grad_x, grad_topk.view_as(plan.dst_row), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None, plan: ReferencePlan
    ) -> torch.Tensor:
        ctx.plan = plan
        # The rows are only wanted for the gradient of the weights.
        ctx.save_for_backward(rows if ctx.needs_input_grad[2] else None, weights)
        home_weights = None if weights is None else _send_home(weights, plan)
        return _sum_at_home(_send_home(rows, plan), home_weights, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[Any, ...]:
        plan: ReferencePlan = ctx.plan
        rows, weights = ctx.saved_tensors
        grads = _send(grad_y, plan.sent_token, plan)
        dots = None
        if rows is not None:
            dots = torch.zeros(len(grads), device=grads.device)
            for block in _blocks(grads[:-1]):
                dots[block] = (rows[plan.row_of_received[block]].float() * grads[block].float()).sum(1)
            dots = _to_rows(dots, plan)
        if weights is not None:
            for block in _blocks(grads[:-1]):
                grads[block] = grads[block].float() * weights[plan.row_of_received[block], None]
        return None, _to_rows(grads, plan), dots, None


def _anchor() -> torch.Tensor:
    """An input that needs a gradient, so that every output does."""
    return torch.empty(0, requires_grad=True)


def _gather_counts(
    ids: torch.Tensor, top_k: int, num_experts: int, group: dist.ProcessGroup | None, num_ranks: int
) -> torch.Tensor:
    """How many routes every rank has for every expert, [R, E]; raises on all ranks if any has a bad id."""
    routed = (ids >= 0) & (ids < num_experts)
    bad = (~routed & (ids != -1)).nonzero().squeeze(1)[:1]
    counts = torch.bincount(ids[routed], minlength=num_experts)
    mine = torch.cat([torch.cat([bad, ids[bad]]) if len(bad) else bad.new_full((2,), -1), counts])
    gathered = mine.new_empty(num_ranks, len(mine))
    if group is None:
        gathered[0] = mine
    else:
        dist.all_gather(list(gathered.unbind()), mine, group=group)
    for rank, (route, value) in enumerate(gathered[:, :2].tolist()):
        if route >= 0:
            raise ValueError(
                f"plan: rank {rank}: topk_idx[{route // top_k}, {route % top_k}]: expected -1 (no route) or an expert "
                f"in [0, {num_experts}), got {value}"
            )
    return gathered[:, 2:]


def _sum_over_ranks(value: int, device: torch.device, group: dist.ProcessGroup | None) -> int:
    total = torch.tensor(value, device=device)
    if group is not None:
        dist.all_reduce(total, group=group)
    return int(total)


def _with_replicas(
    ids: torch.Tensor, counts_RE: torch.Tensor, rank: int, policy: Balanced, hosts: Sequence[int], first: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The expert of every group of all ranks [G], each route's group (-1: none), and how many a rank sends [R, G]."""
    num_ranks = len(counts_RE)
    of_rank, of_expert = lay_out(counts_RE.sum(0).tolist(), num_ranks, policy, None, 1)
    counts_RG = counts_RE.new_zeros(num_ranks, first[-1])
    segments: list[tuple[int, int]] = []  # of this rank's routes, by expert: group, routes
    for routes_of_source, groups in zip(counts_RE.T.tolist(), of_expert, strict=True):
        for source, pieces in enumerate(share_out(routes_of_source, groups, hosts)):
            for place, routes in pieces:
                number = first[groups[place].rank] + groups[place].number
                counts_RG[source, number] = routes
                if source == rank:
                    segments.append((number, routes))
    by_expert = ids.argsort(stable=True)[(ids < 0).sum() :]
    numbers, lengths = torch.tensor(segments, dtype=torch.int64, device=ids.device).reshape(-1, 2).unbind(1)
    group_of_route = torch.full_like(ids, -1).index_copy_(0, by_expert, numbers.repeat_interleave(lengths))
    experts = torch.tensor([group.expert for groups in of_rank for group in groups], device=ids.device)
    return experts, group_of_route, counts_RG


def _gather_ragged(
    values: torch.Tensor, padding: float, group: dist.ProcessGroup | None, num_ranks: int
) -> list[torch.Tensor]:
    """Every rank's `values`, of any length."""
    if group is None:
        return [values]
    lengths = torch.empty(num_ranks, dtype=torch.int64, device=values.device)
    dist.all_gather(list(lengths.unsqueeze(1).unbind()), torch.tensor([len(values)], device=values.device), group=group)
    longest = int(lengths.max())
    gathered = values.new_empty(num_ranks, longest)
    padded = torch.nn.functional.pad(values, (0, longest - len(values)), value=padding)
    dist.all_gather(list(gathered.unbind()), padded, group=group)
    return [row[:length] for row, length in zip(gathered, lengths.tolist(), strict=True)]


def _within_room(all_ids: list[torch.Tensor], all_weights: list[torch.Tensor], room: int) -> tuple[torch.Tensor, ...]:
    """Every rank's ids, -1 for routes that their expert has no room for: the lowest weights, then the latest."""
    ids, weights = torch.cat(all_ids), torch.cat(all_weights)
    by_weight = weights.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argsort(
        descending=True, stable=True
    )
    order = by_weight[ids[by_weight].argsort(stable=True)]
    experts = ids[order]
    place = torch.arange(len(order), device=ids.device) - torch.searchsorted(experts, experts)
    over = torch.zeros_like(ids, dtype=torch.bool).index_copy_(0, order, place >= room)
    return torch.split(torch.where(over, -1, ids), [len(each) for each in all_ids])


def _ranks_of_host(hosts: Sequence[int]) -> list[list[int]]:
    ranks: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return list(ranks.values())


def _exchange(
    received: torch.Tensor,
    sent: torch.Tensor,
    receive_sizes: list[int],
    send_sizes: list[int],
    group: dist.ProcessGroup | None,
) -> None:
    if group is None:
        received.copy_(sent)
    else:
        dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=group)


def _send(values: torch.Tensor, index: torch.Tensor, plan: ReferencePlan) -> torch.Tensor:
    """values[index] to the rows' ranks: [M' + 1, ...], as they come, then zeros for padding."""
    received = values.new_empty(sum(plan.receive_sizes) + 1, *values.shape[1:])
    received[-1] = 0
    _exchange(received[:-1], values.index_select(0, index), plan.receive_sizes, plan.send_sizes, plan.group)
    return received


def _send_home(values: torch.Tensor, plan: ReferencePlan) -> torch.Tensor:
    """Values of rows [N, ...] to the routes' ranks: [M, ...] in the order of `sent_route`."""
    received = values.new_empty(sum(plan.send_sizes), *values.shape[1:])
    _exchange(received, values.index_select(0, plan.row_of_received), plan.send_sizes, plan.receive_sizes, plan.group)
    return received


def _to_rows(received: torch.Tensor, plan: ReferencePlan) -> torch.Tensor:
    """[M' + 1, ...] as `_send` gave it -> [N, ...], sorted by expert."""
    return received.index_select(0, plan.received_of_row)


def _blocks(rows: torch.Tensor) -> list[slice]:
    """Cuts of rows [n, H] that fit in a cache; on a GPU, one."""
    count = max(1, _BLOCK_ELEMENTS // max(1, rows.shape[1])) if rows.device.type == "cpu" else max(1, len(rows))
    return [slice(begin, min(begin + count, len(rows))) for begin in range(0, len(rows), count)]


def _sum_at_home(rows: torch.Tensor, weights: torch.Tensor | None, plan: ReferencePlan) -> torch.Tensor:
    """Sums [T, H] of rows [M, H], times weights [M], in the order of `sent_route`; see `combine`."""
    y = rows.new_empty(plan.num_tokens, rows.shape[1])
    blocks = _blocks(y)
    edges = torch.tensor([0, *(block.stop for block in blocks)], device=rows.device)
    bounds, begin = [], 0  # per rank and token block, where its rows begin
    for size in plan.send_sizes:
        bounds.append((begin + torch.searchsorted(plan.sent_token[begin : begin + size], edges)).tolist())
        begin += size
    for b, block in enumerate(blocks):
        total = torch.zeros(block.stop - block.start, rows.shape[1], device=rows.device)
        for ranks in plan.ranks_of_host:
            host_sum = torch.zeros_like(total)
            for rank in ranks:
                part = slice(bounds[rank][b], bounds[rank][b + 1])
                addends = rows[part].float() if weights is None else rows[part].float() * weights[part, None]
                rank_sum = torch.zeros_like(total)
                _add_rows(rank_sum, plan.sent_token[part] - block.start, addends)
                host_sum += rank_sum.to(y.dtype) if plan.combine_wire == "payload" else rank_sum
            total += host_sum
        y[block] = total
    return y


def _add_rows(sums: torch.Tensor, index: torch.Tensor, addends: torch.Tensor) -> None:
    """sums[index[i]] += addends[i], in the order of i; `index` ascends."""
    if sums.device.type == "cpu":
        sums.index_add_(0, index, addends)
        return
    # There index_add_ is atomic: keep the order by adding every token's first row, then every second one, ...
    ordinal = torch.arange(len(index), device=index.device) - torch.searchsorted(index, index)
    for turn in range(int(ordinal.max()) + 1 if len(index) else 0):
        now = (ordinal == turn).nonzero().squeeze(1)
        sums[index[now]] += addends[now]
