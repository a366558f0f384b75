"""Collect what the user said about each setting, from every place where it can be said.

The same setting may stand in several places (`shard_size` in `sharding_configs`, `sharding_degree` in
`hybrid_configs`). Equal values pass; differing ones are refused with all places named: there is no order of
precedence to know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybrid.strategy.choice import Choice
from hybrid.strategy.fleet_fields import fleet_field, mapped_values
from hybrid.strategy.settings import Settings

if TYPE_CHECKING:
    from hybrid.strategy.strategy import DistributedStrategy

__all__ = ["FLAGS", "Gathered", "gather", "walk"]

#: Flag -> its section.
FLAGS = {
    "sharding": "sharding_configs",
    "tensor_parallel": "tensor_parallel_configs",
    "pipeline": "pipeline_configs",
    "amp": "amp_configs",
    "recompute": "recompute_configs",
    "gradient_merge": "gradient_merge_configs",
    "compile": "compile_configs",
    "profile": "profile_configs",
}

# Setting -> the fields that can give it; the default is that of the first.
_PLACES: dict[str, tuple[str, ...]] = {
    "pp": ("pipeline_configs.degree", "hybrid_configs.pp_degree"),
    "dp_replicate": ("hybrid_configs.dp_degree",),
    "shard_size": ("sharding_configs.shard_size", "hybrid_configs.sharding_degree"),
    "cp": ("hybrid_configs.sep_degree",),
    "tp": ("tensor_parallel_configs.degree", "hybrid_configs.mp_degree"),
    "order": ("hybrid_configs.order",),
    "zero_stage": ("sharding_configs.stage",),
    "bucket_bytes": ("sharding_configs.bucket_bytes",),
    "overlap_comm": ("sharding_configs.overlap_comm",),
    "overlap_param_gather": ("sharding_configs.overlap_param_gather",),
    "grad_reduce": ("sharding_configs.grad_reduce",),
    "grad_dtype": ("sharding_configs.grad_dtype",),
    "reduce_dtype": ("sharding_configs.reduce_dtype",),
    "partition": ("sharding_configs.partition",),
    "units": ("sharding_configs.units",),
    "prefetch": ("sharding_configs.prefetch",),
    "reshard_after": ("sharding_configs.reshard_after",),
    "offload": ("sharding_configs.offload",),
    "sequence_parallel": ("tensor_parallel_configs.sequence_parallel",),
    "tensor_plan": ("tensor_parallel_configs.plan",),
    "tensor_verify": ("tensor_parallel_configs.verify",),
    "schedule": ("pipeline_configs.schedule",),
    "virtual_stages": ("pipeline_configs.virtual_stages",),
    "split": ("pipeline_configs.split",),
    "memory_limit_bytes": ("pipeline_configs.memory_limit_bytes",),
    "amp": ("amp",),
    "amp_dtype": ("amp_configs.dtype",),
    "amp_level": ("amp_configs.level",),
    "amp_custom_fp32": ("amp_configs.custom_fp32",),
    "amp_buffer_dtype": ("amp_configs.buffer_dtype",),
    "amp_init_loss_scaling": ("amp_configs.init_loss_scaling",),
    "amp_growth_interval": ("amp_configs.growth_interval",),
    "amp_growth_factor": ("amp_configs.growth_factor",),
    "amp_backoff_factor": ("amp_configs.backoff_factor",),
    "recompute": ("recompute",),
    "recompute_units": ("recompute_configs.units",),
    "recompute_policy": ("recompute_configs.policy",),
    "recompute_preserve_rng": ("recompute_configs.preserve_rng",),
    "compile": ("compile",),
    "compile_units": ("compile_configs.units",),
    "compile_backend": ("compile_configs.backend",),
    "compile_mode": ("compile_configs.mode",),
    "compile_dynamic": ("compile_configs.dynamic",),
    "compile_fullgraph": ("compile_configs.fullgraph",),
    "profile": ("profile",),
    "profile_steps": ("profile_configs.steps",),
    "profile_warmup": ("profile_configs.warmup",),
    "profile_directory": ("profile_configs.directory",),
    "micro_batch_size": ("micro_batch_size", "pipeline_configs.micro_batch_size"),
    "accumulate_steps": (
        "accumulate_steps",
        "pipeline_configs.accumulate_steps",
        "gradient_merge_configs.k_steps",
    ),
    "global_batch_size": ("global_batch_size",),
    "max_norm": ("gradient_clipping.max_norm",),
    "norm_type": ("gradient_clipping.norm_type",),
    "clip_value": ("gradient_clipping.clip_value",),
    "loss_reduction": ("loss_reduction",),
    "seed": ("seed",),
    "timeout_seconds": ("timeout_seconds",),
}
_DEGREES = frozenset({"pp", "dp_replicate", "shard_size", "cp", "tp"})


@dataclass(slots=True)
class Gathered:
    """What was said: one choice per setting, the settings that are contested, and what to tell the user."""

    choices: dict[str, Choice] = field(default_factory=dict)
    contested: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fleet: list[tuple[str, Any, str]] = field(default_factory=list)
    """Fleet's fields that were given: path, value, what became of it."""


def walk(settings: Settings) -> Iterator[Settings]:
    """These settings and all sections under them."""
    yield settings
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, Settings):
            yield from walk(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """One place that gives a setting a value; `shown` is how the user wrote it there."""

    path: str
    value: Any
    shown: str


def gather(strategy: DistributedStrategy) -> Gathered:
    """One choice for every setting; contradictions are problems, and both sides of them are named."""
    found = Gathered()
    claims: dict[str, list[_Claim]] = {name: [] for name in _PLACES}
    for name, places in _PLACES.items():
        for place in places:
            section, key = _section(strategy, place)
            if section is not None and section.is_set(key):
                value = getattr(section, key)
                shown = repr(list(value)) if isinstance(value, tuple) else repr(value)
                claims[name].append(_Claim(path=section.spelling(key), value=value, shown=shown))
    for section in walk(strategy):
        for key, value in section.fleet_settings().items():
            _add_fleet_field(section, key, value, claims, found)
    for name, said in claims.items():
        found.choices[name] = _settle(strategy, name, said, found)
    return found


def _add_fleet_field(section: Settings, key: str, value: Any, claims: dict[str, list[_Claim]], found: Gathered) -> None:
    path = section.path_of(key)
    answer = fleet_field(section.PATH, key)
    assert answer is not None, path  # nothing else gets past the assignment
    note = f"asks for nothing; {answer.note}" if answer.refused else answer.note
    found.fleet.append((path, value, note))
    for setting, ours in mapped_values(answer, value).items():
        shown = repr(value) if ours == value else f"{value!r} (as {setting}: {ours!r})"
        claims[setting].append(_Claim(path=path, value=ours, shown=shown))


def _section(strategy: DistributedStrategy, place: str) -> tuple[Settings | None, str]:
    path, _, key = place.rpartition(".")
    section = getattr(strategy, path) if path else strategy
    return section, key


def _settle(strategy: DistributedStrategy, name: str, said: list[_Claim], found: Gathered) -> Choice:
    """One choice out of all that was said about a setting."""
    if name in _DEGREES and any(claim.value != -1 for claim in said):
        said = [claim for claim in said if claim.value != -1]  # "derive it" gives way to a number
    if not said:
        section, key = _section(strategy, _PLACES[name][0])
        value = section.default(key) if section is not None else _CLIPPING_DEFAULTS[name]
        return Choice(value=value, origin="default", where=_PLACES[name][0])
    first = said[0]
    if all(claim.value == first.value for claim in said):
        where = " = ".join(claim.path for claim in said)
        return Choice(value=first.value, origin="user", where=where, written=first.shown)
    found.contested.add(name)
    each = " but ".join(f"{claim.path} = {claim.shown}" for claim in said)
    found.problems.append(
        f"{name} is given in {len(said)} places with different values: {each}; keep one of them, or make them equal"
    )
    return Choice(value=first.value, origin="user", where=first.path, written=first.shown)


_CLIPPING_DEFAULTS = {"max_norm": None, "norm_type": 2.0, "clip_value": None}
