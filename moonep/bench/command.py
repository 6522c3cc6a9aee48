"""What `moonep bench` does: options -> settings -> figures -> table, JSON lines, plot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch

from moonep import env
from moonep.bench import plot
from moonep.bench.config import Settings
from moonep.bench.methods import METHODS, default_methods
from moonep.bench.results import CaseResult
from moonep.bench.run import joined_group, run_in_group, run_in_pool
from moonep.bench.table import FOOTNOTE, case_table, configuration, json_lines
from moonep.trace import BUILTIN_TRACES, Trace, load_trace

__all__ = ["bench", "make_settings"]

_NUM_EXPERTS, _TOP_K, _MAXVIO = 896, 16, 1.0  # where there is no trace to say


def make_settings(
    *,
    ranks: int | None,
    tokens: tuple[int, ...],
    maxvio: tuple[float, ...],
    experts: int | None,
    topk: int | None,
    hidden: int,
    dtype: str,
    policy: str,
    transport: tuple[str, ...],
    iterations: int,
    threads: int,
    backward: bool,
    trace: str | None,
) -> Settings:
    """The settings that the command line's options mean.

    Raises:
        ValueError: options that contradict each other, or a file that is not a trace.
        OSError: a trace that cannot be read.
    """
    started = env.torchrun_rank()
    if started is not None and ranks not in (None, started[1]):
        raise ValueError(f"--ranks: {ranks}, but torchrun started {started[1]}")
    num_ranks = started[1] if started is not None else ranks or max(2, torch.cuda.device_count())
    methods = transport or default_methods(num_ranks)
    for name in methods:
        if name not in METHODS:
            raise ValueError(f"--transport: expected some of {', '.join(METHODS)}, got {name!r}")
        if name == "local" and num_ranks > 1:
            raise ValueError("--transport: local is for one rank")
    if trace is not None and maxvio:
        raise ValueError("--trace and --maxvio: routing comes from one or the other")

    recorded, name = _recorded(trace, maxvio, experts, topk)
    num_experts = experts or (recorded.num_experts if recorded is not None else _NUM_EXPERTS)
    top_k = topk or (recorded.top_k if recorded is not None else _TOP_K)
    if top_k > num_experts:
        raise ValueError(f"--topk: expected at most the {num_experts} experts, got {top_k}")
    for value in maxvio:
        if not 0 <= value <= num_experts / top_k - 1:
            raise ValueError(f"--maxvio: expected 0 to experts / top-k - 1 = {num_experts / top_k - 1:g}, got {value}")
    return Settings(
        num_ranks=num_ranks,
        tokens=tokens,
        maxvio=() if recorded is not None else maxvio or (_MAXVIO,),
        trace=recorded,
        trace_name=name,
        num_experts=num_experts,
        top_k=top_k,
        hidden=hidden,
        dtype=dtype,
        policy=policy,
        methods=tuple(dict.fromkeys(methods)),
        rounds=iterations,
        threads=threads,
        backward=backward,
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


def bench(settings: Settings, json_path: str | None, plot_path: str | None) -> None:
    """Runs, and prints on stdout as results come. Under torchrun rank 0 alone prints and writes."""
    if env.torchrun_rank() is None:
        _report(settings, run_in_pool(settings), json_path, plot_path)
        return
    with joined_group() as rank:
        results = run_in_group(settings)
        if rank == 0:
            _report(settings, results, json_path, plot_path)
        else:
            for _ in results:
                pass


def _report(settings: Settings, results: Iterator[CaseResult], json_path: str | None, plot_path: str | None) -> None:
    if plot_path is not None:
        plot.check(plot_path)  # now, rather than after minutes
    with open(json_path, "w", encoding="utf-8") if json_path is not None else nullcontext() as file:
        print(configuration(settings), flush=True)
        done = []
        for result in results:
            print(f"\n{case_table(settings, result)}", flush=True)
            done.append(result)
            if file is not None:
                file.writelines(f"{line}\n" for line in json_lines(settings, result))
    print(f"\n{FOOTNOTE}")
    if plot_path is not None:
        plot.draw(settings, done, plot_path)
