"""Where the recording of a cut model leaves that of the plain one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from hybrid.collectives import ops
from hybrid.contracts.placement import Cut
from hybrid.tensor.cut_module import CutModule
from hybrid.tensor.cuts import TensorCuts
from hybrid.tensor.own_part import Part, candidates
from hybrid.tensor.recording import Recording

__all__ = ["INPUT", "OTHER_INPUTS", "Comparison", "Difference", "compare", "recordings_differ"]

# Under these names a module that is compared by itself records what it is called with: the activation, and the rest.
INPUT, OTHER_INPUTS = "hybrid_input", "hybrid_other_inputs"


# Of the largest element of what is compared; by the lowest precision in which any module computed.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# A gradient that is zero by symmetry is noise in both models: it is measured against this share of the largest one.
_SMALLEST_SHARE = 1e-3
_SMALLEST = 1e-12

Kind = Literal["output", "gradient of its output", "gradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place at which a rank differs.

    Args:
        place: of the call in the plain recording.
        fqn: the module; for a `gradient`, the parameter.
        kind: what differs.
        largest, tolerated: the difference, and what would have been none.
        summing: of a gradient: "missing" if the sum over the ranks would be right, "superfluous" if it is summed and
            this rank's own would be.
    """

    place: int
    fqn: str
    kind: Kind
    largest: float
    tolerated: float
    summing: Literal["", "missing", "superfluous"] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was compared on this rank; `difference` is None where everything agrees."""

    num_modules: int
    largest_share: float
    """The largest difference, as a share of the largest element beside it."""
    difference: Difference | None = None


@dataclass(slots=True, kw_only=True)
class _Pair:
    """One output of both models."""

    place: int
    index: int
    whole: torch.Tensor
    local: torch.Tensor
    parts: list[Part]
    whole_gradient: torch.Tensor | None
    local_gradient: torch.Tensor | None


class _Comparer:
    def __init__(self, plain: Recording, cut: Recording, model: nn.Module, cuts: TensorCuts, samples: int) -> None:
        self.plain, self.cut, self.cuts, self.group = plain, cut, cuts, cuts.group
        infos = [module.tensor_parallel for module in model.modules() if isinstance(module, CutModule)]
        around: list[Cut] = list(dict.fromkeys(held for info in infos for held in info.cuts.values()))
        self.pairs = list(self._pairs(around, samples))
        values = [
            output.value.dtype for recording in (plain, cut) for call in recording.calls for output in call.outputs
        ]
        self.tolerance = max((_TOLERANCES[dtype] for dtype in values if dtype in _TOLERANCES), default=1e-5)
        self.largest_share = 0.0

    def _pairs(self, around: list[Cut], samples: int) -> Iterator[_Pair]:
        """Outputs that both models have, once each: a module that returns what one inside it did adds nothing."""
        theirs = self.cut.by_module()
        seen: set[int] = set()
        for fqn, places in self.plain.by_module().items():
            others = theirs.get(fqn, [])
            if len(others) != len(places):
                continue  # called in one model only: as a part of torch's attention, say
            for place, other in zip(places, others, strict=True):
                outputs, parts = self.plain.calls[place].outputs, self.cut.calls[other].outputs
                if len(outputs) != len(parts):
                    continue
                for index, (whole, local) in enumerate(zip(outputs, parts, strict=True)):
                    yield _Pair(
                        place=place,
                        index=index,
                        whole=whole.value,
                        local=local.value,
                        parts=candidates(
                            whole.value,
                            local.value,
                            tensor=local.tensor,
                            cuts=around,
                            group=self.group,
                            samples=samples,
                        ),
                        whole_gradient=None if id(whole.tensor) in seen else whole.gradient,
                        local_gradient=local.gradient,
                    )
                    seen.add(id(whole.tensor))

    # -- outputs -------------------------------------------------------------------------------------------------

    def outputs(self) -> Iterator[Difference]:
        for pair in self.pairs:
            if not pair.parts:
                continue
            scale = max(_largest(pair.whole), _SMALLEST)
            error = min(_difference(pair.local, part.of(pair.whole)) for part in pair.parts)
            if not self._agrees(error, scale):
                yield self._difference(pair.place, "output", error, scale)

    # -- gradients -----------------------------------------------------------------------------------------------

    def output_gradients(self) -> list[Difference]:
        """*Collective* over tp."""
        pairs = [pair for pair in self.pairs if pair.whole_gradient is not None and pair.parts]
        floor = _SMALLEST_SHARE * max((_largest(pair.whole_gradient) for pair in pairs), default=0.0)
        suspects: dict[tuple[int, int], float] = {}
        for pair in pairs:
            if any(part.copies > 1 for part in pair.parts):
                continue  # each copy has the part of its own queries; the weights are compared as their sum
            whole = pair.whole_gradient
            assert whole is not None
            local = pair.local_gradient
            local = torch.zeros_like(pair.local) if local is None else local
            error = min(_difference(local, part.of(whole)) for part in pair.parts)
            if not self._agrees(error, max(_largest(whole), floor, _SMALLEST)):
                suspects[pair.place, pair.index] = error
        # A whole activation that only cut layers read has a part of its gradient on each rank: the sum must be right.
        everywhere = set().union(*ops.all_gather_object(set(suspects), group=self.group))
        found = []
        for pair in pairs:
            key = (pair.place, pair.index)
            if key not in everywhere:
                continue
            whole = pair.whole_gradient
            assert whole is not None
            local = torch.zeros_like(pair.local) if pair.local_gradient is None else pair.local_gradient.clone()
            is_whole = all(ops.all_gather_object(local.shape == whole.shape, group=self.group))
            scale = max(_largest(whole), floor, _SMALLEST)
            if is_whole and self.plain.calls[pair.place].fqn != INPUT:  # what made that one adds nothing up
                total = sum(ops.all_gather_object(local.cpu(), group=self.group))
                assert isinstance(total, torch.Tensor)
                if self._agrees(_difference(total.to(whole.device), whole), scale):
                    continue
            if key in suspects:
                found.append(self._difference(pair.place, "gradient of its output", suspects[key], scale))
        return found

    def parameter_gradients(self) -> list[Difference]:
        """*Collective* over tp."""
        whole_of, floor = self.plain.gradients, _SMALLEST_SHARE * _most(self.plain.gradients)
        scales: dict[str, float] = {}  # of the module: a bias to which the output does not react is noise beside it
        for fqn, gradient in whole_of.items():
            if gradient is not None:
                module = fqn.rpartition(".")[0]
                scales[module] = max(scales.get(module, 0.0), _largest(gradient))
        mine = {fqn: gradient for fqn, gradient in self.cut.gradients.items() if self._is_summed(fqn)}
        everyone = ops.all_gather_object(_on_cpu(mine), group=self.group)
        suspects: dict[str, tuple[float, float]] = {}
        for fqn, gradient in whole_of.items():
            local = self.cut.gradients.get(fqn)
            if fqn in mine:
                local = _sum([everyone[rank].get(fqn) for rank in self._sharers(fqn)])
            if gradient is None and local is None:
                continue
            known = gradient if gradient is not None else local
            assert known is not None
            part = self.cuts.part(fqn, gradient) if gradient is not None else torch.zeros_like(known)
            local = torch.zeros_like(part) if local is None else local.to(part.device)
            scale = max(scales.get(fqn.rpartition(".")[0], 0.0), floor, _SMALLEST)
            error = _difference(local, part)
            if not self._agrees(error, scale):
                suspects[fqn] = (error, scale)
        everywhere = set().union(*ops.all_gather_object(set(suspects), group=self.group))
        gathered = ops.all_gather_object(
            _on_cpu({fqn: self.cut.gradients.get(fqn) for fqn in everywhere}), group=self.group
        )
        return [
            self._difference(
                self._place_of(fqn), "gradient", *numbers, fqn=fqn, summing=self._summing(fqn, gathered, numbers[1])
            )
            for fqn, numbers in suspects.items()
        ]

    def _is_summed(self, fqn: str) -> bool:
        cut = self.cuts.own(fqn)
        return fqn in self.cuts.partial or (cut is not None and cut.copies > 1)

    def _sharers(self, fqn: str) -> range:
        """The tp ranks whose gradients are added up."""
        cut = self.cuts.own(fqn)
        if cut is None:
            return range(self.group.size)
        first = self.group.rank // cut.copies * cut.copies
        return range(first, first + cut.copies)

    def _summing(
        self, fqn: str, gathered: list[dict[str, torch.Tensor | None]], scale: float
    ) -> Literal["", "missing", "superfluous"]:
        whole = self.plain.gradients[fqn]
        if whole is None or self.cuts.own(fqn) is not None:
            return ""
        own = gathered[self.group.rank][fqn] if fqn in self.cuts.partial else _sum([one[fqn] for one in gathered])
        if own is None or not self._agrees(_difference(own, whole.cpu()), scale):
            return ""
        return "superfluous" if fqn in self.cuts.partial else "missing"

    def _place_of(self, parameter: str) -> int:
        """Of the last call of the module that holds it, or of the nearest around that was called."""
        places = self.plain.by_module()
        module = parameter.rpartition(".")[0]
        while module and module not in places:
            module = module.rpartition(".")[0]
        return places[module][-1]

    # -- numbers -------------------------------------------------------------------------------------------------

    def _agrees(self, error: float, scale: float) -> bool:
        fine = error <= self.tolerance * scale
        if fine:
            self.largest_share = max(self.largest_share, error / scale)
        return fine

    def _difference(
        self,
        place: int,
        kind: Kind,
        error: float,
        scale: float,
        *,
        fqn: str | None = None,
        summing: Literal["", "missing", "superfluous"] = "",
    ) -> Difference:
        return Difference(
            place=place,
            fqn=self.plain.calls[place].fqn if fqn is None else fqn,
            kind=kind,
            largest=error,
            tolerated=self.tolerance * scale,
            summing=summing,
        )


def compare(plain: Recording, cut: Recording, *, model: nn.Module, cuts: TensorCuts, samples: int) -> Comparison:
    """The first difference in the order of execution: forward, then backward, which begins at the end. *Collective*.

    Args:
        plain, cut: the recordings.
        model: the cut model.
        cuts: of its parameters.
        samples: in the batch.
    """
    comparer = _Comparer(plain, cut, model, cuts, samples)
    first = min(comparer.outputs(), key=lambda one: one.place, default=None)
    # The gradient of an output comes before those of the parameters of the module that put it out.
    later = [*comparer.output_gradients(), *comparer.parameter_gradients()]
    if first is None and later:
        first = max(later, key=lambda one: (one.place, one.kind == "gradient of its output"))
    modules = {plain.calls[pair.place].fqn for pair in comparer.pairs if pair.parts}
    return Comparison(num_modules=len(modules), largest_share=comparer.largest_share, difference=first)


def recordings_differ(one: Recording, other: Recording) -> bool:
    """Whether two runs of one model did not give the same."""
    if [call.fqn for call in one.calls] != [call.fqn for call in other.calls]:
        return True
    pairs = (
        (output.value, again.value)
        for call, repeated in zip(one.calls, other.calls, strict=True)
        for output, again in zip(call.outputs, repeated.outputs, strict=False)
    )
    return any(
        _difference(value, again) > _TOLERANCES.get(value.dtype, 0.0) * max(_largest(value), _SMALLEST)
        for value, again in pairs
    )


def _largest(tensor: torch.Tensor | None) -> float:
    if tensor is None or tensor.numel() == 0:
        return 0.0
    finite = tensor.detach().double()
    return float(torch.where(torch.isfinite(finite), finite.abs(), 0.0).max())


def _most(gradients: Mapping[str, torch.Tensor | None]) -> float:
    return max((_largest(gradient) for gradient in gradients.values()), default=0.0)


def _difference(local: torch.Tensor, part: torch.Tensor) -> float:
    """The largest; equal infinities and NaN in the same places (rows that are masked throughout) are none."""
    if local.shape != part.shape:
        return float("inf")
    if local.numel() == 0:
        return 0.0
    mine, theirs = local.detach().double(), part.detach().double()
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    return float(torch.where(same, 0.0, (mine - theirs).abs()).nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def _sum(gradients: list[torch.Tensor | None]) -> torch.Tensor | None:
    given = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(given).sum(0) if given else None


def _on_cpu(gradients: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {fqn: None if gradient is None else gradient.cpu() for fqn, gradient in gradients.items()}
