"""Files of plain weights: filled by rectangles in any order, read by the safetensors library; others' index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from hybrid.checkpoint.tensor_file import read_header
from hybrid.checkpoint.weight_files import (
    INDEX_NAME,
    WeightFiles,
    WeightFilesWriter,
    is_weight_file_name,
    natural_order,
    plan_weight_files,
)
from hybrid.errors import CheckpointError

Entries = list[tuple[str, str, Sequence[int]]]


def boxes(shape: tuple[int, ...], rng: np.random.Generator) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A tensor cut at random places along each dim, in random order."""
    cut: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size in shape:
        places = sorted({0, size, *rng.integers(0, size + 1, 2).tolist()})
        edges = list(pairwise(places)) or [(0, 0)]
        cut = [((*at, low), (*sizes, high - low)) for at, sizes in cut for low, high in edges]
    rng.shuffle(cut)
    return [(tuple(at), tuple(sizes)) for at, sizes in cut]


@settings(max_examples=60, deadline=None)
@given(shape=st.lists(st.integers(0, 5), max_size=4).map(tuple), seed=st.integers(0, 2**20))
def test_rectangles_fall_into_place(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], seed: int
) -> None:
    """Rows, columns, blocks, scalars and nothing at all: a run that is off by one would shuffle a weight."""
    folder = tmp_path_factory.mktemp("weights")
    rng = np.random.default_rng(seed)
    arrays = {"x": rng.integers(0, 2**15, shape, dtype=np.int16), "y": rng.standard_normal((3, 2))}
    files = plan_weight_files([(name, str(one.dtype), one.shape) for name, one in arrays.items()], 10**6)
    files.create(folder)
    # Two writers, as two processes would, each with some of the rectangles.
    with WeightFilesWriter(files, folder) as first, WeightFilesWriter(files, folder) as second:
        for number, (name, at, sizes) in enumerate(
            (name, at, sizes) for name, one in arrays.items() for at, sizes in boxes(one.shape, rng)
        ):
            part = arrays[name][tuple(slice(low, low + size) for low, size in zip(at, sizes, strict=True))]
            (first, second)[number % 2].write_box(name, at, sizes, np.ascontiguousarray(part))
        first.finish()
        second.finish()
    read = load_file(folder / "model.safetensors")
    for name, array in arrays.items():
        assert (read[name].shape, read[name].dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(read[name], array)


def test_a_wrong_rectangle_is_refused(tmp_path: Path) -> None:
    """It would overwrite a neighbour in the file."""
    files = plan_weight_files([("x", "float32", (4, 4))], 10**6)
    files.create(tmp_path)
    with WeightFilesWriter(files, tmp_path) as writer:
        for at, sizes, num_bytes in [((3, 0), (2, 4), 32), ((0, -1), (1, 1), 4), ((0, 0), (1, 1), 8)]:
            with pytest.raises(ValueError, match="x:"):
                writer.write_box("x", at, sizes, bytes(num_bytes))
    with pytest.raises(FileExistsError):
        files.create(tmp_path)


ENTRIES: Entries = [
    ("embed.weight", "float32", (10, 4)),
    ("layers.0.weight", "bfloat16", (4, 4)),
    ("layers.0.bias", "float32", (4,)),
    ("layers.10.weight", "bfloat16", (7, 4)),
    ("flag", "bool", ()),
    ("norm.weight", "float32", (4,)),
]


def num_bytes(files: WeightFiles) -> list[int]:
    return [sum(tensor.num_bytes for tensor in file.tensors) for file in files.files]


@pytest.mark.parametrize("most", [1, 16, 50, 100, 160, 300, 10**9])
def test_cut_into_files_as_others_do(tmp_path: Path, most: int) -> None:
    """Names of files, the index and its sizes are those of the library that `transformers` uses.

    One difference is meant: where a tensor alone is larger than the limit, that library may write an empty file.
    """
    files = plan_weight_files(ENTRIES, most)
    files.create(tmp_path)
    state = {name: torch.empty(tuple(shape), dtype=getattr(torch, dtype)) for name, dtype, shape in ENTRIES}
    theirs = split_torch_state_dict_into_shards(state, max_shard_size=most)
    assert all(size <= most or len(file.tensors) == 1 for size, file in zip(num_bytes(files), files.files, strict=True))
    if all(tensor.nbytes <= most for tensor in state.values()):
        assert {file.name: {tensor.name for tensor in file.tensors} for file in files.files} == {
            name: set(names) for name, names in theirs.filename_to_tensors.items()
        }
    index = tmp_path / INDEX_NAME
    assert index.exists() == (len(files.files) > 1) == (files.index is not None)
    if index.exists():
        written = json.loads(index.read_text())
        assert written["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
        assert written["metadata"]["total_parameters"] == sum(tensor.numel() for tensor in state.values())
        assert set(written["weight_map"]) == set(state)
        for name, file in written["weight_map"].items():
            assert name in {tensor.name for tensor in read_header(tmp_path / file)[0]}
    assert {path.name for path in tmp_path.iterdir()} == {file.name for file in files.files} | (
        {INDEX_NAME} if index.exists() else set()
    )
    assert all(is_weight_file_name(path.name) for path in tmp_path.iterdir())
    for file in files.files:
        assert (tmp_path / file.name).stat().st_size == file.num_bytes
        with safe_open(tmp_path / file.name, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}  # transformers refuses a file without it


def test_tensors_are_aligned_for_their_types() -> None:
    """Others map the files: a float that does not begin at a multiple of its width is slow or an error there."""
    for file in plan_weight_files(ENTRIES, 10**9).files:
        for tensor in file.tensors:
            width = max(1, tensor.num_bytes // max(1, int(np.prod(tensor.sizes))))
            assert tensor.begin % width == 0


def test_layers_in_the_order_of_their_numbers() -> None:
    names = ["layers.10.a", "layers.2.b", "embed", "layers.2.a.3", "layers.2.a"]
    assert sorted(names, key=natural_order) == ["embed", "layers.2.a", "layers.2.a.3", "layers.2.b", "layers.10.a"]


@pytest.mark.parametrize(
    ("entries", "most", "message"),
    [
        pytest.param([("x", "complex128", (2,))], 10, "complex128", id="type-without-a-code"),
        pytest.param(ENTRIES, 0, "max_shard_bytes is 0", id="no-room"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_is(entries: Any, most: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        plan_weight_files(entries, most)


def test_no_tensors_are_one_file(tmp_path: Path) -> None:
    """A model without parameters exports too; the loader finds a file."""
    plan_weight_files([], 10).create(tmp_path)
    assert load_file(tmp_path / "model.safetensors") == {}
