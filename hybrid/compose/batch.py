"""One rank's batch: how many samples it has, and how it is cut into micro-batches.

A batch is a tree of dicts, lists and tuples. Every tensor with at least one dim has the samples on dim 0, and so
has a list of as many texts; numbers, strings, None and 0-d tensors go unchanged into every micro-batch.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hybrid.collectives import ops
from hybrid.errors import BatchError
from hybrid.precision.tree import map_tensors

__all__ = ["check_same_batch", "num_samples", "num_tokens", "on_device", "split_batch"]


# What means the same in every micro-batch, and goes there as it is.
_SHARED = (bool, int, float, complex, str, bytes, type(None))


def _leaves(batch: Any, path: str = "batch") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(batch, torch.Tensor):
        if batch.dim() > 0:
            yield path, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _leaves(value, f"{path}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for position, value in enumerate(batch):
            yield from _leaves(value, f"{path}[{position}]")


def on_device(pieces: list[Any], device: torch.device) -> list[Any]:
    """The same micro-batches with their tensors on the rank's device; on the CPU the same objects."""
    if device.type == "cpu":
        return pieces
    # From pinned memory the copy runs beside the host; from any other, torch returns when it has been read.
    return [map_tensors(piece, lambda tensor: tensor.to(device, non_blocking=True)) for piece in pieces]


def _cut(batch: Any, start: int, end: int, total: int, path: str = "batch") -> Any:
    """Samples `[start, end)` of `total`, in the same containers."""
    if isinstance(batch, torch.Tensor):
        return batch[start:end] if batch.dim() > 0 else batch
    if isinstance(batch, Mapping):
        # A mapping may be of a class with a constructor of its own: copy it, then replace the values.
        cut = copy.copy(batch)
        for key, value in batch.items():
            cut[key] = _cut(value, start, end, total, f"{path}[{key!r}]")  # type: ignore[index]
        return cut
    if isinstance(batch, list | tuple):
        if len(batch) == total and all(isinstance(value, str | bytes) for value in batch):
            return batch[start:end]  # one text per sample
        pieces = [_cut(value, start, end, total, f"{path}[{place}]") for place, value in enumerate(batch)]
        return type(batch)(*pieces) if hasattr(batch, "_fields") else type(batch)(pieces)
    if isinstance(batch, _SHARED):
        return batch
    raise BatchError(
        f"{path} is a {type(batch).__name__}: it cannot be cut into micro-batches; use tensors in dicts, lists "
        "or tuples, or accumulate_steps=1"
    )


def num_samples(batch: Any) -> int:
    """The length of dim 0 that all tensors of the batch share.

    Raises:
        BatchError: no tensor has a dim 0, or two of them differ.
    """
    sizes = {path: tensor.shape[0] for path, tensor in _leaves(batch)}
    if not sizes:
        raise BatchError(
            f"the batch of type {type(batch).__name__} has no tensor with samples on dim 0; give tensors in dicts, "
            "lists or tuples: they tell how many samples a batch has"
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path} has {size}" for path, size in sizes.items())
        raise BatchError(f"the leading dims of the batch differ: {listed}; every tensor needs the samples on dim 0")
    return next(iter(sizes.values()))


def num_tokens(batch: Any) -> int:
    """Elements of the first integer tensor with at least two dims (token ids), else the number of samples."""
    for _, tensor in _leaves(batch):
        if tensor.dim() >= 2 and not tensor.is_floating_point() and not tensor.is_complex():
            return tensor.numel()
    return num_samples(batch)


def split_batch(batch: Any, *, accumulate_steps: int, micro_batch_size: int | None, training: bool = True) -> list[Any]:
    """Cut a batch into exactly `accumulate_steps` micro-batches, in order; the last ones may be smaller or empty.

    With `micro_batch_size` the pieces have that size, and a batch that is too long is refused; a shorter one
    (the tail of an epoch) fills the first pieces. Without it the pieces' sizes differ by at most one.

    Raises:
        BatchError: more samples than `micro_batch_size × accumulate_steps`, or leading dims that differ.
    """
    total = num_samples(batch)
    if micro_batch_size is not None and total > micro_batch_size * accumulate_steps:
        steps = f", or set accumulate_steps={-(-total // micro_batch_size)}" if training else ""
        raise BatchError(
            f"this rank's batch has {total} samples, but micro_batch_size={micro_batch_size} × "
            f"accumulate_steps={accumulate_steps} = {micro_batch_size * accumulate_steps}; give the data loader that "
            f"batch size{steps}"
        )
    if micro_batch_size is not None:
        ends = [min(total, micro_batch_size * (step + 1)) for step in range(accumulate_steps)]
    else:
        ends = [total * (step + 1) // accumulate_steps for step in range(accumulate_steps)]
    if accumulate_steps == 1:
        return [batch]
    starts = [0, *ends[:-1]]
    return [_cut(batch, start, end, total) for start, end in zip(starts, ends, strict=True)]


def check_same_batch(batch: Any, *, group: ops.Group) -> None:
    """Compare a batch over the ranks that work on it together, by a digest of each tensor and the text of each number,
    flag and None. *Collective.*

    Raises:
        BatchError: a rank got another batch; raised on all of them, with the rank and the place.
    """
    if group.size == 1:
        return
    mine = list(_fingerprints(batch, "batch"))
    everyone = ops.all_gather_object(mine, group=group)
    for index, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        place = next((n for n, pair in enumerate(zip(everyone[0], theirs, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            what = f"{len(theirs)} tensors and numbers instead of {len(everyone[0])}"
        else:
            (path, first, _), (other_path, other, _) = everyone[0][place], theirs[place]
            here = path if path == other_path else f"{other_path} instead of {path}"
            what = f"{here}: {other}" + (", other values" if first == other else f", not {first}")
        raise BatchError(
            f"the ranks {', '.join(map(str, group.ranks))} ({group.axis}) work on one batch together, and rank "
            f"{group.ranks[index]} got another one than rank {group.ranks[0]} ({what}); give all of them the same: "
            "shard the data by hybrid's samplers, or by the data-parallel rank of hybrid.get_mesh()"
        )


def _fingerprints(value: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """(place, what is there, digest of its values) of all that a batch means; objects of other classes are left out."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        kind = f"shape {tuple(plain.shape)}, {plain.dtype}"
        yield path, kind, hashlib.sha256(raw).hexdigest()
    elif isinstance(value, _SHARED):
        text = repr(value)
        short = text if len(text) <= 40 else f"{text[:36]} ..."
        yield path, short, hashlib.sha256(text.encode()).hexdigest()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _fingerprints(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from _fingerprints(item, f"{path}[{position}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _fingerprints(getattr(value, field.name, None), f"{path}.{field.name}")
