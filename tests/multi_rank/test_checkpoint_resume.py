"""A run that stops and goes on, through files: schedule, loss scale, place in the data, random states, `extra`."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import seeded, strategy_of, wrapped
from tests.ranks import run_ranks

EXTRA = {"best": 0.25, "seen": torch.arange(5, dtype=torch.int16), "note": ("a", 1, None)}


class Training:
    """Dropout, float16 with a loss scale that moves, warm-up after a schedule of two kinds, 23 samples in batches."""

    def __init__(self, *, seed: int, stage: int) -> None:
        torch.manual_seed(seed)
        strategy = strategy_of(stage=stage)
        strategy.amp = True
        strategy.amp_configs = {"dtype": "float16", "level": "O1", "init_loss_scaling": 8.0, "incr_every_n_steps": 3}
        model = nn.Sequential(nn.Linear(3, 15), nn.Dropout(0.5), nn.Linear(15, 2))
        self.model, self.optimizer = wrapped(model, lambda ps: torch.optim.AdamW(ps, lr=1e-2), strategy)
        first = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=4)
        then = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 30)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(self.optimizer, [first, then], [4])
        self.sampler = hybrid.DistributedBatchSampler(23, 2, shuffle=True, seed=4)
        self.state = {"lr_scheduler": self.scheduler, "sampler": self.sampler}
        random.seed(seed + dist.get_rank())
        np.random.seed(seed + dist.get_rank())

    def train(self, batches: Any) -> list[Any]:
        """By step: ids, loss, rate, scale, and what Python and NumPy draw."""
        inputs, labels = torch.randn(23, 3, generator=seeded(1)), torch.randn(23, 2, generator=seeded(2))
        seen = []
        for ids in batches:
            drawn = random.random(), float(np.random.rand())
            result = self.model.train_batch(
                (inputs[ids], labels[ids]), self.optimizer, lr_scheduler=self.scheduler, loss_fn=functional.mse_loss
            )
            scale = self.model.hybrid_runtime.scaler.get_scale()
            seen.append((ids, result.loss.item(), self.optimizer.param_groups[0]["lr"], scale, drawn))
        return seen


def train_straight(directory: str) -> tuple[list[Any], list[Any]]:
    """One epoch and three steps; a save; to the end of the second epoch."""
    run = Training(seed=20, stage=2)
    run.train(run.sampler)
    batches = iter(run.sampler)
    begun = run.train(itertools.islice(batches, 3))
    hybrid.save_checkpoint(directory, run.model, run.optimizer, step=9, extra=EXTRA, **run.state)
    return begun, run.train(batches)


def resume(directory: str) -> tuple[list[Any], list[str]]:
    os.environ["HYBRID_RESUME"] = directory  # as `hybrid run --resume` does
    run = Training(seed=99, stage=3)  # who draws which numbers does not depend on the stage
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = hybrid.load_checkpoint(None, run.model, run.optimizer, **run.state)
    told = [one for one in caught if "load_checkpoint" in str(one.message)]
    assert {one.filename for one in told} <= {__file__}  # the line that called it, and none in hybrid
    assert (loaded.step, loaded.path) == (9, Path(directory) / "step_00000009")
    assert (loaded.extra["best"], loaded.extra["note"]) == (EXTRA["best"], EXTRA["note"])
    assert torch.equal(loaded.extra["seen"], EXTRA["seen"])
    assert loaded.extra["seen"].dtype == torch.int16
    return run.train(run.sampler), [str(one.message) for one in caught if "dropout" in str(one.message)]


def test_bc54_bc64_the_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Same ranks: samples, masks, rates and losses to the bit. Others: each remaining sample once, and a warning."""
    straight = run_ranks(train_straight, 2, str(tmp_path))
    begun = [index for of_rank, _ in straight for ids, *_ in of_rank for index in ids]
    for world_size in (2, 1, 4):
        resumed = run_ranks(resume, world_size, str(tmp_path))
        rest = [index for of_rank, _ in resumed for ids, *_ in of_rank for index in ids]
        assert sorted(begun + rest) == list(range(23)), world_size
        if world_size == 2:
            assert [of_rank for of_rank, _ in resumed] == [of_rank for _, of_rank in straight]
            assert [said for _, said in resumed] == [[], []]
        else:
            assert [len(said) for _, said in resumed] == [1] + [0] * (world_size - 1)
            assert "dropout masks and other random numbers differ" in resumed[0][1][0]


def check_first_start(directory: str) -> None:
    run = Training(seed=1, stage=2)
    before = run.model.full_state_dict()
    for value in (None, "", directory, f"{directory}/missing"):
        os.environ.pop("HYBRID_RESUME", None)
        if value is not None:
            os.environ["HYBRID_RESUME"] = value
        loaded = hybrid.load_checkpoint(None, run.model, run.optimizer, **run.state)
        assert (loaded.step, loaded.path, loaded.extra) == (0, None, None)
    after = run.model.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    # What is asked for by name must be there.
    with pytest.raises(hybrid.CheckpointError, match="has no complete checkpoint"):
        hybrid.load_checkpoint(directory, run.model, run.optimizer)
    with pytest.raises(hybrid.CheckpointError, match="there is no folder"):
        hybrid.load_checkpoint(f"{directory}/missing", run.model, run.optimizer)
    os.environ["HYBRID_RESUME"] = directory
    with pytest.raises(hybrid.CheckpointError, match="no complete checkpoint of step 3; complete are none"):
        hybrid.load_checkpoint(None, run.model, run.optimizer, step=3)
    # A folder that has steps, none of them whole, is no first start: the run would begin anew over what is left.
    dist.barrier()
    Path(directory, "step_00000004").mkdir(exist_ok=True)
    with pytest.raises(hybrid.CheckpointError, match="step_00000004"):
        hybrid.load_checkpoint(None, run.model, run.optimizer)


def test_first_start_of_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    """One command starts a run and continues it; an empty folder is the start, a damaged one is not."""
    run_ranks(check_first_start, 2, str(tmp_path))
