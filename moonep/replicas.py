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
    """What one rank sends and gets. Tensors are [L, ...], a block per expert at home, and [G, ...], one per group."""

    def __init__(self, plan: Plan, rank: int, num_experts: int):
        num_ranks, slots = plan.replicas.shape
        self._rank = rank
        self._num_home = plan.num_groups - slots
        self._first = first_expert(rank, num_experts, num_ranks)
        found: dict[int, list[tuple[int, int]]] = {}
        for on_rank, slot in (plan.replicas >= 0).nonzero().tolist():
            found.setdefault(int(plan.replicas[on_rank, slot]), []).append((on_rank, slot))
        self._copied = [
            _Copied(expert, home_rank(expert, num_experts, num_ranks), found[expert]) for expert in sorted(found)
        ]

    def with_slots(self, tensors: Sequence[torch.Tensor], slots: int) -> list[torch.Tensor]:
        """Copies [G, ...] of [L, ...]; what their slots hold is yet to come."""
        copies = []
        for tensor in tensors:
            copy = tensor.new_empty(self._num_home + slots, *tensor.shape[1:])
            copy[: self._num_home].copy_(tensor)
            copies.append(copy)
        return copies

    def to_slots(self, tensors: Sequence[torch.Tensor]) -> list[Parcel]:
        """Blocks of home experts in [G, ...], to the slots in [G, ...]."""
        num_bytes = _block_bytes(tensors)
        parcels = []
        for expert, home, slots in self._copied:
            blocks: list[torch.Tensor] = []
            if self._rank == home:
                blocks = [tensor[expert - self._first] for tensor in tensors]
            for rank, slot in slots:
                if self._rank == rank:
                    blocks = [tensor[self._num_home + slot] for tensor in tensors]
            parcels.append(Parcel(home, tuple(rank for rank, _ in slots), num_bytes, blocks))
        return parcels

    def gradients_home(self, grads: Sequence[torch.Tensor]) -> list[Parcel]:
        """Blocks of slots in [G, ...], to new memory at home."""
        num_bytes = _block_bytes(grads)
        parcels = []
        for _, home, slots in self._copied:
            for rank, slot in slots:
                blocks: list[torch.Tensor] = []
                if self._rank == rank:
                    blocks = [grad[self._num_home + slot] for grad in grads]
                if self._rank == home:
                    blocks = [grad.new_empty(grad.shape[1:]) for grad in grads]
                parcels.append(Parcel(rank, (home,), num_bytes, blocks))
        return parcels

    def sum_gradients(self, grads: Sequence[torch.Tensor], parcels: Sequence[Parcel]) -> list[torch.Tensor]:
        """[L, ...] of [G, ...] and what came: in float32 the home's, then those by rank, rounded once."""
        came: dict[int, list[Sequence[torch.Tensor]]] = {}
        rest = iter(parcels)
        for expert, home, slots in self._copied:
            blocks = [next(rest).pieces for _ in slots]
            if self._rank == home:
                came[expert - self._first] = blocks
        sums = []
        for i, grad in enumerate(grads):
            home_grad = grad[: self._num_home]
            total = home_grad.clone() if came else home_grad
            for place, blocks in came.items():
                wide = torch.promote_types(grad.dtype, torch.float32)
                block = home_grad[place].to(wide, copy=True)
                for each in blocks:
                    block += each[i].to(wide)
                total[place] = block
            sums.append(total)
        return sums


def _block_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.shape[1:].numel() * tensor.itemsize for tensor in tensors)
