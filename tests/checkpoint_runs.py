"""Saving under one layout, loading under another, for models of `pipeline_models` and `tensor_models`.

    run = CheckpointRun("tied", {"pp": 2, "stage": 1})       # on each rank
    run.train(0, 2)
    hybrid.save_checkpoint(directory, run.model, run.optimizer, step=2)

`save_all` and `load_all` do so for several models in one world, and compare whole values and the next losses.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hybrid
from tests import pipeline_models, tensor_models, tensor_runs
from tests.tensor_case import AMP, tensor_strategy

__all__ = ["AFTER", "BEFORE", "CheckpointRun", "load_all", "save_all"]

BEFORE, AFTER = 2, 2  # steps before the save, and after it
LOSS_BOUNDS = {False: 1e-5, True: 3e-2}  # by whether bf16 computes on either side
TIMEOUT_SECONDS = 60

Settings = Mapping[str, Any]


class CheckpointRun:
    """A wrapped model with its optimizer and batches, in a world that stands.

    Args:
        kind: a name of either module's models.
        settings: of `pipeline_strategy` or `tensor_strategy`; with `amp`: bf16 with masters, "O2".
    """

    def __init__(self, kind: str, settings: Settings) -> None:
        self.kind = kind
        settings = {**settings, "timeout_seconds": TIMEOUT_SECONDS}
        self.computes_low = settings.pop("amp", None) is not None
        self.model: Any
        if kind in pipeline_models.MODELS:
            amp = {"amp": pipeline_models.PRECISIONS["bf16O2"]} if self.computes_low else {}
            strategy = pipeline_models.pipeline_strategy(**settings, **amp)
            self.model = hybrid.distributed_model(self.plain(), strategy=strategy)
            optimizer = pipeline_models.make_adamw(self.model)
        else:
            if self.computes_low:
                settings |= {"amp": True, "amp_configs": AMP["bf16-O2"]}
            plan = tensor_models.MODELS[kind].plan if settings["tp"] > 1 else None
            strategy = tensor_strategy(plan=plan, **settings)
            self.model = hybrid.distributed_model(self.plain(), strategy=strategy)
            optimizer = tensor_runs.make_optimizer(self.model)
        self.optimizer: Any = hybrid.distributed_optimizer(optimizer)

    def plain(self) -> nn.Module:
        """The model as it is before it is wrapped."""
        if self.kind in pipeline_models.MODELS:
            return pipeline_models.build(self.kind)
        return tensor_models.build(self.kind, dtype=torch.float32)

    def train(self, first: int, count: int) -> list[float]:
        losses = []
        for step in range(first, first + count):
            if self.kind in pipeline_models.MODELS:
                batch, loss = pipeline_models.batch_of(step), {"loss_fn": pipeline_models.cross_entropy}
                batch = pipeline_models.own(batch)
            else:
                batch = tensor_runs.own_samples(tensor_models.MODELS[self.kind].batch(step))
                loss = {"forward_step": tensor_models.MODELS[self.kind].loss}
            losses.append(self.model.train_batch(batch, self.optimizer, **loss).loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        """Whole weights and the optimizer's whole state. *Collective.*"""
        return {"weights": self.model.full_state_dict(), "optimizer": self.optimizer.full_state_dict()}

    def assert_state(self, wanted: Mapping[str, Any], what: object) -> None:
        """To the bit. *Collective.*"""
        rounded = set()
        if self.computes_low:  # a frozen weight has no master
            rounded = {name for name, weight in self.plain().named_parameters() if not weight.requires_grad}
        state = self.state()
        assert list(state["weights"]) == list(wanted["weights"])
        for fqn, value in wanted["weights"].items():
            expected = value.bfloat16().to(value.dtype) if fqn in rounded else value
            assert state["weights"][fqn].dtype == value.dtype, (what, fqn)
            assert torch.equal(state["weights"][fqn], expected), (what, fqn)
        here, saved = state["optimizer"]["state"], wanted["optimizer"]["state"]
        for fqn, values in saved.items():
            for key, value in values.items():
                if key != "master":  # in full precision it is the weight
                    assert here[fqn][key].dtype == value.dtype, (what, fqn, key)
                    assert torch.equal(here[fqn][key], value), (what, fqn, key)
        moments = [{fqn for fqn, values in one.items() if set(values) - {"master"}} for one in (saved, here)]
        assert moments[0] == moments[1], (what, moments)  # parameters without state stay without
        assert state["optimizer"]["param_groups"] == wanted["optimizer"]["param_groups"], what


def save_all(root: str, kinds: Sequence[str], settings: Settings) -> dict[str, dict[str, Any]]:
    """Train, save under `root/<kind>`, train on: kind -> state when it was saved, and the losses after it."""
    saved = {}
    for kind in kinds:
        run = CheckpointRun(kind, settings)
        run.train(0, BEFORE)
        hybrid.save_checkpoint(Path(root) / kind, run.model, run.optimizer, step=BEFORE)
        saved[kind] = run.state()
        saved[kind]["losses"] = run.train(BEFORE, AFTER)
        hybrid.shutdown()
    return saved


def load_all(roots: Mapping[str, str], kinds: Sequence[str], settings: Settings, wanted: Mapping[str, Any]) -> None:
    """Load what each of several layouts saved, all into one run of each kind.

    Args:
        roots: layout -> its root.
        wanted: layout -> what `save_all` gave.
    """
    for kind in kinds:
        run = CheckpointRun(kind, settings)
        run.train(7, 1)  # weights, moments and a step count that are not those of any file
        for layout in [name for name in roots if kind in wanted[name]]:
            what = (kind, layout, settings)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # other dropout masks: there is no dropout here
                loaded = hybrid.load_checkpoint(Path(roots[layout]) / kind, run.model, run.optimizer)
            lists = (loaded.missing, loaded.unexpected, loaded.mismatched)
            assert (loaded.step, lists) == (BEFORE, ((), (), ())), what
            run.assert_state(wanted[layout][kind], what)
            bound = LOSS_BOUNDS[run.computes_low or "bf16" in layout]
            expected = wanted[layout][kind]["losses"]
            losses = run.train(BEFORE, AFTER)
            assert all(abs(got - loss) <= bound for got, loss in zip(losses, expected, strict=True)), (
                what,
                losses,
                expected,
            )
        hybrid.shutdown()
