"""`verify`: one small batch through the plain model and through the cut one, compared module by module.

Both are copies, kept from before the model was cut, in double precision and eval mode, without autocast, recompute or
ZeRO: what is checked is the plan, with nothing else that rounds or draws. Parameters that are constant (biases of
zero, norms of one) get some noise in both, since a bias that is added twice would not show while it is zero.
"""

from __future__ import annotations

import copy
import functools
import random
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid.collectives import ops
from hybrid.contracts.tensor_facts import parent_of
from hybrid.contracts.tensor_plan import TensorPlan
from hybrid.errors import BatchError, ModelError
from hybrid.precision.tree import map_tensors
from hybrid.tensor.attention import disable_fast_paths
from hybrid.tensor.comparison import Comparison, Difference, compare
from hybrid.tensor.cuts import TensorCuts
from hybrid.tensor.recording import Recording, differentiate, record, scalar_of
from hybrid.tensor.rewrite import adopt_modules, cut_parameters
from hybrid.tensor.shape_errors import explain_shape_error

__all__ = ["SelfCheck"]

_MOST_SAMPLES = 2
_NOISE = 0.1
_MOST_RULES = 4


@dataclass(slots=True, kw_only=True)
class SelfCheck:
    """The plain model, until it has been compared with the cut one.

    Args:
        plain: a copy of the model from before it was cut; changed by the check.
        plan: what is checked.
        cuts: that follow from it.
    """

    plain: nn.Module
    plan: TensorPlan
    cuts: TensorCuts

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
        """
        self.plain.eval()
        disable_fast_paths(self.plain)  # they call no module, and with frozen weights they are taken
        _disturb_constants(self.plain)
        group = self.cuts.group
        with _apart():
            comparison = self._compared((args, kwargs))
        everyone = ops.all_gather_object(comparison.difference, group=group)
        differing = [(rank, one) for rank, one in zip(group.ranks, everyone, strict=True) if one is not None]
        if differing:
            # Forward comes before backward, and backward begins at the end.
            rank, first = min(
                differing, key=lambda pair: (0, pair[1].place) if pair[1].kind == "output" else (1, -pair[1].place)
            )
            raise ModelError(self._text(first, rank))
        return comparison

    def _compared(self, batch: Any) -> Comparison:
        attempts = list(self._attempts(batch))
        failure: Exception | None = None
        for index, (dtype, samples, small) in enumerate(attempts):
            self.plain.to(dtype)
            args, kwargs = map_tensors(small, functools.partial(_own, dtype=dtype))
            cut_model = copy.deepcopy(self.plain)
            try:
                plain = _recorded(self.plain, args, kwargs)
            except Exception as error:
                # Two samples may be too few, or double precision not available: the batch as it is comes last.
                failure = failure or error
                continue
            cut_parameters(cut_model, self.cuts)
            adopt_modules(cut_model, self.plan, self.cuts)
            try:
                cut = _recorded(cut_model, args, kwargs)
            except BatchError:
                if index + 1 < len(attempts):
                    continue  # a part of the batch may not share out evenly
                raise
            except Exception as error:
                told = explain_shape_error(cut_model, self.plan, error)
                if told is not None:
                    raise told from error
                raise
            self._differentiate(plain, cut, cut_model)
            return compare(plain, cut, model=cut_model, cuts=self.cuts, samples=samples)
        raise ModelError(
            "tensor_parallel_configs.verify runs the plain model on the first batch, and that raised "
            f"{type(failure).__name__}: {failure}"
        ) from failure

    def _attempts(self, batch: Any) -> Iterator[tuple[torch.dtype, int, Any]]:
        """Dtype, samples, batch; the first that the plain model takes counts."""
        samples = _num_samples(batch)
        sizes = [samples]
        if samples > _MOST_SAMPLES and not _is_sequence_first(self.plain):
            sizes.insert(0, _MOST_SAMPLES)
        own = next((p.dtype for p in self.plain.parameters() if p.is_floating_point()), torch.float32)
        for dtype in dict.fromkeys((torch.float64, torch.float32, own)):
            for size in sizes:
                yield dtype, size, batch if size == samples else _first(batch, size, samples)

    def _differentiate(self, plain: Recording, cut: Recording, cut_model: nn.Module) -> None:
        """Of a number made of what both models return whole: caches and such hold this rank's heads."""
        both = enumerate(zip(plain.returned, cut.returned, strict=False))
        alike = [place for place, (whole, mine) in both if whole.shape == mine.shape]
        # All ranks take the same.
        everyone = ops.all_gather_object(alike, group=self.cuts.group)
        chosen = [place for place in alike if all(place in theirs for theirs in everyone)]
        whole_scalar, scalar = scalar_of(plain.returned, chosen), scalar_of(cut.returned, chosen)
        if whole_scalar is not None and scalar is not None:
            differentiate(plain, whole_scalar, self.plain)
            differentiate(cut, scalar, cut_model)

    # -- words ---------------------------------------------------------------------------------------------------

    def _text(self, first: Difference, rank: int) -> str:
        module = parent_of(first.fqn) if first.kind == "gradient" else first.fqn
        what = {
            "output": f"the output of {module or 'the model'}",
            "gradient of its output": f"the gradient of the output of {module or 'the model'}",
            "gradient": f"the gradient of parameter {first.fqn}",
        }[first.kind]
        order = "forward" if first.kind == "output" else "backward; forward agrees"
        return (
            f"tensor parallel is not right for this model: {what} is the first to differ from the plain model's "
            f"(in {order}), by {first.largest:.3g} at most on rank {rank}, where {first.tolerated:.3g} is tolerated.\n"
            f"  {self._hint(first, module)}"
        )

    def _hint(self, first: Difference, module: str) -> str:
        if first.kind == "gradient":
            why = self.plan.partial.get(first.fqn)
            if first.summing == "superfluous":
                return (
                    f"It is summed over the ranks ({why}: {self._source(module)}), and each rank has the whole of it "
                    "already: take 'partial' out of the plan."
                )
            if first.summing == "missing":
                return (
                    "The sum over the ranks would be right: it acts on cut activations, so say "
                    f"{{{first.fqn!r}: 'partial'}} in the plan."
                )
        rules = self._rules_around(module)
        listed = "".join(f"\n    {name}: {self.plan.rules[name].describe()} ({self._source(name)})" for name in rules)
        around = f" Rules around it:{listed}" if rules else " No rule is near it."
        if first.kind == "output":
            return (
                "What it reads, or how it is cut itself, is wrong. Look at the code before it: one weight that holds "
                "several parts (q, k, v; gate, up) needs 'fused' in the plan; an attribute that counts heads or widths "
                f"needs 'divide'; a norm or a softmax over cut features needs 'gather_output'.{around}"
            )
        return f"What is computed of it is cut in a way that backward does not know; see the layers after it.{around}"

    def _source(self, module: str) -> str:
        rule = self.plan.rules.get(module)
        return rule.source if rule is not None else "by its place"

    def _rules_around(self, module: str) -> list[str]:
        """Of the module, of what is in it and beside it."""
        own = [module] if module in self.plan.rules else []
        inside = [name for name in self.plan.rules if name.startswith(f"{module}.")] if module else []
        beside = [name for name in self.plan.rules if parent_of(name) == parent_of(module) and name != module]
        if not own and not inside and not beside:
            around = parent_of(module)
            beside = [name for name in self.plan.rules if around and name.startswith(f"{around}.")]
        return [*own, *inside, *beside][:_MOST_RULES]


@contextmanager
def _apart() -> Iterator[None]:
    """Nothing drawn inside changes what is drawn afterwards; autocast, no_grad and inference mode do not reach in."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    kind = "cuda" if devices else "cpu"
    state = random.getstate()
    with (
        torch.random.fork_rng(devices=devices),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(kind, enabled=False),
        torch.autocast("cpu", enabled=False),
    ):
        try:
            yield
        finally:
            random.setstate(state)


def _recorded(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    """Both models draw the same, should they draw."""
    torch.manual_seed(0)
    random.seed(0)
    return record(model, args, kwargs)


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


def _own(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    tensor = tensor.detach().clone()
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


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
