"""Which samples each rank reads: every one once, the same number of batches everywhere, also after a resume."""

from __future__ import annotations

import json
from itertools import islice, zip_longest

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.data.coordinate import DataCoordinate, current_coordinate, set_coordinate_provider
from hybrid.data.sampler import DistributedBatchSampler, epoch_order
from hybrid.errors import BatchError

LENGTHS = st.integers(1, 60)
REPLICAS = st.integers(1, 7)
BATCH_SIZES = st.integers(1, 9)


def samplers(length: int, batch_size: int, num_replicas: int, **options: object) -> list[DistributedBatchSampler]:
    """The samplers of all replicas."""
    return [
        DistributedBatchSampler(length, batch_size, num_replicas=num_replicas, rank=rank, **options)
        for rank in range(num_replicas)
    ]


def global_batches(world: list[DistributedBatchSampler]) -> list[list[int]]:
    """What all replicas read together, step by step; fails if they disagree on the number of steps."""
    steps = list(zip_longest(*world))
    assert all(part is not None for step in steps for part in step)
    return [[index for part in step for index in part] for step in steps]


@given(length=LENGTHS, batch_size=BATCH_SIZES, num_replicas=REPLICAS, seed=st.integers(0, 3))
def test_every_sample_once_and_no_rank_waits(length: int, batch_size: int, num_replicas: int, seed: int) -> None:
    """A rank with one batch more hangs the job; a repeated sample counts twice in the gradient."""
    if length < num_replicas:
        with pytest.raises(BatchError, match=f"{length} samples cannot give each of {num_replicas} replicas one"):
            samplers(length, batch_size, num_replicas)
        return
    world = samplers(length, batch_size, num_replicas, shuffle=True, seed=seed)
    parts = [list(sampler) for sampler in world]
    assert sorted(index for part in parts for batch in part for index in batch) == list(range(length))
    assert len({len(part) for part in parts}) == 1
    # torch's default_collate fails on an empty list, and at most one sample may come on top of batch_size.
    assert all(1 <= len(batch) <= batch_size + 1 for part in parts for batch in part)
    for step in zip(*parts, strict=True):
        sizes = [len(batch) for batch in step]
        assert max(sizes) - min(sizes) <= 1


@given(length=LENGTHS, batch_size=BATCH_SIZES, num_replicas=REPLICAS)
def test_global_batches_are_those_of_one_process(length: int, batch_size: int, num_replicas: int) -> None:
    """A layout gives the losses of one process only if it reads the same samples in each step."""
    world = samplers(length, batch_size, num_replicas, shuffle=True, tail="empty")
    (reference,) = samplers(length, batch_size * num_replicas, 1, shuffle=True)
    assert global_batches(world) == list(reference)


@given(length=LENGTHS, batch_size=BATCH_SIZES, num_replicas=REPLICAS)
def test_drop_last_gives_whole_batches_or_refuses(length: int, batch_size: int, num_replicas: int) -> None:
    """Training that ends well after zero steps, because the tail was everything, must not happen."""
    if length < batch_size * num_replicas:
        with pytest.raises(BatchError, match="an epoch would have no batch"):
            samplers(length, batch_size, num_replicas, drop_last=True)
        return
    for sampler in samplers(length, batch_size, num_replicas, drop_last=True):
        batches = list(sampler)
        assert len(batches) == length // (batch_size * num_replicas)
        assert {len(batch) for batch in batches} == {batch_size}


@given(length=LENGTHS, batch_size=BATCH_SIZES, num_replicas=REPLICAS, drop_last=st.booleans())
def test_len_is_the_number_of_batches(length: int, batch_size: int, num_replicas: int, drop_last: bool) -> None:
    """Schedulers and progress bars count on it."""
    try:
        world = samplers(length, batch_size, num_replicas, drop_last=drop_last)
    except BatchError:
        return
    for sampler in world:
        assert len(sampler) == len(list(sampler)) > 0


@given(
    length=st.integers(20, 60),
    before=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    after=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    num_steps=st.integers(0, 4),
)
def test_resume_reads_the_rest_of_the_epoch_once(
    length: int, before: tuple[int, int], after: tuple[int, int], num_steps: int
) -> None:
    """BC-64: resumed in mid-epoch on the same or another number of ranks, nothing is skipped or repeated."""
    world = samplers(length, *before, shuffle=True, seed=5)
    for sampler in world:
        sampler.set_epoch(1)
    seen = [index for sampler in world for batch in islice(sampler, num_steps) for index in batch]
    states = [sampler.state_dict() for sampler in world]
    assert all(state == states[0] for state in states)
    state = json.loads(json.dumps(states[0]))

    resumed = samplers(length, *after, shuffle=True, seed=5, tail="empty")
    for sampler in resumed:
        sampler.load_state_dict(state)
        sampler.set_epoch(state["epoch"])  # as the loop over epochs does
    rest = [index for step in global_batches(resumed) for index in step]
    if state["epoch"] == 1:
        assert sorted(seen + rest) == list(range(length))
    else:  # everything was read before
        assert sorted(seen) == sorted(rest) == list(range(length))
    next_epoch = resumed[0].epoch
    assert global_batches(resumed) == list(_fresh(length, after, epoch=next_epoch))


def _fresh(length: int, shape: tuple[int, int], *, epoch: int) -> DistributedBatchSampler:
    batch_size, num_replicas = shape
    sampler = DistributedBatchSampler(length, batch_size * num_replicas, num_replicas=1, rank=0, shuffle=True, seed=5)
    sampler.set_epoch(epoch)
    return sampler


def test_resume_on_the_same_ranks_gives_the_same_batches() -> None:
    """BC-64, exactly: 23 samples, batch 2 on 2 ranks, saved in epoch 1 after 3 steps."""
    straight = samplers(23, 2, 2, shuffle=True)
    assert [list(sampler) for sampler in straight]  # epoch 0
    expected = [list(sampler) for sampler in straight]  # epoch 1

    first = samplers(23, 2, 2, shuffle=True)
    for sampler in first:
        list(sampler)
    begun = [list(islice(sampler, 3)) for sampler in first]
    resumed = samplers(23, 2, 2, shuffle=True)
    for sampler in resumed:
        sampler.load_state_dict(first[0].state_dict())
    assert [len(sampler) for sampler in resumed] == [3, 3]
    assert [part + list(sampler) for part, sampler in zip(begun, resumed, strict=True)] == expected


def test_epochs_differ_and_come_back() -> None:
    """A loop that forgets set_epoch must not read every epoch in the same order."""
    sampler = DistributedBatchSampler(30, 30, num_replicas=1, rank=0, shuffle=True)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert sampler.epoch == 1
    sampler.set_epoch(1)
    assert list(sampler) == second


def test_leaving_a_loop_early_starts_the_epoch_again() -> None:
    """As torch's samplers do; only a loaded state continues in the middle."""
    sampler = DistributedBatchSampler(10, 2, num_replicas=1, rank=0)
    assert list(islice(sampler, 2)) == [[0, 1], [2, 3]]
    assert next(iter(sampler)) == [0, 1]


def test_state_counts_what_was_trained_where_workers_read_ahead() -> None:
    """DataLoader workers draw indices before the loop gets their batches; the position must not run ahead."""
    sampler = DistributedBatchSampler(40, 2, num_replicas=2, rank=0)
    drawn_ahead = iter(sampler)
    for _ in range(6):
        next(drawn_ahead)
    assert sampler.state_dict()["position_samples"] == 24
    assert sampler.state_dict(num_batches=3)["position_samples"] == 12
    with pytest.raises(BatchError, match="num_batches is 11; this pass has 10 batches"):
        sampler.state_dict(num_batches=11)


def test_load_refuses_another_order() -> None:
    """Another seed or length would read some samples twice and others never."""
    state = DistributedBatchSampler(40, 2, num_replicas=1, rank=0, shuffle=True, seed=1).state_dict()
    other = DistributedBatchSampler(41, 2, num_replicas=1, rank=0, shuffle=True, seed=2)
    with pytest.raises(BatchError, match=r"length is 41 here and 40 in the state; seed is 2 here and 1"):
        other.load_state_dict(state)


def test_loop_that_starts_again_at_epoch_0_after_a_resume_is_refused() -> None:
    """BC-64: set_epoch(0) after loading epoch 1 would repeat a whole epoch."""
    sampler = DistributedBatchSampler(8, 2, num_replicas=1, rank=0, shuffle=True)
    list(sampler)
    list(islice(sampler, 2))
    resumed = DistributedBatchSampler(8, 2, num_replicas=1, rank=0, shuffle=True)
    resumed.load_state_dict(sampler.state_dict())
    with pytest.raises(BatchError, match=r"stands in epoch 1 at sample 4 of 8; .*range\(sampler\.epoch"):
        resumed.set_epoch(0)


def test_rest_that_cannot_reach_every_rank_is_refused() -> None:
    """3 samples left, 4 ranks: with the default rule some rank would have nothing to collate."""
    sampler = DistributedBatchSampler(11, 2, num_replicas=2, rank=0)
    list(islice(sampler, 2))
    wider = DistributedBatchSampler(11, 1, num_replicas=4, rank=0)
    with pytest.raises(BatchError, match="3 samples are left of epoch 0"):
        wider.load_state_dict(sampler.state_dict())


def test_order_is_frozen() -> None:
    """A saved position means nothing if another numpy version or platform shuffles otherwise."""
    assert epoch_order(10, seed=0, epoch=0).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]
    order = epoch_order(1000, seed=3, epoch=2)
    assert sorted(order.tolist()) == list(range(1000))
    assert not numpy.array_equal(order, epoch_order(1000, seed=3, epoch=3))
    assert not numpy.array_equal(order, epoch_order(1000, seed=4, epoch=2))


@pytest.mark.parametrize("num_replicas", [2, 4])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_evaluation_counts_each_sample_once(num_replicas: int, batch_size: int) -> None:
    """BC-67: five values whose mean is 4; a repeated tail would give 3.5 or 5."""
    values = [1.0, 2.0, 3.0, 4.0, 10.0]
    steps = global_batches(samplers(len(values), batch_size, num_replicas))
    read = [values[index] for step in steps for index in step]
    assert (sum(read) / len(read), len(read)) == (4.0, 5)


def test_dataset_smaller_than_a_global_batch_names_the_numbers() -> None:
    """BC-66: 3 samples, batch 4, 2 ranks, drop_last."""
    with pytest.raises(BatchError, match=r"3 samples .* 4 per replica x 2 replicas = 8.*or batch_size=1"):
        DistributedBatchSampler(3, 4, num_replicas=2, rank=0, drop_last=True)


def test_all_problems_at_once() -> None:
    with pytest.raises(BatchError) as caught:
        DistributedBatchSampler(0, 0, num_replicas=2, rank=2, seed=-1, tail="pad")  # type: ignore[arg-type]
    for part in ("batch_size is 0", "rank is 2", "0 samples", "seed is -1", "tail is 'pad'"):
        assert part in str(caught.value)


def test_coordinate_comes_from_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launched process that has not joined its job must not believe that it is alone."""
    monkeypatch.setattr("hybrid.data.coordinate._provider", None)
    assert current_coordinate({}) == DataCoordinate(num_replicas=1, rank=0)
    with pytest.raises(BatchError, match=r"WORLD_SIZE is 4 .*after hybrid\.distributed_model"):
        current_coordinate({"WORLD_SIZE": "4"})
    set_coordinate_provider(lambda: DataCoordinate(num_replicas=4, rank=3))
    sampler = DistributedBatchSampler(16, 2)
    assert list(sampler) == [[6, 7], [14, 15]]
    with pytest.raises(BatchError, match="num_replicas is 2 and rank is None"):
        DistributedBatchSampler(16, 2, num_replicas=2)


def test_position_is_that_of_the_pass_that_a_loader_has_drawn_ahead() -> None:
    """Fault: after a pass was drawn to its end, `num_batches` counted in the next epoch, and a resume skipped one."""
    sampler = DistributedBatchSampler(24, 2, num_replicas=1, rank=0, shuffle=True)
    list(sampler)  # as the workers of a loader do, batches before the loop receives the last one
    assert (sampler.epoch, sampler.state_dict()["epoch"]) == (1, 1)
    for trained, expected in ((0, (0, 0)), (10, (0, 20)), (11, (0, 22)), (12, (1, 0))):
        state = sampler.state_dict(num_batches=trained)
        assert (state["epoch"], state["position_samples"]) == expected
    resumed = DistributedBatchSampler(24, 2, num_replicas=1, rank=0, shuffle=True)
    resumed.load_state_dict(sampler.state_dict(num_batches=6))
    assert resumed.state_dict(num_batches=2)["position_samples"] == 16
    rest = [index for batch in resumed for index in batch]
    whole = DistributedBatchSampler(24, 2, num_replicas=1, rank=0, shuffle=True)
    assert rest == [index for batch in list(whole)[6:] for index in batch]
    state = resumed.state_dict(num_batches=4)
    assert (state["epoch"], state["position_samples"]) == (0, 20)
    resumed.set_epoch(1)  # the loop says that the next pass is to begin
    assert resumed.state_dict(num_batches=1) == {**state, "epoch": 1, "position_samples": 2}
