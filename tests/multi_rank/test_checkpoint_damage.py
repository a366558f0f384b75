"""Loading what is damaged, foreign, or meant as a trap: the file is named on all ranks, before a weight is touched."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hybrid
from hybrid.errors import CheckpointError
from tests.checkpoint_faults import digest, on_all_ranks, train, wrap
from tests.ranks import run_ranks

SHARD = "shard_00001_0.safetensors"
TRAP = "trap_was_sprung"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def change_manifest(step: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = step / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def replace_unseen(step: Path, name: str, data: bytes) -> None:
    """A file with a manifest that fits it: somebody means to deceive."""
    (step / name).write_bytes(data)
    change_manifest(step, lambda manifest: manifest["files"].update({name: {"bytes": len(data), "xxh3_64": None}}))


class Trap:
    """Unpickling it leaves a file."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._place,)


def trap(step: Path) -> bytes:
    return pickle.dumps(Trap(step.parent / TRAP))


def from_another_job(step: Path) -> None:
    shutil.copy(step.parent / "other" / "step_00000002" / SHARD, step / SHARD)


def rename_file(name: str) -> Callable[[dict[str, Any]], object]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"].pop(SHARD)
        for entry in manifest["entries"].values():
            for chunk in entry["chunks"]:
                chunk["file"] = name if chunk["file"] == SHARD else chunk["file"]

    return change


STATES: dict[str, bytes] = {
    "no-json": b"\x93NUMPY",
    "no-object": b"[1, 2]",
    "empty": b"{}",
    "without-groups": b'{"optimizer": {"class": "AdamW"}}',
    "deep": b"[" * 100_000,
    "a-number": b'{"optimizer": 3, "random": 4}',
}

# Seen by a look at the names and sizes: "latest" is the one before, and says why. (damage, what is said)
INCOMPLETE: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard-missing": (lambda step: (step / SHARD).unlink(), f"{SHARD} is missing"),
    "shard-truncated": (lambda step: truncate(step / SHARD), rf"{SHARD} has \d+ bytes, expected \d+"),
    "shard-is-a-folder": (lambda step: ((step / SHARD).unlink(), (step / SHARD).mkdir()), SHARD),
    "state-missing": (lambda step: (step / "state.json").unlink(), "state.json is missing"),
    "manifest-missing": (lambda step: (step / "manifest.json").unlink(), "has no manifest.json"),
    "manifest-truncated": (lambda step: truncate(step / "manifest.json"), "manifest.json is damaged or not whole"),
    "manifest-trap": (lambda step: (step / "manifest.json").write_bytes(trap(step)), "manifest.json is damaged"),
    "manifest-of-another-program": (lambda step: (step / "manifest.json").write_text("{}"), "manifest.json is not"),
    "manifest-newer": (
        lambda step: change_manifest(step, lambda manifest: manifest.update(format_version=7)),
        r"manifest.json has format version 7; .* reads up to 1",
    ),
    "manifest-leads-out": (
        lambda step: change_manifest(step, rename_file(f"../../{SHARD}")),
        rf"the file name '\.\./\.\./{SHARD}' is not allowed",
    ),
    "manifest-leads-to-root": (
        lambda step: change_manifest(step, rename_file("/etc/hostname")),
        "the file name '/etc/hostname' is not allowed",
    ),
}

# Seen when the files are read: an error that names the file, or another one is taken and that is said.
DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard": (lambda step: flip(step / SHARD), f"{SHARD} has the checksum .* expected"),
    "first-shard": (lambda step: flip(step / "shard_00000_0.safetensors"), "shard_00000_0.safetensors has the check"),
    "state": (lambda step: flip(step / "state.json"), "state.json has the checksum"),
    "shard-of-another-job": (from_another_job, f"{SHARD} has the checksum"),
    "shard-trap": (lambda step: replace_unseen(step, SHARD, trap(step).ljust(100_000)), SHARD),
}

# Seen when what it holds is compared: the manifest fits.
UNFIT: dict[str, tuple[Callable[[Path], object], str]] = {
    **{
        f"state-{name}": (lambda step, data=data: replace_unseen(step, "state.json", data), "state.json|no optimizer")
        for name, data in STATES.items()
    },
    "state-trap": (lambda step: replace_unseen(step, "state.json", trap(step)), "state.json"),
    "state-not-listed": (
        lambda step: change_manifest(step, lambda manifest: manifest["files"].pop("state.json")),
        "state.json is not among the files",
    ),
}


def on_first_rank(work: Callable[[Path], object], path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        work(path)
    dist.barrier()


def refused(directory: Path, model: Any, optimizer: Any, said: str, **options: Any) -> None:
    """The load is an error with `said`, the same on all ranks, and nothing is touched."""
    before = digest(model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        hybrid.load_checkpoint(directory, model, optimizer, **options)
    on_all_ranks(str(caught.value))
    assert re.search(said, str(caught.value)), caught.value
    assert str(directory) in str(caught.value)
    assert digest(model, optimizer) == before


def fallen_back(directory: Path, model: Any, optimizer: Any, said: str, expected: str, **options: Any) -> None:
    """Step 1 is loaded, and `said` is, to the caller and as a warning."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loaded = hybrid.load_checkpoint(directory, model, optimizer, **options)
    assert loaded.step == 1
    assert digest(model, optimizer) == expected
    [reason] = loaded.passed_over
    assert "step_00000002" in reason
    assert re.search(said, reason), reason
    assert any(reason in str(one.message) and one.filename == __file__ for one in warned) == (dist.get_rank() == 0)


def load_damaged(directory: str) -> None:
    path = Path(directory)
    model, optimizer = wrap()
    train(model, optimizer)
    hybrid.save_checkpoint(path, model, optimizer, step=1)
    expected = digest(model, optimizer)
    train(model, optimizer)
    whole = hybrid.save_checkpoint(path / "whole", model, optimizer, step=2)
    train(model, optimizer)
    hybrid.save_checkpoint(path / "other", model, optimizer, step=2)
    step = path / whole.name

    def put(damage: Callable[[Path], object]) -> None:
        def damaged(step: Path) -> None:
            if step.exists():
                shutil.rmtree(step)
            shutil.copytree(whole, step)
            damage(step)

        on_first_rank(damaged, step)
        train(model, optimizer)

    for name, (damage, said) in {**INCOMPLETE, **DAMAGED, **UNFIT}.items():
        try:
            put(damage)
            refused(path, model, optimizer, said, step=2)
            if name in INCOMPLETE:
                fallen_back(path, model, optimizer, said, expected)
            elif name in DAMAGED:
                refused(path, model, optimizer, f"{said}.*fallback=True takes the newest one that is not")
                fallen_back(path, model, optimizer, said, expected, fallback=True)
            else:
                refused(path, model, optimizer, said, fallback=True)
        except BaseException as error:
            error.add_note(name)
            raise
    put(DAMAGED["shard"][0])
    on_first_rank(lambda path: flip(path / "step_00000001" / SHARD), path)
    refused(
        path,
        model,
        optimizer,
        rf"no complete.*step_00000002 is damaged: {SHARD}.*00001 is damaged: {SHARD}",
        fallback=True,
    )
    refused(step, model, optimizer, f"step_00000002 is damaged: {SHARD}.*there is no other", fallback=True)
    assert not (path / TRAP).exists()


def test_a_damaged_checkpoint_is_named_or_passed_over_and_nothing_is_touched(tmp_path: Path) -> None:
    """Protects against a model that is half one and half another, and against code that comes with a checkpoint."""
    run_ranks(load_damaged, 2, str(tmp_path), timeout_seconds=200)


def test_the_trap_works(tmp_path: Path) -> None:
    """Guards the test above: unpickled, it would leave its file."""
    pickle.loads(trap(tmp_path / "step"))
    assert (tmp_path / TRAP).exists()
