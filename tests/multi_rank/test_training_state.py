"""Schedule, loss scale, place in the data, `extra` and random numbers: saved once, taken up on any number of ranks."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

import hybrid
from hybrid.checkpoint.values import decode, encode
from hybrid.collectives import ops
from hybrid.compose import training_state
from hybrid.compose.checkpoint_job import layout_record
from hybrid.errors import CheckpointError
from hybrid.rng import random_states
from hybrid.tensor.region import CutRegion
from tests.multi_rank.case_runs import own_part, seeded, strategy_of, variant, wrapped
from tests.ranks import run_ranks

# (state.json, its tensors, the layout that saved)
Saved = tuple[str, dict[str, torch.Tensor], dict[str, Any]]


def save(runtime: Any, *, groups: Any = None, **given: Any) -> Saved:
    """As a save does it; the same on every rank."""
    trees = training_state.collect(runtime, **given)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, training_state.state_digests(trees))
    training_state.check_agreement(runtime, trees, everyone)
    trees["random"] = ops.all_gather_object(training_state.random_record(runtime), group=runtime.mesh.world)
    if groups is not None:
        trees["groups"] = groups
    tensors: dict[str, torch.Tensor] = {}
    document = {name: encode(tree, where=name, tensors=tensors) for name, tree in trees.items()}
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    return json.dumps(document), tensors, json.loads(json.dumps(layout_record(runtime)))


def prepare(runtime: Any, saved: Saved, **given: Any) -> training_state.Restoration:
    text, tensors, layout = saved
    return training_state.prepare(
        runtime,
        json.loads(text),
        tensors=tensors.__getitem__,
        saved_layout=layout,
        layout=layout_record(runtime),
        **given,
    )


def small() -> nn.Module:
    torch.manual_seed(11)
    return nn.Linear(3, 2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def job(stage: int = 2, **settings: Any) -> tuple[Any, Any, Any]:
    """Runtime, model, optimizer."""
    model, optimizer = wrapped(small(), sgd, strategy_of(stage=stage, **settings))
    return model.hybrid_runtime, model, optimizer


def refusal(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


# -- BC-54: schedules ----------------------------------------------------------------------------------------------


def tagged_sgd(parameters: Any) -> torch.optim.Optimizer:
    weight, bias = parameters
    return torch.optim.SGD([{"params": [weight], "tag": "body"}, {"params": [bias], "lr": 0.5}], lr=1.0)


def batch_of(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(own_part(torch.randn(size, n, generator=seeded(n))) for n in (3, 2))  # type: ignore[return-value]


def save_schedule() -> Saved:
    model, optimizer = wrapped(small(), tagged_sgd, strategy_of(stage=2, accumulate_steps=4))
    scheduler = lr_scheduler.LambdaLR(optimizer, [lambda n: 0.1**n, lambda n: 0.5**n])
    skipped = tuple(tensor[:0] for tensor in batch_of(8))
    for batch, lr in ((batch_of(8), 0.1), (skipped, 0.1)):
        model.train_batch(batch, optimizer, scheduler, loss_fn=functional.mse_loss)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(lr)
    groups = optimizer.full_state_dict()["param_groups"]
    return save(model.hybrid_runtime, lr_scheduler={"main": [scheduler]}, groups=groups)


def resume_schedule(saved: Saved) -> None:
    model, optimizer = wrapped(
        small(), lambda p: torch.optim.SGD([{"params": [q]} for q in p], lr=7.0), strategy_of(stage=1)
    )
    scheduler = lr_scheduler.LambdaLR(optimizer, [lambda n: 0.1**n, lambda n: 0.5**n])
    text, tensors, _ = saved
    groups = decode(json.loads(text)["groups"], tensors=tensors.__getitem__)
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
    restoration = prepare(model.hybrid_runtime, saved, lr_scheduler={"main": [scheduler]})
    assert restoration.problems == ()
    restoration.apply()
    assert [(g["initial_lr"], g.get("tag")) for g in optimizer.param_groups] == [(1.0, "body"), (0.5, None)]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.25]
    model.train_batch(batch_of(8), optimizer, scheduler, loss_fn=functional.mse_loss)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1**2, 0.5 * 0.5**2]


def test_bc54_the_schedule_goes_on_with_every_key_of_its_groups() -> None:
    """Fault: after a resume on another world size the rate started again, and `initial_lr` and `tag` were gone."""
    saved = run_ranks(save_schedule, 2)[0]
    for world_size in (1, 2, 4):
        run_ranks(resume_schedule, world_size, saved)


# -- BC-64: data and random numbers ----------------------------------------------------------------------------------


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 15), nn.Dropout(0.5), nn.Linear(15, 2))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sampler_of_23() -> hybrid.DistributedBatchSampler:
    return hybrid.DistributedBatchSampler(23, 2, shuffle=True, seed=4)


def train(model: Any, optimizer: Any, batches: Any) -> tuple[list[list[int]], list[float], list[float]]:
    """Ids, losses, and what Python and NumPy draw in each step (augmentation)."""
    inputs, labels = torch.randn(23, 3, generator=seeded(1)), torch.randn(23, 2, generator=seeded(2))
    seen, losses, drawn = [], [], []
    for ids in batches:
        seen.append(ids)
        drawn.append(random.gauss(0, 1) + float(np.random.randn()))
        result = model.train_batch((inputs[ids], labels[ids]), optimizer, loss_fn=functional.mse_loss)
        losses.append(result.loss.item())
    return seen, losses, drawn


def train_straight() -> tuple[Any, ...]:
    """Epoch 0, three steps of epoch 1; a save; the rest of epoch 1."""
    torch.manual_seed(20)
    model, optimizer = wrapped(dropping(), adamw, strategy_of(stage=2, seed=6))
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    sampler = sampler_of_23()
    train(model, optimizer, sampler)
    batches = iter(sampler)
    begun, _, _ = train(model, optimizer, itertools.islice(batches, 3))
    saved = save(model.hybrid_runtime, sampler=sampler)
    weights, state = model.full_state_dict(), optimizer.full_state_dict()
    rest = train(model, optimizer, batches)
    return saved, weights, state, begun, rest


def resume_training(saved: Saved, weights: Any, state: Any) -> tuple[Any, ...]:
    torch.manual_seed(21)
    # Another stage: who draws which numbers stays the same.
    model, optimizer = wrapped(dropping(), adamw, strategy_of(stage=1, seed=7))
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    sampler = sampler_of_23()
    before = random_states()
    restoration = prepare(model.hybrid_runtime, saved, sampler=sampler)
    assert all(torch.equal(before[name], now) for name, now in random_states().items())
    assert (sampler.epoch, restoration.problems) == (0, ())
    restoration.apply()
    kept = all(torch.equal(before[name], now) for name, now in random_states().items())
    assert sampler.epoch == 1
    return kept, restoration.warnings, train(model, optimizer, sampler)


def test_bc64_the_run_goes_on_exactly_and_on_other_ranks_reads_the_rest_once() -> None:
    """Fault: a resume in mid-epoch repeated or skipped samples, drew other masks, or could not load on fewer ranks."""
    straight = run_ranks(train_straight, 2)
    saved, weights, state = straight[0][:3]
    begun = [index for run in straight for ids in run[3] for index in ids]
    for world_size in (2, 1, 4):
        resumed = run_ranks(resume_training, world_size, saved, weights, state)
        rest = [index for _, _, (seen, _, _) in resumed for ids in seen for index in ids]
        assert sorted(begun + rest) == list(range(23)), world_size
        for rank, (kept, warnings, trained) in enumerate(resumed):
            if world_size == 2:
                assert (kept, warnings) == (False, ())
                assert trained == straight[rank][4]
            else:
                assert kept
                (warning,) = warnings
                assert "dropout masks" in warning
                assert "saved: world_size 2, axes dp_shard 2" in warning
                assert f"here: world_size {world_size}, axes {'1' if world_size == 1 else 'dp_shard 4'}" in warning


def check_region_is_left() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.dropout, self.down = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return self.down(self.dropout(self.up(x)))

    strategy = hybrid.DistributedStrategy()
    strategy.tensor_parallel = True
    strategy.tensor_parallel_configs = {"degree": 2, "plan": {"up": "colwise", "down": "rowwise"}}
    strategy.seed = 3
    model = hybrid.distributed_model(Mlp(), strategy=strategy)
    runtime, region = model.hybrid_runtime, model.up.tensor_parallel_region
    assert isinstance(region, CutRegion)
    x = torch.ones(2, 8)
    model(x)
    region.enter(torch.device("cpu"))  # as a forward leaves it that raises in between
    own = ops.all_gather_object(random_states()["torch"], group=runtime.mesh.world)
    assert not own[0].equal(own[1])
    saved = save(runtime, extra=None)
    common = ops.all_gather_object(random_states()["torch"], group=runtime.mesh.world)
    assert common[0].equal(common[1])
    wanted = model(x)
    region.enter(torch.device("cpu"))
    prepare(runtime, saved).apply()
    assert model(x).equal(wanted)


def test_random_states_are_those_outside_a_cut_region() -> None:
    """A stream of one tensor-parallel rank, saved as if it were the common one, would keep the ranks apart for ever."""
    run_ranks(check_region_is_left, 2)


# -- loss scale -----------------------------------------------------------------------------------------------------


def check_scaler() -> None:
    def with_scaler(**settings: Any) -> Any:
        strategy = strategy_of(stage=1)
        strategy.amp, strategy.amp_configs = True, {"dtype": "float16", **settings}
        return wrapped(small(), sgd, strategy)[0].hybrid_runtime

    try:
        runtime = with_scaler(init_loss_scaling=2.0**10)
        runtime.scaler.scale(torch.ones(1))  # makes the scale
        runtime.scaler.update(32.0)
        message = refusal(save, runtime, scaler=torch.amp.GradScaler("cpu"))
        assert "two loss scalers" in message
        saved = save(runtime, scaler=runtime.scaler)  # the strategy's own is no other one
        assert "two loss scalers" in prepare(runtime, saved, scaler=torch.amp.GradScaler("cpu")).problems[0]
    finally:
        hybrid.shutdown()
    for given in (False, True):
        try:
            runtime = with_scaler(init_loss_scaling=2.0**10)
            if given:
                prepare(runtime, saved, scaler=runtime.scaler).apply()
            else:
                prepare(runtime, saved, random=False).apply()  # weights alone: this run's scale is its own
                assert runtime.scaler.get_scale() == 2.0**10
                prepare(runtime, saved).apply()
            assert runtime.scaler.get_scale() == 32.0
        finally:
            hybrid.shutdown()
    # To and from another precision.
    with variant(stage=1) as strategy:
        runtime = wrapped(small(), sgd, strategy)[0].hybrid_runtime
        restoration = prepare(runtime, saved)
        assert (restoration.problems, restoration.loads) == ((), ())
        assert "the checkpoint has a state of scaler, which is not loaded" in restoration.warnings[0]
        own = torch.amp.GradScaler("cpu", init_scale=4.0)
        prepare(runtime, saved, scaler=own).apply()
        assert own.get_scale() == 32.0
        plain = save(runtime, scaler=torch.amp.GradScaler("cpu", enabled=False))
        assert "scaler" not in json.loads(plain[0])
    try:
        restoration = prepare(with_scaler(init_loss_scaling=16.0), plain)
        assert restoration.problems == ()
        assert "no loss scale: it starts at 16" in restoration.warnings[0]
    finally:
        hybrid.shutdown()


def test_loss_scale_is_that_of_the_strategy_or_the_one_given() -> None:
    """A resumed float16 run that starts at the first scale again skips steps; another precision has no scale."""
    run_ranks(check_scaler, 1)
