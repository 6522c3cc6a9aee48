"""What balances the experts' load: by hand, against the exact form, on skewed routers, and between ranks."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from moonep.nn import AuxiliaryLoss, Balancing, QuantileBalancing, SignBalancing, TopKRouter
from moonep.nn.balancing import exact_quantile_bias

H, E, K = 8, 32, 4
KINDS = [Balancing, QuantileBalancing, SignBalancing, AuxiliaryLoss]
each_kind = pytest.mark.parametrize("kind", KINDS)


def skewed_scores(num_tokens: int, seed: int, num_experts: int = E) -> torch.Tensor:
    """[m, E] of a router that likes some experts much more than others."""
    generator = torch.Generator().manual_seed(seed)
    liking = torch.linspace(-2, 2, num_experts)
    return (torch.randn(num_tokens, num_experts, generator=generator) + liking).sigmoid()


def choose(scores: torch.Tensor, bias: torch.Tensor, top_k: int = K) -> torch.Tensor:
    return (scores + bias).topk(top_k).indices


def note(balancing: Balancing, scores: torch.Tensor) -> None:
    idx = choose(scores, balancing.bias, balancing.top_k)
    balancing(scores, idx, scores.gather(1, idx))


def variation(load: torch.Tensor) -> float:
    """Standard deviation over mean."""
    return float(load.double().std(correction=0) / load.double().mean())


# ---- Quantile Balancing ----


def test_by_hand() -> None:
    """Two tokens, two experts, top-1: the shares are one token each."""
    balancing = QuantileBalancing(2, 1, num_bins=4)
    # Second largest: 0.25 and 0.375, so what would have been needed is 0.25 - 0.75 = -0.5 and 0.375 - 0.5 = -0.125 for
    # expert 0, and 0 for expert 1. Bins begin at -1, -0.5, 0, 0.5.
    note(balancing, torch.tensor([[0.75, 0.25], [0.5, 0.375]]))
    balancing.step()
    # Expert 0: both in bin 1, 1 of 2 is half of it: -0.25. Expert 1: both in bin 2, half of it: 0.25.
    assert balancing.bias.tolist() == [-0.25, 0.25]
    assert balancing.load.tolist() == [2, 0]
    assert balancing.maxvio == 1
    # Now the range is -1.25 to 1.25, a bin 0.625. With bias: 0.5, 0.5 and 0.25, 0.625: alpha 0.5 and 0.25.
    note(balancing, torch.tensor([[0.75, 0.25], [0.5, 0.375]]))
    balancing.step()
    # Expert 0 needs -0.25, -0.25 (bin 1 from -0.625), expert 1 needs 0.25, -0.125 (bins 2 from 0, and 1).
    # Expert 0: -0.625 + 0.625 / 2; expert 1: the end of bin 1, 0. Mean -0.15625.
    assert balancing.bias.tolist() == [-0.15625, 0.15625]


@pytest.mark.parametrize("num_bins", [1, 10, 1000])
@pytest.mark.parametrize("num_tokens", [1, 7, 100, 2001])
def test_histogram_agrees_with_the_exact_form_within_a_bin(num_tokens: int, num_bins: int) -> None:
    balancing = QuantileBalancing(E, K, num_bins=num_bins)
    for seed in range(3):  # from a bias of zeros, then from others
        scores, bias = skewed_scores(num_tokens, seed), balancing.bias.clone()
        width = float(bias.max() - bias.min() + 2) / num_bins
        note(balancing, scores)
        balancing.step()
        required = (scores + bias).sort(1, descending=True).values[:, K, None] - scores
        nth = required.sort(0).values[math.ceil(num_tokens * K / E) - 1]
        off = balancing.bias.double() - nth.double()  # and a number that all share: the mean that was taken off
        assert off.max() - off.min() <= 2 * width + 1e-5  # each within one, above or below
        if num_tokens > 1000:
            exact = exact_quantile_bias(scores, K, bias)
            assert (balancing.bias - exact).abs().max() <= width + 0.01  # neighbours among so many tokens are near
        assert abs(float(balancing.bias.mean())) < 1e-7


def test_exact_form_makes_its_own_tokens_even() -> None:
    scores = skewed_scores(1000, 0)
    once = exact_quantile_bias(scores, K)
    assert torch.equal(exact_quantile_bias(scores, K, once), exact_quantile_bias(scores, K, num_rounds=2))
    load = [torch.bincount(choose(scores, bias).flatten(), minlength=E) for bias in (torch.zeros(E), once)]
    bias = exact_quantile_bias(scores.double(), K, num_rounds=200)
    load.append(torch.bincount(choose(scores.double(), bias).flatten(), minlength=E))
    assert variation(load[0]) > 0.8
    assert variation(load[1]) < variation(load[0]) / 2
    assert variation(load[2]) < 0.02  # a few of 125 tokens
    assert torch.equal(exact_quantile_bias(scores[:0], K, once), once)
    with pytest.raises(ValueError, match="top_k: expected 1 to num_experts - 1 = 31, got 32"):
        exact_quantile_bias(scores, E)


@pytest.mark.parametrize(("num_experts", "top_k"), [(32, 4), (896, 16)])
def test_a_skewed_router_becomes_even(num_experts: int, top_k: int) -> None:
    """On tokens that it has not seen, as even as chance lets it be.

    An expert's share q of m tokens varies by sqrt(q) at least in the tokens that the bias comes from, and again in
    those that it is used on: a coefficient of variation of about sqrt(2 / q).
    """
    balancing, num_tokens = QuantileBalancing(num_experts, top_k), 2048
    found = []
    for seed in range(5):
        note(balancing, skewed_scores(num_tokens, seed, num_experts))
        balancing.step()
        found.append(variation(balancing.load))
    chance = math.sqrt(2 * num_experts / (num_tokens * top_k))
    assert found[0] > 0.8
    assert found[-1] < 1.2 * chance
    assert balancing.load.sum() == num_tokens * top_k


def test_micro_batches_and_their_order_change_no_bit() -> None:
    scores = skewed_scores(500, 0)
    expected = QuantileBalancing(E, K)
    note(expected, scores)
    expected.step()
    for sizes in ([500], [100, 400], [0, 1, 499]):
        for order in (1, -1):
            balancing = QuantileBalancing(E, K)
            for part in scores.split(sizes)[::order]:
                note(balancing, part)
            balancing.step()
            assert torch.equal(balancing.bias, expected.bias)
            assert torch.equal(balancing.load, expected.load)


def test_without_tokens_the_bias_stays() -> None:
    balancing = QuantileBalancing(E, K)
    note(balancing, skewed_scores(100, 0))
    balancing.step()
    bias = balancing.bias.clone()
    balancing.step()
    note(balancing, skewed_scores(0, 0))
    balancing.step()
    assert torch.equal(balancing.bias, bias)
    assert balancing.load.sum() == 0
    assert balancing.maxvio == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_left_out(bad: float) -> None:
    scores = skewed_scores(100, 0)
    expected, found = QuantileBalancing(E, K), QuantileBalancing(E, K)
    note(expected, scores)
    note(found, torch.cat([scores, torch.full((1, E), bad)]))
    expected.step()
    found.step()
    assert torch.equal(found.bias, expected.bias)
    note(found, torch.full((1, E), bad))
    found.step()
    assert torch.equal(found.bias, expected.bias)


# ---- the other kinds ----


def test_sign_balancing() -> None:
    balancing = SignBalancing(4, 1, rate=0.5)
    idx = torch.tensor([[0], [0], [1], [2]])
    balancing(torch.zeros(4, 4), idx, torch.ones(4, 1))
    balancing.step()
    assert balancing.load.tolist() == [2, 1, 1, 0]
    assert balancing.bias.tolist() == [-0.5, 0, 0, 0.5]
    balancing.step()  # no load differs from the mean
    assert balancing.bias.tolist() == [-0.5, 0, 0, 0.5]


def test_sign_balancing_evens_slowly() -> None:
    balancing, found = SignBalancing(E, K, rate=0.02), []
    for seed in range(40):
        note(balancing, skewed_scores(1024, seed))
        balancing.step()
        found.append(variation(balancing.load))
    assert found[0] > 0.8
    assert found[-1] < found[0] / 3


@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "not reentrant"])
def test_auxiliary_loss_is_as_if_added(scores: str, checkpointing: str) -> None:
    torch.manual_seed(0)
    router = TopKRouter(H, E, K, scores=scores, balancing=AuxiliaryLoss(E, K, coefficient=0.3))
    x, target = torch.randn(50, H, requires_grad=True), torch.randn(50, K)

    def block(x: torch.Tensor) -> torch.Tensor:
        return router(x)[1].tanh()

    if checkpointing == "none":
        y = block(x)
    else:
        y = checkpoint(block, x, use_reentrant=checkpointing == "reentrant")
    (y * target).sum().backward()

    logits = x.double() @ router.weight.double().t()
    s = logits.sigmoid() if scores == "sigmoid" else logits.softmax(1)
    idx, _ = router(x)
    load = torch.bincount(idx.flatten(), minlength=E)
    chosen = s.gather(1, idx)
    weights = chosen / chosen.sum(1, keepdim=True)
    loss = 0.3 * (load * E / (K * 50) * (s / s.sum(1, keepdim=True)).mean(0)).sum()
    torch.testing.assert_close(router.balancing.loss.double(), loss, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad((weights.tanh() * target).sum() + loss, [x, router.weight])
    for found, exact in zip((x.grad, router.weight.grad), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)

    grad = router.weight.grad
    router.zero_grad()
    (router.eval()(x)[1].tanh() * target).sum().backward()
    assert not torch.allclose(router.weight.grad, grad, rtol=1e-3)  # no loss in evaluation
    router.train()(x[:0])[1].sum().backward()


def test_auxiliary_loss_is_least_when_even() -> None:
    balancing, even = AuxiliaryLoss(4, 1, coefficient=1.0), torch.full((4, 4), 0.25)
    balancing(even, torch.arange(4)[:, None], torch.ones(4, 1))
    assert balancing.loss == 1
    one = torch.tensor([[1.0, 0, 0, 0]]).repeat(4, 1)
    balancing(one, torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))
    assert balancing.loss == 4


# ---- what all kinds share ----


@each_kind
@pytest.mark.parametrize(
    ("reentrant", "early_stop"), [(True, False), (False, False), (False, True)], ids=["reentrant", "not", "early stop"]
)
def test_recomputation_does_not_count_twice(kind: type[Balancing], reentrant: bool, early_stop: bool) -> None:
    torch.manual_seed(0)
    router = TopKRouter(H, E, K, balancing=kind(E, K))
    x = torch.randn(20, H, requires_grad=True)
    for _ in range(2):  # micro-batches
        with set_checkpoint_early_stop(early_stop):
            y = checkpoint(lambda x: router(x)[1].tanh(), x, use_reentrant=reentrant)
        y.sum().backward()
    router.balancing.step()
    assert router.balancing.load.sum() == 2 * 20 * K
    if kind is QuantileBalancing:
        expected = QuantileBalancing(E, K)
        for _ in range(2):
            note(expected, (x @ router.weight.t()).sigmoid().detach())
        expected.step()
        torch.testing.assert_close(router.balancing.bias, expected.bias, rtol=0, atol=2e-3)


@each_kind
def test_frozen_in_evaluation(kind: type[Balancing]) -> None:
    torch.manual_seed(0)
    router = TopKRouter(H, E, K, balancing=kind(E, K))
    x = torch.randn(20, H)
    router(x)
    router.balancing.step()
    bias = router.balancing.bias.clone()
    router.eval()
    router(x)
    router.balancing.step()
    assert torch.equal(router.balancing.bias, bias)
    assert router.balancing.load.sum() == 0
    router.train()
    with torch.inference_mode():
        router(x)
    with torch.no_grad():
        router(x)
    router.balancing.step()
    assert router.balancing.load.sum() == 2 * 20 * K


@each_kind
def test_states_and_dtypes(kind: type[Balancing]) -> None:
    balancing = kind(E, K)
    note(balancing, skewed_scores(100, 0))
    copied = copy.deepcopy(balancing)
    balancing.step()
    copied.step()
    assert torch.equal(copied.bias, balancing.bias)
    assert balancing.state_dict().keys() == {"bias"}
    other = kind(E, K)
    other.load_state_dict(balancing.state_dict())
    for each in (balancing, other):
        note(each, skewed_scores(100, 1))
        each.step()
    assert torch.equal(other.bias, balancing.bias)
    bias = balancing.bias.clone()
    assert torch.equal(balancing.to(torch.bfloat16).bias, bias)
    assert torch.equal(balancing.half().double().bias, bias)
    assert balancing.to("meta").bias.is_meta
    balancing.to_empty(device="cpu").reset_parameters()
    assert (balancing.bias == 0).all()
    assert repr(balancing) == f"{kind.__name__}(experts=32, top_k=4)"


def test_wrong_settings() -> None:
    with pytest.raises(ValueError, match="num_bins: expected at least 1, got 0"):
        QuantileBalancing(E, K, num_bins=0)
    for top_k in (0, E + 1):
        with pytest.raises(ValueError, match=f"top_k: expected 1 to num_experts = 32, got {top_k}"):
            QuantileBalancing(E, top_k)


# ---- between ranks ----


def parallel_steps(rank: int, sizes: list[int], kind: type[Balancing]) -> list[torch.Tensor]:
    """The biases and loads after each of three steps of two micro-batches, on this rank's part of the tokens."""
    group = dist.group.WORLD if len(sizes) > 1 else None
    balancing, found = kind(E, K), []
    for step in range(3):
        for micro in range(2):
            scores = skewed_scores(sum(sizes), 2 * step + micro).split(sizes)[rank]
            if len(scores):  # a rank without tokens may have had no forward at all
                note(balancing, scores)
        balancing.step(group)
        found += [balancing.bias.clone(), balancing.load.clone()]
    return found


@pytest.mark.parametrize("kind", [QuantileBalancing, SignBalancing])
def test_ranks_agree_bit_for_bit(pool4: Any, kind: type[Balancing]) -> None:
    """With one another, and with one process that has all tokens."""
    expected = parallel_steps(0, [400], kind)
    for of_rank in pool4.run(parallel_steps, [100, 0, 31, 269], kind):
        assert all(torch.equal(*pair) for pair in zip(of_rank, expected, strict=True))


def data_parallel(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    router = TopKRouter(H, E, K, balancing=QuantileBalancing(E, K))
    model = torch.nn.parallel.DistributedDataParallel(router)
    for micro in range(2):
        x = torch.randn(30, H, generator=torch.Generator().manual_seed(10 * rank + micro))
        model(x)[1].sum().backward()
    router.balancing.step(dist.group.WORLD)
    return [router.balancing.bias, router.balancing.load]


def test_in_distributed_data_parallel(pool2: Any) -> None:
    """Which makes buffers equal to rank 0's before every forward: counts must not be among them."""
    (bias, load), (other_bias, _) = pool2.run(data_parallel)
    assert torch.equal(bias, other_bias)
    assert load.sum() == 2 * 2 * 30 * K
