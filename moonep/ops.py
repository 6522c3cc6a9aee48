"""The verbs as torch operators, for torch.compile: what they give has a shape before it has a value.

An operator takes tensors and numbers only. So a plan comes as its `key`, a tensor that holds a number and, behind its
memory, the plan and its Buffer's calls: whoever keeps the key (a graph, for its backward) keeps the plan.

Outside torch.compile only `key_of` runs. A compiled rank's graph is made before the other ranks are heard: when some
rank needs gradients and another compiled without, all raise.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from moonep import checks
from moonep.config import BufferConfig
from moonep.plan import Plan
from moonep.transport.base import Collected, Spread

__all__ = ["combine", "dispatch", "key_of"]


class Calls(Protocol):
    """What the operators ask of a Buffer's calls; see autograd.Verbs for the rest."""

    config: BufferConfig

    def checked(self, verb: str, check: Callable[[], Any]) -> Any:
        """What `check` gives; when it raises, all ranks do."""

    def start_dispatch(
        self, plan: Plan, x: torch.Tensor, topk_weights: torch.Tensor, needs_grad: bool, *, graph: bool
    ) -> Callable[[], Spread]:
        """dispatch; `graph`: whether this rank can take part in a backward."""

    def start_combine(
        self, plan: Plan, rows: torch.Tensor, row_weights: torch.Tensor | None, needs_grad: bool, *, graph: bool
    ) -> Callable[[], Collected]:
        """combine."""

    def run_dispatch_backward(self, plan: Plan, grad_rows: torch.Tensor, grad_weights: torch.Tensor) -> Collected:
        """dispatch's backward."""

    def run_combine_backward(
        self, plan: Plan, grad_y: torch.Tensor, row_weights: torch.Tensor | None, rows: torch.Tensor | None
    ) -> Spread:
        """combine's backward."""


class _Kept(bytearray):
    """The memory of a key."""

    calls: Calls
    plan: Plan


_KEPT: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def key_of(calls: Calls, plan: Plan) -> torch.Tensor:
    """A key [1] for `plan`, which must not hold it: nobody could see that circle."""
    number = next(_NUMBERS)
    kept = _Kept(number.to_bytes(8, "little"))
    kept.calls, kept.plan = calls, plan
    _KEPT[number] = kept
    return torch.frombuffer(kept, dtype=torch.int64)


def _behind(key: torch.Tensor) -> tuple[Calls, Plan]:
    kept = _KEPT[int(key)]
    return kept.calls, kept.plan


# ---- what Buffer calls while torch.compile looks ----


def dispatch(plan: Plan, x: torch.Tensor, topk_weights: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [N, H] and their weights [N]."""
    weights = _float32(topk_weights)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or (weights is not None and weights.requires_grad))
    rows, row_weights = _dispatch(x, weights, plan.key, plan.num_rows, needs_grad)
    return rows, row_weights


def combine(plan: Plan, rows: torch.Tensor, row_weights: torch.Tensor | None) -> torch.Tensor:
    """Sums [T, H]."""
    weights = _float32(row_weights)
    needs_grad = torch.is_grad_enabled() and (rows.requires_grad or (weights is not None and weights.requires_grad))
    sums: torch.Tensor = _combine(rows, weights, plan.key, plan.num_tokens, needs_grad)
    return sums


def _float32(weights: torch.Tensor | None) -> torch.Tensor | None:
    """For gradients in the dtype that was given; what is not a floating dtype is refused later, on every rank."""
    return weights.to(torch.float32) if weights is not None and weights.dtype.is_floating_point else weights


# ---- the operators ----


@torch.library.custom_op("moonep::dispatch", mutates_args=())
def _dispatch(
    x: torch.Tensor, topk_weights: torch.Tensor | None, key: torch.Tensor, num_rows: int, needs_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    calls, plan = _behind(key)
    dense_x, weights = calls.checked(
        "dispatch", lambda: checks.check_dispatch(x, topk_weights, plan.num_tokens, calls.config)
    )
    rows, row_weights, _ = calls.start_dispatch(plan, dense_x, weights, needs_grad, graph=needs_grad)()
    assert row_weights is not None
    return rows, row_weights


@_dispatch.register_fake
def _(
    x: torch.Tensor, topk_weights: torch.Tensor | None, key: torch.Tensor, num_rows: int, needs_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(num_rows, x.shape[1]), x.new_empty(num_rows, dtype=torch.float32)


@torch.library.custom_op("moonep::dispatch_backward", mutates_args=())
def _dispatch_backward(
    grad_rows: torch.Tensor, grad_weights: torch.Tensor, key: torch.Tensor, num_tokens: int, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    calls, plan = _behind(key)
    sums, scalars, _ = calls.run_dispatch_backward(plan, grad_rows, grad_weights)
    assert scalars is not None
    return sums, scalars


@_dispatch_backward.register_fake
def _(
    grad_rows: torch.Tensor, grad_weights: torch.Tensor, key: torch.Tensor, num_tokens: int, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return grad_rows.new_empty(num_tokens, grad_rows.shape[1]), grad_weights.new_empty(num_tokens, top_k)


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, topk_weights, key, _, _ = inputs
    ctx.save_for_backward(key)
    ctx.num_tokens, ctx.top_k = x.shape[0], 1 if topk_weights is None else topk_weights.shape[1]
    ctx.weighted = topk_weights is not None


def _differentiate_dispatch(ctx: Any, grad_rows: torch.Tensor, grad_weights: torch.Tensor) -> tuple[Any, ...]:
    (key,) = ctx.saved_tensors
    sums, scalars = _dispatch_backward(grad_rows, grad_weights, key, ctx.num_tokens, ctx.top_k)
    return sums, scalars if ctx.weighted else None, None, None, None


_dispatch.register_autograd(_differentiate_dispatch, setup_context=_save_dispatch)


@torch.library.custom_op("moonep::combine", mutates_args=())
def _combine(
    rows: torch.Tensor, row_weights: torch.Tensor | None, key: torch.Tensor, num_tokens: int, needs_grad: bool
) -> torch.Tensor:
    calls, plan = _behind(key)
    dense_rows, weights = calls.checked(
        "combine", lambda: checks.check_combine(rows, row_weights, plan.num_rows, calls.config)
    )
    return calls.start_combine(plan, dense_rows, weights, needs_grad, graph=needs_grad)().sums


@_combine.register_fake
def _(
    rows: torch.Tensor, row_weights: torch.Tensor | None, key: torch.Tensor, num_tokens: int, needs_grad: bool
) -> torch.Tensor:
    return rows.new_empty(num_tokens, rows.shape[1])


@torch.library.custom_op("moonep::combine_backward", mutates_args=())
def _combine_backward(
    grad_y: torch.Tensor,
    row_weights: torch.Tensor | None,
    rows: torch.Tensor | None,
    key: torch.Tensor,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    calls, plan = _behind(key)
    # Saved as they were given: with any strides.
    dense_weights, dense_rows = (None if each is None else checks.dense(each) for each in (row_weights, rows))
    grad_rows, dots, _ = calls.run_combine_backward(plan, grad_y, dense_weights, dense_rows)
    return grad_rows, grad_y.new_empty(0, dtype=torch.float32) if dots is None else dots


@_combine_backward.register_fake
def _(
    grad_y: torch.Tensor,
    row_weights: torch.Tensor | None,
    rows: torch.Tensor | None,
    key: torch.Tensor,
    num_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    dots = grad_y.new_empty(0 if rows is None else num_rows, dtype=torch.float32)
    return grad_y.new_empty(num_rows, grad_y.shape[1]), dots


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, row_weights, key, _, _ = inputs
    # The rows are only wanted for the gradient of the weights.
    ctx.weighted = row_weights is not None and ctx.needs_input_grad[1]
    ctx.save_for_backward(key, row_weights, rows if ctx.weighted else None)
    ctx.num_rows = rows.shape[0]


def _differentiate_combine(ctx: Any, grad_y: torch.Tensor) -> tuple[Any, ...]:
    key, row_weights, rows = ctx.saved_tensors
    grad_rows, dots = _combine_backward(grad_y, row_weights, rows, key, ctx.num_rows)
    return grad_rows, dots if ctx.weighted else None, None, None, None


_combine.register_autograd(_differentiate_combine, setup_context=_save_combine)
