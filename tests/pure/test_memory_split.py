"""Splits under a memory: against all splits that there are."""

from __future__ import annotations

import random
import time
from itertools import combinations, pairwise, permutations
from typing import Any

import pytest

from hybrid.contracts import memory_split, split_moves
from hybrid.contracts.memory_split import fullest_memory, split_by_memory
from hybrid.contracts.schedule import make_schedule
from hybrid.contracts.split_moves import SplitFigures
from hybrid.contracts.stage_memory import HeldParameter, LayerBytes, MemoryModel, StateRule, moments
from hybrid.contracts.stage_split import split_by_costs
from hybrid.errors import StrategyError

SCHEDULES = [("1f1b", 3, 1), ("gpipe", 2, 1), ("zb-h1", 3, 1), ("zbv", 2, 2), ("interleaved", 2, 2)]


def layer(kept: int, elements: int = 0, name: str = "", **more: Any) -> LayerBytes:
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


SHARED = [((1, 1, 1),), ((2, 2, 0), (0, 1, 3)), ((4, 0, 0), (0, 4, 4))]


@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("shared", SHARED)
def test_ranks_that_share_a_memory(shared: tuple[tuple[int, ...], ...], seed: int) -> None:
    """What counts is their sum: a split whose fullest stage needs more may be the one that fits."""
    draw = random.Random(seed)
    schedule = make_schedule("1f1b", num_stages=3, num_micro_batches=6)
    costs = [draw.randint(1, 9) for _ in range(8)]
    layers = [layer(draw.randint(100, 900), draw.randint(1, 99), f"w{place}") for place in range(8)]
    memory = MemoryModel(layers, StateRule(), schedule)
    sums = {chunks: fullest_memory(memory.of_stages(chunks), shared) for chunks in all_splits(8, 3)}
    least = min(sums.values())
    assert sums[split_by_memory(costs, memory, limit_bytes=least, shared=shared).chunks] == least
    refused = split_by_memory(costs, memory, limit_bytes=least - 1, shared=shared)
    assert not refused.fits
    assert sums[refused.chunks] == least


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


def test_a_buffer_of_several_layers_counts_once_on_a_stage() -> None:
    schedule = make_schedule("1f1b", num_stages=2, num_micro_batches=4)
    layers = [LayerBytes(buffers={"mask": 100, f"own.{place}": 7}) for place in range(4)]
    stages = MemoryModel(layers, StateRule(), schedule).of_stages((range(3), range(3, 4)))
    assert [stage.total for stage in stages] == [121, 107]


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


@pytest.mark.parametrize(
    ("name", "virtual", "num_layers"), [("interleaved", 2, 80), ("zbv", 2, 80), ("interleaved", 4, 130)]
)
def test_many_chunks_are_split_in_time(name: str, virtual: int, num_layers: int) -> None:
    """Of hundreds of millions of splits one that fits, in a second on a quiet machine; to look at them took minutes."""
    schedule = make_schedule(name, num_stages=8, num_micro_batches=16, virtual_stages=virtual)
    layers = [layer(1000 + place % 7, 50 + place % 3, f"w{place}") for place in range(num_layers)]
    memory = MemoryModel(layers, StateRule(zero_stage=2, num_shards=8, reduces_each=True, bucket_bytes=64), schedule)
    costs = [100 + place % 3 for place in range(num_layers)]
    free = split_by_memory(costs, memory)
    began = time.process_time()
    limited = split_by_memory(costs, memory, limit_bytes=free.fullest.total * 9 // 10)
    leanest = split_by_memory(costs, memory, limit_bytes=0)
    assert time.process_time() - began < 6  # seconds of a processor that others use too
    assert limited.fits
    assert limited.fullest.total <= free.fullest.total * 9 // 10
    assert leanest.fullest.total < limited.fullest.total
    # What a refusal names as enough is enough.
    assert split_by_memory(costs, memory, limit_bytes=leanest.fullest.total).fits


@pytest.mark.parametrize("seed", range(6))
def test_moves_alone_come_near(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Where there are too many splits: against all splits of a model that is small enough for it."""
    draw = random.Random(seed)
    schedule = make_schedule(("interleaved", "zbv")[seed % 2], num_stages=3, num_micro_batches=6, virtual_stages=2)
    layers = [layer(draw.randint(400, 600), draw.randint(20, 30), f"w{place}") for place in range(11)]
    memory = MemoryModel(layers, StateRule(), schedule)
    costs = [draw.choice([90, 100, 110]) for _ in range(11)]
    splits = all_splits(11, 6)
    peaks = {chunks: fullest_memory(memory.of_stages(chunks)) for chunks in splits}
    monkeypatch.setattr(memory_split, "_MOST_PARTIALS", -1)
    assert split_by_memory(costs, memory, limit_bytes=0).fullest.total <= min(peaks.values()) * 1.1
    limit = sorted(peaks.values())[len(splits) // 8]
    found = split_by_memory(costs, memory, limit_bytes=limit)
    assert peaks[found.chunks] <= limit

    def cost(chunks: tuple[range, ...]) -> int:
        return max(sum(costs[index] for index in chunk) for chunk in chunks)

    assert cost(found.chunks) <= min(cost(chunks) for chunks in splits if peaks[chunks] <= limit) * 1.1


@pytest.mark.parametrize("seed", range(4))
def test_what_a_move_changes_is_what_the_moved_split_has(seed: int) -> None:
    """For every pair of chunks: added up from what each chunk changes, against the whole split."""
    draw = random.Random(seed)
    costs = [draw.randint(1, 9) for _ in range(16)]
    schedule = make_schedule("interleaved", num_stages=3, num_micro_batches=6, virtual_stages=2)
    figures = SplitFigures(costs, MemoryModel([LayerBytes()] * 16, StateRule(), schedule))
    bounds = (0, *sorted(draw.sample(range(1, 16), 5)), 16)
    before = figures.evenness(bounds)
    for cost in sorted({*figures.costs(bounds), figures.costliest(bounds) + 4}):
        handed = split_moves._Handed(figures, bounds, cost)
        for giver, taker in permutations(range(6), 2):
            if bounds[giver + 1] - bounds[giver] > 1:
                moved = split_moves._move(bounds, giver, taker)
                after = figures.evenness(moved)
                assert handed.evenness(giver, taker) == (after[0] - before[0], after[1] - before[1])
                assert handed.is_within(giver, taker) == (figures.costliest(moved) <= cost)
