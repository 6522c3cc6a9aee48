"""Bytes that a rank holds for its experts and for a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

from moonep.policy import Balanced
from moonep.sizing.loads import Load, load
from moonep.sizing.routing import Routing
from moonep.sizing.setting import Setting

__all__ = ["RankMemory", "most_tokens_that_fit", "plan_tensor_bytes", "rank_memory", "ranks_that_fit", "worst_memory"]

_INT64_BYTES, _INT32_BYTES = 8, 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank that holds most of each; 0 for what there is not.

    Rows and replicas are of one layer at a time; in training of all layers, since autograd keeps them until backward,
    unless they are made again there (`Setting.recompute`).
    """

    home_bytes: int  # weights of the experts at home, all layers
    home_grad_bytes: int  # their gradients
    optimizer_bytes: int  # and what an optimizer keeps of them
    replica_bytes: int  # weights in slots that are in use
    replica_grad_bytes: int  # their gradients, one layer's
    staging_bytes: int  # both halves; 0 where ranks share no memory
    messages_bytes: int  # on their way out and in, at most; 0 where ranks share memory
    rows_in_bytes: int  # received, N rows
    rows_out_bytes: int  # the experts' results, N rows
    inner_bytes: int  # what experts keep in between: gate, up and product, 3 F a row
    plan_bytes: int  # tensors of the plan

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(astuple(self))


def plan_tensor_bytes(setting: Setting, routes_out: int, routes_in: int) -> int:
    """What the tensors of one Plan take: places of the routes, crossings out and in, groups and replicas.

    `routes_out` of this rank's tokens, `routes_in` to it: crossings have room as if every route made one.
    """
    policy, slots = setting.policy, 0
    if isinstance(policy, Balanced):
        slots = policy.slots_per_rank(setting.num_experts, setting.num_ranks)
    groups = -(-setting.num_experts // setting.num_ranks) + slots
    places = 2 * _INT64_BYTES * setting.max_tokens * setting.top_k
    boxes = sum(_INT32_BYTES * (setting.num_ranks + 1 + 4 * (routes + 1)) for routes in (routes_out, routes_in))
    # group_experts, group_sizes, rank_rows; group_ends; sizes and ends once more for the transport; replicas.
    per_group = 3 * _INT64_BYTES + 2 * _INT32_BYTES
    return places + boxes + groups * per_group + _INT64_BYTES * setting.num_ranks * (1 + slots)


def rank_memory(setting: Setting, found: Load) -> RankMemory:
    """What the fullest rank holds when `found` is the load of a step of `setting`."""
    model, layers = setting.model, setting.model.layers
    num_rows, local = int(found.num_rows.max(initial=0)), -(-setting.num_experts // setting.num_ranks)
    live = layers if setting.training and not setting.recompute else 1
    home_params = local * model.expert_params * layers
    replica_bytes = found.most_received * setting.expert_bytes
    routes_out = setting.max_tokens * setting.top_k
    return RankMemory(
        home_bytes=home_params * setting.weight_bytes,
        home_grad_bytes=home_params * setting.weight_bytes if setting.training else 0,
        optimizer_bytes=home_params * setting.optimizer_bytes if setting.training else 0,
        replica_bytes=replica_bytes * live,
        replica_grad_bytes=replica_bytes if setting.training else 0,
        staging_bytes=setting.shared_bytes(setting.num_ranks),
        messages_bytes=_messages_bytes(setting, int(found.rank_rows.max(initial=0))),
        rows_in_bytes=num_rows * setting.row_bytes * live,
        rows_out_bytes=num_rows * setting.row_bytes * live,
        inner_bytes=3 * num_rows * model.width * setting.element_bytes * live,
        plan_bytes=plan_tensor_bytes(setting, routes_out, int(found.rank_rows.max(initial=0))) * live,
    )


def _messages_bytes(setting: Setting, rows_in: int) -> int:
    """Tokens sent, each to as many ranks as it may name, and rows received, as if each came alone."""
    if setting.num_ranks == 1 or setting.shared_bytes(setting.num_ranks):
        return 0
    sent = setting.max_tokens * min(setting.top_k, setting.num_ranks - 1)
    return (sent + rows_in) * max(setting.row_bytes, setting.sum_bytes)


def worst_memory(setting: Setting, routing: Routing) -> RankMemory:
    """Of the draw of `routing` that takes most."""
    totals = (routing.totals(draw, setting.num_ranks * setting.max_tokens) for draw in range(routing.num_draws))
    ranks, alignment = setting.num_ranks, setting.expert_alignment
    loads = (load(each, ranks, setting.policy, setting.num_routes, alignment) for each in totals)
    return max((rank_memory(setting, found) for found in loads), key=lambda memory: memory.total_bytes)


def most_tokens_that_fit(setting: Setting, routing: Routing, memory_bytes: int) -> int:
    """The most tokens of a rank, in all else as `setting`, that fit; 0: not even one does. At most 2**24."""

    def fits(num_tokens: int) -> bool:
        return worst_memory(replace(setting, max_tokens=num_tokens), routing).total_bytes <= memory_bytes

    return _most(fits, 2**24)


def ranks_that_fit(setting: Setting, routing: Routing, memory_bytes: int) -> int:
    """The fewest whole hosts, as a number of ranks, that fit with the tokens of `setting`.

    0: not even as many ranks as there are experts do.
    """
    per_host, most_hosts = setting.ranks_per_host, -(-setting.num_experts // setting.ranks_per_host)

    def fits(hosts: int) -> bool:
        wider = replace(setting, num_ranks=hosts * per_host)
        return worst_memory(wider, routing).total_bytes <= memory_bytes

    # Under Home, more ranks may hold more again, as the fullest one's share of the rows does not shrink with its
    # experts. So look at all sizes, up to a sixteenth apart, before looking closer.
    too_few, enough = 0, 1
    while not fits(enough):
        if enough == most_hosts:
            return 0
        too_few, enough = enough, min(max(enough + 1, enough * 17 // 16), most_hosts)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
    return enough * per_host


def _most(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which it holds, where it holds from 1 up to some number; 0: for none."""
    low, high = 0, 1
    while high <= limit and holds(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
