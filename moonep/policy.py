"""Policies: where rows may go."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["OVERFLOWS", "Capacity", "Home", "Policy"]

OVERFLOWS = ("drop", "error")


@dataclass(frozen=True)
class Home:
    """Each row goes to its expert's home rank. Nothing is dropped; the rows received depend on the routing."""


@dataclass(frozen=True)
class Capacity:
    """Each row goes to its expert's home rank, where every expert has room for the same number of rows, used or not.

    So shapes depend on the numbers of tokens alone. The room is `factor` times an even share (see `rows_per_expert`).
    What is over is dropped, or raises. Of an expert's routes, those of the lowest weight in all ranks together are
    dropped (among equals, and without weights, the latest by rank, token and k); the other weights of the token stay
    as they are.

    Args:
        factor: of the even share, more than 0; 1.0 drops whatever is above the mean.
        overflow: "drop", or "error": CapacityExceededError on every rank, before anything moves.
    """

    factor: float
    overflow: str = "drop"

    def rows_per_expert(self, num_tokens: int, top_k: int, num_experts: int, expert_alignment: int) -> int:
        """C = align_up(ceil(factor * num_tokens * top_k / num_experts)), num_tokens of all ranks, -1 routes included.

        `factor` is taken as the decimal number that it prints as, so that 1.1 is eleven tenths.
        """
        rows = math.ceil(Fraction(str(self.factor)) * num_tokens * top_k / num_experts)
        return -(-rows // expert_alignment) * expert_alignment


Policy = Home | Capacity
