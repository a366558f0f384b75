"""States saved and loaded: plain names and whole values, under any layout, and training that goes on as if nothing was.

Files are the matter of the checkpoint; here the dictionaries travel through memory.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import hybrid
from tests.models import MODELS, build, cut
from tests.parity import TOLERANCES, compare_tensors
from tests.parity_case import even_cuts, make_optimizer
from tests.ranks import run_plain, run_ranks
from tests.scenario import DTYPE, make_strategy

TOTAL_STEPS, SAVED_AT = 5, 2


def wrap(seed: int, optimizer_name: str, zero_stage: int, **settings: Any) -> tuple[Any, Any]:
    model = build("blocks", dtype=DTYPE, seed=seed)
    model = hybrid.distributed_model(model, strategy=make_strategy(zero_stage, **settings))
    return model, hybrid.distributed_optimizer(make_optimizer(optimizer_name, model))


def train(model: Any, optimizer: Any, steps: range) -> None:
    """The given steps, each on this rank's part of the global batch."""
    launched = torch.distributed.is_initialized()
    rank, world_size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if launched else (0, 1)
    for step in steps:
        batch = cut(MODELS["blocks"].batch(step), *even_cuts(0, 12, world_size)[rank], dtype=DTYPE)
        if hasattr(model, "train_batch"):
            model.train_batch(batch, optimizer, loss_fn=MODELS["blocks"].loss_fn)
        else:
            MODELS["blocks"].loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


Saved = tuple[dict[str, torch.Tensor], dict[str, Any]]


def whole_state(model: Any, optimizer: Any) -> Saved:
    return model.full_state_dict(), optimizer.full_state_dict()


@functools.cache
def plain_states(optimizer_name: str) -> tuple[Saved, Saved]:
    """(at `SAVED_AT`, at the end) of an uninterrupted plain run, the optimizer's state by name."""
    model = build("blocks", dtype=DTYPE)
    optimizer = make_optimizer(optimizer_name, model)
    names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    saved = []
    for steps in (range(SAVED_AT), range(SAVED_AT, TOTAL_STEPS)):
        train(model, optimizer, steps)
        state = {
            names[id(p)]: {key: value.clone() for key, value in values.items()} for p, values in optimizer.state.items()
        }
        groups = [{**g, "params": [names[id(p)] for p in g["params"]]} for g in optimizer.param_groups]
        weights = {fqn: value.clone() for fqn, value in model.state_dict().items()}
        saved.append((weights, {"state": state, "param_groups": groups}))
    return saved[0], saved[1]


def differences(got: Saved, wanted: Saved) -> list[str]:
    problems: list[str] = []
    if list(got[0]) != list(wanted[0]):
        problems.append(f"names are {list(got[0])}")
    for fqn, weight in wanted[0].items():
        compare_tensors(problems, TOLERANCES[DTYPE], "weight", fqn, got[0].get(fqn), weight)
    if got[1]["param_groups"] != wanted[1]["param_groups"]:
        problems.append(f"groups are {got[1]['param_groups']}")
    if set(got[1]["state"]) != set(wanted[1]["state"]):
        problems.append(f"state exists for {sorted(got[1]['state'])}")
    for fqn, values in wanted[1]["state"].items():
        mine = got[1]["state"].get(fqn, {})
        if set(mine) != set(values):
            problems.append(f"state of {fqn} has {sorted(mine)}")
        for key, value in values.items():
            compare_tensors(problems, TOLERANCES[DTYPE], "state", f"{key} of {fqn}", mine.get(key), value)
    return problems[:8]


def train_and_save(optimizer_name: str, zero_stage: int, settings: dict[str, Any]) -> Saved:
    model, optimizer = wrap(0, optimizer_name, zero_stage, **settings)
    train(model, optimizer, range(SAVED_AT))
    saved = whole_state(model, optimizer)
    train(model, optimizer, range(SAVED_AT, SAVED_AT + 1))  # what was saved must not follow
    return saved


def load_and_train(saved: Saved, optimizer_name: str, zero_stage: int, settings: dict[str, Any]) -> tuple[Saved, Saved]:
    """From other weights and a state of its own: (right after the load, after the remaining steps)."""
    model, optimizer = wrap(9, optimizer_name, zero_stage, **settings)
    train(model, optimizer, range(1))
    for group in optimizer.param_groups:
        group["lr"] = 123.0
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    loaded = whole_state(model, optimizer)
    train(model, optimizer, range(SAVED_AT, TOTAL_STEPS))
    return loaded, whole_state(model, optimizer)


Layout = tuple[int, int, dict[str, Any]]

MOVES: dict[str, tuple[Layout, Layout]] = {
    "dp2-z2 to dp3-z1": ((2, 2, {}), (3, 1, {})),
    "dp3-z1 to dp2-z0": ((3, 1, {"bucket_bytes": 64}), (2, 0, {})),
    "dp4-shard2-z2 to dp1-z2": ((4, 2, {"shard_size": 2}), (1, 2, {})),
    "dp1-z0 to dp4-shard2-z1": ((1, 0, {}), (4, 1, {"shard_size": 2})),
    "dp2-z1-parameter to dp3-z2-element": ((2, 1, {"partition": "parameter"}), (3, 2, {"partition": "element"})),
    "dp3-z2 to dp2-z2-parameter-lategather": (
        (3, 2, {"overlap_param_gather": True}),
        (2, 2, {"partition": "parameter", "overlap_param_gather": True}),
    ),
}


@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd"])
@pytest.mark.parametrize("move", MOVES)
def test_whole_states_move_between_layouts(move: str, optimizer_name: str) -> None:
    """Weights, moments, counters and options saved on one layout go on under another as the plain run does."""
    (size, stage, settings), (new_size, new_stage, new_settings) = MOVES[move]
    at_save, at_end = plain_states(optimizer_name)
    saves = run_ranks(train_and_save, size, optimizer_name, stage, settings)
    for saved in saves:
        assert differences(saved, at_save) == []
    for loaded, finished in run_ranks(load_and_train, new_size, saves[-1], optimizer_name, new_stage, new_settings):
        assert differences(loaded, at_save) == []
        assert differences(finished, at_end) == []


def plain_into_hybrid(saved: Saved, zero_stage: int) -> Saved:
    """States of a plain run loaded into wrapped models, and a wrapped model's weights into a plain one."""
    _, finished = load_and_train(saved, "adamw", zero_stage, {})
    plain = build("blocks", dtype=DTYPE, seed=4)
    plain.load_state_dict(finished[0], strict=True)
    assert all(torch.equal(plain.state_dict()[fqn], value) for fqn, value in finished[0].items())
    return finished


def test_plain_states_load_under_their_own_names() -> None:
    """No prefix, no padding, no missing key, in both directions."""
    at_save, at_end = plain_states("adamw")
    for finished in run_ranks(plain_into_hybrid, 2, at_save, 2):
        assert differences(finished, at_end) == []


def names_and_shards(zero_stage: int, settings: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    model, optimizer = wrap(0, "adamw", zero_stage, **settings)
    train(model, optimizer, range(2))
    references = model.state_dict()
    with torch.no_grad():
        model.scale.add_(1)  # state_dict returns references, as in plain torch
    assert references["scale"].item() == model.scale.item()
    assert references["first.weight"].data_ptr() == references["last.weight"].data_ptr()
    shards = {fqn: (bounds, value) for fqn, (bounds, value) in model.shard_state_dict().items()}
    facts = {fqn: (tuple(value.shape), value.dtype, value.stride()) for fqn, value in references.items()}
    return facts, {fqn: dict(values) for fqn, values in optimizer.state_dict()["state"].items()}, shards


@pytest.mark.parametrize("settings", [{}, {"partition": "parameter"}], ids=["element", "parameter"])
def test_states_have_plain_names_and_shards_cover_them(settings: dict[str, Any]) -> None:
    """The model's state is the plain one; each element and each moment lies on exactly one rank of a shard group."""
    plain = build("blocks", dtype=DTYPE)
    wanted = {fqn: (tuple(value.shape), value.dtype, value.stride()) for fqn, value in plain.state_dict().items()}
    ranks = run_ranks(names_and_shards, 3, 2, settings)
    for facts, state, shards in ranks:
        assert facts == wanted
        for fqn, values in state.items():
            start, stop = shards[fqn][0]
            assert values["exp_avg"].numel() == stop - start
    for fqn, parameter in plain.named_parameters():
        parts = sorted(shards[fqn][0] for _, _, shards in ranks if fqn in shards)
        ends = [0, *(stop for _, stop in parts)]
        assert [start for start, _ in parts] == ends[:-1]
        assert ends[-1] == (parameter.numel() if parameter.requires_grad else 0)


def own_state_round_trip(zero_stage: int, overlap_param_gather: bool) -> bool:
    """Whether a run that saves and loads this rank's own states goes on bitwise as one that does not."""
    finished = []
    for interrupted in (False, True):
        model, optimizer = wrap(0, "adamw", zero_stage, overlap_param_gather=overlap_param_gather)
        train(model, optimizer, range(SAVED_AT))
        if interrupted:
            weights, state = model.full_state_dict(), optimizer.state_dict()
            hybrid.shutdown()
            model, optimizer = wrap(9, "adamw", zero_stage, overlap_param_gather=overlap_param_gather)
            train(model, optimizer, range(1))
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        train(model, optimizer, range(SAVED_AT, TOTAL_STEPS))
        finished.append(model.full_state_dict())
        hybrid.shutdown()
    return all(torch.equal(finished[0][fqn], value) for fqn, value in finished[1].items())


@pytest.mark.parametrize(("zero_stage", "overlap_param_gather"), [(0, False), (1, True), (2, False)])
def test_a_ranks_own_state_round_trips_bitwise(zero_stage: int, overlap_param_gather: bool) -> None:
    """`optimizer.state_dict()` of a rank, loaded by the same rank, is the identity."""
    assert run_ranks(own_state_round_trip, 2, zero_stage, overlap_param_gather) == [True, True]


def load_what_does_not_fit() -> dict[str, str]:
    model, optimizer = wrap(0, "adamw", 2)
    train(model, optimizer, range(1))
    whole, mine = optimizer.full_state_dict(), optimizer.state_dict()
    ranges = {fqn: (start + 1, stop + 1) for fqn, (start, stop) in mine["ranges"].items()}
    strange = {**whole, "state": {**whole["state"], "stranger": whole["state"]["scale"]}}
    wrong_shape = {**whole, "state": {**whole["state"], "mixing": {"exp_avg": torch.ones(3)}}}
    swapped = {**whole, "param_groups": whole["param_groups"][::-1]}
    states = {
        "ranges": {**mine, "ranges": ranges},
        "stranger": strange,
        "shape": wrong_shape,
        "groups": swapped,
        "plain": make_optimizer("adamw", build("blocks")).state_dict(),
    }
    outcome = {}
    for name, state in states.items():
        before = optimizer.full_state_dict()
        try:
            optimizer.load_state_dict(state)
        except hybrid.OptimizerError as error:
            outcome[name] = str(error)
        else:
            outcome[name] = "no error"
        after = optimizer.full_state_dict()
        if after["param_groups"] != before["param_groups"] or set(after["state"]) != set(before["state"]):
            outcome[name] += " THE OPTIMIZER CHANGED"
    return outcome


@functools.cache
def misfits() -> list[dict[str, str]]:
    return run_ranks(load_what_does_not_fit, 2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ranges", ("this rank owns", "full_state_dict")),
        ("stranger", ("stranger",)),
        ("shape", ("mixing", "exp_avg", "(3,)", "(15, 17)")),
        ("groups", ("param groups differ",)),
        ("plain", ("param groups differ",)),
    ],
)
def test_states_that_do_not_fit_are_refused_whole(name: str, words: tuple[str, ...]) -> None:
    """Each misfit is named, and the optimizer keeps what it had: nothing is half loaded."""
    for outcome in misfits():
        assert all(word in outcome[name] for word in words), outcome[name]
        assert "CHANGED" not in outcome[name]


def alone_round_trip() -> list[str]:
    (weights, state), at_end = plain_states("sgd")
    loaded, finished = load_and_train((weights, state), "sgd", 2, {})
    return differences(loaded, (weights, state)) + differences(finished, at_end)


def test_a_state_loads_in_one_process() -> None:
    """A process without a launcher takes a saved state like any layout."""
    assert run_plain(alone_round_trip) == []
