"""The least time of a step, phase by phase: bytes and products over the rates of the hardware.

Rates are the hardware's most, nothing waits for anything it could do at once within a phase, and starting things takes
no time. So real times are longer, those of few tokens much longer; what can be compared are policies.

- A phase ends when the last rank has sent and received all of its bytes, inside its host and across hosts at once.
- dispatch also writes every received row and reads every token once in memory, combine reads rows and writes tokens.
- Experts multiply every row, under Capacity the unused ones too, and read the weights of every group that they hold.
- In training, dispatch and combine each run twice (one's backward is the other), replicas' gradients go home, and
  experts multiply three times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moonep.policy import Balanced, Capacity, Home, Policy
from moonep.sizing import wire
from moonep.sizing.hardware import Hardware
from moonep.sizing.loads import Load, home_of_expert, load
from moonep.sizing.routing import Lognormal, Routing, Tokens
from moonep.sizing.setting import Setting

__all__ = ["SLACKS", "Phases", "Step", "Steps", "break_even_maxvio"]

SLACKS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_COUNT_BYTES = 4  # of an expert's count, or of a route, as planning exchanges them
_MOST_TOKENS = 2**20


@dataclass(frozen=True)
class Phases:
    """Seconds of each phase of a step of one layer."""

    plan_secs: float
    dispatch_secs: float
    replicate_secs: float
    experts_secs: float
    combine_secs: float

    @property
    def total_secs(self) -> float:
        """One phase after the other."""
        return self.plan_secs + self.dispatch_secs + self.replicate_secs + self.experts_secs + self.combine_secs


class Step:
    """A policy's step on given routing, whose time is told for any number of tokens.

    What crosses is counted once, for `tokens`, and taken in proportion; so are the rows of `found`, the load of all
    tokens of the setting, whose replicas are those of any number of tokens.
    """

    def __init__(self, setting: Setting, tokens: Tokens, found: Load, hardware: Hardware, across_bytes_per_sec: float):
        self.setting, self._hardware, self._across = setting, hardware, across_bytes_per_sec
        hosts, experts, ranks = setting.host_of_rank, setting.num_experts, setting.num_ranks
        self.crossings = wire.count(tokens, setting.policy, experts, hosts, setting.expert_alignment, found)
        # Where some tokens stand for all, what reaches a rank is off by chance; but its rows are known.
        counted_R = self.crossings.routes.sum(0)
        chance_R = found.rank_rows * self.crossings.tokens_per_rank / np.maximum(counted_R * setting.max_tokens, 1)
        # Pieces of the busiest rank and direction, inside and across.
        self._rows = _busiest(self.crossings.per_rank * chance_R, hosts)
        self._routes = _busiest(self.crossings.routes * chance_R, hosts)
        self._replicas = _busiest(_replicas_between(setting, found), hosts)
        groups_R = np.bincount(home_of_expert(experts, ranks), minlength=ranks)
        rows_R = found.num_rows if isinstance(setting.policy, Capacity) else found.rank_rows
        self._multiplied = float(rows_R.max() / setting.max_tokens)  # for each token of a rank
        self._received = float(found.rank_rows.max() / setting.max_tokens)
        self._groups = int((groups_R + (found.replica_experts >= 0).sum(axis=1)).max())

    def phases(self, num_tokens: int) -> Phases:
        """For so many tokens on every rank."""
        setting, hardware = self.setting, self._hardware
        scale = num_tokens / self.crossings.tokens_per_rank
        times = 2 if setting.training else 1
        # Counts of all ranks come to each, then a word for each route.
        rest = setting.num_ranks - setting.ranks_per_host
        inside_counts = min(setting.num_ranks, setting.ranks_per_host) - 1
        counts_secs = max(inside_counts / hardware.inside_bytes_per_sec, max(0, rest) / self._across)
        plan_secs = counts_secs * setting.num_experts * _COUNT_BYTES + self._secs(self._routes, _COUNT_BYTES * scale)
        memory = hardware.memory_bytes_per_sec
        memory_secs = (self._received + 1) * num_tokens * setting.row_bytes / memory
        out_secs = max(self._secs(self._rows, setting.row_bytes * scale), memory_secs)
        home_secs = max(self._secs(self._rows, setting.sum_bytes * scale), memory_secs)

        experts_secs = self._groups * setting.expert_bytes / memory
        if hardware.flops_per_sec is not None:
            experts_secs = max(
                experts_secs, self._multiplied * num_tokens * setting.model.row_flops / hardware.flops_per_sec
            )
        return Phases(
            plan_secs=plan_secs,
            dispatch_secs=out_secs * times,
            replicate_secs=self._secs(self._replicas, setting.expert_bytes) * times,
            experts_secs=experts_secs * (3 if setting.training else 1),
            combine_secs=home_secs * times,
        )

    def _secs(self, pieces: tuple[float, float], piece_bytes: float) -> float:
        inside, across = pieces
        return max(inside / self._hardware.inside_bytes_per_sec, across / self._across) * piece_bytes


def _busiest(pairs_RR: wire.Pairs, host_of_rank: Sequence[int]) -> tuple[float, float]:
    """The most pieces that a rank sends or receives inside its host, and across hosts."""
    links = wire.split(pairs_RR, host_of_rank)
    inside = max(links.inside_sent.max(), links.inside_received.max())
    return float(inside), float(max(links.across_sent.max(), links.across_received.max()))


def _replicas_between(setting: Setting, found: Load) -> wire.Counts:
    """Experts copied from each home to each rank [R, R]. Every replica crosses on its own."""
    experts_RS = found.replica_experts
    pairs_RR = np.zeros((setting.num_ranks, setting.num_ranks), np.int64)
    rank, slot = np.nonzero(experts_RS >= 0)
    homes = home_of_expert(setting.num_experts, setting.num_ranks)[experts_RS[rank, slot]]
    np.add.at(pairs_RR, (homes, rank), 1)
    return pairs_RR


class Steps:
    """Steps of a routing's last draw under any policy, each counted once."""

    def __init__(self, setting: Setting, routing: Routing, hardware: Hardware, across_bytes_per_sec: float):
        draw, self._setting = routing.num_draws - 1, setting
        self.tokens = routing.tokens(draw, setting.num_ranks, setting.max_tokens)
        self._totals_E = routing.totals(draw, setting.num_ranks * setting.max_tokens)
        self._hardware, self._across = hardware, across_bytes_per_sec
        self._steps: dict[Policy, Step] = {}

    def step(self, policy: Policy) -> Step:
        """The step under `policy`."""
        if policy not in self._steps:
            setting = self._setting.with_policy(policy)
            found = load(self._totals_E, setting.num_ranks, policy, setting.num_routes, setting.expert_alignment)
            self._steps[policy] = Step(setting, self.tokens, found, self._hardware, self._across)
        return self._steps[policy]

    def secs(self, policy: Policy, num_tokens: int | None = None) -> float:
        """Of a whole step, for so many tokens on every rank; None: those of the setting."""
        return self.step(policy).phases(num_tokens or self._setting.max_tokens).total_secs

    def break_even_tokens(self, policy: Balanced) -> int | None:
        """From how many tokens of a rank on `policy` is faster than Home; None: not up to 2**20."""

        def pays(num_tokens: int) -> bool:
            return self.secs(policy, num_tokens) < self.secs(Home(), num_tokens)

        return _first(pays, _MOST_TOKENS) if pays(_MOST_TOKENS) else None

    def best_slack(self, max_replicas: int | None = None) -> float:
        """The slack of SLACKS with the shortest step; of equals the largest."""
        return min(reversed(SLACKS), key=lambda slack: self.secs(Balanced(slack, max_replicas)))


def break_even_maxvio(
    setting: Setting, hardware: Hardware, across_bytes_per_sec: float, policy: Balanced, values: int = 12
) -> float | None:
    """From which imbalance of lognormal routing on `policy` is faster than Home with the tokens of `setting`.

    None: at none. So many values are tried, each 1.5 times the one before, up to the most that routing can have.
    """
    bound = setting.num_experts / setting.top_k - 1
    for value in range(values):
        maxvio = bound * 1.5 ** (value + 1 - values)
        routing = Lognormal(setting.num_experts, setting.top_k, maxvio, num_draws=1, effort=0.2)
        steps = Steps(setting, routing, hardware, across_bytes_per_sec)
        if steps.secs(policy) < steps.secs(Home()):
            return float(maxvio)
    return None


def _first(holds: Callable[[int], bool], limit: int) -> int:
    """The smallest number from 1 to `limit` from which it holds, where it holds from there on."""
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
