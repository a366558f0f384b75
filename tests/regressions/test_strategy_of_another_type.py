"""A dict, or the path of a file, in the place of a strategy ended in `'dict' object has no attribute 'resolve'`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist
from torch import nn

import hybrid


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sharding": True}, r"got dict: hybrid\.DistributedStrategy\.from_dict\(\.\.\.\) makes one of a dict"),
        ("zero2.yaml", r"got str: hybrid\.DistributedStrategy\.load\('zero2\.yaml'\) reads one"),
        (Path("zero2.yaml"), r"got .*Path: hybrid\.DistributedStrategy\.load\('zero2\.yaml'\) reads one"),
        (2, "must be a hybrid.DistributedStrategy, got int$"),
    ],
)
@pytest.mark.parametrize("call", [hybrid.init, lambda given: hybrid.distributed_model(nn.Linear(2, 2), strategy=given)])
def test_a_strategy_of_another_type_is_refused_in_a_sentence(given: Any, words: str, call: Any) -> None:
    """As other tools take them; nothing is started."""
    with pytest.raises(hybrid.StrategyError, match=words):
        call(given)
    assert not dist.is_initialized()


def test_it_is_refused_in_a_job_that_runs_as_well() -> None:
    hybrid.init()
    try:
        with pytest.raises(hybrid.StrategyError, match="got dict"):
            hybrid.distributed_model(nn.Linear(2, 2), strategy={"sharding": True})  # type: ignore[arg-type]
    finally:
        hybrid.shutdown()
