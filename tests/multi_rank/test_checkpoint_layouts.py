"""Any layout loads any layout: weights, moments, step counts and masters to the bit, and the next losses.

Every pair of a set of layouts that covers all axes: ZeRO stages, shard groups with replicas, tensor and pipeline
parallel and both, schedules with several chunks per stage, partitions, bucket sizes, precision, world sizes; over
models with frozen parameters, uneven parts, parameters that never had a gradient, and a weight on two or three stages.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hybrid
from tests.pipeline_models import batch_of, build, cross_entropy, make_adamw, own, pipeline_strategy
from tests.ranks import run_ranks

# Name -> number of ranks, strategy.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"pp": 1}),
    "dp2-z0": (2, {"pp": 1, "stage": 0}),
    "dp4-z1-shard2-whole": (4, {"pp": 1, "stage": 1, "shard_size": 2, "partition": "parameter"}),
    "dp3-z3-tiny-buckets": (3, {"pp": 1, "stage": 3, "bucket_bytes": 300}),
    "pp2-dp2-z1-bf16": (4, {"pp": 2, "stage": 1, "amp": {"level": "O2"}}),
    "pp2-interleaved-z0": (2, {"pp": 2, "stage": 0, "schedule": "interleaved"}),
    "pp3-split-z2": (3, {"pp": 3, "stage": 2, "split": [1, 6, 1]}),
    "tp2-dp2-z2-bf16": (4, {"pp": 1, "tp": 2, "stage": 2, "amp": {"level": "O2"}}),
    "pp2-tp2-dp2-z3": (8, {"pp": 2, "tp": 2, "stage": 3}),
}
MODELS = {"tied": tuple(LAYOUTS), "thrice": tuple(name for name in LAYOUTS if "tp2" not in name)}  # it cannot be cut
BEFORE, AFTER = 2, 2
LOSS_BOUNDS = {False: 1e-5, True: 3e-2}  # by whether bf16 computes on either side


def wrap(kind: str, settings: dict[str, Any]) -> tuple[Any, Any]:
    strategy = pipeline_strategy(**settings)
    strategy.timeout_seconds = 60
    model: Any = hybrid.distributed_model(build(kind), strategy=strategy)
    return model, hybrid.distributed_optimizer(make_adamw(model))


def train(model: Any, optimizer: Any, first: int, count: int) -> list[float]:
    return [
        model.train_batch(own(batch_of(step)), optimizer, loss_fn=cross_entropy).loss.item()
        for step in range(first, first + count)
    ]


def save(directory: str, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = wrap(kind, settings)
    train(model, optimizer, 0, BEFORE)
    hybrid.save_checkpoint(directory, model, optimizer, step=BEFORE)
    state = {"weights": model.full_state_dict(), "optimizer": optimizer.full_state_dict()}
    return {**state, "losses": train(model, optimizer, BEFORE, AFTER)}


def load_all(directories: dict[str, str], kind: str, settings: dict[str, Any], wanted: dict[str, Any]) -> None:
    model, optimizer = wrap(kind, settings)
    train(model, optimizer, 7, 3)  # far from what is loaded
    frozen = {name for name, weight in build(kind).named_parameters() if not weight.requires_grad}
    computes_low = "amp" in settings
    for name, directory in directories.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other dropout masks: there is no dropout here
            loaded = hybrid.load_checkpoint(directory, model, optimizer)
        lists = (loaded.missing, loaded.unexpected, loaded.mismatched)
        assert (loaded.step, lists) == (BEFORE, ((), (), ())), name
        assert_weights(
            name, model.full_state_dict(), wanted[name]["weights"], rounded=frozen if computes_low else set()
        )
        assert_optimizer(name, optimizer.full_state_dict(), wanted[name]["optimizer"])
        losses = train(model, optimizer, BEFORE, AFTER)
        bound = LOSS_BOUNDS[computes_low or "bf16" in name]
        for got, expected in zip(losses, wanted[name]["losses"], strict=True):
            assert abs(got - expected) <= bound, (name, losses, wanted[name]["losses"])


def assert_weights(name: str, weights: Any, wanted: Any, *, rounded: set[str]) -> None:
    """Those in `rounded` are frozen and compute in bf16: they have no master."""
    assert list(weights) == list(wanted)
    for fqn, value in wanted.items():
        expected = value.bfloat16().to(value.dtype) if fqn in rounded else value
        assert weights[fqn].dtype == value.dtype, (name, fqn)
        assert torch.equal(weights[fqn], expected), (name, fqn)


def assert_optimizer(name: str, optimizer: Any, wanted: Any) -> None:
    here = optimizer["state"]
    for fqn, values in wanted["state"].items():
        for key, value in values.items():
            if key != "master":  # in full precision it is the weight
                assert here[fqn][key].dtype == value.dtype, (name, fqn, key)
                assert torch.equal(here[fqn][key], value), (name, fqn, key)
    moments = [{fqn for fqn, values in one.items() if set(values) - {"master"}} for one in (wanted["state"], here)]
    assert moments[0] == moments[1], (name, moments)  # parameters without state stay without
    assert optimizer["param_groups"] == wanted["param_groups"], name


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, str], dict[str, dict[str, Any]]]]:
    kind = request.param
    root = Path(tempfile.mkdtemp())
    try:
        directories = {name: str(root / name) for name in MODELS[kind]}
        states = {
            name: run_ranks(save, LAYOUTS[name][0], directory, kind, LAYOUTS[name][1], timeout_seconds=120)[0]
            for name, directory in directories.items()
        }
        yield kind, directories, states
    finally:
        shutil.rmtree(root)


def test_every_layout_loads_every_layout(saved: Any) -> None:
    kind, directories, states = saved
    for name in directories:
        world, settings = LAYOUTS[name]
        run_ranks(load_all, world, directories, kind, settings, states, timeout_seconds=180)
