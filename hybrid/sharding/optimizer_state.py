"""What the optimizer steps on: this rank's slices of the parameters, and the state that goes with them.

The user's optimizer keeps the user's parameters in `param_groups`; only while it steps does it see, in their
places, the slices that this rank owns, each with its slice of the gradient. Its state is therefore as large as
the slices.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn

from hybrid.contracts.partition import Slice
from hybrid.errors import OptimizerError
from hybrid.sharding.bucket import Bucket
from hybrid.sharding.engine import ShardingEngine
from hybrid.sharding.offloaded_bucket import OffloadedBucket
from hybrid.sharding.optimizer_kind import Scope, known_scope
from hybrid.sharding.slice_state import SliceState
from hybrid.sharding.state_precision import in_precision
from hybrid.sharding.tensors import tensors_in

__all__ = ["MASTER", "OptimizerShards", "Shard", "own_copy"]

MASTER = "master"  # the key of a low-precision parameter's fp32 master beside the optimizer's own (exp_avg, ...)


@dataclass(slots=True)
class Shard:
    """One parameter as the optimizer sees it here. `tensor` is None where this rank owns nothing of it."""

    fqn: str
    bucket: Bucket
    position: int
    part: Slice | None
    tensor: nn.Parameter | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupMembers:
    """Of one param group: the user's parameters, those that have no shard, and, of which this rank owns something, the
    places among them and the slices."""

    all: list[nn.Parameter]
    without_shard: list[nn.Parameter]
    here: list[int]
    slices: list[nn.Parameter]


class OptimizerShards:
    """The shards of one optimizer's parameters.

    Args:
        engine: of the wrapped model.
        optimizer: not wrapped yet; its state is cut.
        scope: what one of its updates depends on.
    """

    def __init__(self, engine: ShardingEngine, optimizer: torch.optim.Optimizer, *, scope: Scope) -> None:
        self.engine = engine
        self.optimizer = optimizer
        self.scope = scope
        self.name = type(optimizer).__name__
        """Of the class that the user wrote."""
        self._is_torchs = known_scope(optimizer) is not None
        self._shards: dict[int, Shard] = {}
        # What follows from the shards, and from what each group holds; made anew when that changes.
        self._buckets: list[Bucket] | None = None
        self._slices: list[tuple[Bucket, list[tuple[int, int, nn.Parameter]]]] | None = None
        self._of_groups: dict[int, _GroupMembers] = {}
        # While the optimizer steps: per group, the user's parameters and their names, if it has names.
        self._users: list[tuple[list[nn.Parameter], list[str] | None]] | None = None
        for group in optimizer.param_groups:
            self.add(group["params"])
        self._adopt_state(optimizer.state)
        optimizer.state = SliceState(self, optimizer.state)

    def rebuild(self, whole: Mapping[str, Mapping[str, Any]]) -> None:
        """After the buckets were cut anew: make the shards again, from whole state by fqn without masters."""
        self._shards.clear()
        self._forget()
        state = self.optimizer.state
        state.clear()
        for group in self.optimizer.param_groups:
            self.add(group["params"])
        for shard in self._shards.values():
            if shard.tensor is not None and shard.fqn in whole:
                state[shard.tensor] = self.cut_state(shard, whole[shard.fqn])

    def add(self, parameters: list[nn.Parameter]) -> None:
        """Make shards for more parameters.

        Raises:
            OptimizerError: one of them is not a parameter of the wrapped model.
        """
        for parameter in parameters:
            fqn = self.engine.fqn_of.get(id(parameter))
            if fqn is None:
                raise OptimizerError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the model given "
                    "to distributed_model; build the optimizer from model.parameters()"
                )
            bucket = self.engine.bucket_of.get(fqn)
            if bucket is None:
                continue  # frozen: never has a gradient, so the optimizer never touches it
            part = bucket.slice_of.get(fqn)
            tensor = None if part is None else nn.Parameter(bucket.slice_view(bucket.stepped(), part))
            self._shards[id(parameter)] = Shard(
                fqn=fqn, bucket=bucket, position=bucket.position_of[fqn], part=part, tensor=tensor
            )
        self._forget()

    def _forget(self) -> None:
        self._buckets = self._slices = None
        self._of_groups.clear()

    def shards(self) -> Iterator[Shard]:
        return iter(self._shards.values())

    def buckets(self) -> list[Bucket]:
        """The buckets that hold a parameter of this optimizer, in launch order."""
        if self._buckets is None:
            indices = sorted({shard.bucket.index for shard in self._shards.values()})
            self._buckets = [self.engine.buckets[index] for index in indices]
        return self._buckets

    def _slices_by_bucket(self) -> list[tuple[Bucket, list[tuple[int, int, nn.Parameter]]]]:
        """For each bucket the slices here: place among `bucket.slices`, position in the bucket, the slice."""
        if self._slices is None:
            self._slices = [(bucket, []) for bucket in self.buckets()]
            tensors = {shard.fqn: shard.tensor for shard in self._shards.values() if shard.tensor is not None}
            for bucket, slices in self._slices:
                for place, part in enumerate(bucket.slices):
                    if part.fqn in tensors:
                        slices.append((place, bucket.position_of[part.fqn], tensors[part.fqn]))
        return self._slices

    def _members(self, index: int, group: dict[str, Any]) -> _GroupMembers:
        """Of a param group that holds the user's parameters."""
        parameters: list[nn.Parameter] = group["params"]
        known = self._of_groups.get(index)
        if known is None or len(known.all) != len(parameters) or not all(map(is_, known.all, parameters)):
            shards = [self._shards.get(id(parameter)) for parameter in parameters]
            here = [place for place, shard in enumerate(shards) if shard is not None and shard.tensor is not None]
            known = self._of_groups[index] = _GroupMembers(
                all=list(parameters),
                without_shard=[p for p, shard in zip(parameters, shards, strict=True) if shard is None],
                here=here,
                slices=[shards[place].tensor for place in here],  # type: ignore[union-attr, misc]
            )
        return known

    def shard_of(self, parameter: Any) -> Shard | None:
        """The shard of one of the model's own parameters; None of anything else."""
        return self._shards.get(id(parameter))

    def without_shard(self) -> list[nn.Parameter]:
        """Parameters in the groups that have no shard yet, put there by hand; frozen ones never get one."""
        groups = enumerate(self.optimizer.param_groups)
        return [p for index, group in groups for p in self._members(index, group).without_shard]

    def users_parameters(self) -> list[nn.Parameter]:
        """The model's parameters in the optimizer's groups, also while it steps."""
        if self._users is not None:
            return [parameter for parameters, _ in self._users for parameter in parameters]
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def is_in_place(self) -> bool:
        """Whether the optimizer's groups hold the slices now."""
        return self._users is not None

    def _show_slices(self) -> None:
        """Put the slices in the places of the user's parameters; the lists stay, as optimizers keep references."""
        groups = self.optimizer.param_groups
        members = [self._members(index, group) for index, group in enumerate(groups)]
        self._users = [(known.all, group.get("param_names")) for known, group in zip(members, groups, strict=True)]
        for group, known, (_, names) in zip(groups, members, self._users, strict=True):
            group["params"][:] = known.slices
            if names is not None:
                group["param_names"] = [names[place] for place in known.here]

    def _show_parameters(self) -> None:
        assert self._users is not None
        for group, (parameters, names) in zip(self.optimizer.param_groups, self._users, strict=False):
            group["params"][:] = parameters
            if names is not None:
                group["param_names"] = names
        self._users = None

    def step(self, base_step: Callable[[], Any]) -> Any:
        """Run the optimizer's own step on the slices.

        A parameter without a gradient on any rank is left alone, as plain torch leaves one whose `grad` is None.
        """
        with self._stepping():
            return base_step()

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Inside, `param_groups` hold the slices with their gradients; outside, the user's parameters."""
        self._begin()
        try:
            yield
            self._end()
        finally:
            self._show_parameters()
            self.drop_slice_gradients()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """In the middle of a step: inside, all is as before it; afterwards the slices have the gradients of then."""
        self._end()
        self._show_parameters()
        self.drop_slice_gradients()
        try:
            yield
        except BaseException:
            self._show_slices()  # for the step's own end
            raise
        self._begin()

    def _begin(self) -> None:
        for bucket in self.buckets():
            if isinstance(bucket, OffloadedBucket):
                bucket.fetch_mirror()
        for bucket, slices in self._slices_by_bucket():
            bucket.apply_scale()
            if bucket.settled is None:
                continue
            views = bucket.settled_views(are_given_back=self._is_torchs)
            dtype, has_gradient = bucket.stepped().dtype, bucket.has_gradient_anywhere
            is_same = bucket.settled.dtype == dtype
            have_all = all(has_gradient)
            for place, position, tensor in slices:
                if have_all or has_gradient[position]:
                    tensor.grad = views[place] if is_same else views[place].to(dtype)
        self._show_slices()

    def _end(self) -> None:
        for bucket in self.buckets():
            if isinstance(bucket, OffloadedBucket):
                bucket.write_back_mirror()

    def drop_slice_gradients(self) -> None:
        """Take the gradients away from the slices; those in the buckets stay."""
        for _, slices in self._slices_by_bucket():
            for _, _, tensor in slices:
                tensor.grad = None

    def fqns(self) -> set[str]:
        """The trainable parameters of this optimizer."""
        return {shard.fqn for shard in self._shards.values()}

    def unscale(self, inverse_scale: torch.Tensor, *, grad_dtype: torch.dtype) -> bool:
        """Multiply this optimizer's settled gradients of one dtype; returns whether all are finite here."""
        finite = True
        for bucket in self.buckets():
            if bucket.settled is None or bucket.key.grad_dtype != grad_dtype:
                continue
            mine = {shard.fqn for shard in self._shards.values()}
            for part, view in zip(bucket.slices, bucket.own_views(bucket.settled), strict=True):
                if part.fqn in mine:
                    finite = finite and bool(torch.isfinite(view).all())
                    view.mul_(inverse_scale.to(view.device))
        return finite

    # -- state -----------------------------------------------------------------------------------------

    def _adopt_state(self, state: dict[Any, Any]) -> None:
        """Cut the state of an optimizer that has already trained the plain model."""
        for parameter in [key for key in state if isinstance(key, torch.Tensor)]:
            shard = self._shards.get(id(parameter))
            if shard is None:
                continue
            whole = state.pop(parameter)
            if shard.tensor is not None:
                state[shard.tensor] = self.cut_state(shard, whole)

    def cut_state(self, shard: Shard, whole: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of one parameter's whole state.

        Raises:
            OptimizerError: a state tensor that has neither the parameter's shape nor is a scalar, of a parameter
                that is cut.
        """
        assert shard.part is not None and shard.tensor is not None
        whole = self._in_precision(shard, dict(whole))
        shape = tuple(shard.bucket.parameters[shard.position].shape)
        is_whole = tuple(shard.tensor.shape) == shape and shard.part.num_elements == shard.tensor.numel()
        cut: dict[str, Any] = {}
        for key, value in whole.items():
            if isinstance(value, torch.Tensor) and self.engine.host is not None:
                value = self.engine.host.fetch(value.detach(), "optimizer_state")
            if not isinstance(value, torch.Tensor) or (value.dim() == 0 and shape != ()):
                cut[key] = own_copy(value)
            elif tuple(value.shape) == shape:
                flat = shard.bucket.stepped().new_zeros(shard.bucket.partition.num_elements, dtype=value.dtype)
                shard.bucket.view(flat, shard.position).copy_(value)
                own = flat[shard.bucket.low : shard.bucket.high].clone()
                cut[key] = shard.bucket.slice_view(own, shard.part).clone()
            elif is_whole:
                cut[key] = value.clone()
            else:
                raise OptimizerError(
                    f"state {key!r} of parameter {shard.fqn!r} has shape {tuple(value.shape)}, the parameter has "
                    f"{shape}: it cannot be cut; set sharding_configs['partition'] = 'parameter'"
                )
        return cut

    def _in_precision(self, shard: Shard, values: dict[str, Any]) -> dict[str, Any]:
        """Of an optimizer that is not torch's own the state stays as it is: its dtypes may be meant."""
        assert shard.tensor is not None
        return in_precision(values, shard.tensor.dtype) if self._is_torchs else values

    def own_state(self) -> dict[str, dict[str, Any]]:
        """fqn -> this rank's slice of the optimizer's state and of the master; without either, left out."""
        self.engine.gather.finish()
        for bucket in self.buckets():
            self.engine.adopt_edits(bucket)
        own: dict[str, dict[str, Any]] = {}
        for shard in self._shards.values():
            if shard.tensor is None or shard.part is None:
                continue
            values = dict(self.optimizer.state.get(shard.tensor, {}))
            if shard.bucket.master is not None:
                values[MASTER] = shard.bucket.slice_view(shard.bucket.master, shard.part).detach()
            if values:
                own[shard.fqn] = values
        return own

    def memory_for(self, shard: Shard, key: str, dtype: torch.dtype, *, without: Collection[int]) -> torch.Tensor:
        """For all elements of a tensor of the state that is about to be read: where the present one lies, if there is
        one and its address is not among `without`; else new memory, in which no value is set.
        """
        assert shard.tensor is not None
        present = self.optimizer.state.get(shard.tensor, {}).get(key)
        if (
            isinstance(present, torch.Tensor)
            and (present.shape, present.stride()) == (shard.tensor.shape, shard.tensor.stride())
            and (present.dtype, present.device) == (dtype, shard.tensor.device)
            and present.data_ptr() not in without
        ):
            return present.detach()
        return torch.empty_like(shard.tensor, dtype=dtype).detach()

    def set_whole_master(self, fqn: str, master: torch.Tensor) -> None:
        """Give a parameter its master, and itself the rounded one; in full precision where it has no master."""
        bucket = self.engine.bucket_of[fqn]
        bucket.store(bucket.position_of[fqn], master.detach().to(bucket.data.device))

    def set_own_masters(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Give parameters this rank's slices of their masters, and all ranks the rounded values. *Collective.*"""
        buckets = [bucket for bucket in self.buckets() if bucket.master is not None]
        if not buckets:
            return
        self.engine.before_update(buckets)
        for bucket in buckets:
            for part in bucket.slices:
                if part.fqn in masters:
                    assert bucket.master is not None
                    bucket.slice_view(bucket.master, part).copy_(masters[part.fqn])
        self.engine.after_update(buckets, deferred=False)

    def at_home(self, shard: Shard, values: Mapping[str, Any]) -> dict[str, Any]:
        """State that was saved elsewhere, in the memory of its slice: on the host all of it, on a GPU also the numbers
        if a fused or capturable step reads them there."""
        assert shard.tensor is not None
        parameter, device = shard.bucket.parameters[shard.position], shard.tensor.device
        groups = [g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"])]
        values = self._in_precision(shard, dict(values))
        reads_numbers = device.type == "cpu" or any(g.get("fused") or g.get("capturable") for g in groups)
        return {
            key: value.to(device) if isinstance(value, torch.Tensor) and (value.dim() > 0 or reads_numbers) else value
            for key, value in values.items()
        }

    def state_bytes(self) -> int:
        """Live bytes of the optimizer's state on this rank."""
        held = (self.optimizer.state.get(s.tensor) for s in self._shards.values() if s.tensor is not None)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(list(held), all_of_them=True))


def own_copy(value: Any) -> Any:
    """A value of the state that shares no memory with the given one."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
