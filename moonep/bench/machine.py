"""What a figure was measured on: versions and the machine, without its name."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np
import torch

from moonep import _C, __version__

__all__ = ["machine", "versions"]


def versions() -> dict[str, str]:
    """Of everything that a figure may depend on."""
    return {
        "moonep": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def machine() -> dict[str, str | int | None]:
    """Processor, cores that this process may use, memory, system, and the row kernels in use."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
        "row_kernels": _C.row_kernels(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
