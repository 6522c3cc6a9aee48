"""The machine, the software and the GPUs, as they tell of themselves."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import warnings
from typing import Any

from moonep import env, machine
from moonep._version import __version__
from moonep.doctor.report import Gpu, Gpus, Machine, Software

__all__ = ["look_at_gpus", "look_at_machine", "look_at_software", "one_line"]

_COMPILERS = ("gcc", "g++", "clang", "clang++", "nvcc")
_COMPILER_SECS = 5.0


def look_at_machine() -> Machine:
    """Asks the kernel."""
    quota = machine.cores_quota()
    allowed = machine.cores_allowed()
    return Machine(
        cpu=machine.cpu_model(),
        architecture=platform.machine(),
        kernel=f"{platform.system()} {platform.release()}",
        host_id=env.host_id(),
        cores=os.cpu_count() or 1,
        cores_allowed=allowed,
        cores_quota=quota,
        cores_usable=allowed if quota is None else max(1, min(allowed, int(quota))),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        memory_total_bytes=machine.memory_total_bytes(),
        memory_available_bytes=machine.memory_available_bytes(),
        memory_limit_bytes=machine.memory_limit_bytes(),
        numa_nodes=machine.numa_nodes(),
        huge_pages=machine.huge_pages(),
        dev_shm_bytes=machine.dev_shm_bytes(),
        has_proc=machine.has_proc(),
    )


def look_at_software() -> Software:
    """Imports torch and the extension, and asks compilers for their versions."""
    torch, torch_error = _load("torch")
    native, extension_error = _load("moonep._C")
    shared_memory_error = None
    if native is not None:
        try:
            native.SharedGroup(0, 1, 4096).close()
        except RuntimeError as error:
            shared_memory_error = str(error)
    return Software(
        moonep=__version__,
        python=platform.python_version(),
        torch=getattr(torch, "__version__", None) and str(torch.__version__),
        numpy=_version("numpy"),
        click=_version("click"),
        matplotlib=_version("matplotlib"),
        nccl=_nccl_version(torch),
        torch_error=torch_error,
        torch_cuda=torch.version.cuda if torch is not None else None,
        torch_threads=torch.get_num_threads() if torch is not None else None,
        backends=_backends(torch),
        extension_error=extension_error,
        row_kernels=native.row_kernels() if native is not None else None,
        pidfd=_can_watch(native) if native is not None else None,
        shared_memory_error=shared_memory_error,
        compilers={name: _compiler_version(name) for name in _COMPILERS},
    )


def look_at_gpus(software: Software) -> Gpus:
    """Asks torch for its CUDA devices."""
    driver = machine.nvidia_driver()
    if software.torch_cuda is None:
        return Gpus(driver)
    import torch

    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            devices = [_gpu(torch, number, count) for number in range(count)]
    except Exception as error:  # drivers fail in many ways
        return Gpus(driver, error=one_line(error))
    return Gpus(driver, devices, str(warned[0].message).strip() if warned and not devices else None)


def _gpu(torch: Any, number: int, count: int) -> Gpu:
    told = torch.cuda.get_device_properties(number)
    others = (other for other in range(count) if other != number)
    peers = [other for other in others if torch.cuda.can_device_access_peer(number, other)]
    return Gpu(told.name, told.total_memory, f"{told.major}.{told.minor}", peers)


def _load(name: str) -> tuple[Any, str | None]:
    """A module, or why it cannot be imported."""
    try:
        return importlib.import_module(name), None
    except Exception as error:  # a broken library raises OSError, or what it likes
        return None, one_line(error)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backends(torch: Any) -> list[str]:
    if torch is None or not torch.distributed.is_available():
        return []
    names = ("gloo", "nccl", "mpi", "ucc")
    return [name for name in names if getattr(torch.distributed, f"is_{name}_available", bool)()]


def _nccl_version(torch: Any) -> str | None:
    if "nccl" not in _backends(torch):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _can_watch(native: Any) -> bool:
    pidfd = native.open_pidfd(os.getpid())
    if pidfd >= 0:
        os.close(pidfd)
    return bool(pidfd >= 0)


def _compiler_version(name: str) -> str | None:
    """The version that the compiler tells; "unknown" when it is there but tells none."""
    path = shutil.which(name)
    if path is None:
        return None
    try:
        told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_COMPILER_SECS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    found = re.search(r"\bV(\d+\.\d+[.\d]*)", told) if name == "nvcc" else re.search(r"\b\d+\.\d+[.\d]*", told)
    return found[0].lstrip("V") if found else "unknown"


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of its text."""
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[0]}"
