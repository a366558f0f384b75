"""`export_weights`: whole or not at all, refusals before anything is written, and each rank its share."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hybrid
from hybrid.checkpoint.export import new_aside, reveal
from hybrid.errors import CheckpointError
from tests.checkpoint_faults import file_operations
from tests.multi_rank.case_runs import variant
from tests.ranks import run_ranks


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def fail_everywhere(root: str) -> int:
    """An error at every file operation of each rank in turn: the same on both, and an export stands at any moment."""
    with variant(stage=2, timeout_seconds=30) as strategy:
        torch.manual_seed(0)
        model: Any = hybrid.distributed_model(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), strategy=strategy)
        rank, target = torch.distributed.get_rank(), Path(root, "weights")
        hybrid.export_weights(model, target, max_shard_bytes=100)
        old = files_of(target)
        with torch.no_grad(), model.gather_parameters():
            model[0].weight.fill_(2)
        new = files_of(hybrid.export_weights(model, f"{root}/other", max_shard_bytes=100))
        failed = 0
        for victim in (0, 1):
            for number in range(100):
                shutil.rmtree(target, ignore_errors=True) if rank == 0 else None
                if rank == 0:
                    target.mkdir()
                    for name, data in old.items():
                        (target / name).write_bytes(data)
                torch.distributed.barrier()
                said = None
                with file_operations(number if rank == victim else None, act=_full) as operations, _pwrite(operations):
                    try:
                        hybrid.export_weights(model, target, max_shard_bytes=100)
                    except CheckpointError as error:
                        said = str(error)
                said_by: list[Any] = [None, None]
                there = files_of(target)
                torch.distributed.all_gather_object(said_by, (said, operations.count))
                assert said_by[0][0] == said_by[1][0]
                if said is None:  # what it did last was to clear up
                    assert there == new
                    if said_by[victim][1] <= number:
                        break
                    continue
                failed += 1
                assert all(words in said for words in (str(target), "bytes): ", "No space left")), said
                assert there == old or ("the new one" in said and there == new), (number, said)
            else:
                raise AssertionError("it never comes to its end")
        torch.distributed.barrier()
        hybrid.export_weights(model, target, max_shard_bytes=100)
        assert sorted(os.listdir(root)) == ["other", "weights"]  # what died has been cleared up
        return failed


def _full(what: str) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", what)


def _pwrite(operations: Any) -> Any:
    write = os.pwrite

    def counting(*args: Any) -> int:
        operations.came("pwrite")
        return write(*args)

    return mock.patch.object(os, "pwrite", counting)


def test_an_error_at_any_file_operation_leaves_an_export_whole(tmp_path: Path) -> None:
    """A full disk in the middle of an export must not cost the one that is there, nor hang the other ranks."""
    assert run_ranks(fail_everywhere, 2, str(tmp_path), timeout_seconds=120)[0] > 20


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"format": "pickle"}, "format = 'pickle': must be 'safetensors' or 'torch'"),
    ({"max_shard_bytes": 0}, "max_shard_bytes = 0: must be a number of bytes, at least 1"),
    ({"max_shard_bytes": True}, "max_shard_bytes = True"),
    ({"max_shard_bytes": "5 apples"}, "cannot read '5 apples'"),
    ({"path": "mine"}, "holds 'notes.txt', which an export does not make"),
    ({"path": "model.safetensors"}, "is to be a folder"),
    ({"path": "file"}, "is there and is no folder"),
    ({"path": "file/below"}, "File exists"),
]


def refuse(root: str) -> None:
    with variant(stage=1) as strategy:
        model: Any = hybrid.distributed_model(nn.Linear(3, 3), strategy=strategy)
        for settings, said in REFUSED:
            path = Path(root, settings.get("path", "new"))
            options = {name: value for name, value in settings.items() if name != "path"}
            with pytest.raises(CheckpointError) as refusal:
                hybrid.export_weights(model, path, **options)
            assert said in str(refusal.value), refusal.value
        with pytest.raises(CheckpointError, match=r"do not ask for the same: path is .*0.* on rank 0, .*1.* on rank 1"):
            hybrid.export_weights(model, f"{root}/{torch.distributed.get_rank()}")
        with pytest.raises(CheckpointError, match="needs a model from distributed_model, got Linear"):
            hybrid.export_weights(nn.Linear(3, 3), f"{root}/new")


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("dear diary")
    (tmp_path / "file").write_text("")
    run_ranks(refuse, 2, str(tmp_path))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "mine", "notes.txt"]


def written_bytes(root: str, format: str) -> tuple[int, int]:
    with variant(stage=1) as strategy:
        model: Any = hybrid.distributed_model(
            nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)]), strategy=strategy
        )
        before = _written_bytes()
        hybrid.export_weights(model, f"{root}/{format}", format=format, max_shard_bytes="800kB")  # type: ignore[arg-type]
        return _written_bytes() - before, sum(p.numel() * 4 for p in model.parameters())


def _written_bytes() -> int:
    return int(next(line for line in Path("/proc/self/io").read_text().splitlines() if "wchar" in line).split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc")
@pytest.mark.parametrize(("format", "times"), [("safetensors", 1), ("torch", 2)])
def test_each_rank_writes_its_share(format: str, times: int, tmp_path: Path) -> None:
    """Four ranks write a quarter each: an export that goes through one rank is as slow as that rank, and as large."""
    for written, total in run_ranks(written_bytes, 4, str(tmp_path), format):
        assert written < total * times / 4 * 1.2 + 100_000, (written, total)


def test_an_export_that_died_between_its_renames_is_found_again(tmp_path: Path) -> None:
    """Killed after the old folder was put aside and before the new one had its name: the old one is not lost."""
    (tmp_path / ".weights.old-0123abcd").mkdir()
    (tmp_path / ".weights.old-0123abcd" / "model.safetensors").write_bytes(b"old")
    aside = new_aside(tmp_path / "weights", "5")
    assert files_of(tmp_path / "weights") == {"model.safetensors": b"old"}
    (aside / "model.safetensors").write_bytes(b"new")
    reveal(aside, tmp_path / "weights")
    assert files_of(tmp_path / "weights") == {"model.safetensors": b"new"}
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
