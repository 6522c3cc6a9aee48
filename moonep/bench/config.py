"""What is measured: the settings of a run, its cases, and the routing and tensors of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moonep.testing import lognormal_routing, topk_weights
from moonep.trace import Trace

__all__ = ["DTYPES", "Case", "Inputs", "Peer", "Settings", "make_inputs"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SEED = 0


@dataclass(frozen=True)
class Peer:
    """A method from outside of this package, compared with its own; `benchmarks/peers` has some.

    Its plan needs `group_experts` and `group_sizes`, after dispatch at the latest: the groups of its rows.
    """

    name: str
    package: str  # that does the work
    version: str  # of the package
    make: Callable[[Settings, Case], Any]  # gives a `methods.Method`; collective; ranks find it by its name
    rtol: float  # of y in float32, where sums in any order are nearly the reference's
    sends_rows: bool  # every routed row crosses on its own, as the reference's; False: what crosses is not counted


@dataclass(frozen=True)
class Settings:
    """A run of the benchmark. The same on every rank."""

    num_ranks: int
    tokens: tuple[int, ...]  # T of each rank, one or more to measure
    maxvio: tuple[float, ...]  # imbalances to measure; empty: replay `trace`
    trace: Trace | None
    trace_name: str
    num_experts: int
    top_k: int
    hidden: int
    dtype: str
    policy: str
    methods: tuple[str, ...]
    rounds: int  # timed blocks of every method
    threads: int  # of every rank
    backward: bool
    peers: tuple[Peer, ...] = ()

    @property
    def row_bytes(self) -> int:
        """One row in the payload dtype."""
        return self.hidden * DTYPES[self.dtype].itemsize

    def cases(self) -> Iterator[Case]:
        """Every T with every routing."""
        for maxvio in self.maxvio or (None,):
            for num_tokens in self.tokens:
                yield Case(num_tokens, maxvio)


@dataclass(frozen=True)
class Case:
    """One configuration of a run."""

    num_tokens: int  # T of each rank
    maxvio: float | None  # of a lognormal routing; None: the trace


class Inputs(NamedTuple):
    """What a rank passes to every method."""

    topk_idx: torch.Tensor  # [T, K]
    topk_weights: torch.Tensor  # [T, K] float32
    x: torch.Tensor  # [T, H]


def make_inputs(settings: Settings, case: Case, rank: int) -> Inputs:
    """The same for every method and in every run."""
    num_tokens = case.num_tokens
    if case.maxvio is None:
        assert settings.trace is not None
        idx, weights = settings.trace.slice_for(rank, settings.num_ranks, num_tokens)
        topk_idx = torch.from_numpy(idx).long()
    else:
        all_idx = lognormal_routing(
            settings.num_ranks * num_tokens, settings.num_experts, settings.top_k, case.maxvio, _SEED
        )
        topk_idx = torch.from_numpy(all_idx[rank * num_tokens : (rank + 1) * num_tokens])
        weights = topk_weights(num_tokens, settings.top_k, _SEED + rank)
    generator = torch.Generator().manual_seed(_SEED + rank)
    x = torch.randn(num_tokens, settings.hidden, generator=generator).to(DTYPES[settings.dtype])
    return Inputs(topk_idx, torch.from_numpy(weights), x)
