"""How fast this machine copies memory, and how a time is taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from moonep.doctor.report import Copies, Machine

__all__ = ["measure_copies", "median_us"]

_SMALL_BYTES = 1 << 18  # source and destination lie in a core's own cache
_LARGE_BYTES = 1 << 28  # larger than most caches
_SMALL_TIMES, _LARGE_TIMES = 2000, 5


def measure_copies(this_machine: Machine) -> Copies:
    """Times copies, in memory like that of received rows."""
    import torch

    from moonep import _C
    from moonep.transport.memory import Memory

    available = this_machine.memory_available_bytes or 2**40
    large_bytes = max(_SMALL_BYTES, min(_LARGE_BYTES, available // 8) // 4096 * 4096)
    cores, memory = this_machine.cores_usable, Memory()
    tensors = [memory.empty((large_bytes,), torch.uint8).fill_(1) for _ in range(2)]
    target, source = (tensor.data_ptr() for tensor in tensors)

    def gb_per_s(copy: Callable[[], object], num_bytes: int, times: int) -> float:
        return num_bytes / median_us(copy, times) * 1e6 / 1e9

    return Copies(
        small_bytes=_SMALL_BYTES,
        large_bytes=large_bytes,
        cores=cores,
        small_gb_per_s=gb_per_s(lambda: _C.copy(target, source, _SMALL_BYTES, 1), _SMALL_BYTES, _SMALL_TIMES),
        large_gb_per_s=gb_per_s(lambda: _C.copy(target, source, large_bytes, 1), large_bytes, _LARGE_TIMES),
        large_all_cores_gb_per_s=gb_per_s(
            lambda: _C.copy(target, source, large_bytes, cores), large_bytes, _LARGE_TIMES
        ),
        stream_gb_per_s=gb_per_s(lambda: _C.stream_copy(target, source, large_bytes, 1), large_bytes, _LARGE_TIMES),
        stream_all_cores_gb_per_s=gb_per_s(
            lambda: _C.stream_copy(target, source, large_bytes, cores), large_bytes, _LARGE_TIMES
        ),
    )


def median_us(step: Callable[[], object], times: int) -> float:
    """The median time of `step` in microseconds."""

    def once() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    return statistics.median(once() for _ in range(times)) * 1e6
