"""Policy Balanced between ranks: what the Buffer does is what the reference does, bit for bit, and a layer gives what
one process that holds all experts gives."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import moonep
from moonep import reference
from moonep.errors import MoonEPError
from moonep.testing import lognormal_routing, one_expert_routing, one_rank_routing, random_routing, ring_routing

F = 5  # an expert's width


def transports(num_ranks: int) -> tuple[str, ...]:
    return ("local",) if num_ranks == 1 else ("shm", "collective")


EXACT = moonep.Balanced(slack=0)


@dataclass(frozen=True)
class Case:
    routing: str
    experts: int = 8
    top_k: int = 3
    tokens: int = 24
    hidden: int = 16
    alignment: int = 1
    policy: moonep.Balanced = EXACT
    dtype: torch.dtype = torch.float32
    uneven: bool = False  # ranks have other numbers of tokens, rank 1 has none


def routed(case: Case, rank: int, num_ranks: int) -> torch.Tensor:
    tokens = (case.tokens, 0, case.tokens // 2, 1)[rank] if case.uneven else case.tokens
    shape = tokens, case.experts, case.top_k
    if case.routing == "one expert":
        return torch.from_numpy(one_expert_routing(*shape, seed=rank, expert=case.experts - 1, repeated=True))
    if case.routing == "one rank":
        last = min(num_ranks, case.experts) - 1
        return torch.from_numpy(one_rank_routing(*shape, seed=rank, num_ranks=num_ranks, rank=last))
    if case.routing == "ring":
        return torch.from_numpy(ring_routing(*shape, seed=rank, num_ranks=num_ranks, rank=rank))
    if case.routing == "lognormal":
        return torch.from_numpy(lognormal_routing(*shape, maxvio=1.5, seed=rank))
    if case.routing == "none":
        return torch.full((tokens, case.top_k), -1)
    return torch.from_numpy(random_routing(*shape, seed=rank))


CASES = [
    Case("one expert"),
    Case("one rank"),
    Case("one rank", uneven=True, alignment=4),
    Case("ring", policy=moonep.Balanced()),
    Case("random", experts=7, uneven=True),
    Case("random", experts=3, top_k=2, alignment=8),
    Case("lognormal", experts=32, top_k=4, policy=moonep.Balanced(slack=0.1), alignment=4, uneven=True),
    Case("lognormal", experts=32, top_k=4, policy=moonep.Balanced(slack=0, max_replicas=1)),
    Case("one rank", policy=moonep.Balanced(max_replicas=0)),
    Case("none"),
    Case("one expert", experts=1, top_k=1),
    Case("one rank", dtype=torch.bfloat16, hidden=24),
    Case("one rank", dtype=torch.float16, uneven=True),
]


FEW = Case("one expert", experts=3, top_k=1, tokens=1, policy=moonep.Balanced(slack=0.5))  # a rank gets no rows


def make_buffer(case: Case, transport: str) -> moonep.Buffer:
    return moonep.Buffer(
        num_experts=case.experts,
        top_k=case.top_k,
        hidden=case.hidden,
        max_tokens=case.tokens,
        dtype=case.dtype,
        policy=case.policy,
        expert_alignment=case.alignment,
        transport=transport,
        timeout_secs=30,
    )


def integers(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def all_weights(case: Case) -> list[torch.Tensor]:
    """[E, H, F], [E, F, H] and [E, 3], which only adds."""
    E, H = case.experts, case.hidden
    return [integers(shape, seed, case.dtype) for seed, shape in enumerate([(E, H, F), (E, F, H), (E, 3)])]


def experts(
    rows: torch.Tensor, plan: Any, w1: torch.Tensor, w2: torch.Tensor, b: torch.Tensor, skip: bool
) -> torch.Tensor:
    """Group by group; `skip` those without rows, so that a rank may have weights that nothing hangs on."""
    out, start = [rows[:0]], 0
    for g, end in enumerate(plan.group_ends.tolist()):
        if end > start or not skip:
            out.append((rows[start:end] @ w1[g]).clamp(-2, 2) @ w2[g] / 4 + b[g].sum())
        start = end
    out.append(torch.full_like(rows[start:], float("nan")))  # what stands there reaches nothing
    return torch.cat(out)


def layer(case: Case, rank: int, num_ranks: int, verbs: Any, plan: Any, skip: bool = False) -> list[torch.Tensor]:
    """Outputs and gradients of everything."""
    tokens = plan.num_tokens
    x = integers((tokens, case.hidden), 10 + rank, case.dtype).requires_grad_()
    weights = (integers((tokens, case.top_k), 20 + rank, torch.float32) / 2).requires_grad_()
    mine = slice(*(moonep.plan.first_expert(r, case.experts, num_ranks) for r in (rank, rank + 1)))
    params = [each[mine].clone().requires_grad_() for each in all_weights(case)]
    recv_x, recv_weights = verbs.dispatch(x, plan, weights)
    whole = verbs.replicate(plan, *params)
    y = verbs.combine(experts(recv_x, plan, *whole, skip), plan, recv_weights)
    target = integers(tuple(y.shape), 30 + rank, case.dtype)
    (y * target).sum().backward()
    filled = [w[plan.group_experts >= 0] for w in whole]
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in (x, weights, *params)]
    return [recv_x.detach(), recv_weights.detach(), *(each.detach() for each in filled), y.detach(), *grads]


class Ours:
    def __init__(self, ep: moonep.Buffer):
        self.ep, self.replicate, self.combine = ep, ep.replicate, ep.combine

    def dispatch(self, x: torch.Tensor, plan: moonep.Plan, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        recv = self.ep.dispatch(x, plan, weights)
        return recv.x, recv.weights


class Theirs:
    replicate, combine = staticmethod(reference.replicate), staticmethod(reference.combine)

    @staticmethod
    def dispatch(x: torch.Tensor, plan: Any, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        recv = reference.dispatch(x, plan, weights)
        return recv.x, recv.weights


PUBLIC = ["num_tokens", "num_rows", "num_groups", "group_experts", "group_sizes", "group_ends"]
PUBLIC += ["replicas", "rank_rows", "dst_rank", "dst_row", "num_dropped"]


def check_case(rank: int, num_ranks: int, transport: str, case: Case) -> list[list[int]]:
    idx = routed(case, rank, num_ranks)
    with make_buffer(case, transport) as ep:
        plan = ep.plan(idx)
        theirs = reference.plan(idx, num_experts=case.experts, expert_alignment=case.alignment, policy=case.policy)
        for name in PUBLIC:
            a, b = getattr(plan, name), getattr(theirs, name)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, (case, name, a, b)
        for _ in range(2):  # the plan again
            pairs = zip(
                layer(case, rank, num_ranks, Ours(ep), plan),
                layer(case, rank, num_ranks, Theirs, theirs),
                strict=True,
            )
            for i, (a, b) in enumerate(pairs):
                if i == 7:  # the weights' gradient, a sum over H
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
                else:
                    assert torch.equal(a, b), (case, i, a, b)
    return plan.replicas.tolist()


def check_cases(rank: int, num_ranks: int, transport: str) -> int:
    return sum(e >= 0 for case in CASES for each in check_case(rank, num_ranks, transport, case) for e in each)


def test_same_as_the_reference(pool: Any) -> None:
    for transport in transports(pool.num_ranks):
        replicas = pool.run(check_cases, pool.num_ranks, transport)
        assert (min(replicas) > 0) == (pool.num_ranks > 1)


def gathered_layer(rank: int, num_ranks: int, transport: str, case: Case) -> dict[str, Any]:
    with make_buffer(case, transport) as ep:
        idx = routed(case, rank, num_ranks)
        results = layer(case, rank, num_ranks, Ours(ep), ep.plan(idx), skip=True)
    return {"idx": idx, "y": results[5], "grads": results[6:]}


@pytest.mark.parametrize("case", [Case("one rank"), Case("random", experts=7, uneven=True), FEW], ids=str)
def test_same_as_one_process_with_all_experts(pool: Any, case: Case) -> None:
    """Small whole numbers, exact in float32 whatever the order."""
    for transport in transports(pool.num_ranks):
        found = pool.run(gathered_layer, pool.num_ranks, transport, case)
        params = [each.requires_grad_() for each in all_weights(case)]
        for rank, of_rank in enumerate(found):
            tokens = len(of_rank["idx"])
            x = integers((tokens, case.hidden), 10 + rank, case.dtype).requires_grad_()
            weights = (integers((tokens, case.top_k), 20 + rank, torch.float32) / 2).requires_grad_()
            w1, w2, b = params
            inner = torch.einsum("th,khf->tkf", x, w1).clamp(-2, 2)
            every = torch.einsum("tkf,kfh->tkh", inner, w2) / 4 + b.sum(1)[None, :, None]
            y = torch.zeros(tokens, case.hidden)
            for k in range(case.top_k):
                chosen = of_rank["idx"][:, k]
                picked = every[torch.arange(tokens), chosen.clamp(min=0)]
                y = y + torch.where(chosen[:, None] >= 0, weights[:, k, None] * picked, 0.0)
            assert torch.equal(of_rank["y"], y)
            (y * integers(tuple(y.shape), 30 + rank, case.dtype)).sum().backward()
            assert x.grad is not None
            assert torch.equal(of_rank["grads"][0], x.grad)
            assert weights.grad is not None
            assert torch.equal(of_rank["grads"][1], weights.grad)
        for i, param in enumerate(params):
            assert param.grad is not None
            assert torch.equal(torch.cat([of_rank["grads"][2 + i] for of_rank in found]), param.grad)


def static_shapes(rank: int, transport: str, steps: int) -> None:
    case = Case("lognormal", experts=32, top_k=4, policy=moonep.Balanced(), alignment=8)
    rng = torch.Generator().manual_seed(0)
    with make_buffer(case, transport) as ep:
        sizes = set()
        for _ in range(steps):
            scores = torch.randn(case.experts, generator=rng) * torch.rand(1, generator=rng) * 3
            noise = torch.rand(case.tokens, case.experts, generator=rng.manual_seed(rng.initial_seed() + 1 + rank))
            idx = (scores - (-noise.log()).log()).topk(case.top_k).indices
            plan = ep.plan(idx)
            sizes.add((plan.num_rows, plan.num_groups))
            limit = case.policy.row_limit(int(plan.rank_rows.sum()), ep.num_ranks)
            assert int(plan.rank_rows.max()) <= limit
        assert len(sizes) == 1


def test_shapes_do_not_depend_on_the_routing(pool: Any) -> None:
    for transport in transports(pool.num_ranks):
        pool.run(static_shapes, transport, 40)


@pytest.mark.slow
def test_shapes_over_a_thousand_routings(pool4: Any) -> None:
    pool4.run(static_shapes, "shm", 1000, timeout_secs=100)


def tensors_of_any_kind(rank: int, transport: str) -> None:
    case = Case("one rank")
    with make_buffer(case, transport) as ep:
        plan = ep.plan(routed(case, rank, ep.num_ranks))
        E, first, L = case.experts, ep.first_local_expert, ep.num_local_experts
        large = torch.arange(E * 300_001, dtype=torch.int32).view(E, 300_001)  # more than one window
        wholes = [
            large,
            torch.arange(E, dtype=torch.uint8),
            torch.arange(E * 6, dtype=torch.float64).view(E, 2, 3),
            torch.arange(E * 6).view(E, 3, 2).transpose(1, 2),
            torch.empty(E, 0),
            torch.arange(E).bool(),
        ]
        got = ep.replicate(plan, *(whole[first : first + L] for whole in wholes))
        used = plan.group_experts >= 0
        for tensor, whole in zip(got, wholes, strict=True):
            assert torch.equal(tensor[used], whole[plan.group_experts[used]])
        assert ep.replicate(plan) == ()
        kept = [tensor.clone() for tensor in got]
        ep.replicate(plan, *(whole[first : first + L].clone().zero_() for whole in wholes))
        assert all(torch.equal(a[used], b[used]) for a, b in zip(got, kept, strict=True)), "results stay valid"


def test_tensors_of_any_kind(pool: Any) -> None:
    for transport in transports(pool.num_ranks):
        pool.run(tensors_of_any_kind, transport)


def bad_tensors(rank: int, transport: str) -> None:
    case = Case("one rank")
    with make_buffer(case, transport) as ep:
        plan = ep.plan(routed(case, rank, ep.num_ranks))
        L = ep.num_local_experts
        good = torch.ones(L, 2)
        for bad, match in [
            (good[1:], "replicate: rank 1: tensors\\[0\\]: expected shape"),
            ("w", "replicate: rank 1: tensors\\[0\\]: expected a tensor"),
            (torch.ones(L, 3), "replicate: tensors: expected the same number, shapes .* rank 1 differ from rank 0"),
            (good.double(), "rank 1 differ from rank 0"),
            (good.clone().requires_grad_(), "rank 1 differ from rank 0"),
        ]:
            with pytest.raises((ValueError, TypeError), match=match):
                ep.replicate(plan, bad if rank == 1 else good)
            ep.replicate(plan, good)
        idx = routed(case, rank, ep.num_ranks)
        with pytest.raises(MoonEPError, match="different verbs"):
            ep.replicate(plan, good) if rank == 1 else ep.plan(idx)


@pytest.mark.parametrize("transport", transports(2))
def test_bad_tensors(pool2: Any, transport: str) -> None:
    pool2.run(bad_tensors, transport)


def frozen_and_shared(rank: int, transport: str) -> None:
    """Frozen parameters get no gradient; two layers on one Buffer; accumulation over steps; a rank without a graph."""
    case = Case("one rank")
    with make_buffer(case, transport) as ep:
        plan = ep.plan(routed(case, rank, ep.num_ranks))
        L = ep.num_local_experts
        frozen, first, second = (torch.full((L, 4), float(v + rank)) for v in (1, 2, 3))
        first.requires_grad_()
        second.requires_grad_()
        for step in range(1, 3):
            a_frozen, a = ep.replicate(plan, frozen, first)
            (b,) = ep.replicate(plan, second)
            assert not a_frozen.requires_grad
            used = (plan.group_experts >= 0)[:, None]
            (torch.where(used, a, 0) + 2 * torch.where(used, b, 0)).sum().backward()
            copies = torch.stack([(plan.replicas == ep.first_local_expert + e).sum() for e in range(L)]).float()
            assert first.grad is not None
            assert torch.equal(first.grad, step * (1 + copies)[:, None].expand(L, 4))
            assert second.grad is not None
            assert torch.equal(second.grad, 2 * step * (1 + copies)[:, None].expand(L, 4))
        assert frozen.grad is None
        with torch.no_grad():
            assert ep.num_ranks == 1 or not ep.replicate(plan, first)[0].requires_grad
        # One rank asks for no gradient; all take part in the backward.
        x = torch.ones(plan.num_tokens, case.hidden, requires_grad=True)
        recv = ep.dispatch(x, plan)
        if rank == 0:
            with torch.no_grad():
                ep.replicate(plan, first)
        else:
            ep.replicate(plan, first)
        ep.combine(recv.x, plan).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, (plan.dst_row >= 0).sum(1)[:, None].float().expand_as(x))


def test_frozen_and_shared(pool: Any) -> None:
    for transport in transports(pool.num_ranks):
        pool.run(frozen_and_shared, transport)
