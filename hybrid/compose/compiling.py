"""Compilation by unit: torch.compile goes around a unit's own `forward`, its hooks stay outside.

    hooks of the unit: gather, free, reduce ── recompute ── forward
    └── never compiled                        └── one program per kind of unit, made at its first call

A program sees ordinary parameters only: those that a hook has not brought yet (deferred gathers, units around which
stage 3 puts no hook) are brought before it runs. Where recompute is part of a program, the compiler decides what
backward computes again; that needs the unit in one graph, else buffers would be written twice. A module that is
recomputed around compiled ones stays as it is.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hybrid import shims
from hybrid.collectives.autograd import make_known
from hybrid.errors import ModelError, StrategyError
from hybrid.sharding.absence import bring_all
from hybrid.sharding.gradient_handle import GradientHandle
from hybrid.sharding.tensors import tensors_in
from hybrid.strategy.resolved import CompileSettings, RecomputeSettings
from hybrid.tensor.cut_module import CutModule
from hybrid.tensor.foreign_reads import parameters_as_plain

__all__ = [
    "check_compiled",
    "check_compiler",
    "check_not_compiled",
    "compile_units",
    "is_inside",
    "refuse_compiled_call",
]

# Programs that torch makes of one forward before it gives up and runs it as it is; that many for each unit here.
_PROGRAMS_PER_UNIT = 8
_INSTEAD = "give the plain model, and set strategy.compile = True"


def check_not_compiled(model: nn.Module) -> None:
    """Raises ModelError: the user's own torch.compile around a module, which would be around our hooks as well."""
    for name, module in model.named_modules():
        if not shims.is_compiled(module):
            continue
        what = f"module {name!r} is" if name else "the model is"
        raise ModelError(
            f"{what} compiled by torch.compile already: parameters would be called '_orig_mod', and what is done "
            f"around each unit would become part of the program; {_INSTEAD}, which compiles each block"
        )


@torch.compiler.disable
def refuse_compiled_call(name: str) -> None:
    """Raises ModelError: a wrapped model is called in a compiled function."""
    raise ModelError(
        f"torch.compile around {name}, a model of distributed_model: gathering and reducing would become part of the "
        "program. Call the model itself, and set strategy.compile = True, which compiles each block"
    )


def check_compiler(settings: CompileSettings) -> None:
    """Raises StrategyError: torch does not know the backend, or what it needs is not installed here."""
    known = torch.compiler.list_backends(exclude_tags=())
    if settings.backend not in known:
        usual = sorted({*torch.compiler.list_backends(), "aot_eager", "eager"})
        raise StrategyError(
            f"compile_configs.backend = {settings.backend!r}: torch knows no backend of this name; it has {usual}"
        )
    if settings.backend != "inductor":
        return
    if torch.cuda.is_available():
        if importlib.util.find_spec("triton") is None:
            raise StrategyError(
                "compile_configs.backend = 'inductor' needs triton on this machine's GPUs, and it is not installed: "
                "pip install triton, or use 'aot_eager', which makes no kernels"
            )
        return
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise StrategyError(
            f"compile_configs.backend = 'inductor' needs a C++ compiler on a machine without GPUs, and there is no "
            f"{compiler!r} (CXX names another one): install one, or use 'aot_eager', which makes no kernels"
        )


def check_compiled(
    model: nn.Module,
    names: Sequence[str],
    *,
    blocks: Sequence[str],
    recomputed: Sequence[str],
    recompute: RecomputeSettings | None,
) -> None:
    """That these modules can be compiled.

    Args:
        model: with all of its layers.
        names: of the modules to compile.
        blocks: of the modules that hooks gather and free.
        recomputed: names of those that run again in backward.
        recompute: how they do.

    Raises:
        ModelError: they cannot; the message names the module.
    """
    for name in names:
        module = model.get_submodule(name)
        scripted = next(
            (inner for inner, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)), None
        )
        if scripted is not None:
            full = ".".join(filter(None, (name, scripted)))
            raise ModelError(
                f"compile: module {full!r} is TorchScript, which is compiled already: use the plain module, or name "
                "the modules to compile in compile_configs.units"
            )
        recurrent = next(
            ((inner, part) for inner, part in module.named_modules() if isinstance(part, nn.RNNBase)), None
        )
        if recurrent is not None:
            full, kind = ".".join(filter(None, (name, recurrent[0]))), type(recurrent[1]).__name__
            raise ModelError(
                f"compile: module {full!r} is a recurrent {kind}, of which torch's compiler makes no program, nor of "
                "what is around it: name other modules in compile_configs.units"
            )
        held = [block for block in blocks if block != name and is_inside(block, name)]
        if held:
            raise ModelError(
                f"compile_configs.units chooses {name or type(model).__name__!r}, around {held[:3]}, which stage 3 "
                "gathers and frees one by one: name these instead, or name it in sharding_configs['units'] as well"
            )
    for outer in recomputed:
        inner = next((name for name in names if name != outer and is_inside(name, outer)), None)
        if inner is not None and recompute is not None and recompute.policy == "selective":
            raise ModelError(
                f"recompute_configs.policy = 'selective' of {outer!r}, around {inner!r}, which is compiled: what to "
                "keep is chosen by operation, and a program shows none. Recompute and compile the same modules, or "
                "use policy 'full'"
            )


def compile_units(
    model: nn.Module, names: Sequence[str], settings: CompileSettings, *, recomputed: Sequence[str]
) -> None:
    """Replace the `forward` of these modules by a compiled one. Nothing is compiled before its first call."""
    for module in model.modules():
        if isinstance(module, CutModule):
            make_known(module.tensor_parallel.group)
    kinds = Counter(type(model.get_submodule(name)) for name in names)
    for name in names:
        module = model.get_submodule(name)
        runs_again = any(is_inside(inner, name) for inner in recomputed)
        module.forward = _compiled(
            module, name, settings, runs_again=runs_again, most_programs=_PROGRAMS_PER_UNIT * kinds[type(module)]
        )


def _compiled(
    module: nn.Module, name: str, settings: CompileSettings, *, runs_again: bool, most_programs: int
) -> Callable[..., Any]:
    forward = module.forward
    options: dict[str, Any] = {
        "backend": settings.backend,
        "mode": settings.mode,
        "dynamic": settings.dynamic,
        "fullgraph": settings.fullgraph or runs_again,
        "recompile_limit": most_programs,
    }
    program = torch.compile(forward, **options)
    parameters = tuple(module.parameters())
    title = name or type(module).__name__

    draws = _Draws(module, title, runs_again=runs_again)

    @functools.wraps(forward)
    def compiled_forward(*args: Any, **kwargs: Any) -> Any:
        bring_all((parameters, args, kwargs))
        try:
            with _without_placeholders(parameters, args, kwargs), draws.watched() as may_compile:
                if not may_compile:
                    return forward(*args, **kwargs)
                with parameters_as_plain(parameters):
                    return program(*args, **kwargs)
        except Exception as error:
            if not shims.is_compiler_error(error):
                raise
            raise ModelError(_explanation(title, error, settings, runs_again=runs_again)) from error

    return compiled_forward


@contextmanager
def _without_placeholders(*values: Any) -> Iterator[None]:
    """Inside, parameters have no placeholder for a gradient: a compiler looks at gradients when it makes a program."""
    hidden = []
    for parameter in tensors_in(values, all_of_them=True):
        if parameter.is_leaf and isinstance(parameter.grad, GradientHandle):
            hidden.append((parameter, parameter.grad))
            parameter.grad = None
    try:
        yield
    finally:
        for parameter, handle in hidden:
            parameter.grad = handle


class _Draws:
    """Whether a unit that is cut over tp draws random numbers, which it does from the rank's own stream in places.

    Switching streams ends a graph. So the first call in each mode is not compiled, and watched; in a unit that draws
    nothing, programs switch nothing. One that is recomputed has to be one graph, so it may draw nothing.
    """

    def __init__(self, module: nn.Module, name: str, *, runs_again: bool) -> None:
        self._module = module
        self._name = name
        self._runs_again = runs_again
        cut = [part for part in module.modules() if isinstance(part, CutModule) and part.tensor_parallel.group.size > 1]
        self._regions = list({id(part.tensor_parallel_region): part.tensor_parallel_region for part in cut}.values())
        self._device = next((parameter.device for part in cut for parameter in part.parameters()), None)
        self._modes: set[bool] = set()
        for region in self._regions:
            region.left_out_of_programs = True

    @contextmanager
    def watched(self) -> Iterator[bool]:
        """Around each call; says whether it may be compiled."""
        if self._device is None or not all(region.left_out_of_programs for region in self._regions):
            yield True
            return
        is_known = self._runs_again or self._module.training in self._modes
        for region in self._regions:
            region.start_watch(self._device)
        yield is_known
        drew = [region.end_watch(self._device) for region in self._regions]
        self._modes.add(self._module.training)
        if any(drew):
            if is_known:
                self._refuse()
            for region in self._regions:
                region.left_out_of_programs = False

    def _refuse(self) -> None:
        if self._runs_again:
            raise ModelError(
                f"compile: {self._name!r} is recomputed, so it has to be one graph, and it draws random numbers "
                "(dropout) where each tensor-parallel rank has a stream of its own, which ends a graph: set its "
                "dropout to 0, or leave it out of recompute_configs.units or of compile_configs.units"
            )
        raise ModelError(
            f"compile: {self._name!r} began to draw random numbers (dropout) after its first call, in which it drew "
            "none: the tensor-parallel ranks would draw the same ones. Set its dropout before the first call"
        )


def _explanation(name: str, error: Exception, settings: CompileSettings, *, runs_again: bool) -> str:
    reason = str(error).strip().partition("\n")[0]
    if runs_again:
        return (
            f"compile: {name!r} is recomputed, so it has to be one graph, and it is not ({reason}): leave it out of "
            "recompute_configs.units or of compile_configs.units"
        )
    also = ", or set fullgraph to False" if settings.fullgraph else ""
    return f"compile: {name!r} could not be compiled ({reason}): leave it out of compile_configs.units{also}"


def is_inside(name: str, other: str) -> bool:
    """Whether a module is another one, or part of it."""
    return other in {"", name} or name.startswith(f"{other}.")
