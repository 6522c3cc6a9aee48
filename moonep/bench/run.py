"""Runs the cases on ranks: those that torchrun started, or its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from moonep.bench.config import REFERENCE, Case, Settings, Way
from moonep.bench.floor import copy_bytes_per_sec
from moonep.bench.group import gather
from moonep.bench.inputs import Inputs, make_inputs, make_weights
from moonep.bench.memory import peak_bytes
from moonep.bench.methods import Method, make_method
from moonep.bench.results import CaseResult, Traffic, case_result, traffic
from moonep.bench.timing import run_step, time_methods
from moonep.bench.verify import verify, verify_experts, verify_peers
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
    weights = [] if settings.width is None else make_weights(settings, rank)
    peers = {peer: Way(peer.name, settings.policies[0]) for peer in settings.peers}
    with contextlib.ExitStack() as stack:
        methods: dict[Way, Method] = {}
        for way in (*settings.ways, *peers.values()):
            methods[way] = make_method(way.method, settings, case, way.policy, weights)
            stack.callback(methods[way].close)
        progress("making inputs")  # after the Buffers, which refuse what does not fit the machine
        inputs = make_inputs(settings, case, rank)
        progress("checking results against the reference")
        moved: dict[str, Traffic] = {}
        for policy in settings.policies:
            baseline = methods.get(Way(REFERENCE, policy)) or make_method(REFERENCE, settings, case, policy, weights)
            ours = {REFERENCE: baseline} | {name: methods[Way(name, policy)] for name in settings.methods}
            verify(ours, inputs, settings.backward)
            if settings.width is not None:
                verify_experts(ours, inputs, settings.backward)
            verify_peers({peer: methods[way] for peer, way in peers.items()}, baseline, inputs)
            moved[policy] = traffic(baseline.plan(inputs.topk_idx), inputs, rank, settings.num_experts)
        peaks: dict[Way, int] = {}
        if settings.width is not None:
            progress("measuring memory")
            peaks = {way: peak for way in settings.ways if (peak := _peak_bytes(way, settings, case, inputs, weights))}
        progress("measuring copy bandwidth")
        bytes_per_sec = copy_bytes_per_sec(settings.threads)
        samples = time_methods(methods, inputs, settings, progress)
        progress.done()
        return case_result(settings, case, moved, bytes_per_sec, samples, peaks)


def _peak_bytes(
    way: Way, settings: Settings, case: Case, inputs: Inputs, weights: Sequence[torch.nn.Parameter]
) -> int | None:
    """Memory of a step of a method that is made for it, on the rank that takes most; None: not known. Collective."""

    def run() -> None:
        method = make_method(way.method, settings, case, way.policy, weights)
        try:
            for _ in range(2):
                run_step(method, inputs, settings.width is not None, settings.backward)
        finally:
            method.close()

    peak = peak_bytes(run)
    peak_R = gather(torch.tensor(-1 if peak is None else peak))
    return None if peak_R.min() < 0 else int(peak_R.max())


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
