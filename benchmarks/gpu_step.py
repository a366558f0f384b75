"""One training step on one CUDA device: plain torch, DDP, FSDP2 and hybrid's ZeRO stages, as they are and compiled.

    python -m benchmarks.gpu_step                                a GPT of 1.1 B parameters in bf16
    python -m benchmarks.gpu_step --device cpu --size tiny       the same flow on any machine, to see that it runs

One rank: nothing is sent, so what is measured is what each engine costs beside plain torch. Every mode trains the same
model on the same batches (AdamW fused, fp32 weights or masters, computing in bf16) in a process of its own:

    plain, ddp    autocast                fsdp2    MixedPrecisionPolicy, each block and the whole
    hybrid0..3    amp level O2            +compile    each block by itself (hybrid: strategy.compile)

Then `parity`: a small model in fp32 through plain torch and every stage, whose losses must agree; on a CUDA device
under TORCH_CUDA_SANITIZER=1, which ends it where kernels on two streams use one memory unordered. The last line printed
has all in JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hybrid
from benchmarks import gpt
from benchmarks.gpt import BenchGPT, Size, make_batch

SIZES = {
    "1B": Size(width=2048, num_layers=20, num_heads=16, vocabulary=32768, sequence=1024, micro_batch=4),
    **gpt.SIZES,
}
ENGINES = ("plain", "ddp", "fsdp2", "hybrid0", "hybrid1", "hybrid2", "hybrid3")
MODES = (*ENGINES, *(f"{engine}+compile" for engine in ENGINES))
NEEDED_BYTES = {"1B": 40 * 2**30}
_PARITY_STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=tuple(SIZES), default="1B", help="1B: 1.1 B parameters")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each mode")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument(
        "--backend", help="of torch.compile; inductor on cuda, aot_eager (no kernels) on cpu by default"
    )
    parser.add_argument("--turn", help=argparse.SUPPRESS)  # one mode, in this process
    arguments = parser.parse_args()
    arguments.backend = arguments.backend or ("inductor" if arguments.device == "cuda" else "aot_eager")
    modes = arguments.modes.split(",")
    if unknown := [mode for mode in modes if mode not in MODES]:
        parser.error(f"unknown modes {', '.join(unknown)}; known: {', '.join(MODES)}")
    if missing := what_is_missing(arguments.device, arguments.size):
        sys.exit(missing)
    if arguments.turn:
        print(json.dumps(parity(arguments) if arguments.turn == "parity" else measure(arguments.turn, arguments)))
        return
    rows = [turn(mode, arguments) for mode in modes]
    rows.append(turn("parity", arguments))
    print(f"{device_name(arguments.device)}, torch {torch.__version__}, size {arguments.size}, bf16")
    print(as_text(rows))
    print(json.dumps(rows))


def what_is_missing(device: str, size: str) -> str:
    """Why this cannot run here, and what can; empty if nothing is missing."""
    elsewhere = "the same flow on this machine: --device cpu --size tiny"
    if device == "cpu":
        return ""
    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        return (
            f"gpu_step needs one CUDA device, and torch sees none here (torch {torch.__version__}, built {built}): run "
            f"it on a machine with an NVIDIA GPU of {NEEDED_BYTES['1B'] // 2**30} GiB or more (size 1B) and torch for "
            f"CUDA; {elsewhere}"
        )
    memory, needed = torch.cuda.get_device_properties(0).total_memory, NEEDED_BYTES.get(size, 0)
    if memory < needed:
        return (
            f"size {size} needs about {needed / 2**30:.0f} GiB, and {torch.cuda.get_device_name(0)} has "
            f"{memory / 2**30:.0f}: take --size M"
        )
    return ""


def turn(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One mode in a process of its own, which begins with an empty device."""
    shown = [f"--{name}={getattr(arguments, name)}" for name in ("device", "size", "steps", "warmup", "backend")]
    command = [sys.executable, "-m", "benchmarks.gpu_step", f"--turn={mode}", *shown]
    watched = {"TORCH_CUDA_SANITIZER": "1"} if mode == "parity" and arguments.device == "cuda" else {}
    done = subprocess.run(command, env={**os.environ, **watched}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{mode} failed:\n{done.stderr[-4000:]}")
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


# -- one mode -----------------------------------------------------------------------------------------------------


def measure(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Median seconds of a step, peak bytes of the device, and the losses."""
    size, device = SIZES[arguments.size], torch.device(arguments.device)
    step = start(mode, size, device, backend=arguments.backend)
    losses = []
    for number in range(arguments.warmup):
        losses.append(step(number).item())
    seconds = []
    for number in range(arguments.warmup, arguments.warmup + arguments.steps):
        wait(device)
        began = time.perf_counter()
        loss = step(number)
        wait(device)
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    finish()
    peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    tokens = size.micro_batch * size.sequence
    median = statistics.median(seconds)
    return {
        "mode": mode,
        "step_seconds": median,
        "tokens_per_second": tokens / median,
        "peak_bytes": peak_bytes,
        "losses": losses,
    }


def start(mode: str, size: Size, device: torch.device, *, backend: str) -> Callable[[int], torch.Tensor]:
    """A function that trains one step, and returns its loss."""
    engine, _, compiled = mode.partition("+")
    torch.manual_seed(0)
    with device:
        model: Any = BenchGPT(size)
    around: AbstractContextManager[Any] = nullcontext()
    if not engine.startswith("hybrid"):
        for block in model.blocks if compiled else ():
            block.compile(backend=backend)
        around = torch.autocast(device.type, torch.bfloat16) if engine != "fsdp2" else around
        model = as_peer(engine, model, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        model = hybrid.distributed_model(
            model, strategy=strategy_of(int(engine[-1]), bool(compiled), backend, amp=True)
        )
        optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))

    def step(number: int) -> torch.Tensor:
        tokens, labels = (part.to(device) for part in make_batch(size, step=number, rank=0, num_ranks=1))
        with around:
            loss: torch.Tensor = model(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def as_peer(engine: str, model: Any, device: torch.device) -> Any:
    """The model under torch's own engines, alone in their group."""
    if engine == "plain":
        return model
    with tempfile.NamedTemporaryFile(prefix="hybrid-gpu-step-") as file:
        store = dist.FileStore(file.name, 1)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
        if engine == "ddp":
            return DistributedDataParallel(model)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)


def strategy_of(stage: int, compiled: bool, backend: str, *, amp: bool) -> hybrid.DistributedStrategy:
    strategy = hybrid.DistributedStrategy(sharding=True, sharding_configs={"stage": stage})
    if amp:
        strategy.amp = True
        strategy.amp_configs = {"dtype": "bfloat16", "level": "O2"}
    if compiled:
        strategy.compile = True
        strategy.compile_configs = {"backend": backend}
    return strategy


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def finish() -> None:
    if hybrid.is_initialized():
        hybrid.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


# -- parity -------------------------------------------------------------------------------------------------------


def parity(arguments: argparse.Namespace) -> dict[str, Any]:
    """Losses of a small model in fp32: the largest difference of any stage to plain torch."""
    device, size = torch.device(arguments.device), SIZES["tiny"]

    def losses(stage: int | None) -> list[float]:
        torch.manual_seed(0)
        with device:
            model: nn.Module = BenchGPT(size)
        if stage is not None:
            model = hybrid.distributed_model(model, strategy=strategy_of(stage, False, arguments.backend, amp=False))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        optimizer = optimizer if stage is None else hybrid.distributed_optimizer(optimizer)
        found = []
        for number in range(_PARITY_STEPS):
            loss = model(*(part.to(device) for part in make_batch(size, step=number, rank=0, num_ranks=1)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        finish()
        return found

    plain = losses(None)
    differences = {
        f"stage {stage}": max(abs(one - other) for one, other in zip(losses(stage), plain, strict=True))
        for stage in (0, 1, 2, 3)
    }
    if max(differences.values()) > 1e-4:
        sys.exit(f"losses differ from those of plain torch: {differences}")
    sanitizer = os.environ.get("TORCH_CUDA_SANITIZER") == "1"
    return {"mode": "parity", "max_loss_difference": max(differences.values()), "sanitizer": sanitizer}


def as_text(rows: list[dict[str, Any]]) -> str:
    *modes, checked = rows
    lines = [f"{'mode':18}{'ms/step':>10}{'tokens/s':>12}{'to plain':>10}{'peak GiB':>10}{'last loss':>11}"]
    plain = next((row["step_seconds"] for row in modes if row["mode"] == "plain"), None)
    for row in modes:
        ratio = f"{row['step_seconds'] / plain:.3f}" if plain else "-"
        peak = f"{row['peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else "-"
        lines.append(
            f"{row['mode']:18}{row['step_seconds'] * 1e3:10.1f}{row['tokens_per_second']:12,.0f}{ratio:>10}{peak:>10}"
            f"{row['losses'][-1]:11.4f}"
        )
    watched = "under the CUDA sanitizer" if checked["sanitizer"] else "without the CUDA sanitizer, which needs CUDA"
    lines.append(f"parity in fp32, {watched}: losses within {checked['max_loss_difference']:.1e} of plain torch")
    return "\n".join(lines)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(0) if device == "cuda" else "cpu"


if __name__ == "__main__":
    main()
