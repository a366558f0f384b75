"""Optimizers and ranks: numbers that were silently wrong, and errors that came in the middle of a step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import assert_weights, own_part, strategy_of, variant, weights_of, wrapped
from tests.optimizers import batch_of
from tests.ranks import run_ranks

# -- state in the wrong precision ---------------------------------------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(81)
    return nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


def dtypes_of(optimizer: Any) -> set[torch.dtype]:
    held = optimizer.full_state_dict()["state"]["0.weight"]
    return {value.dtype for key, value in held.items() if key != "step"}


def one_step(model: Any, optimizer: Any) -> None:
    x, y = batch_of(0)
    kind = model[0].weight.dtype
    model.train_batch((own_part(x).to(kind), own_part(y).to(kind)), optimizer, loss_fn=nn.MSELoss())


def check_masters_under_another_default() -> None:
    for stage in (0, 2):
        with variant(stage=stage) as strategy:
            model, optimizer = wrapped(net().bfloat16(), torch.optim.AdamW, strategy)
            one_step(model, optimizer)
            assert dtypes_of(optimizer) == {torch.float32}
            hybrid.shutdown()
            torch.set_default_dtype(torch.bfloat16)
            try:
                model, optimizer = wrapped(net(), torch.optim.AdamW, strategy)
            finally:
                torch.set_default_dtype(torch.float32)
            one_step(model, optimizer)
            assert dtypes_of(optimizer) == {torch.float32}


def check_state_made_from_low_precision() -> None:
    for stage in (0, 2, 3):
        with variant(stage=stage) as strategy:
            model = hybrid.distributed_model(net().bfloat16(), strategy=strategy)
            optimizer = hybrid.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
            one_step(model, optimizer)
            assert dtypes_of(optimizer) == {torch.float32}
        trained = net().bfloat16()
        optimizer = torch.optim.AdamW(trained.parameters())
        trained(torch.ones(2, 7, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with variant(stage=stage) as strategy:
            model = hybrid.distributed_model(trained, strategy=strategy)
            adopted = hybrid.distributed_optimizer(optimizer)
            one_step(model, adopted)
            assert dtypes_of(adopted) == {torch.float32}


def check_state_of_another_dtype() -> None:
    for stage in (0, 3):
        with variant(stage=stage) as strategy:
            model, optimizer = wrapped(net(), torch.optim.AdamW, strategy)
            one_step(model, optimizer)
            saved = optimizer.full_state_dict()
            hybrid.shutdown()
            model, optimizer = wrapped(net().double(), torch.optim.AdamW, strategy)
            optimizer.load_state_dict(saved)
            one_step(model, optimizer)
            assert dtypes_of(optimizer) == {torch.float64}


def check_precisions() -> None:
    check_masters_under_another_default()
    check_state_made_from_low_precision()
    check_state_of_another_dtype()


def test_masters_and_state_have_the_precision_of_the_update() -> None:
    """Under `torch.set_default_dtype(torch.bfloat16)` the fp32 masters were bfloat16: small updates were lost.

    Adagrad's sums, made when it is built, stayed in bfloat16 beside fp32 masters; adopted or loaded state of another
    dtype than the update's ended the first step in torch's error about `lerp`.
    """
    run_ranks(check_precisions, 2)


# -- several optimizers of one model ------------------------------------------------------------------------------


def check_one_clip() -> None:
    plain = net().double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=100.0)
    for step in range(2):
        x, y = (tensor.double() for tensor in batch_of(step))
        functional.mse_loss(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    for stage, scale in ((0, 0.0), (2, 0.0), (3, 0.0), (2, 64.0)):
        with variant(stage=stage, gradient_clipping=1e-3) as strategy:
            model = hybrid.distributed_model(net().double(), strategy=strategy)
            parts = [[p for p in model.parameters() if (p.dim() == 2) is is_matrix] for is_matrix in (True, False)]
            pair: list[Any] = [hybrid.distributed_optimizer(torch.optim.SGD(part, lr=100.0)) for part in parts]
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scale > 0)
            for step in range(2):
                x, y = (own_part(tensor).double() for tensor in batch_of(step))
                scaler.scale(functional.mse_loss(model(x), y)).backward()
                if scale and step == 0:
                    scaler.unscale_(pair[0])
                    with pytest.raises(hybrid.OptimizerError, match=r"still has the loss scale: call scaler\.unscale_"):
                        pair[0].step()
                    scaler.unscale_(pair[1])
                elif scale:
                    for one in pair:
                        scaler.unscale_(one)
                for one in pair:
                    scaler.step(one)
                scaler.update()
                for one in pair:
                    one.zero_grad()
            assert_weights(model, weights_of(plain), 1e-9)


def test_two_optimizers_clip_once_and_not_half_scaled() -> None:
    """The second optimizer's step clipped again what the first one's had clipped: off by 1e-6 / max_norm.

    With a GradScaler the first step clipped by a norm in which the other optimizer's gradients had the loss scale.
    """
    run_ranks(check_one_clip, 2)


# -- what an optimizer keeps beside its state ---------------------------------------------------------------------


class Table(torch.optim.Optimizer):
    """Keeps its buffers in a dict of its own, by parameter."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.own: Any = {p: torch.zeros_like(p) for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for place, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.sub_(group["lr"] * (p.grad + self.kept(p, place)))

    def kept(self, p: torch.Tensor, place: int) -> torch.Tensor:
        return self.own[p]  # type: ignore[no-any-return]


class Anchored(Table):
    """Pulls each weight back to where it started, which it finds by the weight's place."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.own = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def kept(self, p: torch.Tensor, place: int) -> torch.Tensor:
        return p - self.own[place]


def squares() -> nn.Sequential:
    torch.manual_seed(82)
    return nn.Sequential(*(nn.Linear(7, 7, bias=False) for _ in range(3)))


def check_tables() -> None:
    plain = squares()
    optimizer: Any = Anchored(plain.parameters())
    for _ in range(2):
        plain(batch_of(0)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for make, freezes, settings, words in (
        (Table, False, {"stage": 0}, "in .own, beside its state: while it steps its groups hold slices"),
        (Table, False, {"stage": 2, "partition": "parameter"}, "in .own, beside its state"),
        (Anchored, False, {"stage": 2, "partition": "parameter"}, "in .own, beside its state, by its place"),
        (Anchored, True, {"stage": 0}, "without frozen ones"),
        (Anchored, False, {"stage": 0}, ""),
    ):
        with variant(**settings) as strategy:  # type: ignore[arg-type]
            model: Any = squares()
            model[0].requires_grad_(not freezes)
            optimizer = make(model.parameters())
            model = hybrid.distributed_model(model, strategy=strategy)
            if words:
                with pytest.raises(hybrid.OptimizerError, match=words):
                    hybrid.distributed_optimizer(optimizer)
                continue
            optimizer = hybrid.distributed_optimizer(optimizer)
            for _ in range(2):
                model(own_part(batch_of(0)[0])).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_weights(model, weights_of(plain), 1e-6)


def test_tables_beside_the_state_are_refused() -> None:
    """An optimizer with a list by place stepped each rank's weights with the values of other weights, in silence.

    One with a dict by parameter ended in a KeyError in its first step, after a message that had named stage 0 as a way.
    """
    run_ranks(check_tables, 2)


class Drawing(Table):
    """Draws from a generator that torch's random state says nothing of."""

    def __init__(self, params: Any, draw: Callable[[], float]) -> None:
        super().__init__(params)
        self.own = None
        self.source, self.draw = getattr(draw, "__self__", None), draw

    def kept(self, p: torch.Tensor, place: int) -> torch.Tensor:
        return torch.full_like(p, self.draw())


class ClippedHigh(Table):
    """Clips by the norm over all parameters, which is seldom as high as this."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 1000.0)
        for p in parameters:
            p.sub_(0.1 * p.grad)  # type: ignore[operator]

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.own = None


def check_trials() -> None:
    own = random.Random(5)
    makes: tuple[tuple[Any, str], ...] = (
        (lambda p: Drawing(p, random.random), "draws random numbers"),
        (lambda p: Drawing(p, np.random.default_rng(5).random), "draws random numbers"),
        (lambda p: Drawing(p, own.random), "draws random numbers"),
        (ClippedHigh, "updates each parameter by all of them together"),
    )
    before = random.getstate(), own.getstate()
    for make, words in makes:
        with variant(stage=2) as strategy, pytest.raises(hybrid.OptimizerError, match=words):
            wrapped(squares(), make, strategy)
    assert before == (random.getstate(), own.getstate())


def test_trials_see_other_generators_and_high_thresholds() -> None:
    """Each rank drew other numbers from Python's or NumPy's generator, or the same for other weights, unseen.

    A clip by the global norm above what small gradients reach was not seen, and clipped by each rank's own norm.
    """
    run_ranks(check_trials, 2)


def check_state_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = net()
    optimizer = torch.optim.Adagrad(model.parameters())
    model = hybrid.distributed_model(model, strategy=strategy_of(stage=2))
    with pytest.raises(hybrid.OptimizerError, match="Adagrad made its state when it was built, from parameters on"):
        hybrid.distributed_optimizer(optimizer)
    hybrid.shutdown()


# -- ranks that differ --------------------------------------------------------------------------------------------


def check_other_ranks_optimizer() -> None:
    check_state_on_the_meta_device()
    rank = dist.get_rank()

    def groups(model: Any) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        return torch.optim.SGD([{"params": parameters[: 2 + rank]}, {"params": parameters[2 + rank :]}], lr=0.1)

    def resumed(model: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters())
        if rank == 0:  # a script that loads its checkpoint where it wrote it
            model(batch_of(0)[0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    def faster(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))

    def another(model: Any) -> torch.optim.Optimizer:
        return (torch.optim.AdamW, torch.optim.SGD)[rank](model.parameters(), lr=0.1)

    cases: tuple[tuple[Callable[[Any], torch.optim.Optimizer], str], ...] = (
        (faster, "'lr' of group 0 is 0.1 on rank 0 and 0.2 on rank 1"),
        (another, "its class is AdamW on rank 0 and SGD"),
        (groups, "the number of parameters of group 0 is 2 on rank 0 and 3 on rank 1"),
        (resumed, "the state of '0.weight' is step 1, .* on rank 0 and not there on rank 1"),
    )
    for make, words in cases:
        for stage in (0, 2):
            with variant(stage=stage) as strategy:
                model = net()
                optimizer = make(model)
                hybrid.distributed_model(model, strategy=strategy)
                with pytest.raises(hybrid.OptimizerError, match=words):
                    hybrid.distributed_optimizer(optimizer)
    for stage, clip in ((0, None), (3, 1.0)):
        with variant(stage=stage, gradient_clipping=clip) as strategy:
            model, optimizer = wrapped(net(), lambda p: torch.optim.SGD(p, lr=0.1), strategy)
            saved = optimizer.full_state_dict()
            saved["param_groups"] *= 1 + rank
            with pytest.raises(hybrid.OptimizerError, match=r"state does not fit.*: param groups differ"):
                optimizer.load_state_dict(saved)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            one_step(model, optimizer)
            for loss in (1.0, 0.5 + rank):  # on rank 1 it grows
                scheduler.step(loss)
            with pytest.raises(hybrid.OptimizerError, match=r"group 0 is 0\.1 on rank 0 and 0\.01 on rank 1: step"):
                one_step(model, optimizer)


def test_ranks_with_other_optimizers_are_refused() -> None:
    """Each rank updated its part by its own rate, groups, class or moments: weights of no run of one process.

    At stage 0 the copies parted. A ReduceLROnPlateau that gets each rank's own loss does the same, later. State that
    does not fit on one rank stopped that rank alone.
    """
    run_ranks(check_other_ranks_optimizer, 2)
