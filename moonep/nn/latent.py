"""The Mixture-of-Experts layer of Kimi K3: experts work, and rows travel, at a narrower width than the model's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from moonep.buffer import Buffer
from moonep.nn.activations import ACTIVATIONS
from moonep.nn.balancing import QuantileBalancing
from moonep.nn.experts import Experts
from moonep.nn.router import TopKRouter

__all__ = ["LatentMoE", "LatentMoEConfig"]


@dataclass(frozen=True)
class LatentMoEConfig:
    """The sizes of a `LatentMoE`. The defaults of the last two are Kimi K3's."""

    hidden: int  # H, of the model
    latent: int  # of the rows that travel: the Buffer's `hidden`
    expert_width: int  # of a routed expert's hidden layer
    shared_width: int  # of the shared experts' hidden layers, all together
    num_experts: int  # E, routed
    top_k: int  # K
    norm_eps: float = 1e-5
    activation: str = "situ_glu"  # of `Experts`; the shared experts have the same

    @classmethod
    def kimi_k3(cls) -> LatentMoEConfig:
        """The published sizes: 896 experts of 33.03 million weights, 16 for each token, and 2 that are shared."""
        return cls(hidden=7168, latent=3584, expert_width=3072, shared_width=2 * 3072, num_experts=896, top_k=16)

    @classmethod
    def kimi_k3_tiny(cls) -> LatentMoEConfig:
        """As many experts for as many tokens, of 2,304 weights each: for a laptop."""
        return cls(hidden=64, latent=32, expert_width=24, shared_width=2 * 24, num_experts=896, top_k=16)


class LatentMoE(nn.Module):
    """Routed experts at the latent width, shared experts at the full one. Collective, as `MoE`.

        u = sum over the chosen experts i of p_i * E_i(W_down x)
        y = shared(x) + W_up RMSNorm(u)

    The router reads x at full width; the norm stands after the sum, before W_up. (Kimi K3's technical report, Eq. 11;
    scores and choice are Eq. 13, the activation Eq. 12, the bias section 2.3.3.) The shared experts are computed while
    the rows are on their way.

        config = LatentMoEConfig.kimi_k3_tiny()
        ep = moonep.Buffer(num_experts=config.num_experts, top_k=config.top_k, hidden=config.latent, max_tokens=4096)
        layer = LatentMoE(ep, config)
        ...
        layer.router.balancing.step(group)  # before each optimizer step, see `QuantileBalancing`

    All weights but those of `experts` are dense: equal on ranks that draw from equal seeds, their gradients want
    summing over ranks. If FSDP gathers weights within this layer, it must not do so over the Buffer's own group.

    Under autocast, products and activations are computed in autocast's dtype, otherwise in that of the parameters;
    routed experts, without autocast, in the Buffer's. The router and the norm are computed in float32.

    Args:
        ep: carries the rows, at the latent width; a copy of the module shares it. Any number of layers a Buffer.
        config: the sizes.
        dtype: of the parameters; None: the Buffer's. The router's are float32, whatever this says.
        device: of the parameters; None: torch's default. On "meta" they are not drawn: call `reset_parameters` later.

    Raises:
        ValueError: a Buffer for other sizes, or sizes that cannot be.
    """

    def __init__(
        self,
        ep: Buffer,
        config: LatentMoEConfig,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        for name, wanted, found in (
            ("hidden", config.latent, ep.config.hidden),
            ("num_experts", config.num_experts, ep.config.num_experts),
            ("top_k", config.top_k, ep.config.top_k),
        ):
            if wanted != found:
                latent = ", the latent width" if name == "hidden" else ""
                raise ValueError(f"ep: expected a Buffer with {name}={wanted}{latent}, got one with {found}")
        for name in ("hidden", "shared_width"):
            if getattr(config, name) < 1:
                raise ValueError(f"config: {name}: expected at least 1, got {getattr(config, name)}")
        dtype = dtype or ep.config.dtype

        def linear(wide_in: int, wide_out: int) -> nn.Linear:
            return nn.Linear(wide_in, wide_out, bias=False, dtype=dtype, device=device)

        self.ep, self.config = ep, config
        self.router = TopKRouter(
            config.hidden,
            config.num_experts,
            config.top_k,
            balancing=QuantileBalancing(config.num_experts, config.top_k, device=device),
            dtype=torch.float32,
            device=device,
        )
        self.w_down = linear(config.hidden, config.latent)
        self.experts = Experts(ep, config.expert_width, activation=config.activation, dtype=dtype, device=device)
        self.norm = nn.RMSNorm(config.latent, config.norm_eps, dtype=dtype, device=device)
        self.w_up = linear(config.latent, config.hidden)
        self.shared_gate_up = linear(config.hidden, 2 * config.shared_width)
        self.shared_down = linear(config.shared_width, config.hidden)

    def reset_parameters(self) -> None:
        """Draws all weights anew, the same for any number of ranks; the balancing bias becomes zero."""
        self.router.reset_parameters()
        self.experts.reset_parameters()
        self.norm.reset_parameters()
        for linear in (self.w_down, self.w_up, self.shared_gate_up, self.shared_down):
            linear.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [..., H], say [T, H] or [B, S, H], of any floating dtype; the result has their shape and dtype."""
        x_TH = x.reshape(-1, x.shape[-1])
        topk_idx, topk_weights = self.router(x_TH)
        plan = self.ep.plan(topk_idx, topk_weights)
        given = x_TH.to(self.w_down.weight.dtype)
        rows = self.w_down(given).to(self.ep.config.dtype)
        on_the_way = self.ep.dispatch(rows, plan, topk_weights, async_op=True)
        shared_TH = self.shared_down(ACTIVATIONS[self.config.activation](self.shared_gate_up(given)))
        recv = on_the_way.wait()
        u = self.ep.combine(self.experts(recv.x, plan), plan, recv.weights)
        with torch.autocast(u.device.type, enabled=False):
            weight = self.norm.weight
            normal = nn.functional.rms_norm(u.float(), self.norm.normalized_shape, weight.float(), self.norm.eps)
        y_TH = shared_TH + self.w_up(normal.to(weight.dtype))
        y: torch.Tensor = y_TH.view(x.shape).to(x.dtype)
        return y

    def extra_repr(self) -> str:
        """What the module is, for print."""
        return str(self.config)
