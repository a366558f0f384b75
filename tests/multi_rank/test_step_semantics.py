"""What surrounds a step in a training script works as in plain torch: schedulers, closures, options, hooks, zeroing.

Each test runs one scenario (tests/scenario.py) plainly and on two ranks under stages 0, 1 and 2.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from tests.parity_case import make_optimizer
from tests.scenario import DTYPE, Job, assert_as_plain, build

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.7**epoch),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.01], total_steps=8),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    ),
}


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def scheduled(job: Job, *, kind: str, built: str) -> dict[str, Any]:
    """A scheduler stepped by `train_batch`; torch's warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job.name = "blocks"
        model = build("blocks", dtype=DTYPE)
        optimizer = make_optimizer("adamw", model)
        scheduler = SCHEDULERS[kind](optimizer) if built == "before" else None
        model = job.wrap(model)
        optimizer = job.wrap_optimizer(optimizer)
        scheduler = scheduler or SCHEDULERS[kind](optimizer)
        seen = []
        for step in range(5):
            job.update(model, optimizer, step, scheduler)
            seen.append(options(optimizer))
    return {"weight": job.weights(model), "same": seen}


@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_step_once_per_update(kind: str, built: str) -> None:
    """Rates and cycled momenta follow the updates, not micro-batches or ranks, wherever the scheduler was built."""
    assert_as_plain(functools.partial(scheduled, kind=kind, built=built), stages=(0, 2), accumulate_steps=3)


def scheduled_loop(job: Job, *, built: str, order: str) -> dict[str, Any]:
    """A scheduler stepped by hand, after the optimizer or (wrongly) before it; the warnings are part of the result."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.name = "blocks"
        model = build("blocks", dtype=DTYPE)
        optimizer = make_optimizer("sgd", model)
        scheduler = SCHEDULERS["lambda"](optimizer) if built == "before" else None
        model = job.wrap(model)
        optimizer = job.wrap_optimizer(optimizer)
        scheduler = scheduler or SCHEDULERS["lambda"](optimizer)
        for step in range(3):
            job.loss(model, step).backward()
            for stepping in (optimizer, scheduler) if order == "right" else (scheduler, optimizer):
                stepping.step()
            model.zero_grad()
    messages = [f"{w.category.__name__}: {str(w.message)[:60]}" for w in caught]
    return {"weight": job.weights(model), "same": [options(optimizer), messages]}


@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("order", ["right", "wrong"])
def test_a_scheduler_in_a_plain_loop_warns_as_in_plain_torch(built: str, order: str) -> None:
    """No warning in the right order; in the wrong one torch's warning still comes."""
    assert_as_plain(functools.partial(scheduled_loop, built=built, order=order), stages=(1, 2))


def accumulating_calls(job: Job) -> dict[str, Any]:
    """Three calls per update; only the third one steps the optimizer and the scheduler."""
    model, optimizer = job.build("blocks")
    scheduler = SCHEDULERS["lambda"](optimizer)
    seen = []
    for update in range(2):
        for call in range(3):
            step = 3 * update + call
            if job.is_plain:
                (job.loss(model, step) / 3).backward()
                if call == 2:
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
            else:
                batch = job.batch(step)
                model.train_batch(
                    batch, optimizer, lr_scheduler=scheduler, loss_fn=torch.nn.functional.mse_loss, step=call == 2
                )
            seen.append(options(optimizer))
    return {"weight": job.weights(model), "same": seen}


def test_step_false_leaves_the_schedule_alone() -> None:
    """Calls that only accumulate do not advance the learning rate."""
    assert_as_plain(accumulating_calls, accumulate_steps=2)


def closure(job: Job) -> dict[str, Any]:
    model, optimizer = job.build("blocks")
    losses, calls = [], 0
    for step in range(3):

        def evaluate(step: int = step) -> torch.Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = job.loss(model, step)
            loss.backward()
            return loss

        losses.append(optimizer.step(evaluate).item())
    return {"loss": losses, "weight": job.weights(model), "same": calls}


def test_step_with_a_closure() -> None:
    """`optimizer.step(closure)` evaluates once, with gradients enabled, and returns the loss."""
    assert_as_plain(closure)


def changed_options(job: Job) -> dict[str, Any]:
    """Rates, decay and betas set by hand, and a group added late."""
    job.name = "blocks"
    model = job.wrap(build("blocks", dtype=DTYPE))
    parameters = dict(model.named_parameters())
    held_back = [parameters.pop("mixing"), parameters.pop("scale")]
    optimizer = job.wrap_optimizer(torch.optim.AdamW(parameters.values(), lr=1e-2))
    for step in range(5):
        if step == 1:
            optimizer.param_groups[0]["lr"] = 3e-3
        elif step == 2:
            optimizer.param_groups[0].update(weight_decay=0.3, betas=(0.5, 0.9))
        elif step == 3:
            optimizer.add_param_group({"params": held_back, "lr": 2e-2})
        job.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step < 3:
            model.zero_grad()  # of those that no group holds yet
    return {"weight": job.weights(model), "state": job.state(model, optimizer), "same": options(optimizer)}


def test_options_changed_in_training() -> None:
    """`param_groups` stay the place where options live, and groups can be added later."""
    assert_as_plain(changed_options)


def forgotten_zero_grad(job: Job) -> dict[str, Any]:
    model, optimizer = job.build("experts")
    gradients = []
    for step in (2, 0, 1):
        job.loss(model, step).backward()
        gradients.append(job.gradients(model))
        optimizer.step()
    optimizer.step()  # the same gradient once more
    return {"weight": job.weights(model), "gradient": gradients}


def test_forgotten_zero_grad_accumulates() -> None:
    """Gradients that nobody cleared are added to, and a second step uses them again, as in plain torch."""
    assert_as_plain(forgotten_zero_grad)


def zeroed(job: Job, *, way: str, optimizer_name: str) -> dict[str, Any]:
    """Steps 2, 0, 1: the second expert has a gradient, then none on any rank, then one on the first rank only."""
    model, optimizer = job.build("experts", optimizer_name)
    gradients = []
    for step in (2, 0, 1, 3):
        job.loss(model, step).backward()
        gradients.append(job.gradients(model))
        optimizer.step()
        if way == "by hand":
            for parameter in model.parameters():
                parameter.grad = None
        else:
            (optimizer if way == "optimizer" else model).zero_grad(set_to_none=False)
    return {
        "weight": job.weights(model),
        "gradient": gradients,
        "state": job.state(model, optimizer),
        "same": [parameter.grad is None for parameter in model.parameters()],
    }


@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd"])
@pytest.mark.parametrize("way", ["optimizer", "model", "by hand"])
def test_ways_to_zero(way: str, optimizer_name: str) -> None:
    """`set_to_none=False` leaves zeros, which decay and move weights; `p.grad = None` by hand leaves nothing."""
    assert_as_plain(functools.partial(zeroed, way=way, optimizer_name=optimizer_name))


def zeroed_by_hand_between_backwards(job: Job) -> dict[str, Any]:
    """One gradient is thrown away between two backward passes of the same step."""
    model, optimizer = job.build("blocks")
    for step in range(3):
        job.loss(model, step).backward()
        model.blocks[2][0].weight.grad = None
        model.first.weight.grad = None
        job.loss(model, step + 5).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weight": job.weights(model)}


def test_one_gradient_set_to_none_between_backwards() -> None:
    """Only this parameter starts anew; what others have accumulated stays."""
    assert_as_plain(zeroed_by_hand_between_backwards)


def no_backward(job: Job) -> dict[str, Any]:
    model, optimizer = job.build("blocks")
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    before = job.state(model, optimizer)
    job.update(model, optimizer, 0)
    optimizer.step()
    return {"weight": job.weights(model), "same": sorted(before)}


def test_a_step_without_a_backward_changes_nothing() -> None:
    """Without a gradient there is no update, no decay and no state."""
    assert_as_plain(no_backward)


def hooked(job: Job) -> dict[str, Any]:
    """Hooks of the optimizer note what they see: which step, and whether the parameters are the model's own."""
    model, optimizer = job.build("blocks")
    own = {id(parameter) for parameter in model.parameters()}
    seen: list[Any] = []

    def note(name: str) -> Callable[..., None]:
        def hook(hooked_optimizer: Any, args: Any, kwargs: Any) -> None:
            parameters = [p for group in hooked_optimizer.param_groups for p in group["params"]]
            seen.append((name, hooked_optimizer is optimizer, len(parameters), {id(p) for p in parameters} <= own))

        return hook

    handles = [optimizer.register_step_pre_hook(note("pre")), optimizer.register_step_post_hook(note("post"))]
    job.update(model, optimizer, 0)
    job.loss(model, 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    handles[0].remove()
    job.update(model, optimizer, 2)
    return {"weight": job.weights(model), "same": seen}


def test_step_hooks_see_the_models_parameters() -> None:
    """Pre and post hooks run once per step, around `train_batch`'s step too, and never meet slices."""
    assert_as_plain(hooked)


def graph_uses(job: Job) -> dict[str, Any]:
    """`autograd.grad`, a graph kept for two passes, two forwards before one backward."""
    model, optimizer = job.build("blocks", "sgd")
    penalty = torch.autograd.grad(job.loss(model, 0), [model.mixing, model.scale])
    loss = job.loss(model, 1)
    loss.backward(retain_graph=True)
    loss.backward()
    first, second = job.loss(model, 2), job.loss(model, 3)
    (first + 2 * second).backward()
    gradients = job.gradients(model)
    optimizer.step()
    means = [part.mean().item() for part in penalty]
    return {"weight": job.weights(model), "gradient": gradients, "loss": means}


def test_other_uses_of_the_graph() -> None:
    """`autograd.grad` accumulates nothing; a graph used twice and two graphs at once accumulate everything."""
    assert_as_plain(graph_uses)


def scaled(job: Job, *, unscales: bool) -> dict[str, Any]:
    """A plain loop with a plain `GradScaler`; in step 2 the last sample of the batch overflows."""
    model, optimizer = job.build("blocks")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales = []
    for step in range(5):
        inputs, labels = job.batch(step)
        if step == 2 and job.rank == job.world_size - 1:
            labels = torch.cat([labels[:-1], torch.full_like(labels[-1:], torch.inf)])
        scaler.scale(torch.nn.functional.mse_loss(model(inputs), labels)).backward()
        if unscales:
            scaler.unscale_(optimizer)
            if job.is_plain:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            else:
                model.clip_grad_norm_(0.3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return {"weight": job.weights(model), "state": job.state(model, optimizer), "same": scales}


@pytest.mark.parametrize("unscales", [False, True])
def test_a_plain_grad_scaler(unscales: bool) -> None:
    """Scaled losses, unscaled clips, growth, and a step that every rank skips because one of them overflowed."""
    assert_as_plain(functools.partial(scaled, unscales=unscales))
