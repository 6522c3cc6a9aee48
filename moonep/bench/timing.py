"""Times, the methods in turn, in blocks of many steps.

Ranks leave a barrier at slightly different times; a block is long against that, and lasts as long as its slowest rank.
Taking the methods in turn lets whatever else the machine does fall on all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from moonep.bench.group import barrier, gather
from moonep.bench.inputs import Inputs
from moonep.bench.methods import Method

__all__ = ["PHASES", "STEP", "TRAIN_STEP", "Samples", "time_methods"]

PHASES = ("plan", "dispatch", "combine")
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


def time_methods(
    methods: dict[str, Method], inputs: Inputs, rounds: int, backward: bool, progress: Callable[[str], None]
) -> dict[str, Samples]:
    """Runs `rounds` rounds of one block per method, in an order that turns. Collective."""
    samples = {name: Samples(_steps_per_block(method, inputs)) for name, method in methods.items()}
    names = list(methods)
    for i in range(rounds):
        progress(f"round {i + 1} of {rounds}")
        first = i % len(names)
        for name in names[first:] + names[:first]:
            steps = samples[name].steps_per_block
            step_secs, phase_secs = _forward_block(methods[name], inputs, steps)
            samples[name].add(STEP, [step_secs])
            for phase, secs in zip(PHASES, phase_secs, strict=True):
                samples[name].add(phase, secs)
            if backward:
                train_steps = max(_BLOCK_STEPS[0], steps // 2)
                samples[name].add(TRAIN_STEP, [_train_block(methods[name], inputs, train_steps)])
    return samples


def _steps_per_block(method: Method, inputs: Inputs) -> int:
    """The same on every rank."""
    slowest_step = min(_forward_block(method, inputs, 1)[0] for _ in range(_PILOT_STEPS))
    least, most = _BLOCK_STEPS
    return min(most, max(least, math.ceil(_BLOCK_SECS / slowest_step)))


@torch.no_grad()
def _forward_block(method: Method, inputs: Inputs, steps: int) -> tuple[float, list[list[float]]]:
    """Seconds per step, and the seconds of every step's phases [phase][step]; of the slowest rank each."""
    marks = torch.empty(steps, 1 + len(PHASES), dtype=torch.float64)
    clock = time.perf_counter
    barrier()
    began = clock()
    for i in range(steps):
        t0 = clock()
        plan = method.plan(inputs.topk_idx)
        t1 = clock()
        recv = method.dispatch(inputs.x, plan, inputs.topk_weights)
        t2 = clock()
        y = method.combine(recv.x, plan, recv.weights)
        t3 = clock()
        marks[i] = torch.tensor((t0, t1, t2, t3), dtype=torch.float64)
        del plan, recv, y  # a layer would have no more use for them either
    step_secs = (clock() - began) / steps
    times = torch.cat([torch.tensor([step_secs], dtype=torch.float64), marks.diff(dim=1).T.flatten()])
    slowest = gather(times).amax(0)
    return slowest[0].item(), slowest[1:].view(len(PHASES), steps).tolist()


def _train_block(method: Method, inputs: Inputs, steps: int) -> float:
    """Seconds per step, forward and backward, of the slowest rank."""
    x = inputs.x.clone().requires_grad_()
    topk_weights = inputs.topk_weights.clone().requires_grad_()
    barrier()
    began = time.perf_counter()
    for _ in range(steps):
        plan = method.plan(inputs.topk_idx)
        recv = method.dispatch(x, plan, topk_weights)
        y = method.combine(recv.x, plan, recv.weights)
        torch.autograd.backward(y, inputs.x)
        del plan, recv, y
        x.grad = topk_weights.grad = None
    secs = torch.tensor([(time.perf_counter() - began) / steps], dtype=torch.float64)
    return gather(secs).max().item()
