"""Plans made by the native module (`csrc/cpu/plan.h`). What they mean is defined by `moonep.plan.plan_plain`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moonep import _C
from moonep.config import BufferConfig
from moonep.errors import CapacityExceededError
from moonep.plan import Crossings, Plan
from moonep.policy import Balanced, Capacity
from moonep.transport.base import Agreed, Call

__all__ = ["Kept", "Outgoing", "Planner"]

_AS_COUNTED = -1


class Planner:
    """Makes the Plans of one rank with the native module; what ranks must tell each other goes through a transport."""

    def __init__(self, config: BufferConfig, rank: int, host_of_rank: Sequence[int]):
        self.config, self.rank, self.num_ranks = config, rank, len(host_of_rank)
        self._native = _C.Planner(rank, host_of_rank, config.num_experts, config.top_k, config.expert_alignment)
        self._slots = 0
        if isinstance(config.policy, Balanced):
            self._slots = config.policy.slots_per_rank(config.num_experts, self.num_ranks)

    def load_ids(self, topk_idx: torch.Tensor, ids_address: int, counts_address: int) -> None:
        """Writes `topk_idx` [T, K], of any strides, densely as int32, and how many routes each expert has [E] int32.

        ValueError for the first id that is neither -1 nor an expert; the memory is then unfinished.
        """
        idx = topk_idx.cpu()
        experts = self.config.num_experts
        bad = _C.load_ids(
            idx.data_ptr(),
            idx.element_size(),
            idx.shape[0],
            idx.shape[1],
            idx.stride(0),
            idx.stride(1),
            experts,
            ids_address,
            counts_address,
        )
        if bad >= 0:
            token, k = divmod(bad, self.config.top_k)
            raise ValueError(
                f"topk_idx[{token}, {k}]: expected -1 (no route) or an expert in [0, {experts}), "
                f"got {int(idx[token, k])}"
            )

    def load_ids_or_note(self, call: Call, topk_idx: torch.Tensor, ids_address: int, counts_address: int) -> None:
        """The same, but a bad id becomes the call's problem, for all ranks to raise."""
        try:
            self.load_ids(topk_idx, ids_address, counts_address)
        except ValueError as error:
            call.problem = error

    def group_rows(self, num_tokens_of_rank: Sequence[int]) -> int:
        """How many rows the policy gives every expert; _AS_COUNTED: as many as are routed to it."""
        config = self.config
        if isinstance(config.policy, Capacity):
            total = sum(num_tokens_of_rank)
            return config.policy.rows_per_expert(total, config.top_k, config.num_experts, config.expert_alignment)
        return _AS_COUNTED

    def kept(
        self,
        counts_RE: torch.Tensor,
        num_tokens_of_rank: Sequence[int],
        read: Callable[[], tuple[list[torch.Tensor], list[torch.Tensor | None]]],
    ) -> Kept | None:
        """What is left of all ranks' routes once those over the policy's room are dropped; None: all of them fit.

        `read` gives copies of every rank's ids [T, K] int32, which are then written to, and weights [T, K] float32 (or
        None). Raises Agreed where the policy does not drop: all ranks come to the same conclusion.
        """
        config, room = self.config, self.group_rows(num_tokens_of_rank)
        sizes_E = counts_RE.sum(0)
        if room < 0 or int(sizes_E.max()) <= room:
            return None
        assert isinstance(config.policy, Capacity)
        if config.policy.overflow == "error":
            expert = int(sizes_E.argmax())
            raise Agreed(
                CapacityExceededError(
                    f"plan: {config.policy} leaves every expert {room} rows, but {int((sizes_E > room).sum())} of "
                    f"{config.num_experts} experts have more; the most has expert {expert}: {int(sizes_E[expert])}"
                )
            )
        ids, weights = read()
        kept_RE = counts_RE.clone()
        _C.drop_overflow(
            [each.data_ptr() for each in ids],
            [0 if each is None else each.data_ptr() for each in weights],
            [counts_E.data_ptr() for counts_E in kept_RE.unbind()],
            num_tokens_of_rank,
            config.top_k,
            config.num_experts,
            room,
        )
        return Kept(ids, kept_RE, int(counts_RE[self.rank].sum() - kept_RE[self.rank].sum()))

    def plan_from_ids(
        self,
        ids_of_rank: Sequence[int],
        counts_of_rank: Sequence[int],
        num_tokens_of_rank: tuple[int, ...],
        num_dropped: int = 0,
    ) -> Plan:
        """The Plan where all ranks' ids and counts (addresses, as `load_ids` wrote them) can be read here."""
        self._lay_out(counts_of_rank, num_tokens_of_rank)
        outgoing = self._outgoing(ids_of_rank[self.rank], num_tokens_of_rank[self.rank])
        inbox, addresses = self._empty_box(self._native.routes_in)
        crossings = self._native.number_incoming(ids_of_rank, num_tokens_of_rank, addresses)
        return self._plan(num_tokens_of_rank, outgoing, _cut(inbox, crossings), num_dropped)

    def words_to_send(
        self, ids_address: int, counts_of_rank: Sequence[int], num_tokens_of_rank: Sequence[int]
    ) -> tuple[torch.Tensor, Outgoing, torch.Tensor]:
        """Where ids stay with their rank: what the others must know of this rank's routes, int32 in outbox order.

        And how many such words go from every rank to every other [R, R].
        """
        self._lay_out(counts_of_rank, num_tokens_of_rank)
        outgoing = self._outgoing(ids_address, num_tokens_of_rank[self.rank])
        words = torch.empty(self._native.routes_out, dtype=torch.int32)
        self._native.pack_words(ids_address, outgoing.outbox.addresses, words.data_ptr())
        routes_RR = torch.empty(self.num_ranks, self.num_ranks, dtype=torch.int64)
        self._native.write_routes(routes_RR.data_ptr())
        return words, outgoing, routes_RR

    def plan_from_words(
        self,
        words: torch.Tensor,
        words_of_rank: Sequence[int],
        num_tokens_of_rank: tuple[int, ...],
        outgoing: Outgoing,
        num_dropped: int = 0,
    ) -> Plan | None:
        """The Plan from every rank's words for this rank, in rank order; None when they contradict the counts."""
        inbox, addresses = self._empty_box(self._native.routes_in)
        crossings = self._native.unpack_words(words.data_ptr(), words_of_rank, addresses)
        if crossings < 0:
            return None
        # What peers send is numbered as it comes; this rank's own rows stay where they are.
        inbox, outbox = _cut(inbox, crossings), outgoing.outbox
        (into, _), (out_of, end) = (box.first[self.rank : self.rank + 2].tolist() for box in (inbox, outbox))
        inbox.token[into : into + end - out_of] = outbox.token[out_of:end]
        into, (out_of, end) = int(inbox.start[into]), outbox.start[[out_of, end]].tolist()
        inbox.route[into : into + end - out_of] = outbox.route[out_of:end]
        return self._plan(num_tokens_of_rank, outgoing, inbox, num_dropped)

    def _lay_out(self, counts_of_rank: Sequence[int], num_tokens_of_rank: Sequence[int]) -> None:
        """Decides where every expert's rows go, and where each group begins."""
        config, policy = self.config, self.config.policy
        self._native.set_counts(counts_of_rank)
        num_rows = _AS_COUNTED
        if isinstance(policy, Balanced):
            limit = policy.row_limit(self._native.total_rows, self.num_ranks)
            self._native.balance(limit, self._slots, policy.slack == 0)
            if policy.max_replicas is None:
                num_rows = policy.rows_per_rank(
                    sum(num_tokens_of_rank), config.top_k, config.num_experts, self.num_ranks, config.expert_alignment
                )
        self._native.lay_out(self.group_rows(num_tokens_of_rank), num_rows)

    def _empty_box(self, routes: int) -> tuple[Crossings, tuple[int, int, int, int, int]]:
        """Arrays for at most one crossing per route, and one entry more, in one piece of memory."""
        sizes = [self.num_ranks + 1, *[routes + 1] * 4]
        box = Crossings(*torch.split(torch.empty(sum(sizes), dtype=torch.int32), sizes))
        return box, box.addresses

    def _outgoing(self, ids_address: int, num_tokens: int) -> Outgoing:
        dst = torch.empty(2, num_tokens, self.config.top_k, dtype=torch.int64)
        dst_rank, dst_row = dst.unbind()
        outbox, addresses = self._empty_box(self._native.routes_out)
        crossings = self._native.number_outgoing(
            ids_address, num_tokens, dst_rank.data_ptr(), dst_row.data_ptr(), addresses
        )
        return Outgoing(dst_rank, dst_row, _cut(outbox, crossings))

    def _plan(
        self, num_tokens_of_rank: tuple[int, ...], outgoing: Outgoing, inbox: Crossings, num_dropped: int
    ) -> Plan:
        groups = self._native.num_groups
        sizes = [groups, groups, self.num_ranks]
        group_experts, group_sizes, rank_rows = torch.split(torch.empty(sum(sizes), dtype=torch.int64), sizes)
        group_ends = torch.empty(groups, dtype=torch.int32)
        replicas = torch.empty(self.num_ranks, self._slots, dtype=torch.int64)
        self._native.write_groups(
            group_experts.data_ptr(),
            group_sizes.data_ptr(),
            group_ends.data_ptr(),
            rank_rows.data_ptr(),
            replicas.data_ptr(),
        )
        return Plan(
            num_tokens=num_tokens_of_rank[self.rank],
            num_rows=self._native.num_rows,
            num_groups=groups,
            group_experts=group_experts,
            group_sizes=group_sizes,
            group_ends=group_ends,
            replicas=replicas,
            rank_rows=rank_rows,
            dst_rank=outgoing.dst_rank,
            dst_row=outgoing.dst_row,
            num_dropped=num_dropped,
            num_tokens_of_rank=num_tokens_of_rank,
            most_rows=self._native.most_rows,
            outbox=outgoing.outbox,
            inbox=inbox,
            layout=(group_sizes.clone(), group_ends.clone()),
        )


@dataclass(frozen=True, eq=False)
class Kept:
    """Routes of all ranks that have a row."""

    ids: list[torch.Tensor]  # per rank [T, K] int32, -1 also for a dropped route
    counts_RE: torch.Tensor  # [R, E] int32
    num_dropped: int  # of this rank

    @property
    def addresses(self) -> tuple[list[int], list[int]]:
        """Of every rank's ids and counts."""
        return [each.data_ptr() for each in self.ids], [counts_E.data_ptr() for counts_E in self.counts_RE.unbind()]


@dataclass(frozen=True, eq=False)
class Outgoing:
    """One rank's own routes, numbered."""

    dst_rank: torch.Tensor  # [T, K]
    dst_row: torch.Tensor  # [T, K]
    outbox: Crossings


def _cut(box: Crossings, crossings: int) -> Crossings:
    return Crossings(box.first, box.token[:crossings], box.start[: crossings + 1], box.route[:-1], box.row[:-1])
