"""The weights of a plan's replicas: which blocks go where, and how their gradients come home."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from moonep.plan import Plan, first_expert, home_rank
from moonep.transport.base import Parcel

__all__ = ["Replicas", "digest"]


def digest(tensors: Sequence[torch.Tensor], differentiable: Sequence[bool]) -> int:
    """32 bits of what must be the same on all ranks: all but L."""
    shapes = [(tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors]
    return zlib.crc32(repr((shapes, list(differentiable))).encode())


class _Copied(NamedTuple):
    """An expert that has replicas."""

    expert: int
    home: int
    slots: list[tuple[int, int]]  # rank and slot there, ranks ascending


class Replicas:
    """What one rank sends and gets: a block per expert at home, [L, ...], and one per slot in use, [U, ...]."""

    def __init__(self, plan: Plan, rank: int, num_experts: int):
        num_ranks, _ = plan.replicas.shape
        self._rank = rank
        self._first = first_expert(rank, num_experts, num_ranks)
        self.num_used = int((plan.replicas[rank] >= 0).sum())
        found: dict[int, list[tuple[int, int]]] = {}
        for on_rank, slot in (plan.replicas >= 0).nonzero().tolist():
            found.setdefault(int(plan.replicas[on_rank, slot]), []).append((on_rank, slot))
        self._copied = [
            _Copied(expert, home_rank(expert, num_experts, num_ranks), found[expert]) for expert in sorted(found)
        ]

    def to_slots(self, homes: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> list[Parcel]:
        """Blocks of home experts, to the slots."""
        num_bytes = _block_bytes(homes)
        parcels = []
        for expert, home, places in self._copied:
            blocks: list[torch.Tensor] = []
            if self._rank == home:
                blocks = [tensor[expert - self._first].contiguous() for tensor in homes]
            for rank, slot in places:
                if self._rank == rank:
                    blocks = [tensor[slot] for tensor in slots]
            parcels.append(Parcel(home, tuple(rank for rank, _ in places), num_bytes, blocks))
        return parcels

    def gradients_home(self, slot_grads: Sequence[torch.Tensor]) -> list[Parcel]:
        """Blocks of slots, to new memory at home."""
        num_bytes = _block_bytes(slot_grads)
        parcels = []
        for _, home, places in self._copied:
            for rank, slot in places:
                blocks: list[torch.Tensor] = []
                if self._rank == rank:
                    blocks = [grad[slot].contiguous() for grad in slot_grads]
                if self._rank == home:
                    blocks = [grad.new_empty(grad.shape[1:]) for grad in slot_grads]
                parcels.append(Parcel(rank, (home,), num_bytes, blocks))
        return parcels

    def sum_gradients(self, home_grads: Sequence[torch.Tensor], parcels: Sequence[Parcel]) -> list[torch.Tensor]:
        """[L, ...]: in float32 the home's own, then those of the replicas by rank, rounded once."""
        came: dict[int, list[Sequence[torch.Tensor]]] = {}
        rest = iter(parcels)
        for expert, home, places in self._copied:
            blocks = [next(rest).pieces for _ in places]
            if self._rank == home:
                came[expert - self._first] = blocks
        sums = []
        for i, grad in enumerate(home_grads):
            total = grad.clone() if came else grad
            for place, blocks in came.items():
                wide = torch.promote_types(grad.dtype, torch.float32)
                block = grad[place].to(wide, copy=True)
                for each in blocks:
                    block += each[i].to(wide)
                total[place] = block
            sums.append(total)
        return sums


def _block_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.shape[1:].numel() * tensor.itemsize for tensor in tensors)
