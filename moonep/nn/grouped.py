"""Each group of rows times its own expert's matrix, forward and backward.

Two ways: `torch._grouped_mm` makes all products in one call; a loop calls `torch.mm` once per group. Milliseconds of
forward + backward, one thread of an AMD EPYC with AVX2 and no instructions for 16-bit numbers, torch 2.13:

    groups x rows x in x out      float32: one call        loop    bfloat16: one call         loop    through float32
    896 x 8192 x  256 x   64              16 +  70     20 +  84            113 +  119     117 +  116        36 +  72
    896 x 4096 x  512 x  256              85 + 457     88 + 457            884 +  427     853 +  407        89 + 409
    128 x 4096 x  256 x  512              29 +  97     30 +  93            810 +  208     821 +  223        33 + 104
      8 x 2048 x 1024 x 2048             125 + 292    125 + 289          22821 + 1428   21970 + 1431       132 + 284

So on CPUs float32 takes the one call, which wins a fifth where groups are many and small and loses nothing elsewhere.
The 16-bit dtypes take the loop. Where the CPU has instructions for them, a group's `mm` is faster than the one call
(328 against 207 GFLOP/s in bfloat16 on an Intel CPU with AMX). Where it has none, each group goes through float32,
with the same sums in float32 and one rounding at the end. On GPUs bfloat16 takes the one call (a loop would launch a
kernel per group) and the other dtypes the loop; that has not been measured.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

__all__ = ["grouped_linear"]

_GROUPED_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
_GROUPED_ALIGN_BYTES = 16


def grouped_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group_ends: list[int]
) -> torch.Tensor:
    """Rows of group g times weight[g], plus bias[g]. Differentiable once.

    Args:
        rows: [N, A]; group g is rows group_ends[g - 1] .. group_ends[g], and may be empty.
        weight: [G, A, B], in the rows' dtype.
        bias: [G, B], in the rows' dtype, or None.
        group_ends: G ints, ascending. Rows past the last are not read.

    Returns:
        [N, B]: zeros past the last group. There, the gradient of the rows is zeros too, and an empty group's weight and
        bias get gradients of exact zeros.
    """
    product: torch.Tensor = _GroupedLinear.apply(rows, weight, bias, group_ends)  # type: ignore[no-untyped-call]
    return product


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group_ends: list[int]
    ) -> torch.Tensor:
        rows = rows.contiguous()
        ctx.group_ends = group_ends
        needs_rows, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(rows if needs_weight else None, weight if needs_rows else None)
        out = _times(rows, weight, group_ends)
        if bias is not None:
            for part, of_group in zip(_split(out, group_ends), bias.unbind(), strict=True):
                part += of_group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        grad = grad.contiguous()  # that of a sum has strides of 0
        grad_rows = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_rows = _times(grad, weight.transpose(1, 2), ctx.group_ends)
        if ctx.needs_input_grad[1]:
            grad_weight = _outer(rows, grad, ctx.group_ends)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.new_empty(len(ctx.group_ends), grad.shape[1])
            for part, of_group in zip(_split(grad, ctx.group_ends), grad_bias.unbind(), strict=True):
                torch.sum(part, 0, out=of_group)
        return grad_rows, grad_weight, grad_bias, None


def _times(rows: torch.Tensor, weight: torch.Tensor, group_ends: list[int]) -> torch.Tensor:
    """[N, A] by groups times [G, A, B]: [N, B], zeros past the last group."""
    end = group_ends[-1] if group_ends else 0
    if _takes_grouped(rows[:end], weight):
        product = torch._grouped_mm(rows[:end], weight, offs=_offsets(group_ends, rows.device))
        if end == rows.shape[0]:
            return product
        return torch.cat([product, product.new_zeros(rows.shape[0] - end, product.shape[1])])
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    out[end:] = 0
    _mm_each(_split(rows, group_ends), weight.unbind(), _split(out, group_ends))
    return out


def _outer(rows: torch.Tensor, grad: torch.Tensor, group_ends: list[int]) -> torch.Tensor:
    """[N, A] transposed times [N, B], group by group: [G, A, B], zeros for empty groups."""
    end = group_ends[-1] if group_ends else 0
    if _takes_grouped(rows[:end], grad[:end]):
        out = torch._grouped_mm(rows[:end].t(), grad[:end], offs=_offsets(group_ends, rows.device))
        for of_group, part in zip(out.unbind(), _split(rows, group_ends), strict=True):
            if part.shape[0] == 0:  # what stands there then is nowhere promised
                of_group.zero_()
        return out
    out = rows.new_empty(len(group_ends), rows.shape[1], grad.shape[1])
    _mm_each([part.t() for part in _split(rows, group_ends)], _split(grad, group_ends), out.unbind())
    return out


def _split(rows: torch.Tensor, group_ends: list[int]) -> Sequence[torch.Tensor]:
    sizes = [end - start for start, end in zip([0, *group_ends], group_ends, strict=False)]
    return rows[: sum(sizes)].split_with_sizes(sizes)


def _offsets(group_ends: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(group_ends, dtype=torch.int32, device=device)


def _mm_each(
    lefts: Sequence[torch.Tensor],
    rights: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
) -> None:
    """out = left @ right for each; `out=` also keeps autocast away."""
    for left, right, out in zip(lefts, rights, outs, strict=True):
        if left.numel() == 0 or right.numel() == 0:
            out.zero_()
        elif _has_instructions(left.device.type, left.dtype):
            torch.mm(left, right, out=out)
        else:
            wide = left.new_empty(out.shape, dtype=torch.float32)
            out.copy_(torch.mm(left.float(), right.float(), out=wide))


def _takes_grouped(*operands: torch.Tensor) -> bool:
    """Whether `torch._grouped_mm` is the way to go, and takes operands of these strides and addresses."""
    device, dtype = operands[0].device.type, operands[0].dtype
    if dtype != _GROUPED_DTYPE.get(device) or not _has_grouped_mm(device, dtype):
        return False
    # One stride of 1, the others whole numbers of 16 bytes.
    strides = [[stride * dtype.itemsize for stride in operand.stride() if stride != 1] for operand in operands]
    return all(
        operand.numel() > 0
        and len(wide) == operand.dim() - 1
        and all(stride % _GROUPED_ALIGN_BYTES == 0 for stride in wide)
        and operand.data_ptr() % _GROUPED_ALIGN_BYTES == 0
        for operand, wide in zip(operands, strides, strict=True)
    )


@functools.cache
def _has_grouped_mm(device: str, dtype: torch.dtype) -> bool:
    """Whether this torch makes grouped products there: asked by making one, as it came to devices one by one."""
    square = torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch._grouped_mm(square, square[None], offs=torch.tensor([16], device=device, dtype=torch.int32))
    except (AttributeError, RuntimeError):
        return False
    return True


@functools.cache
def _has_instructions(device: str, dtype: torch.dtype) -> bool:
    """Whether `mm` of this dtype is fast; without instructions for 16-bit numbers, a CPU's is some 50 times slower."""
    if device != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    ask = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return bool(getattr(torch.ops.mkldnn, ask)())
