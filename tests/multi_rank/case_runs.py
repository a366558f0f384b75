"""What the tests of reported cases share: a strategy in one line, many variants in one world, close numbers.

A test's function runs on every rank. It first trains the same model with plain torch on the whole batch, in its
own process, then with hybrid on its part, and asserts. `variant` names the settings when one of many fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hybrid

__all__ = [
    "ONE_STEP",
    "SEVERAL_STEPS",
    "assert_close",
    "assert_same_on_all_ranks",
    "assert_weights",
    "own_part",
    "seeded",
    "strategy_of",
    "variant",
    "weights_of",
    "wrapped",
]

# As a part of the value, or absolute below 1: fp32, the order of additions differs.
ONE_STEP = 1e-6
SEVERAL_STEPS = 1e-5

_OWN_FIELDS = ("accumulate_steps", "micro_batch_size", "gradient_clipping", "loss_reduction", "seed")

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def strategy_of(*, stage: int, timeout_seconds: float = 20, **settings: Any) -> hybrid.DistributedStrategy:
    """A sharding strategy; settings of the strategy itself and of `sharding_configs` side by side."""
    strategy = hybrid.DistributedStrategy()
    strategy.timeout_seconds = timeout_seconds
    for name in _OWN_FIELDS:
        if settings.get(name) is not None:
            setattr(strategy, name, settings[name])
    strategy.sharding = True
    strategy.sharding_configs = {
        "stage": stage,
        **{name: value for name, value in settings.items() if name not in _OWN_FIELDS and value is not None},
    }
    return strategy


@contextmanager
def variant(**settings: Any) -> Iterator[hybrid.DistributedStrategy]:
    """One strategy of several in this world; the job is left at the end, so that the next may begin."""
    try:
        yield strategy_of(**settings)
    except BaseException as error:
        error.add_note(f"with {settings}, rank {dist.get_rank()} of {dist.get_world_size()}")
        raise
    finally:
        hybrid.shutdown()


def wrapped(model: nn.Module, make_optimizer: MakeOptimizer, strategy: hybrid.DistributedStrategy) -> tuple[Any, Any]:
    """The model and its optimizer as hybrid makes them. Ranks other than 0 start from other weights."""
    if dist.get_rank() > 0:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_contiguous():  # not an expanded one, whose elements are one
                    parameter.add_(1)
    optimizer = make_optimizer(model.parameters())
    return hybrid.distributed_model(model, strategy=strategy), hybrid.distributed_optimizer(optimizer)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the whole batch; sizes differ by at most one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return tensor[len(tensor) * rank // world_size : len(tensor) * (rank + 1) // world_size]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a plain model's state."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_close(got: Any, wanted: Any, tolerance: float, what: str) -> None:
    got, wanted = torch.as_tensor(got), torch.as_tensor(wanted)
    assert got.shape == wanted.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(wanted.shape)}"
    if wanted.numel() == 0:
        return
    if wanted.is_complex():
        got, wanted = torch.view_as_real(got.detach()), torch.view_as_real(wanted.detach())
    off = (got.detach().double() - wanted.detach().double()).abs() / wanted.detach().double().abs().clamp(min=1)
    largest = off.max().item()
    assert largest <= tolerance, f"{what}: off by {largest:.2e} (allowed {tolerance:.0e}): {got}, not {wanted}"


def assert_weights(model: Any, wanted: Mapping[str, torch.Tensor], tolerance: float) -> None:
    """Every entry of the state dict, under the plain model's names, and nothing more. All ranks call it."""
    got = model.full_state_dict()
    assert list(got) == list(wanted), f"names {list(got)}, not {list(wanted)}"
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype, f"{name} is {got[name].dtype}, not {value.dtype}"
        assert_close(got[name], value, tolerance, name)


def assert_same_on_all_ranks(value: Any, what: str) -> None:
    """To the bit. All ranks call it; `value` is a number or a dict of tensors."""
    everyone: list[Any] = [None] * dist.get_world_size()
    mine = {name: tensor.tolist() for name, tensor in value.items()} if isinstance(value, dict) else value
    dist.all_gather_object(everyone, mine)
    assert all(other == everyone[0] for other in everyone), f"{what} differs between ranks: {everyone}"
