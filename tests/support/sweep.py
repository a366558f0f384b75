"""Which choices are swept, and the rules that they give."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, count
from typing import Any

from tests.support.axes import MODEL, OPTIMIZER, SETTINGS, Choice, switched_on
from tests.support.models import MODELS
from tests.support.optimizers import OPTIMIZERS
from tests.support.page import FEATURES
from tests.support.rules import Rule, find_rules, pairs_of, random_choices, singles_of

__all__ = [
    "FOR_MODELS",
    "FOR_OPTIMIZERS",
    "all_rules",
    "model_choices",
    "optimizer_choices",
    "other_models",
    "setting_choices",
    "setting_rules",
]

# What the checks of models and optimizers can see of a strategy.
# Names in them (units, patterns) are left out: whether a model has a name is no question of combinations.
FOR_MODELS: dict[str, tuple[Any, ...]] = {
    path: SETTINGS[path]
    for path in (
        "sharding_configs.stage",
        "sharding_configs.offload",
        "sharding_configs.grad_dtype",
        "sharding_configs.overlap_param_gather",
        "tensor_parallel_configs.degree",
        "tensor_parallel_configs.sequence_parallel",
        "tensor_parallel_configs.verify",
        "pipeline_configs.degree",
        "pipeline_configs.schedule",
        "pipeline_configs.virtual_stages",
        "accumulate_steps",
        "amp",
        "amp_configs.level",
        "amp_configs.buffer_dtype",
        "recompute",
        "recompute_configs.policy",
        "compile",
        "compile_configs.backend",
    )
} | {"pipeline_configs.split": ("auto", "uniform")}
FOR_OPTIMIZERS: dict[str, tuple[Any, ...]] = {
    path: SETTINGS[path]
    for path in (
        "sharding_configs.stage",
        "sharding_configs.shard_size",
        "sharding_configs.partition",
        "sharding_configs.offload",
        "tensor_parallel_configs.degree",
        "pipeline_configs.degree",
    )
}


def setting_choices(number: int = 0, *, seed: int = 0) -> Iterator[Choice]:
    """Each value, each two of them, each with every feature, and so many others; the sections switched on."""
    yield from map(switched_on, singles_of(SETTINGS), count())
    yield from map(switched_on, pairs_of(SETTINGS), count())
    for feature in FEATURES.values():
        yield from map(switched_on, ({**feature, **choice} for choice in singles_of(SETTINGS)), count())
    yield from map(switched_on, random_choices(SETTINGS, number, seed=seed, most=8), count())


def model_choices(number: int, *, seed: int = 0) -> Iterator[Choice]:
    """Each model with each value and each feature, and so many others."""
    for model in MODELS:
        yield {MODEL: model}
        yield from ({MODEL: model, **choice} for choice in map(switched_on, singles_of(FOR_MODELS), count()))
        yield from ({MODEL: model, **feature} for feature in FEATURES.values())
    yield from other_models(number, seed=seed)


def other_models(number: int, *, seed: int) -> Iterator[Choice]:
    """So many with each model."""
    for place, model in enumerate(MODELS):
        more = random_choices(FOR_MODELS, number, seed=seed + place, most=6)
        yield from ({MODEL: model, **choice} for choice in map(switched_on, more, count()))


def optimizer_choices(number: int, *, seed: int = 0) -> Iterator[Choice]:
    """Each optimizer with each value and each two of them, and so many others."""
    for optimizer in OPTIMIZERS:
        yield {OPTIMIZER: optimizer}
        more = random_choices(FOR_OPTIMIZERS, number, seed=seed, most=4)
        choices = chain(singles_of(FOR_OPTIMIZERS), pairs_of(FOR_OPTIMIZERS), more)
        yield from ({OPTIMIZER: optimizer, **choice} for choice in map(switched_on, choices, count()))


def setting_rules() -> list[Rule]:
    return find_rules(SETTINGS, setting_choices())


def all_rules(number: int = 12) -> list[Rule]:
    """Those of settings, of models and of optimizers."""
    settings = setting_rules()
    axes = {MODEL: tuple(MODELS), **FOR_MODELS}
    models = find_rules(axes, model_choices(number), known=settings)
    of_optimizers = {OPTIMIZER: tuple(OPTIMIZERS), **FOR_OPTIMIZERS}
    optimizers = find_rules(of_optimizers, optimizer_choices(number // 3), known=settings)
    return [*settings, *models, *optimizers]
