"""What goes wrong when ranks work together. Bad arguments are ValueError and TypeError; everything else is here."""

from __future__ import annotations

__all__ = [
    "BufferClosedError",
    "CapacityExceededError",
    "ConfigMismatchError",
    "ForeignPlanError",
    "MoonEPError",
    "PeerLostError",
    "PeerTimeoutError",
    "StaleViewError",
    "TransportError",
    "VerbMismatchError",
]


class MoonEPError(RuntimeError):
    """Base of every MoonEP error that is not a plain bad argument."""


class ConfigMismatchError(MoonEPError):
    """Ranks built a Buffer with different settings. Raised on every rank; no Buffer comes to be."""


class VerbMismatchError(MoonEPError):
    """Ranks called different verbs, or used different plans. Raised on every rank; the Buffer stays usable."""


class CapacityExceededError(MoonEPError):
    """An expert has more rows than `Capacity(overflow="error")` leaves it. Raised on every rank; nothing has moved."""


class ForeignPlanError(MoonEPError, ValueError):
    """A plan (or what was received with it) belongs to another Buffer. Raised before anything moves."""


class StaleViewError(MoonEPError, ValueError):
    """What a verb with `zero_copy` gave was overwritten by a later one. Raised before anything moves."""


class TransportError(MoonEPError):
    """The transport failed, or delivered other than was planned. The Buffer is closed."""


class PeerLostError(TransportError):
    """A peer's process ended. The Buffer is closed; a new one can be made on the survivors' group."""


class PeerTimeoutError(TransportError):
    """A peer did not arrive within `timeout_secs`. The Buffer is closed."""


class BufferClosedError(MoonEPError):
    """The Buffer was closed, by the caller or by an earlier error, which the message repeats."""
