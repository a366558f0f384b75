"""`import_config`: the settings of another tool as a strategy, with an answer for every key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid.errors import StrategyError
from hybrid.strategy.explain import explanation
from hybrid.strategy.importing import accelerate, deepspeed, fleet
from hybrid.strategy.importing.draft import Draft
from hybrid.strategy.importing.given import merged
from hybrid.strategy.importing.key_table import key_table
from hybrid.strategy.importing.notes import ImportNotes
from hybrid.strategy.importing.source import Source, read_source
from hybrid.strategy.importing.walk import count
from hybrid.strategy.strategy import DistributedStrategy

__all__ = ["import_config"]

_MOST_LETTERS = 2000  # of a problem
_MOST_PROCESSES = 2**22  # every one of them is looked at
_NAMES = {
    "deepspeed": "a DeepSpeed configuration",
    "accelerate": "an Accelerate configuration",
    "fleet": "Fleet's strategy",
}


def import_config(
    source: str | Path | Mapping[str, Any],
    *,
    world_size: int | None = None,
    given: Mapping[str, Any] | None = None,
    format: str | None = None,
    allow_drop: bool = False,
) -> tuple[DistributedStrategy, ImportNotes]:
    """A strategy out of a DeepSpeed, Accelerate or Fleet configuration, and what became of each of its keys.

        strategy, notes = hybrid.import_config("ds_config.json", world_size=8, given={"gradient_clipping": 1.0})
        print(notes)

    Args:
        source: a file (.json, .yaml, .yml) or a dict.
        world_size: number of processes; with it the strategy is worked out and must resolve.
        given: values for what the file leaves open ('auto') or does not say, by path; they must not contradict it.
        format: "deepspeed", "accelerate" or "fleet"; found by the keys if not given.
        allow_drop: leave out what cannot be done here, listed in the notes, instead of refusing.

    Raises:
        StrategyError: all that is wrong, unknown, open or refused, in one.
    """
    read = read_source(source, format=format)
    draft = Draft(source=read.name, world_size=_world_size(world_size), allow_drop=allow_drop)
    own, rest = accelerate.own_given(given or {}) if read.format == "accelerate" else (given or {}, {})
    config = _with_given(read, own, draft)
    if read.format == "deepspeed":
        deepspeed.convert(config, draft)
    elif read.format == "accelerate":
        accelerate.convert(config, draft, folder=read.folder, given=rest)
    else:
        fleet.convert(config, draft)
    strategy = _strategy(draft)
    return strategy, ImportNotes(
        format=_NAMES[read.format],
        source=read.name,
        world_size=draft.world_size,
        keys=tuple(draft.keys),
        changes=tuple(draft.changes),
        script=tuple(draft.script),
        worked_out=_worked_out(strategy, draft.world_size),
    )


def _world_size(world_size: int | None) -> int | None:
    try:
        return None if world_size is None else count(world_size, minimum=1)
    except ValueError as error:
        raise StrategyError(f"world_size = {world_size!r}: {error}") from None


def _with_given(read: Source, given: Mapping[str, Any], draft: Draft) -> dict[str, Any]:
    config, problems, added = merged(
        read.config,
        given,
        table=None if read.format == "fleet" else key_table(read.format),
        arguments=deepspeed.TRAINER_ARGUMENTS if read.format == "deepspeed" else {},
        source=read.name,
    )
    draft.problems.extend(problems)
    draft.added.extend(added)
    return config


def _strategy(draft: Draft) -> DistributedStrategy:
    """The finished strategy; StrategyError with the problems of the file and those of the result."""
    if draft.world_size is not None and draft.world_size > _MOST_PROCESSES:
        draft.problems.append(f"{draft.world_size} processes: more than {_MOST_PROCESSES} are not worked out")
        draft.world_size = None
    for note in draft.keys:
        if note.path in draft.added and note.kind == "harmless":
            draft.problems.append(
                f"{note.path} = {note.value!r} is given, but does nothing: {note.sentence}; leave it out"
            )
    try:
        strategy = DistributedStrategy(draft.settings)
        found = [*draft.problems, *map(draft.with_origins, strategy.problems(draft.world_size))]
    except StrategyError as error:
        found = [*draft.problems, *map(draft.with_origins, error.problems)]
    if found:
        where = f"{draft.source}: " if draft.source else ""
        raise StrategyError([_shortened(f"{where}{problem}") for problem in dict.fromkeys(found)])
    return strategy


def _shortened(problem: str) -> str:
    """A value of pages would hide the rest: its beginning, and what is said about it at the end."""
    return problem if len(problem) <= _MOST_LETTERS else f"{problem[: _MOST_LETTERS // 2]} … {problem[-400:]}"


def _worked_out(strategy: DistributedStrategy, world_size: int | None) -> tuple[str, ...]:
    """What nobody wrote: degrees and sizes that follow, the stage, the ranks of each group."""
    if world_size is None:
        return ()
    told = explanation(strategy, world_size)
    rows = [
        row
        for row in told.rows
        if (row.section in {"layout", "batch"} and row.origin.startswith("derived")) or row.setting == "zero_stage"
    ]
    width = max((len(row.setting) for row in rows), default=0)
    lines = [f"{row.setting:<{width}}  {row.value}  ({row.origin})" for row in rows]
    groups = [f"ranks of {axis}: {text}" for axis, text in told.groups]
    return (*lines, *groups, *(f"note: {note}" for note in told.notes))
