"""`buffer_dtype`: which buffers it casts, that training goes on as with buffers cast by hand, what a file holds."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import assert_close, assert_same_on_all_ranks, own_part, seeded, strategy_of
from tests.ranks import run_ranks

WIDTH, STEPS, LEARNING_RATE = 6, 3, 0.1
STAGES = (0, 1, 2, 3)


def with_buffers(stage: int, buffer_dtype: str | None, level: str = "O1", **configs: Any) -> Any:
    strategy = strategy_of(stage=stage, bucket_bytes=200)
    strategy.amp = True
    strategy.amp_configs = {"level": level, **({"buffer_dtype": buffer_dtype} if buffer_dtype else {}), **configs}
    return strategy


# ---- the numbers -------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Linears with buffers in between, in elementwise operations: autocast leaves these to the types they meet."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("scale", torch.rand(WIDTH) + 0.7)
        self.register_buffer("offset", torch.randn(WIDTH) / 3, persistent=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs
        for block in self.blocks:
            hidden = torch.tanh(block(hidden)) * self.scale + self.offset
        return self.head(hidden)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(40 + step)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, 2, generator=generator)


def train_plain(level: str, buffer_dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], list[float]]:
    """One process, each rank's half by itself: fp32 masters after training, and the losses of the whole batches."""
    model = Scaled()
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for buffer in model.buffers():
        buffer.data = buffer.data.to(buffer_dtype)
    if level == "O2":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    losses = []
    for step in range(STEPS):
        gradients = {name: torch.zeros_like(value) for name, value in masters.items()}
        total = 0.0
        for inputs, labels in zip(*(tensor.chunk(2) for tensor in batch(step)), strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(inputs)
            loss = functional.mse_loss(output.float(), labels)
            for name, part in zip(masters, torch.autograd.grad(loss, list(model.parameters())), strict=True):
                gradients[name] += part.float() / 2
            total += loss.item() / 2
        losses.append(total)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                masters[name] -= LEARNING_RATE * gradients[name]
                parameter.copy_(masters[name])
    return masters, losses


def parity() -> None:
    """fp32 tolerances: the rounding to 16 bits is that of the plain run, element for element."""
    for level in ("O1", "O2"):
        uncast, _ = train_plain(level, torch.float32)
        for buffer_dtype in (torch.bfloat16, torch.float16):
            wanted, losses = train_plain(level, buffer_dtype)
            # Ten times the tolerance and more: a build that casts nothing would be seen.
            assert max((wanted[name] - uncast[name]).abs().max().item() for name in wanted) > 1e-5
            for stage in STAGES:
                strategy = with_buffers(stage, str(buffer_dtype).removeprefix("torch."), level)
                model = hybrid.distributed_model(Scaled(), strategy=strategy)
                optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
                what = f"{level}, {buffer_dtype}, stage {stage}"
                for step in range(STEPS):
                    mine = tuple(own_part(tensor) for tensor in batch(step))
                    result = model.train_batch(mine, optimizer, loss_fn=functional.mse_loss)
                    assert_close(result.loss, losses[step], 1e-6, f"loss of step {step}, {what}")
                for name, ((begin, end), value) in model.shard_state_dict().items():
                    assert_close(value.flatten(), wanted[name].flatten()[begin:end], 1e-6, f"{name}, {what}")
                hybrid.shutdown()


def test_training_is_that_of_buffers_cast_by_hand() -> None:
    """Levels, types and stages against a plain process."""
    run_ranks(parity, 2)


# ---- which buffers -----------------------------------------------------------------------------------------------


class Angles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0.1, 1, WIDTH), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * torch.cos(self.frequencies)


class Many(nn.Module):
    """Buffers of every kind; `first` and `second` are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.linear, self.norm, self.angles = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Angles()
        self.register_buffer("first", torch.rand(WIDTH))
        self.register_buffer("second", self.first)
        self.register_buffer("wide", torch.rand(WIDTH).double())
        self.register_buffer("temporary", torch.rand(()), persistent=False)
        self.register_buffer("counts", torch.arange(WIDTH))
        self.register_buffer("phase", torch.ones(WIDTH, dtype=torch.complex64))
        self.register_buffer("codes", torch.ones(WIDTH).to(torch.float8_e4m3fn))
        self.register_buffer("nothing", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.angles(self.norm(self.linear(inputs))) * self.first + self.second * self.temporary
        return hidden + self.wide.float() + self.counts * self.phase.real


CAST = {"first", "second", "wide", "temporary", "angles.frequencies"}


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: buffer.dtype for name, buffer in model.named_buffers(remove_duplicate=False)}


def kinds() -> None:
    plain = Many()
    before, saved = dtypes_of(plain), plain.state_dict()
    for level, stage in (("O1", 1), ("O2", 0), ("O2", 3)):
        for custom_fp32 in ({}, {"custom_fp32": ["Angles"]}):
            cast = CAST - ({"angles.frequencies"} if custom_fp32 else set())
            strategy = with_buffers(stage, "bfloat16", level, **custom_fp32)
            model = hybrid.distributed_model(Many(), strategy=strategy)
            wanted = {name: torch.bfloat16 if name in cast else dtype for name, dtype in before.items()}
            assert dtypes_of(model) == wanted
            assert model.first is model.second
            optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
            for step in range(2):
                inputs = own_part(batch(step)[0])
                model.train_batch((inputs, inputs), optimizer, loss_fn=functional.mse_loss)
            assert dtypes_of(model) == wanted  # training gives none of them another type
            # BatchNorm's statistics moved, in fp32: in bf16 they would stop at 1/256 of themselves.
            mean = model.norm.running_mean
            assert mean.dtype == torch.float32
            assert not torch.equal(mean, mean.bfloat16().float())
            for state in (model.state_dict(), model.full_state_dict()):
                buffers = {name: value for name, value in state.items() if name in before}
                assert {name: value.dtype for name, value in buffers.items()} == {
                    name: value.dtype for name, value in saved.items() if name in before
                }
                for name in ("first", "wide"):
                    assert torch.equal(state[name], saved[name].bfloat16().to(saved[name].dtype))
            hybrid.shutdown()


def test_which_buffers_are_cast_and_what_state_dicts_hold() -> None:
    """Saved or not, shared, fp64; not integers, complex numbers, codes, norms, custom_fp32. Files: the plain types."""
    run_ranks(kinds, 2)


def default() -> None:
    before = dtypes_of(Many())
    for buffer_dtype in (None, "float32"):
        model = hybrid.distributed_model(Many(), strategy=with_buffers(1, buffer_dtype, "O2"))
        assert dtypes_of(model) == before
        assert model.state_dict()["first"].data_ptr() == model.first.data_ptr()
        hybrid.shutdown()


def test_without_the_setting_buffers_stay_as_they_are() -> None:
    run_ranks(default, 2)


class Counting(nn.Module):
    """A buffer that its forward updates in place, in whatever type it has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1.5)
        return self.linear(inputs)


def loads() -> None:
    model = hybrid.distributed_model(Counting(), strategy=with_buffers(2, "bf16"))
    model(batch(0)[0])
    model(batch(0)[0])
    state = model.full_state_dict()
    assert torch.equal(state["seen"], torch.full((WIDTH,), 3.0))
    assert_same_on_all_ranks({"seen": state["seen"]}, "the saved buffer")
    plain = Counting()
    plain.load_state_dict(state)
    assert plain.seen.dtype == torch.float32
    state["seen"] = torch.full((WIDTH,), 7.0)
    model.load_state_dict(state)
    assert (model.seen.dtype, model.seen.tolist()) == (torch.bfloat16, [7.0] * WIDTH)
    hybrid.shutdown()


def test_cast_buffers_are_updated_saved_and_loaded() -> None:
    run_ranks(loads, 2)


# ---- refusals ----------------------------------------------------------------------------------------------------


class SharedWithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.angles = nn.Linear(WIDTH, WIDTH), Angles()
        self.register_buffer("frequencies", self.angles.frequencies)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.angles(self.linear(inputs)) + self.frequencies


def refused() -> list[str]:
    said = []
    for build, strategy in (
        (lambda: nn.Linear(WIDTH, WIDTH), with_buffers(1, "bfloat16")),
        (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), with_buffers(1, "float16")),
        (lambda: Scaled().half(), with_buffers(0, "float16")),
        (SharedWithHead, with_buffers(1, "bfloat16", custom_fp32=["Angles"])),
    ):
        with pytest.raises(hybrid.ModelError) as caught:
            hybrid.distributed_model(build(), strategy=strategy)
        said.append(str(caught.value))
        hybrid.shutdown()
    return said


def test_a_setting_that_would_do_nothing_is_refused() -> None:
    """No buffer; only those of a norm; all of this type already; one tensor under two rules."""
    patterns = (
        r"buffer_dtype = 'bfloat16' would change no buffer of this model\. Leave it out",
        r"buffer_dtype = 'float16' would change no buffer.*1\.running_mean.*normalisation",
        r"buffer_dtype = 'float16' would change no buffer",
        r"angles\.frequencies.*one tensor.*custom_fp32",
    )
    for said in run_ranks(refused, 2):
        assert [bool(re.search(pattern, text)) for pattern, text in zip(patterns, said, strict=True)] == [True] * 4, (
            said
        )


def test_the_strategy_checks_and_shows_it() -> None:
    """Without amp it is refused with its section; types are read in any spelling; every view of the plan has it."""
    strategy = hybrid.DistributedStrategy(amp_configs={"buffer_dtype": "bf16"})
    with pytest.raises(hybrid.StrategyError, match=r"amp_configs = .*buffer_dtype.*amp was not set: set amp = True"):
        strategy.resolve(1)
    for spelling in ("bf16", "torch.bfloat16", torch.bfloat16):
        strategy = hybrid.DistributedStrategy(amp=True, amp_configs={"buffer_dtype": spelling})
        resolved = strategy.resolve(2)
        assert resolved.amp is not None
        assert resolved.amp.buffer_dtype == "bfloat16"
        assert "buffers in bfloat16" in resolved.describe()
        assert "buffers in bfloat16" in repr(strategy)
        assert re.search(r"amp_buffer_dtype +bfloat16 +user: amp_configs.buffer_dtype", strategy.explain(2))
    plain = hybrid.DistributedStrategy(amp=True)
    assert re.search(r"amp_buffer_dtype +as the model +default", plain.explain(2))
    assert "buffers" not in plain.resolve(2).describe()
    with pytest.raises(hybrid.StrategyError, match=r"amp_configs\.buffer_dtype.*expected one of 'float32', 'bfloat16'"):
        hybrid.DistributedStrategy(amp_configs={"buffer_dtype": "param"})
