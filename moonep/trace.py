"""Routing traces: what a router chose, on disk. NumPy's npz, never with pickle.

A file holds `topk_idx` (uint16, or int32 where ids are -1 or large) and `topk_weights` (float16), both
[steps, tokens, K], `num_experts` and `description`. Nothing in a file is believed before it is checked.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt

from moonep.testing import maxvio

__all__ = ["BUILTIN_TRACES", "RankRouting", "Trace", "load_trace", "save_trace"]

BUILTIN_TRACES = ("pydoc",)
"""Names that `load_trace` knows. `pydoc`: examples/02_moe_layer.py on Python's own documentation."""

_MAX_BYTES = 2**30  # a trace larger than this is taken for a mistake, or for malice
_MEMBERS = {  # what a file holds: dtypes and number of dimensions
    "topk_idx": (("uint16", "int32"), 3),
    "topk_weights": (("float16",), 3),
    "num_experts": (("int64",), 0),
    "description": (("uint8",), 1),  # UTF-8
}
# What reading a damaged archive may raise: RuntimeError for an encrypted one, NotImplementedError for odd compression.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError)


class RankRouting(NamedTuple):
    """What one rank passes to `Buffer.plan` and `Buffer.dispatch`, once turned into tensors."""

    topk_idx: npt.NDArray[np.int32]  # [T, K]
    topk_weights: npt.NDArray[np.float32]  # [T, K]


@dataclass(frozen=True, eq=False)
class Trace:
    """Recorded routing of one MoE layer.

    Raises:
        ValueError: shapes that do not belong together, ids outside -1 .. num_experts - 1, weights that are not finite.
    """

    topk_idx: npt.NDArray[np.int32]  # [steps, tokens, K], -1: no route
    topk_weights: npt.NDArray[np.float16]  # [steps, tokens, K]
    num_experts: int
    description: str = ""  # free text: what was recorded

    def __post_init__(self) -> None:
        shape = self.topk_idx.shape
        if len(shape) != 3 or 0 in shape:
            raise ValueError(f"topk_idx: expected shape [steps, tokens, K], none of them 0, got {list(shape)}")
        if self.topk_weights.shape != shape:
            raise ValueError(
                f"topk_weights: expected the shape of topk_idx {list(shape)}, got {list(self.topk_weights.shape)}"
            )
        if not self.top_k <= self.num_experts < 2**30:
            raise ValueError(f"num_experts: expected K = {self.top_k} to 2**30 - 1, got {self.num_experts}")
        wrong = (self.topk_idx < -1) | (self.topk_idx >= self.num_experts)
        if wrong.any():
            step, token, k = (int(place[0]) for place in np.nonzero(wrong))
            raise ValueError(
                f"topk_idx: expected -1 to {self.num_experts - 1}, got {self.topk_idx[step, token, k]} at step {step}, "
                f"token {token}, k {k}"
            )
        if not np.isfinite(self.topk_weights).all():
            raise ValueError("topk_weights: expected finite numbers, got NaN or infinity")

    @property
    def num_steps(self) -> int:
        """Steps recorded."""
        return len(self.topk_idx)

    @property
    def num_tokens(self) -> int:
        """Tokens of a step, of all ranks together."""
        return int(self.topk_idx.shape[1])

    @property
    def top_k(self) -> int:
        """K, experts per token."""
        return int(self.topk_idx.shape[2])

    def slice_for(self, rank: int, num_ranks: int, num_tokens: int, step: int = -1) -> RankRouting:
        """The routing of `rank`, when each of `num_ranks` ranks holds `num_tokens` tokens of `step`.

        Ranks take consecutive tokens; a trace with fewer than num_ranks * num_tokens starts over. Steps start over
        too, and negative ones count from the end.
        """
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank: expected 0 to {num_ranks - 1}, got {rank}")
        if num_tokens < 0:
            raise ValueError(f"num_tokens: expected at least 0, got {num_tokens}")
        tokens = (rank * num_tokens + np.arange(num_tokens)) % self.num_tokens
        step %= self.num_steps
        return RankRouting(self.topk_idx[step, tokens], self.topk_weights[step, tokens].astype(np.float32))

    def maxvio_of_step(self) -> list[float]:
        """Imbalance of each step: max_e(load_e / mean) - 1."""
        return [maxvio(idx_TK, self.num_experts) for idx_TK in self.topk_idx]


def save_trace(path: str | os.PathLike[str], trace: Trace) -> None:
    """Writes `trace` to the file `path`, compressed."""
    idx = trace.topk_idx
    fits = idx.min() >= 0 and idx.max() <= np.iinfo(np.uint16).max
    with open(path, "wb") as file:  # given a name, NumPy would add .npz to it
        np.savez_compressed(
            file,
            topk_idx=idx.astype(np.uint16 if fits else np.int32),
            topk_weights=trace.topk_weights.astype(np.float16),
            num_experts=np.int64(trace.num_experts),
            description=np.frombuffer(trace.description.encode(), np.uint8),
        )


def load_trace(source: str | os.PathLike[str]) -> Trace:
    """The trace in the file `source`, or the built-in one of that name.

    Raises:
        ValueError: not a trace, or one whose parts contradict each other.
        OSError: the file cannot be read.
    """
    if source in BUILTIN_TRACES:
        with resources.as_file(resources.files("moonep") / "data" / f"{source}.npz") as path:
            return load_trace(path)
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file, nor a built-in trace ({', '.join(BUILTIN_TRACES)})")
    try:
        with zipfile.ZipFile(path) as archive:
            idx, weights, experts, text = (_read_member(archive, name) for name in _MEMBERS)
        return Trace(idx.astype(np.int32), weights.astype(np.float16), int(experts), text.tobytes().decode())
    except (ValueError, *_DAMAGE) as error:
        raise ValueError(f"{path}: not a trace: {error}") from error


def _read_member(archive: zipfile.ZipFile, name: str) -> npt.NDArray[np.generic]:
    """One array, its header checked against what a trace holds and against its size before memory is taken for it."""
    try:
        member = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise ValueError(f"there is no {name} in it") from None
    if member.file_size > _MAX_BYTES:
        raise ValueError(f"{name}: expected at most {_MAX_BYTES} bytes, got {member.file_size}")
    with archive.open(member) as file:
        dtype, shape, fortran_order = _read_header(file)
        names, dimensions = _MEMBERS[name]
        if dtype.name not in names or len(shape) != dimensions or fortran_order:
            raise ValueError(
                f"{name}: expected {' or '.join(names)} of {dimensions} dimensions in C order, "
                f"got {dtype.name} {list(shape)}{' in Fortran order' if fortran_order else ''}"
            )
        wanted = dtype.itemsize
        for size in shape:
            wanted *= size  # Python's integers do not overflow
        if min(shape, default=0) < 0 or wanted > member.file_size:
            raise ValueError(f"{name}: {list(shape)} is more than the {member.file_size} bytes that are there")
        data = file.read(wanted)
        if len(data) != wanted or file.read(1):
            raise ValueError(f"{name}: expected {wanted} bytes for {list(shape)}, got fewer or more")
    array: npt.NDArray[np.generic] = np.frombuffer(data, dtype).reshape(shape)
    return array


def _read_header(file: IO[bytes]) -> tuple[np.dtype[np.generic], tuple[int, ...], bool]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, fortran_order, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"an array in NumPy's format {version}, expected (1, 0) or (2, 0)")
    return dtype, shape, fortran_order
