"""What beside the numbers of a step depends on the device, on the stand-in for CUDA."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hybrid
from tests.cuda_devices import cuda_devices
from tests.pipeline_models import batch_of, cross_entropy, make_adamw, own, pipeline_strategy
from tests.ranks import run_ranks
from tests.tensor_gpt import GPT, GPT_PLAN


def wrapped(plain: nn.Module, *, pp: int = 1, tp: int = 1, **settings: Any) -> tuple[Any, Any]:
    strategy = pipeline_strategy(pp, mb=2, tp=tp, **settings)
    if tp > 1:
        strategy.tensor_parallel_configs = {"degree": tp, "plan": GPT_PLAN}
    model = hybrid.distributed_model(plain, strategy=strategy)
    return model, hybrid.distributed_optimizer(make_adamw(model))


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(dropout=0.2)


def train(model: Any, optimizer: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        result = model.train_batch(own(batch_of(step, length=6)), optimizer, loss_fn=cross_entropy)
        losses += [result.loss.item(), result.grad_norm.item()]
    return losses


def recomputed() -> list[list[float]]:
    found = []
    with cuda_devices(2) as machine:
        for layout in ({"tp": 2}, {"stage": 3}):
            for policy in (None, "full"):
                found.append(train(*wrapped(gpt(), recompute=policy, **layout), 0, 2))
                hybrid.shutdown()
        assert machine.problems() == []
    return found


def test_recompute_draws_the_masks_of_dropout_again_from_the_devices_generator() -> None:
    (cut, cut_again, gathered, gathered_again), other = run_ranks(recomputed, 2)
    assert cut == cut_again
    assert gathered == gathered_again
    assert other == [cut, cut_again, gathered, gathered_again]


def resumed() -> tuple[list[float], list[float]]:
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders, src=0)
    with cuda_devices(2) as machine:
        model, optimizer = wrapped(gpt(), stage=2)
        train(model, optimizer, 0, 1)
        handle = hybrid.async_save_checkpoint(folders[0], model, optimizer, step=1)
        on = train(model, optimizer, 1, 2)
        handle.wait()
        hybrid.shutdown()
        model, optimizer = wrapped(gpt(), stage=3)
        assert hybrid.load_checkpoint(folders[0], model, optimizer).step == 1
        again = train(model, optimizer, 1, 2)
        hybrid.export_weights(model, Path(folders[0]) / "weights")
        hybrid.shutdown()
        assert machine.problems() == []
    return on, again


def test_a_checkpoint_has_the_state_of_the_devices_generator() -> None:
    """Saved beside the training, from the host's copy; the steps after it draw the masks that they drew."""
    for on, again in run_ranks(resumed, 2):
        assert on[::2] == again[::2]


class Marks(nn.Module):
    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return value, torch.arange(3, device=value.device, dtype=torch.int16), torch.zeros(0, device=value.device) > 0


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(15, 13)

    def forward(self, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        value, counts, nothing = given
        return self.layer(value) * (counts.sum() - 2) + nothing.sum()


def sent() -> list[float]:
    with cuda_devices(2) as machine:
        torch.manual_seed(0)
        layers = [nn.Embedding(13, 15), nn.Linear(15, 15), Marks(), Head()]
        found = train(*wrapped(nn.Sequential(*layers), pp=2, split=[3, 1]), 0, 1)
        hybrid.shutdown()
        assert machine.problems() == []
        assert not any("point_to_point" in line for line in machine.host_waits)
    return found


def test_stages_send_what_nccl_has_no_type_for() -> None:
    """16-bit integers, and tensors without an element; and no message keeps the host."""
    first, second = run_ranks(sent, 2)
    assert first == second
    assert 2 < first[0] < 3
