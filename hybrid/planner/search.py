"""The best layouts for a request, and why every other one is not among them.

Bases (all that decides compute and activations) wait in a queue by the least time that they can take: first the work of
their units alone; then that of their pipeline chunks; then, if they fit, their schedule without data-parallel traffic.
Once the next bound is above the
worst plan kept, nothing that is left can be better, so the search is exact although it prices few candidates in full.
Nothing is random, and ties are broken by the candidates' labels: the same request gives the same answer.
"""

from __future__ import annotations

import gc
import heapq
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import inf
from operator import itemgetter
from typing import Literal

from hybrid.contracts.schedule_choice import schedule_splits_backward
from hybrid.planner.base_queue import Bound, Entry, Rejection, Tally, first_problem, place_of, queue_of
from hybrid.planner.constraints import batch_problems, shape_problems
from hybrid.planner.cost import StepTime, least_base_seconds, least_step_seconds, step_time
from hybrid.planner.job import Candidate
from hybrid.planner.memory import MemoryPlan, least_bytes, least_bytes_of, memory, worst_bytes
from hybrid.planner.memory_layers import num_communicators
from hybrid.planner.options import bases, least_memory, shapes, state_options
from hybrid.planner.request import Request
from hybrid.planner.room import Fit, Room, fit_of
from hybrid.units import format_bytes

__all__ = ["Fit", "Priced", "Progress", "Rejection", "SearchResult", "anything_fits", "fit_of", "search", "why"]

_SAME = 1e-6  # steps that differ by less take the same time
# Of those that do not fit, when the nearest ones that would be faster are looked for: priced in full, and looked at.
_MOST_TRIED = 100
_MOST_LOOKED = 300
Progress = Callable[[int, int], None]


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


def search(request: Request, *, progress: Progress | None = None) -> SearchResult:
    """The best `request.num_plans` layouts. With an empty `found` nothing fits; `too_large` says what came near."""
    started = time.monotonic()
    with _no_garbage():
        running = _Search(request, progress)
        running.run()
        best = running.kept[0].time.total_seconds if running.kept else None
        too_large = tuple(running.nearest_that_do_not_fit(best))
    return SearchResult(
        found=tuple(running.kept),
        too_large=too_large,
        rejections=running.tally.rejections(),
        num_considered=running.num_considered,
        num_priced=running.num_priced,
        seconds=time.monotonic() - started,
    )


@contextmanager
def _no_garbage() -> Iterator[None]:
    """A search keeps what it makes, without cycles: to look for them again and again is a tenth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # all that is new is old now, without being looked through
                gc.freeze()
                gc.unfreeze()
            gc.enable()


class _Search:
    """One search as it goes on."""

    def __init__(self, request: Request, progress: Progress | None) -> None:
        self.request, self.job = request, request.job
        self.tally = Tally()
        self.num_considered, self.queue = queue_of(request, self.tally)
        heapq.heapify(self.queue)
        self.num_priced = 0
        self.kept: list[Priced] = []
        self._progress, self._num_done, self._num_bases = progress, 0, len(self.queue)
        self._room = Room(request)
        self._large: list[_TooLarge] = []
        self._failing: dict[tuple[object, ...], list[tuple[int, float, Candidate]]] = {}

    def run(self) -> None:
        while self.queue:
            entry = heapq.heappop(self.queue)
            if self._is_beaten(entry.bound_seconds):
                self.tally.add("slower", partial(self._beaten, entry), 1 + len(self.queue))
                return
            if entry.bound is Bound.SCHEDULE:
                for least, option in entry.options:
                    self._try(option, least)
            elif self._raise_bound(entry):
                heapq.heappush(self.queue, entry)

    def _raise_bound(self, entry: Entry) -> bool:
        """Work out the next bound of a base; whether it is still to be looked at."""
        base, least = entry.base, inf
        if entry.bound is Bound.WORK:
            self._num_done += 1
            if self._progress is not None:
                self._progress(self._num_done, self._num_bases)
            if not self._may_fit(entry):
                return False
            entry.bound, least = Bound.CHUNKS, least_base_seconds(self.job, base, is_played=False)
        elif entry.bound is Bound.CHUNKS:
            entry.bound, entry.options = Bound.STATE, tuple(self._options(base))
            least = min((seconds for seconds, _ in entry.options), default=inf)
        elif self._is_spare(base):
            return False
        else:
            entry.bound, least = Bound.SCHEDULE, least_base_seconds(self.job, base, is_played=True)
        entry.bound_seconds = max(entry.bound_seconds, least)
        return least < inf

    def _options(self, base: Candidate) -> Iterator[tuple[float, Candidate]]:
        """The ways to cut its state that may fit and be fast enough, with the least that each can take."""
        least_of = least_bytes_of(self.job, base)
        for option in state_options(self.request, base):
            self.num_considered += 1
            if self._fits(option, least_of(option), is_exact=False):
                least = self._least(option, is_played=False)
                if not self._is_slower(option, least):
                    yield least, option

    def _is_beaten(self, seconds: float) -> bool:
        return len(self.kept) == self.request.num_plans and seconds > self.kept[-1].time.total_seconds

    def _beaten(self, entry: Entry) -> str:
        return (
            f"{entry.base.label} takes {entry.bound_seconds:.4g} s or more, the slowest plan kept "
            f"{self.kept[-1].time.total_seconds:.4g} s"
        )

    def _is_slower(self, option: Candidate, least: float) -> bool:
        if self._is_beaten(least):
            self.tally.add("slower", lambda: f"{option.label} takes {least:.4g} s or more")
            return True
        return False

    def _may_fit(self, entry: Entry) -> bool:
        """Whether some state option of a base fits, as far as is seen before it is laid out."""
        base = entry.base
        if not entry.group.is_possible(self.request):
            self.tally.add("sharding", lambda: "no stage and shard_size with what is fixed")
            return False
        held = entry.group.failing_bytes(self.job, base, self._failing_bytes)
        if held is None:
            return True
        self.tally.add("memory", lambda: _too_large_base(self.request, base))
        alike = (id(entry.group), base.recompute, *place_of(self.job, base))
        self._failing.setdefault(alike, []).append((base.micro_batch_size, held, base))
        return False

    def _failing_bytes(self, base: Candidate) -> float | None:
        """What a base has at least in that state option which keeps least; None where it fits."""
        option = self._least_option(base)
        most = self._room.most_bytes(option)
        held = least_bytes(self.job, option, enough=most)
        return None if held <= most else held

    def _least_option(self, base: Candidate) -> Candidate:
        option = least_memory(self.request, base)
        assert option is not None  # it would have been left out
        return option

    def _is_spare(self, base: Candidate) -> bool:
        """Whether another schedule is as good for all that it has."""
        if _is_spare_gpipe(self.request, base):
            self.tally.add("schedule", lambda: f"{base.label}: 1f1b takes no longer and keeps fewer micro-batches")
            return True
        return False

    def _fits(self, option: Candidate, size: float, *, is_exact: bool) -> bool:
        """By the bytes that it has at least, or by all of them."""
        if size <= self._room.most_bytes(option):
            return True
        self.tally.add("memory", lambda: _too_large(option, fit_of(self.request, memory(self.job, option))))
        self._large.append(_TooLarge(option, size, "exact" if is_exact else "least"))
        return False

    def _try(self, option: Candidate, least: float) -> None:
        if self._is_slower(option, least):
            return
        if len(self.kept) == self.request.num_plans:  # sooner than to count all of its bytes
            if self._is_slower(option, self._least(option, is_played=True)):
                return
        if not self._fits(option, worst_bytes(self.job, option), is_exact=True):
            return
        if not host_fits(self.request, option):
            self.tally.add("host memory", lambda: _too_large_for_host(self.request, option))
            return
        self.num_priced += 1
        self.kept.append(self._priced(option, step_time(self.job, option)))
        self.kept.sort(key=lambda one: one.key)
        if len(self.kept) > self.request.num_plans:
            last = self.kept.pop()
            self.tally.add("slower", lambda: f"{last.candidate.label} takes {last.time.total_seconds:.4g} s")

    def _priced(self, option: Candidate, seconds: StepTime) -> Priced:
        plan = memory(self.job, option)
        return Priced(candidate=option, memory=plan, fit=fit_of(self.request, plan), time=seconds)

    def nearest_that_do_not_fit(self, best_seconds: float | None, limit: int = 8) -> Iterator[Priced]:
        """What more memory would admit: fewest missing bytes first, only what would be faster."""
        given = 0
        for candidate in islice(self._by_missing_bytes(best_seconds), _MOST_TRIED):
            if given == limit:
                return
            if best_seconds is not None and self._least(candidate, is_played=True) > best_seconds:
                continue
            seconds = step_time(self.job, candidate)
            if best_seconds is None or seconds.total_seconds < best_seconds:
                given += 1
                yield self._priced(candidate, seconds)

    def _least(self, candidate: Candidate, *, is_played: bool) -> float:
        return least_step_seconds(self.job, candidate, is_played=is_played)

    def _by_missing_bytes(self, best_seconds: float | None) -> Iterator[Candidate]:
        """Those that are too large and may be faster, fewest missing bytes first; counted exactly only where their turn
        may come."""
        groups: dict[int, list[_TooLarge]] = {}
        for one in sorted([*self._large, *self._smallest_failing()], key=lambda one: one.tensors_bytes):
            groups.setdefault(num_communicators(one.candidate), []).append(one)
        waiting: Iterator[_TooLarge] = heapq.merge(*groups.values(), key=self._missing)
        larger: list[tuple[float, str, _TooLarge]] = []  # those whose figures have come nearer to what they have
        counted: list[tuple[float, str, Candidate]] = []
        ahead: _TooLarge | None = next(waiting, None)
        num_looked = 0
        while ahead is not None or larger:
            if ahead is None or (larger and larger[0][0] < self._missing(ahead)):
                turn = heapq.heappop(larger)[-1]
            else:
                turn, ahead = ahead, next(waiting, None)
            while counted and counted[0][0] < self._missing(turn):
                yield heapq.heappop(counted)[-1]
            # Of those that are counted, more than one that is not may be missing less.
            if best_seconds is not None and num_looked == _MOST_LOOKED:
                return
            candidate, size = turn.candidate, turn.tensors_bytes
            if turn.known == "leaner":
                own = replace(turn, tensors_bytes=least_bytes(self.job, candidate), known="least")
                heapq.heappush(larger, (self._missing(own), candidate.label, own))
                continue
            num_looked += 1
            if turn.larger:
                rest = turn.larger
                following = replace(turn, candidate=self._least_option(rest[0]), known="leaner", larger=rest[1:])
                heapq.heappush(larger, (self._missing(following), following.candidate.label, following))
            if best_seconds is not None and self._least(candidate, is_played=False) > best_seconds:
                continue
            if not _is_spare_gpipe(self.request, candidate):
                size = size if turn.known == "exact" else worst_bytes(self.job, candidate)
                heapq.heappush(counted, (self._room.over_bytes(size, candidate), candidate.label, candidate))
        while counted:
            yield heapq.heappop(counted)[-1]

    def _smallest_failing(self) -> Iterator[_TooLarge]:
        """The smallest of the bases that do not fit and are alike, which leads to the next larger one."""
        for alike in self._failing.values():
            (_, held, first), *others = sorted(alike, key=itemgetter(0))
            yield _TooLarge(self._least_option(first), held, "leaner", tuple(base for _, _, base in others))

    def _missing(self, one: _TooLarge) -> float:
        return self._room.over_bytes(one.tensors_bytes, one.candidate)


@dataclass(frozen=True, slots=True)
class _TooLarge:
    """A layout that does not fit.

    Args:
        tensors_bytes: that it has, at least.
        known: whose they are: at least those of one that has less, its own least ones, or all of them.
        larger: bases like it with larger micro-batches.
    """

    candidate: Candidate
    tensors_bytes: float
    known: Literal["leaner", "least", "exact"]
    larger: tuple[Candidate, ...] = ()


def _is_spare_gpipe(request: Request, candidate: Candidate) -> bool:
    """Whether it is a gpipe that nobody asked for, and 1f1b takes no longer."""
    if candidate.schedule != "gpipe" or "schedule" in request.fixed:
        return False
    if candidate.num_micro_batches == 1:
        return True
    own, other = (
        least_base_seconds(request.job, replace(candidate, schedule=name), is_played=True) for name in ("gpipe", "1f1b")
    )
    return own >= other * (1 - _SAME)


def host_fits(request: Request, option: Candidate) -> bool:
    """Whether the hosts have what offload keeps there; where nobody says what they have, they do."""
    if not option.is_offloaded or request.host_memory_bytes is None:
        return True
    return memory(request.job, option).fullest_host_bytes <= request.host_memory_bytes


def _too_large_for_host(request: Request, option: Candidate) -> str:
    needed = memory(request.job, option).fullest_host_bytes
    return f"{option.label} keeps {format_bytes(needed)} in the memory of one host, which has {request.host_words}"


def _too_large_base(request: Request, base: Candidate) -> str:
    option = least_memory(request, base)
    assert option is not None
    return _too_large(option, fit_of(request, memory(request.job, option)))


def _too_large(candidate: Candidate, fit: Fit) -> str:
    return (
        f"{candidate.label} needs {format_bytes(fit.needed_bytes)} of {format_bytes(fit.limit_bytes)} "
        f"({fit.chance_of_running_out:.0%} chance of running out)"
    )


def anything_fits(request: Request) -> bool:
    """As `search(request).found` says, without times: of the layouts that differ in micro-batch and recompute alone it
    is enough to look at those that keep least (see `Group`)."""
    room = Room(request)
    for shape in shapes(request):
        wrong = shape_problems(request.job, shape, is_tp_given="tp" in request.fixed, is_all=request.is_all)
        if any(wrong) or request.job.global_batch_size % shape.dp:
            continue
        for grown in bases(request, shape):
            is_leanest = grown[0].recompute == request.fixed.get("recompute", "full")
            if not is_leanest and not schedule_splits_backward(grown[0].schedule):
                continue
            seen = set()
            for base in grown:
                place = place_of(request.job, base)
                if place in seen or first_problem(request, base) is not None:
                    continue
                seen.add(place)
                if _any_option_fits(request, base, room):
                    return True
    return False


def _any_option_fits(request: Request, base: Candidate, room: Room) -> bool:
    first = least_memory(request, base)
    if first is None:
        return False
    most = room.most_bytes(first)
    if least_bytes(request.job, first, enough=most) > most:
        return False
    least_of = least_bytes_of(request.job, base)
    for option in state_options(request, base):
        most = room.most_bytes(option)
        if least_of(option) <= most and worst_bytes(request.job, option) <= most and host_fits(request, option):
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
            problem = first_problem(request, base)
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
    if not host_fits(request, option):
        return _too_large_for_host(request, option)
    seconds = step_time(request.job, option).total_seconds
    return f"{seconds:.4g} s a step, {format_bytes(fit.needed_bytes)}"
