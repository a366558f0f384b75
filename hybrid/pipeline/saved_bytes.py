"""What each call of a unit keeps for backward: the tensors that autograd saves, in a forward without values."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hybrid import shims
from hybrid.pipeline.following import Following
from hybrid.pipeline.operations import tensors_in
from hybrid.pipeline.outline import tensors_by_path
from hybrid.pipeline.skeleton import FakeTensorMode, fake_like, is_fake, skeleton_of
from hybrid.precision.casting import compute_dtypes, install_casts
from hybrid.recompute import KEPT_OPERATIONS

__all__ = ["MeasuredAs", "SavedBytes", "measure_saved_bytes"]

_PRODUCTS = {  # operation -> places of the two factors
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.baddbmm.default: (1, 2),
}
_CASTS = {"aten::_to_copy", "aten::t", "aten::transpose.int"}
_LOSS_BYTES = 4  # a loss outside of the model is computed in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAs:
    """How the model will compute.

    Args:
        dtype: of mixed precision; None without.
        keeps_masters: whether parameters become `dtype` (level O2).
        custom_fp32: modules that do not.
        recomputed: name of a module -> its policy.
        tp_degree: ranks that share what is cut.
        cuts: name of a weight that tensor parallel cuts -> how.
    """

    dtype: torch.dtype | None = None
    keeps_masters: bool = False
    custom_fp32: tuple[str, ...] = ()
    recomputed: Mapping[str, Literal["full", "selective"]] = field(default_factory=dict)
    tp_degree: int = 1
    cuts: Mapping[str, Literal["column", "row"]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """Of one call.

    Args:
        kept: which memory -> its bytes; what several calls save has one number.
        put_off: of that, and of gradients, what the gradients of weights need.
        recomputed: what a backward computes again.
        working: gradients of activations at the fullest moment.
    """

    kept: Mapping[int, int]
    put_off: Mapping[int, int]
    recomputed: int
    working: int


def measure_saved_bytes(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, units: Sequence[str], num_calls: int,
    measured_as: MeasuredAs,
) -> tuple[SavedBytes, ...]:  # fmt: skip
    """Of each call of a unit, in order, in a forward in training mode.

    Args:
        model: whole; it is left as it is.
        args, kwargs: a sample.
        units: names of the modules that are cut as a whole.
        num_calls: that a forward makes.

    Raises:
        ValueError: the forward with these settings does not make so many calls.
        Exception: what it raises.
    """
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    skeleton = skeleton_of(model, fakes, units=units)
    if measured_as.dtype is not None:
        _lower(skeleton, fakes, measured_as)
    recorder = _Recorder(skeleton, measured_as)
    for name in units:
        recorder.watch(name)
    following = Following(skeleton, fakes, units=units)
    following.on_value = recorder.note_value
    with ExitStack() as stack:
        # Also without mixed precision: a caller may be inside an autocast of its own, which the training is not.
        is_low = measured_as.dtype is not None
        stack.enter_context(torch.autocast("cpu", dtype=measured_as.dtype or torch.bfloat16, enabled=is_low))
        stack.enter_context(saved_tensors_hooks(recorder.pack, lambda tensor: tensor))
        following.follow(args, kwargs, training={"": True})
    if len(recorder.calls) < num_calls:
        raise ValueError(f"{len(recorder.calls)} calls of units where {num_calls} were seen")
    return recorder.found(num_calls)


def _lower(skeleton: nn.Module, fakes: FakeTensorMode, measured_as: MeasuredAs) -> None:
    assert measured_as.dtype is not None
    custom_fp32 = list(measured_as.custom_fp32)
    if measured_as.keeps_masters:
        low = compute_dtypes(skeleton, dtype=measured_as.dtype, custom_fp32=custom_fp32)
        known = dict(skeleton.named_parameters())
        lowered = {
            id(known[fqn]): nn.Parameter(fake_like(known[fqn], fakes, dtype=dtype), known[fqn].requires_grad)
            for fqn, dtype in low.items()
        }
        for module in skeleton.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if id(parameter) in lowered:
                    setattr(module, name, lowered[id(parameter)])
    install_casts(skeleton, custom_fp32=custom_fp32, norms=measured_as.keeps_masters)


@dataclass(slots=True)
class _Record:
    name: str
    kept: dict[int, int] = field(default_factory=dict)
    put_off: dict[int, int] = field(default_factory=dict)
    recomputed: dict[int, int] = field(default_factory=dict)
    largest: int = 0
    outputs: int = 0  # elements that it returns
    before: dict[int, int] = field(default_factory=dict)  # saved by code before it
    has_output: bool = True
    has_rest: bool = False  # whether code behind it saves anything


class _Recorder:
    """Listens to one forward."""

    def __init__(self, skeleton: nn.Module, measured_as: MeasuredAs) -> None:
        self.calls: list[_Record] = []
        self._skeleton = skeleton
        self._as = measured_as
        self._current: _Record | None = None
        self._nested = 0
        self._regions: list[str] = []  # policies of the modules to recompute that run
        self._around: dict[int, int] = {}  # saved by code since the last call
        self._same: dict[int, int] = {}  # memory of what a unit returned -> of what others get of it
        self._held: list[torch.Tensor] = []  # memory that is given back may come again as another one
        self._real: list[torch.Tensor] = []
        self._fresh = -1
        self._own = {shims.memory_of(tensor) for tensor in (*skeleton.parameters(), *skeleton.buffers())}
        self._weights = {shims.memory_of(p): fqn for fqn, p in skeleton.named_parameters() if p.requires_grad}
        self._cuts = {
            shims.memory_of(p): measured_as.cuts[fqn]
            for fqn, p in skeleton.named_parameters()
            if fqn in measured_as.cuts
        }
        self._of_copy: set[int] = set()  # parameters of a copy on zeros
        self._is_cut: set[int] = set()
        self._mode: _Operations | None = None
        for name, policy in measured_as.recomputed.items():
            module = skeleton.get_submodule(name)
            module.register_forward_pre_hook(functools.partial(self._enter_region, policy), with_kwargs=True)
            module.register_forward_hook(self._leave_region)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recorder:
        """Hooks of a copied unit tell the same one."""
        return self

    def watch(self, name: str) -> None:
        """A unit; to be called behind all that is hooked to what is in it."""
        unit = self._skeleton.get_submodule(name)
        unit.register_forward_pre_hook(functools.partial(self._begin, name), with_kwargs=True, prepend=True)
        unit.register_forward_hook(functools.partial(self._end, name), always_call=True)

    def note_value(self, returned: torch.Tensor, given: torch.Tensor) -> None:
        """What a unit returned goes on as another tensor; what it is given, such as a mask, came as another one."""
        before, after = shims.memory_of(returned), shims.memory_of(given)
        if before != after and self._size(returned) == self._size(given):
            self._same[before] = after
            self._held += [returned, given]
        if before in self._is_cut:
            self._is_cut.add(after)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """For `saved_tensors_hooks`."""
        memory = shims.memory_of(tensor)
        if memory in self._own:
            return tensor
        self._hold(tensor)
        if self._current is None:
            self._around[memory] = self._size(tensor)
        elif self._regions:
            self._current.recomputed[memory] = self._size(tensor)
        else:
            self._current.kept[memory] = self._size(tensor)
        return tensor

    def note_operation(self, func: Any, args: Any, output: Any) -> None:
        """Inside a unit."""
        record = self._current
        if record is None:
            return
        given, made = list(tensors_in(list(args))), list(tensors_in(output))
        if func.name() in _CASTS and len(made) == 1 and given:
            for known in (self._weights, self._cuts):
                if (memory := shims.memory_of(given[0])) in known:
                    self._hold(made[0])
                    known[shims.memory_of(made[0])] = known[memory]  # type: ignore[assignment]
        cut = next((self._cuts[memory] for one in given if (memory := shims.memory_of(one)) in self._cuts), None)
        is_cut = cut == "column" or (cut is None and any(shims.memory_of(one) in self._is_cut for one in given))
        for one in made:
            if is_cut and shims.memory_of(one) not in self._own:
                self._hold(one)
                self._is_cut.add(shims.memory_of(one))
            if one.is_floating_point():
                record.largest = max(record.largest, self._part(one, one.numel() * one.dtype.itemsize))
        if self._regions and self._regions[-1] == "selective" and func in KEPT_OPERATIONS:
            for one in made:
                self._hold(one)
                record.kept[shims.memory_of(one)] = self._size(one)
        if func in _PRODUCTS:
            left, right = (args[place] for place in _PRODUCTS[func])
            if shims.memory_of(right) in self._weights:
                self._hold(left)
                record.put_off[shims.memory_of(left)] = self._size(left)
                record.put_off[self._new()] = self._part(made[0], made[0].numel() * made[0].dtype.itemsize)

    def found(self, num_calls: int) -> tuple[SavedBytes, ...]:
        """Of the last calls, if there were more forwards than one."""
        calls = self.calls[-num_calls:]
        last = calls[-1]
        last.kept |= self._around
        working = [2 * call.largest for call in calls]
        if not self._around:  # the loss is computed elsewhere: of what it reads, its gradient, and another one
            last.kept[self._new()] = _LOSS_BYTES * last.outputs
            working[-1] = max(working[-1], 2 * _LOSS_BYTES * last.outputs)
        found = []
        for call, size in zip(calls, working, strict=True):
            kept = self._joined(call.kept)
            again = sum(size for memory, size in self._joined(call.recomputed).items() if memory not in kept)
            put_off = self._joined(call.put_off)
            found.append(SavedBytes(kept=kept, put_off=put_off, recomputed=again, working=size))
        return tuple(found)

    # -- hooks -----------------------------------------------------------------------------------------------------

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._current is not None and self._current.name != name:
            self._nested += 1
            return
        if self.calls and self.calls[-1].name == name and not self.calls[-1].has_output:
            # It could not run without values, and begins again as a copy on zeros.
            self._around = self.calls.pop().before
        self._of_copy = {shims.memory_of(one) for one in (*module.parameters(), *module.buffers())} - self._own
        self._own |= self._of_copy
        self._weights |= {shims.memory_of(p): fqn for fqn, p in module.named_parameters() if p.requires_grad}
        self._regions.clear()
        self._current = _Record(name, before=self._around)
        self._current.kept |= self._around
        self._around = {}
        self._mode = _Operations(self)
        self._mode.__enter__()

    def _end(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._nested:
            self._nested -= 1
            return
        record, mode, self._mode = self._current, self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)
        if record is None:
            return
        record.has_output = output is not None
        if not record.has_output:  # it failed, and may begin again
            self._around = {}
        floating = [t for t in tensors_by_path((output,), {}).values() if t.is_floating_point()]
        record.outputs = sum(self._part(tensor, tensor.numel()) for tensor in floating)
        self.calls.append(record)
        self._current = None
        self._own -= self._of_copy  # whose memory will be others'
        for memory in self._of_copy:
            self._weights.pop(memory, None)
        if self._real:  # their memory will be others'
            fresh = {memory: self._new() for memory in {shims.memory_of(tensor) for tensor in self._real}}
            for sizes in (record.kept, record.put_off, record.recomputed):
                for memory in fresh.keys() & sizes.keys():
                    sizes[fresh[memory]] = sizes.pop(memory)
            self._real.clear()

    def _enter_region(self, policy: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._current is not None:
            if not self._regions:  # its inputs are kept
                for tensor in tensors_by_path(args, kwargs).values():
                    if shims.memory_of(tensor) not in self._own:
                        self._hold(tensor)
                        self._current.kept[shims.memory_of(tensor)] = self._size(tensor)
            self._regions.append(policy)

    def _leave_region(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._regions:
            self._regions.pop()

    # -- sizes -----------------------------------------------------------------------------------------------------

    def _new(self) -> int:
        """A number that no memory has."""
        self._fresh -= 1
        return self._fresh

    def _hold(self, tensor: torch.Tensor) -> None:
        (self._held if is_fake(tensor) else self._real).append(tensor)

    def _size(self, tensor: torch.Tensor) -> int:
        return self._part(tensor, tensor.untyped_storage().nbytes())

    def _part(self, tensor: torch.Tensor, size: int) -> int:
        return -(-size // self._as.tp_degree) if shims.memory_of(tensor) in self._is_cut else size

    def _joined(self, sizes: Mapping[int, int]) -> dict[int, int]:
        return {self._same.get(memory, memory): size for memory, size in sizes.items()}


class _Operations(shims.TorchDispatchMode):
    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self._recorder.note_operation(func, args, output)
        return output
