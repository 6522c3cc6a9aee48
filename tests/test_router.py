"""moonep.nn.TopKRouter against the formulas, token by token in float64."""

import copy
import math
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moonep
from moonep.nn import Balancing, Experts, MoE, QuantileBalancing, TopKRouter

H, E, K, T = 12, 24, 4, 50


def make_router(**settings: Any) -> TopKRouter:
    torch.manual_seed(0)
    router = TopKRouter(H, E, K, **settings)
    router.balancing.bias.copy_(torch.linspace(-0.2, 0.2, E).flip(0))
    return router


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randn(T, H, generator=torch.Generator().manual_seed(seed))


def plain_choice(biased: list[float], top_k: int, num_groups: int, top_groups: int) -> list[int]:
    """The ids chosen, best first, the lower id first among equals."""
    size = len(biased) // num_groups
    groups = [biased[g * size : (g + 1) * size] for g in range(num_groups)]
    worth = [sum(sorted(group, reverse=True)[:2]) for group in groups]
    kept = sorted(range(num_groups), key=lambda g: (-worth[g], g))[:top_groups]
    eligible = [e for e in range(len(biased)) if e // size in kept]
    return sorted(eligible, key=lambda e: (-biased[e], e))[:top_k]


def plain_weights(router: TopKRouter, x: torch.Tensor, weight: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
    """In the dtype of x."""
    logits = x @ weight.t()
    if router.scores == "sigmoid":
        scores = 1 / (1 + (-logits).exp())
    else:
        scores = logits.exp() / logits.exp().sum(1, keepdim=True)
    chosen = torch.stack([scores[t, idx[t]] for t in range(len(x))])
    if router.renormalize:
        chosen = chosen / chosen.sum(1, keepdim=True)
    return router.scale * chosen


SETTINGS: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "softmax": {"scores": "softmax"},
    "softmax as it is": {"scores": "softmax", "renormalize": False},
    "scaled": {"renormalize": False, "scale": 2.5},
    "groups": {"num_groups": 6, "top_groups": 2, "scale": 2.5},
    "groups of one": {"num_groups": E, "top_groups": 7},
    "all groups": {"num_groups": 3, "top_groups": 3},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_formulas(name: str) -> None:
    router, x = make_router(**SETTINGS[name]), tokens().requires_grad_()
    idx, weights = router(x)
    assert (idx.dtype, weights.dtype, idx.shape, weights.shape) == (torch.int64, torch.float32, (T, K), (T, K))

    wide_x, wide_weight = (t.detach().double().requires_grad_() for t in (x, router.weight))
    logits = wide_x @ wide_weight.t()
    scores = (logits.sigmoid() if router.scores == "sigmoid" else logits.softmax(1)).detach()
    for t in range(T):
        biased = (scores[t] + router.balancing.bias.double()).tolist()
        assert idx[t].tolist() == plain_choice(biased, K, router.num_groups, router.top_groups)
    expected = plain_weights(router, wide_x, wide_weight, idx)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-6)

    target = torch.randn(T, K, generator=torch.Generator().manual_seed(2))
    grads = torch.autograd.grad((weights * target).sum(), [x, router.weight])
    exact = torch.autograd.grad((expected * target).sum(), [wide_x, wide_weight])
    for found, wide in zip(grads, exact, strict=True):
        torch.testing.assert_close(found.double(), wide, rtol=1e-4, atol=1e-6)


def test_the_bias_chooses_and_never_weighs() -> None:
    router, x = make_router(), tokens()
    router.balancing.bias.zero_()
    idx, weights = router(x)
    router.balancing.bias[5] = 7.0
    biased_idx, biased_weights = router(x)
    assert (biased_idx[:, 0] == 5).all()
    with_5 = (idx == 5).any(1)
    assert with_5.any()
    by_id = [w.gather(1, i.argsort(1)) for i, w in ((idx, weights), (biased_idx, biased_weights))]
    assert torch.equal(by_id[0][with_5], by_id[1][with_5])  # the same experts, so the same weights
    torch.testing.assert_close(biased_weights.sum(1), torch.ones(T))


@pytest.mark.parametrize("groups", [{}, {"num_groups": 6, "top_groups": 2}], ids=["", "groups"])
def test_ties_go_to_the_lowest_id(groups: dict[str, int]) -> None:
    """Scores of few different values; gradients go to the chosen, however many would do as well."""
    router = make_router(**groups)
    router.balancing.bias.zero_()
    x = torch.eye(H)
    with torch.no_grad():
        router.weight.copy_(torch.randint(0, 3, (E, H), generator=torch.Generator().manual_seed(3)))
        router.weight[:, 0] = 0
        router.weight[:, 1] = 40  # a sigmoid of 1 in float32
    x.requires_grad_()
    idx, weights = router(x)
    scores = (x @ router.weight.t()).sigmoid()
    for t in range(H):
        assert idx[t].tolist() == plain_choice(scores[t].tolist(), K, router.num_groups, router.top_groups)
    assert idx[0].tolist() == idx[1].tolist() == [0, 1, 2, 3]
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        assert torch.equal(router(x)[0], idx)
        torch.set_num_threads(before)
    target = torch.randn(H, K)
    found = torch.autograd.grad((weights * target).sum(), [x, router.weight])
    expected = torch.autograd.grad(
        (plain_weights(router, x, router.weight, idx) * target).sum(), [x, router.weight], allow_unused=True
    )
    for grad, same in zip(found, expected, strict=True):
        torch.testing.assert_close(grad, same)
    never = sorted(set(range(E)) - set(idx.flatten().tolist()))
    assert (found[1][never] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_inside(dtype: torch.dtype) -> None:
    router = make_router().to(dtype)
    assert router.balancing.bias.dtype == torch.float32
    x = tokens().to(dtype)
    expected = make_router()
    expected.weight.data.copy_(router.weight)
    idx, weights = router(x)
    assert all(torch.equal(*pair) for pair in zip((idx, weights), expected(x.float()), strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(*pair) for pair in zip((idx, weights), router(x), strict=True))
    weights.square().sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.dtype == dtype


def test_no_tokens() -> None:
    for settings in SETTINGS.values():
        router = make_router(**settings)
        x = torch.zeros(0, H, requires_grad=True)
        idx, weights = router(x)
        assert idx.shape == weights.shape == (0, K)
        weights.sum().backward()
        assert router.weight.grad is not None
        assert (router.weight.grad == 0).all()


def test_scores_of_zero() -> None:
    """Sigmoids that are 0 in float32: no 0 / 0."""
    router = make_router()
    with torch.no_grad():
        router.weight.fill_(-100)
    _, weights = router(torch.ones(3, H))
    assert (weights == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_token_harms_only_itself(bad: float) -> None:
    router, x = make_router(balancing=QuantileBalancing(E, K)), tokens()
    expected = router(x)
    x[7, 3] = bad
    idx, weights = router(x)
    others = torch.arange(T) != 7
    assert torch.equal(idx[others], expected[0][others])
    assert torch.equal(weights[others], expected[1][others])
    assert len(set(idx[7].tolist())) == K
    assert 0 <= idx[7].min() <= idx[7].max() < E


def test_noise_is_for_training_and_for_the_choice() -> None:
    router, x = make_router(noise=0.5), tokens()
    quiet_idx, _ = router.eval()(x)
    plain_idx, _ = make_router()(x)
    assert torch.equal(quiet_idx, plain_idx)
    idx, weights = router.train()(x)
    assert not torch.equal(idx, quiet_idx)
    torch.testing.assert_close(weights, plain_weights(router, x, router.weight, idx))
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        idx, weights = router(x)
        seen.append(idx)
        return weights.square().sum()

    checkpoint(block, x.requires_grad_(), use_reentrant=False).backward()
    first, again = seen
    assert torch.equal(first, again)


def test_all_experts() -> None:
    router = TopKRouter(H, 3, 3, balancing=QuantileBalancing(3, 3))
    idx, weights = router(tokens())
    assert (idx.sort(1).values == torch.arange(3)).all()
    router.balancing.step()
    assert (router.balancing.bias == 0).all()
    assert router.balancing.load.tolist() == [T] * 3
    torch.testing.assert_close(weights.sum(1), torch.ones(T))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scores": "relu"}, "scores: expected one of sigmoid, softmax, got 'relu'"),
        ({"num_groups": 5}, "num_groups: expected a divisor of num_experts = 24, got 5"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups: expected 1 to num_groups = 4, got 5"),
        ({"num_groups": 24, "top_groups": 3}, "top_groups: 3 groups of 1 experts hold fewer than top_k 4"),
        ({"balancing": Balancing(E, 3)}, "balancing: expected one for 24 experts and top_k 4, got one for 24 and 3"),
        ({"balancing": QuantileBalancing(E, K), "num_groups": 2}, "num_groups: QuantileBalancing is for 1, got 2"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TopKRouter(H, E, K, **settings)
    with pytest.raises(ValueError, match="top_k: expected 1 to num_experts = 3, got 4"):
        TopKRouter(H, 3, 4)


def test_as_a_module() -> None:
    router = make_router(balancing=QuantileBalancing(E, K))
    assert router.state_dict().keys() == {"weight", "balancing.bias"}
    copied, x = copy.deepcopy(router), tokens()
    router(x)
    router.balancing.step()
    assert not torch.equal(router.balancing.bias, copied.balancing.bias)
    copied.load_state_dict(router.state_dict())
    assert all(torch.equal(*pair) for pair in zip(router(x), copied(x), strict=True))
    assert "experts=24, top_k=4, scores='sigmoid'" in repr(router)

    torch.manual_seed(0)
    meta = TopKRouter(H, E, K, balancing=QuantileBalancing(E, K, device="meta"), device="meta")
    meta.to_empty(device="cpu").reset_parameters()
    router.balancing.reset_parameters()
    assert all(torch.equal(*pair) for pair in zip(meta(x), router(x), strict=True))


def test_as_the_router_of_a_layer() -> None:
    with moonep.Buffer(num_experts=E, top_k=K, hidden=H, max_tokens=T, dtype=torch.float32) as ep:
        layer = MoE(ep, TopKRouter(H, E, K, balancing=QuantileBalancing(E, K)), Experts(ep, 8))
        x = tokens().view(5, 10, H).requires_grad_()
        layer(x).square().sum().backward()
        layer.router.balancing.step()
        assert layer.router.balancing.load.sum() == T * K
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())
