"""Rules about the repository's files."""

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

from moonep import _version

ROOT = Path(__file__).parents[1]

# Places that exist on one person's machine; /proc, /dev and /sys are the same everywhere.
ABSOLUTE_PATH = re.compile(
    r"(?<![\w.:$}/-])/(?:home|root|Users|work|workspace|tmp|opt|srv|mnt|scratch)/\w|\b[C-Z]:\\\w"
)
# Whoever installs or builds says where packages come from.
REGISTRY_HOST = re.compile(
    r"\b(?:pypi\.(?:org|io)|pythonhosted\.org|download\.pytorch\.org|pypi\.nvidia\.com|registry\.npmjs\.org"
    r"|deb\.debian\.org|archive\.ubuntu\.com|(?:conda\.)?anaconda\.(?:org|com))\b",
    re.IGNORECASE,
)


def project_files() -> list[Path]:
    """What git tracks, and what it would if it were added now."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.split("\0") if name]
    return sorted(path for path in paths if path.is_file())


def places(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in project_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # not text
        found += [
            f"{path.relative_to(ROOT)}:{n}: {line.strip()}" for n, line in enumerate(lines, 1) if pattern.search(line)
        ]
    return found


def test_no_absolute_paths() -> None:
    assert places(ABSOLUTE_PATH) == []


def test_no_registry_hosts() -> None:
    assert places(REGISTRY_HOST) == []


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (ABSOLUTE_PATH, "open('" + "/home" + "/me/x')", True),
        (ABSOLUTE_PATH, "see docs/work/x", False),
        (ABSOLUTE_PATH, "#!/usr/bin/env bash, /proc/self/fd, /dev/shm/x", False),
        (REGISTRY_HOST, "from https://" + "pypi" + ".org/simple", True),
        (REGISTRY_HOST, "pypi and pytorch", False),
    ],
)
def test_patterns(pattern: re.Pattern[str], text: str, found: bool) -> None:
    assert bool(pattern.search(text)) == found


def test_sources_are_in_the_sdist(monkeypatch: pytest.MonkeyPatch) -> None:
    egg_info = pytest.importorskip("setuptools.command.egg_info")
    monkeypatch.chdir(ROOT)
    manifest = egg_info.FileList()
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            manifest.process_template_line(line)
    names = {path.relative_to(ROOT).as_posix() for path in project_files()}
    packed = {Path(name).as_posix() for name in manifest.files}
    assert {name for name in names if name.startswith("csrc/")} <= packed
    assert {"moonep/py.typed", "CHANGELOG.md"} <= packed
    assert not {name for name in packed if name.startswith("tests/")}


def test_changelog_has_the_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == _version.__version__


def test_env_is_the_one_reader_of_the_environment() -> None:
    def reads_environment(path: Path) -> bool:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names}
        return bool(names & {"environ", "environb", "getenv"})

    readers = [path.relative_to(ROOT).as_posix() for path in (ROOT / "moonep").rglob("*.py") if reads_environment(path)]
    assert readers == ["moonep/env.py"]


def test_scripts_are_executable() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
