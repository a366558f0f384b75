"""A long training in 3D stays as near to one process as one process is to itself.

Two runs that add up in another order part: each step rounds otherwise, and the next one starts from there. How fast,
nobody can say beforehand; but it can be measured: one process trains on the same batches, cut into other micro-batches.
Its distance from the run on whole batches is the noise of fp order (the largest so far, at each step: where two curves
cross they say nothing). The run in 3D has that source of noise and more, since inner products, losses and norms are
sums over ranks as well: some ten sources instead of one, which of independent errors makes about three times the
distance. BOUND leaves another three to chance. A mistake in the gradients goes far beyond it, which is tried here too:
one that AdamW does not see, a gradient of twice the size, shows in the norms.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from hybrid.cli.demo_3d import settings_3d
from hybrid.demo.corpus import read_corpus
from hybrid.demo.gpt import GPT
from tests.ranks import run_plain, run_ranks

BOUND = 10.0
BATCH, LENGTH, MAX_NORM = 16, 32, 1.0
ROUNDING = 4 * torch.finfo(torch.float32).eps  # of a loss and of a norm themselves

Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def make(num_layers: int) -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(width=64, num_layers=num_layers, num_heads=4, max_length=LENGTH)
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@functools.cache
def batches_of(steps: int) -> torch.Tensor:
    """Windows of the demo's text, [steps, batch, length + 1]."""
    text, _ = read_corpus()
    starts = torch.randint(len(text) - LENGTH, (steps * BATCH,), generator=torch.Generator().manual_seed(1))
    return torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()]).view(steps, BATCH, LENGTH + 1)


def alone(batches: torch.Tensor, num_layers: int, *, pieces: int = 1, mistake: str = "") -> Curve:
    """One process that adds up the gradients of so many micro-batches, or makes one of the mistakes of a layout."""
    model, optimizer = make(num_layers)
    if mistake == "tied":  # the stage of the embedding never hears of the head, or the other way round
        model.embedding.register_forward_hook(lambda _, __, output: output.detach())
    curve = []
    for batch in batches.long():
        optimizer.zero_grad()
        used = batch[: BATCH // 2] if mistake == "rank" else batch  # one data-parallel rank is not heard
        total = 0.0
        for piece in used.chunk(pieces):
            loss = loss_fn(model(piece[:, :-1]), piece[:, 1:]) / pieces
            loss.backward()
            total += loss.item()
        if mistake == "twice":
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad *= 2
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        curve.append((total, norm.item()))
    return curve


def in_3d(batches: torch.Tensor, num_layers: int) -> Curve:
    """pp 2 × dp_shard 2 × tp 2, ZeRO stage 2, zb-h1, 4 micro-batches: as `hybrid demo --layout 3d`."""
    settings: dict[str, Any] = {"sharding": True, "sharding_configs": {"stage": 2}, "gradient_clipping": MAX_NORM}
    strategy = hybrid.DistributedStrategy(settings | settings_3d() | {"timeout_seconds": 60})
    model, optimizer = make(num_layers)
    sample = torch.zeros(2, LENGTH, dtype=torch.long)
    wrapped = hybrid.distributed_model(model, strategy=strategy, sample=sample)
    wrapped_optimizer = hybrid.distributed_optimizer(optimizer)
    place = hybrid.get_mesh().coordinate("dp_shard")
    curve = []
    for batch in batches.long():
        own = batch.chunk(2)[place]
        result = wrapped.train_batch((own[:, :-1], own[:, 1:]), wrapped_optimizer, loss_fn=loss_fn)
        assert result.grad_norm is not None
        curve.append((result.loss.item(), result.grad_norm.item()))
    hybrid.shutdown()
    return curve


def distance(curve: Curve, plain: Curve, others: Sequence[Curve]) -> tuple[float, float]:
    """Largest distance of the losses, and of the norms, as a multiple of the noise up to that step."""
    found = []
    for what in (0, 1):
        noise = most = 0.0
        for step, values in enumerate(plain):
            apart = (abs(other[step][what] - values[what]) for other in others)
            noise = max(noise, ROUNDING * values[what], *apart)
            most = max(most, abs(curve[step][what] - values[what]) / noise)
        found.append(most)
    return found[0], found[1]


@pytest.mark.parametrize(
    ("steps", "num_layers"), [(12, 2), pytest.param(300, 4, marks=[pytest.mark.full, pytest.mark.slow])]
)
def test_3d_is_within_the_noise_of_one_process(steps: int, num_layers: int) -> None:
    """Losses and norms, at every step; and what is not right is not within it."""
    batches = batches_of(steps)
    plain = run_plain(alone, batches, num_layers, timeout_seconds=600)
    others = [run_plain(alone, batches, num_layers, pieces=pieces, timeout_seconds=600) for pieces in (2, 4)]
    curves = run_ranks(in_3d, 8, batches, num_layers, timeout_seconds=600)
    assert all(curve == curves[0] for curve in curves)
    assert plain[-1][0] < plain[0][0] - 0.5  # it has learnt something
    losses, norms = distance(curves[0], plain, others)
    print(f"{steps} steps: losses {losses:.2f}, norms {norms:.2f} times the noise; loss {curves[0][-1]} {plain[-1]}")
    assert losses < BOUND
    assert norms < BOUND
    for mistake, place in (("tied", 0), ("rank", 0), ("twice", 1)):
        wrong = run_plain(alone, batches[:16], num_layers, mistake=mistake)
        assert distance(wrong, plain[:16], others)[place] > 100 * BOUND, mistake
