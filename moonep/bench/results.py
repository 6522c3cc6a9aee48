"""Times and bytes -> the figures of a case."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from moonep.bench.config import REFERENCE, Case, Settings
from moonep.bench.floor import step_floor_secs
from moonep.bench.group import gather
from moonep.bench.inputs import Inputs
from moonep.bench.methods import AnyPlan
from moonep.bench.timing import PHASES, STEP, TRAIN_STEP, Samples
from moonep.testing import maxvio

__all__ = ["CaseResult", "Figures", "Traffic", "case_result", "median_interval", "traffic"]

_SUM_BYTES = 4  # of an element of a partial sum


@dataclass(frozen=True)
class Traffic:
    """What a step moves. Means over ranks, except for the slowest rank's rows."""

    routed_rows: float  # that a rank sends
    remote_rows: float  # those that go to another rank
    crossings: float  # (token, other rank) pairs: what crosses when each token goes to a rank once
    slowest_rows: int  # rows received by the rank that receives the most
    maxvio: float  # imbalance over experts


@dataclass(frozen=True)
class Figures:
    """One line of the table: one phase of one method."""

    method: str
    phase: str
    samples: int
    p50_secs: float
    p95_secs: float
    p50_ci95_secs: tuple[float, float]  # 95 % confidence interval of the median, by order statistics
    logical_bytes: float | None  # per rank; None: a phase that moves no rows
    wire_bytes: float | None  # None also where a peer's is not known
    floor_secs: float | None
    times_reference: float | None  # how many times faster than the reference; None: not run, or another phase
    times_reference_ci95: tuple[float, float] | None  # of a step, over rounds


@dataclass(frozen=True)
class CaseResult:
    """All figures of one case, the same on every rank."""

    case: Case
    traffic: Traffic
    copy_bytes_per_sec: float
    steps_per_block: dict[str, int]
    figures: list[Figures]


def traffic(plan: AnyPlan, inputs: Inputs, rank: int, num_experts: int) -> Traffic:
    """Counted from the plans of all ranks. Collective."""
    num_ranks = len(plan.rank_rows)
    goes_TR = torch.zeros(plan.num_tokens, num_ranks + 1, dtype=torch.bool)  # the last column takes the -1
    goes_TR.scatter_(1, plan.dst_rank % (num_ranks + 1), True)
    routes = (plan.dst_rank >= 0).sum()
    remote = routes - (plan.dst_rank == rank).sum()
    crossings = goes_TR[:, :num_ranks].sum() - goes_TR[:, rank].sum()
    mean = gather(torch.stack([routes, remote, crossings])).double().mean(0).tolist()
    imbalance = maxvio(gather(inputs.topk_idx).numpy(), num_experts)
    return Traffic(mean[0], mean[1], mean[2], int(plan.rank_rows.max()), imbalance)


def case_result(
    settings: Settings, case: Case, traffic: Traffic, copy_bytes_per_sec: float, samples: dict[str, Samples]
) -> CaseResult:
    """Every phase of every method."""
    floor_secs = step_floor_secs(traffic.slowest_rows, settings.row_bytes, copy_bytes_per_sec)
    phases = [*PHASES, STEP] + ([TRAIN_STEP] if settings.backward else [])
    peers = {peer.name for peer in settings.peers}
    figures = []
    for method in samples:
        plans = method not in peers  # a peer does it in its dispatch
        for phase in phases if plans else phases[1:]:
            moved_bytes = _moved_bytes(method, phase, settings, traffic)
            figures.append(_figures(method, phase, samples, moved_bytes, floor_secs, plans or phase != phases[1]))
    steps = {method: sample.steps_per_block for method, sample in samples.items()}
    return CaseResult(case, traffic, copy_bytes_per_sec, steps, figures)


# How many row movements out (as dispatch) and home (as combine) a phase holds. dispatch's backward is combine, and
# combine's is dispatch.
_MOVEMENTS = {"plan": (0, 0), "dispatch": (1, 0), "combine": (0, 1), STEP: (1, 1), TRAIN_STEP: (2, 2)}


def _moved_bytes(method: str, phase: str, settings: Settings, traffic: Traffic) -> tuple[float, float | None]:
    """(logical, wire) bytes of a rank; None: not known."""
    out, home = _MOVEMENTS[phase]
    logical = traffic.routed_rows * settings.row_bytes * (out + home)
    sends_rows = {REFERENCE: True} | {peer.name: peer.sends_rows for peer in settings.peers}
    if sends_rows.get(method) is False:
        return logical, None
    if method in sends_rows:  # every routed row crosses on its own, both ways
        return logical, traffic.remote_rows * settings.row_bytes * (out + home)
    sum_bytes = settings.hidden * _SUM_BYTES
    return logical, traffic.crossings * (settings.row_bytes * out + sum_bytes * home)


def _figures(
    method: str,
    phase: str,
    samples: dict[str, Samples],
    moved_bytes: tuple[float, float | None],
    floor_secs: float,
    comparable: bool,
) -> Figures:
    secs = np.array(samples[method].secs[phase])
    ratio = ratio_interval = None
    if REFERENCE in samples and comparable:
        baseline = np.array(samples[REFERENCE].secs[phase])
        ratio = float(np.median(baseline) / np.median(secs))
        if phase in (STEP, TRAIN_STEP):  # one sample a round, of neighbours in time
            ratio_interval = median_interval(baseline / secs)
    movements = sum(_MOVEMENTS[phase])
    return Figures(
        method=method,
        phase=phase,
        samples=len(secs),
        p50_secs=float(np.median(secs)),
        p95_secs=float(np.quantile(secs, 0.95)),
        p50_ci95_secs=median_interval(secs),
        logical_bytes=moved_bytes[0] if movements else None,
        wire_bytes=moved_bytes[1] if movements else None,
        floor_secs=floor_secs * movements / 2 if movements else None,
        times_reference=ratio,
        times_reference_ci95=ratio_interval,
    )


def median_interval(values: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """Order statistics around the median that hold it with at least `confidence`; for few values, the extremes.

    The number of values below the median is binomial(n, 1/2), whatever the distribution.
    """
    ordered = np.sort(values)
    n, skip, tail = len(ordered), 0, 0.0
    while 2 * skip < n:
        tail += math.exp(math.lgamma(n + 1) - math.lgamma(skip + 1) - math.lgamma(n - skip + 1) - n * math.log(2))
        if 2 * tail > 1 - confidence:
            break
        skip += 1
    skip = max(skip - 1, 0)
    return float(ordered[skip]), float(ordered[n - 1 - skip])
