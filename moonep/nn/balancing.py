"""Keeping experts evenly used: what a router learns from each step about the next.

A balancing module belongs to a router, which calls it in every forward with scores and choice. Whatever the kind:

    router = TopKRouter(hidden, num_experts, top_k, balancing=QuantileBalancing(num_experts, top_k))
    ...                                   # forward and backward, any number of micro-batches
    router.balancing.step(group)          # once per optimizer step, before the optimizer's; collective over `group`

`group` holds the ranks between which the tokens of a batch are divided, also those that share experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["AuxiliaryLoss", "Balancing", "QuantileBalancing", "SignBalancing", "exact_quantile_bias"]

_TOKENS_AT_ONCE = 512  # so that what is made for them stays in the caches

if TYPE_CHECKING:
    from typing_extensions import Self


class Balancing(nn.Module):
    """Counts the load of experts, and has a bias of zeros: the base of the others, of use alone as a gauge.

    In training mode every forward counts, under torch.no_grad() too; recomputation in a backward pass (activation
    checkpointing) does not, nor does a forward in evaluation. What is counted since the last `step` is no part of the
    state dict: save after a step. DistributedDataParallel may broadcast the bias, which ranks agree on anyway.

    Attributes:
        bias: [E] float32, a buffer; the router adds it to the scores that choose. It stays float32 when the module is
            moved to another dtype.
        load: [E] int64, the routes to every expert in the last step, of all ranks; zeros before the first.

    Args:
        num_experts: E.
        top_k: K, experts per token.
        device: of the bias; None: torch's default. After `to_empty`, call `reset_parameters`.

    Raises:
        ValueError: top_k outside of 1 to num_experts.
    """

    bias: torch.Tensor
    load: torch.Tensor

    supports_groups = True  # whether a router may choose among groups of experts first

    def __init__(self, num_experts: int, top_k: int, *, device: torch.device | str | None = None):
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k: expected 1 to num_experts = {num_experts}, got {top_k}")
        self.num_experts, self.top_k = num_experts, top_k
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32, device=device))
        self.load = torch.zeros(num_experts, dtype=torch.int64, device="cpu")
        # Of this rank since the last step. Not a buffer: DistributedDataParallel would make it equal on all ranks.
        self._counts: torch.Tensor | None = None

    def reset_parameters(self) -> None:
        """Forgets everything: bias and load become zero."""
        self.bias.zero_()
        self.load.zero_()
        self._counts = None

    def forward(self, scores: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Notes what a router did with its tokens.

        Args:
            scores: [T, E] float32, without bias.
            topk_idx: [T, K] int64, the experts chosen; -1 for no route.
            topk_weights: [T, K].

        Returns:
            The weights as they came; the auxiliary loss lets its gradient begin at them.
        """
        if self.training and not _is_recomputation():
            self._note(scores.detach(), topk_idx)
        return topk_weights

    @torch.no_grad()
    def step(self, group: dist.ProcessGroup | None = None) -> None:
        """Ends a step: the bias takes in what was counted since the last one. Collective: one all-reduce.

        Args:
            group: the ranks whose tokens make up the batch; None: this rank alone.
        """
        counts, self._counts = self._counts, None
        if counts is None:
            counts = self._new_counts(self.bias.device)
        if group is not None:
            dist.all_reduce(counts, group=group)
        self.load = counts[: self.num_experts].to("cpu", torch.int64)
        self._update(counts.to(self.bias.device))

    @property
    def maxvio(self) -> float:
        """Imbalance of the last step: max_e(load_e / mean) - 1; 0 without any route."""
        total = int(self.load.sum())
        return int(self.load.max()) * self.num_experts / total - 1 if total else 0.0

    # ---- what the kinds differ in ----

    def _num_counts(self) -> int:
        """How many integers a step adds up over ranks: the loads, then what a kind needs beside."""
        return self.num_experts

    def _count(self, counts: torch.Tensor, scores: torch.Tensor, topk_idx: torch.Tensor) -> None:
        """Adds one call's to the counts."""
        counts[: self.num_experts] += _loads(topk_idx, self.num_experts)

    def _update(self, counts: torch.Tensor) -> None:
        """Makes the next bias of the counts of all ranks. Must give the same bits on every rank."""

    # ---- the rest ----

    @torch.no_grad()
    def _note(self, scores: torch.Tensor, topk_idx: torch.Tensor) -> None:
        if self._counts is None:
            self._counts = self._new_counts(scores.device)
        self._count(self._counts, scores, topk_idx)

    def _new_counts(self, device: torch.device) -> torch.Tensor:
        with torch.inference_mode(False):  # else only inference could add to them
            return torch.zeros(self._num_counts(), dtype=torch.int32, device=device)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        before = self.bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.bias.dtype != torch.float32:  # model.bfloat16(): small steps of the bias would be lost
            self.bias = before.to(self.bias.device)
        return self

    def extra_repr(self) -> str:
        """What the module is, for print."""
        return f"experts={self.num_experts}, top_k={self.top_k}"


class QuantileBalancing(Balancing):
    """Quantile Balancing of Kimi K3: every bias is set at once to what would give its expert an even share.

    No loss, no rate to tune. Let alpha_i be the (K+1)-th largest of token i's scores with bias, s_i + b. Expert j would
    be chosen by token i if its bias were above r_ij = alpha_i - s_ij. So b_j becomes the (K/E)-quantile of r_.j over
    the tokens of the step, m of them in all ranks: then q = m K / E tokens choose it, if alpha stays. The mean of b is
    taken off, since it changes nothing. (Kimi K3's technical report, section 2.3.3 and Appendix D.)

    The quantile comes from a histogram of r_.j of `num_bins` equal bins from min(b) - 1 to max(b) + 1, which no r_ij
    leaves as scores are within 0 and 1; inside of a bin, tokens count as evenly spread. Integer counts are added over
    micro-batches and ranks, and all else is made of them, so ranks agree bit for bit and the result depends on no
    order. `exact_quantile_bias` is the same without bins. A step costs one all-reduce of E * (num_bins + 1) integers.

    Tokens with a score that is not finite are left out. Without tokens, or with K = E, the bias stays as it is. The
    bias of a step must not change before it ends.

    Args:
        num_bins: of the histogram.
        num_experts, top_k, device: as `Balancing`.

    Raises:
        ValueError: num_bins below 1.
    """

    supports_groups = False  # a bias that would suffice among all experts does not bring an expert's group in

    def __init__(self, num_experts: int, top_k: int, *, num_bins: int = 1000, device: torch.device | str | None = None):
        super().__init__(num_experts, top_k, device=device)
        if num_bins < 1:
            raise ValueError(f"num_bins: expected at least 1, got {num_bins}")
        self.num_bins = num_bins

    def _num_counts(self) -> int:
        return self.num_experts * (1 + self.num_bins)

    def _range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the histogram begins, and how wide a bin is: two float64 scalars."""
        low, high = self.bias.double().aminmax()
        return low - 1, (high - low + 2) / self.num_bins

    def _count(self, counts: torch.Tensor, scores: torch.Tensor, topk_idx: torch.Tensor) -> None:
        super()._count(counts, scores, topk_idx)
        if self.top_k == self.num_experts:
            return
        histogram, bias, (low, width) = counts[self.num_experts :], self.bias.to(scores.device), self._range()
        per_width = 1 / float(width)
        first_bins = torch.arange(self.num_experts, device=scores.device) * self.num_bins
        for some in torch.split(scores, _TOKENS_AT_ONCE):
            some = some[some.sum(1).isfinite()]
            alpha = _alpha(some, bias, self.top_k)
            # (alpha - s - low) / width, in one pass over what is large
            places = torch.sub((alpha - low) / width, some, alpha=per_width)
            bins = places.long().clamp_(0, self.num_bins - 1).add_(first_bins)
            histogram.scatter_add_(0, bins.flatten(), histogram.new_ones(()).expand(bins.numel()))

    def _update(self, counts: torch.Tensor) -> None:
        histogram = counts[self.num_experts :].view(self.num_experts, self.num_bins)
        cumulated = histogram.cumsum(1, dtype=torch.int64)
        num_tokens = int(cumulated[0, -1])
        if num_tokens == 0:
            return
        routes = num_tokens * self.top_k
        share, least = routes / self.num_experts, -(-routes // self.num_experts)
        place = (cumulated < least).sum(1, keepdim=True)  # the first bin where at least ceil(share) tokens are
        inside = histogram.gather(1, place).double()
        before = cumulated.gather(1, place).double() - inside
        low, width = self._range()
        bias = low + (place + ((share - before) / inside).clamp(0, 1)).squeeze(1) * width
        self.bias.copy_(bias - bias.mean())


class SignBalancing(Balancing):
    """The bias goes up by `rate` for an expert with less than the mean load, down for one with more.

    b_j += rate * sign(mean load - load_j): DeepSeek-V3's balancing without an auxiliary loss (its technical report,
    section 2.1.2). It follows slowly what a skewed router needs: by 1e-3 a step, where scores are within 0 and 1.

    Args:
        rate: of change per step.
        num_experts, top_k, device: as `Balancing`.
    """

    def __init__(self, num_experts: int, top_k: int, *, rate: float = 1e-3, device: torch.device | str | None = None):
        super().__init__(num_experts, top_k, device=device)
        self.rate = rate

    def _update(self, counts: torch.Tensor) -> None:
        load = counts.to(torch.int64)  # compared without division: load_j * E with the sum
        self.bias += self.rate * torch.sign(load.sum() - load * self.num_experts)


class AuxiliaryLoss(Balancing):
    """A loss that is least when experts are evenly used; the bias stays zero, the router's weights learn.

    For a call with T tokens: loss = coefficient * sum_j f_j * P_j, with f_j = load_j * E / (K T), which has no
    gradient, and P_j the mean over tokens of the scores, divided by their sum for each token (as they are if they come
    from a softmax). Evenly used experts make it `coefficient`. (Switch Transformer, arXiv 2101.03961, equations 4 to 6,
    for K experts per token.)

    Its gradient joins at the weights that the router gives: it needs not be added to the loss, and comes through
    activation checkpointing. So what multiplies a loss (a GradScaler, 1 / number of micro-batches, and that gradients
    are sums over ranks) must be in the coefficient, which may be set at any time.

    Attributes:
        coefficient: as given.
        loss: of the last call in training mode, a scalar without gradient.

    Args:
        coefficient: of the loss.
        num_experts, top_k, device: as `Balancing`.
    """

    def __init__(
        self, num_experts: int, top_k: int, *, coefficient: float = 1e-2, device: torch.device | str | None = None
    ):
        super().__init__(num_experts, top_k, device=device)
        self.coefficient = coefficient
        self.loss = torch.zeros((), device="cpu")

    def forward(self, scores: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """As `Balancing.forward`; the gradient of the weights that it gives brings the loss's along."""
        topk_weights = super().forward(scores, topk_idx, topk_weights)
        if not self.training or scores.shape[0] == 0:
            return topk_weights
        shares = _loads(topk_idx, self.num_experts) * (self.num_experts / (self.top_k * scores.shape[0]))
        preferences = (scores / scores.sum(1, keepdim=True)).mean(0)
        loss = self.coefficient * (shares * preferences).sum()
        self.loss = loss.detach()
        carried: torch.Tensor = _CarryLoss.apply(topk_weights, loss)  # type: ignore[no-untyped-call]
        return carried


class _CarryLoss(torch.autograd.Function):
    """The weights, behind which a loss hangs as if it were added to the whole loss."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (one,) = ctx.saved_tensors
        return grad, one


@torch.no_grad()
def exact_quantile_bias(
    scores: torch.Tensor, top_k: int, bias: torch.Tensor | None = None, *, num_rounds: int = 1
) -> torch.Tensor:
    """What `QuantileBalancing` approaches, from all scores of a step at once.

    In turn, with m tokens: alpha_i = the (K+1)-th largest over experts of s_i - beta, and beta_j = the (m K / E + 1)-th
    largest over tokens of s_.j - alpha; b = -beta. One round is a step of `QuantileBalancing`; many find a bias that
    uses the experts evenly, but for a few tokens, on these very scores. (Kimi K3's technical report, Appendix C.)

    Args:
        scores: [m, E] of all tokens, all finite.
        top_k: K, below E.
        bias: [E], where to begin; None: zeros.
        num_rounds: how often both are made.

    Returns:
        [E] in the scores' dtype, of mean 0; the bias as given if there are no tokens.
    """
    num_tokens, num_experts = scores.shape
    if not 1 <= top_k < num_experts:
        raise ValueError(f"top_k: expected 1 to num_experts - 1 = {num_experts - 1}, got {top_k}")
    bias = scores.new_zeros(num_experts) if bias is None else bias.to(scores)
    if num_tokens:
        for _ in range(num_rounds):
            required = _alpha(scores, bias, top_k) - scores
            bias = required.kthvalue(num_tokens * top_k // num_experts + 1, 0).values
            bias = (bias.double() - bias.double().mean()).to(scores.dtype)
    return bias


def _alpha(scores: torch.Tensor, bias: torch.Tensor, top_k: int) -> torch.Tensor:
    """[T, 1]: what an expert must get above to be among a token's K, the others staying as they are."""
    return (scores + bias).topk(top_k + 1, sorted=True).values[:, -1:]


def _loads(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[E] int64: routes to every expert."""
    return torch.bincount(topk_idx.flatten() + 1, minlength=num_experts + 1)[1:]


def _is_recomputation() -> bool:
    """Whether a backward pass runs: what computes forward in it has been here before."""
    return torch._C._current_graph_task_id() != -1
