"""Pipelines that cannot work are refused in one sentence, before a process group exists where that can be known.

And a rank that fails, dies or hangs in the middle of a step ends all others, in an error that names its peer.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hybrid
from tests.pipeline_models import (
    batch_of,
    build,
    cross_entropy,
    make_adamw,
    own,
    pipeline_strategy,
    pipeline_variant,
    train_plain,
)
from tests.ranks import RankFailure, RankReport, run_ranks

# ---- before anything starts ------------------------------------------------------------------------------------------


def linears(num_layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))


def listed(num_layers: int, **settings: Any) -> nn.Module:
    return hybrid.PipelineLayer([hybrid.LayerDesc(nn.Linear, 4, 4) for _ in range(num_layers)], **settings)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.layers(value)


class Skipping(nn.Sequential):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + super().forward(value)


# Name -> (ranks, model, settings of the strategy, what the message must say in this order).
EARLY: dict[str, tuple[int, Callable[[], nn.Module], dict[str, Any], str]] = {
    "layers-below-stages": (4, lambda: linears(3), {"pp": 4}, "3 layers .*4 pipeline chunks.*at most 3"),
    "layers-below-chunks": (
        2, lambda: linears(3), {"pp": 2, "schedule": "interleaved"}, "3 layers .*4 pipeline chunks.*at most 3",
    ),
    "listed-layers-below-stages": (4, lambda: listed(3), {"pp": 4}, "3 layers .*4 pipeline chunks.*at most 3"),
    "interleaved-groups": (
        2, lambda: linears(8), {"pp": 2, "schedule": "interleaved", "mb": 3},
        "interleaved.*groups of num_stages = 2.*accumulate_steps.* = 3; use 2 or 4",
    ),
    "interleaved-one-chunk": (
        2, lambda: linears(8), {"pp": 2, "schedule": "interleaved", "virtual_stages": 1},
        "interleaved.*virtual_stages = 1; use virtual_stages = 2",
    ),
    "too-few-counts": (2, lambda: linears(5), {"pp": 2, "split": (5,)}, r"1 counts for 2 pipeline chunks.*\[3, 2\]"),
    "counts-that-do-not-add-up": (2, lambda: linears(5), {"pp": 2, "split": (2, 2)}, "add up to 4.*5 layers"),
    "stale-counts": (2, lambda: linears(24), {"pp": 2, "split": (11, 11)}, "add up to 22.*24 layers"),
    "empty-stage": (2, lambda: linears(5), {"pp": 2, "split": (5, 0)}, "0"),
    "listed-stale-counts": (2, lambda: listed(5, seg_method=(2, 2, 1)), {"pp": 2}, "3 counts for 2 pipeline chunks"),
    "unknown-mark": (2, lambda: linears(5), {"pp": 2, "split": "layer:Block"}, "Block.*Linear"),
    "two-ways-to-split": (2, lambda: listed(5, seg_method="uniform"), {"pp": 2, "split": (3, 2)}, "split.*seg_method"),
    "degree-does-not-divide": (4, lambda: linears(8), {"pp": 3}, "degree = 3.*world_size 4"),
    "degrees-above-the-world": (4, lambda: linears(8), {"pp": 4, "tp": 2}, "pp 4.*tp 2 = 8.*world_size 4"),
    "shard-size": (4, lambda: linears(8), {"pp": 2, "stage": 2, "shard_size": 4}, "shard_size = 4.*2"),
    "model-of-its-own": (2, Own, {"pp": 2}, "Own.*needs a sample.*hybrid.PipelineLayer.*degree = 1"),
    "sequential-with-its-own-forward": (2, lambda: Skipping(*linears(4)), {"pp": 2}, "Skipping.*sample"),
}  # fmt: skip


@pytest.mark.parametrize("name", EARLY)
def test_refused_before_a_process_group_exists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch costs nothing when the plan is wrong: one sentence with the values that would work."""
    world_size, make, settings, wanted = EARLY[name]
    for key, value in {"RANK": 0, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": world_size}.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")  # nobody listens there: a start would fail in another way
    with pytest.raises(hybrid.HybridError) as caught:
        hybrid.distributed_model(make(), strategy=pipeline_strategy(**{"pp": 2, **settings}))
    message = str(caught.value)
    assert re.search(wanted, message, re.DOTALL), message
    assert not dist.is_initialized()
    assert not hybrid.is_initialized()


# ---- in a running job ------------------------------------------------------------------------------------------------


def refusals_of_calls() -> None:
    """Each names what is wrong, on every rank; afterwards the model trains as if nothing had been."""
    plain = build("tied")
    losses, _, _ = train_plain(plain, [batch_of(step) for step in range(3)], cross_entropy, make_adamw)
    with pipeline_variant(2, stage=2) as strategy:
        model: Any = hybrid.distributed_model(build("tied"), strategy=strategy)
        optimizer = hybrid.distributed_optimizer(make_adamw(model))
        tokens, labels = batch_of(0)

        def refused(error: type[Exception], wanted: str, call: Callable[[], Any]) -> None:
            with pytest.raises(error, match=wanted):
                call()

        def train(batch: Any, **keywords: Any) -> Callable[[], Any]:
            return lambda: model.train_batch(batch, optimizer, **keywords)

        refused(hybrid.ModelError, "cannot run by itself.*train_batch", lambda: model(tokens))
        refused(hybrid.BatchError, r"type dict.*\(inputs, labels\)", train({"x": tokens}, loss_fn=cross_entropy))
        refused(
            hybrid.BatchError, r"type tuple.*\(inputs, labels\)", train((tokens, labels, labels), loss_fn=cross_entropy)
        )
        refused(hybrid.BatchError, "needs loss_fn", train((tokens, labels)))
        refused(
            hybrid.BatchError, "forward_step with a pipeline", train((tokens, labels), forward_step=lambda m, b: None)
        )
        refused(
            hybrid.BatchError,
            "forward_step with a pipeline",
            lambda: model.eval_batch((tokens, labels), forward_step=lambda m, b: None),
        )
        refused(hybrid.BatchError, "leading dims", train((tokens, labels[:5]), loss_fn=cross_entropy))
        refused(hybrid.ModelError, "deep-copied", lambda: __import__("copy").deepcopy(model))
        for step in range(3):
            result = model.train_batch(own(batch_of(step)), optimizer, loss_fn=cross_entropy)
            assert abs(result.loss.item() - losses[step]) < 1e-5, (step, result.loss, losses)


def test_wrong_calls_are_refused_and_leave_a_model_that_goes_on() -> None:
    """Dict batches, a forward_step, no loss, a forward by hand: one clear sentence each, no hang."""
    run_ranks(refusals_of_calls, 4)


def train_on_another_batch(later: bool) -> None:
    """Rank 1 is the second stage of the same pipeline: its labels belong to other inputs."""
    model: Any = hybrid.distributed_model(build("tied"), strategy=pipeline_strategy(2, timeout_seconds=4))
    optimizer = hybrid.distributed_optimizer(make_adamw(model))
    if later:
        model.train_batch(batch_of(0), optimizer, loss_fn=cross_entropy)
    model.train_batch(batch_of(dist.get_rank() + 1), optimizer, loss_fn=cross_entropy)


def reports_of(function: Callable[..., Any], world_size: int, *args: Any) -> Sequence[RankReport]:
    with pytest.raises(RankFailure) as caught:
        run_ranks(function, world_size, *args, timeout_seconds=30, group_timeout_seconds=20)
    return caught.value.reports


def test_ranks_of_one_pipeline_with_different_batches() -> None:
    """Labels of one batch with the inputs of another: refused on all ranks, at the first batch."""
    for report in reports_of(train_on_another_batch, 2, False):
        assert report.error.startswith("BatchError"), report.error
        assert "one batch" in report.error, report.error


# ---- a rank that breaks ----------------------------------------------------------------------------------------------

TIMEOUT_SECONDS, SLACK_SECONDS = 2.0, 2.0


def train_until_one_breaks(how: str, where: str) -> None:
    settings: dict[str, Any] = {"schedule": "interleaved"} if how == "raise" else {}
    strategy = pipeline_strategy(4, timeout_seconds=TIMEOUT_SECONDS, **settings)
    model: Any = hybrid.distributed_model(build("chain"), strategy=strategy)
    optimizer = hybrid.distributed_optimizer(make_adamw(model))
    breaks = False

    def maybe_break(*_: Any) -> None:
        if not breaks or dist.get_rank() != 2:
            return
        if how == "raise":
            raise ValueError("the data of this rank is broken")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(TIMEOUT_SECONDS + SLACK_SECONDS)
        raise TimeoutError("this rank was stuck")

    for name in model.hybrid_runtime.stages.staged.names_here():
        layer = model.get_submodule(name)
        if where == "forward":
            layer.register_forward_pre_hook(maybe_break)
        else:
            layer.register_full_backward_hook(maybe_break)
    for step in range(3):
        breaks = step == 1
        model.train_batch(own(batch_of(step)), optimizer, loss_fn=cross_entropy)


OWN_MESSAGE = {
    "raise": "ValueError: the data of this rank is broken",
    "kill": "ended with exit code -9",
    "hang": "TimeoutError: this rank was stuck",
}


@pytest.mark.parametrize(("how", "where"), [("raise", "backward"), ("kill", "forward"), ("hang", "forward")])
def test_when_one_rank_breaks_all_end_and_name_their_peer(how: str, where: str) -> None:
    """No rank waits for ever for a neighbour, nor goes on without it; neighbours say whom they waited for."""
    reports = reports_of(train_until_one_breaks, 4, how, where)
    assert OWN_MESSAGE[how] in reports[2].error, reports[2].error
    for rank in (0, 1, 3):
        assert reports[rank].error.startswith("CollectiveError"), reports[rank].error
        assert f"rank {rank}:" in reports[rank].error, reports[rank].error
        assert "The last collectives" in reports[rank].error
        assert reports[rank].seconds < 4 * TIMEOUT_SECONDS + SLACK_SECONDS, reports[rank].seconds
    named = [rank for rank in (1, 3) if re.search(r"(from|to) rank 2 over pp_", reports[rank].error)]
    assert named, [reports[rank].error[:300] for rank in (1, 3)]


def raise_and_go_on() -> None:
    """All ranks' loss or layer raises once: the model goes on with the numbers of one process."""
    plain = build("tied")
    losses, _, _ = train_plain(plain, [batch_of(step) for step in range(2)], cross_entropy, make_adamw)
    with pipeline_variant(1, mb=3) as strategy:
        model: Any = hybrid.distributed_model(build("tied"), strategy=strategy)
        optimizer = hybrid.distributed_optimizer(make_adamw(model))
        calls = 0

        def failing(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise ValueError("this loss fails once")
            return functional.cross_entropy(output.flatten(0, 1), labels.flatten())

        with pytest.raises(ValueError, match="fails once"):
            model.train_batch(batch_of(0), optimizer, loss_fn=failing)
        got = [model.train_batch(batch_of(step), optimizer, loss_fn=failing).loss.item() for step in range(2)]
        torch.testing.assert_close(got, losses, atol=1e-5, rtol=0)


def test_a_call_that_fails_on_every_rank_leaves_a_model_that_goes_on() -> None:
    """Half of a step's gradients are not added to the next one's."""
    run_ranks(raise_and_go_on, 1)


def go_on_after_one_stage_failed() -> tuple[str, str]:
    """Only the last stage has a loss, which raises at its second micro-batch; all ranks catch and go on."""
    strategy = pipeline_strategy(2, timeout_seconds=TIMEOUT_SECONDS)
    model: Any = hybrid.distributed_model(build("tied"), strategy=strategy)
    optimizer = hybrid.distributed_optimizer(make_adamw(model))
    calls = 0

    def failing(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("this loss fails once")
        return cross_entropy(output, labels)

    def tried(step: int) -> str:
        try:
            return f"loss {model.train_batch(batch_of(step), optimizer, loss_fn=failing).loss.item():.5f}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return tried(0), tried(0)


def test_after_one_stage_failed_the_pipeline_goes_on_or_refuses() -> None:
    """Never a loss from activations or gradients of the call that failed."""
    plain = build("tied")
    losses, _, _ = train_plain(plain, [batch_of(0)], cross_entropy, make_adamw)
    for first, second in run_ranks(go_on_after_one_stage_failed, 2, group_timeout_seconds=20):
        assert not first.startswith("loss"), first
        assert second == f"loss {losses[0]:.5f}" or "Error: " in second, (first[:200], second[:200])
