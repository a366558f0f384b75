"""What the modules that hold a part of their parameters have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import nn

from hybrid.collectives.group import Group
from hybrid.contracts.placement import Cut
from hybrid.errors import ModelError
from hybrid.tensor.region import CutRegion

__all__ = [
    "CutModule",
    "TensorParallelInfo",
    "adopted_class",
    "check_divides",
    "local_part",
    "resolve_group",
    "set_group_provider",
    "shared_region",
]


@dataclass(slots=True, kw_only=True)
class TensorParallelInfo:
    """How a module is cut; every parallel module has one as its attribute `tensor_parallel`."""

    group: Group
    cuts: dict[str, Cut]
    """Parameter name in this module -> its cut; a parameter that is not listed is whole on every rank."""
    partial: frozenset[str]
    """Whole parameters whose gradient is a part of the sum over tp: the row bias under sequence parallel."""
    style: str

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelInfo:
        return replace(self, cuts=dict(self.cuts))  # process groups cannot be copied


# -- groups and regions of layers that are built by hand ---------------------------------------------------------

# One each; lists, so that there is one object for the process to change.
_providers: list[Callable[[], Group]] = []
_regions: dict[tuple[int, ...], CutRegion] = {}


def set_group_provider(provider: Callable[[], Group] | None) -> None:
    """Where layers built without a group find the tp group of the running job; None: nowhere."""
    _providers[:] = [] if provider is None else [provider]
    if provider is None:
        _regions.clear()


def resolve_group(group: Group | None) -> Group:
    """The group that was given, or that of the running job."""
    if group is not None:
        return group
    if not _providers:
        raise ModelError("no tp group: pass group=..., or build the layer after hybrid.init(strategy)")
    return _providers[0]()


def shared_region(group: Group) -> CutRegion:
    """The region of all layers that were built by hand for this group."""
    region = _regions.get(group.ranks)
    if region is None or region.group is not group:
        region = _regions[group.ranks] = CutRegion(group)
    return region


# -- cutting -----------------------------------------------------------------------------------------------------


def local_part(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    """What a rank holds of a whole parameter: a new contiguous tensor."""
    pieces = [tensor.narrow(cut.dim, start, length) for start, length in cut.pieces]
    if len(pieces) == 1:
        return pieces[0].clone(memory_format=torch.contiguous_format)
    return torch.cat(pieces, dim=cut.dim).contiguous()


def check_divides(what: str, size: int, degree: int) -> None:
    """Refuse a size that tp ranks cannot share evenly, with the nearest sizes that they can."""
    if size % degree:
        below = size // degree * degree
        near = f"{below} and {below + degree} can" if below else f"{degree} can"
        raise ModelError(f"{what} = {size} cannot be cut over tp = {degree} ranks; {near}")


class CutModule(nn.Module):
    """Mixed into a plain module class: its parameters are cut as `tensor_parallel.cuts` says."""

    tensor_parallel: TensorParallelInfo
    tensor_parallel_region: CutRegion

    def set_up(
        self, *, group: Group, style: str, cuts: Mapping[str, Cut], partial: frozenset[str], region: CutRegion | None
    ) -> None:
        """Record how the module is cut. Parameter values stay as they are."""
        self.tensor_parallel = TensorParallelInfo(group=group, cuts=dict(cuts), partial=partial, style=style)
        self.tensor_parallel_region = shared_region(group) if region is None else region

    def cut_parameters(self) -> None:
        """Replace the whole parameters, with which the plain constructor built the module, by this rank's part."""
        for name, cut in self.tensor_parallel.cuts.items():
            whole = self._parameters[name]
            assert whole is not None
            self._parameters[name] = nn.Parameter(local_part(whole.detach(), cut), whole.requires_grad)

    def reset_parameters(self) -> None:
        """Draw the whole parameters as the plain module does and keep this rank's part: the same for every degree."""
        self.redraw(cast(Any, super()).reset_parameters)

    def redraw(self, plain: Callable[[], None]) -> None:
        """Let `plain` initialise parameters of the whole sizes, and keep this rank's part."""
        info = self.__dict__.get("tensor_parallel")
        if info is None or all(self._size(name, cut) == cut.global_size for name, cut in info.cuts.items()):
            plain()  # they are whole: the plain constructor is at work, or a call from the user's class to ours
            return
        own = {name: cast(nn.Parameter, self._parameters[name]) for name in info.cuts}
        try:
            for name, cut in info.cuts.items():
                shape = list(own[name].shape)
                shape[cut.dim] = cut.global_size
                self._parameters[name] = nn.Parameter(own[name].detach().new_empty(shape))
            plain()
            with torch.no_grad():
                for name, cut in info.cuts.items():
                    own[name].copy_(local_part(cast(nn.Parameter, self._parameters[name]), cut))
        finally:
            self._parameters.update(own)

    def _size(self, name: str, cut: Cut) -> int:
        parameter = self._parameters[name]
        return cut.global_size if parameter is None else parameter.shape[cut.dim]

    def extra_repr(self) -> str:
        group = self.tensor_parallel.group
        return f"{super().extra_repr()}, tp rank {group.rank} of {group.size}".removeprefix(", ")


# -- adoption ----------------------------------------------------------------------------------------------------

_Kind = TypeVar("_Kind", bound=CutModule)


def adopted_class(module: nn.Module, kind: type[_Kind], *, plain: type[nn.Module]) -> type[_Kind]:
    """The class that makes an existing module, of class `plain` or one derived from it, a parallel one.

    A derived class stays in front, so what it adds around `super().forward(...)` goes on working.

    Raises:
        ModelError: the module computes on its own, without `plain.forward`; or has no parameter `weight`.
    """
    name = type(module).__name__
    if isinstance(module, CutModule):
        raise ModelError(f"this {name} is tensor parallel already, with the style {module.tensor_parallel.style!r}")
    if "forward" in vars(module):
        raise ModelError(f"this {name} has a forward of its own on the instance, which would be used instead of ours")
    for base in type(module).__mro__[: type(module).__mro__.index(plain)]:
        forward = vars(base).get("forward")
        # A method that says super() has a cell with its class.
        if forward is not None and "__class__" not in getattr(getattr(forward, "__code__", None), "co_freevars", ()):
            raise ModelError(
                f"{base.__name__}.forward replaces {plain.__name__}.forward instead of calling it through super(), so "
                f"it cannot be cut; call super().forward(...) there, or leave the module whole"
            )
    if "weight" not in dict(module.named_parameters(recurse=False)):
        raise ModelError(f"the weight of this {name} is not a parameter of its own (is it parametrized?)")
    base = kind if issubclass(kind, plain) else _combined(kind, plain)
    return cast("type[_Kind]", base if type(module) is plain else _derived(type(module), base))


# (class, class) -> the class made of them: one for all modules of a kind.
_made: dict[tuple[type, type], type[CutModule]] = {}


def _combined(kind: type[CutModule], plain: type[nn.Module]) -> type[CutModule]:
    """A mixed-in forward in front of a plain class that is not ours."""
    if (kind, plain) not in _made:
        _made[kind, plain] = type(f"{kind.__name__}{plain.__name__}", (kind, plain), {})
    return _made[kind, plain]


def _derived(user_class: type[nn.Module], base: type[CutModule]) -> type[CutModule]:
    """A user's class in front of ours."""

    def reset_parameters(self: CutModule) -> None:
        self.redraw(functools.partial(cast(Any, user_class).reset_parameters, self))

    if (user_class, base) not in _made:
        name = f"{base.__name__}Of{user_class.__name__}"
        _made[user_class, base] = type(name, (user_class, base), {"reset_parameters": reset_parameters})
    return _made[user_class, base]
