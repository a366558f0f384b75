"""Real worlds of processes for tests.

    def check_sum(scale):                        # a function of the test module, run on every rank
        value = torch.ones(3) * scale
        ...
        return value.tolist()

    def test_sum():
        assert run_ranks(check_sum, 2, 3.0) == [[6.0] * 3] * 2

Processes are forked from a server that has torch, pytest and this module loaded, so a world of four takes a
fraction of a second. Each rank has torchrun's variables and a started gloo group (a file store, no ports), as
under a launcher. Results and tracebacks come back over a pipe per rank, pickled plainly: tensors travel as
bytes, not as shared memory that dies with its rank.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankFailure", "RankReport", "run_environments", "run_plain", "run_ranks"]

_ROOT = Path(__file__).resolve().parent.parent
_CONTEXT = multiprocessing.get_context("forkserver")
_DUMP_BEFORE_SECONDS = 0.5

# Loaded once, in the fork server: a rank that imports these itself takes some seconds longer. None of them starts a
# thread at import (a fork would lose it). torch.optim imports torch._dynamo with the first optimizer.
_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "numpy",
    "pydantic",
    "pytest",
    "hybrid.strategy",
    "hybrid.compose.model",
    "hybrid.compose.optimizer",
    "hybrid.compose.access",
    "hybrid.compose.training_state",
    "hybrid.compose.weights_export",
    "hybrid.compose.weights_load",
    "hybrid.collectives.deferred",
    "transformers.models.bert.modeling_bert",
    "tests.scenario",
    "tests.multi_rank.case_runs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """How one rank ended."""

    rank: int
    value: Any = None
    error: str = ""
    """Type name and message; empty for a rank that returned."""
    traceback: str = ""
    seconds: float = 0.0
    """From the start of the world to the end of this rank."""
    exit_code: int | None = None
    silent: bool = False
    """It ended, or was ended at the timeout, without a report."""

    @property
    def failed(self) -> bool:
        return bool(self.error)


class RankFailure(AssertionError):
    """At least one rank raised, died or was silent; the message holds every rank's traceback, first failure first."""

    def __init__(self, reports: Sequence[RankReport]) -> None:
        self.reports = tuple(reports)
        failed = sorted((report for report in reports if report.failed), key=lambda report: report.seconds)
        silent = [report.rank for report in failed if report.silent]
        lines = [f"{len(failed)} of {len(reports)} ranks failed"]
        if silent:
            lines[0] += f"; silent: {', '.join(map(str, silent))}"
        for report in failed:
            lines.append(f"---- rank {report.rank}, after {report.seconds:.2f} s: {report.error}")
            if report.traceback:
                lines.append(report.traceback.rstrip())
        super().__init__("\n".join(lines))

    def error_of(self, rank: int) -> str:
        return self.reports[rank].error


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 60,
    group_timeout_seconds: float | None = None,
    backend: str = "gloo",
    **kwargs: Any,
) -> list[Any]:
    """Run `function(*args, **kwargs)` on every rank of a world; the return values by rank.

    `group_timeout_seconds` is the timeout of the default process group. With `backend` "nccl" each rank takes the GPU
    of its number. Raises RankFailure.
    """
    environments = [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }
        for rank in range(world_size)
    ]
    with tempfile.TemporaryDirectory(prefix="hybrid-ranks-") as folder:
        meeting = _Meeting(
            path=f"{folder}/store",
            timeout_seconds=timeout_seconds if group_timeout_seconds is None else group_timeout_seconds,
            backend=backend,
        )
        reports = _run(function, environments, args, kwargs, timeout_seconds, meeting)
    if any(report.failed for report in reports):
        raise RankFailure(reports)
    return [report.value for report in reports]


def run_plain(function: Callable[..., Any], *args: Any, timeout_seconds: float = 60, **kwargs: Any) -> Any:
    """Run `function` in one process without launch variables or a process group: the reference of a parity test."""
    (report,) = run_environments(function, [{}], *args, timeout_seconds=timeout_seconds, **kwargs)
    if report.failed:
        raise RankFailure([report])
    return report.value


def run_environments(
    function: Callable[..., Any],
    environments: Sequence[Mapping[str, str]],
    *args: Any,
    timeout_seconds: float = 60,
    **kwargs: Any,
) -> list[RankReport]:
    """Run `function` in one process per set of launch variables; nothing is started for them."""
    return _run(function, environments, args, kwargs, timeout_seconds, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meeting:
    """Where the ranks of a started world meet."""

    path: str
    timeout_seconds: float
    backend: str


# -- the parent -------------------------------------------------------------------------------------------------

_children: set[BaseProcess] = set()


@atexit.register
def _end_children() -> None:
    for child in _children:
        child.kill()


def _start_server() -> None:
    """Start the fork server with this repository on its path and one thread per process."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), *sys.path)))}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        _CONTEXT.set_forkserver_preload([*_PRELOAD, "tests.ranks"])
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run(
    function: Callable[..., Any],
    environments: Sequence[Mapping[str, str]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    timeout_seconds: float,
    meeting: _Meeting | None,
) -> list[RankReport]:
    _start_server()
    work = pickle.dumps((function, args, dict(kwargs)))
    started = time.monotonic()
    children: list[BaseProcess] = []
    child: BaseProcess
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="hybrid-stacks-") as stacks:
        try:
            for rank, environment in enumerate(environments):
                ours, theirs = _CONTEXT.Pipe()
                child = _CONTEXT.Process(
                    target=_rank_main,
                    args=(rank, dict(environment), work, theirs, meeting, f"{stacks}/{rank}", timeout_seconds),
                )
                child.start()
                theirs.close()
                _children.add(child)
                children.append(child)
                pipes.append(ours)
            return _collect(children, pipes, started, timeout_seconds, stacks)
        finally:
            for pipe in pipes:
                pipe.close()
            for child in children:
                # A rank that has reported ends by itself when its pipe closes.
                child.join(5)
                if child.is_alive():
                    child.kill()
                    child.join()
                _children.discard(child)


def _collect(
    children: Sequence[BaseProcess],
    pipes: Sequence[Connection],
    started: float,
    timeout_seconds: float,
    stacks: str,
) -> list[RankReport]:
    deadline = started + timeout_seconds
    reports: dict[int, RankReport] = {}
    while len(reports) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in reports]
        ready = wait(waiting, timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            break
        for pipe in ready:
            rank = pipes.index(pipe)
            reports[rank] = _receive(rank, pipe, children[rank], time.monotonic() - started)  # type: ignore[arg-type]
    for rank, child in enumerate(children):
        if rank not in reports:
            child.kill()
            stack = Path(stacks, str(rank))
            reports[rank] = RankReport(
                rank=rank,
                error=f"silent for {timeout_seconds:g} s, killed",
                traceback=stack.read_text() if stack.exists() else "",
                seconds=time.monotonic() - started,
                silent=True,
            )
    return [reports[rank] for rank in range(len(pipes))]


def _receive(rank: int, pipe: Connection, child: BaseProcess, seconds: float) -> RankReport:
    try:
        value, error, trace = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        child.join(5)
        error = f"ended with exit code {child.exitcode} without a report"
        return RankReport(rank=rank, error=error, seconds=seconds, exit_code=child.exitcode, silent=True)
    return RankReport(rank=rank, value=value, error=error, traceback=trace, seconds=seconds)


# -- a rank -----------------------------------------------------------------------------------------------------


def _rank_main(
    rank: int,
    environment: Mapping[str, str],
    work: bytes,
    pipe: Connection,
    meeting: _Meeting | None,
    stack_path: str,
    timeout_seconds: float,
) -> None:
    stack_file = open(stack_path, "w")  # noqa: SIM115 (faulthandler writes to it from a thread until the end)
    faulthandler.dump_traceback_later(max(timeout_seconds - _DUMP_BEFORE_SECONDS, 0.1), file=stack_file)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    gc.freeze()  # what the server imported is no garbage: a collection would go through some 370,000 objects of it
    failed = False
    try:
        if meeting is not None:
            _join_world(meeting)
        function, args, kwargs = pickle.loads(work)
        outcome = pickle.dumps((function(*args, **kwargs), "", ""))
    except BaseException as error:
        failed = True
        outcome = pickle.dumps((None, f"{type(error).__name__}: {error}", traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        pipe.send_bytes(outcome)
        if not failed:
            # Stay until all ranks are done: a rank that leaves closes connections the others may still read.
            # A rank that failed leaves at once, so that the others learn of it.
            pipe.poll(timeout_seconds)
    os._exit(1 if failed else 0)


def _join_world(meeting: _Meeting) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if meeting.backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        meeting.backend,
        store=dist.FileStore(meeting.path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=meeting.timeout_seconds),
    )
