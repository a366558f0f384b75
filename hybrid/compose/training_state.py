"""What a run is besides model and optimizer: schedule, loss scale, place in the data, `extra`, random numbers.

    save   collect            states of what was given, on this rank
           state_digests      to be compared with those of the other ranks
           check_agreement    all ranks have the same                                          *collective*
           random_record      this rank's generators
    load   prepare            everything is read and tried, nothing is set: problems and warnings
           Restoration.apply  set

All ranks must have the same scheduler, scaler, sampler and `extra`: one copy is saved, for any number of ranks to load.
What differs in `extra` (a rank's own loss, a clock) is refused with its place; saving the first rank's would lose the
others' in silence. Random states are each rank's own, and go back to it where the layout is the same.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hybrid.checkpoint.values import CODE_TYPES, decode, encode
from hybrid.compose.runtime import Runtime
from hybrid.compose.same_state import check_agreement, state_digests
from hybrid.data.sampler import DistributedBatchSampler
from hybrid.errors import CheckpointError, HybridError
from hybrid.rng import check_random_states, random_states, set_random_states
from hybrid.tensor.region import CutRegion

__all__ = ["Restoration", "check_agreement", "collect", "prepare", "random_record", "state_digests"]

# Who draws which random numbers does not depend on how state is cut.
_NO_MATTER_FOR_RANDOM = ("zero_stage", "shard_size", "partition", "bucket_bytes")

_UNREADABLE = object()


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


def _holds_objects(given: Any) -> bool:
    if isinstance(given, Mapping | list | tuple) and not _has(given, "state_dict"):
        return any(_holds_objects(one) for one in (given.values() if isinstance(given, Mapping) else given))
    return _has(given, "state_dict")


def _state_of(path: str, given: Any) -> Any:
    if isinstance(given, list | tuple):
        return [_state_of(f"{path}[{index}]", one) for index, one in enumerate(given)]
    if isinstance(given, Mapping) and not _has(given, "state_dict"):
        if not _holds_objects(given):
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


# -- loading -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoration:
    """What a checkpoint has for this rank, read and tried; nothing is set before `apply`.

    problems: why it must not be applied; empty if it may.
    warnings: what the checkpoint has and nobody asked for, what is not restored. The same on all ranks.
    extra: as it was saved; None if there was none.
    loads: (place, object, its state).
    random: this rank's generators; None: they stay as they are.
    """

    runtime: Runtime
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    extra: Any
    loads: tuple[tuple[str, Any, Any], ...]
    random: Mapping[str, torch.Tensor] | None

    def apply(self) -> None:
        """Set everything; if an object refuses its state after all, those before it get theirs back.

        Raises:
            CheckpointError: an object refused.
        """
        assert not self.problems, self.problems
        before: list[tuple[Any, Any]] = []
        for path, target, state in self.loads:
            try:
                before.append((target, copy.deepcopy(_state_of(path, target))))
                target.load_state_dict(state)
            except Exception as error:
                for done, old in reversed(before):
                    with suppress(Exception):  # the first error is the one to see
                        done.load_state_dict(old)
                reason = f"{type(error).__name__}: {error}"
                raise CheckpointError(f"{path}: its load_state_dict() raised {reason}") from error
        if self.random is not None:
            _leave_regions(self.runtime)  # or the next forward would put an older state over the one set here
            set_random_states(self.random)


def prepare(
    runtime: Runtime,
    document: Mapping[str, Any],
    *,
    tensors: Callable[[str], torch.Tensor],
    saved_layout: Mapping[str, Any],
    layout: Mapping[str, Any],
    lr_scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    random: bool = True,
) -> Restoration:
    """Read and try what the checkpoint has for these objects; sets nothing, raises nothing.

    Args:
        document: what `encode` made of each tree that `collect` gave, by name; and under "random" of the list of all
            ranks' `random_record`s.
        tensors: the tensor of a name.
        saved_layout, layout: of the run that saved, and of this one, in one form.
        lr_scheduler, scaler, sampler: what to load into, of the same form as at the save; None: left as it is.
        random: whether a run goes on: generators are put back, and the scale of the strategy's own scaler.
    """
    reading = _Reading(document=document, tensors=tensors)
    loads: list[tuple[str, Any, Any]] = []
    is_own = scaler is None  # the strategy's, if any: a checkpoint of another precision has none
    scaler, problem = _chosen_scaler(runtime, scaler)
    reading.problems += [problem] if problem else []
    given = {"lr_scheduler": lr_scheduler, "scaler": None if is_own and not random else scaler, "sampler": sampler}
    for name, one in given.items():
        if one is None:
            if name in document and not (problem and name == "scaler"):
                reading.warnings.append(f"the checkpoint has a state of {name}, which is not loaded: none was given")
        elif name in document:
            for path, target, state in _pairs(name, one, reading.tree(name, document[name]), reading.problems):
                reading.problems += _misfits(path, target, state)
                loads.append((path, target, state))
        elif name == "scaler" and is_own:
            reading.warnings.append(f"the checkpoint has no loss scale: it starts at {one.get_scale():g}")
        else:
            reading.problems.append(f"{name} was given, and the checkpoint has none; leave it out to start it afresh")
    return Restoration(
        runtime=runtime,
        extra=reading.tree("extra", document.get("extra")),
        random=_own_random(runtime, reading, saved_layout, layout) if random else None,
        loads=tuple(loads),
        problems=tuple(reading.problems),
        warnings=tuple(reading.warnings),
    )


@dataclass(slots=True, kw_only=True)
class _Reading:
    """A checkpoint that is being read, and what was found."""

    document: Mapping[str, Any]
    tensors: Callable[[str], torch.Tensor]
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def tree(self, where: str, document: Any) -> Any:
        """The tree that was saved; `_UNREADABLE` if it cannot be read, which is noted."""
        try:
            return decode(document, tensors=self.tensors, where=where)
        except CheckpointError as error:
            self.problems.append(str(error))
            return _UNREADABLE


def _pairs(path: str, given: Any, state: Any, problems: list[str]) -> Iterator[tuple[str, Any, Any]]:
    """Each object with its state; notes what does not pair."""
    if state is _UNREADABLE:
        return
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
    if not isinstance(target, LRScheduler | torch.amp.GradScaler | DistributedBatchSampler):
        return []  # a copy of a stranger may cost anything: `apply` takes a refusal back
    if not isinstance(state, dict):
        return [f"{path}: one object was given, the checkpoint has a {type(state).__name__}"]
    if isinstance(target, torch.amp.GradScaler):
        missing = sorted(set(target.state_dict()) - set(state))
        return [f"{path}: the checkpoint's state has no {', '.join(missing)}"] if missing else []
    try:
        found = _misfits_of_scheduler(path, target, state) if isinstance(target, LRScheduler) else []
        trial = None if found else _copy_of(target)
        if trial is not None:
            trial.load_state_dict(copy.deepcopy(state))
    except Exception as error:
        return [f"{path}: {error}" if isinstance(error, HybridError) else f"{path}: {type(error).__name__}: {error}"]
    return found


def _copy_of(target: LRScheduler | DistributedBatchSampler) -> Any:
    """One to be thrown away, over the same optimizer or data set; None if a scheduler holds what cannot be copied."""
    if not isinstance(target, LRScheduler):
        return copy.copy(target)
    try:
        return copy.deepcopy(target, {id(target.optimizer): target.optimizer})
    except Exception:
        return None


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
    runtime: Runtime, reading: _Reading, saved_layout: Mapping[str, Any], layout: Mapping[str, Any]
) -> Mapping[str, torch.Tensor] | None:
    """This rank's generators; None, with a warning or a problem, if they cannot be put back."""
    consequence = (
        "random states stay as they are; dropout masks and other random numbers differ from those of the uninterrupted "
        "run"
    )
    different = [
        key
        for key in {**saved_layout, **layout}
        if key not in _NO_MATTER_FOR_RANDOM and json.dumps(saved_layout.get(key)) != json.dumps(layout.get(key))
    ]
    if "random" not in reading.document:
        reading.warnings.append(f"the checkpoint has no random states: {consequence}")
        return None
    if different:
        there, here = (", ".join(f"{key} {_said(one.get(key))}" for key in different) for one in (saved_layout, layout))
        reading.warnings.append(f"it is of another layout (saved: {there}; here: {here}): {consequence}")
        return None
    mesh, saved = runtime.mesh, reading.document["random"]
    if not isinstance(saved, list) or len(saved) != mesh.world_size:
        reading.problems.append(f"the random states are damaged: expected those of {mesh.world_size} ranks")
        return None
    record = reading.tree(f"random[{mesh.rank}]", saved[mesh.rank])
    if record is _UNREADABLE:
        return None
    if set(record) != set(random_states()):
        kinds = f"of {', '.join(sorted(record))}, and this process has {', '.join(sorted(random_states()))}"
        reading.warnings.append(f"the checkpoint has random states {kinds}: {consequence}")
        return None
    try:
        check_random_states(record)
    except CheckpointError as error:
        reading.problems.append(str(error))
    return record


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return " x ".join(f"{name} {size}" for name, size in value.items() if size != 1) or "1"
    return str(value)
