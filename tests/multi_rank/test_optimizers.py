"""Every optimizer of torch.optim against one plain process, at every stage; what cannot be right is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import optim

import hybrid
from tests.multi_rank.case_runs import SEVERAL_STEPS, assert_close, assert_weights, variant, weights_of
from tests.optimizers import MatrixNet, Net, run_steps, wrap
from tests.ranks import run_ranks

STEPS = range(3)

ELEMENTWISE = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
FUSED = (optim.Adagrad, optim.Adam, optim.AdamW, optim.SGD)


class OwnAdamW(optim.AdamW):
    """Only built in another way: as element-wise as its base."""

    def __init__(self, params: Any, warmth: float = 0.02) -> None:
        self.warmth = warmth
        super().__init__(params, lr=warmth, weight_decay=0.1)


def in_two_groups(params: Any) -> list[dict[str, Any]]:
    params = list(params)
    return [{"params": params[::2], "lr": 0.03, "weight_decay": 0.0}, {"params": params[1::2], "weight_decay": 0.2}]


def elementwise_cases() -> Iterator[tuple[str, Callable[[Any], optim.Optimizer]]]:
    def case(name: str, cls: Any, **options: Any) -> tuple[str, Callable[[Any], optim.Optimizer]]:
        return name, lambda params: cls(params, **options)

    for cls in ELEMENTWISE:
        yield case(cls.__name__, cls, lr=0.01)
        yield case(f"{cls.__name__} foreach maximize", cls, lr=0.01, foreach=True, maximize=True)
    for cls in FUSED:
        yield case(f"{cls.__name__} fused", cls, lr=0.01, fused=True)
    yield case("Adam amsgrad", optim.Adam, amsgrad=True, weight_decay=0.1)
    yield case("AdamW amsgrad fused", optim.AdamW, amsgrad=True, fused=True, lr=torch.tensor(0.01))
    yield case("SGD nesterov", optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
    yield case("SGD dampening fused", optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, fused=True)
    yield case("RMSprop centered", optim.RMSprop, centered=True, momentum=0.5)
    yield case("RAdam decoupled", optim.RAdam, decoupled_weight_decay=True, weight_decay=0.1)
    yield case("NAdam decoupled", optim.NAdam, decoupled_weight_decay=True, weight_decay=0.1)
    yield case("Adagrad with a start", optim.Adagrad, initial_accumulator_value=0.5, lr_decay=0.1)
    yield case("Adam with a tensor rate", optim.Adam, lr=torch.tensor(0.01))
    yield case("own AdamW", OwnAdamW)
    yield "groups", lambda params: optim.AdamW(in_two_groups(params), lr=0.01)


def same_state(optimizer: Any, plain: optim.Optimizer, plain_model: Any) -> None:
    names = {id(parameter): fqn for fqn, parameter in plain_model.named_parameters()}
    wanted = {names[id(parameter)]: state for parameter, state in plain.state.items()}
    full = optimizer.full_state_dict()["state"]
    assert set(full) == set(wanted)
    for fqn, state in wanted.items():
        assert list(full[fqn]) == list(state), fqn
        for key, value in state.items():
            assert torch.as_tensor(full[fqn][key]).dtype == torch.as_tensor(value).dtype, (fqn, key)
            assert_close(full[fqn][key], value, 1e-4, f"{key} of {fqn}")


def check_elementwise() -> None:
    for number, (name, make) in enumerate(elementwise_cases()):
        plain = Net()
        plain_optimizer = make(plain.parameters())
        run_steps(plain, plain_optimizer, STEPS)
        # The kinds of one class are neighbours: they get different stages.
        stage, shard_size = number % 4, (None, 2, 4, 1)[number // 4 % 4]
        with variant(stage=stage, shard_size=shard_size if stage else None) as strategy:
            built = ("before", "after")[number % 3 % 2]
            try:
                model, optimizer = wrap(Net(), make, strategy, built=built)
                run_steps(model, optimizer, STEPS)
                assert_weights(model, weights_of(plain), SEVERAL_STEPS)
                same_state(optimizer, plain_optimizer, plain)
                optimizer.load_state_dict(optimizer.full_state_dict() if number % 2 else optimizer.state_dict())
                same_state(optimizer, plain_optimizer, plain)
            except BaseException as error:
                error.add_note(f"{name}, built {built}")
                raise


def test_every_elementwise_optimizer_is_right_on_shards_cut_anywhere() -> None:
    """Fault: an optimizer that nobody tried with slices; state of a fused, foreach or 0-d kind that was cut wrongly."""
    run_ranks(check_elementwise, 4, timeout_seconds=120)


def test_no_optimizer_of_torch_is_forgotten() -> None:
    """A new version of torch brings a new one: it must get its row in the table of kinds and in docs/optimizers.md."""
    known = {cls.__name__ for cls in ELEMENTWISE} | {"Adafactor", "Muon", "LBFGS", "SparseAdam"}
    there = {name for name, value in vars(optim).items() if isinstance(value, type)} - {"Optimizer"}
    assert there == known


REFUSED: dict[str, tuple[Callable[[Any], optim.Optimizer], dict[str, Any], str]] = {
    "sparse": (optim.SparseAdam, {"stage": 0}, "SparseAdam needs sparse gradients.*sparse=False"),
    "differentiable": (lambda p: optim.Adam(p, differentiable=True), {"stage": 1}, "Adam has differentiable = True"),
    "lbfgs": (optim.LBFGS, {"stage": 1}, "LBFGS updates each parameter by all of them.*stage = 0"),
    "muon at stage 3": (optim.Muon, {"stage": 3}, "Muon .* at stage 3 it needs sharding_configs"),
    "adafactor on slices": (optim.Adafactor, {"stage": 1, "partition": "element"}, "Adafactor .* 'parameter'"),
}


def check_refusals() -> None:
    for make, settings, message in REFUSED.values():
        with variant(**settings) as strategy:
            model = hybrid.distributed_model(MatrixNet(), strategy=strategy)
            with pytest.raises(hybrid.OptimizerError, match=message):
                hybrid.distributed_optimizer(make(model.parameters()))
            # The model can still be trained with another one.
            optimizer = hybrid.distributed_optimizer(optim.SGD(model.parameters(), lr=0.1))
            run_steps(model, optimizer, range(1))
    with variant(stage=1) as strategy:
        model = hybrid.distributed_model(MatrixNet(), strategy=strategy)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        optimizer.step = lambda closure=None: None  # type: ignore[method-assign,assignment]
        with pytest.raises(hybrid.OptimizerError, match="SGD was replaced on the object"):
            hybrid.distributed_optimizer(optimizer)


def test_what_cannot_be_right_is_refused_by_name() -> None:
    """Fault: an optimizer that needs more than its slice ran on it, or a step patched on the object went past it."""
    run_ranks(check_refusals, 2)
