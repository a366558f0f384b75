"""The best layouts for a request, and why every other one is not among them.

Bases (all that decides compute and activations) wait in a queue by the least time that they can take: first the work of
their units alone; then, if they fit, their schedule without data-parallel traffic. Once the next bound is above the
worst plan kept, nothing that is left can be better, so the search is exact although it prices few candidates in full.
Nothing is random, and ties are broken by the candidates' labels: the same request gives the same answer.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from hybrid.planner.constraints import Problem, batch_problems, not_built, shape_problems, state_problems
from hybrid.planner.cost import StepTime, least_step_seconds, step_time, work_seconds
from hybrid.planner.job import Candidate
from hybrid.planner.memory import MemoryPlan, memory
from hybrid.planner.model_spec import Recompute
from hybrid.planner.options import bases, least_memory, shapes, state_options
from hybrid.planner.request import Request

__all__ = ["Fit", "Priced", "Progress", "Rejection", "SearchResult", "anything_fits", "fit_of", "search", "why"]

# Parts of a step that depend on how state is cut; without them the rest is a bound for every state option.
_STATE_PARTS = ("dp_exposed", "gather_exposed", "optimizer")
_SAME = 1e-6  # steps that differ by less take the same time
_MOST_TRIED = 100  # of those that do not fit, when the nearest ones that would be faster are looked for
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether a candidate fits into a device.

    Args:
        needed_bytes: what it takes at the accepted risk.
        limit_bytes: what there is.
        chance_of_running_out: between 0 and 1.
    """

    needed_bytes: float
    limit_bytes: float
    chance_of_running_out: float
    fits: bool

    @property
    def over_bytes(self) -> float:
        """Beyond the limit; negative where there is room."""
        return self.needed_bytes - self.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A candidate with its memory and its time."""

    candidate: Candidate
    memory: MemoryPlan
    fit: Fit
    time: StepTime

    @property
    def key(self) -> tuple[float, str]:
        return (self.time.total_seconds, self.candidate.label)


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


@dataclass(slots=True, kw_only=True)
class SearchResult:
    """Args:
    found: the best plans that fit, best first.
    too_large: bases that would be faster than the best plan if they fitted, least missing bytes first.
    rejections: why all others are not there.
    num_considered: candidates in all.
    num_priced: those priced in full.
    seconds: of the search.
    """

    found: tuple[Priced, ...]
    too_large: tuple[Priced, ...]
    rejections: tuple[Rejection, ...]
    num_considered: int
    num_priced: int
    seconds: float


def fit_of(request: Request, plan: MemoryPlan) -> Fit:
    """Of the worst pipeline rank, at the risk that the request accepts."""
    limit, worst = request.limit_bytes, plan.worst
    chance = worst.chance_of_running_out(limit)
    needed = worst.bytes_at_risk(request.risk)  # the device of which the chance is the accepted one
    return Fit(needed_bytes=needed, limit_bytes=limit, chance_of_running_out=chance, fits=chance <= request.risk)


@dataclass(slots=True)
class _Tally:
    """Counts of rejected candidates by rule, with the first sentence of each."""

    counts: dict[str, int] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def add(self, rule: str, text: str, count: int = 1) -> None:
        self.counts[rule] = self.counts.get(rule, 0) + count
        self.texts.setdefault(rule, text)

    def rejections(self) -> tuple[Rejection, ...]:
        ordered = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        return tuple(Rejection(rule=rule, count=count, text=self.texts[rule]) for rule, count in ordered)


def search(request: Request, *, progress: Progress | None = None) -> SearchResult:
    """The best `request.num_plans` layouts. With an empty `found` nothing fits; `too_large` says what came near."""
    started = time.monotonic()
    tally = _Tally()
    considered, queue = _queue_of(request, tally)
    heapq.heapify(queue)
    size, num_priced, num_done = len(queue), 0, 0
    kept: list[Priced] = []
    large: list[tuple[Candidate, MemoryPlan, Fit]] = []
    failing = _SmallestFailing()
    while queue:
        entry = heapq.heappop(queue)
        if len(kept) == request.num_plans and entry.bound_seconds > kept[-1].time.total_seconds:
            tally.add(
                "slower",
                f"{entry.base.label} takes {entry.bound_seconds:.4g} s or more, the slowest plan kept "
                f"{kept[-1].time.total_seconds:.4g} s",
                1 + len(queue),
            )
            break
        if not entry.is_played:
            num_done += 1
            if progress is not None:
                progress(num_done, size)
            _play(request, entry.base, queue, tally, large, failing)
            continue
        for option in state_options(request, entry.base):
            considered += 1
            plan = memory(request.job, option)
            fit = fit_of(request, plan)
            if not fit.fits:
                tally.add("memory", _too_large(option, fit))
                large.append((option, plan, fit))
                continue
            if len(kept) == request.num_plans:
                least = least_step_seconds(request.job, option)
                if least > kept[-1].time.total_seconds:
                    tally.add("slower", f"{option.label} takes {least:.4g} s or more")
                    continue
            num_priced += 1
            priced = Priced(candidate=option, memory=plan, fit=fit, time=step_time(request.job, option))
            kept.append(priced)
            kept.sort(key=lambda one: one.key)
            if len(kept) > request.num_plans:
                last = kept.pop()
                tally.add("slower", f"{last.candidate.label} takes {last.time.total_seconds:.4g} s")
    best = kept[0].time.total_seconds if kept else None
    return SearchResult(
        found=tuple(kept),
        too_large=tuple(_nearest_that_do_not_fit(request, large, best)),
        rejections=tally.rejections(),
        num_considered=considered,
        num_priced=num_priced,
        seconds=time.monotonic() - started,
    )


@dataclass(slots=True)
class _Entry:
    """A base in the queue: with the least that it can take, and whether its schedule has been played for that."""

    bound_seconds: float
    is_played: bool
    base: Candidate

    def __lt__(self, other: _Entry) -> bool:
        if self.bound_seconds != other.bound_seconds:
            return self.bound_seconds < other.bound_seconds
        return (self.base.label, self.is_played) < (other.base.label, other.is_played)


class _SmallestFailing:
    """(all of a base but micro-batch and recompute) -> recompute -> the smallest micro-batch that does not fit.

    A larger micro-batch keeps more, and so does a base that recomputes less.
    """

    def __init__(self) -> None:
        self._sizes: dict[Candidate, dict[Recompute, int]] = {}

    def fails(self, base: Candidate) -> bool:
        sizes = self._sizes.get(_without_batch(base), {})
        return any(
            base.micro_batch_size >= size and _KEEPS[base.recompute] >= _KEEPS[policy] for policy, size in sizes.items()
        )

    def add(self, base: Candidate) -> None:
        sizes = self._sizes.setdefault(_without_batch(base), {})
        sizes[base.recompute] = min(base.micro_batch_size, sizes.get(base.recompute, base.micro_batch_size))


# How much of a forward stays for backward, in order.
_KEEPS: dict[Recompute, int] = {"full": 0, "selective": 1, "core_attention": 2, "none": 3}


def _without_batch(base: Candidate) -> Candidate:
    # The number of micro-batches in flight depends on it only where there are fewer of them than stages.
    return replace(base, micro_batch_size=1, num_micro_batches=1, recompute="none")


def _queue_of(request: Request, tally: _Tally) -> tuple[int, list[_Entry]]:
    """Candidates looked at, and every base that keeps all rules, with a bound from the work of its units alone."""
    job = request.job
    considered = 0
    queue: list[_Entry] = []
    work: dict[tuple[object, ...], float] = {}
    for shape in shapes(request):
        wrong = list(shape_problems(job, shape, is_tp_given="tp" in request.fixed, is_all=request.is_all))
        if wrong or job.global_batch_size % shape.dp:
            wrong = wrong or list(batch_problems(job, shape))
            considered += 1
            tally.add(wrong[0].rule, wrong[0].text)
            continue
        for grown in bases(request, shape):
            ahead, behind = _shared_problems(request, grown[0])
            for base in grown:
                considered += 1
                problem = ahead or next(batch_problems(job, base), None) or behind
                if problem is not None:
                    tally.add(problem.rule, problem.text)
                    continue
                key = (base.tp, base.cp, base.ep, base.sequence_parallel, base.micro_batch_size, base.recompute)
                if key not in work:
                    work[key] = work_seconds(job, base)
                queue.append(_Entry(_least_seconds(base, work[key]), is_played=False, base=base))
    return considered, queue


def _least_seconds(base: Candidate, work_seconds: float) -> float:
    """Of a step, whatever the stages: work spread evenly, and half of the bubble of even stages.

    A step is at least the mean over the ranks of their work, of waiting for the first micro-batch and of waiting for
    the last gradient, and the mean rank has half of the stages before it.
    """
    per_chunk = work_seconds / (base.pp * base.virtual_stages)
    return base.num_micro_batches * work_seconds / base.pp + (base.pp - 1) / 2 * per_chunk


def _play(
    request: Request,
    base: Candidate,
    queue: list[_Entry],
    tally: _Tally,
    large: list[tuple[Candidate, MemoryPlan, Fit]],
    failing: _SmallestFailing,
) -> None:
    """Back into the queue with the bound of its schedule, if some state option fits."""
    if base.schedule == "gpipe" and "schedule" not in request.fixed and not _beats_1f1b(request, base):
        tally.add("schedule", f"{base.label}: 1f1b takes no longer and keeps fewer micro-batches")
        return
    if failing.fails(base):
        tally.add("memory", f"{base.label} keeps more than one that does not fit")
        return
    least = least_memory(request, base)
    if least is None:
        tally.add("sharding", "no stage and shard_size with what is fixed")
        return
    plan = memory(request.job, least)
    fit = fit_of(request, plan)
    if not fit.fits:
        tally.add("memory", _too_large(least, fit))
        large.append((least, plan, fit))
        failing.add(base)
        return
    heapq.heappush(queue, _Entry(_bound(request, base), is_played=True, base=base))


def _shared_problems(request: Request, base: Candidate) -> tuple[Problem | None, Problem | None]:
    """Of a base and all that differ from it in the micro-batch alone: those that are told before those of the batch,
    and behind them."""
    job, is_all = request.job, request.is_all
    ahead = shape_problems(job, base, is_tp_given="tp" in request.fixed, is_all=is_all)
    behind = chain(state_problems(job, base), () if is_all else not_built(base))
    return next(ahead, None), next(behind, None)


def _first_problem(request: Request, base: Candidate) -> Problem | None:
    """Of a base, whose state is not chosen yet."""
    ahead, behind = _shared_problems(request, base)
    return ahead or next(batch_problems(request.job, base), None) or behind


def _bound(request: Request, base: Candidate) -> float:
    plain = step_time(request.job, replace(base, zero_stage=0, dp_replicate=base.dp, dp_shard=1))
    return plain.total_seconds - sum(plain.parts.get(part, 0.0) for part in _STATE_PARTS)


def _beats_1f1b(request: Request, base: Candidate) -> bool:
    if base.num_micro_batches == 1:
        return False
    return _bound(request, base) < _bound(request, replace(base, schedule="1f1b")) * (1 - _SAME)


def _nearest_that_do_not_fit(
    request: Request, large: list[tuple[Candidate, MemoryPlan, Fit]], best_seconds: float | None, limit: int = 8
) -> Iterator[Priced]:
    """What more memory would admit: fewest missing bytes first, only what would be faster."""
    large.sort(key=lambda item: (item[2].over_bytes, item[0].label))
    given = 0
    for candidate, plan, fit in large[:_MOST_TRIED]:
        if given == limit:
            return
        if best_seconds is not None and least_step_seconds(request.job, candidate) > best_seconds:
            continue
        priced = Priced(candidate=candidate, memory=plan, fit=fit, time=step_time(request.job, candidate))
        if best_seconds is None or priced.time.total_seconds < best_seconds:
            given += 1
            yield priced


def _too_large(candidate: Candidate, fit: Fit) -> str:
    return (
        f"{candidate.label} needs {fit.needed_bytes / 1e9:.1f} GB of {fit.limit_bytes / 1e9:.1f} GB "
        f"({fit.chance_of_running_out:.0%} chance of running out)"
    )


def anything_fits(request: Request) -> bool:
    """As `search(request).found` says, without times: of the layouts that differ in micro-batch and recompute alone it
    is enough to look at that which keeps least."""
    for shape in shapes(request):
        wrong = shape_problems(request.job, shape, is_tp_given="tp" in request.fixed, is_all=request.is_all)
        if any(wrong) or request.job.global_batch_size % shape.dp:
            continue
        for grown in bases(request, shape):
            if grown[0].recompute != request.fixed.get("recompute", "full"):
                continue
            base = next((base for base in grown if _first_problem(request, base) is None), None)
            least = None if base is None else least_memory(request, base)
            if least is not None and fit_of(request, memory(request.job, least)).fits:
                return True
    return False


def why(request: Request, *, limit: int | None = None) -> tuple[list[tuple[Candidate, str]], int]:
    """Each layout with what is fixed, and what became of it: its problem, its missing bytes or its time.

    Returns:
        At most `limit` of them, and how many more there are.
    """
    told: list[tuple[Candidate, str]] = []
    num_more = 0

    def tell(layout: Candidate, outcome: Callable[[], str]) -> None:
        nonlocal num_more
        if limit is not None and len(told) >= limit:
            num_more += 1
        else:
            told.append((layout, outcome()))

    for shape in shapes(request):
        wrong = list(shape_problems(request.job, shape, is_tp_given="tp" in request.fixed, is_all=request.is_all))
        if wrong or request.job.global_batch_size % shape.dp:
            texts = [problem.text for problem in wrong or batch_problems(request.job, shape)]
            tell(shape, partial("; ".join, texts))
            continue
        for base in (base for grown in bases(request, shape) for base in grown):
            problem = _first_problem(request, base)
            if problem is not None:
                tell(base, partial(str, problem.text))
                continue
            for option in state_options(request, base):
                tell(option, partial(_outcome, request, option))
    return told, num_more


def _outcome(request: Request, option: Candidate) -> str:
    fit = fit_of(request, memory(request.job, option))
    if not fit.fits:
        return _too_large(option, fit)
    seconds = step_time(request.job, option).total_seconds
    return f"{seconds:.4g} s a step, {fit.needed_bytes / 1e9:.1f} GB"
