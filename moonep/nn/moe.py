"""The whole layer: a router, this rank's experts, and the roads between them."""

from __future__ import annotations

import torch
from torch import nn

from moonep.buffer import Buffer

__all__ = ["MoE"]


class MoE(nn.Module):
    """Every token through its experts, wherever they are: plan, dispatch, experts, combine. Collective.

    All ranks call it, and call backward on its result if any rank does, also with no tokens.

    It can stand in a `torch.utils.checkpoint`, reentrant or not, if it does on every rank: recomputation calls the
    verbs again. Early stopping is no danger to it: the last verb saves tensors, so none is left out on some ranks.

    Args:
        ep: carries the tokens; a copy of the module shares it. One Buffer serves any number of layers.
        router: called with x [T, H] in x's dtype, gives (topk_idx [T, K], topk_weights [T, K]).
        experts: called with rows [N, H] and their plan, gives [N, H]: an `Experts` of the same Buffer.
    """

    def __init__(self, ep: Buffer, router: nn.Module, experts: nn.Module):
        super().__init__()
        self.ep, self.router, self.experts = ep, router, experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [..., H], say [T, H] or [B, S, H], of any floating dtype; the result has their shape and dtype.

        They travel in the Buffer's dtype, under autocast too.
        """
        x_TH = x.reshape(-1, x.shape[-1])
        topk_idx, topk_weights = self.router(x_TH)
        plan = self.ep.plan(topk_idx, topk_weights)
        recv = self.ep.dispatch(x_TH.to(self.ep.config.dtype), plan, topk_weights)
        y_TH = self.ep.combine(self.experts(recv.x, plan), plan, recv.weights)
        return y_TH.view(x.shape).to(x.dtype)
