"""Whether the mean of micro-batches' mean losses is the mean over the whole batch, as far as the labels tell.

A loss over labels of which some are ignored (-100, as torch and transformers have it) is a mean over those that count.
Weighted by samples, the means of micro-batches, calls and ranks give the mean over the whole batch only if each has as
many labels that count per sample. That is seen from three sums over all of them, which travel with the step's others:
of s samples, of c labels that count, and of c²/s; by Cauchy and Schwarz (Σc)² ≤ Σs · Σc²/s, equal if all c/s are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hybrid.compose.batch import num_samples
from hybrid.errors import BatchError

__all__ = ["IGNORED", "NUM_LABEL_SUMS", "check_even_labels", "check_item_count", "label_sums", "uneven_labels"]

IGNORED = -100
"""What `torch.nn.functional.cross_entropy` leaves out, unless told otherwise."""

NUM_LABEL_SUMS = 5
"""s, then c and c²/s of all positions, then both without the first, which a causal language model does not predict."""

# Of Σs · Σc²/s, from where on it is no rounding: ratios c/s that are apart by a millionth.
_TOLERANCE = 1e-12


def label_sums(micro_batch: Any, samples: int, *, device: torch.device) -> torch.Tensor:
    """The sums of one micro-batch whose loss is a mean, fp64, of shape [NUM_LABEL_SUMS]; 0 if it has no such labels."""
    sums = torch.zeros(NUM_LABEL_SUMS, dtype=torch.float64, device=device)
    found = list(_labels(micro_batch))
    if not found or samples == 0:
        return sums
    sums[0] = samples
    for labels in found:
        sums[1] += _counted(labels, 0).sum().to(device)
        sums[3] += _counted(labels, 1).sum().to(device)
    sums[2::2] = sums[1::2] ** 2 / samples
    return sums


def check_even_labels(sums: torch.Tensor, micro_batches: Sequence[Any]) -> None:
    """Raises BatchError, on every rank, as all have the same sums: `uneven_labels` has something to say."""
    if said := uneven_labels(sums, micro_batches):
        raise BatchError(said)


def uneven_labels(sums: torch.Tensor, micro_batches: Sequence[Any]) -> str:
    """Why a weighted mean of means is not what one process would give; "" if it is.

    Args:
        sums: over all micro-batches of the world, of shape [NUM_LABEL_SUMS].
        micro_batches: this rank's, for the message.
    """
    samples, *counts = sums.tolist()
    uneven = [
        skip
        for skip, (count, squares) in enumerate((counts[:2], counts[2:]))
        if samples * squares - count**2 > _TOLERANCE * samples * squares
    ]
    if not uneven:
        return ""
    skip = uneven[0]
    here = ", ".join(
        f"{sum(int(_counted(labels, skip).sum()) for labels in _labels(one))} in {num_samples(one)}"
        for one in micro_batches
        if num_samples(one) > 0
    )
    aside = " (the first position aside, which a causal language model does not predict)" if skip else ""
    here = f", and in this rank's micro-batches {here}" if here else ""
    return (
        f"the micro-batches (of all ranks and accumulated calls) have unequally many labels per sample that are not "
        f"{IGNORED}{aside}: {counts[2 * skip]:.0f} in {samples:.0f} samples{here}. The loss came as one number, a "
        "mean over the labels of its micro-batch; a mean of such means is not the mean over the whole batch. "
        "Give the sum and its count: train_batch((inputs, labels), loss_fn=...) with inputs a dict without the labels "
        "and a loss_fn(output, labels) that returns (loss.sum(), (labels != -100).sum()), or a model that returns such "
        "a pair as its loss. A loss that is a mean over samples, whatever their labels, is (loss * len(labels), "
        "len(labels))"
    )


def check_item_count(batch: Any, *, is_whole: bool, loss_reduction: str) -> None:
    """That a model which divides its sum by what it is told does not get its loss taken for a mean.

    Args:
        is_whole: whether a step has one micro-batch in the whole world: then the two are the same.

    Raises:
        BatchError: it would.
    """
    count = batch.get("num_items_in_batch") if isinstance(batch, Mapping) else None
    if count is not None and loss_reduction == "mean" and not is_whole:
        raise BatchError(
            f"num_items_in_batch = {count} in the batch: the losses of a step's micro-batches are sums divided by "
            "that, to be added up, and loss_reduction = 'mean' takes their mean. Set "
            "strategy.loss_reduction = 'sum', with the number of labels that count in the batch of the whole world"
        )


def _counted(labels: torch.Tensor, skip: int) -> torch.Tensor:
    """Where a label counts, without the first positions."""
    return (labels[..., skip:] if labels.dim() > 1 else labels) != IGNORED


def _labels(micro_batch: Any) -> Iterator[torch.Tensor]:
    """Whole numbers that are called labels: of a dict by the name, of (inputs, labels) by the place."""
    if isinstance(micro_batch, Mapping):
        for key, value in micro_batch.items():
            if isinstance(key, str) and "label" in key.lower():
                yield from _whole_numbers(value)
    elif isinstance(micro_batch, list | tuple) and len(micro_batch) == 2:
        yield from _whole_numbers(micro_batch[1])


def _whole_numbers(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.dim() > 0 and value.dtype in _WHOLE:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _whole_numbers(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _whole_numbers(item)


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)
