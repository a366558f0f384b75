"""Schedules as text, to read and to write by hand.

Text: a head line, which may be left out, and one line per rank. `#` starts a comment.

    schedule name=1f1b stages=2 micro_batches=2 virtual_stages=1
    F0.0 F0.1 B0.0 B0.1           # rank 0: kind, chunk of the whole model, micro-batch
    F1.0 B1.0 F1.1 B1.1           # rank 1

CSV: one row per action, in any sequence; `order` sorts the actions of a rank.

    rank,order,kind,chunk,micro_batch
    0,0,F,0,0

Without a head line, and in CSV, the sizes are the smallest that hold all actions. Reading looks at the form alone;
`check_schedule` tells whether the schedule works. What is written is read back as an equal `Schedule` (CSV has no place
for the name: give it).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator

from hybrid.contracts.schedule import Action, ActionKind, Schedule
from hybrid.errors import StrategyError

__all__ = ["from_csv", "from_text", "to_csv", "to_text"]

COLUMNS = ("rank", "order", "kind", "chunk", "micro_batch")
LETTERS = ", ".join(kind.letter for kind in ActionKind)
DEFAULT_NAME = "custom"

_ACTION = re.compile(r"([A-Za-z])([0-9]{1,9})\.([0-9]{1,9})")
_HEAD_FIELDS = {
    "name": "name",
    "stages": "num_stages",
    "micro_batches": "num_micro_batches",
    "virtual_stages": "virtual_stages",
}


# ---------------------------------------------------------------- text


def to_text(schedule: Schedule) -> str:
    """Head line and one line per rank."""
    head = " ".join(f"{word}={getattr(schedule, field)}" for word, field in _HEAD_FIELDS.items())
    lines = [f"schedule {head}", *(" ".join(map(str, order)) for order in schedule.actions)]
    return "\n".join(lines) + "\n"


def from_text(text: str, *, name: str = DEFAULT_NAME, source: str = "schedule") -> Schedule:
    """Read what `to_text` writes; `source` stands in the messages, which name line and column (both from 1).

    A name in the head line goes before `name`.
    """
    problems: list[str] = []
    head: dict[str, str] = {}
    orders: list[list[Action]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = list(re.finditer(r"\S+", line.partition("#")[0]))
        where = f"{source}, line {number}"
        if words and words[0].group() == "schedule":
            if head or orders:
                problems.append(f"{where}: the head line stands first, and once")
            problems += _read_head(words[1:], head, where)
        elif words:
            orders.append(list(_read_actions(words, where, problems)))
    if not orders and not problems:
        problems.append(f"{source}: no actions; write one line per rank, such as F0.0 B0.0")
    if problems:
        raise StrategyError(problems)
    return _schedule(orders, {"name": name, **head}, source)


def _read_head(words: Iterable[re.Match[str]], head: dict[str, str], where: str) -> Iterator[str]:
    for word in words:
        key, equals, value = word.group().partition("=")
        place = f"{where}, column {word.start() + 1}"
        if not equals or key not in _HEAD_FIELDS:
            yield f"{place}: cannot read {word.group()!r}; expected {', '.join(f'{key}=...' for key in _HEAD_FIELDS)}"
        elif key in head:
            yield f"{place}: {key} is given twice"
        elif key != "name" and not re.fullmatch(r"0*[1-9][0-9]{0,8}", value):
            yield f"{place}: {key}={value}: expected a whole number of at least 1"
        else:
            head[key] = value


def _read_actions(words: Iterable[re.Match[str]], where: str, problems: list[str]) -> Iterator[Action]:
    for word in words:
        found = _ACTION.fullmatch(word.group())
        place = f"{where}, column {word.start() + 1}"
        if found is None:
            problems.append(f"{place}: cannot read {word.group()!r}; expected KIND CHUNK . MICRO_BATCH, such as F0.3")
        elif found[1] not in ActionKind.__members__:
            problems.append(f"{place}: {word.group()!r} has the kind {found[1]!r}; expected one of {LETTERS}")
        else:
            yield Action(kind=ActionKind(found[1]), chunk=int(found[2]), micro_batch=int(found[3]))


# ---------------------------------------------------------------- CSV


def to_csv(schedule: Schedule) -> str:
    """One row per action, by rank and order."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for rank, order in enumerate(schedule.actions):
        for place, action in enumerate(order):
            writer.writerow((rank, place, action.kind.letter, action.chunk, action.micro_batch))
    return text.getvalue()


def from_csv(text: str, *, name: str = DEFAULT_NAME, source: str = "schedule") -> Schedule:
    """Read what `to_csv` writes; the columns may stand in any sequence, empty rows count for nothing."""
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        rows = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    except csv.Error as error:
        raise StrategyError(f"{source}, line {reader.line_num}: cannot read it as CSV: {error}") from error
    header = rows[0][1] if rows else []
    if sorted(header) != sorted(COLUMNS):
        raise StrategyError(f"{source}, line 1: the columns are {','.join(header)}; expected {','.join(COLUMNS)}")
    problems: list[str] = []
    ranks: dict[int, dict[int, Action]] = {}
    for number, cells in rows[1:]:
        where = f"{source}, line {number}"
        if not any(cells):
            continue
        if len(cells) != len(header):
            problems.append(f"{where}: {len(cells)} cells for {len(header)} columns")
            continue
        row = dict(zip(header, cells, strict=True))
        wrong = [_cell_problem(column, row[column]) for column in header]
        places = [f"{where}, column {index} ({column})" for index, column in enumerate(header, 1)]
        found = [f"{place}: {problem}" for place, problem in zip(places, wrong, strict=True) if problem]
        problems += found
        if found:
            continue
        order = ranks.setdefault(int(row["rank"]), {})
        action = Action(kind=ActionKind(row["kind"]), chunk=int(row["chunk"]), micro_batch=int(row["micro_batch"]))
        place = int(row["order"])
        if place in order:
            problems.append(f"{where}: rank {row['rank']} has order {place} twice, for {order[place]} and {action}")
        order[place] = action
    missing = next((rank for rank in range(len(ranks)) if rank not in ranks), None)
    if missing is not None and not problems:
        problems.append(f"{source}: there is a rank {max(ranks)}, but no rank {missing}; the ranks count from 0")
    if not ranks and not problems:
        problems.append(f"{source}: no actions; write rows such as 0,0,F,0,0")
    if problems:
        raise StrategyError(problems)
    orders = [[action for _, action in sorted(ranks[rank].items(), key=lambda item: item[0])] for rank in sorted(ranks)]
    return _schedule(orders, {"name": name}, source)


def _cell_problem(column: str, cell: str) -> str:
    if column == "kind":
        return "" if cell in ActionKind.__members__ else f"the kind is {cell!r}; expected one of {LETTERS}"
    return "" if re.fullmatch("[0-9]{1,9}", cell) else f"{cell!r} is not a whole number from 0"


# ---------------------------------------------------------------- both


def _schedule(orders: list[list[Action]], head: dict[str, str], source: str) -> Schedule:
    """Sizes from the head, else from the actions."""
    stages = int(head.get("stages", len(orders)))
    if stages != len(orders):
        raise StrategyError(
            f"{source}: stages={stages}, but there are {len(orders)} lines of actions; give one per rank"
        )
    num_chunks = 1 + max(action.chunk for order in orders for action in order)
    num_micro_batches = 1 + max(action.micro_batch for order in orders for action in order)
    return Schedule(
        name=head["name"],
        num_stages=stages,
        num_micro_batches=int(head.get("micro_batches", num_micro_batches)),
        virtual_stages=int(head.get("virtual_stages", -(-num_chunks // stages))),
        actions=tuple(map(tuple, orders)),
    )
