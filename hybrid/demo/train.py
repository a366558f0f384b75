"""Trains the byte-level GPT: `hybrid demo` runs it; `hybrid run --nproc 4 -m hybrid.demo.train` and
torchrun do, too.

The strategy is the file given to `hybrid run --strategy`, or the defaults. With `--resume DIR` it saves into that
folder, and goes on from the newest complete checkpoint there.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import psutil
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

import hybrid
from hybrid.compose import context
from hybrid.demo.actions import HeardActions, KeptByForwards, heard, sent_by_axis
from hybrid.demo.corpus import ByteWindows, read_corpus
from hybrid.demo.gpt import DEMO_HEADS, DEMO_LENGTH, GPT
from hybrid.demo.kept_memory import KeptMemory
from hybrid.demo.one_process import plain_losses
from hybrid.demo.progress import Finished, Memory, ProgressWriter, Started, StepDone
from hybrid.launch.variables import STRATEGY_VARIABLE
from hybrid.strategy import DistributedStrategy, ResolvedStrategy

if TYPE_CHECKING:
    from hybrid.compose.model import DistributedModel
    from hybrid.data.sampler import DistributedBatchSampler

__all__: list[str] = []

NUM_HELD_OUT_WINDOWS = 96
MEMORY_EVERY_STEPS = 10
WATCHED_STEPS = 5  # the last ones, for the bubble
KEPT_SAVES = 2

Batch = tuple[torch.Tensor, torch.Tensor]  # bytes [B, T] and the bytes that follow them [B, T]


def main() -> None:
    options = read_options()
    train_text, held_out_text = read_corpus()
    train_set = ByteWindows(train_text, length=options.length)
    strategy = context.foresee(None)
    # The micro-batches of a pipeline want a sequence each, also in the last batch of an evaluation.
    multiple = 1 if strategy.pipeline is None else options.batch * strategy.data_parallel_size
    held_out_set = evenly_spaced(ByteWindows(held_out_text, length=options.length), multiple=multiple)

    plain = new_model(options)
    num_parameters = sum(parameter.numel() for parameter in plain.parameters())
    sample = torch.zeros(max(1, options.batch // strategy.accumulate_steps), options.length, dtype=torch.long)
    model = hybrid.distributed_model(plain, sample=sample)
    optimizer = hybrid.distributed_optimizer(new_optimizer(model, options))
    scheduler = new_scheduler(optimizer, options)
    sampler = hybrid.DistributedBatchSampler(train_set, options.batch, shuffle=True, drop_last=True, seed=0)

    directory = hybrid.resume_directory()
    loaded = hybrid.load_checkpoint(None, model, optimizer, lr_scheduler=scheduler, sampler=sampler)
    first_step = loaded.step  # 0: nothing was saved so far
    batches = endless(train_set, sampler)

    mesh = hybrid.get_mesh()
    progress = ProgressWriter(rank=mesh.rank)
    if mesh.rank == 0 and strategy.pipeline is not None:
        from hybrid.demo.layout import layout_of  # the other ranks start without the planner

        own = DistributedStrategy.load(os.environ[STRATEGY_VARIABLE])
        progress.write(
            layout_of(own, world_size=mesh.world_size, batch=options.batch, length=options.length, heads=options.heads)
        )
    start_loss = evaluate(model, held_out_set, options.batch)
    if mesh.rank == 0:
        progress.write(
            Started(
                num_parameters=num_parameters,
                train_bytes=len(train_text),
                held_out_bytes=len(held_out_text),
                held_out_loss=start_loss,
            )
        )
        when = f"after step {first_step}" if first_step else "before training"
        print(f"held-out loss {when}: {start_loss:.3f} nats per byte")

    losses: list[float] = []
    begun = last = time.perf_counter()
    for step in range(first_step + 1, options.steps + 1):
        actions = HeardActions()
        is_watched = strategy.pipeline is not None and step > options.steps - WATCHED_STEPS
        with hybrid.trace() as traffic, heard(actions) if is_watched else nullcontext():
            result = model.train_batch(next(batches), optimizer, lr_scheduler=scheduler, loss_fn=next_byte_loss)
        now = time.perf_counter()
        if is_watched:
            progress.write(actions.stepped(rank=mesh.rank, sent_bytes=sent_by_axis(traffic)))
        if mesh.rank == 0:
            done = StepDone(step=step, loss=result.loss.item(), tokens_per_second=result.tokens / (now - last))
            losses.append(done.loss)
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
    batch = next(batches)
    activation_bytes = accumulate(model, optimizer, batch)
    progress.write(memory_of(model, mesh.rank, activation_bytes=activation_bytes))
    device = mesh.device
    hybrid.shutdown()
    if mesh.rank == 0:
        print(f"held-out loss after training: {end_loss:.3f} nats per byte")
        own_inputs, own_labels = (part[: len(sample)] for part in batch)
        plain_forward = MeasuredForward()
        plain_forward(new_model(options).to(device), (own_inputs, own_labels))
        compared = min(options.compare, options.steps) if first_step == 0 else 0
        progress.write(
            Finished(
                held_out_loss=end_loss,
                sent_bytes=traffic.sent_bytes(),
                plain_activation_bytes=plain_forward.kept_bytes,
                train_seconds=train_seconds,
                losses=losses[:compared],
                plain_losses=alone(options, train_set, strategy, steps=compared) if compared else [],
            )
        )


def alone(
    options: argparse.Namespace, train_set: ByteWindows, strategy: ResolvedStrategy, *, steps: int
) -> list[float]:
    """The losses of one process in fp32, on the batches of all ranks."""
    torch.set_num_threads(os.cpu_count() or 1)  # the other ranks have left
    model = new_model(options)
    optimizer = new_optimizer(model, options)
    clipping = strategy.gradient_clipping
    return plain_losses(
        model,
        optimizer,
        new_scheduler(optimizer, options),
        train_set,
        batch=options.batch * strategy.data_parallel_size,
        steps=steps,
        max_norm=None if clipping is None else clipping.max_norm,
        loss_fn=next_byte_loss,
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hybrid.demo.train", description="A byte-level GPT.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank and step")
    parser.add_argument("--length", type=int, default=DEMO_LENGTH, help="bytes per sequence")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints, under --resume DIR")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="largest learning rate")
    parser.add_argument("--heads", type=int, default=DEMO_HEADS, help="of attention, which tensor parallel shares out")
    parser.add_argument("--compare", type=int, default=0, help="first steps that one process takes as well, at the end")
    return parser.parse_args()


def new_model(options: argparse.Namespace) -> GPT:
    """With the same weights on every rank and in every run."""
    torch.manual_seed(0)
    return GPT(max_length=options.length, num_heads=options.heads)


def new_optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)


def new_scheduler(optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, options.steps))


def evenly_spaced(windows: ByteWindows, *, multiple: int) -> Subset[Batch]:
    """A few windows from all over the held-out text, in whole batches of `multiple`."""
    num_kept = min(max(1, NUM_HELD_OUT_WINDOWS // multiple) * multiple, len(windows))
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


class MeasuredForward:
    """Computes the loss of a micro-batch, as a `forward_step`, and counts what that keeps for backward."""

    def __init__(self) -> None:
        self.kept_bytes = 0

    def __call__(self, model: nn.Module, micro_batch: Batch) -> torch.Tensor:
        inputs, labels = micro_batch
        with KeptMemory() as memory:
            loss = next_byte_loss(model(inputs), labels)
        self.kept_bytes = max(self.kept_bytes, memory.num_bytes())
        return loss


def accumulate(model: DistributedModel, optimizer: torch.optim.Optimizer, batch: Batch) -> int:
    """Forward and backward without a step; bytes that this rank keeps for backward where it keeps most."""
    stages = model.hybrid_runtime.stages
    if stages is None:
        forward = MeasuredForward()
        model.train_batch(batch, optimizer, forward_step=forward, step=False)
        return forward.kept_bytes
    kept = KeptByForwards()
    with heard(kept):
        model.train_batch(batch, optimizer, loss_fn=next_byte_loss, step=False)
    return kept.kept_bytes * stages.runner.peak_in_flight


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
