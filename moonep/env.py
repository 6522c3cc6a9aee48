"""The one reader of os.environ."""

from __future__ import annotations

import os

__all__ = ["host_id", "torchrun_rank"]


def torchrun_rank() -> tuple[int, int] | None:
    """(rank, number of ranks) when torchrun, or something that sets the same variables, started this process."""
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    return (int(rank), int(size)) if rank is not None and size is not None else None


def host_id() -> str:
    """The name of this host for grouping ranks: MOONEP_HOSTID, else the kernel's boot id.

    Ranks of different names never share memory, and sums are made per host first (see docs of `Buffer.combine`).
    """
    override = os.environ.get("MOONEP_HOSTID")
    if override:
        return override
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename
