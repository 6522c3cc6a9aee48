"""One torch.distributed group: bounded collectives of plain bytes, the ranks' names, and who of them still lives."""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moonep import _C, env, machine
from moonep.errors import PeerLostError, PeerTimeoutError, TransportError

__all__ = ["Group"]

_SLICE_SECS = 0.2  # how often a wait looks at the peers' processes
_POST_AFTER_SECS = 0.5  # a rank that has waited so long says where it waits
_GRACE_SECS = 1.0  # how long a broken connection waits for the kernel to tell which process ended
_RECORD_BYTES = 8192


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
        self._pids = [os.getpid()]
        self._exchanges = 0
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
        """The process id of every rank, as that rank sees it."""
        return self._pids

    def gather_records(self, record: dict[str, Any], doing: str) -> list[dict[str, Any]]:
        """A small JSON object of texts and numbers from every rank; long texts are cut. Collective."""
        longest = (_RECORD_BYTES - 4) // (8 * len(record))  # a character takes up to 6 bytes, a key some
        short = {key: value[:longest] if isinstance(value, str) else value for key, value in record.items()}
        data = json.dumps(short).encode()
        packed = len(data).to_bytes(4, "little") + data
        gathered = self.all_gather(packed.ljust(_RECORD_BYTES, b"\0"), doing)
        return [json.loads(each[4 : 4 + int.from_bytes(each[:4], "little")]) for each in gathered]

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
        self._run(
            doing,
            lambda: dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=self.group, async_op=True),
        )

    def _run(self, doing: str, start: Any) -> None:
        """Starts a collective and waits for it: bounded, watching the peers, open to Ctrl-C."""
        self._exchanges += 1
        began, posted = time.monotonic(), False
        try:
            work = start()
            if self.device.type != "cpu":
                work.wait()
                return
            while True:
                slice_secs = min(_SLICE_SECS, self.timeout_secs)
                try:
                    work.wait(timedelta(seconds=slice_secs))
                    return
                except RuntimeError:
                    # A slice that ran out and a broken connection both come here; only the latter has ended the work.
                    if work.is_completed():
                        raise
                lost = self.lost_ranks()
                if lost:
                    raise PeerLostError(f"{doing}: {self.describe(lost)} ended")
                waited = time.monotonic() - began
                if waited >= self.timeout_secs:
                    missing = self._ranks_not_waiting()
                    who = self.describe(missing) if missing else "a peer that cannot be told"
                    raise PeerTimeoutError(f"{doing}: no answer from {who} within {self.timeout_secs:g} s")
                if waited >= _POST_AFTER_SECS and not posted:
                    self._post_waiting()
                    posted = True
        except RuntimeError as error:
            if isinstance(error, TransportError):
                raise
            raise self._explain(doing, error) from error

    def _explain(self, doing: str, error: RuntimeError) -> TransportError:
        end = time.monotonic() + _GRACE_SECS
        while time.monotonic() < end:
            lost = self.lost_ranks()
            if lost:
                return PeerLostError(f"{doing}: {self.describe(lost)} ended")
            time.sleep(0.01)
        return PeerLostError(f"{doing}: the connection to a peer broke; no process of this host has ended: {error}")

    def lost_ranks(self) -> list[int]:
        """Ranks whose process is seen to have ended."""
        return [rank for rank, pidfd in self._pidfds.items() if not _C.is_alive(pidfd)]

    def describe(self, ranks: Sequence[int]) -> str:
        """Who `ranks` are, with their process ids."""
        return ", ".join(f"{self.names[rank]} (pid {self._pids[rank]})" for rank in ranks)

    # A collective that runs out of time does not say who is missing. So a rank that waits long writes down, in the
    # store that the process group was made with, which exchange it waits in; whoever has not written is missing.
    # The store is reached through a private name of torch; without it nobody is named, and that is all.

    def _store(self) -> Any:
        try:
            return dist.distributed_c10d._get_process_group_store(self.group)  # type: ignore[arg-type]
        except (AttributeError, KeyError, RuntimeError):
            return None

    def _key(self, rank: int) -> str:
        return f"moonep/waiting/{rank}/{self._exchanges}"

    def _post_waiting(self) -> None:
        store = self._store()
        if store is not None:
            store.set(self._key(self.rank), "")

    def _ranks_not_waiting(self) -> list[int]:
        store = self._store()
        if store is None:
            return []
        self._post_waiting()
        try:
            others = (rank for rank in range(self.num_ranks) if rank != self.rank)
            return [rank for rank in others if not store.check([self._key(rank)])]
        except RuntimeError:  # the store's own process is gone
            return []

    def close(self) -> None:
        """Stops watching. Local."""
        self._close_pidfds()


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
