"""Before anything is timed: every method must give what the reference gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from moonep.bench.config import REFERENCE, Peer
from moonep.bench.group import gather
from moonep.bench.inputs import Inputs
from moonep.bench.methods import AnyPlan, ExpertsMethod, Method
from moonep.plan import Plan
from moonep.reference import ReferencePlan

__all__ = ["VerificationError", "verify", "verify_experts", "verify_peers"]

_PLAN_FIELDS = ("group_experts", "group_sizes", "group_ends", "replicas", "rank_rows", "dst_rank", "dst_row")


class VerificationError(Exception):
    """A method gave other results than the reference. Raised on every rank."""


@dataclass
class _Outcome:
    plan: AnyPlan
    tensors: dict[str, torch.Tensor]  # compared bit for bit
    grad_weights: torch.Tensor | None  # a sum over H, in any order: compared by tolerance


def verify(methods: dict[str, Method], inputs: Inputs, backward: bool) -> None:
    """One step of every method against the reference: plans and rows bit for bit, gradients with `backward`.

    Collective. The experts differ from each other, so that a row at another expert's place is seen.
    """
    ours = {name: method for name, method in methods.items() if name != REFERENCE}
    expected = _outcome(methods[REFERENCE], inputs, backward)
    for name, method in ours.items():
        _raise_everywhere(name, _differences(_outcome(method, inputs, backward), expected))


def verify_experts(methods: dict[str, Method], inputs: Inputs, backward: bool) -> None:
    """One step with experts against the reference: replicated weights bit for bit, what is computed within rounding.

    How a product of matrices rounds may depend on where its operands lie. Collective.
    """
    expected = _through_experts(methods[REFERENCE], inputs, backward)
    tolerance = max(1e-5, 4 * torch.finfo(inputs.x.dtype).eps)
    for name, method in methods.items():
        if name == REFERENCE:
            continue
        found = _through_experts(method, inputs, backward)
        wrong = []
        for what, tensor in expected.items():
            same = _same_bits if what.startswith("replicated") else _close_to(tolerance)
            if not same(found[what], tensor):
                wrong.append(what)
        _raise_everywhere(name, wrong)


def _through_experts(method: Method, inputs: Inputs, backward: bool) -> dict[str, torch.Tensor]:
    computes = cast(ExpertsMethod, method)
    x = inputs.x.clone().requires_grad_(backward)
    with torch.set_grad_enabled(backward):
        plan = method.plan(inputs.topk_idx)
        recv = method.dispatch(x, plan, inputs.topk_weights)
        y = method.combine(computes.experts(recv.x, plan), plan, recv.weights)
        if backward:
            torch.autograd.backward(y, inputs.x.flip(0))
    tensors = {"y through experts": y.detach()}
    if backward:
        assert x.grad is not None
        tensors["gradient of x through experts"] = x.grad
    with torch.no_grad():
        for i, (weight, whole) in enumerate(zip(computes.weights, computes.replicate(plan), strict=True)):
            tensors[f"replicated weights [{i}]"] = whole
            if weight.grad is not None:
                tensors[f"gradient of the experts' weights [{i}]"] = weight.grad
            weight.grad = None
    return tensors


def _close_to(tolerance: float) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Within `tolerance` of the largest value."""

    def close(a: torch.Tensor, b: torch.Tensor) -> bool:
        scale = b.abs().max().item() if b.numel() else 0.0
        return a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=tolerance * scale)

    return close


def verify_peers(peers: dict[Peer, Method], baseline: Method, inputs: Inputs) -> None:
    """One forward step of every peer against the reference: y alone, by tolerance, for a peer sums in its own way.

    First with tokens in float32, where only a wrong result is far off. Then as they are timed: each of the K weighted
    rows and each addition may be rounded to the rows' dtype. Terms of an element have one sign, so errors are relative.
    Collective.
    """
    top_k = inputs.topk_idx.shape[1]
    for dtype in dict.fromkeys((torch.float32, inputs.x.dtype)) if peers else ():
        given = inputs._replace(x=inputs.x.to(dtype))
        expected = _outcome(baseline, given, False).tensors["y"]
        rounding = (top_k + 2) * torch.finfo(dtype).eps / 2
        for peer, method in peers.items():
            y = _outcome(method, given, False).tensors["y"]
            fine = y.dtype == dtype and y.shape == expected.shape
            fine = fine and torch.allclose(y, expected, rtol=peer.rtol + rounding, atol=1e-30)
            _raise_everywhere(peer.name, [] if fine else [f"y of {str(dtype).removeprefix('torch.')} tokens"])


def _raise_everywhere(name: str, wrong: list[str]) -> None:
    """Raises on all ranks if something is wrong on any. Collective."""
    wrong_of_rank = gather(torch.tensor([bool(wrong)]))
    if wrong_of_rank.any():
        ranks = wrong_of_rank.flatten().nonzero().flatten().tolist()
        here = f"; here: {', '.join(wrong)}" if wrong else ""
        raise VerificationError(f"{name} differs from the reference on ranks {ranks}{here}")


def _outcome(method: Method, inputs: Inputs, backward: bool) -> _Outcome:
    x = inputs.x.clone().requires_grad_(backward)
    topk_weights = inputs.topk_weights.clone().requires_grad_(backward)
    plan = method.plan(inputs.topk_idx)
    recv = method.dispatch(x, plan, topk_weights)
    factors = _factors(plan, len(recv.x)).to(x.dtype)
    y = method.combine(recv.x * factors[:, None], plan, recv.weights)
    tensors = {"received rows": recv.x, "received weights": recv.weights, "y": y}
    if backward:
        torch.autograd.backward(y, inputs.x.flip(0))
        assert x.grad is not None
        tensors["gradient of x"] = x.grad
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    return _Outcome(plan, tensors, topk_weights.grad)


def _factors(plan: AnyPlan, num_rows: int) -> torch.Tensor:
    """[N], another one for every expert, and 1 for rows past the last group."""
    sizes_G = plan.group_sizes  # peers have no padding
    if isinstance(plan, (Plan, ReferencePlan)):
        sizes_G = plan.group_ends.long().diff(prepend=plan.group_ends.new_zeros(1))
    factors = torch.repeat_interleave(1 + plan.group_experts % 8 / 8, sizes_G)
    return torch.nn.functional.pad(factors, (0, num_rows - len(factors)), value=1.0)


def _differences(found: _Outcome, expected: _Outcome) -> list[str]:
    wrong = [
        f"plan.{name}"
        for name in _PLAN_FIELDS
        if not torch.equal(getattr(found.plan, name), getattr(expected.plan, name))
    ]
    wrong += [name for name, tensor in expected.tensors.items() if not _same_bits(found.tensors[name], tensor)]
    if expected.grad_weights is not None:
        assert found.grad_weights is not None
        scale = expected.grad_weights.abs().max().item() if expected.grad_weights.numel() else 1.0
        if not torch.allclose(found.grad_weights, expected.grad_weights, rtol=1e-4, atol=1e-4 * scale):
            wrong.append("gradient of the weights")
    return wrong


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
