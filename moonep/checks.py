"""Argument validation. Every message names the argument, what was expected and what came; the rank is added where
the error is raised, because it is raised on every rank."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.autograd import forward_ad

from moonep.config import DTYPES, BufferConfig
from moonep.policy import OVERFLOWS, Balanced, Capacity, Home

__all__ = [
    "check_combine",
    "check_config",
    "check_dispatch",
    "check_fits",
    "check_idx",
    "check_num_tokens",
    "check_rows",
    "check_tensors",
    "check_weights",
    "dense",
    "is_time_limit",
]

COMBINE_WIRES = ("float32", "payload")
TRANSPORTS = ("auto", "local", "collective", "shm")
_MAX_ROUTES = 2**31 - 1  # row numbers are 32-bit on the wire
_SHORTEST_SECS = 0.001


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {value!r} ({type(value).__name__})")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
    return value


def is_time_limit(value: object) -> bool:
    """Whether `value` can bound a wait."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and _SHORTEST_SECS <= value < math.inf


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
    if not isinstance(config.policy, (Home, Capacity, Balanced)):
        raise TypeError(
            f"policy: expected moonep.Home(), moonep.Capacity() or moonep.Balanced(), got {config.policy!r}"
        )
    if isinstance(config.policy, Capacity):
        _check_capacity(config.policy)
    if isinstance(config.policy, Balanced):
        _check_balanced(config.policy)
    if config.transport not in TRANSPORTS:
        raise ValueError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {config.transport!r}")
    if config.transport == "local" and num_ranks > 1:
        raise ValueError(f"transport: 'local' is for one rank, got a group of {num_ranks}")
    if config.combine_wire not in COMBINE_WIRES:
        raise ValueError(f"combine_wire: expected one of {', '.join(COMBINE_WIRES)}, got {config.combine_wire!r}")
    limit: object = config.timeout_secs
    if not is_time_limit(limit):
        kind = ValueError if isinstance(limit, (int, float)) else TypeError
        raise kind(f"timeout_secs: expected at least {_SHORTEST_SECS} seconds, and an end, got {limit!r}")
    rows = num_ranks * config.max_tokens * config.top_k + config.num_experts * config.expert_alignment
    fits = (_MAX_ROUTES - config.num_experts * config.expert_alignment) // (num_ranks * config.top_k)
    if fits < 1:
        raise ValueError(
            f"expert_alignment: {config.num_experts} experts x expert_alignment {config.expert_alignment} make more "
            f"padding than row numbers can hold ({_MAX_ROUTES})"
        )
    if rows > _MAX_ROUTES:
        raise ValueError(
            f"max_tokens: {config.max_tokens} tokens x top_k {config.top_k} x {num_ranks} ranks make {rows} rows, more "
            f"than row numbers can hold ({_MAX_ROUTES}); at most {fits} fits"
        )
    if config.step_rows(num_ranks) > _MAX_ROUTES:
        raise ValueError(
            f"policy: {config.policy} makes {config.step_rows(num_ranks)} rows on a rank for max_tokens "
            f"{config.max_tokens} and {num_ranks} ranks, more than row numbers can hold ({_MAX_ROUTES})"
        )


def _check_capacity(policy: Capacity) -> None:
    factor: object = policy.factor
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise TypeError(f"policy: factor: expected a number, got {factor!r}")
    if not 0 < factor < float("inf"):
        raise ValueError(f"policy: factor: expected more than 0, got {factor!r}")
    if policy.overflow not in OVERFLOWS:
        raise ValueError(f"policy: overflow: expected one of {', '.join(OVERFLOWS)}, got {policy.overflow!r}")


def _check_balanced(policy: Balanced) -> None:
    slack: object = policy.slack
    if isinstance(slack, bool) or not isinstance(slack, (int, float)):
        raise TypeError(f"policy: slack: expected a number, got {slack!r}")
    if not 0 <= slack < float("inf"):
        raise ValueError(f"policy: slack: expected 0 or more, got {slack!r}")
    most: object = policy.max_replicas
    if most is None:
        return
    if isinstance(most, bool) or not isinstance(most, int):
        raise TypeError(f"policy: max_replicas: expected an int or None, got {most!r}")
    if most < 0:
        raise ValueError(f"policy: max_replicas: expected 0 or more, got {most}")


def check_fits(config: BufferConfig, num_ranks: int, ranks_here: int, available_bytes: int | None) -> None:
    """Settings that this machine's memory cannot hold, seen before anything is allocated."""
    wanted = ranks_here * config.rank_bytes(num_ranks)
    if available_bytes is None or wanted <= available_bytes:
        return
    fits, too_many = 0, config.max_tokens
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if ranks_here * replace(config, max_tokens=middle).rank_bytes(num_ranks) <= available_bytes:
            fits = middle
        else:
            too_many = middle
    raise ValueError(
        f"max_tokens: {config.max_tokens} tokens want {wanted} bytes on this machine ({ranks_here} ranks, each "
        f"{config.step_bytes(num_ranks)} for rows in and out (under Home at an even load) and "
        f"{config.rank_bytes(num_ranks) - config.step_bytes(num_ranks)} for staging), but {available_bytes} are "
        "available; "
        + (f"max_tokens={fits} fits" if fits else "not even one token fits: use fewer ranks or a smaller hidden")
    )


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    """A tensor that is all that it seems to be: numbers in memory, at places that its strides tell."""
    if tensor.layout != torch.strided or tensor.is_nested:
        what = "a nested one" if tensor.is_nested else f"layout {tensor.layout}"
        raise ValueError(f"{name}: expected a strided tensor, got {what}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: expected a tensor on cpu or cuda, got {tensor.device}")
    if not _has_memory(tensor):
        raise ValueError(
            f"{name}: expected a tensor with memory of its own, got a {type(tensor).__name__} without, as torch.func's "
            "transforms and FakeTensorMode make them; they cannot look into MoonEP's verbs"
        )
    if _has_tangent(tensor):
        raise ValueError(
            f"{name}: expected a tensor without a tangent, got a dual tensor; verbs have no forward-mode derivatives"
        )


def _has_tangent(tensor: torch.Tensor) -> bool:
    if forward_ad._current_level < 0:  # outside of forward_ad.dual_level(): so the usual case costs nothing
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except Exception:  # torch has several kinds of error for it, and for some tensors a warning
        return False


def check_idx(topk_idx: object, config: BufferConfig) -> torch.Tensor:
    """`topk_idx` [T, K], int32 or int64, on the CPU or a GPU; its values are checked where they are read."""
    if not isinstance(topk_idx, torch.Tensor):
        raise TypeError(f"topk_idx: expected a tensor, got {type(topk_idx).__name__}")
    if topk_idx.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_idx: expected int32 or int64, got {topk_idx.dtype}")
    _check_memory("topk_idx", topk_idx)
    if topk_idx.dim() != 2 or topk_idx.shape[1] != config.top_k:
        raise ValueError(f"topk_idx: expected shape [T, {config.top_k}], got {list(topk_idx.shape)}")
    if topk_idx.shape[0] > config.max_tokens:
        raise ValueError(f"topk_idx: expected at most max_tokens = {config.max_tokens} tokens, got {topk_idx.shape[0]}")
    return topk_idx.resolve_neg()


def check_num_tokens(per_rank: object, num_tokens: int, rank: int, num_ranks: int) -> None:
    """What the caller says of the ranks' numbers of tokens."""
    if not isinstance(per_rank, (list, tuple)) or not all(isinstance(each, int) for each in per_rank):
        raise TypeError(f"num_tokens_per_rank: expected a list of ints, got {per_rank!r}")
    if len(per_rank) != num_ranks:
        raise ValueError(f"num_tokens_per_rank: expected {num_ranks} numbers, one per rank, got {len(per_rank)}")
    if per_rank[rank] != num_tokens:
        raise ValueError(
            f"num_tokens_per_rank[{rank}]: expected the {num_tokens} tokens of topk_idx, got {per_rank[rank]}"
        )


def check_weights(name: str, weights: object, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Weights of any floating dtype, where the rows are; they are used as float32."""
    if not isinstance(weights, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(weights).__name__}")
    if not weights.dtype.is_floating_point:
        raise TypeError(f"{name}: expected a floating dtype, got {weights.dtype}")
    _check_memory(name, weights)
    if tuple(weights.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(weights.shape)}")
    if weights.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, where the rows are, got {weights.device}")
    return weights


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """As native code reads memory: without gaps, and with no negation left to the reader (torch's negative bit)."""
    return tensor.contiguous().resolve_neg()


def check_rows(name: str, rows: object, num_rows: int, what: str, config: BufferConfig) -> torch.Tensor:
    """Rows [num_rows, H] in the payload dtype."""
    if not isinstance(rows, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(rows).__name__}")
    if rows.dtype != config.dtype:
        raise ValueError(f"{name}: expected the Buffer's dtype {config.dtype}, got {rows.dtype}")
    _check_memory(name, rows)
    if tuple(rows.shape) != (num_rows, config.hidden):
        raise ValueError(f"{name}: expected shape [{num_rows}, {config.hidden}] ({what}), got {list(rows.shape)}")
    return rows


def check_dispatch(
    x: object, topk_weights: object, num_tokens: int, config: BufferConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """dispatch's rows [T, H] and weights [T, K] (None: ones), dense, the weights as float32."""
    rows = check_rows("x", x, num_tokens, "the plan's tokens x hidden", config)
    shape = (num_tokens, config.top_k)
    if topk_weights is None:
        return dense(rows), torch.ones(shape, device=rows.device)
    weights = check_weights("topk_weights", topk_weights, shape, rows.device)
    return dense(rows), dense(weights.to(torch.float32))


def check_combine(
    expert_out: object, weights: object, num_rows: int, config: BufferConfig
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """combine's rows [N, H] and weights [N] or None, likewise."""
    rows = check_rows("expert_out", expert_out, num_rows, "the plan's rows x hidden", config)
    if weights is None:
        return dense(rows), None
    row_weights = check_weights("weights", weights, (num_rows,), rows.device)
    return dense(rows), dense(row_weights.to(torch.float32))


def check_tensors(tensors: tuple[object, ...], num_local_experts: int) -> None:
    """replicate's tensors [L, ...]."""
    for place, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensors[{place}]: expected a tensor, got {type(tensor).__name__}")
        _check_memory(f"tensors[{place}]", tensor)
        if tensor.dim() < 1 or tensor.shape[0] != num_local_experts:
            raise ValueError(
                f"tensors[{place}]: expected shape [{num_local_experts}, ...] (the experts at home here), "
                f"got {list(tensor.shape)}"
            )
