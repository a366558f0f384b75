"""One small batch through the plain model and through the cut one, compared module by module.

Both are copies, made of what the model was before it was cut, in double precision and eval mode, without autocast,
recompute or ZeRO: what is checked is the plan, with nothing else that rounds or draws. Parameters that are constant
(biases of zero, norms of one) get some noise in both, since a bias that is added twice would not show while it is zero.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid.collectives import ops
from hybrid.contracts.tensor_plan import TensorPlan
from hybrid.errors import BatchError, HybridError, ModelError
from hybrid.precision.tree import map_tensors
from hybrid.tensor.attention import disable_fast_paths
from hybrid.tensor.comparison import Comparison, compare, recordings_differ
from hybrid.tensor.cuts import TensorCuts
from hybrid.tensor.differing import sequence_hint, told
from hybrid.tensor.isolation import forget_values, run_apart
from hybrid.tensor.recording import Recording, differentiate, record, scalar_of
from hybrid.tensor.rewrite import adopt_modules, cut_parameters
from hybrid.tensor.shape_errors import explain_shape_error

__all__ = ["MOST_SAMPLES", "NotComparable", "SelfCheck"]

MOST_SAMPLES = 2
_NOISE = 0.1
# Of a block with more parameters, copies in single precision have to do.
_MOST_IN_DOUBLE = 2**27


class NotComparable(Exception):
    """Why nothing can be said about a model that may well be right."""


@dataclass(slots=True, kw_only=True)
class SelfCheck:
    """The plain model, until it has been compared with the cut one.

    Args:
        plain: a copy of the model from before it was cut; changed by the check.
        plan: what is checked.
        cuts: that follow from it.
        unit: the module of the model that the copy holds; None: the copy is the whole model.
    """

    plain: nn.Module
    plan: TensorPlan
    cuts: TensorCuts
    unit: str | None = None

    @staticmethod
    def copy_of(model: nn.Module) -> nn.Module:
        """The plain model, to be kept.

        Raises:
            ModelError: it cannot be copied.
        """
        try:
            return copy.deepcopy(model)
        except Exception as error:
            raise ModelError(
                "tensor_parallel_configs.verify compares with a copy of the plain model, and this "
                f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}); leave verify out"
            ) from error

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Comparison:
        """Compare on this batch, or a part of it. *Collective* over tp.

        Raises:
            ModelError: the cut model differs from the plain one; on every tp rank.
            NotComparable: the plain model does not run, or does not return the same twice; on every tp rank.
        """
        return run_apart(lambda: self.compared((args, kwargs)))

    def compared(self, batch: Any) -> Comparison:
        """As `run`, in this thread, whatever is switched on in it."""
        if any(parameter.is_complex() for parameter in self.plain.parameters()):
            raise NotComparable("has complex parameters, which are not compared")
        self.plain.eval()
        disable_fast_paths(self.plain)  # they call no module, and with frozen weights they are taken
        _disturb_constants(self.plain)
        group = self.cuts.group
        comparison = self._compared(batch)
        everyone = ops.all_gather_object(comparison.difference, group=group)
        differing = [(rank, one) for rank, one in zip(group.ranks, everyone, strict=True) if one is not None]
        if differing:
            # Forward comes before backward, and backward begins at the end.
            rank, first = min(
                differing, key=lambda pair: (0, pair[1].place) if pair[1].kind == "output" else (1, -pair[1].place)
            )
            raise ModelError(told(first, rank, self.plan, unit=self.unit))
        return comparison

    def _compared(self, batch: Any) -> Comparison:
        failure: Exception | None = None
        cut_failure: Exception | None = None
        for dtype, samples, small in self._attempts(batch):
            plain = cut = cut_model = None
            try:
                _cast(self.plain, dtype)
                cut_model = copy.deepcopy(self.plain)
                plain = _recorded(self.plain, small, dtype)
            except Exception as error:
                # Two samples may be too few, or double precision not available: the batch as it is comes last.
                failure = failure or _without_values(error)
            if not self._everywhere(plain is not None) or plain is None or cut_model is None:
                continue
            try:
                cut_parameters(cut_model, self.cuts)
                adopt_modules(cut_model, self.plan, self.cuts)
                cut = _recorded(cut_model, small, dtype)
            except Exception as error:
                if _is_about_memory(error):
                    failure = failure or _without_values(error)
                else:
                    cut_failure = cut_failure or _without_values(_explained(cut_model, self.plan, error))
            if not self._everywhere(cut is not None) or cut is None:
                continue  # a part of the batch may not share out evenly
            in_backward = self._differentiated(plain, cut, cut_model)
            if not self._everywhere(in_backward is None):
                failure = failure or in_backward
                continue
            comparison = compare(plain, cut, model=cut_model, cuts=self.cuts, samples=samples)
            if not self._everywhere(comparison.difference is None):
                again = _recorded(self.plain, small, dtype, seed=1)
                if not self._everywhere(not recordings_differ(plain, again)):
                    raise NotComparable("draws random numbers in eval mode, too")
            failure = cut_failure = None  # their tracebacks lead here, and from here to the copies
            return comparison
        if cut_failure is not None:
            raise self._raised(cut_failure)
        failure = failure or RuntimeError("an error on another rank")
        raise NotComparable(f"raised {type(failure).__name__} when a copy of it was called: {failure}") from failure

    def _everywhere(self, is_so: bool) -> bool:
        """*Collective* over tp."""
        return all(ops.all_gather_object(is_so, group=self.cuts.group))

    def _raised(self, error: Exception) -> Exception:
        """What a cut model raises where the plain one does not."""
        is_block = any(self.unit in stack for stack in self.plan.blocks)
        says_it = isinstance(error, HybridError) and error.__cause__ is None
        if self.unit is None or (says_it and not (isinstance(error, BatchError) and is_block)):
            return error
        what = str(error) if isinstance(error, HybridError) else f"{type(error).__name__}: {error}"
        raised = ModelError(
            f"tensor parallel is not right for this model: {self.unit or 'the model'} runs as the plain model has it, "
            f"and not once it is cut. {what}{sequence_hint(self.plan, self.unit)}"
        )
        raised.__cause__ = error.__cause__ or error
        return raised

    def _attempts(self, batch: Any) -> Iterator[tuple[torch.dtype, int, Any]]:
        """Dtype, samples, batch; the first that the plain model takes counts."""
        samples = _num_samples(batch)
        sizes = [samples]
        if self.unit is None and samples > MOST_SAMPLES and not _is_sequence_first(self.plain):
            sizes.insert(0, MOST_SAMPLES)
        own = next((p.dtype for p in self.plain.parameters() if p.is_floating_point()), torch.float32)
        size_of_all = sum(parameter.numel() for parameter in self.plain.parameters())
        dtypes = [torch.float64] if self.unit is None or size_of_all <= _MOST_IN_DOUBLE else []
        for dtype in dict.fromkeys((*dtypes, torch.float32, own)):
            for size in sizes:
                yield dtype, size, batch if size == samples else _first(batch, size, samples)

    def _differentiated(self, plain: Recording, cut: Recording, cut_model: nn.Module) -> Exception | None:
        """Of a number made of what both models return whole: caches and such hold this rank's heads."""
        both = enumerate(zip(plain.returned, cut.returned, strict=False))
        alike = [place for place, (whole, mine) in both if whole.shape == mine.shape]
        # All ranks take the same.
        everyone = ops.all_gather_object(alike, group=self.cuts.group)
        chosen = [place for place in alike if all(place in theirs for theirs in everyone)]
        try:
            whole_scalar, scalar = scalar_of(plain.returned, chosen), scalar_of(cut.returned, chosen)
            if whole_scalar is not None and scalar is not None:
                differentiate(plain, whole_scalar, self.plain)
                differentiate(cut, scalar, cut_model)
        except Exception as error:
            return error
        return None


def _without_values(error: Exception) -> Exception:
    """Another attempt needs the memory."""
    forget_values(error)
    return error


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """`Module.to` would make complex buffers real."""
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if buffer.is_complex()
    ]
    for module, name, _ in buffers:
        setattr(module, name, None)
    try:
        model.to(dtype)
    finally:
        as_complex = torch.complex128 if dtype is torch.float64 else torch.complex64
        cast = {id(buffer): buffer.to(as_complex) for _, _, buffer in buffers}  # one that is shared stays one
        for module, name, buffer in buffers:
            setattr(module, name, cast[id(buffer)])


def _is_about_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _explained(model: nn.Module, plan: TensorPlan, error: Exception) -> Exception:
    explained = explain_shape_error(model, plan, error)
    if explained is None:
        return error
    explained.__cause__ = error
    return explained


def _recorded(model: nn.Module, batch: Any, dtype: torch.dtype, *, seed: int = 0) -> Recording:
    """Both models draw the same, should they draw."""
    args, kwargs = _own(batch, dtype)
    torch.manual_seed(seed)
    random.seed(seed)
    return record(model, args, kwargs)


def _own(batch: Any, dtype: torch.dtype) -> Any:
    """The batch, for a model to keep and to write to, objects (caches) too; a tensor that is in it twice stays one."""
    mine: dict[int, torch.Tensor] = {}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in mine:
            copied = tensor.detach().clone()
            mine[id(tensor)] = copied.to(dtype) if tensor.is_floating_point() else copied
        return mine[id(tensor)]

    return copy.deepcopy(map_tensors(batch, own))


def _disturb_constants(model: nn.Module) -> None:
    for fqn, parameter in model.named_parameters():
        if (
            parameter.numel() > 1
            and parameter.is_floating_point()
            and bool((parameter == parameter.flatten()[0]).all())
        ):
            generator = torch.Generator().manual_seed(zlib.crc32(fqn.encode()))
            noise = torch.randn(parameter.shape, generator=generator) * _NOISE
            with torch.no_grad():
                parameter.add_(noise.to(parameter))


def _num_samples(batch: Any) -> int:
    """The first dim of the first tensor."""
    sizes: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim():
            sizes.append(tensor.shape[0])
        return tensor

    map_tensors(batch, note)
    return sizes[0] if sizes else 1


def _first(batch: Any, count: int, samples: int) -> Any:
    return map_tensors(batch, lambda t: t[:count] if t.dim() and t.shape[0] == samples else t)


def _is_sequence_first(model: nn.Module) -> bool:
    return any(isinstance(module, nn.MultiheadAttention) and not module.batch_first for module in model.modules())
