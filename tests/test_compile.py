"""torch.compile: `plan` breaks the graph, dispatch and combine are operators in it. Backend aot_eager, which traces
forward and backward as inductor does, and runs what it traced as it stands: results are those of eager mode, bit for
bit."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import moonep
from moonep import ops
from moonep.errors import ForeignPlanError

E, K, H = 10, 3, 16


def transports(num_ranks: int) -> tuple[str, ...]:
    return ("local",) if num_ranks == 1 else ("shm", "collective")


def make_buffer(transport: str = "local") -> moonep.Buffer:
    return moonep.Buffer(
        num_experts=E,
        top_k=K,
        hidden=H,
        max_tokens=64,
        dtype=torch.float32,
        transport=transport,
        timeout_secs=60,  # ranks compile at their own pace
    )


class Layer(nn.Module):
    def __init__(self, ep: moonep.Buffer):
        super().__init__()
        torch.manual_seed(0)
        self.ep = ep
        self.router = nn.Linear(H, E, bias=False)
        self.experts = nn.Linear(H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, topk_idx = self.router(x).softmax(-1).topk(K)
        plan = self.ep.plan(topk_idx)
        recv = self.ep.dispatch(x, plan, weights)
        return x + self.ep.combine(self.experts(recv.x).tanh(), plan, recv.weights)


def step(layer: nn.Module, params: list[nn.Parameter], x: torch.Tensor) -> list[torch.Tensor]:
    """Output, and gradients of x and the parameters."""
    x = x.clone().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *params])]


def same_as_eager(rank: int, transport: str) -> int:
    torch._dynamo.reset()
    with make_buffer(transport) as ep:
        layer = Layer(ep)
        params = list(layer.parameters())
        backend = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(layer, backend=backend)
        for tokens in (12, 20 + rank, 33, 0) if ep.num_ranks == 1 else (12, 20 + rank):  # compiling is slow
            x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(rank))
            for eager, other in zip(step(layer, params, x), step(compiled, params, x), strict=True):
                assert torch.equal(eager, other)
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert breaks
    assert all("Buffer.plan" in each or "function `disable`" in each for each in breaks), breaks
    return backend.frame_count


@pytest.mark.parametrize("transport", ["local", "shm", pytest.param("collective", marks=pytest.mark.slow)])
def test_same_as_eager(transport: str, request: pytest.FixtureRequest) -> None:
    pool = request.getfixturevalue("pool1" if transport == "local" else "pool2")
    # Two graphs, before and after `plan`, for: the first shape, any shape, 0 tokens.
    assert max(pool.run(same_as_eager, transport, timeout_secs=110)) <= 6


@pytest.fixture
def ep() -> Any:
    torch._dynamo.reset()
    with make_buffer() as buffer:
        yield buffer


def routed(ep: moonep.Buffer, tokens: int = 12) -> tuple[moonep.Plan, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    plan = ep.plan(torch.randint(-1, E, (tokens, K), generator=generator))
    return plan, torch.randn(tokens, H, generator=generator), torch.rand(tokens, K, generator=generator)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float64])
def test_one_graph_from_dispatch_to_combine(ep: moonep.Buffer, dtype: torch.dtype | None) -> None:
    def there_and_back(x: torch.Tensor, plan: moonep.Plan, weights: torch.Tensor | None) -> torch.Tensor:
        recv = ep.dispatch(x, plan, weights)
        return ep.combine(recv.x.sin(), plan, recv.weights)

    plan, x, weights = routed(ep)
    given = None if dtype is None else weights.to(dtype)
    grads = []
    for function in (there_and_back, torch.compile(there_and_back, backend="aot_eager", fullgraph=True)):
        leaves = [each.clone().requires_grad_() for each in (x, given) if each is not None]
        y = function(leaves[0], plan, leaves[1] if len(leaves) > 1 else None)
        grads.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for eager, compiled in zip(*grads, strict=True):
        assert eager.dtype == compiled.dtype
        assert torch.equal(eager, compiled)


def test_replicate_of_home_experts_is_in_the_graph(ep: moonep.Buffer) -> None:
    def layer(x: torch.Tensor, plan: moonep.Plan, w: torch.Tensor) -> torch.Tensor:
        (whole,) = ep.replicate(plan, w)
        return ep.combine(ep.dispatch(x, plan).x * whole.sum(), plan)

    plan, x, _ = routed(ep)
    w = torch.rand(E, 2, requires_grad=True)
    y = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, plan, w)
    assert torch.equal(y, layer(x, plan, w))
    y.sum().backward()
    assert w.grad is not None


def test_replicate_under_balanced_breaks_the_graph(pool2: Any) -> None:
    pool2.run(replicate_compiled)


def replicate_compiled(rank: int) -> None:
    torch._dynamo.reset()
    with moonep.Buffer(
        num_experts=E, top_k=K, hidden=H, max_tokens=64, dtype=torch.float32, policy=moonep.Balanced(slack=0)
    ) as ep:

        def layer(x: torch.Tensor, plan: moonep.Plan, w: torch.Tensor) -> torch.Tensor:
            (whole,) = ep.replicate(plan, w)
            rows = ep.dispatch(x, plan).x
            scale = whole[: len(w)].sum() + whole[len(w) :][plan.group_experts[len(w) :] >= 0].sum()
            return ep.combine(rows * scale, plan)

        plan = ep.plan(torch.zeros(12, K, dtype=torch.int64))
        assert (plan.replicas >= 0).any()
        x, grads = torch.randn(12, H), []
        for function in (layer, torch.compile(layer, backend="aot_eager")):
            w = torch.ones(ep.num_local_experts, 2, requires_grad=True)
            function(x, plan, w).sum().backward()
            grads.append(w.grad)
        assert grads[0] is not None
        assert grads[1] is not None
        assert torch.equal(grads[0], grads[1])


def test_plain_sum(ep: moonep.Buffer) -> None:
    plan, x, _ = routed(ep)
    rows = ep.dispatch(x, plan).x
    total = torch.compile(lambda rows, plan: ep.combine(rows, plan), backend="aot_eager", fullgraph=True)
    leaf, other = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    y, expected = total(leaf, plan), ep.combine(other, plan)
    assert torch.equal(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, other.grad)


def test_inputs_with_gaps(ep: moonep.Buffer) -> None:
    """What is saved for backward keeps its strides."""
    plan, _, _ = routed(ep)
    combine = torch.compile(lambda rows, plan, weights: ep.combine(rows, plan, weights), backend="aot_eager")
    grads = []
    for function in (ep.combine, combine):
        rows = torch.randn(H, plan.num_rows, generator=torch.Generator().manual_seed(1)).t().requires_grad_()
        weights = torch.linspace(0, 1, 2 * plan.num_rows)[::2].requires_grad_()
        y = function(rows, plan, weights)
        grads.append([y, *torch.autograd.grad(y.square().sum(), [rows, weights])])
    for eager, compiled in zip(*grads, strict=True):
        assert torch.equal(eager, compiled)


def test_backward_keeps_the_plan(ep: moonep.Buffer) -> None:
    dispatch = torch.compile(lambda x, plan: ep.dispatch(x, plan).x, backend="aot_eager", fullgraph=True)
    plan, x, _ = routed(ep)
    x.requires_grad_()
    routes = (plan.dst_row >= 0).sum(1)
    rows = dispatch(x, plan)
    del plan
    gc.collect()
    rows.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, routes[:, None].float().expand_as(x))


def test_nothing_outlives_its_buffer() -> None:
    ep = make_buffer()
    plan, x, weights = routed(ep)
    recv = ep.dispatch(x.requires_grad_(), plan, weights)
    key = int(plan.key)
    assert key in ops._KEPT
    gone = weakref.ref(ep)
    del ep, plan, recv
    gc.collect()
    assert gone() is None
    assert key not in ops._KEPT


def test_plan_of_another_buffer(ep: moonep.Buffer) -> None:
    dispatch = torch.compile(lambda x, plan: ep.dispatch(x, plan).x, backend="aot_eager")
    with make_buffer() as other:
        plan, x, _ = routed(other)
        with pytest.raises(ForeignPlanError):
            dispatch(x, plan)
    plan, x, _ = routed(ep)
    assert torch.equal(dispatch(x, plan), ep.dispatch(x, plan).x)


def test_bad_arguments(ep: moonep.Buffer) -> None:
    dispatch = torch.compile(lambda x, plan, weights: ep.dispatch(x, plan, weights).x, backend="aot_eager")
    plan, x, weights = routed(ep)
    for bad_x, bad_weights in ((x[1:], weights), (x.double(), weights), (x, weights[:, 1:]), (x, weights.int())):
        with pytest.raises((ValueError, TypeError), match=r"dispatch: rank 0: (x|topk_weights): expected"):
            dispatch(bad_x, plan, bad_weights)
    assert torch.equal(dispatch(x, plan, weights), ep.dispatch(x, plan, weights).x)


def one_compiled_without_gradients(rank: int, transport: str) -> None:
    torch._dynamo.reset()
    with make_buffer(transport) as ep:
        plan, x, weights = routed(ep)
        dispatch = torch.compile(lambda x, plan, weights: ep.dispatch(x, plan, weights).x, backend="aot_eager")
        x.requires_grad_(rank == 0)
        with pytest.raises(ValueError, match=r"rank 0 needs gradients, but rank 1 .*was compiled without gradients"):
            dispatch(x, plan, weights)
        assert dispatch(x.requires_grad_(), plan, weights).requires_grad


@pytest.mark.parametrize("transport", transports(2))
def test_one_rank_compiled_without_gradients(pool2: Any, transport: str) -> None:
    pool2.run(one_compiled_without_gradients, transport)


def test_async_breaks_the_graph(ep: moonep.Buffer) -> None:
    def there_and_back(x: torch.Tensor, plan: moonep.Plan, weights: torch.Tensor) -> torch.Tensor:
        recv = ep.dispatch(x, plan, weights, async_op=True).wait()
        return ep.combine(recv.x.sin(), plan, recv.weights, async_op=True).wait()

    plan, x, weights = routed(ep)
    expected = there_and_back(x, plan, weights)
    assert torch.equal(torch.compile(there_and_back, backend="aot_eager")(x, plan, weights), expected)


def test_operators_keep_torchs_rules(ep: moonep.Buffer) -> None:
    plan, x, weights = routed(ep)
    x.requires_grad_()
    weights.requires_grad_()
    torch.library.opcheck(ops._dispatch, (x, weights, plan.key, plan.num_rows, True))
    rows = torch.randn(plan.num_rows, H, requires_grad=True)
    row_weights = torch.rand(plan.num_rows, requires_grad=True)
    torch.library.opcheck(ops._combine, (rows, row_weights, plan.key, plan.num_tokens, True))


@pytest.mark.slow
def test_inductor(ep: moonep.Buffer) -> None:
    layer = Layer(ep)
    params = list(layer.parameters())
    compiled = torch.compile(layer)
    for tokens in (12, 20, 0, 1):
        x = torch.randn(tokens, H)
        for eager, other in zip(step(layer, params, x), step(compiled, params, x), strict=True):
            torch.testing.assert_close(eager, other, rtol=1e-4, atol=1e-4)
