"""Which modules of a model are cut as a whole: its repeated blocks, and of the rest the largest parts around them."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

__all__ = ["can_be_taken_apart", "find_cut_units"]

_NEVER_ALONE = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_TAKEN_APART = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)


def find_cut_units(
    model: nn.Module, *, blocks: Collection[str], wanted: Collection[str], apart: Collection[str]
) -> tuple[str, ...]:
    """Names of the modules, in the order of registration; one that has several names under its first.

    Args:
        blocks: names of the repeated blocks.
        wanted: names of modules that must be units, or lie around units.
        apart: names of modules that must not be units, only their parts.
    """
    stops = {*blocks, *wanted}
    seen: set[int] = set()
    found: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        inner = any(other.startswith(f"{name}.") for other in (*stops, *apart)) or not name
        whole = not inner and name not in apart and not isinstance(module, _NEVER_ALONE)
        if whole and (name in stops or _has_parameters(module)):
            found.append(name)
            return
        if not inner and name in blocks and name not in apart:
            found.append(name)
            return
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    return tuple(found)


def can_be_taken_apart(model: nn.Module, name: str) -> bool:
    """Whether a unit may be taken apart: it has parts with parameters, and is no layer of torch."""
    module = model.get_submodule(name)
    is_torchs = type(module).__module__.startswith("torch.nn.modules") and type(module) is not nn.Module
    is_torchs = is_torchs and not isinstance(module, _TAKEN_APART)
    return not is_torchs and any(_has_parameters(child) for child in module.children())


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
