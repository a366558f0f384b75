"""Pipelines in the cases that people reported elsewhere, each as its whole kind: the numbers of one plain process.

Families E (pipelines), F (composition), H and B (norms, clipping), C (accumulation) of the cases. Many checks share a
world; a note on the error says which settings it was.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import hybrid
from tests.pipeline_models import (
    assert_as_plain,
    batch_of,
    build,
    cross_entropy,
    make_adamw,
    own,
    pipeline_variant,
    train_plain,
)
from tests.ranks import run_ranks

SCHEDULES: tuple[dict[str, Any], ...] = ({}, {"schedule": "gpipe"}, {"schedule": "interleaved"})


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Scale(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.weight


def mean_output(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return output.mean()


def regression(step: int, *, samples: int = 12, width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, width, generator=generator), torch.randn(samples, width, generator=generator)


def mlp(num_layers: int = 4, width: int = 6) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_layers)))


# ---- E: few micro-batches, uneven layers, shapes ---------------------------------------------------------------------


def one_norm_over_all_stages() -> None:
    """BC-09 by hand: gradients 3 and 4, norm 5, clip at 1."""
    for settings in ({}, {"schedule": "gpipe"}, {"stage": 3}):
        with pipeline_variant(2, mb=1, gradient_clipping=1.0, **settings) as strategy:
            model: Any = hybrid.distributed_model(nn.Sequential(Scale(4.0), Scale(3.0)), strategy=strategy)
            optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
            result = model.train_batch((torch.ones(2, 1), torch.ones(2, 1)), optimizer, loss_fn=mean_output)
            assert abs(result.grad_norm.item() - 5.0) < 1e-6, result.grad_norm
            weights = model.full_state_dict()
            assert abs(weights["0.weight"] - 3.4) < 1e-6, weights
            assert abs(weights["1.weight"] - 2.2) < 1e-6, weights

    def four() -> nn.Module:
        return nn.Sequential(*(Scale(value) for value in (4.0, 3.0, 2.0, 0.5)))

    batches = [(torch.ones(4, 1), torch.ones(4, 1))] * 3
    for clip in (0.1, math.inf):
        assert_as_plain(four, batches, mean_output, mb=2, schedule="interleaved", make_optimizer=sgd, clip=clip)


def uneven_layers() -> None:
    """BC-22: five blocks on two stages, each layer once; also cut by counts."""
    for split in (None, "uniform", (4, 1), (1, 4)):
        assert_as_plain(lambda: mlp(5), [regression(step) for step in range(3)], functional.mse_loss, split=split)


def few_micro_batches(pp: int) -> None:
    """BC-23: all numbers of micro-batches that a schedule takes, with ragged and odd batches."""
    batches = [regression(step, samples=8) for step in range(2)]
    for schedule in ("gpipe", "1f1b"):
        for mb in (1, 2, 3, 4, 8):  # 8 samples in 3: 2, 3, 3
            assert_as_plain(lambda: mlp(4), batches, functional.mse_loss, pp=pp, mb=mb, schedule=schedule)


def shapes_change() -> None:
    """BC-24: lengths and batch sizes change from step to step; labels go with their inputs."""
    batches = [batch_of(step, length=length) for step, length in enumerate((5, 3, 7))]
    batches += [(tokens[:size], labels[:size]) for size, (tokens, labels) in ((7, batches[0]), (5, batches[1]))]
    for settings in SCHEDULES:
        assert_as_plain(lambda: build("chain"), batches, cross_entropy, **settings)
    index = torch.arange(8.0).unsqueeze(1)

    def pairing(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (output - labels).abs().mean()

    with pipeline_variant(2, mb=3) as strategy:
        model: Any = hybrid.distributed_model(nn.Sequential(nn.Identity(), Scale(1.0)), strategy=strategy)
        optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        assert model.train_batch((index, index), optimizer, loss_fn=pairing).loss.item() == 0.0
        by_label = model.train_batch(
            (index, index + 1), optimizer, loss_fn=lambda out, labels: (labels + 0 * out).mean()
        )
        assert abs(by_label.loss.item() - 4.5) < 1e-6, by_label.loss


def evaluation_comes_first() -> None:
    """A model that was loaded to be evaluated has trained nothing yet."""
    batch = batch_of(0)
    wanted = cross_entropy(build("tied")(batch[0]), batch[1]).item()
    for settings in ({"mb": 4}, {"mb": 1}, {"stage": 3, "schedule": "interleaved"}):
        with pipeline_variant(2, timeout_seconds=4, **settings) as strategy:
            model: Any = hybrid.distributed_model(build("tied"), strategy=strategy)
            got = model.eval_batch(own(batch), loss_fn=cross_entropy)
            assert abs(got.loss.item() - wanted) < 1e-5, (got, wanted)
            assert got.count.item() == len(batch[0])
            assert model.training


def fewer_samples_than_micro_batches() -> None:
    """Micro-batches without a sample, on all ranks alike: no NaN, the numbers of one process."""
    assert_as_plain(lambda: mlp(4), [regression(0, samples=3), regression(1, samples=8)], functional.mse_loss, mb=4)


EAGER = """
    F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3
    F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3
"""
BREADTH_FIRST = """
    F0.0 F0.1 F0.2 F0.3 F2.0 F2.1 F2.2 F2.3 B2.0 B2.1 B2.2 B2.3 B0.0 B0.1 B0.2 B0.3
    F1.0 F1.1 F1.2 F1.3 F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3 B1.0 B1.1 B1.2 B1.3
"""


def own_schedules() -> None:
    """Of one and of two chunks per stage, with parameters cut and gradients reduced at once; a batch that is short."""
    batches = [regression(0), regression(1, samples=3), regression(2)]
    for schedule, chunks in ((EAGER, 1), (BREADTH_FIRST, 2)):
        for sharding in ({"stage": 2}, {"stage": 3}, {"stage": 3, "reshard_after": "run"}):
            assert_as_plain(
                lambda: mlp(4), batches, functional.mse_loss,
                mb=4, schedule=schedule, virtual_stages=chunks, **sharding,
            )  # fmt: skip
    assert_as_plain(
        lambda: mlp(4), [regression(3, samples=3)], functional.mse_loss, mb=4, schedule="interleaved", virtual_stages=2
    )


def test_schedules_of_ones_own_train() -> None:
    """The numbers do not depend on the order; nor does a short batch need another one."""
    run_ranks(own_schedules, 2)


def test_stages_clip_by_one_norm_and_hold_every_layer_once() -> None:
    """BC-09, BC-22, BC-24."""
    run_ranks(in_turn, 2, [one_norm_over_all_stages, uneven_layers, shapes_change])


def test_micro_batches_without_a_sample_add_nothing() -> None:
    """A tail that is shorter than the number of micro-batches."""
    run_ranks(fewer_samples_than_micro_batches, 2)


def test_evaluation_comes_first() -> None:
    """An evaluation needs no step before it."""
    run_ranks(evaluation_comes_first, 2)


def test_every_number_of_micro_batches_runs() -> None:
    """BC-23."""
    run_ranks(few_micro_batches, 4, 4)


def in_turn(functions: list[Any]) -> None:
    for function in functions:
        try:
            function()
        except BaseException as error:
            error.add_note(f"in {function.__name__}")
            raise


# ---- what crosses a boundary -----------------------------------------------------------------------------------------


class Spread(nn.Module):
    """One tensor becomes a tree: used and unused tensors, whole numbers, flags, None, the same tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: torch.Tensor) -> dict[str, Any]:
        hidden = self.linear(value)
        mask = hidden > 0
        return {
            "hidden": hidden, "again": hidden, "mask": mask, "place": torch.arange(6), "empty": torch.zeros(0, 3),
            "pair": (hidden * 2, None, 3, "text"), "unused": hidden.exp(), "wide": value.double(),
        }  # fmt: skip


class Keep(nn.Module):
    """Passes the tree on, and one of its tensors changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, tree: dict[str, Any]) -> dict[str, Any]:
        return {**tree, "hidden": self.linear(tree["hidden"])}


class Gather(nn.Module):
    def forward(self, tree: dict[str, Any]) -> torch.Tensor:
        assert tree["pair"][1:] == (None, 3, "text")
        assert not tree["mask"].requires_grad
        kinds = [tree[name].dtype for name in ("mask", "place", "wide")]
        assert kinds == [torch.bool, torch.int64, torch.float64], kinds
        assert tree["empty"].shape == (0, 3)
        picked = torch.where(tree["mask"], tree["hidden"], tree["again"])[:, tree["place"]]
        return picked + tree["pair"][0] + tree["wide"].float()


def trees_cross() -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(Spread(), Keep(), Keep(), Gather())

    for settings in ({}, {"schedule": "interleaved"}, {"split": (1, 3)}, {"split": (3, 1), "stage": 3}):
        assert_as_plain(make, [regression(step) for step in range(3)], functional.mse_loss, **settings)


def in_place_at_a_boundary() -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        layers = [nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Linear(6, 6), nn.SiLU(inplace=True)]
        return nn.Sequential(*layers)

    for split in ((1, 4), (2, 3), (4, 1)):
        for stage in (None, 3):
            assert_as_plain(
                make, [regression(step) for step in range(3)], functional.mse_loss, split=split, stage=stage
            )


def odd_stages() -> None:
    """Stages without parameters, with everything frozen, at either end; everything frozen but one stage."""

    def make(kinds: str) -> nn.Module:
        torch.manual_seed(2)
        layers = {"p": lambda: nn.Linear(6, 6), "f": lambda: nn.Linear(6, 6).requires_grad_(False), "n": nn.Tanh}
        return nn.Sequential(*(layers[kind]() for kind in kinds))

    for kinds in ("np", "pn", "fp", "pf"):
        for stage in (None, 2, 3):
            for built in ("before", "after"):
                assert_as_plain(
                    lambda kinds=kinds: make(kinds), [regression(step) for step in range(2)], functional.mse_loss,
                    mb=2, stage=stage, built=built, split=(1, 1), make_optimizer=sgd,
                )  # fmt: skip
        with pipeline_variant(2, mb=2, split=(1, 1)) as strategy:
            model: Any = hybrid.distributed_model(make(kinds).double(), strategy=strategy)
            x, y = (one.double() for one in own(regression(0)))
            result = model.train_batch((x, y), hybrid.distributed_optimizer(sgd(model)), loss_fn=functional.mse_loss)
            evaluated = model.eval_batch((x, y), loss_fn=functional.mse_loss).loss
            for value in (result.loss, result.grad_norm, evaluated):
                assert value.dtype == torch.float64, f"{kinds}: of a stage that holds nothing in float64 too"


def batch_norm_sees_each_micro_batch_once() -> None:
    for settings in SCHEDULES:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6)]
        with pipeline_variant(2, mb=4, **settings) as strategy:
            model: Any = hybrid.distributed_model(nn.Sequential(*layers), strategy=strategy)
            optimizer = hybrid.distributed_optimizer(sgd(model))
            for step in range(3):
                model.train_batch(own(regression(step)), optimizer, loss_fn=functional.mse_loss)
            model.eval_batch(own(regression(0)), loss_fn=functional.mse_loss)
            state = model.full_state_dict()
            assert state["1.num_batches_tracked"] == state["3.num_batches_tracked"] == 12, state
            assert state["1.running_mean"].abs().sum() > 0


def test_any_tree_crosses_a_boundary() -> None:
    """Tuples, dicts, whole numbers, flags, None, empty tensors, one tensor twice; in-place layers; odd stages."""
    run_ranks(in_turn, 2, [trees_cross, in_place_at_a_boundary, batch_norm_sees_each_micro_batch_once])


def test_stages_without_parameters_or_all_frozen() -> None:
    """They hold nothing to train, and take part in everything else."""
    run_ranks(odd_stages, 2)


# ---- accumulation, scaling, state ------------------------------------------------------------------------------------


def accumulation_over_calls() -> None:
    """C: step=False over calls of other sizes gives the mean over all samples; also with pairs (sum, count)."""

    def by_tokens(output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = labels > 3  # another number in every micro-batch
        losses = functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * kept.flatten()).sum(), kept.sum()

    assert_as_plain(lambda: build("tied"), [batch_of(step) for step in range(3)], by_tokens, mb=3, stage=2)
    tokens, labels = batch_of(0)
    for settings in ({}, {"stage": 2, "schedule": "interleaved"}, {"stage": 3, "grad_reduce": "last_micro_batch"}):
        for loss_fn in (cross_entropy, by_tokens):
            plain = build("tied")
            _, norms, _ = train_plain(plain, [(tokens, labels)], loss_fn, make_adamw)
            with pipeline_variant(2, mb=2, **settings) as strategy:
                model: Any = hybrid.distributed_model(build("tied"), strategy=strategy)
                optimizer = hybrid.distributed_optimizer(make_adamw(model))
                for start, end in ((0, 10), (10, 13), (13, 24)):
                    result = model.train_batch(
                        own((tokens[start:end], labels[start:end])), optimizer, loss_fn=loss_fn, step=end == 24
                    )
                    assert (result.grad_norm is None) == (end < 24)
                assert abs(result.grad_norm.item() - norms[0]) < 1e-5 * norms[0], (result.grad_norm, norms, settings)
                for name, value in model.full_state_dict().items():
                    torch.testing.assert_close(value, plain.state_dict()[name], atol=1e-5, rtol=0)


def overflow_on_one_stage_skips_everywhere() -> None:
    class Burst(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if value.requires_grad and on["it"]:
                value.register_hook(lambda gradient: gradient * math.inf)
            return value

    on = {"it": False}
    for place in (0, 2):
        layers: list[nn.Module] = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)]
        layers[place] = nn.Sequential(layers[place], Burst())
        amp = {"level": "O1", "dtype": "float16", "init_loss_scaling": 64.0}
        with pipeline_variant(2, mb=2, amp=amp, split=(2, 2)) as strategy:
            model: Any = hybrid.distributed_model(nn.Sequential(*layers), strategy=strategy)
            optimizer = hybrid.distributed_optimizer(sgd(model))
            for step, burst in enumerate((False, True, False)):
                on["it"] = burst
                before = model.full_state_dict()
                result = model.train_batch(own(regression(step)), optimizer, loss_fn=functional.mse_loss)
                assert result.skipped == burst
                same = [torch.equal(before[name], value) for name, value in model.full_state_dict().items()]
                assert all(same) if burst else not any(same), same
            assert model.hybrid_runtime.scaler.get_scale() == 32.0


def schedulers_and_groups_are_one_for_all_stages() -> None:
    def trained(model: Any, optimizer: Any, step_once: Any) -> None:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (count + 1))
        for step in range(4):
            step_once(model, optimizer, scheduler, batch_of(step))
        assert scheduler.last_epoch == 4

    def plainly(model: Any, optimizer: Any, scheduler: Any, batch: Any) -> None:
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    def by_stages(model: Any, optimizer: Any, scheduler: Any, batch: Any) -> None:
        model.train_batch(own(batch), optimizer, lr_scheduler=scheduler, loss_fn=cross_entropy)

    plain = build("thrice")
    wanted = make_adamw(plain)
    trained(plain, wanted, plainly)
    with pipeline_variant(2) as strategy:
        model: Any = build("thrice")
        optimizer: Any = make_adamw(model)
        model = hybrid.distributed_model(model, strategy=strategy)
        optimizer = hybrid.distributed_optimizer(optimizer)
        trained(model, optimizer, by_stages)
        assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in wanted.param_groups]
        for name, value in model.full_state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], atol=1e-5, rtol=0)


def test_accumulation_and_schedulers() -> None:
    """C, and the learning rate of all stages."""
    run_ranks(in_turn, 2, [accumulation_over_calls, schedulers_and_groups_are_one_for_all_stages])


def test_overflow_on_one_stage_skips_everywhere() -> None:
    """All stages skip alike, keep the same scale, and go on."""
    run_ranks(overflow_on_one_stage_skips_everywhere, 2)
