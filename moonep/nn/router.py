"""Which experts a token goes to, and with what weights."""

from __future__ import annotations

import math

import torch
from torch import nn

from moonep.nn.balancing import Balancing

__all__ = ["TopKRouter"]

_SCORES = ("sigmoid", "softmax")


class TopKRouter(nn.Module):
    """Scores every expert for a token and chooses the best K.

        s = sigmoid(W x), or softmax            the scores, float32, of every token by itself
        chosen = top K of s + b                 b: the bias of `balancing`, which chooses and never weighs
        p_j = scale * s_j / sum of the chosen s (without `renormalize`: scale * s_j)

    Kimi K3 routes so (its technical report, Eq. 13: sigmoid, renormalised), DeepSeek-V3 with groups besides: experts
    stand in `num_groups` groups of neighbours, a group counts the sum of its two best s + b, and only experts of the
    best `top_groups` groups can be chosen (its technical report, section 2.1.2).

    Where scores tie, the lowest id is chosen, and comes first. The gradient is that of the formulas for the experts
    chosen: through the weights, none through the choice. A token with NaN gets any K distinct experts.

    All is computed in float32, whatever dtypes tokens and parameters have, and under autocast. Ranks that draw from
    equal seeds have equal parameters; their gradients want summing over ranks, as of every dense weight.

    Parameters:

        weight [E, H]

    Args:
        hidden: H, of the tokens.
        num_experts: E.
        top_k: K.
        scores: "sigmoid" or "softmax".
        balancing: made for the same E and K. The default has no influence.
        renormalize: whether a token's weights sum to `scale`.
        scale: of all weights.
        num_groups: of experts; must divide E.
        top_groups: groups that experts are chosen from; must hold K experts.
        noise: standard deviation of normal noise on what chooses, in training mode only: s + b + noise * n, from
            torch's generator, which activation checkpointing restores.
        dtype: of the parameters; None: torch's default.
        device: of the parameters; None: torch's default. On "meta" they are not drawn: call `reset_parameters` later.

    Raises:
        ValueError: settings that do not fit together.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        scores: str = "sigmoid",
        balancing: Balancing | None = None,
        renormalize: bool = True,
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        noise: float = 0.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.balancing = balancing if balancing is not None else Balancing(num_experts, top_k, device=device)
        if (self.balancing.num_experts, self.balancing.top_k) != (num_experts, top_k):
            raise ValueError(
                f"balancing: expected one for {num_experts} experts and top_k {top_k}, got one for "
                f"{self.balancing.num_experts} and {self.balancing.top_k}"
            )
        if scores not in _SCORES:
            raise ValueError(f"scores: expected one of {', '.join(_SCORES)}, got {scores!r}")
        if not 1 <= top_groups <= num_groups:
            raise ValueError(f"top_groups: expected 1 to num_groups = {num_groups}, got {top_groups}")
        if num_experts % num_groups:
            raise ValueError(f"num_groups: expected a divisor of num_experts = {num_experts}, got {num_groups}")
        if num_experts // num_groups * top_groups < top_k:
            raise ValueError(
                f"top_groups: {top_groups} groups of {num_experts // num_groups} experts hold fewer than top_k {top_k}"
            )
        if num_groups > 1 and not self.balancing.supports_groups:
            raise ValueError(f"num_groups: {type(self.balancing).__name__} is for 1, got {num_groups}")
        self.hidden, self.num_experts, self.top_k = hidden, num_experts, top_k
        self.scores, self.renormalize, self.scale, self.noise = scores, renormalize, scale, noise
        self.num_groups, self.top_groups = num_groups, top_groups
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, dtype=dtype, device=device))
        if not self.weight.is_meta:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weight anew, as nn.Linear does; the bias of `balancing` becomes zero."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.balancing.reset_parameters()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes tokens.

        Args:
            x: [T, H], of any floating dtype; T may be 0.

        Returns:
            topk_idx [T, K] int64, best first by s + b, and topk_weights [T, K] float32.
        """
        with torch.autocast(x.device.type, enabled=False):
            logits = nn.functional.linear(x.float(), self.weight.float())
            scores = logits.sigmoid() if self.scores == "sigmoid" else logits.softmax(-1)
            topk_idx = self._choose(scores.detach())
            weights = scores.gather(1, topk_idx)
            if self.renormalize:
                # Scores may all be 0 in float32; then so are the weights.
                weights = weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            if self.scale != 1:
                weights = weights * self.scale
            return topk_idx, self.balancing(scores, topk_idx, weights)

    @torch.no_grad()
    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        biased = scores + self.balancing.bias
        if self.training and self.noise:
            biased = biased + self.noise * torch.randn_like(biased)
        if self.num_groups > 1:
            by_group = biased.view(-1, self.num_groups, self.num_experts // self.num_groups)
            worth = by_group.topk(min(2, by_group.shape[2])).values.sum(2)
            left_out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, _largest(worth, self.top_groups), False)
            biased = by_group.masked_fill(left_out[:, :, None], -math.inf).flatten(1)
        return _largest(biased, self.top_k)

    def extra_repr(self) -> str:
        """What the module is, for print."""
        groups = f", top_groups={self.top_groups} of {self.num_groups}" if self.num_groups > 1 else ""
        return f"hidden={self.hidden}, experts={self.num_experts}, top_k={self.top_k}, scores={self.scores!r}{groups}"


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """[T, count]: the places of the largest values of each row, largest first, of equal ones the first place first."""
    if values.device.type != "cpu":
        return values.sort(dim=1, descending=True, stable=True).indices[:, :count]
    # Which of equal values topk takes is its own affair; sorting all, which knows, takes many times longer.
    top = values.topk(min(count + 1, values.shape[1]), sorted=True)
    places = top.indices[:, :count].clone()
    unsure = ~(top.values[:, :-1] > top.values[:, 1:]).all(1)  # also where there is NaN
    if unsure.any():
        places[unsure] = values[unsure].sort(dim=1, descending=True, stable=True).indices[:, :count]
    return places
