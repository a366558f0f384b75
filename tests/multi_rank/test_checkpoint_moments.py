"""Saves and loads at odd moments, and with arguments as people write them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import hybrid
from hybrid.checkpoint.folder import read_manifest
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


def check_edits(root: str) -> None:
    model, optimizer = wrapped(Net(seed=12), adam, strategy_of(stage=3))
    hybrid.save_checkpoint(root, model, optimizer, step=1)
    hybrid.export_weights(model, f"{root}/weights")
    before = model.full_state_dict()
    with model.gather_parameters():
        for call in (
            lambda: hybrid.load_checkpoint(root, model, optimizer),
            lambda: hybrid.load_weights(model, f"{root}/weights"),
        ):
            with pytest.raises(hybrid.CheckpointError, match=r"load_\w+ inside `with model.gather_parameters\(\):`"):
                call()
    after = model.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_load_while_parameters_are_edited_is_refused_by_its_name(tmp_path: Path) -> None:
    """Fault: the message spoke of optimizer.step()."""
    run_ranks(check_edits, 2, str(tmp_path))


class SharedNorm(nn.Module):
    """One BatchNorm under two names, or two of them."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(6)
        self.again = self.norm if shared else nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 5)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.last(self.again(torch.tanh(self.norm(self.first(value)))))


def check_shared_buffers(root: str) -> None:
    for saved in (True, False):
        model, optimizer = wrapped(SharedNorm(shared=saved), adam, strategy_of(stage=2))
        step(model, optimizer, 0)
        path = hybrid.save_checkpoint(f"{root}/{saved}", model, optimizer, step=1)
        wanted = model.full_state_dict()
        entries = read_manifest(path).entries
        assert ("model.again.running_mean" in entries) != saved  # stored once
        hybrid.shutdown()
        for other in (True, False):
            if saved or not other:  # two different ones do not go into one
                model = hybrid.distributed_model(SharedNorm(shared=other), strategy=strategy_of(stage=3))
                hybrid.load_checkpoint(f"{root}/{saved}", model)
                state = model.full_state_dict()
                assert list(state) == list(wanted)
                assert all(torch.equal(state[name], value) for name, value in wanted.items())
                hybrid.shutdown()


def test_a_buffer_under_two_names_is_stored_once_and_loads_under_both(tmp_path: Path) -> None:
    """A module that is used twice; the manifest's list of ties is the one place that says so, of buffers too."""
    run_ranks(check_shared_buffers, 2, str(tmp_path))
