"""What `distributed_model` refuses, by name: models that it could not train as one process would."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hybrid.collectives import ops
from hybrid.compose.compiling import check_not_compiled
from hybrid.errors import ModelError
from hybrid.sharding.engine import ShardingEngine
from hybrid.strategy import ResolvedStrategy
from hybrid.tensor.cut_module import CutModule

__all__ = [
    "check_aliases",
    "check_alike_on_all_ranks",
    "check_layouts",
    "check_model",
    "check_not_shared",
    "refuse_changed_parameters",
]


def check_model(model: nn.Module, *, wrapper: type[nn.Module]) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(f"distributed_model needs a torch.nn.Module, got {type(model).__name__}")
    check_not_compiled(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError("distributed_model cannot extend a TorchScript model; give it the plain module")
    inside = [name or "(the model itself)" for name, module in model.named_modules() if isinstance(module, wrapper)]
    if inside:
        raise ModelError(f"{inside[0]} has already been given to distributed_model; wrap the whole model once")
    lazy = [name for name, tensor in _named_tensors(model) if is_lazy(tensor)]
    if lazy:
        raise ModelError(f"{lazy[0]!r} has no shape yet (a lazy module); run one batch through the plain model first")
    taken = [name for name in vars(wrapper) if not name.startswith("__") and name in dir(model)]
    clashes = sorted(set(taken) - {*dir(nn.Module), "hybrid_runtime"})
    if clashes:
        raise ModelError(
            f"the model already has {clashes}, which distributed_model would replace; rename it in the model"
        )


def check_not_shared(model: nn.Module, engines: Sequence[ShardingEngine]) -> None:
    """Raises ModelError: a parameter that lies in the buckets of a model that was wrapped before."""
    for name, parameter in model.named_parameters():
        for engine in engines:
            fqn = engine.fqn_of.get(id(parameter))
            if fqn is not None and engine.home_of(fqn) is not None:
                raise ModelError(
                    f"parameter {name!r} is parameter {fqn!r} of another model that was given to distributed_model: "
                    "two engines would keep it in two places. Wrap one model that holds both parts, once"
                )


def refuse_changed_parameters(
    parameters: Mapping[str, nn.Parameter], change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Raises ModelError: `change` would give a parameter another type, device or memory; tried on one like it."""
    tried = set()
    for fqn, parameter in parameters.items():
        kind = (parameter.dtype, parameter.device, parameter.dim())
        if kind in tried:
            continue
        tried.add(kind)
        probe = torch.zeros((1,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
        address = probe.data_ptr()
        changed = change(probe)
        if changed is not probe or probe.data_ptr() != address:
            into = f"{changed.dtype} on {changed.device}"
            raise ModelError(
                f"this call (.to(), .half(), .cuda(), .to_empty(), .share_memory() or the like) would give parameter "
                f"{fqn!r}, {parameter.dtype} on {parameter.device}, other memory ({into}): the engine would update the "
                "old one. Do it before distributed_model; for computing in low precision set strategy.amp"
            )


def check_alike_on_all_ranks(model: nn.Module, group: ops.Group) -> None:
    whole: dict[int, tuple[int, ...]] = {}
    for module in model.modules():
        if isinstance(module, CutModule):  # built of parallel layers: each rank has its part
            for name, cut in module.tensor_parallel.cuts.items():
                shape = list(module.get_parameter(name).shape)
                shape[cut.dim] = cut.global_size
                whole[id(module.get_parameter(name))] = tuple(shape)
    mine = [
        (name, whole.get(id(t), tuple(t.shape)), str(t.dtype), t.requires_grad) for name, t in _named_tensors(model)
    ]
    everyone = ops.all_gather_object(mine, group=group)
    for rank, theirs in zip(group.ranks, everyone, strict=True):
        if theirs == everyone[0]:
            continue
        first = next((pair for pair in zip(everyone[0], theirs, strict=False) if pair[0] != pair[1]), None)
        what = (
            f"{first[0]} on rank {group.ranks[0]}, {first[1]} on rank {rank}"
            if first
            else f"rank {group.ranks[0]} has {len(everyone[0])} parameters and buffers, rank {rank} has {len(theirs)}"
        )
        raise ModelError(f"the model is not the same on all ranks (name, shape, dtype, requires_grad): {what}")


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def check_aliases(model: nn.Module) -> None:
    """That nothing beside a trainable parameter lies in its memory, which moves into a bucket.

    Raises:
        ModelError: a buffer, or a tensor kept as an attribute, that plain torch would see change with a parameter.
    """
    homes = {
        p.untyped_storage().data_ptr(): (fqn, p)
        for fqn, p in model.named_parameters()
        if p.requires_grad and p.numel() > 0 and not p.is_meta
    }
    known = {id(parameter) for parameter in model.parameters()}
    for name, module in model.named_modules():
        kept: dict[str, object] = dict(module.named_buffers(recurse=False))
        kept |= {key: v for key, v in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}
        for key, value in kept.items():
            items = value if isinstance(value, list | tuple) else value.values() if type(value) is dict else (value,)
            for tensor in items:
                if not isinstance(tensor, torch.Tensor) or id(tensor) in known or tensor.layout is not torch.strided:
                    continue
                fqn, parameter = homes.get(tensor.untyped_storage().data_ptr(), ("", None))
                # torch.nn.utils.spectral_norm leaves the weight itself under its name until the first forward.
                if parameter is None or getattr(module, f"{key}_orig", None) is parameter:
                    continue
                where = f"{name}.{key}" if name else key
                raise ModelError(
                    f"{where!r} is another view of the memory of parameter {fqn!r}, and would keep the values of now "
                    "while the parameter moves into a bucket and is trained: compute it from the parameter where it is "
                    "used, or store a copy (tensor.clone())"
                )


def check_layouts(model: nn.Module, resolved: ResolvedStrategy) -> None:
    """What the engine cannot hold or watch, refused by name.

    Raises:
        ModelError: a tensor that is not dense, or overlaps itself; TorchScript code, which reads parameters without
            asking them, where values may be elsewhere; a Parameter subclass at stage 3.
    """
    for name, tensor in _named_tensors(model):
        if tensor.layout is not torch.strided:
            raise ModelError(f"{name!r} is not a dense tensor ({tensor.layout}); store it dense (tensor.to_dense())")
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ModelError(f"{name!r} is expanded: its elements share memory; store it whole (tensor.clone())")
    if resolved.data_parallel_size > 1:
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
                raise ModelError(
                    f"module {name!r} has max_norm={module.max_norm}: its forward changes the weight, by this rank's "
                    "own indices, so the ranks would train different models; leave max_norm out"
                )
    if resolved.data_parallel_size > 1 or resolved.accumulate_steps > 1:
        for name, module in model.named_modules():
            counts = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq
            if counts and module.weight.requires_grad:
                raise ModelError(
                    f"module {name!r} has scale_grad_by_freq=True: it divides gradients by how often an index is in "
                    "the batch, and would count in each micro-batch of each data-parallel rank for itself; leave "
                    "scale_grad_by_freq out, or freeze its weight"
                )
    check_aliases(model)
    absent = resolved.zero_stage == 3 and (resolved.shard_size > 1 or resolved.offload == "parameters")
    if absent or resolved.overlap_param_gather:
        setting = "stage 3" if absent else "overlap_param_gather=True"
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
                raise ModelError(
                    f"module {name!r} is TorchScript, which reads parameters without waiting for them; with {setting} "
                    "their values may be elsewhere: use the plain module, or stage 2 without overlap_param_gather"
                )
    if absent:
        for name, parameter in model.named_parameters():
            if type(parameter) is not nn.Parameter:
                raise ModelError(
                    f"parameter {name!r} is of class {type(parameter).__name__}: stage 3 can free plain nn.Parameters "
                    "only; use stage 2"
                )
