"""The sharding engine: one model's parameters in buckets, with everything that happens to them in a step.

forward                      parameters are whole (stages 0-2)
backward                     Reducer fills and reduces buckets               reduce.py
settle(scale)                sums over replicas; the gradient becomes `scale` × sum
(norm, clip)                 compose/grad_norm.py, over the settled shards
step                         the optimizer sees only own shards              optimizer_state.py
gather                       updated shards go to the other ranks            gather.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import nn

from hybrid import shims
from hybrid.collectives import ops
from hybrid.contracts.layout import axis_name
from hybrid.contracts.partition import PartitionKind
from hybrid.contracts.placement import Placement
from hybrid.errors import ModelError
from hybrid.sharding.bucket import Bucket
from hybrid.sharding.gather import ParameterGather, carry_masters
from hybrid.sharding.offload import HostStore
from hybrid.sharding.offloaded_bucket import OffloadedBucket
from hybrid.sharding.plan import EngineSettings, check_parameters, make_buckets, split_axes
from hybrid.sharding.reduce import Reducer
from hybrid.sharding.units import Unit
from hybrid.sharding.unshard import Unsharder

__all__ = ["EngineSettings", "ShardingEngine"]

_REQUIRES_GRAD = attrgetter("requires_grad")

# The ranks that differ on these alone run the same layers of the model.
_SAME_PARAMETERS = ("dp_replicate", "dp_shard", "tp")


class ShardingEngine:
    """Cuts a model's trainable parameters into buckets and keeps them in step over the ranks.

    Args:
        parameters: fqn -> parameter, in registration order, each tied parameter once; frozen ones are left alone.
        placements: fqn -> record, for each of them.
        units: from `plan_units`, in registration order.
        coordinates: this rank's coordinate on each mesh axis.
        group_of: axes -> group of the ranks that differ from this one on these axes alone.
        compute_dtypes: fqn -> lower dtype that a parameter gets; its fp32 master keeps the values as given.
        world_fqns: trainable parameters of the whole model, where other ranks hold others of them.
        planned_elements: fqn -> size to plan buckets by, of parameters of which ranks hold parts of unequal size.
        device: where the buffers are; None: where the parameters are. Those on the meta device get values by `store`.
        peers: the reducers of all models trained in this process, in the order of their wrapping.
        neighbours: of the memory that whole gradients are to lie in, so that it stays mapped between steps; None: it
            is given back to the system.

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
        compute_dtypes: Mapping[str, torch.dtype] | None = None,
        planned_elements: Mapping[str, int] | None = None,
        world_fqns: Sequence[str] | None = None,
        device: torch.device | None = None,
        peers: Callable[[], Sequence[Reducer]] = tuple,
        neighbours: ops.Group | None = None,
    ) -> None:
        self.settings = settings
        self._neighbours = neighbours
        self.parameters = dict(parameters)
        self.placements = dict(placements)
        check_parameters(self.parameters, placements)
        self._wanted = [parameter.requires_grad for parameter in self.parameters.values()]
        self._trainable = {fqn: p for fqn, p in self.parameters.items() if p.requires_grad}
        self.device = device or next((p.device for p in self.parameters.values()), torch.device("cpu"))
        wide = any(p.dtype == torch.float64 for p in self.parameters.values())
        self.result_dtype = torch.float64 if wide else torch.float32  # of losses and norms that users get
        self.fqn_of = {id(parameter): fqn for fqn, parameter in self.parameters.items()}
        self._coordinates = dict(coordinates)
        self._group_of = group_of
        self._peers = peers
        self._planned_elements = dict(planned_elements or {})
        self.compute_dtypes = dict(compute_dtypes or {})
        self._units = tuple(units)
        # Trainable parameters of the whole model, the same list on all ranks; with a pipeline, other stages' too.
        self.world_fqns: tuple[str, ...] = tuple(self._trainable if world_fqns is None else world_fqns)
        self.any_gradient_anywhere = False
        self._frozen_later: list[str] = []  # frozen since wrapping, as of the last check
        self.settlements = 0
        self.unsharder: Unsharder | None = None
        self.host: HostStore | None = None
        """Where state lies that is offloaded."""
        if settings.offload != "none":
            self.host = HostStore(self.device, holds_parameters=settings.offload == "parameters")
        self._build(settings.partition)

    # -- construction ----------------------------------------------------------------------------------

    def _build(self, kind: PartitionKind) -> None:
        self.partition_kind: PartitionKind = kind
        self.buckets = self._make_buckets(self._trainable, kind)
        for bucket in self.buckets:
            bucket.lie_near(self._neighbours)
        frozen = {fqn: p for fqn, p in self.parameters.items() if fqn not in self._trainable}
        cut_frozen = self.settings.zero_stage == 3
        self.frozen_buckets = self._make_buckets(frozen, kind, first_index=len(self.buckets)) if cut_frozen else ()
        self.bucket_of = {fqn: bucket for bucket in self.buckets for fqn in bucket.fqns}
        place_of = {fqn: place for place, fqn in enumerate(self.world_fqns)}
        self._world_places = [[place_of[fqn] for fqn in bucket.fqns] for bucket in self.buckets]
        reduce_groups = []
        for bucket in self.buckets:
            cut, kept = split_axes(bucket.key.sync_axes, zero_stage=self.settings.zero_stage)
            # What other pipeline stages hold too is summed over them once per step: they work at different times.
            late = tuple(axis for axis in kept if axis_name(axis) == "pp")
            soon = tuple(axis for axis in kept if axis not in late)
            reduce_groups.append((self._group_of(cut or soon), self._group_of((*(soon if cut else ()), *late))))
            if isinstance(bucket, OffloadedBucket):
                bucket.sums_late = reduce_groups[-1][1].size > 1
        self._shard_groups = tuple(
            self._group_of(split_axes(bucket.key.sync_axes, zero_stage=self.settings.zero_stage)[0])
            for bucket in self.all_buckets()
        )
        self.reducer = Reducer(
            self.buckets,
            groups=reduce_groups,
            overlap=self.settings.overlap_comm,
            # At stages 2 and 3 one bucket fills while one is under way; below, whole gradients are there anyway.
            max_in_flight=1 if self.settings.zero_stage >= 2 else 4,
            peers=self._peers,
            reduce_dtype=None if self.settings.reduce_dtype == "grad" else getattr(torch, self.settings.reduce_dtype),
        )
        self.gather = ParameterGather(self._shard_groups)

    def _make_buckets(
        self, parameters: Mapping[str, nn.Parameter], kind: PartitionKind, *, first_index: int = 0
    ) -> tuple[Bucket, ...]:
        return make_buckets(
            parameters,
            placements=self.placements,
            units=self._units,
            settings=self.settings,
            kind=kind,
            coordinates=self._coordinates,
            group_of=self._group_of,
            compute_dtypes=self.compute_dtypes,
            device=self.device,
            planned_elements=self._planned_elements,
            first_index=first_index,
            host=self.host,
        )

    def repartition(self, kind: PartitionKind) -> None:
        """Cut anew, before any gradient exists (stages 1 and 2). *Collective.*

        Parameters and masters keep their values.
        """
        if kind == self.partition_kind:
            return
        assert self.unsharder is None
        self.gather.finish()
        before, groups = self.buckets, self._shard_groups
        for bucket in before:
            bucket.take_own_from_data()
        self.reducer.remove_hooks()
        self._build(kind)
        carry_masters(before, self.buckets, groups=groups)

    def start_unsharding(self, model: nn.Module) -> None:
        """From now on parameters are whole only while needed (stage 3; nothing to do where nothing is cut)."""
        cut = [bucket for bucket in self.all_buckets() if bucket.cut is not None]
        if not cut:
            return
        self.unsharder = Unsharder(
            model,
            self.all_buckets(),
            groups=self._shard_groups,
            unit_names=[unit.name for unit in self._units if not unit.is_around],
            prefetch=self.settings.prefetch,
            keep_for_a_run=self.settings.keep_for_a_run,
        )

    def end_run(self) -> None:
        """Other micro-batches than those of a run follow, or none: nothing needs to stay whole for them (stage 3)."""
        if self.unsharder is not None:
            self.unsharder.end_run()

    def all_buckets(self) -> tuple[Bucket, ...]:
        """Those with gradients first, then those of frozen parameters (stage 3 only)."""
        return (*self.buckets, *self.frozen_buckets)

    # -- gradients -------------------------------------------------------------------------------------

    def reduce_all(self) -> None:
        """Bring every gradient into the accumulators of its shard, summed over all its ranks."""
        self.reducer.reduce_all()

    def settle(self, scale: float) -> None:
        """The reduced sums, times `scale`, become the gradient that norm, clip and step see."""
        for bucket in self.buckets:
            bucket.settle(scale * self.reducer.undo_scale(bucket))
        self.settlements += 1

    def scale_settled(self, factor: float) -> None:
        """Multiply what is settled already, before more is added."""
        for bucket in self.buckets:
            if bucket.settled is not None:
                bucket.scale = bucket.scale * factor

    def zero_grad(self, parameters: Sequence[torch.nn.Parameter] | None = None, *, set_to_none: bool = True) -> None:
        """Empty local buffers and accumulators, of all parameters or of these."""
        self.reducer.finish_round()
        chosen = None if parameters is None else set(map(id, parameters))
        for bucket in self.buckets:
            positions: Sequence[int] = range(len(bucket.parameters))
            if chosen is not None and not chosen.issuperset(map(id, bucket.parameters)):
                positions = [p for p in positions if id(bucket.parameters[p]) in chosen]
            if not set_to_none:
                for position in positions:
                    bucket.fill_zero(position)
                continue
            if len(positions) == len(bucket.parameters):
                bucket.drop_all()
            else:
                for position in positions:
                    bucket.drop(position)
            for position in positions:
                bucket.parameters[position].grad = None

    def has_gradient_flags(self) -> list[bool]:
        """For each of `world_fqns`, whether a real gradient came on this rank since zero_grad."""
        flags = [False] * len(self.world_fqns)
        for bucket, places in zip(self.buckets, self._world_places, strict=True):
            for place, flag in zip(places, bucket.has_gradient, strict=True):
                flags[place] = flag
        return flags

    def set_gradient_flags(self, flags: Sequence[bool]) -> None:
        """Store, in the same order, whether one came on any rank; `p.grad` is then alike on all ranks."""
        self.any_gradient_anywhere = any(flags)
        for bucket, places in zip(self.buckets, self._world_places, strict=True):
            bucket.has_gradient_anywhere = [flags[place] for place in places]
            self.reducer.show_handles(bucket)
            bucket.has_gradient = list(bucket.has_gradient_anywhere)
        if not self.any_gradient_anywhere:
            for bucket in self.buckets:
                bucket.drop_all()
        else:
            self.reducer.expect([bucket.has_gradient_anywhere for bucket in self.buckets])

    # -- parameters ------------------------------------------------------------------------------------

    def check_memory(self) -> None:
        """Refuse a model whose memory was replaced as a whole, by a look at one parameter per bucket."""
        for bucket in self.all_buckets():
            self._refuse_moved(bucket.moved(bucket.fqns[:1]))

    def check_unchanged(self) -> None:
        """Refuse what was done to the model behind the engine's back since it was wrapped.

        What is frozen since then has no gradient, and is left alone as plain torch leaves it; it may be trained again.
        *Collective* over the ranks with the same parameters, where anything was frozen or unfrozen since the last call.

        Raises:
            ModelError: `p.data` was replaced (`.to()`, `.half()`, a hand-made assignment); a parameter that was frozen
                when the model was wrapped is trainable; not all ranks have frozen the same.
        """
        for bucket in self.all_buckets():
            self._refuse_moved(bucket.moved(bucket.fqns))
        with shims.plain_tensors():  # of a value that is elsewhere, too, all is here but the value
            wants = list(map(_REQUIRES_GRAD, self.parameters.values()))
        if not self._frozen_later and wants == self._wanted:
            return
        frozen = []
        for fqn, parameter in self.parameters.items():
            if parameter.requires_grad and fqn not in self._trainable:
                raise ModelError(
                    f"parameter {fqn!r} is trainable now and was frozen when the model was wrapped: it has no gradient "
                    "buffer. Wrap a model in which all is trainable that ever will be, and freeze after "
                    "distributed_model (requires_grad_(False)); that may be taken back at any time"
                )
            if not parameter.requires_grad and fqn in self._trainable:
                frozen.append(fqn)
        if frozen != self._frozen_later:
            self._check_frozen_alike(frozen)

    def _check_frozen_alike(self, frozen: list[str]) -> None:
        self._frozen_later = frozen
        group = self._group_of(_SAME_PARAMETERS)
        for rank, theirs in zip(group.ranks, ops.all_gather_object(frozen, group=group), strict=True):
            if theirs != frozen:
                fqn = min(set(theirs) ^ set(frozen))
                raise ModelError(
                    f"parameter {fqn!r} was frozen after distributed_model on some ranks only (rank "
                    f"{group.ranks[group.rank]} and rank {rank} differ): its gradient would be that of a part of the "
                    "batch; set requires_grad alike on all ranks"
                )

    def adopt_hand_made_changes(self) -> None:
        """Look at what the user did to `p.grad` since: None drops the gradient, a tensor of theirs is refused."""
        self.reducer.adopt_all()

    @staticmethod
    def _refuse_moved(fqn: str | None) -> None:
        if fqn is not None:
            raise ModelError(
                f"the memory of parameter {fqn!r} was replaced after distributed_model (by .to(), .half(), "
                "an assignment to .data): the engine would update the old one. Do it before distributed_model, "
                "or edit in place: `with torch.no_grad(): p.copy_(value)`"
            )

    def after_update(self, buckets: Sequence[Bucket], *, deferred: bool) -> None:
        """Make the updated shards the parameters of every rank; returns when they are, unless `deferred`.

        At stage 3 nothing is sent: what is whole is out of date and freed, the next use gathers the new values.
        """
        for bucket in sorted(buckets, key=lambda bucket: -bucket.index):
            bucket.write_back_master()
            if self.unsharder is None:
                self.gather.start((bucket,))
        if self.unsharder is not None:
            self.unsharder.free_all()
        else:
            if deferred:
                self.gather.defer()
            else:
                self.gather.finish()
        # Buckets are written behind the parameters' own version counters; without this a graph made before the
        # step could be used after it and give wrong gradients where plain torch raises.
        torch.autograd.graph.increment_version([p for bucket in buckets for p in bucket.parameters])

    def check_nothing_edited(self, call: str) -> None:
        """Raises ModelError inside `gather_parameters` at stage 3, where `call` would be overwritten by the edit."""
        if self.unsharder is not None:
            self.unsharder.check_nothing_edited(call)

    def before_update(self, buckets: Sequence[Bucket]) -> None:
        """Take parameter values that were edited in place into the masters, which would overwrite them."""
        self.gather.finish()
        self.check_nothing_edited("optimizer.step()")
        if self.host is not None:
            self.host.finish_sending()
        if self.unsharder is None:
            for bucket in buckets:
                bucket.take_own_from_data()

    def adopt_edits(self, bucket: Bucket) -> None:
        """Take values of this bucket that were edited in place into the own shard and the master, if it is whole."""
        if self.unsharder is None:
            bucket.take_own_from_data()
        elif self.unsharder.gathered.is_whole(bucket):
            bucket.take_edits_from_data()

    @contextmanager
    def whole(self, fqns: Sequence[str] | None = None) -> Iterator[None]:
        """Inside, these parameters (default: all) are whole on every rank and may be edited, on all alike.

        Collective at stage 3. On leaving, the edits go into shards and masters.
        """
        self.gather.finish()
        names = set(self.parameters if fqns is None else fqns)
        chosen = [bucket for bucket in self.all_buckets() if names & set(bucket.fqns)]
        if self.unsharder is not None:
            with self.unsharder.whole(chosen):
                yield
        else:
            try:
                yield
            finally:
                for bucket in chosen:
                    bucket.take_own_from_data()
        for bucket in chosen:
            self._refuse_moved(bucket.moved(bucket.fqns))

    def home_of(self, fqn: str) -> Bucket | None:
        """The bucket of a parameter, frozen ones included; None: it is whole on every rank, in no bucket."""
        return self.bucket_of.get(fqn) or next((b for b in self.frozen_buckets if fqn in b.position_of), None)

    def cut_axes(self, bucket: Bucket) -> tuple[str, ...]:
        """The mesh axes over which a bucket is cut."""
        return split_axes(bucket.key.sync_axes, zero_stage=self.settings.zero_stage)[0]

    def shard_group(self, bucket: Bucket) -> ops.Group:
        return self._shard_groups[bucket.index]

    # -- facts -----------------------------------------------------------------------------------------

    def parameter_bytes(self) -> int:
        inside = {fqn for bucket in self.all_buckets() for fqn in bucket.fqns}
        outside = sum(p.numel() * p.element_size() for fqn, p in self.parameters.items() if fqn not in inside)
        return outside + sum(bucket.parameter_bytes() for bucket in self.all_buckets())

    def gradient_bytes(self) -> int:
        return self.reducer.waiting_bytes() + sum(bucket.gradient_bytes() for bucket in self.buckets)

    def host_bytes(self) -> tuple[int, int]:
        """Of `parameter_bytes` and of `gradient_bytes`, what is in host memory."""
        held = [bucket.host_bytes() for bucket in self.all_buckets()]
        return sum(parameters for parameters, _ in held), sum(gradients for _, gradients in held)

    def trainable_parameters(self) -> Collection[torch.nn.Parameter]:
        return self._trainable.values()

    def trainable(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return iter(self._trainable.items())
