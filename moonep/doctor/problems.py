"""What stands in the way, and what to do about it."""

from __future__ import annotations

from moonep.doctor.report import Gpus, Machine, Problem, Software, Transports

__all__ = ["find_problems"]

_ENOUGH_MEMORY_BYTES = 4 * 10**9
_SLOW_MEETING_US = 100.0

_Faults = list[tuple[object, str, str]]  # whether it is so, what, what to do


def find_problems(this_machine: Machine, software: Software, gpus: Gpus, transports: Transports) -> list[Problem]:
    """What stands in the way of running, then of running fast."""
    return [
        Problem(problem, advice)
        for found, problem, advice in (
            *_software_faults(software),
            *_kernel_faults(this_machine, software),
            *_transport_faults(gpus, transports),
            *_shortages(this_machine, software),
            *_gpu_faults(software, gpus),
            *_slownesses(this_machine, software, transports),
        )
        if found
    ]


def _software_faults(software: Software) -> _Faults:
    return [
        (
            software.torch_error,
            f"torch cannot be imported: {software.torch_error}",
            "install torch 2.6 or newer into the Python that runs this command",
        ),
        (
            software.extension_error,
            f"MoonEP's native module cannot be loaded: {software.extension_error}",
            "build it for this Python and this machine: pip install --force-reinstall --no-deps moonep, or in a "
            "checkout pip install -e .",
        ),
        (
            software.torch and "gloo" not in software.backends,
            "this torch has no gloo, by which ranks with rows on the CPU find each other",
            "install a torch that has it; the official builds do",
        ),
        (
            not any(software.compilers[name] for name in ("g++", "clang++")),
            "no C++ compiler was found",
            "nothing, unless MoonEP is to be built here: then install g++ or clang",
        ),
    ]


def _kernel_faults(this_machine: Machine, software: Software) -> _Faults:
    linux = this_machine.kernel.startswith("Linux")
    return [
        (not linux, "this is not Linux: ranks cannot share memory", "nothing; collective works, but is slower"),
        (
            linux and not this_machine.has_proc,
            "/proc does not show this process's files: ranks cannot find each other's memory",
            "mount proc in this container or chroot",
        ),
        (
            linux and software.pidfd is False,
            f"processes cannot be watched (pidfd_open) on {this_machine.kernel}: ranks cannot share memory",
            "use Linux 5.3 or newer; in a container, allow pidfd_open in its seccomp profile",
        ),
        (
            linux and software.shared_memory_error,
            f"memory cannot be shared: {software.shared_memory_error}",
            "allow memfd_create and fallocate in the container's seccomp profile; leave some memory free",
        ),
    ]


def _transport_faults(gpus: Gpus, transports: Transports) -> _Faults:
    shm, gloo, local = transports.shm, transports.collective_gloo, transports.local
    hidden, started = "opening its memory" in shm.reason, not transports.ranks_error
    return [
        (local.usable is False, f"not even one rank works: {local.reason}", "solve what stands above; else report it"),
        (
            not started,
            f"two ranks do not start: {transports.ranks_error}",
            "see whether the loopback interface is up, and whether the directory for temporary files can be written",
        ),
        (
            shm.usable is False and hidden,
            "a rank may not open another's memory in /proc",
            "run all ranks as one user, in one container; mount /proc without hidepid; keep processes dumpable",
        ),
        (
            shm.usable is False and started and not hidden and local.usable,
            f"shm does not work: {shm.reason}",
            "remove what the reason names; until then auto takes collective, which is slower",
        ),
        (
            gloo.usable is False and started and local.usable,
            f"collective does not work over gloo: {gloo.reason}",
            "remove what the reason names; look for a firewall on the loopback interface",
        ),
        (
            transports.collective_nccl.usable is False and len(gpus.devices) > 1,
            f"collective does not work over NCCL: {transports.collective_nccl.reason}",
            "run with NCCL_DEBUG=INFO to see what NCCL says",
        ),
    ]


def _shortages(this_machine: Machine, software: Software) -> _Faults:
    available, cores, threads = this_machine.memory_available_bytes, this_machine.cores_usable, software.torch_threads
    return [
        (
            available is not None and available < _ENOUGH_MEMORY_BYTES,
            f"little memory is left: {(available or 0) / 1e9:.2f} GB",
            "a rank of 4096 tokens, top_k 16 and hidden 3584 wants 1 GB: pass a smaller max_tokens, use fewer ranks, "
            "or raise the container's limit",
        ),
        (
            cores < 2,
            "ranks must take turns on one core",
            "do not measure here; allow more cores (taskset, the container's cpu limit)",
        ),
        (
            threads is not None and threads > cores,
            f"torch uses {threads} threads on {cores} usable {'core' if cores == 1 else 'cores'}",
            f"set OMP_NUM_THREADS={cores}, or less with several ranks",
        ),
    ]


def _gpu_faults(software: Software, gpus: Gpus) -> _Faults:
    return [
        (gpus.error, f"GPUs cannot be used: {gpus.error}", "see what nvidia-smi says; compare the driver with torch's"),
        (
            gpus.driver and software.torch and software.torch_cuda is None,
            "there is an NVIDIA driver, but this torch was built without CUDA",
            "install a CUDA build of torch if GPUs are to be used",
        ),
        (
            gpus.driver and software.torch_cuda and not gpus.devices and not gpus.error,
            "there is an NVIDIA driver, but torch finds no GPU",
            "look at CUDA_VISIBLE_DEVICES, and whether the container was given the devices",
        ),
    ]


def _slownesses(this_machine: Machine, software: Software, transports: Transports) -> _Faults:
    load, meeting_us = this_machine.load or 0.0, transports.meeting_us or 0.0
    x86 = this_machine.architecture in ("x86_64", "AMD64")
    return [
        (
            this_machine.huge_pages == "never",
            "memory never comes in huge pages: large buffers are slower, above all when they are new",
            "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        (
            x86 and software.row_kernels == "generic",
            "rows are summed without AVX: the processor, or the build of MoonEP, does not have it",
            "on a newer processor build MoonEP with a newer compiler",
        ),
        (
            load > this_machine.cores,
            f"others are at work here: load {load:.1f} on {this_machine.cores} cores",
            "measure again when it is quiet",
        ),
        (
            meeting_us > _SLOW_MEETING_US,
            f"ranks need {meeting_us:.0f} us to meet, where a few are usual",
            "give every rank a core of its own, and see what else runs (top)",
        ),
    ]
