"""Batches that do not divide: fewer samples on some ranks, none at all, tokens that do not count.

One process sees the samples of all ranks as one batch; whatever their distribution, the numbers are its numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

import hybrid
from tests.models import LanguageModel, build, seeded
from tests.parity_case import make_optimizer
from tests.ranks import run_ranks
from tests.scenario import DTYPE, Job, assert_as_plain, make_strategy

IGNORED = -100

# Samples of each of three ranks, step by step.
UNEVEN = ((3, 2, 0), (0, 0, 4), (1, 5, 2), (0, 1, 0), (2, 2, 2))


def share(job: Job, batch: tuple[torch.Tensor, ...], sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The rank's samples when the ranks have `sizes` of them; all in one plain process."""
    start = 0 if job.is_plain else sum(sizes[: job.rank])
    end = sum(sizes) if job.is_plain else start + sizes[job.rank]
    return tuple(tensor[start:end] for tensor in batch)


def regression(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(40 + step)
    return torch.randn(size, 15, generator=generator, dtype=DTYPE), torch.randn(
        size, 15, generator=generator, dtype=DTYPE
    )


def uneven(job: Job, *, reduction: str) -> dict[str, Any]:
    model, optimizer = job.build("blocks", "sgd")
    losses, counts, gradients = [], [], []
    if not job.is_plain:
        optimizer.register_step_pre_hook(lambda *_: gradients.append(dict(model.named_gradients())))
    for step, sizes in enumerate(UNEVEN):
        inputs, labels = share(job, regression(step, sum(sizes)), sizes)

        def loss_fn(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return functional.mse_loss(output, wanted) if reduction == "mean" else (output - wanted).square().sum() / 99

        if job.is_plain:
            loss = loss_fn(model(inputs), labels)
            loss.backward()
            gradients.append(job.gradients(model))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            counts.append(len(inputs))
        else:
            result = model.train_batch((inputs, labels), optimizer, loss_fn=loss_fn)
            losses.append(result.loss.item())
            counts.append(result.samples)
    return {"loss": losses, "weight": job.weights(model), "gradient": gradients, "same": counts}


@pytest.mark.parametrize(
    ("accumulate_steps", "reduction", "deferred"), [(1, "mean", False), (2, "sum", False), (2, "mean", True)]
)
def test_uneven_and_empty_local_batches(accumulate_steps: int, reduction: str, deferred: bool) -> None:
    """Ranks with 3, 2 and 0 samples: each sample counts once, however many its rank or micro-batch has."""
    assert_as_plain(
        functools.partial(uneven, reduction=reduction),
        world_size=3,
        deferred=deferred,
        accumulate_steps=accumulate_steps,
        loss_reduction=reduction,
        bucket_bytes=600,
    )


def token_loss(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over the labels that count, their number)."""
    logits = model(tokens=batch["tokens"], labels=batch["labels"]).logits
    labels = batch["labels"].flatten()
    total = functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


def tokens(step: int, counted: Sequence[int]) -> dict[str, torch.Tensor]:
    """Two samples of five tokens per rank; the first `counted[rank]` labels of a rank count."""
    generator = seeded(70 + step)
    shape = (2 * len(counted), LanguageModel.LENGTH)
    ids = torch.randint(0, LanguageModel.VOCABULARY, shape, generator=generator)
    labels = torch.randint(0, LanguageModel.VOCABULARY, shape, generator=generator).view(len(counted), -1)
    labels[torch.arange(labels.shape[1]) >= torch.tensor(counted)[:, None]] = IGNORED
    return {"tokens": ids, "labels": labels.view(shape)}


# Labels that count on each of two ranks. In the third step no rank has one.
COUNTED = ((7, 3), (5, 0), (0, 0), (1, 10))


def masked(job: Job) -> dict[str, Any]:
    """Token-weighted steps; the one without any token is left out, and the schedule does not advance."""
    job.name = "lm"
    model = job.wrap(build("lm", dtype=DTYPE))
    optimizer = job.wrap_optimizer(make_optimizer("adamw", model))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses, seen, weights = [], [], []
    for step, counted in enumerate(COUNTED):
        batch = tokens(step, counted)
        if job.is_plain:
            total, count = token_loss(model, batch)
            if count > 0:
                (total / count).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            losses.append((total / count.clamp(min=1)).item())
            seen.append((count.item(), count.item() == 0, 2 * len(counted)))
        else:
            mine = {key: value[2 * job.rank : 2 * job.rank + 2] for key, value in batch.items()}
            result = model.train_batch(mine, optimizer, lr_scheduler=scheduler, forward_step=token_loss)
            losses.append(result.loss.item())
            seen.append((result.tokens, result.skipped, result.samples))
        weights.append(job.weights(model))
    rates = [group["lr"] for group in optimizer.param_groups]
    return {"loss": losses, "weight": weights, "state": job.state(model, optimizer), "same": [seen, rates]}


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_token_weighted_loss_and_masked_ranks(accumulate_steps: int) -> None:
    """A mean over tokens, not over ranks; without a token anywhere weights, state and schedule stay as they are."""
    assert_as_plain(masked, accumulate_steps=accumulate_steps)
    assert_as_plain(masked, stages=(2,), deferred=True, accumulate_steps=accumulate_steps, bucket_bytes=600)


def weighted_over_calls(job: Job, *, looks: bool, finishes: str, empty: bool) -> dict[str, Any]:
    """Two accumulating calls of unequal size, then an update; gradients may be looked at in between."""
    model, optimizer = job.build("blocks", "sgd")
    gradients = []
    for update in range(2):
        sizes = ((4, 2), (1, 0 if empty else 1), (2, 3))
        batches = [share(job, regression(3 * update + i, sum(size)), size) for i, size in enumerate(sizes)]
        if job.is_plain:
            inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
            functional.mse_loss(model(inputs), labels).backward()
            gradients.append(job.gradients(model))
            optimizer.step()
            optimizer.zero_grad()
            continue
        for call, batch in enumerate(batches):
            is_last = call == len(batches) - 1 and finishes == "train_batch"
            if is_last:
                hook = optimizer.register_step_pre_hook(lambda *_: gradients.append(dict(model.named_gradients())))
            model.train_batch(batch, optimizer, loss_fn=functional.mse_loss, step=is_last)
            if is_last:
                hook.remove()
            elif looks:
                model.clip_grad_norm_(float("inf"))
        if finishes == "step":
            gradients.append(dict(model.named_gradients()))
            optimizer.step()
            optimizer.zero_grad()
    return {"weight": job.weights(model), "gradient": gradients}


@pytest.mark.parametrize("finishes", ["train_batch", "step"])
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("empty", [False, True])
def test_calls_that_accumulate_weigh_their_samples(empty: bool, looks: bool, finishes: str) -> None:
    """`step=False` calls of unequal size give the mean over all samples: also if a rank had none in one of them,

    if a norm was read between them, and if the plain `optimizer.step()` ends the accumulation.
    """
    assert_as_plain(functools.partial(weighted_over_calls, looks=looks, finishes=finishes, empty=empty))


def evaluated() -> list[tuple[float, float]]:
    """(mean, count) of the values 1, 2, 3, 4, 10 over uneven batches of this rank."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = hybrid.distributed_model(torch.nn.Linear(1, 1), strategy=make_strategy(1))
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0]).unsqueeze(1)
    results = []
    for mine in (values[rank::world_size], values if rank == 0 else values[:0]):
        result = model.eval_batch(mine, forward_step=lambda model, batch: batch.mean())
        results.append((result.loss.item(), result.count.item()))
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_evaluation_weighs_samples_not_ranks(world_size: int) -> None:
    """The mean over the set, whatever its split; empty ranks neither hang nor count."""
    assert run_ranks(evaluated, world_size) == [[(4.0, 5.0), (4.0, 5.0)]] * world_size


def bad_batch(kind: str) -> str:
    model = hybrid.distributed_model(build("blocks"), strategy=make_strategy(2))
    optimizer = hybrid.distributed_optimizer(make_optimizer("sgd", model))
    inputs, labels = torch.ones(4, 15), torch.ones(3 if kind == "lengths" else 4, 15)
    calls = {
        "lengths": lambda: model.train_batch((inputs, labels), optimizer, loss_fn=functional.mse_loss),
        "vector": lambda: model.train_batch((inputs, labels), optimizer, loss_fn=lambda o, y: (o - y).mean(dim=1)),
        "no loss": lambda: model.train_batch((inputs, labels), optimizer),
        "no tensor": lambda: model.train_batch({"text": "abc"}, optimizer),
    }
    try:
        calls[kind]()
    except hybrid.BatchError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("lengths", ("batch[0] has 4", "batch[1] has 3")),
        ("vector", ("shape (4,)", ".mean()")),
        ("no loss", ("loss_fn", "forward_step")),
        ("no tensor", ("dict", "no tensor")),
    ],
)
def test_batches_without_a_meaning_are_refused(kind: str, words: tuple[str, ...]) -> None:
    """Each error says what was found and what to give; all ranks get it, none hangs."""
    for message in run_ranks(bad_batch, 2, kind):
        assert all(word in message for word in words), message


def left_out(job: Job, *, looks: str) -> dict[str, Any]:
    """In step 1 the second rank has nothing to run backward on; something may ask for gradients before the step."""
    model, optimizer = job.build("blocks", "sgd")
    norms = []
    for step in range(3):
        batch = regression(step, 8)
        parts = [tuple(tensor[start : start + 4] for tensor in batch) for start in (0, 4)]
        present = [0] if step == 1 else [0, 1]
        for rank in present if job.is_plain else [job.rank] if job.rank in present else []:
            loss = functional.mse_loss(model(parts[rank][0]), parts[rank][1])
            (loss / 2 if job.is_plain else loss).backward()
        if looks == "norm" and not job.is_plain:
            norms.append(model.clip_grad_norm_(float("inf")))
        elif looks == "norm":
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            norms.append(torch.nn.utils.get_total_norm(gradients))
        elif looks == "gradients":
            norms.append(job.gradients(model)["scale"])
        optimizer.step()
        optimizer.zero_grad()
    return {"weight": job.weights(model), "norm": norms}


@pytest.mark.parametrize("looks", ["not", "norm", "gradients"])
def test_a_rank_may_leave_a_backward_out(looks: str) -> None:
    """In a plain loop, what a rank without samples did not launch is completed by whoever needs the gradients."""
    assert_as_plain(functools.partial(left_out, looks=looks))
