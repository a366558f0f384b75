"""Chunks that are balanced by cost and fit a memory.

Of the splits that fit, those whose costliest chunk is within 1 % of the cheapest possible take about as long; of them
those that are as even (least sum of squares, within 0.1 %); of these those whose fullest stage is within 1 % of the
least possible; of these the most even one, as `split_by_costs` has it. Ten equal layers on four stages of 1F1B: 2, 2,
3, 3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from hybrid.contracts.stage_memory import MemoryModel, StageBytes
from hybrid.contracts.stage_split import split_by_costs, whole_costs

__all__ = ["MemorySplit", "split_by_memory"]

# Splits this close to the best (a part of it) take as long, or need as much: neither is known better. And as even.
_TOLERANCE, _EVEN = 100, 1000
_SLOWER = (1.02, 1.05, 1.1, 1.2, 1.5, 2, 4, inf)
# Of partial splits with open stages, so many are followed for each number of layers; with one chunk per stage there is
# but one for each.
_MOST_STATES = 64

_Objective = Callable[["_Partial", range, int], tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySplit:
    """A split, and what each stage needs; `fits` is False if no split keeps the limit: then it is the leanest one."""

    chunks: tuple[range, ...]
    stages: tuple[StageBytes, ...]
    fits: bool

    @property
    def fullest(self) -> StageBytes:
        return max(self.stages, key=lambda stage: (stage.total, -stage.stage))


def split_by_memory(costs: Sequence[float], memory: MemoryModel, *, limit_bytes: int | None = None) -> MemorySplit:
    """Contiguous chunks for the stages of `memory.schedule`.

    With several chunks on a stage and many layers the search follows the most promising splits only.

    Args:
        costs: one number per layer, in any unit, none below 0.
        memory: of the same layers.
        limit_bytes: that no stage may exceed; None for no limit.

    Raises:
        StrategyError: fewer layers than chunks, or a cost that is negative or not finite.
    """
    fastest = split_by_costs(costs, memory.schedule.num_chunks)
    search = _Search(whole_costs(costs), memory)
    most = inf if limit_bytes is None else limit_bytes
    least_cost: float = search.costliest(fastest)
    found = search.best(most=most, cost=least_cost, objective=search.by_peak)
    if found is None and limit_bytes is not None:
        for more in _SLOWER:  # windows that grow, since most splits that are looked at are far too slow
            found = search.best(most=most, cost=least_cost * more, objective=search.by_cost)
            if found is not None:
                break
        else:
            leanest = search.leanest(fastest)
            return search.split(leanest, limit_bytes)
        least_cost = search.costliest(found)
    cost = least_cost + least_cost // _TOLERANCE
    even = search.best(most=most, cost=cost, objective=search.by_evenness) or found or fastest
    return search.split(search.leanest_of(even, most=most, cost=cost), limit_bytes)


@dataclass(frozen=True, slots=True)
class _Partial:
    """The first chunks of a split."""

    value: tuple[float, ...]
    bounds: tuple[int, ...]
    open: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """Stages that have chunks yet to come: the ranges that they have."""


class _Search:
    def __init__(self, costs: Sequence[int], memory: MemoryModel) -> None:
        self._sums = list(accumulate(costs, initial=0))
        self._memory = memory
        schedule = memory.schedule
        self._stage_of = [schedule.rank_of(chunk) for chunk in range(schedule.num_chunks)]
        self._last_of = {stage: chunk for chunk, stage in enumerate(self._stage_of)}
        self._totals: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}

    def costliest(self, chunks: Sequence[range]) -> int:
        return max(self._sums[chunk.stop] - self._sums[chunk.start] for chunk in chunks)

    def squares(self, chunks: Sequence[range]) -> int:
        return sum((self._sums[chunk.stop] - self._sums[chunk.start]) ** 2 for chunk in chunks)

    def peak(self, chunks: Sequence[range]) -> int:
        return max(stage.total for stage in self._memory.of_stages(chunks))

    def split(self, chunks: tuple[range, ...], limit_bytes: int | None) -> MemorySplit:
        stages = self._memory.of_stages(chunks)
        fits = limit_bytes is None or all(stage.total <= limit_bytes for stage in stages)
        return MemorySplit(chunks=chunks, stages=stages, fits=fits)

    def leanest(self, known: tuple[range, ...]) -> tuple[range, ...]:
        """The split whose fullest stage needs least."""
        return self.best(most=self.peak(known), cost=inf, objective=self.by_peak) or known

    def leanest_of(self, even: tuple[range, ...], *, most: float, cost: float) -> tuple[range, ...]:
        """Of the splits that are as even as this one, the most even of those whose fullest stage needs least."""
        squares = self.squares(even)
        squares += squares // _EVEN
        found = self._fronts(most=min(most, self.peak(even)), cost=cost, squares=squares)
        least = min((one.value[-1] for one in found), default=inf)
        close = [one for one in found if one.value[-1] <= least + least // _TOLERANCE]
        if not close:
            return even
        return _ranges(min(close, key=lambda one: (*one.value[:-1], [a - b for a, b in pairwise(one.bounds)])))

    def _fronts(self, *, most: float, cost: float, squares: int) -> list[_Partial]:
        """Whole splits that no other one beats in evenness and in what the fullest stage needs."""

        def value(before: _Partial, chunk: range, total: int) -> tuple[float, ...]:
            done, lengths, peak = before.value or (0, 0, 0)
            size = self._sums[chunk.stop] - self._sums[chunk.start]
            return (done + size * size, lengths + len(chunk) ** 2, max(peak, total))

        num_layers, num_chunks = len(self._sums) - 1, len(self._stage_of)
        now = {0: [_Partial((), (0,), ())]}
        for chunk in range(num_chunks):
            left = num_chunks - chunk - 1
            after: dict[int, dict[object, list[_Partial]]] = {}
            for start, stop in self._steps(now, left, cost):
                rest = self._sums[-1] - self._sums[stop]
                for partial in now[start]:
                    new = self._with(partial, chunk, range(start, stop), most, value)
                    # What is left is most even in equal parts.
                    if new is None or (new.value[0] - squares) * max(1, left) + rest * rest > 0:
                        continue
                    front = after.setdefault(stop, {}).setdefault(new.open, [])
                    if not any(_beats(other, new) for other in front):
                        front[:] = [other for other in front if not _beats(new, other)] + [new]
            now = {
                stop: self._promising([one for front in found.values() for one in front])
                for stop, found in after.items()
            }
        return now.get(num_layers, [])

    def _steps(self, now: Collection[int], left: int, cost: float) -> Iterator[tuple[int, int]]:
        """(start, stop) of the chunks that may follow, so many being left behind them."""
        num_layers = len(self._sums) - 1
        for start in now:
            for stop in range(start + 1, num_layers - left + 1) if left else (num_layers,):
                if self._sums[stop] - self._sums[start] > cost:
                    break
                if not left or self._sums[-1] - self._sums[stop] <= cost * left:
                    yield start, stop

    # What is least: of a partial split, with a chunk more and what its stage needs then.

    def by_peak(self, before: _Partial, chunk: range, total: int) -> tuple[float, ...]:
        return (max(before.value[0] if before.value else 0, total),)

    def by_cost(self, before: _Partial, chunk: range, total: int) -> tuple[float, ...]:
        return (max(before.value[0] if before.value else 0, self._sums[chunk.stop] - self._sums[chunk.start]),)

    def by_evenness(self, before: _Partial, chunk: range, total: int) -> tuple[float, ...]:
        squares, lengths, *sizes = before.value or (0, 0)
        cost = self._sums[chunk.stop] - self._sums[chunk.start]
        return (squares + cost * cost, lengths + len(chunk) ** 2, *sizes, -len(chunk))

    def best(self, *, most: float, cost: float, objective: _Objective) -> tuple[range, ...] | None:
        """The split with the least objective, whose stages need `most` bytes and whose chunks cost `cost`, at most."""
        num_layers, num_chunks = len(self._sums) - 1, len(self._stage_of)
        now = {0: [_Partial((), (0,), ())]}
        for chunk in range(num_chunks):
            left = num_chunks - chunk - 1
            after: dict[int, dict[object, _Partial]] = {}
            too_full = -1
            for start, stop in self._steps(now, left, cost):
                if start == too_full:
                    continue
                if self._always(chunk, start, stop) > most:
                    too_full = start  # and so is a longer one
                    continue
                for partial in now[start]:
                    new = self._with(partial, chunk, range(start, stop), most, objective)
                    if new is None:
                        continue
                    known = after.setdefault(stop, {}).get(new.open)
                    if known is None or new.value < known.value:
                        after[stop][new.open] = new
            now = {stop: self._promising(list(found.values())) for stop, found in after.items()}
        found = now.get(num_layers)
        if not found:
            return None
        return _ranges(found[0])

    def _with(self, before: _Partial, chunk: int, layers: range, most: float, objective: _Objective) -> _Partial | None:
        stage = self._stage_of[chunk]
        ranges = dict(before.open)
        held = (*ranges.pop(stage, ()), (layers.start, layers.stop))
        total = self._total(stage, held)
        if total > most:
            return None
        if self._last_of[stage] > chunk:
            ranges[stage] = held
        value = objective(before, layers, total)
        return _Partial(value, (*before.bounds, layers.stop), tuple(sorted(ranges.items())))

    def _always(self, chunk: int, start: int, stop: int) -> int:
        """Of a chunk alone, without what a longer one may need less of."""
        stage = self._stage_of[chunk]
        needs = self._memory.of_stage(stage, [range(start, stop)])
        is_alone = len(self._memory.schedule.chunks_of(stage)) == 1
        return needs.state + needs.gradients + needs.activations * is_alone

    def _total(self, stage: int, held: tuple[tuple[int, int], ...]) -> int:
        key = stage, held
        if key not in self._totals:
            self._totals[key] = self._memory.of_stage(stage, [range(*one) for one in held]).total
        return self._totals[key]

    def _promising(self, partials: list[_Partial]) -> list[_Partial]:
        partials.sort(key=lambda one: (one.value, one.bounds))
        if len(partials) <= _MOST_STATES:
            return partials
        # Half of them by the objective, half by what the open stages need so far.
        first = partials[: _MOST_STATES // 2]
        lean = sorted(
            partials[_MOST_STATES // 2 :],
            key=lambda one: (max((self._total(stage, held) for stage, held in one.open), default=0), one.bounds),
        )
        return sorted([*first, *lean[: _MOST_STATES // 2]], key=lambda one: (one.value, one.bounds))


def _beats(one: _Partial, other: _Partial) -> bool:
    """Whether it is no worse in anything; of equals the one that came first."""
    return all(a <= b for a, b in zip(one.value, other.value, strict=True))


def _ranges(partial: _Partial) -> tuple[range, ...]:
    return tuple(range(start, stop) for start, stop in pairwise(partial.bounds))
