"""Whole values of what is cut: parameters, gradients and optimizer state under the plain model's names.

Every function here is collective: all ranks of the world call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hybrid.collectives import ops
from hybrid.sharding.bucket import Bucket
from hybrid.sharding.engine import ShardingEngine
from hybrid.sharding.offload import HostStore, Kind
from hybrid.sharding.offloaded_bucket import OffloadedBucket
from hybrid.sharding.optimizer_state import MASTER, OptimizerShards, own_copy

__all__ = ["bucket_gradients", "describe", "whole_optimizer_state", "whole_parameters"]


def whole_parameters(engine: ShardingEngine) -> Iterator[tuple[str, torch.Tensor]]:
    """(fqn, whole value) of every parameter, in the precision in which it was given; read it before the next.

    The values are those of the masters where there are any; a frozen parameter that computes in low precision has
    none. Sends each bucket once, where its values are not on every rank, and holds one whole bucket at a time.
    """
    engine.gather.finish()
    for bucket in engine.all_buckets():
        engine.adopt_edits(bucket)
        wants_master = bucket.master is not None and any(fqn in engine.compute_dtypes for fqn in bucket.fqns)
        if bucket.cut is None and not wants_master:
            whole = bucket.data
        else:
            own = bucket.own_data() if wants_master else bucket.own_parameters()
            whole = torch.zeros(bucket.partition.num_elements, dtype=own.dtype, device=bucket.data.device)
            host = engine.host if isinstance(bucket, OffloadedBucket) and bucket.is_on_host(own) else None
            _fill_own(host, whole[bucket.low : bucket.high], own, "masters" if wants_master else "parameters")
            _gather(engine, bucket, whole)
        for position, fqn in enumerate(bucket.fqns):
            given = torch.float32 if fqn in engine.compute_dtypes else bucket.key.dtype
            yield fqn, bucket.view(whole, position).to(given)
    inside = {fqn for bucket in engine.all_buckets() for fqn in bucket.fqns}
    for fqn, parameter in engine.parameters.items():
        if fqn not in inside:
            yield fqn, parameter.float() if fqn in engine.compute_dtypes else parameter


def bucket_gradients(engine: ShardingEngine, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor | None]]:
    """(fqn, whole settled gradient) for each parameter of a bucket; None where no rank has a gradient.

    Sends the bucket once, and holds one whole bucket while it is read.
    """
    whole = torch.zeros(bucket.partition.num_elements, dtype=bucket.key.grad_dtype, device=bucket.data.device)
    if bucket.settled is not None:
        own = bucket.settled * bucket.scale_for(bucket.settled)
        _fill_own(engine.host, whole[bucket.low : bucket.high], own, "gradients")
    _gather(engine, bucket, whole)
    for position, fqn in enumerate(bucket.fqns):
        has_gradient = bucket.has_gradient_anywhere[position]
        yield fqn, bucket.view(whole, position).clone() if has_gradient else None


def whole_optimizer_state(shards: OptimizerShards, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """fqn -> state with whole tensors, as a plain optimizer would hold it, and the master of a low-precision parameter.

    Parameters without either are left out.
    """
    engine = shards.engine
    own = shards.own_state()
    result: dict[str, dict[str, Any]] = {}
    for bucket in shards.buckets():
        group = engine.shard_group(bucket)
        forms = {
            fqn: {key: _form(bucket, fqn, value) for key, value in own.get(fqn, {}).items()} for fqn in bucket.fqns
        }
        from_all = ops.all_gather_object(forms, group=group)
        # Keys in the order in which the optimizer made them; ranks that own nothing of a parameter know none.
        keys = list(dict.fromkeys(key for forms in from_all for fqn in bucket.fqns for key in forms[fqn]))
        for key in keys:
            dtypes = {
                f[fqn][key][1] for f in from_all for fqn in bucket.fqns if f[fqn].get(key, ("", None))[0] == "cut"
            }
            for dtype in sorted(dtypes, key=str):
                whole = torch.zeros(bucket.partition.num_elements, dtype=dtype, device=bucket.data.device)
                for fqn, part in bucket.slice_of.items():
                    if forms[fqn].get(key, ("", None)) == ("cut", dtype):
                        here = bucket.slice_view(whole[bucket.low : bucket.high], part)
                        _fill_own(engine.host, here, own[fqn][key], "masters" if key == MASTER else "optimizer_state")
                _gather(engine, bucket, whole)
                for position, fqn in enumerate(bucket.fqns):
                    if any(f[fqn].get(key) == ("cut", dtype) for f in from_all):
                        result.setdefault(fqn, {})[key] = bucket.view(whole, position).clone()
            for fqn in bucket.fqns:
                plain = [f[fqn][key][1] for f in from_all if f[fqn].get(key, ("", None))[0] == "plain"]
                if plain:
                    result.setdefault(fqn, {})[key] = own_copy(plain[0])
    return result


def _form(bucket: Bucket, fqn: str, value: Any) -> tuple[str, Any]:
    """("cut", dtype) for a tensor shaped like the slice, ("plain", value) for anything else."""
    part = bucket.slice_of[fqn]
    shape = tuple(bucket.slice_view(bucket.own_data(), part).shape)
    if isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
        return ("cut", value.dtype)
    return ("plain", value)


def _fill_own(host: HostStore | None, here: torch.Tensor, own: torch.Tensor, kind: Kind) -> None:
    """Copy what this rank owns into a buffer on the device, from the host if it is there."""
    if host is None:
        here.copy_(own)
    else:
        host.to_device(here, own, kind)


def _gather(engine: ShardingEngine, bucket: Bucket, whole: torch.Tensor) -> None:
    group = engine.shard_group(bucket)
    if group.size > 1:
        ops.all_gather(whole, bounds=bucket.partition.bounds, group=group, tag=bucket.index).wait()


def describe(engine: ShardingEngine, optimizers: Sequence[OptimizerShards] = ()) -> str:
    """How parameters are cut, what each shard owns, the optimizers, and the map parameter -> bucket, range, shard."""
    how = "anywhere" if engine.partition_kind == "element" else "between whole parameters"
    num_shards = max((bucket.partition.num_shards for bucket in engine.buckets), default=1)
    owned = [0] * num_shards
    for bucket in engine.buckets:
        for shard in range(bucket.partition.num_shards):
            owned[shard] += sum(part.num_elements for part in bucket.partition.slices(shard))
    shares = ", ".join(f"shard {shard} owns {count}" for shard, count in enumerate(owned))
    lines = [
        "not cut: one shard"
        if num_shards == 1
        else f"cut {how} (partition {engine.partition_kind!r}): {shares} elements"
    ]
    for shards in optimizers:
        lines.append(f"optimizer {shards.name}: an update depends on {shards.scope.value}")
    rows = [("parameter", "shape", "dtype", "bucket", "elements", "owned by shard")]
    for bucket in engine.buckets:
        for position, fqn in enumerate(bucket.fqns):
            entry = bucket.partition.entries[position]
            owners = []
            for shard in range(bucket.partition.num_shards):
                for part in bucket.partition.slices(shard):
                    if part.fqn == fqn:
                        owners.append(f"{shard}:[{part.start},{part.stop})")
            stop = entry.offset_elements + entry.num_elements
            rows.append(
                (
                    fqn,
                    "×".join(map(str, bucket.parameters[position].shape)) or "scalar",
                    str(bucket.key.dtype).removeprefix("torch."),
                    str(bucket.index),
                    f"[{entry.offset_elements},{stop})",
                    " ".join(owners) or "(no elements)",
                )
            )
    for fqn, parameter in engine.parameters.items():
        if fqn not in engine.bucket_of:
            shape = "×".join(map(str, parameter.shape)) or "scalar"
            rows.append((fqn, shape, str(parameter.dtype).removeprefix("torch."), "–", "–", "frozen: on every rank"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)
