"""Reported cases (families A, B, C, N and their neighbours) at stage 3, as the other stages have them elsewhere.

Recipes, batches and references are those of the files that test the case at stages 0 to 2; what differs here is how a
weight is read, and that forwards send something.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank import test_cases_accumulation as accumulation
from tests.multi_rank import test_cases_frozen as frozen
from tests.multi_rank import test_cases_norms as norms
from tests.multi_rank import test_cases_sharding as sharding
from tests.multi_rank import test_stage_3_cases as structures
from tests.multi_rank.case_runs import (
    ONE_STEP,
    SEVERAL_STEPS,
    assert_close,
    assert_same_on_all_ranks,
    assert_weights,
    own_part,
    seeded,
    variant,
    weights_of,
    wrapped,
)
from tests.ranks import run_ranks

# -- BC-01, BC-03, BC-04 ----------------------------------------------------------------------------------------


def check_stage_3_agrees(world_size: int) -> None:
    num_steps, num_samples = 10, 12 * world_size
    losses, plain_norms, weights = sharding.train_tied_plain(num_samples, num_steps)
    assert max(plain_norms) > 0.5  # the clip is at work
    for layout in (
        {"prefetch": 0},
        {"prefetch": 2, "bucket_bytes": 100, "overlap_comm": False},
        {"grad_reduce": "last_micro_batch"},
        {"partition": "parameter", "shard_size": None if world_size == 2 else 2},
    ):
        with variant(stage=3, accumulate_steps=3, micro_batch_size=4, gradient_clipping=0.5, **layout) as strategy:
            model, optimizer = wrapped(sharding.Tied(), sharding.adamw, strategy)
            for step in range(num_steps):
                inputs, labels = (own_part(tensor) for tensor in sharding.tied_batch(step, num_samples))
                result = model.train_batch((inputs, labels), optimizer, loss_fn=functional.mse_loss)
                assert_close(result.loss, losses[step], SEVERAL_STEPS, f"loss of step {step}")
                assert_close(result.grad_norm, plain_norms[step], SEVERAL_STEPS, f"norm of step {step}")
            assert_weights(model, weights, SEVERAL_STEPS)
            assert model.layers[3].weight is model.layers[0].weight
            assert_same_on_all_ranks(model.full_state_dict(), "a weight")


@pytest.mark.parametrize("world_size", [2, 4])
def test_bc01_stage_3_agrees_with_one_process(world_size: int) -> None:
    """Fault: stage 3 left its norm un-reduced, and reduced a shared weight at the wrong moment."""
    run_ranks(check_stage_3_agrees, world_size, world_size)


def check_elements() -> None:
    """The recipe on a weight of 1024 elements: those of 24 lie on one rank, as shards begin at whole cache lines."""
    for stage, num_parameters in ((1, 1024), (2, 1024), (3, 512)):
        with variant(stage=stage) as strategy:
            torch.manual_seed(1)
            model, optimizer = wrapped(nn.Linear(64, 16, bias=False), sharding.adamw, strategy)
            inputs = torch.randn(8, 64, generator=seeded(1))
            for _ in range(3):
                model(own_part(inputs)).square().mean().backward()
                optimizer.step()
                counts = {name: size / 4 for name, size in model.memory_bytes().items()}
                # Two moments, and the step count.
                assert counts == {"parameters": num_parameters, "gradients": 512, "optimizer_state": 1025}, stage
                optimizer.zero_grad()
                if stage == 3:
                    with pytest.raises(hybrid.ModelError, match=r"'weight' is cut over 2 ranks"):
                        inputs @ model.weight.T
                with model.gather_parameters():
                    product = (inputs @ model.weight.T).detach()
                assert_same_on_all_ranks({"product": product}, f"the manual product at stage {stage}")
                assert model.memory_bytes()["parameters"] == 4 * num_parameters


def test_bc03_only_stage_3_keeps_a_part_of_the_parameters() -> None:
    """Fault: a stage became another one after the first update."""
    run_ranks(check_elements, 2)


def check_bucket_sizes() -> None:
    plain = sharding.Sizes()
    optimizer = sharding.sgd_momentum(plain.parameters())
    for step in range(5):
        inputs, labels = sharding.sizes_batch(step)
        functional.mse_loss(plain(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    for bucket_elements in (1, 8, 999, 1000, 1001, 10_000_000):
        for overlap in (True, False):
            with variant(stage=3, bucket_bytes=4 * bucket_elements, overlap_comm=overlap) as strategy:
                model, optimizer = wrapped(sharding.Sizes(), sharding.sgd_momentum, strategy)
                for step in range(5):
                    batch = tuple(own_part(tensor) for tensor in sharding.sizes_batch(step))
                    model.train_batch(batch, optimizer, loss_fn=functional.mse_loss)
                assert_weights(model, weights_of(plain), ONE_STEP)


def test_bc04_bucket_size_and_overlap_do_not_change_stage_3() -> None:
    """Fault: the result depended on the bucket size, or on overlap."""
    run_ranks(check_bucket_sizes, 2)


# -- BC-06, BC-07 -----------------------------------------------------------------------------------------------


def check_clips(shard_size: int | None) -> None:
    for stage, name, way, shape in norms.choices((3,)):
        clipping, norm, update = norms.CLIPS[name]
        with variant(
            stage=stage,
            shard_size=shard_size,
            gradient_clipping=None if way == "calls" else clipping,
            partition="parameter" if shape["pieces"] > 1 else None,
        ) as strategy:
            what = f"{name} by {way} of {shape}"
            model, optimizer = wrapped(norms.Weights(**shape), norms.sgd, strategy)
            got = norms.clip_through(way, model, optimizer, clipping)
            if got is not None:
                assert norm is not None
                assert_close(got, norm, ONE_STEP, f"the norm, {what}")
            assert_weights(model, norms.Weights(**shape).expected(*update), ONE_STEP)
            assert_same_on_all_ranks(model.full_state_dict(), what)
    for bad in (math.nan, math.inf):
        with variant(stage=3, shard_size=shard_size) as strategy:
            model, _ = wrapped(norms.Weights(stretch=101), norms.sgd, strategy)
            model(torch.full((2,), bad if dist.get_rank() == 1 else 1.0)).backward()
            assert not torch.isfinite(model.clip_grad_norm_(1.0))


@pytest.mark.parametrize(("world_size", "shard_size"), [(2, None), (3, None), (4, 2)])
def test_bc06_bc07_norm_and_clip_at_stage_3(world_size: int, shard_size: int | None) -> None:
    """Fault: the norm of one shard, or of every replica; a bad value that only one rank sees."""
    run_ranks(check_clips, world_size, shard_size)


# -- BC-12 ------------------------------------------------------------------------------------------------------


def one_window(way: str, model: Any, optimizer: Any, window: Any) -> None:
    if way in {"train_batch", "calls"}:
        accumulation.one_window(way, model, optimizer, window)
        return
    *earlier, last = window
    with hybrid.trace() as recording, model.no_sync() if way == "no_sync" else contextlib.nullcontext():
        for piece in earlier:
            (model(piece) / len(window)).backward()
    sent = [call.op for call in recording.calls if not call.control]
    assert set(sent) <= ({"all_gather"} if way == "no_sync" else {"all_gather", "reduce_scatter", "all_reduce"})
    (model(last) / len(window)).backward()
    optimizer.step()
    optimizer.zero_grad()


def check_leftover(shard_size: int | None) -> None:
    rank = dist.get_rank()
    wanted = accumulation.expected_w(dist.get_world_size())
    for way in ("train_batch", "calls", "no_sync", "repeated"):
        accumulate_steps = 2 if way == "train_batch" else 1
        with variant(stage=3, shard_size=shard_size, accumulate_steps=accumulate_steps) as strategy:
            model, optimizer = wrapped(accumulation.Scalar(), accumulation.sgd, strategy)
            for epoch in range(2):
                for place, window in enumerate(accumulation.windows(accumulation.micro_batches(rank))):
                    one_window(way, model, optimizer, window)
                    total = epoch * wanted[-1] + wanted[place]
                    what = f"w after window {place} of epoch {epoch} by {way}"
                    assert_close(hybrid.full_parameter(model.w), total, ONE_STEP, what)
            assert model.memory_bytes()["gradients"] == 0
    # A loop that drops the fifth instead: nothing of it is in the next epoch's first step.
    for deferred in (False, True):
        for emptied in ("model", "optimizer", "by hand"):
            with variant(stage=3, shard_size=shard_size) as strategy:
                model, optimizer = wrapped(accumulation.Scalar(), accumulation.sgd, strategy)
                with model.no_sync() if deferred else contextlib.nullcontext():
                    model(torch.tensor([1000.0 + rank])).backward()
                if emptied == "by hand":
                    model.w.grad = None
                else:
                    (model if emptied == "model" else optimizer).zero_grad()
                model(torch.tensor([2.0])).backward()
                optimizer.step()
                assert_close(hybrid.full_parameter(model.w), -2.0, ONE_STEP, f"{emptied}, deferred {deferred}")


@pytest.mark.parametrize(("world_size", "shard_size"), [(2, None), (4, None), (4, 2)])
def test_bc12_the_leftover_micro_batch_is_a_step_or_dropped(world_size: int, shard_size: int | None) -> None:
    """Fault: five micro-batches, accumulate 2: the fifth was lost, or was in the next epoch's first step."""
    run_ranks(check_leftover, world_size, shard_size)


# -- BC-15 ------------------------------------------------------------------------------------------------------


def check_masked_ranks() -> None:
    rank = dist.get_rank()
    for make in (accumulation.make_sgd, accumulation.make_adamw):
        losses, weights = accumulation.train_tagger_plain(make)
        for accumulate_steps in (1, 2):
            with variant(stage=3, accumulate_steps=accumulate_steps) as strategy:
                model, optimizer = wrapped(accumulation.Tagger(), make, strategy)
                for step in range(4):
                    batch = tuple(tensor[4 * rank : 4 * rank + 4] for tensor in accumulation.tagged_batch(step))
                    result = model.train_batch(batch, optimizer, loss_fn=accumulation.sum_and_count)
                    assert_close(result.loss, losses[step], SEVERAL_STEPS, f"loss of step {step}")
                    assert result.skipped == (step == 2)
                    assert_weights(model, weights[step], SEVERAL_STEPS)


def test_bc15_a_rank_without_tokens_counts_for_nothing_at_stage_3() -> None:
    """Fault: a fully masked rank made NaN of the mean; a batch without any token moved the weights."""
    run_ranks(check_masked_ranks, 2)


# -- BC-34 ------------------------------------------------------------------------------------------------------


def check_adapters() -> None:
    """Bytes on this rank: parameters of which half is here, gradients and moments of the adapters alone."""
    before = weights_of(frozen.Frozen())
    trainable = {name for name, parameter in frozen.Frozen().named_parameters() if parameter.requires_grad}
    num_elements = sum(value.numel() for value in before.values())
    for make in (frozen.adamw_over_all, frozen.adamw_over_trainable):
        wanted = frozen.train_frozen_plain(make)
        for partition in ("element", "parameter"):
            with variant(stage=3, partition=partition, bucket_bytes=1500) as strategy:
                model, optimizer = wrapped(frozen.Frozen(), make, strategy)
                for step in range(3):
                    inputs, labels = (own_part(tensor) for tensor in frozen.frozen_batch(step))
                    functional.mse_loss(model(inputs), labels).backward()
                    optimizer.step()
                    counted = model.memory_bytes()
                    optimizer.zero_grad()
                assert_weights(model, wanted, SEVERAL_STEPS)
                for name, value in model.full_state_dict().items():
                    assert name in trainable or torch.equal(value, before[name]), f"frozen {name} has changed"
                assert set(optimizer.full_state_dict()["state"]) == trainable
                share = (4 + 8) * frozen.TRAINABLE / 2
                extra = counted["gradients"] + counted["optimizer_state"]
                assert abs(extra - share) <= 0.1 * share, (partition, counted, share)
                if partition == "element":
                    assert counted["parameters"] == pytest.approx(4 * num_elements / 2, rel=0.02)


def test_bc34_frozen_weights_cost_a_share_of_themselves_at_stage_3() -> None:
    """Fault: a mixed unit kept gradients and moments as of a full fine-tune."""
    run_ranks(check_adapters, 2)


# -- BC-42, BC-44 -----------------------------------------------------------------------------------------------


class KindsKept(structures.Containers):
    """The containers that blocks return arrive as they were made: their class, and what else is in them."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            make, take = structures.CONTAINERS[block.container]
            output = block(x=inputs, scale=0.5)
            assert type(output) is type(make(inputs)), block.container
            if isinstance(output, structures.Pair):
                assert output.note == "note"
            if isinstance(output, structures.Record):
                assert output.nothing is None
            inputs = inputs + take(output)
        return inputs


def check_containers() -> None:
    torch.manual_seed(3)
    plain = KindsKept().double()
    start = weights_of(plain)
    inputs, labels = (torch.randn(8, structures.WIDTH, generator=seeded(seed)).double() for seed in (1, 2))
    optimizer = structures.sgd(plain.parameters())
    for _ in range(2):
        functional.mse_loss(plain(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage in (0, 3):
        for recompute in (None, {}, {"policy": "selective"}, {"units": ["Linear"]}):
            with variant(stage=stage, bucket_bytes=200) as strategy:
                if recompute is not None:
                    strategy.recompute, strategy.recompute_configs = True, recompute
                model = KindsKept().double()
                model.load_state_dict(start)
                model, optimizer = wrapped(model, structures.sgd, strategy)
                for _ in range(2):
                    functional.mse_loss(model(own_part(inputs)), own_part(labels)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                assert_weights(model, weights_of(plain), 1e-12)


def test_bc42_containers_and_keywords_with_recompute() -> None:
    """Fault: gradients were missing when a block returned something other than a tensor or tuple."""
    run_ranks(check_containers, 2)


def check_norm_outside(inside_gather: bool) -> None:
    torch.manual_seed(4)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    start = weights_of(plain)
    inputs = torch.randn(8, 4, generator=seeded(3))
    optimizer = accumulation.make_sgd(plain.parameters())
    for _ in range(2):
        (plain(inputs).square().mean() + plain[1].weight.norm()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage in (0, 1, 2, 3):
        with variant(stage=stage) as strategy:
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            model.load_state_dict(start)
            model, optimizer = wrapped(model, accumulation.make_sgd, strategy)
            if stage == 3 and not inside_gather:
                loss = model(own_part(inputs)).square().mean()
                with pytest.raises(hybrid.ModelError, match=r"'1\.weight' is cut over 2 ranks.*gather_parameters"):
                    loss + model[1].weight.norm()
                continue
            for _ in range(2):
                with model.gather_parameters("1.weight") if inside_gather else contextlib.nullcontext():
                    (model(own_part(inputs)).square().mean() + model[1].weight.norm()).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_weights(model, weights_of(plain), SEVERAL_STEPS)


@pytest.mark.parametrize("inside_gather", [False, True])
def test_bc44f_a_norm_in_the_loss_is_right_or_refused_by_name(inside_gather: bool) -> None:
    """Fault: the one-element stand-in broadcast, and training went on with wrong numbers."""
    run_ranks(check_norm_outside, 2, inside_gather)


# -- BC-58 ------------------------------------------------------------------------------------------------------


class FromTokens(nn.Module):
    """Token ids are its only input; its embedding is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4).requires_grad_(False)
        self.linear = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(self.embedding(tokens)))


def check_frozen_front() -> None:
    tokens = torch.arange(8) % 11

    def build() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(FromTokens(), nn.Sequential(nn.Linear(4, 4), nn.Tanh())).double()

    plain = build()
    plain(tokens).square().mean().backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.requires_grad}
    for stage in (0, 1, 2, 3):
        for policy in (None, "full", "selective"):
            with variant(stage=stage) as strategy:
                if policy is not None:
                    strategy.recompute, strategy.recompute_configs = True, {"units": ["0", "1"], "policy": policy}
                model, _ = wrapped(build(), accumulation.make_sgd, strategy)
                model(own_part(tokens)).square().mean().backward()
                gradients = dict(model.named_gradients())
                assert gradients.keys() == wanted.keys()
                for name, gradient in gradients.items():
                    assert gradient is not None, name
                    assert_close(gradient, wanted[name], 1e-12, f"{name}, recompute {policy}")


def test_bc58_token_ids_into_a_recomputed_block_with_a_frozen_embedding() -> None:
    """Fault: all gradients None behind the first frozen layer."""
    run_ranks(check_frozen_front, 2)
