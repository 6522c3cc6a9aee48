"""Tensors in recycled memory: fresh pages cost as much as the exchange that fills them."""

from __future__ import annotations

import torch

from moonep import _C

__all__ = ["Memory"]

_SMALL_BYTES = 1 << 16  # torch's own allocator is quick for these


class Memory:
    """Hands out CPU tensors; their memory comes back when the last tensor that shares it is gone."""

    def __init__(self) -> None:
        self._pool = _C.Pool()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised, contiguous."""
        count = 1
        for size in shape:
            count *= size
        if count * dtype.itemsize < _SMALL_BYTES:
            return torch.empty(shape, dtype=dtype)
        block = self._pool.take(count * dtype.itemsize)
        return torch.frombuffer(block, dtype=dtype, count=count).view(shape)

    def close(self) -> None:
        """Gives idle memory back to the system; what is still in use follows as it is dropped."""
        self._pool.close()
