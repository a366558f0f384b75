"""Saves and loads at odd moments, and with arguments as people write them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import hybrid
from tests.multi_rank.case_runs import own_part, seeded, strategy_of, wrapped
from tests.multi_rank.test_checkpoint_strict import STAGES, Net, adam, step
from tests.ranks import run_ranks


def check_gradients_under_way(root: str) -> None:
    for stage in STAGES:
        model, optimizer = wrapped(Net(seed=10), adam, strategy_of(stage=stage))
        batch = own_part(torch.randn(12, 5, generator=seeded(5)))
        step(model, optimizer, 0)
        hybrid.save_checkpoint(f"{root}/{stage}", model, optimizer, step=1)
        hybrid.export_weights(model, f"{root}/weights-{stage}")
        model.train_batch((batch, batch), optimizer, loss_fn=nn.functional.mse_loss, step=False)
        with pytest.raises(hybrid.CheckpointError, match="gradients are in no checkpoint"):
            hybrid.save_checkpoint(f"{root}/{stage}", model, optimizer, step=2)
        with pytest.raises(hybrid.CheckpointError, match="of the weights before"):
            hybrid.load_checkpoint(f"{root}/{stage}", model, optimizer)
        with pytest.raises(hybrid.CheckpointError, match="of the weights before"):
            hybrid.load_weights(model, f"{root}/weights-{stage}")
        model.zero_grad()
        hybrid.load_checkpoint(f"{root}/{stage}", model, optimizer)
        loss = step(model, optimizer, 1)
        hybrid.load_checkpoint(f"{root}/{stage}", model, optimizer)
        with model.no_sync():
            nn.functional.mse_loss(model(batch), batch).backward()
        with pytest.raises(hybrid.CheckpointError, match="gradients are in no checkpoint"):
            hybrid.save_checkpoint(f"{root}/{stage}", model, optimizer, step=2)
        optimizer.zero_grad()
        with torch.inference_mode():
            hybrid.load_checkpoint(f"{root}/{stage}", model, optimizer)
            hybrid.save_checkpoint(f"{root}/{stage}", model, optimizer, step=1)
        assert step(model, optimizer, 1) == loss, stage
        nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()
        hybrid.save_checkpoint(f"{root}/{stage}", model, optimizer, step=2)  # the update has them
        hybrid.shutdown()


def test_gradients_that_wait_for_an_update_are_neither_lost_nor_used_on_other_weights(tmp_path: Path) -> None:
    """Fault: a load within an accumulation kept its gradients, and the next update moved the loaded weights by them."""
    run_ranks(check_gradients_under_way, 2, str(tmp_path), timeout_seconds=60)


def check_arguments(root: str) -> None:
    model, optimizer = wrapped(Net(seed=11), adam, strategy_of(stage=1))
    for wrong in (None, 3, "", " ", "a\0b", b"raw"):
        with pytest.raises(hybrid.CheckpointError, match="save_checkpoint needs the path of a folder, got"):
            hybrid.save_checkpoint(wrong, model, optimizer, step=1)
    os.environ["HOME"] = root
    path = hybrid.save_checkpoint("~/saved", model, optimizer, step=np.int64(7))
    assert path == Path(root, "saved", "step_00000007")
    hybrid.save_checkpoint("~/saved", np.int64(8))
    assert hybrid.load_checkpoint("~/saved", model, optimizer, step=np.int32(7)).step == 7
    assert hybrid.load_checkpoint("~/saved", model, optimizer).step == 8


def test_paths_and_steps_are_read_as_people_write_them(tmp_path: Path) -> None:
    """An empty variable made the current folder the checkpoint's, `~` a folder of that name."""
    run_ranks(check_arguments, 2, str(tmp_path), timeout_seconds=60)
