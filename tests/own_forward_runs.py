"""Runs an unmodified model both ways, in one plain process and as a pipeline, and compares by name.

The plain run goes micro-batch by micro-batch, so that BatchNorm sees the same samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hybrid
from hybrid.compose.batch import split_batch
from hybrid.compose.own_forward import inputs_and_labels, loss_of
from tests.own_forward_models import MODELS, OwnModel, build
from tests.parity import TOLERANCES, compare_tensors
from tests.pipeline_models import make_adamw, own, pipeline_variant

__all__ = ["assert_like_plain", "differences_from_plain"]


def plain_loss(model: nn.Module, chosen: OwnModel, micro_batch: Any) -> torch.Tensor:
    (args, kwargs), labels = inputs_and_labels(micro_batch, has_loss_fn=chosen.loss_fn is not None)
    output = model(*args, **kwargs)
    loss: torch.Tensor = loss_of(output) if chosen.loss_fn is None else chosen.loss_fn(output, labels)
    return loss


def _num_samples(batch: Any) -> int:
    first = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return len(first[0] if isinstance(first, tuple) else first)


_Seen = tuple[float, float, dict[str, torch.Tensor | None]]
"""Loss, norm, gradients by name."""


def _train_plain(chosen: OwnModel, plain: nn.Module, *, steps: int, mb: int) -> tuple[nn.Module, list[_Seen]]:
    optimizer, wanted = make_adamw(plain), list[_Seen]()
    for step in range(steps):
        batch, total = chosen.batch(step), 0.0
        for piece in split_batch(batch, accumulate_steps=mb, micro_batch_size=None):
            loss = plain_loss(plain, chosen, piece) * (_num_samples(piece) / _num_samples(batch))
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.grad is not None], math.inf).item()
        gradients = {
            fqn: None if p.grad is None else p.grad.clone() for fqn, p in plain.named_parameters() if p.requires_grad
        }
        wanted.append((total, norm, gradients))
        optimizer.step()
        optimizer.zero_grad()
    return plain, wanted


def assert_like_plain(name: str, **settings: Any) -> None:
    """`differences_from_plain` finds none. *Collective.*"""
    problems = differences_from_plain(name, **settings)
    assert not problems, f"{name}: " + "\n".join(problems[:12])


def differences_from_plain(
    name: str,
    *,
    pp: int = 2,
    mb: int = 2,
    steps: int | None = None,
    tolerances: dict[str, float] | None = None,
    make: Callable[[], nn.Module] | None = None,
    sample: Any = None,
    built: str = "after",
    odd_samples: bool = False,
    **settings: Any,
) -> list[str]:
    """Plain torch on the first rank, then a pipeline: losses, norms, gradients and weights that are not the same.

    The first rank tells what it compared, every rank what the ranks should have alike. *Collective.*
    """
    chosen = MODELS[name]
    is_low = tolerances is not None
    tolerances = tolerances or TOLERANCES[torch.float32]
    steps = steps or chosen.steps
    is_first = torch.distributed.get_rank() == 0
    plain, wanted = _train_plain(chosen, build(name), steps=steps, mb=mb) if is_first else (None, [])
    problems: list[str] = []
    compare = functools.partial(compare_tensors, problems, tolerances)
    with pipeline_variant(pp, mb=mb, **settings) as strategy:
        model: Any = make() if make is not None else build(name)
        if sample is None:
            # Of another size on each rank, if asked for: what is balanced by it must be the same on all.
            batch = chosen.batch(torch.distributed.get_rank() % chosen.steps if odd_samples else 0)
            batch = split_batch(batch, accumulate_steps=mb, micro_batch_size=None)[0]
            sample = batch if chosen.loss_fn is None else batch[0]
        optimizer: Any = make_adamw(model) if built == "before" else None
        model = hybrid.distributed_model(model, strategy=strategy, sample=sample)
        optimizer = hybrid.distributed_optimizer(optimizer or make_adamw(model))
        step, seen = 0, list[tuple[float, float]]()

        def look(*_: Any) -> None:
            gradients = dict(model.named_gradients())
            if not is_first:
                return
            if list(gradients) != list(wanted[step][2]):
                problems.append(f"gradients of {list(gradients)}, not {list(wanted[step][2])}")
            # In low precision later steps start from weights that rounding has parted.
            for fqn, gradient in wanted[step][2].items() if step == 0 or not is_low else ():
                compare("gradient", f"gradient of {fqn} at step {step}", gradients.get(fqn), gradient)

        optimizer.register_step_pre_hook(look)
        keywords = {} if chosen.loss_fn is None else {"loss_fn": chosen.loss_fn}
        for step in range(steps):
            result = model.train_batch(own(chosen.batch(step)), optimizer, **keywords)
            seen.append((result.loss.item(), result.grad_norm.item()))
            if is_first:
                compare("loss", f"loss at step {step}", result.loss, wanted[step][0])
                compare("norm", f"norm at step {step}", result.grad_norm, wanted[step][1])
        weights = model.full_state_dict()
        evaluated = model.eval_batch(own(chosen.batch(0)), **keywords).loss.item()
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, (seen, evaluated))
        if any(other != everyone[0] for other in everyone):
            problems.append(f"the ranks have {everyone}")
        if plain is None:
            return problems
        wanted_weights = plain.state_dict()
        if list(weights) != list(wanted_weights):
            problems.append(f"weights are {list(weights)}, not {list(wanted_weights)}")
        for fqn, value in wanted_weights.items():
            compare("weight", f"weight {fqn}", weights.get(fqn), value)
        plain.eval()
        with torch.no_grad():
            compare("loss", "evaluation loss", evaluated, plain_loss(plain, chosen, chosen.batch(0)).item())
    return problems
