"""Reported faults of accumulation and deferred synchronisation: gradients lost, sent too often, or left over."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import (
    ONE_STEP,
    SEVERAL_STEPS,
    assert_close,
    assert_weights,
    seeded,
    variant,
    weights_of,
    wrapped,
)
from tests.ranks import run_ranks

# -- BC-12 ------------------------------------------------------------------------------------------------------


class Scalar(nn.Module):
    """The loss is w times the mean of what comes in, so that is the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, gradients: torch.Tensor) -> torch.Tensor:
        return self.w * gradients.mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def micro_batches(rank: int) -> list[torch.Tensor]:
    return [torch.tensor([10.0 * rank + k]) for k in range(1, 6)]


def windows(pieces: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    """Accumulate 2; the fifth micro-batch is a window of its own."""
    return [pieces[0:2], pieces[2:4], pieces[4:5]]


def expected_w(world_size: int) -> list[float]:
    """w after each of the three steps of one process over everybody's micro-batches."""
    w, after = 0.0, []
    for window in zip(*(windows(micro_batches(rank)) for rank in range(world_size)), strict=True):
        w -= torch.cat([piece for of_rank in window for piece in of_rank]).mean().item()
        after.append(w)
    return after


_SENDERS = ("isend", "irecv", "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast", "reduce")


@contextlib.contextmanager
def counted_messages() -> Iterator[list[str]]:
    """Names of the functions of torch.distributed that this process calls inside."""
    seen: list[str] = []
    originals = {name: getattr(dist, name) for name in _SENDERS}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return originals[name](*args, **kwargs)

        return call

    for name in _SENDERS:
        setattr(dist, name, counting(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def one_window(way: str, model: Any, optimizer: Any, window: Sequence[torch.Tensor]) -> None:
    if way == "train_batch":
        model.train_batch(torch.cat(list(window)), optimizer, forward_step=lambda model, batch: model(batch))
        return
    if way == "calls":
        for place, piece in enumerate(window):
            model.train_batch(
                piece, optimizer, step=place == len(window) - 1, forward_step=lambda model, batch: model(batch)
            )
        return
    *earlier, last = window
    if way == "no_sync":
        with counted_messages() as messages, hybrid.trace() as recording, model.no_sync():
            for piece in earlier:
                (model(piece) / len(window)).backward()
        assert messages == []
        assert recording.calls == []
    else:
        for piece in earlier:
            (model(piece) / len(window)).backward()
    with counted_messages() as messages:
        (model(last) / len(window)).backward()
        optimizer.step()
    assert messages  # the wrapper counts: here something is sent
    optimizer.zero_grad()


def check_accumulation(shard_size: int | None) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    wanted = expected_w(world_size)
    for stage in (0, 1, 2) if shard_size is None else (1, 2):
        for way in ("train_batch", "calls", "no_sync", "repeated"):
            with variant(
                stage=stage, shard_size=shard_size, accumulate_steps=2 if way == "train_batch" else 1
            ) as strategy:
                model, optimizer = wrapped(Scalar(), sgd, strategy)
                for epoch in range(2):
                    for place, window in enumerate(windows(micro_batches(rank))):
                        one_window(way, model, optimizer, window)
                        total = epoch * wanted[-1] + wanted[place]
                        assert_close(model.w, total, ONE_STEP, f"w after window {place} of epoch {epoch} by {way}")
                assert model.memory_bytes()["gradients"] == 0


@pytest.mark.parametrize(("world_size", "shard_size"), [(2, None), (4, None), (4, 2)])
def test_bc12_deferred_sync_gives_the_sum_and_sends_nothing_meanwhile(world_size: int, shard_size: int | None) -> None:
    """Fault: no_sync saved no traffic, lost earlier micro-batches across replicas, or dropped the last window."""
    run_ranks(check_accumulation, world_size, shard_size)


def check_tail_is_dropped() -> None:
    """A loop that throws its tail away: zero_grad by model, optimizer or hand, on local and on reduced gradients."""
    rank = dist.get_rank()
    for stage in (0, 1, 2):
        for deferred in (False, True):
            for emptied in ("model", "optimizer", "to zero", "by hand"):
                with variant(stage=stage) as strategy:
                    model, optimizer = wrapped(Scalar(), sgd, strategy)
                    with model.no_sync() if deferred else contextlib.nullcontext():
                        model(torch.tensor([1000.0 + rank])).backward()
                    if emptied == "model":
                        model.zero_grad()
                    elif emptied == "optimizer":
                        optimizer.zero_grad()
                    elif emptied == "to zero":
                        optimizer.zero_grad(set_to_none=False)
                    else:
                        model.w.grad = None
                    model(torch.tensor([2.0 + 2 * rank])).backward()
                    optimizer.step()
                    assert_close(model.w, -3.0, ONE_STEP, f"w, tail emptied by {emptied}, deferred {deferred}")


def test_bc12_a_dropped_tail_leaves_nothing_for_the_next_epoch() -> None:
    """Fault: the tail of an epoch was mixed into the first step of the next."""
    run_ranks(check_tail_is_dropped, 2)


def check_mixtures() -> None:
    """Every mixture of synchronised (S) and deferred (d) backward calls before one step gives the sum."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mean = sum(10 * r for r in range(world_size)) / world_size
    for stage, shard_size in ((0, None), (2, None), (1, world_size // 2), (2, world_size // 2)):
        for pattern in ("S", "d", "dS", "Sd", "dd", "SdS", "dSd", "SS", "ddSSd"):
            with variant(stage=stage, shard_size=shard_size if world_size > 2 else None) as strategy:
                model, optimizer = wrapped(Scalar(), sgd, strategy)
                for place, kind in enumerate(pattern):
                    with model.no_sync() if kind == "d" else contextlib.nullcontext():
                        model(torch.tensor([10.0 * rank + place])).backward()
                optimizer.step()
                wanted = -sum(mean + place for place in range(len(pattern)))
                assert_close(model.w, wanted, ONE_STEP, f"w after {pattern}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_bc12_any_mixture_of_deferred_and_reduced_backwards_is_the_sum(world_size: int) -> None:
    """Fault of the same kind: the reduction overwrote what had been accumulated, or added it twice."""
    run_ranks(check_mixtures, world_size)


# -- BC-15 ------------------------------------------------------------------------------------------------------

IGNORED = -100


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def sum_and_count(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (labels != IGNORED).sum()


def tagged_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight sequences of five; the second half is rank 1's. Step 1: it is masked. Step 2: everything is."""
    generator = seeded(300 + step)
    tokens = torch.randint(0, 11, (8, 5), generator=generator)
    labels = torch.randint(0, 7, (8, 5), generator=generator)
    labels[:, 3:] = IGNORED
    labels[1] = IGNORED  # ranks have different numbers of tokens in every step
    if step == 1:
        labels[4:] = IGNORED
    if step == 2:
        labels[:] = IGNORED
    return tokens, labels


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def make_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)


def train_tagger_plain(make: Any) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    model = Tagger()
    optimizer = make(model.parameters())
    losses, weights = [], []
    for step in range(4):
        tokens, labels = tagged_batch(step)
        loss, count = sum_and_count(model(tokens), labels)
        if count > 0:
            (loss / count).backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append((loss / count.clamp(min=1)).item())
        weights.append(weights_of(model))
    return losses, weights


def check_masked_ranks() -> None:
    rank = dist.get_rank()
    for make in (make_sgd, make_adamw):
        losses, weights = train_tagger_plain(make)
        for stage in (0, 1, 2):
            for accumulate_steps, no_samples in ((1, False), (2, False), (3, True)):
                with variant(stage=stage, accumulate_steps=accumulate_steps, gradient_clipping=1e9) as strategy:
                    model, optimizer = wrapped(Tagger(), make, strategy)
                    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
                    for step in range(4):
                        tokens, labels = (tensor[4 * rank : 4 * rank + 4] for tensor in tagged_batch(step))
                        if no_samples and bool((labels == IGNORED).all()):
                            tokens, labels = tokens[:0], labels[:0]  # the rank has no sample at all
                        result = model.train_batch((tokens, labels), optimizer, scheduler, loss_fn=sum_and_count)
                        assert_close(result.loss, losses[step], SEVERAL_STEPS, f"loss of step {step}")
                        assert result.skipped == (step == 2)
                        assert math.isfinite(result.grad_norm)
                        assert_weights(model, weights[step], SEVERAL_STEPS)
                        if step == 2:
                            assert result.loss == 0
                            assert result.tokens == 0
                    assert scheduler.last_epoch == 3  # the step without tokens does not count


def test_bc15_a_rank_without_tokens_counts_for_nothing() -> None:
    """Fault: a fully masked rank made NaN of the mean, or skipped its backward so that the others waited."""
    run_ranks(check_masked_ranks, 2)


def check_rank_without_backward() -> None:
    """A plain loop in which rank 1 has nothing to do: it goes on to the step, where the ranks meet."""
    rank = dist.get_rank()
    tokens, labels = tagged_batch(0)
    plain = Tagger()
    plain_optimizer = make_sgd(plain.parameters())
    loss, _ = sum_and_count(plain(tokens[:4]), labels[:4])
    (loss / 2).backward()  # the mean over two ranks, of which one has nothing
    plain_optimizer.step()
    for stage in (0, 1, 2):
        with variant(stage=stage) as strategy:
            model, optimizer = wrapped(Tagger(), make_sgd, strategy)
            if rank == 0:
                sum_and_count(model(tokens[:4]), labels[:4])[0].backward()
            optimizer.step()
            assert_weights(model, weights_of(plain), ONE_STEP)


def test_bc15_a_rank_that_skips_its_backward_meets_the_others_at_the_step() -> None:
    """Fault: the rank with nothing to do left the others waiting in their backward."""
    run_ranks(check_rank_without_backward, 2)
