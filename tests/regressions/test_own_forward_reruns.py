"""Checkpoints in a model's own code, around a unit and what stands beside it, under a pipeline."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hybrid
from tests.pipeline_models import own, pipeline_variant
from tests.ranks import RankFailure, run_ranks

WIDTH = 12


class Checkpointed(nn.Module):
    """Its blocks run several times, each time in a checkpoint of its own with a dropout behind them.

    With `around` they run before and behind it, too; with `repeats` several times one after the other.
    """

    def __init__(
        self,
        *,
        blocks: int,
        passes: int,
        around: bool = False,
        repeats: int = 1,
        drop: float = 0.4,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.drop = nn.Dropout(drop)
        self.passes, self.around, self.repeats, self.settings = passes, around, repeats, settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.passes):
            for block in (block for block in self.blocks for _ in range(self.repeats)):
                run = functools.partial(self.run, block)
                if self.around:
                    x = torch.sin(block(x))
                x = checkpoint(run, x, **{"use_reentrant": False, **self.settings}) if self.settings else run(x)
                if self.around:
                    x = torch.sin(block(x))
        return x

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.drop(block(x)))


def numbers(*, blocks: int, passes: int, schedule: str = "1f1b", **settings: Any) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator))] * 2
    torch.manual_seed(3)
    model: Any = Checkpointed(blocks=blocks, passes=passes, **settings)
    with pipeline_variant(2, mb=4, seed=5, schedule=schedule) as strategy:
        model = hybrid.distributed_model(model, strategy=strategy, sample=torch.zeros(2, WIDTH))
        optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        found = []
        for batch in batches:
            result = model.train_batch(own(batch), optimizer, loss_fn=functional.mse_loss)
            found += [result.loss.item(), result.grad_norm.item()]
    return found


def as_without(schedule: str, around: bool) -> None:
    for blocks, passes in ((4, 1), (2, 4)):
        case: dict[str, Any] = {"blocks": blocks, "passes": passes, "schedule": schedule}
        case["around"] = around and passes == 1
        wanted, found = numbers(**case), numbers(**case, use_reentrant=False)
        assert found == wanted, (case, found, wanted)


def test_what_stands_beside_a_unit_in_a_checkpoint_runs_again() -> None:
    """With one block per stage a rank ended the step with advice that had been followed. Where blocks run several
    times, the stage behind the cut ran its own block on what it did not have: the gradients were NaN, without a word;
    and a later call of a block dropped out other elements than in its forward."""
    run_ranks(as_without, 2, "1f1b", False)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zbv"])
def test_the_first_backward_of_a_step_forgets_no_call(schedule: str) -> None:
    """It let go of what was noted for the micro-batch that the step before had ended with, and the first step for chunk
    0: other elements were dropped out in backward than in forward, and gradients were wrong by up to 80 %."""
    run_ranks(as_without, 2, schedule, True)


def within_one_chunk(schedule: str) -> None:
    case: dict[str, Any] = {"blocks": 4, "passes": 1, "repeats": 3, "drop": 0.0, "schedule": schedule}
    wanted = numbers(**case)
    assert numbers(**case, use_reentrant=False, preserve_rng_state=False) == wanted


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_calls_of_one_chunk_need_no_random_state(schedule: str) -> None:
    """They were refused: which of them comes again in backward cannot be told, and need not be."""
    run_ranks(within_one_chunk, 2, schedule)


def test_calls_that_nobody_can_tell_apart_are_refused() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(numbers, 2, blocks=2, passes=4, preserve_rng_state=False)
    assert "which of them comes again in backward cannot be told" in str(failure.value)
    assert "preserve_rng_state=True" in str(failure.value)
