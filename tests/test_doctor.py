"""`moonep doctor`: what it prints, and what it says of machines that lack something."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import NoneType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from moonep import _C, machine
from moonep.cli.doctor import doctor
from moonep.doctor import copies, examine, look
from moonep.doctor.problems import find_problems
from moonep.doctor.report import Auto, Gpu, Gpus, Report, Section, Trial
from moonep.doctor.trials import try_ranks
from moonep.testing import RankFailure, RankOutcome

SECTIONS = ("Machine", "Software", "GPUs", "Copies", "Transports", "Problems")

# What --json promises: every key, and what its value may be.
TEXT, NUMBER = (str, NoneType), (float, NoneType)
COUNT = (int, NoneType)
TRIAL = {"usable": (bool, NoneType), "reason": str, "round_trip_us": NUMBER}
GPU = {"name": str, "memory_bytes": int, "compute_capability": str, "peers": [int]}
KEYS = {
    "machine": {
        "cpu": str,
        "architecture": str,
        "kernel": str,
        "host_id": str,
        "cores": int,
        "cores_allowed": int,
        "cores_quota": NUMBER,
        "cores_usable": int,
        "load": NUMBER,
        "memory_total_bytes": COUNT,
        "memory_available_bytes": COUNT,
        "memory_limit_bytes": COUNT,
        "numa_nodes": int,
        "huge_pages": TEXT,
        "dev_shm_bytes": COUNT,
        "has_proc": bool,
    },
    "software": {
        "moonep": str,
        "python": str,
        "torch": TEXT,
        "numpy": TEXT,
        "click": TEXT,
        "matplotlib": TEXT,
        "nccl": TEXT,
        "torch_error": TEXT,
        "torch_cuda": TEXT,
        "torch_threads": COUNT,
        "backends": [str],
        "extension_error": TEXT,
        "row_kernels": TEXT,
        "pidfd": (bool, NoneType),
        "shared_memory_error": TEXT,
        "compilers": dict.fromkeys(("gcc", "g++", "clang", "clang++", "nvcc"), TEXT),
    },
    "gpus": {"driver": TEXT, "devices": [GPU], "error": TEXT},
    "copies": {
        "small_bytes": int,
        "large_bytes": int,
        "cores": int,
        "small_gb_per_s": float,
        "large_gb_per_s": float,
        "large_all_cores_gb_per_s": float,
        "stream_gb_per_s": float,
        "stream_all_cores_gb_per_s": float,
    },
    "transports": {
        "local": TRIAL,
        "shm": TRIAL,
        "collective_gloo": TRIAL,
        "collective_nccl": TRIAL,
        "cuda": TRIAL,
        "auto": {"transport": TEXT, "reason": str},
        "ranks_error": TEXT,
        "meeting_us": NUMBER,
    },
    "problems": [{"problem": str, "advice": str}],
    "usable": bool,
}


def check_shape(value: object, shape: Any, place: str = "report") -> None:
    """`value` has exactly the keys and types that `shape` says."""
    if isinstance(shape, dict):
        assert isinstance(value, dict), place
        assert value.keys() == shape.keys(), place
        for key in shape:
            check_shape(value[key], shape[key], f"{place}.{key}")
    elif isinstance(shape, list):
        assert isinstance(value, list), place
        for item in value:
            check_shape(item, shape[0], f"{place}[]")
    else:
        kinds = shape if isinstance(shape, tuple) else (shape,)
        assert type(value) in kinds, (place, value)


def run(*args: str) -> Result:
    result = CliRunner().invoke(doctor, args)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def check_page(text: str) -> None:
    """The sections stand there in order, and the lines fit a terminal."""
    titles = [line.split()[0] for line in text.splitlines() if re.match(r"\w", line)]
    assert titles == list(SECTIONS)
    assert max(map(len, text.splitlines())) <= 80
    assert "None" not in text


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_LARGE_BYTES", 1 << 20)


@pytest.fixture
def report() -> Report:
    return examine(ranks=False)


# ---- what is printed ----


def test_table() -> None:
    result = run("--no-ranks")
    assert result.exit_code == 0
    check_page(result.stdout)
    assert re.search(r"^  local +works; round trip \d+ us$", result.stdout, re.MULTILINE)
    assert result.stdout.count("not tried: no ranks were started") >= 3


def test_json() -> None:
    result = run("--json", "--no-ranks")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    check_shape(told, KEYS)
    assert told["usable"] is True
    assert told["transports"]["local"]["usable"] is True
    assert told["transports"]["shm"]["usable"] is None
    assert min(value for key, value in told["copies"].items() if key.endswith("gb_per_s")) > 0


@pytest.mark.slow
def test_whole_command() -> None:
    command = "from moonep.cli.doctor import doctor; doctor()"
    done = subprocess.run([sys.executable, "-c", command, "--json"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    check_shape(told, KEYS)
    assert told["transports"]["collective_gloo"]["usable"] is True


def test_help_answers_without_torch() -> None:
    code = (
        "import sys\n"
        "from moonep.cli.doctor import doctor\n"
        "try: doctor(['--help'])\n"
        "finally: assert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--no-ranks" in done.stdout


def test_sections_are_told_as_they_come() -> None:
    seen: list[Section] = []
    whole = examine(ranks=False, seen=seen.append)
    assert seen == [whole.machine, whole.software, whole.gpus, whole.copies, whole.transports]


# ---- ranks ----


def test_ranks(pool2: Any) -> None:
    shm, gloo, auto, meeting_us = try_ranks(pool2)
    assert gloo.usable
    assert gloo.round_trip_us
    assert gloo.round_trip_us > 0
    if sys.platform == "linux":
        assert shm.usable, shm.reason
        assert auto.transport == "shm"
        assert meeting_us
        assert meeting_us > 0


class RefusingPool:
    """Two ranks that cannot share memory."""

    def run(self, fn: Callable[..., Any], transport: str = "", **options: Any) -> list[Any]:
        if transport == "shm":
            lost = RankOutcome(
                error="ValueError: transport: 'shm' cannot be used: rank 0: opening its memory: no; 'auto' can"
            )
            raise RankFailure([RankOutcome(), lost])
        return [("collective", 7.0), ("collective", 9.0)]


def test_ranks_that_cannot_share_memory(report: Report) -> None:
    pool: Any = RefusingPool()
    shm, gloo, auto, meeting_us = try_ranks(pool)
    assert shm == Trial(False, "rank 0: opening its memory: no")
    assert gloo == Trial(True, round_trip_us=9.0)
    assert auto == Auto("collective", f"shm is not usable: {shm.reason}")
    assert meeting_us is None
    transports = replace(report.transports, shm=shm, collective_gloo=gloo, auto=auto)
    found = find_problems(report.machine, report.software, report.gpus, transports)
    assert any("/proc" in problem.problem and "hidepid" in problem.advice for problem in found)


# ---- machines that lack something ----


def test_no_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "open_pidfd", lambda pid: -1)
    result = run("--no-ranks")
    assert result.exit_code == 0
    check_page(result.stdout)
    assert "processes can be watched: no" in result.stdout
    if sys.platform == "linux":
        assert "pidfd_open" in result.stdout.partition("Problems")[2]


def test_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_available_bytes", lambda: 30_000_000)
    result = run("--no-ranks")
    assert result.exit_code == 0
    assert "little memory is left: 0.03 GB" in result.stdout


def test_no_transport_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_available_bytes", lambda: 1000)
    result = run("--no-ranks")
    assert result.exit_code == 1
    check_page(result.stdout)
    assert "not even one rank works" in result.stdout


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    result = run("--no-ranks")
    assert result.exit_code == 0
    check_page(result.stdout)
    assert "none found" in result.stdout
    assert "no C++ compiler was found" in result.stdout


@pytest.mark.parametrize(
    ("module", "key", "advice"),
    [("torch", "torch_error", "install torch"), ("moonep._C", "extension_error", "build it")],
)
def test_what_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, module: str, key: str, advice: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    result = run("--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    check_shape(told, KEYS | {"copies": NoneType})
    assert module in told["software"][key]
    assert advice in told["problems"][0]["advice"]
    assert told["transports"]["auto"]["transport"] is None


def test_ranks_that_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: object, **options: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("moonep.testing.RankPool", no_room)
    result = run()
    assert result.exit_code == 0  # one rank works
    check_page(result.stdout)
    assert result.stdout.count("two ranks do not start: OSError: no space left on device") == 1
    assert result.stdout.count("no: two ranks do not start") == 2


def test_kernel_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("memory_available_bytes", "memory_total_bytes", "huge_pages", "dev_shm_bytes"):
        monkeypatch.setattr(machine, name, lambda: None)
    monkeypatch.setattr(machine, "has_proc", lambda: False)
    result = run("--no-ranks")
    assert result.exit_code == 0
    check_page(result.stdout)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cores_usable": 1, "cores_allowed": 1}, "take turns on one core"),
        ({"huge_pages": "never"}, "never comes in huge pages"),
        ({"load": 99.0, "cores": 2}, "load 99.0 on 2 cores"),
        ({"kernel": "Linux 5.4", "has_proc": False}, "/proc does not show"),
        ({"kernel": "Darwin 24"}, "this is not Linux"),
    ],
)
def test_machine_problems(report: Report, changes: dict[str, Any], said: str) -> None:
    changed = replace(report.machine, **changes)
    found = find_problems(changed, report.software, report.gpus, report.transports)
    assert any(said in problem.problem for problem in found), found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"torch_threads": 4096}, "4096 threads"),
        ({"backends": []}, "no gloo"),
        ({"shared_memory_error": "memfd_create: Operation not permitted"}, "memory cannot be shared: memfd_create"),
    ],
)
def test_software_problems(report: Report, changes: dict[str, Any], said: str) -> None:
    linux = replace(report.machine, kernel="Linux 6.1")
    found = find_problems(linux, replace(report.software, **changes), report.gpus, report.transports)
    assert any(said in problem.problem for problem in found), found


def test_a_good_machine_has_no_problems(report: Report) -> None:
    good = replace(
        report.machine,
        kernel="Linux 6.1",
        cores=64,
        cores_usable=64,
        load=0.5,
        memory_available_bytes=10**11,
        huge_pages="madvise",
        has_proc=True,
    )
    software = replace(
        report.software, pidfd=True, row_kernels="avx2", torch_threads=64, compilers={"g++": "13.2.0", "clang++": None}
    )
    works = Trial(True, round_trip_us=50.0)
    transports = replace(report.transports, shm=works, collective_gloo=works, meeting_us=1.0)
    assert find_problems(good, software, Gpus(), transports) == []


# ---- parts ----


def test_gpus_that_torch_does_not_find(report: Report) -> None:
    for cuda, said in ((None, "built without CUDA"), ("12.6", "torch finds no GPU")):
        software = replace(report.software, torch_cuda=cuda)
        found = find_problems(report.machine, software, Gpus(driver="550.54"), report.transports)
        assert any(said in problem.problem for problem in found), found


def test_gpu_links(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus("550.54", [Gpu("H100", 80 * 10**9, "9.0", [1]), Gpu("H100", 80 * 10**9, "9.0", [])])
    monkeypatch.setattr("moonep.doctor.look_at_gpus", lambda software: gpus)
    result = run("--no-ranks")
    check_page(result.stdout)
    assert "H100, 80.00 GB, 9.0; reaches 1 directly" in result.stdout
    assert "reaches no other directly" in result.stdout


def test_compilers_tell_their_version() -> None:
    if shutil.which("gcc"):
        assert re.fullmatch(r"\d+\.\d+[.\d]*", look.look_at_software().compilers["gcc"] or "")


@pytest.mark.parametrize(
    ("files", "quota", "limit", "available"),
    [
        ({"cpu.max": "150000 100000\n", "memory.max": "4096\n", "memory.current": "1096\n"}, 1.5, 4096, 3000),
        ({"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.current": "1096\n"}, None, None, None),
        ({"a/cpu.max": "400000 100000\n", "cpu.max": "200000 100000\n"}, 2.0, None, None),
        ({"memory.max": "4096\n", "memory.current": "5000\n"}, None, 4096, 0),
    ],
)
def test_control_groups(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    files: dict[str, str],
    quota: float | None,
    limit: int | None,
    available: int | None,
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    read = machine._read
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    monkeypatch.setattr(
        machine,
        "_read",
        lambda path: {"/proc/self/cgroup": "0::/a\n", "/proc/meminfo": ""}.get(str(path)) or read(path),
    )
    monkeypatch.setattr(machine, "_meminfo_bytes", lambda name: None)
    assert machine.cores_quota() == quota
    assert machine.memory_limit_bytes() == limit
    assert machine.memory_available_bytes() == available


def test_nccl_that_fails_is_a_problem(report: Report) -> None:
    gpus = Gpus("550.54", [Gpu("H100", 80 * 10**9, "9.0", [1]), Gpu("H100", 80 * 10**9, "9.0", [0])])
    transports = replace(report.transports, collective_nccl=Trial(False, "DistBackendError: NCCL error"))
    for devices, expected in ((gpus.devices, True), ([], False)):
        found = find_problems(report.machine, report.software, replace(gpus, devices=devices), transports)
        assert any("NCCL error" in problem.problem for problem in found) == expected


def test_no_room_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(this_machine: object) -> None:
        raise MemoryError

    monkeypatch.setattr("moonep.doctor.measure_copies", no_room)
    told = json.loads(run("--json", "--no-ranks").stdout)
    check_shape(told, KEYS | {"copies": NoneType})
