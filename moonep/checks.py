"""Argument validation. Every message names the argument, what was expected and what came; the rank is added where
the error is raised, because it is raised on every rank."""

from __future__ import annotations

import torch

from moonep.config import DTYPES, BufferConfig
from moonep.policy import Home

__all__ = [
    "check_config",
    "check_fits",
    "check_idx",
    "check_rows",
    "check_tensors",
    "check_weights",
]

TRANSPORTS = ("auto", "local", "collective", "shm")
_MAX_ROUTES = 2**31 - 1  # row numbers are 32-bit on the wire


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {value!r} ({type(value).__name__})")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
    return value


def check_config(config: BufferConfig, num_ranks: int) -> None:
    """Settings that can never work, whatever the machine."""
    for name in ("num_experts", "top_k", "hidden", "max_tokens", "expert_alignment"):
        _positive(name, getattr(config, name))
    if config.top_k > config.num_experts:
        raise ValueError(f"top_k: expected at most num_experts = {config.num_experts}, got {config.top_k}")
    if config.num_experts >= 2**30:
        raise ValueError(f"num_experts: expected less than 2**30, got {config.num_experts}")
    if config.dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(map(str, DTYPES))}, got {config.dtype}")
    if not isinstance(config.policy, Home):
        raise TypeError(f"policy: expected moonep.Home(), got {config.policy!r}")
    if config.transport not in TRANSPORTS:
        raise ValueError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {config.transport!r}")
    if config.transport == "local" and num_ranks > 1:
        raise ValueError(f"transport: 'local' is for one rank, got a group of {num_ranks}")
    if not config.timeout_secs > 0:
        raise ValueError(f"timeout_secs: expected more than 0, got {config.timeout_secs}")
    rows = num_ranks * config.max_tokens * config.top_k + config.num_experts * config.expert_alignment
    if rows > _MAX_ROUTES:
        fits = (_MAX_ROUTES - config.num_experts * config.expert_alignment) // (num_ranks * config.top_k)
        raise ValueError(
            f"max_tokens: {config.max_tokens} tokens x top_k {config.top_k} x {num_ranks} ranks make {rows} rows, more "
            f"than row numbers can hold ({_MAX_ROUTES}); at most {fits} fits"
        )


def check_fits(config: BufferConfig, num_ranks: int, ranks_here: int, available_bytes: int | None) -> None:
    """Settings that this machine's memory cannot hold, seen before anything is allocated."""
    if available_bytes is None:
        return
    staging = 2 * config.staging_bytes(num_ranks) if num_ranks > 1 else 0
    wanted = ranks_here * (staging + config.step_bytes(config.max_tokens))
    if wanted > available_bytes:
        room = available_bytes // ranks_here - staging
        fits = max(0, room // config.step_bytes(1))
        raise ValueError(
            f"max_tokens: {config.max_tokens} tokens want {wanted} bytes on this machine ({ranks_here} ranks x "
            f"(staging {staging} + rows in and out at an even load {config.step_bytes(config.max_tokens)})), but "
            f"{available_bytes} are available; "
            + (f"max_tokens={fits} fits" if fits else "not even one token fits: fewer ranks or a smaller hidden")
        )


def check_idx(topk_idx: object, config: BufferConfig) -> torch.Tensor:
    """`topk_idx` [T, K], int32 or int64, on the CPU or a GPU; its values are checked where they are read."""
    if not isinstance(topk_idx, torch.Tensor):
        raise TypeError(f"topk_idx: expected a tensor, got {type(topk_idx).__name__}")
    if topk_idx.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_idx: expected int32 or int64, got {topk_idx.dtype}")
    if topk_idx.dim() != 2 or topk_idx.shape[1] != config.top_k:
        raise ValueError(f"topk_idx: expected shape [T, {config.top_k}], got {list(topk_idx.shape)}")
    if topk_idx.shape[0] > config.max_tokens:
        raise ValueError(f"topk_idx: expected at most max_tokens = {config.max_tokens} tokens, got {topk_idx.shape[0]}")
    return topk_idx


def check_weights(name: str, weights: object, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Weights of any floating dtype, where the rows are; they are used as float32."""
    if not isinstance(weights, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(weights).__name__}")
    if not weights.dtype.is_floating_point:
        raise TypeError(f"{name}: expected a floating dtype, got {weights.dtype}")
    if tuple(weights.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(weights.shape)}")
    if weights.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, where the rows are, got {weights.device}")
    return weights


def check_rows(name: str, rows: object, num_rows: int, what: str, config: BufferConfig) -> torch.Tensor:
    """Rows [num_rows, H] in the payload dtype."""
    if not isinstance(rows, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(rows).__name__}")
    if rows.dtype != config.dtype:
        raise ValueError(f"{name}: expected the Buffer's dtype {config.dtype}, got {rows.dtype}")
    if tuple(rows.shape) != (num_rows, config.hidden):
        raise ValueError(f"{name}: expected shape [{num_rows}, {config.hidden}] ({what}), got {list(rows.shape)}")
    if rows.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: expected a tensor on cpu or cuda, got {rows.device}")
    return rows


def check_tensors(tensors: tuple[object, ...], num_local_experts: int) -> None:
    """replicate's tensors [L, ...]."""
    for place, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensors[{place}]: expected a tensor, got {type(tensor).__name__}")
        if tensor.dim() < 1 or tensor.shape[0] != num_local_experts:
            raise ValueError(
                f"tensors[{place}]: expected shape [{num_local_experts}, ...] (the experts at home here), "
                f"got {list(tensor.shape)}"
            )
