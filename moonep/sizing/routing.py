"""Routings to plan for: a recorded trace, or lognormal popularity of a given imbalance.

Both give whole steps for any number of ranks and tokens: how many routes every expert gets, and which experts single
tokens choose (which decides what a token costs on the wire). A routing has several draws: the steps of the trace, or
popularities drawn anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moonep.trace import Trace

__all__ = ["Lognormal", "Recorded", "Routing", "Tokens"]

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_MOST_ROUTES = 2**22  # of a trace, looked at one by one
_MOST_SCORES = 2**23  # tokens times experts that are drawn
_HALVINGS = 50
_MOST_SIGMA = 128.0
_LEAST_LOG_RATE = -80.0  # whose inverse is still a float32


class Tokens(NamedTuple):
    """The choices of single tokens. Where a step has too many, fewer a rank, that stand for all."""

    topk_idx: npt.NDArray[np.int32]  # [R, T', K], -1: no route
    topk_weights: npt.NDArray[np.float32] | None  # [R, T', K]; None: all alike


class Routing(ABC):
    """Where tokens go."""

    name: str
    num_experts: int
    top_k: int
    num_draws: int

    @abstractmethod
    def totals(self, draw: int, num_tokens: int) -> Counts:
        """Routes of every expert [E], for `num_tokens` tokens in all ranks together."""

    @abstractmethod
    def tokens(self, draw: int, num_ranks: int, num_tokens: int) -> Tokens:
        """Choices of the tokens, `num_tokens` or fewer on each rank, at least one."""

    def maxvio(self, draw: int, num_tokens: int) -> float:
        """Imbalance of a draw: max_e(load_e / mean) - 1."""
        totals_E = self.totals(draw, num_tokens)
        return float(totals_E.max() * len(totals_E) / max(1, totals_E.sum()) - 1) if totals_E.any() else 0.0


class Recorded(Routing):
    """A trace: ranks take consecutive tokens of a step, which starts over where it is too short."""

    def __init__(self, trace: Trace, name: str):
        self.name, self.num_experts, self.top_k = f"trace {name}", trace.num_experts, trace.top_k
        self.num_draws = trace.num_steps
        self._trace = trace

    def totals(self, draw: int, num_tokens: int) -> Counts:
        """As they are."""
        times, rest = divmod(num_tokens, self._trace.num_tokens)
        idx_TK = self._trace.topk_idx[draw]
        return times * self._count(idx_TK) + self._count(idx_TK[:rest])

    def _count(self, idx_TK: npt.NDArray[np.int32]) -> Counts:
        return np.bincount(idx_TK[idx_TK >= 0], minlength=self.num_experts).astype(np.int64)

    def tokens(self, draw: int, num_ranks: int, num_tokens: int) -> Tokens:
        """The first of each rank's."""
        seen = max(1, min(num_tokens, _MOST_ROUTES // (num_ranks * self.top_k)))
        place_RT = (np.arange(num_ranks)[:, None] * seen + np.arange(seen)) % self._trace.num_tokens
        weights = self._trace.topk_weights[draw][place_RT].astype(np.float32)
        return Tokens(self._trace.topk_idx[draw][place_RT], weights)


class Lognormal(Routing):
    """Distinct experts per token, drawn in turn with probabilities proportional to exp(sigma * a standard normal).

    As `moonep.testing.lognormal_routing`, but sigma is solved for what is expected, not for what single tokens chose:
    the mean of any number of tokens has the imbalance asked for. A token's experts are the first K of E exponential
    clocks of these rates. In the time t in which K have rung on average, expert e has with probability
    1 - exp(-t * rate_e); that is taken for its share of the tokens.

    Args:
        maxvio: max_e(load_e / mean) - 1, 0 to E / K - 1.
        effort: of the tokens that can be looked at, the share that is.
    """

    def __init__(self, num_experts: int, top_k: int, maxvio: float, *, num_draws: int = 8, effort: float = 1.0):
        bound = num_experts / top_k - 1
        if not 0 <= maxvio <= bound:
            raise ValueError(f"maxvio: expected 0 to experts / top-k - 1 = {bound:g}, got {maxvio:g}")
        self.name, self.num_experts, self.top_k, self.num_draws = f"maxvio {maxvio:g}", num_experts, top_k, num_draws
        self._most_scores = int(_MOST_SCORES * effort)
        solved = [_solve(num_experts, top_k, maxvio, seed) for seed in range(num_draws)]
        self._log_rates_DE = np.array([log_rates for log_rates, _ in solved])
        self._share_DE = np.array([share for _, share in solved])

    def totals(self, draw: int, num_tokens: int) -> Counts:
        """Expected, rounded so that none of the routes is lost."""
        ends_E = np.rint(np.cumsum(self._share_DE[draw]) * num_tokens).astype(np.int64)
        ends_E[-1] = num_tokens * self.top_k
        totals_E: Counts = np.diff(ends_E, prepend=0)
        return totals_E

    def tokens(self, draw: int, num_ranks: int, num_tokens: int) -> Tokens:
        """Drawn, always alike."""
        seen = max(1, min(num_tokens, self._most_scores // (num_ranks * self.num_experts)))
        rng = np.random.default_rng(draw)
        idx = np.empty((num_ranks * seen, self.top_k), np.int32)
        slow_E = np.exp(-self._log_rates_DE[draw]).astype(np.float32)
        block = max(1, 2**20 // self.num_experts)  # tokens whose clocks fit in the caches
        for begin in range(0, len(idx), block):
            part = idx[begin : begin + block]
            rings_TE = rng.standard_exponential((len(part), self.num_experts), dtype=np.float32) * slow_E
            part[:] = np.argpartition(rings_TE, self.top_k - 1, axis=1)[:, : self.top_k]
        return Tokens(idx.reshape(num_ranks, seen, self.top_k), None)


def _solve(num_experts: int, top_k: int, maxvio: float, seed: int) -> tuple[Floats, Floats]:
    """Log rates [E], the largest 0, and shares of the tokens [E], for a popularity drawn with `seed`."""
    normal_E = np.random.default_rng(seed).standard_normal(num_experts)
    normal_E -= normal_E.max()
    wanted = (1 + maxvio) * top_k / num_experts
    low, high = 0.0, 1.0 if maxvio else 0.0
    while _shares(high * normal_E, top_k).max() < wanted and high < _MOST_SIGMA:
        low, high = high, 2 * high
    for _ in range(_HALVINGS if maxvio else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if _shares(middle * normal_E, top_k).max() < wanted else (low, middle)
    log_rates_E = np.maximum(high * normal_E, _LEAST_LOG_RATE)
    return log_rates_E, _shares(log_rates_E, top_k)


def _shares(log_rates_E: Floats, top_k: int) -> Floats:
    """1 - exp(-t * rate) [E], with t such that the sum is K."""
    if top_k == len(log_rates_E):
        return np.ones(top_k)
    rates_E = np.exp(np.maximum(log_rates_E, _LEAST_LOG_RATE))
    low, high = -20.0, 10.0 - _LEAST_LOG_RATE  # log of t
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = -np.expm1(-np.exp(middle) * rates_E).sum() >= top_k
        low, high = (low, middle) if enough else (middle, high)
    share_E: Floats = -np.expm1(-np.exp(high) * rates_E)
    share_E *= top_k / share_E.sum()
    return share_E
