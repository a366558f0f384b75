"""The shape the package promises: floors, imports without torch, public names, small files, one version."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import hybrid

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hybrid"
MAX_LINES = 450

# Floors that work where torch is not installed (docs/contributing.md).
TORCH_FREE = ("errors", "units", "contracts", "strategy", "launch", "planner", "report", "cli")

REPORT_MODULES = "import json, sys; print(json.dumps(sorted(sys.modules)))"


def python_modules(package: Path) -> Iterator[Path]:
    return (path for path in sorted(package.rglob("*.py")))


def run_python(code: str, *, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def loaded_by(code: str) -> set[str]:
    """Names in sys.modules of a fresh interpreter that has run `code`."""
    finished = run_python(f"{code}\n{REPORT_MODULES}")
    assert finished.returncode == 0, finished.stderr
    return set(json.loads(finished.stdout.splitlines()[-1]))


# `hybrid --help` leaves by SystemExit, with the page on stdout.
HELP = """
import sys
from hybrid.cli.app import main
sys.argv = ["hybrid", "--help"]
try:
    main()
except SystemExit as leave:
    assert not leave.code, leave.code
"""


@pytest.mark.parametrize(
    ("code", "most_modules"),
    [
        pytest.param("import hybrid", 150, id="import-hybrid"),
        pytest.param("import hybrid.strategy", 600, id="strategy"),
        pytest.param("import hybrid.launch.environment", 250, id="launch-environment"),
        pytest.param("import hybrid; hybrid.DistributedStrategy", 600, id="strategy-by-its-public-name"),
        pytest.param(HELP, 1000, id="help"),
    ],
)
def test_starts_without_torch(code: str, most_modules: int) -> None:
    """The command line and a strategy file's check must not wait seconds for torch, nor need it."""
    modules = loaded_by(code)
    assert "torch" not in modules
    assert len(modules) < most_modules


def test_public_names_resolve() -> None:
    """A lazy name whose module or attribute has moved would fail only at a user."""
    code = "import hybrid\nfor name in hybrid.__all__: getattr(hybrid, name)\nprint(len(hybrid.__all__))"
    finished = run_python(code)
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout) == len(hybrid.__all__)


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hybrid.no_such_name


def test_public_names_for_type_checkers_are_the_lazy_ones() -> None:
    """A name only in the lazy table has no type for an editor; one only in the other fails at run time."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.asname
        for block in tree.body
        if isinstance(block, ast.If)
        for line in block.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
    modules = {
        alias.asname
        for block in tree.body
        if isinstance(block, ast.If)
        for line in block.body
        if isinstance(line, ast.Import)
        for alias in line.names
    }
    assert typed | modules == set(hybrid.__all__) - {"__version__"}


def test_modules_stay_small() -> None:
    """One file, one noun: a file that outgrows the budget is split."""
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in python_modules(PACKAGE)
    }
    assert {name: lines for name, lines in lengths.items() if lines >= MAX_LINES} == {}


def test_every_folder_is_a_package() -> None:
    """A folder without `__init__.py` imports all the same, but the linter and the wheel do not see it."""
    folders = {path.parent for path in python_modules(PACKAGE)}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_lower_floors_do_not_import_the_top_package() -> None:
    """`import hybrid` in a module reaches every floor through the lazy names, unseen by the linter.

    Only the demo does so, for it is written as a user's script; anyone may read the version.
    """
    found = []
    for path in python_modules(PACKAGE):
        if path.is_relative_to(PACKAGE / "demo"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            plain = isinstance(node, ast.Import) and any(alias.name == "hybrid" for alias in node.names)
            names = node.names if isinstance(node, ast.ImportFrom) and node.module == "hybrid" else []
            lazy = [alias.name for alias in names if alias.name in hybrid.__all__ and alias.name != "__version__"]
            if plain or lazy:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def test_version_is_the_changelogs_newest() -> None:
    """A release without its changelog, or the other way round, stops here."""
    changelog = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", changelog, flags=re.MULTILINE)
    assert released[0] == hybrid.__version__


def test_dependencies_page_names_every_dependency() -> None:
    """Each library has its reason in docs/dependencies.md, and no reason outlives its library."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    declared = {re.split(r"[<>=!~\[; ]", line)[0] for line in wanted}
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == declared


# ---------------------------------------------------------------- import-linter


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command as command\n"
        "command(['--no-logo', '--no-cache'])"
    )
    return run_python(code, cwd=folder)


def test_floors_hold() -> None:
    finished = lint_imports(ROOT)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_every_floor_without_torch_is_under_the_torch_contract() -> None:
    """A new torch-free floor must be listed: the linter cannot list what does not exist yet."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contracts = {contract["id"]: contract for contract in settings["importlinter"]["contracts"]}
    there = {name for name in TORCH_FREE if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()}
    assert set(contracts["torch-free"]["source_modules"]) == {f"hybrid.{name}" for name in there}


@pytest.fixture
def copy_of_package(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(PACKAGE, tmp_path / "hybrid", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        pytest.param("errors.py", "import hybrid.strategy", "imports go downwards", id="upwards"),
        pytest.param("strategy/__init__.py", "import torch", "no torch", id="torch"),
        pytest.param("sharding/__init__.py", "import hybrid.pipeline", "imports go downwards", id="sideways"),
        pytest.param("weather/__init__.py", "", "imports go downwards", id="floor-that-nobody-listed"),
    ],
)
def test_planted_import_breaks_a_contract(copy_of_package: Path, module: str, line: str, broken: str) -> None:
    """The contracts above would also hold if they checked nothing: plant what they must catch."""
    pipeline = copy_of_package / "hybrid" / "pipeline" / "__init__.py"
    pipeline.parent.mkdir(exist_ok=True)
    pipeline.touch()
    target = copy_of_package / "hybrid" / module
    target.parent.mkdir(exist_ok=True)
    before = target.read_text(encoding="utf-8") if target.exists() else ""
    target.write_text(f"{before}\n{line}\n", encoding="utf-8")

    finished = lint_imports(copy_of_package)

    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert re.search(rf"^{broken}.* BROKEN", finished.stdout, flags=re.MULTILINE), finished.stdout
