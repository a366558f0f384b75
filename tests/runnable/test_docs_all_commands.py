"""Every command that README and docs/ show runs: here, in test_docs_commands.py, or it is in a list with its reason.

A page's commands run in one folder, in their order. `hybrid` runs in this process, from its command line on; the ranks
that `hybrid run`, `hybrid profile` and torchrun would start are forked with torch loaded (tests/ranks.py). What needs
several machines is read by the command that it is for, and starts nothing. `-m full` gives the pages' commands to a
shell instead, with processes of their own, and those that take long with them.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest

from hybrid.launch.job import LaunchJob
from hybrid.launch.run import RunOutcome
from tests.ranks import run_plain, run_ranks
from tests.runnable.command import COMMAND, ROOT, environment, hybrid_here, run_as_main, run_script
from tests.runnable.pages import PAGES, Fence, fences_of
from tests.runnable.test_docs_commands import FILES, arguments_of_hybrid, parsed, started

BLOCKS = [fence for page in PAGES for fence in fences_of(page, "bash")]

TRAIN = """
import torch, hybrid
model = hybrid.distributed_model(torch.nn.Linear(16, 16))
optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters()))
for step in range(9):
    model.train_batch((torch.ones(8, 16), torch.ones(8, 16)), optimizer, loss_fn=torch.nn.functional.mse_loss)
"""
MODEL = """
import torch

def build():
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    return torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 2), torch.nn.Linear(16, 7)), torch.randn(2, 3, 16)
"""
ZERO2 = "sharding: true\nsharding_configs: {stage: 2}\n"
DEEPSPEED = json.dumps(
    {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a page's commands find: files, blocks of the page as files (language -> name), a block that runs first."""

    files: Mapping[str, str] = field(default_factory=dict)
    blocks: Mapping[str, str] = field(default_factory=dict)
    runs_first: bool = False


SETUPS = {
    "README.md": Setup(),
    "docs/3d.md": Setup(),
    "docs/calibrate.md": Setup(files={"my_package/model.py": MODEL}, blocks={"yaml": "here.yaml"}),
    "docs/checkpoints.md": Setup(runs_first=True),
    "docs/cluster.md": Setup(),
    "docs/dryrun.md": Setup(files={"my_package/model.py": MODEL}, blocks={"yaml": "strategy.yaml"}),
    "docs/get_started.md": Setup(),
    "docs/launching.md": Setup(blocks={"python": "train.py", "yaml": "zero2.yaml"}),
    "docs/migrating.md": Setup(files={"train.py": TRAIN, "ds_config.json": DEEPSPEED}),
    "docs/pipeline.md": Setup(),
    "docs/planner.md": Setup(),
    "docs/profile.md": Setup(files={"train.py": TRAIN, "zero2.yaml": ZERO2}),
}
# Only with -m full: these take longer than all of the others.
LONG = {
    "hybrid demo --layout 3d": "eight ranks; test_demo_3d.py runs it, shortened",
    "hybrid run --nproc 8 examples/train_3d.py": "test_examples.py runs the script alone and on two ranks",
    "hybrid run --nproc 8 examples/hf_3d.py": "test_finetune_example.py runs the script, shortened",
    "hybrid run --nproc 4 examples/hf_3d.py": "the same",
    "hybrid calibrate --ranks 4 --out here.yaml": "a minute; test_calibrate.py runs its parts",
    "hybrid plan --model my_package.model:build --cluster here.yaml --global-batch 32 --precision fp32 --measure 3": (
        "it measures, on the machine where the cluster file was made"
    ),
    "hybrid dryrun strategy.yaml --model llama3-70b --world-size 16384": "13 s; test_dry_run.py runs smaller ones",
    "hybrid dryrun strategy.yaml --model llama3-70b --world-size 16384 --rank 0,2048,16376": "three times that",
    "hybrid plan --model llama3-70b --cluster 16x8xH100 --global-batch 1024 --seq 8192 --out strategy.yaml": (
        "3 s; docs/get_started.md has a smaller one that runs"
    ),
    "hybrid plan --model llama3-70b --cluster 16x8xH100 --global-batch 1024"
    " --out launch_70b --report launch_70b.html": "the same",
    "hybrid demo": "it trains for minutes; CI runs it with --steps 6 --nproc 2 from an ordinary installation",
}
# Nowhere as they stand.
NOT_RUN = {
    "python3 -m venv .venv": "CI runs README's commands from nothing (.ci/run)",
    ".venv/bin/pip install .": "the same",
    ".venv/bin/pip install -e '.[test]'": "the same",
    ".venv/bin/pip install -e '.[docs]'": "the same",
    ".venv/bin/python -m pytest": "the same",
    ".venv/bin/sphinx-build -W docs site": "the same",
    ".venv/bin/hybrid demo": "the same, with --steps 6 --nproc 2",
    "./launch.sh --no-python hybrid verify-placement ranks.csv": "test_plan_command.py runs launch files of a plan",
}


def commands(code: str) -> Iterator[tuple[str, list[str], str | None]]:
    """Each command of a block as it is shown, its words, and the file that takes its output."""
    for line in code.replace("\\\n", " ").splitlines():
        for part in re.split(r"\s*&&\s*", line):
            words = shlex.split(part, comments=True)
            target = None
            if ">" in words:
                place = words.index(">")
                words, target = words[:place], words[place + 1]
            if words:
                yield shlex.join(words) + (f" > {target}" if target else ""), words, target


def is_for_slurm(block: Fence) -> bool:
    return re.search(r"^srun ", block.code, flags=re.MULTILINE) is not None


def runs_in_the_other_file(block: Fence, shown: str) -> bool:
    files = FILES.get(block.page)
    return "run" in block.marks or (files is not None and shown.startswith(files[1]))


def test_no_command_is_forgotten() -> None:
    """A page with a new command is a page with a command that nobody has tried, unless it comes to one of the lists."""
    shown = {
        (block.page, one) for block in BLOCKS if not is_for_slurm(block) for one, _, _ in commands(block.code)
        if not runs_in_the_other_file(block, one)
    }  # fmt: skip
    texts = {one for _, one in shown}
    assert {*LONG, *NOT_RUN} <= texts, "these are in a list, and no page shows them"
    missing = sorted(f"{page}: {one}" for page, one in shown if page not in SETUPS and one not in {*LONG, *NOT_RUN})
    assert missing == []
    assert {page for page, _ in shown} >= set(SETUPS)


# -- in this process ---------------------------------------------------------------------------------------------------


def prepare(page: str, folder: Path) -> None:
    setup = SETUPS[page]
    for name, text in setup.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for language, name in setup.blocks.items():
        (folder / name).write_text(fences_of(ROOT / page, language)[0].code, encoding="utf-8")
    if page == "docs/launching.md":
        (folder / "package").mkdir()
        shutil.copy(folder / "train.py", folder / "package" / "train.py")
    if page == "docs/3d.md":
        (folder / "examples").symlink_to(ROOT / "examples")
    if page == "docs/profile.md":
        (folder / "b.json").symlink_to("a.json")


def as_rank(job: LaunchJob, cwd: Path, variables: Mapping[str, str]) -> tuple[str, str]:
    """In a forked process of a world that has been started: a rank of `hybrid run`."""
    if not job.is_module:
        return started(cwd / job.script, cwd, dict(variables))
    sys.path.insert(0, str(cwd))
    with mock.patch("torch.distributed.init_process_group", return_value=None):
        os.chdir(cwd)
        os.environ.update(variables)
        sys.argv = [job.script, *job.arguments]
        runpy.run_module(job.script, run_name="__main__")
    return "", ""


def carried_on(job: LaunchJob, cwd: Path, variables: Mapping[str, str]) -> tuple[str, str]:
    """As `as_rank`: `hybrid profile` ends the script behind its last step."""
    try:
        return as_rank(job, cwd, variables)
    except SystemExit as left:
        if left.code:
            raise
        return "", ""


class Forked:
    """In place of `run_job`: the ranks of a launch are forked. Of several machines' nothing is started."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.num_launches = 0

    def __call__(self, job: LaunchJob, **_: object) -> RunOutcome:
        self.num_launches += 1
        if job.num_nodes == 1:
            ours = job.worker_environment(self.cwd / "logs")
            variables = {name: value for name, value in ours.items() if name.startswith("HYBRID_")}
            ranks = run_ranks(carried_on, job.num_processes, job, self.cwd, variables, timeout_seconds=120)
            print(ranks[0][0] if job.show_output else "", end="")
        return RunOutcome(exit_code=0, message="", log_dir=self.cwd)


def torchrun(words: list[str], cwd: Path, variables: Mapping[str, str]) -> str:
    from torch.distributed.run import get_args_parser  # a second, which only those who need it pay

    given = get_args_parser().parse_args(words)
    if given.training_script == "hybrid":
        assert given.no_python
        parsed(given.training_script_args)
        return ""
    assert (cwd / given.training_script).is_file()
    if given.nnodes != "1:1":
        return ""
    num_ranks = int(given.nproc_per_node)
    return str(run_ranks(started, num_ranks, cwd / given.training_script, cwd, dict(variables))[0][0])


def jq(words: list[str], cwd: Path) -> str:
    """The keys that the filter names are there."""
    names = set(re.findall(r"\w+", words[0]))
    for file in words[1:]:
        assert names <= set(json.loads((cwd / file).read_text(encoding="utf-8")))
    return " ".join(sorted(names))


def carry_out(words: list[str], cwd: Path) -> str:
    variables = {}
    while "=" in words[0]:
        name, _, value = words[0].partition("=")
        variables[name] = str(cwd / value)
        words = words[1:]
    match words:
        case ["python", name]:
            return run_script(cwd / name, cwd=cwd).stdout
        case ["torchrun", *rest]:
            return torchrun(rest, cwd, variables)
        case ["jq", *rest]:
            return jq(rest, cwd)
        case ["hybrid", *arguments]:
            finished = hybrid_here(*arguments, cwd=cwd)
            assert finished.returncode == 0, f"{shlex.join(words)}: {finished.stdout[-2000:]}{finished.stderr}"
            return finished.stdout or finished.stderr
    raise AssertionError(f"this test cannot run {shlex.join(words)}")


def pages_own(page: str, *, also_long: bool) -> list[tuple[str, list[str], str | None]]:
    """Of a page's commands those that run here."""
    skipped = {*NOT_RUN} if also_long else {*NOT_RUN, *LONG}
    return [
        (shown, words, target)
        for block in BLOCKS
        if block.page == page and not is_for_slurm(block)
        for shown, words, target in commands(block.code)
        if shown not in skipped and (target is not None or not runs_in_the_other_file(block, shown))
    ]


@pytest.mark.parametrize("page", [page for page in sorted(SETUPS) if pages_own(page, also_long=False)])
def test_commands_of_a_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page shows is what a reader can paste: each command as it stands ends well."""
    prepare(page, tmp_path)
    if SETUPS[page].runs_first:
        first = tmp_path / "first.py"
        first.write_text(fences_of(ROOT / page, "python")[0].code, encoding="utf-8")
        run_plain(run_as_main, first, (), tmp_path, {}, timeout_seconds=120)
    forked = Forked(tmp_path)
    for name in ("hybrid.cli.run.run_job", "hybrid.cli.run.run_with_restarts", "hybrid.cli.profile.run_job"):
        monkeypatch.setattr(name, forked)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_package", "my_package.model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    launches = 0
    for _, words, target in pages_own(page, also_long=False):
        if page == "docs/dryrun.md":  # the page's own is for 16,384 ranks
            (tmp_path / "strategy.yaml").write_text(ZERO2, encoding="utf-8")
        printed = carry_out(words, tmp_path)
        launches += words[:2] in (["hybrid", "run"], ["hybrid", "profile"])
        if target is not None:
            (tmp_path / target).write_text(printed, encoding="utf-8")
    assert forked.num_launches == launches


def slurm_blocks() -> list[Fence]:
    return [block for block in BLOCKS if is_for_slurm(block)]


@pytest.mark.parametrize("block", slurm_blocks(), ids=lambda block: block.id)
def test_commands_for_slurm(block: Fence, tmp_path: Path) -> None:
    """Behind `srun`, a stand-in, stands what torchrun and `hybrid run` take, with what Slurm's variables hold."""
    stands = {"scontrol": "echo host0; echo host1", "srun": 'printf "%s\\n" "$@"'}
    for name, text in stands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    variables = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "host[0-1]", "head_node": "host0"}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", block.code], env={**variables, "PATH": path}, capture_output=True, text=True, check=True
    )
    words = done.stdout.splitlines()
    if words[0] == "torchrun":
        assert torchrun(words[1:], tmp_path, {}) == ""
    else:
        arguments = arguments_of_hybrid(words)
        assert arguments is not None
        parsed(arguments)
    assert "host0:29500" in done.stdout


# -- in a shell --------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("page", sorted(SETUPS))
def test_commands_of_a_page_in_a_shell(page: str, tmp_path: Path) -> None:
    """The same by bash, with processes of their own, and those that take long."""
    work, programs = tmp_path / "work", tmp_path / "bin"
    work.mkdir()
    programs.mkdir()
    prepare(page, work)
    python = [sys.executable]
    shims = {"hybrid": COMMAND, "python": python, "torchrun": [*python, "-m", "torch.distributed.run"]}
    for name, command in shims.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    settings = environment()
    settings["PATH"] = f"{programs}{os.pathsep}{settings['PATH']}"
    settings["PYTHONPATH"] = f"{settings['PYTHONPATH']}{os.pathsep}{work}"
    if SETUPS[page].runs_first:
        first = fences_of(ROOT / page, "python")[0].code
        subprocess.run([sys.executable, "-c", first], cwd=work, env=settings, timeout=120, check=True)
    for shown, words, _ in pages_own(page, also_long=True):
        if "--nnodes" in words or (words[0] == "jq" and shutil.which("jq") is None):
            continue
        if page == "docs/dryrun.md" and "my_package.model:build" in words:
            (work / "strategy.yaml").write_text(ZERO2, encoding="utf-8")
        done = subprocess.run(
            ["bash", "-euc", shown], cwd=work, env=settings, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, f"{shown}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
