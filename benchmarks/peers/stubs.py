"""What peers written for GPUs need to run on CPU tensors: each stands in for something that has no meaning there."""

from __future__ import annotations

import os
import warnings
from typing import Any
from unittest import mock

import torch


def current_device_is_the_cpu() -> Any:
    """A patch, to be started for as long as the peer lives; MoonEP asks for the device only with NCCL.

    Megatron-Core allocates what it receives on `torch.cuda.current_device()`, which raises where torch has no CUDA.
    """

    def current_device() -> torch.device:
        return torch.device("cpu")

    return mock.patch.object(torch.cuda, "current_device", current_device)


class NoStream:
    """In place of the `torch.cuda.Stream` on which Megatron-Core copies sizes to the host; they are there already."""


def old_name_of_a_collective() -> None:
    """Megatron-Core calls `all_gather_into_tensor`, of which new versions of torch warn on every rank."""
    warnings.filterwarnings("ignore", ".*all_gather_into_tensor.*", FutureWarning)


def deepspeed_on_cpu() -> None:
    """DeepSpeed chooses its accelerator when it is imported, and complains where it finds none."""
    os.environ["DS_ACCELERATOR"] = "cpu"


def without_deepspeed_allreduce() -> Any:
    """A patch. On CPUs DeepSpeed compiles an all-reduce of its own, in minutes; its MoE layer never calls it."""

    def build_shm_op() -> None:
        return None

    return mock.patch("deepspeed.comm.torch.build_shm_op", build_shm_op)
