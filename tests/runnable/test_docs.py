"""Python blocks in README and docs/ run as they stand, each alone, on one rank.

A block that cannot run here has a line `<!-- not run: the reason -->` above it; its syntax is still checked.
One interpreter imports torch once and forks a child for each block, so a block costs fractions of a second.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECONDS_PER_BLOCK = 60

BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?^```python\n(?P<code>.*?)^```$",
    flags=re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One ```python block of a page; `line` is the page's line of its first statement."""

    page: str
    line: int
    code: str
    reason: str | None  # why it is not run; None if it is

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=str(page.relative_to(ROOT)),
            line=text.count("\n", 0, found.start("code")) + 1,
            code=found["code"],
            reason=found["reason"],
        )
        for found in BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]

# Runs in the interpreter that forks: no tensor is made before the fork, so torch has started no thread.
DRIVER = """
import json, os, signal, sys, tempfile, traceback
import torch, torch.distributed
import hybrid

def run(block, report):
    signal.alarm(block["seconds"])
    os.chdir(tempfile.mkdtemp(dir=block["folder"]))
    os.dup2(report.fileno(), 1)
    os.dup2(report.fileno(), 2)
    torch.set_num_threads(1)
    # Empty lines in front give a traceback the page's own line numbers.
    code = compile("\\n" * (block["line"] - 1) + block["code"], block["path"], "exec")
    try:
        exec(code, {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

results = []
for block in json.load(sys.stdin):
    with tempfile.TemporaryFile("w+") as report:
        child = os.fork()
        if child == 0:
            status = run(block, report)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        status = os.waitpid(child, 0)[1]
        report.seek(0)
        results.append({"status": status, "output": report.read()})
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """Block id -> wait status and output, of all blocks that are run."""
    folder = str(tmp_path_factory.mktemp("blocks"))
    blocks = [block for block in BLOCKS if block.reason is None]
    orders = [
        asdict(block) | {"path": str(ROOT / block.page), "seconds": SECONDS_PER_BLOCK, "folder": folder}
        for block in blocks
    ]
    finished = subprocess.run(
        [sys.executable, "-c", DRIVER],
        cwd=ROOT,
        input=json.dumps(orders),
        capture_output=True,
        text=True,
        timeout=30 + SECONDS_PER_BLOCK * len(orders),
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    results = json.loads(finished.stdout.splitlines()[-1])
    return {block.id: result for block, result in zip(blocks, results, strict=True)}


def test_blocks_are_found() -> None:
    """If the pattern stopped matching, every test below would pass over nothing."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert len(BLOCKS) == len(re.findall(r"^```python", text, flags=re.MULTILINE)) > 0


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.id)
def test_block_is_python(block: Block) -> None:
    compile(block.code, block.page, "exec")


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.reason is None], ids=lambda block: block.id)
def test_block_runs(block: Block, outcomes: dict[str, dict[str, object]]) -> None:
    """What a page shows is what a reader can paste."""
    outcome = outcomes[block.id]
    assert outcome["status"] == 0, outcome["output"]
