"""Bytes and seconds as text: read from settings, written for people."""

from __future__ import annotations

import re

__all__ = ["format_bytes", "format_count", "format_rate", "format_seconds", "parse_bytes", "parse_number"]

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_NUMBER = re.compile(r"([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([a-zA-Z]*)")


def parse_number(text: str) -> int | float:
    """`"8"`, `"5e8"`, `"1.0"`, `"inf"` -> a number, an int wherever nothing is lost by it."""
    value = text.strip().replace("_", "")
    try:
        return int(value)
    except ValueError:
        pass
    number = float(value)  # its ValueError names the text
    return int(number) if number.is_integer() else number


def parse_bytes(text: str) -> int:
    """`"16MiB"`, `"16 MB"`, `"5e8"`, `"1024"` -> bytes. MiB is 2**20, MB is 10**6."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match.group(2).lower() not in _BYTE_UNITS:
        raise ValueError(f"cannot read {text!r} as a number of bytes; write for example 26214400 or '25MiB'")
    number = parse_number(match.group(1)) * _BYTE_UNITS[match.group(2).lower()]
    if isinstance(number, float) and not number.is_integer():
        raise ValueError(f"{text!r} is {number} bytes, which is not a whole number of them")
    return int(number)


def format_bytes(num_bytes: float) -> str:
    """Binary units with three digits: `512 B`, `25 MiB`, `1.46 GiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{_three_digits(value)} {unit}"
        value /= 1024
    return f"{_three_digits(value)} TiB"


def format_count(count: float) -> str:
    """Decimal units with three digits: `999`, `10.7 M`, `1.3 B`."""
    value = float(count)
    for unit in ("", " k", " M", " B"):
        if abs(value) < 1000:
            return f"{_three_digits(value)}{unit}"
        value /= 1000
    return f"{_three_digits(value)} T"


def format_rate(bytes_per_second: float) -> str:
    """Decimal units, as links have them: `12.5 GB/s`, `1.8 TB/s`."""
    if bytes_per_second >= 1e12:
        return f"{bytes_per_second / 1e12:.4g} TB/s"
    return f"{bytes_per_second / 1e9:.4g} GB/s"


def format_seconds(seconds: float) -> str:
    """`350 µs`, `12.5 ms`, `3.2 s`, `10 min`, `1 h 05 min`."""
    size = abs(seconds)
    if size == 0:
        return "0 s"
    if size < 1e-3:
        return f"{_three_digits(seconds * 1e6)} µs"
    if size < 1:
        return f"{_three_digits(seconds * 1e3)} ms"
    if size < 120:
        return f"{_three_digits(seconds)} s"
    if size < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if minutes else f"{hours} h"


def _three_digits(value: float) -> str:
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
