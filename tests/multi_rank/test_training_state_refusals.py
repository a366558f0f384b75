"""Training state that differs between ranks, cannot be saved or does not fit: said at once, with its place."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

import hybrid
from hybrid.compose import training_state
from hybrid.rng import random_states, set_random_states
from tests.multi_rank.test_training_state import job, prepare, refusal, save
from tests.ranks import run_ranks

# -- what the ranks must agree on ------------------------------------------------------------------------------------


def check_disagreement() -> list[str]:
    rank = dist.get_rank()
    runtime, _, optimizer = job()
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=9)
    plateau.step(2.0 + (rank == 2))  # a rank's own loss
    messages = [
        refusal(save, runtime, lr_scheduler=plateau, extra={"a": [1, {"b": float(rank // 2)}], "c": rank}),
        refusal(save, runtime, extra={"mean": torch.ones(2) * (rank != 1)}),
        refusal(save, runtime, extra={"a": 1} if rank else {"b": 1}),
        refusal(save, runtime, extra=[0.0, 1] if rank == 1 else [-0.0, 1]),
        refusal(save, runtime, extra=[0.0] if rank == 0 else None),
    ]
    # Equal trees are equal, whatever the order of a set or of keys.
    words = ["a", "b", "c", "nan"] if rank else ["nan", "c", "b", "a"]
    array = np.array([1.0, np.nan])
    array.setflags(write=False)
    save(runtime, extra={"words": set(words), **dict.fromkeys(words, float("nan")), "array": array, "e": np.zeros(0)})
    return messages


def test_ranks_that_would_save_different_things_are_told_where() -> None:
    """One copy is saved: the first rank's would replace the others' in silence."""
    messages = run_ranks(check_disagreement, 3)
    assert all(theirs == messages[0] for theirs in messages)
    schedule, tensor, key, zero, missing = messages[0]
    assert "lr_scheduler['best'] is 2.0 on rank 0 and 3.0 on rank 2; step it alike" in schedule
    assert (
        "extra['a'][1]['b'] is 0.0 on rank 0 and 1.0 on rank 2" in schedule or "extra['c'] is 0 on rank 0" in schedule
    )
    assert "extra['mean'] is a Tensor of torch.float32, shape (2,)" in tensor
    assert "rank 1" in tensor
    assert "rank 0 has extra['b'] where rank 1 has extra['a']" in key
    assert "extra[0] is -0.0 on rank 0 and 0.0 on rank 1" in zero
    assert "extra was given on ranks [0] and not on ranks [1, 2]" in missing


# -- what is refused -------------------------------------------------------------------------------------------------


class WithFunctions(lr_scheduler.LRScheduler):
    """A user's schedule that holds a function and one of its own methods."""

    def __init__(self, optimizer: Any, factor: float) -> None:
        self.factor = factor
        self.curve = lambda n: self.factor**n
        self.warm = self.rates
        super().__init__(optimizer)

    def rates(self) -> list[float]:
        return [lr * self.curve(self.last_epoch) for lr in self.base_lrs]

    def get_lr(self) -> list[float]:
        return self.warm()


class Stubborn:
    """Has a state, and takes none."""

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        raise ValueError("not today")


def check_collect() -> None:
    runtime, _, optimizer = job()
    message = refusal(
        training_state.collect,
        runtime,
        lr_scheduler=[lr_scheduler.StepLR(optimizer, 1), object()],
        sampler=torch.utils.data.SequentialSampler(range(3)),
        extra={"hooks": [print]},
    )
    for part in (
        "lr_scheduler[1] is a object, which has no state_dict()",
        "sampler is a SequentialSampler, which has no state_dict() and load_state_dict(); use hybrid.Distributed",
        "extra['hooks'][0] is a builtin_function_or_method, which a checkpoint cannot hold: it is code",
    ):
        assert part in message
    broken = lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    broken.lr_lambdas = [abs]  # torch fails on a builtin
    assert "lr_scheduler: its state_dict() raised AttributeError" in refusal(
        training_state.collect, runtime, lr_scheduler=broken
    )
    # Functions of a schedule are the script's, as torch has it for LambdaLR; a finished state is a state.
    scheduler = WithFunctions(optimizer, 0.5)
    scheduler.last_epoch = 3
    position = hybrid.DistributedBatchSampler(23, 2).state_dict(num_batches=2)
    saved = save(runtime, lr_scheduler=scheduler, sampler=position)
    resumed, sampler = WithFunctions(optimizer, 0.9), hybrid.DistributedBatchSampler(23, 2)
    restoration = prepare(runtime, saved, lr_scheduler=resumed, sampler=sampler)
    assert restoration.problems == ()
    restoration.apply()
    assert (resumed.factor, resumed.get_lr(), sampler.state_dict()) == (0.5, [0.125], position)


def test_what_cannot_be_saved_is_listed_at_once() -> None:
    """BC-53: found when the save is called, all of it, with its place."""
    run_ranks(check_collect, 1)


def check_prepare() -> None:
    runtime, _, optimizer = job()
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    scheduler.last_epoch = 5
    sampler = hybrid.DistributedBatchSampler(23, 2)
    saved = save(runtime, lr_scheduler=scheduler, sampler=sampler, extra={"best": 2.5})
    states = random_states()

    # Each problem by itself, all at once; nothing is changed.
    other = lr_scheduler.CosineAnnealingLR(optimizer, 7)
    longer = hybrid.DistributedBatchSampler(24, 2, shuffle=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    kept = (other.state_dict().copy(), longer.state_dict(), scaler.state_dict())
    broken = json.loads(saved[0])
    broken["random"][0]["python"] = {"__kind__": "tensor", "name": "value.99"}
    problems = prepare(
        runtime, (json.dumps(broken), *saved[1:]), lr_scheduler=other, sampler=longer, scaler=scaler
    ).problems
    for part in (
        "lr_scheduler: the checkpoint's is of another kind than the CosineAnnealingLR that was given: only in the "
        "checkpoint ['gamma', 'step_size'], only here ['T_max', 'eta_min']",
        "length is 24 here and 23 in the state; shuffle is True here and False",
        "scaler was given, and the checkpoint has none",
        "random[0]['python']: the checkpoint has no tensor 'value.99'",
    ):
        assert any(part in problem for problem in problems), (part, problems)
    assert len(problems) == 4
    assert kept == (other.state_dict(), longer.state_dict(), scaler.state_dict())
    assert all(torch.equal(states[name], now) for name, now in random_states().items())

    # Not asked for: a warning each. Not a resume: generators are left alone.
    restoration = prepare(runtime, saved)
    assert [note.split(",")[0] for note in restoration.warnings] == [
        f"the checkpoint has a state of {name}" for name in ("lr_scheduler", "sampler")
    ]
    assert (restoration.extra, restoration.random is None) == ({"best": 2.5}, False)
    assert prepare(runtime, saved, random=False).random is None

    # Lists and dicts in another form; groups that grew; parts of a sequence.
    one, two = lr_scheduler.StepLR(optimizer, 1), lr_scheduler.StepLR(optimizer, 2)
    assert (
        "a list of 2 was given, the checkpoint has one" in prepare(runtime, saved, lr_scheduler=[one, two]).problems[0]
    )
    named = save(runtime, lr_scheduler={"a": one})
    assert (
        "a dict of ['b'] was given, the checkpoint has ['a']"
        in prepare(runtime, named, lr_scheduler={"b": one}).problems[0]
    )
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    sequence = save(runtime, lr_scheduler=lr_scheduler.SequentialLR(optimizer, parts, [2]))
    shorter = lr_scheduler.SequentialLR(optimizer, parts[:1], [])
    assert "saved with 2 schedulers, here are 1" in prepare(runtime, sequence, lr_scheduler=shorter).problems[0]
    swapped = lr_scheduler.SequentialLR(optimizer, parts[::-1], [2])
    assert (
        "lr_scheduler._schedulers[0]: the checkpoint's is of"
        in prepare(runtime, sequence, lr_scheduler=swapped).problems[0]
    )
    plain = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(2)], lr=1.0)
    wider = lr_scheduler.StepLR(plain, 1)
    assert "saved with 1 param groups, here are 2" in prepare(runtime, saved, lr_scheduler=wider).problems[0]

    # An object that refuses in the end: the ones before it have their state back.
    both = save(runtime, lr_scheduler={"a": scheduler, "b": Stubborn()})
    fresh = lr_scheduler.StepLR(optimizer, 1)
    restoration = prepare(runtime, both, lr_scheduler={"a": fresh, "b": Stubborn()})
    assert restoration.problems == ()
    message = refusal(restoration.apply)
    assert "lr_scheduler['b']: its load_state_dict() raised ValueError: not today" in message
    assert fresh.last_epoch == 0


def test_all_that_does_not_fit_is_listed_and_nothing_is_set() -> None:
    """torch's schedulers take any dict without a word: the run would go on with wrong rates, or fail steps later."""
    run_ranks(check_prepare, 1)


def check_generators() -> None:
    states = random_states()
    drawn = [random.gauss(0, 1), np.random.randn(), torch.randn(2)]
    for name in states:
        damaged = {**states, name: states[name][:-4]}
        now = random_states()
        assert f"random state {name!r} cannot be put back" in refusal(set_random_states, damaged)
        assert all(torch.equal(now[other], state) for other, state in random_states().items())
    assert "no generator has this name" in refusal(set_random_states, {"perl": states["torch"]})
    set_random_states(states)
    again = [random.gauss(0, 1), np.random.randn(), torch.randn(2)]
    assert drawn[:2] == again[:2]
    assert drawn[2].equal(again[2])
    np.random.set_bit_generator(np.random.PCG64(3))
    other = random_states()
    drawn = [np.random.randn()]
    set_random_states(other)
    assert [np.random.randn()] == drawn
    assert "'numpy' cannot be put back" in refusal(set_random_states, states)


def test_generators_are_put_back_all_or_none() -> None:
    """Half of a damaged record would be a run that is neither the old one nor a new one."""
    run_ranks(check_generators, 1)
