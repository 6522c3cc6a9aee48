"""Policies: where rows may go."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Home", "Policy"]


@dataclass(frozen=True)
class Home:
    """Each row goes to its expert's home rank. Nothing is dropped; the rows received depend on the routing."""


Policy = Home
