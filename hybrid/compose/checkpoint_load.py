"""`load_checkpoint`: the training state from any checkpoint, whatever layout wrote it.

choose     the first rank looks for the newest complete checkpoint; the files are verified, a share by each rank
compare    names, shapes and types of everything, on all ranks, all problems at once: nothing is touched before
read       each rank reads the pieces that meet what it holds, straight into its shards      checkpoint/loading.py
settle     shards become parameters everywhere; param groups, scheduler, scaler, sampler, random states
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from hybrid.checkpoint.export import EXTRA_STATE, STATE_FILE
from hybrid.checkpoint.held import HeldState, Region, model_entry, optimizer_entry
from hybrid.checkpoint.loading import read_entry, read_regions
from hybrid.checkpoint.manifest import Entry, Manifest
from hybrid.checkpoint.saving import dtype_name
from hybrid.checkpoint.together import describe
from hybrid.checkpoint.values import decode
from hybrid.compose import checkpoint_groups, training_state
from hybrid.compose.checkpoint_choice import Chosen, choose
from hybrid.compose.checkpoint_job import (
    Job,
    agree,
    begin,
    extra_states,
    held_by,
    layout_record,
    outside_inference_mode,
    path_of,
    persistent_buffers,
    refuse_loading_now,
)
from hybrid.compose.misfits import Misfits
from hybrid.errors import CheckpointError, CollectiveError, HybridError
from hybrid.sharding.optimizer_state import MASTER, OptimizerShards

__all__ = ["LoadedCheckpoint", "load_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """What was loaded.

    Args:
        step: its number.
        path: its folder; None if nothing was there to load (`directory=None` at a first start).
        extra: what was given to the save as `extra`.
        missing: names that the model or the optimizer has and the checkpoint has not (strict=False).
        unexpected: names that only the checkpoint has.
        mismatched: names whose shape or type differs, with both.
        passed_over: newer checkpoints that were not taken, and why.
    """

    step: int
    path: Path | None
    extra: Any = None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()


@outside_inference_mode
def load_checkpoint(
    directory: str | os.PathLike[str] | None,
    model: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | Literal["latest"] = "latest",
    lr_scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    strict: bool = True,
    fallback: bool = False,
    checksums: bool = True,
) -> LoadedCheckpoint:
    """Load what `save_checkpoint` wrote, under any layout. *Collective.*

    Nothing of the model is touched before the files are verified and every name, shape and type is compared.

    Args:
        directory: that of the job's checkpoints, or the folder of one. None: the one of `hybrid run --resume`; without
            one, or if nothing was saved in it so far, nothing is loaded: a first start, of step 0.
        model: weights and buffers are loaded into it; None with an optimizer: only the optimizer's state is loaded.
        optimizer: its state is loaded, which for a model of low precision includes the float32 masters, and with them
            its weights; None with a model: only weights. Neither: the ones that were wrapped.
        step: "latest" is the newest complete one.
        lr_scheduler, scaler, sampler: get the state they were saved with.
        strict: raise for every name that is missing, unexpected or of another shape or type. False loads what fits,
            leaves the rest as it is to the bit, and returns the lists.
        fallback: if the newest is damaged, take the newest that is not, and say so.
        checksums: verify the files' content, not only their sizes.

    With model and optimizer, random states are restored as well: those of each rank under the same layout; under
    another a warning says that dropout masks differ from those of the uninterrupted run.

    Raises:
        CheckpointError: no checkpoint, damaged files, or anything that does not fit, all of it listed.
        CollectiveError: a rank is gone, or did not call within the timeout.
    """
    asked = {"lr_scheduler": lr_scheduler, "scaler": scaler, "sampler": sampler}
    alike: dict[str, Any] = {name: "given" if value is not None else None for name, value in asked.items()}
    alike |= {"step": step, "strict": strict, "fallback": fallback, "checksums": checksums}
    path = None if directory is None else path_of(directory, call="load_checkpoint")
    alike["directory"] = None if path is None else str(path)
    job = begin("load_checkpoint", model, optimizer, alike)
    chosen = choose(job, path, step=step, fallback=fallback, checksums=checksums)
    if chosen is None:
        return LoadedCheckpoint(step=0, path=None)
    plan = _compare(job, chosen, asked, strict=strict)
    _read(job, chosen, plan)
    _settle(job, plan)
    if plan.training.warnings and job.optimizer is not None and job.runtime.mesh.rank == 0:
        warnings.warn(f"load_checkpoint of {chosen.path}: {'; '.join(plan.training.warnings)}", stacklevel=3)
    return LoadedCheckpoint(
        step=chosen.manifest.step,
        path=chosen.path,
        extra=plan.training.extra,
        missing=plan.missing,
        unexpected=plan.unexpected,
        mismatched=plan.mismatched,
        passed_over=chosen.passed_over,
    )


# -- what fits -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What this rank reads, and where it goes."""

    regions: list[Region]
    """Into memory that is there already."""
    state: dict[str, dict[str, Any]]
    """fqn -> new optimizer state; its tensors are filled by `regions`."""
    groups: list[dict[str, Any]] | None
    training: training_state.Restoration
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    extra_states: dict[str, Any] = field(default_factory=dict)


def _compare(job: Job, chosen: Chosen, asked: Mapping[str, Any], *, strict: bool) -> _Plan:
    """What will be read. *Collective.* Raises CheckpointError: what does not fit, all of it."""
    groups = job.optimizer.whole_groups() if job.optimizer is not None else []
    lists = Misfits()
    plan: _Plan | None = None
    failure: BaseException | None = None
    try:
        plan = _compare_here(job, chosen, asked, groups, lists, strict=strict)
    except (HybridError, OSError) as error:
        failure = error
    except Exception as error:  # the document is of another form than a save writes, or the user's objects raise
        failure = CheckpointError(f"{chosen.path / STATE_FILE} cannot be taken: {describe(error)}")
        failure.__cause__ = error
    everyone = agree(lists, failure, runtime=job.runtime, what="load_checkpoint, contents")
    assert plan is not None
    together = Misfits.of_all(everyone)
    parts = ("model.",) * (job.model is not None) + ("optimizer.",) * (job.optimizer is not None)
    unexpected = together.unexpected(name for name in chosen.manifest.entries if name.startswith(parts))
    missing, mismatched = tuple(together.missing), tuple(together.mismatched)
    problems = together.reasons(unexpected, strict=strict)
    if problems:
        hint = "; strict=False loads what fits" if strict and (missing or unexpected or mismatched) else ""
        raise CheckpointError(f"{chosen.path} does not fit: {'; '.join(problems)}{hint}")
    return replace(plan, missing=missing, unexpected=unexpected, mismatched=mismatched)


def _compare_here(
    job: Job, chosen: Chosen, asked: Mapping[str, Any], groups: list[dict[str, Any]], lists: Misfits, *, strict: bool
) -> _Plan:
    """What this rank will read; what does not fit is listed."""
    runtime, manifest = job.runtime, chosen.manifest
    refuse_loading_now(job, call="load_checkpoint")
    held = held_by(runtime)
    runtime.engine.gather.finish()
    document = _read_state(chosen)

    def tensors(name: str) -> torch.Tensor:
        return read_entry(chosen.path, manifest, name)

    def tree(name: str) -> Any:
        return decode(document[name], tensors=tensors, where=name)

    for name, part in (("model", job.model), ("optimizer", job.optimizer)):
        if part is not None and name not in manifest.contents:
            lists.problems.append(f"it has no {name}: it was saved without one")
    regions: list[Region] = []
    if job.model is not None and "model" in manifest.contents:
        wanted = held.parameters("read")
        wanted += held.buffers(persistent_buffers(job.model))
        regions += _fitting(wanted, manifest, lists)
    state: dict[str, dict[str, Any]] = {}
    options = None
    if job.optimizer is not None and "optimizer" in manifest.contents:
        saved = tree("optimizer")
        shards = job.optimizer.hybrid_shards
        known = {fqn for group in saved["groups"] for fqn in group["params"]}
        state, of_optimizer = _optimizer_state(held, shards, manifest, saved["values"], lists, known=known)
        # The full precision of a weight comes with the optimizer's state; the weight itself is that, rounded.
        exact = {model_entry(fqn) for fqn, values in state.items() if MASTER in values}
        regions = [region for region in regions if region.name not in exact] + of_optimizer
        options = checkpoint_groups.fitting(job.optimizer, groups, saved, strict=strict, problems=lists.problems)
    training = training_state.prepare(
        runtime,
        document,
        tensors=tensors,
        saved_layout=manifest.layout,
        layout=layout_record(runtime),
        random=job.model is not None and job.optimizer is not None,
        **asked,
    )
    lists.problems += training.problems
    return _Plan(
        regions=regions,
        state=state,
        groups=options,
        training=training,
        extra_states=tree(EXTRA_STATE) if job.model is not None and EXTRA_STATE in document else {},
    )


def _read_state(chosen: Chosen) -> dict[str, Any]:
    """What is no tensor of a parameter's shape, still encoded."""
    path = chosen.path / STATE_FILE
    if STATE_FILE not in chosen.manifest.files:
        raise CheckpointError(f"{path} is not among the files of the checkpoint's manifest, so it is not verified")
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} is damaged: it is no object but a {type(document).__name__}")
    return document


def _fitting(wanted: list[Region], manifest: Manifest, lists: Misfits) -> list[Region]:
    """Those of the regions that the checkpoint has alike; the others are listed."""
    fitting = []
    for region in wanted:
        name = region.name
        if name not in manifest.entries:  # tied when it was saved, by itself here
            stored = manifest.tied.get(name.removeprefix("model."))
            name = name if stored is None else f"model.{stored}"
        entry = manifest.entries.get(name)
        if entry is None:
            lists.missing.append(region.name)
            continue
        lists.known.add(name)
        if _is_alike(region, entry):
            fitting.append(replace(region, name=name))
        else:
            lists.mismatched.append(
                f"{region.name} ({entry.dtype} {tuple(entry.shape)} in the checkpoint, {dtype_name(region.dtype)} "
                f"{region.shape} here)"
            )
    return fitting


def _is_alike(region: Region, entry: Entry) -> bool:
    saved = getattr(torch, entry.dtype)
    # `amp_configs.buffer_dtype` changes the type of buffers: that is a setting, not another model.
    both_real = region.kind == "buffer" and saved.is_floating_point and region.dtype.is_floating_point
    return tuple(entry.shape) == region.shape and (saved == region.dtype or both_real)


def _optimizer_state(
    held: HeldState,
    shards: OptimizerShards,
    manifest: Manifest,
    values: Mapping[str, Any],
    lists: Misfits,
    *,
    known: set[str],
) -> tuple[dict[str, dict[str, Any]], list[Region]]:
    """Memory for the state that the checkpoint has of what this rank owns, and the regions that fill it.

    Empty for a parameter that had no state when it was saved; left out is one of which it knows nothing.

    Args:
        values: fqn -> what is no tensor of the parameter's shape.
        known: parameters of the optimizer that was saved.
    """
    saved: dict[str, list[str]] = {}
    fqns = set(shards.fqns())
    for name, entry in manifest.entries.items():
        if entry.kind == "optimizer":
            fqn, key = _split(name.removeprefix("optimizer."), fqns)
            if key:
                saved.setdefault(fqn, []).append(key)
                lists.known.add(name)
    state: dict[str, dict[str, Any]] = {}
    regions: list[Region] = []
    for shard in shards.shards():
        if shard.fqn not in known:
            lists.missing.append(f"optimizer.{shard.fqn}")
            continue
        other_shapes = _other_shapes(manifest, shard.fqn, saved.get(shard.fqn, ()), held.global_shape(shard.fqn))
        if other_shapes:
            lists.mismatched += other_shapes
            continue
        if shard.tensor is None:
            continue
        own: dict[str, Any] = dict(values.get(shard.fqn, {}))
        taken = {shard.tensor.data_ptr()}
        for key in saved.get(shard.fqn, ()):
            entry = manifest.entries[optimizer_entry(shard.fqn, key)]
            dtype = getattr(torch, entry.dtype)
            if key == MASTER:
                if shard.bucket.master is not None:
                    assert shard.part is not None
                    own[key] = shard.bucket.slice_view(shard.bucket.master, shard.part)
                continue
            own[key] = shards.memory_for(shard, key, dtype, without=taken)
            taken.add(own[key].data_ptr())
        state[shard.fqn] = own
    found, _ = held.optimizer(shards, state, "read")
    regions += found
    return state, regions


def _split(rest: str, fqns: set[str]) -> tuple[str, str]:
    """fqn and state key, either of which may have dots; the key is empty if the parameter is not of `fqns`."""
    fqn, key = rest, ""
    while fqn and fqn not in fqns:
        fqn, _, more = fqn.rpartition(".")
        key = f"{more}.{key}" if key else more
    return fqn, key if fqn else ""


def _other_shapes(manifest: Manifest, fqn: str, keys: Iterable[str], shape: tuple[int, ...]) -> list[str]:
    """The optimizer's entries of a parameter that is of another shape here; as its own entry says, or theirs."""
    own = manifest.entries.get(model_entry(fqn))
    names = [optimizer_entry(fqn, key) for key in keys]
    shapes = {name: tuple(manifest.entries[name].shape) for name in names}
    if own is not None and tuple(own.shape) != shape:
        return names or [f"optimizer.{fqn}"]
    return [f"{name} ({saved} in the checkpoint, {shape} here)" for name, saved in shapes.items() if saved != shape]


# -- reading -------------------------------------------------------------------------------------------------------


def _read(job: Job, chosen: Chosen, plan: _Plan) -> None:
    """Fill the regions. *Collective.*"""
    engine = job.runtime.engine
    engine.before_update(engine.buckets)
    try:
        read_regions(plan.regions, chosen.path, chosen.manifest, group=job.runtime.mesh.host_world())
    except (CheckpointError, CollectiveError) as error:
        raise type(error)(
            f"{chosen.path} was verified but could not be read ({error}); model and optimizer are loaded in part: load "
            "again before going on"
        ) from error.__cause__


def _settle(job: Job, plan: _Plan) -> None:
    """What was read becomes the state of the job. *Collective.*"""
    engine = job.runtime.engine
    engine.after_update(engine.all_buckets(), deferred=False)
    if job.model is not None:
        for name, module in extra_states(job.model):
            if name in plan.extra_states:
                module.set_extra_state(plan.extra_states[name])
    if job.optimizer is not None and plan.groups is not None:
        shards = job.optimizer.hybrid_shards
        for shard in shards.shards():
            if shard.tensor is None or shard.fqn not in plan.state:
                continue
            own = {key: value for key, value in plan.state[shard.fqn].items() if key != MASTER}
            job.optimizer.state.pop(shard.tensor, None)
            if own:
                job.optimizer.state[shard.tensor] = shards.at_home(shard, own)
        checkpoint_groups.apply(job.optimizer, plan.groups)
    plan.training.apply()
