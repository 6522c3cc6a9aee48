"""Capacity: the same rows for every expert; what is over is dropped by weight, or raises on all ranks."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import moonep
from moonep import reference
from moonep.plan import plan_plain

FIELDS = ("group_experts", "group_sizes", "group_ends", "rank_rows", "dst_rank", "dst_row")


def hand_made(topk_weights: list[list[float]] | None) -> moonep.Plan:
    """Three tokens on one rank, all to expert 0, one also to expert 1; two experts with two rows each."""
    idx = torch.tensor([[0, 1], [0, -1], [0, -1]])
    weights = None if topk_weights is None else [torch.tensor(topk_weights)]
    # ceil(0.5 * 3 * 2 / 2) = 2
    return plan_plain([idx], 0, num_experts=2, policy=moonep.Capacity(0.5), topk_weights_of_rank=weights)


def test_without_weights_the_latest_is_dropped() -> None:
    plan = hand_made(None)
    assert plan.dst_row.tolist() == [[0, 2], [1, -1], [-1, -1]]
    assert (plan.num_rows, plan.num_dropped) == (4, 1)
    assert plan.group_sizes.tolist() == [2, 1]
    assert plan.group_ends.tolist() == [2, 4]


def test_the_lowest_weight_is_dropped() -> None:
    assert hand_made([[0.1, 0.9], [0.5, 0.0], [0.4, 0.0]]).dst_row.tolist() == [[-1, 2], [0, -1], [1, -1]]
    # Equal weights: the latest goes. NaN is lower than anything.
    assert hand_made([[0.5, 0.9], [0.5, 0.0], [0.5, 0.0]]).dst_row.tolist() == [[0, 2], [1, -1], [-1, -1]]
    assert hand_made([[float("nan"), 0.9], [-1.0, 0.0], [0.5, 0.0]]).dst_row.tolist() == [[-1, 2], [0, -1], [1, -1]]


@pytest.mark.parametrize(
    ("factor", "tokens", "top_k", "experts", "alignment", "rows"),
    [(1.0, 10, 2, 5, 1, 4), (1.1, 50, 2, 10, 1, 11), (1.25, 7, 3, 4, 8, 8), (0.01, 3, 1, 7, 1, 1), (2, 0, 4, 4, 16, 0)],
)
def test_rows_per_expert(factor: float, tokens: int, top_k: int, experts: int, alignment: int, rows: int) -> None:
    assert moonep.Capacity(factor).rows_per_expert(tokens, top_k, experts, alignment) == rows


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60, deadline=None)
def test_local_is_the_definition(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, min(4, experts)))
    tokens = data.draw(st.integers(0, 12))
    seed = data.draw(st.integers(0, 2**20))
    policy = moonep.Capacity(data.draw(st.sampled_from([0.1, 0.5, 1.0, 1.25, 3.0])))
    alignment = data.draw(st.sampled_from([1, 4]))
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(-1, experts, (tokens, top_k), generator=generator)
    # Few distinct weights: ties must be broken as the definition says.
    weights = torch.randint(0, 3, (tokens, top_k), generator=generator) / 2 if data.draw(st.booleans()) else None
    expected = plan_plain(
        [idx],
        0,
        num_experts=experts,
        expert_alignment=alignment,
        policy=policy,
        topk_weights_of_rank=None if weights is None else [weights],
    )
    with moonep.Buffer(
        num_experts=experts,
        top_k=top_k,
        hidden=3,
        max_tokens=12,
        dtype=torch.float32,
        policy=policy,
        expert_alignment=alignment,
    ) as ep:
        plan = ep.plan(idx, weights)
    assert (plan.num_rows, plan.num_dropped) == (expected.num_rows, expected.num_dropped)
    for name in FIELDS:
        assert torch.equal(getattr(plan, name), getattr(expected, name)), name
    assert plan.num_dropped == int((idx >= 0).sum()) - int((plan.dst_row >= 0).sum())


def compare(rank: int, transport: str, weighted: bool, factor: float, sizes: list[int]) -> int:
    """A step against the reference and the definition; how many routes of this rank were dropped."""
    experts, top_k, hidden = 11, 4, 37
    policy = moonep.Capacity(factor)
    inputs = []
    for r, tokens in enumerate(sizes):
        generator = torch.Generator().manual_seed(r)
        idx = (torch.rand(tokens, top_k, generator=generator) ** 3 * (experts + 1)).long() - 1  # skewed, with holes
        inputs.append(
            (
                idx,
                torch.rand(tokens, top_k, generator=generator),
                torch.randn(tokens, hidden, generator=generator).bfloat16(),
            )
        )
    idx, w0, x0 = inputs[rank]
    given = w0 if weighted else None
    plain = plan_plain(
        [each[0] for each in inputs],
        rank,
        num_experts=experts,
        expert_alignment=4,
        policy=policy,
        topk_weights_of_rank=[each[1] for each in inputs] if weighted else None,
    )
    plan_ref = reference.plan(idx, num_experts=experts, expert_alignment=4, policy=policy, topk_weights=given)
    with moonep.Buffer(
        num_experts=experts,
        top_k=top_k,
        hidden=hidden,
        max_tokens=max(sizes),
        policy=policy,
        transport=transport,
        expert_alignment=4,
        timeout_secs=30,
    ) as ep:
        plan = ep.plan(idx, given)
        for other in (plain, plan_ref):
            assert (plan.num_rows, plan.num_dropped) == (other.num_rows, other.num_dropped)
            for name in FIELDS:
                assert torch.equal(getattr(plan, name), getattr(other, name)), name
        outputs = []
        for verbs, its_plan in ((ep, plan), (reference, plan_ref)):
            x, w = x0.clone().requires_grad_(), w0.clone().requires_grad_()
            recv = verbs.dispatch(x, its_plan, w)
            y = verbs.combine(recv.x, its_plan, recv.weights)
            y.backward(torch.ones_like(y))
            outputs.append((recv.x, recv.weights, y, x.grad, w.grad))
    for mine, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0 if mine.dtype == torch.bfloat16 else 1e-3)
    w_grad = outputs[0][4]
    assert bool((w_grad[plan.dst_row < 0] == 0).all())  # a dropped route has no say, and no gradient
    return plan.num_dropped


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("factor", [0.3, 0.7, 20.0])
def test_transports_are_the_definition(pool: Any, weighted: bool, factor: float) -> None:
    ranks = len(pool.pids)
    for transport in ("local",) if ranks == 1 else ("shm", "collective"):
        dropped = pool.run(compare, transport, weighted, factor, [50, 0, 31, 7][:ranks])
        assert (sum(dropped) > 0) == (factor < 1)


def overflowing(rank: int, transport: str) -> tuple[str, str]:
    """What is said when an expert is over, and when only one rank gives weights; the Buffer then works."""
    idx = torch.zeros(4, 2, dtype=torch.int64)
    said = []
    with moonep.Buffer(
        num_experts=8,
        top_k=2,
        hidden=4,
        max_tokens=4,
        policy=moonep.Capacity(1.5, overflow="error"),
        transport=transport,
        timeout_secs=30,
    ) as ep:
        for call in (lambda: ep.plan(idx), lambda: ep.plan(idx, torch.rand(4, 2) if rank == 0 else None)):
            try:
                call()
            except (moonep.errors.CapacityExceededError, ValueError) as error:
                said.append(f"{type(error).__name__}: {error}")
        fine = ep.plan(torch.arange(8).view(4, 2))
        assert fine.num_dropped == 0
        assert fine.num_rows == fine.num_groups * ep.config.policy.rows_per_expert(4 * ep.num_ranks, 2, 8, 1)
    return tuple(said)


@pytest.mark.parametrize("transport", ["shm", "collective"])
def test_overflow_raises_everywhere(pool2: Any, transport: str) -> None:
    for over, mixed in pool2.run(overflowing, transport):
        # ceil(1.5 * 8 tokens * 2 / 8) = 3 rows
        assert over.startswith("CapacityExceededError: plan: ")
        assert "leaves every expert 3 rows" in over
        assert "expert 0: 16" in over
        assert "topk_weights: expected from all ranks or none, got it from rank 0 only" in mixed


@pytest.mark.parametrize(
    ("policy", "kind", "text"),
    [
        (moonep.Capacity(0), ValueError, "factor"),
        (moonep.Capacity(float("inf")), ValueError, "factor"),
        (moonep.Capacity("1"), TypeError, "factor"),  # type: ignore[arg-type]
        (moonep.Capacity(1.0, overflow="spill"), ValueError, "overflow"),
        (moonep.Capacity(1e9), ValueError, "more than row numbers can hold"),
    ],
)
def test_settings_that_cannot_work(policy: moonep.Capacity, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        moonep.Buffer(num_experts=8, top_k=2, hidden=4, max_tokens=4, policy=policy)
