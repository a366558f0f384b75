"""What a search drops unseen: for micro-batches and policies of which the smaller does not always need less."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from hybrid.planner.base_queue import Group, Tally, queue_of
from hybrid.planner.cost import step_time
from hybrid.planner.job import Candidate
from hybrid.planner.memory import worst_bytes
from hybrid.planner.options import state_options
from hybrid.planner.request import Request
from hybrid.planner.request_reading import make_request
from hybrid.planner.room import Room
from hybrid.planner.search import anything_fits, host_fits, search


def those_that_fit(request: Request) -> list[Candidate]:
    """Of every base that keeps the rules, without a shortcut."""
    room = Room(request)
    options = chain.from_iterable(state_options(request, entry.base) for entry in queue_of(request, Tally())[1])
    return [one for one in options if worst_bytes(request.job, one) <= room.most_bytes(one) and host_fits(request, one)]


def test_no_plan_is_dropped_for_one_that_only_seems_leaner() -> None:
    """16 stages with few micro-batches keep less than with many small ones where backward is split."""
    fixed = "pp=16,schedule=zbv,recompute=full"
    request = make_request("llama2-7b", "8x8xH100", global_batch_size=128, fixed=fixed, memory_bytes=18e9, num_plans=3)
    best = sorted((step_time(request.job, one).total_seconds, one.label) for one in those_that_fit(request))[:3]
    assert len(best) == 3
    assert [one.key for one in search(request).found] == best


def failing(group: Group, request: Request, base: Candidate, failed: Candidate) -> bool:
    """Whether a group drops a base once another one has failed, if it would fit."""
    group.failing_bytes(request.job, failed, lambda one: 1e12)
    return group.failing_bytes(request.job, base, lambda one: None) is not None


@pytest.mark.parametrize(
    ("schedule", "failed", "asked", "is_dropped"),
    [
        ("1f1b", (1, "full"), (2, "full"), True),
        ("1f1b", (1, "full"), (2, "none"), True),
        ("1f1b", (1, "selective"), (1, "none"), False),  # with sequence parallelism it keeps more
        ("1f1b", (2, "none"), (1, "none"), False),
        ("gpipe", (1, "full"), (1, "none"), True),
        ("gpipe", (1, "full"), (2, "full"), False),
        ("zb-h1", (1, "full"), (1, "full"), True),
        ("zb-h1", (1, "full"), (1, "none"), False),
        ("zb-h1", (1, "full"), (2, "full"), False),
    ],
)
def test_which_base_speaks_for_which(
    schedule: str, failed: tuple[int, Any], asked: tuple[int, Any], is_dropped: bool
) -> None:
    request = make_request("llama2-7b", "8xH100", global_batch_size=32)
    plain = Candidate(tp=2, pp=4, schedule=schedule, micro_batch_size=1, num_micro_batches=32, recompute="full")

    def base(size: int, policy: Any) -> Candidate:
        return replace(plain, micro_batch_size=size, num_micro_batches=32 // size, recompute=policy)

    group = Group(plain)
    group.failing_bytes(request.job, plain, lambda one: None)
    assert failing(group, request, base(*asked), base(*failed)) is is_dropped


@pytest.mark.parametrize(
    ("model", "batch", "fixed", "memory_bytes", "fits"),
    [
        ("llama2-7b", 32, "tp=1,pp=8,schedule=zbv,offload=parameters", 22e9, True),  # 8 micro-batches of 4, not 32 of 1
        ("llama2-7b", 32, "tp=1,pp=8,schedule=zbv,offload=parameters", 17e9, False),
        ("gpt2", 8, "tp=2,pp=2,schedule=zbv,recompute=full,micro_batch_size=1", 7e9, True),
    ],
)
def test_something_fits_where_what_is_looked_at_first_does_not(
    model: str, batch: int, fixed: str, memory_bytes: float, fits: bool
) -> None:
    """The smallest micro-batch need not keep least, and neither need the state that is cut most: what is gathered for
    a chunk counts as well."""
    asked: dict[str, Any] = {"fixed": fixed, "memory_bytes": memory_bytes, "include_unbuilt": model == "llama2-7b"}
    request = make_request(model, "8xH100", global_batch_size=batch, **asked)
    assert bool(those_that_fit(request)) == anything_fits(request) == bool(search(request).found) == fits
