"""moonep.nn.LatentMoE against one process that holds all experts, in plain torch, float32, loops."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import moonep
from moonep.nn import LatentMoE, LatentMoEConfig

CONFIG = LatentMoEConfig(hidden=20, latent=12, expert_width=6, shared_width=10, num_experts=9, top_k=3)
TINY = LatentMoEConfig.kimi_k3_tiny()
T = 24  # of all ranks together
TOKENS_OF_RANK = {1: [24], 2: [24, 0], 4: [9, 0, 1, 14]}
POLICIES = {"home": moonep.Home(), "balanced": moonep.Balanced(), "even": moonep.Balanced(slack=0)}


def make_buffer(config: LatentMoEConfig, **changes: Any) -> moonep.Buffer:
    sizes = {"num_experts": config.num_experts, "top_k": config.top_k, "hidden": config.latent}
    usual = {"max_tokens": T, "dtype": torch.float32, "timeout_secs": 20.0}
    return moonep.Buffer(**sizes | usual | changes)


def make_layer(ep: moonep.Buffer, config: LatentMoEConfig, **settings: Any) -> LatentMoE:
    """With a bias that sends much to the first experts, so that `Balanced` has something to do."""
    torch.manual_seed(1)
    layer = LatentMoE(ep, config, **settings)
    layer.router.balancing.bias.copy_(torch.linspace(0.5, -0.5, config.num_experts))
    torch.nn.init.normal_(layer.norm.weight)
    return layer


def tokens(ep: moonep.Buffer, hidden: int, seed: int = 2) -> torch.Tensor:
    """This rank's, of the T of all ranks."""
    x = torch.randn(T, hidden, generator=torch.Generator().manual_seed(seed)).to(ep.config.dtype)
    return x.split(TOKENS_OF_RANK[ep.num_ranks])[ep.rank].clone()


def step(rank: int, config: LatentMoEConfig, settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    """Results of this rank, and how many replicas there were."""
    plans = []
    with make_buffer(config, **settings) as ep:
        layer = make_layer(ep, config)
        layer.experts.register_forward_pre_hook(lambda module, given: plans.append(given[1]))
        x, target = tokens(ep, config.hidden).requires_grad_(), tokens(ep, config.hidden, seed=3)
        y = layer(x)
        (y * target).sum().backward()
        assert (y.dtype, y.shape) == (x.dtype, x.shape)
        found = {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}
        (plan,) = plans
        return found, int((plan.replicas >= 0).sum())


def dense_step(config: LatentMoEConfig, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same of all tokens in one process, written out."""
    with make_buffer(config, **settings) as ep:
        layer = make_layer(ep, config).float()
        x, target = tokens(ep, config.hidden).float().requires_grad_(), tokens(ep, config.hidden, seed=3).float()

    def glu(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return 4 * (gate / 4).tanh() * gate.sigmoid() * 25 * (up / 25).tanh()

    y = []
    for t in range(T):
        scores = (layer.router.weight @ x[t]).sigmoid()
        chosen = (scores + layer.router.balancing.bias).topk(config.top_k).indices
        latent = layer.w_down.weight @ x[t]
        u = torch.zeros(config.latent)
        for e in chosen:
            out = glu(latent @ layer.experts.w_gate_up[e]) @ layer.experts.w_down[e]
            u = u + scores[e] / scores[chosen].sum() * out
        normal = u / (u.square().mean() + 1e-5).sqrt() * layer.norm.weight
        shared = layer.shared_down.weight @ glu(layer.shared_gate_up.weight @ x[t])
        y.append(shared + layer.w_up.weight @ normal)
    (torch.stack(y) * target).sum().backward()
    return {"y": torch.stack(y).detach(), "x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}


def assert_same(of_rank: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Tokens and experts lie block behind block; gradients of dense weights are sums over ranks."""
    assert of_rank[0].keys() == expected.keys()
    for name, exact in expected.items():
        parts = [found[name] for found in of_rank]
        whole = torch.cat(parts) if name in ("y", "x") or name.startswith("experts.") else torch.stack(parts).sum(0)
        assert whole.shape == exact.shape, name
        assert (whole.float() - exact).abs().max() <= tolerance * exact.abs().max().clamp_min(1), name


@pytest.mark.parametrize("policy", POLICIES)
def test_equals_one_process(pool: Any, policy: str) -> None:
    settings = {"policy": POLICIES[policy]}
    found, replicas = zip(*pool.run(step, CONFIG, settings), strict=True)
    assert (replicas[0] > 0) == (policy != "home" and pool.num_ranks > 1)
    assert_same(found, dense_step(CONFIG, settings), 1e-5)


def test_equals_one_process_in_bfloat16(pool2: Any) -> None:
    settings = {"policy": moonep.Balanced(), "dtype": torch.bfloat16}
    found, _ = zip(*pool2.run(step, CONFIG, settings), strict=True)
    assert {found[0]["x"].dtype, found[0]["w_up.weight"].dtype} == {torch.bfloat16}
    assert found[0]["router.weight"].dtype == torch.float32
    assert_same(found, dense_step(CONFIG, settings), 0.1)


def test_equals_one_process_with_896_experts(pool2: Any) -> None:
    settings = {"policy": moonep.Balanced()}
    found, _ = zip(*pool2.run(step, TINY, settings), strict=True)
    assert_same(found, dense_step(TINY, settings), 1e-5)


def checkpointed(rank: int) -> list[list[torch.Tensor]]:
    results = []
    with make_buffer(CONFIG, policy=moonep.Balanced()) as ep:
        for use in (False, True):
            layer, x = make_layer(ep, CONFIG), tokens(ep, CONFIG.hidden).requires_grad_()
            y = checkpoint(layer, x, use_reentrant=False) if use else layer(x)
            y.square().sum().backward()
            layer.router.balancing.step(dist.group.WORLD)
            balancing = layer.router.balancing
            results.append([y, balancing.bias, balancing.load, x.grad, *(p.grad for p in layer.parameters())])
    return [[tensor.detach() for tensor in result] for result in results]


def test_checkpointing_and_balancing(pool2: Any) -> None:
    """Recomputation changes no bit, nor the counts; ranks take the same step, with and without tokens."""
    found = pool2.run(checkpointed)
    for plain, again in found:
        assert all(torch.equal(*pair) for pair in zip(plain, again, strict=True))
    assert torch.equal(found[0][0][1], found[1][0][1])
    assert found[0][0][2].sum() == found[1][0][2].sum() == T * CONFIG.top_k


def test_kimi_k3() -> None:
    config = LatentMoEConfig.kimi_k3()
    assert round(3 * config.latent * config.expert_width / 1e6, 2) == 33.03
    assert (config.num_experts, config.top_k) == (TINY.num_experts, TINY.top_k) == (896, 16)
    with make_buffer(config, max_tokens=1, dtype=torch.bfloat16) as ep:
        layer = LatentMoE(ep, config, device="meta")
    experts = sum(p.numel() for p in layer.experts.parameters())
    dense = sum(p.numel() for p in layer.parameters()) - experts
    assert experts == 896 * 33_030_144
    # 92 such layers of 2.8e12 weights, 104e9 of them active; the rest is attention, embeddings and a dense layer.
    assert 0.95 < 92 * (experts + dense) / 2.8e12 < 1
    assert 0.5 < 92 * (16 / 896 * experts + dense) / 104e9 < 1


def test_shapes_dtypes_and_copies() -> None:
    with make_buffer(CONFIG, dtype=torch.bfloat16) as ep:
        layer = make_layer(ep, CONFIG, dtype=torch.float32)
        x = torch.randn(2, 5, CONFIG.hidden)
        y = layer(x)
        assert (y.dtype, y.shape) == (x.dtype, x.shape)
        assert torch.equal(layer(x.flatten(0, 1)), y.flatten(0, 1))
        assert torch.equal(copy.deepcopy(layer)(x), y)
        assert layer(x.double()).dtype == torch.float64
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = layer(x)
            assert low.dtype == x.dtype
            low.sum().backward()
        torch.testing.assert_close(low, y, rtol=0.1, atol=0.1)
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
        for shape in ((0, CONFIG.hidden), (3, 0, CONFIG.hidden)):
            layer.zero_grad()
            empty = torch.zeros(shape, requires_grad=True)
            layer(empty).sum().backward()
            assert all((p.grad == 0).all() for p in layer.parameters())
        torch.manual_seed(1)
        meta = LatentMoE(ep, CONFIG, device="meta").to_empty(device="cpu")
        meta.reset_parameters()
        assert (meta.norm.weight == 1).all()
        assert meta(x).isfinite().all()
        assert "latent=12" in repr(layer)


def test_wrong_sizes() -> None:
    for name, value in (("hidden", 20), ("num_experts", 8), ("top_k", 2)):
        with make_buffer(CONFIG, **{name: value}) as ep, pytest.raises(ValueError, match=f"ep: .* {name}=.* {value}"):
            LatentMoE(ep, CONFIG)
    with make_buffer(CONFIG) as ep, pytest.raises(ValueError, match="config: shared_width: expected at least 1, got 0"):
        LatentMoE(ep, LatentMoEConfig(20, 12, 6, 0, 9, 3))
