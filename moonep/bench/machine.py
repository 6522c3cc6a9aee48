"""What a figure was measured on: versions and the machine, without its name."""

from __future__ import annotations

import platform

import numpy as np
import torch

from moonep import _C, __version__
from moonep.machine import cores_allowed, cpu_model, memory_total_bytes

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
        "cpu": cpu_model(),
        "cores": cores_allowed(),
        "memory_bytes": memory_total_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
        "row_kernels": _C.row_kernels(),
    }
