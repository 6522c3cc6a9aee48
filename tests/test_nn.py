"""moonep.nn against one process that holds all experts, in plain torch."""

import copy
import dataclasses
import functools
import io
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import moonep
from moonep.errors import BufferClosedError
from moonep.nn import Experts, ModelState, MoE, grouped

T = 13  # of all ranks together
TOKENS_OF_RANK = {1: [13], 2: [13, 0], 4: [5, 0, 1, 7]}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def make_buffer(**changes: Any) -> moonep.Buffer:
    usual = {"num_experts": 5, "top_k": 2, "hidden": 16, "max_tokens": T, "dtype": torch.float32, "timeout_secs": 20.0}
    return moonep.Buffer(**usual | changes)


@pytest.fixture
def ep() -> Iterator[moonep.Buffer]:
    with make_buffer() as buffer:
        yield buffer


class Router(nn.Module):
    """Softmax over float32 logits."""

    def __init__(self, ep: moonep.Buffer):
        super().__init__()
        self.top_k = ep.config.top_k
        self.gate = nn.Linear(ep.config.hidden, ep.config.num_experts, bias=False)
        self.favour = torch.zeros(ep.config.num_experts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", enabled=False):
            weights, idx = (self.gate(x.float()) + self.favour).softmax(-1).topk(self.top_k)
        return idx, weights


def make_layer(ep: moonep.Buffer, *, hot: int = 0, **settings: Any) -> MoE:
    """The same on any number of ranks; biases, too, are not zero. With `hot`, only so many first experts get rows."""
    torch.manual_seed(1)
    layer = MoE(ep, Router(ep), Experts(ep, **{"width": 8} | settings))
    if hot:
        layer.router.favour[hot:] = -100.0
    home = slice(ep.first_local_expert, ep.first_local_expert + ep.num_local_experts)
    for bias in (layer.experts.b_gate_up, layer.experts.b_down):
        if bias is not None:
            bias.data.copy_(torch.randn(ep.config.num_experts, bias.shape[1])[home])
    return layer


def tokens(ep: moonep.Buffer, seed: int = 2) -> torch.Tensor:
    """This rank's, of the T of all ranks."""
    x = torch.randn(T, ep.config.hidden, generator=torch.Generator().manual_seed(seed)).to(ep.config.dtype)
    counts = TOKENS_OF_RANK[ep.num_ranks]
    return x.split(counts)[ep.rank].clone()


def gradients(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}


def step(rank: int, settings: dict[str, Any], layer_settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    with make_buffer(**settings) as ep:
        layer = make_layer(ep, **layer_settings)
        x, target = tokens(ep).requires_grad_(), tokens(ep, seed=3)
        y = layer(x)
        (y * target).sum().backward()
        assert y.dtype == x.dtype
        assert x.grad is not None
        return {"y": y.detach(), "x": x.grad} | gradients(layer)


def kept_routes(idx: torch.Tensor, weights: torch.Tensor, policy: Any, num_experts: int) -> torch.Tensor:
    """[T, K]: those that the policy drops are False."""
    keep = torch.ones(idx.shape, dtype=torch.bool)
    if isinstance(policy, moonep.Capacity):
        room = policy.rows_per_expert(*idx.shape, num_experts, 1)
        for expert in range(num_experts):
            routes = (idx == expert).nonzero()
            order = weights[tuple(routes.t())].sort(descending=True, stable=True).indices
            keep[tuple(routes[order[room:]].t())] = False
    return keep


def dense_step(settings: dict[str, Any], layer_settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What `step` gives, all ranks together: every token through its experts, in loops, in float32."""
    with make_buffer(**settings) as ep:
        layer = make_layer(ep, **layer_settings)
        x, target = tokens(ep).float().requires_grad_(), tokens(ep, seed=3).float()
    layer.float()
    experts = layer.experts
    idx, weights = layer.router(x)
    keep = kept_routes(idx, weights, ep.config.policy, ep.config.num_experts)
    y = []
    for t in range(T):
        total = torch.zeros_like(x[t])
        for k in range(idx.shape[1]):
            if keep[t, k]:
                e = idx[t, k]
                hidden = x[t] @ experts.w_gate_up[e]
                if experts.b_gate_up is not None:
                    hidden = hidden + experts.b_gate_up[e]
                gate, up = hidden.chunk(2)
                out = (gate * gate.sigmoid() * up) @ experts.w_down[e]
                if experts.b_down is not None:
                    out = out + experts.b_down[e]
                total = total + weights[t, k] * out
        y.append(total)
    (torch.stack(y) * target).sum().backward()
    assert x.grad is not None
    return {"y": torch.stack(y).detach(), "x": x.grad} | gradients(layer)


def whole(of_rank: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Results of all ranks as of one: gradients of the router are sums, everything else lies block behind block."""
    join = {name: torch.stack if name.startswith("router.") else torch.cat for name in of_rank[0]}
    parts = {name: join[name]([found[name] for found in of_rank]) for name in of_rank[0]}
    return {name: part.sum(0) if name.startswith("router.") else part for name, part in parts.items()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Within `tolerance` of the largest value, or of 1."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        scale, worst = (t.detach().double().abs().flatten() for t in (tensor, found[name] - tensor))
        assert max([0.0, *worst.tolist()]) <= tolerance * max([1.0, *scale.tolist()]), name
        assert worst.isfinite().all(), name


LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "bias": ({}, {"bias": True}),
    "padded": ({"expert_alignment": 4}, {"bias": True}),
    "capacity": ({"policy": moonep.Capacity(1.0)}, {"bias": True}),
    "bfloat16": ({"dtype": torch.bfloat16}, {"bias": True}),
    "float16": ({"dtype": torch.float16, "policy": moonep.Capacity(2.0)}, {}),
    "float32 masters": ({"dtype": torch.bfloat16}, {"dtype": torch.float32}),
    "odd widths": ({"hidden": 7}, {"width": 3, "bias": True}),
    "odd widths, bfloat16": ({"hidden": 7, "dtype": torch.bfloat16}, {"width": 3}),
    "width 1": ({"hidden": 1}, {"width": 1}),
    "ranks without experts": ({"num_experts": 2}, {"bias": True}),
    "many experts": ({"num_experts": 40, "top_k": 16}, {}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_one_process(pool: Any, name: str) -> None:
    settings, layer_settings = LAYERS[name]
    found = whole(pool.run(step, settings, layer_settings))
    dtype = settings.get("dtype", torch.float32)
    if "dtype" in settings:
        weight_dtype = layer_settings.get("dtype", dtype)
        assert {found[name].dtype for name in found if name.startswith("experts.")} == {weight_dtype}
    assert_close(found, dense_step(settings, layer_settings), TOLERANCE[dtype])


# ---- grouped_linear ----

ENDS = {"some": [3, 3, 8, 9], "empty": [0, 0, 0, 0], "one": [0, 9, 9, 9], "all but the last": [2, 4, 9, 9]}


def plain_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, ends: list[int]) -> torch.Tensor:
    parts = [
        rows[start:end] @ weight[g] + bias[g] for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    return torch.cat([*parts, torch.zeros(len(rows) - ends[-1], weight.shape[2], dtype=rows.dtype)])


def operands(num_rows: int, wide: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_rows, wide), (4, wide, 2 * wide), (4, 2 * wide)]
    rows, weight, bias = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return rows, weight, bias


@pytest.mark.parametrize("way", ["as chosen", "loop", "loop through float32"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("ends", ENDS)
def test_grouped_linear(monkeypatch: pytest.MonkeyPatch, ends: str, dtype: torch.dtype, way: str) -> None:
    if way != "as chosen":
        monkeypatch.setattr(grouped, "_takes_grouped", lambda *_: False)
        monkeypatch.setattr(grouped, "_has_instructions", lambda *_: way == "loop")
    # 12: rows past the last group
    for num_rows, wide in itertools.product({ENDS[ends][-1], 12}, (1, 7, 16)):
        mine = operands(num_rows, wide, dtype)
        exact = [leaf.detach().double().requires_grad_() for leaf in mine]
        with torch.no_grad():
            mine[0][ENDS[ends][-1] :] = float("nan")
        out = grouped.grouped_linear(*mine, ENDS[ends])
        expected = plain_linear(*exact, ENDS[ends])
        assert_close({"out": out}, {"out": expected}, TOLERANCE[dtype])
        assert out.dtype == dtype
        for grad in (torch.ones(()).expand(out.shape), torch.randn(out.shape)):  # as of sum(), and any
            found = torch.autograd.grad(out, mine, grad.to(dtype), retain_graph=True)
            same = torch.autograd.grad(expected, exact, grad.to(dtype).double(), retain_graph=True)
            assert_close(dict(enumerate(found)), dict(enumerate(same)), TOLERANCE[dtype])
            for leaf_grad, exact_grad in zip(found, same, strict=True):
                assert leaf_grad.dtype == dtype
                assert (leaf_grad[exact_grad == 0] == 0).all()  # exact zeros for empty groups and rows past the last


@pytest.mark.parametrize("wide", [3, 4])
def test_gradients_by_finite_differences(wide: int) -> None:
    leaves = [leaf.detach().double().requires_grad_() for leaf in operands(10, wide, torch.float32)]
    assert torch.autograd.gradcheck(lambda *leaves: grouped.grouped_linear(*leaves, ENDS["some"]), leaves)


def test_grouped_linear_without_groups() -> None:
    for num_rows in (0, 3):
        rows = torch.randn(num_rows, 8, requires_grad=True)
        weight, bias = torch.empty(0, 8, 4, requires_grad=True), torch.empty(0, 4, requires_grad=True)
        out = grouped.grouped_linear(rows, weight, bias, [])
        assert torch.equal(out, torch.zeros(num_rows, 4))
        out.sum().backward()
        for leaf in (rows, weight, bias):
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("layout", ["transposed", "every other", "offset"])
def test_rows_of_any_strides(layout: str) -> None:
    rows, weight, bias = operands(9, 16, torch.float32)
    view = {
        "transposed": lambda: rows.detach().t().contiguous().t(),
        "every other": lambda: rows.detach().repeat_interleave(2, 0)[::2],
        "offset": lambda: torch.cat([torch.zeros(1), rows.detach().flatten()])[1:].view(9, 16),
    }[layout]()
    out = grouped.grouped_linear(view, weight, bias, ENDS["some"])
    torch.testing.assert_close(out, plain_linear(rows, weight, bias, ENDS["some"]))


def test_one_call_is_used_where_it_wins() -> None:
    rows, weight, _ = operands(9, 16, torch.float32)
    if grouped._has_grouped_mm("cpu", torch.float32):
        assert grouped._takes_grouped(rows, weight)
        assert grouped._takes_grouped(rows, weight.transpose(1, 2))
    assert not grouped._takes_grouped(rows.to(torch.bfloat16), weight.to(torch.bfloat16))
    assert not grouped._takes_grouped(rows[:, :7].contiguous(), weight[:, :7])
    assert not grouped._takes_grouped(rows[:0], weight)


# ---- Experts ----


def test_plans_with_replicas_need_their_weights(ep: moonep.Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with one slot more than home experts: refused on home weights alone, computed with all."""
    experts = make_layer(ep).experts
    plan = ep.plan(torch.tensor([[0, 1], [2, 1], [4, 0]]))
    rows = ep.dispatch(tokens(ep)[:3], plan).x
    expected = experts(rows, plan)
    with_slots = dataclasses.replace(
        plan,
        num_groups=7,
        group_experts=torch.tensor([0, 1, 2, 3, 4, 3, -1]),
        group_ends=torch.cat([plan.group_ends, plan.group_ends[-1:], plan.group_ends[-1:]]),
    )
    monkeypatch.setattr(ep, "replicate_apart", lambda plan, *weights: [(w, w[:0]) for w in weights])
    with pytest.raises(
        ValueError, match="rank 0 has rows of 5 experts at home and 1 replicas, but weights for 5 and 0"
    ):
        experts(rows, with_slots)

    monkeypatch.setattr(ep, "replicate_apart", lambda plan, *weights: [(w, w[3:4].clone()) for w in weights])
    out = experts(rows, with_slots)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert all(grad.isfinite().all() for grad in gradients(experts).values())


def test_wrong_arguments(ep: moonep.Buffer) -> None:
    experts, plan = make_layer(ep).experts, ep.plan(torch.tensor([[0, 1], [2, 1]]))
    with pytest.raises(ValueError, match=r"rows: expected shape \[4, 16\] .*, got \[3, 16\]"):
        experts(torch.zeros(3, 16), plan)
    with pytest.raises(ValueError, match="width: expected at least 1, got 0"):
        Experts(ep, 0)
    with pytest.raises(ValueError, match="activation: expected one of swiglu, gelu, situ_glu, got 'relu'"):
        Experts(ep, 8, activation="relu")
    with make_buffer() as other, pytest.raises(moonep.errors.ForeignPlanError):
        experts(torch.zeros(4, 16), other.plan(torch.tensor([[0, 1], [2, 1]])))


def home_weights(rank: int) -> list[torch.Tensor]:
    with make_buffer(num_experts=7) as ep:
        torch.manual_seed(3)
        first, second = Experts(ep, 4), Experts(ep, 4, dtype=torch.bfloat16)
        assert not torch.equal(first.w_down.bfloat16(), second.w_down)
        after = torch.rand(3)  # what is drawn next is also the same
        second.reset_parameters(functools.partial(nn.init.normal_, std=0.5), generator=torch.Generator().manual_seed(5))
        return [*(p.detach() for e in (first, second) for p in e.parameters()), after]


def test_the_same_experts_on_any_number_of_ranks(pool: Any) -> None:
    *expected, after = home_weights(0)
    found = pool.run(home_weights)
    for place, weights in enumerate(expected):
        assert torch.equal(torch.cat([of_rank[place] for of_rank in found]), weights)
    assert all(torch.equal(of_rank[-1], after) for of_rank in found)
    assert len({tuple(expert.flatten().tolist()) for expert in expected[0]}) == 7  # no two are alike
    assert expected[0].abs().max() <= 0.25  # as nn.Linear: within 1 / sqrt(16)
    assert 0.4 < expected[2].float().std() < 0.6


def test_experts_on_meta(ep: moonep.Buffer) -> None:
    torch.manual_seed(1)
    experts = Experts(ep, 8, bias=True, device="meta")
    assert all(parameter.is_meta for parameter in experts.parameters())
    experts.to_empty(device="cpu").reset_parameters()
    torch.manual_seed(1)
    for found, same in zip(experts.parameters(), Experts(ep, 8, bias=True).parameters(), strict=True):
        assert torch.equal(found, same)


def test_what_print_shows(ep: moonep.Buffer) -> None:
    shown = "Experts(experts 0 .. 5 of 5, hidden=16, width=8, activation='swiglu', bias=True)"
    assert repr(Experts(ep, 8, bias=True)) == shown


@pytest.mark.parametrize("frozen", ["w_gate_up", "w_down", "b_gate_up", "b_down", "all"])
def test_frozen_parameters(ep: moonep.Buffer, frozen: str) -> None:
    layer = make_layer(ep, bias=True)
    (layer(tokens(ep)) * tokens(ep, 3)).sum().backward()
    expected = gradients(layer)
    layer.zero_grad()
    for name, parameter in layer.experts.named_parameters():
        parameter.requires_grad_(frozen not in (name, "all"))
    (layer(tokens(ep)) * tokens(ep, 3)).sum().backward()
    found = gradients(layer)
    trained = {
        name for name in expected if name.startswith("experts.") and frozen not in (name[len("experts.") :], "all")
    }
    assert found.keys() == trained | {"router.gate.weight"}
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_gradients_accumulate(ep: moonep.Buffer) -> None:
    layer, losses = make_layer(ep, bias=True), []
    for seed in (4, 5):
        losses.append((layer(tokens(ep, seed)) ** 2).sum())
    sum(losses).backward()
    expected = gradients(layer)
    layer.zero_grad()
    for seed in (4, 5):
        (layer(tokens(ep, seed)) ** 2).sum().backward()
    assert_close(gradients(layer), expected, 1e-6)


@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.float16])
def test_autocast(rows_dtype: torch.dtype) -> None:
    """Under autocast, what is computed is as of a layer in autocast's dtype; what comes out has its own dtype."""
    with make_buffer(dtype=rows_dtype) as ep, make_buffer(dtype=torch.bfloat16) as low:
        layer = make_layer(ep, bias=True, dtype=torch.float32)
        same = make_layer(low, bias=True, dtype=torch.bfloat16)
        idx = torch.tensor([[0, 1], [2, 1], [4, 0]])
        plan = ep.plan(idx)
        rows = ep.dispatch(tokens(ep)[:3].bfloat16().to(rows_dtype), plan).x.requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer.experts(rows, plan)
            out.float().sum().backward()  # in autocast too, where it should not be, but is
        expected = same.experts(rows.detach().bfloat16(), low.plan(idx))
        assert out.dtype == rows_dtype
        assert torch.equal(out, expected.to(rows_dtype))
        assert {grad.dtype for grad in gradients(layer.experts).values()} == {torch.float32}
        expected.sum().backward()
        assert rows.grad is not None
        assert rows.grad.dtype == rows_dtype
        for name, grad in gradients(same.experts).items():
            torch.testing.assert_close(grad.float(), gradients(layer.experts)[name], rtol=1e-2, atol=1e-2)


# ---- MoE ----


def test_shapes_and_dtypes_of_tokens(ep: moonep.Buffer) -> None:
    layer = make_layer(ep)
    x = torch.randn(2, 3, 2, 16)
    y = layer(x)
    assert torch.equal(y, layer(x.view(12, 16)).view(x.shape))
    assert torch.equal(layer(x.transpose(0, 2)), layer(x.transpose(0, 2).contiguous()))
    for dtype in (torch.bfloat16, torch.float64):
        given = x.to(dtype).requires_grad_()
        assert layer(given).dtype == dtype
        layer(given).sum().backward()
        assert given.grad is not None
        assert given.grad.dtype == dtype
    for shape in ((0, 16), (0, 5, 16), (5, 0, 16)):
        empty = torch.zeros(shape, requires_grad=True)
        layer.zero_grad()
        y = layer(empty)
        assert y.shape == shape
        y.sum().backward()
        assert all((grad == 0).all() for grad in gradients(layer).values())
        assert gradients(layer).keys() == dict(layer.named_parameters()).keys()


def test_autocast_around_a_layer(ep: moonep.Buffer) -> None:
    layer = make_layer(ep)
    before = nn.Linear(16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(before(tokens(ep)))  # Linear gives bfloat16, the Buffer carries float32
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert before.weight.grad is not None


def test_evaluation_and_training_take_turns(ep: moonep.Buffer) -> None:
    layer, x = make_layer(ep), tokens(ep)
    trained = layer(x)
    layer.eval()
    with torch.no_grad():
        y = layer(x)
    assert not y.requires_grad
    with torch.inference_mode():
        inferred = layer(x)
    assert torch.equal(y, trained)
    assert torch.equal(inferred.clone(), y)
    layer.train()
    layer(x).sum().backward()
    assert gradients(layer).keys() == dict(layer.named_parameters()).keys()


def test_copies_and_state_dicts(ep: moonep.Buffer) -> None:
    layer, x = make_layer(ep, bias=True), tokens(ep)
    copied = copy.deepcopy(layer)
    assert copied.ep is copied.experts.ep is ep
    with torch.no_grad():
        copied.experts.w_down.zero_()
    assert not torch.equal(copied(x), layer(x))
    names = {"w_gate_up", "w_down", "b_gate_up", "b_down"}
    assert layer.state_dict().keys() == {"router.gate.weight"} | {f"experts.{name}" for name in names}
    copied.load_state_dict(layer.state_dict())
    assert torch.equal(copied(x), layer(x))
    with pytest.raises(RuntimeError, match="size mismatch"), make_buffer(num_experts=6) as other:
        make_layer(other, bias=True).load_state_dict(layer.state_dict())


def test_layers_share_a_buffer_and_its_end(ep: moonep.Buffer) -> None:
    first, second = make_layer(ep), make_layer(ep)
    x = tokens(ep).requires_grad_()
    second(first(x)).sum().backward()
    assert x.grad is not None
    ep.close()
    with pytest.raises(BufferClosedError):
        first(x)


def checkpointed(
    rank: int, reentrant: bool, early_stop: bool, last_saves: bool, settings: dict[str, Any]
) -> list[dict[str, torch.Tensor]]:
    """Two steps of two layers, without checkpointing and with."""
    results = []
    with make_buffer(**settings) as ep:
        for use in (False, True):
            layers = nn.Sequential(make_layer(ep, bias=True), make_layer(ep))
            x = tokens(ep).requires_grad_()
            for _ in range(2):
                y = x
                for layer in layers:

                    def block(x: torch.Tensor, layer: nn.Module = layer) -> torch.Tensor:
                        return layer(x).tanh() if last_saves else x + layer(x)

                    with set_checkpoint_early_stop(early_stop):
                        y = checkpoint(block, y, use_reentrant=reentrant) if use else block(y)
                (y * tokens(ep, 3)).sum().backward()
            assert x.grad is not None
            results.append({"y": y.detach(), "x": x.grad} | gradients(layers))
    return results


@pytest.mark.parametrize("last_saves", [True, False], ids=["saved after", "nothing saved after"])
@pytest.mark.parametrize(
    ("reentrant", "early_stop"), [(True, False), (False, False), (False, True)], ids=["reentrant", "not", "early stop"]
)
def test_checkpointing(pool: Any, reentrant: bool, early_stop: bool, last_saves: bool) -> None:
    """Recomputation runs the verbs again, on ranks without tokens too, and changes no bit."""
    for expected, found in pool.run(checkpointed, reentrant, early_stop, last_saves, {}):
        assert found.keys() == expected.keys()
        for name in expected:
            assert torch.equal(found[name], expected[name]), name


# ---- saving and loading ----


class Net(nn.Module):
    """Dense layers around two MoE layers, whose experts have other numbers."""

    def __init__(self, ep: moonep.Buffer, small: moonep.Buffer):
        super().__init__()
        self.before = nn.Linear(16, 16)
        self.layers = nn.ModuleList([make_layer(ep, bias=True), make_layer(small)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def make_optimizer(net: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    is_expert = {name: ".experts." in name for name, _ in net.named_parameters()}
    groups = [[p for name, p in net.named_parameters() if is_expert[name] == which] for which in (False, True)]
    return torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "lr": 0.05}], lr=0.01)


def train(net: nn.Module, ep: moonep.Buffer, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    """The same, but for rounding, on any number of ranks: losses of all ranks' tokens."""
    losses = []
    for step in range(steps):
        loss = (net(tokens(ep, 10 + step)) ** 2).sum() / T
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        dense = [p.grad for name, p in net.named_parameters() if ".experts." not in name]
        for tensor in [total, *dense]:
            dist.all_reduce(tensor)
        optimizer.step()
        losses.append(total)
    return losses


def trained(
    rank: int, directory: str, kind: str, what: str, wrapped: bool = False, **settings: Any
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Saves after two steps, or loads, and goes on: what happens then, and what the model was at that moment."""
    import torch.distributed.checkpoint as dcp

    with make_buffer(**settings) as ep, make_buffer(num_experts=2, **settings) as small:
        net: nn.Module = Net(ep, small)
        if wrapped:
            ignored = [name for name, _ in net.named_parameters() if ".experts." in name]
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
            net = nn.parallel.DistributedDataParallel(net)
        optimizer = make_optimizer(net, kind)
        if what == "save":
            train(net, ep, optimizer, 2)
            dcp.save({"train": ModelState(net, optimizer)}, checkpoint_id=directory)
        else:
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.fill_(3)
            optimizer.param_groups[-1]["lr"] = 7.0
            dcp.load({"train": ModelState(net, optimizer)}, checkpoint_id=directory)
        found = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
        return train(net, ep, optimizer, 2), found


def loaded_alone(rank: int, directory: str) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    with make_buffer() as ep, make_buffer(num_experts=2) as small:
        net = Net(ep, small)
        for parameter in net.parameters():
            nn.init.zeros_(parameter)
        dcp.load({"train": ModelState(net)}, checkpoint_id=directory)
        return {name: parameter.detach() for name, parameter in net.named_parameters()}


def assert_goes_on(found: Any, expected: Any) -> None:
    """As it would have, without saving, on the first number of ranks."""
    losses, _ = expected[0]
    for of_rank, _ in found:
        torch.testing.assert_close(of_rank, losses, rtol=1e-4, atol=1e-5)
    for name, tensor in expected[0][1].items():
        parts = [[of_rank[1][name] for of_rank in results] for results in (found, expected)]
        if ".experts." in name:
            assert torch.equal(torch.cat(parts[0]), torch.cat(parts[1])), name
        else:
            assert all(torch.equal(part, tensor) for part in parts[0]), name


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_saving_on_four_ranks_loading_on_two_and_one(
    pool4: Any, pool2: Any, pool1: Any, tmp_path: Any, kind: str
) -> None:
    expected = pool4.run(trained, str(tmp_path), kind, "save")
    for fewer in (pool2, pool1):
        found = fewer.run(trained, str(tmp_path), kind, "load")
        assert_goes_on(found, expected)
    for name, parameter in pool1.run(loaded_alone, str(tmp_path))[0].items():
        assert torch.equal(parameter, found[0][1][name])


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_saving_on_one_rank_loading_on_four(pool4: Any, pool1: Any, tmp_path: Any, kind: str) -> None:
    expected = pool1.run(trained, str(tmp_path), kind, "save")
    assert_goes_on(pool4.run(trained, str(tmp_path), kind, "load"), expected)


def states(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    with make_buffer() as ep, make_buffer(num_experts=2) as small:
        torch.manual_seed(0)
        state = ModelState(Net(ep, small)).state_dict()["model"]
        names = {name: list(value) for name, value in state.items() if isinstance(value, dict)}
        whole = {name: value for name, value in state.items() if not isinstance(value, dict)}
        return names, whole


def test_names_of_experts(pool4: Any) -> None:
    found = pool4.run(states)
    for rank, homes in enumerate([["0", "1"], ["2"], ["3"], ["4"]]):
        names, whole = found[rank]
        first = {f"layers.0.experts.{name}": homes for name in ("w_gate_up", "w_down", "b_gate_up", "b_down")}
        second = {f"layers.1.experts.{name}": [str(rank)] for name in ("w_gate_up", "w_down")}
        assert names == first | (second if rank < 2 else {})
        assert whole.keys() == {"before.weight", "before.bias"} | {f"layers.{i}.router.gate.weight" for i in (0, 1)}


def test_states_without_files(ep: moonep.Buffer) -> None:
    """What state_dict gives are views; what load_state_dict takes may come from anywhere."""
    net, other = nn.Sequential(make_layer(ep)), nn.Sequential(make_layer(ep))
    optimizer, other_optimizer = make_optimizer(net, "sgd"), make_optimizer(other, "sgd")
    (net(tokens(ep)) ** 2).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(ModelState(net, optimizer).state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    ModelState(other, other_optimizer).load_state_dict(state)
    for found, expected in zip(other.parameters(), net.parameters(), strict=True):
        assert torch.equal(found, expected)
        momenta = other_optimizer.state[found]["momentum_buffer"], optimizer.state[expected]["momentum_buffer"]
        assert torch.equal(*momenta)
    views = ModelState(other).state_dict()["model"]["0.experts.w_down"]
    views["3"].fill_(5)
    assert (other[0].experts.w_down[3] == 5).all()
    ModelState(other).load_state_dict(state)  # the optimizer's part is not read
    assert torch.equal(other[0].experts.w_down, net[0].experts.w_down)
    in_experts = state["model"]["0.experts.w_down"]
    in_experts["4"] = in_experts["4"][:1]
    with pytest.raises(ValueError, match=r"0.experts.w_down.4: expected shape \[8, 16\], got \[1, 16\]"):
        ModelState(other).load_state_dict(state)
    del in_experts["4"]
    with pytest.raises(KeyError, match="4"):
        ModelState(other).load_state_dict(state)


def test_wrapped_models_save_under_the_same_names(pool2: Any, pool1: Any, tmp_path: Any) -> None:
    saved = pool2.run(trained, str(tmp_path), "sgd", "save", True)
    for name, parameter in pool1.run(loaded_alone, str(tmp_path))[0].items():
        parts = [of_rank[f"module.{name}"] for _, of_rank in saved]
        assert torch.equal(parameter, torch.cat(parts) if ".experts." in name else parts[0])
