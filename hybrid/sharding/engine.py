"""The sharding engine: one model's parameters in buckets, with everything that happens to them in a step.

forward                      parameters are whole (stages 0-2)
backward                     Reducer fills and reduces buckets               reduce.py
settle(scale)                sums over replicas; the gradient becomes `scale` × sum
(norm, clip)                 compose/grad_norm.py, over the settled shards
step                         the optimizer sees only own shards              optimizer_state.py
gather                       updated shards go to the other ranks            gather.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from hybrid.collectives import ops
from hybrid.contracts.partition import PartitionKind, partition_bucket
from hybrid.contracts.placement import Placement
from hybrid.errors import ModelError
from hybrid.sharding.bucket import LOW_PRECISION, Bucket, BucketKey
from hybrid.sharding.gather import ParameterGather
from hybrid.sharding.reduce import Reducer
from hybrid.sharding.units import Unit, plan_buckets

__all__ = ["EngineSettings", "ShardingEngine"]

GradDtype = Literal["float32", "bfloat16", "float16", "param"]

# Axes over which ZeRO cuts; the other axes of a parameter's `partial_axes` hold replicas of the shards.
CUT_AXES = ("dp_shard", "cp")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What the engine needs of the resolved strategy; see `hybrid.strategy`."""

    zero_stage: int
    bucket_bytes: int
    overlap_comm: bool
    grad_dtype: GradDtype
    partition: PartitionKind


class ShardingEngine:
    """Cuts a model's trainable parameters into buckets and keeps them in step over the ranks.

    Args:
        parameters: fqn -> parameter, in registration order, each tied parameter once; frozen ones are left alone.
        placements: fqn -> record, for each of them.
        units: from `plan_units`, in registration order.
        coordinates: this rank's coordinate on each mesh axis.
        group_of: axes -> group of the ranks that differ from this one on these axes alone.

    Raises:
        ModelError: a parameter without a record, on another device than the rest, or two that share memory.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        placements: Mapping[str, Placement],
        units: Sequence[Unit],
        settings: EngineSettings,
        coordinates: Mapping[str, int],
        group_of: Callable[[tuple[str, ...]], ops.Group],
    ) -> None:
        self.settings = settings
        self.parameters = dict(parameters)
        self.placements = dict(placements)
        self._check(self.parameters, placements)
        self._trainable = {fqn: p for fqn, p in self.parameters.items() if p.requires_grad}
        self.device = next((p.device for p in self.parameters.values()), torch.device("cpu"))
        self.fqn_of = {id(parameter): fqn for fqn, parameter in self.parameters.items()}
        self._coordinates = dict(coordinates)
        self._group_of = group_of
        self._units = tuple(units)
        self.settlements = 0
        self._build(settings.partition)

    # -- construction ----------------------------------------------------------------------------------

    def _build(self, kind: PartitionKind) -> None:
        self.partition_kind: PartitionKind = kind
        self.buckets = self._make_buckets(kind)
        self.bucket_of = {fqn: bucket for bucket in self.buckets for fqn in bucket.fqns}
        reduce_groups, shard_groups = [], []
        for bucket in self.buckets:
            cut, kept = self._split_axes(bucket.key.sync_axes)
            reduce_groups.append((self._group_of(cut or kept), self._group_of(kept if cut else ())))
            shard_groups.append(self._group_of(cut))
        self.reducer = Reducer(self.buckets, groups=reduce_groups, overlap=self.settings.overlap_comm)
        self.gather = ParameterGather(self.buckets, groups=shard_groups)
        self._shard_groups = tuple(shard_groups)

    def repartition(self, kind: PartitionKind) -> None:
        """Cut anew, before any gradient exists. Parameters keep their values."""
        if kind == self.partition_kind:
            return
        self.reducer.remove_hooks()
        self._build(kind)

    def _split_axes(self, sync_axes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(axes that cut, axes that replicate) of a bucket's sync axes; at stage 0 nothing is cut."""
        cut = tuple(axis for axis in sync_axes if axis in CUT_AXES) if self.settings.zero_stage > 0 else ()
        return cut, tuple(axis for axis in sync_axes if axis not in cut)

    def _key(self, fqn: str) -> BucketKey:
        dtype = self._trainable[fqn].dtype
        if self.settings.grad_dtype == "param" or dtype not in LOW_PRECISION:
            grad_dtype = dtype
        else:
            grad_dtype = getattr(torch, self.settings.grad_dtype)
        return BucketKey(dtype=dtype, grad_dtype=grad_dtype, sync_axes=self.placements[fqn].partial_axes)

    def _make_buckets(self, kind: PartitionKind) -> tuple[Bucket, ...]:
        launch_order = {fqn: place for place, fqn in enumerate(reversed(self._trainable))}
        keys = list(dict.fromkeys(self._key(fqn) for fqn in self._trainable))
        planned: list[tuple[BucketKey, tuple[str, ...]]] = []
        for key in keys:
            units = []
            for unit in reversed(self._units):
                members = [fqn for fqn in reversed(unit.fqns) if fqn in self._trainable and self._key(fqn) == key]
                sizes = tuple((fqn, self._trainable[fqn].numel() * key.dtype.itemsize) for fqn in members)
                if sizes:
                    units.append(sizes)
            planned += [(key, fqns) for fqns in plan_buckets(units, bucket_bytes=self.settings.bucket_bytes)]
        # A bucket is full when its last parameter has its gradient: launch in the order of these moments.
        planned.sort(key=lambda item: max(launch_order[fqn] for fqn in item[1]))
        buckets: list[Bucket] = []
        loads: dict[tuple[int, ...], list[int]] = {}
        for index, (key, fqns) in enumerate(planned):
            cut, _ = self._split_axes(key.sync_axes)
            group = self._group_of(cut)
            partition = partition_bucket(
                [(fqn, self._trainable[fqn].numel()) for fqn in fqns],
                num_shards=group.size,
                element_bytes=min(key.dtype.itemsize, key.grad_dtype.itemsize),
                kind=kind,
                loads=loads.setdefault(group.ranks, [0] * group.size),
            )
            buckets.append(
                Bucket(
                    index=index,
                    key=key,
                    partition=partition,
                    parameters=[self._trainable[entry.fqn] for entry in partition.entries],
                    shard=group.rank,
                    counts=self.placements[fqns[0]].is_owner(self._coordinates, cut),
                )
            )
        return tuple(buckets)

    @staticmethod
    def _check(parameters: Mapping[str, torch.nn.Parameter], placements: Mapping[str, Placement]) -> None:
        problems = [f"{fqn}: no placement record" for fqn in parameters if fqn not in placements]
        devices = {parameter.device for parameter in parameters.values()}
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

    # -- gradients -------------------------------------------------------------------------------------

    def reduce_all(self) -> None:
        """Bring every gradient into the accumulators of its shard, summed over all its ranks."""
        self.reducer.reduce_all()

    def settle(self, scale: float) -> None:
        """The reduced sums, times `scale`, become the gradient that norm, clip and step see."""
        for bucket in self.buckets:
            bucket.settle(scale)
        self.settlements += 1

    def zero_grad(self, parameters: Sequence[torch.nn.Parameter] | None = None, *, set_to_none: bool = True) -> None:
        """Empty local buffers and accumulators, of all parameters or of these."""
        self.reducer.finish_round()
        chosen = None if parameters is None else {id(parameter) for parameter in parameters}
        for bucket in self.buckets:
            inside = [chosen is None or id(parameter) in chosen for parameter in bucket.parameters]
            if set_to_none and all(inside):
                bucket.drop_all()
            else:
                for position in (position for position, is_inside in enumerate(inside) if is_inside):
                    if set_to_none:
                        bucket.drop(position)
                    else:
                        bucket.fill_zero(position)
            if set_to_none:
                for parameter, is_inside in zip(bucket.parameters, inside, strict=True):
                    if is_inside:
                        parameter.grad = None

    def has_gradient_flags(self) -> list[bool]:
        """Per trainable parameter, in bucket order, whether a real gradient came on this rank since zero_grad."""
        return [flag for bucket in self.buckets for flag in bucket.has_gradient]

    def set_gradient_flags(self, anywhere: Sequence[bool]) -> None:
        """Store, in the same order, whether one came on any rank; `p.grad` is then alike on all ranks."""
        position = 0
        for bucket in self.buckets:
            count = len(bucket.parameters)
            bucket.has_gradient_anywhere = list(anywhere[position : position + count])
            for fqn, parameter, anywhere_here in zip(
                bucket.fqns, bucket.parameters, bucket.has_gradient_anywhere, strict=True
            ):
                if anywhere_here and parameter.grad is None:
                    parameter.grad = self.reducer.handles[fqn]
            bucket.has_gradient = list(bucket.has_gradient_anywhere)
            position += count

    # -- parameters ------------------------------------------------------------------------------------

    def check_unchanged(self) -> None:
        """Refuse what was done to the model behind the engine's back since it was wrapped.

        Raises:
            ModelError: `p.data` was replaced (`.to()`, `.half()`, a hand-made assignment), or `requires_grad` changed.
        """
        for bucket in self.buckets:
            moved = bucket.moved()
            if moved is not None:
                raise ModelError(
                    f"the memory of parameter {moved!r} was replaced after distributed_model (by .to(), .half(), "
                    "an assignment to .data): the engine would update the old one. Do it before distributed_model, "
                    "or edit in place: `with torch.no_grad(): p.copy_(value)`"
                )
        for fqn, parameter in self.parameters.items():
            if parameter.requires_grad != (fqn in self._trainable):
                now = "trainable" if parameter.requires_grad else "frozen"
                raise ModelError(
                    f"parameter {fqn!r} is {now} now and was not when the model was wrapped; freeze and unfreeze "
                    "before distributed_model (wrap a fresh model with the new flags)"
                )

    def after_update(self, buckets: Sequence[Bucket], *, deferred: bool) -> None:
        """Write masters back, send updated shards to the other ranks; returns when they are there unless `deferred`."""
        for bucket in buckets:
            if bucket.master is not None:
                bucket.data[bucket.low : bucket.high].copy_(bucket.master)
        self.gather.start(buckets)
        if deferred:
            self.gather.defer()
        else:
            self.gather.finish()
        # Buckets are written behind the parameters' own version counters; without this a graph made before the
        # step could be used after it and give wrong gradients where plain torch raises.
        torch.autograd.graph.increment_version([p for bucket in buckets for p in bucket.parameters])

    def refresh_masters(self) -> None:
        """Take parameter values that were written in place (load_state_dict) into the fp32 masters."""
        self.gather.finish()
        for bucket in self.buckets:
            if bucket.master is not None:
                bucket.master.copy_(bucket.data[bucket.low : bucket.high])

    def shard_group(self, bucket: Bucket) -> ops.Group:
        return self._shard_groups[bucket.index]

    # -- facts -----------------------------------------------------------------------------------------

    def parameter_bytes(self) -> int:
        frozen = sum(p.numel() * p.element_size() for fqn, p in self.parameters.items() if fqn not in self._trainable)
        masters = sum(bucket.master.numel() * 4 for bucket in self.buckets if bucket.master is not None)
        return frozen + masters + sum(bucket.data.untyped_storage().nbytes() for bucket in self.buckets)

    def gradient_bytes(self) -> int:
        return sum(bucket.gradient_bytes() for bucket in self.buckets)

    def trainable(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return iter(self._trainable.items())
