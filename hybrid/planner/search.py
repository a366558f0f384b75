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

from hybrid.planner.base_queue import Entry, Rejection, SmallestFailing, Tally, first_problem, queue_of
from hybrid.planner.constraints import batch_problems, shape_problems
from hybrid.planner.cost import StepTime, least_base_seconds, least_step_seconds, step_time
from hybrid.planner.job import Candidate
from hybrid.planner.memory import MemoryPlan, least_bytes, least_bytes_of, memory, worst_bytes
from hybrid.planner.memory_layers import num_communicators
from hybrid.planner.options import bases, least_memory, shapes, state_options
from hybrid.planner.request import Request
from hybrid.planner.room import Fit, Room, fit_of

__all__ = ["Fit", "Priced", "Progress", "Rejection", "SearchResult", "anything_fits", "fit_of", "search", "why"]

_SAME = 1e-6  # steps that differ by less take the same time
_MOST_TRIED = 100  # of those that do not fit, when the nearest ones that would be faster are looked for
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
        self._failing = SmallestFailing()

    def run(self) -> None:
        while self.queue:
            entry = heapq.heappop(self.queue)
            if self._is_beaten(entry.bound_seconds):
                self.tally.add("slower", partial(self._beaten, entry), 1 + len(self.queue))
                return
            if entry.is_played:
                least_of = least_bytes_of(self.job, entry.base)
                for option in state_options(self.request, entry.base):
                    self.num_considered += 1
                    self._try(option, least_of(option))
            elif not entry.has_chunks:
                self._num_done += 1
                if self._progress is not None:
                    self._progress(self._num_done, self._num_bases)
                if not self._is_known_to_fail(entry.base):
                    self._push(entry, is_played=False)
            elif self._may_fit(entry.base):
                self._push(entry, is_played=True)

    def _is_beaten(self, seconds: float) -> bool:
        return len(self.kept) == self.request.num_plans and seconds > self.kept[-1].time.total_seconds

    def _beaten(self, entry: Entry) -> str:
        return (
            f"{entry.base.label} takes {entry.bound_seconds:.4g} s or more, the slowest plan kept "
            f"{self.kept[-1].time.total_seconds:.4g} s"
        )

    def _push(self, entry: Entry, *, is_played: bool) -> None:
        """Back into the queue, with the bound of its chunks or of its schedule."""
        least = least_base_seconds(self.job, entry.base, is_played=is_played)
        entry.bound_seconds = max(entry.bound_seconds, least)
        entry.has_chunks, entry.is_played = True, is_played
        heapq.heappush(self.queue, entry)

    def _may_fit(self, base: Candidate) -> bool:
        """Whether some state option of a base fits, and nothing better is known of it."""
        if self._is_known_to_fail(base):
            return False
        least = least_memory(self.request, base)
        if least is None:
            self.tally.add("sharding", lambda: "no stage and shard_size with what is fixed")
            return False
        if not self._fits(least, least_bytes(self.job, least), is_exact=False):
            self._failing.add(base)
            return False
        if _is_spare_gpipe(self.request, base):
            self.tally.add("schedule", lambda: f"{base.label}: 1f1b takes no longer and keeps fewer micro-batches")
            return False
        return True

    def _is_known_to_fail(self, base: Candidate) -> bool:
        if self._failing.fails(base):
            self.tally.add("memory", lambda: f"{base.label} keeps more than one that does not fit")
            return True
        return False

    def _fits(self, option: Candidate, size: float, *, is_exact: bool) -> bool:
        """By the bytes that it has at least, or by all of them."""
        if size <= self._room.most_bytes(option):
            return True
        self.tally.add("memory", lambda: _too_large(option, fit_of(self.request, memory(self.job, option))))
        self._large.append(_TooLarge(option, size, is_exact))
        return False

    def _try(self, option: Candidate, least_bytes: float) -> None:
        if not self._fits(option, least_bytes, is_exact=False):
            return
        if len(self.kept) == self.request.num_plans:  # sooner than to count all of its bytes
            least = least_step_seconds(self.job, option)
            if self._is_beaten(least):
                self.tally.add("slower", lambda: f"{option.label} takes {least:.4g} s or more")
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
        for candidate in islice(self._by_missing_bytes(), _MOST_TRIED):
            if given == limit:
                return
            if best_seconds is not None and least_step_seconds(self.job, candidate) > best_seconds:
                continue
            seconds = step_time(self.job, candidate)
            if best_seconds is None or seconds.total_seconds < best_seconds:
                given += 1
                yield self._priced(candidate, seconds)

    def _by_missing_bytes(self) -> Iterator[Candidate]:
        """Those that are too large, fewest missing bytes first; counted exactly only where their turn may come."""
        groups: dict[int, list[_TooLarge]] = {}
        for one in sorted(self._large, key=lambda one: one.tensors_bytes):
            groups.setdefault(num_communicators(one.candidate), []).append(one)
        counted: list[tuple[float, str, Candidate]] = []
        for one in heapq.merge(*groups.values(), key=self._missing):
            while counted and counted[0][0] < self._missing(one):
                yield heapq.heappop(counted)[-1]
            candidate = one.candidate
            if not _is_spare_gpipe(self.request, candidate):
                size = one.tensors_bytes if one.is_exact else worst_bytes(self.job, candidate)
                heapq.heappush(counted, (self._room.over_bytes(size, candidate), candidate.label, candidate))
        while counted:
            yield heapq.heappop(counted)[-1]

    def _missing(self, one: _TooLarge) -> float:
        return self._room.over_bytes(one.tensors_bytes, one.candidate)


@dataclass(frozen=True, slots=True)
class _TooLarge:
    """`tensors_bytes` are at least so many where they are not exact."""

    candidate: Candidate
    tensors_bytes: float
    is_exact: bool


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
    assert request.host_memory_bytes is not None
    needed = memory(request.job, option).fullest_host_bytes
    return (
        f"{option.label} keeps {needed / 1e9:.1f} GB in the memory of one host, which has "
        f"{request.host_memory_bytes / 1e9:.1f} GB"
    )


def _too_large(candidate: Candidate, fit: Fit) -> str:
    return (
        f"{candidate.label} needs {fit.needed_bytes / 1e9:.1f} GB of {fit.limit_bytes / 1e9:.1f} GB "
        f"({fit.chance_of_running_out:.0%} chance of running out)"
    )


def anything_fits(request: Request) -> bool:
    """As `search(request).found` says, without times: of the layouts that differ in micro-batch and recompute alone it
    is enough to look at that which keeps least."""
    room = Room(request)
    for shape in shapes(request):
        wrong = shape_problems(request.job, shape, is_tp_given="tp" in request.fixed, is_all=request.is_all)
        if any(wrong) or request.job.global_batch_size % shape.dp:
            continue
        for grown in bases(request, shape):
            if grown[0].recompute != request.fixed.get("recompute", "full"):
                continue
            base = next((base for base in grown if first_problem(request, base) is None), None)
            if base is None:
                continue
            least = least_memory(request, base)
            if least is None or worst_bytes(request.job, least) > room.most_bytes(least):
                continue
            if host_fits(request, least):
                return True
            others = (one for one in state_options(request, base) if host_fits(request, one))
            if any(worst_bytes(request.job, one) <= room.most_bytes(one) for one in others):
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
    return f"{seconds:.4g} s a step, {fit.needed_bytes / 1e9:.1f} GB"
