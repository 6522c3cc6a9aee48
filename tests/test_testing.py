"""The rank launcher ends what it started and says what went wrong; routings have the shape they promise."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moonep.testing import (
    RankFailure,
    RankOutcome,
    RankPool,
    lognormal_routing,
    maxvio,
    one_expert_routing,
    one_rank_routing,
    random_routing,
    ring_routing,
    run_ranks,
    topk_weights,
    uniform_routing,
)

# ---- what ranks do here ----


def add(rank: int, a: int, b: int) -> int:
    return rank + a + b


def all_reduce(rank: int, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.full((3,), rank, dtype=dtype)
    dist.all_reduce(tensor)
    return tensor


def shape_of_group(rank: int) -> tuple[int, int, int, int]:
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), os.getpid()


def has_group(rank: int) -> bool:
    return dist.is_initialized()


def send_back(rank: int, value: Any) -> Any:
    return value


def raise_on(rank: int, ranks: list[int]) -> str:
    if rank in ranks:
        raise ValueError(f"I am {rank}")
    return "fine"


def leave_on(rank: int, who: int) -> None:
    if rank == who:
        os._exit(7)


def sleep_on(rank: int, who: int, secs: float) -> int:
    if rank == who:
        time.sleep(secs)
    return rank


def wait_for_file(rank: int, who: int, path: str) -> int:
    while rank == who and not os.path.exists(path):
        time.sleep(0.01)
    return rank


def fail_or_sleep(rank: int) -> None:
    if rank == 0:
        raise KeyError("early")
    time.sleep(100)


def unpicklable(rank: int) -> Any:
    return lambda: rank


# ---- the launcher ----


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def directories() -> set[pathlib.Path]:
    return set(pathlib.Path(tempfile.gettempdir()).glob("moonep-ranks-*"))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pids: list[int], secs: float) -> list[int]:
    """The processes that still run after a while."""
    deadline = time.monotonic() + secs
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if is_running(pid)]


def test_results_come_by_rank(pool: RankPool) -> None:
    assert pool.run(add, 10, 20) == [30 + rank for rank in range(pool.num_ranks)]


def test_ranks_are_a_group(pool: RankPool) -> None:
    pids = pool.pids
    assert pool.run(shape_of_group) == [(rank, pool.num_ranks, 1, pids[rank]) for rank in range(pool.num_ranks)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tensors_come_back(pool2: RankPool, dtype: torch.dtype) -> None:
    for result in pool2.run(all_reduce, dtype):
        assert torch.equal(result, torch.ones(3, dtype=dtype))


@pytest.mark.parametrize("value", [None, "text", b"bytes", np.arange(6).reshape(2, 3), torch.ones(2, 3).t()[1:]])
def test_values_go_and_come_back(pool1: RankPool, value: Any) -> None:
    (came,) = pool1.run(send_back, value)
    assert type(came) is type(value)
    np.testing.assert_array_equal(came, value)


def test_large_results_do_not_go_through_shared_memory(pool2: RankPool) -> None:
    before = shared_memory()
    results = pool2.run(send_back, torch.zeros(2**20))
    assert len(results) == 2
    assert shared_memory() == before


def test_one_shot() -> None:
    assert run_ranks(add, 2, 1, 1) == [2, 3]
    assert run_ranks(has_group, 2, backend=None) == [False, False]


def test_threads() -> None:
    with RankPool(1, threads=2) as pool:
        assert pool.run(shape_of_group)[0][2] == 2


def test_failures_are_told_with_their_ranks(pool4: RankPool) -> None:
    with pytest.raises(RankFailure) as caught:
        pool4.run(raise_on, [1, 3])
    text = str(caught.value)
    assert text.startswith("rank 1: ValueError: I am 1, rank 3: ValueError: I am 3")
    assert "---- rank 1 ----\nTraceback" in text
    assert "in raise_on" in text
    assert "rank 0" not in text
    assert [outcome.result for outcome in caught.value.outcomes] == ["fine", None, "fine", None]
    assert pool4.usable
    assert pool4.run(raise_on, []) == ["fine"] * 4


def test_functions_and_results_that_cannot_be_sent(pool2: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"rank 0: (AttributeError|PicklingError): "):
        pool2.run(unpicklable)
    with pytest.raises((AttributeError, TypeError)):
        pool2.run(lambda rank: rank)
    assert pool2.run(add, 0, 0) == [0, 1]


def test_a_rank_that_ends_is_told_and_the_pool_closed() -> None:
    pool = RankPool(2)
    pids = pool.pids
    with pytest.raises(RankFailure, match=r"^rank 1: the process ended with exit code 7$"):
        pool.run(leave_on, 1)
    assert wait_until_gone(pids, 1.0) == []
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(add, 0, 0)


def test_a_killed_rank_is_told_and_the_others_serve_on() -> None:
    with RankPool(3) as pool:
        pool.start(sleep_on, 1, 100)
        os.kill(pool.pids[1], signal.SIGKILL)
        outcomes = pool.collect(timeout_secs=20)
        assert [outcome.result for outcome in outcomes] == [0, None, 2]
        assert [outcome.exitcode for outcome in outcomes] == [None, -signal.SIGKILL, None]
        assert outcomes[1].error == f"the process ended with exit code {-signal.SIGKILL}"
        assert not pool.usable
        pool.start(add, 1, 2)
        assert [outcome.result for outcome in pool.collect(timeout_secs=20)] == [3, None, 5]


def test_a_late_rank_is_told_with_where_it_stands() -> None:
    pool = RankPool(2)
    pids = pool.pids
    with pytest.raises(RankFailure, match=r"^rank 1: TimeoutError: no answer within [23][\d.]* s") as caught:
        pool.run(sleep_on, 1, 100, timeout_secs=2.0)
    assert "in sleep_on" in str(caught.value)
    assert caught.value.outcomes[0].result == 0
    assert wait_until_gone(pids, 1.0) == []


def collect_from(pool: RankPool, rank: int) -> list[RankOutcome]:
    """Outcomes once `rank` has answered, whatever the others do."""
    outcomes = pool.collect(timeout_secs=0.1)
    for _ in range(200):
        if outcomes[rank].error is None:
            break
        outcomes = pool.collect(timeout_secs=0.1)
    return outcomes


def test_a_late_answer_is_collected_later(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "go on"
    with RankPool(2) as pool:
        pool.start(wait_for_file, 0, str(path))
        early = collect_from(pool, 1)
        assert early[0].error is not None
        assert "TimeoutError" in early[0].error
        assert early[1].result == 1
        assert not pool.usable
        with pytest.raises(RuntimeError, match=r"ranks \[0\] have not answered"):
            pool.start(add, 0, 0)
        path.touch()
        assert [outcome.result for outcome in pool.collect(timeout_secs=20)] == [0, 1]
        assert pool.usable


def test_a_stopped_rank_does_not_outlive_its_pool() -> None:
    with RankPool(2) as pool:
        pids = pool.pids
        os.kill(pids[0], signal.SIGSTOP)
        pool.start(add, 0, 0)
        assert [outcome.result for outcome in collect_from(pool, 1)] == [None, 1]
    assert wait_until_gone(pids, 1.0) == []


def test_a_failure_does_not_wait_for_the_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonep.testing._AFTER_FAILURE_SECS", 0.2)
    began = time.monotonic()
    with RankPool(2) as pool, pytest.raises(RankFailure, match=r"rank 0: KeyError: 'early', rank 1: TimeoutError"):
        pool.run(fail_or_sleep, timeout_secs=60)
    assert time.monotonic() - began < 30


def test_nothing_is_left() -> None:
    run_ranks(add, 1, 0, 0)  # the forkserver stays
    gc.collect()
    children, files = set(multiprocessing.active_children()), len(os.listdir("/dev/fd"))
    memory, folders = shared_memory(), directories()
    for _ in range(3):
        pool = RankPool(2)
        pids = pool.pids
        pool.run(all_reduce, torch.float32)
        pool.close()
        pool.close()
        assert wait_until_gone(pids, 1.0) == []
    del pool
    gc.collect()
    assert set(multiprocessing.active_children()) == children
    assert shared_memory() == memory
    assert directories() - folders == set()
    assert len(os.listdir("/dev/fd")) <= files


ABANDON = """
import os, signal, sys
from moonep.testing import RankPool
if __name__ == "__main__":
    pool = RankPool(2)
    print(*pool.pids, flush=True)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_ranks_end_with_the_process_that_made_them(tmp_path: pathlib.Path, name: str) -> None:
    script = tmp_path / "abandon.py"
    script.write_text(ABANDON)
    folders = directories()
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, str(script), name],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=dict(os.environ, PYTHONPATH=path),
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    process.wait(timeout=60)
    process.stdout.close()
    assert len(pids) == 2
    assert wait_until_gone(pids, 10.0) == []
    assert directories() - folders == set()


@pytest.mark.parametrize("num_ranks", [0, -1])
def test_no_ranks(num_ranks: int) -> None:
    with pytest.raises(ValueError, match="num_ranks"):
        RankPool(num_ranks)


# ---- routings ----


def check_distinct(idx: np.ndarray, num_tokens: int, num_experts: int, top_k: int) -> None:
    assert idx.dtype == np.int64
    assert idx.shape == (num_tokens, top_k)
    assert ((idx >= 0) & (idx < num_experts)).all()
    ordered = np.sort(idx, axis=1)
    assert (ordered[:, 1:] != ordered[:, :-1]).all()


@pytest.mark.parametrize("target", [0.5, 1.0, 3.0, 10.0, 40.0, 55.0])
def test_lognormal_hits_its_target(target: float) -> None:
    idx = lognormal_routing(4096, 896, 16, target, seed=1)
    check_distinct(idx, 4096, 896, 16)
    assert maxvio(idx, 896) == pytest.approx(target, rel=0.02)


def test_lognormal_is_quick_and_repeats() -> None:
    began = time.process_time()
    first = lognormal_routing(4096, 896, 16, 2.0, seed=1)
    assert time.process_time() - began < 5.0
    np.testing.assert_array_equal(first, lognormal_routing(4096, 896, 16, 2.0, seed=1))
    assert (first != lognormal_routing(4096, 896, 16, 2.0, seed=2)).any()


def test_lognormal_where_chance_is_more_than_the_target() -> None:
    idx = lognormal_routing(16, 64, 4, 0.0, seed=0)
    check_distinct(idx, 16, 64, 4)
    assert 0 < maxvio(idx, 64) < 5
    check_distinct(lognormal_routing(0, 8, 2, 1.0, seed=0), 0, 8, 2)
    check_distinct(lognormal_routing(5, 8, 8, 0.0, seed=0), 5, 8, 8)


@pytest.mark.parametrize("target", [-0.1, 3.1])
def test_lognormal_refuses_the_impossible(target: float) -> None:
    with pytest.raises(ValueError, match="maxvio"):
        lognormal_routing(16, 8, 2, target, seed=0)


def test_uniform() -> None:
    idx = uniform_routing(2000, 10, 3, seed=0)
    check_distinct(idx, 2000, 10, 3)
    assert maxvio(idx, 10) < 0.2
    check_distinct(uniform_routing(0, 10, 3, seed=0), 0, 10, 3)
    check_distinct(uniform_routing(4, 3, 3, seed=0), 4, 3, 3)


def test_one_expert() -> None:
    idx = one_expert_routing(50, 10, 3, seed=0, expert=7)
    check_distinct(idx, 50, 10, 3)
    assert (idx[:, 0] == 7).all()
    repeated = one_expert_routing(50, 10, 3, seed=0, expert=7, repeated=True)
    assert maxvio(repeated, 10) == 9.0


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(12, 4), (10, 4), (5, 4), (3, 4), (8, 1)])
def test_one_rank_and_ring(num_experts: int, num_ranks: int) -> None:
    homes = np.array_split(np.arange(num_experts), num_ranks)
    for rank in range(min(num_ranks, num_experts)):
        idx = one_rank_routing(20, num_experts, 2, seed=0, num_ranks=num_ranks, rank=rank)
        assert set(idx.ravel()) <= set(homes[rank])
        if len(homes[rank]) >= 2:
            check_distinct(idx, 20, num_experts, 2)
    for rank in range(num_ranks):
        idx = ring_routing(20, num_experts, 2, seed=0, num_ranks=num_ranks, rank=rank)
        assert set(idx.ravel()) <= set(homes[(rank + 1) % min(num_ranks, num_experts)])


def test_one_rank_without_experts() -> None:
    with pytest.raises(ValueError, match="has none"):
        one_rank_routing(2, 3, 1, seed=0, num_ranks=4, rank=3)


def test_random_has_holes_and_repeats() -> None:
    idx = random_routing(1000, 6, 4, seed=0, holes=0.3)
    assert idx.dtype == np.int64
    assert idx.min() == -1
    assert idx.max() == 5
    assert np.mean(idx == -1) == pytest.approx(0.3, abs=0.05)
    assert any(len(set(row[row >= 0])) < np.count_nonzero(row >= 0) for row in idx)


def test_weights() -> None:
    weights = topk_weights(100, 5, seed=0)
    assert weights.dtype == np.float32
    assert (weights > 0).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("idx", "expected"),
    [([[0, 1], [2, 3]], 0.0), ([[0, 0], [0, 1]], 2.0), ([[0, -1], [-1, -1]], 3.0), ([[-1, -1]], 0.0)],
)
def test_maxvio(idx: list[list[int]], expected: float) -> None:
    assert maxvio(idx, 4) == expected
    assert maxvio(torch.tensor(idx), 4) == expected
