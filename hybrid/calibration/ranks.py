"""One rank of `hybrid calibrate`: what is measured, in which order, and what all ranks make of it."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from hybrid.calibration.clock import Clock
from hybrid.calibration.device_work import DeviceWork
from hybrid.calibration.effort import PROGRESS_FILE, RESULT_FILE, Effort, effort_of
from hybrid.calibration.group_work import Family, GroupWork, families
from hybrid.calibration.step_work import step_costs
from hybrid.collectives import ops
from hybrid.contracts.layout import Layout
from hybrid.contracts.measurements import CollectiveCurve, CollectivePoint, Launch, Machine, Measurements
from hybrid.errors import LaunchError
from hybrid.launch.environment import read_environment
from hybrid.launch.machine import ThisMachine, this_machine
from hybrid.launch.variables import LOG_DIR_VARIABLE
from hybrid.mesh import Mesh, running_world_size, start_process_group, stop_process_group

__all__ = ["Found", "measure_here"]

TIMEOUT_SECONDS = 300.0

Say = Callable[[int, int, str], None]
"""(measurements done, all of them, what comes next)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Measurements, and the figures of the device that stand beside them.

    Args:
        free_bytes: memory that a rank may use.
    """

    measurements: Measurements
    free_bytes: float


@dataclass(slots=True)
class _Progress:
    say: Say
    total: int
    done: int = 0

    def run(self, label: str, work: Callable[[], Any]) -> Any:
        self.say(self.done, self.total, label)
        result = work()
        self.done += 1
        return result


@dataclass(slots=True)
class _Results:
    matmul: list[Any] = field(default_factory=list)
    attention: list[Any] = field(default_factory=list)
    pointwise: list[Any] = field(default_factory=list)
    collectives: list[CollectiveCurve] = field(default_factory=list)


def measure_here(*, is_quick: bool, say: Say = lambda done, total, label: None, effort: Effort | None = None) -> Found:
    """Measure as one rank of a world that a launcher started; all ranks call it alike, and get the same.

    Args:
        effort: instead of the usual one.

    Raises:
        LaunchError: hosts with different processors, or with different numbers of ranks.
    """
    started = time.monotonic()
    machine = this_machine()
    began = running_world_size() is None
    if began:
        start_process_group(read_environment(), timeout_seconds=TIMEOUT_SECONDS, agreement="hybrid calibrate")
    mesh = Mesh(Layout.of(dp_shard=running_world_size() or 1), timeout_seconds=TIMEOUT_SECONDS)
    try:
        effort = effort or effort_of(on_cuda=mesh.device.type == "cuda", is_quick=is_quick)
        where = _where(machine, mesh)
        free = _agreed_free_bytes(machine, where, mesh)
        context = _context_bytes(mesh)  # before measuring leaves something behind
        found = _measure(mesh, where, effort, say)
    finally:
        if began:
            stop_process_group()
    return Found(
        measurements=Measurements(
            date=date.today().isoformat(),
            torch=torch.__version__,
            seconds=round(time.monotonic() - started, 1),
            load=round(machine.load, 2),
            machine=where,
            context_bytes=context,
            **found,
        ),
        free_bytes=free,
    )


def _where(machine: ThisMachine, mesh: Mesh) -> Machine:
    """Hosts in the order of their ranks."""
    accelerator = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else None
    told = ops.all_gather_object((machine.host, machine.processor, machine.cores, accelerator), group=mesh.world)
    hosts = list(dict.fromkeys(host for host, *_ in told))
    counts = [sum(host == one for one, *_ in told) for host in hosts]
    kinds = {(processor, cores, device): host for host, processor, cores, device in reversed(told)}
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise LaunchError(
            f"{first} has {_kind(*one)} and {second} has {_kind(*other)}: every rank of a layout does the same work, "
            "so a cluster file describes equal hosts; calibrate each kind by itself"
        )
    if len(set(counts)) > 1 or [host for host, *_ in told] != [host for host in hosts for _ in range(counts[0])]:
        listed = ", ".join(f"{host} has {count}" for host, count in zip(hosts, counts, strict=True))
        raise LaunchError(
            f"ranks per host differ or are not numbered host by host: {listed}; start as many on each, as torchrun does"
        )
    return Machine(
        hosts=tuple(hosts),
        processor=machine.processor,
        cores=machine.cores,
        ranks_per_host=counts[0],
        threads_per_rank=torch.get_num_threads(),
        accelerator=accelerator,
        backend="nccl" if mesh.backend == "nccl" else "gloo",
    )


def _kind(processor: str, cores: int, accelerator: str | None) -> str:
    return accelerator or f"{cores} cores of {processor}"


def _measure(mesh: Mesh, where: Machine, effort: Effort, say: Say) -> dict[str, Any]:
    clock = Clock(mesh.world, mesh.device, window_seconds=effort.window_seconds, num_windows=effort.num_windows)
    device = DeviceWork(clock, mesh.device, effort)
    groups = families(len(where.hosts), where.ranks_per_host)
    products, attentions, pointwise = (list(one) for one in (device.matmuls(), device.attentions(), device.pointwise()))
    # Optimizer, launches and steps are one each; of messages there are those of pairs.
    kinds = sum(4 if family.size == 2 else 3 for family in groups)
    progress = _Progress(say, len(products) + len(attentions) + len(pointwise) + 3 + kinds)
    results = _Results()
    launch: Launch = progress.run("launches", device.launch)
    results.matmul += [progress.run("matrix products", one) for one in products]
    results.attention += [progress.run("attention", one) for one in attentions]
    results.pointwise += [progress.run("memory", one) for one in pointwise]
    optimizer = progress.run("optimizer", device.optimizer_bytes_per_second)
    everyone = mesh.world_size
    agreed = ops.all_gather_object(optimizer, group=mesh.world)
    for family in groups:
        results.collectives += _curves(clock, family, everyone, effort, progress)
    whole = next((one.points for one in results.collectives if (one.kind, one.size) == ("all_reduce", everyone)), ())
    step = progress.run("steps", lambda: step_costs(clock, launch, whole, timeout_seconds=TIMEOUT_SECONDS))
    say(progress.total, progress.total, "done")
    return {
        "matmul": tuple(results.matmul),
        "attention": tuple(results.attention),
        "pointwise": tuple(results.pointwise),
        "collectives": tuple(results.collectives),
        "optimizer_bytes_per_second": sorted(agreed)[len(agreed) // 2],
        "launch": launch,
        "step": step,
    }


def _curves(
    clock: Clock, family: Family, world_size: int, effort: Effort, progress: _Progress
) -> Iterator[CollectiveCurve]:
    work = GroupWork(clock, family, world_size=world_size, timeout_seconds=TIMEOUT_SECONDS)
    for kind in work.kinds:
        label = f"{kind.replace('_', '-')} over {family.size}"
        points = progress.run(label, partial(_all_points, work, kind, effort.messages))
        yield CollectiveCurve(kind=kind, size=family.size, stride=family.stride, points=points)  # type: ignore[arg-type]


def _all_points(work: GroupWork, kind: str, sizes: tuple[int, ...]) -> tuple[CollectivePoint, ...]:
    return tuple(one() for one in work.points(kind, sizes))


def _agreed_free_bytes(machine: ThisMachine, where: Machine, mesh: Mesh) -> float:
    """The least of all ranks."""
    free = machine.memory_bytes / where.ranks_per_host
    if mesh.device.type == "cuda":
        free = float(torch.cuda.get_device_properties(mesh.device).total_memory)
    return min(ops.all_gather_object(free, group=mesh.world))


def _context_bytes(mesh: Mesh) -> tuple[float, float, float]:
    """Of a process with this library and nothing to train: resident, or on the accelerator."""
    parameter = torch.nn.Parameter(torch.ones(8, device=mesh.device))
    parameter.square().sum().backward()
    torch.optim.AdamW([parameter], lr=1e-4).step()  # the first optimizer of a process loads some tens of megabytes
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(mesh.device)
        own = float(total - free - torch.cuda.memory_reserved(mesh.device))
    else:
        own = float(psutil.Process().memory_info().rss)
    found = sorted(ops.all_gather_object(own, group=mesh.world))
    return max(1.0, found[0] * 0.9), max(1.0, found[len(found) // 2]), max(1.0, found[-1] * 1.1)


def main() -> None:
    """Under `hybrid calibrate`: progress and the result go into the log folder of the run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    folder = Path(os.environ[LOG_DIR_VARIABLE])
    is_first = int(os.environ["RANK"]) == 0

    def say(done: int, total: int, label: str) -> None:
        if is_first:
            with (folder / PROGRESS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps([done, total, label]) + "\n")

    found = measure_here(is_quick=options.quick, say=say)
    if is_first:
        content = {"measurements": found.measurements.model_dump(mode="json"), "free_bytes": found.free_bytes}
        (folder / RESULT_FILE).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main()
