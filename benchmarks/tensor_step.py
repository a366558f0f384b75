"""One training step of a model cut over two ranks, beside torch's own way and one process, in interleaved rounds.

    python -m benchmarks.tensor_step --size S --rounds 10

Modes: one plain process (the other rank waits), `hybrid` with tensor_parallel, `torch.distributed.tensor.parallel`
with the equivalent plan; both also under sequence parallel. `--modes plain,hybrid,dtensor,deepspeed` adds AutoTP
training (`pip install -e '.[bench]'`), which leaves embedding, head and loss whole.

Each trains the same model on the same batches (AdamW fused, fp32, plain loop, no clipping). A round runs a few steps
of each mode, in an order that rotates; ratios are taken within the round, so a slow spell of the machine falls on
both. Printed: median ratios and 95 % intervals (bootstrap over rounds), CPU seconds, live bytes, and what one step of
each hybrid mode sends.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import hybrid
from benchmarks.gpt import SIZES, BenchGPT, Size, make_batch
from benchmarks.rounds import Mode, interval, launch, rank_or_none, ratios, run_rounds
from benchmarks.tensor_traffic import Traffic, measure_traffic

MODES = ("plain", "hybrid", "hybrid_sp", "dtensor", "dtensor_sp")
OPTIONAL = ("deepspeed",)
PLAN = {
    "blocks.*.query_key_value": {"style": "colwise", "fused": 3},
    "blocks.*.attention_out": "rowwise",
    "blocks.*.mlp_in": "colwise",
    "blocks.*.mlp_out": "rowwise",
    "embedding": "vocab",
    "head": "head",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="S", help="S: 10.5 M parameters, M: 82 M")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated; plain is always measured")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="steps of each mode per round")
    arguments = parser.parse_args()
    chosen = list(dict.fromkeys(["plain", *arguments.modes.split(",")]))
    unknown = [mode for mode in chosen if mode not in (*MODES, *OPTIONAL)]
    if unknown:
        parser.error(f"unknown modes {unknown}; known: {', '.join((*MODES, *OPTIONAL))}")
    if rank_or_none() is None:
        raise SystemExit(launch("benchmarks.tensor_step", num_ranks=2))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # Both ranks compute on all rows, so a step has as many as one of two data-parallel ranks in zero_step.
    size = replace(SIZES[arguments.size], micro_batch=2 * SIZES[arguments.size].micro_batch)
    built = {name: build(name, size) for name in chosen}
    modes = {name: mode for name, (mode, _) in built.items()}
    run_rounds(modes, rounds=arguments.rounds, steps=arguments.steps)
    traffic = {
        name: measure_traffic(model, size, with_sequence_parallel=name == "hybrid_sp")
        for name, (_, model) in built.items()
        if name.startswith("hybrid")
    }
    if dist.get_rank() == 0:
        report(modes, traffic, arguments.size, size)
    dist.destroy_process_group()


# -- modes -------------------------------------------------------------------------------------------------------


def build(name: str, size: Size) -> tuple[Mode, nn.Module]:
    torch.manual_seed(0)
    model: Any = BenchGPT(size)
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    if name.startswith("hybrid"):
        strategy = hybrid.DistributedStrategy()
        strategy.tensor_parallel = True
        strategy.tensor_parallel_configs = {"degree": 2, "sequence_parallel": name == "hybrid_sp", "plan": PLAN}
        optimizer: Any = torch.optim.AdamW(model.parameters(), **options)
        model = hybrid.distributed_model(model, strategy=strategy)
        optimizer = hybrid.distributed_optimizer(optimizer)
        hybrid.shutdown()  # the next mode has another strategy; the group is ours, so this model goes on
    elif name == "deepspeed":
        return Mode(step=deepspeed_step(model, size, options), live_bytes=lambda: parameter_bytes(model)), model
    else:
        if name.startswith("dtensor"):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            cut_with_dtensor(model, mesh, with_sequence_parallel=name == "dtensor_sp")
            around = loss_parallel
        # A fused update takes parameters of one kind only.
        kinds: dict[type, list[nn.Parameter]] = {}
        for parameter in model.parameters():
            kinds.setdefault(type(parameter.data), []).append(parameter)
        optimizer = torch.optim.AdamW([{"params": parameters} for parameters in kinds.values()], **options)
    is_idle = name == "plain" and dist.get_rank() != 0

    def step(number: int) -> float:
        if is_idle:
            return 0.0
        tokens, labels = make_batch(size, step=number, rank=0, num_ranks=1)
        with around():
            loss = model(tokens, labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return Mode(step=step, live_bytes=lambda: parameter_bytes(model)), model


def parameter_bytes(model: nn.Module) -> int:
    return sum(local(parameter.detach()).nbytes for parameter in model.parameters())


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def cut_with_dtensor(model: BenchGPT, mesh: DeviceMesh, *, with_sequence_parallel: bool) -> None:
    """The plan that torchtitan uses for its Llama, for this model."""
    num_ranks = mesh.size()
    for block in model.blocks:
        # A colwise cut takes rows as they lie, so each rank's queries, keys and values are brought together.
        for tensor in (block.query_key_value.weight.data, block.query_key_value.bias.data):
            parts = tensor.unflatten(0, (3, num_ranks, -1)).transpose(0, 1)
            tensor.copy_(parts.flatten(0, 2).clone())
    cut = Shard(1) if with_sequence_parallel else Replicate()
    plan: dict[str, Any] = {
        # The position is added to whole sequences.
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(input_layouts=cut, output_layouts=Shard(-1), use_local_output=False),
    }
    for index in range(len(model.blocks)):
        name = f"blocks.{index}"
        plan |= {
            f"{name}.query_key_value": ColwiseParallel(input_layouts=cut),
            f"{name}.attention_out": RowwiseParallel(output_layouts=cut),
            f"{name}.mlp_in": ColwiseParallel(input_layouts=cut),
            f"{name}.mlp_out": RowwiseParallel(output_layouts=cut),
        }
        if with_sequence_parallel:
            plan |= {f"{name}.attention_norm": SequenceParallel(), f"{name}.mlp_norm": SequenceParallel()}
    if with_sequence_parallel:
        plan["norm"] = SequenceParallel()
        plan["blocks.0"] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        )
    parallelize_module(model, mesh, plan)


def deepspeed_step(model: BenchGPT, size: Size, options: dict[str, Any]) -> Callable[[int], float]:
    """AutoTP training; rules for linear layers only."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    specs = [
        {"patterns": [r".*query_key_value\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
        {"patterns": [r".*mlp_in\.weight$"], "partition_type": "column"},
        {"patterns": [r".*attention_out\.weight$", r".*mlp_out\.weight$"], "partition_type": "row"},
    ]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, **options),
        config={
            "train_micro_batch_size_per_gpu": size.micro_batch,
            "zero_optimization": {"stage": 0},
            "zero_allow_untested_optimizer": True,
            "tensor_parallel": {
                "autotp_size": 2,
                "partition_config": {"use_default_specs": False, "layer_specs": specs},
            },
        },
    )

    def step(number: int) -> float:
        tokens, labels = make_batch(size, step=number, rank=0, num_ranks=1)
        loss = engine(tokens, labels)
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return step


# -- report ------------------------------------------------------------------------------------------------------


def report(modes: dict[str, Mode], traffic: dict[str, Traffic], size_name: str, size: Size) -> None:
    plain = modes["plain"]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"size {size_name}, 2 ranks, {len(plain.wall_seconds)} rounds; load at the end {load} (1, 5, 15 minutes)")
    heads = f"{'mode':11} {'step ms':>7} {'to plain':>20} {'to dtensor':>20} {'cpu ms':>6} {'cpu ratio':>9}"
    print(f"{heads} {'parameters':>12} {'max |Δ loss|':>12}")
    rows = []
    for name, mode in modes.items():
        peer = modes.get("dtensor_sp" if name.endswith("_sp") else "dtensor")
        compared = {"plain": ratios(mode, plain)}
        if peer is not None and name != "plain":
            compared["dtensor"] = ratios(mode, peer)
        row: dict[str, Any] = {
            "mode": name,
            "step_ms": statistics.median(mode.wall_seconds) * 1e3,
            "cpu_ms": statistics.median(mode.cpu_seconds) * 1e3,
            "cpu_to_dtensor": median_ratio(mode.cpu_seconds, (peer or mode).cpu_seconds),
            "parameter_bytes": mode.live_bytes(),
            "max_loss_difference": max(abs(a - b) for a, b in zip(mode.losses, plain.losses, strict=True)),
        }
        for other, values in compared.items():
            row[f"to_{other}"] = (statistics.median(values), *interval(values))
        rows.append(row)
        print(
            f"{name:11} {row['step_ms']:7.0f} {spread(row['to_plain']):>20} {spread(row.get('to_dtensor')):>20} "
            f"{row['cpu_ms']:6.0f} {row['cpu_to_dtensor']:9.3f} {row['parameter_bytes']:12,} "
            f"{row['max_loss_difference']:12.1e}"
        )
    for name, sent in traffic.items():
        print(f"\n{name}, one step:\n{sent.text(size)}")
    print(json.dumps(rows))


def median_ratio(own: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(own, other, strict=True))


def spread(values: tuple[float, float, float] | None) -> str:
    return "" if values is None else f"{values[0]:.3f} ({values[1]:.3f}–{values[2]:.3f})"


if __name__ == "__main__":
    main()
