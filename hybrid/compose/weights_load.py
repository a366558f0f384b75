"""`load_weights`: plain weights, as others write them, straight into the shards of any layout.

find       the first rank looks which files are meant, and reads their headers
compare    names, shapes and types, on all ranks, all problems at once: nothing is touched before
fill       each rank reads what it holds, and nothing else                                checkpoint/weight_source.py
settle     shards and masters become the parameters everywhere
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybrid.checkpoint.export import MODEL_PREFIX
from hybrid.checkpoint.held import Region
from hybrid.checkpoint.manifest import Entry
from hybrid.checkpoint.saving import dtype_name
from hybrid.checkpoint.weight_source import Found, WeightSource, find_weights, open_weights
from hybrid.compose.checkpoint_job import (
    Job,
    agree,
    begin,
    distinct_buffers,
    extra_states,
    held_by,
    outside_inference_mode,
    path_of,
    refuse_loading_now,
    tied_names,
)
from hybrid.compose.misfits import Misfits
from hybrid.compose.model import DistributedModel
from hybrid.errors import CheckpointError, CollectiveError

__all__ = ["LoadedWeights", "load_weights"]

Rename = Callable[[str], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """What was not loaded; all empty with `strict=True`.

    Args:
        missing: names that the model has and the files have not.
        unexpected: names that only the files have.
        mismatched: names whose shape or type differs, with both.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()


@outside_inference_mode
def load_weights(
    model: Any,
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    strict: bool = True,
    rename: Rename | None = None,
) -> LoadedWeights:
    """Load plain weights, such as a published model's, into a wrapped model, under any layout. *Collective.*

    Each rank reads from the files what it holds; nothing is gathered or sent. Names and shapes are those of the plain
    model's `state_dict()`. The optimizer's state and all else but the weights stay as they are; fp32 masters become
    the values in the files, and the next step goes on from them. Nothing of the model is touched before every name,
    shape and type has been compared. No code in the files is run.

    Args:
        model: from `distributed_model`. One that was built on the meta device is wrapped first, with
            `init="by_name"`: then no rank computes initial values of what it does not hold.
        path: a safetensors file, a file of `torch.save` with a state dict, an index of several of them, a folder as
            `transformers` writes it, or a list of files. Every rank must see them.
        strict: raise for every name that is missing, unexpected or of another shape or type. False loads what fits,
            leaves the rest as it is to the bit, and returns the lists.
        rename: name in the files -> name in the model, or None for what is to be left out:
            `rename=lambda name: name.removeprefix("module.")`.

    Floating point values are converted to the model's own type (bf16 files into an fp32 model and the other way round),
    except the 8-bit ones, which mean little without their scales. Of tied weights the files may have one name, or all
    of them with the same values.

    Raises:
        CheckpointError: no or damaged files, or anything that does not fit, all of it listed.
        CollectiveError: a rank is gone, or did not call within the timeout.
    """
    if isinstance(model, nn.Module) and not isinstance(model, DistributedModel) and _is_on_meta(model):
        raise CheckpointError(
            f"load_weights: this {type(model).__name__} is on the meta device and has no memory yet; wrap it first: "
            "model = hybrid.distributed_model(model, init='by_name'), and then hybrid.load_weights(model, ...)"
        )
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    absolute = [path_of(one, call="load_weights", what="the path of a file or a folder") for one in paths]
    asked = {"path": [str(one) for one in absolute], "strict": strict, "rename": None if rename is None else "given"}
    job = begin("load_weights", model, None, asked)
    found = _find(job, absolute)
    plan = _compare(job, found, rename, strict=strict)
    _fill(job, plan)
    return plan.loaded


def _is_on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _find(job: Job, paths: Sequence[Path]) -> Found:
    """The files, as the first rank sees them. *Collective.*"""
    found: Found | None = None
    problem: BaseException | None = None
    if job.runtime.mesh.rank == 0:
        try:
            found = find_weights(paths)
        except (CheckpointError, OSError) as error:
            problem = error
    found = agree(found, problem, runtime=job.runtime, what="load_weights, files")[0]
    assert found is not None
    return found


# -- what fits -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What this rank reads, and where it goes."""

    source: WeightSource
    regions: list[Region]
    extra: list[tuple[nn.Module, str]]
    """Modules with state of their own, and its name in the files."""
    loaded: LoadedWeights = field(default_factory=LoadedWeights)


def _compare(job: Job, found: Found, rename: Rename | None, *, strict: bool) -> _Plan:
    """What will be read. *Collective.* Raises CheckpointError: what does not fit, all of it."""
    lists = Misfits()
    plan: _Plan | None = None
    failure: BaseException | None = None
    try:
        source = open_weights(found)
        plan = _compare_here(job, source if rename is None else source.renamed(rename), lists)
    except Exception as error:  # `rename` is the user's
        failure = error
    everyone = agree(lists, failure, runtime=job.runtime, what="load_weights, contents")
    assert plan is not None
    together = Misfits.of_all(everyone)
    unexpected = together.unexpected(plan.source.entries)
    loaded = LoadedWeights(
        missing=tuple(together.missing), unexpected=unexpected, mismatched=tuple(together.mismatched)
    )
    problems = together.reasons(unexpected, strict=strict)
    if problems:
        raise CheckpointError(f"{found.where} does not fit: {'; '.join(problems)}{_hint(loaded) if strict else ''}")
    return replace(plan, loaded=loaded)


def _compare_here(job: Job, source: WeightSource, lists: Misfits) -> _Plan:
    assert job.model is not None
    refuse_loading_now(job, call="load_weights")
    runtime, held = job.runtime, held_by(job.runtime)
    runtime.engine.gather.finish()
    buffers, tied_buffers = distinct_buffers(job.model)
    tied = tied_names(runtime)
    wanted = held.parameters("read") + held.buffers(buffers)
    others: dict[str, list[str]] = {}
    for name, stored in (tied | tied_buffers).items():
        others.setdefault(stored, []).append(name)
    regions = []
    for region in wanted:
        fqn = region.name.removeprefix(MODEL_PREFIX)
        names = [name for name in (fqn, *others.get(fqn, ())) if name in source.entries]
        if not names:
            lists.missing.append(fqn)
            continue
        lists.known.update(names)
        entry = source.entries[names[0]]
        if _fits(region, entry):
            regions.append(replace(region, name=names[0]))
        else:
            lists.mismatched.append(
                f"{fqn} ({entry.dtype} {tuple(entry.shape)} in the files, {dtype_name(region.dtype)} {region.shape} "
                "here)"
            )
    _compare_tied(source, others, lists, rank=runtime.mesh.rank, world_size=runtime.mesh.world_size)
    extra = list(extra_states(job.model))
    lists.known.update(name for name, _ in extra)
    lists.missing += [name for name, _ in extra if name not in source.entries]
    return _Plan(
        source=source, regions=regions, extra=[(module, name) for name, module in extra if name in source.entries]
    )


def _fits(region: Region, entry: Entry) -> bool:
    stored = getattr(torch, entry.dtype)
    both_real = stored.is_floating_point and region.dtype.is_floating_point
    may_convert = both_real and min(stored.itemsize, region.dtype.itemsize) > 1
    return tuple(entry.shape) == region.shape and (stored == region.dtype or may_convert)


def _compare_tied(
    source: WeightSource, others: Mapping[str, Sequence[str]], lists: Misfits, *, rank: int, world_size: int
) -> None:
    """What is one tensor in the model must be one value in the files; each rank looks at a share."""
    for number, (stored, names) in enumerate(sorted(others.items())):
        there = [name for name in (stored, *names) if name in source.entries]
        if number % world_size != rank:
            continue
        for name in there[1:]:
            if not source.are_equal(there[0], name):
                lists.problems.append(
                    f"{there[0]} and {name} are one tensor in the model (tied), and differ in the files: build the "
                    "model without the tie, or leave one of them out by rename"
                )


def _hint(loaded: LoadedWeights) -> str:
    """What to try; a prefix that all names of one side have is seen by the first of them."""
    missing, unexpected = loaded.missing, loaded.unexpected
    if missing and unexpected:
        longer = next((name for name in missing if unexpected[0].endswith(f".{name}")), None)
        if longer is not None:
            prefix = unexpected[0].removesuffix(longer)
            if all(name.startswith(prefix) for name in unexpected):
                return f"; the files have a prefix: rename=lambda name: name.removeprefix({prefix!r})"
        shorter = next((name for name in unexpected if missing[0].endswith(f".{name}")), None)
        if shorter is not None:
            prefix = missing[0].removesuffix(shorter)
            return f"; the model has a prefix: rename=lambda name: {prefix!r} + name"
    if missing or unexpected or loaded.mismatched:
        return "; strict=False loads what fits"
    return ""


# -- reading -------------------------------------------------------------------------------------------------------


def _fill(job: Job, plan: _Plan) -> None:
    """Read this rank's part, and make it the parameters of all ranks. *Collective.*"""
    runtime, engine = job.runtime, job.runtime.engine
    engine.before_update(engine.buckets)
    try:
        plan.source.fill(plan.regions, group=runtime.mesh.host_world())
    except (CheckpointError, CollectiveError) as error:
        raise type(error)(
            f"{plan.source.where} could not be read ({error}); the model is loaded in part: load again before going on"
        ) from error.__cause__
    engine.after_update(engine.all_buckets(), deferred=False)
    for module, name in plan.extra:
        module.set_extra_state(plan.source.tensor(name).clone())
