"""The values that a wrapped model starts from: the same for every layout.

A model built in full is taken as it is on the first data-parallel rank. What was built on the meta device is
initialised after its memory has been laid out, one parameter at a time, and each rank keeps its own part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from hybrid import shims
from hybrid.collectives import ops
from hybrid.errors import ModelError
from hybrid.materialize.buffers import replace_buffers
from hybrid.materialize.initialise import initialise, meta_attributes
from hybrid.materialize.writing import Target
from hybrid.mesh import Mesh
from hybrid.sharding.engine import ShardingEngine
from hybrid.tensor.cut_module import CutModule

__all__ = [
    "InitOrder",
    "MetaTensors",
    "align_values",
    "check_meta",
    "find_meta",
    "materialise",
    "move",
    "stand_ins",
]

InitOrder = Literal["replay", "by_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaTensors:
    """What a model has on the meta device: fqn -> stand-in of the whole, by kind."""

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]

    def __bool__(self) -> bool:
        return bool(self.parameters or self.buffers)


def check_meta(model: nn.Module, init: str | None) -> None:
    """Raises ModelError: a way to initialise that is none, or that nothing needs; what could not be initialised."""
    if init not in {None, "replay", "by_name"}:
        raise ModelError(f"init = {init!r}: must be 'replay' or 'by_name'")
    meta = find_meta(model)
    if init is not None and not meta:
        raise ModelError(
            f"init = {init!r} is for models built on the meta device, and this one has its values: it would do "
            "nothing; leave it out, or build the model under `with torch.device('meta'):`"
        )
    wrapped = _wrapped_later(meta)
    if wrapped is not None and init != "by_name":
        raise ModelError(
            f"{wrapped!r} is a layer with a low-rank side path (LoRA) around it, on the meta device: such paths go "
            'around the layers of a model that is built already, and init = "replay" would draw them with each layer, '
            'which gives other values. Use init = "by_name" (the same under every layout; values can be loaded '
            "afterwards), or build the model on a real device"
        )
    attributes = meta_attributes(model)
    if attributes:
        raise ModelError(
            f"{attributes[0]!r} is a tensor on the meta device that is neither parameter nor buffer, so nothing gives "
            "it values; register it as a buffer that reset_parameters() writes, or build the model on a real device"
        )
    for fqn, parameter in meta.parameters.items():
        if type(parameter) is not nn.Parameter:
            raise ModelError(
                f"parameter {fqn!r} on the meta device is of class {type(parameter).__name__}: only plain "
                "nn.Parameters can be given memory later; build the model on a real device"
            )


def _wrapped_later(meta: MetaTensors) -> str | None:
    """The first module on the meta device that holds a layer and low-rank ones beside it."""
    for fqn in meta.parameters:
        *path, _ = fqn.split(".")
        for depth, part in enumerate(path):
            holder = ".".join(path[:depth])
            if part.lower().startswith("lora_") and f"{holder}.base_layer.weight".lstrip(".") in meta.parameters:
                return holder
    return None


def find_meta(model: nn.Module) -> MetaTensors:
    return MetaTensors(
        parameters={fqn: p for fqn, p in model.named_parameters() if p.is_meta},
        buffers={fqn: b for fqn, b in model.named_buffers() if b.is_meta},
    )


def move(model: nn.Module, device: torch.device) -> None:
    """As `model.to(device)`, for all that is not on the meta device."""
    if not find_meta(model):
        model.to(device)
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_meta and tensor.device != device:
            tensor.data = tensor.data.to(device)


def align_values(model: nn.Module, everyone: ops.Group, *, same_part: ops.Group) -> None:
    """Give the ranks of a group the first one's parameters and buffers; of layers cut by hand, those of `same_part`."""
    by_hand = {
        id(module.get_parameter(name))
        for module in model.modules()
        if isinstance(module, CutModule)
        for name in module.tensor_parallel.cuts
    }
    for tensor in dict.fromkeys([*model.parameters(), *model.buffers()]):
        group = same_part if id(tensor) in by_hand else everyone
        if tensor.is_meta or group.size == 1:
            continue
        flat = tensor.detach().reshape(-1).contiguous().clone()
        ops.broadcast(flat, source=0, group=group).wait()
        with torch.no_grad():
            tensor.copy_(flat.view(tensor.shape))


def stand_ins(meta: MetaTensors) -> MetaTensors:
    """The same shapes and dtypes, as tensors of their own: those in the model get memory and may change."""
    return MetaTensors(
        parameters={
            fqn: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for fqn, p in meta.parameters.items()
        },
        buffers=dict(meta.buffers),
    )


def materialise(
    model: nn.Module,
    engine: ShardingEngine,
    meta: MetaTensors,
    everything: Mapping[str, nn.Parameter],
    *,
    order: InitOrder,
    mesh: Mesh,
    seed: int | None,
    local_part: Callable[[str, torch.Tensor], torch.Tensor],
) -> None:
    """Initialise what was on the meta device. *Collective.*

    Args:
        model: its parameters have their memory by now, or are cut.
        engine: keeps the values of those in buckets.
        meta: `stand_ins` of the model as it was given.
        everything: its parameters, those of other pipeline stages too.
        order: "replay" draws as one process would; "by_name" seeds each parameter from its name.
        mesh: of the job.
        seed: the strategy's, for "by_name"; None takes that of torch's generator on the first rank.
        local_part: (fqn, whole values) -> what this rank holds of them before ZeRO cuts (tensor parallel).

    Raises:
        ModelError: what no initialisation writes, by name.
    """
    buckets = {fqn: bucket for bucket in engine.all_buckets() for fqn in bucket.fqns}
    for fqn in meta.parameters:
        if fqn in engine.parameters and fqn not in buckets:  # frozen, below stage 3: whole on every rank, in no bucket
            shims.give_memory(engine.parameters[fqn], torch.empty_like(engine.parameters[fqn], device=mesh.device))
    targets: list[Target] = []
    for fqn, stand_in in meta.parameters.items():
        bucket = buckets.get(fqn)
        parameter = everything[fqn]
        is_here = fqn in engine.parameters

        def keep(value: torch.Tensor, fqn: str = fqn, parameter: nn.Parameter = parameter) -> None:
            if fqn not in engine.parameters:
                return  # another pipeline stage's: drawn, and thrown away
            held = local_part(fqn, value)
            if fqn in buckets:
                buckets[fqn].store(buckets[fqn].position_of[fqn], held)
            else:
                parameter.copy_(held)

        is_cut = bucket is not None and bucket.cut is not None
        targets.append(
            Target(
                fqn=fqn,
                tensor=parameter,
                stand_in=stand_in,
                device=mesh.device,
                keep=keep,
                wanted=is_here and (not is_cut or (bucket is not None and fqn in bucket.slice_of)),
            )
        )
    found: dict[int, torch.Tensor] = {}
    for fqn, buffer in meta.buffers.items():

        def keep_buffer(value: torch.Tensor, buffer: torch.Tensor = buffer) -> None:
            found[id(buffer)] = value

        targets.append(
            Target(fqn=fqn, tensor=buffer, stand_in=buffer, device=mesh.device, keep=keep_buffer, stays=True)
        )
    for fqn, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if fqn not in meta.parameters and fqn not in meta.buffers:
            targets.append(
                Target(fqn=fqn, tensor=tensor, stand_in=tensor, device=mesh.device, keep=lambda _: None, is_given=True)
            )
    with _random_state(mesh, order) as first_seed, _failing_together(mesh):
        initialise(model, targets, order=order, seed=first_seed if seed is None else seed)
    replace_buffers(model, found)


@contextmanager
def _failing_together(mesh: Mesh) -> Iterator[None]:
    """An initialisation that fails on some ranks (what others hold nothing of, they may skip) fails on all."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    everyone = ops.all_gather_object(None if error is None else str(error), group=mesh.world)
    if error is not None:
        raise error
    for rank, message in enumerate(everyone):
        if message is not None:
            raise ModelError(f"rank {rank} could not initialise the model: {message}")


@contextmanager
def _random_state(mesh: Mesh, order: InitOrder) -> Iterator[int]:
    """Inside, every rank draws what the first one would; yields the seed of that one's generator.

    Where all ranks come with the same random state, "replay" moves it on as building the model would. Where they
    differ (each rank has a stream of its own) each gets its own back.
    """
    state = torch.random.get_rng_state()
    on_device = torch.cuda.get_rng_state(mesh.device) if mesh.device.type == "cuda" else state[:0]
    digest = hashlib.sha256(state.numpy().tobytes() + on_device.numpy().tobytes()).hexdigest()
    everyone = ops.all_gather_object((digest, torch.initial_seed()), group=mesh.world)
    alike = len({digest for digest, _ in everyone}) == 1
    if alike and order == "replay":
        yield everyone[0][1]
        return
    devices = [mesh.device] if mesh.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        first = state.clone()
        if mesh.world.size > 1:
            ops.broadcast(first, source=0, group=mesh.world, control=True).wait()
        torch.random.set_rng_state(first)
        if devices:
            torch.cuda.manual_seed(everyone[0][1])
        yield everyone[0][1]
