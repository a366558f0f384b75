"""Schedules that split the backward: the numbers of one process, the work of one backward."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import hybrid
from hybrid.collectives import ops
from hybrid.collectives.deferred import deferred_backend
from hybrid.collectives.group import Group
from hybrid.compose.split_backward import split_backward
from hybrid.weight_gradients import WeightGradients, splitting, take_over_gradients
from tests.multi_rank.test_gradient_sinks import Counted
from tests.pipeline_models import (
    VOCABULARY,
    WIDTH,
    assert_as_plain,
    batch_of,
    build,
    cross_entropy,
    make_adamw,
    own,
    pipeline_variant,
)
from tests.ranks import run_ranks

BATCHES = [batch_of(step) for step in range(2)]


def encoder() -> nn.Module:
    """Attention of torch, whose projections are no modules; a layer that is used twice; a frozen one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = [nn.TransformerEncoderLayer(WIDTH + 1, 4, 20, dropout=0.0, batch_first=True) for _ in range(3)]
        model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH + 1), *layers, nn.Linear(WIDTH + 1, VOCABULARY))
    model[2].linear1.requires_grad_(False)
    return model


class Crossing(nn.Module):
    """Attention whose keys and values are not its queries: one weight, two products with parts of it."""

    def __init__(self, width: int = WIDTH + 1) -> None:
        super().__init__()
        self.memory, self.attention = nn.Linear(width, width), nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        memory = self.memory(value).tanh()
        return value + self.attention(value, memory, memory, need_weights=False)[0]


def crossing() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        width = WIDTH + 1
        layers = [Crossing() for _ in range(3)]
        return nn.Sequential(nn.Embedding(VOCABULARY, width), *layers, nn.Linear(width, VOCABULARY))


def thrice() -> nn.Module:
    return build("thrice")


def hooked() -> nn.Module:
    """Hooks that would show if a gradient came by twice: on a weight that is put off, and on one that is not."""
    model: Any = encoder()
    for weight in (model[3].linear2.weight, model[3].norm1.weight):
        weight.register_hook(lambda gradient: gradient * 0.5)
    return model


def on_two_ranks() -> None:
    for stage, make in enumerate((encoder, thrice, hooked, thrice)):
        every = {"grad_reduce": "every_micro_batch"} if stage > 1 else {}
        assert_as_plain(make, BATCHES, cross_entropy, schedule="zb-h1", stage=stage, mb=4, bucket_bytes=512, **every)
    with Counted():
        assert_as_plain(crossing, BATCHES, cross_entropy, schedule="zbv", stage=2, mb=3)
    assert_as_plain(encoder, BATCHES, cross_entropy, schedule="zb-h1", stage=3, mb=3, recompute="full")
    assert_as_plain(encoder, BATCHES, cross_entropy, schedule="zb-h1", stage=2, mb=1, built="before", clip=0.1)
    for amp in ({"level": "O2"}, {"level": "O1", "dtype": "float16", "init_loss_scaling": 256.0}):
        low = {"amp": amp, "stage": 2, "tolerance": 3e-2}
        assert_as_plain(encoder, BATCHES[:1], cross_entropy, schedule="zb-h1", mb=4, **low)
    with deferred_backend():
        assert_as_plain(encoder, BATCHES, cross_entropy, schedule="zb-h1", stage=3, mb=4)
    with Counted():
        for stage, make in enumerate((lambda: build("tied"), thrice, encoder, hooked)):
            assert_as_plain(make, BATCHES, cross_entropy, schedule="zbv", stage=stage, mb=4, bucket_bytes=512)
    assert_as_plain(encoder, BATCHES, cross_entropy, schedule="zbv", stage=3, mb=3, recompute="full")
    fp16 = {"level": "O1", "dtype": "float16", "init_loss_scaling": 256.0}
    assert_as_plain(encoder, BATCHES[:1], cross_entropy, schedule="zbv", stage=2, mb=4, amp=fp16, tolerance=3e-2)
    with deferred_backend():
        assert_as_plain(thrice, BATCHES, cross_entropy, schedule="zbv", stage=3, mb=4)
    own_order = "F0.0 F0.1 I0.0 I0.1 W0.0 W0.1\nF1.0 B1.0 F1.1 I1.1 W1.1\n"  # some backwards split, some whole
    assert_as_plain(lambda: build("tied"), BATCHES, cross_entropy, schedule=own_order, mb=2, stage=2)


def on_four_ranks() -> None:
    assert_as_plain(encoder, BATCHES, cross_entropy, pp=4, schedule="zb-h1", mb=6)
    assert_as_plain(encoder, BATCHES, cross_entropy, pp=4, schedule="zb-h1", mb=2)
    assert_as_plain(encoder, BATCHES, cross_entropy, schedule="zb-h1", stage=3, mb=4, reshard_after="run")
    assert_as_plain(thrice, BATCHES, cross_entropy, pp=4, schedule="zbv", mb=9, built="before", clip=0.1)
    assert_as_plain(thrice, BATCHES, cross_entropy, pp=4, schedule="zbv", mb=1)
    assert_as_plain(thrice, BATCHES, cross_entropy, schedule="zbv", stage=3, mb=5, reshard_after="run")
    assert_as_plain(thrice, BATCHES, cross_entropy, schedule="zbv", stage=2, mb=4, grad_reduce=2)
    assert_as_plain(lambda: build("chain"), BATCHES, cross_entropy, tp=2, schedule="zbv", mb=4)
    for recompute in ({}, {"recompute": "selective"}):
        chain = lambda: build("chain")  # noqa: E731
        assert_as_plain(chain, BATCHES, cross_entropy, tp=2, schedule="zb-h1", mb=4, **recompute)


def test_numbers_of_one_process() -> None:
    run_ranks(on_two_ranks, 2)


def test_numbers_of_one_process_on_four_ranks() -> None:
    run_ranks(on_four_ranks, 4)


def work_of_a_step(schedule: str, **settings: Any) -> tuple[int, int]:
    """(flops of matrix products, calls of the blocks) of all ranks in one step."""
    with pipeline_variant(2, schedule=schedule, mb=2, **settings) as strategy:
        model: Any = hybrid.distributed_model(encoder(), strategy=strategy)
        optimizer = hybrid.distributed_optimizer(make_adamw(model))
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        for module in model.modules():
            if isinstance(module, nn.TransformerEncoderLayer):
                module.norm1.register_forward_hook(count)
        with FlopCounterMode(display=False) as counter:
            model.train_batch(own(BATCHES[0]), optimizer, loss_fn=cross_entropy)
        mine = torch.tensor([counter.get_total_flops(), calls])
        ops.all_reduce(mine, group=hybrid.get_mesh().group("pp"), control=True).wait()
        flops, calls = mine.tolist()
        return flops, calls


def the_work_of_one_backward() -> None:
    for settings in ({}, {"recompute": "full"}):
        whole = work_of_a_step("1f1b", **settings)
        assert whole[0] > 0
        for schedule in ("zb-h1", "zbv"):
            assert work_of_a_step(schedule, **settings) == whole, (schedule, settings)


def test_no_work_is_done_twice() -> None:
    """Two calls of `torch.autograd.grad` would cost 1.4 to 1.7 backwards, and recompute twice."""
    run_ranks(the_work_of_one_backward, 2)


def most_is_put_off() -> None:
    """Between I and W no whole gradient exists: a stage 2 that held them would be stage 1 in memory.

    And W writes a product into the bucket: one in fresh memory, to be copied there, costs a pass and its memory.
    """
    with Counted() as counted, pipeline_variant(2, schedule="zb-h1", mb=4, stage=2, split=(3, 2)) as strategy:
        model: Any = hybrid.distributed_model(encoder(), strategy=strategy)
        optimizer = hybrid.distributed_optimizer(make_adamw(model))
        runtime = model.hybrid_runtime
        left: list[tuple[str, bool]] = []
        taken: list[tuple[str, int]] = []
        run = runtime.stages.runner._run_part_of_backward

        def watched(action: Any) -> None:
            before = counted.taken
            run(action)
            taken.append((action.kind.letter, counted.taken - before))
            left.append((action.kind.letter, any(bucket.local is not None for bucket in runtime.engine.buckets)))

        runtime.stages.runner._run_part_of_backward = watched
        model.train_batch(own(BATCHES[0]), optimizer, loss_fn=cross_entropy)
        assert sum(kind == "I" for kind, _ in left) == 4, left
        assert not any(has_whole for kind, has_whole in left if kind == "I"), left
        stage = hybrid.get_mesh().coordinate("pp")
        # Four weights of a block, but three of the second, one of whose is frozen; and the head.
        of_step = [("I", 0), ("W", (7, 5)[stage])] * 4
        assert sorted(taken) == sorted(of_step), taken


def test_first_halves_leave_no_whole_gradients() -> None:
    run_ranks(most_is_put_off, 2)


def test_projections_are_put_off() -> None:
    """Of cross attention, too: all the products of the second half are the weights' own, and none is in the first."""
    plain: Any = Crossing()
    layer = copy.deepcopy(plain)
    take_over_gradients(layer)
    split_backward(layer, Group(process_group=None, ranks=(0,), rank=0, axis="tp"))
    value = torch.randn(2, 5, WIDTH + 1)
    plain(value.requires_grad_()).square().sum().backward()
    wanted, value.grad = value.grad, None
    with splitting():
        output = layer(value)
    left = WeightGradients()
    with left.collecting():
        output.square().sum().backward()
    torch.testing.assert_close(value.grad, wanted)
    weights = [layer.memory.weight, layer.attention.in_proj_weight, layer.attention.out_proj.weight]
    assert all(weight.grad is None for weight in weights)
    with FlopCounterMode(display=False) as counter:
        left.accumulate()
    assert counter.get_total_flops() == sum(2 * 10 * weight.numel() for weight in weights)
    for here, there in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(here.grad, there.grad)


class Penalised(nn.Module):
    """Differentiates its own linear layer in its forward, as energies and penalties do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if not value.requires_grad:
            value = value.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.linear(value).square().sum(), value, create_graph=True)
        return value + slope


def a_gradient_inside_a_forward() -> str:
    with pipeline_variant(2, schedule="zb-h1", mb=2, split=(2, 2)) as strategy:
        layers = nn.Sequential(nn.Linear(6, 6), Penalised(), nn.Linear(6, 6), nn.Linear(6, 6))
        model: Any = hybrid.distributed_model(layers, strategy=strategy)
        optimizer = hybrid.distributed_optimizer(make_adamw(model))
        batch = torch.ones(4, 6), torch.ones(4, 6)
        try:
            model.train_batch(batch, optimizer, loss_fn=nn.functional.mse_loss)
        except hybrid.HybridError as error:
            return str(error)
        return ""


def test_a_gradient_inside_a_forward_is_refused_by_name() -> None:
    """Autograd does not see the weight of a product whose gradient is put off: a second derivative would lack it."""
    first, _ = run_ranks(a_gradient_inside_a_forward, 2)
    assert "differentiated inside a forward" in first
    assert "schedule '1f1b'" in first
