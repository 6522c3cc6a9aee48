"""`moonep bench`: what it counts, what it refuses, and a small run of all of it."""

import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import moonep
from moonep import reference
from moonep.bench import plot
from moonep.bench.config import Case, Settings, Way, parse_policy
from moonep.bench.floor import copy_bytes_per_sec, step_floor_secs
from moonep.bench.inputs import make_inputs, make_weights
from moonep.bench.memory import peak_bytes
from moonep.bench.methods import AnyPlan, make_method
from moonep.bench.options import check_files, make_settings
from moonep.bench.results import CaseResult, Traffic, case_result, median_interval, traffic
from moonep.bench.table import _digits, case_table, configuration, footnotes, json_lines, missed_maxvio
from moonep.bench.timing import EXPERTS_PHASES, PHASES, STEP, TRAIN_STEP, Samples, phases_of
from moonep.bench.verify import VerificationError, verify, verify_experts
from moonep.cli import main
from moonep.plan import Received
from moonep.testing import RankPool
from moonep.trace import Trace, load_trace, save_trace

SITE = str(Path(moonep.__file__).parents[1])
METHODS = ("reference", "collective", "shm")
OPTIONS: dict[str, Any] = {
    "ranks": 2,
    "tokens": (8,),
    "maxvio": (1.0,),
    "experts": 32,
    "topk": 4,
    "hidden": 16,
    "dtype": "bfloat16",
    "policy": ("home",),
    "transport": (),
    "iterations": 2,
    "threads": 1,
    "backward": False,
    "trace": None,
}


def settings_with(**options: Any) -> Settings:
    return make_settings(**{**OPTIONS, **options})


# ---- options ----


def test_the_built_in_trace_is_the_default() -> None:
    settings = settings_with(maxvio=(), experts=None, topk=None)
    assert settings.trace is not None
    assert (settings.trace_name, settings.num_experts, settings.top_k) == ("pydoc", 896, 16)
    assert list(settings.cases()) == [Case(8, None)]


def test_lognormal_where_the_built_in_trace_does_not_fit() -> None:
    settings = settings_with(maxvio=())
    assert settings.trace is None
    assert list(settings.cases()) == [Case(8, 1.0)]


def test_every_t_with_every_imbalance() -> None:
    settings = settings_with(tokens=(1, 2), maxvio=(0.5, 3.0))
    assert list(settings.cases()) == [Case(1, 0.5), Case(2, 0.5), Case(1, 3.0), Case(2, 3.0)]
    assert settings.methods == METHODS


def test_one_rank_alone() -> None:
    assert settings_with(ranks=1).methods == ("reference", "local")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": ("nccl",)}, "--transport.*'nccl'"),
        ({"transport": ("local",)}, "--transport.*one rank"),
        ({"trace": "pydoc"}, "--trace and --maxvio"),
        ({"trace": "pydoc", "maxvio": ()}, "--trace.*896"),
        ({"topk": 33}, "--topk.*32"),
        ({"maxvio": (7.5,)}, "--maxvio.*7"),
        ({"policy": ("home", "capacity")}, "--policy.*got 'capacity'"),
        ({"policy": ("balanced:-0.1",)}, "--policy.*got 'balanced:-0.1'"),
        ({"policy": ("balanced:0:1.5",)}, "--policy.*got 'balanced:0:1.5'"),
        ({"policy": ("balanced:nan",)}, "--policy.*got 'balanced:nan'"),
        ({"policy": ("capacity:0",)}, "--policy.*got 'capacity:0'"),
        ({"policy": ("",)}, "--policy.*got ''"),
        ({"maxvio": (), "experts": None, "topk": None, "hot_together": True}, "--hot-together"),
    ],
)
def test_options_that_contradict(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_with(**options)


def test_policies() -> None:
    assert [parse_policy(text) for text in ("home", "capacity:1.25", "balanced", "balanced:0", "balanced:0.1:2")] == [
        moonep.Home(),
        moonep.Capacity(1.25),
        moonep.Balanced(),
        moonep.Balanced(0.0),
        moonep.Balanced(0.1, 2),
    ]
    settings = settings_with(policy=("home", "balanced", "home"), transport=("shm",))
    assert settings.ways == [Way("shm", "home"), Way("shm", "balanced")]


def test_steps_that_compute() -> None:
    settings = settings_with(experts_compute=True, width=8)
    assert settings.methods == ("collective", "shm")
    assert settings_with(experts_compute=True, ranks=1).methods == ("local",)
    assert settings.expert_bytes == 3 * 16 * 8 * 2  # gate, up and down, in bfloat16
    weights = [make_weights(settings, rank) for rank in range(2)]
    assert [tuple(weight.shape) for weight in weights[0]] == [(16, 16, 16), (16, 8, 16)]
    assert sum(weight[0].nbytes for weight in weights[1]) == settings.expert_bytes
    assert not torch.equal(weights[0][0], weights[1][0])


def test_ranks_must_be_those_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert settings_with(ranks=None).num_ranks == 3
    with pytest.raises(ValueError, match="torchrun started 3"):
        settings_with(ranks=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "8,x"], "'8,x': expected whole numbers separated by commas, such as 128,512"),
        (["--tokens", "1e3"], "'1e3': expected whole numbers separated by commas, such as 128,512"),
        (["--tokens", "-1"], "-1: expected at least 0"),
        (["--maxvio", "0.5;1"], "'0.5;1': expected numbers separated by commas, such as 0.5,1"),
        (["--maxvio", "nan"], "nan: expected at least 0"),
        (["--hidden", "2000000000"], "--tokens 512, --hidden 2000000000: max_tokens: 512 tokens want"),
        (["--json", "missing/figures.jsonl"], "--json: missing/figures.jsonl: there is no directory missing"),
        (["--json", "."], "--json: .: expected a file, got a directory"),
        (["--plot", "missing/picture.png"], "--plot: missing/picture.png: there is no directory missing"),
        (["--trace", "missing.npz"], "missing.npz"),
        (["--plot", "picture.pdf"], "picture.pdf"),
        (["--transport", "nccl"], "nccl"),
    ],
)
def test_command_says_what_is_wrong(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


WITHOUT_TORCH = """
import sys
from click.testing import CliRunner
from moonep.cli import main
for arguments in (["--json", "missing/x"], ["--plot", "x.pdf"], ["--transport", "nccl"], ["--trace", "missing.npz"],
                  ["--trace", "pydoc", "--maxvio", "1"], ["--topk", "897"], ["--maxvio", "56"]):
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == 2, (arguments, result.output)
print("torch" in sys.modules)
"""


def test_wrong_options_are_refused_before_torch_is_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], env={**os.environ, "PYTHONPATH": SITE}, capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("command", [[], ["bench"], ["trace"]])
def test_help_fits_80_columns(command: list[str]) -> None:
    result = CliRunner().invoke(main, [*command, "--help"], terminal_width=80)
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80


# ---- inputs ----


def test_ranks_hold_different_tokens_of_one_routing() -> None:
    settings = settings_with(tokens=(64,))
    a, b = (make_inputs(settings, Case(64, 1.0), rank) for rank in range(2))
    again = make_inputs(settings, Case(64, 1.0), 1)
    assert not torch.equal(a.topk_idx, b.topk_idx)
    assert not torch.equal(a.x, b.x)
    assert all(torch.equal(first, second) for first, second in zip(b, again, strict=True))
    assert b.x.shape == (64, 16)
    assert b.x.dtype == torch.bfloat16


def test_where_hot_experts_are_at_home() -> None:
    """The same routing but for the ids, which are in the order of load."""
    apart, together = (settings_with(tokens=(64,), hot_together=hot) for hot in (False, True))
    loads = []
    for settings in (apart, together):
        idx = torch.cat([make_inputs(settings, Case(64, 3.0), rank).topk_idx for rank in range(2)])
        loads.append(torch.bincount(idx.flatten(), minlength=32))
    assert torch.equal(loads[0].sort(descending=True).values, loads[1])
    assert not torch.equal(loads[0], loads[1])
    assert "lognormal, hot together" in case_table(together, made_up_result(together))


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    idx = np.random.default_rng(0).integers(32, size=(2, 10, 4)).astype(np.int32)
    save_trace(tmp_path / "own.npz", Trace(idx, np.full(idx.shape, 0.25, np.float16), 32))
    settings = settings_with(trace=str(tmp_path / "own.npz"), maxvio=(), experts=None, topk=None, tokens=(5,))
    assert (settings.trace_name, settings.num_experts, settings.top_k) == ("own", 32, 4)
    for rank in range(2):
        inputs = make_inputs(settings, Case(5, None), rank)
        np.testing.assert_array_equal(inputs.topk_idx.numpy(), idx[-1, 5 * rank : 5 * rank + 5])
        assert inputs.topk_weights.eq(0.25).all()


# ---- what is counted ----


def count_traffic(rank: int, settings: Settings, case: Case) -> tuple[Traffic, AnyPlan, torch.Tensor]:
    inputs = make_inputs(settings, case, rank)
    inputs.topk_idx[::3, 1] = -1
    plan = reference.plan(inputs.topk_idx, num_experts=settings.num_experts)
    return traffic(plan, inputs, rank, settings.num_experts), plan.dst_rank, plan.rank_rows


def test_traffic_is_what_the_plans_say(pool4: RankPool) -> None:
    settings = settings_with(ranks=4, tokens=(12,))
    results = pool4.run(count_traffic, settings, Case(12, 1.0))
    assert len({result[0] for result in results}) == 1
    counted = results[0][0]
    routed = remote = crossings = 0
    for rank, (_, dst_rank_TK, _) in enumerate(results):
        for dst_rank_K in dst_rank_TK.tolist():
            real = [dst for dst in dst_rank_K if dst >= 0]
            routed += len(real)
            remote += sum(dst != rank for dst in real)
            crossings += len(set(real) - {rank})
    assert (counted.routed_rows, counted.remote_rows, counted.crossings) == (routed / 4, remote / 4, crossings / 4)
    assert counted.slowest_rows == max(results[0][2].tolist())


def made_up_result(settings: Settings) -> CaseResult:
    """Every phase of the reference takes 40 ms, of the others 10 and 20 ms."""
    samples = {}
    for policy, factor in zip(settings.policies, (1, 2, 0.5), strict=False):
        for method, secs in zip(settings.methods, (0.04, 0.01, 0.02), strict=False):
            phases = (*phases_of(settings), STEP, TRAIN_STEP)
            samples[Way(method, policy)] = Samples(5, {phase: [secs * factor] * 7 for phase in phases})
    moved = Traffic(routed_rows=100.0, remote_rows=60.0, crossings=20.0, slowest_rows=110, maxvio=1.5)
    peaks = {} if settings.width is None else dict.fromkeys(settings.ways, 10**8)
    return case_result(settings, Case(25, 1.0), dict.fromkeys(settings.policies, moved), 1e6, samples, peaks)


def test_bytes_and_floors() -> None:
    settings = settings_with(backward=True)
    figures = {(each.method, each.phase): each for each in made_up_result(settings).figures}
    row = 16 * 2  # hidden x bfloat16
    floor_secs = 110 * row / 1e6
    for method in METHODS:
        assert figures[method, "plan"].logical_bytes is None
        assert figures[method, "plan"].floor_secs is None
        for phase, movements in ((PHASES[1], 1), (PHASES[2], 1), (STEP, 2), (TRAIN_STEP, 4)):
            assert figures[method, phase].logical_bytes == 100 * row * movements
            assert figures[method, phase].floor_secs == pytest.approx(floor_secs * movements / 2)
    # The reference sends every row; the others a token once per rank, and float32 sums home.
    wire = {
        "reference": {"dispatch": 60 * row, "combine": 60 * row, STEP: 120 * row, TRAIN_STEP: 240 * row},
        "shm": {"dispatch": 20 * row, "combine": 20 * 64, STEP: 20 * (row + 64), TRAIN_STEP: 40 * (row + 64)},
    }
    for method, of_phase in wire.items():
        assert {phase: figures[method, phase].wire_bytes for phase in of_phase} == of_phase
    assert figures["reference", STEP].times_reference == 1
    assert figures["shm", STEP].times_reference == pytest.approx(2)
    assert figures["shm", STEP].times_reference_ci95 == pytest.approx((2, 2))


def test_without_the_reference_there_is_no_ratio() -> None:
    settings = settings_with(transport=("shm",))
    assert [each.times_reference for each in made_up_result(settings).figures] == [None] * 4
    assert case_table(settings, made_up_result(settings))


def test_median_interval() -> None:
    values = np.arange(20.0)[::-1]
    assert median_interval(values) == (5.0, 14.0)  # the 6th and the 15th: 95.9 %
    assert median_interval(values[:3]) == (17.0, 19.0)
    assert median_interval(np.array([2.0])) == (2.0, 2.0)
    low, high = median_interval(np.arange(100_000.0))
    assert low < 49_999.5 < high
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(100_000) / 2, rel=0.02)


def test_table_fits_80_columns() -> None:
    settings = settings_with(backward=True)
    many = settings_with(backward=True, policy=("home", "balanced:0.05:2", "capacity:1.25"), experts_compute=True)
    for each in (settings, many):
        for text in (configuration(each), case_table(each, made_up_result(each)), footnotes(each)):
            assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "-"),
        (1.2e-9, "1.2e-09"),
        (0.00012345, "0.000123"),
        (0.5, "0.500"),
        (1.234, "1.23"),
        (99.96, "100.0"),
        (123.4, "123"),
        (99359.5, "99400"),
        (1e12, "1.0e+12"),
    ],
)
def test_digits(value: float, text: str) -> None:
    assert _digits(value) == text


def test_small_cases_are_not_shown_as_nothing() -> None:
    settings = settings_with(hidden=1, iterations=1)
    assert "1 block of each of" in configuration(settings)
    samples = {way: Samples(5, {phase: [40.0] for phase in (*PHASES, STEP)}) for way in settings.ways}
    moved = Traffic(routed_rows=1.0, remote_rows=0.0, crossings=0.0, slowest_rows=1, maxvio=15.0)
    table = case_table(settings, case_result(settings, Case(1, 1.0), {"home": moved}, 1e9, samples, {}))
    assert "0.00 " not in table
    assert max(map(len, table.splitlines())) <= 80
    assert "-" in table.splitlines()[-1].split()  # nothing crossed


@pytest.mark.parametrize(
    ("asked", "achieved", "rows", "missed"),
    [(1.0, 1.09, 8, False), (1.0, 1.2, 8, True), (0.0, 0.04, 8, False), (0.0, 3.0, 8, True), (1.0, 0.0, 0, False)],
)
def test_asked_and_achieved_imbalance(asked: float, achieved: float, rows: int, missed: bool) -> None:
    settings = settings_with()
    samples = {way: Samples(5, {phase: [0.1] for phase in (*PHASES, STEP)}) for way in settings.ways}
    moved = Traffic(float(rows), 0.0, 0.0, rows, achieved)
    result = case_result(settings, Case(8, asked), {"home": moved}, 1e9, samples, {})
    said = f"maxvio asked {asked:g}, achieved {f'{achieved:.2f}' if rows else '-'}"
    assert said in case_table(settings, result).splitlines()[0]
    assert bool(missed_maxvio(result)) == missed
    assert {json.loads(line)["maxvio_asked"] for line in json_lines(settings, result)} == {asked}


def test_over_home() -> None:
    settings = settings_with(policy=("balanced", "home", "capacity:1"), experts_compute=True)
    result = made_up_result(settings)
    for each in result.figures:
        assert each.over_home == {"balanced": 0.5, "home": None, "capacity:1": 0.25}[each.policy]
        assert each.times_reference is None
        assert (each.floor_secs is not None) == (each.phase in ("dispatch", "combine"))
        if each.phase == STEP and each.policy != "home":
            assert each.over_home_ci95 == (each.over_home, each.over_home)
    assert "shm step over home's: 0.500 (0.500 to 0.500)" in case_table(settings, result)
    lines = [json.loads(line) for line in json_lines(settings, result)]
    assert {(line["policy"], line["width"], line["peak_bytes"]) for line in lines} == {
        (policy, 64, 10**8) for policy in settings.policies
    }
    assert {each.over_home for each in made_up_result(settings_with(policy=("balanced",))).figures} == {None}


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_peak_memory() -> None:
    held: list[torch.Tensor] = []

    def run(num_bytes: int) -> None:
        held[:] = [torch.ones(num_bytes, dtype=torch.uint8)]
        held.clear()

    for megabytes in (200, 40, 120):  # each on its own, whatever was before
        assert peak_bytes(functools.partial(run, megabytes * 10**6)) == pytest.approx(megabytes * 1e6, abs=8e6)
    assert (peak_bytes(lambda: None) or 0) < 8e6


def test_floor_is_a_copy() -> None:
    assert step_floor_secs(1000, 32, 64e3) == 0.5


def measure_copy(rank: int) -> float:
    return copy_bytes_per_sec(threads=2)


def test_copy_bandwidth(pool2: RankPool) -> None:
    a, b = pool2.run(measure_copy)
    assert a == b
    assert 1e8 < a < 1e13


# ---- checking ----


class Spoiled:
    """A method that gets something wrong on rank 1."""

    def __init__(self, method: Any, what: str, rank: int):
        self._method, self._what = method, what if rank == 1 else ""

    def plan(self, topk_idx: torch.Tensor) -> AnyPlan:
        plan = self._method.plan(topk_idx)
        if self._what == "plan.dst_row":
            plan.dst_row[0, 0] += 1
        return plan

    def dispatch(self, x: torch.Tensor, plan: AnyPlan, topk_weights: torch.Tensor) -> Received:
        recv = self._method.dispatch(x, plan, topk_weights)
        if self._what == "received rows":
            recv.x.detach()[0, 0] += 1
        if self._what == "gradient of the weights":
            return Received(recv.x, recv.weights + (recv.weights - recv.weights.detach()))
        return recv

    def combine(self, expert_out: torch.Tensor, plan: AnyPlan, weights: torch.Tensor) -> torch.Tensor:
        y = self._method.combine(expert_out, plan, weights)
        if self._what == "y":
            y.detach()[-1, -1] *= -1
        if self._what == "gradient of x":
            return y + (y - y.detach())
        return y

    def close(self) -> None:
        self._method.close()


def verify_spoiled(rank: int, settings: Settings, case: Case, what: str) -> str:
    plain = make_method("reference", settings, case)
    ours = make_method("shm", settings, case)
    try:
        verify({"reference": plain, "shm": Spoiled(ours, what, rank)}, make_inputs(settings, case, rank), True)
    except VerificationError as error:
        return str(error)
    finally:
        ours.close()
    return "fine"


@pytest.mark.parametrize("what", ["", "plan.dst_row", "received rows", "y", "gradient of x", "gradient of the weights"])
def test_a_wrong_result_is_seen_on_every_rank(pool2: RankPool, what: str) -> None:
    settings = settings_with(backward=True)
    said = pool2.run(verify_spoiled, settings, Case(8, 1.0), what)
    if what:
        # Weights' gradients come from the rank of the experts, so there it is rank 0's tokens too that are wrong.
        ranks = [0, 1] if what == "gradient of the weights" else [1]
        assert all(text.startswith(f"shm differs from the reference on ranks {ranks}") for text in said)
        assert said[0].endswith("]") == (ranks == [1])
        assert what in said[1]
    else:
        assert said == ["fine", "fine"]


class SpoiledExperts:
    """A method whose experts, or weights, are others on rank 1."""

    def __init__(self, method: Any, what: str, rank: int):
        self._method, self._what = method, what if rank == 1 else ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def replicate(self, plan: AnyPlan) -> tuple[torch.Tensor, ...]:
        first, *others = self._method.replicate(plan)
        if self._what == "replicated weights":
            first[-1, 0, 0] += 1
        return first, *others

    def experts(self, rows: torch.Tensor, plan: AnyPlan) -> torch.Tensor:
        out = self._method.experts(rows, plan)
        return out * 2 if self._what == "y through experts" else out


def verify_spoiled_experts(rank: int, settings: Settings, case: Case, what: str) -> str:
    weights = make_weights(settings, rank)
    plain, ours = (make_method(name, settings, case, "balanced:0", weights) for name in ("reference", "shm"))
    try:
        methods = {"reference": plain, "shm": SpoiledExperts(ours, what, rank)}
        verify_experts(methods, make_inputs(settings, case, rank), True)
    except VerificationError as error:
        return str(error)
    finally:
        ours.close()
    return "fine"


@pytest.mark.parametrize("what", ["", "replicated weights", "y through experts"])
def test_wrong_experts_are_seen_on_every_rank(pool2: RankPool, what: str) -> None:
    settings = settings_with(backward=True, experts_compute=True, dtype="float32")
    said = pool2.run(verify_spoiled_experts, settings, Case(8, 3.0), what)
    if what:
        assert all(text.startswith("shm differs from the reference on ranks") for text in said)
        assert what in said[1]
    else:
        assert said == ["fine", "fine"]


# ---- pictures ----


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.parametrize("tokens", [(25,), (25, 50)])
def test_plot(tmp_path: Path, suffix: str, tokens: tuple[int, ...]) -> None:
    pytest.importorskip("matplotlib")
    settings = settings_with(tokens=tokens, backward=True)
    path = tmp_path / f"picture{suffix}"
    check_files(None, str(path))
    plot.draw(settings, [made_up_result(settings)] * len(tokens), str(path))
    assert path.read_bytes()[:4] in (b"\x89PNG", b"<?xm")


@pytest.mark.parametrize("tokens", [(25,), (25, 50)])
def test_plot_over_imbalance(tmp_path: Path, tokens: tuple[int, ...]) -> None:
    pytest.importorskip("matplotlib")
    policies = ("home", "balanced", "balanced:0")
    settings = settings_with(tokens=tokens, maxvio=(0.0, 1.0, 4.0), policy=policies, experts_compute=True)
    result = made_up_result(settings)
    results = [dataclasses.replace(result, case=case) for case in settings.cases()]
    path = tmp_path / "picture.png"
    plot.draw(settings, results, str(path))
    assert path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("tokens", [(0,), (0, 25)])
def test_plot_begins_near_what_was_measured(
    tmp_path: Path, tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda figure, path: drawn.append(figure.axes[0].get_ylim()))
    settings = settings_with(tokens=tokens)
    samples = {way: Samples(5, {phase: [0.04] for phase in (*PHASES, STEP)}) for way in settings.ways}
    results = [
        case_result(
            settings, Case(num_tokens, 1.0), {"home": Traffic(0.0, 0.0, 0.0, num_tokens, 0.0)}, 1e9, samples, {}
        )
        for num_tokens in tokens
    ]
    plot.draw(settings, results, str(tmp_path / "picture.png"))
    ((lowest, highest),) = drawn
    assert 1 < lowest < 40 < highest  # floors are far below: at most 0.0008 ms


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"matplotlib.*moonep\[plot\]"):
        check_files(None, "picture.png")


# ---- all of it ----

SMALL = ["--experts", "32", "--topk", "4", "--hidden", "64", "--iterations", "2", "--maxvio", "1"]


def test_run(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    result = CliRunner().invoke(main, ["bench", *SMALL, "--tokens", "16,24", "--backward", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "experts 32, top-k 4, hidden 64, bfloat16" in result.output
    assert result.output.count("equal to the reference's, bit for bit") == 2
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    expected = [(t, m, p) for t in (16, 24) for m in METHODS for p in (*PHASES, STEP, TRAIN_STEP)]
    assert [(line["num_tokens"], line["method"], line["phase"]) for line in lines] == expected
    for line in lines:
        assert 0 < line["p50_ci95_secs"][0] <= line["p50_secs"] <= line["p50_ci95_secs"][1]
        assert line["p50_secs"] <= line["p95_secs"]
        assert line["versions"]["torch"] == torch.__version__
        assert line["machine"]["cores"] >= 1
        if line["phase"] == STEP:
            assert line["samples"] == 2
            assert line["logical_bytes"] == 2 * line["num_tokens"] * 4 * 64 * 2
            assert line["logical_gb_per_sec"] == pytest.approx(line["logical_bytes"] / line["p50_secs"] / 1e9)
            assert line["times_floor"] == pytest.approx(line["p50_secs"] / line["floor_secs"])


@pytest.mark.parametrize("backward", [[], ["--backward"]], ids=["forward", "backward"])
def test_run_with_policies_and_experts(tmp_path: Path, backward: list[str]) -> None:
    path = tmp_path / "figures.jsonl"
    options = ["--policy", "home,balanced:0,capacity:1.5", "--experts-compute", "--width", "16", "--dtype", "float32"]
    result = CliRunner().invoke(main, ["bench", *SMALL, *options, *backward, "--tokens", "32", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "every step computes experts of width 16" in result.output
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    expected = [
        (policy, method, phase)
        for policy in ("home", "balanced:0", "capacity:1.5")
        for method in ("collective", "shm")
        for phase in (*EXPERTS_PHASES, STEP, *([TRAIN_STEP] if backward else []))
    ]
    assert [(line["policy"], line["method"], line["phase"]) for line in lines] == expected
    for line in lines:
        balanced = line["policy"] == "balanced:0"
        assert (line["replicas"] > 0) == balanced
        assert line["replicated_bytes"] == line["replicas"] * 3 * 64 * 16 * 4
        assert (line["rank_imbalance"] == 1) == balanced
        assert line["rank_imbalance"] >= 1
        assert (line["dropped_rows"] > 0) == (line["policy"] == "capacity:1.5")
        assert (line["over_home"] is None) == (line["policy"] == "home")
        assert line["width"] == 16
        if sys.platform == "linux":
            assert line["peak_bytes"] > 0


def test_run_with_policies_that_only_carry(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["bench", *SMALL, "--policy", "home,balanced:0", "--tokens", "16", "--backward"])
    assert result.exit_code == 0, result.output
    assert result.output.count("equal to the reference's, bit for bit") == 1
    assert "Without --experts-compute no weights are replicated" in result.output
    assert "policy balanced:0\n" in result.output
    assert "replicate  " not in result.output


def test_run_without_tokens() -> None:
    result = CliRunner().invoke(main, ["bench", *SMALL, "--tokens", "0"])
    assert result.exit_code == 0, result.output
    assert "T 0, routing lognormal: maxvio asked 1, achieved -" in result.output
    assert "warning" not in result.output
    assert "nan" not in result.output


def test_run_on_one_rank() -> None:
    result = CliRunner().invoke(main, ["bench", *SMALL, "--tokens", "16", "--ranks", "1", "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    assert "local" in result.output
    assert "warning: T 16, --maxvio 1: the routing has" in result.output


def test_run_under_torchrun(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "moonep"]
    done = subprocess.run(
        [*launch, "bench", *SMALL, "--tokens", "16", "--transport", "reference,shm", "--json", "figures.jsonl"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SITE},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ranks 2, threads a rank 1") == 1
    assert len((tmp_path / "figures.jsonl").read_text().splitlines()) == 2 * 4
    assert "round 2 of 2" in done.stderr


def test_json_lines_are_complete() -> None:
    settings = settings_with()
    for line in json_lines(settings, made_up_result(settings)):
        figures = json.loads(line)
        assert figures["routing"] == "lognormal 1"
        assert {"ranks", "threads", "dtype", "policy", "num_experts", "copy_bytes_per_sec"} <= figures.keys()


def test_built_in_trace_feeds_four_ranks() -> None:
    trace = load_trace("pydoc")
    parts = [trace.slice_for(rank, 4, 512).topk_idx for rank in range(4)]
    assert all(part.shape == (512, 16) for part in parts)
