"""What every transport does, and the header that opens every verb.

The header is the one place where ranks agree: each rank says what it is about to do, or what is wrong with its
arguments, and every rank reads all of it and comes to the same conclusion. An error on one rank is so raised on all,
and nobody is left waiting.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moonep.errors import ForeignPlanError, MoonEPError, StaleViewError, VerbMismatchError
from moonep.plan import Plan
from moonep.transport.memory import Memory

__all__ = [
    "HEADER_BYTES",
    "VERBS",
    "Agreed",
    "Agreement",
    "Call",
    "Collected",
    "Parcel",
    "Spread",
    "Transport",
    "agree",
]

HEADER_BYTES = 512
VERBS = (
    "plan",
    "dispatch",
    "combine",
    "replicate",
    "dispatch's backward",
    "combine's backward",
    "replicate's backward",
)

# Buffer number, sequence number, plan id, verb, flags, status, digest | tokens, length of the text | text
_MUST_MATCH = struct.Struct("<qqqHHII")
_OWN = struct.Struct("<qI")
_MAX_TEXT = HEADER_BYTES - _MUST_MATCH.size - _OWN.size
_NEEDS_GRAD, _WITHOUT_GRAPH, _RANKED, _ZERO_COPY, _LENT = 1, 2, 4, 8, 16
# What an argument error may be; the status is its place here, 0 for none.
_PROBLEMS: tuple[type[Exception], ...] = (ForeignPlanError, StaleViewError, ValueError, TypeError, MoonEPError)


@dataclass
class Call:
    """One rank's part in a verb, as its header tells the others."""

    verb: str
    num_tokens: int = 0
    plan_id: int = -1
    needs_grad: bool = False  # an input of this rank requires a gradient
    ranked: bool = False  # weights come along, by which routes are dropped
    without_graph: bool = False  # this rank cannot take part in a backward: inference mode, or compiled without
    zero_copy: bool = False  # results may be transport memory
    lent: bool = False  # the rows that come along are transport memory
    digest: int = 0  # of shapes and dtypes that must be the same on all ranks, 32 bits
    problem: Exception | None = None  # what is wrong with this rank's arguments
    buffer_number: int = 0  # tells the Buffers of a group apart
    sequence: int = 0

    def pack(self) -> bytes:
        """The header, at most HEADER_BYTES."""
        flags = (
            _NEEDS_GRAD * self.needs_grad
            | _WITHOUT_GRAPH * self.without_graph
            | _RANKED * self.ranked
            | _ZERO_COPY * self.zero_copy
            | _LENT * self.lent
        )
        status, text = 0, b""
        if self.problem is not None:
            status = next((i for i, kind in enumerate(_PROBLEMS, 1) if isinstance(self.problem, kind)), len(_PROBLEMS))
            kind = "" if isinstance(self.problem, _PROBLEMS) else f"{type(self.problem).__name__}: "
            text = (kind + str(self.problem)).encode()[:_MAX_TEXT]
        fixed = _MUST_MATCH.pack(
            self.buffer_number, self.sequence, self.plan_id, VERBS.index(self.verb), flags, status, self.digest
        )
        return fixed + _OWN.pack(self.num_tokens, len(text)) + text


class Agreement(NamedTuple):
    """What all ranks know after the headers."""

    num_tokens_of_rank: tuple[int, ...]
    needs_grad: bool  # of any rank: then every rank's output gets an edge
    lent: bool = False  # the rows of all ranks are transport memory


class Agreed(Exception):
    """Carries an error that every rank raises: the Buffer stays usable."""

    def __init__(self, error: Exception):
        self.error = error


def agree(headers: Sequence[bytes], names: Sequence[str]) -> Agreement:
    """The same conclusion on every rank: an Agreement, or Agreed with the error to raise.

    `names` say who each rank is in messages.
    """
    size = _MUST_MATCH.size
    tokens = tuple(_OWN.unpack_from(header, size)[0] for header in headers)
    first = headers[0][:size]
    fixed = _MUST_MATCH.unpack(first)
    if fixed[5] == 0 and all(header[:size] == first for header in headers):
        return Agreement(tokens, bool(fixed[4] & _NEEDS_GRAD), bool(fixed[4] & _LENT))

    all_fixed = [_MUST_MATCH.unpack_from(header) for header in headers]
    for rank, (_, _, _, verb, _, status, _) in enumerate(all_fixed):
        if status:
            length = _OWN.unpack_from(headers[rank], size)[1]
            text = headers[rank][size + _OWN.size :][:length].decode(errors="replace")
            raise Agreed(_PROBLEMS[status - 1](f"{VERBS[verb]}: {names[rank]}: {text}"))
    if len({fixed[0] for fixed in all_fixed}) > 1:
        raise Agreed(VerbMismatchError("ranks used different Buffers in the same place; use them in the same order"))
    if len({fixed[3] for fixed in all_fixed}) > 1:
        called = ", ".join(f"{name} called {VERBS[fixed[3]]}" for name, fixed in zip(names, all_fixed, strict=True))
        raise Agreed(VerbMismatchError(f"ranks called different verbs: {called}"))
    for place, what in ((2, "plans"), (1, "sequence numbers")):
        if len({fixed[place] for fixed in all_fixed}) > 1:
            used = ", ".join(f"{name} {fixed[place]}" for name, fixed in zip(names, all_fixed, strict=True))
            raise Agreed(VerbMismatchError(f"{VERBS[all_fixed[0][3]]}: ranks used different {what}: {used}"))
    if len({fixed[6] for fixed in all_fixed}) > 1:
        differing = [name for name, fixed in zip(names, all_fixed, strict=True) if fixed[6] != all_fixed[0][6]]
        raise Agreed(
            ValueError(
                f"{VERBS[all_fixed[0][3]]}: tensors: expected the same number, shapes (beyond the first dimension), "
                f"dtypes and requires_grad on all ranks; those of {', '.join(differing)} differ from {names[0]}"
            )
        )
    for flag, what in ((_RANKED, "topk_weights: expected from"), (_ZERO_COPY, "zero_copy: expected on")):
        if len({fixed[4] & flag for fixed in all_fixed}) > 1:
            given = [name for name, fixed in zip(names, all_fixed, strict=True) if fixed[4] & flag]
            raise Agreed(
                ValueError(f"{VERBS[all_fixed[0][3]]}: {what} all ranks or none, got it from {', '.join(given)} only")
            )
    needing = [name for name, fixed in zip(names, all_fixed, strict=True) if fixed[4] & _NEEDS_GRAD]
    unable = [name for name, fixed in zip(names, all_fixed, strict=True) if fixed[4] & _WITHOUT_GRAPH]
    if needing and unable:
        raise Agreed(
            ValueError(
                f"{VERBS[all_fixed[0][3]]}: {', '.join(needing)} needs gradients, but {', '.join(unable)} is in "
                "inference mode, or passed tensors made in it, or was compiled without gradients, and could not take "
                "part in the backward; use torch.no_grad() there, outside of torch.compile"
            )
        )
    return Agreement(tokens, bool(needing), all(fixed[4] & _LENT for fixed in all_fixed))


class Spread(NamedTuple):
    """Rows brought to this rank."""

    rows: torch.Tensor  # [N, H]
    scalars: torch.Tensor | None  # [N] float32: routing weights, or dots
    agreement: Agreement


class Collected(NamedTuple):
    """Sums brought home."""

    sums: torch.Tensor  # [T, H]
    scalars: torch.Tensor | None  # [T, K] float32
    agreement: Agreement


class Parcel(NamedTuple):
    """Bytes that go from one rank to others, in pieces. All ranks list all parcels, in the same order."""

    source: int
    destinations: tuple[int, ...]
    num_bytes: int
    # Where the pieces are (at the source) or are to be (at a destination), contiguous, on the CPU; elsewhere unused.
    pieces: Sequence[torch.Tensor]


class Transport(ABC):
    """Carries rows between ranks. Every method but `close` is collective and opens with the header.

    Tensors come checked, dense, and with float32 weights and scalars.
    """

    name: str
    memory: Memory  # what it hands out is in it

    @abstractmethod
    def agree(self, call: Call) -> Agreement:
        """The header alone: all that a verb does when this rank's arguments are wrong (it raises Agreed everywhere)."""

    @abstractmethod
    def plan(self, call: Call, topk_idx: torch.Tensor, weights: torch.Tensor | None) -> Plan:
        """The Plan for the routing of all ranks. Ids out of range become the call's problem.

        `weights` [T, K] rank the routes of an expert that has too many; None: later ones are dropped first, or the
        policy drops none. All ranks give them or none does.
        """

    @abstractmethod
    def spread(self, call: Call, plan: Plan, x: torch.Tensor, route_weights: torch.Tensor) -> Spread:
        """dispatch: rows [N, H] of `x` [T, H], and the routes' weights [T, K] as scalars [N].

        With call.zero_copy, rows may be memory that the next such call overwrites.
        """

    @abstractmethod
    def spread_scaled(
        self, call: Call, plan: Plan, x: torch.Tensor, row_weights: torch.Tensor | None, other: torch.Tensor | None
    ) -> Spread:
        """combine's backward: each row times its weight [N] (None: 1); scalars: <other [N, H], unscaled row>."""

    @abstractmethod
    def collect(
        self,
        call: Call,
        plan: Plan,
        rows: torch.Tensor,
        row_weights: torch.Tensor | None,
        row_scalars: torch.Tensor | None,
    ) -> Collected:
        """combine and dispatch's backward: weighted sums [T, H] of rows [N, H]; scalars [N] go home to [T, K]."""

    @abstractmethod
    def exchange(self, call: Call, parcels: Sequence[Parcel]) -> Agreement:
        """Carries parcels; no rank sends one to itself."""

    def is_stale(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` was handed out by a verb with zero_copy and has been overwritten."""
        return False

    def cancel(self) -> None:  # noqa: B027 (most have nothing to end)
        """Ends waits early, here and at the peers, where that can be done. Local; memory stays for a verb at work."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back. Local, never waits, may be called again."""
