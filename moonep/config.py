"""Frozen settings of a Buffer; sizes.py has every size in bytes that follows from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moonep.policy import Policy
from moonep.sizes import Sizes

__all__ = ["DTYPES", "BufferConfig"]

# The payload dtypes, by the number that the native module knows them by.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class BufferConfig(Sizes):
    """What all ranks must agree on; checked when a Buffer is made."""

    num_experts: int  # E
    top_k: int  # K
    hidden: int  # H
    max_tokens: int  # S
    dtype: torch.dtype
    policy: Policy
    transport: str
    expert_alignment: int
    combine_wire: str
    timeout_secs: float

    @property
    def element_bytes(self) -> int:
        """One element of a row."""
        return self.dtype.itemsize
