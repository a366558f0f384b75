"""Files of tensors: what others read in them, what a damaged or foreign one is told, and that nothing is held back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from hybrid.checkpoint.checksums import file_checksum
from hybrid.checkpoint.tensor_file import (
    DTYPES,
    TensorFileWriter,
    TensorSpec,
    map_chunk,
    read_header,
)
from hybrid.errors import CheckpointError

WEIGHT = np.arange(15, dtype=np.float32).reshape(5, 3)


def write(path: Path, arrays: dict[str, tuple[TensorSpec, Any]], *, checksum: bool = True) -> Any:
    with TensorFileWriter(path, [spec for spec, _ in arrays.values()], checksum=checksum) as writer:
        for _, data in arrays.values():
            writer.write(data)
        return writer.begins, writer.close()


def spec(name: str, array: Any, offsets: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec(name=name, dtype=str(array.dtype), sizes=array.shape, offsets=offsets)


def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    """The files are not a format of our own: also odd lengths that leave the next tensor unaligned, and empty ones."""
    arrays = {
        "flags": np.array([True, False, True]),
        "weight": WEIGHT,
        "step": np.array(7, dtype=np.int64),
        "nothing": np.empty((0, 4), dtype=np.float16),
        "rotation": np.array([1 + 2j, 3j], dtype=np.complex64),
    }
    path = tmp_path / "a.safetensors"
    write(path, {name: (spec(name, array), array) for name, array in arrays.items()})
    read = load_file(path)
    assert sorted(read) == sorted(arrays)
    for name, array in arrays.items():
        assert (read[name].dtype, read[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(read[name], array)
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_torch_reads_two_shards_of_one_tensor(tmp_path: Path) -> None:
    """`HuggingFaceStorageReader` finds the pieces by their offsets: the folder is readable without this package."""
    whole = spec("whole", WEIGHT)
    for number, rows in enumerate((slice(0, 2), slice(2, 5))):
        part = np.ascontiguousarray(WEIGHT[rows])
        extra = {} if number else {"whole": (whole, WEIGHT)}
        path = tmp_path / f"shard_{number:05d}_0.safetensors"
        write(path, {"cut": (spec("cut", part, (rows.start, 0)), part), **extra})
    loaded = {"cut": torch.zeros(5, 3), "whole": torch.zeros(5, 3)}
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    for tensor in loaded.values():
        torch.testing.assert_close(tensor, torch.from_numpy(WEIGHT), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_type_is_torchs_and_comes_back(tmp_path: Path, dtype: str) -> None:
    """A wrong code or width would put bytes under another meaning."""
    data = bytes(range(3 * DTYPES[dtype][1]))
    path = tmp_path / "a.safetensors"
    write(path, {"x": (TensorSpec(name="x", dtype=dtype, sizes=(3,), offsets=None), data)})
    [tensor], _ = read_header(path)
    assert (tensor.dtype, tensor.sizes) == (dtype, (3,))
    read = torch.from_numpy(map_chunk(path, tensor.begin, tensor.num_bytes)).view(getattr(torch, dtype))
    assert read.shape == (3,)
    assert bytes(read.view(torch.uint8)) == data
    if dtype != "float8_e8m0fnu":  # the library's reader for torch does not know this one
        with safe_open(path, "pt") as file:
            assert file.get_tensor("x").dtype == getattr(torch, dtype)


def test_pieces_of_any_length_and_the_sum_on_the_way(tmp_path: Path) -> None:
    """What is written in pieces is what is written at once; the sum is the one a second reading finds."""
    data = np.random.default_rng(0).integers(0, 256, 9 * 2**20 + 5, dtype=np.uint8)  # several blocks
    path = tmp_path / "a.safetensors"
    with TensorFileWriter(path, [spec("x", data)], checksum=True) as writer:
        for start in range(0, len(data), 2**20 + 1):
            writer.write(data[start : start + 2**20 + 1])
        record = writer.close()
    assert record.bytes == path.stat().st_size
    assert record.xxh3_64 == file_checksum(path)
    np.testing.assert_array_equal(load_file(path)["x"], data)
    assert write(tmp_path / "b.safetensors", {"x": (spec("x", data), data)}, checksum=False)[1].xxh3_64 is None


def test_begins_are_places_in_the_file(tmp_path: Path) -> None:
    """The manifest stores them: they must be those of the header, which other readers go by."""
    arrays = {"a": np.arange(3, dtype=np.uint8), "b": WEIGHT}
    path = tmp_path / "a.safetensors"
    begins, _ = write(path, {name: (spec(name, array, (4,) * array.ndim), array) for name, array in arrays.items()})
    tensors, metadata = read_header(path)
    assert [tensor.begin for tensor in tensors] == begins
    assert [tensor.offsets for tensor in tensors] == [(4,), (4, 4)]
    assert metadata["format"] == "pt"
    mapped = map_chunk(path, begins[1], WEIGHT.nbytes)
    np.testing.assert_array_equal(mapped.view(np.float32).reshape(5, 3), WEIGHT)


def test_writing_into_a_map_leaves_the_file_alone(tmp_path: Path) -> None:
    """Whoever loads in place (`tensor.mul_`) must not change the checkpoint."""
    path = tmp_path / "a.safetensors"
    [begin], _ = write(path, {"x": (spec("x", WEIGHT), WEIGHT)})
    before = path.read_bytes()
    map_chunk(path, begin, WEIGHT.nbytes)[:] = 255
    assert path.read_bytes() == before


def test_too_much_and_too_little_are_refused(tmp_path: Path) -> None:
    """A fault of the caller is found at the write, not by whoever loads the file."""
    with TensorFileWriter(tmp_path / "a", [spec("x", WEIGHT)], checksum=False) as writer:
        with pytest.raises(ValueError, match="announced"):
            writer.write(bytes(WEIGHT.nbytes + 1))
        writer.write(WEIGHT)
    writer = TensorFileWriter(tmp_path / "b", [spec("x", WEIGHT)], checksum=False)
    writer.write(bytes(WEIGHT.nbytes - 1))
    with pytest.raises(ValueError, match="announced"):
        writer.close()
    with pytest.raises(FileExistsError):  # two ranks that write one file
        TensorFileWriter(tmp_path / "a", [], checksum=False)
    with pytest.raises(ValueError, match="twice"):
        TensorFileWriter(tmp_path / "c", [spec("x", WEIGHT), spec("x", WEIGHT)], checksum=False)
    with TensorFileWriter(tmp_path / "d", [spec("x", WEIGHT)], checksum=False) as writer:
        with pytest.raises(ValueError, match="row-major"):  # else other elements would be written, without an error
            writer.write(WEIGHT.T)
        writer.write(WEIGHT)


def header(text: str | bytes, data: bytes = b"") -> bytes:
    text = text.encode() if isinstance(text, str) else text
    return len(text).to_bytes(8, "little") + text + data


def one(**changes: Any) -> bytes:
    return header(json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}), bytes(8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "not whole", id="empty"),
        pytest.param(b"PK\x03\x04" + bytes(40), "no safetensors file", id="a-zip-archive"),
        pytest.param((2**63).to_bytes(8, "little") + b"{}", "not whole", id="header-longer-than-memory"),
        pytest.param(header(b"\xff\xfe"), "no safetensors file", id="no-text"),
        pytest.param(header("[1, 2]"), "no safetensors file", id="another-json"),
        pytest.param(header('{"__metadata__": 3}'), "no safetensors file", id="metadata-no-table"),
        pytest.param(header('{"x": 3}'), "no safetensors file", id="tensor-no-table"),
        pytest.param(one(dtype="F4"), "'F4'", id="type"),
        pytest.param(one(shape=[3]), "x has 8 bytes; float32 of shape", id="shape"),
        pytest.param(one(shape=[-2]), "-2", id="negative"),
        pytest.param(one(shape=[2.0]), "2.0", id="no-count"),
        pytest.param(one(data_offsets=[8, 16]), "begins at byte", id="gap"),
        pytest.param(one() + b"more", "added to", id="grown"),
        pytest.param(one()[:-1], "not whole", id="truncated"),
        pytest.param(header("[" * 100_000), "no safetensors file", id="deep"),
    ],
)
def test_a_damaged_or_foreign_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    """Weight files come from elsewhere: lengths in them are not believed, and the message says which file."""
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors") as caught:
        read_header(path)
    assert message in str(caught.value)


def test_each_truncation_of_a_real_file_is_refused(tmp_path: Path) -> None:
    save_file({"a": WEIGHT, "b": np.arange(4)}, tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    names = [tensor.name for tensor in read_header(tmp_path / "whole.safetensors")[0]]
    assert sorted(names) == ["a", "b"]
    for length in range(len(whole)):
        path = tmp_path / "part.safetensors"
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"part\.safetensors"):
            read_header(path)


def test_a_map_beyond_the_end_is_an_error(tmp_path: Path) -> None:
    """A memory map past the end would kill the process with SIGBUS at the first look."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(bytes(10))
    with pytest.raises(CheckpointError, match="bytes 4 to 12"):
        map_chunk(path, 4, 8)
    assert len(map_chunk(path, 10, 0)) == 0
