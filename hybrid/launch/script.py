"""The command that every rank runs, handed over in a file.

Not on torchrun's command line: its parser also looks at what follows the script, and refuses `--nproc 7`
there as an ambiguous abbreviation of its own options.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["ScriptCommand"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCommand:
    """`python SCRIPT ARGUMENTS...`, or `python -m SCRIPT ARGUMENTS...`."""

    script: str
    arguments: tuple[str, ...]
    is_module: bool

    def write(self, log_dir: Path) -> None:
        _path(log_dir).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, log_dir: Path) -> ScriptCommand:
        fields = json.loads(_path(log_dir).read_text(encoding="utf-8"))
        return cls(**{**fields, "arguments": tuple(fields["arguments"])})


def _path(log_dir: Path) -> Path:
    return log_dir / "status" / "command.json"
