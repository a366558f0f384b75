"""How long hybrid's own Python takes in a step of many tiny layers, where nothing else takes long.

    python -m benchmarks.python_overhead --layers 200 --rounds 10

Two ranks train `--layers` linear layers of width 16 (AdamW fused, plain loop) plainly, each for itself, and under each
ZeRO stage; `hooks` is plain with two empty Python hooks on each parameter, the least that works by hooks. Rounds
interleave the modes. Printed, per step and in CPU time, which a busy machine changes least:

    CPU              the least of all rounds, without a profiler
    own code         time inside the functions of `hybrid` itself, by cProfile, less what the profiler adds to a
                     function for each call of it, and for each call that it makes (both measured); what they call
                     (torch's operations, gloo) is not in it
    with its calls   the same with the built-in functions that they call, save waiting for the other rank

and the functions of `hybrid` that take longest. The last line has all of it in JSON.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="steps of each mode per round")
    parser.add_argument("--stages", default="0,1,2", help="ZeRO stages")
    parser.add_argument("--top", type=int, default=12, help="functions to print for each stage")
    arguments = parser.parse_args()
    if rank_or_none() is None:
        raise SystemExit(launch("benchmarks.python_overhead", num_ranks=2))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names = ["plain", "hooks", *(f"stage {stage}" for stage in arguments.stages.split(","))]
    steps = {name: build(name, arguments.layers) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(-1, arguments.rounds):  # round -1 warms up
        for name, step in steps.items():
            dist.barrier()
            begin = time.process_time()
            for _ in range(arguments.steps):
                step()
            if round_number >= 0:
                seconds[name].append((time.process_time() - begin) / arguments.steps)
    plain_seconds = min(seconds["plain"])
    added = seconds_that_a_profiler_adds()
    rows = []
    for name, step in steps.items():
        row: dict[str, Any] = {"mode": name, "cpu_ms": min(seconds[name]) * 1e3}
        if name.startswith("stage"):
            num_steps = arguments.rounds * arguments.steps
            profile = profiled(step, num_steps)
            own, called = own_seconds(profile, added)
            row |= {"own_ms": own / num_steps * 1e3, "own_to_plain": own / num_steps / plain_seconds}
            row |= {"called_ms": called / num_steps * 1e3, "top": longest(profile, num_steps, arguments.top)}
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


def profiled(step: Callable[[], None], num_steps: int) -> pstats.Stats:
    profiler = cProfile.Profile(time.process_time)
    profiler.enable()
    for _ in range(num_steps):
        step()
    profiler.disable()
    return pstats.Stats(profiler)


def seconds_that_a_profiler_adds(num_calls: int = 50000) -> tuple[float, float, float]:
    """Of CPU time, to a Python function per call of it, to any function per call that it makes, to a built-in one."""

    def nothing() -> None:
        pass

    def calls_nothing() -> None:
        for _ in range(num_calls):
            nothing()

    def calls_built_in() -> None:
        for _ in range(num_calls):
            abs(1)

    def per_call(many: Callable[[], None], called: str) -> tuple[float, float]:
        begin = time.process_time()
        many()
        bare = time.process_time() - begin
        profiler = cProfile.Profile(time.process_time)
        profiler.runcall(many)
        stats: Any = pstats.Stats(profiler)
        seconds = {name: entry[2] for (_, _, name), entry in stats.stats.items()}
        return seconds[called] / num_calls, max(0.0, seconds[many.__name__] - bare) / num_calls

    of_nothing, making_a_call = per_call(calls_nothing, "nothing")
    of_built_in, _ = per_call(calls_built_in, "<built-in method builtins.abs>")
    return of_nothing, making_a_call, of_built_in


def _is_own(function: tuple[str, int, str]) -> bool:
    return function[0].startswith(_PACKAGE)


def own_seconds(profile: Any, added: tuple[float, float, float]) -> tuple[float, float]:
    """(inside functions of hybrid, inside built-in functions that they call), waiting left out."""
    of_call, making_a_call, of_built_in = added
    own = called = 0.0
    for function, (_, num_calls, seconds, _, callers) in profile.stats.items():
        if _is_own(function):
            own += seconds - num_calls * of_call
        for caller, (_, times, seconds_from_there, _) in callers.items():
            if _is_own(caller):
                own -= times * making_a_call
                if function[0] == "~" and not any(wait in function[2] for wait in _WAITS):
                    called += seconds_from_there - times * of_built_in
    return own, called


def longest(profile: Any, num_steps: int, count: int) -> list[tuple[str, float, float]]:
    """(place, calls per step, own ms per step) of the functions of hybrid that take longest."""
    own = [(function, entry) for function, entry in profile.stats.items() if _is_own(function)]
    own.sort(key=lambda item: -item[1][2])
    return [
        (
            f"{Path(file).relative_to(_PACKAGE)}:{line} {name}",
            entry[1] / num_steps,
            entry[2] / num_steps * 1e3,
        )
        for (file, line, name), entry in own[:count]
    ]


def report(rows: list[dict[str, Any]]) -> None:
    print(f"{'mode':9} {'CPU ms':>8} {'own code ms':>12} {'to plain':>9} {'with its calls ms':>18}")
    for row in rows:
        if "own_ms" not in row:
            print(f"{row['mode']:9} {row['cpu_ms']:8.2f}")
            continue
        both = row["own_ms"] + row["called_ms"]
        print(f"{row['mode']:9} {row['cpu_ms']:8.2f} {row['own_ms']:12.2f} {row['own_to_plain']:9.3f} {both:18.2f}")
    for row in rows:
        for place, calls, ms in row.get("top", ()):
            print(f"  {row['mode']}: {ms:7.3f} ms {calls:7.1f} calls  {place}")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
