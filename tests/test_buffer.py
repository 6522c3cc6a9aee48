"""The verbs against `moonep.reference`, bit for bit, and against what they mean."""

import dataclasses
import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moonep
from moonep import reference
from moonep.plan import home_rank

PLAN_FIELDS = (
    "num_tokens",
    "num_rows",
    "num_groups",
    "group_experts",
    "group_sizes",
    "group_ends",
    "replicas",
    "rank_rows",
    "dst_rank",
    "dst_row",
    "num_dropped",
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def transports(num_ranks: int) -> tuple[str, ...]:
    return ("local",) if num_ranks == 1 else ("shm", "collective")


# ---- cases ----


@dataclass(frozen=True)
class Case:
    """One routing of one shape. `tokens[r]` is T of rank r (cyclic)."""

    routing: str
    num_experts: int = 16
    top_k: int = 4
    hidden: int = 24
    tokens: tuple[int, ...] = (13, 9, 16, 11)
    dtype: torch.dtype = torch.float32
    expert_alignment: int = 1
    weighted: bool = True  # False: topk_weights=None and weights=None
    seed: int = 0
    layout: str = "dense"  # of the inputs
    combine_wire: str = "float32"

    def tokens_of(self, rank: int) -> int:
        return self.tokens[rank % len(self.tokens)]


def distinct(scores_TE: torch.Tensor, top_k: int) -> torch.Tensor:
    return scores_TE.topk(top_k, dim=1).indices


def one_expert(scores: torch.Tensor, case: Case, rank: int, num_ranks: int) -> torch.Tensor:
    return torch.full((len(scores), case.top_k), case.num_experts - 1)


def of_rank(target: int, scores: torch.Tensor, case: Case, num_ranks: int) -> torch.Tensor:
    """Experts of one rank alone, repeated where it has too few; any other expert where it has none."""
    homes = [home_rank(expert, case.num_experts, num_ranks) for expert in range(case.num_experts)]
    there = [expert for expert, home in enumerate(homes) if home == target] or [0]
    order = scores[:, there].argsort(dim=1)
    return torch.tensor(there)[order.repeat(1, -(-case.top_k // len(there)))[:, : case.top_k]]


def lognormal(scores: torch.Tensor, case: Case, rank: int, num_ranks: int) -> torch.Tensor:
    """The same experts are loved everywhere: near the bound E / K - 1 of maxvio."""
    love = torch.randn(case.num_experts, generator=torch.Generator().manual_seed(case.seed)).mul(4)
    return distinct(love + scores.clamp_min(1e-6).log().neg().log().neg(), case.top_k)


def holes(scores: torch.Tensor, case: Case, rank: int, num_ranks: int) -> torch.Tensor:
    idx = distinct(scores, case.top_k)
    return idx.masked_fill(scores[:, : case.top_k] < 0.4, -1)


ROUTINGS: dict[str, Callable[[torch.Tensor, Case, int, int], torch.Tensor]] = {
    "uniform": lambda scores, case, rank, num_ranks: distinct(scores, case.top_k),
    "one expert": one_expert,
    "one rank": lambda scores, case, rank, num_ranks: of_rank(num_ranks - 1, scores, case, num_ranks),
    "all local": lambda scores, case, rank, num_ranks: of_rank(rank, scores, case, num_ranks),
    "ring": lambda scores, case, rank, num_ranks: of_rank((rank + 1) % num_ranks, scores, case, num_ranks),
    "all remote": lambda scores, case, rank, num_ranks: torch.where(
        scores[:, :1] < 0.5,
        of_rank((rank + 1) % num_ranks, scores, case, num_ranks),
        of_rank((rank + num_ranks - 1) % num_ranks, scores, case, num_ranks),
    ),
    "lognormal": lognormal,
    "repeated": lambda scores, case, rank, num_ranks: (scores[:, : case.top_k] ** 3 * case.num_experts).long(),
    "holes": holes,
    "none": lambda scores, case, rank, num_ranks: torch.full((len(scores), case.top_k), -1),
}

SHAPE_CASES = [
    Case("uniform", 1, 1, 1, (3, 0, 2)),  # more ranks than experts
    Case("uniform", 3, 2, 7, (5, 6)),
    Case("holes", 3, 3, 7, (5, 6), torch.bfloat16, 4),
    Case("uniform", 7, 3, 5, (8, 3), torch.float16),
    Case("uniform", 5, 5, 1, (4, 7), torch.bfloat16),  # K = E
    Case("uniform", 5, 1, 33, (17, 2), torch.float16, 8),  # K = 1
    Case("uniform", 896, 16, 3584, (6, 2), torch.bfloat16, 8),
    Case("lognormal", 128, 22, 40, (9,), torch.bfloat16),
    Case("uniform", 32, 32, 8, (5, 1), torch.float16),
    Case("uniform", 64, 32, 9, (5, 1)),
    Case("holes", 8, 2, 16, (1,), torch.bfloat16),  # S = 1
    Case("uniform", 8, 2, 16, (0, 7), torch.bfloat16),  # no tokens on some rank
    Case("uniform", 8, 2, 16, (5, 0, 0, 0), torch.float16, 16),
    Case("uniform", 8, 2, 16, (0,), torch.float32),  # or on all
    Case("uniform", 8, 2, 16, (0,), torch.bfloat16, 16, weighted=False),
    Case("uniform", 16, 8, 7168, (3, 4), torch.bfloat16, weighted=False),
    Case("repeated", 6, 4, 3584, (300, 280, 310), torch.float32),  # several chunks of staging
]
ROUTING_CASES = [
    Case(name, dtype=dtype, expert_alignment=alignment, seed=seed, weighted=(name, dtype) != ("holes", torch.float16))
    for seed, name in enumerate(ROUTINGS)
    for dtype, alignment in list(zip(DTYPES * 2, (1, 8, 5) * 2, strict=True))[seed % 3 :][:2]
]
LAYOUT_CASES = [
    Case("holes", dtype=dtype, layout=layout, expert_alignment=4)
    for layout in ("sliced", "transposed", "rows", "expanded")
    for dtype in (torch.bfloat16, torch.float32)
]


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    num_experts = draw.choice((1, 2, 3, 5, 7, 8, 12, 16, 33, 64))
    return Case(
        draw.choice(list(ROUTINGS)),
        num_experts,
        draw.randint(1, min(num_experts, 12)),
        draw.choice((1, 2, 3, 7, 8, 16, 31, 64, 100)),
        tuple(draw.choice((0, 1, 2, 5, 13, 40)) for _ in range(4)),
        draw.choice(DTYPES),
        draw.choice((1, 1, 2, 3, 8, 16, 128)),
        draw.random() < 0.8,
        seed,
        draw.choice(("dense", "dense", "sliced", "transposed", "rows")),
        draw.choice(("float32", "payload")),
    )


@dataclass
class Inputs:
    idx: torch.Tensor  # [T, K]
    x: torch.Tensor  # [T, H], perhaps a view of the leaf
    leaf: torch.Tensor
    weights: torch.Tensor | None  # [T, K]
    weights_leaf: torch.Tensor | None
    grad_y: torch.Tensor  # [T, H]

    def grads(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of `x`'s leaf and of the weights' leaf; takes them away."""
        found = self.leaf.grad, None if self.weights_leaf is None else self.weights_leaf.grad
        for leaf in (self.leaf, self.weights_leaf):
            if leaf is not None:
                leaf.grad = None
        return found


def make_inputs(case: Case, rank: int, num_ranks: int) -> Inputs:
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    T, K, H = case.tokens_of(rank), case.top_k, case.hidden

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    scores = torch.rand(T, case.num_experts, generator=generator)
    idx = ROUTINGS[case.routing](scores, case, rank, num_ranks)
    weights_leaf = torch.rand(T, K, generator=generator)
    if case.layout == "sliced":
        idx = torch.stack((idx, torch.full_like(idx, 10**6)), dim=2)[:, :, 0].to(torch.int32)
        leaf = normal(T, 2 * H).to(case.dtype).requires_grad_()
        x = leaf[:, 1::2]
        weights = weights_leaf.double().requires_grad_()
        weights_leaf = weights
    elif case.layout == "transposed":
        idx = idx.t().contiguous().t()
        leaf = normal(H, T).to(case.dtype).requires_grad_()
        x = leaf.t()
        weights_leaf = weights_leaf.t().contiguous().requires_grad_()
        weights = weights_leaf.t()
    elif case.layout == "rows":
        idx = idx.repeat_interleave(2, dim=0)[::2].to(torch.int32)
        leaf = normal(2 * T + 1, H).to(case.dtype).requires_grad_()
        x = leaf[1::2]
        weights_leaf = weights_leaf.to(torch.bfloat16).requires_grad_()
        weights = weights_leaf
    elif case.layout == "expanded":
        idx = idx[:1].expand(T, K)
        leaf = normal(1, H).to(case.dtype).requires_grad_()
        x = leaf.expand(T, H)
        weights_leaf = weights_leaf[:1].clone().requires_grad_()
        weights = weights_leaf.expand(T, K)
    else:
        leaf = x = normal(T, H).to(case.dtype).requires_grad_()
        weights = weights_leaf.requires_grad_()
    if not case.weighted:
        return Inputs(idx, x, leaf, None, None, normal(T, H).to(case.dtype))
    return Inputs(idx, x, leaf, weights, weights_leaf, normal(T, H).to(case.dtype))


# ---- what is compared ----


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, but +0 and -0 differ and every NaN is one."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach().contiguous(), b.detach().contiguous()
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    bits = BITS[a.element_size()]
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


def close(a: torch.Tensor, b: torch.Tensor, scale: float) -> bool:
    """Close as two orders of one float32 sum of terms about `scale` in all are."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a - b).abs() <= 2e-5 * scale).all())


@dataclass
class Differences:
    """Gathers what is wrong instead of stopping, so that no peer is left waiting."""

    found: list[str] = field(default_factory=list)
    about: str = ""

    def check(self, right: bool, what: str) -> None:
        if not right:
            self.found.append(f"{self.about}: {what}")

    def bits(self, what: str, got: torch.Tensor | None, expected: torch.Tensor | None) -> None:
        if got is None or expected is None:
            self.check(got is expected, f"{what} is {got}, expected {expected}")
        else:
            self.check(same_bits(got, expected), f"{what} differs: {got} {got.dtype}, expected {expected}")

    def finish(self) -> None:
        assert not self.found, "\n".join(self.found[:5])


def row_scales(plan: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What each row's expert multiplies with [N, 1], and which rows are padding [N, 1]."""
    scales, padding = torch.ones(plan.num_rows, 1), torch.ones(plan.num_rows, 1, dtype=torch.bool)
    groups = (plan.group_experts, plan.group_sizes, plan.group_ends)
    begin = 0
    for expert, size, end in zip(*(t.tolist() for t in groups), strict=True):
        scales[begin:end] = 0.5 + expert % 7
        padding[begin : begin + size] = False
        begin = end
    return scales, padding


def experts(rows: torch.Tensor, plan: Any, garbage: bool) -> torch.Tensor:
    """A differentiable expert for every group. With garbage: NaN where no token is."""
    scales, padding = row_scales(plan)
    out = (rows.float().tanh() * scales).to(rows.dtype)
    return out.masked_fill(padding, math.nan) if garbage else out


def make_buffer(case: Case, num_ranks: int, transport: str, **settings: Any) -> moonep.Buffer:
    return moonep.Buffer(
        num_experts=case.num_experts,
        top_k=case.top_k,
        hidden=case.hidden,
        max_tokens=max(1, *(case.tokens_of(rank) for rank in range(num_ranks))),
        dtype=case.dtype,
        expert_alignment=case.expert_alignment,
        combine_wire=case.combine_wire,
        **{"transport": transport, "timeout_secs": 30.0} | settings,
    )


def reference_plan(case: Case, inputs: Inputs, hosts: list[int] | None = None) -> reference.ReferencePlan:
    return reference.plan(
        inputs.idx,
        num_experts=case.num_experts,
        expert_alignment=case.expert_alignment,
        combine_wire=case.combine_wire,
        hosts=hosts,
    )


def check_meaning(wrong: Differences, case: Case, plan: moonep.Plan, recv: moonep.Received, inputs: Inputs) -> None:
    """Conservation, and every row traced to its token. Collective."""
    mine = (plan.dst_rank, plan.dst_row, inputs.x.detach(), inputs.weights, inputs.idx)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [None if tensor is None else tensor.detach().clone() for tensor in mine])
    routes = sum(int((idx >= 0).sum()) for *_, idx in gathered)
    wrong.check(int(plan.rank_rows.sum()) == routes, f"{plan.rank_rows} rows for {routes} routes")
    rank = dist.get_rank()
    wrong.check(int(plan.group_sizes.sum()) == int(plan.rank_rows[rank]), "group_sizes and rank_rows disagree")
    wrong.check(int((plan.dst_row >= 0).sum()) == int((inputs.idx >= 0).sum()), "routes without rows")

    expected_x = torch.zeros(plan.num_rows, case.hidden, dtype=case.dtype)
    expected_weights = torch.zeros(plan.num_rows)
    times_written = torch.zeros(plan.num_rows, dtype=torch.int64)
    for dst_rank, dst_row, x, weights, _ in gathered:
        token, k = (dst_rank == rank).nonzero(as_tuple=True)
        row = dst_row[token, k]
        expected_x[row] = x[token]
        expected_weights[row] = 1.0 if weights is None else weights[token, k].float()
        times_written.index_add_(0, row, torch.ones_like(row))
    _, padding = row_scales(plan)
    wrong.check(torch.equal(times_written, (~padding[:, 0]).long()), "some row has no token, or several")
    wrong.bits("recv.x by its tokens", recv.x, expected_x)
    wrong.bits("recv.weights by its tokens", recv.weights, expected_weights)


def check_case(wrong: Differences, case: Case, rank: int, transport: str) -> None:
    """Everything about one case. Collective; never stops early."""
    num_ranks = dist.get_world_size()
    wrong.about = f"{transport}, rank {rank} of {num_ranks}, {case}"
    inputs = make_inputs(case, rank, num_ranks)
    with make_buffer(case, num_ranks, transport) as ep:
        wrong.check(ep.transport == transport, f"transport is {ep.transport}")
        plan = ep.plan(inputs.idx)
        ref_plan = reference_plan(case, inputs)
        for name in PLAN_FIELDS:
            got, expected = getattr(plan, name), getattr(ref_plan, name)
            if isinstance(expected, torch.Tensor):
                wrong.bits(f"plan.{name}", got, expected)
            else:
                wrong.check(got == expected, f"plan.{name} is {got}, expected {expected}")

        recv = ep.dispatch(inputs.x, plan, inputs.weights)
        check_meaning(wrong, case, plan, recv, inputs)
        out = experts(recv.x, plan, garbage=True)
        y = ep.combine(out, plan, recv.weights if case.weighted else None)
        y.backward(inputs.grad_y)
        grad_x, grad_weights = inputs.grads()

        ref_recv = reference.dispatch(inputs.x, ref_plan, inputs.weights)
        ref_out = experts(ref_recv.x, ref_plan, garbage=False)
        ref_y = reference.combine(ref_out, ref_plan, ref_recv.weights if case.weighted else None)
        ref_y.backward(inputs.grad_y)
        ref_grad_x, ref_grad_weights = inputs.grads()

        wrong.bits("recv.x", recv.x, ref_recv.x)
        wrong.bits("recv.weights", recv.weights, ref_recv.weights)
        wrong.bits("y", y, ref_y)
        wrong.bits("the gradient of x", grad_x, ref_grad_x)
        if grad_weights is not None and ref_grad_weights is not None:
            # A gradient is a sum of H products of numbers up to 8 and about 1; the leaf's own dtype rounds it again.
            scale = 8 * case.hidden * (100 if inputs.weights_leaf is not None and case.layout == "rows" else 1)
            scale *= inputs.idx.shape[0] if case.layout == "expanded" else 1
            wrong.check(close(grad_weights, ref_grad_weights, scale), f"{grad_weights=}, expected {ref_grad_weights}")

        # dispatch alone: gradients of what was received go home; what padding gets reaches nothing.
        generator = torch.Generator().manual_seed(case.seed)
        grad_rows = torch.randn(plan.num_rows, case.hidden, generator=generator).to(case.dtype)
        grad_row_weights = torch.randn(plan.num_rows, generator=generator)
        _, padding = row_scales(plan)
        recv = ep.dispatch(inputs.x, plan, inputs.weights)
        nan = [grad_rows.masked_fill(padding, math.nan), grad_row_weights.masked_fill(padding[:, 0], math.nan)]
        torch.autograd.backward([recv.x, recv.weights], nan)
        ref_recv = reference.dispatch(inputs.x, ref_plan, inputs.weights)
        grads = inputs.grads()
        torch.autograd.backward([ref_recv.x, ref_recv.weights], [grad_rows, grad_row_weights])
        for what, got, expected in zip(("x", "topk_weights"), grads, inputs.grads(), strict=True):
            wrong.bits(f"dispatch's gradient of {what}", got, expected)


def check_cases(rank: int, transport: str, cases: list[Case]) -> None:
    wrong = Differences()
    for case in cases:
        check_case(wrong, case, rank, transport)
    wrong.finish()


def run_on(pool: Any, fn: Callable[..., object], *args: object, timeout_secs: float = 100) -> None:
    for transport in transports(len(pool.pids)):
        pool.run(fn, transport, *args, timeout_secs=timeout_secs)


def test_shapes(pool: Any) -> None:
    run_on(pool, check_cases, SHAPE_CASES)


def test_routings(pool: Any) -> None:
    run_on(pool, check_cases, ROUTING_CASES)


def test_layouts(pool: Any) -> None:
    run_on(pool, check_cases, LAYOUT_CASES)


def test_random_cases(pool: Any) -> None:
    run_on(pool, check_cases, [random_case(seed) for seed in range(16)])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_random_cases(pool: Any) -> None:
    run_on(pool, check_cases, [random_case(seed) for seed in range(16, 140)], timeout_secs=400)


REAL = Case("lognormal", 896, 16, 3584, (512,), torch.bfloat16)


@pytest.mark.parametrize("ranks", [2, 4])
def test_real_shape(ranks: int, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(f"pool{ranks}").run(check_cases, "shm", [REAL], timeout_secs=110)


# ---- properties ----


def check_adjoint(rank: int, transport: str) -> None:
    """<dispatch x, z> = <x, combine z>, over all ranks together."""
    wrong = Differences()
    for seed, routing in enumerate(ROUTINGS):
        case = Case(routing, 7, 3, 50, (40, 0, 33, 21), seed=seed, expert_alignment=4)
        num_ranks = dist.get_world_size()
        inputs = make_inputs(case, rank, num_ranks)
        with make_buffer(case, num_ranks, transport) as ep, torch.no_grad():
            plan = ep.plan(inputs.idx)
            recv = ep.dispatch(inputs.x, plan)
            z = torch.randn(recv.x.shape, generator=torch.Generator().manual_seed(rank))
            there = (recv.x.double() * z).sum()
            here = (inputs.x.double() * ep.combine(z, plan)).sum()
            sums = torch.stack((there, here))
            dist.all_reduce(sums)
            terms = case.top_k * case.hidden * sum(case.tokens_of(each) for each in range(num_ranks))
            wrong.check(abs(float(sums[0] - sums[1])) <= 1e-7 * (1 + terms), f"{routing}: {sums.tolist()}")
    wrong.finish()


def test_combine_is_dispatchs_adjoint(pool: Any) -> None:
    run_on(pool, check_adjoint)


def check_nonfinite(rank: int, transport: str) -> None:
    """A NaN or an Inf in a token reaches that token's output, all of it and nothing else."""
    wrong = Differences()
    num_ranks = dist.get_world_size()
    for dtype in DTYPES:
        case = Case("repeated", 6, 3, 20, (8, 6), dtype, 4)
        clean = make_inputs(case, rank, num_ranks).x.detach()
        inputs = make_inputs(case, rank, num_ranks)
        with make_buffer(case, num_ranks, transport) as ep, torch.no_grad():
            plan = ep.plan(inputs.idx)
            ys = []
            for value in (None, math.nan, math.inf):
                x = clean.clone()
                if value is not None and rank == num_ranks - 1:
                    x[2] = value
                recv = ep.dispatch(x, plan, inputs.weights)
                ys.append(ep.combine(recv.x, plan, recv.weights))
        others = torch.tensor([token != 2 or rank != num_ranks - 1 for token in range(len(clean))])
        for y in ys[1:]:
            wrong.bits("other tokens", y[others], ys[0][others])
        wrong.check(bool(ys[1][~others].isnan().all()), f"the token of NaN: {ys[1][~others]}")
        wrong.check(not bool(ys[2][~others].isfinite().any()), f"the token of Inf: {ys[2][~others]}")
    wrong.finish()


def test_nonfinite_tokens_stay_alone(pool: Any) -> None:
    run_on(pool, check_nonfinite)


def check_repeats(rank: int, transport: str) -> None:
    """The same seed gives the same bits, in another Buffer too."""
    case = Case("lognormal", 32, 8, 256, (64, 50), torch.bfloat16)
    num_ranks = dist.get_world_size()
    runs = []
    for _ in range(2):
        inputs = make_inputs(case, rank, num_ranks)
        with make_buffer(case, num_ranks, transport) as ep:
            plan = ep.plan(inputs.idx)
            for _ in range(3):
                recv = ep.dispatch(inputs.x, plan, inputs.weights)
                y = ep.combine(experts(recv.x, plan, garbage=False), plan, recv.weights)
                y.backward(inputs.grad_y)
                grads = inputs.grads()
                runs.append([recv.x, recv.weights, y, *(grad for grad in grads if grad is not None)])
    for run in runs[1:]:
        assert all(same_bits(a, b) for a, b in zip(run, runs[0], strict=True))


def test_runs_repeat_bit_for_bit(pool: Any) -> None:
    run_on(pool, check_repeats)


# ---- plans and buffers side by side ----


def check_plans_alive(rank: int, transport: str) -> None:
    """Several plans of one Buffer, used again and again and in any order."""
    wrong = Differences()
    num_ranks = dist.get_world_size()
    cases = [Case(routing, seed=seed) for seed, routing in enumerate(("uniform", "holes", "none", "one rank"))]
    inputs = [make_inputs(case, rank, num_ranks) for case in cases]
    with make_buffer(cases[0], num_ranks, transport) as ep:
        plans = [ep.plan(each.idx) for each in inputs]
        ref_plans = [reference_plan(cases[0], each) for each in inputs]
        order = [3, 0, 2, 2, 1, 0, 3, 1]
        recvs = [ep.dispatch(inputs[i].x, plans[i], inputs[i].weights) for i in order]
        ys = {}
        for place in reversed(range(len(order))):
            i, recv = order[place], recvs[place]
            ys[place] = ep.combine(recv.x, plans[i], recv.weights)
        # Backward in an order of its own, too.
        for place in (2, 7, 0, 5, 1, 6, 3, 4):
            i = order[place]
            ys[place].backward(inputs[i].grad_y)
            grads = inputs[i].grads()
            ref_recv = reference.dispatch(inputs[i].x, ref_plans[i], inputs[i].weights)
            ref_y = reference.combine(ref_recv.x, ref_plans[i], ref_recv.weights)
            ref_y.backward(inputs[i].grad_y)
            wrong.about = f"use {place} of plan {i}"
            wrong.bits("recv.x", recvs[place].x, ref_recv.x)
            wrong.bits("y", ys[place], ref_y)
            wrong.bits("the gradient of x", grads[0], inputs[i].grads()[0])
    wrong.finish()


def test_plans_are_used_in_any_order(pool: Any) -> None:
    run_on(pool, check_plans_alive)


def check_two_buffers(rank: int, transport: str) -> None:
    wrong = Differences()
    num_ranks = dist.get_world_size()
    cases = [Case("uniform", 8, 2, 24, dtype=torch.bfloat16), Case("holes", 5, 3, 7, (3, 12), expert_alignment=8)]
    inputs = [make_inputs(case, rank, num_ranks) for case in cases]
    eps = [make_buffer(case, num_ranks, transport) for case in cases]
    for _ in range(3):
        plans = [ep.plan(each.idx) for ep, each in zip(eps, inputs, strict=True)]
        recvs = [eps[i].dispatch(inputs[i].x, plans[i], inputs[i].weights) for i in (1, 0)][::-1]
        ys = [eps[i].combine(recvs[i].x, plans[i], recvs[i].weights) for i in (0, 1)]
        for i in (1, 0):
            ys[i].backward(inputs[i].grad_y)
            grads = inputs[i].grads()
            case = cases[i]
            ref_plan = reference_plan(case, inputs[i])
            ref_recv = reference.dispatch(inputs[i].x, ref_plan, inputs[i].weights)
            ref_y = reference.combine(ref_recv.x, ref_plan, ref_recv.weights)
            ref_y.backward(inputs[i].grad_y)
            wrong.about = f"Buffer {i}"
            wrong.bits("y", ys[i], ref_y)
            wrong.bits("the gradient of x", grads[0], inputs[i].grads()[0])
    eps[0].close()
    wrong.bits("after the other closed", eps[1].dispatch(inputs[1].x, plans[1]).x, recvs[1].x)
    eps[1].close()
    wrong.finish()


def test_two_buffers_interleaved(pool: Any) -> None:
    run_on(pool, check_two_buffers)


# ---- who needs gradients ----


def check_some_need_grad(rank: int, transport: str) -> None:
    """Every rank takes part in the backward of any; the gradients are those of the reference."""
    wrong = Differences()
    num_ranks = dist.get_world_size()
    case = Case("uniform", 8, 2, 12)
    with make_buffer(case, num_ranks, transport, timeout_secs=10.0) as ep:
        for needs in (("x", "weights"), ("x",), ("weights",), ()):
            for trainers in ({0}, {num_ranks - 1}, set(range(num_ranks))):
                inputs = make_inputs(case, rank, num_ranks)
                plan = ep.plan(inputs.idx)
                x = inputs.x if "x" in needs and rank in trainers else inputs.x.detach()
                weights = inputs.weights if "weights" in needs and rank in trainers else inputs.weights.detach()
                recv = ep.dispatch(x, plan, weights)
                y = ep.combine(experts(recv.x, plan, garbage=False), plan, recv.weights)
                wrong.about = f"rank {rank}, {needs} of {trainers}"
                wrong.check(y.requires_grad == recv.x.requires_grad == bool(needs), "an edge too many or too few")
                if needs:
                    y.backward(inputs.grad_y)
                grads = inputs.grads()

                ref_plan = reference_plan(case, inputs)
                ref_recv = reference.dispatch(inputs.x, ref_plan, inputs.weights)
                ref_out = experts(ref_recv.x, ref_plan, garbage=False)
                ref_y = reference.combine(ref_out, ref_plan, ref_recv.weights)
                ref_y.backward(inputs.grad_y)
                expected = inputs.grads()
                here = rank in trainers
                wrong.bits("x", grads[0], expected[0] if here and "x" in needs else None)
                if here and "weights" in needs:
                    wrong.check(close(grads[1], expected[1], 8 * case.hidden), "the gradient of the weights")
                else:
                    wrong.bits("weights", grads[1], None)
    wrong.finish()


def test_only_some_ranks_need_gradients(pool: Any) -> None:
    run_on(pool, check_some_need_grad)


def check_cut_graph(rank: int, transport: str, how: str) -> None:
    """A rank whose experts' output hangs on nothing still serves the others' backward."""
    num_ranks = dist.get_world_size()
    case = Case("one rank", 8, 2, 12)
    inputs = make_inputs(case, rank, num_ranks)
    no_graph = rank == 0 and how == "no_grad"
    with make_buffer(case, num_ranks, transport, timeout_secs=3.0) as ep:
        plan = ep.plan(inputs.idx)
        with torch.set_grad_enabled(not no_graph):
            recv = ep.dispatch(inputs.x, plan, inputs.weights)
            out = 2 * recv.x if plan.num_rows else torch.zeros(0, case.hidden)
            y = ep.combine(out, plan, None if how == "no rows" else recv.weights)
        y.backward(inputs.grad_y)
    factor = case.top_k if how == "no rows" else inputs.weights.detach().sum(1, keepdim=True)
    grad_x, _ = inputs.grads()
    assert (grad_x is None) if no_graph else torch.allclose(grad_x, 2 * factor * inputs.grad_y, atol=1e-4)


@pytest.mark.parametrize("how", ["no rows", "no rows but weights", "no_grad"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_without_a_graph(ranks: int, how: str, request: pytest.FixtureRequest) -> None:
    run_on(request.getfixturevalue(f"pool{ranks}"), check_cut_graph, how)


def check_no_grad_on_one(rank: int, transport: str) -> None:
    """A rank under no_grad serves the others' backward from the outputs' own edges."""
    num_ranks = dist.get_world_size()
    case = Case("uniform", 8, 2, 12)
    grads = []
    for frozen in (None, 0):
        with make_buffer(case, num_ranks, transport, timeout_secs=10.0) as ep:
            inputs = make_inputs(case, rank, num_ranks)
            plan = ep.plan(inputs.idx)
            if rank == frozen:
                with torch.no_grad():
                    recv = ep.dispatch(inputs.x, plan, inputs.weights)
                    y = ep.combine(recv.x, plan, recv.weights)
                if num_ranks == 1:
                    assert not y.requires_grad
                    continue
                torch.autograd.backward([y, recv.x], [inputs.grad_y, torch.zeros_like(recv.x)])
                assert inputs.grads() == (None, None)
            else:
                recv = ep.dispatch(inputs.x, plan, inputs.weights)
                y = ep.combine(recv.x, plan, recv.weights)
                y.backward(inputs.grad_y)
                grads.append(inputs.grads())
    assert all(torch.isfinite(grad).all() for each in grads for grad in each if grad is not None)
    with make_buffer(case, num_ranks, transport) as ep, torch.no_grad():
        recv = ep.dispatch(make_inputs(case, rank, num_ranks).x, ep.plan(make_inputs(case, rank, num_ranks).idx))
        assert not recv.x.requires_grad


def test_one_rank_under_no_grad(pool: Any) -> None:
    run_on(pool, check_no_grad_on_one)


def check_inference_mode(rank: int, transport: str) -> None:
    """Everywhere: the same bits without a graph."""
    num_ranks = dist.get_world_size()
    case = Case("holes", 8, 2, 12)
    inputs = make_inputs(case, rank, num_ranks)
    with make_buffer(case, num_ranks, transport) as ep:
        plan = ep.plan(inputs.idx)
        recv = ep.dispatch(inputs.x, plan, inputs.weights)
        y = ep.combine(recv.x, plan, recv.weights)
        with torch.inference_mode():
            recv = ep.dispatch(inputs.x, plan, inputs.weights)
            y_inferred = ep.combine(recv.x, plan, recv.weights)
        assert y_inferred.is_inference()
        assert same_bits(y, y_inferred)


def test_inference_mode(pool: Any) -> None:
    run_on(pool, check_inference_mode)


def check_weights_gradient(rank: int, transport: str) -> None:
    """The gradient of the routing weights is right by finite differences."""
    num_ranks = dist.get_world_size()
    case = Case("uniform", 8, 2, 5, (3, 2))
    inputs = make_inputs(case, rank, num_ranks)
    with make_buffer(case, num_ranks, transport) as ep:
        plan = ep.plan(inputs.idx)

        def loss(weights: torch.Tensor) -> torch.Tensor:
            recv = ep.dispatch(inputs.x.detach(), plan, weights)
            y = ep.combine(experts(recv.x, plan, garbage=False), plan, recv.weights)
            return (y.double() * inputs.grad_y).sum()

        loss(inputs.weights).backward()
        grad = inputs.grads()[1]
        step = 0.25
        rows = max(case.tokens_of(each) for each in range(num_ranks))
        for token in range(rows):
            for k in range(case.top_k):
                moved = []
                for sign in (1, -1):
                    weights = inputs.weights.detach().clone()
                    if token < len(weights):
                        weights[token, k] += sign * step
                    moved.append(loss(weights))
                if token < len(grad):
                    assert abs((moved[0] - moved[1]) / (2 * step) - grad[token, k]) < 1e-3


def test_weights_gradient_by_finite_differences(pool: Any) -> None:
    run_on(pool, check_weights_gradient)


# ---- hosts ----


@contextmanager
def on_host(name: str) -> Iterator[None]:
    before = os.environ.get("MOONEP_HOSTID")
    os.environ["MOONEP_HOSTID"] = name
    try:
        yield
    finally:
        del os.environ["MOONEP_HOSTID"]
        if before is not None:
            os.environ["MOONEP_HOSTID"] = before


def check_hosts(rank: int, hosts: list[int]) -> int:
    """Returns how many elements of y another order of hosts would change."""
    wrong = Differences()
    num_ranks = dist.get_world_size()
    changed = 0
    for dtype in DTYPES:
        case = Case("uniform", 16, 8, 300, (20, 13), dtype)
        inputs = make_inputs(case, rank, num_ranks)
        with on_host(f"host {hosts[rank]}"), pytest.raises(ValueError, match=r"'shm' cannot be used: .*hosts"):
            make_buffer(case, num_ranks, "shm")
        with on_host(f"host {hosts[rank]}"):
            ep = make_buffer(case, num_ranks, "auto")
        with ep:
            wrong.check(ep.transport == "collective", ep.transport)
            plan = ep.plan(inputs.idx)
            recv = ep.dispatch(inputs.x, plan, inputs.weights)
            y = ep.combine(recv.x, plan, recv.weights)
            y.backward(inputs.grad_y)
            grad_x, _ = inputs.grads()
        ref_plan = reference_plan(case, inputs, hosts)
        ref_recv = reference.dispatch(inputs.x, ref_plan, inputs.weights)
        ref_y = reference.combine(ref_recv.x, ref_plan, ref_recv.weights)
        ref_y.backward(inputs.grad_y)
        wrong.bits("y", y, ref_y)
        wrong.bits("the gradient of x", grad_x, inputs.grads()[0])
        one_host = reference_plan(case, inputs)
        changed += int((reference.combine(ref_recv.x, one_host, ref_recv.weights) != ref_y).sum())
    wrong.finish()
    return changed


def test_two_ranks_on_two_hosts(pool2: Any) -> None:
    pool2.run(check_hosts, [0, 1])


@pytest.mark.parametrize("hosts", [[0, 1, 0, 1], [0, 0, 1, 1], [0, 1, 1, 0], [0, 1, 2, 0]])
def test_four_ranks_on_hosts(pool4: Any, hosts: list[int]) -> None:
    changed = sum(pool4.run(check_hosts, hosts))
    assert changed > 0, "the case does not tell orders apart"


def check_auto(rank: int) -> None:
    case = Case("uniform")
    with make_buffer(case, dist.get_world_size(), "auto") as ep:
        assert ep.transport == transports(dist.get_world_size())[0]
        assert (ep.rank, ep.num_ranks) == (rank, dist.get_world_size())
        assert f"rank {rank} of {ep.num_ranks}" in repr(ep)
    firsts: list[Any] = [None] * ep.num_ranks
    case = dataclasses.replace(case, num_experts=7)
    with make_buffer(case, ep.num_ranks, "auto") as ep:
        dist.all_gather_object(firsts, (ep.first_local_expert, ep.num_local_experts))
    assert sum(count for _, count in firsts) == case.num_experts
    assert [first for first, _ in firsts] == [
        sum(7 // ep.num_ranks + (i < 7 % ep.num_ranks) for i in range(r)) for r in range(ep.num_ranks)
    ]


def test_auto(pool: Any) -> None:
    pool.run(check_auto)
