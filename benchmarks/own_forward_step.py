"""One step of a pipeline whose model is cut by its own forward, beside the same model cut as a chain.

    python -m benchmarks.own_forward_step --size S --micro-batches 4 --rounds 15

Both modes train the GPT of `pipeline_step` in two stages under 1F1B, on the same batches and cut at the same place:
`chain` is an nn.Sequential of its layers, `own` a model with a forward of its own around the same layers, whose
positions are a parameter that this forward reads. Rounds are interleaved, ratios are taken within a round.

Printed: median ratios of wall and computing time with 95 % intervals (bootstrap over rounds), and the largest
difference of losses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hybrid
from benchmarks.gpt import SIZES, BenchGPT, Size, make_batch
from benchmarks.pipeline_step import ADAMW, chain_of, largest_difference, loss_fn, spread
from benchmarks.rounds import Mode, interval, launch, rank_or_none, ratios, run_rounds


class OwnForward(BenchGPT):
    """Token ids [B, T] -> logits [B, T, V]."""

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x_BTD = self.embedding(tokens_BT) + self.position.weight
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: torch.Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="S", help="S: 10.5 M parameters, M: 82 M")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="steps of each mode per round")
    arguments = parser.parse_args()
    if rank_or_none() is None:
        raise SystemExit(launch("benchmarks.own_forward_step", num_ranks=2))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = SIZES[arguments.size]
    size = replace(size, micro_batch=max(2 * size.micro_batch, arguments.micro_batches))
    block = size.num_layers * 5 // 8  # at S and M the stages' times are about equal then: the last one has the head
    modes = {
        "chain": Mode(step=build(nn.Sequential(*chain_of(size)), size, arguments.micro_batches, first=f"{block + 1}")),
        "own": Mode(step=build(own_model(size), size, arguments.micro_batches, first=f"blocks.{block}")),
    }
    run_rounds(modes, rounds=arguments.rounds, steps=arguments.steps)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, {name: (mode.cpu_seconds, mode.losses) for name, mode in modes.items()})
    if dist.get_rank() == 0:
        report(modes, everyone, arguments)
    dist.destroy_process_group()


def own_model(size: Size) -> nn.Module:
    """With the values of the chain."""
    torch.manual_seed(0)
    return OwnForward(size)


def build(model: Any, size: Size, micro_batches: int, *, first: str) -> Callable[[int], float]:
    """A step of the model; `first`: the module at which the second stage begins."""
    strategy: Any = hybrid.DistributedStrategy()
    strategy.pipeline = True
    strategy.pipeline_configs = {"degree": 2, "accumulate_steps": micro_batches, "split": [first]}
    is_chain = isinstance(model, nn.Sequential)
    sample = make_batch(size, step=0, rank=0, num_ranks=1)[0][: size.micro_batch // micro_batches]
    optimizer: Any = torch.optim.AdamW(model.parameters(), **ADAMW)
    model = hybrid.distributed_model(model, strategy=strategy, sample=None if is_chain else sample)
    optimizer = hybrid.distributed_optimizer(optimizer)
    hybrid.shutdown()  # the next mode has no strategy; the group is ours, so this model goes on

    def step(number: int) -> float:
        batch = make_batch(size, step=number, rank=0, num_ranks=1)
        return float(model.train_batch(batch, optimizer, loss_fn=loss_fn).loss.item())

    return step


def report(modes: dict[str, Mode], everyone: list[Any], arguments: argparse.Namespace) -> None:
    chain, own = modes["chain"], modes["own"]
    cpu = {name: [statistics.median(stage[name][0]) * 1e3 for stage in everyone] for name in modes}
    of_cpu = [
        sum(stage["own"][0][index] for stage in everyone) / sum(stage["chain"][0][index] for stage in everyone)
        for index in range(arguments.rounds)
    ]
    of_wall = ratios(own, chain)
    # The last stage knows the loss.
    difference = largest_difference(everyone[-1]["own"][1], everyone[-1]["chain"][1])
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"size {arguments.size}, 2 ranks, {arguments.micro_batches} micro-batches, {arguments.rounds} rounds of "
        f"{arguments.steps} steps; load at the end {load} (1, 5, 15 minutes)"
    )
    rows: list[dict[str, Any]] = []
    for name, mode in modes.items():
        row = {"mode": name, "step_ms": statistics.median(mode.wall_seconds) * 1e3, "cpu_ms": cpu[name]}
        rows.append(row)
        print(f"{name:6} step {row['step_ms']:.0f} ms, computing {' and '.join(f'{ms:.0f}' for ms in cpu[name])} ms")
    rows[-1] |= {"max_loss_difference": difference}
    for what, values in (("wall", of_wall), ("computing", of_cpu)):
        rows[-1][f"{what}_to_chain"] = (statistics.median(values), *interval(values))
        print(f"own to chain, {what} time: {spread(rows[-1][f'{what}_to_chain'])}")
    print(f"largest difference of losses {difference:.1e}")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
