"""The floor: what a step cannot go below on this machine, whatever the method.

Every received row is written once by dispatch and read once by combine. Copying B bytes reads B and writes B, so
writing N rows and reading N rows takes the time in which the machine copies N rows: N * row_bytes / copy bandwidth,
with the copied bytes counted once. Half of that is dispatch's floor and half is combine's. N is the slowest rank's.
"""

from __future__ import annotations

import time

import torch

from moonep import _C
from moonep.bench.group import barrier, gather

__all__ = ["copy_bytes_per_sec", "step_floor_secs"]

_BUFFER_BYTES = 256 * 2**20  # source and destination together; far more than the caches hold
_REPEATS = 7


def copy_bytes_per_sec(threads: int) -> float:
    """Bytes that a rank copies in a second with streaming stores while all ranks copy. Collective.

    The median over repeats of the slowest rank.
    """
    half = _BUFFER_BYTES // 2
    memory = torch.ones(2, half, dtype=torch.uint8)  # written, so that its pages are there
    secs = []
    for _ in range(_REPEATS):
        barrier()
        began = time.perf_counter()
        _C.stream_copy(memory[0].data_ptr(), memory[1].data_ptr(), half, threads)
        secs.append(time.perf_counter() - began)
    slowest = gather(torch.tensor(secs, dtype=torch.float64)).amax(0)
    return half / slowest.median().item()


def step_floor_secs(num_rows: int, row_bytes: int, bytes_per_sec: float) -> float:
    """Plan aside, the least that dispatch and combine of `num_rows` received rows take together."""
    return num_rows * row_bytes / bytes_per_sec
