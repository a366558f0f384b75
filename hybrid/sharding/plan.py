"""From parameters to buckets: which lie together, in which order, cut how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn

from hybrid.collectives import ops
from hybrid.contracts.partition import PartitionKind, partition_bucket
from hybrid.contracts.placement import Placement
from hybrid.errors import ModelError
from hybrid.precision.casting import LOW_PRECISION
from hybrid.sharding.bucket import Bucket, BucketKey
from hybrid.sharding.offload import HostStore, OffloadKind
from hybrid.sharding.offloaded_bucket import OffloadedBucket
from hybrid.sharding.units import Unit, plan_buckets

__all__ = ["CUT_AXES", "EngineSettings", "check_parameters", "make_buckets", "split_axes"]

GradDtype = Literal["float32", "bfloat16", "float16", "param"]
ReduceDtype = Literal["float32", "bfloat16", "float16", "grad"]

# Axes over which ZeRO cuts; the other axes of a parameter's `partial_axes` hold replicas of the shards.
CUT_AXES = ("dp_shard", "cp")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What the engine needs of the resolved strategy; see `hybrid.strategy`."""

    zero_stage: int
    bucket_bytes: int
    overlap_comm: bool
    grad_dtype: GradDtype
    reduce_dtype: ReduceDtype = "grad"
    partition: PartitionKind
    prefetch: int = 1
    keep_for_a_run: bool = False
    offload: OffloadKind = "none"


def split_axes(sync_axes: tuple[str, ...], *, zero_stage: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(axes that cut, axes that replicate) of a bucket's sync axes; at stage 0 nothing is cut."""
    cut = tuple(axis for axis in sync_axes if axis in CUT_AXES) if zero_stage > 0 else ()
    return cut, tuple(axis for axis in sync_axes if axis not in cut)


def make_buckets(
    parameters: Mapping[str, nn.Parameter],
    *,
    placements: Mapping[str, Placement],
    units: Sequence[Unit],
    settings: EngineSettings,
    kind: PartitionKind,
    coordinates: Mapping[str, int],
    group_of: Callable[[tuple[str, ...]], ops.Group],
    compute_dtypes: Mapping[str, torch.dtype],
    device: torch.device,
    planned_elements: Mapping[str, int],
    first_index: int = 0,
    host: HostStore | None = None,
) -> tuple[Bucket, ...]:
    """Put `parameters` (all trainable, or all frozen) into buckets, in launch order: reverse registration.

    At stage 3 a bucket holds either blocks or what lies around them, since the two live for different times.
    `planned_elements` stands for the size of a parameter that other ranks may hold more or less of: which parameters
    lie together, and which rank has them whole, must not differ between ranks. With a `host` their state lies there.
    """
    launch_order = {fqn: place for place, fqn in enumerate(reversed(list(parameters)))}
    planned: list[tuple[BucketKey, tuple[str, ...]]] = []
    keys = {
        fqn: _key(compute_dtypes.get(fqn, parameter.dtype), placements[fqn], settings)
        for fqn, parameter in parameters.items()
    }
    kinds_of_unit = (True, False) if settings.zero_stage == 3 else (None,)
    for key in dict.fromkeys(keys.values()):
        if key.is_over_stages:  # each by itself: the stages that share one may share no other
            planned += [(key, (fqn,)) for fqn in parameters if keys[fqn] == key]
            continue
        for around in kinds_of_unit:
            sizes = []
            for unit in reversed(units):
                if around is not None and unit.is_around != around:
                    continue
                members = [fqn for fqn in reversed(unit.fqns) if keys.get(fqn) == key]
                if members:
                    elements = [planned_elements.get(fqn, parameters[fqn].numel()) for fqn in members]
                    sizes.append(tuple((fqn, n * key.dtype.itemsize) for fqn, n in zip(members, elements, strict=True)))
            planned += [(key, fqns) for fqns in plan_buckets(sizes, bucket_bytes=settings.bucket_bytes)]
    # A bucket is full when its last parameter has its gradient: launch in the order of these moments.
    planned.sort(key=lambda item: max(launch_order[fqn] for fqn in item[1]))
    buckets: list[Bucket] = []
    loads: dict[tuple[int, ...], list[int]] = {}
    for index, (key, fqns) in enumerate(planned, first_index):
        cut, _ = split_axes(key.sync_axes, zero_stage=settings.zero_stage)
        group = group_of(cut)
        partition = partition_bucket(
            [(fqn, parameters[fqn].numel()) for fqn in fqns],
            num_shards=group.size,
            element_bytes=min(key.dtype.itemsize, key.grad_dtype.itemsize),
            kind=kind,
            loads=loads.setdefault(group.ranks, [0] * group.size),
            planned=[planned_elements.get(fqn, parameters[fqn].numel()) for fqn in fqns],
        )
        keeps_parameters = host is not None and host.holds_parameters
        make = Bucket if host is None else partial(OffloadedBucket, host=host)
        buckets.append(
            make(
                index=index,
                key=key,
                partition=partition,
                parameters=[parameters[entry.fqn] for entry in partition.entries],
                shard=group.rank,
                counts=placements[fqns[0]].is_owner(coordinates, cut),
                device=device,
                cut_parameters=settings.zero_stage == 3 and (group.size > 1 or keeps_parameters),
            )
        )
    return tuple(buckets)


def _key(dtype: torch.dtype, placement: Placement, settings: EngineSettings) -> BucketKey:
    grad_dtype = dtype
    if dtype in LOW_PRECISION and settings.grad_dtype != "param":
        grad_dtype = getattr(torch, settings.grad_dtype)
    return BucketKey(
        dtype=dtype,
        grad_dtype=grad_dtype,
        sync_axes=placement.partial_axes,
        copy_axes=placement.copy_axes,
        chunk=placement.chunks[0],
    )


def check_parameters(parameters: Mapping[str, nn.Parameter], placements: Mapping[str, Placement]) -> None:
    """Raises ModelError: a parameter without a record, several devices, or two parameters over the same memory."""
    problems = [f"{fqn}: no placement record" for fqn in parameters if fqn not in placements]
    devices = {parameter.device for parameter in parameters.values() if not parameter.is_meta}
    if len(devices) > 1:
        listed = ", ".join(sorted(f"{fqn} on {p.device}" for fqn, p in list(parameters.items())[:4]))
        problems.append(f"parameters lie on {len(devices)} devices ({listed}, ...): move the model to one device")
    owner_of_storage: dict[int, list[tuple[int, int, str]]] = {}
    for fqn, parameter in parameters.items():
        if parameter.numel() == 0 or parameter.is_meta:
            continue
        begin = int(parameter.storage_offset())
        last: int = sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True))
        ranges = owner_of_storage.setdefault(parameter.untyped_storage().data_ptr(), [])
        for other_begin, other_end, other in ranges:
            if begin <= other_end and other_begin <= begin + last:
                problems.append(
                    f"{other!r} and {fqn!r} are two parameters over the same memory; tie them by using one "
                    "Parameter object in both places"
                )
        ranges.append((begin, begin + last, fqn))
    if problems:
        raise ModelError("; ".join(problems))
