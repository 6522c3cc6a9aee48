"""The routing and the tensors of a case.

Experts are popular whatever their ids, and the same ones on all ranks: each rank has its part of one routing. So hot
experts lie where chance puts them, not evenly over their homes; or, if asked for, all on the first ranks, which is the
worst for a rank that such a routing can have.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from moonep.bench.config import DTYPE_BYTES, Case, Settings
from moonep.plan import first_expert
from moonep.testing import lognormal_routing, topk_weights

__all__ = ["DTYPES", "Inputs", "make_inputs", "make_weights"]

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
_SEED = 0


class Inputs(NamedTuple):
    """What a rank passes to every method."""

    topk_idx: torch.Tensor  # [T, K]
    topk_weights: torch.Tensor  # [T, K] float32
    x: torch.Tensor  # [T, H]


def make_inputs(settings: Settings, case: Case, rank: int) -> Inputs:
    """The same for every method and in every run."""
    num_tokens = case.num_tokens
    if case.maxvio is None:
        assert settings.trace is not None
        idx, weights = settings.trace.slice_for(rank, settings.num_ranks, num_tokens)
        topk_idx = torch.from_numpy(idx).long()
    else:
        all_idx = lognormal_routing(
            settings.num_ranks * num_tokens, settings.num_experts, settings.top_k, case.maxvio, _SEED
        )
        if settings.hot_together:
            loads = np.bincount(all_idx.ravel(), minlength=settings.num_experts)
            all_idx = np.argsort(np.argsort(-loads, kind="stable"), kind="stable")[all_idx]
        topk_idx = torch.from_numpy(all_idx[rank * num_tokens : (rank + 1) * num_tokens])
        weights = topk_weights(num_tokens, settings.top_k, _SEED + rank)
    generator = torch.Generator().manual_seed(_SEED + rank)
    x = torch.randn(num_tokens, settings.hidden, generator=generator).to(DTYPES[settings.dtype])
    return Inputs(topk_idx, torch.from_numpy(weights), x)


def make_weights(settings: Settings, rank: int) -> list[torch.nn.Parameter]:
    """Those of the experts at home on this rank, for all that is timed: [L, H, 2F] and [L, F, H]; see nn.Experts."""
    assert settings.width is not None
    first, end = (first_expert(r, settings.num_experts, settings.num_ranks) for r in (rank, rank + 1))
    generator = torch.Generator().manual_seed(_SEED + rank)
    weights = []
    for wide, out in ((settings.hidden, 2 * settings.width), (settings.width, settings.hidden)):
        drawn = torch.randn(end - first, wide, out, generator=generator) / math.sqrt(wide)
        weights.append(torch.nn.Parameter(drawn.to(DTYPES[settings.dtype])))
    return weights
