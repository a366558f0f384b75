"""What the launcher told this process: its rank, the size of the world, and where the processes meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hybrid.errors import LaunchError

__all__ = ["LaunchEnvironment", "read_environment"]

_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")

_MEANING = {
    "RANK": "the number of this process, 0 to WORLD_SIZE - 1",
    "WORLD_SIZE": "the number of processes of the job",
    "MASTER_ADDR": "the host name or address of the machine of rank 0",
    "MASTER_PORT": "a free port on that machine, 1 to 65535",
}

# Schedulers that start several processes without torchrun's variables: (size, rank, local rank, local size).
_SCHEDULERS = {
    "Slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", ""),
    "Open MPI": (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPI": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """The place of this process in its job, checked."""

    rank: int
    world_size: int
    local_rank: int
    """Index among the processes of this machine; chooses the device."""
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    launched: bool
    """False: no launcher; this process is the whole world."""
    derived: tuple[str, ...] = ()
    """Variables that were not set and were worked out from the others."""


def read_environment(environ: Mapping[str, str] = os.environ) -> LaunchEnvironment:
    """Read torchrun's variables. With none of them set, the process runs alone.

    Raises LaunchError with every problem: a variable that is missing beside others, is no number, or
    contradicts another. Variables that are only partly set never mean a world of one.
    """
    if not any(name in environ for name in (*_REQUIRED, *_LOCAL)):
        _refuse_unnoticed_scheduler(environ)
        return LaunchEnvironment(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            node_rank=0,
            master_addr="",
            master_port=0,
            launched=False,
        )
    return _Reader(environ).read()


class _Reader:
    """Collects the problems of one set of variables."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._problems: list[str] = []

    def read(self) -> LaunchEnvironment:
        for name in _REQUIRED:
            if name not in self._environ:
                self._problems.append(f"{name} is not set, expected {_MEANING[name]}")
        world_size = self._number("WORLD_SIZE", lowest=1)
        rank = self._number("RANK", lowest=0)
        port = self._number("MASTER_PORT", lowest=1, highest=65535)
        address = self._environ.get("MASTER_ADDR", "unset").strip()
        if not address:
            self._problems.append(f"MASTER_ADDR is empty, expected {_MEANING['MASTER_ADDR']}")
        if rank is not None and world_size is not None and rank >= world_size:
            self._problems.append(
                f"RANK={rank} with WORLD_SIZE={world_size}, expected a rank from 0 to {world_size - 1}"
            )
        local_rank, local_world_size, derived = self._local(rank, world_size)
        if self._problems:
            raise LaunchError(self._text())
        assert rank is not None and world_size is not None and port is not None
        node_rank = self._first_number("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")
        return LaunchEnvironment(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            node_rank=rank // local_world_size if node_rank is None else node_rank,
            master_addr=address,
            master_port=port,
            launched=True,
            derived=derived,
        )

    def _local(self, rank: int | None, world_size: int | None) -> tuple[int, int, tuple[str, ...]]:
        """LOCAL_RANK and LOCAL_WORLD_SIZE; where they are not set, the scheduler's, else from the others.

        Without any word on the machine's share it is taken to be the whole world; the check-in of the
        processes counts those of each machine and corrects it.
        """
        derived = tuple(name for name in _LOCAL if name not in self._environ)
        local_world_size = self._number("LOCAL_WORLD_SIZE", lowest=1)
        if "LOCAL_WORLD_SIZE" not in self._environ:
            local_world_size = self._first_number(*(names[3] for names in _SCHEDULERS.values() if names[3]))
        local_rank = self._number("LOCAL_RANK", lowest=0)
        if "LOCAL_RANK" not in self._environ:
            local_rank = self._first_number(*(names[2] for names in _SCHEDULERS.values()))
        if world_size is None or rank is None:
            return 0, 1, derived
        if local_world_size is not None and local_world_size > world_size:
            self._problems.append(
                f"LOCAL_WORLD_SIZE={local_world_size} with WORLD_SIZE={world_size}, expected at most {world_size}"
            )
        share = world_size if local_world_size is None else local_world_size
        if local_rank is None:
            return rank % share, share, derived
        if local_rank >= share:
            name = "WORLD_SIZE" if local_world_size is None else "LOCAL_WORLD_SIZE"
            self._problems.append(
                f"LOCAL_RANK={local_rank} with {name}={share}, expected a local rank from 0 to {share - 1}"
            )
        return local_rank, share, derived

    def _number(self, name: str, *, lowest: int, highest: int | None = None) -> int | None:
        text = self._environ.get(name)
        if text is None:
            return None
        try:
            value = int(text)
        except ValueError:
            self._problems.append(f"{name}={text!r} is not a whole number, expected {lowest} or more")
            return None
        if value < lowest or (highest is not None and value > highest):
            limit = "or more" if highest is None else f"to {highest}"
            self._problems.append(f"{name}={value}, expected {lowest} {limit}")
            return None
        return value

    def _first_number(self, *names: str) -> int | None:
        for name in names:
            if self._environ.get(name, "").isdigit():
                return int(self._environ[name])
        return None

    def _text(self) -> str:
        seen = ", ".join(f"{name}={self._environ[name]}" for name in (*_REQUIRED, *_LOCAL) if name in self._environ)
        lines = "".join(f"\n  - {problem}" for problem in self._problems)
        return (
            f"the launch variables are wrong (set: {seen}):{lines}\n"
            "torchrun and `hybrid run` set all of them; with none of them set, one process runs alone."
        )


def _refuse_unnoticed_scheduler(environ: Mapping[str, str]) -> None:
    """Several processes that each believe to be alone would train several models and say nothing."""
    for name, (size, rank, local_rank, _) in _SCHEDULERS.items():
        count = environ.get(size, "")
        if count.isdigit() and int(count) > 1:
            raise LaunchError(
                f"RANK and WORLD_SIZE are not set, but {name} started {count} processes ({size}={count}): "
                f"each would train alone. Set RANK=${rank}, WORLD_SIZE=${size}, LOCAL_RANK=${local_rank}, "
                "MASTER_ADDR and MASTER_PORT in each of them, or start one torchrun or `hybrid run` per machine"
            )
