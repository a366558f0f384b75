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

from tests.runnable.command import hybrid_here
from tests.runnable.pages import PAGES, ROOT, Fence, fences_of

SECONDS_PER_BLOCK = 60


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


def reason_of(fence: Fence) -> str | None:
    return "the page's commands run it (test_docs_commands.py)" if "file" in fence.marks else fence.marks.get("not run")


def blocks_of(page: Path) -> list[Block]:
    return [
        Block(page=fence.page, line=fence.line, code=fence.code, reason=reason_of(fence))
        for fence in fences_of(page, "python")
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]

# Runs in the interpreter that forks: no tensor is made before the fork, so torch has started no thread.
DRIVER = """
import json, os, signal, sys, tempfile, traceback
import torch, torch.distributed
import hybrid, hybrid.compose.model

for name in hybrid.__all__:  # what is imported at first use: once, and not in every block
    getattr(hybrid, name)

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


OUTPUT_WIDTH = 120
SHOWN = [fence for page in PAGES for fence in fences_of(page, "text") if "output" in fence.marks]


@pytest.mark.parametrize(
    "fence",
    [fence for fence in SHOWN if fence.marks["output"].startswith("hybrid schedule")],
    ids=lambda fence: fence.id,
)
def test_picture_is_what_the_command_draws(fence: Fence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of schedules in pages, `<!-- output: hybrid schedule ... -->`, are of the lists that run."""
    monkeypatch.setenv("COLUMNS", str(OUTPUT_WIDTH))
    done = hybrid_here(*fence.marks["output"].split()[1:], cwd=tmp_path)
    assert done.returncode == 0
    assert stripped(done.stdout) == stripped(fence.code)


@pytest.mark.parametrize(
    "fence", [fence for fence in SHOWN if fence.marks["output"] == "the block above"], ids=lambda fence: fence.id
)
def test_output_is_what_the_block_prints(fence: Fence, outcomes: dict[str, dict[str, object]]) -> None:
    """A table below a block, `<!-- output: the block above -->`, is of this version."""
    above = max((block for block in BLOCKS if block.page == fence.page and block.line < fence.line), key=line_of)
    assert stripped(str(outcomes[above.id]["output"])) == stripped(fence.code)


def line_of(block: Block) -> int:
    return block.line


def stripped(text: str) -> list[str]:
    """Without what nobody sees: spaces at the ends of lines, empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
