"""MoonEP: expert-parallel dispatch and combine for Mixture-of-Experts models.

    ep = moonep.Buffer(num_experts=896, top_k=16, hidden=3584, max_tokens=4096)
    plan = ep.plan(topk_idx)
    recv = ep.dispatch(x, plan, topk_weights)
    y = ep.combine(experts(recv.x, plan.group_ends), plan, recv.weights)

Names are loaded when they are first used, so that the command line answers without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from moonep._version import __version__

if TYPE_CHECKING:
    from moonep import errors
    from moonep.buffer import Buffer
    from moonep.plan import Plan, Received
    from moonep.policy import Balanced, Capacity, Home

__all__ = ["Balanced", "Buffer", "Capacity", "Home", "Plan", "Received", "__version__", "errors"]

_MODULE_OF_NAME = {
    "Balanced": "policy",
    "Buffer": "buffer",
    "Capacity": "policy",
    "Home": "policy",
    "Plan": "plan",
    "Received": "plan",
}


def __getattr__(name: str) -> object:
    if name in _MODULE_OF_NAME:
        return getattr(importlib.import_module(f"moonep.{_MODULE_OF_NAME[name]}"), name)
    if name == "errors":
        return importlib.import_module("moonep.errors")
    raise AttributeError(f"module 'moonep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
