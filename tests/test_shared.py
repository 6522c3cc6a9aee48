"""How ranks meet in shared memory, with ranks as threads of one process, and as child processes where one must die."""

import ctypes
import errno
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from moonep import _C

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")

DONE, TIMED_OUT, LOST, CLOSED, ERROR = range(5)
STAGING = 1 << 16


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_segments() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:moonep")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = num_fds(), num_segments()
    yield
    assert (num_fds(), num_segments()) == before


@contextmanager
def ranks(count: int, staging_bytes: int = STAGING) -> Iterator[list[_C.SharedGroup]]:
    """Connected ranks of this process."""
    groups = [_C.SharedGroup(rank, count, staging_bytes) for rank in range(count)]
    try:
        for rank, group in enumerate(groups):
            for peer, other in enumerate(groups):
                if peer != rank:
                    assert group.connect(peer, os.getpid(), other.segment_fd, other.nonce) == ""
        yield groups
    finally:
        for group in groups:
            group.close()


def run_on_all(groups: list[_C.SharedGroup], body: Callable[[int, _C.SharedGroup], object]) -> list[object]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return [each.result(60) for each in [pool.submit(body, rank, group) for rank, group in enumerate(groups)]]


def staging(group: _C.SharedGroup, rank: int, phase: int, num_bytes: int = STAGING) -> torch.Tensor:
    """The staging half as int64."""
    memory = (ctypes.c_char * num_bytes).from_address(group.staging(rank, phase))
    return torch.frombuffer(memory, dtype=torch.int64)


# ---- meeting ----


@pytest.mark.parametrize(("num_ranks", "phases"), [(2, 3000), (3, 1500), (4, 1000)])
def test_what_peers_wrote_is_read(num_ranks: int, phases: int) -> None:
    """Thousands of phases; now and then a rank is late, before or after it announces."""

    def work(rank: int, group: _C.SharedGroup) -> None:
        order = random.Random(rank)
        for phase in range(1, phases + 1):
            assert group.phase == phase
            if order.random() < 0.01:
                time.sleep(order.random() * 0.002)
            group.write_header(rank, f"{rank} {phase}".encode())
            staging(group, rank, phase).fill_(phase * num_ranks + rank)
            group.announce()
            if order.random() < 0.01:
                time.sleep(order.random() * 0.002)
            assert group.wait(30.0)[0] == DONE
            for peer in range(num_ranks):
                assert group.read_header(peer).startswith(f"{peer} {phase}".encode())
                read = staging(group, peer, phase)
                assert int(read[0]) == int(read[-1]) == phase * num_ranks + peer
                if phase % 100 == 0:
                    assert (read == phase * num_ranks + peer).all()

    with ranks(num_ranks) as groups:
        run_on_all(groups, work)


def test_headers_are_cut_to_their_size() -> None:
    with ranks(2) as groups:
        groups[0].write_header(0, b"x" * (_C.HEADER_BYTES + 1000))
        groups[1].write_header(1, b"short")
        for group in groups:
            group.announce()
        for group in groups:
            assert group.wait(5.0)[0] == DONE
            assert group.read_header(0) == b"x" * _C.HEADER_BYTES
            assert group.read_header(1).startswith(b"short")


def test_staging_halves_do_not_overlap() -> None:
    with ranks(2, staging_bytes=5000) as groups:
        for group in groups:
            for rank in range(2):
                first, second = (group.staging(rank, phase) for phase in (0, 1))
                assert second - first >= 5000
                assert first % 4096 == second % 4096 == 0
                assert group.staging(rank, 2) == first
        torch.frombuffer((ctypes.c_char * 5000).from_address(groups[0].staging(0, 1)), dtype=torch.uint8).fill_(7)
        assert (staging(groups[1], 0, 1, 4096) == 0x0707070707070707).all()
        assert (staging(groups[1], 0, 0, 4096) == 0).all()


def test_one_rank_waits_for_nobody() -> None:
    with ranks(1) as (group,):
        for _ in range(100):
            group.announce()
            assert group.wait(1.0)[0] == DONE


# ---- what ends a wait ----


def test_timeout_names_who_is_awaited() -> None:
    with ranks(3) as groups:
        groups[0].announce()
        groups[1].announce()
        for group in groups[:2]:
            began = time.monotonic()
            assert group.wait(0.3) == (TIMED_OUT, 2, 0)
            assert 0.3 <= time.monotonic() - began < 3.0
        # A late peer is still welcome.
        groups[2].announce()
        assert [group.wait(5.0)[0] for group in groups] == [DONE] * 3


def test_closed_peer_ends_the_wait_at_once() -> None:
    for delay in (0.0, 0.2):
        with ranks(3) as groups:
            groups[0].announce()
            groups[2].announce()
            closer = threading.Timer(delay, groups[1].close)
            closer.start()
            began = time.monotonic()
            assert groups[0].wait(30.0) == (CLOSED, 1, 0)
            assert groups[2].wait(30.0) == (CLOSED, 1, 0)
            assert time.monotonic() - began < delay + 3.0
            closer.join()


def test_a_peer_that_announced_and_closed_has_done_its_part() -> None:
    with ranks(3) as groups:
        staging(groups[1], 1, 1).fill_(42)
        groups[0].announce()
        groups[1].announce()
        groups[1].close()
        threading.Timer(0.2, groups[2].announce).start()
        assert groups[0].wait(30.0)[0] == DONE
        assert (staging(groups[0], 1, 1) == 42).all()
        groups[0].announce()
        assert groups[0].wait(30.0) == (CLOSED, 1, 0)


def test_recorded_error_ends_every_wait() -> None:
    with ranks(3) as groups:
        groups[0].announce()
        groups[1].announce()
        assert {group.recorded_error for group in groups} == {0}
        threading.Timer(0.2, groups[2].record_error, [77]).start()
        outcomes = run_on_all(groups[:2], lambda _, group: group.wait(30.0))
        assert [(kind, error) for kind, _, error in outcomes] == [(ERROR, 77)] * 2  # type: ignore[misc]
        assert {group.recorded_error for group in groups} == {77}


def test_an_error_of_a_later_phase_waits_for_it() -> None:
    """A slow rank still completes what everybody did; it raises in the phase in which the error happened."""
    with ranks(2) as groups:
        for group in groups:
            group.announce()
        assert groups[1].wait(5.0)[0] == DONE
        groups[1].announce()
        error = groups[1].record_error(5)
        assert error == 2 << 32 | 5
        assert groups[0].wait(5.0)[0] == DONE
        groups[0].announce()
        assert groups[0].wait(5.0)[::2] == (ERROR, error)


def test_the_first_error_stands() -> None:
    for _ in range(20):
        with ranks(4) as groups:
            stands = run_on_all(groups, lambda rank, group: group.record_error(rank + 1))
            assert len(set(stands)) == 1
            assert stands[0] in (1, 2, 3, 4)
            assert {group.recorded_error for group in groups} == set(stands)
            assert groups[0].record_error(99) == stands[0]


def test_interrupt_ends_the_wait() -> None:
    with ranks(2) as groups:
        groups[0].announce()
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        began = time.monotonic()
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            groups[0].wait(30.0)
        assert time.monotonic() - began < 1.0
        timer.join()
        # The interrupted rank can wait again.
        groups[1].announce()
        assert groups[0].wait(5.0)[0] == DONE


def test_other_signals_do_not_end_the_wait() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        with ranks(2) as groups:
            groups[0].announce()
            timers = [threading.Timer(0.1 * i, os.kill, (os.getpid(), signal.SIGUSR1)) for i in range(1, 4)]
            timers.append(threading.Timer(0.5, groups[1].announce))
            for timer in timers:
                timer.start()
            assert groups[0].wait(30.0)[0] == DONE
            for timer in timers:
                timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert set(seen) == {signal.SIGUSR1}  # how many is not told: equal signals that wait for a handler are one


# ---- connecting ----


def test_wrong_nonce_is_refused() -> None:
    for nonce in (b"0" * 16, b"", b"0" * 15):
        groups = [_C.SharedGroup(rank, 2, STAGING) for rank in range(2)]
        assert "is not the peer" in groups[0].connect(1, os.getpid(), groups[1].segment_fd, nonce)
        for group in groups:
            group.close()


def test_a_peer_of_the_same_size_but_another_group_is_refused() -> None:
    groups, others = ([_C.SharedGroup(rank, 2, STAGING) for rank in range(2)] for _ in range(2))
    assert "is not the peer" in groups[0].connect(1, os.getpid(), others[1].segment_fd, groups[1].nonce)
    for group in groups + others:
        group.close()


def test_wrong_descriptors_are_refused() -> None:
    group, peer = (_C.SharedGroup(rank, 2, STAGING) for rank in range(2))
    size = os.fstat(peer.segment_fd).st_size
    too_small, too_large, unsealed = (os.memfd_create("moonep") for _ in range(3))
    for fd, length in ((too_small, size - 4096), (too_large, size + 4096), (unsealed, size)):
        os.ftruncate(fd, length)
    null = os.open("/dev/null", os.O_RDWR)
    other_settings = _C.SharedGroup(1, 2, 2 * STAGING)
    for fd, reason in [
        (too_small, "its memory has another size"),
        (too_large, "its memory has another size"),
        (null, "its memory has another size"),
        (other_settings.segment_fd, "its memory has another size"),
        (unsealed, "its memory is not sealed"),
        (10**6, f"opening its memory: {os.strerror(errno.ENOENT)}"),
        (-1, f"opening its memory: {os.strerror(errno.ENOENT)}"),
    ]:
        fresh = _C.SharedGroup(0, 2, STAGING)
        assert fresh.connect(1, os.getpid(), fd, peer.nonce) == reason
        fresh.close()
    for fd in (too_small, too_large, unsealed, null):
        os.close(fd)
    for each in (group, peer, other_settings):
        each.close()


def test_a_process_that_has_ended_is_refused() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    group = _C.SharedGroup(0, 2, STAGING)
    assert group.connect(1, child.pid, group.segment_fd, group.nonce).startswith("watching the process")
    group.close()


def test_after_release_nobody_connects() -> None:
    with ranks(2) as groups:
        fd, nonce = groups[0].segment_fd, groups[0].nonce
        before = num_fds()
        groups[0].release_fd()
        groups[0].release_fd()
        assert num_fds() == before - 1
        assert groups[0].segment_fd == -1
        late = _C.SharedGroup(1, 2, STAGING)
        assert late.connect(0, os.getpid(), fd, nonce) != ""
        late.close()
        for group in groups:
            group.announce()
        assert groups[1].wait(5.0)[0] == DONE


# ---- giving back ----


def test_descriptors_and_mappings_are_given_back() -> None:
    before = num_fds(), num_segments()
    for _ in range(200):
        with ranks(3, staging_bytes=4096) as groups:
            assert num_segments() == before[1] + 9
            for group in groups:
                group.release_fd()
        for group in groups:
            group.close()  # again
        assert (num_fds(), num_segments()) == before


def test_dropping_closes() -> None:
    before = num_fds(), num_segments()
    groups = [_C.SharedGroup(rank, 2, STAGING) for rank in range(2)]
    assert groups[0].connect(1, os.getpid(), groups[1].segment_fd, groups[1].nonce) == ""
    groups[0].announce()
    del groups[1]
    assert groups[0].wait(10.0) == (CLOSED, 1, 0)
    del groups
    assert (num_fds(), num_segments()) == before


@contextmanager
def limited(limit: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)


def lowest_free_fd() -> int:
    fd = os.dup(0)
    os.close(fd)
    return fd


def address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


@pytest.mark.parametrize(
    ("limit", "soft", "staging_bytes", "reason"),
    [
        (resource.RLIMIT_NOFILE, lowest_free_fd, STAGING, f"memfd_create: {os.strerror(errno.EMFILE)}"),
        (resource.RLIMIT_FSIZE, lambda: 1 << 20, 2**45, f"ftruncate: {os.strerror(errno.EFBIG)}"),
        (
            resource.RLIMIT_AS,
            lambda: address_space_bytes() + (16 << 20),
            32 << 20,
            f"mapping shared memory: {os.strerror(errno.ENOMEM)}",
        ),
    ],
    ids=["descriptors", "size", "address space"],
)
def test_what_cannot_be_had_is_an_error_and_leaks_nothing(
    limit: int, soft: Callable[[], int], staging_bytes: int, reason: str
) -> None:
    before = num_fds(), num_segments()
    bound = soft()
    with limited(limit, bound):
        caught = []
        for _ in range(3):
            try:
                _C.SharedGroup(0, 2, staging_bytes)
            except RuntimeError as error:
                caught.append(str(error))
    assert caught == [reason] * 3
    assert (num_fds(), num_segments()) == before
    with ranks(2):
        pass


SIGNALLED = """
import signal
from moonep import _C
signal.signal(signal.SIGALRM, lambda number, frame: None)
signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
_C.SharedGroup(0, 1, 64 << 20).close()
print("made")
"""


def test_a_timer_that_ticks_does_not_keep_memory_from_being_reserved() -> None:
    """On some kernels every signal undoes what was reserved since they were asked."""
    done = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, timeout=30)
    assert done.stdout == "made\n", done.stderr


def test_a_peer_that_cannot_be_mapped_leaks_nothing() -> None:
    groups = [_C.SharedGroup(rank, 2, 32 << 20) for rank in range(2)]
    with limited(resource.RLIMIT_AS, address_space_bytes() + (16 << 20)):
        reason = groups[0].connect(1, os.getpid(), groups[1].segment_fd, groups[1].nonce)
    assert reason == f"mapping its memory: {os.strerror(errno.ENOMEM)}"
    for group in groups:
        group.close()


# ---- other processes ----


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_touches_nothing() -> None:
    with ranks(2) as groups:
        staging(groups[0], 0, 1).fill_(3)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                in_child = num_segments()
                for group in groups:
                    group.close()
                del groups
                status = 0 if in_child == 0 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        groups[1].announce()
        threading.Timer(0.2, groups[0].announce).start()
        assert groups[1].wait(10.0)[0] == DONE, "the child's close is not this rank's"
        assert (staging(groups[1], 0, 1) == 3).all()


# Rank 1 of 2 as a process: connects, announces as often as it is told to, and then does what it is told.
CHILD = """
import os, signal, sys, time
from moonep import _C
parent, fd, nonce, staging_bytes, announcements, end = sys.argv[1:]
group = _C.SharedGroup(1, 2, int(staging_bytes))
print(group.segment_fd, group.nonce.hex(), flush=True)
failure = group.connect(0, int(parent), int(fd), bytes.fromhex(nonce))
print(failure or "connected", flush=True)
for _ in range(int(announcements)):
    group.announce()
sys.stdin.readline()
if end == "exit":
    os._exit(0)
if end == "close":
    group.close()
    print("closed", flush=True)
if end == "wait":
    print(group.wait(10.0)[0], flush=True)
time.sleep(60)
"""


@contextmanager
def child_rank(end: str, announcements: int = 0) -> Iterator[tuple[_C.SharedGroup, subprocess.Popen[str]]]:
    group = _C.SharedGroup(0, 2, STAGING)
    args = [os.getpid(), group.segment_fd, group.nonce.hex(), STAGING, announcements, end]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        fd, nonce = child.stdout.readline().split()
        assert child.stdout.readline() == "connected\n"
        assert group.connect(1, child.pid, int(fd), bytes.fromhex(nonce)) == ""
        yield group, child
    finally:
        group.close()
        child.kill()
        child.communicate()


def tell(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


@pytest.mark.parametrize("end", ["killed", "exit"])
def test_a_peer_that_ends_is_lost_within_a_second(end: str) -> None:
    """Nobody has reaped it yet: a zombie has ended, too."""
    with child_rank(end) as (group, child):
        group.announce()
        ender = threading.Timer(0.3, (lambda: tell(child)) if end == "exit" else child.kill)
        began = time.monotonic()
        ender.start()
        assert group.wait(30.0) == (LOST, 1, 0)
        assert time.monotonic() - began < 1.3
        ender.join()


def test_a_peer_that_announced_and_ended_has_done_its_part() -> None:
    with child_rank("exit", announcements=1) as (group, child):
        tell(child)
        child.wait(10)
        group.announce()
        assert group.wait(10.0)[0] == DONE
        group.announce()
        assert group.wait(10.0) == (LOST, 1, 0)


def test_a_stopped_peer_is_late_not_lost() -> None:
    with child_rank("wait") as (group, child):
        child.send_signal(signal.SIGSTOP)
        group.announce()
        assert group.wait(0.4) == (TIMED_OUT, 1, 0)
        child.send_signal(signal.SIGCONT)


def test_a_process_that_sleeps_is_woken() -> None:
    with child_rank("wait", announcements=1) as (group, child):
        tell(child)
        time.sleep(0.3)
        group.announce()
        assert group.wait(10.0)[0] == DONE
        assert child.stdout is not None
        assert child.stdout.readline() == f"{DONE}\n"


def test_a_process_that_closes_is_told_from_one_that_ends() -> None:
    with child_rank("close") as (group, child):
        group.announce()
        tell(child)
        assert group.wait(10.0) == (CLOSED, 1, 0)
        assert child.poll() is None


def test_pidfd() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = _C.open_pidfd(child.pid)
    assert _C.is_alive(pidfd)
    child.kill()
    end = time.monotonic() + 5
    while _C.is_alive(pidfd) and time.monotonic() < end:
        time.sleep(0.01)
    assert not _C.is_alive(pidfd)  # a zombie still
    child.communicate()
    assert not _C.is_alive(pidfd)
    os.close(pidfd)
    assert _C.open_pidfd(child.pid) == -1


# ---- close during a wait ----

CLOSE_IN_HANDLER = """
import os, signal, threading
from moonep import _C
groups = [_C.SharedGroup(rank, 2, 4096) for rank in range(2)]
assert groups[0].connect(1, os.getpid(), groups[1].segment_fd, groups[1].nonce) == ""
signal.signal(signal.SIGTERM, lambda *_: groups[0].close())
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
groups[0].announce()
print(groups[0].wait(2.0)[0])
"""
CLOSE_IN_THREAD = CLOSE_IN_HANDLER.replace("os.kill, (os.getpid(), signal.SIGTERM)", "groups[0].close")


@pytest.mark.parametrize("code", [CLOSE_IN_HANDLER, CLOSE_IN_THREAD], ids=["signal handler", "thread"])
def test_close_during_a_wait_ends_it(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode >= 0, f"ended by signal {-done.returncode}"


def test_a_refused_connection_can_be_tried_again() -> None:
    groups = [_C.SharedGroup(rank, 2, STAGING) for rank in range(2)]
    before = num_fds(), num_segments()
    try:
        for _ in range(3):
            assert groups[0].connect(1, os.getpid(), groups[1].segment_fd, b"0" * 16) != ""
        assert (num_fds(), num_segments()) == before
    finally:
        for group in groups:
            group.close()
