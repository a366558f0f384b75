"""Batches and losses of a form that was promised, crashed or was taken for another."""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from hybrid.compose.batch import split_batch
from hybrid.errors import BatchError
from tests.multi_rank.case_runs import own_part, variant, wrapped
from tests.ranks import run_ranks


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_a_defaultdict_is_a_batch() -> None:
    """A defaultdict was rebuilt by calling its class with a dict, which wants a factory: TypeError."""
    batch = defaultdict(list, {"x": torch.arange(4)})
    pieces = split_batch(batch, accumulate_steps=2, micro_batch_size=None)
    assert [piece["x"].tolist() for piece in pieces] == [[0, 1], [2, 3]]


@dataclass
class Inputs:
    values: torch.Tensor


@pytest.mark.parametrize(
    "inputs", [Inputs(torch.ones(4, 2)), numpy.ones((4, 2)), ["a", "b", "c", "d"]], ids=["dataclass", "numpy", "texts"]
)
def test_what_holds_samples_but_cannot_be_cut_is_refused(inputs: Any) -> None:
    """What was no tensor went whole into every micro-batch, beside labels that were cut: wrong pairs, in silence."""
    try:
        pieces = split_batch((inputs, torch.arange(4)), accumulate_steps=2, micro_batch_size=None)
    except BatchError:
        return
    for piece_inputs, piece_labels in pieces:
        held = piece_inputs.values if isinstance(piece_inputs, Inputs) else piece_inputs
        assert len(held) == len(piece_labels), "the labels were cut and the inputs were not"


def one_number(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, labels).reshape(1)


def sum_and_count(output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return functional.mse_loss(output, labels, reduction="sum").reshape(1), torch.tensor([labels.numel()])


def check_shaped_loss() -> None:
    for loss_fn in (one_number, sum_and_count):
        with variant(stage=2) as strategy:
            model, optimizer = wrapped(nn.Linear(3, 2), sgd, strategy)
            batch = (own_part(torch.ones(4, 3)), own_part(torch.ones(4, 2)))
            assert model.train_batch(batch, optimizer, loss_fn=loss_fn).loss.shape == ()


def test_a_loss_of_shape_1_is_one_number() -> None:
    """A loss with one element passed the check and then failed in torch.stack."""
    run_ranks(check_shaped_loss, 2)


def check_batch_without_tensors() -> None:
    """The message of the refusal names this way out."""
    with variant(stage=2) as strategy:
        model, optimizer = wrapped(nn.Linear(3, 2), sgd, strategy)

        def forward_step(model: nn.Module, texts: list[str]) -> tuple[torch.Tensor, int]:
            return model(torch.ones(len(texts), 3)).sum(), len(texts)

        with pytest.raises(BatchError) as caught:
            model.train_batch(["a", "b"], optimizer, forward_step=forward_step)
        assert "(sum, count)" not in str(caught.value), "the message names a way out that is refused as well"


def test_a_refused_batch_is_not_told_a_way_out_that_is_refused_too() -> None:
    """A batch without tensors was told to return (sum, count), and was refused when it did."""
    run_ranks(check_batch_without_tensors, 2)


def short_first_batch() -> list[str]:
    model = hybrid.distributed_model(nn.Linear(3, 2), strategy=hybrid.DistributedStrategy(global_batch_size=8))
    optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    told = []
    for size in (3, 2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.train_batch((torch.ones(size, 3), torch.ones(size, 2)), optimizer, loss_fn=nn.MSELoss())
        told += [f"{Path(warning.filename).name}: {warning.message}" for warning in caught]
    return told


def test_a_first_batch_below_the_global_batch_size_is_told() -> None:
    """It trained in silence with another batch than the strategy's; later ones may be the tail of an epoch."""
    for told in run_ranks(short_first_batch, 2):
        assert len(told) == 1
        assert told[0].startswith(f"{Path(__file__).name}: this rank's first batch has 3 samples")
        assert "asks for 4 (global_batch_size = 8 over 2 data-parallel ranks)" in told[0]
