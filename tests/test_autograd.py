"""Gradients and the life of a Buffer of one rank, against a dense layer in plain torch.

Numbers are small integers where equality is asked for: then float32 is exact in any order.
"""

import copy
import gc
import io
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import moonep
from moonep.errors import BufferClosedError, ForeignPlanError, MoonEPError

T, E, K, H = 12, 5, 3, 8


def make_buffer(dtype: torch.dtype = torch.float32, **changes: object) -> moonep.Buffer:
    settings: dict[str, object] = {"num_experts": E, "top_k": K, "hidden": H, "max_tokens": 32, "dtype": dtype}
    return moonep.Buffer(**(settings | changes))  # type: ignore[arg-type]


@pytest.fixture
def ep() -> Iterator[moonep.Buffer]:
    with make_buffer() as buffer:
        yield buffer


def routing(tokens: int = T, seed: int = 0) -> torch.Tensor:
    """With holes and repeated experts; token 0 has no route at all."""
    idx = torch.randint(-1, E, (tokens, K), generator=torch.Generator().manual_seed(seed))
    idx[:1] = -1
    return idx


def integers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def experts(rows: torch.Tensor, plan: moonep.Plan, weight_EHH: torch.Tensor) -> torch.Tensor:
    """Each group of rows times its expert's matrix; padding gets what the expert makes of zeros."""
    parts = rows.split(torch.diff(plan.group_ends, prepend=torch.zeros(1, dtype=torch.int32)).tolist())
    return torch.cat([part @ weight_EHH[e] for part, e in zip(parts, plan.group_experts.tolist(), strict=True)])


def layer(
    ep: moonep.Buffer, idx: torch.Tensor, x: torch.Tensor, weights: torch.Tensor | None, matrices: torch.Tensor
) -> torch.Tensor:
    plan = ep.plan(idx)
    recv = ep.dispatch(x, plan, weights)
    return ep.combine(experts(recv.x, plan, matrices), plan, recv.weights)


def dense_layer(
    idx: torch.Tensor, x: torch.Tensor, weights: torch.Tensor | None, matrices: torch.Tensor
) -> torch.Tensor:
    """The same, every token through every expert."""
    out_TEH = torch.einsum("th,ehj->tej", x, matrices)
    weights = torch.ones(idx.shape) if weights is None else weights
    y = torch.zeros_like(x)
    for k in range(idx.shape[1]):
        picked = out_TEH[torch.arange(len(x)), idx[:, k].clamp(min=0)]
        y = y + torch.where(idx[:, k, None] >= 0, weights[:, k, None] * picked, 0.0)
    return y


def leaves(tokens: int = T) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weights and matrices that require gradients."""
    found = (integers(tokens, H), integers(tokens, K, seed=1), integers(E, H, H, seed=2))
    for leaf in found:
        leaf.requires_grad_()
    return found


# ---- gradients are those of the dense layer ----


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 12])
def test_gradients_of_a_layer(tokens: int, with_weights: bool, alignment: int) -> None:
    idx, target = routing(tokens), integers(tokens, H, seed=3)
    ours, theirs = leaves(tokens), leaves(tokens)
    with make_buffer(expert_alignment=alignment) as ep:
        y = layer(ep, idx, ours[0], ours[1] if with_weights else None, ours[2])
        expected = dense_layer(idx, theirs[0], theirs[1] if with_weights else None, theirs[2])
        assert torch.equal(y, expected)
        (y * target).sum().backward()
        (expected * target).sum().backward()
    for leaf, same in zip(ours, theirs, strict=True):
        if leaf is ours[1] and not with_weights:
            assert leaf.grad is None
        else:
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, same.grad if same.grad is not None else torch.zeros_like(leaf))


def test_gradient_without_routes_is_zero(ep: moonep.Buffer) -> None:
    idx, (x, weights, matrices) = torch.full((T, K), -1), leaves()
    y = layer(ep, idx, x, weights, matrices)
    assert torch.equal(y, torch.zeros(T, H))
    y.sum().backward()
    for leaf in (x, weights, matrices):
        assert leaf.grad is not None
        assert (leaf.grad == 0).all()


@pytest.mark.filterwarnings("ignore:Input .* requires gradient and is not a double precision:UserWarning")
def test_gradcheck(ep: moonep.Buffer) -> None:
    """Finite differences: a layer is linear in each input, so a large step is exact but for float32."""
    plan = ep.plan(routing())
    x, weights, _ = leaves()
    rows, row_weights = integers(plan.num_rows, H, seed=4), integers(plan.num_rows, seed=5)
    rows.requires_grad_()
    row_weights.requires_grad_()

    def there(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        recv = ep.dispatch(x, plan, weights)
        return recv.x, recv.weights

    exact = {"eps": 0.5, "atol": 1e-4, "rtol": 1e-4}
    assert torch.autograd.gradcheck(there, (x, weights), **exact)
    assert torch.autograd.gradcheck(lambda r, w: ep.combine(r, plan, w), (rows, row_weights), **exact)
    assert torch.autograd.gradcheck(lambda r: ep.combine(r, plan), (rows,), **exact)


def test_gradient_of_topk_weights_is_exact(ep: moonep.Buffer) -> None:
    """dispatch's weights come home by themselves: bit for bit, whatever their size."""
    idx, weights = routing(), torch.rand(T, K).requires_grad_()
    plan = ep.plan(idx)
    recv = ep.dispatch(integers(T, H), plan, weights)
    grad = torch.randn(plan.num_rows) * torch.exp2(torch.randint(-60, 60, (plan.num_rows,)).float())
    recv.weights.backward(grad)
    expected = torch.where(idx >= 0, grad[plan.dst_row.clamp(min=0)], 0.0)
    assert weights.grad is not None
    assert torch.equal(weights.grad, expected)


def test_gradient_of_the_dot_product(ep: moonep.Buffer) -> None:
    """With real numbers: the gradient of a weight is a sum over H in float32."""
    idx, (x, weights, matrices) = routing(), (torch.randn(T, H), torch.rand(T, K), torch.randn(E, H, H))
    target = torch.randn(T, H)
    mine = weights.clone().requires_grad_()
    (layer(ep, idx, x, mine, matrices) * target).sum().backward()
    exact = weights.double().requires_grad_()
    (dense_layer(idx, x.double(), exact, matrices.double()) * target).sum().backward()
    torch.testing.assert_close(mine.grad, exact.grad, rtol=1e-4, atol=1e-4, check_dtype=False)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_input_alone_needs_a_gradient(ep: moonep.Buffer, which: int) -> None:
    idx, ours, theirs = routing(), leaves(), leaves()
    for i in range(3):
        if i != which:
            ours[i].requires_grad_(False)
    layer(ep, idx, *ours).sum().backward()
    dense_layer(idx, *theirs).sum().backward()
    assert ours[which].grad is not None
    assert torch.equal(ours[which].grad, theirs[which].grad)
    assert all(leaf.grad is None for i, leaf in enumerate(ours) if i != which)


# ---- forms of backward ----


def test_sum_backward_has_strides_of_zero(ep: moonep.Buffer) -> None:
    """sum() gives backward one number, expanded; combine and dispatch each get it directly."""
    idx = routing()
    plan = ep.plan(idx)
    routes = (idx >= 0).sum(1, keepdim=True).float()
    x, rows = integers(T, H).requires_grad_(), integers(plan.num_rows, H).requires_grad_()
    ep.dispatch(x, plan).x.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, routes.expand(T, H))
    ep.combine(rows, plan).sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad, torch.ones(plan.num_rows, H))


def test_transposed_gradient(ep: moonep.Buffer) -> None:
    plan, x, weight = ep.plan(routing()), integers(T, H).requires_grad_(), integers(T, H, seed=3)
    rows = ep.dispatch(x, plan).x
    y = ep.combine(rows, plan)
    grad_of_t = weight.t().contiguous()
    assert not grad_of_t.t().is_contiguous()
    y.t().backward(grad_of_t)
    routes = (plan.dst_row >= 0).sum(1, keepdim=True)
    assert x.grad is not None
    assert torch.equal(x.grad, routes * weight)


def test_negative_views_are_read_as_what_they_stand_for(ep: moonep.Buffer) -> None:
    """torch marks some tensors as negated (`torch._neg_view`, the imaginary part of a conjugate) and leaves memory."""
    idx, target = routing(), integers(T, H, seed=3)
    found = []
    for negated in (torch.neg, torch._neg_view):
        x, weights, _ = leaves()
        plan = ep.plan(negated(-idx))
        recv = ep.dispatch(negated(x), plan, negated(weights))
        y = ep.combine(negated(recv.x), plan, negated(recv.weights))
        y.backward(negated(target))
        grads = [x.grad, weights.grad]
        recv = ep.dispatch(x, plan, weights)
        torch.autograd.backward([recv.x, recv.weights], [negated(recv.x.detach()), negated(recv.weights.detach())])
        found.append([plan.dst_row, recv.x, recv.weights, y, *grads, x.grad, weights.grad])
    for expected, got in zip(*found, strict=True):
        assert torch.equal(expected, got)


def test_dropping_reads_negative_views() -> None:
    weights = integers(T, K, seed=1)
    with make_buffer(policy=moonep.Capacity(0.5)) as ep:
        dropped = [ep.plan(routing(), negated(weights)).dst_row for negated in (torch.neg, torch._neg_view)]
    assert torch.equal(*dropped)


def test_one_plan_twice(ep: moonep.Buffer) -> None:
    """Two layers on one plan in one graph, the second on what the first gave."""
    idx, ours, theirs = routing(), leaves(), leaves()
    plan = ep.plan(idx)
    y, expected = ours[0], theirs[0]
    for _ in range(2):
        recv = ep.dispatch(y, plan, ours[1])
        y = ep.combine(experts(recv.x, plan, ours[2]), plan, recv.weights) / 16
        expected = dense_layer(idx, expected, theirs[1], theirs[2]) / 16
    assert torch.equal(y, expected)
    y.sum().backward()
    expected.sum().backward()
    for leaf, same in zip(ours, theirs, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, same.grad)


def test_plans_in_any_order(ep: moonep.Buffer) -> None:
    """Later plans do not disturb earlier ones, forward or backward."""
    losses, xs = [], []
    plans = [ep.plan(routing(seed=seed)) for seed in range(4)]
    for plan in reversed(plans):
        x = integers(T, H).requires_grad_()
        losses.append(ep.combine(ep.dispatch(x, plan).x, plan).sum())
        xs.append(x)
    for loss in losses:
        loss.backward()
    for plan, x in zip(reversed(plans), xs, strict=True):
        assert x.grad is not None
        assert torch.equal(x.grad, (plan.dst_row >= 0).sum(1, keepdim=True).float().expand(T, H))


def test_retain_graph(ep: moonep.Buffer) -> None:
    idx, ours = routing(), leaves()
    loss = layer(ep, idx, *ours).sum()
    loss.backward(retain_graph=True)
    once = [leaf.grad.clone() for leaf in ours if leaf.grad is not None]
    loss.backward()
    for leaf, grad in zip(ours, once, strict=True):
        assert torch.equal(leaf.grad, 2 * grad)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_second_derivatives_are_refused(ep: moonep.Buffer) -> None:
    x, weights, matrices = leaves()
    y = layer(ep, routing(), x, weights, matrices)
    (grad,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiated twice|once_differentiable"):
        grad.sum().backward()


def test_rows_changed_before_backward_are_noticed(ep: moonep.Buffer) -> None:
    plan, weights = ep.plan(routing()), torch.rand(T, K).requires_grad_()
    recv = ep.dispatch(integers(T, H), plan, weights)
    rows = integers(plan.num_rows, H)
    y = ep.combine(rows, plan, recv.weights)
    rows.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_dropped_graphs_give_memory_back() -> None:
    """No cycle keeps rows alive: their memory is used again in the next step."""
    gc.disable()
    try:
        with make_buffer(hidden=4096, max_tokens=64) as ep:
            where = set()
            for _ in range(20):
                x = torch.ones(64, 4096, requires_grad=True)
                plan = ep.plan(routing(64))
                recv = ep.dispatch(x, plan, torch.ones(64, K, requires_grad=True))
                where.add(recv.x.data_ptr())
                ep.combine(recv.x, plan, recv.weights).sum().backward()
            assert len(where) <= 4
    finally:
        gc.enable()


# ---- no graph where none is wanted ----


def test_no_graph_when_nothing_needs_one(ep: moonep.Buffer) -> None:
    plan = ep.plan(routing())
    recv = ep.dispatch(integers(T, H), plan, torch.rand(T, K))
    y = ep.combine(recv.x, plan, recv.weights)
    for output in (recv.x, recv.weights, y):
        assert not output.requires_grad
        assert output.grad_fn is None


def test_outputs_without_a_graph_are_plain_tensors(ep: moonep.Buffer) -> None:
    """They can be written to, and a graph can begin at them."""
    plan = ep.plan(routing())
    recv = ep.dispatch(integers(T, H), plan)
    recv.x.requires_grad_()
    ep.combine(recv.x, plan).sum().backward()
    assert recv.x.grad is not None
    assert torch.equal(recv.x.grad, torch.ones_like(recv.x))
    recv.x.detach().zero_()


def test_no_grad(ep: moonep.Buffer) -> None:
    x, weights, matrices = leaves()
    with torch.no_grad():
        y = layer(ep, routing(), x, weights, matrices)
        assert not torch.is_grad_enabled()
    assert not y.requires_grad
    assert y.grad_fn is None
    with torch.no_grad():
        assert torch.equal(y, dense_layer(routing(), x, weights, matrices))


def test_inference_mode(ep: moonep.Buffer) -> None:
    x, weights, matrices = leaves()
    with torch.inference_mode():
        y = layer(ep, routing(), x, weights, matrices)
        assert y.is_inference()
    assert not y.requires_grad
    assert torch.equal(y.clone(), dense_layer(routing(), x, weights, matrices))
    # The same plan and Buffer serve training afterwards.
    layer(ep, routing(), x, weights, matrices).sum().backward()
    assert x.grad is not None


def test_inference_mode_without_weights(ep: moonep.Buffer) -> None:
    x = integers(T, H)
    with torch.inference_mode():
        plan = ep.plan(routing())
        y = ep.combine(ep.dispatch(x, plan).x, plan)
        assert y.is_inference()
        assert not y.requires_grad
    assert torch.equal(y.clone(), x * (plan.dst_row >= 0).sum(1, keepdim=True))


def test_what_came_in_inference_mode_is_combined_without_a_graph(ep: moonep.Buffer) -> None:
    with torch.inference_mode():
        plan = ep.plan(routing())
        recv = ep.dispatch(integers(T, H), plan)
    y = ep.combine(recv.x, plan, recv.weights)
    assert not y.requires_grad
    assert torch.equal(y, ep.combine(recv.x, plan))


def test_a_plan_made_in_inference_mode_serves_training(ep: moonep.Buffer) -> None:
    with torch.inference_mode():
        plan = ep.plan(routing())
    x = integers(T, H).requires_grad_()
    ep.combine(ep.dispatch(x, plan).x, plan).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (plan.dst_row >= 0).sum(1, keepdim=True).float().expand(T, H))


def test_nothing_is_kept_between_steps(ep: moonep.Buffer) -> None:
    x = integers(T, H).requires_grad_()
    for _ in range(5):
        plan = ep.plan(routing())
        recv = ep.dispatch(x.exp(), plan)  # no combine: as when a checkpoint stops its recomputation early
        ep.dispatch(x.exp(), plan).x.sum().backward()
    del plan, recv
    gc.collect()
    assert not ep._calls._edges
    assert not ep._calls.plans


def test_dispatches_of_one_plan_have_graphs_of_their_own(ep: moonep.Buffer) -> None:
    a, b = integers(T, H).requires_grad_(), integers(T, H).requires_grad_()
    plan = ep.plan(routing())
    weights = torch.rand(T, K, requires_grad=True)
    first, second = ep.dispatch(a.exp(), plan, weights), ep.dispatch(b.exp(), plan)
    ep.combine(first.x, plan, first.weights).sum().backward()
    second.x.sum().backward()
    assert a.grad is not None
    assert b.grad is not None


# ---- dtypes, layouts, autocast ----


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_keep_their_dtypes(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    idx = routing()
    x, weights = integers(T, H, dtype=dtype), integers(T, K, seed=1, dtype=weight_dtype)
    with make_buffer(dtype) as ep:
        plan = ep.plan(idx)
        recv = ep.dispatch(x.requires_grad_(), plan, weights.requires_grad_())
        assert (recv.x.dtype, recv.weights.dtype) == (dtype, torch.float32)
        y = ep.combine(recv.x, plan, recv.weights)
        assert y.dtype == dtype
        y.sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    assert (x.grad.dtype, weights.grad.dtype) == (dtype, weight_dtype)
    routed = idx >= 0
    assert torch.equal(x.grad.float(), (weights.float() * routed).sum(1, keepdim=True).expand(T, H))
    assert torch.equal(weights.grad.float(), x.detach().float().sum(1, keepdim=True) * routed)


def test_combine_takes_weights_of_any_floating_dtype(ep: moonep.Buffer) -> None:
    plan = ep.plan(routing())
    rows, weights = integers(plan.num_rows, H), integers(plan.num_rows, seed=1)
    expected = ep.combine(rows, plan, weights)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        given = weights.to(dtype).requires_grad_()
        assert torch.equal(ep.combine(rows, plan, given), expected)
        ep.combine(rows, plan, given).sum().backward()
        assert given.grad is not None
        assert given.grad.dtype == dtype
        assert torch.equal(given.grad.float(), rows.sum(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_keeps_dtypes(dtype: torch.dtype) -> None:
    idx, x, weights = routing(), integers(T, H, dtype=dtype), integers(T, K, seed=1)
    x.requires_grad_()
    weights.requires_grad_()
    with make_buffer(dtype) as ep:
        plain = ep.plan(idx)
        expected = ep.combine(ep.dispatch(x, plain).x, plain)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plan = ep.plan(idx)
            recv = ep.dispatch(x, plan, weights)
            y = ep.combine(recv.x, plan, recv.weights)
            plain_y = ep.combine(ep.dispatch(x, plan).x, plan)
        assert (recv.x.dtype, recv.weights.dtype, y.dtype) == (dtype, torch.float32, dtype)
        assert torch.equal(plain_y, expected)
        y.sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    assert (x.grad.dtype, weights.grad.dtype) == (dtype, torch.float32)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "offset"])
def test_views_that_require_gradients(ep: moonep.Buffer, layout: str) -> None:
    base, view = {
        "transposed": lambda: (integers(H, T), lambda b: b.t()),
        "sliced": lambda: (integers(2 * T, 3 * H), lambda b: b[1::2, 2::3]),
        "expanded": lambda: (integers(1, H), lambda b: b.expand(T, H)),
        "offset": lambda: (integers(T + 3, H), lambda b: b[3:]),
    }[layout]()
    plan, weights = ep.plan(routing()), integers(K, T, seed=1).requires_grad_()
    base.requires_grad_()
    same = base.detach().clone().requires_grad_()

    def loss(x: torch.Tensor) -> torch.Tensor:
        recv = ep.dispatch(x, plan, weights.t())
        rows = recv.x * 2
        # combine, too, takes any strides
        return (ep.combine(rows.t().contiguous().t(), plan, torch.stack([recv.weights] * 2, 1)[:, 0]) ** 2).sum()

    first, second = loss(view(base)), loss(view(same).contiguous())
    assert torch.equal(first, second)
    first.backward()
    of_view = weights.grad
    weights.grad = None
    second.backward()
    assert base.grad is not None
    assert torch.equal(base.grad, same.grad)
    assert torch.equal(of_view, weights.grad)


def test_inputs_are_not_changed(ep: moonep.Buffer) -> None:
    idx, ours = routing(), leaves()
    before = [leaf.detach().clone() for leaf in (idx, *ours)]
    layer(ep, idx, *ours).sum().backward()
    for leaf, same in zip((idx, *ours), before, strict=True):
        assert torch.equal(leaf, same)


def test_padding_rows_are_zeros_and_their_results_are_not_read() -> None:
    with make_buffer(expert_alignment=8) as ep:
        idx = routing()
        plan = ep.plan(idx)
        x, weights = (integers(T, H) + 10).requires_grad_(), torch.ones(T, K, requires_grad=True)
        recv = ep.dispatch(x, plan, weights)
        is_real = torch.zeros(plan.num_rows, dtype=torch.bool)
        is_real[plan.dst_row[idx >= 0]] = True
        assert (recv.x[~is_real] == 0).all()
        assert (recv.weights[~is_real] == 0).all()
        rows = torch.where(is_real[:, None], recv.x, torch.tensor(float("nan")))
        y = ep.combine(rows, plan, recv.weights)
        assert y.isfinite().all()
        grads = torch.autograd.grad(y.sum(), [x, weights, recv.x])
        assert all(grad.isfinite().all() for grad in grads)
        assert (grads[2][~is_real] == 0).all()


def test_runs_repeat_bit_for_bit(ep: moonep.Buffer) -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        x, weights = torch.randn(T, H, requires_grad=True), torch.rand(T, K, requires_grad=True)
        matrices = torch.randn(E, H, H, requires_grad=True)
        y = layer(ep, routing(), x, weights, matrices)
        return [y, *torch.autograd.grad((y**2).sum(), [x, weights, matrices])]

    first = run()
    for _ in range(5):
        assert all(torch.equal(one, other) for one, other in zip(first, run(), strict=True))


def test_replicate_gives_the_tensors_themselves(ep: moonep.Buffer) -> None:
    plan, (w1, w2) = ep.plan(routing()), (integers(E, H, H).requires_grad_(), integers(E, H))
    assert ep.replicate(plan) == ()
    given = ep.replicate(plan, w1, w2)
    assert given[0] is w1
    assert given[1] is w2
    with pytest.raises(ValueError, match=r"tensors\[1\]: expected shape \[5, \.\.\.\]"):
        ep.replicate(plan, w1, w2[:3])


# ---- the Buffer in a module ----


class Layer(nn.Module):
    def __init__(self, ep: moonep.Buffer):
        super().__init__()
        self.ep = ep
        self.matrices = nn.Parameter(integers(E, H, H))

    def forward(self, idx: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return layer(self.ep, idx, x, None, self.matrices)


def test_a_copied_module_shares_the_buffer(ep: moonep.Buffer) -> None:
    module = Layer(ep)
    copied = copy.deepcopy(module)
    assert copied.ep is ep
    assert copied.matrices is not module.matrices
    idx, x = routing(), integers(T, H)
    assert torch.equal(copied(idx, x), module(idx, x))
    assert copy.deepcopy([ep, {"same": ep}]) == [ep, {"same": ep}]
    assert set(module.state_dict()) == {"matrices"}


def test_pickling_is_refused_with_advice(ep: moonep.Buffer) -> None:
    for attempt in (lambda: pickle.dumps(ep), lambda: torch.save(Layer(ep), io.BytesIO()), lambda: copy.copy(ep)):
        with pytest.raises(TypeError, match=r"cannot be pickled.*make a new one after loading"):
            attempt()
    torch.save(Layer(ep).state_dict(), io.BytesIO())


# ---- errors and lifetime ----


def test_use_after_close() -> None:
    ep = make_buffer()
    plan = ep.plan(routing())
    x = integers(T, H).requires_grad_()
    rows = ep.dispatch(x, plan).x
    loss = rows.sum()
    assert "closed" not in repr(ep)
    ep.close()
    ep.close()
    assert "closed: close() was called" in repr(ep)
    attempts = {
        "plan": lambda: ep.plan(routing()),
        "dispatch": lambda: ep.dispatch(x, plan),
        "combine": lambda: ep.combine(rows, plan),
        "replicate": lambda: ep.replicate(plan),
        "dispatch's backward": loss.backward,
    }
    for verb, attempt in attempts.items():
        with pytest.raises(BufferClosedError, match=rf"^{verb}: .*closed: close\(\) was called$"):
            attempt()
    # What was handed out stays good, and what the Buffer is can still be asked.
    assert torch.equal(rows.detach().sum(0), (x * (plan.dst_row >= 0).sum(1, keepdim=True)).sum(0).detach())
    assert (ep.rank, ep.num_ranks, ep.num_local_experts, ep.first_local_expert, ep.transport) == (0, 1, E, 0, "local")


def test_closed_buffers_refuse_before_looking_at_arguments() -> None:
    ep = make_buffer()
    ep.close()
    with pytest.raises(BufferClosedError):
        ep.plan("nonsense")  # type: ignore[arg-type]


def test_context_manager() -> None:
    with make_buffer() as ep:
        assert isinstance(ep, moonep.Buffer)
        ep.plan(routing())
    with pytest.raises(BufferClosedError):
        ep.plan(routing())
    with pytest.raises(ZeroDivisionError), make_buffer() as other:
        1 / 0  # noqa: B018
    with pytest.raises(BufferClosedError):
        other.plan(routing())


def test_foreign_plans_are_refused(ep: moonep.Buffer) -> None:
    """Before anything moves; the Buffer stays usable."""
    with make_buffer() as other:
        foreign = other.plan(routing())
    plan = ep.plan(routing())
    x = integers(T, H)
    rows = ep.dispatch(x, plan).x
    attempts = {
        "dispatch: rank 0: ": lambda: ep.dispatch(x, foreign),
        "combine: rank 0: ": lambda: ep.combine(rows, foreign),
        "replicate: rank 0: ": lambda: ep.replicate(foreign),
    }
    for who, attempt in attempts.items():
        with pytest.raises(ForeignPlanError, match=f"^{who}plan: expected a plan of this Buffer") as caught:
            attempt()
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, MoonEPError)
    with pytest.raises(TypeError, match="plan: expected a moonep Plan, got str"):
        ep.dispatch(x, "plan")  # type: ignore[arg-type]
    assert torch.equal(ep.dispatch(x, plan).x, rows)


WRONG = {
    "idx of another type": (lambda ep, plan: ep.plan([[0]]), TypeError, r"plan: rank 0: topk_idx: .* got list"),
    "idx of another dtype": (lambda ep, plan: ep.plan(routing().float()), TypeError, "topk_idx: .*float32"),
    "idx of another width": (
        lambda ep, plan: ep.plan(routing()[:, 1:]),
        ValueError,
        r"topk_idx: .*\[T, 3\].*\[12, 2\]",
    ),
    "idx of one dimension": (lambda ep, plan: ep.plan(routing()[0]), ValueError, r"topk_idx: .*\[3\]"),
    "too many tokens": (lambda ep, plan: ep.plan(routing(33)), ValueError, "topk_idx: .*max_tokens = 32.* got 33"),
    "idx of bools": (lambda ep, plan: ep.plan(routing() > 0), TypeError, "topk_idx: .*bool"),
    "wrong plan weights": (
        lambda ep, plan: ep.plan(routing(), torch.ones(T, K + 1)),
        ValueError,
        r"topk_weights: .*\[12, 3\].*\[12, 4\]",
    ),
    "x of another dtype": (
        lambda ep, plan: ep.dispatch(integers(T, H).double(), plan),
        ValueError,
        "dispatch: rank 0: x: .*float32.*float64",
    ),
    "x of another width": (
        lambda ep, plan: ep.dispatch(integers(T, H + 1), plan),
        ValueError,
        r"x: expected shape \[12, 8\].*got \[12, 9\]",
    ),
    "x of other tokens": (lambda ep, plan: ep.dispatch(integers(T - 1, H), plan), ValueError, r"x: .*got \[11, 8\]"),
    "no x": (lambda ep, plan: ep.dispatch(None, plan), TypeError, "x: expected a tensor, got NoneType"),
    "integer weights": (
        lambda ep, plan: ep.dispatch(integers(T, H), plan, routing()),
        TypeError,
        "topk_weights: .*floating.*int64",
    ),
    "transposed weights": (
        lambda ep, plan: ep.dispatch(integers(T, H), plan, torch.ones(K, T)),
        ValueError,
        r"topk_weights: .*\[12, 3\].*\[3, 12\]",
    ),
    "rows of another number": (
        lambda ep, plan: ep.combine(integers(plan.num_rows + 1, H), plan),
        ValueError,
        "combine: rank 0: expert_out: expected shape",
    ),
    "row weights of another shape": (
        lambda ep, plan: ep.combine(integers(plan.num_rows, H), plan, torch.ones(plan.num_rows, 1)),
        ValueError,
        "combine: rank 0: weights: expected shape",
    ),
    "rows without memory": (
        lambda ep, plan: ep.dispatch(torch.empty(T, H, device="meta"), plan),
        ValueError,
        "x: expected a tensor on cpu or cuda, got meta",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_leave_the_buffer_usable(ep: moonep.Buffer, name: str) -> None:
    attempt, kind, message = WRONG[name]
    plan = ep.plan(routing())
    for _ in range(2):
        with pytest.raises(kind, match=message):
            attempt(ep, plan)
    x = integers(T, H)
    assert torch.equal(ep.combine(ep.dispatch(x, plan).x, plan), x * (plan.dst_row >= 0).sum(1, keepdim=True))


def test_plans_of_two_buffers_side_by_side() -> None:
    with make_buffer() as first, make_buffer(torch.bfloat16, hidden=16) as second:
        x, y = integers(T, H).requires_grad_(), integers(T, 16, dtype=torch.bfloat16).requires_grad_()
        plan, other = first.plan(routing()), second.plan(routing(seed=1))
        loss = first.combine(first.dispatch(x, plan).x, plan).sum()
        loss = loss + second.combine(second.dispatch(y, other).x, other).sum().float()
        loss.backward()
        for leaf, used in ((x, plan), (y, other)):
            assert leaf.grad is not None
            assert torch.equal(leaf.grad.float(), (used.dst_row >= 0).sum(1, keepdim=True).float().expand(leaf.shape))


def test_made_many_times() -> None:
    for _ in range(200):
        with make_buffer(hidden=64) as ep:
            plan = ep.plan(routing())
            assert ep.dispatch(integers(T, 64), plan).x.shape == (plan.num_rows, 64)
