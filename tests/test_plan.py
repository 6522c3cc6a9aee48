"""The native planner against the definition, `plan_plain`, and what any plan must hold.

R ranks are simulated in one process: one Planner each, and what would cross between ranks is handed over here.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

import moonep
from moonep.checks import check_config
from moonep.config import BufferConfig
from moonep.plan import Crossings, Plan, first_expert, home_rank, plan_plain
from moonep.policy import Policy
from moonep.transport.base import Call
from moonep.transport.planner import Outgoing, Planner

MAX_ROWS = 2**31 - 1


def make_config(
    num_experts: int,
    top_k: int,
    *,
    max_tokens: int = 64,
    expert_alignment: int = 1,
    policy: Policy = moonep.Home(),  # noqa: B008 (frozen)
) -> BufferConfig:
    return BufferConfig(
        num_experts, top_k, 8, max_tokens, torch.float32, policy, "auto", expert_alignment, "float32", 60.0
    )


class Ranks:
    """One Planner a rank, with the routing of all ranks loaded."""

    def __init__(
        self,
        idx_of_rank: Sequence[torch.Tensor],
        num_experts: int,
        alignment: int = 1,
        policy: Policy = moonep.Home(),  # noqa: B008 (frozen)
        hosts: Sequence[int] | None = None,
    ):
        top_k = idx_of_rank[0].shape[1]
        config = make_config(num_experts, top_k, expert_alignment=alignment, policy=policy)
        hosts = hosts or [0] * len(idx_of_rank)
        self.planners = [Planner(config, rank, hosts) for rank in range(len(idx_of_rank))]
        self.tokens = tuple(len(idx) for idx in idx_of_rank)
        self.ids = [torch.full((len(idx), top_k), -77, dtype=torch.int32) for idx in idx_of_rank]
        self.counts = [torch.full((num_experts,), -77, dtype=torch.int32) for _ in idx_of_rank]
        for planner, idx, ids, counts in zip(self.planners, idx_of_rank, self.ids, self.counts, strict=True):
            planner.load_ids(idx, ids.data_ptr(), counts.data_ptr())

    @property
    def counts_addresses(self) -> list[int]:
        return [counts.data_ptr() for counts in self.counts]

    def plans_from_ids(self) -> list[Plan]:
        ids = [ids.data_ptr() for ids in self.ids]
        return [planner.plan_from_ids(ids, self.counts_addresses, self.tokens) for planner in self.planners]

    def send_words(self) -> tuple[list[list[torch.Tensor]], list[Outgoing]]:
        """words[source][destination], and what every rank keeps."""
        words, kept = [], []
        for planner, ids in zip(self.planners, self.ids, strict=True):
            sent, outgoing, routes_RR = planner.words_to_send(ids.data_ptr(), self.counts_addresses, self.tokens)
            ends = outgoing.outbox.start[outgoing.outbox.first.long()].tolist()
            words.append([sent[begin:end] for begin, end in itertools.pairwise(ends)])
            assert routes_RR[planner.rank].tolist() == [len(each) for each in words[-1]]
            kept.append(outgoing)
        return words, kept

    def plan_from_words(self, rank: int, words_of_rank: Sequence[torch.Tensor], outgoing: Outgoing) -> Plan | None:
        lengths = [len(words) for words in words_of_rank]
        return self.planners[rank].plan_from_words(torch.cat(list(words_of_rank)), lengths, self.tokens, outgoing)

    def plans_from_words(self) -> list[Plan]:
        words, kept = self.send_words()
        plans = [
            self.plan_from_words(rank, [sent[rank] for sent in words], outgoing) for rank, outgoing in enumerate(kept)
        ]
        assert None not in plans
        return plans  # type: ignore[return-value]


def crossings_as_dict(box: Crossings) -> dict[str, list[int]]:
    tensors = {field.name: getattr(box, field.name) for field in dataclasses.fields(box)}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.int32}
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def plan_as_dict(plan: Plan) -> dict[str, object]:
    """Every field in plain values, with dtypes and shapes."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, Crossings):
            value = crossings_as_dict(value)
        elif isinstance(value, torch.Tensor):
            assert value.is_contiguous()
            value = (value.dtype, tuple(value.shape), value.tolist())
        elif field.name == "layout":  # its own memory: what a caller does to the public tensors must not reach it
            value = [each.tolist() for each in value]
            assert value == [plan.group_sizes.tolist(), plan.group_ends.tolist()]
        found[field.name] = value
    return found


def with_words_numbering(plan: dict[str, object], rank: int) -> dict[str, object]:
    """What the plan says where words crossed: crossings and routes of other ranks are numbered as they come."""
    inbox = {name: list(values) for name, values in plan["inbox"].items()}  # type: ignore[attr-defined]
    for source, (begin, end) in enumerate(itertools.pairwise(inbox["first"])):
        if source != rank:
            at, after = inbox["start"][begin], inbox["start"][end]
            inbox["token"][begin:end] = range(end - begin)
            inbox["route"][at:after] = range(after - at)
    return plan | {"inbox": inbox}


def laid_out(idx: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with other strides."""
    if layout == "transposed":
        return idx.t().contiguous().t()
    if layout == "sliced":
        wide = torch.full((2 * idx.shape[0], 3 * idx.shape[1] + 1), -9, dtype=idx.dtype)
        wide[::2, 1::3] = idx
        return wide[::2, 1::3]
    return idx.contiguous()


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[torch.Tensor], int, int]:
    """Routing of every rank, E and the alignment."""
    num_ranks, num_experts = draw(st.integers(1, 6)), draw(st.integers(1, 17))
    top_k = draw(st.integers(1, min(num_experts, 6)) | st.just(num_experts))
    lowest, highest = draw(st.sampled_from([(-1, num_experts - 1), (0, num_experts - 1), (-1, 0), (-1, -1)]))
    idx_of_rank = []
    for _ in range(num_ranks):
        shape = (draw(st.integers(0, 7)), top_k)
        dtype = draw(st.sampled_from([np.int32, np.int64]))
        values = draw(st_np.arrays(dtype, shape, elements=st.integers(lowest, highest)))
        idx_of_rank.append(laid_out(torch.from_numpy(values), draw(st.sampled_from(["dense", "transposed", "sliced"]))))
    return idx_of_rank, num_experts, draw(st.sampled_from([1, 1, 2, 3, 8, 16]))


policies = st.sampled_from(
    [
        moonep.Home(),
        moonep.Balanced(),
        moonep.Balanced(slack=0),
        moonep.Balanced(slack=0.3),
        moonep.Balanced(slack=0, max_replicas=1),
        moonep.Balanced(max_replicas=2),
        moonep.Balanced(max_replicas=0),
    ]
)

quick = settings(max_examples=150, deadline=None)


# ---- the native planner is the definition ----


@quick
@given(routings(), policies, st.data())
def test_native_plans_are_the_plain_ones(
    routing: tuple[list[torch.Tensor], int, int], policy: Policy, data: st.DataObject
) -> None:
    idx_of_rank, num_experts, alignment = routing
    hosts = data.draw(st.lists(st.integers(0, 2), min_size=len(idx_of_rank), max_size=len(idx_of_rank)))
    ranks = Ranks(idx_of_rank, num_experts, alignment, policy, hosts)
    from_ids, from_words = ranks.plans_from_ids(), ranks.plans_from_words()
    for rank in range(len(idx_of_rank)):
        plain = plan_as_dict(
            plan_plain(
                idx_of_rank,
                rank,
                num_experts=num_experts,
                expert_alignment=alignment,
                policy=policy,
                host_of_rank=hosts,
            )
        )
        assert plan_as_dict(from_ids[rank]) == plain
        assert plan_as_dict(from_words[rank]) == with_words_numbering(plain, rank)


@quick
@given(routings())
def test_load_ids_copies_and_counts(routing: tuple[list[torch.Tensor], int, int]) -> None:
    idx_of_rank, num_experts, _ = routing
    ranks = Ranks(idx_of_rank, num_experts)
    for idx, ids, counts in zip(idx_of_rank, ranks.ids, ranks.counts, strict=True):
        assert torch.equal(ids, idx.int())
        assert counts.tolist() == [int((idx == expert).sum()) for expert in range(num_experts)]


def test_ids_of_stride_zero() -> None:
    idx = torch.tensor([[2, 0, -1]]).expand(5, 3)
    column = torch.tensor([[1], [0], [3]], dtype=torch.int32).expand(3, 3)
    for given_idx in (idx, column):
        (plan,) = Ranks([given_idx], 4).plans_from_ids()
        assert plan_as_dict(plan) == plan_as_dict(plan_plain([given_idx], 0, num_experts=4))


def test_planner_is_used_again() -> None:
    """A smaller plan after a larger one holds nothing of it."""
    generator = torch.Generator().manual_seed(1)
    ranks = Ranks([torch.randint(-1, 6, (9, 3), generator=generator) for _ in range(2)], 6)
    ranks.plans_from_ids()
    idx_of_rank = [torch.tensor([[5, -1, 5]]), torch.empty(0, 3, dtype=torch.int64)]
    smaller = Ranks(idx_of_rank, 6)
    smaller.planners = ranks.planners
    for rank, plan in enumerate(smaller.plans_from_ids()):
        assert plan_as_dict(plan) == plan_as_dict(plan_plain(idx_of_rank, rank, num_experts=6))


# ---- what any plan holds ----


@quick
@given(routings(), policies)
def test_every_route_has_one_row_and_every_row_one_route(
    routing: tuple[list[torch.Tensor], int, int], policy: Policy
) -> None:
    idx_of_rank, num_experts, alignment = routing
    plans = Ranks(idx_of_rank, num_experts, alignment, policy).plans_from_ids()
    static = isinstance(policy, moonep.Balanced) and policy.max_replicas is None

    # Who stands in each row, from the sources' side.
    found: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    for source, (idx, plan) in enumerate(zip(idx_of_rank, plans, strict=True)):
        for t, k in np.ndindex(*idx.shape):
            expert, rank, row = int(idx[t, k]), int(plan.dst_rank[t, k]), int(plan.dst_row[t, k])
            if expert < 0:
                assert (rank, row) == (-1, -1)
                continue
            home = home_rank(expert, num_experts, len(plans))
            assert rank == home or expert in plan.replicas[rank].tolist()
            assert (rank, row) not in found
            found[rank, row] = (expert, source, t, k)

    for rank, plan in enumerate(plans):
        start, expected_rows = 0, []
        for expert, size, end in zip(
            plan.group_experts, plan.group_sizes.tolist(), plan.group_ends.tolist(), strict=True
        ):
            here = [found[rank, row] for row in range(start, start + size)]
            assert here == sorted(here), "rows of a group are ordered by (source rank, token, k)"
            assert {route[0] for route in here} == ({int(expert)} if size else set())
            assert end - start == -(-size // alignment) * alignment
            expected_rows += range(start, start + size)
            start = end
        assert plan.num_rows == plans[0].num_rows >= start if static else plan.num_rows == start
        assert sorted(row for r, row in found if r == rank) == expected_rows
        assert sum(plan.group_sizes.tolist()) == len(expected_rows) == int(plan.rank_rows[rank])
        assert int(plan.rank_rows.sum()) == sum(int((idx >= 0).sum()) for idx in idx_of_rank)
        assert plan.num_groups == len(plan.group_experts)
        slots = policy.slots_per_rank(num_experts, len(plans)) if isinstance(policy, moonep.Balanced) else 0
        assert plan.replicas.shape == (len(plans), slots)
        first = first_expert(rank, num_experts, len(plans)), first_expert(rank + 1, num_experts, len(plans))
        assert plan.group_experts.tolist() == [*range(*first), *plan.replicas[rank].tolist()]
        assert not set(range(*first)) & set(plan.replicas[rank].tolist())
        if static:
            assert int(plan.rank_rows.max()) <= policy.row_limit(int(plan.rank_rows.sum()), len(plans))
        assert plan.num_dropped == 0
        assert plan.num_tokens == len(idx_of_rank[rank])


@quick
@given(routings())
def test_boxes_of_two_ranks_agree(routing: tuple[list[torch.Tensor], int, int]) -> None:
    """What a rank sends is what the other expects: the same tokens, once each, and the same routes and rows."""
    idx_of_rank, num_experts, alignment = routing
    plans = Ranks(idx_of_rank, num_experts, alignment).plans_from_ids()

    def part(box: Crossings, peer: int) -> list[tuple[int, list[int], list[int]]]:
        start = box.start.tolist()
        return [
            (int(box.token[c]), box.route[start[c] : start[c + 1]].tolist(), box.row[start[c] : start[c + 1]].tolist())
            for c in range(int(box.first[peer]), int(box.first[peer + 1]))
        ]

    for source, destination in itertools.product(range(len(plans)), repeat=2):
        sent = part(plans[source].outbox, destination)
        assert sent == part(plans[destination].inbox, source)
        tokens = [token for token, _, _ in sent]
        assert tokens == sorted(set(tokens))
        assert all(routes and routes == sorted(routes) for _, routes, _ in sent)


@quick
@given(st.integers(1, 40), st.integers(1, 300))
def test_homes_are_contiguous_blocks(num_ranks: int, num_experts: int) -> None:
    firsts = [first_expert(rank, num_experts, num_ranks) for rank in range(num_ranks + 1)]
    sizes = [after - first for first, after in itertools.pairwise(firsts)]
    assert (firsts[0], firsts[-1]) == (0, num_experts)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes.count(num_experts // num_ranks + 1) == num_experts % num_ranks
    homes = [home_rank(expert, num_experts, num_ranks) for expert in range(num_experts)]
    assert homes == [rank for rank, size in enumerate(sizes) for _ in range(size)]


# ---- plans worked out by hand ----


def box(first: list[int], token: list[int], start: list[int], route: list[int], row: list[int]) -> dict[str, list[int]]:
    return {"first": first, "token": token, "start": start, "route": route, "row": row}


BY_HAND = [
    # E = 3 over R = 2: experts 0 and 1 on rank 0, expert 2 on rank 1. Token 2 of rank 0 names two experts of rank 0,
    # token 0 of rank 1 one expert twice. Groups are padded to 2: rows 0 1 2 _ of expert 0, rows 4 5 of expert 1.
    (
        [[[0, 2], [2, -1], [1, 0]], [[2, 2], [0, 1]]],
        3,
        2,
        [
            {
                "num_rows": 6,
                "group_experts": [0, 1],
                "group_sizes": [3, 2],
                "group_ends": [4, 6],
                "rank_rows": [5, 4],
                "dst_rank": [[0, 1], [1, -1], [0, 0]],
                "dst_row": [[0, 0], [1, -1], [4, 1]],
                "outbox": box([0, 2, 4], [0, 2, 0, 1], [0, 1, 3, 4, 5], [0, 4, 5, 1, 2], [0, 4, 1, 0, 1]),
                "inbox": box([0, 2, 3], [0, 2, 1], [0, 1, 3, 5], [0, 4, 5, 2, 3], [0, 4, 1, 2, 5]),
            },
            {
                "num_rows": 4,
                "group_experts": [2],
                "group_sizes": [4],
                "group_ends": [4],
                "rank_rows": [5, 4],
                "dst_rank": [[1, 1], [0, 0]],
                "dst_row": [[2, 3], [2, 5]],
                "outbox": box([0, 1, 2], [1, 0], [0, 2, 4], [2, 3, 0, 1], [2, 5, 2, 3]),
                "inbox": box([0, 2, 3], [0, 1, 0], [0, 1, 2, 4], [1, 2, 0, 1], [0, 1, 2, 3]),
            },
        ],
    ),
    # More ranks than experts: rank 2 owns none. Rank 1 has no tokens, rank 2 a token without a route. Expert 0 is
    # padded to 4 rows.
    (
        [[[1], [1]], [], [[0], [-1], [1]]],
        2,
        4,
        [
            {
                "num_rows": 4,
                "group_experts": [0],
                "group_sizes": [1],
                "group_ends": [4],
                "rank_rows": [1, 3, 0],
                "dst_rank": [[1], [1]],
                "dst_row": [[0], [1]],
                "outbox": box([0, 0, 2, 2], [0, 1], [0, 1, 2], [0, 1], [0, 1]),
                "inbox": box([0, 0, 0, 1], [0], [0, 1], [0], [0]),
            },
            {
                "num_rows": 4,
                "group_experts": [1],
                "group_sizes": [3],
                "group_ends": [4],
                "rank_rows": [1, 3, 0],
                "dst_rank": [],
                "dst_row": [],
                "outbox": box([0, 0, 0, 0], [], [0], [], []),
                "inbox": box([0, 2, 2, 3], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2], [0, 1, 2]),
            },
            {
                "num_rows": 0,
                "group_experts": [],
                "group_sizes": [],
                "group_ends": [],
                "rank_rows": [1, 3, 0],
                "dst_rank": [[0], [-1], [1]],
                "dst_row": [[0], [-1], [2]],
                "outbox": box([0, 1, 2, 2], [0, 2], [0, 1, 2], [0, 2], [0, 2]),
                "inbox": box([0, 0, 0, 0], [], [0], [], []),
            },
        ],
    ),
    # One rank, one expert, an empty group before and after the only row.
    (
        [[[1]]],
        3,
        1,
        [
            {
                "num_rows": 1,
                "group_experts": [0, 1, 2],
                "group_sizes": [0, 1, 0],
                "group_ends": [0, 1, 1],
                "rank_rows": [1],
                "dst_rank": [[0]],
                "dst_row": [[0]],
                "outbox": box([0, 1], [0], [0, 1], [0], [0]),
                "inbox": box([0, 1], [0], [0, 1], [0], [0]),
            }
        ],
    ),
]


@pytest.mark.parametrize(("ids", "num_experts", "alignment", "expected_of_rank"), BY_HAND)
def test_plans_by_hand(
    ids: list[list[list[int]]], num_experts: int, alignment: int, expected_of_rank: list[dict[str, object]]
) -> None:
    top_k = len(ids[0][0])
    idx_of_rank = [torch.tensor(idx, dtype=torch.int64).reshape(len(idx), top_k) for idx in ids]
    native = Ranks(idx_of_rank, num_experts, alignment).plans_from_ids()
    for rank, expected in enumerate(expected_of_rank):
        plain = plan_plain(idx_of_rank, rank, num_experts=num_experts, expert_alignment=alignment)
        for plan in (plain, native[rank]):
            for name, value in expected.items():
                found = getattr(plan, name)
                if isinstance(found, Crossings):
                    found = crossings_as_dict(found)
                elif isinstance(found, torch.Tensor):
                    found = found.tolist()
                assert found == value, f"rank {rank}: {name}"
            assert plan.num_tokens_of_rank == tuple(map(len, ids))


# ---- skew ----


@pytest.mark.parametrize("expert", [0, 5, 895])
def test_all_tokens_to_one_expert(expert: int) -> None:
    """T = 4096, K = 16, R = 4, all to one expert: 2**18 rows, counted exactly."""
    idx = torch.full((4096, 16), expert)
    ranks = Ranks([idx] * 4, 896, 128)
    home, rows = home_rank(expert, 896, 4), idx.numel()
    for rank, (plan, same) in enumerate(zip(ranks.plans_from_ids(), ranks.plans_from_words(), strict=True)):
        assert plan.rank_rows.tolist() == [4 * rows if r == home else 0 for r in range(4)]
        assert plan.num_rows == (4 * rows if rank == home else 0)
        assert plan.group_sizes.sum() == plan.num_rows
        assert torch.equal(plan.dst_row.flatten(), torch.arange(rank * rows, (rank + 1) * rows))
        assert len(plan.outbox.token) == 4096
        assert len(plan.inbox.token) == (4 * 4096 if rank == home else 0)
        assert torch.equal(plan.inbox.row, torch.arange(plan.num_rows, dtype=torch.int32))
        assert torch.equal(same.inbox.row, plan.inbox.row)
        assert torch.equal(same.dst_row, plan.dst_row)


def test_heavy_skew_is_counted_exactly() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.arange(1, 65, dtype=torch.float64) ** -2.0
    idx_of_rank = [
        torch.multinomial(weights, 2048 * 8, replacement=True, generator=generator).view(2048, 8) for _ in range(3)
    ]
    totals = torch.cat(idx_of_rank).flatten().bincount(minlength=64)
    for plan in Ranks(idx_of_rank, 64).plans_from_ids():
        assert torch.equal(plan.group_sizes, totals[plan.group_experts])
        assert torch.equal(plan.rank_rows, torch.stack([part.sum() for part in totals.split([22, 21, 21])]))


# ---- ids out of range ----

INT32_MIN, INT64_MIN = -(2**31), -(2**63)


@pytest.mark.parametrize("layout", ["dense", "transposed", "sliced"])
@pytest.mark.parametrize(
    ("bad", "dtype"),
    [
        *itertools.product([-2, 5, INT32_MIN, 2**31 - 1], [torch.int32, torch.int64]),
        # Also where the low half alone would be an expert or -1.
        *itertools.product([2**32, 2**32 + 1, 2**40, 2**63 - 1, INT64_MIN, 2**32 - 1, -(2**32)], [torch.int64]),
    ],
)
def test_bad_id_is_named(bad: int, dtype: torch.dtype, layout: str) -> None:
    idx = torch.tensor([[0, -1, 4], [1, 2, bad], [bad, -5, 0]], dtype=dtype)
    planner = Planner(make_config(5, 3), 0, [0])
    ids, counts = torch.empty(3, 3, dtype=torch.int32), torch.empty(5, dtype=torch.int32)
    expected = f"topk_idx[1, 2]: expected -1 (no route) or an expert in [0, 5), got {bad}"
    with pytest.raises(ValueError) as caught:
        planner.load_ids(laid_out(idx, layout), ids.data_ptr(), counts.data_ptr())
    assert str(caught.value) == expected
    call = Call("plan")
    planner.load_ids_or_note(call, laid_out(idx, layout), ids.data_ptr(), counts.data_ptr())
    assert isinstance(call.problem, ValueError)
    assert str(call.problem) == expected


def test_buffer_stays_usable_after_a_bad_id() -> None:
    with moonep.Buffer(num_experts=4, top_k=2, hidden=8, max_tokens=4) as ep:
        with pytest.raises(ValueError, match=r"plan: rank 0: topk_idx\[0, 1\]: .* \[0, 4\), got 4"):
            ep.plan(torch.tensor([[0, 4]]))
        assert ep.plan(torch.tensor([[0, 3]])).num_rows == 2


# ---- words that contradict the counts ----


def words_for_rank_0() -> tuple[Ranks, list[torch.Tensor], Outgoing]:
    """Rank 0 owns experts 0 to 2 of 5; both ranks send it words."""
    ranks = Ranks([torch.tensor([[0, 1], [2, 3], [0, 0]]), torch.tensor([[1, 4], [2, 2], [-1, 0]])], 5)
    words, kept = ranks.send_words()
    return ranks, [sent[0].clone() for sent in words], kept[0]


FIRST = 1 << 30  # the flag on a token's first word


def test_words() -> None:
    ranks, words, outgoing = words_for_rank_0()
    assert words[0].tolist() == [0 | FIRST, 1, 2 | FIRST, 0 | FIRST, 0]
    assert words[1].tolist() == [1 | FIRST, 2 | FIRST, 2, 0 | FIRST]
    assert ranks.plan_from_words(0, words, outgoing) is not None


@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("wrong", ["another expert", "expert of another rank", "no expert", -1, INT32_MIN, "unwritten"])
def test_wrong_words_give_no_plan(source: int, place: int, wrong: str | int) -> None:
    ranks, words, outgoing = words_for_rank_0()
    word = int(words[source][place])
    flag, expert = word & FIRST, word & ~FIRST
    words[source][place] = {
        "another expert": flag | (expert + 1) % 3,
        "expert of another rank": flag | 3,
        "no expert": flag | (FIRST - 1),
        "unwritten": -1,
    }.get(wrong, wrong)  # type: ignore[call-overload]
    assert ranks.plan_from_words(0, words, outgoing) is None


@pytest.mark.parametrize("source", [0, 1])
def test_a_source_begins_with_a_token(source: int) -> None:
    ranks, words, outgoing = words_for_rank_0()
    words[source][0] &= ~FIRST
    assert ranks.plan_from_words(0, words, outgoing) is None


def test_missing_and_misplaced_words_give_no_plan() -> None:
    ranks, words, outgoing = words_for_rank_0()
    for fewer in ([words[0][:-1], words[1]], [words[0], words[1][:-1]], [words[0][:0], words[1]]):
        assert ranks.plan_from_words(0, fewer, outgoing) is None
    joined = torch.cat(words)
    assert ranks.plan_from_words(0, [joined[:3], joined[3:]], outgoing) is None
    assert ranks.plan_from_words(0, [words[1], words[0]], outgoing) is None


@quick
@given(routings(), st.data())
def test_any_wrong_expert_gives_no_plan(routing: tuple[list[torch.Tensor], int, int], data: st.DataObject) -> None:
    idx_of_rank, num_experts, _ = routing
    ranks = Ranks(idx_of_rank, num_experts)
    words, kept = ranks.send_words()
    rank = data.draw(st.integers(0, len(idx_of_rank) - 1))
    mine = [sent[rank].clone() for sent in words]
    places = [(source, place) for source, part in enumerate(mine) for place in range(len(part))]
    if not places:
        return
    source, place = data.draw(st.sampled_from(places))
    word = data.draw(st.integers(INT32_MIN, 2**31 - 1))
    if (word ^ int(mine[source][place])) in (0, FIRST):  # only the flag differs: other tokens, the same counts
        return
    mine[source][place] = word
    assert ranks.plan_from_words(rank, mine, kept[rank]) is None


# ---- large numbers ----


def test_rows_up_to_the_largest_number() -> None:
    """Lower ranks' counts alone put this rank's rows at the end of the 31 bits."""
    lower, own = MAX_ROWS - 3, torch.tensor([[0, -1], [0, 0]])
    ranks = Ranks([torch.empty(0, 2, dtype=torch.int64), own], 2)
    ranks.counts[0][0] = lower  # as if rank 0 sent so many; its ids are not read here
    _, outgoing, _ = ranks.planners[1].words_to_send(ranks.ids[1].data_ptr(), ranks.counts_addresses, (0, 2))
    assert outgoing.dst_row.tolist() == [[lower, -1], [lower + 1, lower + 2]]
    assert outgoing.outbox.row.tolist() == [lower, lower + 1, lower + 2]
    native = ranks.planners[0]._native
    native.set_counts(ranks.counts_addresses)
    native.lay_out(-1, -1)
    assert (native.num_rows, native.routes_in, native.routes_out) == (MAX_ROWS, MAX_ROWS, lower)
    experts, sizes, rank_rows = (torch.empty(2, dtype=torch.int64) for _ in range(3))
    ends = torch.empty(2, dtype=torch.int32)
    native.write_groups(experts.data_ptr(), sizes.data_ptr(), ends.data_ptr(), rank_rows.data_ptr(), 0)
    assert (int(experts[0]), int(sizes[0]), int(ends[0])) == (0, MAX_ROWS, MAX_ROWS)
    assert rank_rows.tolist() == [MAX_ROWS, 0]


@quick
@given(st.integers(1, 512), st.integers(1, 1024), st.integers(1, 64), st.integers(1, 256))
def test_max_tokens_beyond_row_numbers(num_ranks: int, num_experts: int, top_k: int, alignment: int) -> None:
    """The largest max_tokens that fits is accepted, one more is refused, and the refusal names it."""
    top_k = min(top_k, num_experts)
    fits = (MAX_ROWS - num_experts * alignment) // (num_ranks * top_k)

    def check(max_tokens: int) -> None:
        check_config(make_config(num_experts, top_k, max_tokens=max_tokens, expert_alignment=alignment), num_ranks)

    check(fits)
    with pytest.raises(ValueError, match=rf"^max_tokens: {fits + 1} tokens .* at most {fits} fits$"):
        check(fits + 1)
    with pytest.raises(ValueError, match=f"at most {fits} fits$"):
        check(2**62)


def test_padding_alone_beyond_row_numbers() -> None:
    """No max_tokens can help: the message must not ask for a negative one."""
    with pytest.raises(ValueError, match="expert_alignment") as caught:
        check_config(make_config(896, 16, expert_alignment=2**22), 4)
    assert "at most -" not in str(caught.value)
