"""Who writes what: every rank about as much as the others, every byte once, nothing sent to another rank for it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hybrid
from tests.pipeline_models import pipeline_strategy
from tests.ranks import run_ranks

WIDTH, LAYERS = 64, 4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp4-z0": (4, {"pp": 1, "stage": 0}),
    "dp4-z2": (4, {"pp": 1, "stage": 2}),
    "dp4-z3-shard2": (4, {"pp": 1, "stage": 3, "shard_size": 2}),
    "dp3-z1": (3, {"pp": 1, "stage": 1}),
    "tp2-dp2-z1": (4, {"pp": 1, "tp": 2, "stage": 1}),
    "pp2-dp2-z0": (4, {"pp": 2, "stage": 0}),
}
# Parameters and two moments, in float32.
STATE_BYTES = 3 * 4 * LAYERS * 2 * (WIDTH * WIDTH + WIDTH)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.narrow(torch.tanh(self.widen(value)))


def save(directory: str, settings: dict[str, Any]) -> int:
    torch.manual_seed(0)
    strategy = pipeline_strategy(**settings)
    if "tp" in settings:
        plan = {"*.widen": "colwise", "*.narrow": "rowwise"}
        strategy.tensor_parallel_configs = {"degree": settings["tp"], "plan": plan}
    model: Any = hybrid.distributed_model(nn.Sequential(*(Pair() for _ in range(LAYERS))), strategy)
    optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters()))
    batch = (torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    model.train_batch(batch, optimizer, loss_fn=nn.functional.mse_loss)
    with hybrid.trace() as traffic:
        hybrid.save_checkpoint(directory, model, optimizer, step=1)
    return sum(totals.sent_bytes for by_op in traffic.totals().values() for totals in by_op.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_work_is_spread_over_all_ranks(layout: str, tmp_path: Path) -> None:
    """Rivals gather on the first rank, or write each replica's copy."""
    world, settings = LAYOUTS[layout]
    sent = run_ranks(save, world, str(tmp_path), settings)
    folder = tmp_path / "step_00000001"
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    written = [0] * world
    for entry in manifest["entries"].values():
        if entry["kind"] in ("parameter", "optimizer"):
            assert entry["dtype"] == "float32"
            for chunk in entry["chunks"]:
                written[int(chunk["file"].split("_")[1])] += 4 * math.prod(chunk["sizes"])
    assert sum(written) == STATE_BYTES
    for size in written:
        assert abs(size - STATE_BYTES / world) < 0.05 * STATE_BYTES / world, written
    assert max(sent) < 0.02 * STATE_BYTES, sent  # that all ranks agree, not the state
