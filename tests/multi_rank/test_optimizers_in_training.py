"""What a script does with an optimizer while it trains: options, groups, schedules, hooks, looks at its state."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn import functional
from torch.optim import lr_scheduler, swa_utils

import hybrid
from tests.multi_rank.case_runs import SEVERAL_STEPS, assert_close, assert_weights, own_part, variant, weights_of
from tests.optimizers import Lamb, MatrixNet, Net, batch_of, run_steps, wrap
from tests.ranks import run_ranks

# -- options and groups ----------------------------------------------------------------------------------------------


def edited(model: Any, make: Callable[[Any], Any], begin: Callable[[Any, Any], tuple[Any, Any]]) -> tuple[Any, Any]:
    """The narrow layer joins after two steps, with options of its own; then rates, decay and betas change."""
    params = dict(model.named_parameters())
    late = [name for name in params if name.startswith("narrow")]
    model, optimizer = begin(model, make([(name, p) for name, p in params.items() if name not in late]))
    params = dict(model.named_parameters())
    run_steps(model, optimizer, range(2))
    optimizer.add_param_group({"params": [(name, params[name]) for name in late], "lr": 0.05, "weight_decay": 0.3})
    run_steps(model, optimizer, range(2, 4))
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] = 0.1
    run_steps(model, optimizer, range(4, 5))
    return model, optimizer


MAKES: tuple[Callable[[Any], Any], ...] = (
    lambda p: optim.AdamW(p, lr=0.02),
    lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    lambda p: optim.Adafactor(p, lr=0.02),
    lambda p: Lamb(p, weight_decay=0.0),
)


def check_groups() -> None:
    for number, make in enumerate(MAKES):
        plain, plain_optimizer = edited(Net(), make, lambda model, optimizer: (model, optimizer))
        for stage in (number % 2, 2):
            with variant(stage=stage) as strategy:

                def begin(model: Any, optimizer: Any, strategy: Any = strategy) -> tuple[Any, Any]:
                    model = hybrid.distributed_model(model, strategy=strategy)
                    return model, hybrid.distributed_optimizer(optimizer)

                model, optimizer = edited(Net(), make, begin)
                assert_weights(model, weights_of(plain), SEVERAL_STEPS)
                saved = optimizer.full_state_dict()["param_groups"]
                for got, wanted in zip(saved, plain_optimizer.param_groups, strict=True):
                    assert got["params"] == wanted["param_names"] == got["param_names"]
                    assert (got["lr"], got["weight_decay"]) == (wanted["lr"], wanted["weight_decay"])
                with pytest.raises(hybrid.OptimizerError, match=r"shape \(4,\).*not in the model"):
                    optimizer.add_param_group({"params": [("x", nn.Parameter(torch.ones(4)))]})
                assert len(optimizer.param_groups) == 2


def test_groups_join_and_options_change_during_training() -> None:
    """Fault: a group that came later, or a parameter of it, was in no shard and stood still; options were copies."""
    run_ranks(check_groups, 2)


def check_part() -> None:
    for stage in (0, 2, 3):
        plain = Net()
        run_steps(plain, optim.AdamW(plain.wide.parameters(), lr=0.1), range(2))
        with variant(stage=stage) as strategy:
            model = hybrid.distributed_model(Net(), strategy=strategy)
            optimizer = hybrid.distributed_optimizer(optim.AdamW([model.wide.weight], lr=0.1))
            optimizer.param_groups[0]["params"].append(model.wide.bias)  # by hand, past add_param_group
            model.zero_grad(set_to_none=False)
            run_steps(model, optimizer, range(2))
            optimizer.zero_grad(set_to_none=False)
            assert_weights(model, weights_of(plain), SEVERAL_STEPS)


def test_an_optimizer_over_a_part_leaves_the_rest_alone() -> None:
    """Fault: what no optimizer holds was updated, or what was appended to a group by hand stood still."""
    run_ranks(check_part, 2)


# -- schedules -------------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: n / 4),  # begins at 0
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.3, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=6),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=3),
}


def scheduled(model: Any, optimizer: Any, scheduler: Any) -> list[tuple[float, float]]:
    rates = []
    for step in range(4):
        run_steps(model, optimizer, range(step, step + 1))
        scheduler.step(1.0) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()
        group = optimizer.param_groups[0]
        rates.append((float(group["lr"]), group["momentum"]))
    return rates


def check_schedules() -> None:
    for number, (name, schedule) in enumerate(SCHEDULES.items()):
        is_tensor = number % 3 == 0 and name not in ("LambdaLR", "CyclicLR", "OneCycleLR", "SWALR")

        def make(params: Any, is_tensor: bool = is_tensor) -> Any:
            return optim.SGD(params, lr=torch.tensor(0.2) if is_tensor else 0.2, momentum=0.8)

        plain = MatrixNet()
        plain_optimizer = make(plain.parameters())
        wanted = scheduled(plain, plain_optimizer, schedule(plain_optimizer))
        with variant(stage=number % 4) as strategy:
            model, optimizer = MatrixNet(), None
            if number % 2:
                optimizer = make(model.parameters())
                scheduler = schedule(optimizer)
            model = hybrid.distributed_model(model, strategy=strategy)
            optimizer = hybrid.distributed_optimizer(optimizer or make(model.parameters()))
            got = scheduled(model, optimizer, scheduler if number % 2 else schedule(optimizer))
            assert_close(torch.tensor(got), torch.tensor(wanted), 1e-6, name)
            assert_weights(model, weights_of(plain), SEVERAL_STEPS)
            saved = optimizer.full_state_dict()
            before = copy.deepcopy(saved["param_groups"])
            optimizer.load_state_dict(saved)
            for group in optimizer.param_groups:
                group["lr"].fill_(7.0) if is_tensor else group.update(lr=7.0)
            assert saved["param_groups"] == before  # a rate that is a tensor is not shared with what was saved


def test_bc54_every_scheduler_of_torch_steers_a_wrapped_optimizer() -> None:
    """Fault: a schedule of one kind, or a rate that is a tensor, went past the wrapped optimizer."""
    there = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert there - {"LRScheduler"} == set(SCHEDULES)
    run_ranks(check_schedules, 2)


# -- hooks, and looks at the state -----------------------------------------------------------------------------------


def check_hooks() -> None:
    for stage in (0, 2):
        with variant(stage=stage) as strategy:
            model, optimizer = wrap(Net(), lambda p: optim.AdamW(p, lr=0.1), strategy)
            own = {id(parameter) for parameter in model.parameters()}
            calls: list[str] = []

            def note(name: str, calls: list[str] = calls) -> Callable[..., None]:
                return lambda *_: calls.append(name)

            def before_step(
                optimizer: Any, args: Any, kwargs: Any, own: Any = own, calls: Any = calls
            ) -> tuple[Any, Any]:
                assert {id(p) for group in optimizer.param_groups for p in group["params"]} == own
                calls.append("before")
                return args, {}

            optimizer.register_step_pre_hook(before_step)
            optimizer.register_step_post_hook(note("after"))
            run_steps(model, optimizer, range(1))
            optimizer.zero_grad()
            x, y = (own_part(tensor) for tensor in batch_of(1))
            model.train_batch((x, y), optimizer, loss_fn=functional.mse_loss)
            assert calls == ["before", "after"] * 2
            calls.clear()

            def mark(optimizer: Any, state_dict: Any) -> dict[str, Any]:
                return {**state_dict, "mark": 3}

            def unmark(optimizer: Any, state_dict: Any, calls: list[str] = calls) -> dict[str, Any]:
                calls.append(str(state_dict["mark"]))
                return {key: value for key, value in state_dict.items() if key != "mark"}

            optimizer.register_state_dict_pre_hook(note("saving"))
            optimizer.register_state_dict_post_hook(mark)
            optimizer.register_load_state_dict_pre_hook(unmark)
            optimizer.register_load_state_dict_post_hook(note("loaded"))
            assert optimizer.state_dict()["mark"] == 3
            saved = optimizer.full_state_dict()
            optimizer.load_state_dict(saved)
            assert saved["mark"] == 3
            assert calls == ["saving", "saving", "3", "loaded"]


def test_hooks_of_steps_and_of_state_dicts_run() -> None:
    """Fault: state-dict hooks were dropped in silence; a step hook that returns arguments broke train_batch."""
    run_ranks(check_hooks, 2)


def check_state() -> None:
    rank = dist.get_rank()
    for stage in (0, 1):
        with variant(stage=stage) as strategy:
            model, optimizer = wrap(MatrixNet(), lambda p: optim.AdamW(p, lr=0.1), strategy)
            run_steps(model, optimizer, range(1))
            weight = model[0].weight
            if stage == 0:
                assert optimizer.state[weight]["exp_avg"].shape == weight.shape
                assert weight in optimizer.state
                assert optimizer.state.get(weight)["step"] == 1
            for _ in range(0 if stage == 0 else 2):
                cut = model[2].weight  # the middle one lies on both ranks
                for look in (lambda s, p: s[p], lambda s, p: s.get(p), lambda s, p: p in s):
                    with pytest.raises(hybrid.OptimizerError, match=r"'2.weight' is cut .*full_state_dict"):
                        look(optimizer.state, cut)
                optimizer.state = defaultdict(dict)  # as if never stepped, and asked as before
                run_steps(model, optimizer, range(1))
                assert {values["step"].item() for values in optimizer.full_state_dict()["state"].values()} == {1.0}
            assert all(value for value in optimizer.state.values()), f"an empty entry on rank {rank}"
            numbered = optim.AdamW(MatrixNet().parameters()).state_dict()
            with pytest.raises(hybrid.OptimizerError, match="load that state into it before distributed_optimizer"):
                optimizer.load_state_dict(numbered)


def test_a_look_at_the_state_by_parameter_is_right_or_refused() -> None:
    """Fault: `optimizer.state[p]` of a wrapped optimizer was an empty dict, and became an entry of the state."""
    run_ranks(check_state, 2)


def assert_written_as_one_entry(model: Any, optimizer: Any) -> None:
    """`update` put a second entry beside the one that is stepped with; copies were a TypeError."""
    before = copy.deepcopy(optimizer.state)
    assert len(before) == len(optimizer.state) == len(pickle.loads(pickle.dumps(optimizer.state)))
    for parameter in model.parameters():
        with contextlib.suppress(hybrid.OptimizerError):  # cut on this rank
            values = optimizer.state[parameter]
            optimizer.state.update({parameter: dict(values)})
            optimizer.state |= {parameter: values}
    assert len(optimizer.state) == len(before)


def check_forgotten_state() -> None:
    plain = MatrixNet()
    plain_optimizer = optim.AdamW(plain.parameters(), lr=0.1)
    for index in range(4):
        if index == 2:
            del plain_optimizer.state[plain[2].weight]
            plain_optimizer.state.pop(plain[4].weight, None)
        x, y = batch_of(index)
        functional.mse_loss(plain(x), y).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    for stage in range(4):
        with variant(stage=stage) as strategy:
            model, optimizer = wrap(MatrixNet(), lambda p: optim.AdamW(p, lr=0.1), strategy)
            run_steps(model, optimizer, range(2))
            assert_written_as_one_entry(model, optimizer)
            cut = model[2].weight
            if stage > 0:
                for change in (
                    lambda s, p: s.pop(p, None),
                    lambda s, p: s.setdefault(p, {}),
                    lambda s, p: s.update({p: {}}),
                ):
                    with pytest.raises(hybrid.OptimizerError, match=r"'2.weight' is cut .*del optimizer.state\[p\]"):
                        change(optimizer.state, cut)
                with pytest.raises(hybrid.OptimizerError, match=r"'4.weight' is cut"):
                    optimizer.state.pop(model[4].weight, None)  # whole on one rank: refused on both
                del optimizer.state[model[4].weight]
            else:
                assert optimizer.state.setdefault(cut, {})["step"] == 2
                assert optimizer.state.pop(model[4].weight, None)["step"] == 2
                with pytest.raises(KeyError, match=r"4.weight"):
                    del optimizer.state[model[4].weight]
            del optimizer.state[cut]
            run_steps(model, optimizer, range(2, 4))
            assert_weights(model, weights_of(plain), SEVERAL_STEPS)


def test_state_of_a_parameter_that_is_forgotten_begins_anew() -> None:
    """Fault: `optimizer.state.pop(p, None)` did nothing in silence, `del optimizer.state[p]` was a KeyError."""
    run_ranks(check_forgotten_state, 2)
