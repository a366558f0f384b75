"""What a model that is cut over tp ranks refuses while it is used: batches, optimizers, widths in its code."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hybrid
from hybrid.errors import BatchError, ModelError, OptimizerError
from tests.ranks import run_ranks
from tests.tensor_case import tensor_variant
from tests.tensor_gpt import GPT_PLAN, LENGTH, WIDTH, logits_loss, tokens
from tests.tensor_models import build
from tests.tensor_runs import own_samples

# -- at the call -----------------------------------------------------------------------------------------------------


def check_lengths() -> None:
    with tensor_variant(2, plan=GPT_PLAN, sequence_parallel=True) as strategy:
        model: Any = hybrid.distributed_model(build("gpt"), strategy)
        batch = own_samples(tokens(0))
        with pytest.raises(BatchError, match=r"a sequence of 7 .*tp = 2 ranks; .*6 or 8"):
            model(batch["ids"][:, :-1])
        assert model(batch["ids"]).shape == (8, LENGTH, 67)


def check_batches(first_call: str) -> None:
    """The ranks get other values, another shape, or other numbers of tensors."""
    ids = tokens(0)["ids"]
    rank = dist.get_rank()
    others = {"values": ids + (rank == 3), "shape": ids[: 8 - (rank == 3)]}
    for what, mine in others.items():
        with tensor_variant(2, plan=GPT_PLAN) as strategy:
            model: Any = hybrid.distributed_model(build("gpt"), strategy)
            optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            batch = {"ids": mine % 67, "labels": mine % 67}

            def call(model: Any = model, batch: Any = batch, optimizer: Any = optimizer) -> None:
                if first_call == "train_batch":
                    model.train_batch(batch, optimizer, forward_step=logits_loss)
                else:
                    logits_loss(model, batch)

            if rank >= 2:
                with pytest.raises(BatchError, match=r"ranks 2, 3 .*rank 3 got another one than rank 2"):
                    call()
            else:
                # In another tp group the batches agree; what it waits for then, nobody sends.
                assert what
                if first_call != "train_batch":
                    call()


def test_sequences_that_the_ranks_cannot_share() -> None:
    run_ranks(check_lengths, 2)


def test_ranks_with_different_batches() -> None:
    run_ranks(check_batches, 4, "plain")


def check_different_batches_in_train_batch() -> None:
    ids = tokens(0)["ids"]
    with tensor_variant(2, plan=GPT_PLAN) as strategy:
        model: Any = hybrid.distributed_model(build("gpt"), strategy)
        optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batch = {"ids": ids, "labels": (ids + dist.get_rank()) % 67}
        with pytest.raises(
            BatchError, match=r"ranks 0, 1 .*rank 1 got another one than rank 0 .*batch\[.labels.\]: shape"
        ):
            model.train_batch(batch, optimizer, forward_step=logits_loss)
        model.train_batch({"ids": ids, "labels": ids}, optimizer, forward_step=logits_loss)


def test_ranks_with_different_labels_in_train_batch() -> None:
    """And the model can be used with a right batch after that."""
    run_ranks(check_different_batches_in_train_batch, 2)


class NotElementwise(torch.optim.SGD):
    """Not known to work on each element alone."""


def check_optimizers() -> None:
    makers: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
        lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2 and p.shape[0] != 67], lr=1e-2),
        lambda parameters: NotElementwise(parameters, lr=1e-2),
    ]
    for stage in (None, 1, 3):
        for make in makers:
            for is_before in (True, False):
                with tensor_variant(2, stage=stage, plan=GPT_PLAN) as strategy:
                    plain = build("gpt", dtype=torch.float32)
                    optimizer = make(plain.parameters()) if is_before else None
                    model = hybrid.distributed_model(plain, strategy)
                    with pytest.raises(OptimizerError, match=r"is cut over 2 tensor-parallel ranks.*AdamW or SGD"):
                        hybrid.distributed_optimizer(optimizer or make(model.parameters()))


def test_whole_matrix_optimizers() -> None:
    run_ranks(check_optimizers, 2)


def check_gradients_are_there() -> None:
    with tensor_variant(2, plan=GPT_PLAN) as strategy:
        plain = build("gpt")
        logits_loss(plain, tokens(0)).backward()
        with pytest.raises(ModelError, match=r"has a gradient.*zero_grad"):
            hybrid.distributed_model(plain, strategy)


def test_gradients_of_whole_size() -> None:
    run_ranks(check_gradients_are_there, 2)


# -- a width in the code ---------------------------------------------------------------------------------------------


class FixedWidth(nn.Module):
    """Its forward reshapes by the whole width, and calls itself as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(this, x: torch.Tensor) -> torch.Tensor:
        return this.down(functional.gelu(this.up(x)).view(x.shape[0], 24))


def check_width() -> None:
    with tensor_variant(2, plan={"*.up": "colwise", "*.down": "rowwise"}) as strategy:
        model = hybrid.distributed_model(nn.Sequential(FixedWidth(), nn.Identity()), strategy)
        with pytest.raises(ModelError, match=r"(?s)24.*up.*write view\(B"):
            model(torch.ones(3, WIDTH))


def test_a_width_in_the_code_is_named() -> None:
    run_ranks(check_width, 2)


# -- what would come back in part ------------------------------------------------------------------------------------


def check_partial_outputs() -> None:
    ids = tokens(0)["ids"]
    for sequence_parallel, name in ((False, "output_attentions"), (True, "output_hidden_states")):
        with tensor_variant(2, plan=GPT_PLAN, sequence_parallel=sequence_parallel) as strategy:
            model: Any = hybrid.distributed_model(build("gpt"), strategy)
            model.config = types.SimpleNamespace(**{name: True})
            with pytest.raises(ModelError, match=f"{name} under tensor parallel would return"):
                model(ids)
            setattr(model.config, name, False)
            assert model(ids).shape == (*ids.shape, 67)


def test_heads_and_sequences_are_not_returned_in_part() -> None:
    """Protects `output_attentions=True` of transformers models: each rank has its own heads, and no shape tells."""
    run_ranks(check_partial_outputs, 2)
