"""One training step under each ZeRO stage beside its peers, in interleaved rounds of one run.

    python -m benchmarks.zero_step --size S --modes ddp,zero1,fsdp2,hybrid0,hybrid1,hybrid2,hybrid3 --rounds 10

Every mode trains the same model on the same batches (AdamW fused, fp32, plain loop, no clipping). A round runs a
few steps of each mode, in an order that rotates; the ratio to DDP is taken within the round, so a slow spell of
the machine falls on both. Printed: median ratio and 95 % interval (bootstrap over rounds), CPU seconds, live bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics

from benchmarks.rounds import Mode, interval, launch, rank_or_none, ratios, run_rounds

MODES = ("ddp", "zero1", "fsdp2", "hybrid0", "hybrid1", "hybrid2", "hybrid3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("S", "M", "tiny"), default="S", help="S: 10.5 M parameters, M: 82 M")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated; ddp is always measured")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="steps of each mode per round")
    arguments = parser.parse_args()
    chosen = list(dict.fromkeys(["ddp", *arguments.modes.split(",")]))
    unknown = [mode for mode in chosen if mode not in MODES]
    if unknown:
        parser.error(f"unknown modes {unknown}; known: {', '.join(MODES)}")
    if rank_or_none() is None:
        raise SystemExit(launch("benchmarks.zero_step", num_ranks=arguments.nproc))
    worker(arguments.size, chosen, rounds=arguments.rounds, steps=arguments.steps)


def worker(size_name: str, names: list[str], *, rounds: int, steps: int) -> None:
    import torch
    import torch.distributed as dist

    from benchmarks.gpt import SIZES

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = SIZES[size_name]
    modes = {name: build(name, size) for name in names}
    run_rounds(modes, rounds=rounds, steps=steps)
    if dist.get_rank() == 0:
        report(modes, size_name, dist.get_world_size())
    dist.destroy_process_group()


def build(name: str, size: object) -> Mode:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    import hybrid
    from benchmarks.gpt import BenchGPT, Size, make_batch

    assert isinstance(size, Size)
    torch.manual_seed(0)
    model: torch.nn.Module = BenchGPT(size)
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    if name in ("ddp", "zero1"):
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if name == "ddp":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **options)
        else:
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **options
            )
    elif name == "fsdp2":
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    else:
        strategy = hybrid.DistributedStrategy()
        strategy.sharding = True
        strategy.sharding_configs = {"stage": int(name.removeprefix("hybrid"))}
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        model = hybrid.distributed_model(model, strategy=strategy)
        optimizer = hybrid.distributed_optimizer(optimizer)
        hybrid.shutdown()  # the next mode has another strategy; the group is ours, so this model goes on

    def step(number: int) -> float:
        tokens, labels = make_batch(size, step=number, rank=dist.get_rank(), num_ranks=dist.get_world_size())
        loss = model(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def live_bytes() -> int:
        """Model state after a step: parameters and optimizer state, masters included."""
        if name.startswith("hybrid"):
            live = model.memory_bytes()
            return live["parameters"] + live["optimizer_state"]
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            state = optimizer.optim.state
        else:
            state = optimizer.state
        tensors = [*model.parameters(), *(v for s in state.values() for v in s.values() if isinstance(v, torch.Tensor))]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return sum(t.numel() * t.element_size() for t in local)

    return Mode(step=step, live_bytes=live_bytes)


def report(modes: dict[str, Mode], size_name: str, num_ranks: int) -> None:
    base = modes["ddp"]
    print(f"size {size_name}, {num_ranks} ranks, {len(base.wall_seconds)} rounds; ratios to ddp of the same round")
    heads = f"{'mode':9} {'step ms':>8} {'wall ratio':>10} {'95 % interval':>15} {'cpu ms':>7} {'state MB':>8}"
    print(f"{heads} {'max |Δ loss|':>12}")
    rows = []
    for name, mode in modes.items():
        to_ddp = ratios(mode, base)
        low, high = interval(to_ddp)
        row = {
            "mode": name,
            "step_ms": statistics.median(mode.wall_seconds) * 1e3,
            "wall_ratio": statistics.median(to_ddp),
            "wall_ratio_low": low,
            "wall_ratio_high": high,
            "cpu_ms": statistics.median(mode.cpu_seconds) * 1e3,
            "state_bytes": mode.live_bytes(),
            "max_loss_difference": max(abs(a - b) for a, b in zip(mode.losses, base.losses, strict=True)),
        }
        rows.append(row)
        print(
            f"{name:9} {row['step_ms']:8.0f} {row['wall_ratio']:10.3f} {low:7.3f}–{high:<7.3f} {row['cpu_ms']:7.0f} "
            f"{row['state_bytes'] / 1e6:8.1f} {row['max_loss_difference']:12.1e}"
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
