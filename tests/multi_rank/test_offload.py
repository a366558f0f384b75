"""Offload: the same bits as without it, under every kind of layout, and exactly the copies that docs/offload.md says.

Each case trains twice, without and with offload, the second time between two memories that may not meet
(`tests/two_memories.py`), so that what would fail on a GPU fails here.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hybrid
from hybrid.collectives.deferred import deferred_backend
from tests.multi_rank.offload_cases import BF16, ON_FOUR_RANKS, ON_TWO_RANKS, Case, by_train_batch
from tests.ranks import run_plain, run_ranks
from tests.two_memories import two_memories

STEPS = 2


def build(case: Case, offload: str) -> tuple[Any, Any]:
    with torch.device("meta") if case.meta else contextlib.nullcontext():
        plain = case.model()
    torch.manual_seed(5)
    model = hybrid.distributed_model(plain, strategy=case.strategy(offload))
    return model, hybrid.distributed_optimizer(case.optimizer(model))


def run(case: Case, offload: str) -> list[Any]:
    """All that a user can see of some steps."""
    with contextlib.ExitStack() as stack:
        if case.late:
            stack.enter_context(deferred_backend())
        if offload != "none" and case.is_guarded:
            stack.enter_context(two_memories())
        try:
            model, optimizer = build(case, offload)
            seen = [value for step in range(STEPS) for value in case.train(model, optimizer, step)]
            seen += everything(model, optimizer)
        finally:
            hybrid.shutdown()
    return seen


def everything(model: Any, optimizer: Any) -> list[Any]:
    state = optimizer.full_state_dict()
    return [*model.full_state_dict().items(), *state["state"].items(), state["param_groups"]]


def differing(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype != other.dtype or not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    if isinstance(one, dict):
        return one.keys() != other.keys() or any(differing(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) != len(other) or any(map(differing, one, other))
    return bool(one != other) and not (one != one and other != other)


def compared(names: list[str]) -> list[str]:
    wrong = []
    for name in names:
        case = (ON_TWO_RANKS | ON_FOUR_RANKS)[name]
        try:
            one, other = run(case, "none"), run(case, case.offload)
            wrong += [
                f"{name}: {place}" for place, (a, b) in enumerate(zip(one, other, strict=True)) if differing(a, b)
            ]
        except Exception as error:
            raise AssertionError(f"case {name!r}") from error
    return wrong


@pytest.mark.parametrize(("world_size", "cases"), [(2, ON_TWO_RANKS), (4, ON_FOUR_RANKS)], ids=["two", "four"])
def test_numbers_are_those_without_offload(world_size: int, cases: dict[str, Case]) -> None:
    """Protects the promise: where state lies changes no bit, and no operation needs what is in the other memory."""
    assert run_ranks(compared, world_size, list(cases), timeout_seconds=240) == [[]] * world_size


# -- what is copied ------------------------------------------------------------------------------------------------

ELEMENTS = 4 * 32 * 32


def square_layers() -> nn.Module:
    """Four weights of 4 KiB in fp32: a bucket each, without padding."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Per element of the own shards, in a step of two micro-batches: bytes to the host and to the device."""

    case: Case
    own: int
    gradients: int
    read: int = 0
    written: int


def counted(
    stage: int, *, own: int = ELEMENTS // 2, low: bool = True, offload: str = "optimizer", **numbers: Any
) -> Any:
    sharding = {"stage": stage, **numbers.pop("sharding", {})}
    settings = {"accumulate_steps": 2, **(BF16 if low else {})}
    case = Case(offload=offload, sharding=sharding, settings=settings, model=square_layers)
    return Copies(case=case, own=own, **numbers)


COPIES = {
    2: (
        counted(0, own=ELEMENTS, gradients=4, read=2, written=2),
        counted(1, gradients=4, read=2, written=2),
        counted(2, gradients=2 * 4, read=2, written=2),
        counted(2, gradients=2 * 2, read=2, written=2, sharding={"reduce_dtype": "bfloat16"}),
        counted(2, low=False, gradients=2 * 4, read=4, written=4),
        counted(3, gradients=2 * 4, written=2),
        counted(3, low=False, gradients=2 * 4, read=4, written=4),
        counted(3, offload="parameters", gradients=2 * 4, written=2 * 2 * 2),
        counted(3, offload="parameters", low=False, gradients=2 * 4, written=2 * 2 * 4),
        counted(3, offload="parameters", gradients=2 * 4, written=2, sharding={"reshard_after": "run"}),
    ),
    4: (
        counted(2, gradients=4, read=2, written=2, sharding={"shard_size": 2}),
        counted(3, offload="parameters", gradients=4, written=2 * 2 * 2, sharding={"shard_size": 2}),
    ),
}


def square_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 32), torch.randn(4, 32)


def copies_of_a_step(world_size: int) -> list[tuple[dict[str, int], dict[str, int], dict[str, int]]]:
    found = []
    for copies in COPIES[world_size]:
        model, optimizer = build(copies.case, copies.case.offload)
        model.train_batch(square_batch(0), optimizer, loss_fn=nn.functional.mse_loss)
        before = model.host_transfer_bytes()
        model.train_batch(square_batch(1), optimizer, loss_fn=nn.functional.mse_loss)
        after = model.host_transfer_bytes()
        between = model.memory_bytes()
        model.train_batch(square_batch(2), optimizer, loss_fn=nn.functional.mse_loss, step=False)
        model.hybrid_runtime.synchronise()
        found.append(({k: after[k] - before.get(k, 0) for k in after}, between, model.memory_bytes()))
        hybrid.shutdown()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_copies_and_memory_are_those_of_the_formulas(world_size: int) -> None:
    """Protects the formulas of docs/offload.md: a copy too many is time in every step, and memory is what it is for."""
    for found in run_ranks(copies_of_a_step, world_size, world_size):
        for copies, (sent, between, settled) in zip(COPIES[world_size], found, strict=True):
            case, own = copies.case, copies.own
            expected = {"gradients to host": copies.gradients, "parameters to host": copies.read}
            expected["parameters to device"] = copies.written
            assert {k: v for k, v in sent.items() if v} == {k: own * v for k, v in expected.items() if v}, case
            width = 2 if "amp" in case.settings else 4
            is_cut = case.offload == "parameters"
            here = own if case.sharding["stage"] == 3 else ELEMENTS
            assert between["parameters"] == (0 if is_cut else here * width), case
            # A master, or the copy that the host updates, or the cut parameters; or a master and these.
            assert between["host_parameters"] == own * (4 + width * (is_cut and width == 2)), case
            assert between["gradients"] == between["host_gradients"] == between["optimizer_state"] == 0
            assert 0 <= between["host_optimizer_state"] - own * 8 <= 4 * 4, case  # step counters
            assert (settled["gradients"], settled["host_gradients"]) == (0, own * 4), case


# -- files ---------------------------------------------------------------------------------------------------------


def saved_and_loaded(folder: str) -> list[str]:
    """Each way to keep state saves after a step; others load that and go on. All end like a run without a stop."""
    wrong = []
    for settings, kinds in ((BF16, ("none", "optimizer", "parameters")), ({}, ("none", "optimizer"))):
        case = Case(sharding={"stage": 3}, settings=settings)
        whole: dict[str, Any] = {}
        ends: dict[str, Any] = {}
        for kind in kinds:
            model, optimizer = build(case, kind)
            by_train_batch(model, optimizer, 0)
            hybrid.save_checkpoint(Path(folder, f"{len(settings)}{kind}"), model, optimizer, step=1)
            whole[kind] = model.full_state_dict(), optimizer.full_state_dict(), copy.deepcopy(optimizer.state_dict())
            by_train_batch(model, optimizer, 1)
            ends[kind] = everything(model, optimizer)
            hybrid.shutdown()
        pairs = [(one, other) for one in kinds for other in kinds if one == other or "none" in (one, other)]
        for saver, loader in pairs:
            for way in ("a checkpoint", "whole state", "own state")[: 3 if saver == "none" and settings else 1]:
                model, optimizer = build(case, loader)
                if way == "a checkpoint":
                    hybrid.load_checkpoint(Path(folder, f"{len(settings)}{saver}"), model, optimizer)
                else:
                    model.load_state_dict(whole[saver][0])
                    optimizer.load_state_dict(whole[saver][1 if way == "whole state" else 2])
                by_train_batch(model, optimizer, 1)
                ends[f"{way} of {saver!r} in {loader!r}"] = everything(model, optimizer)
                hybrid.shutdown()
        wrong += [f"{name}, {settings}" for name, end in ends.items() if differing(ends["none"], end)]
    return wrong


def test_files_know_no_offload(tmp_path: Path) -> None:
    """Protects resuming with other settings: what is saved is the same wherever it lay, masters to the bit."""
    assert run_ranks(saved_and_loaded, 2, str(tmp_path), timeout_seconds=240) == [[], []]


def refusals() -> list[str]:
    model, _ = build(Case(sharding={"stage": 0}), "optimizer")
    found = []
    for option in ({"capturable": True}, {"lr": torch.tensor(0.1, device="meta")}):
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.param_groups[0].update(option)
        with pytest.raises(hybrid.OptimizerError) as caught:
            hybrid.distributed_optimizer(optimizer)
        found.append(str(caught.value))
    hybrid.shutdown()
    return found


def test_steps_that_the_host_cannot_make_are_refused() -> None:
    """Protects against an error of torch's in the first step, which names neither the optimizer nor offload."""
    captured, rate = run_plain(refusals)
    assert "Adam has capturable = True (param group 0)" in captured
    assert "Adam has 'lr' as a tensor on meta (param group 0)" in rate
