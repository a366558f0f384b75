"""What `hybrid checkpoint ls` and `show` print: tables on a terminal, whole lines elsewhere, or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybrid.checkpoint.folder import StepFolder
from hybrid.checkpoint.manifest import Manifest
from hybrid.units import format_bytes, format_count

__all__ = ["Listing", "Shown"]

NAME_WIDTH = 48  # what a longer name of an entry takes more than that moves or folds its own row alone


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    step: int
    name: str
    problem: str | None
    created_at: str = ""
    num_files: int = 0
    num_bytes: int = 0
    layout: Mapping[str, Any] | None = None


class Listing:
    """The steps of a folder; keeps a line of each, no manifest."""

    def __init__(self, *, directory: Path) -> None:
        self._directory = directory
        self._rows: list[_Row] = []
        self.writing: list[str] = []
        """Folders of saves that are under way, or died."""

    def add(self, found: StepFolder) -> None:
        """The next one, newest first."""
        row = _Row(step=found.step, name=found.path.name, problem=found.problem)
        if found.manifest is not None:
            row = _Row(
                step=found.step,
                name=found.path.name,
                problem=found.problem,
                created_at=found.manifest.created_at,
                num_files=len(found.manifest.files),
                num_bytes=found.manifest.num_bytes,
                layout=found.manifest.layout,
            )
        self._rows.append(row)

    @property
    def _latest(self) -> _Row | None:
        return next((row for row in self._rows if row.problem is None), None)

    def to_dict(self) -> dict[str, Any]:
        latest = self._latest
        return {
            "directory": str(self._directory),
            "latest": None if latest is None else latest.name,
            "steps": [
                {
                    "step": row.step,
                    "name": row.name,
                    "complete": row.problem is None,
                    "problem": row.problem,
                    "created_at": row.created_at or None,
                    "num_files": row.num_files,
                    "num_bytes": row.num_bytes,
                    "layout": row.layout,
                }
                for row in self._rows
            ],
            "writing": self.writing,
        }

    def print(self) -> None:
        if not self._rows:
            whole = "whole " if self.writing else ""
            print(f"{self._directory} holds no {whole}checkpoints")
        else:
            self._print_rows()
        for name in self.writing:
            print(f"{name}: a save under way, or one that died; the next save removes it")

    def _print_rows(self) -> None:
        latest = self._latest
        table = _table(("step", "written", "files", "size", "saved by", "state"), right=("step", "files", "size"))
        for row in self._rows:
            state = "latest" if row is latest else "complete" if row.problem is None else "not complete"
            size = format_bytes(row.num_bytes) if row.layout is not None else ""
            layout = "" if row.layout is None else _layout_text(row.layout)
            files = str(row.num_files) if row.layout is not None else ""
            style = "bold" if row is latest else "red" if row.problem is not None else ""
            table.add_row(str(row.step), _time_text(row.created_at), files, size, layout, state, style=style)
        _print(table)
        for row in self._rows:
            if row.problem is not None:
                print(f"{row.name}: {row.problem}")
        if latest is None:
            print("none of them is complete")
            return
        newer = [row.name for row in self._rows[: self._rows.index(latest)]]
        passed_over = f", passing over {', '.join(newer)}" if newer else ""
        print(f"a resume takes {latest.name}{passed_over}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One checkpoint; `names` are the entries to list, in the manifest's order."""

    path: Path
    manifest: Manifest
    problem: str | None
    names: Sequence[str]

    def _totals(self) -> dict[str, dict[str, int]]:
        """Of the listed entries, by kind."""
        totals: dict[str, dict[str, int]] = {}
        for name in self.names:
            entry = self.manifest.entries[name]
            of_kind = totals.setdefault(entry.kind, {"entries": 0, "elements": 0, "bytes": 0})
            of_kind["entries"] += 1
            of_kind["elements"] += prod(entry.shape)
            of_kind["bytes"] += entry.num_bytes
        return totals

    def to_dict(self) -> dict[str, Any]:
        manifest = self.manifest
        return {
            "path": str(self.path),
            "step": manifest.step,
            "problem": self.problem,
            "created_at": manifest.created_at,
            "hybrid_version": manifest.hybrid_version,
            "torch_version": manifest.torch_version,
            "layout": manifest.layout,
            "contents": list(manifest.contents),
            "tied": manifest.tied,
            "files": {
                name: {"bytes": record.bytes, "xxh3_64": record.xxh3_64} for name, record in manifest.files.items()
            },
            "entries": [
                {
                    "name": name,
                    "kind": entry.kind,
                    "dtype": entry.dtype,
                    "shape": list(entry.shape),
                    "bytes": entry.num_bytes,
                    "pieces": len(entry.chunks),
                }
                for name, entry in ((name, manifest.entries[name]) for name in self.names)
            ],
            "totals": self._totals(),
        }

    def print(self) -> None:
        manifest = self.manifest
        print(f"step {manifest.step} in {self.path}")
        print(
            f"written {_time_text(manifest.created_at)} by hybrid {manifest.hybrid_version}, "
            f"torch {manifest.torch_version}"
        )
        print(f"holds {', '.join(manifest.contents)}; {len(manifest.files)} files, {format_bytes(manifest.num_bytes)}")
        if self.problem is not None:
            print(f"NOT COMPLETE: {self.problem}")
        print()
        entries = _table(("entry", "kind", "dtype", "shape", "size", "pieces"), right=("size", "pieces"))
        for name in self.names:
            entry = manifest.entries[name]
            shape = " × ".join(map(str, entry.shape)) or "scalar"
            size = format_bytes(entry.num_bytes)
            entries.add_row(name, entry.kind, entry.dtype, shape, size, str(len(entry.chunks)))
        entries.columns[0].max_width = NAME_WIDTH
        _print(entries)
        print()
        totals = _table(("together", "entries", "elements", "size"), right=("entries", "elements", "size"))
        for kind, of_kind in self._totals().items():
            totals.add_row(
                kind, str(of_kind["entries"]), format_count(of_kind["elements"]), format_bytes(of_kind["bytes"])
            )
        _print(totals)
        if len(self.names) < len(manifest.entries):
            print(f"{len(self.names)} of {len(manifest.entries)} entries")
        print()
        layout = _table(("layout", ""), right=())
        for key, value in manifest.layout.items():
            layout.add_row(key, _value_text(value))
        for name, stored in manifest.tied.items():
            layout.add_row("tied", f"{name} is {stored}")
        _print(layout)


def _table(columns: Sequence[str], *, right: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        # Names and states may be folded on a narrow terminal, numbers never.
        is_foldable = number in {0, len(columns) - 1} and column not in right
        justify = "right" if column in right else "left"
        table.add_column(column, justify=justify, no_wrap=not is_foldable, overflow="fold")  # type: ignore[arg-type]
    return table


def _print(table: Table) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        console.print(table)
        return
    columns = [[str(cell) for cell in (column.header, *column.cells)] for column in table.columns]
    widths = [
        min(max(map(len, cells)), column.max_width or 10**6)
        for cells, column in zip(columns, table.columns, strict=True)
    ]
    for row in zip(*columns, strict=True):  # whole lines, for `grep`
        padded = (
            cell.rjust(width) if column.justify == "right" else cell.ljust(width)
            for cell, width, column in zip(row, widths, table.columns, strict=True)
        )
        print("  ".join(padded).rstrip())


def _layout_text(layout: Mapping[str, Any]) -> str:
    """`8 ranks: pp 2, dp_shard 2, tp 2, stage 1`, as far as the manifest says it."""
    axes = layout.get("axes")
    parts = [f"{axis} {size}" for axis, size in axes.items() if size != 1] if isinstance(axes, dict) else []
    if "zero_stage" in layout:
        parts.append(f"stage {layout['zero_stage']}")
    ranks = layout.get("world_size", "?")
    return f"{ranks} rank{'' if ranks == 1 else 's'}" + (f": {', '.join(parts)}" if parts else "")


def _time_text(created_at: str) -> str:
    """`2026-01-02 03:04:05+00:00` of an ISO time."""
    date, _, time = created_at.partition("T")
    return f"{date} {time.partition('.')[0]}".removesuffix("+00:00").strip() + (" UTC" if time else "")


def _value_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value_text(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(f"({_value_text(one)})" if isinstance(one, list) else _value_text(one) for one in value)
    return str(value)
