"""`moonep doctor`: the report as a table of 80 columns, or as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap

import click

from moonep.doctor import examine
from moonep.doctor.report import Auto, Copies, Gpus, Machine, Problem, Section, Software, Transports, Trial
from moonep.doctor.trials import TRIAL_SHAPE

__all__ = ["doctor"]

_WIDTH, _LABEL_WIDTH = 80, 20

Line = tuple[str, str]  # label, text


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; its keys name their units.")
@click.option("--ranks/--no-ranks", default=True, help="Start two processes and try the transports between them.")
def doctor(as_json: bool, ranks: bool) -> None:
    """Look at this machine: what MoonEP finds here, how fast it is, and what is in the way.

    Takes some seconds. The exit code is 0 when a transport works, and 1 when none does. The keys of --json are the
    fields of moonep.doctor.report.Report.
    """
    if as_json:
        report = examine(ranks=ranks)
        click.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        report = examine(ranks=ranks, seen=lambda section: click.echo(_table(*_section(section))))
        click.echo(_problems(report.problems))
    sys.exit(0 if report.usable else 1)


def _table(title: str, lines: list[Line]) -> str:
    """The title, and every line's text beside its label, broken at the page's width."""
    rows = [title]
    for label, text in lines:
        head = f"  {label:<{_LABEL_WIDTH - 3}} "
        rows += textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * _LABEL_WIDTH)
    return "\n".join(rows) + "\n"


def _section(section: Section) -> tuple[str, list[Line]]:
    if isinstance(section, Machine):
        return "Machine", _machine(section)
    if isinstance(section, Software):
        return "Software", _software(section)
    if isinstance(section, Gpus):
        return "GPUs", _gpus(section)
    if isinstance(section, Copies):
        return "Copies (GB/s: 1e9 bytes of payload, counted once)", _copies(section)
    return f"Transports (round trip: {TRIAL_SHAPE})", _transports(section)


def _machine(machine: Machine) -> list[Line]:
    quota = "no limit" if machine.cores_quota is None else f"a limit of {machine.cores_quota:g}"
    load = "" if machine.load is None else f"; load {machine.load:.1f}"
    limit = "no limit" if machine.memory_limit_bytes is None else f"a limit of {_gb(machine.memory_limit_bytes)}"
    nodes = "; bind every rank to one (numactl)" if machine.numa_nodes > 1 else ""
    return [
        ("processor", f"{machine.cpu}, {machine.architecture}"),
        (
            "cores",
            f"{machine.cores_usable} usable: {machine.cores} in the machine, {machine.cores_allowed} allowed, {quota} "
            f"by control groups{load}",
        ),
        (
            "memory",
            f"{_gb(machine.memory_available_bytes)} available of {_gb(machine.memory_total_bytes)}, {limit} by control "
            "groups",
        ),
        ("NUMA nodes", f"{machine.numa_nodes}{nodes}"),
        ("huge pages", machine.huge_pages or "unknown"),
        ("/dev/shm", f"{_gb(machine.dev_shm_bytes)} (the shm transport does not use it)"),
        ("/proc", "shows open files" if machine.has_proc else "hidden"),
        ("kernel", machine.kernel),
        ("host id", machine.host_id),
    ]


def _software(software: Software) -> list[Line]:
    cuda = f"for CUDA {software.torch_cuda}" if software.torch_cuda else "without CUDA"
    torch = f"{software.torch} {cuda}, {software.torch_threads} threads"
    native = f"loads; rows by {software.row_kernels}"
    kernel = f"processes can be watched: {_yes(software.pidfd)}; memory can be shared: "
    kernel += "not tried" if software.pidfd is None else software.shared_memory_error or "yes"
    compilers = [f"{name} {version}" for name, version in software.compilers.items() if version is not None]
    return [
        ("moonep", software.moonep),
        ("python", software.python),
        ("torch", torch if software.torch_error is None else f"does not load: {software.torch_error}"),
        ("backends", ", ".join(software.backends) or "none"),
        ("NCCL", software.nccl or "none in torch"),
        ("native module", native if software.extension_error is None else f"does not load: {software.extension_error}"),
        ("kernel calls", kernel),
        ("numpy", software.numpy or "missing"),
        ("click", software.click or "missing"),
        ("matplotlib", software.matplotlib or "missing (only plots want it)"),
        ("compilers", ", ".join(compilers) or "none found"),
    ]


def _gpus(gpus: Gpus) -> list[Line]:
    lines = [("driver", gpus.driver or "none")]
    for number, gpu in enumerate(gpus.devices):
        links = f"reaches {', '.join(map(str, gpu.peers))} directly" if gpu.peers else "reaches no other directly"
        links = links if len(gpus.devices) > 1 else "the only one"
        lines.append((f"GPU {number}", f"{gpu.name}, {_gb(gpu.memory_bytes)}, {gpu.compute_capability}; {links}"))
    if not gpus.devices:
        lines.append(("GPUs", gpus.error or "none that torch can use"))
    return lines


def _copies(copies: Copies) -> list[Line]:
    def both(one: float, all_cores: float) -> str:
        more = f", {all_cores:.1f} on {copies.cores} cores" if copies.cores > 1 else ""
        return f"{one:.1f} GB/s on 1 core{more}; {copies.large_bytes / 1e6:.0f} MB"

    return [
        ("in the caches", f"{copies.small_gb_per_s:.1f} GB/s on 1 core; {copies.small_bytes / 1e3:.0f} kB"),
        ("plain", both(copies.large_gb_per_s, copies.large_all_cores_gb_per_s)),
        ("past the caches", both(copies.stream_gb_per_s, copies.stream_all_cores_gb_per_s)),
    ]


def _transports(transports: Transports) -> list[Line]:
    meeting = "not measured" if transports.meeting_us is None else f"{transports.meeting_us:.2f} us for two processes"
    return [
        ("local", _trial(transports.local)),
        ("shm", _trial(transports.shm)),
        ("collective (gloo)", _trial(transports.collective_gloo)),
        ("collective (nccl)", _trial(transports.collective_nccl)),
        ("cuda", _trial(transports.cuda)),
        ("meeting by flags", meeting),
        ("auto, two ranks", _auto(transports.auto)),
    ]


def _trial(trial: Trial) -> str:
    if trial.usable:
        return f"works; round trip {trial.round_trip_us:.0f} us"
    return trial.reason if trial.usable is None else f"no: {trial.reason}"


def _auto(auto: Auto) -> str:
    return auto.reason if auto.transport is None else f"takes {auto.transport}: {auto.reason}"


def _problems(problems: list[Problem]) -> str:
    rows = ["Problems"]
    for number, found in enumerate(problems, 1):
        rows += textwrap.wrap(found.problem, _WIDTH, initial_indent=f"  {number}. ", subsequent_indent="     ")
        rows += textwrap.wrap(f"What to do: {found.advice}", _WIDTH, initial_indent="     ", subsequent_indent="     ")
    return "\n".join(rows if problems else [*rows, "  none found"])


def _gb(num_bytes: int | None) -> str:
    return "an unknown amount" if num_bytes is None else f"{num_bytes / 1e9:.2f} GB"


def _yes(answer: bool | None) -> str:
    return "not tried" if answer is None else "yes" if answer else "no"
