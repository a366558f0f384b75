"""Recompute: units keep their inputs only, and run forward again in backward.

The wrapper goes around a unit's own `forward`, inside its hooks: gathering of parameters (ZeRO stage 3) happens
outside, once per forward and once per backward, and the second forward finds the parameters there. Buffers that the
forward writes are written once (kept_buffers.py).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hybrid import shims
from hybrid.collectives.autograd import COLLECTIVE_OPERATIONS, freeing_summed
from hybrid.empty_caches import without_caches
from hybrid.errors import ModelError
from hybrid.kept_buffers import WrittenBuffers

__all__ = ["KEPT_OPERATIONS", "choose_units", "install_recompute"]

# Under the selective policy the results of these are kept: they cost far more flops per byte than the rest.
KEPT_OPERATIONS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    shims.ONEDNN_PRODUCT,
    *shims.ATTENTION_OPERATIONS,
)


def choose_units(
    model: nn.Module, wanted: Sequence[str] | None, *, blocks: Sequence[str], feature: str = "recompute"
) -> tuple[str, ...]:
    """Names of the modules to recompute: the repeated blocks, or those that `wanted` names or whose class it names.

    A module inside another chosen one is left out: the outer one covers it. `feature` is for messages: the flag for
    whose section `wanted` was given.

    Raises:
        ModelError: nothing to choose from, a name that is neither a module nor a class of the model, or a container
            that is never called.
    """
    modules = dict(model.named_modules())
    if wanted is None:
        if not blocks:
            raise ModelError(
                f"{feature}: the model has no repeated blocks to {feature}; name modules or classes in "
                f"{feature}_configs['units'], for example {[name for name in modules if name][:3]}"
            )
        _check_called(modules, blocks, feature)
        return tuple(blocks)
    _check_known(modules, wanted, feature)
    chosen = [name for name, module in modules.items() if name in wanted or type(module).__name__ in wanted]
    chosen = [name for name in chosen if name] or chosen  # a class of modules inside, which the model is of as well
    outer = tuple(name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen if other != name))
    _check_called(modules, outer, feature)
    return outer


def _check_called(modules: Mapping[str, nn.Module], chosen: Sequence[str], feature: str) -> None:
    """Of a container without a forward the model calls what is in it: nothing would happen there."""
    for name in chosen:
        if not _has_forward(modules[name]):
            inside = sorted({type(one).__name__ for one in modules[name].children() if _has_forward(one)})
            raise ModelError(
                f"{feature}: module {name!r} is a {type(modules[name]).__name__} and has no forward, the model calls "
                f"what is in it: {feature} would do nothing there. Name modules in {feature}_configs['units'], for "
                f"example {inside[:3]}"
            )


def _has_forward(module: nn.Module) -> bool:
    # Without asking the class: that of a scripted module answers with an error.
    return inspect.getattr_static(type(module), "forward") is not nn.Module.forward or "forward" in vars(module)


def _check_known(modules: Mapping[str, nn.Module], wanted: Sequence[str], feature: str) -> None:
    unknown = [one for one in wanted if one not in modules and all(type(m).__name__ != one for m in modules.values())]
    if unknown:
        raise ModelError(
            f"{feature}_configs.units names {unknown}: no module and no class of the model; it has the classes "
            f"{sorted({type(module).__name__ for module in modules.values()})}"
        )


def install_recompute(
    model: nn.Module,
    names: Sequence[str],
    *,
    policy: Literal["full", "selective"],
    preserve_rng: bool,
    keep_buffers: bool = False,
    compiled: Collection[str] = (),
) -> None:
    """Replace the `forward` of these modules by one that recomputes.

    With `keep_buffers` the second forward leaves buffers as they were; on fake tensors, without values, it cannot.
    Those in `compiled` will be part of a compiled graph, which writes buffers once by itself: the compiler decides
    there what backward computes again, and takes no contexts of ours.
    """
    for name in names:
        module = model.get_submodule(name)
        written = WrittenBuffers(module) if keep_buffers and name not in compiled else None
        module.forward = _recomputing(module.forward, written, policy=policy, preserve_rng=preserve_rng)


def _recomputing(
    forward: Callable[..., Any],
    written: WrittenBuffers | None,
    *,
    policy: Literal["full", "selective"],
    preserve_rng: bool,
) -> Callable[..., Any]:
    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        assert written is not None
        around = written.contexts()
        if policy == "full":
            return around
        inside = create_selective_checkpoint_contexts(_keep_expensive)
        # A sum over tp ranks is kept: the second forward takes it, and reads no value of the product that was summed.
        return _All(around[0], freeing_summed, inside[0]), _All(around[1], None, inside[1])

    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_rng}
    if written is not None:
        options["context_fn"] = contexts
    elif policy == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_expensive)

    @functools.wraps(forward)
    def recomputing_forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        args, kwargs = without_caches(args, kwargs, refusal=_full_cache)
        return checkpoint(functools.partial(forward, **kwargs) if kwargs else forward, *args, **options)

    return recomputing_forward


class _All:
    """Contexts, one inside the other, which may be entered again; `between` makes one for each time."""

    def __init__(
        self,
        outer: AbstractContextManager[Any],
        between: Callable[[], AbstractContextManager[Any]] | None,
        inner: AbstractContextManager[Any],
    ) -> None:
        self._outer, self._between, self._inner = outer, between, inner
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._outer)
            if self._between is not None:
                stack.enter_context(self._between())
            stack.enter_context(self._inner)
            self._stacks.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._stacks.pop().__exit__(*error)


def _full_cache(name: str, length: int) -> str:
    return (
        f"recompute: {name!r} holds {length} positions of an earlier call, and a unit that runs twice would append to "
        "it twice; train without a cache (use_cache=False), or leave recompute out"
    )


def _keep_expensive(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in KEPT_OPERATIONS or operation in COLLECTIVE_OPERATIONS
    # The same memory again, of a linear layer without a bias: kept too, so that torch notices when it is written to,
    # which the second forward would do once more.
    kept = kept or (operation == shims.RESHAPED_PRODUCT and args[0].dim() == 2)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
