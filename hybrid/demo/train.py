"""Trains the byte-level GPT: `hybrid demo` runs it; `hybrid run --nproc 4 -m hybrid.demo.train` and
torchrun do, too.

The strategy is the file given to `hybrid run --strategy`, or the defaults. With `--resume DIR` it saves into that
folder, and goes on from the newest complete checkpoint there.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

import hybrid
from hybrid import shims
from hybrid.demo.corpus import ByteWindows, read_corpus
from hybrid.demo.gpt import DEMO_LENGTH, GPT
from hybrid.demo.progress import Finished, Memory, ProgressWriter, Started, StepDone

if TYPE_CHECKING:
    from hybrid.compose.model import DistributedModel
    from hybrid.data.sampler import DistributedBatchSampler

__all__: list[str] = []

NUM_HELD_OUT_WINDOWS = 96
MEMORY_EVERY_STEPS = 10
KEPT_SAVES = 2

Batch = tuple[torch.Tensor, torch.Tensor]  # bytes [B, T] and the bytes that follow them [B, T]


def main() -> None:
    options = read_options()
    train_text, held_out_text = read_corpus()
    train_set = ByteWindows(train_text, length=options.length)
    held_out_set = evenly_spaced(ByteWindows(held_out_text, length=options.length))

    torch.manual_seed(0)
    model = hybrid.distributed_model(GPT(max_length=options.length))
    optimizer = hybrid.distributed_optimizer(
        torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, options.steps))
    sampler = hybrid.DistributedBatchSampler(train_set, options.batch, shuffle=True, drop_last=True, seed=0)

    directory = hybrid.resume_directory()
    loaded = hybrid.load_checkpoint(None, model, optimizer, lr_scheduler=scheduler, sampler=sampler)
    first_step = loaded.step  # 0: nothing was saved so far
    batches = endless(train_set, sampler)

    mesh = hybrid.get_mesh()
    progress = ProgressWriter(rank=mesh.rank)
    start_loss = evaluate(model, held_out_set, options.batch)
    if mesh.rank == 0:
        progress.write(
            Started(
                num_parameters=sum(parameter.numel() for parameter in model.parameters()),
                train_bytes=len(train_text),
                held_out_bytes=len(held_out_text),
                held_out_loss=start_loss,
            )
        )
        when = f"after step {first_step}" if first_step else "before training"
        print(f"held-out loss {when}: {start_loss:.3f} nats per byte")

    begun = last = time.perf_counter()
    for step in range(first_step + 1, options.steps + 1):
        with hybrid.trace() as traffic:
            result = model.train_batch(next(batches), optimizer, lr_scheduler=scheduler, loss_fn=next_byte_loss)
        now = time.perf_counter()
        if mesh.rank == 0:
            done = StepDone(step=step, loss=result.loss.item(), tokens_per_second=result.tokens / (now - last))
            progress.write(done)
            if step % 10 == 0 or step == options.steps:
                print(f"step {step}: loss {done.loss:.3f}, {done.tokens_per_second:,.0f} tokens/s")
        if step % MEMORY_EVERY_STEPS == 1 or step == first_step + 1:
            progress.write(memory_of(model, mesh.rank))
        last = now
        if directory is not None and (step % options.save_every == 0 or step == options.steps):
            hybrid.save_checkpoint(
                directory, model, optimizer, step=step, lr_scheduler=scheduler, sampler=sampler, keep_last=KEPT_SAVES
            )
            last = time.perf_counter()
    train_seconds = time.perf_counter() - begun

    end_loss = evaluate(model, held_out_set, options.batch)
    # Gradients live from backward to step only, so the last word on memory comes from between the two.
    forward = MeasuredForward()
    model.train_batch(next(batches), optimizer, forward_step=forward, step=False)
    progress.write(memory_of(model, mesh.rank, activation_bytes=forward.kept_bytes))
    if mesh.rank == 0:
        print(f"held-out loss after training: {end_loss:.3f} nats per byte")
        assert forward.micro_batch is not None, "train_batch has called it"
        plain_forward = MeasuredForward()
        plain_forward(GPT(max_length=options.length).to(mesh.device), forward.micro_batch)
        finished = Finished(
            held_out_loss=end_loss,
            sent_bytes=traffic.sent_bytes(),
            plain_activation_bytes=plain_forward.kept_bytes,
            train_seconds=train_seconds,
        )
        progress.write(finished)
    hybrid.shutdown()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hybrid.demo.train", description="A byte-level GPT.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank and step")
    parser.add_argument("--length", type=int, default=DEMO_LENGTH, help="bytes per sequence")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints, under --resume DIR")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="largest learning rate")
    return parser.parse_args()


def evenly_spaced(windows: ByteWindows) -> Subset[Batch]:
    """A few windows from all over the held-out text."""
    num_kept = min(NUM_HELD_OUT_WINDOWS, len(windows))
    return Subset(windows, [index * len(windows) // num_kept for index in range(num_kept)])


def endless(dataset: ByteWindows, sampler: DistributedBatchSampler) -> Iterator[Batch]:
    """This rank's batches, epoch after epoch."""
    # A loader draws a number at the begin of each pass, and a resumed pass begins once more: not from the random
    # state of the training.
    loader: DataLoader[Batch] = DataLoader(dataset, batch_sampler=sampler, generator=torch.Generator())
    while True:
        yield from loader


def evaluate(model: DistributedModel, dataset: Subset[Batch], batch_size: int) -> float:
    """Mean loss over the whole set, each sample once, whatever the number of ranks."""
    sampler = hybrid.DistributedBatchSampler(dataset, batch_size)
    loss_sum, num_bytes = 0.0, 0.0
    for batch in DataLoader(dataset, batch_sampler=sampler, generator=torch.Generator()):
        result = model.eval_batch(batch, loss_fn=next_byte_loss)
        loss_sum += result.loss.item() * result.count.item()
        num_bytes += result.count.item()
    return loss_sum / num_bytes


def next_byte_loss(logits_BTV: torch.Tensor, next_BT: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits_BTV.flatten(0, 1), next_BT.flatten())


def lr_factor(step: int, num_steps: int) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine down to a tenth."""
    warm_up = max(1, num_steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, num_steps - warm_up)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


class KeptMemory(shims.TorchDispatchMode):
    """Notes the memory that operations inside it take; `num_bytes` is how much of it is held still.

    Around a forward: what it keeps for backward. torch's hooks for saved tensors would not show what selective
    recompute holds by itself. Parameters do not count: they were there before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._taken: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if StorageWeakRef(storage) not in given:  # else a view, or written in place
                self._taken[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def num_bytes(self) -> int:
        return sum(size for storage, size in self._taken.items() if not storage.expired())


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


class MeasuredForward:
    """Computes the loss of a micro-batch, as a `forward_step`, and counts what that keeps for backward."""

    def __init__(self) -> None:
        self.kept_bytes = 0
        self.micro_batch: Batch | None = None

    def __call__(self, model: nn.Module, micro_batch: Batch) -> torch.Tensor:
        inputs, labels = self.micro_batch = micro_batch
        with KeptMemory() as memory:
            loss = next_byte_loss(model(inputs), labels)
        self.kept_bytes = max(self.kept_bytes, memory.num_bytes())
        return loss


def memory_of(model: DistributedModel, rank: int, *, activation_bytes: int | None = None) -> Memory:
    live = model.memory_bytes()
    return Memory(
        rank=rank,
        parameter_bytes=live["parameters"],
        gradient_bytes=live["gradients"],
        optimizer_bytes=live["optimizer_state"],
        activation_bytes=activation_bytes,
        resident_bytes=psutil.Process().memory_info().rss,
        host_bytes=sum(size for name, size in live.items() if name.startswith("host_")),
    )


if __name__ == "__main__":
    main()
