"""What `hybrid run` is asked to start, checked as a whole before any process exists."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hybrid.errors import LaunchError, StrategyError
from hybrid.launch.machine import problem_of_ranks
from hybrid.launch.script import ScriptCommand
from hybrid.launch.variables import (
    LOG_DIR_VARIABLE,
    PARENT_VARIABLE,
    RESUME_VARIABLE,
    STRATEGY_VARIABLE,
    resume_directory,
)
from hybrid.strategy import DistributedStrategy

__all__ = ["GRACE_SECONDS", "LaunchJob", "threads_per_rank"]

# From the signal to end (Ctrl-C, or the first failure) until ranks that are still there are killed.
# torchrun's own 30 s would make every hang half a minute longer.
GRACE_SECONDS = 5
DEFAULT_MASTER_PORT = 29500
DEFAULT_RDZV_ID = "hybrid"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """One script on `num_nodes * num_processes` ranks; this process starts the ranks of one node."""

    script: str  # path of a script, or the name of a module
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    num_processes: int = 1  # per node
    num_nodes: int = 1
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None  # None: Slurm's job number, else one name for all jobs
    strategy: Path | None = None
    resume: Path | None = None  # folder of checkpoints; it need not exist yet
    max_restarts: int = 0
    min_processes: int | None = None  # to which a restart may go down after ranks were lost; None: never
    log_dir: Path = Path("hybrid_logs")
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the workers' own
    show_output: bool = True  # whether rank 0's output is shown while it runs

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.num_processes

    def check(self) -> None:
        """Raise LaunchError with all that is wrong, or StrategyError if the strategy cannot work here."""
        problems = [*self._problems_of_nodes(), *self._problems_of_files(), *self._problems_of_restarts()]
        if problems:
            raise LaunchError("; ".join(problems))
        self._resolve(self.world_size)
        if self.min_processes is not None and self.min_processes < self.num_processes:
            fitting, reasons = self.fewer_processes(self.num_processes - 1)
            if fitting is None:
                raise StrategyError(
                    [
                        f"--min-nproc is {self.min_processes}, but the strategy works on no number of ranks from "
                        f"{self.num_processes - 1} down to it; leave --min-nproc out",
                        *reasons,
                    ]
                )

    def fewer_processes(self, most: int) -> tuple[int | None, list[str]]:
        """The largest number of ranks from `most` down to --min-nproc for which the strategy works.

        Also why it does not work on the numbers above it, a line for each of them.
        """
        reasons: list[str] = []
        for count in range(most, (self.min_processes or self.num_processes) - 1, -1):
            try:
                self._resolve(count)
            except StrategyError as error:
                reasons.append(f"{count} rank{'s' if count > 1 else ''}: {'; '.join(error.problems)}")
            else:
                return count, reasons
        return None, reasons

    def _resolve(self, world_size: int) -> None:
        """Raise StrategyError if the strategy from outside cannot work on this number of ranks."""
        strategy = self.strategy or os.environ.get(STRATEGY_VARIABLE)
        if strategy:
            DistributedStrategy.load(strategy, world_size=world_size).resolve(world_size)

    def _problems_of_nodes(self) -> list[str]:
        problems = []
        if self.num_processes < 1:
            problems.append(f"--nproc is {self.num_processes}; expected 1 or more")
        elif too_many := problem_of_ranks("--nproc", self.num_processes):
            problems.append(too_many + " (more machines: --nnodes)")
        if self.num_nodes < 1:
            problems.append(f"--nnodes is {self.num_nodes}; expected 1 or more")
        if self.master_port is not None and not 0 < self.master_port < 65536:
            problems.append(f"--master-port is {self.master_port}; expected 1..65535")
        given = {
            "--node-rank": self.node_rank,
            "--master-addr": self.master_addr,
            "--master-port": self.master_port,
            "--rdzv-endpoint": self.rdzv_endpoint,
            "--rdzv-id": self.rdzv_id,
        }
        named = [name for name, value in given.items() if value is not None]
        if self.num_nodes == 1 and named:
            problems.append(f"{', '.join(named)} given with --nnodes 1, where it has no effect; leave it out")
        elif self.rdzv_id is not None and self.rdzv_endpoint is None:
            problems.append(f"--rdzv-id {self.rdzv_id} given without --rdzv-endpoint, where it has no effect")
        elif self.rdzv_id is not None and not self.rdzv_id.strip():
            problems.append("--rdzv-id is empty; expected a name that only the machines of this job give")
        if self.num_nodes > 1 and self.rdzv_endpoint is not None:
            others = [name for name in named if name not in {"--rdzv-endpoint", "--rdzv-id"}]
            if others:
                problems.append(
                    f"--rdzv-endpoint {self.rdzv_endpoint} given with {', '.join(others)}: the meeting point "
                    "hands out the node ranks itself; give one or the other"
                )
        elif self.num_nodes > 1:
            missing = [name for name in ("--node-rank", "--master-addr") if given[name] is None]
            if missing:
                problems.append(
                    f"--nnodes {self.num_nodes} needs {' and '.join(missing)} "
                    f"(0..{self.num_nodes - 1}; the address of node 0), or --rdzv-endpoint HOST:PORT"
                )
            if self.node_rank is not None and not 0 <= self.node_rank < self.num_nodes:
                problems.append(f"--node-rank is {self.node_rank}; expected 0..{self.num_nodes - 1}")
        return problems

    def _problems_of_files(self) -> list[str]:
        problems = []
        if not self.is_module and not Path(self.script).exists():
            problems.append(f"script {self.script} does not exist (looked in {Path.cwd()})")
        inherited = os.environ.get(STRATEGY_VARIABLE)
        if inherited and self.strategy is not None and Path(inherited).resolve() != self.strategy.resolve():
            problems.append(
                f"--strategy is {self.strategy} and the environment variable {STRATEGY_VARIABLE} is "
                f"{inherited}; give one of them"
            )
        inherited = os.environ.get(RESUME_VARIABLE)
        if inherited and self.resume is not None and Path(inherited).resolve() != self.resume.resolve():
            problems.append(
                f"--resume is {self.resume} and the environment variable {RESUME_VARIABLE} is {inherited}; "
                "give one of them"
            )
        folder = self.resume_directory
        if folder is not None and folder.exists() and not folder.is_dir():
            problems.append(
                f"the folder to resume from, {folder}, is a file; expected a folder of checkpoints, or none yet"
            )
        return problems

    def _problems_of_restarts(self) -> list[str]:
        problems = []
        if self.max_restarts < 0:
            problems.append(f"--max-restarts is {self.max_restarts}; expected 0 or more")
        if self.max_restarts > 0 and self.resume_directory is None:
            problems.append(
                f"--max-restarts {self.max_restarts} needs --resume DIR, the folder in which the script saves: "
                "without it a restart would begin at the first step again"
            )
        if self.max_restarts > 0 and self.num_nodes > 1:
            problems.append(
                f"--max-restarts {self.max_restarts} given with --nnodes {self.num_nodes}: each machine has a "
                "launcher of its own, which sees its own ranks only, and nobody decides for all of them; leave it "
                "out and let the scheduler start all machines again (Slurm: --requeue) with the same --resume DIR"
            )
        if self.min_processes is not None:
            if self.max_restarts <= 0:
                problems.append(
                    f"--min-nproc {self.min_processes} given without --max-restarts, where it has no effect"
                )
            if not 1 <= self.min_processes <= self.num_processes:
                problems.append(f"--min-nproc is {self.min_processes}; expected 1..{self.num_processes} (--nproc)")
        return problems

    @property
    def resume_directory(self) -> Path | None:
        """The folder of checkpoints, from the option or the environment."""
        return resume_directory() if self.resume is None else self.resume

    def torchrun_arguments(self) -> list[str]:
        """What follows `torchrun` on the command line."""
        arguments = [
            f"--nnodes={self.num_nodes}",
            f"--nproc-per-node={self.num_processes}",
            f"--shutdown-timeout={GRACE_SECONDS - 1}",
            f"--log-dir={os.devnull}",  # the workers write their own logs, named by global rank
        ]
        if self.num_nodes == 1:
            # Without --local-addr the workers are told this machine's full name, which need not resolve.
            arguments += ["--standalone", "--local-addr=127.0.0.1"]
        elif self.rdzv_endpoint is not None:
            # One name for the machines of one job: two jobs at one endpoint must not meet.
            rdzv_id = self.rdzv_id or os.environ.get("SLURM_JOB_ID") or DEFAULT_RDZV_ID
            arguments += ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.rdzv_endpoint}", f"--rdzv-id={rdzv_id}"]
        else:
            arguments += [
                "--rdzv-backend=static",
                f"--node-rank={self.node_rank}",
                f"--master-addr={self.master_addr}",
                f"--master-port={self.master_port or DEFAULT_MASTER_PORT}",
            ]
        # The script's name is for whoever lists processes; worker.py reads the command from a file.
        return [*arguments, "--module", "hybrid.launch.worker", self.script]

    @property
    def script_command(self) -> ScriptCommand:
        return ScriptCommand(script=self.script, arguments=self.arguments, is_module=self.is_module)

    def worker_environment(self, log_dir: Path) -> dict[str, str]:
        """The environment of torchrun and, through it, of every rank."""
        environment = {**os.environ, **self.environment}
        environment.setdefault("OMP_NUM_THREADS", str(threads_per_rank(self.num_processes)))
        environment[LOG_DIR_VARIABLE] = str(log_dir)
        environment[PARENT_VARIABLE] = str(os.getpid())
        if self.strategy is not None:
            environment[STRATEGY_VARIABLE] = str(self.strategy.resolve())
        if self.resume_directory is not None:
            environment[RESUME_VARIABLE] = str(self.resume_directory.resolve())  # a script may change its folder
        return environment

    def new_log_dir(self, timestamp: str) -> Path:
        """A fresh folder for one run; never one that an earlier run has written to."""
        name = timestamp
        if self.num_nodes > 1:
            name += f"-{socket.gethostname()}" if self.node_rank is None else f"-node{self.node_rank}"
        base = self.log_dir.resolve()
        for attempt in range(1, 1000):
            folder = base / (name if attempt == 1 else f"{name}-{attempt}")
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise LaunchError(f"log folder {folder} cannot be made: {error}; choose --log-dir") from error
            return folder
        raise LaunchError(f"log folder {base / name} and 999 numbered ones exist; choose --log-dir")


def threads_per_rank(num_processes: int) -> int:
    """An equal part of the cores this process may use: more threads than cores would only wait."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_processes)
