"""Ranks that die, stop, stay away or leave early: the others say who it was, and go on without."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moonep
from moonep import errors
from moonep.testing import RankPool

TRANSPORTS = ("shm", "collective")
T, K, H, E = 6, 2, 16, 8
PLACES = ("plan", "dispatch", "combine", "combine's backward", "dispatch's backward")
PROMPT_SECS = 10.0  # about one is promised; the machine may be busy
LONG_SECS = 60.0  # timeout_secs where it must not be what ends a wait


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    yield
    after = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert after <= before


@contextlib.contextmanager
def fresh_pool(num_ranks: int) -> Iterator[RankPool]:
    """A pool of its own for ranks that come to grief; none of their processes may be left."""
    with RankPool(num_ranks) as pool:
        yield pool
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pool.pids):
        assert time.monotonic() < deadline, f"a process of {pool.pids} is left"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def make_buffer(transport: str, timeout_secs: float, group: Any = None) -> moonep.Buffer:
    return moonep.Buffer(
        group,
        num_experts=E,
        top_k=K,
        hidden=H,
        max_tokens=T,
        dtype=torch.float32,
        transport=transport,
        timeout_secs=timeout_secs,
    )


def step(ep: moonep.Buffer, before: Callable[[str], None] = lambda place: None) -> torch.Tensor:
    """A step of training, told by `before` where it is. Returns y."""
    idx = (torch.arange(T * K).view(T, K) * 3 + ep.rank) % E
    x = torch.randn(T, H, requires_grad=True)
    before("plan")
    plan = ep.plan(idx)
    before("dispatch")
    recv = ep.dispatch(x, plan)
    recv.x.register_hook(lambda grad: before("dispatch's backward"))
    before("combine")
    y = ep.combine(recv.x, plan)
    before("combine's backward")
    y.sum().backward()
    assert torch.allclose(y, x * K)
    assert torch.allclose(x.grad, torch.full_like(x, K))
    return y


def wait_for(condition: Callable[[], bool], what: str, timeout_secs: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_secs
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def new_group(directory: str, name: str, rank: int, num_ranks: int) -> None:
    """The default group again, among those who are left."""
    dist.destroy_process_group()
    store = dist.FileStore(os.path.join(directory, name), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)


# ---- a peer dies ----


def die_in_turn(rank: int, transport: str, places: list[str], directory: str) -> list[Any]:
    """At every place the last rank dies, and the others go on as a smaller group. Returns what each saw.

    It dies while the others wait for it, or, every other time, perhaps before they do.
    """
    seen = []
    for generation, place in enumerate(places):
        num_ranks = dist.get_world_size()
        ep = make_buffer(transport, LONG_SECS)
        step(ep)
        began = 0.0

        def before(here: str, place: str = place, victim: int = num_ranks - 1) -> None:
            nonlocal began
            began = time.monotonic()
            if here == place and dist.get_rank() == victim:
                time.sleep(0.4 if PLACES.index(here) % 2 else 0.0)
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            step(ep, before)
            seen.append(("", "no error", 0.0, ""))
        except errors.MoonEPError as error:
            waited = time.monotonic() - began
            with pytest.raises(errors.BufferClosedError) as closed:
                ep.plan(torch.zeros(T, K, dtype=torch.int64))
            seen.append((type(error).__name__, str(error), waited, str(closed.value)))
        ep.close()
        new_group(directory, f"generation {generation}", dist.get_rank(), num_ranks - 1)
        with make_buffer(transport if num_ranks > 2 else "auto", LONG_SECS) as ep:
            for _ in range(3):
                step(ep)
    return seen


@pytest.mark.parametrize("places", [PLACES[:3], PLACES[2:]], ids=["forward", "backward"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed(transport: str, places: tuple[str, ...], tmp_path: Path) -> None:
    with fresh_pool(4) as pool:
        pids = pool.pids
        pool.start(die_in_turn, transport, list(places), str(tmp_path))
        outcomes = pool.collect(80)
    assert [outcome.exitcode for outcome in outcomes[1:]] == [-signal.SIGKILL] * 3
    assert outcomes[0].error is None, outcomes[0].traceback
    for victim, place, (kind, text, waited_secs, closed) in zip((3, 2, 1), places, outcomes[0].result, strict=True):
        assert kind == "PeerLostError", text
        assert text == f"{place}: rank {victim} (pid {pids[victim]}) ended"
        assert waited_secs < PROMPT_SECS
        assert f"the Buffer is closed: PeerLostError: {text}" in closed


def one_dies(rank: int, transport: str, place: str, victim: int) -> tuple[str, str, float]:
    ep = make_buffer(transport, LONG_SECS)
    step(ep)
    began = 0.0

    def before(here: str) -> None:
        nonlocal began
        began = time.monotonic()
        if here == place and rank == victim:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        step(ep, before)
    except errors.MoonEPError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "no error", 0.0


@pytest.mark.parametrize("place", ["plan", "combine's backward"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_survivor_names_the_dead(transport: str, place: str) -> None:
    """Also rank 0, which holds what the ranks of a group share."""
    with fresh_pool(4) as pool:
        pool.start(one_dies, transport, place, 0)
        outcomes = pool.collect(60)
        for outcome in outcomes[1:]:
            assert outcome.error is None, outcome.traceback
            kind, text, waited_secs = outcome.result
            assert (kind, text) == ("PeerLostError", f"{place}: rank 0 (pid {pool.pids[0]}) ended")
            assert waited_secs < PROMPT_SECS


def die_while_making(rank: int, transport: str) -> tuple[str, str]:
    if rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        make_buffer(transport, LONG_SECS)
    except errors.MoonEPError as error:
        return type(error).__name__, str(error)
    return "", "no error"


def test_killed_while_others_make_a_buffer() -> None:
    with fresh_pool(2) as pool:
        pool.start(die_while_making, "auto")
        survivor = pool.collect(30)[0]
    assert survivor.error is None, survivor.traceback
    assert survivor.result[0] == "PeerLostError"
    assert "making a Buffer" in survivor.result[1]


def one_is_late(rank: int, victim: int, directory: str) -> tuple[str, str]:
    """The last to make a Buffer does so after the others have given up."""
    if rank == victim:
        wait_for(lambda: len(os.listdir(directory)) == dist.get_world_size() - 1, "the others wait on")
        return "", ""
    try:
        make_buffer("auto", 1.5)
        found = "", "no error"
    except Exception as error:
        found = type(error).__name__, str(error)
    Path(directory, str(rank)).touch()
    return found


@pytest.mark.parametrize(("num_ranks", "victim"), [(2, 0), (4, 3)])
def test_late_while_others_make_a_buffer(num_ranks: int, victim: int, tmp_path: Path) -> None:
    """Whose process ids nobody knows yet."""
    with fresh_pool(num_ranks) as pool:
        found = pool.run(one_is_late, victim, str(tmp_path))
    assert found.pop(victim) == ("", "")
    for each in found:
        assert each == ("PeerTimeoutError", f"making a Buffer: no answer from rank {victim} within 1.5 s")


# ---- a peer stops, or stays away ----


def one_stops(rank: int, transport: str, place: str, victim: int, directory: str) -> tuple[str, str, float]:
    ep = make_buffer(transport, 2.0)
    step(ep)
    began = 0.0

    def before(here: str) -> None:
        nonlocal began
        began = time.monotonic()
        if here == place and rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)

    try:
        step(ep, before)
        found = "", "no error", 0.0
    except errors.MoonEPError as error:
        found = type(error).__name__, str(error), time.monotonic() - began
    Path(directory, str(rank)).touch()
    with pytest.raises(errors.BufferClosedError):
        ep.plan(torch.zeros(T, K, dtype=torch.int64))
    return found


@pytest.mark.parametrize(
    ("num_ranks", "place"),
    [
        (2, "dispatch"),
        (4, "dispatch's backward"),
        pytest.param(2, "plan", marks=pytest.mark.slow),
        pytest.param(4, "combine", marks=pytest.mark.slow),
        pytest.param(4, "combine's backward", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stopped(transport: str, num_ranks: int, place: str, tmp_path: Path) -> None:
    victim = 1
    with fresh_pool(num_ranks) as pool:
        pool.start(one_stops, transport, place, victim, str(tmp_path))
        others = [tmp_path / str(rank) for rank in range(num_ranks) if rank != victim]
        try:
            wait_for(lambda: all(other.exists() for other in others), "the others wait on")
        finally:
            os.kill(pool.pids[victim], signal.SIGCONT)
        outcomes = pool.collect(30)
        for rank, outcome in enumerate(outcomes):
            assert outcome.error is None, outcome.traceback
            kind, text, waited_secs = outcome.result
            assert kind == "PeerTimeoutError", text
            if rank != victim:
                assert text == f"{place}: no answer from rank {victim} (pid {pool.pids[victim]}) within 2 s"
                assert 1.9 < waited_secs < 2 + PROMPT_SECS


def one_skips(rank: int, transport: str, victim: int, directory: str) -> tuple[str, str]:
    ep = make_buffer(transport, 1.5)
    plan = ep.plan(torch.zeros(T, K, dtype=torch.int64))
    num_ranks = dist.get_world_size()
    if rank == victim:
        others = [Path(directory, str(other)) for other in range(num_ranks) if other != victim]
        wait_for(lambda: all(other.exists() for other in others), "the others wait on")
    try:
        ep.dispatch(torch.randn(T, H), plan)
        found = "", "no error"
    except errors.MoonEPError as error:
        found = type(error).__name__, str(error)
    Path(directory, str(rank)).touch()
    return found


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_skips_a_verb(transport: str, num_ranks: int, tmp_path: Path) -> None:
    victim = num_ranks - 1
    with fresh_pool(num_ranks) as pool:
        found = pool.run(one_skips, transport, victim, str(tmp_path))
        for rank, (kind, text) in enumerate(found):
            assert kind == "PeerTimeoutError", text
            if rank != victim:
                assert text == f"dispatch: no answer from rank {victim} (pid {pool.pids[victim]}) within 1.5 s"


# ---- a peer leaves early ----


def one_closes(rank: int, transport: str, directory: str) -> tuple[str, str, float]:
    ep = make_buffer(transport, 2.0)
    step(ep)
    began = time.monotonic()
    if rank == 1:
        ep.close()
    try:
        ep.plan(torch.zeros(T, K, dtype=torch.int64))
        found = "", "no error", 0.0
    except errors.MoonEPError as error:
        found = type(error).__name__, str(error), time.monotonic() - began
    new_group(directory, transport, rank, dist.get_world_size())  # an unfinished collective is left in the old one
    with make_buffer(transport, LONG_SECS) as ep:
        step(ep)
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_closes_early(num_ranks: int, tmp_path: Path) -> None:
    with fresh_pool(num_ranks) as pool:
        for transport in TRANSPORTS:
            found = pool.run(one_closes, transport, str(tmp_path))
            assert found.pop(1)[0] == "BufferClosedError"
            for kind, text, waited_secs in found:
                assert f"plan: rank 1 (pid {pool.pids[1]}) closed its Buffer" == text or "no answer from rank 1" in text
                assert kind == ("TransportError" if transport == "shm" else "PeerTimeoutError")
                assert waited_secs < 2 + PROMPT_SECS


def last_verb_then_close(rank: int, transport: str) -> None:
    """A rank that has done its part may close while others are still in the verb."""
    for turn in range(12):
        ep = make_buffer(transport, 20.0)
        if turn % dist.get_world_size() == rank:
            time.sleep(0.002)
        step(ep)
        ep.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closing_after_the_last_verb(transport: str) -> None:
    with fresh_pool(4) as pool:
        pool.run(last_verb_then_close, transport)


def interrupted(rank: int, transport: str) -> tuple[str, float]:
    """Ctrl-C ends a wait at once."""
    ep = make_buffer(transport, LONG_SECS)
    if rank == 1:
        time.sleep(2.0)
        return "", 0.0
    began = time.monotonic()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        ep.plan(torch.zeros(T, K, dtype=torch.int64))
    except KeyboardInterrupt:
        return "KeyboardInterrupt", time.monotonic() - began
    return "no error", 0.0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_interrupted(transport: str) -> None:
    with fresh_pool(2) as pool:
        kind, waited_secs = pool.run(interrupted, transport)[0]
    assert kind == "KeyboardInterrupt"
    assert waited_secs < 1.8


# ---- a Buffer that is closed while a verb of it is at work ----


def closed_by_a_thread(rank: int, transport: str, rounds: int) -> list[str]:
    """How the verbs ended on this rank."""
    ends = []
    hidden = 1 << 14
    for i in range(rounds):
        ep = moonep.Buffer(num_experts=8, top_k=2, hidden=hidden, max_tokens=256, transport=transport, timeout_secs=3)
        idx = torch.arange(512).view(256, 2) % 8
        x = torch.zeros(256, hidden, dtype=torch.bfloat16)
        timer = threading.Timer(0.002 * (i % 7), ep.close)
        if rank == 0:
            timer.start()
        try:
            while True:
                plan = ep.plan(idx)
                recv = ep.dispatch(x, plan)
                ep.combine(recv.x, plan, recv.weights)
        except moonep.errors.MoonEPError as error:
            ends.append(type(error).__name__)
        if rank == 0:
            timer.join()
        ep.close()
    return ends


def test_closed_by_a_thread() -> None:
    """Memory must not go while rows are moved in it."""
    with fresh_pool(2) as pool:
        mine, theirs = pool.run(closed_by_a_thread, "shm", 12, timeout_secs=90)
    assert set(mine) <= {"BufferClosedError", "TransportError"}
    assert set(theirs) == {"TransportError"}
