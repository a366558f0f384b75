"""Which chunk holds what of a model that is cut by its own forward: parameters and buffers, by module and by name.

A unit is held by every chunk that calls it. A parameter that code outside its unit reads is held by every chunk that
this reading reaches, too; each then has a part of its gradient, as of any tied parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

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
        self._all_names: dict[str, list[str]] = {}
        for fqn, parameter in model.named_parameters(remove_duplicate=False):
            self._all_names.setdefault(self._first[id(parameter)], []).append(fqn)
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

    def check(self, flow: Flow, chunks: Sequence[range], stage_of: Callable[[int], int]) -> None:
        """That a forward finds on each chunk what it reads there, and no chunk has a copy of what one process has once.

        Args:
            flow: of a forward of this model.
            chunks: the calls of each chunk in it.
            stage_of: chunk -> its stage.

        Raises:
            ModelError: it does not.
        """
        for chunk, calls in enumerate(chunks):
            for call in flow.calls[calls.start : calls.stop]:
                self._check_reads(call.parameters, f"reaches {call.unit!r}", chunk)
        self._check_reads(flow.output_parameters, "reaches the output", len(chunks) - 1)
        for again in flow.together:
            _check_uncut(
                flow,
                again,
                chunks,
                "a checkpoint (recompute) in the model's own code covers",
                "would run all of them again in backward: checkpoint single units, choose a split that does not cut "
                "it, or use strategy.recompute",
            )
        for drawing in flow.draws:
            _check_uncut(
                flow,
                drawing,
                chunks,
                "a torch.Generator of the model's own is drawn from in",
                "would be another on each of them: give each unit one of its own, or draw from torch's default one",
            )
        for fqn in sorted(flow.read_buffers):
            if len(self.of(fqn)) < len(chunks):
                raise ModelError(
                    f"with these inputs, or in this mode, the forward of the model reads buffer {fqn!r} outside of its "
                    "unit, unlike with the sample by which the model was cut, and not every stage has it. Give "
                    "distributed_model the model in this mode, and a sample of the kind that you train with"
                )
        for fqn in sorted(flow.written_buffers):
            _check_once(f"buffer {fqn!r} is written by its module", self.of(fqn), stage_of)
        for fqn in sorted(flow.counted):
            held = self.of(fqn.rpartition(".")[0])
            _check_once(f"attribute {fqn!r} is changed by each call of its module", held, stage_of)

    def _check_reads(self, fqns: Iterable[str], how: str, chunk: int) -> None:
        for fqn in fqns:
            if all(chunk not in self.of(name) for name in self._all_names[fqn]):
                raise ModelError(
                    f"with these inputs parameter {fqn!r} {how} from outside its unit, unlike with the sample by which "
                    "the model was cut, and the stage does not hold it. Give distributed_model(sample=...) inputs of "
                    "the kind that you train with"
                )


def _check_uncut(flow: Flow, calls: frozenset[int], chunks: Sequence[range], what: str, why: str) -> None:
    """Raises ModelError: these calls belong to several chunks."""
    cut = [chunk for chunk, own in enumerate(chunks) if not calls.isdisjoint(own)]
    if len(cut) > 1:
        first, last = flow.calls[min(calls)].unit, flow.calls[max(calls)].unit
        raise ModelError(
            f"{what} {first!r} to {last!r}, which are in pipeline chunks {' and '.join(map(str, cut))}, and {why}"
        )


def _check_once(what: str, held: Sequence[int], stage_of: Callable[[int], int]) -> None:
    """Raises ModelError: several chunks change this."""
    stages = sorted(set(map(stage_of, held)))
    if len(held) < 2:
        return
    where = f"pipeline stages {' and '.join(map(str, stages))}: each stage would go on with a copy of its own, which"
    if len(stages) == 1:
        where = (
            f"chunks {' and '.join(map(str, held))} of pipeline stage {stages[0]}: the micro-batches do not come to it "
            "one after the other, as"
        )
    tail = "one process has not" if len(stages) > 1 else "in one process"
    raise ModelError(
        f"{what}, which is called on {where} {tail}. Give each call a module of its own, or choose a split that puts "
        f"all calls on one {'stage' if len(stages) > 1 else 'chunk'}"
    )


def _parameters(model: nn.Module, name: str) -> Iterator[nn.Parameter]:
    yield from model.get_submodule(name).parameters()
