"""Splits under a memory: against all splits that there are."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from hybrid.contracts.memory_split import split_by_memory
from hybrid.contracts.schedule import make_schedule
from hybrid.contracts.stage_memory import HeldParameter, LayerBytes, MemoryModel, StateRule, moments
from hybrid.contracts.stage_split import split_by_costs
from hybrid.errors import StrategyError

SCHEDULES = [("1f1b", 3, 1), ("gpipe", 2, 1), ("zb-h1", 3, 1), ("zbv", 2, 2), ("interleaved", 2, 2)]


def layer(kept: int, elements: int = 0, name: str = "", **more: int) -> LayerBytes:
    held = {name: HeldParameter(elements=elements, parameter_bytes=4, gradient_bytes=4, state_bytes=8)} if name else {}
    return LayerBytes(parameters=held, kept={hash((name, kept, elements)): kept}, **more)


def all_splits(num_layers: int, num_chunks: int) -> list[tuple[range, ...]]:
    return [
        tuple(range(start, stop) for start, stop in pairwise((0, *cuts, num_layers)))
        for cuts in combinations(range(1, num_layers), num_chunks - 1)
    ]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("name", "stages", "virtual"), SCHEDULES)
def test_no_split_is_better(name: str, stages: int, virtual: int, seed: int) -> None:
    """Fits if any does; within 1 % of the least time, then as even, then within 1 % of the least memory."""
    draw = random.Random(seed)
    schedule = make_schedule(name, num_stages=stages, num_micro_batches=6, virtual_stages=virtual)
    num_layers = draw.randint(schedule.num_chunks, 8)
    costs = [draw.choice([1, 2, 3, draw.randint(1, 300)]) for _ in range(num_layers)]
    names = [f"w{draw.choice([0, index])}" for index in range(num_layers)]  # some are tied
    sizes = {one: draw.randint(0, 200) for one in names}
    layers = [
        layer(draw.randint(0, 900), sizes[one], one, working=draw.randint(0, 300), recomputed=draw.randint(0, 99))
        for one in names
    ]
    rule = StateRule(zero_stage=draw.randint(0, 3), num_shards=draw.choice([1, 2]), bucket_bytes=100)
    memory = MemoryModel(layers, rule, schedule)

    def peak(chunks: tuple[range, ...]) -> int:
        return max(stage.total for stage in memory.of_stages(chunks))

    def cost(chunks: tuple[range, ...]) -> int:
        return max(sum(costs[index] for index in chunk) for chunk in chunks)

    def squares(chunks: tuple[range, ...]) -> int:
        return sum(sum(costs[index] for index in chunk) ** 2 for chunk in chunks)

    splits = all_splits(num_layers, schedule.num_chunks)
    peaks = sorted(map(peak, splits))
    for limit in (None, peaks[0] - 1, peaks[0], peaks[len(peaks) // 3], peaks[-1]):
        found = split_by_memory(costs, memory, limit_bytes=limit)
        fitting = [chunks for chunks in splits if limit is None or peak(chunks) <= limit]
        assert found.chunks in splits
        assert found.fits == bool(fitting)
        if not fitting:
            assert found.fullest.total == peaks[0]
            continue
        assert found.chunks in fitting
        least = min(map(cost, fitting))
        assert cost(found.chunks) <= least * 1.01
        quick = [chunks for chunks in fitting if cost(chunks) <= least + least // 100]
        most = min(map(squares, quick)) * 1.001
        assert squares(found.chunks) <= most
        assert peak(found.chunks) <= min(peak(chunks) for chunks in quick if squares(chunks) <= most) * 1.01


def test_layers_that_need_nothing_are_split_by_cost_alone() -> None:
    schedule = make_schedule("1f1b", num_stages=4, num_micro_batches=8)
    costs = [5, 1, 1, 1, 1, 1, 1, 1, 1, 9, 2]
    memory = MemoryModel([LayerBytes()] * len(costs), StateRule(), schedule)
    assert split_by_memory(costs, memory).chunks == split_by_costs(costs, 4)


def test_of_equal_splits_the_leanest() -> None:
    """Ten equal layers on four stages: the stages that keep fewer micro-batches have more of them."""
    schedule = make_schedule("1f1b", num_stages=4, num_micro_batches=8)
    memory = MemoryModel([layer(100 + index, 1, f"w{index}") for index in range(10)], StateRule(), schedule)
    assert [len(chunk) for chunk in split_by_costs([1] * 10, 4)] == [3, 3, 2, 2]
    assert [len(chunk) for chunk in split_by_memory([1] * 10, memory).chunks] == [2, 2, 3, 3]
    thirty = MemoryModel([layer(100 + index, 1, f"w{index}") for index in range(30)], StateRule(), schedule)
    assert [len(chunk) for chunk in split_by_memory([1] * 30, thirty).chunks] == [7, 7, 8, 8]


def test_moments_are_those_of_the_schedule() -> None:
    """1F1B keeps p - r micro-batches; the halves of a backward have places of their own."""
    schedule = make_schedule("1f1b", num_stages=3, num_micro_batches=6)
    assert [moments(schedule, stage) for stage in range(3)] == [((3, 0),), ((2, 0),), ((1, 0),)]
    schedule = make_schedule("zb-h1", num_stages=2, num_micro_batches=4)
    assert moments(schedule, 1) == ((0, 2), (1, 1))


def test_a_tied_parameter_counts_once_on_a_stage() -> None:
    """zbv has the first and the last chunk on one rank: embedding and head are one there."""
    schedule = make_schedule("zbv", num_stages=2, num_micro_batches=4)
    tied = [layer(0, 10, name) for name in ("words", "a", "b", "words")]
    stages = MemoryModel(tied, StateRule(step_bytes=0), schedule).of_stages(all_splits(4, 4)[0])
    assert [stage.total for stage in stages] == [160, 320]


def test_fewer_layers_than_chunks() -> None:
    schedule = make_schedule("1f1b", num_stages=3, num_micro_batches=6)
    with pytest.raises(StrategyError, match="2 layers cannot fill 3 pipeline chunks"):
        split_by_memory([1, 1], MemoryModel([LayerBytes()] * 2, StateRule(), schedule))


def test_a_deep_model_is_split_at_once() -> None:
    """200 layers on 16 stages: the start of a job must not wait for it."""
    schedule = make_schedule("1f1b", num_stages=16, num_micro_batches=64)
    layers = [layer(1000 + index % 7, 50 + index % 3, f"w{index}") for index in range(200)]
    memory = MemoryModel(layers, StateRule(zero_stage=2, num_shards=8, reduces_each=True), schedule)
    free = split_by_memory([3] * 200, memory)
    limited = split_by_memory([3] * 200, memory, limit_bytes=free.fullest.total * 95 // 100)
    assert limited.fits
    assert limited.chunks != free.chunks
