"""What each layer of a list costs, found on fake tensors: shapes and operations, no memory and no arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

# The class has no public home in torch 2.13; this is a public module that has it.
from torch.fx.passes.fake_tensor_prop import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from hybrid import shims
from hybrid.contracts.stage_split import LayerCost, LayerCosts
from hybrid.errors import ModelError
from hybrid.pipeline.layer_desc import layer_name
from hybrid.pipeline.layers import PipelineLayer
from hybrid.precision.tree import map_tensors

__all__ = ["CPU_ATTENTION_FLOPS", "flop_counter", "layer_costs", "parameter_costs"]


def layer_costs(layers: nn.Sequential | PipelineLayer | Iterable[nn.Module], sample: Any) -> LayerCosts:
    """Parameters and forward flops of each layer, on an input like `sample`.

    The layers are left as they are, and need not be built. Flops are those of matrix products, convolutions and
    attention, as torch counts them; all else counts none.

    Args:
        layers: in the order in which they run; of a `PipelineLayer` all or nothing is built.
        sample: what the first layer takes, any tree of tensors; only shapes and types matter. A micro-batch, best.

    Returns:
        The costs; without flops, and with a note, if a layer cannot run on fake tensors (it reads values).

    Raises:
        ModelError: a `PipelineLayer` of which this process has built only a part.
    """
    chain = _of_pipeline(layers) if isinstance(layers, PipelineLayer) else [_of_module(module) for module in layers]
    device = _device_of(chain, sample)
    fakes = FakeTensorMode(allow_non_fake_inputs=True)  # a layer may hold plain tensors as constants
    costs: list[LayerCost] = []
    note = ""
    # Constructors and dropout draw nothing on fake tensors; what else a layer draws from is put back.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        value = map_tensors(sample, lambda tensor: _fake(tensor, fakes, device))
        for index, layer in enumerate(chain):
            flops: int | None = None
            if not note:
                try:
                    value, flops = _run(layer, value, fakes, device)
                except Exception as error:
                    reason = (str(error).splitlines() or [""])[0]
                    note = (
                        f"layer {index}, {layer.name}, cannot run on fake tensors ({type(error).__name__}: {reason}): "
                        "layers count by their parameters"
                    )
            costs.append(LayerCost(name=layer.name, num_parameters=layer.num_parameters, forward_flops=flops))
    return LayerCosts(layers=tuple(costs), note=note)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer: `module` if it is built, else `make` builds it."""

    name: str
    num_parameters: int
    module: nn.Module | None
    make: Callable[[], nn.Module]
    device: torch.device | None


def _of_module(module: nn.Module) -> _Layer:
    return _Layer(
        name=layer_name(module),
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        module=module,
        make=lambda: module,
        device=next((parameter.device for parameter in module.parameters() if not parameter.is_meta), None),
    )


def _of_pipeline(layers: PipelineLayer) -> list[_Layer]:
    if 0 < len(layers.owned) < layers.num_layers:
        raise ModelError(
            f"layers {list(layers.owned)} of {layers.num_layers} are built here; measure costs before a part is built"
        )
    found = []
    for index, name in enumerate(layers.layer_names()):
        module = layers.layer_here(index)
        found.append(
            _Layer(
                name=name,
                num_parameters=layers.num_parameters_of(index),
                module=module,
                make=partial(layers.make_layer, index),
                device=_of_module(module).device if module is not None else layers.build_settings.device,
            )
        )
    return found


def _run(layer: _Layer, value: Any, fakes: FakeTensorMode, device: torch.device) -> tuple[Any, int]:
    with fakes:
        module = layer.make() if layer.module is None else _fake_copy(layer.module, fakes, device)
        with flop_counter(CPU_ATTENTION_FLOPS) as counter:
            return module(value), counter.get_total_flops()


def _fake_copy(module: nn.Module, fakes: FakeTensorMode, device: torch.device) -> nn.Module:
    """With fake parameters and buffers; a copy, so that nothing that its forward stores stays in the model."""
    replaced: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        fake = _fake(tensor, fakes, device if tensor.is_meta else tensor.device)
        is_parameter = isinstance(tensor, nn.Parameter)
        replaced[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
    return copy.deepcopy(module, replaced)


def _fake(tensor: torch.Tensor, fakes: FakeTensorMode, device: torch.device) -> torch.Tensor:
    with fakes:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _device_of(chain: Sequence[_Layer], sample: Any) -> torch.device:
    """Where the layers compute: where they are, else where the sample is; what is on the meta device, on the CPU."""
    found = [layer.device for layer in chain if layer.device is not None]
    map_tensors(sample, lambda tensor: found.append(tensor.device))
    return next((device for device in found if device.type != "meta"), torch.device("cpu"))


class _OneModule(ModuleTracker):
    """Counts a call as a whole. Torch's own hooks on what modules are given fail without gradients, on a parameter."""

    def __enter__(self) -> ModuleTracker:
        return self

    def __exit__(self, *_: Any) -> None:
        """Nothing was hooked."""


def flop_counter(formulas: Mapping[Any, Callable[..., int]]) -> FlopCounterMode:
    """Torch's counter of all that runs inside it, by these formulas beside its own."""
    counter = FlopCounterMode(display=False, custom_mapping=dict(formulas))
    counter.mod_tracker = _OneModule()
    return counter


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Of each head two products, [s_q, d] × [d, s_k] and [s_q, s_k] × [s_k, d_v]; a mask takes nothing off."""
    *heads, s_q, d = query
    return 2 * prod(heads) * s_q * key[-2] * (d + value[-1])


# torch 2.13 has formulas for the attention kernels of GPUs only, and would count none for the CPU's.
CPU_ATTENTION_FLOPS = {
    operation.overloadpacket: _attention_flops
    for operation in shims.ATTENTION_OPERATIONS
    if operation.name().endswith("_for_cpu")
}


def parameter_costs(model: nn.Module, layers: Sequence[nn.Module]) -> list[float]:
    """What stands for the layers' times without a sample: multiplications per token, one per parameter, at least 1.

    A table that is looked up costs nothing; a shared one that comes again is a head, a product with all of it.
    """
    again: set[int] = set()
    if isinstance(model, PipelineLayer):
        again = {index for uses in model.shared_keys().values() for index, _ in uses[1:]}
    costs = []
    for index, layer in enumerate(layers):
        tables = (module.weight for module in layer.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
        looked_up = set() if index in again else {id(table) for table in tables}
        costs.append(1.0 + sum(p.numel() for p in layer.parameters() if id(p) not in looked_up))
    return costs
