"""The shape of the house: imports run one way, `import moonep` does no work, and `__all__` keeps its promises."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import moonep
from moonep import errors

SOURCE = Path(__file__).parents[1] / "moonep"

# A part is a file or folder directly under moonep/, and imports only what stands above it; parts of one line may
# import each other, without circles. `__init__` is the package itself: `import moonep`, `from moonep import Buffer`.
LAYERS = [
    {"_C", "_version"},
    {"errors", "env", "machine", "policy", "sizes", "config"},
    {"checks", "balance"},
    {"plan"},
    {"reference", "transport"},
    {"autograd", "ops", "replicas"},
    {"calls"},
    {"buffer"},
    {"nn"},
    {"__init__"},
    {"integrations", "trace", "testing"},
    {"bench", "doctor", "sizing"},
    {"cli"},
    {"__main__"},
]
LAYER_OF = {part: number for number, layer in enumerate(LAYERS) for part in layer}


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_private(module: str) -> bool:
    return any(part.startswith("_") for part in module.split("."))


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imported_modules(path: Path) -> Iterator[str]:
    """The moonep modules that a file imports, wherever in the file: functions and `if TYPE_CHECKING` count."""
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            origin = ".".join(filter(None, [base, node.module]))
            # `from moonep import plan` names a module, `from moonep import Buffer` the package.
            names = [f"{origin}.{alias.name}" if is_part(origin, alias.name) else origin for alias in node.names]
        else:
            continue
        yield from (name for name in names if name == "moonep" or name.startswith("moonep."))


def is_part(origin: str, name: str) -> bool:
    return origin == "moonep" and name in LAYER_OF


def imported_parts() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for path in source_files():
        part = part_of(module_name(path))
        graph.setdefault(part, set()).update({part_of(name) for name in imported_modules(path)} - {part})
    return graph


def run_python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_part_has_a_layer() -> None:
    assert imported_parts().keys() - LAYER_OF.keys() == set(), "give the part a place in LAYERS"


def test_imports_run_one_way() -> None:
    upward = [
        f"{module_name(path)} imports {name}"
        for path in source_files()
        for name in imported_modules(path)
        if LAYER_OF[part_of(name)] > LAYER_OF[part_of(module_name(path))]
    ]
    assert upward == []


def test_imports_make_no_circle() -> None:
    TopologicalSorter(imported_parts()).prepare()  # raises CycleError, which names the circle


def test_reference_does_not_import_the_extension() -> None:
    assert "_C" not in imported_parts()["reference"]


def test_every_public_module_says_what_is_public() -> None:
    def has_all(path: Path) -> bool:
        targets = [
            target
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, (ast.Assign, ast.AnnAssign))
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        ]
        return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)

    silent = [module_name(path) for path in source_files() if not has_all(path)]
    assert [module for module in silent if not is_private(module)] == []


@pytest.mark.parametrize("module", [module_name(path) for path in source_files() if path.name != "__main__.py"])
def test_public_names_exist(module: str) -> None:
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "moonep":
            raise
        pytest.skip(f"needs {error.name}")
    names = getattr(loaded, "__all__", [])
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(loaded, name)] == []


def test_public_names_are_listed_by_dir() -> None:
    assert set(moonep.__all__) <= set(dir(moonep))


def test_errors_are_kinds_of_moonep_error() -> None:
    assert "MoonEPError" in errors.__all__
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.MoonEPError)
        assert kind.__doc__


def test_import_does_no_work() -> None:
    loaded = run_python(
        "import sys, threading, moonep\n"
        "for name in moonep.__all__: getattr(moonep, name)\n"
        "import torch.distributed as dist\n"
        "assert not dist.is_initialized()\n"
        "assert not sys.modules['torch'].cuda.is_initialized()\n"
        "assert threading.active_count() == 1\n"
        "print(*sys.modules)"
    ).split()
    assert "matplotlib" not in loaded
    assert "click" not in loaded
    assert "moonep.cli" not in loaded
    assert "moonep.nn" not in loaded


def test_errors_are_importable_alone() -> None:
    run_python("from moonep.errors import MoonEPError; assert issubclass(MoonEPError, Exception)")


def test_help_answers_without_torch() -> None:
    shown = run_python(
        "import sys\n"
        "from moonep.cli import main\n"
        "sys.argv = ['moonep', '--help']\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'numpy' not in sys.modules"
    )
    assert "Usage: moonep" in shown
    assert "bench" in shown
