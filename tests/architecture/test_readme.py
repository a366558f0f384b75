"""README's commands are the ones that CI runs, and every link of a page leads to a file."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

COMMANDS = {
    "demo": "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/hybrid demo",
    "docs": "python3 -m venv .venv && .venv/bin/pip install -e '.[docs]' && .venv/bin/sphinx-build -W docs site",
    "test": "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest",
}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_readme_shows_the_command(name: str) -> None:
    """These lines are promised to work on a fresh machine, as they stand."""
    blocks = re.findall(rf"<!-- command: {name} -->\n```bash\n(.*?)\n```\n", README, flags=re.DOTALL)
    assert blocks == [COMMANDS[name]]


def test_ci_takes_the_test_command_from_readme() -> None:
    """If .ci/run read another command than README shows, README could rot unseen."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    function = re.search(r"^readme_command\(\) \{.*?^\}$", script, flags=re.DOTALL | re.MULTILINE)
    assert function is not None
    read = subprocess.run(
        ["bash", "-c", f"{function[0]}\nreadme_command test"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert read.stdout.strip() == COMMANDS["test"]
    assert script.count('"$test_command"') >= 2
    assert "pytest" not in script.replace("pytest_cache", "")


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    """A page that moves takes its links along."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [target for target in targets if target and "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []
