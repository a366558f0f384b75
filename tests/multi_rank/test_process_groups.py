"""Process groups live as long as what was wrapped over them, in a job whose default group somebody else started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hybrid
from hybrid.collectives.process_groups import TURNS
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


def strategy() -> hybrid.DistributedStrategy:
    chosen = hybrid.DistributedStrategy()
    chosen.sharding = True
    chosen.sharding_configs = {"stage": 2, "shard_size": 1}
    chosen.pipeline = True
    chosen.pipeline_configs = {"degree": 2, "accumulate_steps": 2}
    return chosen


def wrapped() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model = hybrid.distributed_model(model, strategy=strategy())
    return model, hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def step(model: Any, optimizer: Any) -> float:
    torch.manual_seed(1)
    batch = torch.randn(4, 5), torch.randn(4, 3)
    return model.train_batch(batch, optimizer, loss_fn=nn.functional.mse_loss).loss.item()


def groups_here() -> int:
    """gloo groups that run: each has one thread that serves its connections."""
    return sum(path.read_text().startswith("gloo_tcp_loop") for path in Path("/proc/self/task").glob("*/comm"))


def jobs_in_turn(num_jobs: int) -> list[int]:
    found = []
    for _ in range(num_jobs):
        step(*wrapped())
        hybrid.shutdown()
        found.append(groups_here())
    return found


def models_in_turn(num_models: int) -> list[int]:
    found = []
    for _ in range(num_models):
        step(*wrapped())
        found.append(groups_here())
    hybrid.shutdown()
    return found


@pytest.mark.parametrize("run", [jobs_in_turn, models_in_turn])
def test_a_loop_over_models_does_not_gather_groups(run: Any) -> None:
    """A search over settings in one process kept every model's groups: threads that wake up, and open connections."""
    for found in run_ranks(run, 4, 3 * TURNS):
        assert max(found[2 * TURNS :]) == max(found[: 2 * TURNS]), found


def keep_on_one_rank() -> tuple[list[float], list[float]]:
    model, optimizer = wrapped()
    alone = [step(model, optimizer) for _ in range(4)]
    hybrid.shutdown()
    first, first_optimizer = wrapped()
    if dist.get_rank() == 0:
        del model, optimizer  # rank 1 still has its part of the earlier job
    losses = [step(first, first_optimizer)]
    hybrid.shutdown()
    second, second_optimizer = wrapped()  # a job begins, and the one before it goes on
    for _ in range(3):
        losses.append(step(first, first_optimizer))
        step(second, second_optimizer)
    hybrid.shutdown()
    return alone, losses


def test_a_model_that_is_kept_goes_on_beside_the_next_job() -> None:
    for alone, losses in run_ranks(keep_on_one_rank, 2):
        assert losses == alone


def default_groups_in_turn(folder: str) -> list[int]:
    found = []
    for turn in range(4):
        step(*wrapped())
        hybrid.shutdown()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dist.barrier()
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/{turn}", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        found.append(groups_here())
    return found


def test_a_default_group_that_the_caller_ended_leaves_nothing(tmp_path: Path) -> None:
    """The groups of the one before were held for good, and with them their threads and connections."""
    for found in run_ranks(default_groups_in_turn, 2, str(tmp_path)):
        assert found[-1] == found[1], found
