"""Peers in the benchmark: how a method from outside joins, and benchmarks/peers, which needs other projects."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from moonep import Received, reference
from moonep.bench.config import Case, Peer, Settings
from moonep.bench.inputs import make_inputs
from moonep.bench.methods import make_method
from moonep.bench.options import make_settings
from moonep.bench.results import CaseResult
from moonep.bench.run import measure_case
from moonep.bench.table import case_table, configuration, json_lines
from moonep.bench.verify import VerificationError, verify_peers
from moonep.testing import RankPool

ROOT = Path(__file__).parents[1]
PACKAGES = {"megatron": "megatron-core", "torchtitan": "torchtitan", "deepspeed": "deepspeed"}
CASE = Case(8, 1.0)
SMALL = ["--experts", "32", "--topk", "4", "--hidden", "64", "--maxvio", "1", "--iterations", "2"]


# ---- a method from outside ----


class RoundsOften:
    """The reference's way, but sums at home in the rows' dtype, k descending."""

    def __init__(self, settings: Settings, case: Case):
        self._settings = settings

    def plan(self, topk_idx: torch.Tensor) -> Any:
        return reference.plan(topk_idx, num_experts=self._settings.num_experts)

    def dispatch(self, x: torch.Tensor, plan: Any, topk_weights: torch.Tensor) -> Received:
        return reference.dispatch(x, plan, topk_weights)

    def combine(self, expert_out: torch.Tensor, plan: Any, weights: torch.Tensor) -> torch.Tensor:
        rows = (expert_out * weights[:, None]).to(expert_out.dtype)
        rows = reference._send_home(rows, plan).flip(0)
        y = rows.new_zeros(plan.num_tokens, rows.shape[1])
        for token, row in zip(plan.sent_token.flip(0), rows, strict=True):
            y[token] += row
        return y

    def close(self) -> None:
        pass


class SwapsRows(RoundsOften):
    """Rank 1 gives two tokens each other's result."""

    def combine(self, expert_out: torch.Tensor, plan: Any, weights: torch.Tensor) -> torch.Tensor:
        y = super().combine(expert_out, plan, weights)
        if torch.distributed.get_rank() == 1:
            y[[0, 1]] = y[[1, 0]]
        return y


class AddsOnePercent(RoundsOften):
    """In bfloat16 no more than rounding."""

    def combine(self, expert_out: torch.Tensor, plan: Any, weights: torch.Tensor) -> torch.Tensor:
        return super().combine(expert_out, plan, weights * 1.01)


class GivesFloat32(RoundsOften):
    def combine(self, expert_out: torch.Tensor, plan: Any, weights: torch.Tensor) -> torch.Tensor:
        return super().combine(expert_out, plan, weights).float()


def settings_with(*peers: Peer) -> Settings:
    settings = make_settings(
        ranks=2,
        tokens=(8,),
        maxvio=(1.0,),
        experts=32,
        topk=4,
        hidden=16,
        dtype="bfloat16",
        policy=("home",),
        transport=(),
        iterations=2,
        threads=1,
        backward=False,
        trace=None,
    )
    return replace(settings, peers=peers)


def peer_of(kind: Any, sends_rows: bool = True) -> Peer:
    return Peer("other", "some-package", "1.2.3", kind, rtol=1e-5, sends_rows=sends_rows)


def measure(rank: int, settings: Settings) -> CaseResult:
    return measure_case(rank, settings, CASE)


@pytest.mark.parametrize("sends_rows", [True, False])
def test_a_peer_is_timed_beside_our_own(pool2: RankPool, sends_rows: bool) -> None:
    settings = settings_with(peer_of(RoundsOften, sends_rows))
    result = pool2.run(measure, settings)[0]
    figures = {(each.method, each.phase): each for each in result.figures}
    assert {method for method, _ in figures} == {"reference", "collective", "shm", "other"}
    step = figures["other", "step"]
    assert step.times_reference is not None
    assert step.logical_bytes == figures["reference", "step"].logical_bytes
    assert step.wire_bytes == (figures["reference", "step"].wire_bytes if sends_rows else None)
    # Where a peer plans is its own affair: dispatch and plan are not compared phase by phase.
    assert ("other", "plan") not in figures
    assert figures["other", "dispatch"].times_reference is None
    assert figures["other", "combine"].times_reference is not None

    text = f"{configuration(settings)}\n{case_table(settings, result)}"
    assert "some-package 1.2.3" in text
    assert "peers': within rounding" in text
    assert max(map(len, text.splitlines())) <= 80
    lines = [json.loads(line) for line in json_lines(settings, result)]
    assert {line["versions"]["some-package"] for line in lines} == {"1.2.3"}


def test_without_peers_nothing_is_said_of_them() -> None:
    assert "peer" not in configuration(settings_with())


def verify_other(rank: int, kind: Any) -> str:
    peer = peer_of(kind)
    settings = settings_with(peer)
    methods = {peer: make_method("other", settings, CASE)}
    try:
        verify_peers(methods, make_method("reference", settings, CASE), make_inputs(settings, CASE, rank))
    except VerificationError as error:
        return str(error)
    return "fine"


def test_rounding_is_no_error(pool2: RankPool) -> None:
    assert pool2.run(verify_other, RoundsOften) == ["fine", "fine"]


@pytest.mark.parametrize(
    ("kind", "ranks", "tokens"),
    [(SwapsRows, [1], "float32"), (AddsOnePercent, [0, 1], "float32"), (GivesFloat32, [0, 1], "bfloat16")],
)
def test_an_error_is_seen_on_every_rank(pool2: RankPool, kind: Any, ranks: list[int], tokens: str) -> None:
    said = pool2.run(verify_other, kind)
    assert all(text.startswith(f"other differs from the reference on ranks {ranks}") for text in said)
    assert all(f"y of {tokens} tokens" in said[rank] for rank in ranks)


# ---- benchmarks/peers ----


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of benchmarks/peers, by name."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.peers.{name}")


def test_peers_that_are_not_installed_are_counted(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "torchtitan":
            return "9.9"
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", version)
    run: dict[str, Any] = {}
    command = peers("__main__")
    monkeypatch.setattr(command, "bench", lambda settings, *paths: run.update(settings=settings, paths=paths))
    done = CliRunner().invoke(command.main, [*SMALL, "--json", "figures.jsonl"])
    assert done.exit_code == 0, done.output
    assert [(peer.package, peer.version) for peer in run["settings"].peers] == [("torchtitan", "9.9")]
    assert run["paths"] == ("figures.jsonl", None)
    for name in ("megatron", "deepspeed"):
        assert f"{name}: skipped: {PACKAGES[name]} is not installed" in done.stderr
    assert "peers skipped: 2 of 3" in done.stderr
    assert "skipped" not in done.stdout


def test_without_any_peer_there_is_nothing_to_compare(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", version)
    done = CliRunner().invoke(peers("__main__").main, [*SMALL, "--peer", "megatron"])
    assert done.exit_code == 2
    assert "peers skipped: 1 of 1\nnothing to compare" in done.stderr


def test_what_a_router_hands_over_is_made_once(peers: Any) -> None:
    made = []
    handed = peers("common").Handed(lambda *tensors: made.append(tensors) or len(made))
    a, b = torch.zeros(2), torch.zeros(2)
    assert [handed(a, b), handed(a, b), handed(a, a), handed(a, b)] == [1, 1, 2, 3]


def test_every_rank_has_as_many_experts(peers: Any) -> None:
    local_experts = peers("common").local_experts
    assert local_experts(settings_with(), 1).tolist() == list(range(16, 32))
    with pytest.raises(ValueError, match="32 / 3"):
        local_experts(replace(settings_with(), num_ranks=3), 0)


def test_requirements_pin_every_peer() -> None:
    lines = (ROOT / "benchmarks" / "peers" / "requirements.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    assert set(PACKAGES.values()) <= pinned


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", PACKAGES)
def test_run(tmp_path: Path, name: str, ranks: int) -> None:
    """The real one, checked against the reference as every run is."""
    try:
        metadata.version(PACKAGES[name])
    except metadata.PackageNotFoundError:
        pytest.skip(f"needs {PACKAGES[name]} (benchmarks/peers/requirements.txt)")
    path = tmp_path / "figures.jsonl"
    command = [sys.executable, "-m", "benchmarks.peers", "--peer", name, *SMALL, "--tokens", "16,3"]
    done = subprocess.run(
        [*command, "--ranks", str(ranks), "--json", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    methods = {json.loads(line)["method"] for line in path.read_text().splitlines()}
    assert methods == {"reference", "collective", "shm", name}
    assert "Warning" not in done.stderr
