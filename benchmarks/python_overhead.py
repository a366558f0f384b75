"""How long hybrid's own Python takes in a step of many tiny layers, where nothing else takes long.

    python -m benchmarks.python_overhead --layers 200 --rounds 10

`--ranks` ranks train `--layers` linear layers of width 16 (AdamW fused, plain loop) plainly, each for itself, and under
each ZeRO stage; `hooks` is plain with two empty Python hooks on each parameter, the least that works by hooks. Rounds
interleave the modes. Printed, per step and in CPU time of the thread that trains, which a busy machine changes least:

    CPU            the least of all rounds, without a profiler
    over plain     that less the plain step's; also in microseconds for each parameter
    hooks          of it, what calling two hooks for each parameter takes, though they do nothing
    operations     of it, torch's operations that functions of `hybrid` call (copies of gradients, sums for the norm,
                   collectives), by cProfile in the quickest of the profiled steps, less what the profiler adds to each
    own code       the rest: Python, and attributes of tensors (`p.grad`), which no profiler sees; and its part of the
                   plain step

and the functions of `hybrid` in which a profiled step is longest; those that are called often are overstated. The last
line has all of it in JSON.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hybrid
from benchmarks.rounds import launch, rank_or_none

_PACKAGE = str(Path(hybrid.__file__).parent)
_WIDTH, _ROWS = 16, 8
_WAITS = ("'wait'", "'recv'", "'send'")
_OF_TORCH = ("torch", "TensorBase", "StorageBase")
_PLAIN_TOO = "_nn.linear"  # what the model itself computes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="steps of each mode per round")
    parser.add_argument("--stages", default="0,1,2", help="ZeRO stages")
    parser.add_argument("--top", type=int, default=12, help="functions to print for each stage")
    arguments = parser.parse_args()
    if rank_or_none() is None:
        raise SystemExit(launch("benchmarks.python_overhead", num_ranks=arguments.ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names = ["plain", "hooks", *(f"stage {stage}" for stage in arguments.stages.split(","))]
    steps = {name: build(name, arguments.layers) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(-1, arguments.rounds):  # round -1 warms up
        for name, step in steps.items():
            dist.barrier()
            begin = time.thread_time()
            for _ in range(arguments.steps):
                step()
            if round_number >= 0:
                seconds[name].append((time.thread_time() - begin) / arguments.steps)
    plain, hooks = min(seconds["plain"]), min(seconds["hooks"])
    added_seconds = seconds_that_a_profiler_adds()
    rows = []
    for name, step in steps.items():
        row: dict[str, Any] = {"mode": name, "cpu_ms": min(seconds[name]) * 1e3}
        if name.startswith("stage"):
            over = min(seconds[name]) - plain
            profile = quickest_profile(step, arguments.rounds * arguments.steps)
            operations = seconds_of_torch(profile, added_seconds)
            own = over - (hooks - plain) - operations
            row |= {"over_ms": over * 1e3, "over_us_per_parameter": over * 1e6 / (2 * arguments.layers)}
            row |= {"hooks_ms": (hooks - plain) * 1e3, "operations_ms": operations * 1e3}
            row |= {"own_ms": own * 1e3, "own_to_plain": own / plain, "top": longest(profile, arguments.top)}
        rows.append(row)
    if dist.get_rank() == 0:
        report(rows)
    dist.destroy_process_group()


def build(name: str, num_layers: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_layers)))
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    if name == "hooks":
        return _loop(model, optimizer, kept=[hook for p in model.parameters() for hook in _empty_hooks(p)])
    if name != "plain":
        strategy = hybrid.DistributedStrategy()
        strategy.sharding = True
        strategy.sharding_configs = {"stage": int(name.removeprefix("stage "))}
        model = hybrid.distributed_model(model, strategy=strategy)
        optimizer = hybrid.distributed_optimizer(optimizer)
        hybrid.shutdown()  # the next mode has another strategy; the group is ours, so this model goes on
    return _loop(model, optimizer)


def _empty_hooks(parameter: nn.Parameter) -> tuple[Any, ...]:
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    return node, node.register_prehook(lambda _: None), parameter.register_post_accumulate_grad_hook(lambda _: None)


def _loop(model: Any, optimizer: Any, *, kept: object = None) -> Callable[[], None]:
    """The step; it holds `kept`."""
    rows = torch.randn(_ROWS, _WIDTH)

    def step(_: object = kept) -> None:
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# -- profiles ------------------------------------------------------------------------------------------------------


def quickest_profile(step: Callable[[], None], num_steps: int) -> Any:
    """Of single steps, that of the one which took least: a busy machine lengthens the others."""
    profiles = []
    for _ in range(num_steps):
        profiler = cProfile.Profile(time.thread_time)
        profiler.runcall(step)
        profiles.append(pstats.Stats(profiler))
    return min(profiles, key=lambda profile: profile.total_tt)  # type: ignore[attr-defined]


def seconds_that_a_profiler_adds(num_calls: int = 50000) -> float:
    """To a built-in function, for each call of it."""

    def calls_built_in() -> None:
        for _ in range(num_calls):
            abs(1)

    profiler = cProfile.Profile(time.thread_time)
    profiler.runcall(calls_built_in)
    stats: Any = pstats.Stats(profiler)
    seconds = {name: entry[2] for (_, _, name), entry in stats.stats.items()}
    return float(seconds["<built-in method builtins.abs>"]) / num_calls


def _is_own(function: tuple[str, int, str]) -> bool:
    return function[0].startswith(_PACKAGE)


def seconds_of_torch(profile: Any, added_seconds: float) -> float:
    """Inside torch's functions that functions of `hybrid` call; waiting for the other rank is left out."""
    total = 0.0
    for function, (_, _, _, _, callers) in profile.stats.items():
        is_operation = function[0] == "~" and any(part in function[2] for part in _OF_TORCH)
        if is_operation and not any(other in function[2] for other in (*_WAITS, _PLAIN_TOO)):
            for caller, (_, times, seconds, _) in callers.items():
                if _is_own(caller):
                    total += max(0.0, seconds - times * added_seconds)
    return total


def longest(profile: Any, count: int) -> list[tuple[str, int, float]]:
    """(place, calls, own ms) of the functions of hybrid that take longest in a profiled step."""
    own = [(function, entry) for function, entry in profile.stats.items() if _is_own(function)]
    own.sort(key=lambda item: -item[1][2])
    return [
        (f"{Path(file).relative_to(_PACKAGE)}:{line} {name}", entry[1], entry[2] * 1e3)
        for (file, line, name), entry in own[:count]
    ]


def report(rows: list[dict[str, Any]]) -> None:
    heads = ("over plain ms", "us/param", "hooks ms", "operations ms", "own code ms", "to plain")
    print(f"{'mode':9} {'CPU ms':>7}", *(f"{head:>{max(9, len(head) + 1)}}" for head in heads))
    for row in rows:
        print(f"{row['mode']:9} {row['cpu_ms']:7.2f}", end="")
        if "own_ms" in row:
            print(f" {row['over_ms']:14.2f} {row['over_us_per_parameter']:9.1f} {row['hooks_ms']:9.2f}", end="")
            print(f" {row['operations_ms']:14.2f} {row['own_ms']:12.2f} {row['own_to_plain']:9.3f}", end="")
        print()
    for row in rows:
        for place, calls, ms in row.get("top", ()):
            print(f"  {row['mode']}: {ms:7.3f} ms {calls:5} calls  {place}")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
