"""Counts -> replicas: which experts are copied to which ranks for a step, and how many rows each copy takes.

The definition, in plain Python; `csrc/common/balance.h` gives the same numbers. Everything is decided by integers, so
that every rank decides alike. What rows go to which copy is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonep.policy import Balanced, first_expert

__all__ = ["Replicas", "balance_plain"]


@dataclass(frozen=True)
class Replicas:
    """Replicas of one step. Slots of a rank: ascending by expert, idle ones last."""

    experts: list[list[int]]  # [R, slots]  the expert of each slot, -1: idle
    rows: list[list[int]]  # [R, slots]     rows that it takes; the expert's home keeps the rest. Idle: 0
    rank_rows: list[int]  # [R]             rows that each rank then has


Found = list[dict[int, int]]  # by rank, what it receives: expert -> rows


def balance_plain(totals: Sequence[int], num_ranks: int, policy: Balanced) -> Replicas:
    """Replicas for experts with `totals` rows [E] in all ranks together.

    With slack 0 every rank ends at exactly its share of the rows, by the even rule (`_share_exactly`). Else no rank
    exceeds `policy.row_limit`, by few replicas (`_keep`); where that runs out of slots, the even rule is taken, which
    ceil(E / R) slots always allow. `max_replicas` may be too few for both: then the limit is the lowest that halving
    finds, from the one asked for up to the fullest rank without replicas, by `_keep` or by `_relay`.
    """
    limit = policy.row_limit(sum(totals), num_ranks)
    slots = policy.slots_per_rank(len(totals), num_ranks)
    homes = _homes(len(totals), num_ranks)
    home_rows = [sum(totals[e] for e in home) for home in homes]

    def keep(limit: int) -> Found | None:
        return _keep(limit, totals, homes, slots)

    def relay(limit: int) -> Found | None:
        return _relay(limit, totals, homes, slots)

    def share_exactly() -> Found | None:
        return _share_exactly(totals, homes, slots)

    found = share_exactly() or keep(limit) if policy.slack == 0 else keep(limit) or share_exactly()
    if not found:
        fails, works = limit - 1, max(home_rows)
        while works - fails > 1:
            middle = (fails + works) // 2
            fails, works = (fails, middle) if keep(middle) or relay(middle) else (middle, works)
        found = keep(works) or relay(works)
        assert found, "where the fullest rank is the limit, nothing moves"

    filled = [sorted(on_rank.items()) + [(-1, 0)] * (slots - len(on_rank)) for on_rank in found]
    rank_rows = [
        home_rows[rank]
        + sum(found[rank].values())
        - sum(rows for on_rank in found for expert, rows in on_rank.items() if expert in home)
        for rank, home in enumerate(homes)
    ]
    return Replicas(
        experts=[[expert for expert, _ in on_rank] for on_rank in filled],
        rows=[[rows for _, rows in on_rank] for on_rank in filled],
        rank_rows=rank_rows,
    )


# Of equals, max and min take the first: the lowest rank, the lowest expert.


def _homes(num_experts: int, num_ranks: int) -> list[range]:
    """The experts at home on each rank."""
    first = [first_expert(rank, num_experts, num_ranks) for rank in range(num_ranks + 1)]
    return [range(first[rank], first[rank + 1]) for rank in range(num_ranks)]


def _keep(limit: int, totals: Sequence[int], homes: list[range], slots: int) -> Found | None:
    """Few replicas such that no rank exceeds `limit`; None: out of slots.

    The fullest rank gives of its largest expert, at most its excess, as much as one receiver can take. The receiver has
    room for all of it if any rank has: the one with the fewest replicas (so that they spread), then with the least room
    (so that large rooms stay for large pieces). Else it is the one with the most room.

    Fewest replicas is a transport problem with a price per pair, which is NP-hard; docs/planner.md says how near this
    comes. A step ends a rank's excess, empties an expert or fills a rank: there are at most 2 R + E. Ranks that give
    never have room, so no expert goes to one rank twice.
    """
    left = list(totals)
    rank_rows = [sum(totals[e] for e in home) for home in homes]
    found: Found = [{} for _ in homes]
    ranks = range(len(homes))
    while True:
        giver = max(ranks, key=lambda r: rank_rows[r])
        excess = rank_rows[giver] - limit
        if excess <= 0:
            return found
        expert = max(homes[giver], key=lambda e: left[e])
        rows = min(left[expert], excess)

        room = {r: limit - rank_rows[r] for r in ranks if rank_rows[r] < limit and len(found[r]) < slots}
        if not room:
            return None
        fitting = [r for r in room if room[r] >= rows]
        if fitting:
            receiver = min(fitting, key=lambda r: (len(found[r]), room[r]))
        else:
            receiver = max(room, key=lambda r: room[r])
            rows = room[receiver]

        assert expert not in found[receiver]
        found[receiver][expert] = rows
        left[expert] -= rows
        rank_rows[giver] -= rows
        rank_rows[receiver] += rows


def _relay(limit: int, totals: Sequence[int], homes: list[range], slots: int) -> Found | None:
    """No rank exceeds `limit`, by making the most of every slot; None: it cannot.

    The rank with the most room takes the largest piece that it can get from any home, of equal pieces from the fullest
    one. A home below the limit gives too, if it has a slot to be filled up again: so a large expert near by makes room
    for rows from far above the limit. A step takes a slot.
    """
    left = list(totals)
    rank_rows = [sum(totals[e] for e in home) for home in homes]
    found: Found = [{} for _ in homes]
    ranks = range(len(homes))
    while max(rank_rows) > limit:
        roomy = [r for r in ranks if rank_rows[r] < limit and len(found[r]) < slots]
        if not roomy:
            return None
        receiver = min(roomy, key=lambda r: rank_rows[r])
        room = limit - rank_rows[receiver]

        pieces = []  # giver, expert, rows
        for giver in ranks:
            if giver != receiver and homes[giver] and (rank_rows[giver] > limit or len(found[giver]) < slots):
                expert = max(homes[giver], key=lambda e: left[e])
                if left[expert] > 0 and expert not in found[receiver]:
                    pieces.append((giver, expert, min(left[expert], room)))
        if not pieces:
            return None
        giver, expert, rows = max(pieces, key=lambda piece: (piece[2], rank_rows[piece[0]]))
        found[receiver][expert] = rows
        left[expert] -= rows
        rank_rows[giver] -= rows
        rank_rows[receiver] += rows
    return found


def _share_exactly(totals: Sequence[int], homes: list[range], slots: int) -> Found | None:
    """The even rule: every rank ends at exactly its share; None: out of slots.

    Shares are total // R, and one more for the first total mod R ranks. While some rank is above its share, the most
    overloaded home gives to the rank with the most room the whole of that room: this may bring the home below its own
    share, and it receives later. So a rank receives from one home alone, and a home has at most ceil(E / R) experts.
    Inside a home, the receiver with the most rows still to come takes from the expert with the most rows left.
    """
    share, extra = divmod(sum(totals), len(homes))
    ranks = range(len(homes))
    above = [sum(totals[e] for e in home) - share - (rank < extra) for rank, home in enumerate(homes)]
    to_come: list[dict[int, int]] = [{} for _ in homes]  # by giver: receiver -> rows
    while any(rows > 0 for rows in above):
        giver, receiver = max(ranks, key=lambda r: above[r]), min(ranks, key=lambda r: above[r])
        to_come[giver][receiver] = -above[receiver]
        above[giver] += above[receiver]
        above[receiver] = 0

    left = list(totals)
    found: Found = [{} for _ in homes]
    for home, quotas in zip(homes, to_come, strict=True):
        while any(quotas.values()):
            receiver = max(sorted(quotas), key=lambda r: quotas[r])
            if len(found[receiver]) == slots:
                return None
            expert = max(home, key=lambda e: left[e])
            rows = min(left[expert], quotas[receiver])
            assert expert not in found[receiver]
            found[receiver][expert] = rows
            left[expert] -= rows
            quotas[receiver] -= rows
    return found
