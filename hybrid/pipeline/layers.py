"""A model that is a list of layers, in Fleet's way: each process builds only the layers that it runs.

    model = PipelineLayer(
        [
            SharedLayerDesc("embed", nn.Embedding, vocab, width),
            *[LayerDesc(Block, width) for _ in range(12)],
            SharedLayerDesc("embed", nn.Embedding, vocab, width, forward_func=project),
        ],
        loss_fn=loss,
    )

Layer i is the child "i", so names are those of an `nn.Sequential` of the same layers, whichever process holds them.
Each layer draws its initial values from a random state of its own, so they are the same wherever it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hybrid.contracts.stage_split import (
    LayerCosts,
    split_by_costs,
    split_by_counts,
    split_by_marks,
    split_evenly,
)
from hybrid.errors import ModelError, StrategyError
from hybrid.pipeline.layer_build import BuildDevice, BuildSettings
from hybrid.pipeline.layer_desc import LayerDesc, SharedLayerDesc, checked_layers, layer_name
from hybrid.pipeline.layer_sharing import check_own_modules, check_sharing, places_by_key, tie

__all__ = ["LayerDesc", "PipelineLayer", "SharedLayerDesc", "is_chain"]

_MARK = "layer:"


class PipelineLayer(nn.Module):
    """A list of layers, each of which takes what the one before returns. Nothing is built at construction.

    Used plainly in one process, the first forward builds all of it; to make an optimizer first, call `build()`.

    Args:
        layers: `LayerDesc` and `SharedLayerDesc`; also built modules, and functions of one value.
        loss_fn: kept as the attribute `loss_fn`; it is no layer and has no part in the state dict.
        seg_method: how layers are split into chunks: "auto" (balanced by cost), "uniform" (by number), "layer:Name"
            (evenly many layers whose class name contains Name), or the number of layers of each chunk.
        seed: base of the layers' random states; None draws it from torch's generator here, once.

    Raises:
        ModelError: an empty list, something that is no layer, built modules that share a parameter, a loss that is no
            function or has parameters, a seed that is none.
        StrategyError: a `seg_method` that is none, or counts that do not add up to the layers.
    """

    def __init__(
        self,
        layers: Sequence[LayerDesc | nn.Module | Callable[[Any], Any]],
        *,
        loss_fn: Callable[..., Any] | None = None,
        seg_method: str | Sequence[int] = "auto",
        seed: int | None = None,
    ) -> None:
        super().__init__()
        # Plain lists: a module in them becomes a child when it is built here, and not before.
        self._layers: list[LayerDesc | nn.Module | None] = list(checked_layers(layers, list_class=PipelineLayer))
        if loss_fn is not None and (isinstance(loss_fn, type) or not callable(loss_fn)):
            raise ModelError(f"loss_fn must be a function (output, labels) -> loss, not {loss_fn!r}")
        if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
            raise ModelError(
                f"loss_fn is a {type(loss_fn).__name__} with parameters, which no stage would own; "
                "make what has parameters a layer"
            )
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise ModelError(f"seed must be a whole number of at least 0, not {seed!r}")
        self._names = tuple(layer_name(layer) for layer in self._layers)
        self.seg_method = _checked_method(seg_method, self._names)
        self.loss_fn = loss_fn
        self.build_settings = BuildSettings.now(seed)
        self._num_parameters: dict[int, int] = {}
        self._owned: tuple[int, ...] | None = None
        self._elsewhere: dict[str, str] = {}

    # ---------------------------------------------------------------- what there is, built or not

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def layer_names(self) -> tuple[str, ...]:
        """Class of each layer (of what it will be built from)."""
        return self._names

    def shared_keys(self) -> dict[str, list[tuple[int, str]]]:
        """Key -> (layer, attribute) of each parameter that is one, first occurrence first."""
        return places_by_key(self._shared)

    def segments(self, num_chunks: int, costs: LayerCosts | Sequence[float] | None = None) -> tuple[range, ...]:
        """The layers of each chunk, by `seg_method`.

        Args:
            num_chunks: how many chunks.
            costs: for "auto": from `layer_costs`, or one number per layer; None balances numbers of parameters.

        Raises:
            StrategyError: too few layers, or a method that does not fit; the message says what works.
            ModelError: "auto" without costs, and a layer that cannot be built on the meta device.
        """
        method = self.seg_method
        if not isinstance(method, str):
            return split_by_counts(method, self.num_layers, num_chunks)
        if method == "uniform":
            return split_evenly(self.num_layers, num_chunks)
        if method.startswith(_MARK):
            return split_by_marks(self._names, method.removeprefix(_MARK), num_chunks)
        if costs is None:
            weights: Sequence[float] = [self.num_parameters_of(index) for index in range(self.num_layers)]
        else:
            weights = costs.weights if isinstance(costs, LayerCosts) else costs
        if len(weights) != self.num_layers:
            raise StrategyError(f"{len(weights)} costs for {self.num_layers} layers: one for each is needed")
        return split_by_costs(weights, num_chunks)

    def num_parameters_of(self, index: int) -> int:
        """Parameter elements of this layer (a shared one counts in each), built on the meta device if need be."""
        if index not in self._num_parameters:
            built = self.layer_here(index)
            if built is None:
                try:
                    built = self.make_layer(index, device="meta")
                except ModelError:
                    raise
                except Exception as error:
                    raise ModelError(
                        f"layer {index}, {self._names[index]}, cannot be built on the meta device to count its "
                        f'parameters ({type(error).__name__}: {error}); give seg_method = "uniform", "layer:Name" '
                        "or the counts"
                    ) from error
            self._num_parameters[index] = sum(parameter.numel() for parameter in built.parameters())
        return self._num_parameters[index]

    # ---------------------------------------------------------------- building

    @property
    def is_built(self) -> bool:
        return self._owned is not None

    @property
    def owned(self) -> tuple[int, ...]:
        """The layers that are built here."""
        return self._owned or ()

    def build(self, owned: Collection[int] | None = None, *, device: BuildDevice = "real") -> PipelineLayer:
        """Build these layers (None: all), each with the values that it has in every process. Returns the model.

        A shared layer whose first occurrence is not among them gets the same initial values as that one has.

        Args:
            owned: indices of layers.
            device: "meta" gives parameters shapes and no memory.

        Raises:
            ModelError: indices that are not there; other layers are built already; shared parameters that do not fit.
        """
        wanted = tuple(range(self.num_layers)) if owned is None else tuple(sorted(set(owned)))
        strangers = [index for index in wanted if not 0 <= index < self.num_layers]
        if strangers or not wanted:
            what = f"layer {strangers[0]} is not there" if strangers else "no layer at all"
            raise ModelError(f"build({sorted(wanted)}): {what}; the layers are 0 to {self.num_layers - 1}")
        if device not in {"real", "meta"}:
            raise ModelError(f"build(device={device!r}): must be 'real' or 'meta'")
        if self._owned is not None:
            if self._owned != wanted:
                raise ModelError(
                    f"layers {list(self._owned)} are built already, {list(wanted)} cannot be built as well; "
                    "make a new PipelineLayer"
                )
            return self
        check_sharing(wanted, self._shared, make=lambda index: self.make_layer(index, device="meta"))
        built = {index: self.make_layer(index, device=device) for index in wanted}
        check_own_modules(built, self._shared)
        elsewhere = tie(built, self._shared, make=lambda index: self.make_layer(index, device=device))
        # Only now, so that a constructor that fails leaves a model that can be built again.
        for index, layer in built.items():
            self.add_module(str(index), layer if self.training else layer.eval())
        for index, given in enumerate(self._layers):
            if isinstance(given, nn.Module) and index not in built:
                self.num_parameters_of(index)
                self._layers[index] = None  # its memory can go, once the caller lets go of it as well
        self._owned, self._elsewhere = wanted, elsewhere
        return self

    def layer_here(self, index: int) -> nn.Module | None:
        """Layer `index`, if it is built here or was a built module when it was given."""
        layer = self._layers[index]
        return self._modules.get(str(index), layer if isinstance(layer, nn.Module) else None)

    def make_layer(self, index: int, *, device: BuildDevice = "real") -> nn.Module:
        """Layer `index` by itself, as `build` would make it: not kept, its parameter not yet shared."""
        layer = self._layers[index]
        if layer is None:
            raise ModelError(f"layer {index} was a module that this process has given up, since it runs elsewhere")
        if isinstance(layer, nn.Module):
            return layer
        try:
            with self.build_settings.building(index, device=device):
                return layer.make()
        except Exception as error:
            error.add_note(f"while layer {index} was built: {layer!r}")
            raise

    def shared_elsewhere(self) -> dict[str, str]:
        """Name of a shared parameter in a layer here -> in its first layer, which is not built here.

        Names are the first ones of the parameter in each layer, as `named_parameters` gives them.
        """
        return dict(self._elsewhere)

    @property
    def _shared(self) -> dict[int, SharedLayerDesc]:
        return {index: layer for index, layer in enumerate(self._layers) if isinstance(layer, SharedLayerDesc)}

    # ---------------------------------------------------------------- running

    def forward(self, value: Any) -> Any:
        """All layers in order; builds them first, if nothing is built.

        Raises:
            ModelError: this process holds only some of the layers.
        """
        if self._owned is None:
            self.build()
        if len(self.owned) < self.num_layers:
            raise ModelError(
                f"this process holds layers {list(self.owned)} of {self.num_layers}: a forward of the whole model "
                "crosses processes; use train_batch or eval_batch"
            )
        for index in range(self.num_layers):
            value = self.run_layer(index, value)
        return value

    def run_layer(self, index: int, value: Any) -> Any:
        """One layer that is built here, on what the layer before it returned."""
        return self.get_submodule(str(index))(value)

    # ---------------------------------------------------------------- what a model that is not built does not have

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        self._check_built("parameters")
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self._check_built("buffers")
        return super().named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        self._check_built("state dict")
        result: dict[str, Any] = super().state_dict(*args, **kwargs)
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        self._check_built("parameters to load into")
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def apply(self, fn: Callable[[nn.Module], None]) -> PipelineLayer:
        self._check_built("modules to apply anything to")
        return super().apply(fn)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PipelineLayer:
        self._check_built("tensors to move or cast")  # by .to(), .cuda(), .half()
        return super()._apply(fn, recurse)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_fn":  # a loss that is a module would become a child, and be in the state dict
            vars(self)[name] = value
        else:
            super().__setattr__(name, value)

    def extra_repr(self) -> str:
        if len(self.owned) == self.num_layers:
            return ""
        return f"{len(self.owned)} of {self.num_layers} layers built here: {', '.join(self._names)}"

    def _check_built(self, what: str) -> None:
        # nn.Module's constructor may ask before ours has run.
        if vars(self).get("_owned", ()) is None:
            raise ModelError(
                f"this PipelineLayer has no {what} yet, for nothing of it is built: give it to "
                "hybrid.distributed_model first, or call .build()"
            )


def is_chain(model: nn.Module) -> bool:
    """Whether a model is a chain of layers, which is cut between them: this, or a Sequential with the plain forward."""
    is_sequential = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    return is_sequential or isinstance(model, PipelineLayer)


def _checked_method(method: Any, names: Sequence[str]) -> str | tuple[int, ...]:
    if isinstance(method, str):
        if method in {"auto", "uniform"}:
            return method
        if method.startswith(_MARK):
            split_by_marks(names, method.removeprefix(_MARK), 1)  # refuses what no layer has
            return method
    elif isinstance(method, Sequence) and method:
        split_by_counts(method, len(names), len(method))
        return tuple(method)
    raise StrategyError(
        f"seg_method = {method!r}: must be 'auto', 'uniform', 'layer:Name' or the number of layers of each chunk"
    )
