"""One torch.distributed group: bounded collectives of plain bytes, the ranks' names, and who of them still lives."""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moonep import _C, env, machine
from moonep.errors import PeerLostError, PeerTimeoutError, TransportError
from moonep.transport.waiting import WaitingList

__all__ = ["FIRST_BYTES", "VERB", "Group"]

_SLICE_SECS = 0.2  # how often a wait looks at the peers' processes
_POST_AFTER_SECS = 0.5  # a rank that has waited so long says where it waits
_GRACE_SECS = 1.0  # how long a broken connection waits for the kernel to tell which process ended
FIRST_BYTES = 4096  # holds a verb's header, and the counts of up to 896 experts
_RECORD, VERB = b"record  ", b"verb    "
_KINDS = {_RECORD: "making a Buffer", VERB: "a verb of another Buffer"}


class Group:
    """The ranks of a Buffer; rank and num_ranks are the group's own. Without a process group: one rank."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_secs: float):
        self.group, self.timeout_secs = group, timeout_secs
        self.rank = dist.get_rank(group) if group is not None else 0
        if self.rank < 0:
            raise ValueError("group: expected a group that this process belongs to")
        self.num_ranks = dist.get_world_size(group) if group is not None else 1
        self.device = torch.device("cpu")
        self.names = ["rank 0"]
        self.host_of_rank = [0]
        self.number = 0  # tells this group's Buffer from any other; the same on every rank
        self._pidfds: dict[int, int] = {}
        self._close_pidfds = weakref.finalize(self, _close_all, {}, os.getpid())
        self._pids: list[int] = []  # none before the ranks have met
        self._exchanges = 0
        self._waiting = WaitingList(group, self.rank, self.num_ranks)
        if group is not None:
            backend = str(dist.get_backend_config(group))
            if "cpu" not in backend and "gloo" not in backend and "mpi" not in backend:
                self.device = torch.device("cuda", torch.cuda.current_device())
            self.names = [_name(rank, dist.get_global_rank(group, rank)) for rank in range(self.num_ranks)]

    @staticmethod
    def resolve(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """The default group for None, when there is one."""
        if group is None and dist.is_available() and dist.is_initialized():
            return dist.group.WORLD
        return group

    def meet(self) -> None:
        """Learns who the ranks are: their hosts, and processes to watch. Collective."""
        mine = {"host": env.host_id(), "pid": os.getpid(), "pids": machine.pid_namespace(), "number": _random_number()}
        records = self.gather_records(mine, "making a Buffer")
        self.number = records[0]["number"]
        hosts = [record["host"] for record in records]
        self.host_of_rank = [hosts.index(host) for host in hosts]
        self._pids = [int(record["pid"]) for record in records]
        for rank, record in enumerate(records):
            same = (record["host"], record["pids"]) == (mine["host"], mine["pids"]) and record["pids"]
            if rank != self.rank and same:
                pidfd = _C.open_pidfd(self._pids[rank])
                if pidfd >= 0:
                    self._pidfds[rank] = pidfd
        self._close_pidfds = weakref.finalize(self, _close_all, self._pidfds, os.getpid())

    @property
    def ranks_here(self) -> int:
        """How many ranks share this rank's host."""
        return self.host_of_rank.count(self.host_of_rank[self.rank])

    @property
    def pids(self) -> Sequence[int]:
        """The process id of every rank, as that rank sees it; after `meet`."""
        return self._pids

    def gather_records(self, record: dict[str, Any], doing: str) -> list[dict[str, Any]]:
        """A small JSON object of texts and numbers from every rank; long texts are cut. Collective."""
        most_bytes = 3 * FIRST_BYTES // (4 * len(record))  # the rest is for keys and numbers
        short = {key: _cut(value, most_bytes) if isinstance(value, str) else value for key, value in record.items()}
        gathered = self.all_gather_first(_RECORD, json.dumps(short).encode(), doing)
        return [json.loads(each.rstrip(b"\0")) for each in gathered]

    def all_gather_first(self, kind: bytes, data: bytes, doing: str) -> list[bytes]:
        """At most FIRST_BYTES from every rank, padded with zeros, where ranks may not be about the same thing.

        `kind` says what this rank is about; TransportError when others say otherwise. All these exchanges have one
        size, because gloo ends the process when sizes differ.
        """
        assert len(data) <= FIRST_BYTES
        gathered = self.all_gather(kind + data.ljust(FIRST_BYTES, b"\0"), doing)
        for name, each in zip(self.names, gathered, strict=True):
            if each[: len(kind)] != kind:
                raise TransportError(
                    f"{doing}: {name} is doing something else: {_KINDS.get(each[:8], 'no MoonEP call')}"
                )
        return [each[len(kind) :] for each in gathered]

    def all_gather(self, data: bytes, doing: str) -> list[bytes]:
        """The same number of bytes from every rank. Collective."""
        if self.num_ranks == 1:
            return [data]
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        gathered = torch.empty(self.num_ranks, len(data), dtype=torch.uint8, device=self.device)
        self._run(doing, lambda: dist.all_gather(list(gathered.unbind()), mine, group=self.group, async_op=True))
        return [bytes(row) for row in gathered.cpu().numpy()]

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, receive_sizes: list[int], send_sizes: list[int], doing: str
    ) -> None:
        """Elements of `sent` in rank order to every rank, likewise received. Collective."""
        there, here = sent.to(self.device), received.to(self.device)
        self._run(
            doing,
            lambda: dist.all_to_all_single(here, there, receive_sizes, send_sizes, group=self.group, async_op=True),
        )
        if here is not received:
            received.copy_(here)

    def _run(self, doing: str, start: Callable[[], Any]) -> None:
        """Starts a collective and waits for it: bounded, watching the peers, open to Ctrl-C."""
        self._exchanges += 1
        exchange = f"{self.number}/{self._exchanges}"
        try:
            work = start()
            if self.device.type != "cpu":
                work.wait()  # for the stream; the group's own timeout bounds it
                return
            self._wait(doing, exchange, work)
        except RuntimeError as error:
            if isinstance(error, TransportError):
                raise
            raise self._explained(doing, error) from error

    def _wait(self, doing: str, exchange: str, work: Any) -> None:
        began, posted = time.monotonic(), False
        post_after_secs = min(_POST_AFTER_SECS, self.timeout_secs / 2)
        while not self._done(work, min(_SLICE_SECS, post_after_secs)):
            lost = self.lost_ranks()
            if lost and not self._done(work, _SLICE_SECS):  # a peer that did its part may end
                raise PeerLostError(f"{doing}: {self.describe(lost)} ended")
            waited = time.monotonic() - began
            if waited >= post_after_secs and not posted:
                self._waiting.enter(exchange)
                posted = True
            if waited >= self.timeout_secs:
                time.sleep(_SLICE_SECS)  # whoever came just before may not have written yet
                absent = self._waiting.absent(exchange)
                who = self.describe(absent) if absent else "a peer that cannot be told"
                raise PeerTimeoutError(f"{doing}: no answer from {who} within {self.timeout_secs:g} s")
        if posted:
            self._waiting.leave(exchange)

    @staticmethod
    def _done(work: Any, secs: float) -> bool:
        """Waits at most `secs`. Raises what broke the work."""
        try:
            work.wait(timedelta(seconds=max(secs, 0.001)))  # none at all would mean for ever
        except RuntimeError:
            # The time ran out, or the connection broke; only then the work has ended, or it has ended just now.
            if not work.is_completed():
                return False
            work.wait()
        return True

    def _explained(self, doing: str, error: RuntimeError) -> TransportError:
        """What a failed collective means. The kernel may need a moment to tell which process ended."""
        end = time.monotonic() + _GRACE_SECS
        while time.monotonic() < end:
            lost = self.lost_ranks()
            if lost:
                return PeerLostError(f"{doing}: {self.describe(lost)} ended")
            time.sleep(0.01)
        if any(word in str(error).lower() for word in ("connection", "read error", "write error", "socket", "peer")):
            return PeerLostError(f"{doing}: the connection to a peer broke; no process of this host has ended: {error}")
        return TransportError(f"{doing}: {error}")

    def lost_ranks(self) -> list[int]:
        """Ranks whose process is seen to have ended."""
        return [rank for rank, pidfd in self._pidfds.items() if not _C.is_alive(pidfd)]

    def describe(self, ranks: Sequence[int]) -> str:
        """Who `ranks` are, with their process ids once they have met."""
        pids = [f" (pid {pid})" for pid in self._pids] or [""] * self.num_ranks
        return ", ".join(self.names[rank] + pids[rank] for rank in ranks)

    def close(self) -> None:
        """Stops watching. Local."""
        self._close_pidfds()


def _cut(text: str, most_bytes: int) -> str:
    """The beginning of `text` that JSON holds in so many bytes; a character takes 1 to 12."""
    text = text[:most_bytes]
    while len(json.dumps(text)) > most_bytes:
        text = text[: -1 - len(text) // 16]
    return text


def _random_number() -> int:
    return int.from_bytes(os.urandom(7), "little")


def _close_all(pidfds: dict[int, int], pid: int) -> None:
    """Also when a Group is dropped without close(); in a forked child the numbers may mean other things."""
    if os.getpid() == pid:
        for pidfd in pidfds.values():
            os.close(pidfd)
    pidfds.clear()


def _name(rank: int, global_rank: int) -> str:
    return f"rank {rank}" if rank == global_rank else f"rank {rank} (global rank {global_rank})"
