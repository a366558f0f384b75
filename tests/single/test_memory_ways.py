"""What a refusal for memory names as a way out, done to the letter with the same global batch, is one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import hybrid
from hybrid.compose.stage_plan import plan_stages
from hybrid.errors import StrategyError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.relu(self.widen(x)))


def model() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(16)))


def resolved(limit: int, *, world: int, micro: int, batch: int | None, shard: dict[str, Any], **configs: Any) -> Any:
    made = hybrid.DistributedStrategy(pipeline=True, global_batch_size=batch)
    made.pipeline_configs = {"memory_limit_bytes": limit, "micro_batch_size": micro, **configs}
    made.sharding = bool(shard)
    made.sharding_configs = shard
    return made.resolve(world)


def refused(limit: int, *, is_here: bool = True, **asked: Any) -> str:
    with pytest.raises(StrategyError, match="no split of") as told:
        plan_stages(model(), resolved(limit, **asked), sample=torch.zeros(asked["micro"], 128, 32), is_here=is_here)
    return str(told.value)


def least(**asked: Any) -> int:
    return int(refused(1000, **asked).rpartition("memory_limit_bytes = ")[2].partition(",")[0])


def ways(text: str) -> list[str]:
    named = text.partition("Nearest: ")[2].split("; or ")[:-1]  # the last one is a greater limit
    return [way.rpartition(" (")[0] for way in named]


def done(way: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What was asked for, changed as the way says."""
    made = {**asked, "shard": dict(asked["shard"])}
    if more := re.search(r" on (\d+) ranks", way):
        made["world"] = int(more[1])
    if half := re.match(r"micro-batches of (\d+)", way):
        made["micro"] = int(half[1])
    for name, value in re.findall(r"([\w.]+) = \"?([\w-]+)", way):
        key = name.rpartition(".")[2]
        number = int(value) if value.isdigit() else value
        if name.startswith("sharding"):
            made["shard"][key] = number
        else:
            made[key] = number
    return made


ASKED: dict[str, dict[str, Any]] = {
    "plain": {"world": 8, "degree": 2, "micro": 4, "batch": 16, "shard": {}},
    "cut": {"world": 8, "degree": 2, "micro": 4, "batch": 32, "shard": {"stage": 1, "shard_size": 4}},
    "gpipe": {"world": 4, "degree": 2, "micro": 4, "batch": 32, "shard": {}, "schedule": "gpipe"},
    "interleaved": {
        "world": 4,
        "degree": 4,
        "micro": 4,
        "batch": 16,
        "shard": {},
        "schedule": "interleaved",
        "virtual_stages": 2,
    },
}


@pytest.mark.parametrize("name", ASKED)
def test_a_way_out_fits_with_the_same_global_batch(name: str) -> None:
    """Fault: fewer ranks that get samples, and smaller micro-batches, were counted with as many micro-batches."""
    asked = ASKED[name]
    needed = least(**asked)
    followed = set()
    for percent in (92, 70, 50):
        limit = needed * percent // 100
        for way in ways(refused(limit, **asked)):
            if way.startswith(("recompute", "sharding with")):
                continue
            followed.add(way.partition(" = ")[0].partition(" of ")[0])
            after = done(way, asked)
            sample = torch.zeros(after["micro"], 128, 32)
            assert plan_stages(model(), resolved(limit, **after), sample=sample) is not None, way
    assert followed, name
    if name == "interleaved":
        assert "pipeline_configs.schedule" in followed  # with its virtual_stages
    if name == "plain":
        assert {"pipeline_configs.degree", "micro-batches"} <= followed


def test_ranks_that_are_left_hold_whole_copies() -> None:
    """12 ranks that get samples in copies of 4 are no 6 in copies of 4."""
    asked = {"world": 24, "degree": 2, "micro": 4, "batch": 48, "shard": {"stage": 1, "shard_size": 4}}
    needed = least(**asked)
    texts = [refused(needed * percent // 100, **asked) for percent in (80, 60)]
    named = [way for text in texts for way in ways(text) if way.startswith("pipeline_configs.degree")]
    assert named
    for way in named:
        resolved(needed, **done(way, asked))


def test_offload_is_no_way_out_where_memory_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors what is offloaded stays where it was; on a GPU, and where no device is known, it goes."""
    asked: dict[str, Any] = {"world": 2, "degree": 2, "micro": 1, "batch": 1, "shard": {"stage": 1}}
    limit = least(**asked) * 9 // 10
    assert "offload" not in refused(limit, **asked)
    assert 'offload = "optimizer"' in refused(limit, is_here=False, **asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert 'offload = "optimizer"' in refused(limit, **asked)
