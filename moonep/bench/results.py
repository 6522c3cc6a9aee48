"""Times and bytes -> the figures of a case."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from moonep.bench.config import HOME, REFERENCE, Case, Settings, Way
from moonep.bench.floor import step_floor_secs
from moonep.bench.group import gather
from moonep.bench.inputs import Inputs
from moonep.bench.methods import AnyPlan
from moonep.bench.timing import STEP, TRAIN_STEP, Samples, phases_of
from moonep.testing import maxvio

__all__ = ["CaseResult", "Figures", "Traffic", "case_result", "median_interval", "traffic"]

_SUM_BYTES = 4  # of an element of a partial sum


@dataclass(frozen=True)
class Traffic:
    """What a step moves under a policy. Means over ranks, except for the slowest rank's rows, and sums."""

    routed_rows: float  # that a rank sends
    remote_rows: float  # those that go to another rank
    crossings: float  # (token, other rank) pairs: what crosses when each token goes to a rank once
    slowest_rows: int  # rows received by the rank that receives the most
    maxvio: float  # imbalance over experts
    rank_imbalance: float = 1.0  # rows of the rank that receives the most, over the mean
    replicas: int = 0  # on all ranks
    most_replicas: int = 0  # on one rank
    dropped_rows: int = 0  # on all ranks


@dataclass(frozen=True)
class Figures:
    """One line of the table: one phase of one method."""

    method: str
    policy: str
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
    over_home: float | None  # time over that of the same method under Home; None: not run, or this is Home
    over_home_ci95: tuple[float, float] | None  # of a step, over rounds


@dataclass(frozen=True)
class CaseResult:
    """All figures of one case, the same on every rank."""

    case: Case
    traffic: dict[str, Traffic]  # by policy
    copy_bytes_per_sec: float
    steps_per_block: dict[Way, int]
    figures: list[Figures]
    peak_bytes: dict[Way, int]  # of the rank that takes most memory for a step; empty: not measured

    @property
    def any_traffic(self) -> Traffic:
        """That of the first policy; imbalance over experts is the same under all."""
        return next(iter(self.traffic.values()))


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
    filled_R = (plan.replicas >= 0).sum(1)
    return Traffic(
        routed_rows=mean[0],
        remote_rows=mean[1],
        crossings=mean[2],
        slowest_rows=int(plan.rank_rows.max()),
        maxvio=imbalance,
        rank_imbalance=(plan.rank_rows.max() * num_ranks / plan.rank_rows.sum().clamp(min=1)).item(),
        replicas=int(filled_R.sum()),
        most_replicas=int(filled_R.max()),
        dropped_rows=int(gather(torch.tensor(plan.num_dropped)).sum()),
    )


def case_result(
    settings: Settings,
    case: Case,
    traffic: dict[str, Traffic],
    copy_bytes_per_sec: float,
    samples: dict[Way, Samples],
    peak_bytes: dict[Way, int],
) -> CaseResult:
    """Every phase of every method under every policy."""
    phases = [*phases_of(settings), STEP] + ([TRAIN_STEP] if settings.backward else [])
    peers = {peer.name for peer in settings.peers}
    figures = []
    for way in samples:
        plans = way.method not in peers  # a peer does it in its dispatch
        for phase in phases if plans else phases[1:]:
            figures.append(
                _figures(
                    settings, way, phase, samples, traffic[way.policy], copy_bytes_per_sec, plans or phase != phases[1]
                )
            )
    steps = {way: sample.steps_per_block for way, sample in samples.items()}
    return CaseResult(case, traffic, copy_bytes_per_sec, steps, figures, peak_bytes)


# How many row movements out (as dispatch) and home (as combine) a phase holds. dispatch's backward is combine, and
# combine's is dispatch.
_MOVEMENTS = {"dispatch": (1, 0), "combine": (0, 1), STEP: (1, 1), TRAIN_STEP: (2, 2)}


def _moved_bytes(method: str, phase: str, settings: Settings, traffic: Traffic) -> tuple[float, float | None]:
    """(logical, wire) bytes of a rank; None: not known."""
    out, home = _MOVEMENTS.get(phase, (0, 0))
    logical = traffic.routed_rows * settings.row_bytes * (out + home)
    sends_rows = {REFERENCE: True} | {peer.name: peer.sends_rows for peer in settings.peers}
    if sends_rows.get(method) is False:
        return logical, None
    if method in sends_rows:  # every routed row crosses on its own, both ways
        return logical, traffic.remote_rows * settings.row_bytes * (out + home)
    sum_bytes = settings.hidden * _SUM_BYTES
    return logical, traffic.crossings * (settings.row_bytes * out + sum_bytes * home)


def _figures(
    settings: Settings,
    way: Way,
    phase: str,
    samples: dict[Way, Samples],
    traffic: Traffic,
    copy_bytes_per_sec: float,
    comparable: bool,
) -> Figures:
    secs = np.array(samples[way].secs[phase])
    whole = phase in (STEP, TRAIN_STEP)  # one sample a round, of neighbours in time

    def over(other: Way) -> tuple[float | None, tuple[float, float] | None]:
        """The time of another way over this one's."""
        if other not in samples or not comparable:
            return None, None
        baseline = np.array(samples[other].secs[phase])
        return float(np.median(baseline) / np.median(secs)), median_interval(baseline / secs) if whole else None

    times_reference, times_reference_ci95 = over(Way(REFERENCE, way.policy))
    times_home, times_home_ci95 = over(Way(way.method, HOME)) if way.policy != HOME else (None, None)
    moved_bytes = _moved_bytes(way.method, phase, settings, traffic)
    movements = sum(_MOVEMENTS.get(phase, ()))
    # What memory allows for computing is not known here.
    has_floor = movements > 0 and (settings.width is None or not whole)
    floor_secs = step_floor_secs(traffic.slowest_rows, settings.row_bytes, copy_bytes_per_sec) * movements / 2
    return Figures(
        method=way.method,
        policy=way.policy,
        phase=phase,
        samples=len(secs),
        p50_secs=float(np.median(secs)),
        p95_secs=float(np.quantile(secs, 0.95)),
        p50_ci95_secs=median_interval(secs),
        logical_bytes=moved_bytes[0] if movements else None,
        wire_bytes=moved_bytes[1] if movements else None,
        floor_secs=floor_secs if has_floor else None,
        times_reference=times_reference,
        times_reference_ci95=times_reference_ci95,
        over_home=times_home and 1 / times_home,
        over_home_ci95=times_home_ci95 and (1 / times_home_ci95[1], 1 / times_home_ci95[0]),
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
