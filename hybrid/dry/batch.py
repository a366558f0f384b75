"""What a rank of a dry run trains on: zeros of the right shapes, and something to call a loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybrid.errors import BatchError
from hybrid.precision.tree import map_tensors

__all__ = ["Batch", "make_batch", "sample_length", "stand_in_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Args:
    sample: one micro-batch, as the model is called with it.
    data: of a rank and step, for `train_batch`: (inputs, something with as many samples).
    micro_batch_size: samples of a micro-batch.
    seq: tokens of a sample: the second size of the first tensor; 1 where it has none.
    """

    sample: Any
    data: tuple[Any, torch.Tensor]
    micro_batch_size: int
    seq: int


def make_batch(sample: Any, *, micro_batch_size: int | None, accumulate_steps: int, seq: int | None = None) -> Batch:
    """Zeros for a whole step.

    Args:
        sample: an example batch: a tensor, a tuple of arguments, or a dict of keyword arguments.
        micro_batch_size: samples of a micro-batch; None: as many as the sample has.
        accumulate_steps: micro-batches.
        seq: tokens per sample instead of the sample's, for token ids.

    Raises:
        BatchError: no tensor with samples on dim 0 in the sample; `seq` for a sample that is not of token ids.
    """
    first = next((tensor for tensor in _tensors(sample) if tensor.dim() > 0), None)
    if first is None:
        raise BatchError(
            "a dry run needs a sample, of which it takes shapes and types: let the factory return (model, sample), or "
            "give sample=, an example batch as the model is called with it"
        )
    samples, length = first.shape[0], first.shape[1] if first.dim() > 1 else None
    if seq is not None and seq != length and (first.dim() != 2 or first.is_floating_point()):
        raise BatchError(
            f"seq = {seq}, but the sample has the shape {tuple(first.shape)}; only token ids, (samples, tokens), can "
            "be resized: give a sample of the length itself and leave seq out"
        )
    size = micro_batch_size or samples

    def zeros(num_samples: int) -> Any:
        def resize(tensor: torch.Tensor) -> torch.Tensor:
            shape = list(tensor.shape)
            if shape and shape[0] == samples:
                shape[0] = num_samples
                if seq is not None and len(shape) > 1 and shape[1] == length:
                    shape[1] = seq
            return torch.zeros(shape, dtype=tensor.dtype, device="cpu")

        return map_tensors(sample, resize)

    total = size * accumulate_steps
    tokens = (seq or length) if length is not None and not first.is_floating_point() else 1
    return Batch(sample=zeros(size), data=(zeros(total), torch.zeros(total)), micro_batch_size=size, seq=tokens)


def sample_length(sample: Any) -> int | None:
    """Tokens of a sample: the second size of the first tensor; None where it has none."""
    first = next((tensor for tensor in _tensors(sample) if tensor.dim() > 0), None)
    return first.shape[1] if first is not None and first.dim() > 1 else None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def stand_in_loss(output: Any, _: Any) -> Any:
    """The loss that the model has found, else the mean of the squares of what it returned first."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    values = output.values() if isinstance(output, Mapping) else vars(output).values() if _is_record(output) else output
    for tensor in _tensors(list(values) if not isinstance(values, torch.Tensor) else values):
        if tensor.is_floating_point() and tensor.requires_grad:
            return tensor.float().pow(2).mean()
    raise BatchError(
        f"the model returned a {type(output).__name__} without a floating point tensor that depends on its parameters: "
        "there is nothing to train in a dry run"
    )


def _is_record(value: Any) -> bool:
    return not isinstance(value, torch.Tensor | list | tuple) and hasattr(value, "__dict__")
