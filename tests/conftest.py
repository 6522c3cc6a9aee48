"""Pools of ranks that the tests share, and what is said of tests that want a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moonep.testing import RankPool

RAN_BADLY = pytest.StashKey[bool]()
NO_GPU = "needs a CUDA device"


class Pools:
    """One pool for every number of ranks, started when it is first asked for."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def get(self, num_ranks: int) -> RankPool:
        if num_ranks not in self._pools or not self._pools[num_ranks].usable:
            self.discard(num_ranks)
            self._pools[num_ranks] = RankPool(num_ranks)
        return self._pools[num_ranks]

    def discard(self, num_ranks: int) -> None:
        if num_ranks in self._pools:
            self._pools.pop(num_ranks).close()

    def close(self) -> None:
        for num_ranks in list(self._pools):
            self.discard(num_ranks)


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


def lend(pools: Pools, num_ranks: int, request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """The shared pool; after a test that failed, the next one gets a fresh one."""
    yield pools.get(num_ranks)
    if request.node.stash.get(RAN_BADLY, False):
        pools.discard(num_ranks)


@pytest.fixture
def pool1(pools: Pools, request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """A process group of one."""
    yield from lend(pools, 1, request)


@pytest.fixture
def pool2(pools: Pools, request: pytest.FixtureRequest) -> Iterator[RankPool]:
    yield from lend(pools, 2, request)


@pytest.fixture
def pool4(pools: Pools, request: pytest.FixtureRequest) -> Iterator[RankPool]:
    yield from lend(pools, 4, request)


@pytest.fixture(params=[1, 2, 4], ids=lambda num_ranks: f"{num_ranks}ranks")
def pool(pools: Pools, request: pytest.FixtureRequest) -> Iterator[RankPool]:
    yield from lend(pools, request.param, request)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[RAN_BADLY] = True
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.getreports("skipped") if NO_GPU in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"skipped for want of a CUDA device: {len(skipped)}")
