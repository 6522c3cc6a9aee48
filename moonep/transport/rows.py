"""Moves of rows on this rank, on tensors: the edge to the native row functions (`csrc/cpu/rows.h`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from moonep import _C
from moonep.config import DTYPES, BufferConfig
from moonep.plan import Crossings, Plan
from moonep.transport.memory import Memory

__all__ = ["Chunk", "Rows", "address", "crossing_chunks", "host_order"]

_LAST_TOKEN = 2**31 - 1


def address(tensor: torch.Tensor | None) -> int:
    """Where a tensor's data is; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def host_order(host_of_rank: Sequence[int]) -> tuple[list[int], list[bool]]:
    """The order in which ranks are summed, and which of them opens another host's sum.

    Ranks ascend within a host; hosts go by their lowest rank.
    """
    lowest: dict[int, int] = {}
    for rank, host in enumerate(host_of_rank):
        lowest.setdefault(host, rank)
    order = sorted(range(len(host_of_rank)), key=lambda rank: (lowest[host_of_rank[rank]], rank))
    opens = [i > 0 and host_of_rank[rank] != host_of_rank[order[i - 1]] for i, rank in enumerate(order)]
    return order, opens


class Rows:
    """Row moves for one Buffer. Memory that crosses ranks comes as addresses, everything of this rank as tensors."""

    def __init__(self, config: BufferConfig, rank: int, host_of_rank: Sequence[int]):
        self.config, self.rank = config, rank
        self.memory = Memory()
        self._order, self._opens_host = host_order(host_of_rank)

    def empty_rows(self, plan: Plan) -> torch.Tensor:
        """[N, H] for the rows of `plan`: padding is zero, the rest is uninitialised."""
        rows = self.memory.empty((plan.num_rows, self.config.hidden), self.config.dtype)
        self.zero_padding(rows, plan)
        return rows

    def zero_padding(self, rows: torch.Tensor, plan: Plan) -> None:
        """Rows [N, H] that carry no token."""
        group_sizes, group_ends = plan.layout
        _C.zero_padding(
            address(rows),
            plan.num_rows,
            self.config.row_bytes,
            address(group_sizes),
            address(group_ends),
            plan.num_groups,
        )

    def expand(self, rows: torch.Tensor, src: int, plan: Plan, begin: int, end: int, first_token: int) -> None:
        """Inbox crossings [begin, end) from `src`, which begins with token `first_token`, to their places in `rows`."""
        _C.expand(
            address(rows),
            src,
            self.config.row_bytes,
            plan.inbox.addresses,
            begin,
            end,
            first_token,
            torch.get_num_threads(),
        )

    def expand_scaled(
        self,
        rows: torch.Tensor,
        src: int,
        plan: Plan,
        begin: int,
        end: int,
        first_token: int,
        row_weights: torch.Tensor | None,
        other: torch.Tensor | None,
        dots: torch.Tensor | None,
    ) -> None:
        """The same times `row_weights` [N]; dots[row] = <other[row], the row as it came>."""
        _C.expand_scaled(
            address(rows),
            src,
            self.config.hidden,
            DTYPES[self.config.dtype],
            address(row_weights),
            address(other),
            address(dots),
            plan.inbox.addresses,
            begin,
            end,
            first_token,
            torch.get_num_threads(),
        )

    def pack(self, dst: int, x: torch.Tensor, plan: Plan, begin: int, end: int) -> None:
        """The rows of outbox crossings [begin, end) of `x` [T, H], to `dst` one after the other."""
        _C.pack(dst, address(x), self.config.row_bytes, plan.outbox.addresses, begin, end, torch.get_num_threads())

    def sum_crossings(
        self, dst: int, rows: torch.Tensor, row_weights: torch.Tensor | None, plan: Plan, begin: int, end: int
    ) -> None:
        """The sums of inbox crossings [begin, end), to `dst` one after the other."""
        _C.sum_crossings(
            dst,
            address(rows),
            self.config.hidden,
            DTYPES[self.config.dtype],
            address(row_weights),
            plan.inbox.addresses,
            begin,
            end,
            self.config.payload_wire,
            torch.get_num_threads(),
        )

    def finish(
        self,
        sums: torch.Tensor,
        rows: torch.Tensor,
        row_weights: torch.Tensor | None,
        plan: Plan,
        tokens: tuple[int, int],
        sums_of_rank: Sequence[int],
        first_crossing_of_rank: Sequence[int],
    ) -> None:
        """sums[t] for tokens [t0, t1): other ranks' sums from memory, this rank's from its `rows`."""
        _C.finish(
            address(sums),
            self.config.hidden,
            DTYPES[self.config.dtype],
            self._order,
            self._opens_host,
            sums_of_rank,
            first_crossing_of_rank,
            self.config.payload_wire,
            self.rank,
            address(rows),
            address(row_weights),
            plan.outbox.addresses,
            plan.inbox.addresses,
            *tokens,
            torch.get_num_threads(),
        )

    def finish_from_rows(
        self, sums: torch.Tensor, plan: Plan, rows_of_rank: Sequence[int], weights_of_rank: Sequence[int]
    ) -> None:
        """sums[t] for all tokens, from every rank's rows and weights, read where they are."""
        _C.finish_from_rows(
            address(sums),
            self.config.hidden,
            DTYPES[self.config.dtype],
            self._order,
            self._opens_host,
            rows_of_rank,
            weights_of_rank,
            self.config.payload_wire,
            self.rank,
            plan.outbox.addresses,
            plan.inbox.addresses,
            plan.num_tokens,
            torch.get_num_threads(),
        )


class Chunk(NamedTuple):
    """The crossings [begin, end) of one peer whose tokens are in one chunk, and their routes."""

    begin: int
    end: int
    first_route: int
    num_routes: int


def crossing_chunks(box: Crossings, edges: Sequence[int]) -> list[list[Chunk]]:
    """Per peer, its crossings in chunks of tokens: chunk i holds tokens [edges[i], edges[i + 1]); all are in some."""
    token, start, first = box.token.numpy(), box.start.numpy(), box.first.tolist()
    if len(edges) == 2:  # all tokens in one chunk: small batches should not pay for cutting
        whole = zip(itertools.pairwise(first), itertools.pairwise(start[first].tolist()), strict=True)
        return [[Chunk(*crossings, at, after - at)] for crossings, (at, after) in whole]
    places = np.minimum(edges, _LAST_TOKEN).astype(np.int32)
    chunks = []
    for begin, end in itertools.pairwise(first):
        cuts = token[begin:end].searchsorted(places) + begin
        both = zip(itertools.pairwise(cuts.tolist()), itertools.pairwise(start[cuts].tolist()), strict=True)
        chunks.append([Chunk(*crossings, at, after - at) for crossings, (at, after) in both])
    return chunks
