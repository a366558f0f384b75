"""Splits of a pipeline's layers made better step by step: a layer goes from one chunk to another.

    chunks    a a a | b b | c c | d d            d takes a layer from a: those between hand one on
              a a | a b | b c | c d d

For pipelines of several chunks per stage and many layers, of which nobody can look at all splits (`memory_split`). All
numbers are whole: every rank finds the same split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf

from hybrid.contracts.stage_memory import MemoryModel

__all__ = ["Bounds", "Moves", "SplitFigures"]

Bounds = tuple[int, ...]
"""The first layer of each chunk, and the number of layers."""

# Of the moves that should help, so many are tried before a split counts as the best.
_TRIES = 40
_POWERS = (4, 16, 64)
_TURNS = 4


class SplitFigures:
    """What a split costs and needs.

    Args:
        costs: of the layers, whole numbers.
        memory: of the same layers.
        shared: of each memory that ranks share, how many of them each stage has there; empty if each rank has its own.
    """

    def __init__(self, costs: Sequence[int], memory: MemoryModel, shared: Sequence[Sequence[int]] = ()) -> None:
        self.sums = list(accumulate(costs, initial=0))
        self.memory = memory
        self.shared = tuple(dict.fromkeys(tuple(ranks) for ranks in shared))
        schedule = memory.schedule
        self.stage_of = [schedule.rank_of(chunk) for chunk in range(schedule.num_chunks)]
        self.chunks_of = [schedule.chunks_of(stage) for stage in range(schedule.num_stages)]
        self._totals: dict[tuple[int, Bounds], int] = {}

    @property
    def num_layers(self) -> int:
        return len(self.sums) - 1

    def costs(self, bounds: Bounds) -> list[int]:
        return [self.sums[stop] - self.sums[start] for start, stop in pairwise(bounds)]

    def costliest(self, bounds: Bounds) -> int:
        return max(self.costs(bounds))

    def evenness(self, bounds: Bounds) -> tuple[int, int]:
        """Squares of the costs, and of the numbers of layers: less is more even."""
        return sum(cost * cost for cost in self.costs(bounds)), sum((b - a) ** 2 for a, b in pairwise(bounds))

    def total(self, stage: int, held: Bounds) -> int:
        """Of a stage with its first chunks, each from one number up to the next."""
        key = stage, held
        if key not in self._totals:
            ranges = [range(held[at], held[at + 1]) for at in range(0, len(held), 2)]
            self._totals[key] = self.memory.of_stage(stage, ranges).total
        return self._totals[key]

    def totals(self, bounds: Bounds) -> list[int]:
        """Of each stage."""
        return [
            self.total(stage, tuple(bound for chunk in chunks for bound in bounds[chunk : chunk + 2]))
            for stage, chunks in enumerate(self.chunks_of)
        ]

    def loads(self, bounds: Bounds) -> list[int]:
        """Of each memory."""
        totals = self.totals(bounds)
        if not self.shared:
            return totals
        return [sum(number * total for number, total in zip(ranks, totals, strict=True)) for ranks in self.shared]

    def fullest(self, bounds: Bounds) -> int:
        """The most that a memory has to hold."""
        return max(self.loads(bounds))


class Moves:
    """Betters splits as long as a move does."""

    def __init__(self, figures: SplitFigures) -> None:
        self._figures = figures

    def lean(self, bounds: Bounds, *, cost: float, squares: float = inf, enough: float = -1) -> Bounds:
        """Less in the fullest memory.

        Args:
            cost, squares: that the costliest chunk, and the squares of all, may have.
            enough: bytes at which to stop.
        """
        figures = self._figures
        best = bounds
        while True:
            before = figures.fullest(best)
            best = self._descended(best, cost=cost, squares=squares, enough=enough)
            if enough >= 0:
                if figures.fullest(best) <= enough:
                    return best
                return self._settled(best, most=enough, cost=cost) or best
            low, high = 0, figures.fullest(best)
            while high - low > high // 256:
                middle = (low + high) // 2
                found = self._settled(best, most=middle, cost=cost)
                if found is not None and figures.evenness(found)[0] <= squares:
                    best, high = found, figures.fullest(found)
                else:
                    low = middle + 1
            if before - high <= before // 256:
                return best

    def _descended(self, bounds: Bounds, *, cost: float, squares: float, enough: float) -> Bounds:
        figures = self._figures
        best = bounds
        for power in _POWERS:
            loads = figures.loads(bounds)
            value = sum(load**power for load in loads)
            while max(loads) > enough:
                for moved in self._relieving(bounds, cost, power):
                    if squares < inf and figures.evenness(moved)[0] > squares:
                        continue
                    after = figures.loads(moved)
                    if (new := sum(load**power for load in after)) < value:
                        bounds, loads, value = moved, after, new
                        break
                else:
                    break
            if max(loads) < figures.fullest(best):
                best = bounds
        return best

    def _settled(self, bounds: Bounds, *, most: float, cost: float) -> Bounds | None:
        """Chunks that are too large hand layers on, those to one side all, then those to the other; None if in vain."""
        marks = list(bounds)
        places = range(len(bounds) - 1)
        for turn in range(_TURNS):
            back = turn % 2
            for chunk in reversed(places) if back else places:
                if chunk != (0 if back else places[-1]):
                    while marks[chunk + 1] - marks[chunk] > 1 and self._is_over(marks, chunk, most, cost):
                        marks[chunk + (not back)] += 1 if back else -1
            if self._figures.costliest(tuple(marks)) <= cost and self._figures.fullest(tuple(marks)) <= most:
                return tuple(marks)
        return None

    def _is_over(self, marks: Sequence[int], chunk: int, most: float, cost: float) -> bool:
        figures = self._figures
        if figures.sums[marks[chunk + 1]] - figures.sums[marks[chunk]] > cost:
            return True
        stage = figures.stage_of[chunk]
        if not figures.shared:
            held = tuple(bound for other in figures.chunks_of[stage] for bound in marks[other : other + 2])
            return figures.total(stage, held) > most
        loads = figures.loads(tuple(marks))
        return any(ranks[stage] and load > most for ranks, load in zip(figures.shared, loads, strict=True))

    def even(self, bounds: Bounds, *, cost: float, most: float) -> Bounds:
        """More even, within what chunks may cost and memories hold."""
        figures = self._figures
        while True:
            handed = _Handed(figures, bounds, cost)
            better = []
            for giver, taker in self._pairs(bounds, range(len(bounds) - 1)):
                change = handed.evenness(giver, taker)
                if change < (0, 0) and handed.is_within(giver, taker):
                    better.append((change, giver, taker))
            better.sort()
            if len(better) > _TRIES:  # and those that are as even as the last one
                last = better[_TRIES - 1][0]
                better = [one for one in better if one[0] <= last]
            splits = sorted((change, _move(bounds, giver, taker)) for change, giver, taker in better)
            for _, moved in splits[:_TRIES]:
                if figures.fullest(moved) <= most:
                    bounds = moved
                    break
            else:
                return bounds

    def _relieving(self, bounds: Bounds, cost: float, power: int) -> Iterator[Bounds]:
        """Splits in which the fullest memory should hold less, the most promising ones first."""
        figures = self._figures
        totals, loads = figures.totals(bounds), figures.loads(bounds)
        # What a byte counts for on each stage: much where a memory is full.
        pressures = [load ** (power - 1) for load in loads]
        prices = pressures
        if figures.shared:
            prices = [
                sum(ranks[stage] * pressure for ranks, pressure in zip(figures.shared, pressures, strict=True))
                for stage in range(len(totals))
            ]
        givers = range(len(figures.stage_of))
        changes = self._changes(bounds, totals)
        found = []
        for giver, taker in self._pairs(bounds, givers):
            is_later = taker > giver
            given, taken = changes[giver][is_later], changes[taker][2 + is_later]
            score = prices[figures.stage_of[giver]] * given + prices[figures.stage_of[taker]] * taken
            if score < 0:
                found.append((score, giver, taker))
        found.sort()
        handed = _Handed(figures, bounds, cost)
        tried = 0
        for _, giver, taker in found:
            if handed.is_within(giver, taker):
                yield _move(bounds, giver, taker)
                tried += 1
                if tried == _TRIES:
                    return

    def _pairs(self, bounds: Bounds, givers: Sequence[int]) -> Iterator[tuple[int, int]]:
        for giver in givers:
            if bounds[giver + 1] - bounds[giver] > 1:
                for taker in range(len(bounds) - 1):
                    if taker != giver:
                        yield giver, taker

    def _changes(self, bounds: Bounds, totals: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """Of each chunk what its stage needs more without its first layer, its last, with one behind, one before."""
        figures = self._figures
        found = []
        for chunk, stage in enumerate(figures.stage_of):
            start, stop = bounds[chunk], bounds[chunk + 1]
            others = (
                (start + 1, stop) if stop - start > 1 else None,
                (start, stop - 1) if stop - start > 1 else None,
                (start, stop + 1) if stop < figures.num_layers else None,
                (start - 1, stop) if start else None,
            )
            held = [bounds[other : other + 2] for other in figures.chunks_of[stage]]
            place = figures.chunks_of[stage].index(chunk)
            changes = [0, 0, 0, 0]
            for at, other in enumerate(others):
                if other is not None:
                    now = tuple(bound for one in (*held[:place], other, *held[place + 1 :]) for bound in one)
                    changes[at] = figures.total(stage, now) - totals[stage]
            found.append((changes[0], changes[1], changes[2], changes[3]))
        return found


class _Handed:
    """What changes when a chunk hands a layer on to another one: those between stay as long, each a layer further.

    Pairs of chunks are many, so what each chunk has to say is added up from the first chunk on, once for all of them.
    In lists of two the first is for layers that go to an earlier chunk, the second for those that go to a later one.

    Args:
        figures, bounds: of the split.
        cost: that a chunk may have.
    """

    def __init__(self, figures: SplitFigures, bounds: Bounds, cost: float) -> None:
        sums, chunks = figures.sums, list(pairwise(bounds))
        now = figures.costs(bounds)
        self._lengths = [stop - start for start, stop in chunks]
        self._over = _added(value > cost for value in now)
        self._gives: list[list[tuple[int, bool]]] = []
        self._takes: list[list[tuple[int, bool]]] = []
        self._shifts: list[tuple[list[int], list[int]]] = []
        for less, more in (((1, 0), (0, 1)), ((0, -1), (-1, 0))):
            gives, takes, shifts = (
                [sums[min(stop + right, figures.num_layers)] - sums[max(start + left, 0)] for start, stop in chunks]
                for left, right in (less, more, (less[0] + more[0], less[1] + more[1]))
            )
            for changed, kept in ((gives, self._gives), (takes, self._takes)):
                kept.append([(a * a - b * b, a > cost) for a, b in zip(changed, now, strict=True)])
            squares = _added(a * a - b * b for a, b in zip(shifts, now, strict=True))
            self._shifts.append((squares, _added(value > cost for value in shifts)))

    def evenness(self, giver: int, taker: int) -> tuple[int, int]:
        """What `SplitFigures.evenness` is more by."""
        later = taker > giver
        low, high = (giver, taker) if later else (taker, giver)
        between = self._shifts[later][0]
        squares = self._gives[later][giver][0] + self._takes[later][taker][0] + between[high] - between[low + 1]
        return squares, 2 * (self._lengths[taker] - self._lengths[giver] + 1)

    def is_within(self, giver: int, taker: int) -> bool:
        """Whether no chunk costs too much then."""
        later = taker > giver
        if self._gives[later][giver][1] or self._takes[later][taker][1]:
            return False
        low, high = (giver, taker) if later else (taker, giver)
        between, over = self._shifts[later][1], self._over
        return between[high] == between[low + 1] and not over[low] and over[-1] == over[high + 1]


def _added(values: Iterable[int]) -> list[int]:
    return list(accumulate(values, initial=0))


def _move(bounds: Bounds, giver: int, taker: int) -> Bounds:
    if giver < taker:
        return (*bounds[: giver + 1], *(bound - 1 for bound in bounds[giver + 1 : taker + 1]), *bounds[taker + 1 :])
    return (*bounds[: taker + 1], *(bound + 1 for bound in bounds[taker + 1 : giver + 1]), *bounds[giver + 1 :])
