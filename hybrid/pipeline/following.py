"""Follows values through a forward on a skeleton: which outputs of units reach which later units.

Inside units tensors are fake, so nothing is computed; outside of them what depends on the inputs alone is computed for
real, so that a forward may look at its masks, and what depends on units is fake. Every piece of memory outside units
carries the places of the values that went into it:

    memory written by an operation outside   what the memories that it read carry
    memory that a unit returned              its own place
    memory that a unit made and kept         nothing: who reads it is refused, for the value left by a side channel
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from hybrid import shims
from hybrid.empty_caches import without_caches
from hybrid.errors import ModelError
from hybrid.pipeline.attributes import Attributes, check_around
from hybrid.pipeline.boundary import full_cache
from hybrid.pipeline.chance import Chance, python_generators
from hybrid.pipeline.derivatives import check_no_transform, derivative_taken
from hybrid.pipeline.fake_call import fake_input, run_without_values
from hybrid.pipeline.fast_paths import slow_paths
from hybrid.pipeline.flow import Call, Flow, Place, ValueSize
from hybrid.pipeline.function_caches import fresh_caches
from hybrid.pipeline.opaque import check_objects, why_it_stays
from hybrid.pipeline.operations import statistics_of, tensors_in, written_by
from hybrid.pipeline.outline import map_with_paths, tensors_by_path
from hybrid.pipeline.own_checkpoints import Checkpoints, checkpoints_around
from hybrid.pipeline.random_state import kept_generators, set_generators
from hybrid.pipeline.sized_by_inputs import run_on_zeros, wants_values, with_known_masks
from hybrid.pipeline.skeleton import FakeTensorMode, fake_like, is_fake, on_cpu
from hybrid.pipeline.unit_class import watch_calls
from hybrid.precision.tree import map_tensors

__all__ = ["BufferWritten", "Following"]

_Source = Place | str
"""A value, or the name of a parameter that is read outside its unit."""
_OnValue = Callable[[torch.Tensor, torch.Tensor], None]
"""Is told of each tensor that a unit returned or was given, and of the one that the code outside has in its place."""

_WAY = "Write the model as a hybrid.PipelineLayer, or set pipeline_configs.degree = 1"
# Forwards that are looked at where random numbers decide: a layer that is dropped one time in ten is dropped in one.
_DRAWS = 16
_CPU = torch.device("cpu")
# Of these the result is a number or a shape that only the values tell.
_DECIDES = ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2")


class BufferWritten(Exception):
    """Code outside units writes a buffer: its module must be a unit. Holds the buffer's name."""


class Following:
    """Runs forwards of one skeleton.

    Args:
        skeleton: see `skeleton_of`.
        fakes: the mode of its fake tensors.
        units: names of the modules that are cut as a whole.
    """

    def __init__(self, skeleton: nn.Module, fakes: FakeTensorMode, *, units: Sequence[str]) -> None:
        self.skeleton = skeleton
        self._fakes = fakes
        modules = {name: skeleton.get_submodule(name) for name in units}
        self._parameters = {shims.memory_of(p): fqn for fqn, p in skeleton.named_parameters()}
        self._buffers = {shims.memory_of(b): fqn for fqn, b in skeleton.named_buffers()}
        self._own = {name: {shims.memory_of(p) for p in unit.parameters()} for name, unit in modules.items()}
        self._unit_buffers = {fqn for unit in units for fqn in self._buffers.values() if fqn.startswith(f"{unit}.")}
        self._state: _Forward | None = None
        self._chance_decides = False
        self.on_value: _OnValue = lambda returned, given: None
        watch_calls(modules, self._called)
        self._attributes = Attributes(skeleton, modules)

    def follow(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: Mapping[str, bool]) -> Flow:
        """One forward.

        Args:
            args, kwargs: what the model is called with.
            training: the mode of each module by name; "" is the model itself.

        Raises:
            ModelError: a value that cannot be followed; the message names it, and the way out.
            BufferWritten: see there.
        """
        for name, module in self.skeleton.named_modules():
            module.training = training.get(name, training[""])
        put_back = self._attributes.saved()
        args, kwargs = (map_tensors(value, on_cpu) for value in (args, kwargs))
        try:
            with kept_generators(), fresh_caches(self.skeleton):
                set_generators(_DRAWS, _CPU)  # every rank sees the same forward
                flow = self._run(args, kwargs, is_training=training[""])
                if self._chance_decides:
                    self._check_chance(flow, args, kwargs, is_training=training[""])
                suspects = self._attributes.changed_around() & self._attributes.read_around()
                if suspects:  # what is filled once stays as it is in another forward with the same inputs
                    self._run(args, kwargs, is_training=training[""])
                    check_around(suspects & self._attributes.changed_around())
        finally:
            put_back()
        return flow

    def _check_chance(self, flow: Flow, args: Any, kwargs: Any, *, is_training: bool) -> None:
        """Raises ModelError: with other random numbers the forward calls other units."""
        for seed in range(_DRAWS):
            set_generators(seed, _CPU)
            again = self._run(args, kwargs, is_training=is_training)
            if [call.unit for call in again.calls] != [call.unit for call in flow.calls]:
                raise ModelError(
                    "random numbers decide which units the forward of the model calls (LayerDrop): what crosses the "
                    "cuts of a pipeline would change with every micro-batch. Switch that off (layerdrop = 0 in "
                    "configurations of transformers), or set pipeline_configs.degree = 1"
                )

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_training: bool) -> Flow:
        attributes = self._attributes
        state = self._state = _Forward(self._parameters, self._buffers, self._unit_buffers, self._fakes, attributes)
        state.on_value = self.on_value
        state.inputs = {shims.memory_of(tensor) for tensor in tensors_by_path(args, kwargs).values()}
        gradients = torch.enable_grad() if is_training else torch.no_grad()
        attributes.begin()
        generators = python_generators()
        try:
            with gradients, state, slow_paths():
                output = self.skeleton(*args, **kwargs)
            state.read_output(output)
        except (ModelError, BufferWritten):
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise ModelError(
                derivative_taken(error, state.last())
                or f"the forward of the {type(self.skeleton).__name__} cannot be run with the sample on tensors "
                f"without values ({what}); a sample is what the model is called with: a dict of its arguments, a tuple "
                f"of them, or one. If it runs on one process: {_WAY}"
            ) from error
        finally:
            self._state = None
            self._chance_decides = state.chance.decides or python_generators() != generators
            attributes.end()
        if written := attributes.changed_around() & attributes.buffers_around():
            raise BufferWritten(".".join(part for part in min(written) if part))
        attributes.check_read()
        returns = type(output).__name__ if isinstance(output, tuple | list) and not hasattr(output, "loss") else ""
        return replace(state.flow(), returns=returns)

    def _called(self, name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self._state
        if state is None or state.inside:  # a unit that runs inside another one is part of that
            return own(*args, **kwargs)
        check_no_transform(name)
        checkpoints = checkpoints_around()
        if checkpoints is not None and checkpoints.is_reentrant:
            raise ModelError(
                f"a checkpoint (recompute) with use_reentrant=True in the model's own code covers {name!r}: every "
                "later chunk of a pipeline would run it again in backward, where it is not. Use use_reentrant=False, "
                "or strategy.recompute"
            )
        args, kwargs = without_caches(args, kwargs, refusal=functools.partial(full_cache, name))
        if checkpoints is not None:
            state.note_checkpoint(checkpoints, name)
        return state.call(name, self.skeleton.get_submodule(name), own, args, kwargs, own_memory=self._own[name])


class _Forward(shims.TorchDispatchMode):
    """What has been seen of one forward."""

    def __init__(
        self,
        parameters: dict[int, str],
        buffers: dict[int, str],
        unit_buffers: set[str],
        fakes: FakeTensorMode,
        attributes: Attributes,
    ) -> None:
        super().__init__()
        self._parameter_at, self._buffer_at, self._unit_buffers, self._fakes = parameters, buffers, unit_buffers, fakes
        self._attributes = attributes
        self.calls: list[Call] = []
        self.inside = False
        self.inputs: set[int] = set()
        self.chance = Chance()
        self.on_value: _OnValue = lambda returned, given: None
        self._sources: dict[int, frozenset[_Source]] = {}
        self._kept: list[torch.Tensor] = []  # memory that is given back may come again as another one
        self._value_at: dict[int, Place] = {}
        self._overwritten: dict[int, str] = {}
        self._foreign: set[str] = set()
        self._own: set[int] = set()
        self._running = ""
        self._output: frozenset[_Source] = frozenset()
        self._written: set[Place] = set()
        self._writes_inputs = False
        self._read_buffers: set[str] = set()
        self._checkpoint: object = None
        self._together: list[set[int]] = []
        self._unkept: set[int] = set()
        self._draws: dict[int, set[int]] = {}
        self._written_buffers: set[str] = set()

    # -- operations outside units ----------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.inside or func.namespace == "prim":
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise ModelError(
                "the forward of the model draws random numbers outside of its units from a torch.Generator of its own "
                f"({func.overloadpacket.__name__}): every chunk of a pipeline runs that code, and would draw others. "
                "Draw from torch's default generator, or inside a unit"
            )
        read = [tensor for value in (*args, *kwargs.values()) for tensor in tensors_in(value)]
        sources = frozenset[_Source]().union(*(self._read(tensor, func) for tensor in read))
        func, args = with_known_masks(func, args, is_known=self._is_known)
        name = func.overloadpacket.__name__
        if sources and name in _DECIDES:
            self._refuse_choice(sources, name)
        written = [*written_by(func, args, kwargs), *statistics_of(func, args)]
        for tensor in written:
            self._write(tensor, sources)
        if any(not is_fake(tensor) for tensor in written) and any(map(is_fake, read)):
            return written[0] if len(written) == 1 else tuple(written)
        try:
            output, has_run = run_on_zeros(func, name, args, kwargs, self._fakes)
            if not has_run:
                output = func(*args, **kwargs)
        except Exception as error:
            if sources and wants_values(error):
                self._refuse_choice(sources, name)
            raise
        self.chance.note(func, args, read, output)
        before = {shims.memory_of(tensor) for tensor in read}
        for tensor in tensors_in(output):
            memory = shims.memory_of(tensor)
            self._kept.append(tensor)
            if memory not in before:
                self._sources[memory] = sources
                self._value_at.pop(memory, None)
        return output

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return not is_fake(tensor) and not self._sources.get(shims.memory_of(tensor))

    def _refuse_choice(self, sources: frozenset[_Source], name: str) -> NoReturn:
        raise ModelError(
            f"{self._said(sources)} decides how the forward of the model goes on ({name}): the other stages of a "
            f"pipeline do not have the value. {_WAY}"
        )

    def _read(self, tensor: torch.Tensor, func: Any) -> frozenset[_Source]:
        memory = shims.memory_of(tensor)
        if memory in self._parameter_at:
            return frozenset({self._parameter_at[memory]})
        if memory in self._buffer_at:
            name = self._buffer_at[memory]
            if name in self._unit_buffers:
                self._read_buffers.add(name)
            return self._sources.get(memory, frozenset())
        if memory in self._overwritten:
            raise ModelError(
                f"{self._overwritten[memory]!r} writes into a tensor that it is given, and the forward of the model "
                "reads it afterwards: on the other stages of a pipeline the unit does not run. Let it compute a new "
                "tensor (x = x + y instead of x += y)"
            )
        if memory not in self._sources and is_fake(tensor):
            raise ModelError(
                f"a tensor of shape {tuple(tensor.shape)} leaves {self.last()!r} by another way than what it returns "
                "(an attribute, a hook that records it, as output_hidden_states, output_attentions and "
                "output_router_logits of transformers do), and the forward of the model reads it: the other stages of "
                "a pipeline do not get it. Switch that off, or return the tensor"
            )
        return self._sources.get(memory, frozenset())

    def _write(self, tensor: torch.Tensor, sources: frozenset[_Source]) -> None:
        memory = shims.memory_of(tensor)
        if memory in self._parameter_at:
            raise ModelError(
                f"the forward of the model writes parameter {self._parameter_at[memory]!r}, outside of the unit that "
                f"holds it: the stages of a pipeline would not agree on it. {_WAY}"
            )
        if memory in self._buffer_at:
            raise BufferWritten(self._buffer_at[memory])
        self._kept.append(tensor)
        self._sources[memory] = self._sources.get(memory, frozenset()) | sources
        self._note_write(memory)

    def _note_write(self, memory: int) -> None:
        if memory in self._value_at:
            self._written.add(self._value_at[memory])
        if memory in self.inputs:
            self._writes_inputs = True

    # -- units -----------------------------------------------------------------------------------------------------

    def call(
        self,
        name: str,
        unit: nn.Module,
        own: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        own_memory: set[int],
    ) -> Any:
        """One call of a unit, and what the code outside gets of it."""
        index = len(self.calls)
        given = tensors_by_path(args, kwargs)
        check_objects(name, (args, kwargs), "is given")
        sources = frozenset[_Source]().union(*(self._read(tensor, None) for tensor in given.values()))
        fakes = {id(t): t if is_fake(t) else fake_input(t, self._fakes) for t in given.values()}
        for tensor in given.values():
            self.on_value(fakes[id(tensor)], tensor)
        versions = {key: shims.version_of(fake) for key, fake in fakes.items()}
        self._foreign, self._own, self._running = set(), own_memory, name
        inner_args, inner_kwargs = (map_tensors(value, lambda t: fakes[id(t)]) for value in (args, kwargs))
        known = {id(fakes[id(t)]): t for t in given.values() if not t.is_floating_point() and self._is_known(t)}
        self.inside = True
        before = self._attributes.begin_call(name)
        changed: set[tuple[str, str]] = set()
        try:
            output, flops, changed = run_without_values(
                name, unit, own, inner_args, inner_kwargs, fakes=self._fakes, known=known, note=self.note_inside
            )
        finally:
            self._written_buffers |= self._attributes.end_call(before, changed)
            self.inside = False
        written = {key for key, fake in fakes.items() if shims.version_of(fake) != versions[key]}
        for tensor in given.values():
            if id(tensor) in written:
                memory = shims.memory_of(tensor)
                self._note_write(memory)
                self._overwritten[memory] = name
                self._kept.append(tensor)
        check_objects(name, output, "returns")
        came_as = {id(fakes[id(tensor)]): path for path, tensor in reversed(given.items()) if id(tensor) not in written}
        passes: dict[str, str] = {}
        values: dict[str, ValueSize] = {}
        replaced: dict[str, torch.Tensor] = {}

        def leave(path: str, tensor: torch.Tensor) -> torch.Tensor:
            if path not in replaced and id(tensor) in came_as:
                passes[path] = came_as[id(tensor)]
                replaced[path] = given[passes[path]]
            elif path not in replaced:
                new = replaced[path] = self._value(tensor)
                memory = shims.memory_of(new)
                self._sources[memory], self._value_at[memory] = frozenset({(index, path)}), (index, path)
                values[path] = ValueSize(
                    shape=tuple(new.shape),
                    dtype=str(new.dtype).removeprefix("torch."),
                    num_bytes=new.numel() * new.dtype.itemsize,
                )
            return replaced[path]

        result = map_with_paths(output, leave)
        self.calls.append(
            Call(
                unit=name,
                reads=frozenset(source for source in sources if not isinstance(source, str)),
                parameters=frozenset(self._foreign) | {source for source in sources if isinstance(source, str)},
                passes=tuple(sorted(passes.items())),
                forward_flops=flops,
                values=tuple(values.items()),
                stays=why_it_stays(output),
            )
        )
        return result

    def note_checkpoint(self, checkpoints: Checkpoints, unit: str) -> None:
        """The next call runs in these, the outermost of which runs all of its calls again in backward."""
        if self._checkpoint is not checkpoints.outermost:
            self._checkpoint = checkpoints.outermost
            self._together.append(set())
        self._together[-1].add(len(self.calls))
        if torch.is_grad_enabled() and not checkpoints.keep_random_state:
            self._unkept.add(len(self.calls))

    def note_inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A unit may use parameters of others, which its stage must hold then; and may count statistics."""
        if kwargs.get("generator") is not None:
            self._draws.setdefault(id(kwargs["generator"]), set()).add(len(self.calls))
        for tensor in statistics_of(func, args):
            self._written_buffers.add(self._buffer_at.get(shims.memory_of(tensor), ""))
        for tensor in (tensor for value in (*args, *kwargs.values()) for tensor in tensors_in(value)):
            memory = shims.memory_of(tensor)
            if memory in self._parameter_at and memory not in self._own:
                self._foreign.add(self._parameter_at[memory])
            elif memory in self._buffer_at:
                buffer = self._buffer_at[memory]
                if buffer in self._unit_buffers and not buffer.startswith(f"{self._running}."):
                    self._read_buffers.add(buffer)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like what a unit returned, which is nobody else's: who has the unit's own got it by another way."""
        self.inside = True
        try:
            new = fake_like(tensor, self._fakes)
            if tensor.requires_grad:
                new = new.requires_grad_().clone()
        finally:
            self.inside = False
        self._kept += [tensor, new]
        self.on_value(tensor, new)
        return new

    # -- the end ---------------------------------------------------------------------------------------------------

    def read_output(self, output: Any) -> None:
        sources = [self._read(tensor, None) for tensor in tensors_by_path((output,), {}).values()]
        self._output = frozenset[_Source]().union(*sources)

    def flow(self) -> Flow:
        return Flow(
            calls=tuple(self.calls),
            output_reads=frozenset(source for source in self._output if not isinstance(source, str)),
            output_parameters=frozenset(source for source in self._output if isinstance(source, str)),
            written=frozenset(self._written),
            writes_inputs=self._writes_inputs,
            read_buffers=frozenset(self._read_buffers),
            draws=tuple(frozenset(calls) for calls in self._draws.values() if len(calls) > 1),
            together=tuple(frozenset(calls) for calls in self._together if len(calls) > 1),
            checkpointed=frozenset(call for calls in self._together for call in calls),
            unkept=frozenset(self._unkept),
            written_buffers=frozenset(self._written_buffers - {""}),
            counted=frozenset(".".join(slot) for slot in self._attributes.counted),
        )

    def _said(self, sources: frozenset[_Source]) -> str:
        first = min(sources, key=str)
        return (
            f"parameter {first!r}" if isinstance(first, str) else f"a value that {self.calls[first[0]].unit!r} returns"
        )

    def last(self) -> str:
        return self.calls[-1].unit if self.calls else "the model"
