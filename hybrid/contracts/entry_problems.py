"""Sentences for people about entries of a file that do not fit its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

__all__ = ["entry_problems", "shortened"]

_MOST_CHARACTERS = 60
_TEXTS: Mapping[str, str] = {
    "missing": "is missing",
    "extra_forbidden": "there is no such entry",
    "model_type": "expected named entries",
    "model_attributes_type": "expected named entries",
    "dict_type": "expected named entries",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "string_type": "expected a text",
    "bool_type": "expected true or false",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
}


def entry_problems(error: ValidationError, where: str) -> list[str]:
    """One for each entry, all at once: the file, the entry, what it has to be, and what it is."""
    return [_sentence(detail, where) for detail in error.errors(include_url=False)]


def _sentence(detail: Any, where: str) -> str:
    place = ".".join(map(str, detail["loc"])) or "top level"
    kind = detail["type"]
    if kind == "value_error":  # of our own, which says all there is to say
        return f"{where}, {place}: {detail['ctx']['error']}"
    text = _TEXTS.get(kind) or detail["msg"].replace("Input should be", "expected")
    return f"{where}, {place}: {text}" + ("" if kind == "missing" else f" (it is {shortened(detail['input'])})")


def shortened(value: object) -> str:
    """As Python writes it, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of thousands of digits
        return "a very long number"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} …"
