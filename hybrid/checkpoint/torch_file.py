"""Files of `torch.save` with plain weights: made from files of an export, and opened without running any code."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hybrid.checkpoint.folder import write_file
from hybrid.checkpoint.tensor_file import map_chunk
from hybrid.checkpoint.weight_files import SINGLE_NAME, WeightFile, WeightFiles, index_text
from hybrid.errors import CheckpointError

__all__ = [
    "TORCH_INDEX_NAME",
    "open_torch_files",
    "tied_in",
    "torch_file_name",
    "write_torch_file",
    "write_torch_index",
]

TORCH_INDEX_NAME = "pytorch_model.bin.index.json"
_ZIP = b"PK\x03\x04"
# What torch says of a class or function that a file names: "GLOBAL posix.system".
_FOREIGN = re.compile(r"\bGLOBAL ([\w.]+)")


def write_torch_file(folder: Path, files: WeightFiles, path: Path, *, tied: Mapping[str, str]) -> None:
    """Write a state dict with the tensors of an export; on the disk when this returns.

    The tensors are memory maps: what has been written can leave memory again. A name that is tied is there as well and
    shares its tensor, as in `model.state_dict()`, so a plain model loads it with strict keys.
    """
    state: dict[str, torch.Tensor] = {}
    for file in files.files:
        mapped = map_chunk(folder / file.name, 0, file.num_bytes)  # one map, and one open file, for all in it
        for tensor in file.tensors:
            # From an array of its own, so that the tensor is saved alone, not the whole file with it.
            data = torch.from_numpy(mapped[tensor.begin : tensor.begin + tensor.num_bytes])
            state[tensor.name] = data.view(getattr(torch, tensor.dtype)).view(tensor.sizes)
    for name, stored in tied.items():
        state[name] = state[stored]
    with path.open("xb") as opened:
        torch.save(state, opened)
        opened.flush()
        os.fsync(opened.fileno())


def torch_file_name(name: str) -> str:
    """What `transformers` calls a file of `torch.save` in place of a safetensors file of this name."""
    return f"pytorch_{name.removesuffix('.safetensors')}.bin"


def write_torch_index(folder: Path, files: WeightFiles, *, tied: Mapping[str, str]) -> None:
    """The index of the files of `torch.save` that these files became; nothing for one."""
    if [file.name for file in files.files] == [SINGLE_NAME]:
        return
    places = {tensor.name: torch_file_name(file.name) for file in files.files for tensor in file.tensors}
    places |= {name: places[stored] for name, stored in tied.items()}
    tensors = [tensor for file in files.files for tensor in file.tensors]
    write_file(folder / TORCH_INDEX_NAME, index_text(tensors, places).encode(), checksum=False)


def tied_in(file: WeightFile, tied: Mapping[str, str]) -> dict[str, str]:
    """Those of the tied names whose tensor is in this file."""
    names = {tensor.name for tensor in file.tensors}
    return {name: stored for name, stored in tied.items() if stored in names}


def open_torch_files(paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    """The tensors of state dicts, as memory maps: a value is read when it is looked at. No code in the files runs.

    Raises:
        CheckpointError: a file is damaged, holds something else than tensors by name, or a name is there twice.
    """
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        for name, value in _open(path).items():
            if name in found:
                raise CheckpointError(f"{name} is in {path} and in another of the files")
            found[name] = value
    return found


def _open(path: Path) -> dict[str, torch.Tensor]:
    with path.open("rb") as file:
        if file.read(len(_ZIP)) != _ZIP:
            raise CheckpointError(
                f"{path} is no file of torch.save, or one in its form from before torch 1.6, which cannot be read in "
                "parts; load it there and torch.save it anew"
            )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except pickle.UnpicklingError as error:  # torch's own text advises to run the code in the file
        found = _FOREIGN.search(str(error))
        if found is None:
            raise CheckpointError(
                f"{path} is damaged, or holds something else than tensors by name; save model.state_dict() alone, anew"
            ) from None
        raise CheckpointError(
            f"{path} holds a {found.group(1)}, which is no plain tensor and could run code when it is loaded; nothing "
            "was loaded. Get the weights as safetensors, or, where the file comes from is trusted, save "
            "model.state_dict() alone from it"
        ) from None
    except Exception as error:  # what torch raises for a damaged file depends on where the damage is
        said = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{path} is damaged, or is no state dict: {said}") from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds a {type(state).__name__}; expected a state dict: names and tensors")
    others = [str(name) for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        some = ", ".join([*others[:8], *["..."] * (len(others) > 8)])
        raise CheckpointError(
            f"{path} holds more than names and tensors: {some}; if the state dict is one of these, save that alone"
        )
    odd = [name for name, value in state.items() if value.layout is not torch.strided or value.is_quantized]
    if odd:
        raise CheckpointError(f"{path}: {', '.join(odd)} is sparse or quantized; only ordinary tensors can be loaded")
    return {str(name): value.detach() for name, value in state.items()}
