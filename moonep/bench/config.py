"""What is measured: the settings of a run, and its cases. Known before torch is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from moonep.policy import Balanced, Capacity, Home, Policy
from moonep.trace import Trace

__all__ = [
    "DTYPE_BYTES",
    "HOME",
    "METHODS",
    "REFERENCE",
    "Case",
    "Peer",
    "Settings",
    "Way",
    "default_methods",
    "parse_policy",
]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
REFERENCE = "reference"
METHODS = (REFERENCE, "collective", "shm", "local")
HOME = "home"  # the policy that others are compared with


def default_methods(num_ranks: int, *, with_reference: bool = True) -> tuple[str, ...]:
    """Those that work with so many ranks on one machine."""
    return (REFERENCE,) * with_reference + (("local",) if num_ranks == 1 else ("collective", "shm"))


class Way(NamedTuple):
    """What is timed: a method under a policy."""

    method: str
    policy: str


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
    policies: tuple[str, ...]  # as `parse_policy` reads them
    methods: tuple[str, ...]
    rounds: int  # timed blocks of every method
    threads: int  # of every rank
    backward: bool
    hot_together: bool = False  # popular experts have neighbouring homes; else they lie where chance puts them
    width: int | None = None  # of the experts that a step computes; None: it only carries rows
    peers: tuple[Peer, ...] = ()

    @property
    def row_bytes(self) -> int:
        """One row in the payload dtype."""
        return self.hidden * DTYPE_BYTES[self.dtype]

    @property
    def expert_bytes(self) -> int:
        """The weights of one expert: what a replica brings."""
        return 3 * self.row_bytes * (self.width or 0)

    @property
    def ways(self) -> list[Way]:
        """All that is timed in turn, but for peers."""
        return [Way(method, policy) for policy in self.policies for method in self.methods]

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


def parse_policy(text: str) -> Policy:
    """home, capacity:FACTOR or balanced[:SLACK[:MAX_REPLICAS]], as moonep.Home, Capacity and Balanced.

    Raises:
        ValueError: anything else.
    """
    kind, *numbers = text.split(":")
    try:
        if kind == "home" and not numbers:
            return Home()
        if kind == "capacity" and len(numbers) == 1 and 0 < float(numbers[0]) < math.inf:
            return Capacity(float(numbers[0]))
        if kind == "balanced" and not numbers:
            return Balanced()
        if kind == "balanced" and len(numbers) <= 2 and 0 <= float(numbers[0]) < math.inf:
            most = [int(number) for number in numbers[1:]]
            if min(most, default=0) >= 0:
                return Balanced(float(numbers[0]), *most)
    except ValueError:
        pass
    raise ValueError(
        f"--policy: expected home, capacity:FACTOR or balanced:SLACK:MAX_REPLICAS (both may be left out), got {text!r}"
    )
