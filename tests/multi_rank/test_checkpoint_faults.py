"""Checkpoints while a rank is killed at any moment of a save, or a disk is full or read-only: complete ones stand."""

from __future__ import annotations

import errno
import itertools
import os
import re
import resource
import shutil
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import hybrid
from hybrid.checkpoint import loading
from hybrid.errors import CheckpointError, CollectiveError
from tests.checkpoint_faults import die, digest, file_operations, on_all_ranks, train, wrap
from tests.ranks import RankFailure, RankReport, run_ranks

TIMEOUT_SECONDS = 10.0

# -- killed ------------------------------------------------------------------------------------------------------------


def save_three(directory: str) -> dict[str, str]:
    """Steps 1, 2, 3, and what a fourth would be."""
    model, optimizer = wrap()
    digests = {}
    for step in (1, 2, 3):
        train(model, optimizer)
        hybrid.save_checkpoint(directory, model, optimizer, step=step)
        digests[f"step {step}"] = digest(model, optimizer)
    train(model, optimizer)
    return {**digests, "again": digest(model, optimizer)}


def save_and_die(directory: str, victim: int, number: int | None, by_thread: bool) -> int:
    """Step 3 is saved again, of other weights, and step 1 goes; `victim` dies before its file operation `number`."""
    model, optimizer = wrap(timeout_seconds=TIMEOUT_SECONDS)
    hybrid.load_checkpoint(directory, model, optimizer)
    train(model, optimizer)
    with file_operations(number if dist.get_rank() == victim else None) as operations:
        if by_thread:
            save = hybrid.async_save_checkpoint(directory, model, optimizer, step=3, keep_last=2)
            train(model, optimizer)
            save.wait()
        else:
            hybrid.save_checkpoint(directory, model, optimizer, step=3, keep_last=2)
    return operations.count


def load_each(directories: list[str]) -> list[tuple[str, list[str]]]:
    """What is loaded of each, and the folder's names after one more save."""
    model, optimizer = wrap(seed=1)
    found = []
    for directory in directories:
        loaded = hybrid.load_checkpoint(directory, model, optimizer)
        assert loaded.step == 3
        assert loaded.passed_over == ()
        found_here = digest(model, optimizer)
        hybrid.save_checkpoint(directory, model, optimizer, step=4, keep_last=2)
        found.append((found_here, sorted(path.name for path in Path(directory).iterdir())))
    return found


def killed(directory: Path, *, victim: int, number: int, by_thread: bool) -> tuple[RankReport, ...]:
    with pytest.raises(RankFailure) as caught:
        run_ranks(save_and_die, 2, str(directory), victim, number, by_thread)
    return caught.value.reports


@pytest.mark.slow
@pytest.mark.parametrize("by_thread", [False, True], ids=["save", "async"])
@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.full)], ids=["some", "all"])
def test_a_rank_killed_at_a_file_operation_loses_nothing(stride: int, by_thread: bool, tmp_path: Path) -> None:
    """Protects months of training from one process: at worst the save that was under way is lost.

    The save takes the place of the newest one and removes the oldest; the next one clears up.
    """
    start = tmp_path / "start"
    expected = run_ranks(save_three, 2, str(start))[0]
    shutil.copytree(start, tmp_path / "undisturbed")
    counts = run_ranks(save_and_die, 2, str(tmp_path / "undisturbed"), 0, None, by_thread)
    moments = [(victim, number) for victim in range(2) for number in range(counts[victim])]
    directories = []
    for victim, number in moments[by_thread::stride]:
        directory = tmp_path / f"rank{victim}-{number}"
        directories.append(str(directory))
        shutil.copytree(start, directory)
        reports = killed(directory, victim=victim, number=number, by_thread=by_thread)
        assert "exit code -9" in reports[victim].error, reports[victim].error
        survivor = reports[1 - victim]
        assert survivor.error.startswith("CollectiveError"), survivor.error
        assert re.search(rf"(with|:) rank {victim}(:| is gone)", survivor.error), survivor.error
        assert survivor.seconds < reports[victim].seconds + TIMEOUT_SECONDS
    found = run_ranks(load_each, 2, directories, timeout_seconds=600)[0]
    for directory, (loaded, names) in zip(directories, found, strict=True):
        assert loaded in (expected["step 3"], expected["again"]), directory
        assert names == ["step_00000003", "step_00000004"], directory
    assert {loaded for loaded, _ in found} == {expected["step 3"], expected["again"]}


def die_while_writing(directory: str) -> None:
    model, optimizer = wrap(timeout_seconds=TIMEOUT_SECONDS)
    with file_operations(1 if dist.get_rank() == 1 else None):
        hybrid.save_checkpoint(directory, model, optimizer, step=1)


def test_all_ranks_that_are_left_name_the_one_that_is_gone(tmp_path: Path) -> None:
    """Protects the search for the machine that failed, among hundreds that say "connection closed"."""
    with pytest.raises(RankFailure) as caught:
        run_ranks(die_while_writing, 4, str(tmp_path))
    for rank in (0, 2, 3):
        assert f"rank {rank}: rank 1 is gone (" in caught.value.error_of(rank)
        assert f"checkpoint of step 1, being written to {tmp_path}" in caught.value.error_of(rank)


def hang_while_writing(directory: str) -> str:
    model, optimizer = wrap(timeout_seconds=2.0)
    if dist.get_rank() == 1:
        with file_operations(1, lambda what: time.sleep(4)), pytest.raises(CollectiveError):
            hybrid.save_checkpoint(directory, model, optimizer, step=1)
        return ""
    started = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        hybrid.save_checkpoint(directory, model, optimizer, step=1)
    assert time.monotonic() - started < 4
    return str(caught.value)


def test_a_rank_whose_disk_hangs_is_named_within_the_timeout(tmp_path: Path) -> None:
    """Protects the ranks that wait from being taken for the one that hangs."""
    said = run_ranks(hang_while_writing, 4, str(tmp_path))
    for rank in (0, 2, 3):
        assert f"rank {rank}: rank 1 did not come within 2 s (" in said[rank]
        assert said[rank].count("did not come") == 1, said[rank]


def die_while_loading(directory: str, where: str) -> None:
    model, optimizer = wrap(timeout_seconds=TIMEOUT_SECONDS)
    hybrid.save_checkpoint(directory, model, optimizer, step=1)
    is_victim = dist.get_rank() == 1
    if where == "verify":
        with file_operations(1 if is_victim else None):  # 0 is the manifest
            hybrid.load_checkpoint(directory, model, optimizer)
    else:
        with mock.patch.object(loading, "_read_into", die) if is_victim else nullcontext():
            hybrid.load_checkpoint(directory, model, optimizer)


@pytest.mark.parametrize("where", ["verify", "read"])
def test_a_rank_that_dies_in_a_load_is_named(where: str, tmp_path: Path) -> None:
    """Protects the ranks that are left from a wait, and from going on with what they have read."""
    with pytest.raises(RankFailure) as caught:
        run_ranks(die_while_loading, 3, str(tmp_path), where)
    assert "exit code -9" in caught.value.error_of(1)
    for rank in (0, 2):
        said = caught.value.error_of(rank)
        assert said.startswith("CollectiveError")
        if where == "verify":
            assert "load_checkpoint, files: not all ranks came together" in said
            assert "rank 1" in said.split("The last collectives")[0]
        else:
            assert f"rank {rank}: rank 1 is gone (" in said
            assert "loaded in part" in said


# -- no space, no permission -------------------------------------------------------------------------------------------


def fail_at_each_operation(directory: str, victim: int, number: int, lasts: bool) -> list[bool]:
    """Whether the save of the same step went well, with an error of the disk at each file operation in turn."""

    def fail(what: str) -> None:
        raise OSError(number, os.strerror(number))

    model, optimizer = wrap()
    train(model, optimizer)
    hybrid.save_checkpoint(directory, model, optimizer, step=1)
    hybrid.save_checkpoint(directory, model, optimizer, step=2)
    stands = digest(model, optimizer)
    went_well: list[bool] = []
    for moment in itertools.count():
        train(model, optimizer)
        tried, error = digest(model, optimizer), ""
        with (
            file_operations(moment if dist.get_rank() == victim else None, fail, lasts=lasts) as operations,
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", message=".*older checkpoints could not be removed")
            try:
                hybrid.save_checkpoint(directory, model, optimizer, step=2, keep_last=1)
            except CheckpointError as problem:
                error = str(problem)
        if on_all_ranks(error):
            assert directory in error
            assert os.strerror(number) in error
            assert re.search(r"needs \d[\d.]* (bytes|KiB)", error), error
        loaded = hybrid.load_checkpoint(directory, model, optimizer)
        assert (loaded.step, loaded.passed_over) == (2, ()), (moment, error)
        found = digest(model, optimizer)
        assert found in ((stands, tried) if error else (tried,)), (moment, error)
        stands = found
        went_well.append(not error)
        if on_all_ranks_any(operations.count <= moment, victim):
            break
    hybrid.save_checkpoint(directory, model, optimizer, step=3, keep_last=1)
    assert [path.name for path in Path(directory).iterdir()] == ["step_00000003"]
    return went_well


def on_all_ranks_any(value: bool, rank: int) -> bool:
    """What `rank` says."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return bool(values[rank])


@pytest.mark.parametrize(
    ("victim", "number", "lasts"),
    [
        (0, errno.ENOSPC, False),
        (1, errno.ENOSPC, True),
        pytest.param(0, errno.EROFS, True, marks=pytest.mark.full),
        pytest.param(1, errno.EIO, False, marks=pytest.mark.full),
    ],
)
def test_an_error_of_the_disk_at_any_moment_costs_at_most_this_save(
    victim: int, number: int, lasts: bool, tmp_path: Path
) -> None:
    """Protects against a full disk: what was complete stands, all ranks get the reason, and the job goes on."""
    went_well = run_ranks(
        fail_at_each_operation, 2, str(tmp_path / "saved"), victim, number, lasts, timeout_seconds=200
    )[0]
    assert went_well[-1]
    assert went_well.count(False) > 5


def reach_the_size_limit(directory: str) -> None:
    """The kernel itself refuses: RLIMIT_FSIZE stands for a full disk."""
    model, optimizer = wrap()
    hybrid.save_checkpoint(directory, model, optimizer, step=1)
    expected = digest(model, optimizer)
    train(model, optimizer)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    with pytest.raises(CheckpointError, match=r"could not be written to .*saved, it needs .*File too large.*on rank 1"):
        hybrid.save_checkpoint(directory, model, optimizer, step=2)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if dist.get_rank() == 0:  # which clears up
        assert [path.name for path in Path(directory).iterdir()] == ["step_00000001"]
    hybrid.load_checkpoint(directory, model, optimizer)
    assert digest(model, optimizer) == expected
    with (
        mock.patch("shutil.disk_usage", return_value=SimpleNamespace(free=12345)),
        pytest.raises(CheckpointError, match=rf"needs \d.* 12.1 KiB are free at {directory}"),
    ):
        hybrid.save_checkpoint(directory, model, optimizer, step=2)
    below_a_file = f"{directory}/step_00000001/manifest.json/below"
    with pytest.raises(CheckpointError, match=rf"could not be written to {below_a_file}, it needs .*Not a directory"):
        hybrid.save_checkpoint(below_a_file, model, optimizer, step=2)

    def read_only(what: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with (
        file_operations(0 if dist.get_rank() == 0 else None, read_only, lasts=True),
        pytest.raises(CheckpointError, match=rf"could not be written to {directory}, it needs .*Read-only file system"),
    ):
        hybrid.save_checkpoint(directory, model, optimizer, step=2)
    hybrid.save_checkpoint(directory, model, optimizer, step=2)


def test_a_disk_that_is_full_or_read_only_is_said_with_the_folder_and_the_bytes(tmp_path: Path) -> None:
    """Protects whoever has to find out at night where to make how much room."""
    run_ranks(reach_the_size_limit, 2, str(tmp_path / "saved"))
