"""What `hybrid profile` asks the ranks of, through their environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hybrid.launch.variables import PROFILE_VARIABLE

__all__ = ["ProfileRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Profile the first model that is trained, whatever its strategy says of that."""

    steps: int
    warmup: int
    directory: str
    goes_on: bool
    """Whether the script runs to its end; else it ends with the last step that is traced."""

    @property
    def facts_path(self) -> Path:
        """What rank 0 writes in the end."""
        return Path(self.directory) / "profile.json"

    def environment(self) -> Mapping[str, str]:
        # torch's profiler tells each start and stop on stderr below this level.
        quiet = {} if "KINETO_LOG_LEVEL" in os.environ else {"KINETO_LOG_LEVEL": "6"}
        return {PROFILE_VARIABLE: json.dumps(asdict(self)), **quiet}

    @classmethod
    def of_environment(cls) -> ProfileRequest | None:
        """None in a run that nobody profiles."""
        text = os.environ.get(PROFILE_VARIABLE)
        return cls(**json.loads(text)) if text else None
