"""Chunks that are balanced by cost and fit a memory.

Of the splits that fit, those whose costliest chunk is within 1 % of the cheapest possible take about as long; of them
those that are as even (least sum of squares, within 0.1 %); of these those whose fullest memory is within 1 % of the
least possible; of these the most even one, as `split_by_costs` has it. Ten equal layers on four stages of 1F1B: 2, 2,
3, 3.

All splits are looked at as long as they are not too many: those that begin alike and are worse in everything are left
out, so there is one for each layer with one chunk per stage, but many with several, whose stages are known in their
first chunks only. Where there are too many, the best split is what `split_moves` makes of a good one.
"""

from __future__ import annotations

import functools
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Literal, NamedTuple

from hybrid.contracts.split_moves import Bounds, Moves, SplitFigures
from hybrid.contracts.stage_memory import MemoryModel, StageBytes
from hybrid.contracts.stage_split import split_by_costs, whole_costs

__all__ = ["MemorySplit", "fullest_memory", "split_by_memory"]

# Splits this close to the best (a part of it) take as long, or need as much: neither is known better. And as even.
_TOLERANCE, _EVEN = 100, 1000
# Partial splits that are looked at before there are too many: some tenths of a second.
_MOST_PARTIALS = 20_000

_By = Literal["cost", "evenness", "bytes", "evenness and bytes"]
_ZERO: dict[_By, tuple[int, ...]] = {"cost": (0,), "evenness": (0, 0), "bytes": (), "evenness and bytes": (0, 0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySplit:
    """A split, and what each stage needs; `fits` is False if no split keeps the limit: then it is the leanest one."""

    chunks: tuple[range, ...]
    stages: tuple[StageBytes, ...]
    fits: bool

    @property
    def fullest(self) -> StageBytes:
        return max(self.stages, key=lambda stage: (stage.total, -stage.stage))


def split_by_memory(
    costs: Sequence[float],
    memory: MemoryModel,
    *,
    limit_bytes: int | None = None,
    shared: Sequence[Sequence[int]] = (),
) -> MemorySplit:
    """Contiguous chunks for the stages of `memory.schedule`.

    Args:
        costs: one number per layer, in any unit, none below 0.
        memory: of the same layers.
        limit_bytes: that no memory may exceed; None for no limit.
        shared: of each memory that ranks share, how many of them each stage has there; empty if each rank has its own.

    Raises:
        StrategyError: fewer layers than chunks, or a cost that is negative or not finite.
    """
    fastest = _bounds(split_by_costs(costs, memory.schedule.num_chunks))
    figures = SplitFigures(whole_costs(costs), memory, shared)
    search, moves = _Search(figures), Moves(figures)
    most = inf if limit_bytes is None else limit_bytes
    found = _cheapest(search, moves, fastest, most)
    if figures.fullest(found) > most:
        return _split(figures, found, fits=False)
    cost = figures.costliest(found)
    cost += cost // _TOLERANCE
    found = _most_even(search, moves, found, most=most, cost=cost)
    return _split(figures, _leanest_of(search, moves, found, most=most, cost=cost), fits=True)


def fullest_memory(stages: Sequence[StageBytes], shared: Sequence[Sequence[int]] = ()) -> int:
    """What the fullest memory has to hold; `shared` as `split_by_memory` takes it."""
    totals = [stage.total for stage in stages]
    if not shared:
        return max(totals)
    return max(sum(number * total for number, total in zip(ranks, totals, strict=True)) for ranks in shared)


def _split(figures: SplitFigures, bounds: Bounds, *, fits: bool) -> MemorySplit:
    chunks = tuple(range(start, stop) for start, stop in pairwise(bounds))
    return MemorySplit(chunks=chunks, stages=figures.memory.of_stages(chunks), fits=fits)


def _bounds(chunks: Sequence[range]) -> Bounds:
    return (0, *(chunk.stop for chunk in chunks))


def _cheapest(search: _Search, moves: Moves, fastest: Bounds, most: float) -> Bounds:
    """Of the splits that fit one whose costliest chunk is cheapest; the leanest one, if none fits."""
    figures = search.figures
    if figures.fullest(fastest) <= most:
        return fastest
    low = figures.costliest(fastest)
    found = leaner = moves.lean(fastest, cost=low, enough=most)
    if figures.fullest(found) > most:
        # From the same start whatever the limit is: a limit that a message names as enough must be.
        found = moves.lean(fastest, cost=inf)
        found = search.best("bytes", most=figures.fullest(found)) or found
        if figures.fullest(found) > most:
            return found
        high = figures.costliest(found)
        step = low // _TOLERANCE + 1  # most of what fits at all is near the fastest
        while high - low > 1 + high // (2 * _TOLERANCE):
            middle = min(low + step, (low + high) // 2)
            again = moves.lean(leaner, cost=middle, enough=most)
            if figures.fullest(again) <= most:
                found, high = again, figures.costliest(again)
            else:
                leaner, low, step = again, middle, 2 * step
    return search.best("cost", most=most, cost=figures.costliest(found)) or found


def _most_even(search: _Search, moves: Moves, found: Bounds, *, most: float, cost: float) -> Bounds:
    figures = search.figures
    found = moves.even(found, cost=cost, most=most)
    squares, _ = figures.evenness(found)
    return search.best("evenness", most=most, cost=cost, squares=squares) or found


def _leanest_of(search: _Search, moves: Moves, even: Bounds, *, most: float, cost: float) -> Bounds:
    """Of the splits that are as even as this one, the most even of those whose fullest memory needs least."""
    figures = search.figures
    squares, _ = figures.evenness(even)
    squares += squares // _EVEN
    most = min(most, figures.fullest(even))
    front = search.front("evenness and bytes", most=most, cost=cost, squares=squares)
    if front is None:
        lean = moves.lean(even, cost=cost, squares=squares)
        least = figures.fullest(lean)
        return moves.even(lean, cost=cost, most=min(most, least + least // _TOLERANCE))
    if not front:
        return even
    least = min(max(one.loads) for one in front)
    close = [one for one in front if max(one.loads) <= least + least // _TOLERANCE]
    return min(close, key=lambda one: (one.value, _longest_first(one))).bounds


class _Partial(NamedTuple):
    """The first chunks of a split.

    Args:
        value: what is to be small, without bytes.
        loads: of each memory what it holds so far; of memories of one rank each, if that matters, the most of one.
        bounds: of the chunks.
        open: stages that have chunks yet to come, with the bounds of those that they have.
    """

    value: tuple[int, ...]
    loads: tuple[int, ...]
    bounds: Bounds
    open: tuple[tuple[int, Bounds], ...]


class _Search:
    """Looks at all splits, from the first chunk to the last."""

    def __init__(self, figures: SplitFigures) -> None:
        self.figures = figures
        self._last_of = {stage: chunk for chunk, stage in enumerate(figures.stage_of)}

    def best(self, by: _By, *, most: float, cost: float = inf, squares: float = inf) -> Bounds | None:
        """The split with the least value; None if there are too many splits, or none."""
        front = self.front(by, most=most, cost=cost, squares=squares)
        if not front:
            return None
        return min(front, key=lambda one: (one.value, max(one.loads, default=0), _longest_first(one))).bounds

    def front(self, by: _By, *, most: float, cost: float, squares: float = inf) -> list[_Partial] | None:
        """Whole splits that no other one beats in everything that is looked at, within these; None if too many."""
        figures = self.figures
        num_chunks = len(figures.stage_of)
        nothing = (0,) * (len(figures.shared) or by.endswith("bytes"))
        lows, highs = self._windows(most)
        now = {0: [_Partial(_ZERO[by], nothing, (0,), ())]}
        num_seen = 0
        for chunk in range(num_chunks):
            left = num_chunks - chunk - 1
            after: dict[int, dict[object, list[_Partial]]] = {}
            for start, stop in self._steps(now, chunk, cost, lows, highs):
                rest = figures.sums[-1] - figures.sums[stop]
                found = after.setdefault(stop, {})
                for partial in now[start]:
                    new = self._with(partial, chunk, stop, by, most)
                    if new is None:
                        continue
                    # What is left is most even in equal parts.
                    if squares < inf and (new.value[0] - squares) * max(1, left) + rest * rest > 0:
                        continue
                    front = found.setdefault(new.open, [])
                    if not any(_beats(other, new, by) for other in front):
                        front[:] = [other for other in front if not _beats(new, other, by)] + [new]
                        num_seen += 1
                num_seen += len(now[start])
                if num_seen > _MOST_PARTIALS:
                    return None
            now = {stop: [one for front in found.values() for one in front] for stop, found in after.items() if found}
        return now.get(figures.num_layers, [])

    def _steps(
        self, now: dict[int, list[_Partial]], chunk: int, cost: float, lows: Sequence[int], highs: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """(start, stop) that this chunk may have."""
        sums, left = self.figures.sums, len(self.figures.stage_of) - chunk - 1
        for start in sorted(now):
            for stop in range(max(start + 1, lows[chunk + 1]), highs[chunk + 1] + 1):
                if sums[stop] - sums[start] > cost:
                    break
                if not left or sums[-1] - sums[stop] <= cost * left:
                    yield start, stop

    def _windows(self, most: float) -> tuple[list[int], list[int]]:
        """The least and the greatest bound of each chunk, of what each memory holds of a chunk alone."""
        figures = self.figures
        num_chunks = len(figures.stage_of)
        lows = list(range(num_chunks + 1))
        highs = [figures.num_layers - left for left in range(num_chunks, -1, -1)]
        lows[-1], highs[0] = figures.num_layers, 0
        if most == inf or figures.shared:
            return lows, highs
        for chunk in range(num_chunks):
            longer = range(highs[chunk] + 2, highs[chunk + 1] + 1)
            fit = bisect(longer, most, key=functools.partial(self._alone, chunk, highs[chunk]))
            highs[chunk + 1] = min(highs[chunk + 1], highs[chunk] + 1 + fit)
        for chunk in range(num_chunks - 1, 0, -1):
            longer = range(lows[chunk + 1] - 2, lows[chunk] - 1, -1)
            fit = bisect(longer, most, key=functools.partial(self._alone, chunk, stop=lows[chunk + 1]))
            lows[chunk] = max(lows[chunk], lows[chunk + 1] - 1 - fit)
        return lows, highs

    def _alone(self, chunk: int, start: int, stop: int) -> int:
        """What a stage needs for one chunk at least, without what a longer one may need less of."""
        stage = self.figures.stage_of[chunk]
        needs = self.figures.memory.of_stage(stage, [range(start, stop)])
        is_alone = len(self.figures.chunks_of[stage]) == 1
        return needs.state + needs.gradients + needs.activations * is_alone

    def _with(self, before: _Partial, chunk: int, stop: int, by: _By, most: float) -> _Partial | None:
        figures = self.figures
        stage, start = figures.stage_of[chunk], before.bounds[-1]
        open_stages = before.open
        earlier: Bounds = ()
        if open_stages:
            earlier = next((held for other, held in open_stages if other == stage), ())
            if earlier:
                open_stages = tuple(one for one in open_stages if one[0] != stage)
        held = (*earlier, start, stop)
        total = figures.total(stage, held)
        loads = before.loads
        if figures.shared:
            more = total - (figures.total(stage, earlier) if earlier else 0)
            loads = tuple(load + ranks[stage] * more for load, ranks in zip(loads, figures.shared, strict=True))
            if max(loads) > most:
                return None
        elif total > most:
            return None
        elif loads:
            loads = (max(loads[0], total),)
        if self._last_of[stage] > chunk:
            open_stages = tuple(sorted((*open_stages, (stage, held))))
        value = before.value
        if value:
            cost = figures.sums[stop] - figures.sums[start]
            if by == "cost":
                value = (max(value[0], cost),)
            else:
                value = (value[0] + cost * cost, value[1] + (stop - start) ** 2)
        return _Partial(value, loads, (*before.bounds, stop), open_stages)


def _longest_first(one: _Partial) -> list[int]:
    return [-bound for bound in one.bounds]


def _beats(one: _Partial, other: _Partial, by: _By) -> bool:
    """Whether it is no worse in anything. Of equals the longest chunks are first, or last, where they keep less."""
    if (one.value, one.loads) == (other.value, other.loads):
        return one.bounds <= other.bounds if by.endswith("bytes") else one.bounds >= other.bounds
    pairs = zip(one.value + one.loads, other.value + other.loads, strict=True)
    return all(a <= b for a, b in pairs)
