"""A file's keys, one by one: known or not, of the right type, open ('auto'), off, refused or to be converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hybrid.strategy.importing.draft import Draft
from hybrid.strategy.importing.key_table import KeyRow, KeyTable
from hybrid.strategy.values import closest, read_boolean, whole
from hybrid.units import parse_number

__all__ = ["AUTO", "count", "is_auto", "leaves", "open_auto", "read_keys"]

AUTO = "auto"
_MOST = 2**53  # of a count: no file means more, and products of such numbers stay numbers


def is_auto(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() == AUTO


def open_auto(draft: Draft, path: str, *, example: object = "VALUE") -> None:
    """An 'auto' that nothing resolves is a problem of its own."""
    draft.problems.append(f"{path} = 'auto': another tool was to fill this in; give it with --set {path}={example}")


def leaves(table: KeyTable, config: Mapping[Any, Any], draft: Draft, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of every key; what is unknown or no section where one must be is a problem."""
    for key, value in config.items():
        path = f"{prefix}.{key}" if prefix else f"{key}"
        if "." in str(key):  # it could stand in its section as well, and one of them would be passed over
            section, _, leaf = path.rpartition(".")
            known = table.row(path) is not None or table.is_section(path)
            draft.problems.append(
                f"{path}: a key with a dot; write {leaf!r} into the section {section}" if known else table.unknown(path)
            )
            continue
        row = table.row(path)
        whole = row is not None and (row.type == "dict" or not table.is_section(path))
        if whole and not (value and isinstance(value, Mapping) and table.is_section(path)):
            yield path, value
        elif not table.is_section(path):
            draft.problems.append(table.unknown(path))
        elif isinstance(value, Mapping):
            yield from leaves(table, value, draft, path)
        elif value is None:
            draft.note(path, None, "equal", sentence="null: not given")
        elif row is not None:
            yield path, value
        else:
            first = next(name for name in table.siblings(f"{path}.") if name)
            draft.problems.append(
                f"{path} = {value!r}: expected a section such as {{{first!r}: ...}}, got {type(value).__name__}"
            )


def read_keys(
    table: KeyTable,
    config: Mapping[Any, Any],
    draft: Draft,
    *,
    gates: Mapping[str, tuple[str, Callable[[Any], bool]]],
) -> dict[str, Any]:
    """The values to be converted, by path; every other key is noted, refused or a problem.

    Args:
        table: the format's keys.
        config: what the file says, nested.
        draft: takes notes and problems.
        gates: section -> (path of its switch, whether that value switches it on): the other keys of a section that
            is off ask for nothing.
    """
    found = dict(leaves(table, config, draft))
    values: dict[str, Any] = {}
    for path, value in found.items():
        row = table.row(path)
        assert row is not None, path
        switch = _closed_gate(path, found, gates)
        if value is None:
            draft.note(path, None, "equal", sentence="null: not given")
        elif switch is not None:
            draft.note(path, value, "harmless", sentence=f"acts only with {switch}, which is off")
        elif is_auto(value) and not row.is_off(value):
            if row.kind in {"equal", "harmless"}:
                draft.note(path, value, row.kind, sentence=row.sentence)  # type: ignore[arg-type]
            elif row.kind == "refused":
                open_auto(draft, path)
            else:
                values[path] = AUTO
        else:
            _read_one(path, value, row, draft, values)
    return values


def _read_one(path: str, value: Any, row: KeyRow, draft: Draft, values: dict[str, Any]) -> None:
    try:
        read = read_value(row.type, value)
    except ValueError as error:
        draft.problems.append(f"{path} = {value!r}: {error}")
        return
    if row.kind == "refused":
        if row.is_off(read):
            draft.note(path, value, "equal", sentence="asks for nothing more")
        elif read in row.default:
            draft.note(path, value, "changed", sentence="its own default; see what changes in meaning")
        else:
            draft.refuse(path, value, row.sentence)
    elif row.kind in {"equal", "harmless"}:
        draft.note(path, value, row.kind, sentence=row.sentence)  # type: ignore[arg-type]
    else:
        values[path] = read


def _closed_gate(
    path: str, found: Mapping[str, Any], gates: Mapping[str, tuple[str, Callable[[Any], bool]]]
) -> str | None:
    """The switch that keeps this key from acting, if there is one and it is off."""
    section = path.rpartition(".")[0]
    switch, is_on = gates.get(section, ("", bool))
    if not switch or path == switch or is_auto(found.get(switch)):
        return None
    try:
        return None if is_on(found.get(switch)) else switch
    except ValueError:
        return None  # the switch itself is reported


def read_value(kind: str, value: Any) -> Any:
    """The value as its type says, text converted where nothing is lost; ValueError otherwise."""
    if kind == "any":
        return value
    if kind == "bool":
        return read_boolean(value)
    if kind == "count":
        return count(value, minimum=1)
    if kind == "whole":
        return count(value)
    if kind == "stage":
        return whole(0, 3)(value)
    if kind == "integer":
        return count(value, minimum=-_MOST)
    if kind == "number":
        return _number(value)
    if kind == "text":
        return _of_type(value, str, "text")
    if kind == "list":
        return _of_type(value, list, "a list")
    if kind == "dict":
        return _of_type(value, Mapping, "a section")
    return _word(kind.split("|"), value)


def count(value: Any, *, minimum: int = 0) -> int:
    """A whole number that somebody can mean; ValueError otherwise."""
    number = whole(minimum)(value)
    if number > _MOST:
        raise ValueError(f"expected a whole number of at most {_MOST}, got {number:.3g}")
    return number


def _number(value: Any) -> float | int:
    if isinstance(value, str):
        try:
            value = parse_number(value)
        except (ValueError, OverflowError):
            raise ValueError(f"expected a number, got the text {value!r}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number, got {value!r} ({type(value).__name__})")
    return value


def _of_type(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"expected {name}, got {value!r} ({type(value).__name__})")
    return value


def _word(words: list[str], value: Any) -> str:
    text = f"{value}".strip().lower() if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if value is False and "no" in words:  # YAML reads a bare `no` as false
        return "no"
    known = {word.lower(): word for word in words}
    if text in known:
        return known[text]
    guess = closest(text, known) if text else None
    hint = f"; did you mean {known[guess]!r}?" if guess in known else ""
    raise ValueError(f"expected one of {', '.join(map(repr, words))}, got {value!r}{hint}")
