"""The schedule that a setting means: the name of one that is made for any size, or one written out as text.

A schedule of one's own is kept as its whole text (`schedule_text`), so a strategy that has one needs no other file, and
strategies that are equal run the same.
"""

from __future__ import annotations

import re
from pathlib import Path

from hybrid.contracts.chunk_placement import ChunkPlacement
from hybrid.contracts.schedule import Schedule, make_schedule
from hybrid.contracts.schedule_check import check_schedule
from hybrid.contracts.schedule_text import from_csv, from_text
from hybrid.errors import StrategyError

__all__ = [
    "choose_schedule",
    "file_name",
    "is_written_out",
    "read_schedule",
    "schedule_name",
    "schedule_placement",
    "schedule_splits_backward",
]

_SPLITTING = frozenset({"zb-h1", "zbv"})  # of the names


def is_written_out(setting: str) -> bool:
    """Whether it is the text of a schedule, not the name of one."""
    return "\n" in setting


def schedule_name(setting: str) -> str:
    """For people: one word."""
    return from_text(setting).name if is_written_out(setting) else setting


def schedule_placement(setting: str) -> ChunkPlacement:
    """How its chunks lie on the ranks, for any number of micro-batches."""
    if is_written_out(setting):
        return from_text(setting).placement
    return ChunkPlacement.V if setting == "zbv" else ChunkPlacement.ROUND


def schedule_splits_backward(setting: str) -> bool:
    """Whether its backwards come in two halves, for any number of micro-batches."""
    return from_text(setting).splits_backward if is_written_out(setting) else setting in _SPLITTING


def file_name(path: Path) -> str:
    """What a schedule of this file is called where nothing in it says: one word."""
    return re.sub(r"[^\w.+-]", "_", path.stem) or "custom"


def read_schedule(path: Path, *, name: str | None = None) -> Schedule:
    """A schedule from a file: `.csv`, or else text.

    Args:
        path: of the file.
        name: where the file has none; None: as the file is called.

    Raises:
        StrategyError: the file cannot be read, or is no schedule; with line and column.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise StrategyError(f"cannot read {path}: {error}") from error
    read = from_csv if path.suffix.lower() == ".csv" else from_text
    return read(text, name=file_name(path) if name is None else name, source=str(path))


def choose_schedule(setting: str, *, num_stages: int, num_micro_batches: int, virtual_stages: int) -> Schedule:
    """The action lists that `setting` means with these sizes.

    Args:
        setting: a name that `make_schedule` knows, or a text.

    Raises:
        StrategyError: everything that speaks against it: sizes that it cannot have or, written out, has not; actions
            that are missing, out of order, or wait for each other for ever.
    """
    if not is_written_out(setting):
        return make_schedule(
            setting, num_stages=num_stages, num_micro_batches=num_micro_batches, virtual_stages=virtual_stages
        )
    own = from_text(setting)
    sizes = (
        ("degree", own.num_stages, num_stages, "stages"),
        ("accumulate_steps", own.num_micro_batches, num_micro_batches, "micro-batches"),
        ("virtual_stages", own.virtual_stages, virtual_stages, "chunks per stage"),
    )
    problems = [
        f"schedule {own.name!r} is for {has} {what}, and {name} is {wanted}; set it to {has}, or write one for {wanted}"
        for name, has, wanted, what in sizes
        if has != wanted
    ]
    if problems:
        raise StrategyError(problems)
    check_schedule(own)
    return own
