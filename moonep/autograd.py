"""The one file that knows gradients: dispatch's backward is combine, and combine's is dispatch, on the saved plan.

A verb first runs without autograd. If any rank needs a gradient, every rank's output is then hung on the graph, by an
edge where no input of this rank needs one, so that all ranks take part in the backward; if none does, nothing is.

Whoever enters combine's backward must also enter that of the dispatch before it, even where its rows do not link the
two (it received none, or ran its experts without a graph). The weights that dispatch gave are such a link; without
them, combine hangs on an edge that the plan's last dispatch left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from moonep.plan import Plan
from moonep.transport.base import Collected, Spread

__all__ = ["Verbs", "combine", "dispatch"]


class Verbs(Protocol):
    """What a Buffer does for the functions here; each call is collective."""

    def keep_edge(self, plan: Plan, edge: torch.Tensor | None) -> None:
        """Keeps the edge of the plan's last dispatch, as long as the plan lives; None: it has none."""

    def edge_of(self, plan: Plan) -> torch.Tensor:
        """An empty tensor that requires a gradient, hung on that dispatch."""

    def start_dispatch(
        self, plan: Plan, x: torch.Tensor, topk_weights: torch.Tensor, needs_grad: bool, *, async_op: bool
    ) -> Callable[[], Spread]:
        """dispatch; what it gives waits for the result."""

    def start_combine(
        self, plan: Plan, rows: torch.Tensor, row_weights: torch.Tensor | None, needs_grad: bool, *, async_op: bool
    ) -> Callable[[], Collected]:
        """combine; what it gives waits for the result."""

    def run_dispatch_backward(self, plan: Plan, grad_rows: torch.Tensor, grad_weights: torch.Tensor) -> Collected:
        """dispatch's backward: sums of gradients, and the weights' gradients, go home."""

    def run_combine_backward(
        self, plan: Plan, grad_y: torch.Tensor, row_weights: torch.Tensor | None, rows: torch.Tensor | None
    ) -> Spread:
        """combine's backward: gradients go out, and meet the rows (None: they are not asked for)."""


def dispatch(
    verbs: Verbs, plan: Plan, x: torch.Tensor, topk_weights: torch.Tensor, async_op: bool = False
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Starts it; what it gives waits for the rows [N, H] and their weights [N], and hangs them on the graph."""
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad)
    result = verbs.start_dispatch(plan, x.detach(), topk_weights.detach(), needs_grad, async_op=async_op)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        rows, weights, agreement = result()
        assert weights is not None
        if not agreement.needs_grad:
            verbs.keep_edge(plan, None)
            return rows, weights
        inputs = (x, topk_weights) if needs_grad else (x.detach(), topk_weights.detach())
        with torch.enable_grad():
            edge = torch.empty(0, requires_grad=True)
            rows, weights, edge = _Dispatch.apply(  # type: ignore[no-untyped-call]
                edge, *inputs, verbs, replace(plan), (rows, weights)
            )
        verbs.keep_edge(plan, edge)  # whose graph holds a copy of the plan: the edge must not keep the plan alive
        return rows, weights

    return finish


def combine(
    verbs: Verbs, plan: Plan, rows: torch.Tensor, row_weights: torch.Tensor | None, async_op: bool = False
) -> Callable[[], torch.Tensor]:
    """Starts it; what it gives waits for the sums [T, H], and hangs them on the graph."""
    weights = None if row_weights is None else row_weights.detach()
    needs_grad = torch.is_grad_enabled() and (
        rows.requires_grad or (row_weights is not None and row_weights.requires_grad)
    )
    result = verbs.start_combine(plan, rows.detach(), weights, needs_grad, async_op=async_op)
    version = 0 if rows.is_inference() else rows._version

    def finish() -> torch.Tensor:
        sums, _, agreement = result()
        if not agreement.needs_grad:
            return sums
        if rows._version != version:  # autograd looks only from here on
            raise RuntimeError("expert_out: expected to stay as it was until wait(), got one changed in place")
        linked = row_weights is not None and row_weights.requires_grad
        with torch.enable_grad():
            edge = torch.empty(0, requires_grad=True) if linked else verbs.edge_of(plan)
            y: torch.Tensor = _Combine.apply(  # type: ignore[no-untyped-call]
                # The weights keep their link where the rows have none.
                edge,
                rows if needs_grad else rows.detach(),
                row_weights,
                verbs,
                replace(plan),
                (sums,),
            )
        return y

    return finish


# The results of a verb come to `forward` in a tuple, which autograd does not look into: a tensor that goes in and
# comes out would become a view, and views of a function's outputs must not be changed in place.
#
# The edges are saved for torch.utils.checkpoint, which ends a recomputation at the last saved tensor: so that this is
# behind the same verb on every rank.


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        edge: torch.Tensor,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        verbs: Verbs,
        plan: Plan,
        results: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.verbs, ctx.plan = verbs, plan
        ctx.save_for_backward(edge)
        return *results, torch.empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor, grad_weights: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        sums, scalars, _agreement = ctx.verbs.run_dispatch_backward(ctx.plan, grad_rows, grad_weights)
        return None, sums, scalars, None, None, None


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
