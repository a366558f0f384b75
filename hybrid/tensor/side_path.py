"""Low-rank side paths (LoRA) beside cut layers, as they run: which random numbers they draw, and what they may do.

The rules (`contracts/tensor_adapters.py`) go by the names of the layers. Whether the module around them adds a multiple
of the thin product to what the layer returns, as they suppose, shows only when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hybrid.contracts.tensor_plan import SidePathRule
from hybrid.errors import ModelError
from hybrid.tensor.region import CutRegion

__all__ = ["watch_side_path"]

# What may be left of `output - base - sum of multiples`, beside rounding, relative to `output - base`.
_TOLERANCE = 2e-2


def watch_side_path(fqn: str, path: SidePathRule, modules: Mapping[str, nn.Module], region: CutRegion) -> None:
    """Hooks for the module `fqn`, whose layers switch no random streams by themselves."""
    watch = _Watch(fqn, path, region)
    module = modules[fqn]
    module.register_forward_pre_hook(watch.begin, prepend=True)
    for inner in module.modules():
        if inner is not module:
            inner.register_forward_pre_hook(watch.before_inner)
    modules[path.base].register_forward_hook(watch.after_base)
    for narrow in path.narrow:
        modules[narrow].register_forward_hook(watch.after_narrow)
    for widen in path.widen:
        modules[widen].register_forward_hook(watch.after_widen)
    module.register_forward_hook(watch.end)


class _Watch:
    """One call of the module at a time."""

    def __init__(self, fqn: str, path: SidePathRule, region: CutRegion) -> None:
        self._fqn, self._path, self._region = fqn, path, region
        self._is_known = False
        self._clear()

    def _clear(self) -> None:
        self._input: torch.Tensor | None = None
        self._base: torch.Tensor | None = None
        self._num_narrow = 0
        self._products: list[torch.Tensor] = []

    def begin(self, module: nn.Module, args: Any) -> None:
        self._clear()
        self._input = next((one for one in args if isinstance(one, torch.Tensor)), None)
        if self._path.reads_whole:
            self._region.leave()

    def before_inner(self, module: nn.Module, args: Any) -> None:
        """What reads the cut input draws for this rank alone, also behind a product that came back whole."""
        is_input = bool(args) and args[0] is self._input and self._input is not None
        if is_input and module.training and not self._path.reads_whole:
            self._region.enter(args[0].device)

    def after_base(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._base = output

    def after_narrow(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._num_narrow += 1
        self._region.leave()

    def after_widen(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._products.append(output)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._path.leaves_whole:
            self._region.leave()
        elif isinstance(output, torch.Tensor) and module.training:
            self._region.enter(output.device)
        # What has no values (a run on fake tensors) cannot be looked at.
        has_values = type(output) is torch.Tensor and not output.is_meta
        if not self._is_known and not torch.compiler.is_compiling() and (has_values or self._base is None):
            self._check(output)
        self._clear()

    @torch.no_grad()
    def _check(self, output: Any) -> None:
        """Until there was something to see: a product begins at zero."""
        ran = isinstance(output, torch.Tensor) and len(self._products) == self._num_narrow
        if self._base is not None and ran and not self._products and torch.equal(output, self._base):
            return  # switched off
        if self._base is None or not ran or not self._products:
            raise self._refusal("reads the weights of its layers, or calls some of them only")
        left = difference = (output - self._base).double().flatten()
        products = [one.double().flatten() for one in self._products]
        if any(one.shape != difference.shape for one in products):
            raise self._refusal("returns another shape than its layer")
        has_products = any(bool(one.any()) for one in products)
        if not has_products and not difference.any():
            return
        # By sums over elements: a matrix product would be among those that selective recompute keeps, in the order of a
        # forward that does not look again.
        directions: list[torch.Tensor] = []
        for one in products:
            rest = one
            for direction in directions:
                rest = rest - torch.dot(direction, rest) * direction
            if rest.norm() > 1e-9 * one.norm():
                directions.append(rest / rest.norm())
                left = left - torch.dot(directions[-1], left) * directions[-1]
        rounding = 8 * torch.finfo(output.dtype).eps * output.double().norm()
        if left.norm() > _TOLERANCE * difference.norm() + rounding:
            raise self._refusal("does more with what they return than add a multiple of it")
        self._is_known = has_products

    def _refusal(self, what: str) -> ModelError:
        return ModelError(
            f"{self._fqn} has the layers of a low-rank side path (LoRA) and is cut as one, but its forward {what}: on "
            f"a part of the features that gives other numbers. Say {{{self._fqn!r}: 'replicated'}} for it and for the "
            "layers cut together with it in tensor_parallel_configs.plan, or write rules for its parts"
        )
