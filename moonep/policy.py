"""Policies: where rows may go; and homes, where experts live."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["OVERFLOWS", "Balanced", "Capacity", "Home", "Policy", "first_expert", "home_rank"]

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


@dataclass(frozen=True)
class Balanced:
    """No rank computes more than (1 + slack) times an even share of the rows, whatever the router does.

    Experts of overloaded ranks get replicas on others for the step, which take part of their rows; `Buffer.replicate`
    brings the weights there. Nothing is dropped, and as few replicas are made as the rule finds: none, at no cost,
    while routing is within the slack. `balance_plain` in moonep/balance.py defines who gets what.

    Args:
        slack: by what share a rank's rows may exceed the even share, 0 or more. 0 makes all ranks equal and takes many
            more replicas; docs/planner.md shows what each step buys.
        max_replicas: the most replicas on one rank, 0 or more; None: as many as a rank has experts at home, which is
            always enough. With fewer, a rank may exceed the limit: the balance comes as near as they allow.
            `Plan.rank_rows` says what was reached.
    """

    slack: float = 0.05
    max_replicas: int | None = None

    def row_limit(self, num_rows: int, num_ranks: int) -> int:
        """M = ceil((1 + slack) * ceil(num_rows / num_ranks)), the most rows on a rank, of num_rows in all ranks.

        Never more than there are. `slack` is taken as the decimal number that it prints as, so that 0.1 is one tenth.
        """
        return min(num_rows, math.ceil((1 + Fraction(str(self.slack))) * -(-num_rows // num_ranks)))

    def rows_per_rank(
        self, num_tokens: int, top_k: int, num_experts: int, num_ranks: int, expert_alignment: int
    ) -> int:
        """N = align_up(M + min(G, M) * (A - 1), A), of every rank, num_tokens in all ranks, -1 routes included.

        With A the alignment, G the groups of the rank that has most, and M the `row_limit` of all routes: room for M
        rows however they fall into groups. Only with `max_replicas` a rank may have more.
        """
        limit = self.row_limit(num_tokens * top_k, num_ranks)
        groups = -(-num_experts // num_ranks) + self.slots_per_rank(num_experts, num_ranks)
        rows = limit + min(groups, limit) * (expert_alignment - 1)
        return -(-rows // expert_alignment) * expert_alignment

    def slots_per_rank(self, num_experts: int, num_ranks: int) -> int:
        """Places for replicas on every rank: ceil(num_experts / num_ranks), or `max_replicas` if that is fewer.

        One rank alone has nobody to take rows from: none.
        """
        enough = -(-num_experts // num_ranks) if num_ranks > 1 else 0
        return enough if self.max_replicas is None else min(enough, self.max_replicas)


Policy = Home | Capacity | Balanced


def first_expert(rank: int, num_experts: int, num_ranks: int) -> int:
    """The first expert at home on `rank`: contiguous blocks, the first E mod R ranks hold one more."""
    share, extra = divmod(num_experts, num_ranks)
    return rank * share + min(rank, extra)


def home_rank(expert: int, num_experts: int, num_ranks: int) -> int:
    """The rank that owns `expert`: the inverse of `first_expert`."""
    share, extra = divmod(num_experts, num_ranks)
    in_larger = (share + 1) * extra
    return expert // (share + 1) if expert < in_larger else extra + (expert - in_larger) // share
