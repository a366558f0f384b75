"""What may be done to a model after `distributed_model`: right, or refused by name; and ranks that differ.

The rules are in docs/models.md.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hybrid
from hybrid.collectives import ops
from tests.multi_rank.case_runs import (
    SEVERAL_STEPS,
    assert_close,
    assert_weights,
    own_part,
    variant,
    weights_of,
    wrapped,
)
from tests.multi_rank.test_models_kinds import WIDTH, Stack, rows, sgd, steps
from tests.ranks import run_ranks


def built() -> Any:
    torch.manual_seed(3)
    return Stack()


def whole(model: Any) -> Any:
    """Where values may be read and edited at every stage; a plain model has them anywhere."""
    return model.gather_parameters() if hasattr(model, "gather_parameters") else nullcontext()


def double(model: Any) -> None:
    model.double()


def save(model: Any) -> None:
    torch.save(model, io.BytesIO())


def move(model: Any) -> None:
    """Where they are already."""
    model.register_buffer("late", torch.ones(2, dtype=torch.float64))
    model.to("cpu").to(torch.float32).float()
    assert model.late.dtype == torch.float32


def retie(model: Any) -> None:
    model.last.weight = model.first.weight


def unfreeze(model: Any) -> None:
    model.blocks[1].requires_grad_(True)


def assign(model: Any) -> None:
    model.load_state_dict(model.full_state_dict(), assign=True)


def replace(model: Any) -> None:
    model.last.bias = nn.Parameter(torch.ones(WIDTH))


def wrap_part(model: Any) -> None:
    hybrid.distributed_model(model.blocks)


def initialise(model: Any) -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.1)

    with whole(model):
        model.apply(fill)


# name -> (what is done after a step, words of the error; none: training goes on as in plain torch)
CHANGES: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "to double": (double, ("first.weight", "torch.float64", "before distributed_model", "amp")),
    "to meta": (lambda model: model.to("meta"), ("first.weight", "meta")),
    "emptied": (lambda model: model.to_empty(device="cpu"), ("first.weight", "to_empty")),
    "shared": (lambda model: model.share_memory(), ("first.weight", "share_memory")),
    "where it is": (move, ()),
    "initialised": (initialise, ()),
    "tied": (retie, ()),
    "blocks swapped": (lambda model: model.blocks.insert(0, model.blocks.pop(2)), ()),
    "replaced": (replace, ("last.bias", "came into the model after distributed_model")),
    "layer added": (lambda model: model.blocks.append(nn.Linear(WIDTH, WIDTH)), ("blocks.3.weight",)),
    "unfrozen": (unfreeze, ("blocks.1.norm.weight", "frozen when the model was wrapped", "freeze after")),
    "assigned": (assign, ("assign=False",)),
    "copied": (copy.deepcopy, ("deep-copied", "AveragedModel", "gather_parameters", "full_state_dict")),
    "averaged": (AveragedModel, ("deep-copied", "update_parameters")),
    "pickled": (pickle.dumps, ("pickled", "full_state_dict")),
    "saved": (save, ("pickled", "full_state_dict")),
    "wrapped in part": (wrap_part, ("'0.norm.weight'", "'blocks.0.norm.weight'", "another model")),
}


def act_and_step(action: Callable[[Any], Any], model: Any, optimizer: Any) -> None:
    action(model)
    steps(model, optimizer, own_part, count=1)


def change(name: str, stage: int) -> None:
    action, words = CHANGES[name]

    def built_for() -> Any:
        model = built()
        if name == "unfrozen":
            model.blocks[1].requires_grad_(False)
        return model

    def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
        return sgd([parameter for parameter in parameters if parameter.requires_grad])

    with variant(stage=stage, bucket_bytes=200) as strategy:
        model, optimizer = wrapped(built_for(), optimizer_of, strategy)
        steps(model, optimizer, own_part, count=1)
        if words:
            with pytest.raises(hybrid.HybridError) as caught:
                act_and_step(action, model, optimizer)
            assert all(word in str(caught.value) for word in words), caught.value
            if name in ("replaced", "layer added"):  # nor are gradients shown as if these were all
                with pytest.raises(hybrid.ModelError, match=words[0]):
                    dict(model.named_gradients())
            return
        action(model)
        steps(model, optimizer, own_part, count=2)
        plain = built_for()
        plain_optimizer = optimizer_of(plain.parameters())
        steps(plain, plain_optimizer, lambda tensor: tensor, count=1)
        action(plain)
        steps(plain, plain_optimizer, lambda tensor: tensor, count=2)
        assert_weights(model, weights_of(plain), SEVERAL_STEPS)


def change_all() -> None:
    for name in CHANGES:
        for stage in (3,) if CHANGES[name][1] else (1, 3):
            try:
                change(name, stage)
            except BaseException as error:
                error.add_note(name)
                raise


def test_changes_of_a_wrapped_model() -> None:
    """BC-37 and its kind: a change is followed, or named with a way out before another step."""
    run_ranks(change_all, 2, timeout_seconds=60)


# -- moving averages, copies --------------------------------------------------------------------------------------


def average(model: Any, optimizer: Any, part: Any, *, plain: nn.Module) -> dict[str, torch.Tensor]:
    """Three shadows with decay 0.5: torch's, one by hand over the parameters, one over state dicts."""
    shadow = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    by_hand = {name: value.detach().clone() for name, value in plain.named_parameters()}
    by_state = {name: value.clone() for name, value in plain.state_dict().items()}
    for _ in range(3):
        steps(model, optimizer, part, count=1)
        with whole(model), torch.no_grad():
            shadow.update_parameters(model)
            for name, value in model.named_parameters():
                by_hand[name].lerp_(value.detach(), 0.5)
        for name, value in model.state_dict().items():
            by_state[name].lerp_(value, 0.5)
    found = {f"torch.{name}": value for name, value in shadow.module.state_dict().items()}
    return found | {f"hand.{n}": v for n, v in by_hand.items()} | {f"state.{n}": v for n, v in by_state.items()}


def check_averages() -> None:
    plain = built()
    wanted = average(plain, sgd(plain.parameters()), lambda tensor: tensor, plain=built())
    for stage in (0, 1, 2, 3):
        with variant(stage=stage, bucket_bytes=200) as strategy:
            model, optimizer = wrapped(built(), sgd, strategy)
            for name, value in average(model, optimizer, own_part, plain=built()).items():
                assert_close(value, wanted[name], SEVERAL_STEPS, f"shadow {name} at stage {stage}")
            with model.gather_parameters():
                block = copy.deepcopy(model.blocks[1])
                file = io.BytesIO()
                torch.save(model.blocks[1], file)
            inputs = rows(7)
            with torch.no_grad():
                model(inputs)
            if dist.get_rank() == 0:  # copies belong to nobody: no other rank takes part
                file.seek(0)
                loaded = torch.load(file, weights_only=False)
                assert torch.equal(loaded(inputs), block(inputs))
                block(inputs).sum().backward()
                assert block.linear.weight.grad is not None
            steps(model, optimizer, own_part, count=1)


def test_moving_averages_and_copies_of_blocks() -> None:
    """BC-49: shadows are those of one process at every stage; a copied block is an ordinary module, on one rank too."""
    run_ranks(check_averages, 2, timeout_seconds=60)


def steps_in_backward() -> None:
    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for stage in (0, 3):
        model = built()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        with variant(stage=stage) as strategy:
            distributed, _ = wrapped(model, sgd, strategy)
            with pytest.raises(hybrid.ModelError, match=r"'last.bias' was taken out of p.grad .*this rank's gradient"):
                distributed(own_part(rows(1))).sum().backward()


def test_an_optimizer_that_steps_in_backward_is_refused() -> None:
    """Its hook took this rank's gradient before it was summed: the ranks trained different models without a word."""
    run_ranks(steps_in_backward, 2)


# -- ranks that differ --------------------------------------------------------------------------------------------


def frozen_on_one_rank() -> None:
    with variant(stage=2) as strategy:
        model, optimizer = wrapped(built(), sgd, strategy)
        model.last.bias.requires_grad_(dist.get_rank() == 0)
        model.first.bias.requires_grad_(False)
        with pytest.raises(hybrid.ModelError, match=r"'last.bias' was frozen after distributed_model on some ranks"):
            steps(model, optimizer, own_part, count=1)


def test_a_parameter_frozen_on_some_ranks_is_refused() -> None:
    """Else its gradient would be that of a part of the batch."""
    run_ranks(frozen_on_one_rank, 2)


class Routed(Stack):
    """Each rank takes the blocks that it is told to."""

    route: tuple[int, ...] = (0, 1, 2)

    def encode(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for index in self.route:
            hidden = self.blocks[index](hidden)
        return hidden


ROUTES = {
    "another block": ((0, 1), (0, 2)),
    "another order": ((0, 1, 2), (0, 2, 1)),
    "another number of times": ((0, 1, 2), (0, 1, 1, 2)),
    "none": ((0, 1, 2), ()),
}


def routed(name: str) -> None:
    torch.manual_seed(3)
    plain = Routed()
    for step in range(2):
        for route, part in zip(ROUTES[name], rows(step).chunk(2), strict=True):
            plain.route = route
            (plain(part).square().mean() / 2).backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    for stage in (0, 2, 3):
        torch.manual_seed(3)
        with variant(stage=stage, bucket_bytes=200, timeout_seconds=8) as strategy:
            model, optimizer = wrapped(Routed(), lambda p: torch.optim.SGD(p, lr=0.1), strategy)
            model.route = ROUTES[name][dist.get_rank()]
            if stage < 3:
                steps(model, optimizer, own_part, count=2)
                assert_weights(model, weights_of(plain), SEVERAL_STEPS)
            else:
                with pytest.raises(hybrid.CollectiveError, match=r"(block|parameters) '(blocks|first|last)") as caught:
                    steps(model, optimizer, own_part, count=2)
                assert "same order" in str(caught.value)
                assert "did not launch the same" in str(caught.value)


@pytest.mark.parametrize("name", ROUTES)
def test_ranks_that_use_different_blocks(name: str) -> None:
    """BC-48's kind: right at stages 0 to 2; at stage 3 an error on every rank that names what was to be gathered."""
    run_ranks(routed, 2, name, timeout_seconds=30)


def mixed_gathers() -> None:
    """Gathers without a name, as on NCCL: blocks of one size are exchanged for each other and nothing fails."""
    gather = ops.all_gather

    def nameless(*args: Any, tag: int = 0, **kwargs: Any) -> Any:
        return gather(*args, tag=0, **kwargs)

    with variant(stage=3, bucket_bytes=256, timeout_seconds=8, prefetch=0) as strategy:
        model, optimizer = wrapped(Routed(), sgd, strategy)
        steps(model, optimizer, own_part, count=1)
        before = model.full_state_dict()
        model.route = (0, 1, 2) if dist.get_rank() == 0 else (0, 2, 1)
        ops.all_gather = nameless
        try:
            with torch.no_grad():
                model(own_part(rows(1)))  # an evaluation, say
        finally:
            ops.all_gather = gather
        model.route = (0, 1, 2)
        with pytest.raises(hybrid.CollectiveError) as caught:
            steps(model, optimizer, own_part, count=1)
        mine = "rank 0 block 'blocks.1', rank 1 block 'blocks.2'"
        assert "did not gather the same parameters" in str(caught.value)
        assert mine in str(caught.value)
        assert_weights(model, before, 0.0)


def test_blocks_gathered_for_each_other_are_found_before_the_step() -> None:
    """NCCL pairs what it is given: weights of two blocks mixed without a word would train on."""
    run_ranks(mixed_gathers, 2, timeout_seconds=30)
