"""Reported faults of loading: what does not fit, what is left out, what lands in the wrong place.

Each saves in one world and loads in another, in processes that started from other weights.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hybrid
from tests.multi_rank.case_runs import own_part, seeded, strategy_of, wrapped
from tests.ranks import run_ranks

STAGES = (0, 1, 2, 3)


class Net(nn.Module):
    """A parameter that is really called `module`, buffers, a frozen pattern; variants for what does not fit."""

    def __init__(self, *, seed: int, extra: bool = False, missing: bool = False, hidden: int = 6) -> None:
        super().__init__()
        generator = seeded(seed)
        self.first = nn.Linear(5, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.module = nn.Parameter(torch.ones(hidden))
        if not missing:
            self.second = nn.Linear(hidden, hidden)
        if extra:
            self.extra = nn.Linear(hidden, hidden)
        self.frozen = nn.Linear(hidden, 5)
        self.frozen.requires_grad_(False)
        with torch.no_grad():
            for value in self.parameters():
                value.copy_(torch.randn(value.shape, generator=generator))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.norm(self.first(value)) * self.module
        for name in ("second", "extra"):
            if hasattr(self, name):
                value = torch.tanh(getattr(self, name)(value))
        return self.frozen(value)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam([value for value in parameters if value.requires_grad], lr=1e-2)


def step(model: Any, optimizer: Any, number: int) -> float:
    batch = torch.randn(12, 5, generator=seeded(100 + number))
    loss: torch.Tensor = model.train_batch(
        (own_part(batch), own_part(batch)), optimizer, loss_fn=nn.functional.mse_loss
    ).loss
    return loss.item()


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"weights": model.full_state_dict(), **optimizer.full_state_dict()}


def assert_equal(got: Any, wanted: Any, what: str) -> None:
    """Trees of tensors and numbers, to the bit."""
    if isinstance(wanted, dict):
        assert set(got) == set(wanted), (what, list(got), list(wanted))
        for key in wanted:
            assert_equal(got[key], wanted[key], f"{what}.{key}")
    elif isinstance(wanted, list):
        for index, pair in enumerate(zip(got, wanted, strict=True)):
            assert_equal(*pair, f"{what}[{index}]")
    elif isinstance(wanted, torch.Tensor):
        assert torch.equal(got, wanted), what
    else:
        assert got == wanted, what


# -- BC-61 -------------------------------------------------------------------------------------------------------


def save_net(directory: str) -> None:
    strategy = strategy_of(stage=3)
    strategy.recompute, strategy.recompute_configs = True, {"units": ["second"]}
    model, optimizer = wrapped(Net(seed=1), adam, strategy)
    step(model, optimizer, 0)
    hybrid.save_checkpoint(directory, model, optimizer, step=1)


def refused(directory: str, model: Any, optimizer: Any = None, **options: Any) -> str:
    """What is said, the same on all ranks; nothing may have changed."""
    before = state_of(model, optimizer) if optimizer is not None else {"weights": model.full_state_dict()}
    with pytest.raises(hybrid.CheckpointError) as caught:
        hybrid.load_checkpoint(directory, model, optimizer, **options)
    after = state_of(model, optimizer) if optimizer is not None else {"weights": model.full_state_dict()}
    assert_equal(after, before, "what was refused")
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, str(caught.value))
    assert len(set(said)) == 1, said
    return str(caught.value)


def load_misfits(directory: str) -> None:
    for stage in STAGES:
        for options, lists in (
            ({"extra": True}, ("missing: ", "model.extra.weight", "optimizer.extra.bias")),
            ({"missing": True}, ("unexpected: ", "model.second.weight", "optimizer.second.weight.exp_avg")),
            (
                {"hidden": 7},
                (
                    "of another shape or type: ",
                    "model.first.weight (float32 (6, 5) in the checkpoint, float32 (7, 5) here)",
                ),
            ),
        ):
            model, optimizer = wrapped(Net(seed=2, **options), adam, strategy_of(stage=stage))
            step(model, optimizer, 5)
            said = refused(directory, model, optimizer)
            for one in lists:
                assert one in said, said
            assert "strict=False loads what fits" in said
            before = state_of(model, optimizer)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loaded = hybrid.load_checkpoint(directory, model, optimizer, strict=False)
            check_loose(loaded, before, state_of(model, optimizer), options)
            step(model, optimizer, 6)
            hybrid.shutdown()


def check_loose(loaded: Any, before: dict[str, Any], after: dict[str, Any], options: dict[str, Any]) -> None:
    """What the checkpoint has is there; the rest is as it was, to the bit."""
    wanted = dict(Net(seed=1).named_parameters())
    if options.get("extra"):
        assert set(loaded.missing) >= {"model.extra.weight", "optimizer.extra.bias"}
        assert not loaded.unexpected
        assert not loaded.mismatched
        kept = [name for name in before["weights"] if name.startswith("extra")]
    elif options.get("missing"):
        assert "model.second.bias" in loaded.unexpected
        assert not loaded.missing
        kept = []
    else:
        names = " ".join(loaded.mismatched)
        assert "model.second.weight" in names
        assert "optimizer.second.weight.exp_avg" in names
        # All but the last bias have the hidden size.
        kept = [name for name in before["weights"] if name not in ("frozen.bias", "norm.num_batches_tracked")]
    for name in kept:
        assert_equal(after["weights"][name], before["weights"][name], name)
        assert_equal(after["state"].get(name), before["state"].get(name), name)
    moved = [name for name in after["weights"] if name not in kept and name in wanted]
    assert moved
    for name in moved:
        assert not torch.equal(after["weights"][name], before["weights"][name]), name


def test_bc61_names_are_the_plain_ones_and_all_misfits_are_listed(tmp_path: Path) -> None:
    """Fault: extra names passed without a word, a missing layer stayed random, a prefix was cut from other names."""
    run_ranks(save_net, 2, str(tmp_path), timeout_seconds=60)
    manifest = (tmp_path / "step_00000001" / "manifest.json").read_text(encoding="utf-8")
    names = set(re.findall(r'"model\.([^"]+)":\{"kind"', manifest.replace(" ", "")))
    assert names == set(Net(seed=1).state_dict())
    run_ranks(load_misfits, 2, str(tmp_path), timeout_seconds=60)


# -- BC-36 -------------------------------------------------------------------------------------------------------


def save_frozen(directory: str, stage: int) -> dict[str, Any]:
    model, optimizer = wrapped(Net(seed=3), adam, strategy_of(stage=stage))
    for number in range(2):
        step(model, optimizer, number)
    hybrid.save_checkpoint(directory, model, optimizer, step=2)
    return dict(model.full_state_dict())


def load_frozen(directory: str, wanted: dict[str, Any], stages: tuple[int, ...]) -> None:
    for stage in stages:
        model: Any = hybrid.distributed_model(Net(seed=4 + dist.get_rank()), strategy=strategy_of(stage=stage))
        hybrid.load_checkpoint(directory, model)
        assert_equal(model.full_state_dict(), wanted, f"stage {stage}")
        hybrid.shutdown()
        all_frozen = Net(seed=5).requires_grad_(False)
        model = hybrid.distributed_model(all_frozen, strategy=strategy_of(stage=stage))
        hybrid.load_checkpoint(directory, model)
        assert_equal(model.full_state_dict(), wanted, f"stage {stage}, nothing to train")
        again = f"{directory}-{stage}"
        hybrid.save_checkpoint(again, model, step=0)
        hybrid.load_checkpoint(again, model)
        hybrid.shutdown()


@pytest.mark.parametrize("stage", STAGES)
def test_bc36_frozen_weights_and_statistics_are_in_the_files(stage: int, tmp_path: Path) -> None:
    """Fault: the save walked the optimizer's groups, so after a resume the frozen part was random."""
    directory = str(tmp_path / "saved")
    wanted = run_ranks(save_frozen, 2, directory, stage, timeout_seconds=60)[0]
    for world in (1, 3):
        run_ranks(load_frozen, world, directory, wanted, (stage, (stage + 1) % 4), timeout_seconds=60)


# -- BC-53 -------------------------------------------------------------------------------------------------------


class Blockwise(torch.optim.Optimizer):
    """State as 8-bit optimizers have it: codes of the parameter's size, a scale per block of 4, a table, numbers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is None:
                    continue
                state = self.state[value]
                if not state:
                    state["codes"] = torch.zeros(value.shape, dtype=torch.uint8)
                    state["absmax"] = torch.zeros(-(-value.numel() // 4))
                    state["table"] = torch.linspace(-1, 1, 256)
                    state["count"], state["step"] = 0, torch.zeros(())
                state["count"] += 1
                state["step"] += 1
                state["codes"] += (value.grad > 0).to(torch.uint8)
                state["absmax"] += torch.arange(1.0, 1 + len(state["absmax"]))
                value -= group["lr"] * value.grad


def blockwise_job(stage: int, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
    partition = "parameter" if stage in (1, 2) else None
    return wrapped(model, Blockwise, strategy_of(stage=stage, partition=partition))


def save_blockwise(directory: str, stage: int) -> Any:
    model, optimizer = blockwise_job(stage, 1)
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    hybrid.save_checkpoint(directory, model, optimizer, step=2)
    return state_of(model, optimizer)


def load_blockwise(directory: str, wanted: Any) -> None:
    for stage in (0, 1, 2):
        model, optimizer = blockwise_job(stage, 2)
        step(model, optimizer, 3)
        hybrid.load_checkpoint(directory, model, optimizer)
        assert_equal(state_of(model, optimizer), wanted, f"stage {stage}")
        hybrid.shutdown()
    model, optimizer = wrapped(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)), Blockwise, strategy_of(stage=0))
    hybrid.shutdown()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bc53_state_of_other_shapes_goes_as_it_is(stage: int, tmp_path: Path) -> None:
    """Fault: training worked for hours, then the save cut a code table like a weight."""
    wanted = run_ranks(save_blockwise, 2, str(tmp_path), stage, timeout_seconds=60)[0]
    for world in (2, 3):
        run_ranks(load_blockwise, world, str(tmp_path), wanted, timeout_seconds=60)


# -- BC-55 -------------------------------------------------------------------------------------------------------


class Five(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "abcde":
            setattr(self, name, nn.Parameter(torch.ones(3)))
        self.b.requires_grad_(False)

    def forward(self, value: torch.Tensor, with_d: bool = False) -> torch.Tensor:
        own = {"a": 1.0, "c": 3.0, "e": 5.0, **({"d": 4.0} if with_d else {})}
        return sum((getattr(self, name) * factor).sum() for name, factor in own.items()) + 0 * value.sum()  # type: ignore[return-value]


def five_job(stage: int, order: Callable[[nn.Module], list[dict[str, Any]]]) -> tuple[Any, Any]:
    model: Any = hybrid.distributed_model(Five(), strategy=strategy_of(stage=stage))
    return model, hybrid.distributed_optimizer(torch.optim.Adam(order(model)))


def mixed_order(model: Any) -> list[dict[str, Any]]:
    return [
        {"params": [model.e, model.a], "lr": 0.1},
        {"params": [model.c], "lr": 0.2, "tag": "middle"},
        {"params": [model.d], "lr": 0.3},
    ]


def other_order(model: Any) -> list[dict[str, Any]]:
    return [
        {"params": [model.d], "lr": 1.0},
        {"params": [model.a, model.e], "lr": 1.0},
        {"params": [model.c], "lr": 1.0, "tag": "?"},
    ]


def five_steps(model: Any, optimizer: Any, count: int, **options: Any) -> None:
    for _ in range(count):
        model.train_batch(torch.ones(6, 1), optimizer, forward_step=lambda model, batch: model(batch, **options))


def save_five(directory: str) -> Any:
    model, optimizer = five_job(2, mixed_order)
    five_steps(model, optimizer, 2)
    hybrid.save_checkpoint(directory, model, optimizer, step=2)
    return state_of(model, optimizer)


def load_five(directory: str, wanted: Any) -> None:
    for stage in STAGES:
        model, optimizer = five_job(stage, other_order)
        five_steps(model, optimizer, 1, with_d=True)
        hybrid.load_checkpoint(directory, model, optimizer)
        got = state_of(model, optimizer)
        assert_equal(got["weights"], wanted["weights"], f"stage {stage}")
        assert set(got["state"]) == {"a", "c", "e"}
        for name, values in wanted["state"].items():
            assert_equal(got["state"][name], values, name)
        options = {tuple(sorted(group["params"])): (group["lr"], group.get("tag")) for group in got["param_groups"]}
        assert options == {("d",): (0.3, None), ("a", "e"): (0.1, None), ("c",): (0.2, "middle")}
        hybrid.shutdown()


def test_bc55_state_lands_on_its_own_parameter(tmp_path: Path) -> None:
    """Fault: state keyed by position went to the neighbour of the same shape, or the run began as if fresh."""
    wanted = run_ranks(save_five, 2, str(tmp_path), timeout_seconds=60)[0]
    assert {name: round(v["exp_avg"][0].item(), 6) for name, v in wanted["state"].items()} == {
        "a": 0.19, "c": 0.57, "e": 0.95,
    }  # fmt: skip
    run_ranks(load_five, 3, str(tmp_path), wanted, timeout_seconds=60)


# -- BC-62 -------------------------------------------------------------------------------------------------------


def low(stage: int, precision: str) -> hybrid.DistributedStrategy:
    strategy = strategy_of(stage=stage)
    if precision == "bf16":
        strategy.amp, strategy.amp_configs = True, {"level": "O2"}
    return strategy


def save_straight(root: str) -> Any:
    seen = {}
    for stage in STAGES:
        for precision in ("fp32", "bf16"):
            model, optimizer = wrapped(Net(seed=6), adam, low(stage, precision))
            for number in range(5):
                step(model, optimizer, number)
            name = f"{stage}-{precision}"
            hybrid.save_checkpoint(f"{root}/{name}", model, optimizer, step=5)
            state = state_of(model, optimizer)
            local = [value.clone() for value in model.parameters()] if stage < 3 else []
            seen[name] = (state, local, [step(model, optimizer, number) for number in range(5, 10)])
            hybrid.shutdown()
    return seen


def load_straight(root: str, everyone: Any) -> None:
    wanted = everyone[dist.get_rank()]
    for stage in STAGES:
        for precision in ("fp32", "bf16"):
            name = f"{stage}-{precision}"
            state, local, losses = wanted[name]
            model, optimizer = wrapped(Net(seed=99 + dist.get_rank()), adam, low(stage, precision))
            hybrid.load_checkpoint(f"{root}/{name}", model, optimizer)
            for got, value in zip(model.parameters() if stage < 3 else (), local, strict=True):
                assert torch.equal(got, value), name  # what the next forward computes with, on this rank
            assert_equal(state_of(model, optimizer), state, name)
            assert [step(model, optimizer, number) for number in range(5, 10)] == losses, name
            hybrid.shutdown()


def test_bc62_a_fresh_process_goes_on_to_the_bit(tmp_path: Path) -> None:
    """Fault: moments were zero after the load, or low-precision weights those from before it on some ranks."""
    everyone = run_ranks(save_straight, 2, str(tmp_path), timeout_seconds=120)
    run_ranks(load_straight, 2, str(tmp_path), everyone, timeout_seconds=120)


def check_parts(root: str) -> None:
    model, optimizer = wrapped(Net(seed=7), adam, strategy_of(stage=2))
    step(model, optimizer, 0)
    hybrid.save_checkpoint(f"{root}/both", 1)  # Fleet's form
    both = state_of(model, optimizer)
    hybrid.save_checkpoint(f"{root}/weights", model, step=1)
    hybrid.save_checkpoint(f"{root}/optimizer", optimizer=optimizer, step=1)
    step(model, optimizer, 1)
    later = state_of(model, optimizer)

    said = refused(f"{root}/weights", model, optimizer)
    assert "it has no optimizer: it was saved without one" in said
    said = refused(f"{root}/optimizer", model, optimizer)
    assert "it has no model: it was saved without one" in said

    hybrid.load_checkpoint(f"{root}/both", model)
    assert_equal(state_of(model, optimizer), {**later, "weights": both["weights"]}, "weights only")
    for name in ("both", "optimizer"):
        model.load_state_dict(later["weights"])
        optimizer.load_state_dict({key: later[key] for key in ("state", "param_groups")})
        assert_equal(state_of(model, optimizer), later, "as it was")
        hybrid.load_checkpoint(f"{root}/{name}", optimizer=optimizer)
        assert_equal(state_of(model, optimizer), {**both, "weights": later["weights"]}, "optimizer only")
    hybrid.load_checkpoint(f"{root}/both")
    assert_equal(state_of(model, optimizer), both, "both")

    said = refused(f"{root}/both", model, optimizer, step=7)
    assert "has no complete checkpoint of step 7; complete are 1" in said
    second = hybrid.distributed_model(Net(seed=8), strategy=strategy_of(stage=2))
    with pytest.raises(hybrid.CheckpointError, match=r"this process has 2: pass model and optimizer"):
        hybrid.save_checkpoint(f"{root}/several", 3)
    with pytest.raises(hybrid.CheckpointError, match="the optimizer is that of another model"):
        hybrid.save_checkpoint(f"{root}/several", second, optimizer, step=3)
    with pytest.raises(hybrid.CheckpointError, match=r"needs a model from distributed_model, got Net"):
        hybrid.save_checkpoint(f"{root}/several", Net(seed=9), step=3)
    for wrong in (None, -1, True, 1.0):
        with pytest.raises(hybrid.CheckpointError, match="a number of at least 0"):
            hybrid.save_checkpoint(f"{root}/several", model, optimizer, step=wrong)
    dist.barrier()
    assert not Path(root, "several").exists()


def test_parts_are_saved_and_loaded_by_themselves(tmp_path: Path) -> None:
    """Weights alone, the optimizer alone, what was wrapped last; the part that is not meant stays to the bit."""
    run_ranks(check_parts, 2, str(tmp_path), timeout_seconds=60)
