"""One block by itself, plain and cut, on what it is really called with: what tensor parallel compares by default.

The block's structure is kept from before the model is cut, its parameters on the meta device: no values are needed,
for noise of a usual size shows more than values that start at zero. So it does not matter where the values are (cut by
ZeRO, in host memory, not there yet), and what is held for the comparison is one block and a piece of a batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hybrid import shims
from hybrid.collectives import ops
from hybrid.contracts.tensor_plan import TensorPlan
from hybrid.materialize.buffers import replace_buffers
from hybrid.precision.tree import map_tensors
from hybrid.tensor.block_inputs import BlockInputs, activation_of
from hybrid.tensor.comparison import INPUT, OTHER_INPUTS, Comparison
from hybrid.tensor.cuts import TensorCuts
from hybrid.tensor.even_noise import even_noise
from hybrid.tensor.isolation import run_apart
from hybrid.tensor.linear import check_sequence
from hybrid.tensor.real_references import real_reference
from hybrid.tensor.rewrite import sequence_dims
from hybrid.tensor.self_check import NotComparable, SelfCheck

__all__ = ["BlockCheck", "structure_of"]


def structure_of(block: nn.Module, model: nn.Module) -> nn.Module:
    """A copy of a module of `model`, which is not cut yet, without values and without hooks.

    Raises:
        NotComparable: it cannot be copied, or the copy would call the model itself.
    """
    for name, module in block.named_modules():
        own = vars(module).get("forward")
        if own is not None and getattr(own, "__self__", None) is not module:
            # What it calls is the model's own, and not the copy's.
            raise NotComparable(f"has a forward that was put on {name or 'it'} from outside")
    # Also those of other modules: a block may refer to what is around it.
    stand_ins: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
        if type(parameter) is nn.Parameter
    }
    stand_ins |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    try:
        structure = copy.deepcopy(block, stand_ins)
    except Exception as error:
        raise NotComparable(f"cannot be copied ({type(error).__name__}: {error})") from error
    shared = real_reference(structure, model)
    if shared is not None:
        raise NotComparable(f"cannot be copied (a copy still refers to the model itself: {shared})")
    for module in structure.modules():
        shims.drop_hooks(module)
    return structure


@dataclass(slots=True, kw_only=True)
class BlockCheck:
    """What is kept of one block until it is called for the first time.

    Args:
        structure: see `structure_of`.
        plan: of the whole model.
        cuts: of the whole model.
    """

    structure: nn.Module
    plan: TensorPlan
    cuts: TensorCuts

    def run(
        self,
        fqn: str,
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        first_names: Mapping[int, str],
    ) -> Comparison:
        """Compare on what this block is called with. *Collective* over tp.

        Args:
            fqn: its name.
            block: as it is in the model now: it has the buffers.
            args, kwargs: as the block gets them, before its own hooks.
            first_names: of the model's parameters, by their ids.

        Raises:
            ModelError: the cut block differs from the plain one; on every tp rank.
            BatchError: sequences that the ranks cannot share.
            NotComparable: nothing can be said; on every tp rank.
        """
        partial = {
            ".".join(filter(None, (fqn, name)))
            for name, parameter in block.named_parameters(remove_duplicate=False)
            if first_names.get(id(parameter)) in self.cuts.partial
        }
        cuts = replace(self.cuts, partial=self.cuts.partial | partial)
        return run_apart(lambda: self._run(fqn, block, args, kwargs, cuts))

    def _run(
        self, fqn: str, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], cuts: TensorCuts
    ) -> Comparison:
        try:
            activation = activation_of(args, kwargs)
        except Exception as error:
            # Alike on all ranks, before anything collective.
            raise NotComparable(f"is called with what cannot be copied ({type(error).__name__}: {error})") from error
        if activation is None:
            raise NotComparable("is called without an activation")
        structure = self._filled_everywhere(block, activation.device)
        alone = _Alone(fqn, structure) if fqn else structure
        plan = self._plan_of(fqn)
        stack = next((stack for stack in self.plan.blocks if fqn in stack), None)
        dim = sequence_dims(dict(alone.named_modules()), plan).get(fqn, -2)
        is_first = stack is None or fqn == stack[0]
        if stack is not None and is_first:
            check_sequence(activation, dim, cuts.group)  # as its own hook will
        inputs = BlockInputs(
            args,
            kwargs,
            activation,
            group=cuts.group,
            # The first block of a stack is called with whole sequences, and cuts them.
            part_dim=None if is_first else dim,
            is_sequence_first=any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in block.modules()),
        )
        check = SelfCheck(plain=alone, plan=plan, cuts=cuts, unit=fqn)
        reason: NotComparable | None = None
        for small in (True, False):
            if small and not inputs.can_shrink:
                continue
            whole_args, whole_kwargs, wanting = inputs.whole(small=small)
            if isinstance(alone, _Alone):
                alone.wanting = wanting
            try:
                return check.compared((whole_args, whole_kwargs))
            except NotComparable as error:
                reason = reason or error
        assert reason is not None
        raise reason

    def _plan_of(self, fqn: str) -> TensorPlan:
        """The sequence is cut where the block begins and whole where it ends, whatever its place in a stack."""
        if any(fqn in stack for stack in self.plan.blocks):
            return replace(self.plan, blocks=((fqn,),))
        inside = tuple(stack for stack in self.plan.blocks if all(_is_below(one, fqn) for one in stack))
        return replace(self.plan, blocks=inside)

    def _filled_everywhere(self, block: nn.Module, device: torch.device) -> nn.Module:
        failure, filled = "an error on another rank", None
        try:
            filled = self._filled(block, device)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        if not all(ops.all_gather_object(filled is not None, group=self.cuts.group)) or filled is None:
            raise NotComparable(f"cannot be copied ({failure})")
        return filled

    def _filled(self, block: nn.Module, device: torch.device) -> nn.Module:
        """The structure with noise as a usual initialisation has it, and with the block's own buffers."""
        structure = copy.deepcopy(self.structure)
        for name, parameter in structure.named_parameters():
            if parameter.is_meta:
                shims.give_memory(parameter, _initial(name, parameter, device))
        buffers = dict(block.named_buffers(remove_duplicate=False))
        missing = [
            (name, buffer)
            for name, buffer in structure.named_buffers(remove_duplicate=False)
            if buffer.is_meta and name in buffers
        ]
        replace_buffers(structure, {id(buffer): buffers[name].detach().clone() for name, buffer in missing})
        return structure


class _Alone(nn.Module):
    """A block under the name that it has in the model, which records what it is called with."""

    def __init__(self, fqn: str, block: nn.Module) -> None:
        super().__init__()
        self.fqn = fqn
        self.wanting: frozenset[int] = frozenset()
        """Places of the floating point tensors, among what it is called with, that want a gradient."""
        holder: nn.Module = self
        *around, name = fqn.split(".")
        for part in around:
            holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        holder.add_module(name, block)
        self.add_module(INPUT, _Read())
        self.add_module(OTHER_INPUTS, _Read())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        read: dict[int, torch.Tensor] = {}
        activation = activation_of(args, kwargs)

        def enter(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            if id(tensor) not in read:
                name = INPUT if tensor is activation else OTHER_INPUTS
                wants = tensor is activation or len(read) in self.wanting
                read[id(tensor)] = self.get_submodule(name)(tensor.requires_grad_(wants))
            return read[id(tensor)]

        args, kwargs = map_tensors((args, kwargs), enter)
        return self.get_submodule(self.fqn)(*args, **kwargs)


class _Read(nn.Module):
    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()  # a block may write to it


def _initial(name: str, parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    """Of the size that initialisations give, and nowhere constant."""
    if not parameter.is_floating_point():
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
    noise = even_noise(parameter.shape, name=name, device=device)
    if parameter.dim() > 1:
        noise.div_(math.sqrt(math.prod(parameter.shape[1:])))
    else:
        noise.mul_(0.1).add_(0.0 if name.endswith("bias") else 1.0)
    return noise.to(parameter.dtype)


def _is_below(fqn: str, unit: str) -> bool:
    return not unit or fqn.startswith(f"{unit}.")
