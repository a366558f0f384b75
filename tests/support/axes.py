"""What the page on support sweeps: settings, models and optimizers, and what is said of a choice of them.

Nothing here knows what is refused: a choice is put into a real strategy, a real model and a real optimizer, and these
go through the checks that `distributed_model` and `distributed_optimizer` make, without a process group.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal
from unittest import mock

import torch

import hybrid
from hybrid.compose import own_forward, stage_plan
from hybrid.compose.model import DistributedModel
from hybrid.compose.model_plan import plan_model
from hybrid.compose.optimizer_fit import OptimizerPlace, need_of, refusal
from hybrid.compose.stage_memory import Measured
from hybrid.contracts.schedule import SCHEDULE_NAMES
from hybrid.sharding.offload import check_host_update
from tests.support.models import BLOCK, MODELS, made
from tests.support.optimizers import OPTIMIZERS

__all__ = [
    "MODEL",
    "OPTIMIZER",
    "SETTINGS",
    "SWITCHES",
    "WORLD_SIZE",
    "Choice",
    "Floor",
    "known_axes",
    "refusals",
    "strategy_of",
    "switched_on",
]

Choice = Mapping[str, Any]
"""Axis -> value, for those that are not left out."""
Floor = Literal["strategy", "model", "optimizer"]

WORLD_SIZE = 32  # the largest degrees together are 16: every choice has data-parallel ranks left
MODEL, OPTIMIZER = "model", "optimizer"

# Path of each setting -> the values that are tried beside leaving it out; those of a section wait for its switch.
SETTINGS: dict[str, tuple[Any, ...]] = {
    "sharding_configs.stage": (0, 1, 2, 3),
    "sharding_configs.shard_size": (2,),
    "sharding_configs.partition": ("element", "parameter"),
    "sharding_configs.offload": ("optimizer", "parameters"),
    "sharding_configs.grad_reduce": ("every_micro_batch", "last_micro_batch", 2),
    "sharding_configs.grad_dtype": ("param", "bfloat16", "float16"),
    "sharding_configs.reduce_dtype": ("bfloat16", "float16"),
    "sharding_configs.overlap_comm": (False,),
    "sharding_configs.overlap_param_gather": (True,),
    "sharding_configs.units": ([BLOCK],),
    "sharding_configs.prefetch": (2,),
    "sharding_configs.reshard_after": ("run",),
    "sharding_configs.bucket_bytes": (1000,),
    "tensor_parallel_configs.degree": (2,),
    "tensor_parallel_configs.sequence_parallel": (True,),
    "tensor_parallel_configs.plan": ({"*.linear1": "replicated", "*.linear2": "replicated"},),
    "tensor_parallel_configs.verify": (True,),
    "pipeline_configs.degree": (2, 4),
    "pipeline_configs.schedule": SCHEDULE_NAMES,
    "pipeline_configs.virtual_stages": (1, 2),
    "pipeline_configs.split": ("auto", "uniform", f"layer:{BLOCK}"),
    "accumulate_steps": (3, 4, 8),
    "amp": (True,),
    "amp_configs.level": ("O1", "O2"),
    "amp_configs.dtype": ("bfloat16", "float16"),
    "amp_configs.custom_fp32": (["LayerNorm"],),
    "amp_configs.buffer_dtype": ("bfloat16",),
    "amp_configs.init_loss_scaling": (256.0,),
    "amp_configs.growth_interval": (100,),
    "recompute": (True,),
    "recompute_configs.policy": ("full", "selective"),
    "recompute_configs.units": ([BLOCK],),
    "recompute_configs.preserve_rng": (False,),
    "compile": (True,),
    "compile_configs.backend": ("eager", "aot_eager"),
    "compile_configs.mode": ("default",),
    "compile_configs.units": ([BLOCK],),
    "compile_configs.fullgraph": (True,),
    "gradient_clipping": (1.0, {"clip_value": 1.0}),
    "hybrid_configs.sep_degree": (2,),
    "loss_reduction": ("sum",),
    "profile": (True,),
    "profile_configs.steps": (2,),
}
# Section -> its flag, and the axis that switches it on.
SWITCHES: dict[str, tuple[str, str]] = {
    "sharding_configs": ("sharding", "sharding_configs.stage"),
    "tensor_parallel_configs": ("tensor_parallel", "tensor_parallel_configs.degree"),
    "pipeline_configs": ("pipeline", "pipeline_configs.degree"),
    "amp_configs": ("amp", "amp"),
    "recompute_configs": ("recompute", "recompute"),
    "compile_configs": ("compile", "compile"),
    "profile_configs": ("profile", "profile"),
}


def switched_on(choice: Choice, turn: int) -> Choice:
    """The choice with the switches of all sections that it has settings of; `turn` chooses their values."""
    on = dict(choice)
    for path in choice:
        section = path.rpartition(".")[0]
        if section in SWITCHES and SWITCHES[section][1] not in on:
            values = SETTINGS[SWITCHES[section][1]]
            on[SWITCHES[section][1]] = values[-1 - turn % len(values)]
    return on


def strategy_of(choice: Choice) -> hybrid.DistributedStrategy:
    """The strategy that a choice means."""
    strategy = hybrid.DistributedStrategy()
    for path, value in choice.items():
        if path in {MODEL, OPTIMIZER}:
            continue
        section, _, key = path.rpartition(".")
        if section in SWITCHES:
            flag, switch = SWITCHES[section]
            if switch not in choice:
                continue
            setattr(strategy, flag, True)
        setattr(getattr(strategy, section) if section else strategy, key, value)
    return strategy


def refusals(choice: Choice) -> tuple[Floor | None, tuple[str, ...]]:
    """On which floor a choice is refused, and all that is said there; None, () for one that is not."""
    settings = {path: value for path, value in choice.items() if path not in {MODEL, OPTIMIZER}}
    strategy = strategy_of(settings)
    if problems := strategy.problems(WORLD_SIZE):
        return "strategy", problems
    if MODEL not in choice and OPTIMIZER not in choice:
        return None, ()
    resolved = strategy.resolve(WORLD_SIZE)
    model, sample = made(choice.get(MODEL, next(iter(MODELS))))
    with (
        mock.patch.object(own_forward, "plan_own_forward", _plan_once),
        mock.patch.object(stage_plan, "measure_layers", _unmeasured),
        torch.random.fork_rng(devices=[]),
    ):
        try:
            plan = plan_model(model, resolved, wrapper=DistributedModel, sample=sample)
        except hybrid.HybridError as error:
            return "model", getattr(error, "problems", (str(error),))
    if OPTIMIZER not in choice:
        return None, ()
    place = OptimizerPlace.under(resolved)
    if plan.tensor is not None and plan.tensor.plan is not None:
        cut = next(row for row in plan.tensor.plan.rules.values() if row.style == "attention")
        place = OptimizerPlace(**{**_fields(place), "cut_over_tp": f"{cut.fqn}.in_proj_weight"})
    try:
        optimizer = OPTIMIZERS[choice[OPTIMIZER]](list(model.parameters()))
        if resolved.offload != "none":
            check_host_update(optimizer)
        problem = refusal(optimizer, need_of(optimizer, device=torch.device("cpu")), place)
    except hybrid.HybridError as error:
        problem = str(error)
    return ("optimizer", (problem,)) if problem else (None, ())


_plans: dict[tuple[Any, ...], Any] = {}
_plan = own_forward.plan_own_forward


def _plan_once(model: torch.nn.Module, sample: Any, *, num_chunks: int, split: Any, blocks: Any) -> Any:
    """How a model is cut depends on these alone, and takes a run on fake tensors."""
    key = (id(model), num_chunks, split)
    if key not in _plans:
        try:
            _plans[key] = _plan(model, sample, num_chunks=num_chunks, split=split, blocks=blocks)
        except hybrid.HybridError as error:
            _plans[key] = error
    if isinstance(_plans[key], hybrid.HybridError):
        raise _plans[key]
    return _plans[key]


def _unmeasured(*_: Any, **__: Any) -> Measured:
    """What stages need refuses nothing as long as no limit is given."""
    return Measured(memory=None)


def _fields(place: OptimizerPlace) -> dict[str, Any]:
    return {name: getattr(place, name) for name in OptimizerPlace.__slots__}


@functools.cache
def known_axes() -> dict[str, tuple[Any, ...]]:
    """Settings, and the two axes of things that are not settings."""
    return {MODEL: tuple(MODELS), OPTIMIZER: tuple(OPTIMIZERS), **SETTINGS}
