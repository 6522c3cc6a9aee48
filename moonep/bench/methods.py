"""The ways to carry tokens that are compared, behind one face."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from moonep import Buffer, Plan, Received, reference
from moonep.bench.config import HOME, REFERENCE, Case, Settings, parse_policy
from moonep.bench.inputs import DTYPES
from moonep.config import BufferConfig
from moonep.nn import Experts
from moonep.plan import first_expert

__all__ = ["AnyPlan", "ExpertsMethod", "Method", "buffer_config", "make_method"]

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


class ExpertsMethod(Method, Protocol):
    """A method that also computes."""

    weights: Sequence[torch.nn.Parameter]  # of the experts at home here

    @property
    def replicate_secs(self) -> float:
        """How long it took, in the last step, to get the weights of replicas."""

    def replicate(self, plan: AnyPlan) -> tuple[torch.Tensor, ...]:
        """The weights of the plan's groups that are not idle."""

    def experts(self, rows: torch.Tensor, plan: AnyPlan) -> torch.Tensor:
        """Every row through its group's expert, once the weights of replicas are there."""


_Pairs = tuple[tuple[torch.Tensor, torch.Tensor], ...]


class _Timed:
    """A Buffer, or as much of one as Experts want, that knows how long its last `replicate_apart` took."""

    def __init__(self, ep: Any):
        self._ep = ep
        self.secs = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ep, name)

    def replicate_apart(self, plan: AnyPlan, *tensors: torch.Tensor) -> _Pairs:
        """As the Buffer's."""
        began = time.perf_counter()
        pairs: _Pairs = self._ep.replicate_apart(plan, *tensors)
        self.secs = time.perf_counter() - began
        return pairs


class _Computes:
    """What both kinds of methods compute with: `moonep.nn.Experts`, whoever carries the weights."""

    def __init__(self, settings: Settings, ep: Any, weights: Sequence[torch.nn.Parameter]):
        self.weights = weights
        self._timed = _Timed(ep)
        if settings.width is not None:
            self._experts = Experts(cast(Buffer, self._timed), settings.width, device="meta")
            self._experts.w_gate_up, self._experts.w_down = weights

    @property
    def replicate_secs(self) -> float:
        return self._timed.secs

    def replicate(self, plan: AnyPlan) -> tuple[torch.Tensor, ...]:
        return tuple(torch.cat(pair) for pair in self._timed.replicate_apart(plan, *self.weights))

    def experts(self, rows: torch.Tensor, plan: AnyPlan) -> torch.Tensor:
        out: torch.Tensor = self._experts(rows, plan)
        return out


class _Reference(_Computes):
    """Plain all-to-all."""

    def __init__(self, settings: Settings, policy: str, weights: Sequence[torch.nn.Parameter]):
        self._num_experts, self._policy = settings.num_experts, parse_policy(policy)
        rank = dist.get_rank()
        first, end = (first_expert(r, settings.num_experts, settings.num_ranks) for r in (rank, rank + 1))
        config = SimpleNamespace(num_experts=settings.num_experts, hidden=settings.hidden, dtype=DTYPES[settings.dtype])
        ep = SimpleNamespace(
            config=config,
            rank=rank,
            first_local_expert=first,
            num_local_experts=end - first,
            replicate_apart=self._replicate_apart,
        )
        super().__init__(settings, ep, weights)

    @staticmethod
    def _replicate_apart(plan: reference.ReferencePlan, *tensors: torch.Tensor) -> _Pairs:
        used = int((plan.group_experts >= 0).sum())
        wholes = reference.replicate(plan, *tensors)
        return tuple((whole[: len(own)], whole[len(own) : used]) for own, whole in zip(tensors, wholes, strict=True))

    def plan(self, topk_idx: torch.Tensor) -> AnyPlan:
        return reference.plan(topk_idx, num_experts=self._num_experts, policy=self._policy)

    def dispatch(self, x: torch.Tensor, plan: AnyPlan, topk_weights: torch.Tensor) -> Received:
        assert isinstance(plan, reference.ReferencePlan)
        return reference.dispatch(x, plan, topk_weights)

    def combine(self, expert_out: torch.Tensor, plan: AnyPlan, weights: torch.Tensor) -> torch.Tensor:
        assert isinstance(plan, reference.ReferencePlan)
        return reference.combine(expert_out, plan, weights)

    def close(self) -> None:
        pass


def buffer_config(settings: Settings, case: Case, policy: str, transport: str = "auto") -> BufferConfig:
    """The Buffer's settings for a case."""
    return BufferConfig(
        num_experts=settings.num_experts,
        top_k=settings.top_k,
        hidden=settings.hidden,
        max_tokens=max(1, case.num_tokens),
        dtype=DTYPES[settings.dtype],
        policy=parse_policy(policy),
        transport=transport,
        expert_alignment=1,
        combine_wire="float32",
        timeout_secs=_TIMEOUT_SECS,
    )


class _Buffer(_Computes):
    """A moonep.Buffer."""

    def __init__(
        self, settings: Settings, case: Case, transport: str, policy: str, weights: Sequence[torch.nn.Parameter]
    ):
        config = buffer_config(settings, case, policy, transport)
        self._ep = Buffer(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
        super().__init__(settings, self._ep, weights)

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


def make_method(
    name: str,
    settings: Settings,
    case: Case,
    policy: str = HOME,
    weights: Sequence[torch.nn.Parameter] = (),
) -> Method:
    """The method of that name, a peer's or ours (then also an ExpertsMethod, given weights). Collective."""
    for peer in settings.peers:
        if peer.name == name:
            method: Method = peer.make(settings, case)
            return method
    if name == REFERENCE:
        return _Reference(settings, policy, weights)
    return _Buffer(settings, case, name, policy, weights)
