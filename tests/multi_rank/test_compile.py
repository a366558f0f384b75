"""Compiled units: the numbers of the model as it is, at every stage, and no program made after the second step."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import assert_close, own_part, seeded
from tests.ranks import run_ranks

WIDTH = 6
TOLERANCE = 1e-6
BF16_TOLERANCE = 2e-3  # a program may round at other places
HAS_COMPILER = shutil.which(os.environ.get("CXX") or "g++") is not None


class Block(nn.Module):
    def __init__(self, width: int = 9, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.gate = nn.Linear(WIDTH, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, inputs: torch.Tensor, *, scale: float = 0.7) -> torch.Tensor:
        hidden = self.norm(inputs)
        return inputs + self.dropout(self.down(torch.tanh(self.up(hidden)) * self.gate(hidden))) * scale


class Net(nn.Module):
    """Uneven; the last layer is tied to a block; a frozen block; a parameter of its own goes into the blocks."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first = nn.Linear(4, WIDTH)
        self.gain = nn.Parameter(torch.rand(()) + 0.5)
        self.blocks = nn.ModuleList(Block(9, dropout) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.last = nn.Linear(WIDTH, 9, bias=False)
        self.last.weight = self.blocks[0].up.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden, scale=self.gain)
        return self.last(hidden)


class Odd(nn.Module):
    """BatchNorm writes buffers; a branch on values ends a graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(2))
        self.last = nn.Linear(4, 9)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.last(inputs)


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(self.norm(inputs))
        if hidden.sum() > 1e9:
            hidden = hidden * 2
        return inputs + hidden.tanh()


def chain() -> nn.Sequential:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(4, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, 9))


@contextmanager
def no_new_program() -> Iterator[None]:
    torch.compiler.set_stance("fail_on_recompile")
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


def train(build: Callable[[], nn.Module], settings: dict[str, Any], *, is_compiled: bool) -> list[Any]:
    """Losses of training and evaluation in turn, then the weights; batches of one shape for each."""
    model = hybrid.distributed_model(build(), strategy=hybrid.DistributedStrategy(settings))
    optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []
    for step in range(4):
        generator = seeded(20 + step)
        batch = torch.randn(16, 4, generator=generator), torch.randn(16, 9, generator=generator)
        is_shared = any(name in settings for name in ("tensor_parallel", "pipeline"))
        inputs, labels = batch if is_shared else tuple(own_part(tensor) for tensor in batch)
        with no_new_program() if is_compiled and step >= 2 else torch.enable_grad():
            result = model.train_batch((inputs, labels), optimizer, loss_fn=functional.mse_loss)
            losses += [result.loss, result.grad_norm]
            if build is not Small:
                losses.append(model.eval_batch((inputs, labels), functional.mse_loss).loss)
    weights = list(model.full_state_dict().values())
    hybrid.shutdown()
    return losses + weights


class Small(Net):
    """One kind of unit, all trained: one program for each way."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks[1:]
        self.blocks.append(Block(9))


def check(cases: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]], backend: str, fullgraph: bool) -> None:
    for what, (build, settings) in cases.items():
        settings = {"timeout_seconds": 50, "sharding": True, "accumulate_steps": 2} | settings
        wanted = train(build, settings, is_compiled=False)
        configs = {"backend": backend, "fullgraph": fullgraph}
        tolerance = BF16_TOLERANCE if settings.get("amp") else TOLERANCE
        got = train(build, settings | {"compile": True, "compile_configs": configs}, is_compiled=True)
        for place, (one, other) in enumerate(zip(got, wanted, strict=True)):
            assert_close(one, other, tolerance, f"{what}: result {place}")
    # Programs are shared by the units of one kind, and made anew for train, eval and each way of computing.
    assert counters["stats"]["unique_graphs"] > 0


def stage(number: int, **more: Any) -> dict[str, Any]:
    return {"sharding_configs": {"stage": number, "bucket_bytes": 400, **more}}


RECOMPUTE: dict[str, Any] = {"recompute": True}
SELECTIVE: dict[str, Any] = {"recompute": True, "recompute_configs": {"policy": "selective"}}


SETTINGS = {
    **{f"stage {number}": (Net, stage(number)) for number in (0, 1, 2, 3)},
    "deferred gather": (Net, stage(2, overlap_param_gather=True)),
    "recompute": (Net, stage(3) | RECOMPUTE),
    "O2": (Net, stage(3) | {"amp": True, "amp_configs": {"level": "O2"}} | RECOMPUTE),
}


@pytest.mark.parametrize(
    "names",
    [("stage 3", "deferred gather", "O2"), pytest.param(tuple(SETTINGS), marks=pytest.mark.full)],
    ids=["some", "all"],
)
def test_compiled_units_change_no_number(names: tuple[str, ...]) -> None:
    """At every stage, with deferred gathers, recompute, and mixed precision."""
    cases = {name: SETTINGS[name] for name in names}
    run_ranks(check, 2, cases, "aot_eager", True, timeout_seconds=200)


def test_compiled_units_under_a_pipeline_and_tensor_parallel() -> None:
    """Layers of a pipeline at stage 3; cut layers whose messages are part of the program, recomputed or not."""
    plan = {"blocks.*.up": "colwise", "blocks.*.gate": "colwise", "blocks.*.down": "rowwise", "first": "replicated"}
    tp: dict[str, Any] = {
        "tensor_parallel": True,
        "tensor_parallel_configs": {"degree": 2, "plan": plan | {"last": "replicated"}},
        "sharding": False,
    }
    pp = {"pipeline": True, "pipeline_configs": {"degree": 2}, "sharding": False}
    cases = {"pp": (chain, pp), "tp": (Untied, tp), "tp recompute": (Untied, tp | SELECTIVE)}
    run_ranks(check, 2, cases, "aot_eager", True, timeout_seconds=200)


class Untied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.last = nn.Linear(WIDTH, 9)


def test_what_cannot_be_compiled_runs_as_it_is() -> None:
    """A branch between two programs; buffers are written once."""
    cases = {"odd": (Odd, stage(3))}
    run_ranks(check, 2, cases, "aot_eager", False, timeout_seconds=200)


@pytest.mark.skipif(not HAS_COMPILER, reason="inductor needs a C++ compiler, and this machine has none (g++, CXX)")
@pytest.mark.parametrize("stages", [(3,), pytest.param((0, 1, 2, 3), marks=pytest.mark.full)], ids=["3", "all"])
def test_compiled_by_inductor(stages: tuple[int, ...]) -> None:
    """The backend that people use; the rest of this file uses one that makes no kernels."""
    patient = {"timeout_seconds": 250}  # the first kernels of a machine take their time
    cases = {f"stage {number}": (Small, stage(number) | patient) for number in stages}
    run_ranks(check, 2, cases, "inductor", True, timeout_seconds=300)


# -- random numbers, shapes, refusals -----------------------------------------------------------------------------


def check_dropout() -> None:
    """Columns of one rank are dropped by its own masks, and what backward saw are the masks of forward."""
    plan = {"0": "colwise", "2": "rowwise", "3": "replicated"}

    def build(dropout: float) -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 64, bias=False), nn.Dropout(dropout), nn.Linear(64, 4), nn.Linear(4, 4))

    settings: dict[str, Any] = {
        "tensor_parallel": True,
        "tensor_parallel_configs": {"degree": 2, "plan": plan},
        "compile": True,
        "compile_configs": {"backend": "aot_eager", "units": ["Sequential"]},
        "seed": 4,
        "timeout_seconds": 30,
    }
    model = hybrid.distributed_model(build(0.5), strategy=hybrid.DistributedStrategy(settings))
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        gradient = dict(model.named_gradients())["0.weight"]
        assert gradient is not None
        kept = (gradient[:, 0] != 0).tolist()
        assert kept[:32] != kept[32:], "both ranks drew one mask"
        assert 0 < sum(kept) < 64
    hybrid.shutdown()
    recomputed = settings | {"recompute": True, "recompute_configs": {"units": ["Sequential"]}}
    model = hybrid.distributed_model(build(0.5), strategy=hybrid.DistributedStrategy(recomputed))
    with pytest.raises(hybrid.ModelError, match=r"'Sequential' is recomputed.*draws random numbers \(dropout\)"):
        model(torch.ones(1, 4))
    hybrid.shutdown()


def check_shapes() -> None:
    """A shape that changes makes one more program, with that size as a variable, and then none."""
    settings = {"sharding": True, "compile": True, "compile_configs": {"backend": "aot_eager"}} | stage(3)
    model = hybrid.distributed_model(Net(), strategy=hybrid.DistributedStrategy(settings))
    for size in (3, 4):
        model(torch.randn(size, 4)).sum().backward()
    with no_new_program():
        for size in (5, 9, 6):
            model(torch.randn(size, 4)).sum().backward()
    assert not any("_orig_mod" in name for name in model.full_state_dict())
    hybrid.shutdown()


def check_refusals() -> None:
    def wrap(model: nn.Module, number: int = 3, **configs: Any) -> Any:
        settings = {"sharding": True, "compile": True, "compile_configs": {"backend": "aot_eager"} | configs}
        return hybrid.distributed_model(model, strategy=hybrid.DistributedStrategy(settings | stage(number)))

    def refused(pattern: str, model: nn.Module, number: int = 3, **configs: Any) -> None:
        with pytest.raises(hybrid.HybridError, match=pattern):
            wrap(model, number, **configs)
        assert not hybrid.is_initialized(), "refused too late"

    inside, in_place = Net(), Net()
    inside.blocks[1] = torch.compile(inside.blocks[1])
    in_place.blocks[0].compile()
    refused("the model is compiled by torch.compile already.*strategy.compile = True", torch.compile(Net()))
    refused(r"module 'blocks.1' is compiled by torch.compile already", inside)
    refused(r"module 'blocks.0' is compiled by torch.compile already", in_place)
    scripted = Net()
    scripted.blocks[2].up = torch.jit.script(nn.Linear(WIDTH, 9))
    refused(r"compile: module 'blocks.2.up' is TorchScript", scripted, 2)
    refused("no repeated blocks to compile", nn.Linear(4, 4), 1)
    refused(r"compile_configs.units names \['Blok'\]", Net(), units=["Blok"])
    around = nn.Sequential(Net())
    refused(r"chooses '0'.*around \['0.blocks.0', '0.blocks.1'.*stage 3 gathers", around, units=["Net"])
    refused(r"compile: module 'blocks' is a ModuleList and has no forward.*\['Block'\]", Net(), units=["blocks"])
    refused(r"backend = 'inductors': torch knows no backend.*'inductor'", Net(), backend="inductors")
    recurrent = nn.Sequential(*(nn.Sequential(nn.LSTM(4, 4)) for _ in range(2)))
    refused(r"compile: module '0.0' is a recurrent LSTM", recurrent, 2)
    odd = wrap(Odd(), fullgraph=True)
    with pytest.raises(hybrid.ModelError, match=r"'blocks.0' could not be compiled.*set fullgraph to False"):
        odd(torch.randn(3, 4))
    hybrid.shutdown()
    model = wrap(Net())

    def call(inputs: torch.Tensor) -> Any:
        return model(inputs)

    for compiled in (torch.compile(model, backend="aot_eager"), torch.compile(call, backend="eager")):
        with pytest.raises(hybrid.ModelError, match=r"torch\.compile around Net.*strategy.compile = True"):
            compiled(torch.randn(3, 4))
    assert model(torch.randn(3, 4)).shape == (3, 9)
    hybrid.shutdown()


def check_the_rest() -> None:
    # Found by the process group of this world, and not yet by hybrid: `is_initialized` tells who was early.
    assert dist.is_initialized()
    check_refusals()
    check_shapes()
    check_dropout()


def test_masks_shapes_and_refusals() -> None:
    """Refused by name before anything starts: the user's own torch.compile, TorchScript, units that hold units."""
    run_ranks(check_the_rest, 2, timeout_seconds=120)


def test_settings_that_would_do_nothing_or_cannot_work() -> None:
    def problems(**settings: Any) -> str:
        return "; ".join(hybrid.DistributedStrategy(settings).problems(2))

    assert "modes are of inductor alone" in problems(
        compile=True, compile_configs={"backend": "aot_eager", "mode": "default"}
    )
    assert "set compile = True" in problems(compile_configs={"dynamic": True})
    pipeline = {"pipeline": True, "pipeline_configs": {"degree": 2, "schedule": "zb-h1"}, "accumulate_steps": 4}
    assert re.search(r"'zb-h1' splits each backward.*compile = True", problems(compile=True, **pipeline))
    for configs in ({"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"backend": "cudagraphs"}):
        with pytest.raises(hybrid.StrategyError, match=r"CUDA graphs are not available.*use '"):
            hybrid.DistributedStrategy(compile=True, compile_configs=configs)
