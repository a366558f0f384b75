"""Models on the meta device get the values of a plain model, part by part, under every layout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import SEVERAL_STEPS, assert_close, assert_same_on_all_ranks, own_part, seeded
from tests.multi_rank.meta_models import MODELS, SEED, STAGES, State, Tied, everything, on_meta, strategy
from tests.ranks import run_plain, run_ranks

# ---- replay ------------------------------------------------------------------------------------------------------


def replayed(variants: list[tuple[int, bool]]) -> None:
    for name in MODELS:
        torch.manual_seed(SEED)
        plain = MODELS[name]()
        wanted, next_number = everything(plain), torch.rand(())
        frozen = {fqn for fqn, p in plain.named_parameters(remove_duplicate=False) if not p.requires_grad}
        for stage, o2 in variants:
            what = f"{name}, stage {stage}, O2 {o2}"
            torch.manual_seed(SEED)
            model = on_meta(MODELS[name])
            parameters = dict(model.named_parameters(remove_duplicate=False))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model = hybrid.distributed_model(model, strategy=strategy(stage, o2=o2))
            assert torch.equal(torch.rand(()), next_number), f"{what}: draws more or less than building does"
            after = dict(model.named_parameters(remove_duplicate=False))
            assert list(after) == list(parameters), what
            assert all(after[fqn] is parameter for fqn, parameter in parameters.items()), what
            hybrid.distributed_optimizer(optimizer)
            assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())), what
            assert [p.stride() for p in model.parameters()] == [p.stride() for p in plain.parameters()], what
            got = everything(model)
            assert got.keys() == wanted.keys(), what
            for fqn, value in wanted.items():
                if o2 and fqn in frozen:
                    value = value.bfloat16().float()  # has no master
                assert got[fqn].dtype == value.dtype, (what, fqn)
                assert torch.equal(got[fqn], value), (what, fqn, got[fqn], value)
            hybrid.shutdown()


@pytest.mark.parametrize(
    ("world_size", "variants"),
    [
        (1, [(0, False), (3, True)]),
        (2, [(stage, o2) for stage in STAGES for o2 in (False, True)]),
        (3, [(0, True), (1, False), (2, True), (3, False), (3, True)]),
    ],
    ids=["1", "2", "3"],
)
def test_replay_is_building_plainly(world_size: int, variants: list[tuple[int, bool]]) -> None:
    """Bitwise, at every stage, with and without masters; the random state goes on as after building."""
    run_ranks(replayed, world_size, variants)


def other_random_states() -> None:
    torch.manual_seed(SEED)
    wanted = everything(Tied())
    for order in ("replay", "by_name"):
        torch.manual_seed(SEED + dist.get_rank())
        after = torch.random.get_rng_state()
        model = hybrid.distributed_model(on_meta(Tied), strategy=strategy(3), init=order)
        assert torch.equal(torch.random.get_rng_state(), after), f"{order}: each rank keeps its own stream"
        got = everything(model)
        if order == "replay":
            assert all(torch.equal(got[name], value) for name, value in wanted.items())
        assert_same_on_all_ranks(got, order)
        hybrid.shutdown()


def test_ranks_whose_random_states_differ_take_the_first_ones() -> None:
    run_ranks(other_random_states, 3)


# ---- by name -----------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Weights large enough to see their spread; one whose draws are computed beside it, before and after others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.beside = Beside()


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "c", "d"):
            self.register_parameter(name, nn.Parameter(torch.empty(40, 40)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.a.normal_()
            self.b.copy_(torch.randn(40, 40))  # drawn before the parameter is touched
            self.c.fill_(0.0).add_(torch.randn(40, 40))
            self.d.data = torch.randn(40, 40)


def by_name(seed: int | None) -> dict[str, State]:
    results: dict[str, State] = {}
    models: dict[str, Callable[[], nn.Module]] = {
        **{name: MODELS[name] for name in ("zoo", "tied", "initials", "encoder")},
        "wide": Wide,
    }
    for name, build in models.items():
        for stage, o2, partition in (
            (0, False, None),
            (1, True, None),
            (2, False, "parameter"),
            (3, False, "element"),
            (3, True, "parameter"),
        ):
            torch.manual_seed(SEED)
            made = strategy(stage, o2=o2, seed=seed, partition=partition)
            model = hybrid.distributed_model(on_meta(build), strategy=made, init="by_name")
            # Frozen parameters have no master, so O2 rounds them.
            frozen = {fqn for fqn, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
            got = {fqn: value.bfloat16() if fqn in frozen else value for fqn, value in everything(model).items()}
            first = results.setdefault(name, got)
            for fqn, value in got.items():
                assert torch.equal(value, first[fqn]), (name, stage, o2, partition, fqn)
            hybrid.shutdown()
    return results


@functools.cache
def values_by_name(world_size: int, seed: int | None) -> dict[str, State]:
    return run_ranks(by_name, world_size, seed)[-1]


@pytest.mark.parametrize(("world_size", "seed"), [(1, None), (3, None), (2, SEED)])
def test_by_name_is_the_same_under_every_layout(world_size: int, seed: int | None) -> None:
    """The seed is the strategy's, or that of torch's generator."""
    got, wanted = values_by_name(world_size, seed), values_by_name(2, None)
    for name, state in wanted.items():
        for fqn, value in state.items():
            assert torch.equal(got[name][fqn], value), (name, fqn)


def test_by_name_draws_each_parameter_anew() -> None:
    state = values_by_name(2, None)["wide"]
    bound = 1 / 8  # of nn.Linear with 64 inputs: uniform between the two
    for name in ("first", "second"):
        weight = state[f"{name}.weight"]
        assert weight.abs().max() <= bound
        assert abs(weight.std().item() - bound / 3**0.5) < 0.03 * bound
        assert state[f"{name}.bias"].abs().max() <= bound
    normal = [state[f"beside.{name}"] for name in "abcd"]
    for value in normal:
        assert abs(value.std().item() - 1) < 0.1
        assert abs(value.mean().item()) < 0.1
    drawn = [state["first.weight"].flatten()[:1600] / bound * 3**0.5, *(value.flatten() for value in normal)]
    correlations = torch.corrcoef(torch.stack([*drawn, state["second.weight"].flatten()[:1600]])) - torch.eye(6)
    assert correlations.abs().max() < 0.15, correlations
    zoo = values_by_name(2, None)["zoo"]
    assert zoo["embedding.weight"][2].tolist() == [0.0] * 4
    assert zoo["norm.running_var"].tolist() == [1.0] * 3


def test_another_seed_gives_other_values() -> None:
    one, other = values_by_name(2, None)["wide"], run_ranks(by_name_seed, 2, SEED + 1)[0]
    assert not any(torch.equal(value, other[name]) for name, value in one.items())


def by_name_seed(seed: int) -> State:
    return everything(hybrid.distributed_model(on_meta(Wide), strategy=strategy(3, seed=seed), init="by_name"))


# ---- training ----------------------------------------------------------------------------------------------------


def train(model: Any, optimizer: torch.optim.Optimizer, part: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    losses = []
    for step in range(3):
        tokens = torch.randint(9, (6, 5), generator=seeded(step))
        targets = torch.randint(9, (6, 5), generator=seeded(step + 100))

        def loss_fn(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())

        if hasattr(model, "train_batch"):
            losses.append(model.train_batch((part(tokens), part(targets)), optimizer, loss_fn=loss_fn).loss)
        else:
            loss = loss_fn(model(tokens), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def trained_plainly() -> tuple[list[float], State]:
    torch.manual_seed(SEED)
    model = Tied()
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), lambda tensor: tensor)
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def trained(wanted: tuple[list[float], State]) -> None:
    for stage in STAGES:
        torch.manual_seed(SEED)
        model = on_meta(Tied)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # built before
        model = hybrid.distributed_model(model, strategy=strategy(stage))
        optimizer = hybrid.distributed_optimizer(optimizer)
        losses = train(model, optimizer, own_part)
        for step, (loss, plain) in enumerate(zip(losses, wanted[0], strict=True)):
            assert_close(loss, plain, SEVERAL_STEPS, f"loss of step {step} at stage {stage}")
        for name, value in model.full_state_dict().items():
            assert_close(value, wanted[1][name], SEVERAL_STEPS, f"{name} at stage {stage}")
        hybrid.shutdown()


@pytest.mark.parametrize("world_size", [2, 3])
def test_it_trains_as_one_plain_process(world_size: int) -> None:
    run_ranks(trained, world_size, run_plain(trained_plainly))
