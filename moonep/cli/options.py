"""Kinds of options that commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

__all__ = ["Listed"]


class Listed(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Items with commas between them, as a tuple. `expected` says what, and what that looks like."""

    def __init__(self, kind: Callable[[str], Any], name: str, expected: str, least: float | None = None):
        self._kind, self.name, self._expected, self._least = kind, name, expected, least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """The items; fails with what was expected."""
        if isinstance(value, tuple):
            return value
        try:
            items = tuple(self._kind(item.strip()) for item in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r}: expected {self._expected}", param, ctx)
        if self._least is not None:
            for item in items:
                if not float(item) >= self._least:  # also nan
                    self.fail(f"{item}: expected at least {self._least:g}", param, ctx)
        return items
