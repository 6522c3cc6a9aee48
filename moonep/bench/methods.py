"""The ways to carry tokens that are compared, behind one face."""

from __future__ import annotations

from typing import Protocol

import torch

from moonep import Buffer, Home, Plan, Received, reference
from moonep.bench.config import DTYPES, Case, Settings

__all__ = ["METHODS", "REFERENCE", "AnyPlan", "Method", "default_methods", "make_method"]

REFERENCE = "reference"
METHODS = (REFERENCE, "collective", "shm", "local")
POLICIES = {"home": Home()}

AnyPlan = Plan | reference.ReferencePlan


def default_methods(num_ranks: int) -> tuple[str, ...]:
    """Those that work with so many ranks on one machine."""
    return (REFERENCE, "local") if num_ranks == 1 else (REFERENCE, "collective", "shm")


class Method(Protocol):
    """The verbs, as `moonep.Buffer` has them."""

    def plan(self, topk_idx: torch.Tensor) -> AnyPlan:
        """Where every route goes."""

    def dispatch(self, x: torch.Tensor, plan: AnyPlan, topk_weights: torch.Tensor) -> Received:
        """Tokens to experts."""

    def combine(self, expert_out: torch.Tensor, plan: AnyPlan, weights: torch.Tensor) -> torch.Tensor:
        """Results home."""

    def close(self) -> None:
        """Gives everything back."""


class _Reference:
    """Plain all-to-all."""

    def __init__(self, num_experts: int):
        self._num_experts = num_experts

    def plan(self, topk_idx: torch.Tensor) -> AnyPlan:
        return reference.plan(topk_idx, num_experts=self._num_experts)

    def dispatch(self, x: torch.Tensor, plan: AnyPlan, topk_weights: torch.Tensor) -> Received:
        assert isinstance(plan, reference.ReferencePlan)
        return reference.dispatch(x, plan, topk_weights)

    def combine(self, expert_out: torch.Tensor, plan: AnyPlan, weights: torch.Tensor) -> torch.Tensor:
        assert isinstance(plan, reference.ReferencePlan)
        return reference.combine(expert_out, plan, weights)

    def close(self) -> None:
        pass


class _Buffer:
    """A moonep.Buffer."""

    def __init__(self, settings: Settings, case: Case, transport: str):
        self._ep = Buffer(
            num_experts=settings.num_experts,
            top_k=settings.top_k,
            hidden=settings.hidden,
            max_tokens=case.num_tokens,
            dtype=DTYPES[settings.dtype],
            policy=POLICIES[settings.policy],
            transport=transport,
        )

    def plan(self, topk_idx: torch.Tensor) -> AnyPlan:
        return self._ep.plan(topk_idx)

    def dispatch(self, x: torch.Tensor, plan: AnyPlan, topk_weights: torch.Tensor) -> Received:
        assert isinstance(plan, Plan)
        return self._ep.dispatch(x, plan, topk_weights)

    def combine(self, expert_out: torch.Tensor, plan: AnyPlan, weights: torch.Tensor) -> torch.Tensor:
        assert isinstance(plan, Plan)
        return self._ep.combine(expert_out, plan, weights)

    def close(self) -> None:
        self._ep.close()


def make_method(name: str, settings: Settings, case: Case) -> Method:
    """The method of that name, a peer's or ours. Collective."""
    for peer in settings.peers:
        if peer.name == name:
            method: Method = peer.make(settings, case)
            return method
    return _Reference(settings.num_experts) if name == REFERENCE else _Buffer(settings, case, name)
