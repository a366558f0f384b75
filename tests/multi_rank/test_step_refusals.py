"""What cannot be right is refused with a name: stale gradients, changed parameters, models that differ.

Plain torch code that touches what hybrid has moved must raise, never compute with an empty or partial value.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hybrid
from tests.models import build
from tests.parity_case import make_optimizer
from tests.ranks import run_ranks
from tests.scenario import DTYPE, Job, assert_as_plain, make_strategy

# -- p.grad -----------------------------------------------------------------------------------------------------


ACCESSES: dict[str, Callable[[Any, Any], Any]] = {
    "clip_grad_norm_": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "clip_grad_norm_ foreach": lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=True),
    "clip_grad_norm_ loop": lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=False),
    "clip_grad_value_": lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "get_total_norm": lambda m, o: nn.utils.get_total_norm([p.grad for p in m.parameters() if p.grad is not None]),
    "sum": lambda model, optimizer: model.mixing.grad.sum(),
    "scale in place": lambda model, optimizer: model.mixing.grad.mul_(0.5),
    "divide in place": lambda model, optimizer: model.mixing.grad.__itruediv__(2),
    "arithmetic": lambda model, optimizer: model.mixing.grad * 2,
    "arithmetic, second": lambda model, optimizer: 2 * model.mixing.grad,
    "clone": lambda model, optimizer: model.mixing.grad.clone(),
    "detach": lambda model, optimizer: model.mixing.grad.detach().norm(),
    "data": lambda model, optimizer: model.mixing.grad.data.mul_(2),
    "index": lambda model, optimizer: model.mixing.grad[0],
    "iteration": lambda model, optimizer: list(model.mixing.grad),
    "item": lambda model, optimizer: model.scale.grad.item(),
    "float": lambda model, optimizer: float(model.scale.grad),
    "tolist": lambda model, optimizer: model.mixing.grad.tolist(),
    "numpy": lambda model, optimizer: model.mixing.grad.numpy(),
    "comparison": lambda model, optimizer: bool((model.mixing.grad == 0).all()),
    "stack": lambda model, optimizer: torch.stack([model.last.bias.grad, model.first.bias.grad]),
    "foreach": lambda model, optimizer: torch._foreach_mul_([p.grad for p in model.last.parameters()], 0.5),
    "copy_": lambda model, optimizer: torch.empty(15, 17).copy_(model.mixing.grad),
    "out=": lambda model, optimizer: torch.zeros(17, out=model.widening.bias.grad),
    "isfinite": lambda model, optimizer: torch.isfinite(model.mixing.grad).all(),
    "to": lambda model, optimizer: model.mixing.grad.to(torch.float16),
    "view": lambda model, optimizer: model.mixing.grad.view(torch.int32),
    "all_reduce": lambda model, optimizer: torch.distributed.all_reduce(model.mixing.grad),
    "save": lambda model, optimizer: pickle.dumps(model.mixing.grad),
}


def touch_gradients(zero_stage: int) -> dict[str, str]:
    """What each access raises, and the look of a gradient that is not there."""
    model = hybrid.distributed_model(build("blocks"), strategy=make_strategy(zero_stage))
    optimizer = hybrid.distributed_optimizer(make_optimizer("adamw", model))
    outcome = {}
    for name, access in ACCESSES.items():
        nn.functional.mse_loss(model(torch.ones(2, 15)), torch.ones(2, 15)).backward()
        try:
            value = access(model, optimizer)
        except hybrid.GradientAccessError as error:
            outcome[name] = str(error)
        else:
            outcome[name] = f"no error, but {value!r}"
        optimizer.zero_grad()
    return outcome


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_every_use_of_a_reduced_gradient_raises(zero_stage: int) -> None:
    """`p.grad` is neither None nor a part of the truth: using its values names the parameter and the way."""
    for outcome in run_ranks(touch_gradients, 2, zero_stage):
        quiet = {name: text for name, text in outcome.items() if "hybrid.full_gradient(p)" not in text}
        quiet = {name: text for name, text in quiet.items() if "named_gradients" not in text}
        assert not quiet
        names = ("first.", "last.", "mixing", "scale", "widening", "blocks.")
        assert [name for name, text in outcome.items() if not any(fqn in text for fqn in names)] == []


def harmless(job: Job) -> dict[str, Any]:
    """What scripts ask of a gradient without reading it, and what happens to the training."""
    model, optimizer = job.build("blocks", "sgd")
    seen = []
    for step in range(2):
        job.loss(model, step).backward()
        if not job.is_plain:
            dict(model.named_gradients())  # now it is known which parameters have a gradient on any rank
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                facts = (gradient.shape, gradient.dtype, gradient.device, gradient.numel(), gradient.dim())
                seen.append((name, *facts, gradient.is_sparse, gradient.requires_grad))
        if not job.is_plain:
            with pytest.raises(hybrid.GradientAccessError):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {"weight": job.weights(model), "same": seen}


def test_asking_for_the_shape_of_a_gradient_is_harmless() -> None:
    """Shapes and dtypes are those of plain torch; a refused access leaves the training as it was."""
    assert_as_plain(harmless)


def gradients_by_name(job: Job) -> dict[str, Any]:
    """`named_gradients`, `full_gradient`, twice, before and after a step."""
    model, optimizer = job.build("experts")
    results = []
    for step in range(2):
        job.loss(model, step).backward()
        for _ in range(2):
            results.append(job.gradients(model))
        singles = {}
        for name, parameter in model.named_parameters():
            gradient = parameter.grad if job.is_plain else hybrid.full_gradient(parameter)
            singles[name] = None if gradient is None else gradient.clone()
        results.append(singles)
        optimizer.step()
        results.append(job.gradients(model))
        optimizer.zero_grad()
        results.append(job.gradients(model))
    return {"gradient": results, "weight": job.weights(model)}


def test_whole_gradients_by_name() -> None:
    """Whole gradients under the plain names, None where no rank has one; reading them changes nothing."""
    assert_as_plain(gradients_by_name)
    assert_as_plain(gradients_by_name, stages=(2,), world_size=3, deferred=True, partition="parameter")


# -- changed or unlike models -----------------------------------------------------------------------------------


CHANGES: dict[str, tuple[Callable[[Any, Any], Any], tuple[str, ...]]] = {
    "data replaced": (lambda m, o: setattr(m.mixing, "data", m.mixing.data.clone()), ("mixing", "p.copy_(value)")),
    "half": (lambda m, o: m.blocks.half(), ("blocks.0.0.weight",)),
    "unfrozen": (lambda m, o: m.frozen.requires_grad_(True), ("frozen", "trainable", "distributed_model")),
    "deepcopy": (lambda m, o: copy.deepcopy(m), ("copied", "full_state_dict")),
    "pickle": (lambda m, o: pickle.dumps(m), ("pickled", "full_state_dict")),
    "optimizer deepcopy": (lambda m, o: copy.deepcopy(o), ("optimizer", "full_state_dict")),
    "optimizer pickle": (lambda m, o: pickle.dumps(o), ("optimizer", "full_state_dict")),
    "assign": (lambda m, o: m.load_state_dict(m.state_dict(), assign=True), ("assign=False",)),
    "wrapped twice": (lambda m, o: hybrid.distributed_model(m), ("already",)),
    "optimizer wrapped twice": (lambda m, o: hybrid.distributed_optimizer(o), ("already",)),
    "wrapped inside": (lambda m, o: hybrid.distributed_model(nn.Sequential(m)), ("already", "0")),
    "foreign optimizer": (
        lambda m, o: hybrid.distributed_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1)),
        ("(2, 2)", "distributed_model"),
    ),
    "plain optimizer": (
        lambda m, o: m.train_batch(torch.ones(2, 15), torch.optim.SGD(m.parameters(), lr=1)),
        ("hybrid.distributed_optimizer", "SGD"),
    ),
    "no optimizer": (lambda m, o: m.train_batch(torch.ones(2, 15)), ("hybrid.distributed_optimizer", "step=False")),
    "scaler": (
        lambda m, o: (m.zero_grad(), m.train_batch(torch.ones(2, 15), o, scaler=1.0)),
        ("torch.amp.GradScaler", "float"),
    ),
    "gradient by hand": (
        lambda m, o: setattr(m.mixing, "grad", torch.ones_like(m.mixing)),
        ("mixing", "by hand"),
    ),
    "foreign gradient": (lambda m, o: hybrid.full_gradient(torch.ones(3)), ("(3,)", "distributed_model")),
}


def change(name: str, way: str) -> str:
    """The error of the change, or of the step after it."""
    model = hybrid.distributed_model(build("blocks"), strategy=make_strategy(2))
    optimizer = hybrid.distributed_optimizer(make_optimizer("adamw", model))
    batch = (torch.ones(2, 15), torch.ones(2, 15))
    try:
        if way == "loop":
            nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        CHANGES[name][0](model, optimizer)
        if way == "loop":
            optimizer.step()
        else:
            model.train_batch(batch, optimizer, loss_fn=nn.functional.mse_loss)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def change_all(way: str) -> dict[str, str]:
    """Each change on a model of its own."""
    outcome = {}
    for name in CHANGES:
        outcome[name] = change(name, way)
        hybrid.shutdown()
    return outcome


@functools.cache
def all_changes(way: str) -> list[dict[str, str]]:
    return run_ranks(change_all, 2, way)


@pytest.mark.parametrize("way", ["train_batch", "loop"])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_behind_the_engine_are_refused(name: str, way: str) -> None:
    """A change that would make the engine update other memory, or copy it, is named with the way around it."""
    if (name, way) == ("half", "train_batch"):
        return  # the forward itself fails, as in plain torch
    for outcome in all_changes(way):
        message = outcome[name]
        assert all(word in message for word in CHANGES[name][1]), message
        assert "Error: " in message


DIFFERENCES: dict[str, Callable[[], nn.Module]] = {
    "shape": lambda: nn.Linear(3, 4 if torch.distributed.get_rank() == 0 else 5),
    "dtype": lambda: nn.Linear(3, 4).to(torch.float32 if torch.distributed.get_rank() == 0 else DTYPE),
    "frozen": lambda: nn.Linear(3, 4).requires_grad_(torch.distributed.get_rank() == 0),
    "extra": lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(1 + torch.distributed.get_rank()))),
    "name": lambda: nn.ModuleDict({f"layer{torch.distributed.get_rank()}": nn.Linear(3, 3)}),
}


def wrap_unlike_models(name: str) -> str:
    try:
        hybrid.distributed_model(DIFFERENCES[name](), strategy=make_strategy(1))
    except hybrid.ModelError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shape", ("weight", "(4, 3)", "(5, 3)")),
        ("dtype", ("weight", "float32", "float64")),
        ("frozen", ("weight", "True", "False")),
        ("extra", ("2 parameters", "4")),
        ("name", ("layer0", "layer1")),
    ],
)
def test_models_that_differ_over_ranks_are_refused(name: str, words: tuple[str, ...]) -> None:
    """Every rank gets the first difference with both values at wrapping, not a hang in the first step."""
    for message in run_ranks(wrap_unlike_models, 2, name):
        assert all(word in message for word in words), message
