"""How much memory a step takes: what it makes resident, at its peak.

The kernel keeps the peak of a process's resident memory (VmHWM in /proc/self/status), and starts it anew when a 5 is
written to /proc/self/clear_refs. That sees everything: rows, copies of weights, what autograd keeps, the transport's
own memory, and of shared memory what this rank has touched.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

__all__ = ["peak_bytes"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(run: Callable[[], None]) -> int | None:
    """By how much `run` raises this process's resident memory at most; None where the kernel does not tell."""
    gc.collect()
    try:
        # Memory that malloc keeps would be used again unseen.
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR.write_text("5")
        before = _status_bytes("VmRSS")
        run()
        return max(0, _status_bytes("VmHWM") - before)
    except (OSError, AttributeError, TypeError):  # no /proc, another libc
        return None


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{_STATUS} has no {name}")
    return int(found[1]) * 1024
