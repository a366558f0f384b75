"""Environment variables by which the launcher, torchrun and the ranks tell each other things."""

from __future__ import annotations

import os
from pathlib import Path

from hybrid.contracts.rank_map import RankMap, read_rank_map

__all__ = [
    "LOG_DIR_VARIABLE",
    "PARENT_VARIABLE",
    "PLACEMENT_VARIABLE",
    "PROFILE_VARIABLE",
    "RESUME_VARIABLE",
    "STRATEGY_VARIABLE",
    "planned_places",
    "resume_directory",
]

STRATEGY_VARIABLE = "HYBRID_STRATEGY"  # file that `distributed_model` takes when it is given no strategy
PLACEMENT_VARIABLE = "HYBRID_PLACEMENT"  # file of `hybrid plan --out`: on which node each rank is to be
RESUME_VARIABLE = "HYBRID_RESUME"  # folder of checkpoints from whose newest complete one the script goes on
PROFILE_VARIABLE = "HYBRID_PROFILE"  # what `hybrid profile` wants of the steps, as JSON
LOG_DIR_VARIABLE = "HYBRID_LOG_DIR"  # folder of this run's logs
PARENT_VARIABLE = "HYBRID_PARENT_PID"  # the process whose end also ends the one that reads it


def resume_directory() -> Path | None:
    """The folder of checkpoints of `hybrid run --resume`, from which this run goes on; None without one.

    The folder may be empty or missing: then this is the first start, and it is where to save.
    """
    directory = os.environ.get(RESUME_VARIABLE)
    return Path(directory) if directory else None


def planned_places() -> RankMap | None:
    """Where the plan has each rank; None without a plan. Raises LaunchError: the file is no rank map."""
    path = os.environ.get(PLACEMENT_VARIABLE)
    return read_rank_map(Path(path)) if path else None
