"""From files of weights to one file of `torch.save`: the one part of exporting that needs torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from hybrid.checkpoint.tensor_file import map_chunk
from hybrid.checkpoint.weight_files import WeightFiles

__all__ = ["write_torch_file"]


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
