"""When each action of a schedule runs, for given costs: step time, bubble, micro-batches in flight, critical path.

A rank runs one action at a time, in its order, and starts it once the rank is free and all that it reads has come. A
message takes `transfer_seconds` from the end of its source to its arrival, while both ranks compute on; messages do not
slow each other down. Within one rank nothing is sent. A backward may send the gradient of its input `later_seconds`
before its end, when only the gradients of weights are left to compute.

The closed forms hold for chunks of equal cost and transfers that take no time (p stages, m micro-batches, v chunks per
rank; bubble as the fraction of the step in which a rank is idle):

    gpipe, 1f1b   (p-1) / (m+p-1)      arXiv 1811.06965 §2.3, arXiv 2104.04473 §2.2.1 (there over the ideal time)
    interleaved   (p-1) / (v·m+p-1)    arXiv 2104.04473 §2.2.2, as above
    zb-h1         (p-1) / (3·m+p-1)    arXiv 2401.10241 table 2, for F = I = W and m ≥ p
    zbv           (p-1) / (6·m+p-1)    arXiv 2401.10241 §6, for F = I = W and m ≥ 2·p-1
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybrid.contracts.schedule import (
    Action,
    ActionKind,
    Schedule,
    dependencies,
    make_schedule,
    max_in_flight,
    max_in_flight_by_chunk,
)
from hybrid.contracts.schedule_check import Transport, check_schedule
from hybrid.errors import StrategyError

__all__ = ["ClosedForm", "Seconds", "TimedAction", "Timeline", "closed_form", "time_schedule"]

#: One value for all, or one per chunk (per cut between chunks, for transfers).
Seconds = float | Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAction:
    """An action with its time; seconds from the start of the step."""

    action: Action
    rank: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A schedule on the clock."""

    schedule: Schedule
    timed: tuple[tuple[TimedAction, ...], ...]
    """Per rank, in order."""
    critical_path: tuple[TimedAction, ...]
    """From the start of the step to its end; each begins when the one before, and its message if any, has ended, or
    when what it sends has come where that leaves before its end."""

    @property
    def total_seconds(self) -> float:
        """From the first start to the last end."""
        return max((order[-1].end_seconds for order in self.timed if order), default=0.0)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Per rank: seconds in which it computes."""
        return tuple(math.fsum(timed.end_seconds - timed.start_seconds for timed in order) for order in self.timed)

    @property
    def bubble_fractions(self) -> tuple[float, ...]:
        """Per rank: idle seconds over total seconds, 0 for a step that takes no time."""
        total = self.total_seconds
        return tuple(max(0.0, 1 - busy / total) if total else 0.0 for busy in self.busy_seconds)

    @property
    def bubble_fraction(self) -> float:
        """Idle over total seconds, all ranks together."""
        return math.fsum(self.bubble_fractions) / len(self.timed)

    @property
    def max_in_flight(self) -> tuple[int, ...]:
        """Per rank: the most (chunk, micro-batch) whose activations it keeps at once."""
        return tuple(int(max_in_flight(self.schedule, rank)) for rank in range(self.schedule.num_stages))

    @property
    def max_in_flight_per_chunk(self) -> tuple[int, ...]:
        """Per chunk of the model: the most micro-batches whose activations are kept at once."""
        most: Counter[int] = Counter()
        for rank in range(len(self.schedule.actions)):
            most |= max_in_flight_by_chunk(self.schedule, rank)
        return tuple(most[chunk] for chunk in range(self.schedule.num_chunks))


def time_schedule(
    schedule: Schedule,
    *,
    forward_seconds: Seconds,
    backward_seconds: Seconds,
    input_seconds: Seconds | None = None,
    weight_seconds: Seconds | None = None,
    transfer_seconds: Seconds = 0.0,
    later_seconds: Seconds = 0.0,
) -> Timeline:
    """Play the schedule through with these costs of one micro-batch on each chunk of the model.

    `backward_seconds` is that of a whole backward (B). Of a split one, I takes `input_seconds` and W `weight_seconds`;
    what is not given is the rest of `backward_seconds` (half each where neither is). `transfer_seconds` may be given
    per cut: value c is for the messages between chunks c and c+1, either way. Of a whole backward the last
    `later_seconds` follow when the gradient for the chunk before has been sent.

    A schedule that cannot run to its end raises what `check_schedule` says about it.
    """
    costs = _costs(schedule, forward_seconds, backward_seconds, input_seconds, weight_seconds)
    delays = _values("transfer_seconds", transfer_seconds, schedule.num_chunks - 1, "cut between chunks")
    later = _values("later_seconds", later_seconds, schedule.num_chunks, "chunk")
    if any(after > whole for after, whole in zip(later, costs[ActionKind.B], strict=True)):
        raise StrategyError("later_seconds is more than backward_seconds: it is a part of it")
    reads = dependencies(schedule)
    done: dict[Action, TimedAction] = {}
    cause: dict[Action, TimedAction | None] = {}
    timed: list[list[TimedAction]] = [[] for _ in schedule.actions]
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, order in enumerate(schedule.actions):
            for action in order[len(timed[rank]) :]:
                if any(source not in done for source in reads[action]):
                    break
                start, last = 0.0, None
                if timed[rank]:
                    last = timed[rank][-1]
                    start = last.end_seconds
                for source in reads[action]:
                    before = done[source]
                    delay = 0.0
                    if before.rank != rank:
                        delay = delays[min(source.chunk, action.chunk)]
                        delay -= later[source.chunk] if source.kind is action.kind is ActionKind.B else 0.0
                    if before.end_seconds + delay > start:
                        start, last = before.end_seconds + delay, before
                here = TimedAction(
                    action=action,
                    rank=rank,
                    start_seconds=start,
                    end_seconds=start + costs[action.kind][action.chunk],
                )
                done[action], cause[action] = here, last
                timed[rank].append(here)
                has_moved = True
    if any(len(ran) < len(order) for ran, order in zip(timed, schedule.actions, strict=True)):
        is_training = any(action.kind is not ActionKind.F for order in schedule.actions for action in order)
        check_schedule(schedule, transport=Transport.BUFFERED, is_training=is_training)
    return Timeline(schedule=schedule, timed=tuple(map(tuple, timed)), critical_path=_critical_path(done, cause))


def _critical_path(
    done: Mapping[Action, TimedAction], cause: Mapping[Action, TimedAction | None]
) -> tuple[TimedAction, ...]:
    """Back from the action that ends last, each time to what it had to wait for."""
    path: list[TimedAction] = []
    here = max(done.values(), key=lambda timed: timed.end_seconds, default=None)
    while here is not None:
        path.append(here)
        here = cause[here.action]
    return tuple(reversed(path))


def _costs(
    schedule: Schedule, forward: Seconds, backward: Seconds, inputs: Seconds | None, weights: Seconds | None
) -> dict[ActionKind, tuple[float, ...]]:
    """Kind -> seconds per chunk."""
    size = schedule.num_chunks
    whole = _values("backward_seconds", backward, size, "chunk")
    given = {
        ActionKind.I: None if inputs is None else _values("input_seconds", inputs, size, "chunk"),
        ActionKind.W: None if weights is None else _values("weight_seconds", weights, size, "chunk"),
    }
    costs = {ActionKind.F: _values("forward_seconds", forward, size, "chunk"), ActionKind.B: whole}
    for kind, other in ((ActionKind.I, ActionKind.W), (ActionKind.W, ActionKind.I)):
        own, rest = given[kind], given[other]
        if own is None:
            pairs = zip(whole, [value / 2 for value in whole] if rest is None else rest, strict=True)
            own = tuple(max(0.0, total - part) for total, part in pairs)
        costs[kind] = own
    return costs


def _values(name: str, given: Seconds, size: int, what: str) -> tuple[float, ...]:
    is_for_all = isinstance(given, int | float)
    values = (float(given),) if isinstance(given, int | float) else tuple(map(float, given))
    if not is_for_all and len(values) != size:
        raise StrategyError(f"{name} has {len(values)} values for {size} {what}s; give one value, or one per {what}")
    for value in values:
        if not math.isfinite(value) or value < 0:
            raise StrategyError(f"{name} = {value}: expected a time of 0 or more seconds")
    return values * size if is_for_all else values


# ---------------------------------------------------------------- closed forms


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """What the literature says of a schedule, for chunks of equal cost and transfers that take no time."""

    bubble_fraction: float
    bubble_formula: str
    in_flight: tuple[int, ...]
    """Per rank: (chunk, micro-batch) whose activations are kept at once."""
    in_flight_formula: str


def closed_form(schedule: Schedule) -> ClosedForm | None:
    """The closed forms of a schedule that `make_schedule` makes; None for any other, and where there is none.

    In flight: gpipe m; 1f1b min(p-r, m); interleaved the warm-up of Megatron-LM and one more, min(2(p-r-1)+(v-1)p+1,
    v·m), in chunks of 1/v of a stage (at rank 0 and m large: 1+(p-1)/(p·v) times those of 1f1b); zb-h1 p;
    zbv 2p, in halves of a stage.
    """
    p, m, v = schedule.num_stages, schedule.num_micro_batches, schedule.virtual_stages
    try:
        made = make_schedule(schedule.name, num_stages=p, num_micro_batches=m, virtual_stages=v)
    except StrategyError:
        return None
    if made != schedule:
        return None
    match schedule.name:
        case "gpipe":
            in_flight, formula = [m] * p, "m"
        case "1f1b":
            in_flight, formula = [min(p - rank, m) for rank in range(p)], "min(p-r, m)"
        case "zb-h1":
            if m < p:
                return None
            return ClosedForm(
                bubble_fraction=(p - 1) / (3 * m + p - 1),
                bubble_formula="(p-1)/(3·m+p-1)",
                in_flight=(p,) * p,
                in_flight_formula="p",
            )
        case "zbv":
            if m < 2 * p - 1:
                return None
            return ClosedForm(
                bubble_fraction=(p - 1) / (6 * m + p - 1),
                bubble_formula="(p-1)/(6·m+p-1)",
                in_flight=(2 * p,) * p,
                in_flight_formula="2p",
            )
        case _:
            in_flight = [min(2 * (p - rank - 1) + (v - 1) * p + 1, v * m) for rank in range(p)]
            formula = "min(2(p-r-1)+(v-1)p+1, v·m)"
    return ClosedForm(
        bubble_fraction=(p - 1) / (v * m + p - 1),
        bubble_formula="(p-1)/(v·m+p-1)" if v > 1 else "(p-1)/(m+p-1)",
        in_flight=tuple(in_flight),
        in_flight_formula=formula,
    )
