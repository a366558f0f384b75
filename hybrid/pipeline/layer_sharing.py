"""One parameter for all layers of a key, wherever the layers are built."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import nn

from hybrid.errors import ModelError
from hybrid.pipeline.layer_desc import SharedLayerDesc, layer_name

__all__ = ["check_own_modules", "check_sharing", "places_by_key", "tie"]


def places_by_key(shared: Mapping[int, SharedLayerDesc]) -> dict[str, list[tuple[int, str]]]:
    """Key -> (layer, attribute) of each layer that has it, in order."""
    found: dict[str, list[tuple[int, str]]] = {}
    for index, desc in shared.items():
        found.setdefault(desc.key, []).append((index, desc.shared_weight_attr))
    return found


def tie(
    built: Mapping[int, nn.Module], shared: Mapping[int, SharedLayerDesc], *, make: Callable[[int], nn.Module]
) -> dict[str, str]:
    """Put each key's one parameter into all the layers that are built.

    Args:
        built: index -> layer.
        shared: index -> description, of all layers that have a key.
        make: builds a layer that is not there, whose first parameter the others start from.

    Returns:
        Name of a shared parameter here -> its first name, in a layer that is not among `built`.

    Raises:
        ModelError: no such parameter, or one of another form than the first.
    """
    elsewhere: dict[str, str] = {}
    for places in places_by_key(shared).values():
        first = places[0][0]
        here = [index for index, _ in places if index in built]
        if not here:
            continue
        origin = built[first] if first in built else make(first)
        owner, name = shared[first].owner_of_shared(origin)
        parameter = owner.get_parameter(name)
        for index in here:
            _put(parameter, into=built[index], desc=shared[index], index=index, first=first)
            if first not in built:
                own_name = f"{index}.{_first_name(parameter, built[index])}"
                elsewhere[own_name] = f"{first}.{_first_name(parameter, origin)}"
    return elsewhere


def check_own_modules(built: Mapping[int, nn.Module], shared: Mapping[int, SharedLayerDesc]) -> None:
    """A module has one forward, so one that a `forward_func` runs can be one layer only.

    Raises:
        ModelError: it was built as several layers.
    """
    for index, desc in shared.items():
        module = built.get(index)
        if desc.forward_func is None or module is None:
            continue
        others = [other for other, held in built.items() if held is module and other != index]
        if others:
            raise ModelError(
                f"layers {min(index, *others)} and {max(index, *others)} are built as one and the same "
                f"{type(module).__name__}, and the forward_func of layer {index} would run both: let each "
                "SharedLayerDesc build a module of its own, their key makes the parameter one"
            )


def check_sharing(
    wanted: Collection[int], shared: Mapping[int, SharedLayerDesc], *, make: Callable[[int], nn.Module]
) -> None:
    """Find on the meta device what does not fit, where `wanted` are not all layers of a key.

    So every process refuses alike, whatever it builds.

    Raises:
        ModelError: as `tie`.
    """
    for places in places_by_key(shared).values():
        indices = [index for index, _ in places]
        if len(indices) > 1 and not set(indices) <= set(wanted):
            _check_key(indices, shared, make)


def _check_key(indices: Sequence[int], shared: Mapping[int, SharedLayerDesc], make: Callable[[int], nn.Module]) -> None:
    made: dict[int, nn.Module] = {}
    for index in indices:
        if any(shared[index].is_built_like(shared[other]) for other in made):
            continue
        try:
            made[index] = make(index)
        except Exception:  # not every constructor can run there; then those who build it for real find out
            break
    for index, module in made.items():
        owner, name = shared[indices[0]].owner_of_shared(made[indices[0]])
        _put(owner.get_parameter(name), into=module, desc=shared[index], index=index, first=indices[0])


def _put(parameter: nn.Parameter, *, into: nn.Module, desc: SharedLayerDesc, index: int, first: int) -> None:
    """Make it the module's parameter, under every name that the module's own one has."""
    owner, name = desc.owner_of_shared(into)
    own = owner.get_parameter(name)
    if own is parameter:
        return
    if own.shape != parameter.shape or own.dtype != parameter.dtype:
        raise ModelError(
            f"SharedLayerDesc {desc.key!r}: {desc.shared_weight_attr} of layer {index} ({layer_name(desc)}) is "
            f"{_form(own)}, that of layer {first} is {_form(parameter)}; they must be alike to be one parameter"
        )
    for module in into.modules():
        for other, held in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if held is own:
                setattr(module, other, parameter)


def _first_name(parameter: nn.Parameter, module: nn.Module) -> str:
    """Its name in registration order, which need not be the one it is shared by."""
    return next(name for name, held in module.named_parameters() if held is parameter)


def _form(parameter: nn.Parameter) -> str:
    return f"{' × '.join(map(str, parameter.shape))} {str(parameter.dtype).removeprefix('torch.')}"
