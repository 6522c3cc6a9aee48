"""What is measured: the settings of a run, and its cases. Known before torch is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from moonep.trace import Trace

__all__ = ["DTYPE_BYTES", "METHODS", "REFERENCE", "Case", "Peer", "Settings", "default_methods"]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
REFERENCE = "reference"
METHODS = (REFERENCE, "collective", "shm", "local")


def default_methods(num_ranks: int) -> tuple[str, ...]:
    """Those that work with so many ranks on one machine."""
    return (REFERENCE, "local") if num_ranks == 1 else (REFERENCE, "collective", "shm")


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
        return self.hidden * DTYPE_BYTES[self.dtype]

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
