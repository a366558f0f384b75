"""Shell blocks of README and docs/: valid shell, options that exist, and what can run in a moment runs.

Of every `hybrid ...` in a block, wherever it stands in the line, the command line's own parser reads the words. A
page's blocks under `<!-- run -->` run in one folder, in their order, with the files that the page shows; commands that
only read files run wherever they are shown, with files made here. Scripts run in processes that are forked with torch
loaded (tests/ranks.py); what `hybrid run` and torchrun add around them is tested in test_run.py.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.command_line import COMMAND, subcommands
from tests.ranks import run_ranks
from tests.runnable.command import hybrid_here, run_as_main, run_script
from tests.runnable.pages import PAGES, ROOT, Fence, fences_of

BLOCKS = [fence for page in PAGES for fence in fences_of(page, "bash")]
RUN_PAGES = sorted({fence.page for fence in BLOCKS if "run" in fence.marks})
SEPARATORS = re.compile(r"[;&|()<>]+")


def test_blocks_are_found() -> None:
    """If the pattern stopped matching, every test below would pass over nothing."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert len(BLOCKS) == len(re.findall(r"^```bash", text, flags=re.MULTILINE)) > 20
    assert re.findall(r"^```(?:sh|shell|console)$", text, flags=re.MULTILINE) == []
    assert "docs/get_started.md" in RUN_PAGES


def test_blocks_are_valid_shell() -> None:
    """A quote that is not closed is found here, not at a reader's prompt."""
    for block in BLOCKS:
        finished = subprocess.run(["bash", "-n"], input=block.code, text=True, capture_output=True, check=False)
        assert finished.returncode == 0, f"{block.id}: {finished.stderr}"


# -- options -------------------------------------------------------------------------------------------------------


def simple_commands(code: str) -> Iterator[list[str]]:
    """The words of each command of a block, without comments, redirections and what variables hold."""
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True  # but for what the shell reads as more than a part of a word
        words: list[str] = []
        skips = False
        for token in lexer:
            if skips:
                skips = False
            elif SEPARATORS.fullmatch(token):
                skips = "<" in token or ">" in token
                if not skips:
                    yield words
                    words = []
            else:
                words.append(re.sub(r"\$\{?\w+\}?", "1", token))
        yield words


def arguments_of_hybrid(words: list[str]) -> list[str] | None:
    """What follows the program `hybrid` in a command, also behind `srun`, `launch.sh --no-python` and the like."""
    for place, word in enumerate(words):
        if word == "hybrid" or word.endswith("/bin/hybrid"):
            return words[place + 1 :]
    return None


def parsed(arguments: list[str]) -> tuple[str, Any]:
    """The command that the words choose, and its context; raises click's error for what it does not take."""
    command, name, rest = COMMAND, "", list(arguments)
    while rest and not rest[0].startswith("-") and (inner := subcommands(command)):
        part = rest.pop(0)
        assert part in inner, f"there is no command {part!r} in `hybrid {' '.join(arguments)}`"
        command, name = inner[part], f"{name} {part}".strip()
    return name, command.make_context(name or "hybrid", rest)


def test_options_exist() -> None:
    """A page that shows an option which was renamed or never came would send its reader into an error."""
    seen = []
    for block in BLOCKS:
        for words in simple_commands(block.code):
            arguments = arguments_of_hybrid(words)
            if arguments is not None:
                try:
                    seen.append(parsed(arguments)[0])
                except Exception as error:
                    pytest.fail(f"{block.id}: hybrid {' '.join(arguments)}: {getattr(error, 'message', error)}")
    assert {"run", "plan", "explain", "import", "schedule", "profile", "checkpoint ls"} <= set(seen)


INLINE = re.compile(r"(?<!`)`(hybrid [a-z][^`\n]*)`(?!`)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_inline_commands_exist(page: Path) -> None:
    """`hybrid checkpoint verify` in running text: the command is there, and so is each option that is named."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    wrong = []
    for inline in INLINE.findall(text):
        command, words = COMMAND, inline.split()[1:]
        while words and words[0] in subcommands(command):
            command = subcommands(command)[words.pop(0)]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help", "--version"}
        unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in known]
        if command is COMMAND or (unknown and command.name not in {"run", "profile"}):
            wrong.append(inline)
    assert wrong == []


# -- blocks that run -----------------------------------------------------------------------------------------------


def started(path: Path, cwd: Path, variables: dict[str, str]) -> tuple[str, str]:
    """A script under a launcher: its world has been started (tests/ranks.py), so its own start finds it there."""
    with mock.patch("torch.distributed.init_process_group", return_value=None):
        return run_as_main(path, (), cwd, variables)


def script(cwd: Path, name: str, *, num_ranks: int, variables: dict[str, str] | None = None) -> str:
    assert (cwd / name).is_file(), f"{name} is not among the page's files"
    if num_ranks == 1:
        return run_script(cwd / name, cwd=cwd, variables=variables).stdout
    return run_ranks(started, num_ranks, cwd / name, cwd, variables or {}, timeout_seconds=120)[0][0]


def carry_out(words: list[str], cwd: Path) -> str:
    """One command of a page; its output."""
    match words:
        case ["python", name]:
            return script(cwd, name, num_ranks=1)
        case ["torchrun", "--nproc-per-node", number, name]:
            return script(cwd, name, num_ranks=int(number))
        case ["hybrid", "run", *_]:
            given = parsed(words[1:])[1].params
            variables = {
                f"HYBRID_{key.upper()}": str(cwd / given[key])
                for key in ("strategy", "resume")
                if given[key] is not None
            }
            plain = parsed(["run", given["script"]])[1].params
            assert {key for key in plain if given[key] != plain[key]} <= {"nproc", "strategy", "resume"}
            return script(cwd, given["script"], num_ranks=given["nproc"], variables=variables)
        case ["hybrid", *arguments]:
            finished = hybrid_here(*arguments, cwd=cwd)
            assert finished.returncode == 0, finished.stderr
            return finished.stdout
    raise AssertionError(f"this test cannot run {shlex.join(words)}")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[list[str], str]]]:
    """Page -> its marked commands with what they printed."""
    return {page: run_page(ROOT / page, tmp_path_factory.mktemp(Path(page).stem)) for page in RUN_PAGES}


def run_page(page: Path, folder: Path) -> list[tuple[list[str], str]]:
    fences: list[Fence] = fences_of(page)
    for fence in fences:
        if "file" in fence.marks:
            (folder / fence.marks["file"]).write_text(fence.code, encoding="utf-8")
    commands = [
        words
        for fence in fences
        if fence.language == "bash" and "run" in fence.marks
        for words in simple_commands(fence.code)
        if words
    ]
    unused = {fence.marks["file"] for fence in fences if "file" in fence.marks} - {
        word for one in commands for word in one
    }
    assert unused == set(), f"{page.name}: no command uses {unused}"
    return [(words, carry_out(words, folder)) for words in commands]


MODEL = """
import torch

def build():
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    return torch.nn.TransformerEncoder(layer, 4), torch.randn(2, 3, 16)
"""
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
}
STRATEGIES = {
    "docs/strategy.md": "sharding: true",
    "docs/tensor_parallel.md": "tensor_parallel: true\ntensor_parallel_configs: {degree: 2}",
    "docs/pipeline.md": "pipeline: true\npipeline_configs: {degree: 2, accumulate_steps: 4}",
}
# Page -> files that its commands are shown with, and what these begin with.
FILES: dict[str, tuple[dict[str, str], str]] = {
    page: ({"strategy.yaml": text, "my_package/model.py": MODEL}, "hybrid explain") for page, text in STRATEGIES.items()
}
FILES["docs/migrating.md"] = (
    {
        "ds_config.json": json.dumps(DEEPSPEED),
        "accelerate.yaml": "{distributed_type: FSDP, num_processes: 8, fsdp_config: {fsdp_version: 2}}",
        "fleet.yaml": "{dp_degree: 4, mp_degree: 2, pp_degree: 2}",
    },
    "hybrid import",
)


@pytest.mark.parametrize("page", sorted(FILES))
def test_commands_that_only_read_files(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `explain` and `import` of these pages, as it is shown, ends well and says something."""
    files, start = FILES[page]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_package", raising=False)
    monkeypatch.delitem(sys.modules, "my_package.model", raising=False)
    words = [words for block in BLOCKS if block.page == page for words in simple_commands(block.code)]
    chosen = [one for one in words if shlex.join(one).startswith(start)]
    assert len(chosen) >= 2
    for one in chosen:
        finished = hybrid_here(*one[1:], cwd=tmp_path)
        assert finished.returncode == 0, f"{shlex.join(one)}: {finished.stderr}"
        assert finished.stdout or "--out" in one


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"^step \d+: (?:loss )?([\d.]+)", output, flags=re.MULTILINE)]


def test_get_started(outputs: dict[str, list[tuple[list[str], str]]]) -> None:
    """The page promises the same losses on one rank and on two, a second start that goes on, and files of a plan."""
    explained, one, two, first, second, listed, planned = [out for _, out in outputs["docs/get_started.md"]]
    assert "sharding" in explained
    assert len(losses(one)) == 4
    assert losses(one)[-1] < losses(one)[0]
    assert losses(two) == pytest.approx(losses(one), rel=1e-3)
    assert losses(first) == losses(two)
    assert re.findall(r"^step (\d+)", second, flags=re.MULTILINE) == ["80", "96", "112", "128"]
    assert "128" in listed
    assert "llama3-8b" in planned


def test_fsdp_and_hybrid_print_the_same(outputs: dict[str, list[tuple[list[str], str]]]) -> None:
    """The page's two columns are said to be the same training."""
    (_, theirs), (_, ours) = outputs["docs/migrating_fsdp.md"]
    assert len(losses(theirs)) == 3
    numbers = re.compile(r"[\d.]+\d")
    printed = [[float(number) for number in numbers.findall(output)] for output in (ours, theirs)]
    assert printed[0] == pytest.approx(printed[1], abs=2e-4)


@pytest.mark.parametrize("page", ["docs/migrating_deepspeed.md", "docs/migrating_fleet.md"])
def test_our_side_trains(outputs: dict[str, list[tuple[list[str], str]]], page: str) -> None:
    """The column of ours is a script that runs on two ranks."""
    assert all(len(losses(output)) == 3 for _, output in outputs[page])
