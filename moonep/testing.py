"""For tests and measurements: ranks as processes of this machine, and routings of a known shape.

    with RankPool(4) as pool:
        results = pool.run(step, 128)  # step(rank, 128) on every rank, a list by rank

`step` is found by its name in the rank's process, so it stands at the top of a module. Messages are plain pickles over
pipes: tensors travel as bytes, not through torch's shared memory, and nothing is left behind in /dev/shm.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "RankFailure",
    "RankOutcome",
    "RankPool",
    "lognormal_routing",
    "maxvio",
    "one_expert_routing",
    "one_rank_routing",
    "random_routing",
    "ring_routing",
    "run_ranks",
    "topk_weights",
    "uniform_routing",
]

# What the forkserver loads once, so that ranks start with it.
_PRELOAD = ["torch", "torch.distributed", "moonep.testing", "moonep.reference", "moonep.buffer"]
_START_SECS = 120.0
_AFTER_FAILURE_SECS = 10.0  # how long the others may still take once a rank has failed
_STOP_SECS = 5.0


# ---- ranks ----


@dataclass(frozen=True)
class RankOutcome:
    """What became of a call on one rank."""

    result: Any = None
    error: str | None = None  # "PeerLostError: its text"; None: the call returned
    traceback: str = ""  # of the error, as text
    exitcode: int | None = None  # of a rank whose process ended; negative: the signal


class RankFailure(RuntimeError):
    """A call failed on some rank. The text holds what every such rank said; `outcomes` are by rank."""

    def __init__(self, outcomes: list[RankOutcome]):
        self.outcomes = outcomes
        failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.error is not None]
        heading = ", ".join(f"rank {rank}: {outcome.error}" for rank, outcome in failed)
        texts = (
            f"---- rank {rank} ----\n{outcome.traceback.rstrip()}" for rank, outcome in failed if outcome.traceback
        )
        super().__init__("\n".join([heading, *texts]))


class RankPool:
    """Processes that are the ranks of one torch.distributed group over the loopback, and serve calls.

    The first pool starts a forkserver with torch loaded, which stays until this process ends; it keeps the environment
    variables of that moment. Ranks end with the pool, and with this process. A script that makes a pool needs the
    usual `if __name__ == "__main__":`.

    Args:
        num_ranks: R.
        threads: torch's threads in every rank.
        backend: of torch.distributed; None: no process group. With NCCL, rank r uses device r mod their number.
    """

    def __init__(self, num_ranks: int, *, threads: int = 1, backend: str | None = "gloo"):
        if num_ranks < 1:
            raise ValueError(f"num_ranks: expected at least 1, got {num_ranks}")
        self.num_ranks = num_ranks
        self._directory = Path(tempfile.mkdtemp(prefix="moonep-ranks-"))
        self._remove_directory = weakref.finalize(self, _remove, str(self._directory), os.getpid())
        self._ranks: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._outcomes: list[RankOutcome | None] = [RankOutcome()] * num_ranks  # None: not yet answered
        self._closed = False
        try:
            context = _context()
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                process = context.Process(  # type: ignore[attr-defined]
                    target=_serve,
                    args=(rank, num_ranks, threads, backend, str(self._directory), theirs),
                    name=f"moonep-rank-{rank}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._ranks.append(process)
            self._outcomes = [None] * num_ranks  # every rank answers once when it is ready
            self._raise_failures(_START_SECS)
        except BaseException:
            self._end(0.0)
            raise

    @property
    def pids(self) -> list[int]:
        """The process id of every rank."""
        return [process.pid or 0 for process in self._ranks]

    @property
    def usable(self) -> bool:
        """Not closed, and every rank is alive and has answered."""
        return (
            not self._closed
            and all(process.is_alive() for process in self._ranks)
            and all(outcome is not None for outcome in self._outcomes)
        )

    def run(self, fn: Callable[..., Any], *args: Any, timeout_secs: float = 60.0) -> list[Any]:
        """Calls `fn(rank, *args)` on every rank and gives the results by rank.

        Raises:
            RankFailure: `fn` raised somewhere, or a rank ended, or did not answer in time. In the last two cases, and
                when a rank is still at work some seconds after another has failed, the pool is closed.
        """
        self.start(fn, *args)
        return self._raise_failures(timeout_secs)

    def start(self, fn: Callable[..., Any], *args: Any) -> None:
        """Begins `fn(rank, *args)` on every rank that lives; `collect` gives what became of it."""
        if self._closed:
            raise RuntimeError("the RankPool is closed")
        late = [rank for rank, outcome in enumerate(self._outcomes) if outcome is None]
        if late:
            raise RuntimeError(f"ranks {late} have not answered the call before this one")
        message = pickle.dumps((fn, args))
        for rank, pipe in enumerate(self._pipes):
            self._outcomes[rank] = None
            with contextlib.suppress(OSError):  # ended: collect finds out
                pipe.send_bytes(message)

    def collect(self, timeout_secs: float = 60.0) -> list[RankOutcome]:
        """What became of the call on every rank. Does not raise and ends no rank.

        A rank without an answer shows as TimeoutError; another `collect` may find its answer.
        """
        return self._collect(timeout_secs, timeout_secs)

    def close(self) -> None:
        """Ends the ranks: idle ones are asked, others killed. Takes a few seconds at most; may be called again."""
        self._end(_STOP_SECS if self.usable else 0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _raise_failures(self, timeout_secs: float) -> list[Any]:
        try:
            outcomes = self._collect(timeout_secs, _AFTER_FAILURE_SECS)
        except BaseException:  # Ctrl-C
            self._end(0.0)
            raise
        if any(outcome.error is not None for outcome in outcomes):
            if not self.usable:
                self._end(0.0)
            raise RankFailure(outcomes)
        return [outcome.result for outcome in outcomes]

    def _collect(self, timeout_secs: float, after_failure_secs: float) -> list[RankOutcome]:
        began = time.monotonic()
        deadline = began + timeout_secs
        while waiting := {pipe: rank for rank, pipe in enumerate(self._pipes) if self._outcomes[rank] is None}:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                outcome = self._receive(waiting[pipe])
                self._outcomes[waiting[pipe]] = outcome
                if outcome.error is not None:
                    deadline = min(deadline, time.monotonic() + after_failure_secs)
        waited = time.monotonic() - began
        return [outcome or self._no_answer(rank, waited) for rank, outcome in enumerate(self._outcomes)]

    def _receive(self, rank: int) -> RankOutcome:
        try:
            outcome = pickle.loads(self._pipes[rank].recv_bytes())
            assert isinstance(outcome, RankOutcome)
            return outcome
        except (EOFError, OSError):
            self._ranks[rank].join(_STOP_SECS)
            code = self._ranks[rank].exitcode
            return RankOutcome(error=f"the process ended with exit code {code}", exitcode=code)

    def _no_answer(self, rank: int, waited_secs: float) -> RankOutcome:
        """Says where the rank stands, as far as it can still be asked."""
        stack = self._directory / f"stack-{rank}"
        with contextlib.suppress(OSError):
            os.kill(self.pids[rank], signal.SIGUSR1)
            time.sleep(0.1)
        text = stack.read_text() if stack.exists() else ""
        return RankOutcome(error=f"TimeoutError: no answer within {waited_secs:.3g} s", traceback=text)

    def _end(self, patience_secs: float) -> None:
        if self._closed:
            return
        self._closed = True
        for pipe in self._pipes:
            pipe.close()  # an idle rank reads the end, and stops
        deadline = time.monotonic() + patience_secs
        for process in self._ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.join(_STOP_SECS)
        self._remove_directory()


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    threads: int = 1,
    backend: str | None = "gloo",
    timeout_secs: float = 60.0,
) -> list[Any]:
    """`fn(rank, *args)` on `num_ranks` ranks that live for this one call; the results by rank. Errors as `RankPool`."""
    with RankPool(num_ranks, threads=threads, backend=backend) as pool:
        return pool.run(fn, *args, timeout_secs=timeout_secs)


def _remove(directory: str, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # not in a forked child that ends
        shutil.rmtree(directory, ignore_errors=True)


def _context() -> BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _serve(rank: int, num_ranks: int, threads: int, backend: str | None, directory: str, pipe: Connection) -> None:
    """A rank's life: joins the group, says so, and answers calls until the pipe ends."""
    threading.Thread(target=_end_with_parent, args=(directory,), daemon=True).start()
    with open(os.path.join(directory, f"stack-{rank}"), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        _send(pipe, _outcome(_join_group, rank, num_ranks, threads, backend, directory))
        with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
            while True:
                message = pipe.recv_bytes()
                _send(pipe, _outcome(lambda message=message: _call(message, rank)))
    if backend is not None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def _end_with_parent(directory: str) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def _join_group(rank: int, num_ranks: int, threads: int, backend: str | None, directory: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    if backend is None:
        return
    if "nccl" in backend:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    # gloo's C++ code reads this; without it, gloo asks the resolver for this host's name.
    os.putenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    store = dist.FileStore(os.path.join(directory, "store"), num_ranks)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)


def _call(message: bytes, rank: int) -> Any:
    fn, args = pickle.loads(message)
    return fn(rank, *args)


def _outcome(fn: Callable[..., Any], *args: Any) -> RankOutcome:
    try:
        return RankOutcome(result=fn(*args))
    except Exception as error:
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        kind = type(error)
        if kind.__module__ != "builtins":
            text = text.removeprefix(kind.__module__ + ".")
        return RankOutcome(error=text, traceback=traceback.format_exc())


def _send(pipe: Connection, outcome: RankOutcome) -> None:
    packed = _outcome(pickle.dumps, outcome)
    pipe.send_bytes(packed.result if packed.error is None else pickle.dumps(packed))


# ---- routings: int64 [T, K], and what is known of them ----

Routing = npt.NDArray[np.int64]


def lognormal_routing(num_tokens: int, num_experts: int, top_k: int, maxvio: float, seed: int) -> Routing:
    """Distinct experts per token, best first, of lognormal popularity.

    A token takes the `top_k` largest of sigma * popularity + Gumbel noise, that is, draws experts in turn with
    probabilities proportional to exp(sigma * popularity). Popularity (normal) and noise are drawn once, and sigma is
    solved by bisection so that `maxvio(result)` comes near the one asked for: within 2 %, or as near as the number of
    tokens lets it (chance alone makes few tokens uneven). For R ranks ask for R * T tokens, and give each its part.

    Raises:
        ValueError: a maxvio that distinct experts cannot have: the most is E / K - 1, when all tokens agree.
    """
    bound = num_experts / top_k - 1
    if not 0 <= maxvio <= bound:
        raise ValueError(f"maxvio: expected 0 to num_experts / top_k - 1 = {bound:g}, got {maxvio}")
    rng = np.random.default_rng(seed)
    popularity_E = rng.standard_normal(num_experts, dtype=np.float32)
    noise_TE = -np.log(rng.standard_exponential((num_tokens, num_experts), dtype=np.float32) + np.float32(1e-30))

    def miss(sigma: float) -> float:
        scores_TE = np.float32(sigma) * popularity_E + noise_TE
        least_T1 = np.partition(scores_TE, -top_k, axis=1)[:, -top_k, None]
        return _unevenness(np.count_nonzero(scores_TE >= least_T1, axis=0)) - maxvio

    low, high = 0.0, 1.0
    tried = {sigma: miss(sigma) for sigma in (low, high)}
    while tried[high] < 0 and high < 1024:
        low, high = high, 2 * high
        tried[high] = miss(high)
    while min(map(abs, tried.values())) > 0.005 * maxvio and tried[low] < 0 and high - low > 1e-4 * high:
        middle = (low + high) / 2
        tried[middle] = miss(middle)
        low, high = (middle, high) if tried[middle] < 0 else (low, middle)
    sigma = min(tried, key=lambda sigma: abs(tried[sigma]))
    return _largest(np.float32(sigma) * popularity_E + noise_TE, top_k)


def uniform_routing(num_tokens: int, num_experts: int, top_k: int, seed: int) -> Routing:
    """Distinct experts per token, all equally likely."""
    return _largest(np.random.default_rng(seed).random((num_tokens, num_experts), dtype=np.float32), top_k)


def one_expert_routing(
    num_tokens: int, num_experts: int, top_k: int, seed: int, *, expert: int = 0, repeated: bool = False
) -> Routing:
    """Every token's first choice is `expert`; the others are distinct, or with `repeated` are `expert` again."""
    if repeated:
        return np.full((num_tokens, top_k), expert, dtype=np.int64)
    scores_TE = np.random.default_rng(seed).random((num_tokens, num_experts), dtype=np.float32)
    scores_TE[:, expert] = 2.0
    return _largest(scores_TE, top_k)


def one_rank_routing(num_tokens: int, num_experts: int, top_k: int, seed: int, *, num_ranks: int, rank: int) -> Routing:
    """All choices among the experts at home on `rank`: distinct where it has K of them, else as they come."""
    home = np.array_split(np.arange(num_experts), num_ranks)[rank]
    if len(home) == 0:
        raise ValueError(f"rank: expected one that has experts, but {rank} of {num_ranks} has none of {num_experts}")
    if len(home) < top_k:
        return home[np.random.default_rng(seed).integers(len(home), size=(num_tokens, top_k))]
    return home[uniform_routing(num_tokens, len(home), top_k, seed)]


def ring_routing(num_tokens: int, num_experts: int, top_k: int, seed: int, *, num_ranks: int, rank: int) -> Routing:
    """What `rank` passes when every rank sends all its tokens to the next one."""
    return one_rank_routing(
        num_tokens, num_experts, top_k, seed, num_ranks=num_ranks, rank=(rank + 1) % min(num_ranks, num_experts)
    )


def random_routing(num_tokens: int, num_experts: int, top_k: int, seed: int, *, holes: float = 0.2) -> Routing:
    """Anything allowed: an expert may come twice in a token, and a share `holes` of the routes is -1."""
    rng = np.random.default_rng(seed)
    idx_TK = rng.integers(num_experts, size=(num_tokens, top_k))
    return np.where(rng.random((num_tokens, top_k)) < holes, -1, idx_TK)


def topk_weights(num_tokens: int, top_k: int, seed: int) -> npt.NDArray[np.float32]:
    """Routing weights [T, K]: positive, every token's sum is 1."""
    weights_TK = np.random.default_rng(seed).random((num_tokens, top_k), dtype=np.float32) + np.float32(0.05)
    normal_TK: npt.NDArray[np.float32] = weights_TK / weights_TK.sum(axis=1, keepdims=True)
    return normal_TK


def maxvio(topk_idx: npt.ArrayLike, num_experts: int) -> float:
    """Imbalance of a routing [..., K]: max_e(load_e / mean) - 1. Routes of -1 do not count; 0 without any route."""
    idx = np.asarray(topk_idx)
    return _unevenness(np.bincount(idx[idx >= 0], minlength=num_experts))


def _unevenness(loads_E: npt.NDArray[np.int64]) -> float:
    return float(loads_E.max() * len(loads_E) / max(1, loads_E.sum()) - 1) if loads_E.any() else 0.0


def _largest(scores_TE: npt.NDArray[np.float32], top_k: int) -> Routing:
    """The places of the largest scores of every token, largest first."""
    idx_TK = np.argpartition(scores_TE, -top_k, axis=1)[:, -top_k:]
    order_TK = np.argsort(-np.take_along_axis(scores_TE, idx_TK, axis=1), axis=1, kind="stable")
    return np.take_along_axis(idx_TK, order_TK, axis=1)
