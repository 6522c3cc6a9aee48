"""Rows of every rank under every policy, by the planner's own rules; what is dropped; how many replicas it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonep import _C
from moonep.policy import Balanced, Capacity, Policy, first_expert

__all__ = [
    "Load",
    "dropped_share",
    "fewest_replicas",
    "home_of_expert",
    "least_factor",
    "load",
    "most_home_rows",
    "replicas_always_enough",
    "replicas_worst_input",
]

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Load:
    """What a policy makes of one step's routes."""

    totals: Counts  # [E]                 routes of every expert
    rank_rows: Counts  # [R]              real rows of every rank
    num_rows: Counts  # [R]               N of every rank: rows that memory is taken for
    num_dropped: int  # routes, in all ranks
    replica_experts: Counts  # [R, slots]  -1: idle
    replica_rows: Counts  # [R, slots]

    @property
    def num_replicas(self) -> int:
        """In all ranks."""
        return int((self.replica_experts >= 0).sum())

    @property
    def most_received(self) -> int:
        """Replicas of the rank that has most: slots in use."""
        return int((self.replica_experts >= 0).sum(axis=1).max(initial=0))

    def most_sent(self, num_experts: int) -> int:
        """Replicas of the experts of the home that gives most."""
        num_ranks = len(self.rank_rows)
        homes = home_of_expert(num_experts, num_ranks)[self.replica_experts[self.replica_experts >= 0]]
        return int(np.bincount(homes, minlength=num_ranks).max())

    @property
    def imbalance(self) -> float:
        """Rows of the fullest rank over the mean, minus 1; 0 without rows."""
        total = int(self.rank_rows.sum())
        return float(self.rank_rows.max() * len(self.rank_rows) / total - 1) if total else 0.0


def home_of_expert(num_experts: int, num_ranks: int) -> Counts:
    """[E]: the rank that owns each expert."""
    return np.repeat(np.arange(num_ranks), np.diff(_first_experts(num_experts, num_ranks)))


def load(totals_E: Counts, num_ranks: int, policy: Policy, num_routes: int, expert_alignment: int = 1) -> Load:
    """The load of `totals_E` [E] routes, of `num_routes` in all ranks (T * K summed, -1 routes included)."""
    num_experts = len(totals_E)
    first_R1 = _first_experts(num_experts, num_ranks)
    none = np.empty((num_ranks, 0), np.int64)
    if isinstance(policy, Capacity):
        room = policy.rows_per_expert(num_routes, 1, num_experts, expert_alignment)
        kept_E = np.minimum(totals_E, room)
        dropped = int((totals_E - kept_E).sum())
        return Load(totals_E, _sums(kept_E, first_R1), np.diff(first_R1) * room, dropped, none, none)
    if not isinstance(policy, Balanced):
        padded_E = _align_up(totals_E, expert_alignment)
        return Load(totals_E, _sums(totals_E, first_R1), _sums(padded_E, first_R1), 0, none, none)

    slots = policy.slots_per_rank(num_experts, num_ranks)
    experts_RS, rows_RS = np.empty((2, num_ranks, slots), np.int64)
    rank_rows_R, totals_E = np.empty(num_ranks, np.int64), np.ascontiguousarray(totals_E)
    limit = policy.row_limit(int(totals_E.sum()), num_ranks)
    arrays = [each.ctypes.data for each in (experts_RS, rows_RS, rank_rows_R)]
    _C.balance(totals_E.ctypes.data, num_experts, num_ranks, limit, slots, policy.slack == 0, *arrays)
    if policy.max_replicas is None:
        static = policy.rows_per_rank(num_routes, 1, num_experts, num_ranks, expert_alignment)
        num_rows_R = np.full(num_ranks, static)
    else:
        used = experts_RS >= 0
        away_E = np.bincount(experts_RS[used], rows_RS[used], minlength=num_experts).astype(np.int64)
        at_home_R = _sums(_align_up(totals_E - away_E, expert_alignment), first_R1)
        num_rows_R = at_home_R + _align_up(rows_RS, expert_alignment).sum(axis=1)
    return Load(totals_E, rank_rows_R, num_rows_R, 0, experts_RS, rows_RS)


def most_home_rows(num_ranks: int, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Rows that a rank has under Home at worst: every token names as many of its experts as it can, each once."""
    return num_ranks * num_tokens * min(top_k, -(-num_experts // num_ranks))


# ---- capacity ----


def dropped_share(totals_E: Counts, factor: float, num_routes: int) -> float:
    """The share of the routes that Capacity(factor) drops, 0 to 1; 0 without routes."""
    room = Capacity(factor).rows_per_expert(num_routes, 1, len(totals_E), 1)
    return float(np.maximum(totals_E - room, 0).sum() / max(1, totals_E.sum()))


def least_factor(totals_of_step: Sequence[Counts], share: float, num_routes: int) -> float:
    """The least factor, in hundredths, that drops no more than `share` of the routes in the mean of all steps."""

    def fits(hundredths: int) -> bool:
        dropped = [dropped_share(totals_E, hundredths / 100, num_routes) for totals_E in totals_of_step]
        return sum(dropped) <= share * len(dropped)

    too_few, enough = 0, 100 * max(len(totals_E) for totals_E in totals_of_step)  # where one expert could take all
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
    return enough / 100


# ---- replicas ----


def fewest_replicas(totals_E: Counts, num_ranks: int, limit: int) -> int:
    """A bound from below on replicas in all ranks, for any rule that keeps every rank at `limit` rows.

    What every home above it would need if it were the only one: k replicas take no more rows off it than its k largest
    experts have, nor than the k largest rooms hold.
    """
    first_R1 = _first_experts(len(totals_E), num_ranks)
    rows_R = _sums(totals_E, first_R1)
    rooms = np.sort(np.maximum(limit - rows_R, 0))[::-1].cumsum()
    needed = 0
    for rank in np.flatnonzero(rows_R > limit):
        largest = np.sort(totals_E[first_R1[rank] : first_R1[rank + 1]])[::-1].cumsum()
        needed += 1 + max(int(np.searchsorted(each, rows_R[rank] - limit)) for each in (largest, rooms))
    return needed


def replicas_always_enough(num_experts: int, num_ranks: int) -> int:
    """Slots on a rank that exact balance never exceeds: ceil(E / R), none for one rank (Kimi K3 report, 5.2.1)."""
    return -(-num_experts // num_ranks) if num_ranks > 1 else 0


def replicas_worst_input(num_experts: int, num_ranks: int) -> int:
    """Slots that some rank needs for exact balance of the worst input: ceil(E (R - 1) / R^2) (same report, Appendix E).

    There rank 0's experts get nothing, all others share evenly.
    """
    return math.ceil(num_experts * (num_ranks - 1) / num_ranks**2)


def _first_experts(num_experts: int, num_ranks: int) -> Counts:
    return np.array([first_expert(rank, num_experts, num_ranks) for rank in range(num_ranks + 1)])


def _sums(values_E: Counts, first_R1: Counts) -> Counts:
    """[R]: sums over each rank's experts."""
    ends = np.concatenate([[0], values_E.cumsum()])
    sums_R: Counts = np.diff(ends[first_R1])
    return sums_R


def _align_up(values: Counts, alignment: int) -> Counts:
    return -(-values // alignment) * alignment
