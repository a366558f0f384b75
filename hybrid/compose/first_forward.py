"""What happens at the first forward of a model that is cut: it is compared with the plain one; better words for errors.

verify         compared                              on                                   kept until then
True           the whole model, module by module     two samples of the first batch       a copy of it
not given      one block of each kind, by itself     two samples of what it is given      its structure
False          nothing
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hybrid import shims
from hybrid.collectives import ops
from hybrid.compose.context import DATA_AXES
from hybrid.compose.tensor_parallel import Planned
from hybrid.contracts.tensor_plan import TensorPlan
from hybrid.errors import ModelError, StrategyError
from hybrid.mesh import Mesh
from hybrid.precision.tree import map_tensors
from hybrid.sharding.absence import bring_all
from hybrid.strategy import ResolvedStrategy
from hybrid.tensor.block_check import BlockCheck
from hybrid.tensor.block_kinds import BlockKind, block_kinds
from hybrid.tensor.cuts import TensorCuts
from hybrid.tensor.self_check import NotComparable, SelfCheck
from hybrid.tensor.shape_errors import explain_shape_error

__all__ = ["FirstForward", "Kept", "check_verify", "keep_plain"]


def check_verify(model: nn.Module, resolved: ResolvedStrategy) -> None:
    """Raises StrategyError: `verify` is asked for, and the model has no values to compare."""
    settings = resolved.tensor_parallel
    if settings is None or not settings.verify:
        return
    on_meta = next((fqn for fqn, parameter in model.named_parameters() if parameter.is_meta), None)
    if on_meta is not None:
        raise StrategyError(
            f"tensor_parallel_configs.verify compares with the whole plain model, and {on_meta!r} is on the meta "
            "device, for a model that no rank is to hold whole: check the plan once on the same model with fewer "
            "layers, built as usual, and leave verify out here"
        )


@dataclass(slots=True, kw_only=True)
class Kept:
    """What is kept of a model from before it is cut: a copy of all of it, or the structure of some blocks."""

    plain: nn.Module | None = None
    kinds: list[BlockKind] = field(default_factory=list)


def keep_plain(model: nn.Module, planned: Planned | None, resolved: ResolvedStrategy) -> Kept:
    """What is to be compared with the model once it is cut."""
    settings = resolved.tensor_parallel
    if settings is None or settings.verify is False or planned is None or planned.plan is None:
        return Kept()
    if settings.verify:
        return Kept(plain=SelfCheck.copy_of(model))
    return Kept(kinds=block_kinds(model, planned.plan))


class FirstForward:
    """Watches a model that is cut by a plan until one forward has come to its end."""

    def __init__(self, plan: TensorPlan, cuts: TensorCuts, *, mesh: Mesh) -> None:
        self._plan = plan
        self._cuts = cuts
        self._mesh = mesh
        self._done = False

    @staticmethod
    def watch(
        model: nn.Module,
        planned: Planned | None,
        cuts: TensorCuts | None,
        *,
        kept: Kept,
        mesh: Mesh,
        in_programs: Sequence[str] = (),
    ) -> FirstForward | None:
        """Put its hooks on the model; they take themselves away.

        Args:
            kept: from before the model was cut.
            in_programs: modules that run as one compiled program from their first call on.
        """
        if planned is None or planned.plan is None or cuts is None:
            return None
        watcher = FirstForward(planned.plan, cuts, mesh=mesh)
        if kept.plain is not None:
            watcher._verify_all(model, kept.plain)
        if kept.kinds:
            watcher._agree_on(kept.kinds)
        for kind in kept.kinds:
            watcher._verify_one_of(model, kind, in_programs)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            watcher._done = True
            end.remove()

        end = model.register_forward_hook(after)
        return watcher

    # -- all of it -----------------------------------------------------------------------------------------------

    def _verify_all(self, model: nn.Module, plain: nn.Module) -> None:
        checks = [SelfCheck(plain=plain, plan=self._plan, cuts=self._cuts)]

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if shims.in_backward():
                return
            try:
                comparison = checks.pop().run(args, kwargs)
            except NotComparable as error:
                raise ModelError(f"tensor_parallel_configs.verify: {type(module).__name__} {error}") from error
            finally:
                handle.remove()
            if self._mesh.rank == 0:
                print(
                    f"hybrid: tensor parallel verified: outputs and gradients of {comparison.num_modules} modules are "
                    f"the plain model's, to {comparison.largest_share:.1e} of their size",
                    flush=True,
                )

        handle = model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)

    # -- one block of each kind ----------------------------------------------------------------------------------

    def _agree_on(self, kinds: Sequence[BlockKind]) -> None:
        """What one tp rank cannot compare (only that one holds a lock, say), none does. *Collective* over tp."""
        reasons = {kind.fqns: kind.reason if kind.structure is None else None for kind in kinds}
        everyone = ops.all_gather_object(reasons, group=self._cuts.group)
        for kind in kinds:
            for rank, theirs in zip(self._cuts.group.ranks, everyone, strict=True):
                reason = theirs.get(kind.fqns, "is told apart from others in another way")
                if kind.structure is not None and reason is not None:
                    kind.structure, kind.reason = None, f"{reason} on rank {rank}"

    def _verify_one_of(self, model: nn.Module, kind: BlockKind, in_programs: Sequence[str]) -> None:
        """Compare the first block of a kind that is called."""
        modules = dict(model.named_modules(remove_duplicate=False))
        here = [fqn for fqn in kind.fqns if fqn in modules and any(True for _ in modules[fqn].named_parameters())]
        if not here:
            return  # on other pipeline stages
        if any(fqn.startswith(f"{outer}.") or (not outer and fqn) for fqn in here for outer in in_programs):
            kind.structure, kind.reason = None, "runs inside a compiled program"
        if kind.structure is None:
            self._warn(here[0], kind)
            return
        watch = _KindWatch(kind, BlockCheck(structure=kind.structure, plan=self._plan, cuts=self._cuts))
        for fqn in here:
            watch.put_on(fqn, model, self._plan, warn=self._warn)

    def _warn(self, fqn: str, kind: BlockKind) -> None:
        """One line, by one of the ranks that hold the block."""
        if self._cuts.group.rank or any(self._mesh.coordinate(axis) for axis in DATA_AXES):
            return
        alike = f" and {len(kind.fqns) - 1} more like it" if len(kind.fqns) > 1 else ""
        warnings.warn(
            f"tensor parallel: {fqn or 'the model'} ({kind.class_name}){alike} {kind.reason}, so it is not compared "
            "with the plain model. Check the plan once with tensor_parallel_configs.verify = True, on few layers if "
            "the model is large; False leaves this out, at your own risk",
            stacklevel=2,
        )

    def explained(self, model: nn.Module, error: BaseException) -> ModelError | None:
        """A better error for one that the model's first forward raised; None if there is nothing to add."""
        return None if self._done else explain_shape_error(model, self._plan, error)


class _KindWatch:
    """The hooks on the blocks of one kind, until one of them has been compared."""

    def __init__(self, kind: BlockKind, check: BlockCheck) -> None:
        self._kind = kind
        self._check = check
        self._handles: list[Any] = []
        self._found: ModelError | None = None

    def put_on(self, fqn: str, model: nn.Module, plan: TensorPlan, *, warn: Callable[[str, BlockKind], None]) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if _is_no_call_of_its_own():
                return
            bring_all((args, kwargs))  # parameters of the model that it hands to its blocks
            of_others = _types_of_others((args, kwargs))
            if any(_has_no_values(kind) for kind in of_others):
                return
            if self._found is not None:
                raise self._found  # whoever goes on all the same would train another model
            try:
                if of_others:
                    names_of_types = ", ".join(sorted(kind.__name__ for kind in of_others))
                    raise NotComparable(f"is called with tensors of a class of their own ({names_of_types})")
                names = {id(parameter): name for name, parameter in model.named_parameters()}
                self._check.run(fqn, module, args, kwargs, first_names=names)
            except NotComparable as error:
                self._kind.reason = str(error)
                warn(fqn, self._kind)
            except ModelError as error:
                self._found = error
                raise
            self._remove()

        def passed_by(module: nn.Module, args: Any) -> None:
            if _is_no_call_of_its_own() or self._found is not None:
                return
            if any(_has_no_values(kind) for kind in _types_of_others(args)):
                return
            self._kind.reason = "is not called itself, but something in it"
            warn(fqn, self._kind)
            self._remove()

        self._handles.append(modules[fqn].register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        inside = (name for name in plan.rules if name != fqn and (not fqn or name.startswith(f"{fqn}.")))
        first = next((name for name in inside if name in modules), None)
        if first is not None:
            self._handles.append(modules[first].register_forward_pre_hook(passed_by, prepend=True))

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _is_no_call_of_its_own() -> bool:
    """Recorded by a compiler, run again in backward, or under a transform of torch.func."""
    return torch.compiler.is_compiling() or shims.in_backward() or shims.in_function_transform()


def _types_of_others(batch: Any) -> set[type]:
    """Classes of the tensors that are neither torch.Tensor nor a parameter."""
    kinds: set[type] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kinds.add(type(tensor))
        return tensor

    with suppress(Exception):  # a container that cannot be made again: the check says so
        map_tensors(batch, note)
    return kinds - {torch.Tensor, nn.Parameter}


def _has_no_values(kind: type) -> bool:
    """Whether tensors of this class are there to see shapes, or to be brought: what comes later may have values."""
    return kind.__module__.startswith(("torch._subclasses.", "torch._functorch.", "torch.fx.", "hybrid."))
