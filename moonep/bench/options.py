"""What the options of `moonep bench` mean: the checks that need neither torch nor ranks, and the settings."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from moonep import env
from moonep.bench.config import METHODS, Settings, default_methods, parse_policy
from moonep.trace import BUILTIN_TRACES, Trace, load_trace

__all__ = ["check_files", "make_settings"]

_NUM_EXPERTS, _TOP_K, _MAXVIO = 896, 16, 1.0  # where there is no trace to say
_PLOT_SUFFIXES = (".png", ".svg")


def make_settings(
    *,
    ranks: int | None,
    tokens: tuple[int, ...],
    maxvio: tuple[float, ...],
    experts: int | None,
    topk: int | None,
    hidden: int,
    dtype: str,
    policy: tuple[str, ...],
    transport: tuple[str, ...],
    iterations: int,
    threads: int,
    backward: bool,
    trace: str | None,
    experts_compute: bool = False,
    width: int = 64,
    hot_together: bool = False,
) -> Settings:
    """The settings that the command line's options mean.

    Raises:
        ValueError: options that contradict each other, or a file that is not a trace.
        OSError: a trace that cannot be read.
    """
    started = env.torchrun_rank()
    if started is not None and ranks not in (None, started[1]):
        raise ValueError(f"--ranks: {ranks}, but torchrun started {started[1]}")
    num_ranks = started[1] if started is not None else ranks
    methods = transport or default_methods(num_ranks or 2, with_reference=not experts_compute)
    for text in policy:
        parse_policy(text)
    for name in methods:
        if name not in METHODS:
            raise ValueError(f"--transport: expected some of {', '.join(METHODS)}, got {name!r}")
        if name == "local" and num_ranks != 1:
            raise ValueError("--transport: local is for one rank")
    if trace is not None and maxvio:
        raise ValueError("--trace and --maxvio: routing comes from one or the other")

    recorded, name = _recorded(trace, maxvio, experts, topk)
    if hot_together and recorded is not None:
        raise ValueError("--hot-together: a trace is replayed as it was recorded; use --maxvio")
    num_experts = experts or (recorded.num_experts if recorded is not None else _NUM_EXPERTS)
    top_k = topk or (recorded.top_k if recorded is not None else _TOP_K)
    if top_k > num_experts:
        raise ValueError(f"--topk: expected at most the {num_experts} experts, got {top_k}")
    for value in maxvio:
        if not 0 <= value <= num_experts / top_k - 1:
            raise ValueError(f"--maxvio: expected 0 to experts / top-k - 1 = {num_experts / top_k - 1:g}, got {value}")
    return Settings(
        num_ranks=num_ranks or _default_ranks(),
        tokens=tokens,
        maxvio=() if recorded is not None else maxvio or (_MAXVIO,),
        trace=recorded,
        trace_name=name,
        num_experts=num_experts,
        top_k=top_k,
        hidden=hidden,
        dtype=dtype,
        policies=tuple(dict.fromkeys(policy)),
        methods=tuple(dict.fromkeys(methods)),
        rounds=iterations,
        threads=threads,
        backward=backward,
        hot_together=hot_together,
        width=width if experts_compute else None,
    )


def _recorded(
    trace: str | None, maxvio: tuple[float, ...], experts: int | None, topk: int | None
) -> tuple[Trace | None, str]:
    """The trace to replay, if any, and what to call it: the one asked for, or the built-in one where it fits."""
    if trace is None and maxvio:
        return None, ""
    name = trace or BUILTIN_TRACES[0]
    recorded = load_trace(name)
    if (experts or recorded.num_experts, topk or recorded.top_k) == (recorded.num_experts, recorded.top_k):
        return recorded, Path(name).stem
    if trace is None:
        return None, ""
    raise ValueError(
        f"--trace: {name} has {recorded.num_experts} experts and top-{recorded.top_k}; leave --experts and --topk out"
    )


def _default_ranks() -> int:
    """As many as there are GPUs, and at least 2."""
    import torch  # last of all, because it is slow to load

    return max(2, torch.cuda.device_count())


def check_files(json_path: str | None, plot_path: str | None) -> None:
    """Raises ValueError when one of these files cannot be written, or no picture drawn. Now, not after minutes."""
    started = env.torchrun_rank()
    if started is not None and started[0] != 0:
        return  # rank 0 alone writes
    if json_path is not None:
        _check_file("--json", json_path)
    if plot_path is not None:
        if Path(plot_path).suffix.lower() not in _PLOT_SUFFIXES:
            raise ValueError(f"--plot: expected a file named *.png or *.svg, got {plot_path}")
        _check_file("--plot", plot_path)
        try:
            importlib.import_module("matplotlib")
        except ImportError:
            raise ValueError("--plot needs matplotlib: pip install 'moonep[plot]'") from None


def _check_file(option: str, path: str) -> None:
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{option}: {path}: expected a file, got a directory")
    if not file.parent.is_dir():
        raise ValueError(f"{option}: {path}: there is no directory {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"{option}: {path}: it cannot be written")
