"""The planner's own tables, in `planner/data/`."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import yaml

__all__ = ["read_data_file"]

# The reader in C, where PyYAML was built with one, takes a tenth of the time.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_data_file(name: str) -> Any:
    """What `planner/data/NAME` holds."""
    return yaml.load(files("hybrid.planner").joinpath("data", name).read_text(encoding="utf-8"), Loader=_LOADER)
