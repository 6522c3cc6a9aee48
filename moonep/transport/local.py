"""One rank alone: rows are moved in place, nothing crosses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moonep import _C
from moonep.config import BufferConfig
from moonep.plan import Plan
from moonep.transport.base import Agreement, Call, Collected, Parcel, Spread, Transport, agree
from moonep.transport.group import Group
from moonep.transport.planner import Planner
from moonep.transport.rows import Rows, address

__all__ = ["LocalTransport"]


class LocalTransport(Transport):
    """The `local` transport."""

    name = "local"

    def __init__(self, config: BufferConfig, group: Group):
        self._config, self._names = config, group.names
        self._rows = Rows(config, 0, [0])
        self.memory = self._rows.memory
        self._planner = Planner(config, 0, [0])

    def agree(self, call: Call) -> Agreement:
        return agree([call.pack()], self._names)

    def plan(self, call: Call, topk_idx: torch.Tensor, weights: torch.Tensor | None) -> Plan:
        ids = torch.empty(call.num_tokens, self._config.top_k, dtype=torch.int32)
        counts = torch.empty(self._config.num_experts, dtype=torch.int32)
        self._planner.load_ids_or_note(call, topk_idx, address(ids), address(counts))
        num_tokens_of_rank = self.agree(call).num_tokens_of_rank
        kept = self._planner.kept(counts[None], num_tokens_of_rank, lambda: ([ids], [weights]))
        if kept is not None:
            return self._planner.plan_from_ids(*kept.addresses, num_tokens_of_rank, kept.num_dropped)
        return self._planner.plan_from_ids([address(ids)], [address(counts)], num_tokens_of_rank)

    def spread(self, call: Call, plan: Plan, x: torch.Tensor, route_weights: torch.Tensor) -> Spread:
        agreement = self.agree(call)
        rows = self._rows.empty_rows(plan)
        self._rows.expand(rows, address(x), plan, 0, len(plan.inbox.token), 0)
        weights = torch.zeros(plan.num_rows)
        _, _, _, route, row = plan.inbox.addresses
        _C.move_floats(address(weights), row, 0, address(route_weights), route, 0, len(plan.inbox.row))
        return Spread(rows, weights, agreement)

    def spread_scaled(
        self, call: Call, plan: Plan, x: torch.Tensor, row_weights: torch.Tensor | None, other: torch.Tensor | None
    ) -> Spread:
        agreement = self.agree(call)
        rows = self._rows.empty_rows(plan)
        dots = None if other is None else torch.zeros(plan.num_rows)
        self._rows.expand_scaled(rows, address(x), plan, 0, len(plan.inbox.token), 0, row_weights, other, dots)
        return Spread(rows, dots, agreement)

    def collect(
        self,
        call: Call,
        plan: Plan,
        rows: torch.Tensor,
        row_weights: torch.Tensor | None,
        row_scalars: torch.Tensor | None,
    ) -> Collected:
        agreement = self.agree(call)
        sums = self.memory.empty((plan.num_tokens, self._config.hidden), self._config.dtype)
        self._rows.finish(sums, rows, row_weights, plan, (0, plan.num_tokens), [0], [0])
        scalars = None
        if row_scalars is not None:
            scalars = torch.zeros(plan.num_tokens, self._config.top_k)
            _, _, _, route, row = plan.outbox.addresses
            _C.move_floats(address(scalars), route, 0, address(row_scalars), row, 0, len(plan.outbox.row))
        return Collected(sums, scalars, agreement)

    def exchange(self, call: Call, parcels: Sequence[Parcel]) -> Agreement:
        assert not parcels, "there is nobody to send to"
        return self.agree(call)

    def close(self) -> None:
        self.memory.close()
