"""The reference against computations that know nothing of ranks, and its order of sums against plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moonep import reference
from moonep.plan import home_rank, plan_plain
from moonep.testing import (
    RankFailure,
    RankPool,
    lognormal_routing,
    one_expert_routing,
    one_rank_routing,
    random_routing,
    ring_routing,
    run_ranks,
    topk_weights,
    uniform_routing,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
FIELDS = ("group_experts", "group_sizes", "group_ends", "rank_rows", "dst_rank", "dst_row", "replicas")


# ---- one step on the ranks ----


@dataclass
class Inputs:
    """What one rank passes."""

    x: torch.Tensor
    idx: torch.Tensor
    weights: torch.Tensor | None
    grad_y: torch.Tensor
    scale: torch.Tensor  # [E, H]: expert e multiplies by scale[e]
    needs_grad: bool = True


def make_inputs(
    routing_of_rank: Sequence[np.ndarray], num_experts: int, hidden: int, dtype: torch.dtype, weighted: bool = True
) -> list[Inputs]:
    generator = torch.Generator().manual_seed(len(routing_of_rank))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    scale = random(num_experts, hidden)
    return [
        Inputs(
            x=random(len(idx), hidden),
            idx=torch.from_numpy(idx),
            weights=torch.from_numpy(topk_weights(*idx.shape, seed=rank)) if weighted else None,
            grad_y=random(len(idx), hidden),
            scale=scale,
        )
        for rank, idx in enumerate(routing_of_rank)
    ]


def step(rank: int, inputs: Sequence[Inputs], settings: dict[str, Any]) -> dict[str, Any]:
    """Plan, dispatch, experts, combine and backward. Everything that came of it."""
    mine = inputs[rank]
    x, scale = mine.x.clone().requires_grad_(mine.needs_grad), mine.scale.clone().requires_grad_(mine.needs_grad)
    weights = None if mine.weights is None else mine.weights.clone().requires_grad_(mine.needs_grad)
    plan = reference.plan(mine.idx, num_experts=len(scale), **settings)
    recv = reference.dispatch(x, plan, weights)

    starts = torch.cat([torch.zeros(1, dtype=torch.int64), plan.group_ends.long()])
    out, padding = recv.x.new_empty(0, recv.x.shape[1]), torch.ones(plan.num_rows, dtype=torch.bool)
    groups = []
    for g in range(plan.num_groups):
        groups.append(recv.x[starts[g] : starts[g + 1]] * scale[plan.group_experts[g]])
        padding[starts[g] : starts[g] + plan.group_sizes[g]] = False
    if groups:
        out = torch.cat(groups)
    out = out + torch.where(padding, torch.nan, 0.0).to(out.dtype)[:, None]  # garbage reaches nothing
    y = reference.combine(out, plan, None if weights is None else recv.weights)
    y.backward(mine.grad_y)
    return {
        "y": y.detach(),
        "x_grad": x.grad,
        "weights_grad": None if weights is None else weights.grad,
        "scale_grad": scale.grad,
        "recv_x": recv.x.detach(),
        "recv_weights": recv.weights.detach(),
        "padding": padding,
        "num_tokens": plan.num_tokens,
        "num_rows": plan.num_rows,
        "num_groups": plan.num_groups,
        "num_dropped": plan.num_dropped,
        **{name: getattr(plan, name) for name in FIELDS},
    }


# ---- what is right ----


def check_dense(inputs: Sequence[Inputs], results: Sequence[dict[str, Any]]) -> None:
    """One process with all experts and all tokens, in float64, one route after the other."""
    scale = inputs[0].scale.double().requires_grad_()
    expected, losses = [], []
    for mine in inputs:
        x = mine.x.double().requires_grad_()
        ones = torch.ones(mine.idx.shape)
        weights = (ones if mine.weights is None else mine.weights).double().requires_grad_()
        rows = []
        for t in range(len(x)):
            row = torch.zeros(x.shape[1], dtype=torch.float64)
            for k, expert in enumerate(mine.idx[t].tolist()):
                if expert >= 0:
                    row = row + weights[t, k] * x[t] * scale[expert]
            rows.append(row)
        y = torch.stack(rows) if rows else x * 1
        expected.append((y, x, weights))
        losses.append((y * mine.grad_y.double()).sum())
    loss = torch.stack(losses).sum()
    if loss.requires_grad:
        loss.backward()

    tolerance = TOLERANCE[inputs[0].x.dtype]
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    for mine, result, (y, x, weights) in zip(inputs, results, expected, strict=True):
        assert result["y"].dtype == mine.x.dtype
        assert result["x_grad"].dtype == mine.x.dtype
        torch.testing.assert_close(result["y"], y.detach(), **close)
        torch.testing.assert_close(result["x_grad"], zeros_if_none(x), **close)
        if mine.weights is not None:
            torch.testing.assert_close(result["weights_grad"], zeros_if_none(weights), **close)
    scale_grad = torch.stack([result["scale_grad"].double() for result in results if result["scale_grad"] is not None])
    torch.testing.assert_close(scale_grad.sum(0), zeros_if_none(scale), rtol=tolerance, atol=4 * tolerance)


def zeros_if_none(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def sum_in_order(rows: Sequence[tuple[int, np.ndarray]], num_ranks: int, hosts: Sequence[int] | None) -> np.ndarray:
    """float32 sum of (rank, row) in k order, by DESIGN's order: within ranks, ranks within hosts, hosts."""
    hosts = hosts or [0] * num_ranks
    hidden = len(rows[0][1])
    total = np.zeros(hidden, np.float32)
    for host in dict.fromkeys(hosts):
        host_sum = np.zeros(hidden, np.float32)
        for rank in range(num_ranks):
            if hosts[rank] != host:
                continue
            rank_sum = np.zeros(hidden, np.float32)
            for at, row in rows:
                if at == rank:
                    rank_sum = rank_sum + row
            host_sum = host_sum + rank_sum
        total = total + host_sum
    return total


def check_bits(inputs: Sequence[Inputs], results: Sequence[dict[str, Any]], hosts: Sequence[int] | None) -> None:
    """y, the gradient of x and what was received, bit for bit."""
    num_ranks = len(inputs)
    for mine, result in zip(inputs, results, strict=True):
        dtype, scale = mine.x.dtype, mine.scale
        for t in range(len(mine.x)):
            outputs, grads = [], []
            for k, expert in enumerate(mine.idx[t].tolist()):
                if expert < 0:
                    continue
                rank = home_rank(expert, len(scale), num_ranks)
                weight = 1.0 if mine.weights is None else mine.weights[t, k]
                outputs.append((rank, ((mine.x[t] * scale[expert]).float() * weight).numpy()))
                grad_out = (mine.grad_y[t].float() * weight).to(dtype)
                grads.append((rank, (grad_out * scale[expert]).float().numpy()))
            zeros = [(0, np.zeros(mine.x.shape[1], np.float32))]
            y = torch.from_numpy(sum_in_order(outputs or zeros, num_ranks, hosts)).to(dtype)
            x_grad = torch.from_numpy(sum_in_order(grads or zeros, num_ranks, hosts)).to(dtype)
            assert same_bits(result["y"][t], y)
            assert same_bits(result["x_grad"][t], x_grad)
            for k in range(mine.idx.shape[1]):
                rank, row = int(result["dst_rank"][t, k]), int(result["dst_row"][t, k])
                if rank >= 0:
                    assert same_bits(results[rank]["recv_x"][row], mine.x[t])
                    assert results[rank]["recv_weights"][row] == (1.0 if mine.weights is None else mine.weights[t, k])
    for result in results:
        assert not result["recv_x"][result["padding"]].any()
        assert not result["recv_weights"][result["padding"]].any()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check_plans(inputs: Sequence[Inputs], results: Sequence[dict[str, Any]], num_experts: int, alignment: int) -> None:
    for rank, result in enumerate(results):
        expected = plan_plain([mine.idx for mine in inputs], rank, num_experts=num_experts, expert_alignment=alignment)
        for name in FIELDS:
            assert torch.equal(result[name], getattr(expected, name)), name
            assert result[name].dtype == getattr(expected, name).dtype, name
        for name in ("num_tokens", "num_rows", "num_groups", "num_dropped"):
            assert result[name] == getattr(expected, name), name


def run_and_check(
    pool: RankPool,
    routing_of_rank: Sequence[np.ndarray],
    *,
    num_experts: int,
    hidden: int = 5,
    dtype: torch.dtype = torch.float32,
    alignment: int = 1,
    hosts: Sequence[int] | None = None,
    weighted: bool = True,
) -> list[dict[str, Any]]:
    inputs = make_inputs(routing_of_rank, num_experts, hidden, dtype, weighted)
    results = pool.run(step, inputs, {"expert_alignment": alignment, "hosts": hosts})
    check_plans(inputs, results, num_experts, alignment)
    check_bits(inputs, results, hosts)
    check_dense(inputs, results)
    return results


# ---- shapes and routings ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
def test_dtypes(pool: RankPool, dtype: torch.dtype, weighted: bool) -> None:
    routing = [random_routing(9 + rank, 8, 3, seed=rank) for rank in range(pool.num_ranks)]
    run_and_check(pool, routing, num_experts=8, hidden=16, dtype=dtype, weighted=weighted)


@pytest.mark.parametrize("alignment", [1, 4, 16])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "hidden"),
    [(5, 3, 7), (7, 2, 1), (13, 13, 8), (4, 1, 33), (1, 1, 1), (3, 3, 2), (2, 1, 4)],
)
def test_shapes(pool: RankPool, num_experts: int, top_k: int, hidden: int, alignment: int) -> None:
    routing = [uniform_routing(6 + rank, num_experts, top_k, seed=rank) for rank in range(pool.num_ranks)]
    run_and_check(pool, routing, num_experts=num_experts, hidden=hidden, alignment=alignment)


@pytest.mark.parametrize("tokens", [(0, 5, 3, 4), (5, 0, 0, 0), (3, 0, 6, 0), (0, 0, 0, 0), (1, 1, 1, 1)])
@pytest.mark.parametrize("alignment", [1, 8])
def test_empty_ranks(pool: RankPool, tokens: tuple[int, ...], alignment: int) -> None:
    routing = [random_routing(tokens[rank], 6, 2, seed=rank) for rank in range(pool.num_ranks)]
    results = run_and_check(pool, routing, num_experts=6, alignment=alignment)
    for result, num_tokens in zip(results, tokens, strict=False):
        assert result["y"].shape == (num_tokens, 5)


@pytest.mark.parametrize(
    "name", ["one expert", "expert repeated", "one rank", "ring", "no route", "skewed", "reversed"]
)
def test_routings(pool: RankPool, name: str) -> None:
    tokens, experts, top_k, ranks = 8, 9, 3, pool.num_ranks

    def route(rank: int) -> np.ndarray:
        if name == "one expert":
            return one_expert_routing(tokens, experts, top_k, seed=rank, expert=experts - 1)
        if name == "expert repeated":
            return one_expert_routing(tokens, experts, top_k, seed=rank, expert=1, repeated=True)
        if name == "one rank":
            return one_rank_routing(tokens, experts, top_k, seed=rank, num_ranks=ranks, rank=ranks - 1)
        if name == "ring":
            return ring_routing(tokens, experts, top_k, seed=rank, num_ranks=ranks, rank=rank)
        if name == "no route":
            return np.full((tokens, top_k), -1)
        if name == "skewed":
            return lognormal_routing(tokens, experts, top_k, maxvio=2.0, seed=rank)
        return np.sort(uniform_routing(tokens, experts, top_k, seed=rank))[:, ::-1].copy()

    run_and_check(pool, [route(rank) for rank in range(ranks)], num_experts=experts)


# ---- the order of sums ----


@pytest.mark.parametrize("hosts", [None, (0, 0, 0, 0), (0, 1, 0, 1), (5, 5, 3, 3), (0, 1, 1, 0), (3, 2, 1, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hosts(pool: RankPool, hosts: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    routing = [random_routing(8, 8, 8, seed=rank, holes=0.1) for rank in range(pool.num_ranks)]
    run_and_check(pool, routing, num_experts=8, dtype=dtype, hosts=hosts and hosts[: pool.num_ranks])


def test_order_is_seen_in_the_bits(pool4: RankPool) -> None:
    """Otherwise the tests of the order would show nothing."""
    inputs = make_inputs([uniform_routing(16, 16, 16, seed=rank) for rank in range(4)], 16, 8, torch.float32)
    one_host, two_hosts = (pool4.run(step, inputs, {"hosts": hosts}) for hosts in (None, (0, 1, 0, 1)))
    for name in ("y", "x_grad"):
        assert any(not same_bits(a[name], b[name]) for a, b in zip(one_host, two_hosts, strict=True))


def with_threads(rank: int, inputs: Sequence[Inputs]) -> dict[str, Any]:
    torch.set_num_threads(2)
    try:
        return step(rank, inputs, {})
    finally:
        torch.set_num_threads(1)


def test_many_threads_and_blocks_keep_the_order(pool2: RankPool) -> None:
    hidden = 2048
    tokens = 3 * reference._BLOCK_ELEMENTS // hidden // 2
    inputs = make_inputs([random_routing(tokens, 8, 6, seed=rank) for rank in range(2)], 8, hidden, torch.bfloat16)
    results = pool2.run(with_threads, inputs)
    check_bits(inputs, results, None)
    again = pool2.run(with_threads, inputs)
    for first, second in zip(results, again, strict=True):
        for name in ("y", "x_grad", "weights_grad"):
            assert same_bits(first[name], second[name])


# ---- inputs ----


def mixed_layouts(rank: int, mine: Inputs, top_k: int) -> tuple[torch.Tensor, ...]:
    def run(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.detach().requires_grad_()
        plan = reference.plan(idx, num_experts=6)
        recv = reference.dispatch(leaf, plan, weights)
        y = reference.combine(recv.x.t().contiguous().t(), plan, recv.weights)
        y.sum().backward()  # a gradient of stride 0
        assert leaf.grad is not None
        return y.detach(), leaf.grad

    assert mine.weights is not None
    y, grad = run(mine.x, mine.idx, mine.weights)
    strided_x = torch.cat([mine.x, mine.x], dim=1)[:, : mine.x.shape[1]]
    strided_idx = mine.idx.int().t().contiguous().t()
    strided_y, strided_grad = run(strided_x, strided_idx, mine.weights.double())
    return y, strided_y, grad, strided_grad


def test_layouts_and_dtypes_of_arguments(pool: RankPool) -> None:
    (mine,) = make_inputs([random_routing(7, 6, 2, seed=0)], 6, 4, torch.bfloat16)
    for y, strided_y, grad, strided_grad in pool.run(mixed_layouts, mine, 2):
        assert same_bits(y, strided_y)
        assert same_bits(grad, strided_grad)


def test_a_rank_without_gradients_takes_part(pool: RankPool) -> None:
    routing = [uniform_routing(4, 6, 2, seed=rank) for rank in range(pool.num_ranks)]
    inputs = make_inputs(routing, 6, 4, torch.float32)
    inputs[0].needs_grad = False
    results = pool.run(step, inputs, {})
    assert results[0]["x_grad"] is None
    assert all(result["x_grad"] is not None for result in results[1:])


def no_graph(rank: int, mine: Inputs) -> bool:
    plan = reference.plan(mine.idx, num_experts=6)
    with torch.no_grad():
        recv = reference.dispatch(mine.x.requires_grad_(), plan, mine.weights)
        return recv.x.requires_grad or reference.combine(recv.x, plan, recv.weights).requires_grad


def test_no_grad(pool2: RankPool) -> None:
    (mine,) = make_inputs([uniform_routing(4, 6, 2, seed=0)], 6, 4, torch.float32)
    assert pool2.run(no_graph, mine) == [False, False]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bad_token_stays_alone(pool: RankPool, value: float) -> None:
    inputs = make_inputs([uniform_routing(5, 6, 3, seed=rank) for rank in range(pool.num_ranks)], 6, 4, torch.float32)
    inputs[-1].x[2] = value
    for rank, result in enumerate(pool.run(step, inputs, {"expert_alignment": 4})):
        finite = result["y"].isfinite().all(dim=1)
        assert finite.tolist() == [not (rank == pool.num_ranks - 1 and t == 2) for t in range(5)]
        assert result["x_grad"].isfinite().all()


@pytest.mark.parametrize("bad", [-2, 6, 2**40])
def test_bad_ids_raise_on_every_rank(pool: RankPool, bad: int) -> None:
    inputs = make_inputs([uniform_routing(5, 6, 3, seed=rank) for rank in range(pool.num_ranks)], 6, 4, torch.float32)
    inputs[-1].idx[3, 1] = bad
    with pytest.raises(RankFailure) as caught:
        pool.run(step, inputs, {})
    for outcome in caught.value.outcomes:
        assert outcome.error is not None
        assert outcome.error.startswith("ValueError")
        assert f"rank {pool.num_ranks - 1}: topk_idx[3, 1]" in outcome.error
        assert "[0, 6)" in outcome.error
        assert str(bad) in outcome.error
    inputs[-1].idx[3, 1] = 0
    check_dense(inputs, pool.run(step, inputs, {}))  # nobody is left behind


def test_ids_of_another_dtype() -> None:
    with pytest.raises(TypeError, match=r"topk_idx: expected int32 or int64, got torch\.float32"):
        reference.plan(torch.zeros(2, 2), num_experts=4)


# ---- groups ----


def test_without_a_process_group() -> None:
    inputs = make_inputs([random_routing(7, 6, 3, seed=0)], 6, 4, torch.bfloat16)
    results = [step(0, inputs, {"expert_alignment": 4})]
    check_plans(inputs, results, 6, 4)
    check_bits(inputs, results, None)
    check_dense(inputs, results)
    (alone,) = run_ranks(step, 1, inputs, {"expert_alignment": 4}, backend=None)
    assert same_bits(alone["y"], results[0]["y"])


def step_in_subgroup(rank: int, members: list[int], inputs: Sequence[Inputs]) -> dict[str, Any] | None:
    group = dist.new_group(members)
    return step(members.index(rank), inputs, {"group": group}) if rank in members else None


def test_subgroup(pool4: RankPool) -> None:
    inputs = make_inputs([random_routing(6, 5, 2, seed=rank) for rank in range(2)], 5, 4, torch.float32)
    results = pool4.run(step_in_subgroup, [1, 3], inputs)
    assert results[0] is None
    assert results[2] is None
    members = [results[1], results[3]]
    check_plans(inputs, members, 5, 1)
    check_bits(inputs, members, None)
    check_dense(inputs, members)
