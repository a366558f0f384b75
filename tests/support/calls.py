"""What only a call shows: ways of training that some settings leave no room for, each tried on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import hybrid
from tests.ranks import run_ranks

__all__ = ["CALLS", "said_by_calls"]


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(4, 6), torch.ones(4, 6)


def _strategy(settings: dict[str, Any]) -> hybrid.DistributedStrategy:
    return hybrid.DistributedStrategy(settings, timeout_seconds=20)


def _wrapped(
    settings: dict[str, Any], make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, *more: nn.Module
) -> tuple[Any, Any]:
    layers = [nn.Linear(6, 6) for _ in range(4)]
    model: Any = hybrid.distributed_model(nn.Sequential(*more, *layers), strategy=_strategy(settings))
    return model, hybrid.distributed_optimizer(make(model.parameters()))


def _pipeline(**configs: Any) -> dict[str, Any]:
    return {"pipeline": True, "pipeline_configs": {"degree": 2, "accumulate_steps": 2, **configs}}


def _forward_under_a_pipeline() -> None:
    model, _ = _wrapped(_pipeline())
    model(_batch()[0])


def _forward_step_under_a_pipeline() -> None:
    model, optimizer = _wrapped(_pipeline())
    model.train_batch(_batch(), optimizer, forward_step=lambda model, batch: model(batch[0]).sum())


def _gradient_inside_a_forward() -> None:
    model, optimizer = _wrapped(_pipeline(schedule="zb-h1"), torch.optim.AdamW, _Penalised())
    model.train_batch(_batch(), optimizer, loss_fn=functional.mse_loss)


def _accumulation_in_a_plain_loop() -> None:
    model, optimizer = _wrapped({"accumulate_steps": 2})
    model(_batch()[0]).sum().backward()
    optimizer.step()


def _float16_in_a_plain_loop() -> None:
    model, optimizer = _wrapped({"amp": True, "amp_configs": {"dtype": "float16"}})
    model(_batch()[0]).sum().backward()
    optimizer.step()


def _two_scalers() -> None:
    model, optimizer = _wrapped({"amp": True, "amp_configs": {"dtype": "float16"}})
    model.train_batch(_batch(), optimizer, scaler=torch.amp.GradScaler("cpu"), loss_fn=functional.mse_loss)


def _closure() -> None:
    model, optimizer = _wrapped({}, torch.optim.LBFGS)
    model.train_batch(_batch(), optimizer, loss_fn=functional.mse_loss)


def _empty_micro_batch() -> None:
    model, optimizer = _wrapped({"sharding": True, "sharding_configs": {"stage": 3}, "accumulate_steps": 2})
    inputs, labels = _batch()
    few = 1 if torch.distributed.get_rank() == 0 else 4
    model.train_batch((inputs[:few], labels[:few]), optimizer, loss_fn=functional.mse_loss)


class _Penalised(nn.Module):
    """Differentiates its own linear layer in its forward, as energies and penalties do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.linear(value).square().sum(), value, create_graph=True)
        return value + slope


CALLS: dict[str, Callable[[], None]] = {
    "a pipeline, and `model(...)` or a plain loop": _forward_under_a_pipeline,
    "a pipeline, and `train_batch(forward_step=...)`": _forward_step_under_a_pipeline,
    "`accumulate_steps` above 1, and a plain loop": _accumulation_in_a_plain_loop,
    "float16, and a plain loop without a `GradScaler`": _float16_in_a_plain_loop,
    "float16, and `train_batch(scaler=...)`": _two_scalers,
    "an optimizer that needs a closure, and `train_batch`": _closure,
    "stage 3 or a pipeline, and a micro-batch without samples on one rank": _empty_micro_batch,
    # Raised on one stage alone, so that the other loses its peer: the last one.
    "`zb-h1` or `zbv`, and `torch.autograd.grad` through a linear layer inside a forward": _gradient_inside_a_forward,
}


def _try_all() -> dict[str, str]:
    said = {}
    for name, call in CALLS.items():
        try:
            call()
        except hybrid.HybridError as error:
            said[name] = str(error)
        finally:
            hybrid.shutdown()
    return said


def said_by_calls() -> dict[str, str]:
    """The sentence of each call that is refused, on the first rank that says one."""
    first, second = run_ranks(_try_all, 2)
    return {name: first.get(name) or second[name] for name in CALLS if name in {*first, *second}}
