"""Ranks that do not save or load alike: an error on each that calls, in time, which says who is missing."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hybrid
from hybrid.errors import CheckpointError, CollectiveError
from tests.checkpoint_faults import on_all_ranks, train, wrap
from tests.ranks import RankFailure, run_ranks

TIMEOUT_SECONDS = 2.0  # for the start of three ranks on a busy machine, too
SLACK_SECONDS = 1.5

Call = Callable[[str, Any, Any], object]


def save(directory: str, model: Any, optimizer: Any) -> object:
    return hybrid.save_checkpoint(directory, model, optimizer, step=5)


def load(directory: str, model: Any, optimizer: Any) -> object:
    return hybrid.load_checkpoint(directory, model, optimizer)


def unpicklable(*args: Any) -> Any:
    raise KeyError("a scheduler of the user's own")


class Broken:
    """Its state cannot be had."""

    state_dict = load_state_dict = unpicklable


# What ranks 0 and 2 call, what rank 1 calls, what all of them are told.
DIFFERENT: dict[str, tuple[Call, Call, str]] = {
    "save-load": (
        save,
        load,
        "not at the same call: load_checkpoint on rank 1; save_checkpoint on ranks 0, 2",
    ),
    "save-async": (
        save,
        lambda directory, *job: hybrid.async_save_checkpoint(directory, *job, step=5),
        "not at the same call: async_save_checkpoint on rank 1; save_checkpoint on ranks 0, 2",
    ),
    "step": (
        save,
        lambda directory, *job: hybrid.save_checkpoint(directory, *job, step=6),
        "save_checkpoint: the ranks do not ask for the same: step is 5 on ranks 0, 2, 6 on rank 1",
    ),
    "no-step": (
        save,
        hybrid.save_checkpoint,
        "step is 5 on ranks 0, 2, None on rank 1",
    ),
    "directory": (
        save,
        lambda directory, *job: hybrid.save_checkpoint(f"{directory}/of_rank_1", *job, step=5),
        "directory is '.*saved' on ranks 0, 2, '.*saved/of_rank_1' on rank 1",
    ),
    "retention": (
        save,
        lambda directory, *job: hybrid.save_checkpoint(directory, *job, step=5, keep_last=1),
        "keep_last is None on ranks 0, 2, 1 on rank 1",
    ),
    "no-optimizer": (
        save,
        lambda directory, model, optimizer: hybrid.save_checkpoint(directory, model, step=5),
        "optimizer is given on ranks 0, 2, None on rank 1",
    ),
    "broken-state": (
        save,
        lambda directory, *job: hybrid.save_checkpoint(directory, *job, step=5, extra={"a": 1}, sampler=Broken()),
        r"KeyError: .a scheduler of the user's own.*on rank 1",
    ),
    "load-step": (
        load,
        lambda directory, *job: hybrid.load_checkpoint(directory, *job, step=1),
        "load_checkpoint: the ranks do not ask for the same: step is 'latest' on ranks 0, 2, 1 on rank 1",
    ),
    "load-directory": (
        load,
        lambda directory, *job: hybrid.load_checkpoint(f"{directory}/step_00000001", *job),
        "directory is '.*saved' on ranks 0, 2, '.*saved/step_00000001' on rank 1",
    ),
    "load-weights": (
        load,
        lambda directory, model, optimizer: hybrid.load_checkpoint(directory, model),
        "optimizer is given on ranks 0, 2, None on rank 1",
    ),
    "load-strict": (
        load,
        lambda directory, *job: hybrid.load_checkpoint(directory, *job, strict=False),
        "strict is True on ranks 0, 2, False on rank 1",
    ),
}


def call_differently(directory: str) -> None:
    model, optimizer = wrap(timeout_seconds=TIMEOUT_SECONDS)
    train(model, optimizer)
    hybrid.save_checkpoint(directory, model, optimizer, step=1)
    for name, (most, one, said) in DIFFERENT.items():
        try:
            with pytest.raises(CheckpointError) as caught:
                (one if dist.get_rank() == 1 else most)(directory, model, optimizer)
            assert re.search(said, on_all_ranks(str(caught.value))), caught.value
        except BaseException as error:
            error.add_note(name)
            raise
        train(model, optimizer)
        hybrid.save_checkpoint(directory, model, optimizer, step=1)
    assert [path.name for path in Path(directory).iterdir()] == ["step_00000001"]


def test_calls_that_differ_are_refused_on_all_ranks_and_the_job_goes_on(tmp_path: Path) -> None:
    """Protects against a checkpoint of which each rank wrote another step, and a load of two different ones."""
    run_ranks(call_differently, 3, str(tmp_path / "saved"), timeout_seconds=120)


# -- ranks that do not come -------------------------------------------------------------------------------------------


def begin(directory: str, model: Any, optimizer: Any) -> object:
    return hybrid.async_save_checkpoint(directory, model, optimizer, step=5)


def call_alone(call: Call, how: str, directory: str) -> str:
    """What the ranks that call are told."""
    model, optimizer = wrap(timeout_seconds=TIMEOUT_SECONDS)
    train(model, optimizer)
    hybrid.save_checkpoint(directory, model, optimizer, step=1)
    if dist.get_rank() == 1:
        if how == "gone":
            os._exit(3)
        if how == "trains":
            train(model, optimizer)
        time.sleep(TIMEOUT_SECONDS + SLACK_SECONDS)
        return ""
    started = time.monotonic()
    try:
        call(directory, model, optimizer)
    except CollectiveError as error:
        assert time.monotonic() - started < TIMEOUT_SECONDS + SLACK_SECONDS
        return str(error)
    raise AssertionError("no error")


@pytest.mark.parametrize("how", ["late", "gone", "trains"])
@pytest.mark.parametrize("call", [save, load, begin], ids=["save", "load", "async"])
def test_ranks_that_are_missing_are_named(call: Call, how: str, tmp_path: Path) -> None:
    """Protects against a job that hangs for half an hour because rank 0 alone saves, as people write it."""
    try:
        said = run_ranks(call_alone, 3, call, how, str(tmp_path / "saved"))
    except RankFailure as failure:
        reports = failure.reports
        said = [report.value or report.error for report in reports]
    for rank in (0, 2):
        assert f"{call.__name__}" in said[rank] or "async_save" in said[rank]
        assert "rank 1" in said[rank].split("The last collectives")[0], said[rank]
        assert "_checkpoint: not all ranks came together" in said[rank]


def step_back(directory: str) -> list[str]:
    model, optimizer = wrap()
    hybrid.save_checkpoint(directory, model, optimizer, step=20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hybrid.save_checkpoint(directory, model, optimizer, step=10)
        hybrid.save_checkpoint(directory, model, optimizer, step=30)
    return [str(one.message) for one in caught]


def test_a_save_below_the_latest_step_says_so(tmp_path: Path) -> None:
    """Who went back to step 5 and saves step 10 would else resume from step 20, which that run never saw."""
    (said,), others = run_ranks(step_back, 2, str(tmp_path))
    assert "has one of step 20, which stays the latest" in said
    assert others == []
