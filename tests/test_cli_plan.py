"""`moonep plan`: what it prints, refuses and draws."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moonep.cli import main
from moonep.sizing.models import MODELS

SMALL = ["--experts", "24", "--topk", "3", "--hidden", "64", "--width", "32", "--layers", "2", "--tokens", "100"]


def run(*options: str) -> str:
    result = CliRunner().invoke(main, ["plan", *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def answer(*options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*options, "--json"))
    return found


def refusal(*options: str) -> str:
    result = CliRunner().invoke(main, ["plan", *options])
    assert result.exit_code == 2
    return " ".join(result.output.split())


@pytest.mark.parametrize("name", MODELS)
def test_tables_fit_80_columns(name: str) -> None:
    text = run(
        "--model",
        name,
        "--ranks",
        "64",
        "--machine",
        "gb200-nvl72",
        "--training",
        "--memory-gib",
        "1",
        "--tokens",
        "64",
    )
    assert max(map(len, text.splitlines())) <= 80
    assert "does not fit into 1.0 GiB" in text
    assert "slack with the shortest step" in text


def test_every_option_that_shows() -> None:
    text = run(*SMALL, "--ranks", "4", "--max-replicas", "2", "--alignment", "8", "--slack", "0.1", "--factor", "2")
    assert "Balanced(0.1, 2)" in text
    assert "Capacity(2.0)" in text
    assert "least us" not in text  # no hardware, no times
    assert "fit" not in text


def test_json_says_what_the_table_says() -> None:
    found = answer(*SMALL, "--ranks", "8", "--ranks-per-host", "4", "--machine", "h100", "--maxvio", "0.5,3")
    assert [each["routing"] for each in found["routings"]] == ["maxvio 0.5", "maxvio 3"]
    home, capacity, balanced = found["routings"][1]["policies"]
    assert home["policy"] == "Home()"
    assert home["over_even"] > balanced["over_even"]
    assert capacity["dropped_share"] > 0 == home["dropped_share"]
    assert balanced["replicas_mean"] >= balanced["replicas_at_least"] > 0
    assert balanced["phases"]["replicate_secs"] > 0 == home["phases"]["replicate_secs"]
    memory = dict(home["memory"])
    assert memory.pop("total_bytes") == sum(memory.values())
    assert found["setting"]["model"]["num_experts"] == 24
    assert found["memory_bytes"] == 80 * 10**9
    rows, once_a_rank, once_a_host = home["traffic"]
    assert rows["across_bytes"] >= once_a_rank["across_bytes"] >= once_a_host["across_bytes"] > 0
    assert once_a_rank["combine_across_bytes"] == 2 * once_a_rank["across_bytes"]  # sums are float32


def test_nearest_setting_fits() -> None:
    options = ["--ranks", "8", "--tokens", "100000", "--memory-gib", "650", "--policy", "balanced"]
    fit = answer(*options)["routings"][0]["policies"][0]["fit"]
    assert fit["over_bytes"] > 0
    options[3] = str(fit["most_tokens"])
    assert answer(*options)["routings"][0]["policies"][0]["fit"]["over_bytes"] <= 0
    options[3] = str(fit["most_tokens"] + 1)
    assert answer(*options)["routings"][0]["policies"][0]["fit"]["over_bytes"] > 0
    options[1], options[3] = str(fit["fewest_ranks"]), "100000"
    assert answer(*options)["routings"][0]["policies"][0]["fit"]["over_bytes"] <= 0


def test_trace() -> None:
    text = run("--trace", "pydoc", "--ranks", "4", "--tokens", "64", "--machine", "h200")
    assert "=== Routing: trace pydoc, maxvio" in text
    assert "(3 steps)" in text


def test_doctor_gives_rates(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    machine = {"cpu": "a processor", "memory_available_bytes": 10**9}
    path.write_text(json.dumps({"machine": machine, "copies": {"stream_all_cores_gb_per_s": 10.0}}))
    text = run(*SMALL, "--ranks", "2", "--doctor", str(path))
    assert "a processor: memory 10 GB/s, between ranks 5 GB/s" in text
    assert "(--tflops)" in text
    assert "(--tflops)" not in run(*SMALL, "--ranks", "2", "--doctor", str(path), "--tflops", "1")
    path.write_text("no json")
    assert "--doctor: " in refusal("--doctor", str(path))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--trace", "pydoc", "--maxvio", "1"], "--trace and --maxvio"),
        (["--trace", "pydoc", "--topk", "4"], "leave --experts and --topk out"),
        (["--trace", "pydoc", "--model", "mixtral-8x7b"], "but mixtral-8x7b has 8 and top-2"),
        (["--trace", "nowhere.npz"], "no such file"),
        (["--topk", "1000"], "--topk: expected at most the 896 experts, got 1000"),
        (["--maxvio", "56"], "expected 0 to experts / top-k - 1 = 55, got 56"),
        (["--maxvio", "x"], "expected numbers separated by commas"),
        (["--policy", "home,away"], "--policy: expected some of home, capacity, balanced, got 'away'"),
        (["--recompute"], "are for --training"),
        (["--machine", "h100", "--doctor", "x"], "--machine and --doctor"),
        (["--tflops", "1"], "goes with --machine or --doctor"),
        (["--tokens", "100000000"], "make more rows than a step can have"),
        (["--plot", "x.pdf"], "--plot: expected a file named *.png or *.svg"),
        (["--ranks", "0"], "0 is not in the range x>=1"),
    ],
)
def test_refusals(options: list[str], text: str) -> None:
    assert text in refusal(*options)


@pytest.mark.parametrize("more", [["--machine", "mi355x"], []], ids=["times", "replicas"])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(tmp_path: Path, more: list[str], suffix: str) -> None:
    path = tmp_path / f"picture.{suffix}"
    run(*SMALL, "--ranks", "4", "--maxvio", "1,4", "--plot", str(path), *more)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in data


def test_no_torch() -> None:
    """Not for help, and not for an answer: so it comes within seconds."""
    code = (
        "import sys\n"
        "from moonep.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'numpy' not in sys.modules or '--help' not in sys.argv"
    )
    for options in (["--help"], [*SMALL, "--ranks", "4", "--machine", "h200"]):
        subprocess.run([sys.executable, "-c", code, "plan", *options], check=True, timeout=60, capture_output=True)


def test_one_rank_and_more_ranks_than_experts() -> None:
    assert "replicas of a rank, exact balance: 0" in run(*SMALL, "--ranks", "1", "--machine", "h100")
    assert "40 ranks on 5 hosts" in run(*SMALL, "--ranks", "40", "--machine", "h100")
