"""Who waits where: so that a collective that runs out of time can name the ranks that never came.

A rank that waits long writes down, in the store that the process group was made with, which exchange it waits in, and
takes that back when the wait ends well; whoever has not written is missing. The store is reached through a private name
of torch, and may itself be lost: then nobody is named, and that is all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["WaitingList"]

_STORE_SECS = 1.0  # a store whose host has stopped does not answer; nothing here waits longer for it


class WaitingList:
    """One rank's entries in the store of its group."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, num_ranks: int):
        self._group, self._rank, self._num_ranks = group, rank, num_ranks

    def enter(self, exchange: str) -> None:
        """This rank waits in `exchange`."""
        self._bounded(lambda store: store.set(self._key(self._rank, exchange), ""))

    def leave(self, exchange: str) -> None:
        """It does not any more."""
        self._bounded(lambda store: store.delete_key(self._key(self._rank, exchange)))

    def absent(self, exchange: str) -> list[int]:
        """The ranks that do not wait in `exchange`; empty when that cannot be told."""

        def look(store: Any) -> list[int]:
            others = (rank for rank in range(self._num_ranks) if rank != self._rank)
            return [rank for rank in others if not store.check([self._key(rank, exchange)])]

        found: list[int] | None = self._bounded(look)
        return found or []

    @staticmethod
    def _key(rank: int, exchange: str) -> str:
        return f"moonep/waiting/{exchange}/{rank}"

    def _bounded(self, use: Callable[[Any], Any]) -> Any:
        """What `use` gives for the store; None when there is none, or it fails or does not answer."""
        results: list[Any] = []

        def run() -> None:
            try:
                store = dist.distributed_c10d._get_process_group_store(self._group)  # type: ignore[arg-type]
                results.append(use(store))
            except (AttributeError, KeyError, NotImplementedError, RuntimeError, ValueError):
                results.append(None)

        thread = threading.Thread(target=run, name="moonep-store", daemon=True)
        thread.start()
        thread.join(_STORE_SECS)
        return results[0] if results else None
