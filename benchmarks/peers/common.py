"""What the adapters share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Generic, TypeVar

import torch

from moonep.bench.config import Case, Peer, Settings

T = TypeVar("T")


@dataclass
class PeerPlan:
    """A routing, and from dispatch on the groups of rows and what the peer's combine wants to know."""

    topk_idx: torch.Tensor  # [T, K]
    group_experts: torch.Tensor  # [G] the expert of each group
    group_sizes: torch.Tensor | None = None  # [G] its rows
    state: Any = None


class Handed(Generic[T]):
    """Calls `make(*tensors)` again only when the tensors are others than the last time.

    What a peer's own router would hand over (a dense map, logits, ...) is no part of the step that is timed.
    """

    def __init__(self, make: Callable[..., T]):
        self._make = make
        self._last: tuple[torch.Tensor, ...] = ()

    def __call__(self, *tensors: torch.Tensor) -> T:
        if len(self._last) != len(tensors) or any(a is not b for a, b in zip(self._last, tensors, strict=True)):
            self._value, self._last = self._make(*tensors), tensors
        return self._value


def local_experts(settings: Settings, rank: int) -> torch.Tensor:
    """[L]; all peers here want as many on every rank."""
    if settings.num_experts % settings.num_ranks:
        raise ValueError(f"peers need experts that divide by ranks: {settings.num_experts} / {settings.num_ranks}")
    num_local = settings.num_experts // settings.num_ranks
    return torch.arange(rank * num_local, (rank + 1) * num_local)


def find(
    name: str, package: str, make: Callable[[Settings, Case], Any], *, rtol: float, sends_rows: bool
) -> Peer | None:
    """The peer, if its package is installed."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    return Peer(name, package, version, make, rtol, sends_rows)
