"""Ranks of one machine over memory that all of them map. How they meet there is told in `csrc/cpu/shared.h`.

Tokens pass in chunks through each rank's staging, which peers read in place: a row is written once by its source and
once, at its final place, by every rank it goes to. Every phase is: write own staging, meet, read the others'.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from moonep import _C
from moonep.config import BufferConfig
from moonep.errors import BufferClosedError, MoonEPError, PeerLostError, PeerTimeoutError, TransportError
from moonep.plan import Crossings, Plan
from moonep.sizes import ALIGN_BYTES, align
from moonep.transport.base import VERBS, Agreement, Call, Collected, Parcel, Spread, Transport, agree
from moonep.transport.group import Group
from moonep.transport.lending import Lender
from moonep.transport.planner import Planner
from moonep.transport.rows import Chunk, Rows, address, crossing_chunks

__all__ = ["ShmTransport", "connect_shm"]

_DONE, _TIMED_OUT, _LOST, _CLOSED, _ERROR = range(5)
_KINDS: tuple[type[TransportError], ...] = (PeerLostError, PeerTimeoutError, TransportError)
_LOST_KIND, _TIMEOUT_KIND, _CLOSED_KIND = 1, 2, 3


def connect_shm(config: BufferConfig, group: Group, staging_bytes: int) -> tuple[ShmTransport | None, str]:
    """The transport, or None and why ranks cannot share memory; the same on every rank. Collective."""
    shared, refused = _share(group, staging_bytes)
    return None if shared is None else ShmTransport(config, group, shared, staging_bytes), refused


def _share(group: Group, half_bytes: int) -> tuple[_C.SharedGroup | None, str]:
    """Two halves of memory of every rank, mapped by all; or why that cannot be."""
    shared, refused = None, ""
    try:
        if sys.platform != "linux":
            raise RuntimeError("the shm transport needs Linux")
        if group.ranks_here < group.num_ranks:
            raise RuntimeError("ranks are on several hosts")
        if group.device.type != "cpu":
            raise RuntimeError("the group carries no CPU tensors")
        shared = _C.SharedGroup(group.rank, group.num_ranks, half_bytes)
    except RuntimeError as error:
        refused = str(error)
    mine: dict[str, Any] = {"refused": refused}
    if shared is not None:
        mine |= {"fd": shared.segment_fd, "nonce": shared.nonce.hex()}
    records = group.gather_records(mine, "making a Buffer")
    if not any(record["refused"] for record in records):
        assert shared is not None
        for peer, record in enumerate(records):
            if peer != group.rank and not refused:
                failure = shared.connect(peer, group.pids[peer], int(record["fd"]), bytes.fromhex(record["nonce"]))
                refused = failure and f"cannot share memory with {group.names[peer]}: {failure}"
    outcomes = group.gather_records({"refused": refused}, "making a Buffer")
    for rank, outcome in enumerate(outcomes):
        if outcome["refused"]:
            if shared is not None:
                shared.close()
            return None, f"{group.names[rank]}: {outcome['refused']}"
    assert shared is not None
    shared.release_fd()
    return shared, ""


class _Arena:
    """Rows of every rank, and their weights behind them, in memory that all map."""

    def __init__(self, shared: _C.SharedGroup, most_rows: int, row_bytes: int, rank: int):
        self.most_rows, self._shared = most_rows, shared
        self._weights_at = align(most_rows * row_bytes)
        self.rows = Lender(self.address(rank), self._weights_at, shared)

    def address(self, rank: int) -> int:
        """Of its rows. (Both halves are one piece.)"""
        return self._shared.staging(rank, 0)

    def weights(self, rank: int) -> int:
        """Address of the weights of its rows."""
        return self.address(rank) + self._weights_at


class ShmTransport(Transport):
    """The `shm` transport."""

    name = "shm"

    def __init__(self, config: BufferConfig, group: Group, shared: _C.SharedGroup, staging_bytes: int):
        self._config, self._group, self._shared, self._staging_bytes = config, group, shared, staging_bytes
        self._rank, self._ranks = group.rank, range(group.num_ranks)
        self._others = [rank for rank in self._ranks if rank != group.rank]
        self._planner = Planner(config, group.rank, group.host_of_rank)
        self._rows = Rows(config, group.rank, group.host_of_rank)
        self.memory = self._rows.memory
        self._arenas: list[_Arena] = []  # the last is in use; older ones are kept, to know what is stale
        # Staging on the way out: rows of a chunk of tokens, then their weights.
        self._spread_tokens = (staging_bytes - ALIGN_BYTES) // (config.row_bytes + config.token_scalars_bytes)
        self._weights_at = align(self._spread_tokens * config.row_bytes)
        # On the way home: per rank, the sums of a chunk of its tokens, then their scalars.
        one_token = config.sum_bytes + config.token_scalars_bytes
        self._collect_tokens = (staging_bytes // group.num_ranks - 2 * ALIGN_BYTES) // one_token
        self._scalars_at = align(self._collect_tokens * config.sum_bytes)
        self._slot_bytes = align(self._scalars_at + self._collect_tokens * config.token_scalars_bytes)

    # ---- meeting ----

    def _staging(self, rank: int) -> int:
        """Before a meeting: where to write. (The phase is the one about to be announced.)"""
        return self._shared.staging(rank, self._shared.phase)

    def _staged(self, rank: int) -> int:
        """After a meeting: where to read what `rank` wrote."""
        return self._shared.staging(rank, self._shared.phase - 1)

    def agree(self, call: Call) -> Agreement:
        self._shared.write_header(self._rank, call.pack())
        self._meet(call)
        return agree([self._shared.read_header(rank) for rank in self._ranks], self._group.names)

    def _meet(self, call: Call) -> None:
        self._shared.announce()
        kind, peer, error = self._shared.wait(self._group.timeout_secs)
        if kind == _DONE:
            return
        if kind == _CLOSED and peer == self._rank:
            raise BufferClosedError(f"{call.verb}: close() was called while this rank waited")
        if kind != _ERROR:
            # The first error that any rank records is what all of them raise.
            code = {_TIMED_OUT: _TIMEOUT_KIND, _LOST: _LOST_KIND, _CLOSED: _CLOSED_KIND}[kind]
            error = self._shared.record_error(code | VERBS.index(call.verb) << 8 | peer << 16)  # the phase is added
        raise self._error(error)

    def _error(self, error: int) -> MoonEPError:
        kind, verb, peer = error & 0xFF, VERBS[error >> 8 & 0xFF], error >> 16 & 0xFFFF
        who = self._group.describe([peer])
        what = {
            _LOST_KIND: f"{who} ended",
            _TIMEOUT_KIND: f"no answer from {who} within {self._group.timeout_secs:g} s",
            _CLOSED_KIND: f"{who} closed its Buffer",
        }[kind]
        return _KINDS[kind - 1](f"{verb}: {what}")

    def _chunks(self, plan: Plan, box: Crossings, tokens: int) -> tuple[range, list[list[Chunk]]]:
        """The first tokens of the chunks, the same on every rank, one chunk even when nobody has tokens; and the box's
        crossings in each, by peer and chunk."""
        first_tokens = range(0, max(1, *plan.num_tokens_of_rank), tokens)
        return first_tokens, crossing_chunks(box, [*first_tokens, first_tokens[-1] + tokens])

    # ---- verbs ----

    def plan(self, call: Call, topk_idx: torch.Tensor, weights: torch.Tensor | None) -> Plan:
        # Staging: counts, ids, and weights where they are given.
        ids_at = self._config.counts_bytes
        weights_at = ids_at + self._config.ids_bytes
        staging = self._staging(self._rank)
        self._planner.load_ids_or_note(call, topk_idx, staging + ids_at, staging)
        if weights is not None:
            _C.copy(staging + weights_at, address(weights), weights.nbytes, 1)
        num_tokens_of_rank = self.agree(call).num_tokens_of_rank
        staged = [self._staged(rank) for rank in self._ranks]

        def read() -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
            routes = [num_tokens * self._config.top_k for num_tokens in num_tokens_of_rank]
            ids = [_copy_of(at + ids_at, count, torch.int32) for at, count in zip(staged, routes, strict=True)]
            if weights is None:
                return ids, [None] * len(routes)
            return ids, [
                _copy_of(at + weights_at, count, torch.float32) for at, count in zip(staged, routes, strict=True)
            ]

        if self._planner.group_rows(num_tokens_of_rank) >= 0:
            counts_RE = torch.stack([_copy_of(at, self._config.num_experts, torch.int32) for at in staged])
            kept = self._planner.kept(counts_RE, num_tokens_of_rank, read)
            if kept is not None:
                return self._planner.plan_from_ids(*kept.addresses, num_tokens_of_rank, kept.num_dropped)
        return self._planner.plan_from_ids([at + ids_at for at in staged], staged, num_tokens_of_rank)

    def spread(self, call: Call, plan: Plan, x: torch.Tensor, route_weights: torch.Tensor) -> Spread:
        weights = torch.zeros(plan.num_rows)
        _, _, _, route, row = plan.inbox.addresses

        def take(rows: torch.Tensor, src: int, src_weights: int, chunk: Chunk, first_token: int) -> None:
            self._rows.expand(rows, src, plan, chunk.begin, chunk.end, first_token)
            first_route, at, count = first_token * self._config.top_k, 4 * chunk.first_route, chunk.num_routes
            _C.move_floats(address(weights), row + at, 0, src_weights, route + at, first_route, count)

        rows, agreement = self._spread(call, plan, x, route_weights, take)
        return Spread(rows, weights, agreement)

    def spread_scaled(
        self, call: Call, plan: Plan, x: torch.Tensor, row_weights: torch.Tensor | None, other: torch.Tensor | None
    ) -> Spread:
        dots = None if other is None else torch.zeros(plan.num_rows)

        def take(rows: torch.Tensor, src: int, _: int, chunk: Chunk, first_token: int) -> None:
            self._rows.expand_scaled(rows, src, plan, chunk.begin, chunk.end, first_token, row_weights, other, dots)

        rows, agreement = self._spread(call, plan, x, None, take)
        return Spread(rows, dots, agreement)

    def _spread(
        self, call: Call, plan: Plan, x: torch.Tensor, route_weights: torch.Tensor | None, take: Any
    ) -> tuple[torch.Tensor, Agreement]:
        """Stages `x` chunk by chunk; `take` brings the crossings of each source's chunk to their rows."""
        agreement = rows = None
        threads = torch.get_num_threads()
        first_tokens, chunks_in = self._chunks(plan, plan.inbox, self._spread_tokens)
        for i, first_token in enumerate(first_tokens):
            mine = max(0, min(plan.num_tokens - first_token, self._spread_tokens))
            own_x = address(x) + first_token * self._config.row_bytes
            own_weights = address(route_weights) + first_token * self._config.token_scalars_bytes
            if mine:
                staging = self._staging(self._rank)
                _C.copy(staging, own_x, mine * self._config.row_bytes, threads)
                if route_weights is not None:
                    scalars_bytes = mine * self._config.token_scalars_bytes
                    _C.copy(staging + self._weights_at, own_weights, scalars_bytes, threads)
            if agreement is None or rows is None:
                agreement = self.agree(call)
                rows = self._lent_rows(plan) if call.zero_copy else self._rows.empty_rows(plan)
            else:
                self._meet(call)
            for step in self._ranks:
                source = (self._rank + step) % len(self._ranks)
                staged = self._staged(source)
                src, weights = (own_x, own_weights) if source == self._rank else (staged, staged + self._weights_at)
                take(rows, src, weights, chunks_in[source][i], first_token)
        assert agreement is not None
        assert rows is not None
        return rows, agreement

    def collect(
        self,
        call: Call,
        plan: Plan,
        rows: torch.Tensor,
        row_weights: torch.Tensor | None,
        row_scalars: torch.Tensor | None,
    ) -> Collected:
        sums = self.memory.empty((plan.num_tokens, self._config.hidden), self._config.dtype)
        agreement = self._agree_where_rows_are(call, rows, row_weights) if call.zero_copy else None
        if agreement is not None and agreement.lent:
            arena = self._arenas[-1]
            rows_of_rank, weights_of_rank = zip(
                *((arena.address(r), arena.weights(r)) for r in self._ranks), strict=True
            )
            self._rows.finish_from_rows(sums, plan, rows_of_rank, weights_of_rank)
            self._meet(call)  # from here on rows may be changed
            return Collected(sums, None, agreement)
        scalars = None if row_scalars is None else torch.zeros(plan.num_tokens, self._config.top_k)
        first_tokens, chunks_in = self._chunks(plan, plan.inbox, self._collect_tokens)
        _, chunks_out = self._chunks(plan, plan.outbox, self._collect_tokens)
        _, _, _, route_in, row_in = plan.inbox.addresses
        _, _, _, route_out, row_out = plan.outbox.addresses
        for i, first_token in enumerate(first_tokens):
            first_route = first_token * self._config.top_k
            for source in self._others:
                slot = self._staging(self._rank) + source * self._slot_bytes
                chunk = chunks_in[source][i]
                self._rows.sum_crossings(slot, rows, row_weights, plan, chunk.begin, chunk.end)
                if row_scalars is not None:
                    to, at, count = slot + self._scalars_at, 4 * chunk.first_route, chunk.num_routes
                    _C.move_floats(to, route_in + at, first_route, address(row_scalars), row_in + at, 0, count)
            if agreement is None:
                agreement = self.agree(call)
            else:
                self._meet(call)
            slots = [self._staged(rank) + self._rank * self._slot_bytes for rank in self._ranks]
            mine = (min(first_token, plan.num_tokens), min(first_token + self._collect_tokens, plan.num_tokens))
            first_crossings = [chunks_out[rank][i].begin for rank in self._ranks]
            self._rows.finish(sums, rows, row_weights, plan, mine, slots, first_crossings)
            if scalars is not None:
                for rank in self._ranks:
                    at, count = 4 * chunks_out[rank][i].first_route, chunks_out[rank][i].num_routes
                    if rank == self._rank:
                        src, index, base = address(row_scalars), row_out, 0
                    else:
                        src, index, base = slots[rank] + self._scalars_at, route_out, first_route
                    _C.move_floats(address(scalars), route_out + at, 0, src, index + at, base, count)
        assert agreement is not None
        return Collected(sums, scalars, agreement)

    # ---- rows in memory that all map ----

    def _lent_rows(self, plan: Plan) -> torch.Tensor:
        """[N, H] like `Rows.empty_rows`, where all ranks can read them, if so much memory can be had; collective."""
        if not self._arenas or self._arenas[-1].most_rows < plan.most_rows:
            most_rows = plan.most_rows + plan.most_rows // 4
            row_bytes = self._config.row_bytes
            half_bytes = align(align(most_rows * row_bytes) + most_rows * 4) // 2
            shared, _ = _share(self._group, align(half_bytes))
            if shared is None:  # as all ranks see
                return self._rows.empty_rows(plan)
            if self._arenas:
                self._arenas[-1].rows.recall()
            self._arenas.append(_Arena(shared, most_rows, row_bytes, self._rank))
        rows = self._arenas[-1].rows.lend((plan.num_rows, self._config.hidden), self._config.dtype)
        self._rows.zero_padding(rows, plan)
        return rows

    def _agree_where_rows_are(self, call: Call, rows: torch.Tensor, row_weights: torch.Tensor | None) -> Agreement:
        """Whether all ranks' rows can be read where they are, with their weights."""
        call.lent = bool(self._arenas) and self._arenas[-1].rows.holds(rows)
        if call.lent:
            weights = torch.ones(len(rows)) if row_weights is None else row_weights
            _C.copy(self._arenas[-1].weights(self._rank), address(weights), weights.nbytes, 1)
        return self.agree(call)

    def is_stale(self, tensor: torch.Tensor) -> bool:
        return any(arena.rows.is_stale(tensor) for arena in self._arenas)

    def exchange(self, call: Call, parcels: Sequence[Parcel]) -> Agreement:
        # Every rank's outgoing pieces, one behind the other, pass through its staging a window at a time.
        agreement = None
        filled = [0] * len(self._ranks)  # by source
        outgoing: list[_Stretch] = []
        incoming: list[_Stretch] = []
        for parcel in parcels:
            if self._rank == parcel.source:
                outgoing += _stretches(parcel, filled[parcel.source])
            elif self._rank in parcel.destinations:
                incoming += _stretches(parcel, filled[parcel.source])
            filled[parcel.source] += align(parcel.num_bytes)
        threads = torch.get_num_threads()
        for window in range(0, max(1, *filled), self._staging_bytes):
            staging = self._staging(self._rank)
            for _, at, num_bytes, into in _within(outgoing, window, self._staging_bytes):
                _C.copy(staging + into, at, num_bytes, threads)
            if agreement is None:
                agreement = self.agree(call)
            else:
                self._meet(call)
            for source, at, num_bytes, out_of in _within(incoming, window, self._staging_bytes):
                _C.stream_copy(at, self._staged(source) + out_of, num_bytes, threads)
        assert agreement is not None
        return agreement

    def cancel(self) -> None:
        self._shared.cancel()

    def close(self) -> None:
        self._shared.close()
        self._arenas.clear()
        self.memory.close()


class _Stretch(NamedTuple):
    """Memory of this rank, and where it stands in what `source` sends."""

    source: int
    begin: int
    address: int
    num_bytes: int


def _stretches(parcel: Parcel, begin: int) -> Iterator[_Stretch]:
    for piece in parcel.pieces:
        yield _Stretch(parcel.source, begin, address(piece), piece.nbytes)
        begin += piece.nbytes


def _within(stretches: Sequence[_Stretch], window: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """The parts in [window, window + size): source, address, bytes, and where they stand in the window."""
    for source, begin, at, num_bytes in stretches:
        first, end = max(begin, window), min(begin + num_bytes, window + size)
        if first < end:
            yield source, at + first - begin, end - first, first - window


def _copy_of(source: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor [count] of what lies at `source`."""
    tensor = torch.empty(count, dtype=dtype)
    _C.copy(address(tensor), source, tensor.nbytes, 1)
    return tensor
