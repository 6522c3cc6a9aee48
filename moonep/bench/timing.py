"""Times, the methods in turn, in blocks of many steps.

Ranks leave a barrier at slightly different times; a block is long against that, and lasts as long as its slowest rank.
Taking the methods in turn lets whatever else the machine does fall on all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch

from moonep.bench.config import Settings, Way
from moonep.bench.group import barrier, gather
from moonep.bench.inputs import Inputs
from moonep.bench.methods import ExpertsMethod, Method

__all__ = ["EXPERTS_PHASES", "PHASES", "STEP", "TRAIN_STEP", "Samples", "phases_of", "run_step", "time_methods"]

PHASES = ("plan", "dispatch", "combine")
EXPERTS_PHASES = ("plan", "dispatch", "replicate", "experts", "combine")
STEP = "step"
TRAIN_STEP = "fwd+bwd"

_BLOCK_SECS = 0.3
_BLOCK_STEPS = (2, 500)  # at least, at most
_PILOT_STEPS = 3


@dataclass
class Samples:
    """The times of one method, in seconds, each the slowest rank's."""

    steps_per_block: int = 0
    secs: dict[str, list[float]] = field(default_factory=dict)  # phases: of every step; steps: mean of every block

    def add(self, phase: str, secs: list[float]) -> None:
        """More samples of one phase."""
        self.secs.setdefault(phase, []).extend(secs)


def phases_of(settings: Settings) -> tuple[str, ...]:
    """The parts of a step."""
    return PHASES if settings.width is None else EXPERTS_PHASES


def time_methods(
    methods: dict[Way, Method], inputs: Inputs, settings: Settings, progress: Callable[[str], None]
) -> dict[Way, Samples]:
    """Runs `settings.rounds` rounds of one block per method and policy, in an order that turns. Collective."""
    compute = settings.width is not None
    samples = {way: Samples(_steps_per_block(method, inputs, compute)) for way, method in methods.items()}
    ways = list(methods)
    for i in range(settings.rounds):
        progress(f"round {i + 1} of {settings.rounds}")
        first = i % len(ways)
        for way in ways[first:] + ways[:first]:
            steps = samples[way].steps_per_block
            step_secs, phase_secs = _forward_block(methods[way], inputs, steps, compute)
            samples[way].add(STEP, [step_secs])
            for phase, secs in zip(phases_of(settings), phase_secs, strict=True):
                samples[way].add(phase, secs)
            if settings.backward:
                train_steps = max(_BLOCK_STEPS[0], steps // 2)
                samples[way].add(TRAIN_STEP, [_train_block(methods[way], inputs, train_steps, compute)])
    return samples


def run_step(method: Method, inputs: Inputs, compute: bool, backward: bool) -> None:
    """One step, as it is timed."""
    if backward:
        _train_block(method, inputs, 1, compute)
    else:
        _forward_block(method, inputs, 1, compute)


def _steps_per_block(method: Method, inputs: Inputs, compute: bool) -> int:
    """The same on every rank."""
    slowest_step = min(_forward_block(method, inputs, 1, compute)[0] for _ in range(_PILOT_STEPS))
    least, most = _BLOCK_STEPS
    return min(most, max(least, math.ceil(_BLOCK_SECS / slowest_step)))


@torch.no_grad()
def _forward_block(method: Method, inputs: Inputs, steps: int, compute: bool) -> tuple[float, list[list[float]]]:
    """Seconds per step, and the seconds of every step's phases [phase][step]; of the slowest rank each."""
    num_phases = len(EXPERTS_PHASES if compute else PHASES)
    secs = torch.empty(steps, num_phases, dtype=torch.float64)
    clock = time.perf_counter
    barrier()
    began = clock()
    for i in range(steps):
        t0 = clock()
        plan = method.plan(inputs.topk_idx)
        t1 = clock()
        recv = method.dispatch(inputs.x, plan, inputs.topk_weights)
        t2 = clock()
        rows, replicate_secs = recv.x, 0.0
        if compute:
            rows = cast(ExpertsMethod, method).experts(rows, plan)
            replicate_secs = cast(ExpertsMethod, method).replicate_secs
        t3 = clock()
        y = method.combine(rows, plan, recv.weights)
        t4 = clock()
        computing = (replicate_secs, t3 - t2 - replicate_secs) if compute else ()
        secs[i] = torch.tensor((t1 - t0, t2 - t1, *computing, t4 - t3), dtype=torch.float64)
        del plan, recv, rows, y  # a layer would have no more use for them either
    step_secs = (clock() - began) / steps
    slowest = gather(torch.cat([torch.tensor([step_secs], dtype=torch.float64), secs.T.flatten()])).amax(0)
    return slowest[0].item(), slowest[1:].view(num_phases, steps).tolist()


def _train_block(method: Method, inputs: Inputs, steps: int, compute: bool) -> float:
    """Seconds per step, forward and backward, of the slowest rank."""
    x = inputs.x.clone().requires_grad_()
    topk_weights = inputs.topk_weights.clone().requires_grad_()
    leaves = [x, topk_weights, *(cast(ExpertsMethod, method).weights if compute else ())]
    barrier()
    began = time.perf_counter()
    for _ in range(steps):
        plan = method.plan(inputs.topk_idx)
        recv = method.dispatch(x, plan, topk_weights)
        rows = cast(ExpertsMethod, method).experts(recv.x, plan) if compute else recv.x
        y = method.combine(rows, plan, recv.weights)
        torch.autograd.backward(y, inputs.x)
        del plan, recv, rows, y
        for leaf in leaves:
            leaf.grad = None
    secs = torch.tensor([(time.perf_counter() - began) / steps], dtype=torch.float64)
    return gather(secs).max().item()
