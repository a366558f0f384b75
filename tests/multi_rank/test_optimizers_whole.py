"""Optimizers that need whole parameters, or all of them, and state of any shape."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import hybrid
from tests.multi_rank.case_runs import SEVERAL_STEPS, assert_close, assert_weights, variant, weights_of
from tests.optimizers import (
    Blockwise,
    ClippedLamb,
    Distance,
    Factors,
    Gathering,
    Lamb,
    Lookahead,
    MatrixNet,
    Net,
    Noisy,
    TwoPoints,
    run_steps,
    wrap,
)
from tests.ranks import run_ranks

STEPS = range(3)
Make = Callable[[Any], optim.Optimizer]

WHOLE: dict[str, tuple[type[nn.Module], Make]] = {
    "Adafactor": (Net, optim.Adafactor),
    "Adafactor foreach": (Net, lambda p: optim.Adafactor(p, foreach=True, weight_decay=0.1)),
    "Muon": (MatrixNet, lambda p: optim.Muon(p, lr=0.02, nesterov=False)),
    "Lamb": (Net, Lamb),
    "Blockwise": (Net, Blockwise),
    "Factors": (Net, Factors),
    "TwoPoints": (Net, TwoPoints),
}


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [tensor for one in value.values() for tensor in flat(one)]
    if isinstance(value, list):
        return [tensor for one in value for tensor in flat(one)]
    return [torch.as_tensor(value)] if isinstance(value, torch.Tensor | int) else []


def check_whole() -> None:
    for name, (net, make) in WHOLE.items():
        plain = net()
        plain_optimizer = make(plain.parameters())
        run_steps(plain, plain_optimizer, STEPS)
        names = {id(parameter): fqn for fqn, parameter in plain.named_parameters()}
        wanted = {names[id(parameter)]: state for parameter, state in plain_optimizer.state.items()}
        for settings in ({"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3, "partition": "parameter"}):
            with variant(**settings) as strategy:
                model, optimizer = wrap(net(), make, strategy, built="after" if settings["stage"] == 1 else "before")
                run_steps(model, optimizer, STEPS)
                assert_weights(model, weights_of(plain), SEVERAL_STEPS)
                full = optimizer.full_state_dict()
                assert set(full["state"]) == set(wanted), name
                for fqn, state in wanted.items():
                    assert list(full["state"][fqn]) == list(state)
                    for got, value in zip(flat(full["state"][fqn]), flat(state), strict=True):
                        assert got.dtype == value.dtype
                        assert_close(got.float(), value.float(), 1e-4, f"state of {fqn}")
                # What was saved does not change with the training, nor the training with what was saved.
                before = [tensor.clone() for tensor in flat(full)]
                optimizer.load_state_dict(full)
                run_steps(model, optimizer, range(3, 4))
                assert all(torch.equal(a, b) for a, b in zip(flat(full), before, strict=True)), name
                map_of_all = model.describe()
                assert f"optimizer {type(plain_optimizer).__name__}: an update depends on the whole" in map_of_all
                if settings["stage"]:
                    sizes = {p.numel() for p in plain.parameters()}
                    owners = re.findall(r"(\d):\[0,(\d+)\)", map_of_all)
                    assert len(owners) == len(names)
                    assert {int(size) for _, size in owners} == sizes
                    shares = [sum(int(size) for shard, size in owners if shard == str(one)) for one in (0, 1)]
                    assert f"shard 0 owns {shares[0]}, shard 1 owns {shares[1]} elements" in map_of_all
                    assert max(shares) <= max(sum(shares) / 2 * 4 / 3, *sizes), (name, shares)


def test_whole_parameters_are_dealt_out_by_themselves_and_balanced() -> None:
    """Fault: a norm, a factor or a block of a slice was taken for that of the parameter; state was lost or aliased."""
    run_ranks(check_whole, 2)


def check_lbfgs() -> None:
    for options in ({}, {"line_search_fn": "strong_wolfe", "history_size": 3}):

        def make(params: Any, options: Any = options) -> optim.Optimizer:
            return optim.LBFGS(params, max_iter=4, **options)

        plain = MatrixNet()
        plain_optimizer = make(plain.parameters())
        losses = run_steps(plain, plain_optimizer, STEPS)
        for settings in ({"stage": 0}, {"stage": 2, "shard_size": 1}):
            with variant(**settings) as strategy:
                model, optimizer = wrap(MatrixNet(), make, strategy)
                assert_close(torch.tensor(run_steps(model, optimizer, STEPS)), torch.tensor(losses), 1e-5, "losses")
                assert_weights(model, weights_of(plain), SEVERAL_STEPS)
                (state,) = optimizer.full_state_dict()["state"].values()
                (wanted,) = plain_optimizer.state.values()
                assert state["func_evals"] == wanted["func_evals"]
                assert len(state["old_dirs"]) == len(wanted["old_dirs"])
                with pytest.raises(hybrid.OptimizerError, match="LBFGS evaluates the model by itself"):
                    model.train_batch(tuple(torch.zeros(2, n) for n in (7, 3)), optimizer, loss_fn=nn.MSELoss())
                with pytest.raises(hybrid.OptimizerError, match=r"optimizer.step\(closure\)"):
                    optimizer.step()


def test_bc56_lbfgs_evaluates_the_closure_as_often_as_in_one_process() -> None:
    """Fault: the closure was called once, before the step, or every rank made its own line search."""
    run_ranks(check_lbfgs, 2)


def check_trial() -> None:
    cases: dict[str, tuple[Make, str]] = {
        "norm over all": (ClippedLamb, "ClippedLamb updates each parameter by all of them together"),
        "option in the group": (Distance, "Distance updates each parameter by all of them together"),
        "noise": (Noisy, "the step of Noisy draws random numbers"),
        "many ranks": (Gathering, r"the step of Gathering talks to the other ranks by itself \(c10d\.broadcast"),
        "inner": (
            lambda p: Lookahead(optim.SGD(p, lr=0.1)),
            r"Lookahead holds another optimizer in \.inner.*SGD alone",
        ),
    }
    for make, message in cases.values():
        with variant(stage=1) as strategy:
            model = hybrid.distributed_model(Net(), strategy=strategy)
            state = torch.get_rng_state()
            optimizer = make(model.parameters())
            optimizer.param_groups[0]["lr"] = 0.0  # as a warm-up leaves it
            with pytest.raises(hybrid.OptimizerError, match=message):
                hybrid.distributed_optimizer(optimizer)
            assert torch.equal(torch.get_rng_state(), state)
            assert not optimizer.state
            assert "d" not in optimizer.param_groups[0]
    for make in (ClippedLamb, Distance):
        plain = Net()
        run_steps(plain, make(plain.parameters()), STEPS)
        with variant(stage=0) as strategy:
            model, optimizer = wrap(Net(), make, strategy)
            run_steps(model, optimizer, STEPS)
            assert_weights(model, weights_of(plain), SEVERAL_STEPS)


def test_an_unknown_optimizer_is_tried_before_it_is_trusted() -> None:
    """Fault: one that couples all parameters (a global norm, a learned step length) saw those of its rank alone."""
    run_ranks(check_trial, 2)


def split_by_dims(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return matrices, [p for p in model.parameters() if p.dim() != 2]


def check_two_optimizers() -> None:
    def pair(model: nn.Module) -> list[optim.Optimizer]:
        matrices, others = split_by_dims(model)
        return [optim.AdamW(others, lr=0.02), optim.Muon(matrices, lr=0.05)]

    def train(model: Any, optimizers: list[Any], steps: range) -> None:
        for step in steps:
            both = _Both(optimizers)
            run_steps(model, both, range(step, step + 1))

    plain = Net()
    optimizers = pair(plain)
    train(plain, optimizers, range(2))
    trained, saved = weights_of(plain), copy.deepcopy([one.state_dict() for one in optimizers])
    train(plain, optimizers, range(2, 4))
    for stage in (1, 2):
        for order in ((0, 1), (1, 0)):
            with variant(stage=stage) as strategy:
                model = Net()
                model.load_state_dict(trained)
                own: list[Any] = pair(model)
                for one, state in zip(own, saved, strict=True):
                    one.load_state_dict(copy.deepcopy(state))
                model = hybrid.distributed_model(model, strategy=strategy)
                for place in order:
                    own[place] = hybrid.distributed_optimizer(own[place])
                train(model, own, range(2, 4))
                assert_weights(model, weights_of(plain), SEVERAL_STEPS)


class _Both:
    """Two optimizers as one, for a loop that knows one."""

    def __init__(self, optimizers: list[Any]) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()


def test_muon_for_matrices_beside_adamw_in_either_order() -> None:
    """Fault: cutting anew for the second optimizer left the first with shards, or moments, of the old cut."""
    run_ranks(check_two_optimizers, 2)


def check_masters() -> None:
    exact = Net().state_dict()
    for make in (optim.Adafactor, lambda p: optim.SGD(p, lr=0.0)):
        with variant(stage=2) as strategy:
            strategy.amp, strategy.amp_configs = True, {"level": "O2"}
            model, _ = wrap(Net(), make, strategy)
            assert model.wide.weight.dtype == torch.bfloat16
            assert_weights(model, exact, 0.0)


def test_masters_keep_their_precision_when_the_buckets_are_cut_anew() -> None:
    """Fault: an optimizer that needs whole parameters began from weights rounded to bfloat16."""
    run_ranks(check_masters, 2)
