"""Bases that wait for their turn in a search: all that keep the rules, by the least time that they can take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from itertools import chain

from hybrid.contracts.schedule_choice import schedule_splits_backward
from hybrid.planner.constraints import Problem, batch_problems, not_built, shape_problems, state_problems
from hybrid.planner.cost import work_seconds
from hybrid.planner.job import Candidate, Job
from hybrid.planner.model_spec import Recompute
from hybrid.planner.options import bases, least_memory, shapes
from hybrid.planner.request import Request
from hybrid.planner.stages import stage_ranges

__all__ = ["Bound", "Entry", "Group", "Rejection", "Tally", "first_problem", "place_of", "queue_of"]

Place = tuple[int, bool, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Args:
    rule: one word, as in `Problem`; `memory` and `slower` as well.
    count: candidates that it stands for.
    text: the sentence, of the first of them.
    """

    rule: str
    count: int
    text: str


@dataclass(slots=True)
class Tally:
    """Counts of rejected candidates by rule, with the first sentence of each."""

    counts: dict[str, int] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def add(self, rule: str, text: Callable[[], str], count: int = 1) -> None:
        self.counts[rule] = self.counts.get(rule, 0) + count
        if rule not in self.texts:
            self.texts[rule] = text()

    def rejections(self) -> tuple[Rejection, ...]:
        ordered = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        return tuple(Rejection(rule=rule, count=count, text=self.texts[rule]) for rule, count in ordered)


class Bound(IntEnum):
    """What the least time of a base was worked out from."""

    WORK = 0
    """The work of its units."""
    CHUNKS = 1
    """Its pipeline chunks."""
    STATE = 2
    """These with what the fastest way to cut its state takes, of those that may fit."""
    SCHEDULE = 3
    """That and its schedule."""


@dataclass(slots=True, eq=False)
class Entry:
    """A base in the queue, with the least that it can take."""

    bound_seconds: float
    base: Candidate
    group: Group
    bound: Bound = Bound.WORK
    options: Sequence[tuple[float, Candidate]] = ()
    """From `STATE` on: the ways to cut its state that may fit, each with the least that it can take."""
    _label: str = ""

    @property
    def label(self) -> str:
        """Of the base: many bases have the same bound, and are ordered by it."""
        self._label = self._label or self.base.label
        return self._label

    def __lt__(self, other: Entry) -> bool:
        if self.bound_seconds != other.bound_seconds:
            return self.bound_seconds < other.bound_seconds
        return (self.label, self.bound) < (other.label, other.bound)


class Group:
    """Bases that differ in the micro-batch and in what is recomputed, those that keep the rules; and which of them do
    not fit.

    Among those at one place (`place_of`) a larger micro-batch needs no less, and neither does recomputing less than
    everything; of those that recompute something else than everything none speaks for another: with sequence
    parallelism `selective` keeps more than `none`. Where backward is split, what waits between its halves depends on
    the policy as well, and no base speaks for another.

    Args:
        leanest: that which recomputes most, with the smallest micro-batch.
    """

    def __init__(self, leanest: Candidate) -> None:
        self.leanest = leanest
        self._speaks = leanest.recompute == "full" and not schedule_splits_backward(leanest.schedule)
        self._is_possible: bool | None = None
        self._has_fitting: bool | None = None
        self._failing: dict[Place, list[tuple[Recompute, int, float]]] = {}

    def failing_bytes(
        self, job: Job, base: Candidate, least_bytes: Callable[[Candidate], float | None]
    ) -> float | None:
        """What a base that fails has at least; None for one that may fit.

        Args:
            job: of the search.
            base: of the group.
            least_bytes: of a base that does not fit; None for one that may.
        """
        place = place_of(job, base)
        known = self._known(base, place)
        if known is None and self._speaks and self._has_fitting is None:
            held = self._test(self.leanest, place_of(job, self.leanest), least_bytes)
            self._has_fitting = held is None
            known = self._known(base, place)
        if known is None and self._speaks and not self._has_fitting:  # mostly all fail
            leaner = replace(base, recompute=self.leanest.recompute)
            self._has_fitting = self._test(leaner, place, least_bytes) is None
            known = self._known(base, place)
        return known if known is not None else self._test(base, place, least_bytes)

    def is_possible(self, request: Request) -> bool:
        """Whether what is fixed leaves any way to cut the state."""
        if self._is_possible is None:
            self._is_possible = least_memory(request, self.leanest) is not None
        return self._is_possible

    def _known(self, base: Candidate, place: Place) -> float | None:
        failing = self._failing.get(place)
        if failing is None:
            return None
        speaking = (base.recompute, "full") if self._speaks else (base.recompute,)
        return max(
            (held for policy, size, held in failing if base.micro_batch_size >= size and policy in speaking),
            default=None,
        )

    def _test(self, base: Candidate, place: Place, least_bytes: Callable[[Candidate], float | None]) -> float | None:
        held = least_bytes(base)
        if held is not None:
            self._failing.setdefault(place, []).append((base.recompute, base.micro_batch_size, held))
        return held


def place_of(job: Job, base: Candidate) -> Place:
    """Of bases that are alike but for the micro-batch and the policy, those with the same place are compared: they cut
    the model in the same places, and have several micro-batches, or one.

    The number of micro-batches in flight depends on the batch only where there are fewer of them than stages. Not so
    with gpipe, where all are, and where backward is split: what waits for the second halves is less where micro-batches
    are few. There the size counts as well.
    """
    is_alone = base.schedule == "gpipe" or schedule_splits_backward(base.schedule)
    return id(stage_ranges(job, base)), base.num_micro_batches == 1, base.micro_batch_size if is_alone else 0


def queue_of(request: Request, tally: Tally) -> tuple[int, list[Entry]]:
    """Candidates looked at, and every base that keeps all rules, with a bound from the work of its units alone."""
    job = request.job
    considered = 0
    queue: list[Entry] = []
    work: dict[tuple[object, ...], float] = {}
    for shape in shapes(request):
        wrong = list(shape_problems(job, shape, is_tp_given="tp" in request.fixed, is_all=request.is_all))
        if wrong or job.global_batch_size % shape.dp:
            wrong = wrong or list(batch_problems(job, shape))
            considered += 1
            tally.add(wrong[0].rule, partial(str, wrong[0].text))
            continue
        groups: dict[tuple[object, ...], Group] = {}
        for grown in bases(request, shape):
            first = grown[0]
            ahead, behind = _shared_problems(request, first)
            alike = (first.sequence_parallel, first.schedule, first.virtual_stages)
            for base in grown:
                considered += 1
                problem = ahead or next(batch_problems(job, base), None) or behind
                if problem is not None:
                    tally.add(problem.rule, partial(str, problem.text))
                    continue
                is_split = schedule_splits_backward(base.schedule)
                key = (
                    base.tp,
                    base.cp,
                    base.ep,
                    base.sequence_parallel,
                    base.micro_batch_size,
                    base.recompute,
                    is_split,
                )
                if key not in work:
                    work[key] = work_seconds(job, base)
                if alike not in groups:  # those that recompute most come first
                    groups[alike] = Group(base)
                queue.append(Entry(_least_seconds(base, work[key]), base, groups[alike]))
    return considered, queue


def _least_seconds(base: Candidate, work_seconds: float) -> float:
    """Of a step, whatever the stages: work spread evenly, and half of the bubble of even stages.

    A step is at least the mean over the ranks of their work, of waiting for the first micro-batch and of waiting for
    the last gradient, and the mean rank has half of the stages before it. Where backward is split, ranks compute
    weights meanwhile.
    """
    if schedule_splits_backward(base.schedule):
        return base.num_micro_batches * work_seconds / base.pp
    per_chunk = work_seconds / (base.pp * base.virtual_stages)
    return base.num_micro_batches * work_seconds / base.pp + (base.pp - 1) / 2 * per_chunk


def _shared_problems(request: Request, base: Candidate) -> tuple[Problem | None, Problem | None]:
    """Of a base and all that differ from it in the micro-batch alone: those that are told before those of the batch,
    and behind them."""
    job, is_all = request.job, request.is_all
    ahead = shape_problems(job, base, is_tp_given="tp" in request.fixed, is_all=is_all)
    behind = chain(state_problems(job, base), () if is_all else not_built(base))
    return next(ahead, None), next(behind, None)


def first_problem(request: Request, base: Candidate) -> Problem | None:
    """Of a base, whose state is not chosen yet."""
    ahead, behind = _shared_problems(request, base)
    return ahead or next(batch_problems(request.job, base), None) or behind
