"""Runs the cases on ranks: those that torchrun started, or its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from moonep.bench.config import REFERENCE, Case, Settings
from moonep.bench.floor import copy_bytes_per_sec
from moonep.bench.inputs import make_inputs
from moonep.bench.methods import make_method
from moonep.bench.results import CaseResult, case_result, traffic
from moonep.bench.timing import time_methods
from moonep.bench.verify import verify, verify_peers
from moonep.testing import RankPool

__all__ = ["joined_group", "measure_case", "run_in_group", "run_in_pool"]

_CASE_TIMEOUT_SECS = 3600.0


class _Progress:
    """Lines on stderr, of rank 0; on a terminal each replaces the one before."""

    def __init__(self, rank: int, case: Case):
        self._silent = rank != 0
        self._begin, self._end = ("\r\x1b[K", "") if sys.stderr.isatty() else ("", "\n")
        self._case = f"T {case.num_tokens}" + (f", maxvio {case.maxvio:g}" if case.maxvio is not None else "")

    def __call__(self, text: str) -> None:
        if not self._silent:
            print(f"{self._begin}{self._case}: {text}", end=self._end, file=sys.stderr, flush=True)

    def done(self) -> None:
        """Clears the line."""
        if not self._silent:
            print(self._begin, end="", file=sys.stderr, flush=True)


def measure_case(rank: int, settings: Settings, case: Case) -> CaseResult:
    """Checks, then times. Collective over the default group; the same result on every rank."""
    progress = _Progress(rank, case)
    with contextlib.ExitStack() as stack:
        methods = {}
        for name in (*settings.methods, *(peer.name for peer in settings.peers)):
            methods[name] = make_method(name, settings, case)
            stack.callback(methods[name].close)
        progress("making inputs")  # after the Buffers, which refuse what does not fit the machine
        inputs = make_inputs(settings, case, rank)
        progress("checking results against the reference")
        baseline = methods.get(REFERENCE) or make_method(REFERENCE, settings, case)
        ours = {name: methods[name] for name in settings.methods}
        verify({REFERENCE: baseline, **ours}, inputs, settings.backward)
        verify_peers({peer: methods[peer.name] for peer in settings.peers}, baseline, inputs)
        moved = traffic(baseline.plan(inputs.topk_idx), inputs, rank, settings.num_experts)
        progress("measuring copy bandwidth")
        bytes_per_sec = copy_bytes_per_sec(settings.threads)
        samples = time_methods(methods, inputs, settings.rounds, settings.backward, progress)
        progress.done()
        return case_result(settings, case, moved, bytes_per_sec, samples)


def run_in_pool(settings: Settings) -> Iterator[CaseResult]:
    """Every case on ranks started here."""
    with RankPool(settings.num_ranks, threads=settings.threads) as pool:
        for case in settings.cases():
            yield pool.run(measure_case, settings, case, timeout_secs=_CASE_TIMEOUT_SECS)[0]


def run_in_group(settings: Settings) -> Iterator[CaseResult]:
    """Every case on the ranks of the default group, of which this process is one."""
    torch.set_num_threads(settings.threads)
    for case in settings.cases():
        yield measure_case(dist.get_rank(), settings, case)


@contextlib.contextmanager
def joined_group() -> Iterator[int]:
    """Joins the group that torchrun describes, and leaves it; gives this process's rank."""
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
