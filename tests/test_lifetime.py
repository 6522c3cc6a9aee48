"""Buffers come and go without a trace, and many steps run without a barrier between them."""

import copy
import gc
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moonep
from moonep import errors

T, K, H, E = 8, 2, 16, 8
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def transports(num_ranks: int) -> tuple[str, ...]:
    return ("local",) if num_ranks == 1 else ("shm", "collective")


def make_buffer(transport: str, **settings: Any) -> moonep.Buffer:
    usual = {"num_experts": E, "top_k": K, "hidden": H, "max_tokens": T, "dtype": torch.float32, "timeout_secs": 20.0}
    return moonep.Buffer(transport=transport, **usual | settings)


def step(ep: moonep.Buffer, seed: int = 0, tokens: int = T) -> None:
    """A step whose every result is known: experts double, routes are everywhere."""
    generator = torch.Generator().manual_seed(1000 * seed + ep.rank)
    idx = torch.randint(-1, E, (tokens, K), generator=generator)
    x = torch.randint(-8, 8, (tokens, H), generator=generator).float().requires_grad_()
    weights = torch.randint(0, 4, (tokens, K), generator=generator).float()
    plan = ep.plan(idx)
    recv = ep.dispatch(x, plan, weights)
    y = ep.combine(2 * recv.x, plan, recv.weights)
    y.backward(torch.ones_like(y))
    # Small integers, so float32 is exact.
    factor = (2 * weights * (idx >= 0)).sum(1, keepdim=True)
    assert torch.equal(y, factor * x)
    assert torch.equal(x.grad, factor.expand(tokens, H))


# ---- nothing is left ----


def traces() -> dict[str, Any]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings of shared memory": sum("memfd:" in line or "/dev/shm" in line for line in maps),
        "mappings": len(maps),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "/dev/shm": sorted(os.listdir("/dev/shm")),
    }


def come_and_go(rank: int, transport: str, how: str, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What there was after a few Buffers, and after `count` more."""

    def once(seed: int) -> None:
        ep = make_buffer(transport)
        if seed % 20 == 0:
            step(ep, seed)
        if how == "close":
            ep.close()
        elif how == "cycle":
            ep.itself = ep  # only the garbage collector finds it

    for seed in range(5):
        once(seed)
    before = traces()
    for seed in range(count):
        once(seed)
    return before, traces()


@LINUX
@pytest.mark.parametrize(("how", "count"), [("close", 200), ("drop", 40), ("cycle", 40)])
def test_buffers_leave_nothing(pool: Any, how: str, count: int) -> None:
    if len(pool.pids) == 4:
        count //= 4  # slow where ranks share cores
    for transport in transports(len(pool.pids)):
        for before, after in pool.run(come_and_go, transport, how, count, timeout_secs=100):
            # The allocator's own mappings come and go; a leak would grow with the Buffers.
            assert after.pop("mappings") < before.pop("mappings") + 10
            assert after == before


def fail_and_go(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A Buffer that does not come to be gives everything back, and so does one that an error closed."""

    def fail() -> None:
        with pytest.raises(errors.ConfigMismatchError):
            make_buffer("shm", hidden=H + rank)
        with pytest.raises(ValueError, match="bytes"):
            make_buffer("auto", hidden=2**20, max_tokens=2**20)
        ep = make_buffer("shm")
        with pytest.raises(ValueError, match="topk_idx"):
            ep.plan(torch.full((1, K), E))
        ep.close()

    for _ in range(3):
        fail()
    before = traces()
    for _ in range(15):
        fail()
    return before, traces()


@LINUX
def test_failed_buffers_leave_nothing(pool2: Any) -> None:
    for before, after in pool2.run(fail_and_go):
        assert after.pop("mappings") < before.pop("mappings") + 10
        assert after == before


def use_after_close(rank: int, transport: str) -> None:
    ep = make_buffer(transport)
    step(ep)
    plan = ep.plan(torch.zeros(T, K, dtype=torch.int64))
    x = torch.randn(T, H, requires_grad=True)
    recv = ep.dispatch(x, plan)
    kept = recv.x.detach().clone()
    ep.close()
    ep.close()
    assert torch.equal(recv.x, kept)  # results outlive the Buffer
    assert "closed" in repr(ep)
    calls = [
        lambda: ep.plan(torch.zeros(T, K, dtype=torch.int64)),
        lambda: ep.dispatch(x, plan),
        lambda: ep.combine(recv.x, plan),
        lambda: ep.replicate(plan),
        lambda: ep.plan("nonsense"),
        lambda: recv.x.sum().backward(),
    ]
    for call in calls:
        with pytest.raises(errors.BufferClosedError, match=r"closed: close\(\) was called"):
            call()
    with make_buffer(transport) as other:
        step(other)
    with pytest.raises(errors.BufferClosedError):
        other.plan(torch.zeros(T, K, dtype=torch.int64))


def test_use_after_close(pool: Any) -> None:
    for transport in transports(len(pool.pids)):
        pool.run(use_after_close, transport)


def close_on_error(rank: int, transport: str) -> None:
    """`with` closes when its body raises, even an error that a Buffer survives."""
    ep = make_buffer(transport)
    with pytest.raises(TypeError, match="topk_idx"), ep:
        ep.plan("nonsense")
    with pytest.raises(errors.BufferClosedError):
        step(ep)


def test_an_exception_closes(pool: Any) -> None:
    for transport in transports(len(pool.pids)):
        pool.run(close_on_error, transport)


def results_outlive(rank: int, transport: str) -> None:
    """Large results use recycled memory: what is still referenced is never given out again."""
    tokens, width = 64, 2048
    ep = make_buffer(transport, hidden=width, max_tokens=tokens)
    kept = []
    for seed in range(6):
        x = torch.full((tokens, width), float(seed))
        plan = ep.plan((torch.arange(tokens * K).view(tokens, K) + seed) % E)
        recv = ep.dispatch(x, plan)
        y = ep.combine(recv.x, plan)
        kept.append((seed, recv.x[: recv.x.shape[0] // 2], y.view(-1)))
        del recv, y
    ep.close()
    del ep, plan
    gc.collect()
    for seed, rows, y in kept:
        assert bool((rows == seed).all())
        assert bool((y == K * seed).all())


def test_results_outlive_their_buffer(pool: Any) -> None:
    for transport in transports(len(pool.pids)):
        pool.run(results_outlive, transport)


# ---- many steps ----


def many_steps(rank: int, transport: str, steps: int) -> None:
    """Ranks are late at random, now and then by a lot; nothing but the verbs keeps them in step."""
    late = random.Random(rank)
    with make_buffer(transport) as ep:
        for seed in range(steps):
            if late.random() < 0.1:
                time.sleep(late.choice((0.0, 0.0001, 0.001, 0.003)))
            step(ep, seed, tokens=late.randint(0, T))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("transport", "steps"), [("shm", 1000), ("collective", 200)])
def test_many_steps(transport: str, steps: int, ranks: int, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(f"pool{ranks}").run(many_steps, transport, steps, timeout_secs=110)


def many_large_steps(rank: int, transport: str, steps: int) -> None:
    """Rows of several chunks of staging, so that its halves are written again within a verb."""
    late = random.Random(rank)
    tokens, width = 700, 1024
    with make_buffer(transport, hidden=width, max_tokens=tokens) as ep:
        for seed in range(steps):
            mine = late.choice((tokens, tokens // 3, 0))
            x = torch.arange(mine, dtype=torch.float32)[:, None] + torch.full((1, width), 1000.0 * seed)
            plan = ep.plan((torch.arange(mine * K).view(mine, K) * 5 + rank) % E)
            recv = ep.dispatch(x, plan)
            assert torch.equal(ep.combine(recv.x, plan), K * x)


@pytest.mark.parametrize("transport", ["shm", "collective"])
def test_many_large_steps(pool4: Any, transport: str) -> None:
    pool4.run(many_large_steps, transport, 12)


# ---- copies, forks, and the interpreter's end ----


def copies(rank: int, transport: str) -> None:
    with make_buffer(transport) as ep:
        module = torch.nn.Linear(2, 2)
        module.ep = ep
        twin = copy.deepcopy(module)
        assert twin.ep is ep
        assert twin.weight is not module.weight
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(module)
        step(twin.ep)


def test_copies(pool: Any) -> None:
    for transport in transports(len(pool.pids)):
        pool.run(copies, transport)


def child_of_a_fork(ep: moonep.Buffer, plan: moonep.Plan, recv: moonep.Received, answers: Any) -> None:
    found = []
    calls = [
        lambda: ep.plan(torch.zeros(T, K, dtype=torch.int64)),
        lambda: ep.dispatch(torch.zeros(T, H), plan),
        lambda: ep.combine(recv.x, plan),
        lambda: recv.x.sum().backward(),
        ep.close,  # does nothing
        lambda: ep.plan(torch.zeros(T, K, dtype=torch.int64)),
    ]
    for call in calls:
        try:
            call()
            found.append("no error")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    answers.send(found)


def fork_after_use(rank: int, transport: str) -> tuple[list[str], int | None]:
    """The child can do nothing with the Buffer; its end, the usual or a sudden one, harms nothing."""
    ep = make_buffer(transport)
    step(ep)
    plan = ep.plan(torch.zeros(T, K, dtype=torch.int64))
    recv = ep.dispatch(torch.randn(T, H, requires_grad=True), plan)
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.process.current_process()._config["daemon"] = False  # a pool's rank may have no children else
    child = multiprocessing.get_context("fork").Process(target=child_of_a_fork, args=(ep, plan, recv, theirs))
    child.start()
    found = ours.recv() if ours.poll(20) else []
    child.join(20)
    code = child.exitcode
    if child.is_alive():
        child.kill()
        child.join()
    step(ep, 1)
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    step(ep, 2)
    ep.close()
    return found, code


@LINUX
def test_fork_after_use(pool: Any) -> None:
    for transport in transports(len(pool.pids)):
        for found, code in pool.run(fork_after_use, transport):
            assert code == 0
            assert found.pop(4) == "no error"
            assert len(found) == 5
            for text in found:
                assert text.startswith("BufferClosedError"), found
                assert "forked child" in text


ALIVE_AT_EXIT = """
    import sys
    import torch
    import torch.distributed as dist
    import moonep

    rank, num_ranks, path, transport, destroy = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    store = dist.FileStore(path, num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    ep = moonep.Buffer(num_experts=4, top_k=2, hidden=4096, max_tokens=64, transport=transport, dtype=torch.float32)
    plan = ep.plan(torch.tensor([[0, 3]] * 64))
    x = torch.randn(64, 4096, requires_grad=True)
    recv = ep.dispatch(x, plan)
    y = ep.combine(recv.x, plan)
    assert torch.equal(y, 2 * x)
    cycle = [ep, recv]
    cycle.append(cycle)
    if destroy == "destroy":
        dist.destroy_process_group()
    print("done")
"""


@pytest.mark.parametrize(("transport", "destroy"), [("shm", "leave"), ("collective", "destroy")])
def test_alive_at_exit(transport: str, destroy: str, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    code = textwrap.dedent(ALIVE_AT_EXIT)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), "2", str(tmp_path / "store"), transport, destroy],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=60)
            assert (rank.returncode, out) == (0, "done\n"), err
            assert "Traceback" not in err
            assert "moonep" not in err
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if os.path.isdir("/dev/shm"):
        assert set(os.listdir("/dev/shm")) <= before


def group_destroyed_first(rank: int, directory: str) -> None:
    """close() is local: it needs no process group any more."""
    num_ranks = dist.get_world_size()
    eps = [make_buffer(transport) for transport in transports(num_ranks)]
    for ep in eps:
        step(ep)
    dist.barrier()
    dist.destroy_process_group()
    for ep in eps:
        ep.close()
    store = dist.FileStore(os.path.join(directory, f"of {num_ranks}"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    with make_buffer(transports(num_ranks)[0]) as ep:
        step(ep)


def test_the_group_may_go_first(pool: Any, tmp_path: Path) -> None:
    pool.run(group_destroyed_first, str(tmp_path))
