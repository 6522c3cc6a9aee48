"""Which experts get replicas: the native rule against the definition, `balance_plain`, and what both must hold."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonep import _C
from moonep.balance import Replicas, balance_plain
from moonep.plan import first_expert, home_rank
from moonep.policy import Balanced

MAX_ROWS = 2**31 - 1
quick = settings(max_examples=300, deadline=None)


def balance_native(totals: list[int], num_ranks: int, policy: Balanced) -> Replicas:
    totals_E = np.array(totals, dtype=np.int64)
    slots = policy.slots_per_rank(len(totals), num_ranks)
    experts_RS, rows_RS = np.full((2, num_ranks, slots), -77)  # whatever was there is overwritten
    rank_rows_R = np.full(num_ranks, -77)
    _C.balance(
        totals_E.ctypes.data,
        len(totals),
        num_ranks,
        policy.row_limit(sum(totals), num_ranks),
        slots,
        policy.slack == 0,
        experts_RS.ctypes.data,
        rows_RS.ctypes.data,
        rank_rows_R.ctypes.data,
    )
    return Replicas(experts_RS.tolist(), rows_RS.tolist(), rank_rows_R.tolist())


def homes_of(num_experts: int, num_ranks: int) -> list[range]:
    firsts = [first_expert(rank, num_experts, num_ranks) for rank in range(num_ranks + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(firsts)]


def home_rows(totals: list[int], num_ranks: int) -> list[int]:
    """Rows of every rank without replicas."""
    return [sum(totals[e] for e in home) for home in homes_of(len(totals), num_ranks)]


def shares(totals: list[int], num_ranks: int) -> list[int]:
    share, extra = divmod(sum(totals), num_ranks)
    return [share + (rank < extra) for rank in range(num_ranks)]


def used(found: Replicas) -> list[list[tuple[int, int]]]:
    """Per rank the replicas it receives: (expert, rows)."""
    return [
        [(expert, rows) for expert, rows in zip(experts, taken, strict=True) if expert >= 0]
        for experts, taken in zip(found.experts, found.rows, strict=True)
    ]


def received(found: Replicas) -> list[int]:
    """How many replicas every rank receives."""
    return [len(each) for each in used(found)]


def check(found: Replicas, totals: list[int], num_ranks: int, policy: Balanced) -> None:
    """What every result holds, and what the policy promises."""
    slots = policy.slots_per_rank(len(totals), num_ranks)
    replicas = used(found)
    rank_rows, given_away = home_rows(totals, num_ranks), [0] * len(totals)
    for rank, on_rank in enumerate(replicas):
        experts = [expert for expert, _ in on_rank]
        assert experts == sorted(set(experts)), "ascending, no expert twice"
        idle = slots - len(on_rank)
        assert found.experts[rank] == experts + [-1] * idle
        assert found.rows[rank] == [rows for _, rows in on_rank] + [0] * idle
        for expert, rows in on_rank:
            home = home_rank(expert, len(totals), num_ranks)
            assert home != rank
            assert rows > 0
            given_away[expert] += rows
            rank_rows[home] -= rows
            rank_rows[rank] += rows
    assert all(given <= total for given, total in zip(given_away, totals, strict=True))
    assert found.rank_rows == rank_rows
    assert max(rank_rows) <= max(home_rows(totals, num_ranks))

    if policy.max_replicas is None:
        assert max(rank_rows) <= policy.row_limit(sum(totals), num_ranks)
        if policy.slack == 0:
            assert rank_rows == shares(totals, num_ranks)
            givers = [{home_rank(expert, len(totals), num_ranks) for expert, _ in on_rank} for on_rank in replicas]
            assert all(len(each) <= 1 for each in givers), "a rank receives from one home"
    if max(home_rows(totals, num_ranks)) <= policy.row_limit(sum(totals), num_ranks) and policy.slack > 0:
        assert not any(received(found)), "balanced enough"


def balance(totals: list[int], num_ranks: int, policy: Balanced) -> Replicas:
    """Both ways, checked."""
    found = balance_native(totals, num_ranks, policy)
    assert found == balance_plain(totals, num_ranks, policy)
    check(found, totals, num_ranks, policy)
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int]:
    """Totals [E] and R: even, skewed, sparse, huge."""
    num_ranks, num_experts = draw(st.integers(1, 9)), draw(st.integers(1, 30))
    rows = draw(
        st.sampled_from(
            [
                st.integers(0, 3),
                st.integers(0, 100),
                st.integers(0, MAX_ROWS),
                st.integers(0, 40).map(lambda n: int(1.5**n)),
                st.sampled_from([0, 0, 0, 1, MAX_ROWS]),
            ]
        )
    )
    return draw(st.lists(rows, min_size=num_experts, max_size=num_experts)), num_ranks


slacks = st.sampled_from([0, 0.0, 0.001, 0.01, 0.05, 0.3, 1.0, 7]) | st.floats(0, 2)
policies = st.builds(Balanced, slacks, st.none() | st.integers(0, 4))


@quick
@given(cases(), policies)
def test_native_is_the_definition_and_keeps_its_promises(case: tuple[list[int], int], policy: Balanced) -> None:
    balance(*case, policy)


@quick
@given(cases(), slacks)
def test_slots_that_are_enough_reach_what_no_limit_on_them_reaches(case: tuple[list[int], int], slack: float) -> None:
    free = balance(*case, Balanced(slack))
    assert balance(*case, Balanced(slack, max(received(free)))).rank_rows == free.rank_rows


@quick
@given(cases(), st.integers(1, 4))
def test_more_slots_are_never_worse_than_none(case: tuple[list[int], int], slots: int) -> None:
    totals, num_ranks = case
    none, some = balance(*case, Balanced(0.0, 0)), balance(*case, Balanced(0.0, slots))
    assert none.rank_rows == home_rows(totals, num_ranks)
    assert max(some.rank_rows) <= max(none.rank_rows)


# ---- by hand ----


def test_even_rule_by_hand() -> None:
    # Homes: rank 0 has experts 0-2 and 20 rows, rank 1 has 3-4 and 3, rank 2 has 5-6 and 4. Shares are 9, 9, 9.
    # Rank 0 fills rank 1 (room 6), then rank 2 (room 5). Rank 1 takes from expert 0 (9 rows, 3 left), rank 2 then from
    # expert 1, which has the most.
    found = balance([9, 8, 3, 1, 2, 4, 0], 3, Balanced(0.0))
    assert used(found) == [[], [(0, 6)], [(1, 5)]]
    assert found.rank_rows == [9, 9, 9]


def test_even_rule_gives_the_first_ranks_what_is_over() -> None:
    # 11 rows: shares 4, 4, 3. Rank 2 has 8 of them: it fills rank 0 (room 4) from its larger expert, 5, which leaves 1
    # of it; rank 1 (room 1) then takes from expert 6, which has 3.
    found = balance([0, 0, 0, 0, 3, 5, 3], 3, Balanced(0.0))
    assert homes_of(7, 3) == [range(3), range(3, 5), range(5, 7)]
    assert used(found) == [[(5, 4)], [(6, 1)], []]
    assert found.rank_rows == [4, 4, 3]


def test_even_rule_a_giver_receives_later() -> None:
    # Shares are 10. Rank 0 (19) fills rank 3 (room 10) and has 9 left; rank 1 (11) brings it to 10.
    found = balance([19, 11, 10, 0], 4, Balanced(0.0))
    assert used(found) == [[(1, 1)], [], [], [(0, 10)]]
    assert found.rank_rows == [10, 10, 10, 10]


def test_few_replicas_by_hand() -> None:
    # Two experts a rank; 40 rows, limit 15. Rank 0 has 22 rows and gives the 7 that are over from its largest expert.
    # The others have room for all of that: 9, 8 and 10. Rank 2 has the least and takes it.
    found = balance([14, 8, 4, 2, 3, 4, 0, 5], 4, Balanced(0.5))
    assert used(found) == [[], [], [(0, 7)], []]
    # With limit 11, 11 are over. No rank has room for all of them; the roomiest, rank 3, takes 6 of expert 0, which
    # leaves both experts 8. Of equals the first: rank 1 takes the 5 that are still over.
    found = balance([14, 8, 4, 2, 3, 4, 0, 5], 4, Balanced(0.1))
    assert used(found) == [[], [(0, 5)], [], [(0, 6)]]
    assert found.rank_rows == [11, 11, 7, 11]


def test_replicas_spread_over_ranks() -> None:
    # Ranks 0 and 1 are 2 above the limit of 12. Rank 2 has less room, 5, and would hold both.
    found = balance([14, 14, 7, 5], 4, Balanced(0.2))
    assert used(found) == [[], [], [(0, 2)], [(1, 2)]]


def test_out_of_slots_falls_back_to_the_even_rule() -> None:
    # One slot a rank; ranks 0 to 2 are 2 above the limit of 7, and only ranks 3 and 4 have room. The even rule's shares
    # are 6, 6, 6, 6, 5: rank 0 fills rank 3 and rank 1 fills rank 4, and rank 2 then gives to both of them.
    found = balance([9, 9, 9, 1, 1], 5, Balanced(0.0001))
    assert used(found) == [[(2, 2)], [(2, 1)], [], [(0, 5)], [(1, 4)]]
    assert found.rank_rows == [6, 6, 6, 6, 5]


def test_max_replicas_gets_as_near_as_it_can() -> None:
    # Eight experts of 4 rows on rank 0, nothing elsewhere: each of three ranks can take one expert, and no more.
    totals = [4] * 8 + [0] * 24
    assert balance(totals, 4, Balanced(0.0)).rank_rows == [8, 8, 8, 8]
    assert balance(totals, 4, Balanced(0.0, 2)).rank_rows == [8, 8, 8, 8]
    assert balance(totals, 4, Balanced(0.05, 1)).rank_rows == [20, 4, 4, 4]
    assert balance(totals, 4, Balanced(0.05, 0)).rank_rows == [32, 0, 0, 0]


def test_a_scarce_slot_takes_what_is_large_near_by() -> None:
    # One slot a rank; shares are 7. Rank 0 (12 rows, the largest expert 5) and rank 1 (8, all of one expert) are above,
    # rank 2 (1) alone has room, and cannot help both. But it can take 6 from rank 1, which then takes 5 from rank 0.
    found = balance([5, 5, 2, 8, 0, 0, 1, 0, 0], 3, Balanced(0.0, 1))
    assert used(found) == [[], [(0, 5)], [(3, 6)]]
    assert found.rank_rows == [7, 7, 7]


@pytest.mark.parametrize(("num_ranks", "needed"), [(8, 98), (64, 14)])
def test_the_instance_that_needs_most(num_ranks: int, needed: int) -> None:
    """Rank 0's experts get nothing, all others the same: rank 0 must hold ceil(E (R - 1) / R^2) replicas."""
    num_experts = 896
    local = num_experts // num_ranks
    assert needed == -(-num_experts * (num_ranks - 1) // num_ranks**2)
    totals = [0] * local + [num_ranks * local] * (num_experts - local)  # the share is then a whole number
    found = balance(totals, num_ranks, Balanced(0.0))
    assert received(found)[0] == needed


# ---- every input ends ----


@pytest.mark.parametrize("slack", [0.0, 0.05])
@pytest.mark.parametrize("max_replicas", [None, 0, 1, 2])
@pytest.mark.parametrize(
    ("num_experts", "num_ranks"), [(896, 64), (896, 6), (128, 3), (5, 4), (3, 8), (1, 1), (64, 64)]
)
def test_adversarial_counts(num_experts: int, num_ranks: int, max_replicas: int | None, slack: float) -> None:
    big = MAX_ROWS
    for totals in (
        [0] * num_experts,
        [1] * num_experts,
        [big] * num_experts,
        [big] + [0] * (num_experts - 1),  # one expert has everything
        [0] * (num_experts - 1) + [big],
        [1] + [0] * (num_experts - 1),
        [big if e % 7 == 0 else 0 for e in range(num_experts)],
        [big - e for e in range(num_experts)],
        [max(1, big >> e) for e in range(num_experts)],
        [big if e < -(-num_experts // num_ranks) else 1 for e in range(num_experts)],  # one rank has nearly everything
    ):
        balance(totals, num_ranks, Balanced(slack, max_replicas))


# ---- how few ----


def lognormal_totals(num_ranks: int, sigma: float, seed: int, num_experts: int = 896) -> list[int]:
    """16,384 rows a rank. RandomState: its numbers are promised to stay the same."""
    rng = np.random.RandomState(seed)
    popularity = np.exp(sigma * rng.standard_normal(num_experts))
    totals: list[int] = rng.multinomial(16384 * num_ranks, popularity / popularity.sum()).tolist()
    return totals


@pytest.mark.parametrize(
    ("num_ranks", "sigma", "replicas"),
    [
        (8, 0.05, 0),
        (8, 0.3, 0.7),
        (8, 1, 4.8),
        (8, 2, 5.5),
        (64, 0.05, 0.1),
        (64, 0.3, 16.5),
        (64, 1, 32),
        (64, 2, 42.1),
    ],
)
def test_replicas_are_few(num_ranks: int, sigma: float, replicas: float) -> None:
    """In all ranks together, mean of 20 draws, with a slack of 5 %; docs/planner.md says how few there could be."""
    found = [balance(lognormal_totals(num_ranks, sigma, seed), num_ranks, Balanced()) for seed in range(20)]
    assert np.mean([sum(received(each)) for each in found]) <= replicas
    assert np.mean([max(received(each)) for each in found]) <= 2


@quick
@given(cases(), slacks.filter(bool))
def test_slack_never_costs_replicas(case: tuple[list[int], int], slack: float) -> None:
    assert sum(received(balance(*case, Balanced(slack)))) <= sum(received(balance(*case, Balanced(0.0))))


def test_slack_buys_replicas() -> None:
    totals = lognormal_totals(8, 1, 0)
    counts = [sum(received(balance(totals, 8, Balanced(slack)))) for slack in (0.0, 0.01, 0.05, 0.1, 0.2, 1.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0


# ---- the limit ----


def test_row_limit_is_exact() -> None:
    assert Balanced(0.1).row_limit(80, 8) == 11  # 1.1 * 10 is more than 11 in floating point
    assert Balanced(0.05).row_limit(131072 * 8, 8) == 137626
    assert Balanced(0.0).row_limit(9, 2) == 5
    assert Balanced(0).row_limit(0, 3) == 0
    assert Balanced(1e-9).row_limit(2 * MAX_ROWS, 2) == MAX_ROWS + 3
    assert Balanced(np.float64(0.05)).row_limit(200, 2) == 105
    assert Balanced(0.05).row_limit(100, 1) == 100, "there are no more"


@given(slacks, st.integers(0, 2**40), st.integers(1, 100))
def test_row_limit_is_the_formula(slack: float, num_rows: int, num_ranks: int) -> None:
    exact = min(num_rows, (1 + Fraction(str(slack))) * -(-num_rows // num_ranks))
    assert 0 <= Balanced(slack).row_limit(num_rows, num_ranks) - exact < 1


def test_slots_per_rank() -> None:
    assert Balanced().slots_per_rank(896, 6) == 150
    assert Balanced(max_replicas=2).slots_per_rank(896, 6) == 2
    assert Balanced(max_replicas=200).slots_per_rank(896, 6) == 150
    assert Balanced().slots_per_rank(3, 8) == 1
    assert Balanced().slots_per_rank(896, 1) == 0
