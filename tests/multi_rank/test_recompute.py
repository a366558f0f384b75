"""Recompute changes no number, whatever the stage; and it computes again exactly what it says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import assert_close, own_part, seeded, strategy_of
from tests.ranks import run_ranks

STAGES = (0, 1, 2, 3)
WIDTH = 6
TOLERANCE = 1e-12  # fp64


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.linear, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        COUNTS[id(self)] += 1
        return inputs + self.dropout(self.out(torch.tanh(self.linear(self.norm(inputs))))) * scale


COUNTS: Counter[int] = Counter()


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden, scale=0.7)
        return self.last(hidden)


class Nested(nn.Module):
    """A stack inside a module of its own, with parameters of its own, that reads a parameter of a block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.body = Body()
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(inputs))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs * self.gain
        for block in self.blocks:
            hidden = block(hidden)
        return hidden * self.blocks[0].out.bias


def with_recompute(stage: int, configs: dict[str, Any] | None, **settings: Any) -> hybrid.DistributedStrategy:
    strategy = strategy_of(stage=stage, bucket_bytes=400, timeout_seconds=8, **settings)
    if configs is not None:
        strategy.recompute = True
        strategy.recompute_configs = configs
    return strategy


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(20 + step)
    return (
        torch.randn(8, WIDTH, generator=generator).double(),
        torch.randn(8, 2, generator=generator).double(),
    )


def train(model: Any, optimizer: Any, *, own: bool, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        inputs, labels = (own_part(t) if own else t for t in batch(step))
        loss = functional.mse_loss(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


CONFIGS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "selective": {"policy": "selective"},
    "by class": {"units": ["Block"]},
    "by name": {"units": ["blocks.1", "blocks.3"]},
    "parts": {"units": ["Linear"]},
    "without rng": {"preserve_rng": False},
}


def parity(build: Any, configs: dict[str, dict[str, Any]]) -> None:
    plain = build().double()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), own=False)
    for stage in STAGES:
        for what, config in configs.items():
            for prefetch in (0, 2) if stage == 3 else (1,):
                model = hybrid.distributed_model(build().double(), strategy=with_recompute(stage, config))
                optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
                train(model, optimizer, own=True)
                state = model.full_state_dict()
                for name, value in plain.state_dict().items():
                    where = f"{name}, stage {stage}, {what}, prefetch {prefetch}"
                    assert_close(state[name], value, TOLERANCE, where)
                hybrid.shutdown()


def test_recompute_changes_no_number() -> None:
    """Full and selective, units by class and by name, parts of sharding units, at every stage."""
    run_ranks(parity, 2, Net, CONFIGS)


def test_recompute_around_several_sharding_units() -> None:
    """The recomputed module holds three sharding units, a parameter of its own, and reads one of theirs."""
    run_ranks(
        parity, 2, Nested, {"outer": {"units": ["Body"]}, "outer selective": {"units": ["body"], "policy": "selective"}}
    )


def counted() -> None:
    for stage in STAGES:
        for config, wanted in (
            (None, [1, 1, 1, 1]),
            ({}, [2, 2, 2, 2]),
            ({"policy": "selective"}, [2, 2, 2, 2]),
            ({"units": ["blocks.1", "blocks.3"]}, [1, 2, 1, 2]),
            ({"units": ["Block"]}, [2, 2, 2, 2]),
        ):
            model = hybrid.distributed_model(Net().double(), strategy=with_recompute(stage, config))
            optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(2):
                COUNTS.clear()
                train(model, optimizer, own=True, steps=1)
                assert [COUNTS[id(block)] for block in model.blocks] == wanted, (stage, config)
            COUNTS.clear()
            with torch.no_grad():
                model(batch(0)[0])
            assert [COUNTS[id(block)] for block in model.blocks] == [1] * 4
            hybrid.shutdown()


def test_forwards_per_unit() -> None:
    """Two forwards a step for a recomputed unit, one for the others, one without gradients."""
    run_ranks(counted, 2)


def traffic() -> None:
    """Recompute gathers nothing more: the second forward finds what backward has gathered."""
    sent = {}
    for what, config in (("off", None), ("full", {}), ("selective", {"policy": "selective"})):
        model = hybrid.distributed_model(Net().double(), strategy=with_recompute(3, config, prefetch=1))
        optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        train(model, optimizer, own=True, steps=2)
        with hybrid.trace() as record:
            train(model, optimizer, own=True, steps=1)
        sent[what] = sorted((call.op, call.payload_bytes) for call in record.calls if not call.control)
        hybrid.shutdown()
    assert sent["off"] == sent["full"] == sent["selective"]


def test_recompute_sends_nothing_more() -> None:
    run_ranks(traffic, 2)


def dropout() -> None:
    """To the bit: with the same seed, masks in the second forward are those of the first."""
    for stage in STAGES:
        results = []
        for config in (None, {}, {"policy": "selective"}, {"units": ["Body", "Block"][1:]}):
            model = hybrid.distributed_model(Net(0.5).double(), strategy=with_recompute(stage, config, seed=3))
            optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
            losses = train(model, optimizer, own=True)
            results.append((losses, model.full_state_dict(), torch.rand(1).item()))
            hybrid.shutdown()
        for losses, state, random in results[1:]:
            assert losses == results[0][0], stage
            assert random == results[0][2], "the random state after training"
            assert all(torch.equal(state[name], value) for name, value in results[0][1].items()), stage


def test_dropout_is_replayed_to_the_bit() -> None:
    run_ranks(dropout, 2)


class FrozenFront(nn.Module):
    """BC-58: token ids are the only input of a frozen first block, then trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.embedding = nn.Embedding(11, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[0].requires_grad_(False)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


def frozen() -> None:
    tokens, labels = torch.arange(8) % 11, batch(0)[1]
    plain = FrozenFront().double()
    functional.mse_loss(plain(tokens), labels).backward()
    for stage in STAGES:
        for config in ({}, {"units": ["Embedding", "Block"]}, {"policy": "selective"}):
            model = hybrid.distributed_model(FrozenFront().double(), strategy=with_recompute(stage, config))
            functional.mse_loss(model(own_part(tokens)), own_part(labels)).backward()
            gradients = dict(model.named_gradients())
            assert set(gradients) == {name for name, p in plain.named_parameters() if p.requires_grad}
            for name, gradient in gradients.items():
                assert gradient is not None, (stage, name)
                assert_close(gradient, plain.get_parameter(name).grad, TOLERANCE, f"{name} at stage {stage}")
            hybrid.shutdown()


def test_frozen_inputs() -> None:
    """BC-58: gradients behind a frozen layer are there and those of the run without recompute."""
    run_ranks(frozen, 2)


def in_bf16() -> None:
    """Recompute under autocast: the second forward computes in the same types (fp32 tolerances of bf16)."""
    for stage in (0, 3):
        results = []
        for config in (None, {}, {"policy": "selective"}):
            strategy = with_recompute(stage, config)
            strategy.amp = True
            strategy.amp_configs = {"level": "O2", "custom_fp32": ["LayerNorm"]}
            model = hybrid.distributed_model(Net(), strategy=strategy)
            optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for step in range(3):
                inputs, labels = (own_part(t).float() for t in batch(step))
                functional.mse_loss(model(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(model.full_state_dict())
            hybrid.shutdown()
        for state in results[1:]:
            assert all(torch.equal(state[name], value) for name, value in results[0].items()), stage


def test_recompute_with_mixed_precision() -> None:
    run_ranks(in_bf16, 2)


def refused() -> None:
    with pytest.raises(hybrid.ModelError, match=r"Blok.*Block"):
        hybrid.distributed_model(Net(), strategy=with_recompute(1, {"units": ["Blok"]}))
    hybrid.shutdown()
    with pytest.raises(hybrid.ModelError, match="no repeated blocks"):
        hybrid.distributed_model(nn.Linear(2, 2), strategy=with_recompute(1, {}))
    hybrid.shutdown()
    parts = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(2, 2), "norm": nn.LayerNorm(2)}) for _ in range(2))
    with pytest.raises(hybrid.ModelError, match=r"'0' is a ModuleDict and has no forward.*\['LayerNorm', 'Linear'\]"):
        hybrid.distributed_model(parts, strategy=with_recompute(1, {}))
    hybrid.shutdown()


def test_unknown_units_are_refused() -> None:
    run_ranks(refused, 2)
