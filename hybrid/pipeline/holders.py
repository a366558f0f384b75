"""Which chunk holds what of a model that is cut by its own forward: parameters and buffers, by module and by name.

A unit is held by every chunk that calls it. A parameter that code outside its unit reads is held by every chunk that
this reading reaches, too; each then has a part of its gradient, as of any tied parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from hybrid.errors import ModelError
from hybrid.pipeline.flow import Flow

__all__ = ["Holders"]

_Slot = tuple[int, str]
"""(id of a module, name of one of its own parameters or buffers)."""


class Holders:
    """The chunks that hold each parameter and buffer of a whole model.

    Args:
        model: with all of its parameters.
        units: names of the modules that are cut as a whole.
        flow: of its forward.
        chunks: the calls of each chunk.
    """

    def __init__(self, model: nn.Module, units: Sequence[str], flow: Flow, chunks: Sequence[range]) -> None:
        self.units = tuple(units)
        self._first = {id(p): fqn for fqn, p in model.named_parameters()}
        self._chunks_of_unit = self._place_units(model, flow, chunks)
        reads: dict[str, set[int]] = {}
        for chunk, calls in enumerate(chunks):
            for call in flow.calls[calls.start : calls.stop]:
                for fqn in call.parameters:
                    reads.setdefault(fqn, set()).add(chunk)
        for fqn in flow.output_parameters:
            reads.setdefault(fqn, set()).add(len(chunks) - 1)
        self._inside: dict[int, set[int]] = {}
        for name in self.units:
            for module in model.get_submodule(name).modules():
                self._inside.setdefault(id(module), set()).update(self._chunks_of_unit[name])
        self._slots: dict[_Slot, tuple[int, ...]] = {}
        everywhere = tuple(range(len(chunks)))
        for prefix, module in model.named_modules():
            held = self._inside.get(id(module), set())
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                holders = held | reads.get(self._first[id(parameter)], set())
                self._slots[id(module), attribute] = tuple(sorted(holders)) or (0,)
            for attribute, _ in module.named_buffers(recurse=False, remove_duplicate=False):
                fqn = f"{prefix}.{attribute}" if prefix else attribute
                is_unit = id(module) in self._inside and fqn not in flow.read_buffers
                self._slots[id(module), attribute] = tuple(sorted(held)) if is_unit else everywhere
        self._names = dict(self._named(model))

    def _place_units(self, model: nn.Module, flow: Flow, chunks: Sequence[range]) -> dict[str, tuple[int, ...]]:
        found: dict[str, set[int]] = {}
        for chunk, calls in enumerate(chunks):
            for call in flow.calls[calls.start : calls.stop]:
                found.setdefault(call.unit, set()).add(chunk)
        tied = {id(p): min(found[name]) for name in reversed(list(found)) for p in _parameters(model, name)}
        before = 0
        for (
            name
        ) in self.units:  # one that is never called stands beside what shares its parameters, or what is before it
            if name not in found:
                own = [tied[id(p)] for p in _parameters(model, name) if id(p) in tied]
                found[name] = {min(own)} if own else {before}
            before = min(found[name])
        return {name: tuple(sorted(held)) for name, held in found.items()}

    def _named(self, model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
        for prefix, module in model.named_modules(remove_duplicate=False):
            own = [n for n, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
            own += [n for n, _ in module.named_buffers(recurse=False, remove_duplicate=False)]
            for attribute in own:
                yield f"{prefix}.{attribute}" if prefix else attribute, self._slots[id(module), attribute]
            if prefix and prefix not in self._chunks_of_unit and id(module) in self._inside:
                yield prefix, tuple(sorted(self._inside[id(module)]))
        yield from self._chunks_of_unit.items()

    def of_slot(self, module: nn.Module, attribute: str) -> tuple[int, ...]:
        """The chunks that hold a module's own parameter or buffer; of one that tensor parallel has made, its unit's."""
        held = self._slots.get((id(module), attribute))
        return tuple(sorted(self._inside.get(id(module), {0}))) if held is None else held

    def of(self, fqn: str) -> tuple[int, ...]:
        """The chunks that hold a parameter, a buffer, a unit or a module in one; none for a module around units."""
        return self._names.get(fqn, ())

    def check_reads(self, fqns: Iterable[str], how: str, chunk: int, names: Mapping[str, Sequence[str]]) -> None:
        """That another forward finds on this chunk the parameters that it reads outside their units.

        Args:
            fqns: first names of parameters.
            how: what becomes of them, for messages.
            names: first name of a parameter -> all of its names.

        Raises:
            ModelError: it does not.
        """
        for fqn in fqns:
            if all(chunk not in self.of(name) for name in names[fqn]):
                raise ModelError(
                    f"with these inputs parameter {fqn!r} {how} from outside its unit, unlike with the sample by which "
                    "the model was cut, and the stage does not hold it. Give distributed_model(sample=...) inputs of "
                    "the kind that you train with"
                )


def _parameters(model: nn.Module, name: str) -> Iterator[nn.Parameter]:
    yield from model.get_submodule(name).parameters()
