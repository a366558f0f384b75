"""The global gradient norm, and clipping: what one process would compute, from shards.

Each element is counted by its one owner; powers are accumulated in fp64 over blocks (in fp32 a sum of squares
over one large flat buffer is off by 1 % at 1.3e8 elements); one all-reduce over the world carries the sum, and
with it which parameters had a gradient on any rank.
"""

from __future__ import annotations

import itertools
import math
import zlib

import torch

from hybrid.collectives import ops
from hybrid.collectives.call import describe_history
from hybrid.errors import CollectiveError, OptimizerError, StrategyError
from hybrid.sharding.bucket import Bucket
from hybrid.sharding.engine import ShardingEngine
from hybrid.strategy.resolved import GradientClipping

__all__ = ["agree", "clip", "clip_by_norm", "clip_by_value"]

# Whose fp64 copies stay in the cache of a CPU; elsewhere few calls count for more.
_BLOCK_ELEMENTS_CPU = 1 << 16
_BLOCK_ELEMENTS = 1 << 22

# As torch.nn.utils.clip_grad_norm_: the divisor that keeps a zero gradient from dividing by zero.
_CLIP_EPSILON = 1e-6


def agree(
    engine: ShardingEngine,
    *,
    world: ops.Group,
    norm_type: float | None,
    rates: tuple[str, ...] = (),
    applies_scale: bool = False,
) -> torch.Tensor | None:
    """Agree over the world on which parameters have a gradient and, if `norm_type` is given, on the norm.

    Args:
        engine: its gradients are settled.
        world: the group of all ranks.
        norm_type: p of the p-norm; `math.inf` for the largest absolute value; None: no norm wanted.
        rates: of the optimizer that is about to step, by group.
        applies_scale: the gradients' pending factors are not going to change: multiply on the way.

    Returns:
        The norm as a 0-d fp64 tensor, equal on all ranks, or None.

    Raises:
        CollectiveError: ranks asked for different norms.
        OptimizerError: ranks have different rates.
    """
    if norm_type is not None and not norm_type > 0:
        raise StrategyError(f"norm_type = {norm_type:g}: the order of a norm is a number above 0, or infinity")
    flags = engine.has_gradient_flags()
    device = engine.device
    power = 0.0 if norm_type is None or math.isinf(norm_type) else None
    # A digest of what is asked for goes along, with its square: ranks that ask for different things, or step at
    # different rates, would get wrong sums.
    asked = float((zlib.crc32(repr((norm_type, rates)).encode()) & 0xFFFFF) + 1)
    # At stage 3 a number goes along that shows whether all ranks gathered alike since the last time.
    gathered = [0.0 if engine.unsharder is None else engine.unsharder.gathered.order.term()]
    flags_end = 3 + len(flags)
    parts = [0.0, asked, asked * asked, *flags, *(gathered if engine.settings.zero_stage == 3 else ())]
    message = torch.tensor(parts, dtype=torch.float64, device=device)
    if power is None:
        assert norm_type is not None
        message[0] = _power_sum(engine, norm_type, applies_scale=applies_scale)
    ops.all_reduce(message, group=world, control=True).wait()
    numbers = message.tolist()
    if abs(numbers[1] ** 2 - world.size * numbers[2]) > 1e-9 * numbers[2]:
        _check_rates(norm_type, rates, world)
        wanted = "no norm" if norm_type is None else f"the norm of order {norm_type:g}"
        rank = world.ranks[world.rank]
        raise CollectiveError(
            f"rank {rank}: all_reduce over world: the ranks asked for different norms of the gradients, this one for "
            f"{wanted}, another one not; call clip_grad_norm_ on every rank, with the same order\n"
            f"The last collectives of rank {rank}, oldest first:\n{describe_history()}"
        )
    if engine.unsharder is not None:
        engine.unsharder.gathered.check_order(numbers[-1])
    engine.set_gradient_flags([number > 0 for number in numbers[3:flags_end]])
    if norm_type is None:
        return None
    if math.isinf(norm_type):
        largest = _largest(engine)
        ops.all_reduce(largest, group=world, op="max", control=True).wait()
        return largest
    return message[0] ** (1.0 / norm_type)


def _check_rates(norm_type: float | None, rates: tuple[str, ...], world: ops.Group) -> None:
    """Raises OptimizerError: all ranks asked for the same norm, and their rates differ. *Collective.*"""
    everyone = ops.all_gather_object((norm_type, rates), group=world)
    if any(norm != norm_type or len(theirs) != len(rates) for norm, theirs in everyone):
        return
    for index, (rank, (_, theirs)) in itertools.product(range(len(rates)), zip(world.ranks, everyone, strict=True)):
        first = everyone[0][1]
        if theirs[index] != first[index]:
            raise OptimizerError(
                f"the learning rate of param group {index} is {first[index]} on rank {world.ranks[0]} and "
                f"{theirs[index]} on rank {rank}: step schedulers alike on all ranks, and give ReduceLROnPlateau what "
                "is the same on all of them (train_batch's loss is; a rank's own loss is not)"
            )


def clip(engine: ShardingEngine, clipping: GradientClipping, norm: torch.Tensor | None) -> None:
    """Clip as a strategy says; `norm` of the gradients is needed where it says by norm."""
    if clipping.kind == "norm":
        assert norm is not None and clipping.max_norm is not None
        clip_by_norm(engine, norm, max_norm=clipping.max_norm)
    else:
        assert clipping.clip_value is not None
        clip_by_value(engine, clip_value=clipping.clip_value)


def clip_by_norm(engine: ShardingEngine, norm: torch.Tensor, *, max_norm: float) -> None:
    """Scale every gradient by min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does."""
    coefficient = torch.clamp(max_norm / (norm + _CLIP_EPSILON), max=1.0)
    factor: float | torch.Tensor = coefficient if coefficient.is_cuda else coefficient.item()
    for bucket in engine.buckets:
        bucket.scale = bucket.scale * factor


def clip_by_value(engine: ShardingEngine, *, clip_value: float) -> None:
    """Clamp every gradient element to [-clip_value, clip_value]; needs no communication."""
    for bucket in engine.buckets:
        bucket.apply_scale()
        if bucket.settled is not None:
            bucket.settled.clamp_(-clip_value, clip_value)


def _power_sum(engine: ShardingEngine, norm_type: float, *, applies_scale: bool) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    for bucket in engine.buckets:
        if bucket.settled is None or not bucket.counts:
            continue
        part = torch.zeros((), dtype=torch.float64, device=engine.device)
        factor = bucket.scale_for(bucket.settled) if applies_scale and bucket.has_pending_scale() else None
        size = _BLOCK_ELEMENTS_CPU if bucket.settled.device.type == "cpu" else _BLOCK_ELEMENTS
        for block in bucket.settled.split(size):
            if factor is not None:  # here, where the block is in the cache
                block.mul_(factor)
            wide = (block.abs() if block.is_complex() else block).double()
            # Not in place before there is a copy: of an fp64 gradient `wide` is the gradient itself.
            power = torch.dot(wide, wide) if norm_type == 2.0 else wide.abs().pow_(norm_type).sum()
            part += power.to(part.device)
        if factor is not None:
            bucket.scale = 1.0
        total += part * _magnitude(bucket) ** norm_type
    return total


def _magnitude(bucket: Bucket) -> torch.Tensor:
    """|pending factor| of a settled gradient, as an fp64 tensor on its device."""
    scale, device = bucket.scale, bucket.data.device
    if isinstance(scale, torch.Tensor):
        return scale.to(device, torch.float64).abs()
    return torch.full((), abs(scale), dtype=torch.float64, device=device)  # a copy to CUDA would keep the host


def _largest(engine: ShardingEngine) -> torch.Tensor:
    largest = torch.zeros((), dtype=torch.float64, device=engine.device)
    for bucket in engine.buckets:
        if bucket.settled is not None and bucket.settled.numel() > 0:
            here = bucket.settled.abs().max().double().to(largest.device)
            largest = torch.maximum(largest, here * _magnitude(bucket))
    return largest
