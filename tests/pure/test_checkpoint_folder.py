"""The folder of steps: complete or not there, at whatever moment a process dies; nothing foreign is touched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
import pytest

from hybrid.checkpoint import folder
from hybrid.checkpoint.manifest import MANIFEST_NAME
from hybrid.errors import CheckpointError
from tests.checkpoint_folders import Killed, dies_at_call, save, weights, write_step

SHARD = "shard_00001_0.safetensors"


def latest(directory: Path) -> tuple[int | None, list[str]]:
    found, passed_over = folder.latest_complete(directory)
    return (None if found is None else found.step), [f"{path.name}: {why}" for path, why in passed_over]


def whole_steps(directory: Path) -> list[int]:
    """Steps whose files are, bit for bit, those of a save."""
    return [
        found.step
        for found in folder.scan(directory)
        if found.problem is None and found.manifest and not folder.verify(found.path, found.manifest)
    ]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# ---------------------------------------------------------------- looking


def test_steps_are_numbers(tmp_path: Path) -> None:
    """As text 999 999 999 would come before 100 000 000 0, and a resume would go back in time."""
    for step in (999_999_999, 1_000_000_000, 5, 0):
        save(tmp_path, step)
    assert names(tmp_path) == ["step_00000000", "step_00000005", "step_1000000000", "step_999999999"]
    assert [found.step for found in folder.list_steps(tmp_path)] == [1_000_000_000, 999_999_999, 5, 0]
    assert latest(tmp_path) == (1_000_000_000, [])


def test_what_is_not_ours_is_not_looked_at(tmp_path: Path) -> None:
    """Other programs and people keep things beside checkpoints."""
    save(tmp_path, 3)
    for name in ("step_4", "step-00000005", "checkpoint-6", "step_000000007", "step_00000008.bak", ".writing-x", "7"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000009").write_text("a file")
    assert [found.step for found in folder.list_steps(tmp_path)] == [3]
    before = names(tmp_path)
    folder.sweep(tmp_path)
    assert folder.retain(tmp_path, keep_last=1) == []
    assert names(tmp_path) == before


def test_no_folder_has_no_steps(tmp_path: Path) -> None:
    assert latest(tmp_path / "missing") == (None, [])
    folder.sweep(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file"):
        folder.list_steps(tmp_path / "file")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grow(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        pytest.param(lambda step: (step / SHARD).unlink(), f"{SHARD} is missing", id="missing"),
        pytest.param(lambda step: truncate(step / SHARD), "bytes, expected", id="truncated"),
        pytest.param(lambda step: grow(step / SHARD), "bytes, expected", id="grown"),
        pytest.param(lambda step: (step / "state.json").unlink(), "state.json is missing", id="state"),
        pytest.param(lambda step: (step / MANIFEST_NAME).unlink(), "no manifest.json", id="no-manifest"),
        pytest.param(lambda step: truncate(step / MANIFEST_NAME), None, id="newline-of-the-manifest"),
        pytest.param(lambda step: os.truncate(step / MANIFEST_NAME, 100), "not whole", id="manifest"),
        pytest.param(lambda step: shutil.copytree(step, step.with_name("step_00000012")), "of step 11", id="renamed"),
        pytest.param(lambda step: (step / "notes.txt").touch(), None, id="a-file-more"),
    ],
)
def test_a_damaged_step_is_passed_over_and_said(
    tmp_path: Path, damage: Callable[[Path], object], why: str | None
) -> None:
    """A resume from it would fail, or worse succeed."""
    save(tmp_path, 10)
    damage(save(tmp_path, 11))
    step, passed_over = latest(tmp_path)
    if why is None:
        assert (step, passed_over) == (11, [])
    else:
        assert [line for line in passed_over if why in line] == passed_over != []
        assert step == (11 if "of step" in why else 10)


def test_each_flipped_bit_is_found(tmp_path: Path) -> None:
    """One wrong bit in the weights is a wrong model. Each byte of each file, the manifest too, gets one.

    The manifest has no sum of its own. What may change in it unseen is what no load uses: versions and times; the
    layout, and names of ties, which loads only compare; and the place of a tensor without elements.
    """
    step = save(tmp_path, 3)
    manifest = folder.read_manifest(step)
    unseen: set[str] = set()
    for path in sorted(step.iterdir()):
        content = path.read_bytes()
        for position, byte in enumerate(content):
            damaged = bytearray(content)
            damaged[position] = byte ^ (1 << position % 8)
            path.write_bytes(damaged)
            if path.name != MANIFEST_NAME:
                [problem] = folder.verify(step, manifest)
                assert path.name in problem
                continue
            [found] = folder.scan(tmp_path)
            if found.problem is None and found.manifest and not folder.verify(step, found.manifest):
                before, after = manifest.model_dump(), found.manifest.model_dump()
                for fields in (before, after):
                    fields["entries"].pop("model.nothing", None)
                unseen |= {name for name in before if before[name] != after[name]}
        path.write_bytes(content)
    assert unseen <= {"hybrid_version", "torch_version", "created_at", "layout", "tied"}
    assert folder.verify(step, manifest) == []


def test_verify_names_what_is_wrong(tmp_path: Path) -> None:
    """Each problem is one line with the file and both values; `names` limits it, and it does not need sums."""
    step = save(tmp_path, 3)
    manifest = folder.read_manifest(step)
    truncate(step / "shard_00000_0.safetensors")
    data = bytearray((step / SHARD).read_bytes())
    data[-1] ^= 1
    (step / SHARD).write_bytes(data)
    (step / "state.json").unlink()
    sizes, sums, missing = folder.verify(step, manifest)
    expected = manifest.files["shard_00000_0.safetensors"].bytes
    assert sizes == f"shard_00000_0.safetensors has {expected - 1} bytes, expected {expected}"
    assert sums.startswith(f"{SHARD} has the checksum ")
    assert f"expected {manifest.files[SHARD].xxh3_64}" in sums
    assert missing == "state.json is missing"
    assert folder.verify(step, manifest, checksums=False) == [sizes, missing]
    assert folder.verify(step, manifest, names=["shard_00002_0.safetensors"]) == []
    assert folder.verify(step, manifest, names=["elsewhere"]) == [f"elsewhere is not among the files of {step}"]


def test_verify_reads_everything_and_says_how_far_it_is(tmp_path: Path) -> None:
    step = save(tmp_path, 3)
    manifest = folder.read_manifest(step)
    counted: list[int] = []
    folder.verify(step, manifest, on_progress=counted.append)
    assert sum(counted) == manifest.num_bytes


def test_without_sums_the_headers_are_still_compared(tmp_path: Path) -> None:
    """A manifest and files of two saves of the same sizes do not belong together."""
    step = save(tmp_path, 3, checksums=False)
    manifest = folder.read_manifest(step)
    assert folder.verify(step, manifest) == []
    (step / SHARD).write_bytes((step / SHARD).read_bytes().replace(b"model.scale", b"model.other"))
    assert folder.verify(step, manifest) == [
        f"{SHARD}: the manifest's place of model.scale is not the one in the file's header"
    ]


# ---------------------------------------------------------------- writing


def test_a_save_is_invisible_until_whole(tmp_path: Path) -> None:
    writing = folder.new_writing_folder(tmp_path / "new" / "folder", 7, "n")
    directory = writing.parent
    assert writing.name == folder.writing_folder_name(7, "n")
    manifest = write_step(writing, 7)
    assert latest(directory) == (None, [])
    (writing / SHARD).rename(tmp_path / SHARD)
    with pytest.raises(CheckpointError, match=rf"{SHARD} is missing.*file system that they share"):
        folder.commit(writing, directory, 7, manifest=manifest)
    assert latest(directory) == (None, [])
    (tmp_path / SHARD).rename(writing / SHARD)
    assert folder.commit(writing, directory, 7) == directory / "step_00000007"
    assert latest(directory) == (7, [])


def test_new_folders_are_on_the_disk_with_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is content of the folder above: after a crash of the machine the whole job's folder could be missing."""
    synced: list[Path] = []
    monkeypatch.setattr(folder, "sync_folder", synced.append)
    folder.make_directory(tmp_path / "a" / "b" / "c")
    assert set(synced) == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}
    synced.clear()
    folder.make_directory(tmp_path / "a" / "b" / "c")
    assert synced == []


def test_what_somebody_else_made_is_never_replaced(tmp_path: Path) -> None:
    """Before anything is written, and again at the end: a folder without our manifest is not ours to remove."""
    writing = folder.new_writing_folder(tmp_path, 7, "n")
    write_step(writing, 7)
    other = tmp_path / "step_00000007"
    other.mkdir()
    (other / ".metadata").write_text("of another program")
    with pytest.raises(CheckpointError, match="not a checkpoint of hybrid"):
        folder.commit(writing, tmp_path, 7)
    with pytest.raises(CheckpointError, match="not a checkpoint of hybrid"):
        folder.new_writing_folder(tmp_path, 7, "m")
    assert names(other) == [".metadata"]
    assert names(tmp_path) == [writing.name, other.name]


def test_of_a_link_the_link_alone_is_removed(tmp_path: Path) -> None:
    """A checkpoint moved to another disk and linked: overwritten, its link stayed for ever under another name."""
    directory, moved = tmp_path / "run", tmp_path / "disk"
    save(directory, 1)
    (directory / "step_00000001").rename(moved)
    (directory / "step_00000001").symlink_to(moved)
    there = sorted(path.name for path in moved.iterdir())
    save(directory, 1)
    assert [path.name for path in directory.iterdir()] == ["step_00000001"]
    assert not (directory / "step_00000001").is_symlink()
    (directory / ".gone-step_00000001-0a").symlink_to(moved)  # what earlier versions left
    folder.sweep(directory)
    assert [path.name for path in directory.iterdir()] == ["step_00000001"]
    assert sorted(path.name for path in moved.iterdir()) == there


def test_a_failed_rename_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the folder of a stuck job is swept by its successor in the middle of its last step."""
    save(tmp_path, 7)
    writing = folder.new_writing_folder(tmp_path, 7, "n")
    manifest = write_step(writing, 7)
    rename = os.rename

    def swept_before(source: Path, target: Path) -> None:
        if source == writing:
            shutil.rmtree(writing)
        rename(source, target)

    monkeypatch.setattr(os, "rename", swept_before)
    with pytest.raises(FileNotFoundError):
        folder.commit(writing, tmp_path, 7, manifest=manifest)
    assert names(tmp_path) == ["step_00000007"]


def dying_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], object]) -> list[Path]:
    """`act` in a copy of `tmp_path / "start"`, dying one call later each time, until it comes to its end."""
    directories = []
    for number in range(1000):
        directory = tmp_path / f"run{number}"
        shutil.copytree(tmp_path / "start", directory)
        directories.append(directory)
        try:
            with dies_at_call(number, monkeypatch):
                act(directory)
        except Killed:
            continue
        return directories
    raise AssertionError("it never came to its end")


def test_death_at_any_moment_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older one is found, or the new one whole; and the next save works and leaves nothing behind."""
    start = tmp_path / "start"
    save(start, 5)
    directories = dying_runs(tmp_path, monkeypatch, lambda directory: save(directory, 6))
    assert len(directories) > 10
    for directory in directories:
        assert whole_steps(directory) in ([5], [6, 5])
    assert whole_steps(directories[-1]) == [6, 5]
    for directory in directories:
        save(directory, 7, nonce="m")
        assert whole_steps(directory)[0] == 7
        assert not [name for name in names(directory) if name.startswith(".")]


def test_death_at_any_moment_of_an_overwrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are two renames; between them the only complete one stands aside. Then the next job dies as well."""
    start = tmp_path / "start"
    save(start, 4)
    path = save(start, 5)
    (path / "old").touch()
    directories = dying_runs(tmp_path, monkeypatch, lambda directory: save(directory, 5))
    stood_aside = 0
    for directory in directories:
        found, _ = folder.latest_complete(directory)
        assert found is not None
        assert whole_steps(directory)[0] == 5
        stood_aside += found.is_aside
    assert stood_aside > 0
    assert not (directories[-1] / "step_00000005" / "old").exists()
    for number in (4, 9, 14):
        for directory in directories:
            try:
                with dies_at_call(number, monkeypatch):
                    save(directory, 5, nonce=str(number))
            except Killed:
                pass
            assert whole_steps(directory)[0] == 5
    for directory in directories:
        folder.sweep(directory)
        assert names(directory) == ["step_00000004", "step_00000005"]
        assert whole_steps(directory) == [5, 4]


def test_an_aside_outlives_a_damaged_successor(tmp_path: Path) -> None:
    """Clearing up must not remove the only complete one of a step."""
    shutil.move(save(tmp_path, 5), tmp_path / ".old-step_00000005-n")
    damaged = save(tmp_path / "other", 5)
    (damaged / SHARD).unlink()
    shutil.move(damaged, tmp_path)
    folder.sweep(tmp_path)
    found, passed_over = folder.latest_complete(tmp_path)
    assert found is not None
    assert found.is_aside
    assert [path.name for path, _ in passed_over] == ["step_00000005"]
    save(tmp_path, 5)
    folder.sweep(tmp_path)
    assert names(tmp_path) == ["other", "step_00000005"]
    assert whole_steps(tmp_path) == [5]


def test_a_save_under_way_can_be_kept_from_the_sweep(tmp_path: Path) -> None:
    mine = folder.new_writing_folder(tmp_path, 5, "mine")
    folder.new_writing_folder(tmp_path, 5, "dead")
    folder.sweep(tmp_path, keep=[mine])
    assert names(tmp_path) == [mine.name]


# ---------------------------------------------------------------- removing


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        pytest.param({"keep_last": None}, [0, 1, 2, 3, 4, 5, 6], id="no-rule"),
        pytest.param({"keep_last": 2}, [5, 6], id="last"),
        pytest.param({"keep_last": 99}, [0, 1, 2, 3, 4, 5, 6], id="more-than-there-are"),
        pytest.param({"keep_last": 1, "keep_every": 3}, [0, 3, 6], id="last-and-every"),
        pytest.param({"keep_last": None, "keep_every": 4}, [0, 4, 6], id="every-and-always-the-newest"),
    ],
)
def test_retention_rules(tmp_path: Path, rules: dict[str, int | None], kept: list[int]) -> None:
    for step in range(7):
        save(tmp_path, step)
    removed = folder.retain(tmp_path, **rules)
    assert sorted(removed + kept) == list(range(7))
    assert whole_steps(tmp_path) == kept[::-1]


def test_retention_counts_complete_ones_only(tmp_path: Path) -> None:
    """Else two damaged newer ones would push out the last one that can be loaded."""
    for step in range(4):
        save(tmp_path, step)
    for step in (2, 3):
        (tmp_path / folder.step_folder_name(step) / SHARD).unlink()
    assert folder.retain(tmp_path, keep_last=1, never=tmp_path / "step_00000000") == []
    assert folder.retain(tmp_path, keep_last=1) == [0]
    assert names(tmp_path) == ["step_00000001", "step_00000002", "step_00000003"]


@pytest.mark.parametrize("rules", [{"keep_last": 0}, {"keep_last": -1}, {"keep_last": 1, "keep_every": 0}])
def test_a_rule_that_would_remove_all_is_refused(tmp_path: Path, rules: dict[str, int]) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="keep_"):
        folder.retain(tmp_path, **rules)
    assert whole_steps(tmp_path) == [1]


def test_death_at_any_moment_of_a_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is half removed is not there; the newest is always whole, and no gap opens behind it."""
    for step in range(4):
        save(tmp_path / "start", step)
    directories = dying_runs(tmp_path, monkeypatch, lambda directory: folder.retain(directory, keep_last=2))
    for directory in directories:
        assert whole_steps(directory) in ([3, 2, 1, 0], [3, 2, 1], [3, 2])
        assert latest(directory) == (3, [])
        folder.retain(directory, keep_last=2)
        folder.sweep(directory)
        assert names(directory) == ["step_00000002", "step_00000003"]


def test_the_files_hold_what_was_saved(tmp_path: Path) -> None:
    """Guards the tests above: a comparison of sums with nothing in the files would hold as well."""
    step = save(tmp_path, 3)
    manifest = folder.read_manifest(step)
    read = np.zeros((5, 3), np.float32)
    for chunk in manifest.entries["model.layers.0.weight"].chunks:
        stored = np.frombuffer((step / chunk.file).read_bytes(), np.float32, prod(chunk.sizes), chunk.begin)
        box = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        read[box] = stored.reshape(chunk.sizes)
    np.testing.assert_array_equal(read, weights(3)["layers.0.weight"])
