"""The examples, run as their readers run them."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moonep
from moonep.trace import load_trace

EXAMPLES = Path(__file__).parents[1] / "examples"
SITE = str(Path(moonep.__file__).parents[1])


def run_example(name: str, *arguments: str, ranks: int, timeout_secs: float = 100) -> str:
    """What the example prints; with one rank it runs without torchrun."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = {**os.environ, "PYTHONPATH": SITE, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_secs)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def train(
    tmp_path: Path, ranks: int, steps: int, timeout_secs: float = 100, policy: str = "home"
) -> tuple[list[float], str]:
    """The losses of every step, and what was printed."""
    path = tmp_path / f"losses-{ranks}.json"
    printed = run_example(
        "02_moe_layer.py",
        *("--steps", str(steps), "--losses", str(path), "--record", str(tmp_path / f"trace-{ranks}.npz")),
        *("--policy", policy),
        ranks=ranks,
        timeout_secs=timeout_secs,
    )
    return json.loads(path.read_text()), printed


@pytest.mark.parametrize("ranks", [1, 2])
def test_dispatch_combine(ranks: int) -> None:
    printed = run_example("01_dispatch_combine.py", ranks=ranks)
    assert sorted(re.findall(rf"rank (\d) of {ranks} ", printed)) == [str(rank) for rank in range(ranks)]


@pytest.mark.timeout(340)
def test_losses_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    alone, _ = train(tmp_path, 1, 20)
    both, _ = train(tmp_path, 2, 20)
    assert len(alone) == 20
    assert all(map(math.isfinite, alone))
    assert both == pytest.approx(alone, abs=1e-4)
    assert alone[-1] < alone[0] - 1

    traces = [load_trace(tmp_path / f"trace-{ranks}.npz") for ranks in (1, 2)]
    for trace in traces:
        assert (trace.num_steps, trace.num_experts, trace.top_k) == (3, 896, 16)
    # Experts at a near tie may change places.
    assert (traces[0].topk_idx[-1] == traces[1].topk_idx[-1]).mean() > 0.99

    balanced, printed = train(tmp_path, 2, 20, policy="balanced")
    assert balanced == pytest.approx(alone, abs=1e-4)
    assert re.findall(r"fullest rank (.*?)  +[\d.]+ s", printed) == ["1.000  1.000"] * 2


def train_kimi_k3_tiny(
    tmp_path: Path, ranks: int, *arguments: str, timeout_secs: float = 600
) -> dict[str, list[list[float]]]:
    out = tmp_path / f"{ranks} ranks"
    run_example("03_train_kimi_k3_tiny.py", *arguments, "--out", str(out), ranks=ranks, timeout_secs=timeout_secs)
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    curves: dict[str, list[list[float]]] = json.loads((out / "curves.json").read_text())
    return curves


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kimi_k3_tiny_on_any_number_of_ranks(tmp_path: Path) -> None:
    alone = train_kimi_k3_tiny(tmp_path, 1, "--steps", "20")
    four = train_kimi_k3_tiny(tmp_path, 4, "--steps", "20", "--expert-ranks", "2")
    for run in ("with Quantile Balancing", "without"):
        (losses, maxvios), (four_losses, four_maxvios) = alone[run], four[run]
        # A token at a near tie between experts may go to the other: its loss, one of 2,048, changes by some tenths.
        assert four_losses == pytest.approx(losses, abs=1e-2)
        assert four_maxvios[0] == pytest.approx(maxvios[0], abs=0.1)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_training_kimi_k3_tiny(tmp_path: Path) -> None:
    """It checks itself: that it learns, and how even the experts' load is."""
    curves = train_kimi_k3_tiny(tmp_path, 2, "--steps", "100", timeout_secs=2000)
    for losses, maxvios in curves.values():
        assert len(losses) == len(maxvios) == 100
        assert all(map(math.isfinite, losses))


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_training(tmp_path: Path) -> None:
    runs = [(1, "home"), (2, "home"), (4, "balanced")]
    trained = [train(tmp_path, ranks, 200, timeout_secs=800, policy=policy) for ranks, policy in runs]
    losses, printed = zip(*trained, strict=True)
    for other in losses[1:]:
        assert other[:20] == pytest.approx(losses[0][:20], abs=1e-4)
        assert other[-1] == pytest.approx(losses[0][-1], rel=0.02)
    for text in printed:
        final = float(re.search(r"mean of the last 10 ([\d.]+)", text)[1])  # type: ignore[index]
        entropy = float(re.search(r"unigram entropy .*: ([\d.]+)", text)[1])  # type: ignore[index]
        assert final < 0.85 * entropy
