"""What stands between the two products of an expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from moonep import _C
from moonep.config import DTYPES

__all__ = ["ACTIVATIONS", "geglu", "situ_glu", "swiglu"]

_GATE_LIMIT, _UP_LIMIT = 4.0, 25.0


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [..., 2F] -> [..., F], gates first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, the exact gelu: [..., 2F] -> [..., F], gates first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.gelu(gate) * up


def situ_glu(gate_up: torch.Tensor) -> torch.Tensor:
    """SiTU-GLU, the activation of Kimi K3's experts (its technical report, Eq. 12).

        out = 4 tanh(gate / 4) sigmoid(gate) * 25 tanh(up / 25)

    So |out| <= 100 whatever comes in, infinities too; NaN gives NaN. Differentiable once.

    On CPUs both passes are native code: computed in float32 and rounded once, on as many threads as torch has, the
    same bits on every CPU; only gate_up is kept for backward. In float32, `out` is within 12 units in the last place
    (the formula in torch: 5) or within 1e-42. On other devices, in float64, for subclasses of Tensor and within
    torch.compile it is the formula in torch, computed in float32 at least.

    Args:
        gate_up: [..., 2F], the gates in columns 0 .. F, of any floating dtype.

    Returns:
        [..., F] in the same dtype.

    Raises:
        ValueError: an odd last dimension, or none.
        TypeError: a dtype that is not floating.
    """
    if not gate_up.dtype.is_floating_point:
        raise TypeError(f"gate_up: expected a floating dtype, got {gate_up.dtype}")
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: expected shape [..., 2F], got {list(gate_up.shape)}")
    if torch.compiler.is_compiling() or not _is_for_native(gate_up):
        return _plain_situ_glu(gate_up)
    out: torch.Tensor = _SituGlu.apply(gate_up)  # type: ignore[no-untyped-call]
    return out


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": swiglu,
    "gelu": geglu,
    "situ_glu": situ_glu,
}


def _is_for_native(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.dtype in DTYPES
        and type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout == torch.strided
    )


def _plain_situ_glu(gate_up: torch.Tensor) -> torch.Tensor:
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    gate, up = wide.chunk(2, dim=-1)
    gated = _GATE_LIMIT * torch.tanh(gate / _GATE_LIMIT) * torch.sigmoid(gate)
    return (gated * (_UP_LIMIT * torch.tanh(up / _UP_LIMIT))).to(gate_up.dtype)


class _SituGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous().resolve_neg()
        ctx.save_for_backward(gate_up)
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        num_rows = out.numel() // max(1, width)
        _C.situ_glu(out.data_ptr(), gate_up.data_ptr(), num_rows, width, DTYPES[out.dtype], torch.get_num_threads())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        grad = grad.contiguous().resolve_neg()
        grad_gate_up = torch.empty_like(gate_up)
        width = grad.shape[-1]
        _C.situ_glu_backward(
            grad_gate_up.data_ptr(),
            gate_up.data_ptr(),
            grad.data_ptr(),
            grad.numel() // max(1, width),
            width,
            DTYPES[grad.dtype],
            torch.get_num_threads(),
        )
        return grad_gate_up
