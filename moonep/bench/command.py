"""What `moonep bench` does: settings -> figures -> table, JSON lines, plot."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import nullcontext

from moonep import checks, env, machine
from moonep.bench import plot
from moonep.bench.config import Settings
from moonep.bench.methods import buffer_config
from moonep.bench.results import CaseResult
from moonep.bench.run import joined_group, run_in_group, run_in_pool
from moonep.bench.table import case_table, configuration, footnotes, json_lines, missed_maxvio

__all__ = ["bench"]


def bench(settings: Settings, json_path: str | None, plot_path: str | None) -> None:
    """Runs, and prints on stdout as results come. Under torchrun rank 0 alone prints and writes.

    Raises:
        ValueError: a case that does not fit this machine's memory.
    """
    if env.torchrun_rank() is None:
        _check_memory(settings)
        _report(settings, run_in_pool(settings), json_path, plot_path)
        return
    with joined_group() as rank:
        results = run_in_group(settings)
        if rank == 0:
            _report(settings, results, json_path, plot_path)
        else:
            for _ in results:
                pass


def _check_memory(settings: Settings) -> None:
    """What a Buffer would say, before ranks are started that would say it all at once."""
    num_ranks = settings.num_ranks
    for case, policy in itertools.product(settings.cases(), settings.policies):
        config = buffer_config(settings, case, policy)
        try:
            checks.check_config(config, num_ranks)
            checks.check_fits(config, num_ranks, num_ranks, machine.memory_available_bytes())
        except ValueError as error:
            raise ValueError(f"--tokens {case.num_tokens}, --hidden {settings.hidden}: {error}") from None


def _report(settings: Settings, results: Iterator[CaseResult], json_path: str | None, plot_path: str | None) -> None:
    with open(json_path, "w", encoding="utf-8") if json_path is not None else nullcontext() as file:
        print(configuration(settings), flush=True)
        done = []
        for result in results:
            print(f"\n{case_table(settings, result)}", flush=True)
            missed = missed_maxvio(result)
            if missed:
                print(f"warning: {missed}", file=sys.stderr, flush=True)
            done.append(result)
            if file is not None:
                file.writelines(f"{line}\n" for line in json_lines(settings, result))
    print(f"\n{footnotes(settings)}")
    if plot_path is not None:
        plot.draw(settings, done, plot_path)
