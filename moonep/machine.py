"""What this machine has: read from the kernel, never guessed."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["memory_available_bytes", "pid_namespace"]


def memory_available_bytes() -> int | None:
    """Bytes of memory that this process can still use: the machine's, or less where its control group says so.

    None where the kernel does not tell (not Linux).
    """
    found = [_meminfo_available(), *_cgroup_room()]
    known = [room for room in found if room is not None]
    return min(known) if known else None


def pid_namespace() -> int:
    """A number that two processes share when process ids mean the same to both; 0 where the kernel does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_room() -> list[int | None]:
    """What the control groups of this process (version 2, then 1) leave it, from its own up to the root's."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            rooms += _rooms_up(Path("/sys/fs/cgroup"), path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            rooms += _rooms_up(Path("/sys/fs/cgroup/memory"), path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return rooms


def _rooms_up(root: Path, path: str, limit_name: str, used_name: str) -> list[int | None]:
    group = root / path.lstrip("/")
    rooms: list[int | None] = []
    for place in [group, *group.parents]:
        if root != place and root not in place.parents:
            break
        try:
            limit, used = (place / limit_name).read_text().strip(), (place / used_name).read_text().strip()
        except OSError:
            continue  # the root group has no limit file, and containers hide the upper ones
        if limit != "max":
            rooms.append(max(0, int(limit) - int(used)))
    return rooms
