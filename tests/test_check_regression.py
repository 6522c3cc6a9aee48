"""benchmarks/check_regression.py: each ratio against its own threshold, losses and gains alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "check_regression.py"


def result(method: str = "shm", phase: str = "step", **changed: Any) -> dict[str, Any]:
    shape = {
        "ranks": 2,
        "threads": 1,
        "num_tokens": 512,
        "num_experts": 896,
        "top_k": 16,
        "hidden": 3584,
        "dtype": "bfloat16",
        "policy": "home",
        "routing": "trace pydoc",
    }
    return {"method": method, "phase": phase, "times_reference": 20.0, "times_floor": 2.0, **shape, **changed}


def check(tmp_path: Path, run: list[dict[str, Any]], recorded: list[dict[str, Any]], *options: str) -> tuple[int, str]:
    files = []
    for name, results in (("run.jsonl", run), ("recorded.jsonl", recorded)):
        files.append(tmp_path / name)
        files[-1].write_text("".join(json.dumps(each) + "\n" for each in results))
    done = subprocess.run(
        [sys.executable, SCRIPT, *files, *options], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("now", "code", "verdicts"),
    [
        ({}, 0, ["same", "same"]),
        ({"times_reference": 17.0, "times_floor": 2.5}, 0, ["same", "same"]),
        ({"times_reference": 15.0}, 1, ["SLOWER", "same"]),  # 20 / 15 is more than 1.25
        ({"times_floor": 2.9}, 1, ["same", "SLOWER"]),
        ({"times_reference": 30.0, "times_floor": 1.0}, 0, ["faster", "faster"]),
        ({"times_floor": None}, 0, ["same"]),
    ],
)
def test_verdicts(tmp_path: Path, now: dict[str, Any], code: int, verdicts: list[str]) -> None:
    found, text = check(tmp_path, [result(**now)], [result()])
    assert found == code
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("shm step")] == verdicts
    assert max(map(len, text.splitlines())) <= 80
    assert ("Large gains" in text) == ("faster" in verdicts)


def test_thresholds_are_separate(tmp_path: Path) -> None:
    worse = [result(times_reference=15.0, times_floor=2.9)]
    assert check(tmp_path, worse, [result()], "--reference-threshold", "0.5")[0] == 1
    assert check(tmp_path, worse, [result()], "--reference-threshold", "0.5", "--floor-threshold", "0.5")[0] == 0


def test_only_the_same_shape_is_compared(tmp_path: Path) -> None:
    code, text = check(tmp_path, [result(num_tokens=8)], [result()])
    assert (code, "nothing to compare" in text) == (2, True)
    assert check(tmp_path, [result("reference")], [result("reference")])[0] == 2


def test_other_files_are_refused(tmp_path: Path) -> None:
    code, text = check(tmp_path, [{"method": "shm"}], [result()])
    assert code == 1
    assert "run.jsonl, line 1: not a result of moonep bench" in text


def test_the_recorded_file_is_one() -> None:
    """It holds the phases of both transports at 2 and 4 ranks, and compares as equal with itself."""
    recorded = SCRIPT.parent / "recorded.jsonl"
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    assert {(line["method"], line["ranks"]) for line in lines if line["phase"] == "step"} >= {
        (method, ranks) for method in ("reference", "collective", "shm") for ranks in (2, 4)
    }
    done = subprocess.run(
        [sys.executable, SCRIPT, recorded, recorded], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 slower, 0 faster" in done.stdout
