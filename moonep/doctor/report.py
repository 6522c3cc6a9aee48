"""What the examination finds: one dataclass per section, whose fields are the keys of `moonep doctor --json`."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "Auto",
    "Copies",
    "Gpu",
    "Gpus",
    "Machine",
    "Problem",
    "Report",
    "Section",
    "Software",
    "Transports",
    "Trial",
]


@dataclass(frozen=True)
class Machine:
    """The machine, as its kernel tells. None: it does not tell.

    Attributes:
        cpu: the processor's name.
        architecture: "x86_64", "aarch64", ...
        kernel: system and release.
        host_id: the name by which ranks know that they share a host.
        cores: of the machine.
        cores_allowed: those that this process may be scheduled on.
        cores_quota: cores' worth of time that its control groups give it; None: no limit.
        cores_usable: whole cores that allowance and quota leave, at least 1.
        load: processes that ran or wanted to, on average over the last minute.
        memory_total_bytes: of the machine.
        memory_available_bytes: what this process can still use.
        memory_limit_bytes: of its control groups; None: no limit.
        numa_nodes: memory nodes.
        huge_pages: "always", "madvise" or "never".
        dev_shm_bytes: size of /dev/shm.
        has_proc: /proc shows this process's open files.
    """

    cpu: str
    architecture: str
    kernel: str
    host_id: str
    cores: int
    cores_allowed: int
    cores_quota: float | None
    cores_usable: int
    load: float | None
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    memory_limit_bytes: int | None
    numa_nodes: int
    huge_pages: str | None
    dev_shm_bytes: int | None
    has_proc: bool


@dataclass(frozen=True)
class Software:
    """What is installed. Versions are None where the thing is missing.

    Attributes:
        moonep, python, torch, numpy, click, matplotlib, nccl: versions; `nccl` is the one in torch.
        torch_error: why torch cannot be imported; None: it can.
        torch_cuda: the CUDA version that torch was built for; None: built without.
        torch_threads: threads that torch, and so MoonEP, uses in this process.
        backends: of torch.distributed, those in this torch.
        extension_error: why MoonEP's native module cannot be loaded; None: it can.
        row_kernels: the instruction set that rows are moved and summed with.
        pidfd: processes can be watched. None: not tried, because there is no extension.
        shared_memory_error: why memory cannot be shared between processes; None: it can, or was not tried.
        compilers: version by name.
    """

    moonep: str
    python: str
    torch: str | None
    numpy: str | None
    click: str | None
    matplotlib: str | None
    nccl: str | None
    torch_error: str | None
    torch_cuda: str | None
    torch_threads: int | None
    backends: list[str]
    extension_error: str | None
    row_kernels: str | None
    pidfd: bool | None
    shared_memory_error: str | None
    compilers: dict[str, str | None]


@dataclass(frozen=True)
class Gpu:
    """One CUDA device.

    Attributes:
        name: of the model.
        memory_bytes: in all.
        compute_capability: "9.0".
        peers: the devices whose memory it can reach directly.
    """

    name: str
    memory_bytes: int
    compute_capability: str
    peers: list[int]


@dataclass(frozen=True)
class Gpus:
    """CUDA devices.

    Attributes:
        driver: version of the kernel's driver; None: there is none.
        devices: those that torch can use, by number.
        error: what went wrong in looking at them.
    """

    driver: str | None = None
    devices: list[Gpu] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class Copies:
    """Copies of memory; 1 GB is 1e9 bytes of payload, counted once.

    Attributes:
        small_bytes, large_bytes: sizes of one copy. Small lies in the caches, large does not.
        cores: how many copied at once in `_all_cores_`.
        small_gb_per_s: memcpy of the small size by one thread.
        large_gb_per_s, large_all_cores_gb_per_s: memcpy of the large size.
        stream_gb_per_s, stream_all_cores_gb_per_s: the same with stores that pass by the caches.
    """

    small_bytes: int
    large_bytes: int
    cores: int
    small_gb_per_s: float
    large_gb_per_s: float
    large_all_cores_gb_per_s: float
    stream_gb_per_s: float
    stream_all_cores_gb_per_s: float


@dataclass(frozen=True)
class Trial:
    """What became of a transport here.

    Attributes:
        usable: None: not tried.
        reason: why it is not usable, or was not tried; empty when it is usable.
        round_trip_us: median time of a small dispatch and combine, whose result was right.
    """

    usable: bool | None
    reason: str = ""
    round_trip_us: float | None = None


@dataclass(frozen=True)
class Auto:
    """What `transport="auto"` takes for two ranks here.

    Attributes:
        transport: None: not tried, or nothing works.
        reason: why.
    """

    transport: str | None
    reason: str


@dataclass(frozen=True)
class Transports:
    """Every transport, tried with two ranks (`local`: with one).

    Attributes:
        local, shm, collective_gloo, collective_nccl, cuda: by name and, for `collective`, torch's backend.
        auto: the one that `transport="auto"` takes.
        ranks_error: why two ranks could not be started; None: they could, or were not wanted.
        meeting_us: median time in which two processes tell each other through a flag in shared memory that they have
            come to the same place; None: not measured.
    """

    local: Trial
    shm: Trial
    collective_gloo: Trial
    collective_nccl: Trial
    cuda: Trial
    auto: Auto
    ranks_error: str | None
    meeting_us: float | None

    def trials(self) -> dict[str, Trial]:
        """The trials by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Trial)}


@dataclass(frozen=True)
class Problem:
    """Something that is in the way.

    Attributes:
        problem: what.
        advice: what to do.
    """

    problem: str
    advice: str


@dataclass(frozen=True)
class Report:
    """Everything. `dataclasses.asdict` makes of it what `moonep doctor --json` prints, keys as the names here.

    Attributes:
        machine, software, gpus, transports: see the classes of these names.
        copies: None where there is no extension to copy with, or no room for it.
        problems: in the order in which they are best solved.
        usable: some transport works.
    """

    machine: Machine
    software: Software
    gpus: Gpus
    copies: Copies | None
    transports: Transports
    problems: list[Problem]
    usable: bool


Section = Machine | Software | Gpus | Copies | Transports
