"""Checkpoints that did not load although they were right, or loaded in part without a word."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hybrid
from hybrid.checkpoint.export import export_step, model_files, read_beside
from hybrid.checkpoint.folder import read_manifest
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


class Counts(nn.Module):
    """State of its own: a tensor, or something that is none."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Shares(nn.Module):
    """Modules used twice, and a buffer under two names."""

    def __init__(self, *others: Any) -> None:
        super().__init__()
        self.first = self.second = nn.BatchNorm1d(3)
        self.counts = self.again = Counts(torch.tensor([2.0, 3.0]))
        self.others = nn.ModuleList(Counts(other) for other in others)
        self.register_buffer("position", torch.arange(5))
        self.inner = nn.Module()
        self.inner.register_buffer("position", self.position)


def export_both_ways(root: str) -> None:
    with variant(stage=2) as strategy:
        model: Any = hybrid.distributed_model(Shares(), strategy=strategy)
        step = hybrid.save_checkpoint(f"{root}/run", model, step=1)
        hybrid.export_weights(model, f"{root}/out")
        model.counts.state = torch.zeros(2)
        model.position.zero_()
        hybrid.load_checkpoint(f"{root}/run", model)
        assert model.counts.state.tolist() == [2.0, 3.0]
        assert model.inner.position.tolist() == [0, 1, 2, 3, 4]
    manifest = read_manifest(step)
    beside = read_beside(step, manifest)
    folder = Path(tempfile.mkdtemp(dir=root))  # each rank its own
    export_step(step, manifest, folder, model_files(manifest, 10**9, beside), beside=beside)
    assert beside.left_out == {}
    assert (folder / "model.safetensors").read_bytes() == Path(f"{root}/out/model.safetensors").read_bytes()


def test_an_export_of_a_checkpoint_is_that_of_the_model(tmp_path: Path) -> None:
    """It had no tensors of `get_extra_state()`, and a shared buffer under each of its names."""
    run_ranks(export_both_ways, 2, str(tmp_path))


def save_others(root: str) -> None:
    with variant(stage=0) as strategy:
        others = ({"seen": 3}, 7, torch.ones(2, dtype=torch.complex64))
        model: Any = hybrid.distributed_model(Shares(*others), strategy=strategy)
        hybrid.save_checkpoint(root, model, step=1)


def test_state_that_is_no_tensor_is_named_as_left_out(tmp_path: Path) -> None:
    """A file of weights cannot hold it, and nothing may be missing without a word."""
    run_ranks(save_others, 2, str(tmp_path))
    beside = read_beside(tmp_path / "step_00000001", read_manifest(tmp_path / "step_00000001"))
    assert list(beside.extra) == ["counts._extra_state"]
    assert beside.left_out == {
        "others.0._extra_state": "dict",
        "others.1._extra_state": "int",
        "others.2._extra_state": "complex tensor",
    }
