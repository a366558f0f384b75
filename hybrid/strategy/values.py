"""Reading one value: what a setting accepts, text converted where nothing is lost, the rest refused.

Each reader takes whatever a person wrote and returns the value, or raises a ValueError whose text says what
was expected; the caller puts the path of the setting before it. A bool is never taken for a number, nor a
number for a bool: `stage = True` is a slip, not stage 1.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, WithJsonSchema

from hybrid.contracts.schedule import SCHEDULE_NAMES, Schedule
from hybrid.contracts.schedule_choice import is_written_out, read_schedule
from hybrid.contracts.schedule_text import from_text, to_text
from hybrid.units import parse_bytes, parse_number

__all__ = [
    "AmpDtype",
    "BackendName",
    "BackoffFactor",
    "Boolean",
    "BufferDtype",
    "ByteCount",
    "CompileMode",
    "Count",
    "Degree",
    "FolderPath",
    "GradDtype",
    "GradReduce",
    "GrowthFactor",
    "LossScale",
    "Names",
    "Order",
    "ParallelPlan",
    "Positive",
    "PositiveOrInfinite",
    "ReduceDtype",
    "ScheduleOrder",
    "StageSplit",
    "WholeFromZero",
    "closest",
    "one_of",
    "read_boolean",
    "whole",
]

T = TypeVar("T")
_MAX_SECONDS = 30 * 24 * 3600.0
_MAX_LOSS_SCALE = 2.0**127  # of fp32, in which the scale is kept
_FLOAT_BITS = 1023  # of the largest whole number that is certainly a float as well


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` is most likely a slip of, or None."""
    lowered = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def _kind(value: object) -> str:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "'auto', which has no meaning here (leave the setting out to have it derived or defaulted)"
    return f"{value!r} ({type(value).__name__})"


def read_boolean(value: object) -> bool:
    if isinstance(value, bool) or type(value).__name__ == "bool_":  # numpy's, without importing numpy
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in {"true", "false"}:
        return value.strip().lower() == "true"
    raise ValueError(f"expected true or false, got {_kind(value)}")


def _read_number(value: object, *, expected: str) -> int | float:
    number: int | float | None = None
    if isinstance(value, bool):
        number = None
    elif isinstance(value, Integral):
        number = int(value)
    elif isinstance(value, Real):
        number = float(value)
    elif isinstance(value, str):
        try:
            number = parse_number(value)
        except (ValueError, OverflowError):
            number = None
    if isinstance(number, int) and number.bit_length() > _FLOAT_BITS:  # float() raises, and so may str()
        raise ValueError(f"expected {expected}, got one of more than 300 digits")
    if number is None or math.isnan(number):
        raise ValueError(f"expected {expected}, got {_kind(value)}")
    return number


def whole(minimum: int, maximum: int | None = None, *, name: str = "a whole number") -> Callable[[object], int]:
    """A reader of whole numbers; `8.0` and `'8'` are 8, `8.5` is refused."""
    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def read(value: object) -> int:
        number = _read_number(value, expected=f"{name} {bounds}")
        if isinstance(number, float):
            if not number.is_integer():
                near = "" if math.isinf(number) else f"; the nearest are {math.floor(number)} and {math.ceil(number)}"
                raise ValueError(f"expected {name} {bounds}, got {number!r}{near}")
            number = int(number)
        if number < minimum or (maximum is not None and number > maximum):
            near_value = minimum if number < minimum else maximum
            raise ValueError(f"expected {name} {bounds}, got {number}; the nearest is {near_value}")
        return number

    return read


def _read_degree(value: object) -> int:
    number = whole(-1, name="a degree")(value)
    if number == 0:
        raise ValueError("0 is not a degree; 1 switches the axis off, -1 has it derived from the world size")
    return number


def positive(*, infinite: bool, maximum: float = math.inf, instead_of_zero: str) -> Callable[[object], float]:
    """A reader of numbers above 0; `instead_of_zero` is the advice for whoever means "off" by 0."""

    def read(value: object) -> float:
        expected = "a number above 0" + ("" if infinite else f" and at most {maximum:g}" if maximum < math.inf else "")
        number = float(_read_number(value, expected=expected))
        if number <= 0:
            hint = f"; {instead_of_zero}" if number == 0 else ""
            raise ValueError(f"expected {expected}, got {number:g}{hint}")
        if number > maximum or (math.isinf(number) and not infinite):
            raise ValueError(f"expected {expected}, got {number:g}")
        return number

    return read


def between(low: float, high: float = math.inf) -> Callable[[object], float]:
    """A reader of numbers above `low` and below `high`, neither included."""

    def read(value: object) -> float:
        expected = f"a number above {low:g}" + (f" and below {high:g}" if high < math.inf else "")
        number = float(_read_number(value, expected=expected))
        if not low < number < high:
            raise ValueError(f"expected {expected}, got {number:g}")
        return number

    return read


def one_of(*choices: str, synonyms: dict[str, str] | None = None) -> Callable[[object], str]:
    """A reader of one of these words, in any case."""
    words = {**{choice.lower(): choice for choice in choices}, **(synonyms or {})}

    def read(value: object) -> str:
        word = str(value).strip().lower() if isinstance(value, str) or "dtype" in type(value).__name__ else ""
        if word in words:
            return words[word]
        listed = ", ".join(map(repr, choices))
        guess = closest(word, words) if word else None
        hint = f"; did you mean {words[guess]!r}?" if guess else ""
        raise ValueError(f"expected one of {listed}, got {_kind(value)}{hint}")

    return read


def _read_amp_dtype(value: object) -> str:
    word = one_of("bfloat16", "float16", synonyms={"float32": "float32", **_DTYPES})(value)
    if word == "float32":
        raise ValueError("float32 is no mixed precision; leave amp out, or name modules that keep it in custom_fp32")
    return word


def _read_bytes(value: object) -> int:
    if isinstance(value, str) and value.strip().lower() != "auto":
        value = parse_bytes(value)
    return whole(1, name="a number of bytes")(value)


def _read_names(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        raise ValueError(f"expected a list of names, got the text {value!r}; write [{value!r}]")
    if not isinstance(value, Sequence) or not all(isinstance(item, str) and item.strip() for item in value):
        raise ValueError(f"expected a list of names, got {_kind(value)}")
    if not value:
        raise ValueError("expected a list of names, got an empty one; leave the setting out instead")
    return tuple(value)


_GRAPHS = "CUDA graphs are not available: they replay a step on fixed addresses, which gathered parameters do not keep"


def _read_backend(value: object) -> str:
    """Which backends there are, torch knows; that is looked up when the model is there."""
    word = value.strip() if isinstance(value, str) else ""
    if not word:
        raise ValueError(f"expected the name of a backend of torch.compile, such as 'inductor', got {_kind(value)}")
    if word == "cudagraphs":
        raise ValueError(f"{_GRAPHS}; use 'inductor'")
    return word


def _read_compile_mode(value: object) -> str:
    word = value.strip() if isinstance(value, str) else ""
    if word in {"reduce-overhead", "max-autotune"}:
        instead = "max-autotune-no-cudagraphs" if word == "max-autotune" else "default"
        raise ValueError(f"{_GRAPHS}; use {instead!r}")
    return one_of("default", "max-autotune-no-cudagraphs")(value)


def _read_plan(value: object) -> dict[str, Any]:
    """Which names, styles and words there are is seen when the model is there; here, only the form."""
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a dict such as {{'blocks.*.attn.qkv': 'colwise'}}, got {_kind(value)}")
    if not value:
        raise ValueError("expected a dict of patterns, got an empty one; leave the setting out instead")
    read: dict[str, Any] = {}
    for pattern, entry in value.items():
        if not isinstance(pattern, str) or not pattern.strip():
            raise ValueError(f"expected names of modules as keys, got {_kind(pattern)}")
        if isinstance(entry, Mapping):
            entry = {key: list(item) if isinstance(item, tuple) else item for key, item in entry.items()}
        elif not isinstance(entry, str):
            raise ValueError(f"expected a style or a dict for {pattern!r}, got {_kind(entry)}")
        read[pattern.strip()] = entry
    return read


def _read_split(value: object) -> str | tuple[int, ...] | tuple[str, ...]:
    """How layers are shared out: a word, the class whose layers are counted, the number of layers of each chunk, or the
    names of those at which chunks begin."""
    if isinstance(value, str):
        if value.lower().startswith("layer:") and value[6:].strip():
            return f"layer:{value[6:].strip()}"
        try:
            return one_of("auto", "uniform")(value)
        except ValueError as error:
            raise ValueError(
                f"{error}; or 'layer:ClassName', the number of layers of each chunk, or the name of the first layer of "
                "each chunk but the first"
            ) from None
    if not isinstance(value, Sequence) or not value:
        raise ValueError(
            f"expected 'auto', 'uniform', 'layer:ClassName' or a list of counts or of names, got {_kind(value)}"
        )
    if all(isinstance(item, str) and item.strip() for item in value):
        return tuple(str(item).strip() for item in value)
    return tuple(whole(1)(count) for count in value)


def _read_schedule(value: object) -> str:
    """A name; or a schedule of one's own, as an object, a text or the path of a file: kept as its text."""
    if isinstance(value, Schedule):
        return to_text(value)
    if isinstance(value, str) and is_written_out(value):
        return to_text(from_text(value))
    if isinstance(value, Path) or (isinstance(value, str) and Path(value).suffix.lower() in {".csv", ".txt"}):
        return to_text(read_schedule(Path(value)))
    fleet = {"fthenb": "gpipe", "vpp": "interleaved", "zbh1": "zb-h1", "zbvpp": "zbv"}
    names = one_of(*SCHEDULE_NAMES, synonyms=fleet)
    try:
        return names(value)
    except ValueError as error:
        raise ValueError(f"{error}; or a file (.csv, .txt) or the text of a schedule of your own") from None


def _read_order(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [word.strip() for word in value.split(",")]
    return _read_names(value)


def _read_grad_reduce(value: object) -> str | int:
    words = one_of("auto", "every_micro_batch", "last_micro_batch")
    if isinstance(value, str):
        try:
            number = parse_number(value)
        except ValueError:
            return words(value)
        value = number
    try:
        return whole(1)(value)
    except ValueError as error:
        raise ValueError(f"{error}; or write 'auto', 'every_micro_batch' or 'last_micro_batch'") from None


def _read_path(value: object) -> str:
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise ValueError("expected the path of a folder")
    return os.fspath(value)


_DTYPES = {
    "fp32": "float32",
    "float": "float32",
    "torch.float32": "float32",
    "bf16": "bfloat16",
    "torch.bfloat16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "torch.float16": "float16",
}

Boolean = Annotated[bool, BeforeValidator(read_boolean)]
Count = Annotated[int, BeforeValidator(whole(1)), WithJsonSchema({"type": "integer", "minimum": 1})]
WholeFromZero = Annotated[int, BeforeValidator(whole(0)), WithJsonSchema({"type": "integer", "minimum": 0})]
Degree = Annotated[
    int,
    BeforeValidator(_read_degree),
    WithJsonSchema({"type": "integer", "minimum": -1, "not": {"const": 0}}),
]
ByteCount = Annotated[
    int,
    BeforeValidator(_read_bytes),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "examples": ["25MiB", "5e8"]}]}),
]
Positive = Annotated[
    float,
    BeforeValidator(
        positive(
            infinite=False,
            maximum=_MAX_SECONDS,
            instead_of_zero="waiting cannot be switched off or endless; leave the setting out for its default, or "
            "give a long time, such as 86400 (a day)",
        )
    ),
    WithJsonSchema({"type": "number", "exclusiveMinimum": 0}),
]
PositiveOrInfinite = Annotated[
    float,
    BeforeValidator(
        positive(infinite=True, instead_of_zero="leave the setting out for its default (None, where that means off)")
    ),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"const": "inf"}]}),
]
LossScale = Annotated[
    float,
    BeforeValidator(between(0, _MAX_LOSS_SCALE)),
    WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": _MAX_LOSS_SCALE}),
]
GrowthFactor = Annotated[
    float, BeforeValidator(between(1)), WithJsonSchema({"type": "number", "exclusiveMinimum": 1, "examples": [1.5, 3]})
]
BackoffFactor = Annotated[
    float,
    BeforeValidator(between(0, 1)),
    WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1, "examples": [0.25]}),
]
AmpDtype = Annotated[Literal["bfloat16", "float16"], BeforeValidator(_read_amp_dtype)]
BufferDtype = Annotated[
    Literal["float32", "bfloat16", "float16"],
    BeforeValidator(one_of("float32", "bfloat16", "float16", synonyms=_DTYPES)),
]
GradDtype = Annotated[
    Literal["float32", "bfloat16", "float16", "param"],
    BeforeValidator(one_of("float32", "bfloat16", "float16", "param", synonyms=_DTYPES)),
]
ReduceDtype = Annotated[
    Literal["float32", "bfloat16", "float16", "grad"],
    BeforeValidator(one_of("float32", "bfloat16", "float16", "grad", synonyms=_DTYPES)),
]
GradReduce = Annotated[
    Literal["auto", "every_micro_batch", "last_micro_batch"] | int,
    BeforeValidator(_read_grad_reduce),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["auto", "every_micro_batch", "last_micro_batch"]},
                {"type": "integer", "minimum": 1},
            ]
        }
    ),
]
_NAMES_SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "minItems": 1}
FolderPath = Annotated[
    str,
    BeforeValidator(_read_path),
    WithJsonSchema({"type": "string", "minLength": 1, "examples": ["runs/profile"]}),
]
BackendName = Annotated[
    str,
    BeforeValidator(_read_backend),
    WithJsonSchema({"type": "string", "minLength": 1, "examples": ["inductor", "aot_eager"]}),
]
CompileMode = Annotated[
    Literal["default", "max-autotune-no-cudagraphs"],
    BeforeValidator(_read_compile_mode),
    WithJsonSchema({"type": "string", "enum": ["default", "max-autotune-no-cudagraphs"]}),
]
Names = Annotated[tuple[str, ...], BeforeValidator(_read_names), WithJsonSchema(_NAMES_SCHEMA)]
StageSplit = Annotated[
    str | tuple[int, ...] | tuple[str, ...],
    BeforeValidator(_read_split),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "examples": ["auto", "uniform", "layer:Block"]},
                {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "examples": [["model.layers.8"]]},
            ]
        }
    ),
]
ScheduleOrder = Annotated[
    str,
    BeforeValidator(_read_schedule),
    WithJsonSchema({"type": "string", "examples": [*SCHEDULE_NAMES, "F0.0 B0.0\nF1.0 B1.0\n"]}),
]
ParallelPlan = Annotated[
    dict[str, Any],
    BeforeValidator(_read_plan),
    WithJsonSchema(
        {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": {"anyOf": [{"type": "string"}, {"type": "object"}]},
            "examples": [{"blocks.*.attn.qkv": {"style": "colwise", "fused": 3}, "blocks.*.attn.proj": "rowwise"}],
        }
    ),
]
Order = Annotated[
    tuple[str, ...],
    BeforeValidator(_read_order),
    WithJsonSchema({"anyOf": [_NAMES_SCHEMA, {"type": "string", "examples": ["pp,dp,sharding,mp"]}]}),
]
