"""What the ranks of a benchmark say to each other outside of what is measured. All here is collective."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["barrier", "gather"]


def gather(values: torch.Tensor) -> torch.Tensor:
    """`values` [...] of every rank, [R, ...]."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.stack(parts)


def barrier() -> None:
    """Returns when every rank has called it."""
    dist.barrier()
