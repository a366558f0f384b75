"""A wrapped model's state: whole values out in the plain model's types, and in again without losing any precision.

Names, order and hooks are those of the model's own `state_dict` and `load_state_dict`: these run as they are, and
only the parameters that they touch are exchanged, for copies of the whole or for a store into the buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hybrid.collectives import ops
from hybrid.compose.context import DATA_AXES
from hybrid.compose.runtime import Runtime
from hybrid.metadata import METADATA_CALLS
from hybrid.precision.tree import map_tensors
from hybrid.sharding import state_view
from hybrid.sharding.absence import AbsentParameter
from hybrid.sharding.bucket import Bucket

__all__ = ["full_state_dict", "load_stage", "loading", "over_stages"]


def full_state_dict(model: nn.Module, runtime: Runtime, *, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Copies on the CPU of the whole state, equal on every rank. *Collective.*

    Sends each bucket once and holds one whole bucket on the device; on the CPU each rank has the whole state.

    Args:
        model: the wrapped one.
        runtime: its own.
        plain: the `state_dict` of the model's own class.
    """
    copies = {
        id(runtime.engine.parameters[fqn]): runtime.whole(fqn, value)
        .detach()
        .cpu()
        .clone(memory_format=torch.preserve_format)
        for fqn, value in state_view.whole_parameters(runtime.engine)
    }
    with _Exchanged(copies):
        state = plain()
    ours = {id(copy) for copy in copies.values()}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and id(value) not in ours:
            state[name] = value.detach().cpu().clone()
    group = runtime.mesh.group(*DATA_AXES, "tp")
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for name in state:
        if name in buffers and group.size > 1:
            flat = state[name].reshape(-1).to(runtime.mesh.device)
            ops.broadcast(flat, source=0, group=group).wait()
            state[name] = flat.cpu().view(state[name].shape)
    return over_stages(state, runtime, order=runtime.stages.names if runtime.stages is not None else ())


def over_stages(mine: dict[str, Any], runtime: Runtime, *, order: Sequence[str]) -> dict[str, Any]:
    """What all stages of a pipeline have under these names, in this order; the first stage that has one gives it.

    *Collective*. Without a pipeline, what is given.
    """
    if runtime.stages is None:
        return mine
    everyone = ops.all_gather_object(mine, group=runtime.mesh.group("pp"))
    return {
        name: next(state[name] for state in everyone if name in state)
        for name in order
        if any(name in s for s in everyone)
    }


@contextmanager
def loading(runtime: Runtime) -> Iterator[None]:
    """Inside, the model's own `load_state_dict` gives values to shards and masters; every rank loads the same ones.

    `parameter.copy_(value)`, which is how torch loads, sends nothing and brings nothing here. What a model's own code
    does beside that gathers the bucket first, and its edits count at the end.
    """
    engine = runtime.engine
    engine.gather.finish()
    with ExitStack() as stack:
        if engine.unsharder is None:
            stack.enter_context(engine.whole())
        with _Loading(runtime, stack):
            yield


def load_stage(
    runtime: Runtime, state_dict: Mapping[str, Any], *, own: Sequence[str], strict: bool, load: Callable[..., Any]
) -> Any:
    """Of a whole state dict, load what this stage holds; missing and unexpected keys are those of the whole model."""
    assert runtime.stages is not None
    names = runtime.stages.names
    missing = [name for name in names if name not in state_dict]
    unexpected = [name for name in state_dict if name not in set(names)]
    if strict and (missing or unexpected):
        raise RuntimeError(f"Error(s) in loading state_dict: missing keys {missing}, unexpected keys {unexpected}")
    result = load({name: state_dict[name] for name in own if name in state_dict}, strict=False)
    return type(result)(missing, unexpected)


class _Exchanged(TorchFunctionMode):
    """Whoever uses one of these parameters gets its copy."""

    def __init__(self, copies: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._copies = copies
        self._ours = {id(copy) for copy in copies.values()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args = map_tensors(args, lambda tensor: self._copies.get(id(tensor), tensor))
        if func is torch.Tensor.detach and id(args[0]) in self._ours:
            return args[0]  # tied names share it
        return func(*args, **(kwargs or {}))


_SHAPE: Any = getattr(torch.Tensor, "shape").__get__  # noqa: B009


class _Loading(TorchFunctionMode):
    """`parameter.copy_(value)` becomes a store into the parameter's bucket; one cut over tp says its whole shape."""

    def __init__(self, runtime: Runtime, stack: ExitStack) -> None:
        super().__init__()
        self._runtime = runtime
        self._engine = engine = runtime.engine
        self._stack = stack
        self._places = {
            id(parameter): (bucket, position)
            for bucket in engine.all_buckets()
            for position, parameter in enumerate(bucket.parameters)
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        fqn = self._engine.fqn_of.get(id(args[0])) if args else None
        if fqn is not None and func == _SHAPE:
            return torch.Size(self._runtime.global_shape(fqn))
        if fqn is not None and func is torch.Tensor.copy_ and len(args) > 1:
            value = self._runtime.part(fqn, args[1])
            if id(args[0]) not in self._places:  # frozen, below stage 3
                return func(args[0], value, *args[2:], **kwargs)
            bucket, position = self._places[id(args[0])]
            _load(bucket, position, value)
            return args[0]
        if func not in METADATA_CALLS:
            absent = [arg for arg in args if type(arg) is AbsentParameter and id(arg) in self._places]
            for parameter in absent:
                bucket, position = self._places[id(parameter)]
                self._stack.enter_context(self._engine.whole([bucket.fqns[position]]))
        return func(*args, **kwargs)


def _load(bucket: Bucket, position: int, value: torch.Tensor) -> None:
    """Give one parameter its value: the master in the precision given.

    Of values in the parameter's own low precision, elements that are the rounded master leave it: that is how the
    parameter was saved, and the master itself came back with the optimizer's state.
    """
    parameter = bucket.parameters[position]
    value = value.detach().to(bucket.data.device).expand(parameter.shape)
    part = bucket.slice_of.get(bucket.fqns[position])
    if bucket.master is None:
        bucket.store(position, value)
    elif value.dtype != bucket.key.dtype:
        bucket.store(position, value.to(bucket.master.dtype))  # so that the parameter is the rounded master
    elif part is None:
        bucket.store(position, value)
    else:
        master = bucket.slice_view(bucket.master, part)
        before = master.clone()
        bucket.store(position, value)
        master.copy_(torch.where(master == before.to(value.dtype), before, master))
    torch.autograd.graph.increment_version([parameter])
