"""Bases that wait for their turn in a search: all that keep the rules, by the least time that they can take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain
from operator import attrgetter

from hybrid.contracts.schedule_choice import schedule_splits_backward
from hybrid.planner.constraints import Problem, batch_problems, not_built, shape_problems, state_problems
from hybrid.planner.cost import work_seconds
from hybrid.planner.job import Candidate
from hybrid.planner.model_spec import Recompute
from hybrid.planner.options import bases, shapes
from hybrid.planner.request import Request

__all__ = ["Entry", "Rejection", "SmallestFailing", "Tally", "first_problem", "queue_of"]


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


@dataclass(slots=True, eq=False)
class Entry:
    """A base in the queue, with the least that it can take: by the work of its units, then of its chunks, then by its
    schedule."""

    bound_seconds: float
    base: Candidate
    has_chunks: bool = False
    is_played: bool = False
    _label: str = ""

    @property
    def label(self) -> str:
        """Of the base: many bases have the same bound, and are ordered by it."""
        self._label = self._label or self.base.label
        return self._label

    def __lt__(self, other: Entry) -> bool:
        if self.bound_seconds != other.bound_seconds:
            return self.bound_seconds < other.bound_seconds
        return (self.label, self.is_played) < (other.label, other.is_played)


class SmallestFailing:
    """(all of a base but micro-batch and recompute) -> recompute -> the smallest micro-batch that does not fit.

    A larger micro-batch keeps more, and so does a base that recomputes less.
    """

    def __init__(self) -> None:
        self._sizes: dict[tuple[object, ...], dict[Recompute, int]] = {}

    def fails(self, base: Candidate) -> bool:
        sizes = self._sizes.get(_without_batch(base))
        return sizes is not None and any(
            base.micro_batch_size >= size and _KEEPS[base.recompute] >= _KEEPS[policy] for policy, size in sizes.items()
        )

    def add(self, base: Candidate) -> None:
        sizes = self._sizes.setdefault(_without_batch(base), {})
        sizes[base.recompute] = min(base.micro_batch_size, sizes.get(base.recompute, base.micro_batch_size))


# How much of a forward stays for backward, in order.
_KEEPS: dict[Recompute, int] = {"full": 0, "selective": 1, "core_attention": 2, "none": 3}


# The number of micro-batches in flight depends on the batch only where there are fewer of them than stages.
_BATCH = {"micro_batch_size", "num_micro_batches", "recompute"}
_without_batch = attrgetter(*(item.name for item in fields(Candidate) if item.name not in _BATCH))


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
        for grown in bases(request, shape):
            ahead, behind = _shared_problems(request, grown[0])
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
                queue.append(Entry(_least_seconds(base, work[key]), base))
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
