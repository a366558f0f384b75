"""Memory of models that are no longer used."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn

import hybrid
from tests.multi_rank.case_runs import own_part, strategy_of, wrapped
from tests.ranks import run_ranks


def make_and_forget(train: bool) -> list[weakref.ref[Any]]:
    model, optimizer = wrapped(nn.Linear(4, 4), lambda p: torch.optim.SGD(p, lr=0.1), strategy_of(stage=2))
    if train:
        model.train_batch(own_part(torch.ones(2, 4)), optimizer, forward_step=lambda m, x: m(x).mean())
    bucket = model.hybrid_runtime.engine.buckets[0]
    return [weakref.ref(thing) for thing in (model, optimizer, model.hybrid_runtime, bucket, model.weight)]


def check_freed() -> None:
    for train in (False, True):
        for shut_down in (False, True):
            alive = make_and_forget(train)
            if shut_down:
                hybrid.shutdown()
            gc.collect()
            left = [ref() for ref in alive if ref() is not None]
            assert not left, f"still alive: {[type(thing).__name__ for thing in left]}"


def test_a_wrapped_model_that_nobody_holds_is_freed() -> None:
    """Gradient hooks held the bucket, the bucket its parameters, and the parameters, inside torch, the hooks.

    The garbage collector does not see through a post-accumulate hook, so every model ever wrapped kept its
    parameters for the life of the process: a search over settings ran out of memory.
    """
    run_ranks(check_freed, 2)
