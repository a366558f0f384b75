"""Products by oneDNN in a job: chosen alike on all ranks, in the numbers of plain torch, and kept by recompute."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import hybrid
from hybrid import cpu_products, shims
from hybrid.sharding import gradient_sink
from tests.cpu_products import small_products_by_onednn
from tests.multi_rank.case_runs import SEVERAL_STEPS, assert_weights, variant, weights_of, wrapped
from tests.ranks import run_ranks
from tests.tensor_case import tensor_variant
from tests.tensor_gpt import GPT, GPT_PLAN, logits_loss, tokens
from tests.tensor_runs import assert_copies_alike

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch comes without oneDNN")


def built() -> GPT:
    torch.manual_seed(2)
    return GPT(tied=True)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)  # type: ignore[arg-type]


class Counted:
    """Products that oneDNN computes, and every matrix counts as a large one."""

    def __enter__(self) -> Counted:
        self.number, self._kernel, self._least = 0, shims.ONEDNN_PRODUCT, gradient_sink._LEAST_ELEMENTS
        gradient_sink._LEAST_ELEMENTS = 1

        def counted(*args: object) -> torch.Tensor:
            self.number += 1
            return self._kernel(*args)

        shims.ONEDNN_PRODUCT = counted
        return self

    def __exit__(self, *error: object) -> None:
        shims.ONEDNN_PRODUCT, gradient_sink._LEAST_ELEMENTS = self._kernel, self._least


def cut_models_train_as_plain() -> None:
    plain = built()
    optimizer = sgd(plain.parameters())
    for step in range(3):
        logits_loss(plain, tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for settings in (
        {},
        {"stage": 3, "bucket_bytes": 3000},
        {"stage": 1, "recompute": "selective"},
        {"stage": 2, "sequence_parallel": True, "recompute": "full"},
    ):
        with small_products_by_onednn(), Counted() as counted, tensor_variant(2, plan=GPT_PLAN, **settings) as strategy:
            model, optimizer = wrapped(built(), sgd, strategy)
            for step in range(3):
                logits_loss(model, tokens(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_copies_alike(model)
            # Of two blocks of four layers and the head: a forward, and the gradients of input and weight.
            assert counted.number >= 3 * 3 * 9, counted.number
            assert_weights(model, weights_of(plain), SEVERAL_STEPS)


def test_cut_models_train_as_one_process_does() -> None:
    """Protects both kinds of cut layers, the head, tied weights, sequence parallel, recompute and ZeRO."""
    run_ranks(cut_models_train_as_plain, 2)


def one_rank_does_not() -> None:
    rank = torch.distributed.get_rank()
    with small_products_by_onednn():
        for word, expected in (("1", True), ("0", False)):
            os.environ[cpu_products.VARIABLE] = "1" if rank == 0 else word
            with variant(stage=1) as strategy:
                hybrid.init(strategy)
                assert cpu_products._State.is_chosen is expected, (rank, word)


def test_all_ranks_choose_alike() -> None:
    """Protects what two ranks compute of the same numbers: it must be the same to the bit."""
    run_ranks(one_rank_does_not, 2)


def selective_recompute() -> None:
    flops = []
    for by_onednn in (False, True):
        with small_products_by_onednn(by_onednn), tensor_variant(2, plan=GPT_PLAN, recompute="selective") as strategy:
            model = hybrid.distributed_model(built(), strategy=strategy)
            loss = logits_loss(model, tokens(0))
            with FlopCounterMode(display=False) as counter:
                loss.backward()
            flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0, flops


def test_selective_recompute_keeps_these_products_too() -> None:
    """Protects the backward from computing again what forward was told to keep."""
    run_ranks(selective_recompute, 2)
