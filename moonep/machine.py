"""What this machine has: read from the kernel, never guessed."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "cores_allowed",
    "cores_quota",
    "cpu_model",
    "dev_shm_bytes",
    "has_proc",
    "huge_pages",
    "memory_available_bytes",
    "memory_limit_bytes",
    "memory_total_bytes",
    "numa_nodes",
    "nvidia_driver",
    "pid_namespace",
]

_CGROUPS = Path("/sys/fs/cgroup")


# ---- processor ----


def cpu_model() -> str:
    """The processor's name, or its architecture where the kernel tells no name."""
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo") or "", re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def cores_allowed() -> int:
    """Cores that this process may be scheduled on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_quota() -> float | None:
    """How many cores' time its control groups give this process; None: no limit."""
    quotas = []
    for place in _cgroups_up("cpu"):
        version_2 = _read(place / "cpu.max") or ""
        version_1 = f"{_read(place / 'cpu.cfs_quota_us') or ''} {_read(place / 'cpu.cfs_period_us') or ''}"
        for told in (version_2, version_1):
            if found := re.fullmatch(r"\s*(\d+)\s+(\d+)\s*", told):
                quotas.append(int(found[1]) / int(found[2]))
    return min(quotas, default=None)


def numa_nodes() -> int:
    """Memory nodes; 1 where the kernel does not tell."""
    return max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))


# ---- memory ----


def memory_available_bytes() -> int | None:
    """Bytes of memory that this process can still use: the machine's, or less where its control group says so.

    None where the kernel does not tell (not Linux).
    """
    found = [_meminfo_bytes("MemAvailable"), *(max(0, limit - used) for limit, used in _memory_limits())]
    return min((room for room in found if room is not None), default=None)


def memory_total_bytes() -> int | None:
    """Bytes of the machine's memory. None where the kernel does not tell (not Linux)."""
    return _meminfo_bytes("MemTotal")


def memory_limit_bytes() -> int | None:
    """The least limit of its control groups, in bytes; None where they allow the whole machine."""
    limit = min((limit for limit, _ in _memory_limits()), default=None)
    total = memory_total_bytes()
    return None if limit is None or (total is not None and limit >= total) else limit


def huge_pages() -> str | None:
    """When memory comes in huge pages: "always", "madvise" (for those who ask, as MoonEP does) or "never"."""
    found = re.search(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    return found[1] if found else None


def dev_shm_bytes() -> int | None:
    """The size of /dev/shm; None where there is none."""
    try:
        told = os.statvfs("/dev/shm")
    except OSError:
        return None
    return told.f_blocks * told.f_frsize


# ---- what the kernel offers ----


def has_proc() -> bool:
    """/proc shows this process its open files: ranks find each other's memory there."""
    return Path("/proc/self/fd").is_dir()


def nvidia_driver() -> str | None:
    """The version of the NVIDIA driver in the kernel; None: there is none."""
    told = _read("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d[\d.]*", told or "")
    return found[0] if found else told


def pid_namespace() -> int:
    """A number that two processes share when process ids mean the same to both; 0 where the kernel does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def _meminfo_bytes(name: str) -> int | None:
    found = re.search(rf"^{name}:\s*(\d+) kB$", _read("/proc/meminfo") or "", re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _memory_limits() -> Iterator[tuple[int, int]]:
    """(limit, used) of every control group that limits this process's memory."""
    for place in _cgroups_up("memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = (_read(place / limit_name) or "").strip(), (_read(place / used_name) or "").strip()
            if (
                limit.isdigit() and used.isdigit()
            ):  # not "max"; the root has no such file, containers hide the upper ones
                yield int(limit), int(used)


def _cgroups_up(controller: str) -> Iterator[Path]:
    """The control groups of this process (version 2, or 1 for `controller`), from its own up to the root's."""
    for line in (_read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = _CGROUPS
        elif controller in controllers.split(","):
            root = _CGROUPS / controller
        else:
            continue
        group = root / path.lstrip("/")
        yield from (place for place in [group, *group.parents] if root == place or root in place.parents)
