"""What a forward reads and leaves in attributes of modules: state in Python, of which every stage has its own copy.

changed by a unit's call, read outside of the unit         refused: the other stages have the old value
changed by each call of a unit that several chunks call    refused: one process has one value
changed outside units, from what was there before          refused: every chunk would change it again
filled once, or anew from the same inputs (a cache)        goes: every stage has the same
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from hybrid import shims
from hybrid.errors import ModelError
from hybrid.pipeline.skeleton import is_fake
from hybrid.pipeline.unit_class import watch_attributes

__all__ = ["Attributes", "Slot", "changed_slots", "check_around", "contents", "state_of"]

Slot = tuple[str, str]
"""(name of a module, its attribute)."""

# What every module has: its parts and hooks are looked at elsewhere.
_OF_ALL = frozenset(vars(nn.Module()))
# Of a long container, so many entries at both ends.
_ENTRIES = 64
_DEPTH = 3
_PLAIN = (bool, int, complex, str, bytes, type(None), torch.dtype, torch.device, type)
# Values up to this many elements are compared.
_MOST_ELEMENTS = 1 << 20


class _Object:
    """Stands for one object, and holds it: no other one gets its id. Tensors with the same values are the same."""

    __slots__ = ("held", "version")

    def __init__(self, held: object, *, versions: bool = True) -> None:
        self.held = held
        self.version = shims.version_of(held) if versions and isinstance(held, torch.Tensor) else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Object):
            return False
        if self.held is other.held:
            return self.version == other.version
        return _same_values(self.held, other.held)

    __hash__ = None  # type: ignore[assignment]


def _same_values(one: object, other: object) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if is_fake(one) or is_fake(other) or one.is_meta or other.is_meta or one.layout != other.layout:
        return False
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return one.layout is torch.strided and one.numel() <= _MOST_ELEMENTS and torch.equal(one, other)


def contents(value: Any, depth: int = _DEPTH, *, versions: bool = True) -> Any:
    """Equal as long as nothing in a value was replaced, in containers and attributes of objects.

    `versions`: nor any tensor written to.
    """
    inner = functools.partial(contents, depth=depth - 1, versions=versions)
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, float):
        return "nan" if math.isnan(value) else (float, value)
    if isinstance(value, torch.Tensor | nn.Module) or depth == 0 or callable(value):
        return _Object(value, versions=versions)
    if isinstance(value, list | tuple | collections.deque):
        ends = chain(islice(value, _ENTRIES), islice(reversed(value), _ENTRIES))
        return type(value), len(value), [inner(item) for item in ends]
    if isinstance(value, dict):
        ends = chain(islice(value.items(), _ENTRIES), islice(reversed(value.items()), _ENTRIES))
        return type(value), len(value), [(key, inner(item)) for key, item in ends]
    if isinstance(value, set | frozenset):
        return type(value), len(value)
    held = getattr(value, "__dict__", None)
    return (_Object(value), inner(held)) if isinstance(held, dict) else _Object(value)


def state_of(modules: Iterable[tuple[str, nn.Module]]) -> dict[Slot, Any]:
    """Attributes and buffers of modules by name, to be compared."""
    found: dict[Slot, Any] = {}
    for name, module in modules:
        for attribute, value in vars(module).items():
            if attribute not in _OF_ALL:
                found[name, attribute] = contents(value)
        for attribute, buffer in _buffers_of(module).items():
            found[name, attribute] = _Object(buffer)
    return found


def changed_slots(before: Mapping[Slot, Any], after: Mapping[Slot, Any]) -> set[Slot]:
    """Those that are new, gone or not what they were."""
    return {
        slot
        for slot in before.keys() | after.keys()
        if slot not in before or slot not in after or before[slot] != after[slot]
    }


class Attributes:
    """Those of one skeleton.

    Args:
        skeleton: whose modules are watched.
        units: names of the modules that are cut as a whole.
    """

    def __init__(self, skeleton: nn.Module, units: Mapping[str, nn.Module]) -> None:
        self._named = list(skeleton.named_modules())
        self._name_of = {id(module): name for name, module in self._named}
        self._inside = {name: {id(module) for module in unit.modules()} for name, unit in units.items()}
        of_units = set[int]().union(*self._inside.values())
        self._around = [(name, module) for name, module in self._named if id(module) not in of_units]
        self._is_around = {name for name, _ in self._around}
        self._of_unit = {
            name: [(self._name_of[id(module)], module) for module in unit.modules()] for name, unit in units.items()
        }
        self._first_name = {
            name: {inner: self._name_of[id(module)] for inner, module in unit.named_modules()}
            for name, unit in units.items()
        }
        self._is_watching = False
        self.begin()
        watch_attributes((module for _, module in self._named), self._seen)

    def begin(self) -> None:
        """One forward begins."""
        self._running = ""
        self._first = dict(self._values())
        self._read_outside: set[Slot] = set()
        """Outside the unit that has it, or, around units, before it was changed."""
        self._read_now: set[Slot] = set()
        self._changed: dict[Slot, str] = {}
        self.counted: set[Slot] = set()
        """Changed by several calls of units, from what the one before has left."""
        self._states = [state_of(self._around)]
        self._is_watching = True

    def _values(self) -> Iterable[tuple[Slot, Any]]:
        for name, module in self._around:
            for attribute, value in vars(module).items():
                if attribute not in _OF_ALL:
                    yield (name, attribute), value

    def _seen(self, module: nn.Module, attribute: str, value: Any) -> None:
        if not self._is_watching or attribute in _OF_ALL:
            return
        name = self._name_of.get(id(module))
        if name is None:
            return
        slot = name, attribute
        if self._running and id(module) in self._inside[self._running]:
            self._read_now.add(slot)
        elif name not in self._is_around or self._first.get(slot) is value:
            self._read_outside.add(slot)

    def begin_call(self, unit: str) -> dict[Slot, Any]:
        """Before a unit runs: what its attributes are."""
        self._states.append(state_of(self._around))
        self._running = unit
        self._read_now = set()
        return state_of(self._of_unit[unit])

    def end_call(self, before: Mapping[Slot, Any], changed_in_copy: Iterable[Slot]) -> set[str]:
        """After it ran; returns the names of buffers that it has written or replaced.

        Args:
            before: what `begin_call` returned.
            changed_in_copy: by names in the unit, where a copy of it ran instead.
        """
        unit, self._running = self._running, ""
        changed = changed_slots(before, state_of(self._of_unit[unit]))
        changed |= {(self._first_name[unit][name], attribute) for name, attribute in changed_in_copy}
        self.counted |= {slot for slot in changed & self._read_now if slot in self._changed}
        self._changed |= dict.fromkeys(changed, unit)
        buffers = {(n, a) for n, m in self._of_unit[unit] for a in _buffers_of(m)}
        self.counted -= buffers
        return {".".join(slot) for slot in changed & buffers}

    def end(self) -> None:
        """The forward has ended."""
        self._states.append(state_of(self._around))
        self._is_watching = False

    def changed_around(self) -> set[Slot]:
        """Attributes of modules around units that were changed, from what they were."""
        return {slot for state in self._states[1:] for slot in changed_slots(self._states[0], state)}

    def check_read(self) -> None:
        """Raises ModelError: an attribute that a unit has changed is read outside of it."""
        for slot, unit in sorted(self._changed.items()):
            if slot in self._read_outside:
                raise ModelError(
                    f"{unit!r} changes its attribute {'.'.join(slot)!r}, which the forward of the model reads outside "
                    "of it: the other stages of a pipeline, where the unit does not run, have the old one. Return the "
                    "value from the unit"
                )

    def read_around(self) -> set[Slot]:
        """Attributes of modules around units that were read as they were before."""
        return {slot for slot in self._read_outside if slot[0] in self._is_around}

    def buffers_around(self) -> set[Slot]:
        return {(n, a) for n, m in self._around for a in _buffers_of(m)}

    def saved(self) -> Callable[[], None]:
        """Returns what puts attributes, the containers in them and buffers back to what they are now."""
        kept = [
            (module, {k: (v, _copy(v)) for k, v in vars(module).items() if k not in _OF_ALL}, _buffers_of(module))
            for _, module in self._named
        ]

        def put_back() -> None:
            for module, attributes, buffers in kept:
                own = vars(module)
                for name in [name for name in own if name not in _OF_ALL and name not in attributes]:
                    del own[name]
                for name, (value, items) in attributes.items():
                    own[name] = value
                    if items is not None:
                        value.clear()
                        (value.extend if hasattr(value, "extend") else value.update)(items)
                for name in _buffers_of(module).keys() - buffers.keys():
                    delattr(module, name)
                for name, buffer in buffers.items():
                    if name in own or _buffers_of(module).get(name) is not buffer:
                        own.pop(name, None)
                        module.register_buffer(name, buffer, persistent=shims.is_persistent(module, name))

        return put_back


def check_around(changed: set[Slot]) -> None:
    """Raises ModelError: attributes of modules around units are counted on."""
    for name, attribute in sorted(changed):
        raise ModelError(
            f"the forward of the model changes attribute {attribute!r} of {repr(name) if name else 'the model'}, which "
            "is around units, and goes on from what it was: every chunk of a pipeline runs the code around units, and "
            "would change it again. Let a unit hold it, give it as an argument, or set pipeline_configs.degree = 1"
        )


def _copy(value: Any) -> Any:
    return value.copy() if type(value) in {list, dict, set, collections.deque, collections.OrderedDict} else None


def _buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))
