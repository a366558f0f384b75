"""Scenarios: one piece of a training script, run by plain torch and by hybrid, its results compared.

    def forgotten_zero_grad(job):
        model, optimizer = job.build("blocks")
        for step in range(3):
            job.loss(model, step).backward()
            optimizer.step()
        return {"weight": job.weights(model)}

    def test_forgotten_zero_grad():
        assert_as_plain(forgotten_zero_grad)

A scenario does not know where it runs, but for `job`. Its result is a dict: "loss" (the mean over the ranks is
compared), "weight", "gradient", "state", "norm" (by the tolerances of tests/parity.py) and "same" (must be equal).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import hybrid
from hybrid.collectives.deferred import deferred_backend
from tests.models import BATCH_SIZE, MODELS, build, cut
from tests.parity import TOLERANCES, compare_tensors
from tests.parity_case import even_cuts, make_optimizer
from tests.ranks import run_ranks

__all__ = ["Job", "Scenario", "assert_as_plain", "make_strategy"]

DTYPE = torch.float64


def make_strategy(zero_stage: int, **settings: Any) -> hybrid.DistributedStrategy:
    """Settings of the strategy itself go there, all others into sharding_configs."""
    strategy = hybrid.DistributedStrategy()
    strategy.timeout_seconds = 20
    for name in ("accumulate_steps", "gradient_clipping", "loss_reduction"):
        if name in settings:
            setattr(strategy, name, settings.pop(name))
    strategy.sharding = True
    strategy.sharding_configs = {"stage": zero_stage, "bucket_bytes": 3000, **settings}
    return strategy


class Job:
    """Plain torch on the whole batch (`strategy` None), or one rank of hybrid on its part."""

    def __init__(self, strategy: hybrid.DistributedStrategy | None) -> None:
        self.strategy = strategy
        self.is_plain = strategy is None
        launched = not self.is_plain and torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if launched else 0
        self.world_size = torch.distributed.get_world_size() if launched else 1

    def wrap(self, model: nn.Module) -> Any:
        return model if self.is_plain else hybrid.distributed_model(model, strategy=self.strategy)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        return optimizer if self.is_plain else hybrid.distributed_optimizer(optimizer)

    def build(self, name: str, optimizer: str = "adamw") -> tuple[Any, Any]:
        """A wrapped model of tests/models.py with a wrapped optimizer of tests/parity_case.py."""
        model = self.wrap(build(name, dtype=DTYPE))
        self.name = name
        return model, self.wrap_optimizer(make_optimizer(optimizer, model))

    def part(self, batch: Any) -> Any:
        """This rank's samples of a global batch."""
        return cut(batch, *even_cuts(0, BATCH_SIZE, self.world_size)[self.rank], dtype=DTYPE)

    def batch(self, step: int, name: str | None = None) -> Any:
        return self.part(MODELS[name or self.name].batch(step))

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        return MODELS[self.name].loss(model, self.batch(step))

    def update(self, model: Any, optimizer: Any, step: int, scheduler: Any = None) -> float:
        """One whole step: a plain loop, or `train_batch`."""
        if not self.is_plain:
            result = model.train_batch(
                self.batch(step), optimizer, lr_scheduler=scheduler, **MODELS[self.name].keywords()
            )
            return result.loss.item()
        loss = self.loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss.item())
        elif scheduler is not None:
            scheduler.step()
        return loss.item()

    def weights(self, model: Any) -> dict[str, torch.Tensor]:
        state = model.state_dict() if self.is_plain else model.full_state_dict()
        return {name: value.clone() for name, value in state.items()}

    def gradients(self, model: Any) -> dict[str, torch.Tensor | None]:
        """Collective in hybrid, as `named_gradients` is."""
        if not self.is_plain:
            return dict(model.named_gradients())
        return {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    def state(self, model: Any, optimizer: Any) -> dict[str, Any]:
        """A copy of the optimizer's state by name, tensors whole."""
        if not self.is_plain:
            saved = optimizer.full_state_dict()["state"]
        else:
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            saved = {names[id(parameter)]: state for parameter, state in optimizer.state.items()}
        return {f"{name}.{key}": value.clone() for name, state in saved.items() for key, value in state.items()}


Scenario = Callable[[Job], dict[str, Any]]


def _run(
    scenario: Scenario, stages: Sequence[int], settings: dict[str, Any], deferred: bool
) -> dict[int, dict[str, Any]]:
    results = {}
    for stage in stages:
        with deferred_backend() if deferred else nullcontext():
            results[stage] = scenario(Job(make_strategy(stage, **settings)))
            hybrid.shutdown()
    return results


def assert_as_plain(
    scenario: Scenario,
    *,
    world_size: int = 2,
    stages: Sequence[int] = (0, 1, 2),
    deferred: bool = False,
    **settings: Any,
) -> None:
    """Run the scenario plainly here and under each stage in one world; every number must agree on every rank."""
    plain = scenario(Job(None))
    ranks = run_ranks(_run, world_size, scenario, stages, settings, deferred)
    problems: list[str] = []
    for stage in stages:
        results = [results[stage] for results in ranks]
        found: list[str] = []
        losses = [_flat(result.pop("loss", [])) for result in results]
        for place, wanted in _flat(plain.get("loss", [])).items():
            mean = math.fsum(loss[place] for loss in losses) / len(losses)
            compare_tensors(found, TOLERANCES[DTYPE], "loss", f"loss {place}", mean, wanted)
        for rank, result in enumerate(results):
            assert set(result) == set(plain) - {"loss"}, (sorted(result), sorted(plain))
            for kind in result:
                _compare(found, f"rank {rank}, {kind}", kind, _flat(result[kind]), _flat(plain[kind]))
        problems += [f"stage {stage}: {problem}" for problem in found]
    assert not problems, "\n".join([f"{len(problems)} differences, among them", *problems[:8]])


def _compare(problems: list[str], where: str, kind: str, got: dict[str, Any], wanted: dict[str, Any]) -> None:
    if list(got) != list(wanted):
        problems.append(f"{where} has {list(got)}, not {list(wanted)}")
        return
    for name in wanted:
        if kind != "same":
            compare_tensors(problems, TOLERANCES[DTYPE], kind, f"{where} {name}", got[name], wanted[name])
        elif got[name] != wanted[name]:
            problems.append(f"{where} {name} is {got[name]!r}, not {wanted[name]!r}")


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, item in sorted(value.items()) for k, v in _flat(item, f"{path}/{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for index, item in enumerate(value) for k, v in _flat(item, f"{path}/{index}").items()}
    return {path: value}
