"""Watches some steps: warm-up, then torch's profiler and our own clock, then one file of traces per rank.

step      1 .. warmup                    warmup + 1 .. warmup + steps        afterwards
runs      flops counted in the first,    torch.profiler and the clock        nobody listens
          others timed from outside      listen to every range
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hybrid import shims
from hybrid.collectives.ranges import RangeKind, set_listener
from hybrid.collectives.trace import Recording, trace
from hybrid.profile.profile import RankProfile, Traffic
from hybrid.profile.step_clock import StepClock, covered_seconds
from hybrid.profile.timeline import RankTimeline, Stretch

__all__ = ["StepProfiler"]

_CONTROL = "control"
_PARTS = {
    RangeKind.FORWARD: "forward",
    RangeKind.BACKWARD: "backward",
    RangeKind.OPTIMIZER: "optimizer",
    RangeKind.PLAIN: "other",
    RangeKind.COMMUNICATION: "communication",
}


class _FlopCount(shims.TorchDispatchMode):
    """Adds up what torch's own formulas say of every operation that has one."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._formulas = {
            **flop_registry,
            shims.CPU_ATTENTION: _attention,
            shims.CPU_ATTENTION_BACKWARD: _attention_backward,
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = self._formulas.get(func.overloadpacket)
        if formula is not None:
            self.total += int(formula(*args, **(kwargs or {}), out_val=result))
        return result


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


class _Listener:
    """Tells the clock and torch of each range."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    @contextmanager
    def range(self, name: str, kind: RangeKind, axis: str, op: str) -> Iterator[None]:
        self._clock.enter(kind, _axis(axis), op)
        try:
            with record_function(name):
                yield
        finally:
            self._clock.leave()


class StepProfiler:
    """Of one rank. One at a time in a process: torch has one profiler.

    Args:
        rank: of this process.
        steps: how many are traced.
        warmup: how many before them are not.
        directory: for `rank<N>.trace.json`; made if it is not there.
        device: where the model computes.
    """

    _under_way: ClassVar[StepProfiler | None] = None

    def __init__(self, *, rank: int, steps: int, warmup: int, directory: Path, device: torch.device) -> None:
        self._rank = rank
        self.num_steps = steps
        self._warmup = warmup
        self._directory = directory
        self._device = device
        self._done = 0
        self._flops: float | None = None
        self._untraced: list[float] = []
        self._clock = StepClock()
        self._begun_at = 0.0
        self._open = ExitStack()
        self._recording: Recording | None = None
        self._torch: profile | None = None
        self.is_over = False

    @property
    def steps_left(self) -> int:
        return self._warmup + self.num_steps - self._done

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step; a step that raises ends the profile, without a result."""
        if StepProfiler._under_way not in {None, self}:
            yield  # of another model, whose profile has begun
            return
        StepProfiler._under_way = self
        try:
            with self._watching():
                yield
        except BaseException:
            self._close()
            self.is_over = True
            raise
        self._done += 1
        if self.steps_left == 0:
            self._close()

    @property
    def has_ended(self) -> bool:
        """Whether the last step has been traced and nobody has asked for the result."""
        return self.steps_left == 0 and not self.is_over

    def _watching(self) -> AbstractContextManager[None]:
        if self._done >= self._warmup:
            return self._traced()
        return self._counted() if self._done == 0 else self._timed()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        count = _FlopCount()
        with count:
            yield
        self._flops = float(count.total)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        self._synchronise()
        started = time.monotonic()
        yield
        self._synchronise()
        self._untraced.append(time.monotonic() - started)

    @contextmanager
    def _traced(self) -> Iterator[None]:
        if self._torch is None:
            self._start()
        self._begun_at = time.time()
        self._clock.begin_step()
        with record_function(f"step {self._done + 1}"):
            yield
            self._synchronise()
        self._clock.end_step()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * (self._device.type == "cuda"))]
        self._torch = self._open.enter_context(profile(activities=activities))
        self._recording = self._open.enter_context(trace())
        self._open.callback(set_listener, None)
        set_listener(_Listener(self._clock))

    def _close(self) -> None:
        self._open.close()
        StepProfiler._under_way = None

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # -- the result ------------------------------------------------------------------------------------

    @property
    def untraced_step_seconds(self) -> float | None:
        """Median of the warm-up steps after the first."""
        return statistics.median(self._untraced) if self._untraced else None

    def timeline(self) -> RankTimeline:
        """The last step that was traced."""
        begun = self._clock.stretches[0][1] if self._clock.stretches else 0.0
        return RankTimeline(
            rank=self._rank,
            begun_at_seconds=self._begun_at,
            stretches=tuple(
                Stretch(start - begun, end - begun, _PARTS[kind], _axis(axis), op)
                for (kind, axis, op), start, end in self._clock.stretches
            ),
        )

    def result(self) -> RankProfile:
        """Write the trace of this rank; what was measured."""
        assert self.has_ended and self._torch is not None and self._recording is not None
        self.is_over = True
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"rank{self._rank}.trace.json"
        self._torch.export_chrome_trace(str(path))
        self._torch = None
        clock, steps = self._clock, self.num_steps
        per_step = {kind: clock.of_kind(kind) / steps for kind in RangeKind}
        between = clock.between_seconds
        return RankProfile(
            rank=self._rank,
            step_seconds=sum(clock.step_seconds) / steps,
            forward_seconds=per_step[RangeKind.FORWARD],
            backward_seconds=per_step[RangeKind.BACKWARD],
            optimizer_seconds=per_step[RangeKind.OPTIMIZER],
            other_seconds=per_step[RangeKind.PLAIN],
            between_seconds=sum(between) / len(between) if between else 0.0,
            traffic=tuple(_traffic(clock, self._recording, steps)),
            communication_seconds=_under_way(clock, self._recording, steps),
            flops=self._flops,
            trace_file=str(path),
        )


def _axis(label: str) -> str:
    """The streams of a pipeline, to the next stage and back, are one axis."""
    return "pp" if label.startswith("pp_") else label


def _traffic(clock: StepClock, recording: Recording, steps: int) -> Iterator[Traffic]:
    sent: dict[tuple[str, str], list[int]] = {}
    for call in recording.calls:
        sums = sent.setdefault((_axis(call.axis), _CONTROL if call.control else call.op), [0, 0])
        sums[0] += 1
        sums[1] += call.sent_bytes
    exposed = clock.communication()
    for axis, op in dict.fromkeys((*exposed, *sent)):
        calls, num_bytes = sent.get((axis, op), [0, 0])
        yield Traffic(
            axis=axis,
            op=op,
            exposed_by_step=exposed.get((axis, op), (0.0,) * steps),
            calls=calls / steps,
            sent_bytes=num_bytes / steps,
        )


def _under_way(clock: StepClock, recording: Recording, steps: int) -> Mapping[str, float]:
    intervals = {axis: list(blocked) for axis, blocked in clock.blocked.items()}
    for call in recording.calls:
        intervals.setdefault(_axis(call.axis), []).append((call.ended - call.seconds, call.ended))
    return {axis: covered_seconds(found) / steps for axis, found in intervals.items()}
