"""Checkpoints that did not load although they were right, or loaded in part without a word."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hybrid
from tests.multi_rank.case_runs import variant
from tests.ranks import run_ranks


class WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.nothing = nn.Parameter(torch.empty(0, 3))


def save_and_load_empty(root: str) -> None:
    for stage in (0, 2, 3):
        with variant(stage=stage) as strategy:
            model: Any = hybrid.distributed_model(WithEmpty(), strategy=strategy)
            hybrid.save_checkpoint(f"{root}/{stage}", model, step=1)
            loaded = hybrid.load_checkpoint(f"{root}/{stage}", model)
            assert (loaded.missing, loaded.unexpected) == ((), ())


def test_a_parameter_without_elements(tmp_path: Any) -> None:
    """No rank held a region of it, so a load found its entry unexpected; at stage 3 the save itself failed."""
    run_ranks(save_and_load_empty, 2, str(tmp_path))


class MayBeTied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def save_tied_load_untied(root: str) -> None:
    with variant(stage=0) as strategy:
        model: Any = hybrid.distributed_model(MayBeTied(tied=True), strategy=strategy)
        hybrid.save_checkpoint(root, model, step=1)
        wanted = model.full_state_dict()
    with variant(stage=0) as strategy:
        model = hybrid.distributed_model(MayBeTied(tied=False), strategy=strategy)
        hybrid.load_checkpoint(root, model)
        got = model.full_state_dict()
        assert all(torch.equal(got[name], value) for name, value in wanted.items())


def test_a_tied_checkpoint_in_a_model_without_the_tie(tmp_path: Any) -> None:
    """Both weights wanted the same elements of one entry, and only the last one got them; nothing was reported."""
    run_ranks(save_tied_load_untied, 2, str(tmp_path))
