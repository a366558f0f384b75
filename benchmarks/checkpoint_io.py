"""Saving and loading of a training state on two ranks, beside `torch.distributed.checkpoint` and `torch.save`.

    python -m benchmarks.checkpoint_io --folder DIR            about 1 GB of state, in DIR
    python -m benchmarks.checkpoint_io --size S --rounds 3     126 MB

`dcp` is `torch.distributed.checkpoint` with FSDP2, as its own writer and reader do it by default (files are synced),
with what a user calls around it (`get_model_state_dict` and so on); `gathered` is the whole state of the same model
on rank 0 by `torch.save`, synced as well. `raw` writes or reads as many bytes and does nothing else, `raw_all` reads on
every rank what all have written, which is the least that a load into stage 0 costs. All models are
the same GPT with AdamW after a step; `hybrid3` and `hybrid2` are ZeRO stages, `_sums` is with checksums (verified
before anything is loaded), `3_to_tp` and `3_to_0` load what stage 3 wrote into tensor parallel of 2 and into stage 0.

Every part of it runs in interleaved rounds; ratios are taken within a round. Before a save the folder of the one
before it is removed and everything is synced, outside of what is measured. Files are read from the page cache, unless
`--cold` asks the system to forget them before each load. Peaks are those of resident memory during a save, in
processes of their own, after one save that warms up.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.checkpoint_sides import Side, build, raw_read, raw_write
from benchmarks.gpt import SIZES, BenchGPT
from benchmarks.rounds import Mode, interval, launch, rank_or_none, ratios, run_rounds

PARTS = ("save", "load", "stall", "peak")
SAVES = {
    # mode -> side, checksums
    "dcp": ("fsdp2", False),
    "hybrid3": ("hybrid3", False),
    "hybrid3_sums": ("hybrid3", True),
    "hybrid2": ("hybrid2", False),
    "hybrid2_sums": ("hybrid2", True),
    "gathered": ("gathered", False),
}
LOADS = {
    # mode -> side that loads, side that wrote, checksums
    "dcp": ("fsdp2", "fsdp2", False),
    "hybrid3": ("hybrid3", "hybrid3", False),
    "hybrid3_sums": ("hybrid3", "hybrid3", True),
    "hybrid2": ("hybrid2", "hybrid2", False),
    "hybrid2_sums": ("hybrid2", "hybrid2", True),
    "3_to_tp": ("hybrid_tp", "hybrid3", False),
    "3_to_tp_sums": ("hybrid_tp", "hybrid3", True),
    "3_to_0": ("hybrid0", "hybrid3", False),
    "3_to_0_sums": ("hybrid0", "hybrid3", True),
    "gathered": ("gathered", "gathered", False),
}
PEAKS = ("hybrid3", "hybrid2", "hybrid3 async", "hybrid2 async", "fsdp2", "fsdp2 async", "gathered")
_FOLDER, _PEAK_OF = "BENCHMARK_FOLDER", "BENCHMARK_PEAK_OF"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="M", help="S: 10.5 M parameters, M: 82 M")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--folder", type=Path, help="where to write; by default the one for temporary files")
    parser.add_argument("--cold", action="store_true", help="files leave the page cache before each load")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown parts {unknown}; known: {', '.join(PARTS)}")
    if rank_or_none() is None:
        raise SystemExit(start(parts, arguments.folder))
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="load_checkpoint .* another layout")  # that is what is measured
    dist.init_process_group("gloo")
    if _PEAK_OF in os.environ:
        measure_peak(os.environ[_PEAK_OF], arguments.size)
    else:
        measure(arguments, parts)
    dist.destroy_process_group()


def start(parts: list[str], where: Path | None) -> int:
    """Peaks in processes of their own, then the times; returns the exit status."""
    with tempfile.TemporaryDirectory(dir=where) as folder:
        os.environ[_FOLDER] = folder
        for name in PEAKS if "peak" in parts else ():
            os.environ[_PEAK_OF] = name
            if status := launch("benchmarks.checkpoint_io", num_ranks=2):
                return status
        os.environ.pop(_PEAK_OF, None)
        return launch("benchmarks.checkpoint_io", num_ranks=2)


def measure(arguments: argparse.Namespace, parts: list[str]) -> None:
    bench = Bench(arguments.size)
    rows: list[dict[str, Any]] = []
    for part, work in (
        ("save", bench.saves),
        ("load", partial(bench.loads, cold=arguments.cold)),
        ("stall", bench.stalls),
    ):
        if part in parts:
            modes, base, notes = work(arguments.rounds)
            rows += report(part, modes, base, notes)
    if "peak" in parts:
        rows += report_peaks(bench)
    if dist.get_rank() == 0:
        print(f"state: {bench.total_bytes / 1e6:.1f} MB on both ranks together")
        print(json.dumps(rows))


# -- folders -----------------------------------------------------------------------------------------------------


def place(*names: str) -> Path:
    return Path(os.environ[_FOLDER]).joinpath(*names)


def fresh(folder: Path) -> None:
    """An empty folder; what was in it is gone from the disk, not only from sight. *Collective.*"""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        os.sync()
    dist.barrier()


def forget(folder: Path) -> None:
    """Ask the system to drop the folder's files, which are on the disk, from the page cache. *Collective.*"""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in (path for path in folder.rglob("*") if path.is_file()):
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


# -- what is measured ----------------------------------------------------------------------------------------------

Measured = tuple[dict[str, Mode], str, dict[str, Any]]  # modes, the one that ratios are to, other figures


class Bench:
    """The sides, built when they are wanted, and parts of the benchmark."""

    def __init__(self, size_name: str) -> None:
        self.size = SIZES[size_name]
        self._sides: dict[str, Side] = {}
        with torch.device("meta"):
            num_parameters = sum(parameter.numel() for parameter in BenchGPT(self.size).parameters())
        self.total_bytes = 3 * 4 * num_parameters  # weights and both moments, in fp32
        self.bytes_per_rank = self.total_bytes // 2

    def side(self, name: str) -> Side:
        if name not in self._sides:
            self._sides[name] = build(name, self.size)
            self._sides[name].train(0)
        return self._sides[name]

    def data(self) -> memoryview:
        """As many bytes as a rank writes, in memory that is there."""
        return np.full(self.bytes_per_rank, 1, dtype=np.uint8).data

    def saves(self, rounds: int) -> Measured:
        target = place("save")

        def mode(save: Callable[[Path], object]) -> Mode:
            def step(number: int) -> float:
                save(target)
                return 0.0

            return Mode(step=step, prepare=lambda: fresh(target))

        data = self.data()
        modes = {"raw": mode(lambda folder: raw_write(data, folder))}
        for name, (side_name, checksums) in SAVES.items():
            modes[name] = mode(partial(_save, self.side(side_name), checksums))
        run_rounds(modes, rounds=rounds, steps=1)
        fresh(target)
        return modes, "dcp", {}

    def loads(self, rounds: int, *, cold: bool) -> Measured:
        sources = sorted({source for _, source, _ in LOADS.values()})
        expected = {}
        for name in sources:
            fresh(place(name))
            self.side(name).save(place(name), name.startswith("hybrid"))
            expected[name] = self.side(name).loss()
        data = self.data()
        fresh(place("raw"))
        raw_write(data, place("raw"))
        for name in dict.fromkeys(name for name, _, _ in LOADS.values()):  # in one order on all ranks
            self.side(name).train(1)  # now what is loaded differs from what is there

        def mode(load: Callable[[Path], object], folder: Path) -> Mode:
            def step(number: int) -> float:
                load(folder)
                return 0.0

            return Mode(step=step, prepare=lambda: forget(folder) if cold else None)

        whole = [data, self.data()]

        def read_all(folder: Path) -> None:
            for rank, memory in enumerate(whole):
                raw_read(memory, folder, rank=rank)

        modes = {
            "raw": mode(lambda folder: raw_read(data, folder, rank=dist.get_rank()), place("raw")),
            "raw_all": mode(read_all, place("raw")),
        }
        for name, (side_name, source, checksums) in LOADS.items():
            modes[name] = mode(partial(_load, self.side(side_name), checksums), place(source))
        run_rounds(modes, rounds=rounds, steps=1)
        notes: dict[str, dict[str, Any]] = {"raw_all": _to("raw", modes["raw_all"], modes["raw"])}
        for name, (side_name, source, checksums) in LOADS.items():
            notes[name] = {"loss_difference": abs(self.side(side_name).loss() - expected[source])}
            if side_name != source:
                same = next(same for same, use in LOADS.items() if use == (source, source, checksums))
                notes[name] |= _to(same, modes[name], modes[same])
        return modes, "dcp", notes

    def stalls(self, rounds: int) -> Measured:
        """How long `async_save_checkpoint` takes to return, beside `Tensor.copy_` of as much as a rank writes into
        memory that is there."""
        source = torch.ones(self.bytes_per_rank // 4)
        copy = source.clone()

        def copying(number: int) -> float:
            copy.copy_(source)
            return 0.0

        modes = {"copy": Mode(step=copying)}
        first_ms: dict[str, float] = {}
        for name in ("hybrid3", "fsdp2"):  # one of hybrid: a process keeps the copies of one model
            modes[name] = self._stall(name, first_ms)
        run_rounds(modes, rounds=rounds, steps=1)
        return modes, "copy", {name: {"first_ms": value} for name, value in first_ms.items()}

    def _stall(self, name: str, first_ms: dict[str, float]) -> Mode:
        side, folder = self.side(name), place("async")
        waits: list[Callable[[], object]] = []

        def step(number: int) -> float:
            begin = time.perf_counter()
            assert side.start_save is not None
            waits.append(side.start_save(folder))
            first_ms.setdefault(name, (time.perf_counter() - begin) * 1e3)
            return 0.0

        def finish() -> None:
            waits.pop()()

        return Mode(step=step, prepare=lambda: fresh(folder), finish=finish)


def _to(base_name: str, mode: Mode, base: Mode) -> dict[str, Any]:
    found = ratios(mode, base)
    return {"to": base_name, "ratio_to": statistics.median(found), "interval_to": interval(found)}


def _save(side: Side, checksums: bool, folder: Path) -> None:
    side.save(folder, checksums)


def _load(side: Side, checksums: bool, folder: Path) -> None:
    side.load(folder, checksums)


# -- peaks -------------------------------------------------------------------------------------------------------


def measure_peak(name: str, size_name: str) -> None:
    """Most resident memory during a save, above what there was before it. Once per process."""
    bench = Bench(size_name)
    side_name, _, way = name.partition(" ")
    side = bench.side(side_name)
    with_sums = side_name.startswith("hybrid")
    fresh(place("peak"))
    side.save(place("peak"), with_sums)
    fresh(place("peak"))
    before = _reset_peak()
    if way == "async":
        assert side.start_save is not None
        side.start_save(place("peak"))()
    else:
        side.save(place("peak"), with_sums)
    place(f"{name}.{dist.get_rank()}").write_text(str(_status("VmHWM") - before))
    fresh(place("peak"))


def _reset_peak() -> int:
    """From here on the peak is counted anew; returns what is resident now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system: a save that takes it is seen to
    Path("/proc/self/clear_refs").write_text("5")  # Documentation/filesystems/proc.rst
    return _status("VmRSS")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


# -- printing ----------------------------------------------------------------------------------------------------


def report(part: str, modes: dict[str, Mode], base_name: str, notes: dict[str, Any]) -> list[dict[str, Any]]:
    base = modes[base_name]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: mode.cpu_seconds for name, mode in modes.items()})
    rows = []
    if dist.get_rank() == 0:
        print(f"{part}, {len(base.wall_seconds)} rounds; ratios to {base_name} of the same round")
        print(f"{'mode':14} {'ms':>7} {'least':>7} {'ratio':>7} {'95 % interval':>15} {'cpu ms by rank':>15}")
    for name, mode in modes.items():
        to_base = ratios(mode, base)
        low, high = interval(to_base)
        row = {
            "mode": f"{part} {name}",
            "ms": statistics.median(mode.wall_seconds) * 1e3,
            "least_ms": min(mode.wall_seconds) * 1e3,
            "ratio": statistics.median(to_base),
            "ratio_low": low,
            "ratio_high": high,
            "cpu_ms": [statistics.median(of_rank[name]) * 1e3 for of_rank in everyone],
            **notes.get(name, {}),
        }
        rows.append(row)
        if dist.get_rank() == 0:
            cpu = " ".join(f"{value:.0f}" for value in row["cpu_ms"])
            times = f"{name:14} {row['ms']:7.0f} {row['least_ms']:7.0f} {row['ratio']:7.3f}"
            print(f"{times} {low:7.3f}–{high:<7.3f} {cpu:>15}{_note(row)}", flush=True)
    return rows


def _note(row: dict[str, Any]) -> str:
    if "to" in row:
        return f"  to {row['to']}: {row['ratio_to']:.3f} ({row['interval_to'][0]:.3f}–{row['interval_to'][1]:.3f})"
    return f"  the first one, which allocates: {row['first_ms']:.0f} ms" if "first_ms" in row else ""


def report_peaks(bench: Bench) -> list[dict[str, Any]]:
    rows = []
    if dist.get_rank() == 0:
        print(f"peak of a save above what was resident before; a rank writes {bench.bytes_per_rank / 1e6:.1f} MB")
    for name in PEAKS:
        peaks = [int(place(f"{name}.{rank}").read_text()) for rank in range(dist.get_world_size())]
        rows.append(
            {"mode": f"peak {name}", "peak_bytes": peaks, "of_shard": [p / bench.bytes_per_rank for p in peaks]}
        )
        if dist.get_rank() == 0:
            print(f"{name:14} {' '.join(f'{peak / 1e6:.1f} MB' for peak in peaks)}")
    return rows


if __name__ == "__main__":
    main()
