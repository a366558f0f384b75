"""One world of processes for each way to train, so that no mode finds another's heap, threads or random state.

The worlds live at the same time and work in turn: those whose turn it is not wait at a pipe. What the C library
keeps of freed memory is given back at the end of a turn, so that a waiting world holds its live bytes only.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import zero_memory
from benchmarks.zero_modes import build, import_peer

__all__ = ["Turn", "World", "whole_turn"]

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.profiler",
    "hybrid.compose.model",
    "hybrid.compose.optimizer",
    "benchmarks.zero_worlds",
    "benchmarks.zero_transport",
)
_ANSWER_SECONDS = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Some steps of one rank."""

    wall_seconds: float
    """Per step."""
    cpu_seconds: float
    """Per step, of all threads of the process."""
    page_faults: float
    """Per step."""
    losses: list[float]


class World:
    """The ranks of one mode, started and idle."""

    def __init__(self, mode: str, size_name: str, *, num_ranks: int) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        _CONTEXT.set_forkserver_preload(list(_PRELOAD))
        self.mode = mode
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = _CONTEXT.Pipe()
            arguments = (theirs, mode, size_name, rank, num_ranks, str(Path(self._folder.name) / "store"))
            process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, what: str, *arguments: Any) -> list[Any]:
        """Every rank's answer to one request: the name of a function `_do_*` here, and what it gets."""
        for pipe in self._pipes:
            pipe.send((what, *arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_ANSWER_SECONDS):
                raise RuntimeError(f"{self.mode}: nothing from rank {rank} for {_ANSWER_SECONDS:g} s after {what!r}")
            try:
                is_done, answer = pipe.recv()
            except EOFError:
                raise RuntimeError(f"{self.mode}: rank {rank} ended during {what!r}") from None
            if not is_done:
                raise RuntimeError(f"{self.mode}, rank {rank}:\n{answer}")
            answers.append(answer)
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- in the ranks --------------------------------------------------------------------------------------------------


def _serve(pipe: Connection, mode: str, size_name: str, rank: int, num_ranks: int, store: str) -> None:
    os.dup2(2, 1)  # what a library prints must not get between the rows
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    try:
        server = _Rank(mode, size_name, rank, num_ranks, store)
        while True:
            what, *arguments = pipe.recv()
            pipe.send((True, getattr(server, f"do_{what}")(*arguments)))
    except EOFError:
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    os._exit(0)  # a profiler that recorded memory must not be freed, see pipeline_memory


class _Rank:
    """What one rank can be asked for."""

    def __init__(self, mode: str, size_name: str, rank: int, num_ranks: int, store: str) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        import_peer(mode)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
        self._memory = zero_memory.ResidentPeak()
        self._options: dict[str, Any] = {"rank": rank, "num_ranks": num_ranks}
        self._mode, self._size_name = mode, size_name
        self._training: Any = None
        self._done = 0

    def _build(self) -> Any:
        if self._training is None:
            self._training = build(self._mode, self._size_name, **self._options)
        return self._training

    def do_steps(self, steps: int, unmeasured: int) -> Turn:
        """Some steps, after some that are not measured."""
        import torch.distributed as dist

        training = self._build()
        losses = [self._step(training) for _ in range(unmeasured)]
        dist.barrier()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        wall, cpu = time.perf_counter(), time.process_time()
        losses += [self._step(training) for _ in range(steps)]
        cpu = time.process_time() - cpu
        dist.barrier()
        wall = time.perf_counter() - wall
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        ctypes.CDLL(None).malloc_trim(0)
        return Turn(wall_seconds=wall / steps, cpu_seconds=cpu / steps, page_faults=faults / steps, losses=losses)

    def _step(self, training: Any) -> float:
        loss: float = training.step(self._done)
        self._done += 1
        return loss

    def do_facts(self, steps: int) -> dict[str, Any]:
        """Losses, bytes sent, live bytes and resident peak of a fresh training."""
        facts = zero_memory.facts(self._build(), steps=steps)
        facts["peak_resident_bytes"] = self._memory.bytes_above_start()
        return facts

    def do_losses(self, steps: int, num_ranks: int) -> list[float]:
        """Of one process that takes the rows of so many ranks."""
        training = build("single", self._size_name, rank=0, num_ranks=num_ranks)
        return [training.step(number) for number in range(steps)]

    def do_peak(self) -> int:
        """Most bytes that torch's allocator had given out within a step, of all since before the model was built."""
        return zero_memory.heap_peak(self._build)


def whole_turn(turns: Sequence[Turn]) -> tuple[float, float, float, list[float]]:
    """(wall, CPU, page faults, losses) of a turn: the slowest rank's wall time, means over the ranks of the rest."""
    return (
        max(turn.wall_seconds for turn in turns),
        statistics.mean(turn.cpu_seconds for turn in turns),
        statistics.mean(turn.page_faults for turn in turns),
        [statistics.mean(losses) for losses in zip(*(turn.losses for turn in turns), strict=True)],
    )
