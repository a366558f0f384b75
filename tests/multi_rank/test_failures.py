"""One rank fails, hangs or does something else than the others: everybody ends soon, in an error that says where.

The world's own timeout is far away, so what ends a rank in these tests is hybrid.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import ONE_STEP, assert_weights, seeded, strategy_of, weights_of, wrapped
from tests.ranks import RankFailure, RankReport, run_ranks

BROKEN = 1
TIMEOUT_SECONDS = 4.0
HANG_TIMEOUT_SECONDS = 2.0
# The end of a rank that has failed, on a busy machine.
SLACK_SECONDS = 2.0


def mlp() -> nn.Module:
    torch.manual_seed(20)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(900 + 10 * step + dist.get_rank())
    return torch.randn(4, 4, generator=generator), torch.randn(4, 3, generator=generator)


def reports_of(function: Callable[..., Any], world_size: int, *args: Any) -> tuple[RankReport, ...]:
    with pytest.raises(RankFailure) as caught:
        run_ranks(function, world_size, *args, timeout_seconds=40, group_timeout_seconds=30)
    return caught.value.reports


def assert_told(report: RankReport) -> None:
    """The rank's error names the collective it was in and what came before it."""
    assert report.error.startswith("CollectiveError"), f"rank {report.rank}: {report.error or 'no error'}"
    assert f"rank {report.rank}" in report.error
    assert any(op in report.error for op in ("all_reduce", "reduce_scatter", "all_gather")), report.error
    assert "The last collectives" in report.error


# -- a rank that raises, dies or hangs --------------------------------------------------------------------------


def break_now(how: str) -> None:
    if how == "raise":
        raise ValueError("the data of this rank is broken")
    if how == "exit":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(HANG_TIMEOUT_SECONDS + SLACK_SECONDS)
    raise TimeoutError("this rank was stuck")


def train_until_one_breaks(where: str, how: str, stage: int) -> None:
    timeout_seconds = HANG_TIMEOUT_SECONDS if how == "hang" else TIMEOUT_SECONDS
    strategy = strategy_of(stage=stage, timeout_seconds=timeout_seconds, bucket_bytes=64)
    model, optimizer = wrapped(mlp(), adamw, strategy)
    breaks = False

    def break_at(place: str) -> None:
        if breaks and place == where:
            break_now(how)

    def in_backward(gradient: torch.Tensor) -> None:
        break_at("backward")

    def forward_step(model: nn.Module, batch: Any) -> torch.Tensor:
        break_at("train_batch")
        output = model(batch[0])
        output.register_hook(in_backward)
        return functional.mse_loss(output, batch[1])

    optimizer.register_step_pre_hook(lambda *_: break_at("step"))
    for step in range(3):
        breaks = step == 1 and dist.get_rank() == BROKEN
        if where == "train_batch":
            model.train_batch(batch_of(step), optimizer, forward_step=forward_step)
        else:
            forward_step(model, batch_of(step)).backward()
            optimizer.step()
            optimizer.zero_grad()


OWN_MESSAGE = {
    "raise": "ValueError: the data of this rank is broken",
    "exit": "ended with exit code 3",
    "kill": "ended with exit code -9",
    "hang": "TimeoutError: this rank was stuck",
}


@pytest.mark.parametrize("how", OWN_MESSAGE)
@pytest.mark.parametrize(("where", "stage"), [("backward", 2), ("step", 1), ("train_batch", 0)])
def test_when_one_rank_breaks_the_others_end_with_the_call_they_were_in(where: str, how: str, stage: int) -> None:
    """Protects a job on many machines: no rank waits for ever for one that is gone, and none goes on alone."""
    reports = reports_of(train_until_one_breaks, 3, where, how, stage)
    assert OWN_MESSAGE[how] in reports[BROKEN].error
    for report in reports:
        if report.rank != BROKEN:
            assert_told(report)
            # One that is stuck is left behind; one that is gone is noticed within the timeout.
            late_seconds = report.seconds - reports[BROKEN].seconds
            assert late_seconds <= (0 if how == "hang" else TIMEOUT_SECONDS), (
                f"rank {report.rank}: {late_seconds:.1f} s"
            )


# -- a rank that does something else ----------------------------------------------------------------------------


def backward(model: Any, step: int = 0, weight: float = 1.0) -> None:
    inputs, labels = batch_of(step)
    (functional.mse_loss(model(inputs), labels) * weight).backward()


def extra_backward(model: Any, optimizer: Any, *, is_odd: bool) -> None:
    backward(model)
    if is_odd:
        backward(model)
    optimizer.step()


def skips_the_step(model: Any, optimizer: Any, *, is_odd: bool) -> None:
    backward(model)
    if not is_odd:
        optimizer.step()
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def clips_alone(model: Any, optimizer: Any, *, is_odd: bool) -> None:
    backward(model)
    if is_odd:
        model.clip_grad_norm_(1e-3)
    optimizer.step()


def clips_by_another_norm(model: Any, optimizer: Any, *, is_odd: bool) -> None:
    backward(model)
    model.clip_grad_norm_(1e-3, 1.0 if is_odd else 2.0)
    optimizer.step()


def stops_early(model: Any, optimizer: Any, *, is_odd: bool) -> None:
    for _ in range(1 if is_odd else 2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


def stops_train_batch_early(model: Any, optimizer: Any, *, is_odd: bool) -> None:
    for _ in range(1 if is_odd else 2):
        model.train_batch(batch_of(0), optimizer, loss_fn=functional.mse_loss)


def evaluates_instead(model: Any, optimizer: Any, *, is_odd: bool) -> None:
    if is_odd:
        model.eval_batch(batch_of(0), functional.mse_loss)
    model.train_batch(batch_of(0), optimizer, loss_fn=functional.mse_loss)


def reads_a_gradient_alone(model: Any, optimizer: Any, *, is_odd: bool) -> None:
    backward(model)
    if is_odd:
        hybrid.full_gradient(next(model.parameters()))
    optimizer.step()


WRONG_USES = (
    extra_backward,
    skips_the_step,
    clips_alone,
    clips_by_another_norm,
    stops_early,
    stops_train_batch_early,
    evaluates_instead,
    reads_a_gradient_alone,
)


def use_wrongly(use: Callable[..., None], stage: int) -> None:
    model, optimizer = wrapped(mlp(), adamw, strategy_of(stage=stage, timeout_seconds=HANG_TIMEOUT_SECONDS))
    use(model, optimizer, is_odd=dist.get_rank() == BROKEN)


@pytest.mark.parametrize("use", WRONG_USES, ids=lambda use: use.__name__)
def test_a_rank_that_does_something_else_ends_in_an_error(use: Callable[..., None]) -> None:
    """Protects against a wrong number: calls that do not belong together never meet in silence."""
    reports = reports_of(use_wrongly, 2, use, 2)
    told = [report for report in reports if report.failed]
    assert any(report.error.startswith("CollectiveError") for report in told), [report.error for report in told]
    for report in told:
        # The one that is told first leaves, and the other meets a closed connection.
        assert_told(report)


def defer_on_one_rank(stage: int) -> None:
    model, optimizer = wrapped(mlp(), sgd, strategy_of(stage=stage, timeout_seconds=HANG_TIMEOUT_SECONDS))
    plain = mlp()
    for rank in range(2):
        generator = seeded(900 + rank)
        inputs, labels = torch.randn(4, 4, generator=generator), torch.randn(4, 3, generator=generator)
        (functional.mse_loss(plain(inputs), labels) / 2).backward()
    sgd(plain.parameters()).step()
    with model.no_sync() if dist.get_rank() == BROKEN else contextlib.nullcontext():
        backward(model)
    optimizer.step()
    assert_weights(model, weights_of(plain), ONE_STEP)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_deferring_on_one_rank_only_is_right_or_an_error(stage: int) -> None:
    """Protects against a rank whose gradients are missing from the sum because it was inside no_sync."""
    try:
        run_ranks(defer_on_one_rank, 2, stage, timeout_seconds=40, group_timeout_seconds=30)
    except RankFailure as failure:
        for report in failure.reports:
            assert_told(report)


OTHER_STRATEGIES: dict[str, dict[str, Any]] = {
    "stage": {"stage": 1},
    "bucket_bytes": {"bucket_bytes": 64},
    "partition": {"partition": "parameter"},
    "accumulate_steps": {"accumulate_steps": 2},
    "gradient_clipping": {"gradient_clipping": 1e-3},
    "loss_reduction": {"loss_reduction": "sum"},
}


def train_with_another_strategy(setting: str) -> None:
    common: dict[str, Any] = {"stage": 2, "timeout_seconds": HANG_TIMEOUT_SECONDS}
    if dist.get_rank() == BROKEN:
        common |= OTHER_STRATEGIES[setting]
    model, optimizer = wrapped(mlp(), adamw, strategy_of(**common))
    for step in range(2):
        model.train_batch(batch_of(step), optimizer, loss_fn=functional.mse_loss)


@pytest.mark.parametrize("setting", OTHER_STRATEGIES)
def test_ranks_with_different_strategies_end_in_an_error(setting: str) -> None:
    """Protects against ranks that scale, clip or cut in their own way, under a process group that somebody started."""
    reports = reports_of(train_with_another_strategy, 2, setting)
    assert all(report.failed for report in reports), [report.error for report in reports]


# -- models that are not the same -------------------------------------------------------------------------------


def other_model(kind: str) -> nn.Module:
    model = mlp()
    model.register_buffer("table", torch.zeros(4))
    if dist.get_rank() != BROKEN:
        return model
    if kind == "wider":
        return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    if kind == "transposed":
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(6, 3))
    if kind == "deeper":
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 3))
    if kind == "renamed":
        return nn.ModuleDict({"0": model[0], "two": model[2]})
    if kind == "frozen":
        model[0].weight.requires_grad_(False)
        return model
    if kind == "dtype":
        return model.double()
    if kind == "buffer of another shape":
        model.table = torch.zeros(5)
        return model
    assert kind == "buffer more"
    model.register_buffer("more", torch.zeros(3))
    return model


def wrap_other_model(kind: str) -> None:
    hybrid.distributed_model(other_model(kind), strategy=strategy_of(stage=2, timeout_seconds=HANG_TIMEOUT_SECONDS))


@pytest.mark.parametrize(
    "kind",
    ["wider", "transposed", "deeper", "renamed", "frozen", "dtype", "buffer of another shape", "buffer more"],
)
def test_models_that_differ_between_ranks_are_refused_on_all_of_them(kind: str) -> None:
    """Protects against ranks that exchange parts of different parameters; the first difference is named."""
    reports = reports_of(wrap_other_model, 3, kind)
    for report in reports:
        assert report.error.startswith("ModelError: the model is not the same on all ranks"), report.error
        assert f"rank {BROKEN}" in report.error


# -- going on after an error that all ranks saw -----------------------------------------------------------------


def fail_together_and_go_on(stage: int) -> None:
    plain = mlp()
    plain_optimizer = sgd(plain.parameters())
    strategy = strategy_of(stage=stage, timeout_seconds=TIMEOUT_SECONDS, bucket_bytes=64, accumulate_steps=2)
    model, optimizer = wrapped(mlp(), sgd, strategy)

    def broken_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = output * 1

        def fail(_: torch.Tensor) -> None:
            raise KeyError("a bad sample")

        hidden.register_hook(fail)
        return functional.mse_loss(hidden, labels)

    def bad_step(by_train_batch: bool) -> None:
        inputs, labels = batch_of(9)
        if by_train_batch:
            model.train_batch((inputs, labels), optimizer, loss_fn=broken_loss)
        else:
            broken_loss(model(inputs), labels).backward()

    for step in range(3):
        with pytest.raises(KeyError):
            bad_step(step == 1)
        model.zero_grad()
        for rank in range(2):
            generator = seeded(900 + 10 * step + rank)
            inputs, labels = torch.randn(4, 4, generator=generator), torch.randn(4, 3, generator=generator)
            (functional.mse_loss(plain(inputs), labels) / 2).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        model.train_batch(batch_of(step), optimizer, loss_fn=functional.mse_loss)
    assert_weights(model, weights_of(plain), 1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_after_an_error_on_all_ranks_and_zero_grad_training_goes_on_right(stage: int) -> None:
    """Protects loops that skip a bad batch: a backward that broke off leaves no half-open reduction behind."""
    run_ranks(fail_together_and_go_on, 2, stage)
