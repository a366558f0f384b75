"""`hybrid dryrun` from a shell: what it prints, its exit codes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runnable.command import hybrid_here

STRATEGY = "sharding: true\nsharding_configs: {stage: 2, shard_size: 16}\naccumulate_steps: 2\n"
MODEL = """
import torch


def build():
    blocks = [torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.GELU()) for _ in range(3)]
    return torch.nn.Sequential(torch.nn.Linear(64, 96), *blocks), torch.zeros(2, 64)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "strategy.yaml").write_text(STRATEGY)
    (tmp_path / "dry_command_model.py").write_text(MODEL)
    return tmp_path


def test_it_prints_shapes_bytes_collectives_and_actions(folder: Path) -> None:
    """And nothing but JSON with --json, which says the same."""
    words = ("dryrun", "strategy.yaml", "--model", "dry_command_model:build", "-n", "64", "--rank", "0,63")
    done = hybrid_here(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    for part in ("dp_replicate 4 × dp_shard 16", "rank 63", "96 × 64", "gradient shards", "reduce_scatter", "Actions"):
        assert part in done.stdout, part
    told = json.loads(hybrid_here(*words, "--json", cwd=folder).stdout)
    assert [one["rank"] for one in told["ranks"]] == [0, 63]
    (scattered,) = (row for row in told["ranks"][0]["traffic"] if row["op"] == "reduce_scatter")
    assert f"{scattered['sent_bytes']:,}" in done.stdout


REFUSALS = {
    "a rank beyond the world": (("-n", "64", "--rank", "64"), "rank 64: the ranks of 64 processes are 0 to 63"),
    "no number": (("-n", "64", "--rank", "0,last"), "'last' is no rank; give numbers with commas between"),
    "a shard_size that does not divide": (("-n", "40",), "shard_size"),
    "ranks, and the choice left": (("-n", "64", "--rank", "3", "--all-distinct"), "ranks names others: leave one"),
    "tokens of a sample of numbers": (("-n", "64", "--seq", "8"), "seq = 8, but the sample has the shape (2, 64)"),
    "a model that nobody knows": (("-n", "64", "--model", "lama3-8b"), "did you mean"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_mistakes_are_told_in_a_sentence_and_end_with_2(folder: Path, case: str) -> None:
    """No traceback, in JSON too."""
    options, words = REFUSALS[case]
    model = () if "--model" in options else ("--model", "dry_command_model:build")
    done = hybrid_here("dryrun", "strategy.yaml", *model, *options, cwd=folder)
    assert done.returncode == 2
    assert words in done.stderr
    told = hybrid_here("dryrun", "strategy.yaml", *model, *options, "--json", cwd=folder)
    assert words in " ".join(json.loads(told.stdout)["problems"])


def test_what_json_lists_anyway_is_not_asked_for(folder: Path) -> None:
    """--parameters and --actions lengthen tables; JSON has none."""
    words = ("dryrun", "strategy.yaml", "--model", "dry_command_model:build", "-n", "64", "--json", "--actions")
    done = hybrid_here(*words, cwd=folder)
    assert done.returncode == 2
    assert "--actions beside --json has no effect" in json.loads(done.stdout)["problems"][0]
