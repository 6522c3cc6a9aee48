"""Ranks anywhere, over any torch.distributed group: one uneven all-to-all each way, every token once per rank.

A message to a peer is: float32 scalars, one per route | rows or sums, one per crossing | check word. Both sides know
its size from the plan; the check word, which a shorter message leaves unwritten, proves that all of it came.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from moonep import _C
from moonep.config import BufferConfig
from moonep.errors import TransportError
from moonep.plan import Crossings, Plan
from moonep.sizes import ALIGN_BYTES, align
from moonep.transport.base import HEADER_BYTES, Agreement, Call, Collected, Parcel, Spread, Transport, agree
from moonep.transport.group import FIRST_BYTES, VERB, Group
from moonep.transport.planner import Planner
from moonep.transport.rows import Rows, address

__all__ = ["CollectiveTransport"]

_CHECK_BYTES = ALIGN_BYTES
_SCALAR_BYTES = 4


class _Mail:
    """Messages to or from every peer, one after the other in rank order; this rank's own is empty."""

    def __init__(self, rows: Rows, box: Crossings, piece_bytes: int):
        first, start = box.first, box.start
        self.crossings = list(itertools.pairwise(first.tolist()))  # per rank: crossings [begin, end)
        self.routes = list(itertools.pairwise(start[first.long()].tolist()))  # per rank: routes [begin, end)
        self.sizes: list[int] = []
        self._heads: list[int] = []
        for rank, ((begin, end), (at, after)) in enumerate(zip(self.crossings, self.routes, strict=True)):
            head = align(_SCALAR_BYTES * (after - at))
            self._heads.append(head)
            self.sizes.append(0 if rank == rows.rank else head + align(piece_bytes * (end - begin)) + _CHECK_BYTES)
        self._starts = [0, *itertools.accumulate(self.sizes)]
        self.data = rows.memory.empty((self._starts[-1],), torch.uint8)

    def check_word(self, rank: int) -> torch.Tensor:
        """The word [1] that ends the message to or from `rank`."""
        return self.data[self._starts[rank + 1] - _CHECK_BYTES :][:8].view(torch.int64)

    def scalars(self, rank: int) -> int:
        """Address of the scalars to or from `rank`."""
        return address(self.data) + self._starts[rank]

    def pieces(self, rank: int) -> int:
        """Address of the rows or sums to or from `rank`."""
        return address(self.data) + self._starts[rank] + self._heads[rank]


class CollectiveTransport(Transport):
    """The `collective` transport."""

    name = "collective"

    def __init__(self, config: BufferConfig, group: Group):
        self._config, self._group = config, group
        self._rank, self._ranks = group.rank, range(group.num_ranks)
        self._others = [rank for rank in self._ranks if rank != group.rank]
        self._planner = Planner(config, group.rank, group.host_of_rank)
        self._rows = Rows(config, group.rank, group.host_of_rank)
        self.memory = self._rows.memory
        self._messages = 0

    def agree(self, call: Call) -> Agreement:
        return self._agree_with(call, b"")[0]

    def _agree_with(self, call: Call, rider: bytes) -> tuple[Agreement, list[bytes] | None]:
        """The headers, and every rank's rider; None when it is too long to ride."""
        rides = len(rider) <= FIRST_BYTES - HEADER_BYTES
        mine = call.pack().ljust(HEADER_BYTES, b"\0") + (rider if rides else b"")
        gathered = self._group.all_gather_first(VERB, mine, call.verb)
        agreement = agree(gathered, self._group.names)
        return agreement, [each[HEADER_BYTES:][: len(rider)] for each in gathered] if rides else None

    def plan(self, call: Call, topk_idx: torch.Tensor, weights: torch.Tensor | None) -> Plan:
        ids = torch.empty(call.num_tokens, self._config.top_k, dtype=torch.int32)
        counts = torch.zeros(self._config.num_experts, dtype=torch.int32)
        self._planner.load_ids_or_note(call, topk_idx, address(ids), address(counts))
        own_counts = counts.numpy().tobytes()
        agreement, gathered = self._agree_with(call, own_counts)
        if gathered is None:
            gathered = self._group.all_gather(own_counts, call.verb)
        counts_RE = torch.frombuffer(bytearray().join(gathered), dtype=torch.int32).view(len(gathered), -1)
        num_tokens_of_rank = agreement.num_tokens_of_rank
        kept = self._planner.kept(
            counts_RE, num_tokens_of_rank, lambda: self._all_routes(call, ids, weights, num_tokens_of_rank)
        )
        num_dropped = 0
        if kept is not None:
            ids, counts_RE, num_dropped = kept.ids[self._rank], kept.counts_RE, kept.num_dropped
        counts_of_rank = [address(counts_E) for counts_E in counts_RE.unbind()]
        words, outgoing, routes_RR = self._planner.words_to_send(address(ids), counts_of_rank, num_tokens_of_rank)
        sent, received = routes_RR[self._rank].tolist(), routes_RR[:, self._rank].tolist()
        words_in = torch.full((sum(received),), -1, dtype=torch.int32)  # what does not come stays -1
        self._group.all_to_all(words_in, words, received, sent, call.verb)
        plan = self._planner.plan_from_words(words_in, received, num_tokens_of_rank, outgoing, num_dropped)
        if plan is None:
            name = self._group.names[self._rank]
            raise TransportError(f"{call.verb}: {name} received other routes than were counted")
        return plan

    def _all_routes(
        self, call: Call, ids: torch.Tensor, weights: torch.Tensor | None, num_tokens_of_rank: tuple[int, ...]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Ids and weights of every rank; only needed to drop, and that depends on all of them."""
        own = ids if weights is None else torch.stack([ids, weights.view(torch.int32)])
        longest = max(num_tokens_of_rank) * self._config.top_k * (1 if weights is None else 2) * ids.element_size()
        gathered = self._group.all_gather(own.numpy().tobytes().ljust(longest, b"\0"), call.verb)
        all_ids: list[torch.Tensor] = []
        all_weights: list[torch.Tensor | None] = []
        for data, num_tokens in zip(gathered, num_tokens_of_rank, strict=True):
            routes = num_tokens * self._config.top_k
            words = torch.frombuffer(bytearray(data), dtype=torch.int32)
            all_ids.append(words[:routes].clone())
            all_weights.append(None if weights is None else words[routes : 2 * routes].view(torch.float32))
        return all_ids, all_weights

    def spread(self, call: Call, plan: Plan, x: torch.Tensor, route_weights: torch.Tensor) -> Spread:
        agreement = self.agree(call)
        inbound = self._send_rows(call, plan, x, route_weights)
        rows, weights = self._rows.empty_rows(plan), torch.zeros(plan.num_rows)
        _, _, _, route, row = plan.inbox.addresses
        for rank, (begin, end) in enumerate(inbound.crossings):
            own = rank == self._rank
            self._rows.expand(rows, address(x) if own else inbound.pieces(rank), plan, begin, end, 0)
            at, after = inbound.routes[rank]
            scalars = address(route_weights) if own else inbound.scalars(rank)
            _C.move_floats(address(weights), row + 4 * at, 0, scalars, route + 4 * at, 0, after - at)
        return Spread(rows, weights, agreement)

    def spread_scaled(
        self, call: Call, plan: Plan, x: torch.Tensor, row_weights: torch.Tensor | None, other: torch.Tensor | None
    ) -> Spread:
        agreement = self.agree(call)
        inbound = self._send_rows(call, plan, x, None)
        rows = self._rows.empty_rows(plan)
        dots = None if other is None else torch.zeros(plan.num_rows)
        for rank, (begin, end) in enumerate(inbound.crossings):
            src = address(x) if rank == self._rank else inbound.pieces(rank)
            self._rows.expand_scaled(rows, src, plan, begin, end, 0, row_weights, other, dots)
        return Spread(rows, dots, agreement)

    def _send_rows(self, call: Call, plan: Plan, x: torch.Tensor, route_weights: torch.Tensor | None) -> _Mail:
        """Rows, and weights where there are any, along the plan. Returns what came."""
        out = _Mail(self._rows, plan.outbox, self._config.row_bytes)
        _, _, _, route, _ = plan.outbox.addresses
        for rank in self._others:
            begin, end = out.crossings[rank]
            self._rows.pack(out.pieces(rank), x, plan, begin, end)
            if route_weights is not None:
                at, after = out.routes[rank]
                _C.move_floats(out.scalars(rank), 0, 0, address(route_weights), route + 4 * at, 0, after - at)
        return self._exchange(call, out, _Mail(self._rows, plan.inbox, self._config.row_bytes))

    def _exchange(self, call: Call, out: _Mail, inbound: _Mail) -> _Mail:
        self._messages += 1  # in step on all ranks: every exchange follows an agreement
        for rank in self._others:
            out.check_word(rank).fill_(self._messages)
            inbound.check_word(rank).fill_(-1)
        self._group.all_to_all(inbound.data, out.data, inbound.sizes, out.sizes, call.verb)
        for rank in self._others:
            if inbound.check_word(rank).item() != self._messages:
                raise TransportError(f"{call.verb}: the message from {self._group.names[rank]} is not what was planned")
        return inbound

    def collect(
        self,
        call: Call,
        plan: Plan,
        rows: torch.Tensor,
        row_weights: torch.Tensor | None,
        row_scalars: torch.Tensor | None,
    ) -> Collected:
        agreement = self.agree(call)
        out = _Mail(self._rows, plan.inbox, self._config.sum_bytes)
        _, _, _, _, row = plan.inbox.addresses
        for rank in self._others:
            begin, end = out.crossings[rank]
            self._rows.sum_crossings(out.pieces(rank), rows, row_weights, plan, begin, end)
            if row_scalars is not None:
                at, after = out.routes[rank]
                _C.move_floats(out.scalars(rank), 0, 0, address(row_scalars), row + 4 * at, 0, after - at)
        inbound = self._exchange(call, out, _Mail(self._rows, plan.outbox, self._config.sum_bytes))

        sums = self.memory.empty((plan.num_tokens, self._config.hidden), self._config.dtype)
        pieces = [inbound.pieces(rank) for rank in self._ranks]
        first_crossings = [begin for begin, _ in inbound.crossings]
        self._rows.finish(sums, rows, row_weights, plan, (0, plan.num_tokens), pieces, first_crossings)
        scalars = None
        if row_scalars is not None:
            scalars = torch.zeros(plan.num_tokens, self._config.top_k)
            _, _, _, route, own_row = plan.outbox.addresses
            for rank, (at, after) in enumerate(inbound.routes):
                own = rank == self._rank
                src = address(row_scalars) if own else inbound.scalars(rank)
                index = own_row + 4 * at if own else 0
                _C.move_floats(address(scalars), route + 4 * at, 0, src, index, 0, after - at)
        return Collected(sums, scalars, agreement)

    def exchange(self, call: Call, parcels: Sequence[Parcel]) -> Agreement:
        agreement = self.agree(call)
        self._messages += 1
        check = torch.tensor([self._messages]).view(torch.uint8)
        out: list[list[torch.Tensor]] = [[] for _ in self._ranks]  # pieces to every rank, and a check word
        sizes = [0 if rank == self._rank else len(check) for rank in self._ranks]  # from every rank
        for parcel in parcels:
            if parcel.source == self._rank:
                for rank in parcel.destinations:
                    out[rank] += [piece.view(-1).view(torch.uint8) for piece in parcel.pieces]
            elif self._rank in parcel.destinations:
                sizes[parcel.source] += parcel.num_bytes
        for rank in self._others:
            out[rank].append(check)
        sent = torch.cat([piece for pieces in out for piece in pieces])
        received = torch.full((sum(sizes),), 255, dtype=torch.uint8)  # what does not come stays
        self._group.all_to_all(received, sent, sizes, [sum(map(len, pieces)) for pieces in out], call.verb)

        inbound = list(torch.split(received, sizes))
        for parcel in parcels:
            if self._rank in parcel.destinations:
                for piece in parcel.pieces:
                    flat = piece.view(-1).view(torch.uint8)
                    flat.copy_(inbound[parcel.source][: len(flat)])
                    inbound[parcel.source] = inbound[parcel.source][len(flat) :]
        for rank in self._others:
            if not torch.equal(inbound[rank], check):
                raise TransportError(f"{call.verb}: the message from {self._group.names[rank]} is not what was planned")
        return agreement

    def close(self) -> None:
        self.memory.close()
