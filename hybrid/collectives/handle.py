"""What a launched collective returns."""

from __future__ import annotations

import time
from typing import Protocol

from hybrid.collectives import trace
from hybrid.collectives.call import HISTORY, Call, CallState, describe_history, first_sentence
from hybrid.collectives.exchange import PeerError
from hybrid.collectives.ranges import waiting
from hybrid.errors import CollectiveError

__all__ = ["Handle", "Pending", "collective_error", "forget_calls"]


class Pending(Protocol):
    """A call under way in a backend."""

    def finish(self) -> None:
        """Block until the result is in the buffer."""
        ...


# Calls that nobody has waited for yet. A handle may be dropped without a wait (its rank is then at fault, not
# its peers, who still need the messages), and gloo reads and writes the buffers all the same.
_in_flight: set[Pending] = set()


def forget_calls() -> None:
    """Let go of buffers in flight and of the history: the process groups that they belong to are gone."""
    _in_flight.clear()
    HISTORY.clear()


def forget_history() -> None:
    """Let go of the calls that were named in messages."""
    HISTORY.clear()


class Handle:
    """Results are valid after `wait`, and only then; until then the buffer belongs to the collective."""

    __slots__ = ("_call", "_pending")

    def __init__(self, call: Call | None, pending: Pending | None) -> None:
        self._call = call
        self._pending = pending
        if pending is not None:
            _in_flight.add(pending)

    @property
    def is_done(self) -> bool:
        """Whether `wait` has returned (or there was nothing to wait for)."""
        return self._pending is None

    def wait(self) -> None:
        """Block until the collective is complete. Calling it again does nothing.

        Raises CollectiveError when a rank is gone, launched something else, or did not come in time.
        """
        if self._pending is None:
            return
        assert self._call is not None
        call, pending, started = self._call, self._pending, time.monotonic()
        self._pending = None
        try:
            with waiting("control" if call.control else call.op, call.group.axis):
                pending.finish()
        except BaseException as error:
            if isinstance(error, RuntimeError):
                failure = collective_error(call, error, waited_seconds=time.monotonic() - started)
                call.end(CallState.FAILED)
                # Our own errors are in the message as they are; one traceback then shows the user's line.
                cause = None if isinstance(error, PeerError | CollectiveError) else error
                raise failure from cause
            call.end(CallState.FAILED)
            raise
        finally:
            _in_flight.discard(pending)
        call.end(CallState.DONE)
        if trace.is_on():
            # By the clock of the call's own end, so that no wait is longer than its call.
            ended = time.monotonic() if call.ended is None else call.ended
            trace.record_call(call, wait_seconds=max(0.0, ended - started))


def collective_error(call: Call, error: Exception, *, waited_seconds: float) -> CollectiveError:
    """Say which collective failed, why, after how long, and what this process did before."""
    rank = call.group.ranks[call.group.rank]
    return CollectiveError(
        f"rank {rank}: {call.describe()} failed after {waited_seconds:.1f} s in wait "
        f"(timeout {call.group.timeout_seconds:g} s): {_reason(error)}\n"
        f"The last collectives of rank {rank}, oldest first:\n{describe_history()}"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, CollectiveError):
        return str(error)
    text = first_sentence(str(error)) or type(error).__name__
    lowered = text.lower()
    if "timed out" in lowered or "timeout" in lowered:
        return f"not every rank entered it in time; one hangs, is late, or took another path ({text})"
    if "connection" in lowered or "closed" in lowered or "reset" in lowered:
        return f"a rank is gone; look for the first error among the other ranks ({text})"
    return text
