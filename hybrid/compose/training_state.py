"""What a run is besides model and optimizer: schedule, loss scale, place in the data, `extra`, random numbers.

    save   collect            states of what was given, on this rank
           check_agreement    all ranks have the same                                          *collective*
           random_record      this rank's generators
    load   check              everything is compared and tried, nothing is set: problems and warnings
           restore            set

All ranks must have the same scheduler, scaler, sampler and `extra`: one copy is saved, for any number of ranks to load.
What differs in `extra` (a rank's own loss, a clock) is refused with its place; saving the first rank's would lose the
others' in silence. Random states are each rank's own, and go back to it where the layout is the same.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from xxhash import xxh3_64, xxh3_128

from hybrid.checkpoint.values import CODE_TYPES, encode
from hybrid.collectives import ops
from hybrid.compose.runtime import Runtime
from hybrid.data.sampler import DistributedBatchSampler
from hybrid.errors import CheckpointError, HybridError
from hybrid.rng import check_random_states, random_states, set_random_states
from hybrid.tensor.region import CutRegion

__all__ = ["Restored", "check", "check_agreement", "collect", "random_record", "restore"]

_REMEDIES = {
    "lr_scheduler": "step it alike on all ranks (ReduceLROnPlateau with a loss that all of them have)",
    "scaler": "call scaler.update() on all ranks alike",
    "sampler": "all ranks must have read the same number of batches",
    "extra": "give the same on all ranks: one rank's value broadcast, or all ranks' values gathered in a list",
}

# Who draws which random numbers does not depend on how state is cut.
_NO_MATTER_FOR_RANDOM = ("zero_stage", "shard_size", "partition", "bucket_bytes")


# -- saving ------------------------------------------------------------------------------------------------------


def collect(
    runtime: Runtime, *, lr_scheduler: Any = None, scaler: Any = None, sampler: Any = None, extra: Any = None
) -> dict[str, Any]:
    """Name -> state of each that was given, and of the strategy's own loss scaler (float16).

    The trees refer to what the objects refer to: `encode` them before training goes on.

    Args:
        lr_scheduler, scaler, sampler: an object with `state_dict()` and `load_state_dict()`; a list or a dict of such;
            or a state itself, as `sampler.state_dict(num_batches=...)` gives it. Functions that a scheduler holds are
            left out, as torch leaves out those of LambdaLR: whoever builds it again gives them again.
        extra: what `encode` takes.

    Raises:
        CheckpointError: all that cannot be saved, with its place.
    """
    problems: list[str] = []
    trees: dict[str, Any] = {}
    scaler, problem = _chosen_scaler(runtime, scaler)
    problems += [problem] if problem else []
    given = {"lr_scheduler": lr_scheduler, "scaler": scaler, "sampler": sampler, "extra": extra}
    for name, value in given.items():
        if value is None:
            continue
        try:
            trees[name] = value if name == "extra" else _state_of(name, value)
            encode(trees[name], where=name, tensors={})
        except HybridError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("; ".join(problems))
    return trees


def check_agreement(runtime: Runtime, trees: Mapping[str, Any]) -> None:
    """Compare what `collect` returned over all ranks. *Collective* over the world; sends some bytes if all agree.

    Raises:
        CheckpointError: the ranks were given different things; on all of them, with the first difference of each.
    """
    world = runtime.mesh.world
    mine = {name: list(_leaves(tree, name)) for name, tree in trees.items()}
    digests = {name: xxh3_128(repr(leaves).encode()).hexdigest() for name, leaves in mine.items()}
    everyone = ops.all_gather_object(digests, group=world)
    if all(theirs == everyone[0] for theirs in everyone):
        return
    problems = []
    for name, remedy in _REMEDIES.items():
        found = [theirs.get(name) for theirs in everyone]
        with_it = [rank for rank, digest in enumerate(found) if digest is not None]
        if 0 < len(with_it) < len(found):
            without = [rank for rank in range(len(found)) if rank not in with_it]
            problems.append(f"{name} was given on ranks {with_it} and not on ranks {without}; give it on all")
        elif len(set(found)) > 1:
            all_leaves = ops.all_gather_object(mine[name], group=world)
            rank = next(rank for rank, digest in enumerate(found) if digest != found[0])
            problems.append(f"{_first_difference(all_leaves[0], all_leaves[rank], rank)}; {remedy}")
    raise CheckpointError("the ranks do not save the same: " + "; ".join(problems))


def random_record(runtime: Runtime) -> dict[str, torch.Tensor]:
    """The states of this rank's generators, to be saved between two steps."""
    _leave_regions(runtime)
    return random_states()


def _leave_regions(runtime: Runtime) -> None:
    """Close the cut regions that a forward left open, as the next forward would: their streams are no run's own."""
    model = None if runtime.model is None else runtime.model()
    for module in () if model is None else model.modules():
        region = getattr(module, "tensor_parallel_region", None)
        if isinstance(region, CutRegion):
            region.leave()


def _chosen_scaler(runtime: Runtime, scaler: Any) -> tuple[Any, str]:
    """The caller's scaler, else the strategy's; None for one that is switched off. And what is wrong, or ""."""
    if scaler is None or scaler is runtime.scaler:
        return runtime.scaler, ""
    if runtime.scaler is not None:
        return None, (
            "two loss scalers: the strategy's (amp_configs.dtype = 'float16') and the one given as scaler; leave "
            "`scaler` out, or the strategy's amp"
        )
    if isinstance(scaler, torch.amp.GradScaler) and not scaler.is_enabled():
        return None, ""
    return scaler, ""


def _has(value: Any, method: str) -> bool:
    return callable(getattr(value, method, None))


def _state_of(path: str, given: Any) -> Any:
    if isinstance(given, list | tuple):
        return [_state_of(f"{path}[{index}]", one) for index, one in enumerate(given)]
    if isinstance(given, Mapping) and not _has(given, "state_dict"):
        if not any(_has(one, "state_dict") for one in given.values()):
            return dict(given)  # a state already
        return {key: _state_of(f"{path}[{key!r}]", one) for key, one in given.items()}
    if not _has(given, "state_dict"):
        raise CheckpointError(
            f"{path} is a {type(given).__name__}, which has no state_dict() and load_state_dict(); "
            + ("use hybrid.DistributedBatchSampler" if path == "sampler" else "leave it out, or write them")
        )
    try:
        state = given.state_dict()
    except Exception as error:
        raise CheckpointError(f"{path}: its state_dict() raised {type(error).__name__}: {error}") from error
    return _without_code(state) if isinstance(given, LRScheduler) else state


def _without_code(state: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in state.items() if not isinstance(value, CODE_TYPES)}
    if "_schedulers" in kept:  # of SequentialLR and ChainedScheduler: states of their parts
        kept["_schedulers"] = [_without_code(one) for one in kept["_schedulers"]]
    return kept


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """(place, what is there) of all of a tree that `encode` takes, in an order that values decide."""
    if isinstance(value, list | tuple):
        yield path, f"a {type(value).__name__} of {len(value)}"
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif isinstance(value, dict | argparse.Namespace):
        items = value if isinstance(value, dict) else vars(value)
        yield path, f"a {type(value).__name__} of {len(items)}"
        for key, item in sorted(items.items(), key=lambda pair: repr(pair[0])):
            yield from _leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, set | frozenset):
        yield path, f"a {type(value).__name__} of {sorted(map(repr, value))}"
    elif isinstance(value, torch.Tensor | np.ndarray):
        plain = torch.as_tensor(value).detach().resolve_conj().resolve_neg().cpu().contiguous()
        checksum = xxh3_64(memoryview(plain.reshape(-1).view(torch.uint8).numpy())).hexdigest()
        yield path, f"a {type(value).__name__} of {plain.dtype}, shape {tuple(plain.shape)}, checksum {checksum}"
    else:
        yield path, repr(value)


def _first_difference(first: list[tuple[str, str]], other: list[tuple[str, str]], rank: int) -> str:
    for (path, text), (other_path, other_text) in zip_longest(first, other, fillvalue=("", "")):
        if path != other_path:
            return f"rank 0 has {path or 'nothing more'} where rank {rank} has {other_path or 'nothing more'}"
        if text != other_text:
            return f"{path} is {text} on rank 0 and {other_text} on rank {rank}"
    raise AssertionError("two trees with different digests and equal leaves")


# -- loading -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a checkpoint has for this rank, compared and tried; `restore` sets it.

    problems: why it must not be set; empty if it may.
    warnings: what the checkpoint has and nobody asked for, what is not restored. The same on all ranks.
    extra: as it was saved; None if there was none.
    loads: (place, object, its state).
    random: this rank's generators; None: they stay as they are.
    """

    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    extra: Any
    loads: tuple[tuple[str, Any, Any], ...]
    random: Mapping[str, torch.Tensor] | None


def check(
    runtime: Runtime,
    document: Mapping[str, Any],
    asked: Mapping[str, Any],
    *,
    layout: Mapping[str, Any],
    own_layout: Mapping[str, Any],
    random: bool,
) -> Restored:
    """Compare and try what the checkpoint has for these objects; sets nothing, raises nothing.

    Args:
        document: name -> tree that `collect` gave; under "random" the list of all ranks' `random_record`s.
        asked: "lr_scheduler", "scaler", "sampler" -> what to load into, of the same form as at the save; None: left as
            it is.
        layout, own_layout: of the run that saved, and of this one, in one form.
        random: whether a run goes on: generators are put back, and the scale of the strategy's own scaler.
    """
    problems: list[str] = []
    notes: list[str] = []
    loads: list[tuple[str, Any, Any]] = []
    scaler, problem = _chosen_scaler(runtime, asked.get("scaler"))
    if problem:
        problems.append(problem)
    is_own = asked.get("scaler") is None  # the strategy's, if any: a checkpoint of another precision has none
    if is_own and not random:
        scaler = None
    for name, given in {**asked, "scaler": scaler}.items():
        if given is None:
            if name in document and not (problem and name == "scaler"):
                notes.append(f"the checkpoint has a state of {name}, which is not loaded: none was given")
        elif name in document:
            for path, target, state in _pairs(name, given, document[name], problems):
                problems += _misfits(path, target, state)
                loads.append((path, target, state))
        elif name == "scaler" and is_own:
            notes.append(f"the checkpoint has no loss scale: it starts at {given.get_scale():g}")
        else:
            problems.append(f"{name} was given, and the checkpoint has none; leave it out to start it afresh")
    record = None
    if random:
        record, note = _own_random(runtime, document.get("random"), layout, own_layout, problems)
        notes += [note] if note else []
    return Restored(
        problems=tuple(problems),
        warnings=tuple(notes),
        extra=document.get("extra"),
        loads=tuple(loads),
        random=record,
    )


def restore(runtime: Runtime, restored: Restored) -> None:
    """Set everything that `check` found; if an object refuses its state after all, those before it get theirs back.

    Raises:
        CheckpointError: an object refused.
    """
    assert not restored.problems, restored.problems
    before: list[tuple[Any, Any]] = []
    for path, target, state in restored.loads:
        try:
            before.append((target, copy.deepcopy(_state_of(path, target))))
            target.load_state_dict(state)
        except Exception as error:
            for done, old in reversed(before):
                with suppress(Exception):  # the first error is the one to see
                    done.load_state_dict(old)
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{path}: its load_state_dict() raised {reason}") from error
    if restored.random is not None:
        _leave_regions(runtime)  # or the next forward would put an older state over the one set here
        set_random_states(restored.random)


def _pairs(path: str, given: Any, state: Any, problems: list[str]) -> Iterator[tuple[str, Any, Any]]:
    """Each object with its state; notes what does not pair."""
    if isinstance(given, list | tuple):
        if not isinstance(state, list) or len(state) != len(given):
            saved = f"a list of {len(state)}" if isinstance(state, list) else "one"
            problems.append(f"{path}: a list of {len(given)} was given, the checkpoint has {saved}")
            return
        for index, (one, part) in enumerate(zip(given, state, strict=True)):
            yield from _pairs(f"{path}[{index}]", one, part, problems)
    elif isinstance(given, Mapping) and not _has(given, "load_state_dict"):
        if not isinstance(state, dict) or set(state) != set(given):
            saved = f"{list(state)}" if isinstance(state, dict) else "a list"
            problems.append(f"{path}: a dict of {list(given)} was given, the checkpoint has {saved}")
            return
        for key, one in given.items():
            yield from _pairs(f"{path}[{key!r}]", one, state[key], problems)
    elif not _has(given, "load_state_dict"):
        problems.append(f"{path} is a {type(given).__name__}, which has no load_state_dict()")
    else:
        yield path, given, state


def _misfits(path: str, target: Any, state: Any) -> list[str]:
    """Why an object would not take a state; as far as can be told without changing it."""
    if not isinstance(state, dict):
        return [f"{path}: one object was given, the checkpoint has a {type(state).__name__}"]
    if isinstance(target, torch.amp.GradScaler):
        missing = sorted(set(target.state_dict()) - set(state))
        return [f"{path}: the checkpoint's state has no {', '.join(missing)}"] if missing else []
    if isinstance(target, DistributedBatchSampler):
        trial: Any = copy.copy(target)
    elif isinstance(target, LRScheduler):
        if found := _misfits_of_scheduler(path, target, state):
            return found
        optimizer = target.optimizer
        try:
            trial = copy.deepcopy(target, {id(optimizer): optimizer})
        except Exception:
            return []  # it holds what cannot be copied
    else:
        return []  # a copy of a stranger may cost anything: `restore` takes a refusal back
    try:
        trial.load_state_dict(copy.deepcopy(state))
    except Exception as error:
        return [f"{path}: {error}" if isinstance(error, HybridError) else f"{path}: {type(error).__name__}: {error}"]
    return []


def _misfits_of_scheduler(path: str, scheduler: LRScheduler, state: dict[str, Any]) -> list[str]:
    """torch's schedulers take the state of any other without a word, and fail, or run wrong, at a later step."""
    own = _state_of(path, scheduler)
    # Names with an underscore are torch's bookkeeping, which grows with its versions.
    mine, saved = ({key for key in keys if not str(key).startswith("_")} for keys in (own, state))
    if mine != saved:
        return [
            f"{path}: the checkpoint's is of another kind than the {type(scheduler).__name__} that was given: only in "
            f"the checkpoint {sorted(map(str, saved - mine))}, only here {sorted(mine - saved)}"
        ]
    for key, what in (("base_lrs", "param groups"), ("_last_lr", "param groups"), ("_schedulers", "schedulers")):
        numbers = [len(one[key]) for one in (state, own) if isinstance(one.get(key), list)]
        if len(set(numbers)) > 1:
            return [f"{path} was saved with {numbers[0]} {what}, here are {numbers[1]}"]
    found = []
    inner = vars(scheduler).get("_schedulers", ())
    for index, (one, part) in enumerate(zip(inner, state.get("_schedulers", ()), strict=False)):
        found += _misfits_of_scheduler(f"{path}._schedulers[{index}]", one, part)
    return found


def _own_random(
    runtime: Runtime, saved: Any, layout: Mapping[str, Any], own_layout: Mapping[str, Any], problems: list[str]
) -> tuple[Mapping[str, torch.Tensor] | None, str]:
    """This rank's generators, and a warning if they cannot be put back."""
    consequence = "random states stay as they are; dropout masks and other random numbers differ from those of the "
    consequence += "uninterrupted run"
    different = [
        key
        for key in {**layout, **own_layout}
        if key not in _NO_MATTER_FOR_RANDOM and json.dumps(layout.get(key)) != json.dumps(own_layout.get(key))
    ]
    if saved is None:
        return None, f"the checkpoint has no random states: {consequence}"
    if different:
        there, here = (", ".join(f"{key} {_said(one.get(key))}" for key in different) for one in (layout, own_layout))
        return None, f"the checkpoint is of another layout (saved: {there}; here: {here}): {consequence}"
    mesh = runtime.mesh
    if not isinstance(saved, list) or len(saved) != mesh.world_size or not all(isinstance(r, dict) for r in saved):
        problems.append(f"the random states are damaged: expected those of {mesh.world_size} ranks")
        return None, ""
    record = saved[mesh.rank]
    if set(record) != set(random_states()):
        kinds = f"of {', '.join(sorted(record))}, and this process has {', '.join(sorted(random_states()))}"
        return None, f"the checkpoint has random states {kinds}: {consequence}"
    try:
        check_random_states(record)
    except CheckpointError as error:
        problems.append(str(error))
    return record, ""


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return " x ".join(f"{name} {size}" for name, size in value.items() if size != 1) or "1"
    return str(value)
