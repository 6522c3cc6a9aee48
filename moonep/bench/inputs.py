"""The routing and the tensors of a case."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moonep.bench.config import DTYPE_BYTES, Case, Settings
from moonep.testing import lognormal_routing, topk_weights

__all__ = ["DTYPES", "Inputs", "make_inputs"]

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
        topk_idx = torch.from_numpy(all_idx[rank * num_tokens : (rank + 1) * num_tokens])
        weights = topk_weights(num_tokens, settings.top_k, _SEED + rank)
    generator = torch.Generator().manual_seed(_SEED + rank)
    x = torch.randn(num_tokens, settings.hidden, generator=generator).to(DTYPES[settings.dtype])
    return Inputs(topk_idx, torch.from_numpy(weights), x)
