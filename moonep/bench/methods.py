"""The ways to carry tokens that are compared, behind one face."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from moonep import Buffer, Home, Plan, Received, reference
from moonep.bench.config import REFERENCE, Case, Settings
from moonep.bench.inputs import DTYPES
from moonep.config import BufferConfig

__all__ = ["AnyPlan", "Method", "buffer_config", "make_method"]

POLICIES = {"home": Home()}
_TIMEOUT_SECS = 60.0

AnyPlan = Plan | reference.ReferencePlan


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


def buffer_config(settings: Settings, case: Case, transport: str = "auto") -> BufferConfig:
    """The Buffer's settings for a case."""
    return BufferConfig(
        num_experts=settings.num_experts,
        top_k=settings.top_k,
        hidden=settings.hidden,
        max_tokens=max(1, case.num_tokens),
        dtype=DTYPES[settings.dtype],
        policy=POLICIES[settings.policy],
        transport=transport,
        expert_alignment=1,
        combine_wire="float32",
        timeout_secs=_TIMEOUT_SECS,
    )


class _Buffer:
    """A moonep.Buffer."""

    def __init__(self, settings: Settings, case: Case, transport: str):
        config = buffer_config(settings, case, transport)
        self._ep = Buffer(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})

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
