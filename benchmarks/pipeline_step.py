"""One training step of a model cut into two pipeline stages, beside torch's and DeepSpeed's pipelines and one process.

    python -m benchmarks.pipeline_step --size S --micro-batches 4 --rounds 10
    python -m benchmarks.pipeline_step --sleep --ranks 4

Modes: one plain process (the other rank waits, and it takes the batch in one piece), `hybrid` with the stages balanced
by measured flops, `torch.distributed.pipelining.Schedule1F1B` with as many blocks on each stage, and, if asked for by
`--modes plain,hybrid,torch,hybrid_even,deepspeed`, `hybrid` cut like torch's, and DeepSpeed's PipelineModule
(`pip install -e '.[bench]'`). All run 1F1B on the same batches (AdamW fused, fp32, no clipping), in interleaved rounds;
ratios are taken within a round.

Printed: median ratios and 95 % intervals (bootstrap over rounds), CPU seconds, live bytes at the worst moment of a step
on each stage, activations kept beside what the schedule says, bytes sent beside what layout and schedule say.

`--sleep`: stages that sleep instead of computing; the measured bubble beside that of `time_schedule`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import hybrid
from benchmarks.gpt import SIZES, BenchGPT, Size, make_batch
from benchmarks.pipeline_bubble import measure_bubbles
from benchmarks.pipeline_memory import kept_by, peak_of_last_step
from benchmarks.rounds import Mode, interval, launch, rank_or_none, ratios, run_rounds
from hybrid.contracts.schedule import make_schedule, max_in_flight
from hybrid.contracts.schedule_transfers import Payload, transfers

MODES = ("plain", "hybrid", "torch")
OPTIONAL = ("hybrid_even", "deepspeed")
_PEAK_OF, _FOLDER = "BENCHMARK_PEAK_OF", "BENCHMARK_FOLDER"
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="S", help="S: 10.5 M parameters, M: 82 M")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument(
        "--modes", default=",".join(MODES), help="comma-separated; plain and hybrid are always measured"
    )
    parser.add_argument(
        "--rows", type=int, help="rows of a step; by default 8 (S), 4 (M), at least one per micro-batch"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="steps of each mode per round")
    parser.add_argument("--sleep", action="store_true", help="measure the bubble of stages that sleep, nothing else")
    parser.add_argument("--ranks", type=int, default=2, help="with --sleep")
    arguments = parser.parse_args()
    chosen = list(dict.fromkeys(["plain", "hybrid", *arguments.modes.split(",")]))
    unknown = [mode for mode in chosen if mode not in (*MODES, *OPTIONAL)]
    if unknown:
        parser.error(f"unknown modes {unknown}; known: {', '.join((*MODES, *OPTIONAL))}")
    if rank_or_none() is None:
        raise SystemExit(start(chosen, num_ranks=arguments.ranks if arguments.sleep else 2, memory=not arguments.sleep))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if arguments.sleep:
        measure_bubbles(arguments.micro_batches, steps=arguments.steps)
    elif _PEAK_OF in os.environ:
        measure_peak(arguments, os.environ[_PEAK_OF])
    else:
        train(arguments, chosen)
    dist.destroy_process_group()


def start(names: list[str], *, num_ranks: int, memory: bool) -> int:
    """The peak of each mode in processes of its own, then the times; returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_FOLDER] = folder
        for name in names if memory else ():
            os.environ[_PEAK_OF] = name
            if status := launch("benchmarks.pipeline_step", num_ranks=num_ranks):
                return status
        os.environ.pop(_PEAK_OF, None)
        return launch("benchmarks.pipeline_step", num_ranks=num_ranks)


def peak_file(name: str) -> Path:
    return Path(os.environ[_FOLDER]) / f"{name}.{dist.get_rank()}"


def measure_peak(arguments: argparse.Namespace, name: str) -> None:
    bench = Bench(name, size_of(arguments), arguments.micro_batches)

    def prepare() -> None:
        bench.build()
        bench.step(0)

    peak_file(name).write_text(str(peak_of_last_step(prepare, lambda: bench.step(1), counts_shared=True)))
    dist.barrier()
    os._exit(0)  # see pipeline_memory


def size_of(arguments: argparse.Namespace) -> Size:
    """As many rows as a step of tensor_step has, or one for each micro-batch."""
    size = SIZES[arguments.size]
    return replace(size, micro_batch=arguments.rows or max(2 * size.micro_batch, arguments.micro_batches))


def train(arguments: argparse.Namespace, names: list[str]) -> None:
    size = size_of(arguments)
    benches = {name: Bench(name, size, arguments.micro_batches) for name in names}
    for bench in benches.values():
        bench.build()
    # What is measured of hybrid alone takes two steps, which the others make as well.
    activations, traffic = kept_activations(benches["hybrid"]), sent_bytes(benches["hybrid"])
    for name, bench in benches.items():
        for number in (2, 3) if name != "hybrid" else ():
            bench.step(number)
    modes = {name: Mode(step=bench.step, live_bytes=lambda: 0) for name, bench in benches.items()}
    run_rounds(modes, rounds=arguments.rounds, steps=arguments.steps)
    everyone: list[Any] = [None, None]
    mine = {name: (int(peak_file(name).read_text()), mode.cpu_seconds, mode.losses) for name, mode in modes.items()}
    dist.all_gather_object(everyone, (mine, activations, traffic, benches["hybrid"].layers_here()))
    if dist.get_rank() == 0:
        report(modes, everyone, arguments, size)


# -- modes -------------------------------------------------------------------------------------------------------


class Embedding(nn.Module):
    """The first layer of the chain: token ids [B, T] -> [B, T, D]."""

    def __init__(self, gpt: BenchGPT) -> None:
        super().__init__()
        self.embedding, self.position = gpt.embedding, gpt.position

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.embedding(tokens_BT) + self.position.weight
        return result


def loss_fn(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())


def chain_of(size: Size) -> list[nn.Module]:
    """The layers of the GPT that all benchmarks train."""
    torch.manual_seed(0)
    gpt = BenchGPT(size)
    return [Embedding(gpt), *gpt.blocks, gpt.norm, gpt.head]


def evenly(layers: list[nn.Module]) -> list[list[nn.Module]]:
    """As many blocks on each of two stages."""
    half = 1 + (len(layers) - 3) // 2
    return [layers[:half], layers[half:]]


class Bench:
    """One mode; `step` once it is built."""

    def __init__(self, name: str, size: Size, micro_batches: int) -> None:
        self.name, self.size, self.micro_batches = name, size, micro_batches
        self.model: Any = None
        self.step: Callable[[int], float] = lambda number: 0.0

    def build(self) -> None:
        if self.name != "plain" or dist.get_rank() == 0:
            self.step = getattr(self, f"build_{self.name}")()

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return make_batch(self.size, step=number, rank=0, num_ranks=1)

    def build_plain(self) -> Callable[[int], float]:
        model = nn.Sequential(*chain_of(self.size))
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

        def step(number: int) -> float:
            tokens, labels = self.batch(number)
            loss = loss_fn(model(tokens), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return step

    def build_hybrid_even(self) -> Callable[[int], float]:
        return self.build_hybrid(split=[len(stage) for stage in evenly(chain_of(self.size))])

    def build_hybrid(self, split: Any = "auto") -> Callable[[int], float]:
        strategy: Any = hybrid.DistributedStrategy()
        strategy.pipeline = True
        strategy.pipeline_configs = {"degree": 2, "accumulate_steps": self.micro_batches, "split": split}
        model: Any = nn.Sequential(*chain_of(self.size))
        optimizer: Any = torch.optim.AdamW(model.parameters(), **ADAMW)
        sample = self.batch(0)[0][: self.size.micro_batch // self.micro_batches]
        model = self.model = hybrid.distributed_model(
            model, strategy=strategy, sample=sample if split == "auto" else None
        )
        optimizer = hybrid.distributed_optimizer(optimizer)
        hybrid.shutdown()  # the next mode has no strategy; the group is ours, so this model goes on
        return lambda number: model.train_batch(self.batch(number), optimizer, loss_fn=loss_fn).loss.item()

    def build_torch(self) -> Callable[[int], float]:
        """Shapes given, so that the first step needs no forward to find them; the loss divided, not the gradients."""
        rank, rows = dist.get_rank(), self.size.micro_batch // self.micro_batches
        module = nn.Sequential(*evenly(chain_of(self.size))[rank])
        optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
        between = torch.empty(rows, self.size.sequence, self.size.width, device="meta", requires_grad=True)
        first = torch.empty(rows, self.size.sequence, dtype=torch.int64, device="meta")
        last = torch.empty(rows, self.size.sequence, self.size.vocabulary, device="meta", requires_grad=True)
        stage = PipelineStage(
            module,
            rank,
            2,
            torch.device("cpu"),
            input_args=(between if rank else first,),
            output_args=(last if rank else between,),
        )
        schedule = Schedule1F1B(
            stage,
            self.micro_batches,
            loss_fn=lambda logits, labels: loss_fn(logits, labels) / self.micro_batches,
            scale_grads=False,
        )

        def step(number: int) -> float:
            tokens, labels = self.batch(number)
            losses: list[torch.Tensor] = []
            if rank == 0:
                schedule.step(tokens, return_outputs=False)
            else:
                schedule.step(target=labels, losses=losses, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
            return sum(loss.item() for loss in losses)

        return step

    def build_deepspeed(self) -> Callable[[int], float]:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed
        from deepspeed.pipe import PipelineModule

        deepspeed.init_distributed("gloo")
        net = PipelineModule(chain_of(self.size), num_stages=2, loss_fn=loss_fn, partition_method="type:Block")
        rows = self.size.micro_batch // self.micro_batches
        engine, *_ = deepspeed.initialize(
            model=net,
            optimizer=torch.optim.AdamW(net.parameters(), **ADAMW),
            config={
                "train_micro_batch_size_per_gpu": rows,
                "gradient_accumulation_steps": self.micro_batches,
                "gradient_clipping": 0.0,
                "steps_per_print": 10**9,
                "zero_allow_untested_optimizer": True,
            },
        )

        def step(number: int) -> float:
            tokens, labels = self.batch(number)
            return float(engine.train_batch(iter(list(zip(tokens.split(rows), labels.split(rows), strict=True)))))

        return step

    def layers_here(self) -> tuple[int, int]:
        """First and last layer of this stage of `hybrid`."""
        (chunk,) = [self.model.hybrid_runtime.stages.staged.chunks[dist.get_rank()]]
        return chunk[0], chunk[-1]


# -- what does not depend on the machine ----------------------------------------------------------------------------


def kept_activations(bench: Bench) -> dict[str, int]:
    """Bytes that autograd keeps at the worst moment of a step on this stage, and of one micro-batch run alone."""
    rank, rows = dist.get_rank(), bench.size.micro_batch // bench.micro_batches
    with kept_by(bench.model) as step_bytes:
        bench.step(2)
    first, last = bench.layers_here()
    module = nn.Sequential(*chain_of(bench.size)[first : last + 1])
    tokens, labels = bench.batch(0)
    value = tokens[:rows]
    if rank:
        value = torch.randn(rows, bench.size.sequence, bench.size.width, requires_grad=True)
    with kept_by(module) as one_bytes:
        output = module(value)
        if rank:
            output = loss_fn(output, labels[:rows])
    schedule = make_schedule("1f1b", num_stages=2, num_micro_batches=bench.micro_batches)
    return {"in_flight": int(max_in_flight(schedule, rank)), "one": one_bytes.most, "step": step_bytes.most}


def sent_bytes(bench: Bench) -> dict[str, dict[str, int]]:
    """Axis -> bytes of one step, found and expected; counters and sizes left out."""
    schedule = make_schedule("1f1b", num_stages=2, num_micro_batches=bench.micro_batches)
    boundary = 4 * (bench.size.micro_batch // bench.micro_batches) * bench.size.sequence * bench.size.width
    expected: dict[str, int] = {}
    for one in transfers(schedule)[dist.get_rank()]:
        if one.send is not None:
            axis = "pp_forward" if one.send.payload is Payload.ACTIVATION else "pp_backward"
            expected[axis] = expected.get(axis, 0) + boundary
    with hybrid.trace() as recording:
        bench.step(3)
    found = {axis: sum(sums.sent_bytes for sums in ops.values()) for axis, ops in recording.totals().items()}
    return {"found": found, "expected": expected}


# -- report ------------------------------------------------------------------------------------------------------


def report(modes: dict[str, Mode], everyone: list[Any], arguments: argparse.Namespace, size: Size) -> None:
    plain = modes["plain"]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"size {arguments.size}, 2 ranks, {arguments.micro_batches} micro-batches of "
        f"{size.micro_batch // arguments.micro_batches} rows, {len(plain.wall_seconds)} rounds; "
        f"load at the end {load} (1, 5, 15 minutes)"
    )
    peers = [name for name in ("plain", "torch", "deepspeed") if name in modes]
    heads = "".join(f"{f'to {name}':>21}" for name in peers)
    print(f"{'mode':10} {'step ms':>7}{heads} {'cpu ms by stage':>16} {'peak MB by stage':>17} {'max |Δ loss|':>12}")
    rows = []
    for name, mode in modes.items():
        peak_bytes, cpu_seconds, losses = zip(*(stage[0][name] for stage in everyone), strict=True)
        # The last stage knows the loss; the plain one runs on rank 0.
        own = losses[0 if name == "plain" else -1]
        row: dict[str, Any] = {
            "mode": name,
            "step_ms": statistics.median(mode.wall_seconds) * 1e3,
            "least_ms": min(mode.wall_seconds) * 1e3,
            "cpu_ms": [statistics.median(seconds) * 1e3 for seconds in cpu_seconds],
            "peak_bytes": list(peak_bytes),
            "max_loss_difference": largest_difference(own, plain.losses),
        }
        for peer in peers:
            values = ratios(mode, modes[peer])
            row[f"to_{peer}"] = (statistics.median(values), *interval(values))
        if name == "hybrid":
            row |= {"activations": [stage[1] for stage in everyone], "sent": [stage[2] for stage in everyone]}
        rows.append(row)
        ratios_text = "".join(f"{spread(row[f'to_{peer}']):>21}" for peer in peers)
        cpu = " ".join(f"{value:.0f}" for value in row["cpu_ms"])
        peak = " ".join(f"{value / 1e6:.1f}" for value in peak_bytes)
        print(f"{name:10} {row['step_ms']:7.0f}{ratios_text} {cpu:>16} {peak:>17} {row['max_loss_difference']:12.1e}")
    for stage, (_, kept, sent, layers) in enumerate(everyone):
        share = kept["step"] / (kept["in_flight"] * kept["one"])
        print(
            f"hybrid, stage {stage}, layers {layers[0]} to {layers[1]}: kept {kept['step']:,} bytes, "
            f"{kept['in_flight']} in flight of {kept['one']:,} each ({share:.3f}); sent {sent['found']}, "
            f"expected {sent['expected']}"
        )
    print(json.dumps(rows))


def largest_difference(own: Sequence[float], other: Sequence[float]) -> float:
    """nan if any loss is: `max` alone would pass over it."""
    differences = [abs(a - b) for a, b in zip(own, other, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def spread(values: tuple[float, float, float]) -> str:
    return f"{values[0]:.3f} ({values[1]:.3f}–{values[2]:.3f})"


if __name__ == "__main__":
    main()
