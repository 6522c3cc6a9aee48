"""Transport memory that a verb hands out with `zero_copy`, until the next such verb overwrites it.

What was handed out before is told by its storage: same memory, another storage. Its version is counted up, so that
autograd refuses a backward that saved it.
"""

from __future__ import annotations

import ctypes

import torch

__all__ = ["Lender"]


class Lender:
    """One piece of memory, of which at most one tensor is valid at a time."""

    def __init__(self, address: int, num_bytes: int, owner: object):
        self.address, self.num_bytes = address, num_bytes
        self._owner = owner
        self._lent = torch.empty(0)  # an alias of what is valid: same storage, same version

    def lend(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of the memory as it is; the one before is stale from now on."""
        self.recall()
        count = 1
        for size in shape:
            count *= size
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(self.address)
        memory.owner = self._owner  # type: ignore[attr-defined]
        tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
        self._lent = tensor.detach()
        return tensor

    def recall(self) -> None:
        """What was lent is stale."""
        if not self._lent.is_inference():
            torch.autograd.graph.increment_version(self._lent)
        self._lent = torch.empty(0)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` begins with the memory and is valid; one without elements is anywhere."""
        return tensor.numel() == 0 or (tensor.data_ptr() == self.address and self._is_lent(tensor))

    def is_stale(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is of this memory, and was overwritten."""
        return self.address <= tensor.data_ptr() < self.address + self.num_bytes and not self._is_lent(tensor)

    def _is_lent(self, tensor: torch.Tensor) -> bool:
        same: bool = tensor.untyped_storage()._cdata == self._lent.untyped_storage()._cdata
        return same
