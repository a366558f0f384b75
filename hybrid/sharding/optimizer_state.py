"""What the optimizer steps on: this rank's slices of the parameters, and the state that goes with them.

The user's optimizer keeps the user's parameters in `param_groups`; only while it steps does it see, in their
places, the slices that this rank owns, each with its slice of the gradient. Its state is therefore as large as
the slices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid.contracts.partition import Slice
from hybrid.errors import OptimizerError
from hybrid.sharding.bucket import Bucket
from hybrid.sharding.engine import ShardingEngine

__all__ = ["MASTER", "OptimizerShards", "Shard", "is_elementwise"]

MASTER = "master"  # the key of a low-precision parameter's fp32 master beside the optimizer's own (exp_avg, ...)

# Optimizers of torch.optim whose update of an element depends on that element's own gradient and state alone, so
# that they may step on shards cut anywhere. Adafactor, Muon, LBFGS and SparseAdam are not among them.
_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is known to update each element by itself. A subclass may do anything: not known."""
    return type(optimizer) in _ELEMENTWISE


@dataclass(slots=True)
class Shard:
    """One parameter as the optimizer sees it here. `tensor` is None where this rank owns nothing of it."""

    fqn: str
    bucket: Bucket
    position: int
    part: Slice | None
    tensor: nn.Parameter | None


class OptimizerShards:
    """The shards of one optimizer's parameters."""

    def __init__(self, engine: ShardingEngine, optimizer: torch.optim.Optimizer) -> None:
        self.engine = engine
        self.optimizer = optimizer
        self._shards: dict[int, Shard] = {}
        for group in optimizer.param_groups:
            self.add(group["params"])
        self._adopt_state()

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
            tensor = None if part is None else nn.Parameter(bucket.slice_view(bucket.own_data(), part))
            self._shards[id(parameter)] = Shard(
                fqn=fqn, bucket=bucket, position=bucket.position_of[fqn], part=part, tensor=tensor
            )

    def shards(self) -> Iterator[Shard]:
        return iter(self._shards.values())

    def buckets(self) -> list[Bucket]:
        """The buckets that hold a parameter of this optimizer, in launch order."""
        indices = sorted({shard.bucket.index for shard in self._shards.values()})
        return [self.engine.buckets[index] for index in indices]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the optimizer's `param_groups` hold the slices; outside, the user's parameters."""
        groups = self.optimizer.param_groups
        users = [group["params"] for group in groups]
        for group, parameters in zip(groups, users, strict=True):
            shards = [self._shards.get(id(parameter)) for parameter in parameters]
            group["params"] = [s.tensor for s in shards if s is not None and s.tensor is not None]
        try:
            yield
        finally:
            for group, parameters in zip(groups, users, strict=True):
                group["params"] = parameters

    def step(self, base_step: Callable[[], Any]) -> Any:
        """Run the optimizer's own step on the slices.

        A parameter without a gradient on any rank is left alone, as plain torch leaves one whose `grad` is None.
        """
        gradients: dict[str, torch.Tensor] = {}
        for bucket in self.buckets():
            bucket.apply_scale()
            if bucket.settled is not None:
                views = bucket.own_views(bucket.settled)
                gradients.update((part.fqn, view) for part, view in zip(bucket.slices, views, strict=True))
        for shard in self._shards.values():
            gradient = gradients.get(shard.fqn)
            if shard.tensor is None or gradient is None or not shard.bucket.has_gradient_anywhere[shard.position]:
                continue
            same = gradient.dtype == shard.tensor.dtype
            shard.tensor.grad = gradient if same else gradient.to(shard.tensor.dtype)
        try:
            with self.in_place():
                return base_step()
        finally:
            for shard in self._shards.values():
                if shard.tensor is not None:
                    shard.tensor.grad = None

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
                    view.mul_(inverse_scale)
        return finite

    # -- state -----------------------------------------------------------------------------------------

    def _adopt_state(self) -> None:
        """Cut the state of an optimizer that has already trained the plain model."""
        state = self.optimizer.state
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
        shape = tuple(shard.bucket.parameters[shard.position].shape)
        is_whole = tuple(shard.tensor.shape) == shape and shard.part.num_elements == shard.tensor.numel()
        cut: dict[str, Any] = {}
        for key, value in whole.items():
            if not isinstance(value, torch.Tensor) or (value.dim() == 0 and shape != ()):
                cut[key] = value.clone() if isinstance(value, torch.Tensor) else value
            elif tuple(value.shape) == shape:
                flat = torch.zeros(shard.bucket.partition.num_elements, dtype=value.dtype, device=shard.tensor.device)
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

    def state_bytes(self) -> int:
        """Live bytes of the optimizer's state on this rank."""
        total = 0
        for shard in self._shards.values():
            if shard.tensor is None or shard.tensor not in self.optimizer.state:
                continue
            for value in self.optimizer.state[shard.tensor].values():
                if isinstance(value, torch.Tensor):
                    total += value.numel() * value.element_size()
        return total
