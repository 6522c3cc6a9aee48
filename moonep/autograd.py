"""The one file that knows gradients: dispatch's backward is combine, combine's is dispatch, on the saved plan; that of
replicate sums what all instances of an expert found.

A verb first runs without autograd. If any rank needs a gradient, every rank's output is then hung on the graph, by an
edge where no input of this rank needs one, so that all ranks take part in the backward; if none does, nothing is.

Whoever enters combine's backward must also enter that of the dispatch before it, even where its rows do not link the
two (it received none, or ran its experts without a graph). The weights that dispatch gave are such a link; without
them, combine hangs on an edge that the plan's last dispatch left.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from moonep.plan import Plan
from moonep.transport.base import Collected, Spread

__all__ = ["Verbs", "combine", "dispatch", "replicate"]


@dataclass(eq=False)
class Edge:
    """What the last dispatch or replicate of a plan left, for later verbs to hang on."""

    of_replicate: bool
    edge: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    is_open: bool = True  # no combine has come yet
    is_spent: bool = False  # its backward has run


class Verbs(Protocol):
    """What a Buffer does for the functions here; each call is collective."""

    def edge_of(self, plan: Plan, *, of_replicate: bool = False, is_open: bool = False) -> torch.Tensor:
        """The edge that the plan's last dispatch or replicate left, if it is as asked for; else a new one."""

    def keep_edge(self, plan: Plan, edge: Edge | None) -> None:
        """Keeps an edge as long as the plan lives; None: there is none."""

    def close_edge(self, plan: Plan) -> None:
        """A combine has come: the next dispatch or replicate of the plan begins a step of its own."""

    def start_dispatch(
        self,
        plan: Plan,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        needs_grad: bool,
        *,
        async_op: bool,
        zero_copy: bool,
    ) -> Callable[[], Spread]:
        """dispatch; what it gives waits for the result."""

    def start_combine(
        self,
        plan: Plan,
        rows: torch.Tensor,
        row_weights: torch.Tensor | None,
        needs_grad: bool,
        *,
        async_op: bool,
        zero_copy: bool,
    ) -> Callable[[], Collected]:
        """combine; what it gives waits for the result."""

    def run_dispatch_backward(self, plan: Plan, grad_rows: torch.Tensor, grad_weights: torch.Tensor) -> Collected:
        """dispatch's backward: sums of gradients, and the weights' gradients, go home."""

    def run_combine_backward(
        self, plan: Plan, grad_y: torch.Tensor, row_weights: torch.Tensor | None, rows: torch.Tensor | None
    ) -> Spread:
        """combine's backward: gradients go out, and meet the rows (None: they are not asked for)."""

    def run_replicate(
        self, plan: Plan, tensors: Sequence[torch.Tensor], differentiable: Sequence[bool], needs_grad: bool
    ) -> tuple[list[torch.Tensor], bool]:
        """replicate: the slots in use [U, ...], and whether any rank needs gradients (of what is differentiable)."""

    def run_replicate_backward(
        self, plan: Plan, home_grads: Sequence[torch.Tensor], slot_grads: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """replicate's backward: gradients [L, ...] of what is at home and of the slots."""


def dispatch(
    verbs: Verbs, plan: Plan, x: torch.Tensor, topk_weights: torch.Tensor, *, async_op: bool, zero_copy: bool
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Starts it; what it gives waits for the rows [N, H] and their weights [N], and hangs them on the graph."""
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad)
    result = verbs.start_dispatch(
        plan, x.detach(), topk_weights.detach(), needs_grad, async_op=async_op, zero_copy=zero_copy
    )

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        rows, weights, agreement = result()
        assert weights is not None
        if not agreement.needs_grad:
            verbs.keep_edge(plan, None)
            return rows, weights
        inputs = (x, topk_weights) if needs_grad else (x.detach(), topk_weights.detach())
        before, left = verbs.edge_of(plan, of_replicate=True, is_open=True), Edge(of_replicate=False)
        with torch.enable_grad():
            rows, weights, left.edge = _Dispatch.apply(  # type: ignore[no-untyped-call]
                before, *inputs, verbs, replace(plan), weakref.ref(left), (rows, weights)
            )
        verbs.keep_edge(plan, left)  # whose graph holds a copy of the plan: it must not keep the plan itself alive
        return rows, weights

    return finish


def combine(
    verbs: Verbs, plan: Plan, rows: torch.Tensor, row_weights: torch.Tensor | None, *, async_op: bool, zero_copy: bool
) -> Callable[[], torch.Tensor]:
    """Starts it; what it gives waits for the sums [T, H], and hangs them on the graph."""
    weights = None if row_weights is None else row_weights.detach()
    needs_grad = torch.is_grad_enabled() and (
        rows.requires_grad or (row_weights is not None and row_weights.requires_grad)
    )
    result = verbs.start_combine(plan, rows.detach(), weights, needs_grad, async_op=async_op, zero_copy=zero_copy)
    version = 0 if rows.is_inference() else rows._version

    def finish() -> torch.Tensor:
        sums, _, agreement = result()
        if not agreement.needs_grad:
            return sums
        if rows._version != version:  # autograd looks only from here on
            raise RuntimeError("expert_out: expected to stay as it was until wait(), got one changed in place")
        linked = row_weights is not None and row_weights.requires_grad
        with torch.enable_grad():
            edge = verbs.edge_of(plan, of_replicate=linked)
            y: torch.Tensor = _Combine.apply(  # type: ignore[no-untyped-call]
                # The weights keep their link where the rows have none.
                edge,
                rows if needs_grad else rows.detach(),
                row_weights,
                verbs,
                replace(plan),
                (sums,),
            )
        verbs.close_edge(plan)
        return y

    return finish


def replicate(
    verbs: Verbs, plan: Plan, tensors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors [L, ...] as they are, for use beside the slots in use [U, ...]: their gradients meet."""
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    differentiable, detached = [tensor.requires_grad for tensor in tensors], [tensor.detach() for tensor in tensors]
    slots, any_needs_grad = verbs.run_replicate(plan, detached, differentiable, needs_grad)
    if not any_needs_grad:
        return detached, slots
    before, left = verbs.edge_of(plan, is_open=True), Edge(of_replicate=True)
    with torch.enable_grad():
        *outputs, left.edge = _Replicate.apply(  # type: ignore[no-untyped-call]
            before,
            verbs,
            replace(plan),
            weakref.ref(left),
            differentiable,
            (*detached, *slots),
            *(tensors if needs_grad else detached),
        )
    verbs.keep_edge(plan, left)
    return outputs[: len(tensors)], outputs[len(tensors) :]


# The results of a verb come to `forward` in a tuple, which autograd does not look into: a tensor that goes in and
# comes out would become a view, and views of a function's outputs must not be changed in place.
#
# The edges are saved for torch.utils.checkpoint, which ends a recomputation at the last saved tensor: so that this is
# behind the same verb on every rank.


def _spend(left: weakref.ref[Edge]) -> None:
    """A later verb that hung on a graph that has run, and is freed, could not go backward."""
    edge = left()
    if edge is not None:
        edge.is_spent = True


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        edge: torch.Tensor,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        verbs: Verbs,
        plan: Plan,
        left: weakref.ref[Edge],
        results: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.verbs, ctx.plan, ctx.left = verbs, plan, left
        ctx.save_for_backward(edge)
        return *results, torch.empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor, grad_weights: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        _spend(ctx.left)
        sums, scalars, _agreement = ctx.verbs.run_dispatch_backward(ctx.plan, grad_rows, grad_weights)
        return torch.zeros(0), sums, scalars, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        edge: torch.Tensor,
        rows: torch.Tensor,
        row_weights: torch.Tensor | None,
        verbs: Verbs,
        plan: Plan,
        results: tuple[torch.Tensor],
    ) -> torch.Tensor:
        ctx.verbs, ctx.plan = verbs, plan
        # The rows are only wanted for the gradient of the weights.
        ctx.save_for_backward(edge, rows if ctx.needs_input_grad[2] else None, row_weights)
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[Any, ...]:
        _, rows, row_weights = ctx.saved_tensors
        grad_rows, dots, _ = ctx.verbs.run_combine_backward(ctx.plan, grad_y, row_weights, rows)
        return torch.zeros(0), grad_rows, dots, None, None, None


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        edge: torch.Tensor,
        verbs: Verbs,
        plan: Plan,
        left: weakref.ref[Edge],
        differentiable: list[bool],
        results: tuple[torch.Tensor, ...],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.verbs, ctx.plan, ctx.left, ctx.differentiable = verbs, plan, left, differentiable
        ctx.save_for_backward(edge)
        ctx.mark_non_differentiable(
            *(out for out, needed in zip(results, 2 * differentiable, strict=True) if not needed)
        )
        return *results, torch.empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # raises when this graph was freed
        _spend(ctx.left)
        half = len(ctx.differentiable)
        home_grads, slot_grads = (
            [grad for grad, needed in zip(part, ctx.differentiable, strict=True) if needed]
            for part in (grads[:half], grads[half:-1])
        )
        sums = iter(ctx.verbs.run_replicate_backward(ctx.plan, home_grads, slot_grads))
        by_tensor = (next(sums) if needed else None for needed in ctx.differentiable)
        return torch.zeros(0), None, None, None, None, None, *by_tensor
