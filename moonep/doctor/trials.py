"""The transports, really tried: a small exchange between two ranks, whose result is checked."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from moonep.doctor.copies import median_us
from moonep.doctor.look import one_line
from moonep.doctor.report import Auto, Gpus, Software, Transports, Trial

if TYPE_CHECKING:
    from moonep.testing import RankPool

__all__ = ["TRIAL_SHAPE", "meeting", "round_trip", "try_ranks", "try_transports"]

_TOKENS, _HIDDEN, _TOP_K, _EXPERTS = 64, 1024, 4, 16
TRIAL_SHAPE = f"{_TOKENS} tokens of {_HIDDEN} bfloat16, top {_TOP_K} of {_EXPERTS}"
_STEPS, _MEETINGS = 30, 2000
_TRIAL_SECS = 5.0  # how long a rank waits for the other


def try_transports(software: Software, gpus: Gpus, ranks: bool) -> Transports:
    """Tries every transport that could work; with `ranks`, also those that need two processes."""
    broken = software.torch_error or software.extension_error
    if broken:
        no = Trial(False, f"MoonEP cannot be loaded: {broken}")
        return Transports(no, no, no, no, no, Auto(None, no.reason), None, None)
    cuda = Trial(False, "MoonEP has no CUDA kernels yet: rows of a GPU are staged through host memory")
    local, _ = _try(lambda: [round_trip(0, "local")])
    shm = gloo = not_tried = Trial(None, "not tried: no ranks were started")
    auto, ranks_error, meeting_us = Auto(None, not_tried.reason), None, None
    if ranks:
        from moonep.testing import RankPool

        try:
            with RankPool(2) as pool:
                shm, gloo, auto, meeting_us = try_ranks(pool)
        except Exception as error:
            ranks_error = _reason(error)
            shm = gloo = Trial(False, "two ranks do not start")
            auto = Auto(None, shm.reason)
    nccl = _try_nccl(software, gpus, ranks)
    return Transports(local, shm, gloo, nccl, cuda, auto, ranks_error, meeting_us)


def try_ranks(pool: RankPool) -> tuple[Trial, Trial, Auto, float | None]:
    """Between the two ranks of `pool`: shm, collective over gloo, what "auto" takes, and a meeting's time in us."""
    gloo, _ = _try(lambda: pool.run(round_trip, "collective", timeout_secs=2 * _TRIAL_SECS))
    shm, _ = _try(lambda: pool.run(round_trip, "shm", timeout_secs=2 * _TRIAL_SECS))
    taken, used = _try(lambda: pool.run(round_trip, "auto", timeout_secs=2 * _TRIAL_SECS))
    if used is None:
        auto = Auto(None, taken.reason)
    elif used == "shm":
        auto = Auto(used, "both ranks can map each other's memory")
    else:
        auto = Auto(used, f"shm is not usable: {shm.reason}")
    meeting_us = None
    if shm.usable:
        try:
            meeting_us = max(pool.run(meeting, timeout_secs=2 * _TRIAL_SECS))
        except Exception as error:
            shm = Trial(False, _reason(error))
    return shm, gloo, auto, meeting_us


def _try_nccl(software: Software, gpus: Gpus, ranks: bool) -> Trial:
    if "nccl" not in software.backends:
        return Trial(False, "this torch has no NCCL")
    if len(gpus.devices) < 2:
        return Trial(False, f"NCCL wants a GPU for every rank, and torch can use {len(gpus.devices)} here")
    if not ranks:
        return Trial(None, "not tried: no ranks were started")
    from moonep.testing import run_ranks

    trial, _ = _try(lambda: run_ranks(round_trip, 2, "collective", backend="nccl", timeout_secs=4 * _TRIAL_SECS))
    return trial


def _try(run: Callable[[], Sequence[tuple[str, float]]]) -> tuple[Trial, str | None]:
    """Calls `run` for every rank's `round_trip`; the trial, and which transport it used."""
    try:
        outcomes = run()
    except Exception as error:  # whatever it is, it is what a user would meet
        return Trial(False, _reason(error)), None
    return Trial(True, round_trip_us=max(time_us for _, time_us in outcomes)), outcomes[0][0]


def _reason(error: Exception) -> str:
    """What the first rank that failed said, or the error itself; of a refused transport, only why."""
    outcomes = getattr(error, "outcomes", [])  # of a RankFailure
    said = next((str(outcome.error) for outcome in outcomes if outcome.error is not None), one_line(error))
    refused = re.search(r"cannot be used: (.+); 'auto'", said)
    return refused[1] if refused else said


def round_trip(rank: int, transport: str) -> tuple[str, float]:
    """On one of the ranks: the transport used, and the median time in us of a small dispatch and combine.

    Raises:
        RuntimeError: the result was wrong.
    """
    import torch

    from moonep.buffer import Buffer

    # Whole numbers this small are exact in bfloat16, also summed.
    x = torch.arange(rank, rank + _TOKENS * _HIDDEN).remainder(8).view(_TOKENS, -1).bfloat16()
    topk_idx = torch.arange(_TOKENS * _TOP_K).remainder(_EXPERTS).view(_TOKENS, -1)
    with Buffer(
        num_experts=_EXPERTS,
        top_k=_TOP_K,
        hidden=_HIDDEN,
        max_tokens=_TOKENS,
        transport=transport,
        timeout_secs=_TRIAL_SECS,
    ) as ep:
        plan = ep.plan(topk_idx)

        def step() -> torch.Tensor:
            return ep.combine(ep.dispatch(x, plan).x, plan)

        time_us = median_us(step, _STEPS)
        if not torch.equal(step(), _TOP_K * x):
            raise RuntimeError("dispatch and combine gave a wrong result")
        return ep.transport, time_us


def meeting(rank: int) -> float:
    """On one of two ranks: the median time in us of a bare meeting in shared memory."""
    import torch.distributed as dist

    from moonep import _C

    shared = _C.SharedGroup(rank, 2, 4096)
    try:
        records: list[Any] = [None, None]
        dist.all_gather_object(records, (os.getpid(), shared.segment_fd, shared.nonce))
        refused = shared.connect(1 - rank, *records[1 - rank])
        dist.barrier()
        if refused:
            raise RuntimeError(refused)

        def meet() -> None:
            shared.announce()
            kind, _, _ = shared.wait(_TRIAL_SECS)
            if kind != 0:
                raise RuntimeError("the other rank did not come")

        return median_us(meet, _MEETINGS)
    finally:
        shared.close()
