"""Computing something in the middle of a forward, so that neither notices the other."""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from hybrid.collectives import trace
from hybrid.weight_gradients import splitting

__all__ = ["forget_values", "run_apart"]

_Result = TypeVar("_Result")


def run_apart(work: Callable[[], _Result]) -> _Result:
    """What `work` returns, or raises.

    It runs in a thread of its own, while this one waits: autocast, no_grad, inference mode, the hooks by which
    recompute saves, the modes that record or replace operations are each thread's own. What is the process's, random
    states and the like, is put back.
    """
    outcome: list[_Result] = []
    failure: list[BaseException] = []
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            with ExitStack() as around:
                if stream is not None:
                    around.enter_context(torch.cuda.device(stream.device))
                    around.enter_context(torch.cuda.stream(stream))
                around.enter_context(_random_states(stream))
                around.enter_context(trace.apart())
                around.enter_context(splitting(False))
                outcome.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="hybrid-apart", daemon=True)
    thread.start()
    thread.join()
    if failure:
        forget_values(failure[0])
    if stream is not None:
        torch.cuda.empty_cache()
    if failure:
        raise failure.pop()  # a reference from here would keep the error, and it this frame
    return outcome[0]


def forget_values(error: BaseException) -> None:
    """Free what the frames in the traceback of an error hold, which have come to their end, and keep its lines."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += (one.__cause__, one.__context__)


@contextmanager
def _random_states(stream: torch.cuda.Stream | None) -> Iterator[None]:
    numpy: Any = sys.modules.get("numpy")
    state, array_state = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=[] if stream is None else [stream.device]):
        try:
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(array_state)
