"""The table of `zero_step`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.rounds import interval

__all__ = ["as_markdown", "as_text", "beside_rivals", "time_rows"]

RIVALS: dict[str, tuple[str, ...]] = {
    "hybrid1": ("zero1", "fsdp2_grad", "deepspeed1"),
    "hybrid2": ("zero1", "fsdp2_grad", "fsdp2_grad_ours", "fsdp1_grad", "deepspeed2"),
    "hybrid3": ("fsdp2_full", "fsdp2_full_ours", "fsdp1_full", "deepspeed3"),
}
"""Stage -> the modes that cut the same, or nearly."""


def time_rows(
    turns: Mapping[str, Sequence[tuple[float, float, float]]], losses: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, Any]]:
    """Mode -> what its rounds say, beside DDP's: medians, ratios within a round, intervals.

    Args:
        turns: (wall seconds, CPU seconds, page faults) of a step, by round.
        losses: of all steps.
    """
    rows: dict[str, dict[str, Any]] = {}
    for mode, own in turns.items():
        row: dict[str, Any] = {
            "step_ms": statistics.median(turn[0] for turn in own) * 1e3,
            "cpu_ms": statistics.median(turn[1] for turn in own) * 1e3,
            "page_faults": statistics.median(turn[2] for turn in own),
            "max_loss_difference_to_ddp": max(abs(a - b) for a, b in zip(losses[mode], losses["ddp"], strict=True)),
        }
        for name, column in (("wall", 0), ("cpu", 1)):
            to_ddp = [a[column] / b[column] for a, b in zip(own, turns["ddp"], strict=True)]
            row[f"{name}_to_ddp"] = _ratio(to_ddp)
        rows[mode] = row
    for mode, own in turns.items():
        rows[mode]["wall_to"] = {
            other: _ratio([a[0] / b[0] for a, b in zip(own, turns[other], strict=True)]) for other in turns
        }
    return rows


def _ratio(values: Sequence[float]) -> tuple[float, float, float]:
    return (statistics.median(values), *interval(values))


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.1f}"


def _spread(values: tuple[float, float, float]) -> str:
    return f"{values[0]:.3f} ({values[1]:.3f}–{values[2]:.3f})"


# Head, key of a row, how it is written; columns that were not measured are left out.
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("step ms", "step_ms", _number),
    ("wall to ddp", "wall_to_ddp", _spread),
    ("CPU ms", "cpu_ms", _number),
    ("CPU to ddp", "cpu_to_ddp", _spread),
    ("page faults", "page_faults", _number),
    ("live after backward MB", "live_after_backward_bytes", _megabytes),
    ("after step MB", "live_after_step_bytes", _megabytes),
    ("heap peak MB", "heap_peak_bytes", _megabytes),
    ("resident peak MB", "peak_resident_bytes", _megabytes),
    ("sent MB", "sent_bytes", _megabytes),
    ("Δ loss", "max_loss_difference", lambda value: f"{value:.0e}"),
)


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The heads, then a line for each row."""
    columns = [column for column in _COLUMNS if any(column[1] in row for row in rows)]
    lines = [["mode", *(head for head, _, _ in columns)]]
    for row in rows:
        lines.append([row["mode"], *(write(row[key]) if key in row else "" for _, key, write in columns)])
    return lines


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    heads, *lines = _cells(rows)
    table = [heads, ["---"] + ["---:"] * (len(heads) - 1), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


def beside_rivals(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each stage and mode that it is to beat: the wall time's ratio within the rounds."""
    return "\n".join(
        f"{row['mode']} to {rival}: {_spread(row['wall_to'][rival])}"
        for row in rows
        for rival in RIVALS.get(row["mode"], ())
        if rival in row.get("wall_to", ())
    )


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = _cells(rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(_aligned(line, widths)) for line in lines)


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    (name, width), *rest = zip(line, widths, strict=True)
    return [name.ljust(width), *(cell.rjust(width) for cell, width in rest)]
