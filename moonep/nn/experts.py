"""The experts at home on this rank, as a module."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import nn

from moonep.buffer import Buffer
from moonep.nn.activations import ACTIVATIONS
from moonep.nn.grouped import grouped_linear
from moonep.plan import Plan

__all__ = ["Experts"]


# nn.Linear's: uniform within 1 / sqrt(in) of 0.
_like_linear = functools.partial(nn.init.kaiming_uniform_, a=math.sqrt(5))


class Experts(nn.Module):
    """This rank's home experts of one MoE layer: expert e of a row x gives act(x @ w_gate_up[e]) @ w_down[e].

    Parameters, of the L experts at home, `ep.first_local_expert` first (L may be 0):

        w_gate_up [L, H, 2F]   the gate in columns 0 .. F, the values it gates ("up") in F .. 2F
        w_down    [L, F, H]
        b_gate_up [L, 2F], b_down [L, H]   with `bias`, else None

    The weights are those of this rank alone, and their gradients are complete here: keep them out of DDP and FSDP over
    the Buffer's group. `moonep.nn.ModelState` saves and loads them across numbers of ranks.

    Under autocast, products and activation are computed in autocast's dtype, otherwise in the rows'; the parameters
    are cast to it. Results have the rows' dtype, gradients the dtype of what they belong to.

    Args:
        ep: carries the rows; a copy of the module shares it.
        width: F, of an expert's hidden layer.
        activation: "swiglu": silu(gate) * up; "gelu": gelu(gate) * up (GEGLU); "situ_glu": see `situ_glu`.
        bias: whether both products add one.
        dtype: of the parameters; None: the Buffer's.
        device: of the parameters; None: torch's default. On "meta" they are not drawn: call `reset_parameters` later.

    Raises:
        ValueError: a width below 1, an unknown activation.
    """

    b_gate_up: nn.Parameter | None
    b_down: nn.Parameter | None

    def __init__(
        self,
        ep: Buffer,
        width: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        if width < 1:
            raise ValueError(f"width: expected at least 1, got {width}")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.ep, self.width, self.activation = ep, width, activation
        hidden, local = ep.config.hidden, ep.num_local_experts

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(local, *shape, dtype=dtype or ep.config.dtype, device=device))

        self.w_gate_up = parameter(hidden, 2 * width)
        self.w_down = parameter(width, hidden)
        self.b_gate_up = parameter(2 * width) if bias else None
        self.b_down = parameter(hidden) if bias else None
        if not self.w_gate_up.is_meta:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(
        self, init: Callable[..., object] = _like_linear, *, generator: torch.Generator | None = None
    ) -> None:
        """Draws the weights anew, the same for any number of ranks; biases become zero.

        Every rank draws one seed for each of the E experts of the layer from `generator`, and each home expert is
        drawn from its own seed. So ranks whose generators are in the same state, as dense weights want it anyway, make
        the same experts however many they are, and layers made one after another differ.

        Args:
            init: called as init(matrix, generator=...) on float32 matrices [out, in], as of nn.Linear: any such
                function of torch.nn.init, say functools.partial(nn.init.normal_, std=0.02). Default: nn.Linear's.
            generator: on the CPU; None: torch's default one (torch.manual_seed).
        """
        seeds = torch.randint(2**32, (self.ep.config.num_experts,), generator=generator, device="cpu").tolist()
        first = self.ep.first_local_expert
        for local, seed in enumerate(seeds[first : first + self.ep.num_local_experts]):
            own = torch.Generator("cpu").manual_seed(seed)
            for weight in (self.w_gate_up, self.w_down):
                drawn = torch.empty(weight.shape[2], weight.shape[1], dtype=torch.float32, device="cpu")
                init(drawn, generator=own)
                weight[local].copy_(drawn.t())
        for bias in (self.b_gate_up, self.b_down):
            if bias is not None:
                bias.zero_()

    def forward(self, rows: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Every row through its group's expert.

        Args:
            rows: [N, H], as `Buffer.dispatch` gave them.
            plan: they came by; of this Buffer.

        Returns:
            [N, H] in the rows' dtype. Padding rows, zeros, give what the expert makes of zeros; rows past the last
            group give zeros.

        Raises:
            ValueError: rows of another shape; or a plan that has replicas on this rank, when the Buffer gave weights
                for the home experts alone.
        """
        shape = (plan.num_rows, self.ep.config.hidden)
        if tuple(rows.shape) != shape:
            raise ValueError(f"rows: expected shape {list(shape)} (the plan's rows x hidden), got {list(rows.shape)}")
        parameters = [self.w_gate_up, self.w_down]
        if self.b_gate_up is not None and self.b_down is not None:
            parameters += [self.b_gate_up, self.b_down]
        # Replicas are made of the parameters themselves, so that their gradients are summed before they are rounded.
        pairs = self.ep.replicate_apart(plan, *parameters)
        group_ends, num_home = plan.group_ends.tolist(), self.w_gate_up.shape[0]
        num_used = int((plan.group_experts[num_home:] >= 0).sum())
        for at_home, in_slots in ((len(home), len(slots)) for home, slots in pairs):
            if (at_home, in_slots) != (num_home, num_used):
                raise ValueError(
                    f"plan: rank {self.ep.rank} has rows of {num_home} experts at home and {num_used} replicas, but "
                    f"weights for {at_home} and {in_slots}: rows would go through wrong experts"
                )
        home_ends, slot_ends = group_ends[:num_home], group_ends[num_home : num_home + num_used]
        at_home = home_ends[-1] if home_ends else 0
        in_slots = slot_ends[-1] - at_home if slot_ends else 0
        unused = rows.shape[0] - at_home - in_slots
        homes, slots = ([pair[i] for pair in pairs] for i in (0, 1))
        if in_slots == 0 and unused == 0:
            return self._run(rows, homes, home_ends)
        # Apart, so that no home weight is copied; the rows are, which is little beside what is computed with them.
        home_rows, slot_rows, unused_rows = torch.split(rows, [at_home, in_slots, unused])
        parts = [self._run(home_rows, homes, home_ends)]
        if num_used:
            parts.append(self._run(slot_rows, slots, [end - at_home for end in slot_ends]))
        return torch.cat([*parts, torch.zeros_like(unused_rows)])

    def _run(self, rows: torch.Tensor, weights: list[torch.Tensor], group_ends: list[int]) -> torch.Tensor:
        device, dtype = rows.device.type, rows.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        w_gate_up, w_down, *biases = (weight.to(dtype) for weight in weights)
        b_gate_up, b_down = biases or (None, None)
        gate_up = grouped_linear(rows.to(dtype), w_gate_up, b_gate_up, group_ends)
        out = grouped_linear(ACTIVATIONS[self.activation](gate_up), w_down, b_down, group_ends)
        return out.to(rows.dtype)

    def extra_repr(self) -> str:
        """What the module is, for print."""
        first, config = self.ep.first_local_expert, self.ep.config
        return (
            f"experts {first} .. {first + self.ep.num_local_experts} of {config.num_experts}, hidden={config.hidden}, "
            f"width={self.width}, activation={self.activation!r}, bias={self.b_gate_up is not None}"
        )
