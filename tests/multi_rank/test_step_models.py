"""Models and optimizers in the ways scripts use them: several at once, read between steps, interrupted by errors."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from tests.parity_case import make_optimizer
from tests.ranks import run_plain
from tests.scenario import DTYPE, Job, assert_as_plain, build

# -- several optimizers, several models -------------------------------------------------------------------------


def two_optimizers(job: Job, *, every: int) -> dict[str, Any]:
    """Disjoint parameters of one model; the second optimizer steps every so often, on what has accumulated."""
    job.name = "blocks"
    model = job.wrap(build("blocks", dtype=DTYPE))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    first = job.wrap_optimizer(torch.optim.AdamW(parameters[::2], lr=1e-2))
    second = job.wrap_optimizer(torch.optim.SGD(parameters[1::2], lr=0.1, momentum=0.9))
    for step in range(4):
        job.loss(model, step).backward()
        first.step()
        first.zero_grad()
        if step % every == every - 1:
            second.step()
            second.zero_grad()
    states = [job.state(model, first), job.state(model, second)]
    return {"weight": job.weights(model), "state": states}


@pytest.mark.parametrize("every", [1, 2])
def test_two_optimizers_of_one_model(every: int) -> None:
    """Each steps and clears its own parameters; buckets that both share keep the other's gradients."""
    assert_as_plain(functools.partial(two_optimizers, every=every))


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 17), nn.Tanh(), nn.Linear(17, 15))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.layers(noise)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(15, 17), nn.Tanh(), nn.Linear(17, 1))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return self.layers(samples)


def adversaries(job: Job) -> dict[str, Any]:
    """The critic steps twice for each step of the generator, whose loss goes through the critic."""
    torch.manual_seed(5)
    generator, critic = Generator().to(DTYPE), Critic().to(DTYPE)
    generator_optimizer = make_optimizer("adamw", generator)
    generator, critic = job.wrap(generator), job.wrap(critic)
    critic_optimizer = job.wrap_optimizer(make_optimizer("sgd", critic))
    generator_optimizer = job.wrap_optimizer(generator_optimizer)
    losses = []
    for step in range(6):
        real = job.batch(step, "blocks")[0]
        noise = real[:, :7]
        if step % 3 < 2:
            loss = critic(generator(noise).detach()).square().mean() + (1 - critic(real)).square().mean()
            critic_optimizer.zero_grad()
            loss.backward()
            critic_optimizer.step()
        else:
            loss = (1 - critic(generator(noise))).square().mean()
            generator_optimizer.zero_grad()
            loss.backward()  # leaves gradients in the critic, which its next zero_grad clears
            generator_optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "weight": [job.weights(generator), job.weights(critic)]}


def test_two_models_trained_in_turn() -> None:
    """A GAN, 2:1: each model has its own engine, and gradients that pass through the other one do no harm."""
    assert_as_plain(adversaries)
    assert_as_plain(adversaries, stages=(2,), world_size=3, deferred=True)


def trained_before(job: Job, *, optimizer_name: str) -> dict[str, Any]:
    """Two steps of plain torch (on the whole batch, alike on every rank), then wrapped and trained on."""
    job.name = "blocks"
    model = build("blocks", dtype=DTYPE)
    optimizer = make_optimizer(optimizer_name, model)
    plain = Job(None)
    plain.name = "blocks"
    for step in range(2):
        plain.update(model, optimizer, step)
    model = job.wrap(model)
    optimizer = job.wrap_optimizer(optimizer)
    adopted = job.state(model, optimizer)
    for step in range(2, 5):
        job.update(model, optimizer, step)
    return {"weight": job.weights(model), "state": [adopted, job.state(model, optimizer)]}


@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd"])
def test_an_optimizer_with_state_is_taken_over(optimizer_name: str) -> None:
    """Moments and counters of earlier plain training are cut, not lost."""
    scenario = functools.partial(trained_before, optimizer_name=optimizer_name)
    assert_as_plain(scenario)
    assert_as_plain(scenario, stages=(1, 2), world_size=3, partition="parameter")


# -- reading weights between steps ------------------------------------------------------------------------------


READERS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda model: model(torch.ones(2, 15, dtype=DTYPE)),
    "state_dict": lambda model: torch.cat([value.flatten() for value in model.state_dict().values()]),
    "detach": lambda model: model.mixing.detach().clone(),
    "data": lambda model: model.mixing.data.clone(),
    "numpy": lambda model: torch.from_numpy(np.array(model.last.bias.detach().numpy())),
    "arithmetic": lambda model: 2 * model.scale + model.first.weight.sum(),
    "index": lambda model: model.mixing[3, 4],
    "list": lambda model: torch.tensor(model.last.bias.tolist(), dtype=DTYPE),
    "item": lambda model: torch.tensor(model.scale.item(), dtype=DTYPE),
    "norm": lambda model: torch.nn.utils.get_total_norm(list(model.parameters())),
    "vector": lambda model: torch.nn.utils.parameters_to_vector(model.blocks.parameters()),
    "iteration": lambda model: torch.stack([row.sum() for row in model.mixing]),
    "out": lambda model: torch.add(model.last.bias, 1, out=torch.empty(15, dtype=DTYPE)),
    "lerp of an average": lambda model: torch.zeros(15, dtype=DTYPE).lerp_(model.last.bias, 0.5),
    "copy": lambda model: torch.zeros(15, dtype=DTYPE).copy_(model.last.bias),
    "foreach": lambda model: torch.stack(torch._foreach_norm([model.first.weight, model.last.bias])),
    "functional call": lambda model: torch.func.functional_call(
        model.widening, dict(model.widening.named_parameters()), (torch.ones(2, 15, dtype=DTYPE),)
    ),
}


def _through_a_file(parameter: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    return torch.load(file, weights_only=False).detach()


def read_between_steps(job: Job) -> dict[str, Any]:
    """Each reader comes right after an update, before anything else touches the model."""
    model, optimizer = job.build("blocks")
    seen = {}
    for step, (name, reader) in enumerate(READERS.items()):
        job.update(model, optimizer, step)
        model.eval()
        with torch.no_grad():
            seen[name] = reader(model).clone()
        model.train()
    return {"weight": [seen, job.weights(model)]}


@pytest.mark.parametrize("overlap_param_gather", [False, True])
def test_reads_between_steps_see_new_weights(overlap_param_gather: bool) -> None:
    """However the weights are read, nobody meets old values or buffers under way (on the deferred backend: NaN)."""
    assert_as_plain(read_between_steps, stages=(1, 2), deferred=True, overlap_param_gather=overlap_param_gather)
    assert_as_plain(read_between_steps, stages=(2,), overlap_param_gather=overlap_param_gather)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": lambda model: copy.deepcopy(model.blocks[0]),
    "copied parameter": lambda model: copy.deepcopy(model.mixing),
    "file": lambda model: _through_a_file(model.widening.weight),
}


def copied_between_steps(job: Job, *, way: str) -> dict[str, Any]:
    """A copy made right after an update is an ordinary module or parameter with the new values, and stays apart."""
    model, optimizer = job.build("blocks")
    job.update(model, optimizer, 0)
    copied = COPIES[way](model)
    job.update(model, optimizer, 1)
    parameters = list(copied.parameters()) if isinstance(copied, nn.Module) else [copied]
    values = [(2 * parameter).detach().clone() for parameter in parameters]
    return {
        "weight": [values, job.weights(model)],
        "same": [type(parameter).__name__ for parameter in parameters],
    }


@pytest.mark.parametrize("overlap_param_gather", [False, True])
@pytest.mark.parametrize("way", COPIES)
def test_copies_made_between_steps(way: str, overlap_param_gather: bool) -> None:
    """Moving averages and snapshots copy submodules: the copy has new values and belongs to no engine."""
    scenario = functools.partial(copied_between_steps, way=way)
    assert_as_plain(scenario, stages=(1, 2), overlap_param_gather=overlap_param_gather)


def written_between_steps(job: Job) -> dict[str, Any]:
    """Weights edited in place after an update whose parameters are still on their way."""
    model, optimizer = job.build("blocks")
    for step in range(3):
        job.update(model, optimizer, step)
        with torch.no_grad():
            model.mixing.mul_(0.5)
            model.last.bias.copy_(torch.arange(15, dtype=DTYPE) / 10)
            nn.init.ones_(model.scale)
            model.first.weight.data.clamp_(-0.1, 0.1)
    return {"weight": job.weights(model)}


@pytest.mark.parametrize("overlap_param_gather", [False, True])
def test_weights_edited_in_place_between_steps(overlap_param_gather: bool) -> None:
    """An edit made alike on all ranks is not overwritten by values that arrive later, and the next step uses it."""
    assert_as_plain(written_between_steps, stages=(1, 2), deferred=True, overlap_param_gather=overlap_param_gather)


# -- interrupted steps ------------------------------------------------------------------------------------------


def step_inside_a_graph(job: Job) -> dict[str, Any]:
    """A step between forward and backward: autograd must notice that saved weights have changed."""
    model, optimizer = job.build("blocks")
    first, second = job.loss(model, 0), job.loss(model, 1)
    first.backward()
    optimizer.step()
    error = ""
    try:
        second.backward()
    except RuntimeError as raised:
        error = str(raised)
    model.zero_grad()
    job.update(model, optimizer, 2)
    return {"weight": job.weights(model), "same": "modified by an inplace operation" in error}


def test_a_step_between_forward_and_backward_raises() -> None:
    """Plain torch refuses this with an error; gradients of mixed weights would be silently wrong."""
    assert_as_plain(step_inside_a_graph)


class Raising(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("planted in backward")


def failing_backward(job: Job, *, way: str, clears: bool) -> dict[str, Any]:
    """The backward of step 1 raises on all ranks in the middle of the blocks; the script catches it and goes on."""
    model, optimizer = job.build("blocks")
    caught = 0
    for step in range(4):
        handle = None
        if step == 1:
            handle = model.blocks[2].register_forward_hook(lambda module, inputs, output: Raising.apply(output))
        try:
            if way == "train_batch":
                job.update(model, optimizer, step)
            else:
                job.loss(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        except ArithmeticError:
            caught += 1
            if clears:
                optimizer.zero_grad()
        if handle is not None:
            handle.remove()
    return {"weight": job.weights(model), "same": caught}


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(("way", "clears"), [("train_batch", True), ("loop", True), ("loop", False)])
def test_training_goes_on_after_a_failed_backward(way: str, clears: bool, deferred: bool) -> None:
    """What the failed pass has left is cleared by zero_grad, or (uncleared, as in plain torch) still counts."""
    scenario = functools.partial(failing_backward, way=way, clears=clears)
    assert_as_plain(scenario, deferred=deferred, bucket_bytes=600)


def failing_forward(job: Job) -> dict[str, Any]:
    model, optimizer = job.build("blocks")
    for step in range(3):
        if step == 1:
            handle = model.blocks[3].register_forward_hook(lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                job.update(model, optimizer, step)
            handle.remove()
        job.update(model, optimizer, step)
    return {"weight": job.weights(model)}


def test_training_goes_on_after_a_failed_forward() -> None:
    """An error in forward inside train_batch leaves no half-open step behind."""
    assert_as_plain(failing_forward, accumulate_steps=2)


# -- one process ------------------------------------------------------------------------------------------------


def alone(zero_stage: int) -> dict[str, Any]:
    """Three steps without a launcher, one of them a plain loop."""
    strategy = hybrid.DistributedStrategy()
    strategy.sharding = True
    strategy.sharding_configs = {"stage": zero_stage}
    job = Job(strategy)
    job_plain = Job(None)
    return {"hybrid": _three_steps(job), "plain": _three_steps(job_plain)}


def _three_steps(job: Job) -> dict[str, torch.Tensor]:
    model, optimizer = job.build("blocks")
    job.update(model, optimizer, 0)
    functional.mse_loss(model(job.batch(1)[0]), job.batch(1)[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    job.update(model, optimizer, 2)
    return job.weights(model)


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_one_process_without_a_launcher(zero_stage: int) -> None:
    """A script with hybrid in it runs as it is on a laptop, without launch variables, and gives the plain result."""
    results = run_plain(alone, zero_stage)
    for name, weight in results["plain"].items():
        torch.testing.assert_close(results["hybrid"][name], weight, rtol=1e-12, atol=1e-12)
