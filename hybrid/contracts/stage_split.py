"""Which layers form which pipeline chunk: contiguous ranges, every layer exactly once and in order, no chunk empty.

    10 layers in 4 chunks     0 1 2 | 3 4 5 | 6 7 | 8 9         split_evenly
    which rank runs a chunk                                     chunk_placement

Chunks that cannot all be alike are longest first: the last one usually has the loss to compute as well.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import inf, isfinite, lcm

from hybrid.errors import StrategyError

__all__ = [
    "LayerCost",
    "LayerCosts",
    "split_by_costs",
    "split_by_counts",
    "split_by_marks",
    "split_by_names",
    "split_evenly",
    "whole_costs",
]

# The work that one parameter makes beside the layer's own, in forward flops of one micro-batch. An estimate: Adam's
# update (about 12 flops and 28 bytes) once per step, against a forward and a backward of twice its work for each of
# some micro-batches. It keeps an embedding, whose lookup counts no flops, from being free.
_FLOPS_PER_PARAMETER = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer asks for.

    Args:
        name: its class.
        num_parameters: elements of all its parameters; a shared one counts in every layer that holds it.
        forward_flops: of a forward of the sample it was measured on; None if it could not be measured.
    """

    name: str
    num_parameters: int
    forward_flops: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """The costs of all layers, in order; `note` says why there are no flops, where there are none."""

    layers: tuple[LayerCost, ...]
    note: str = ""

    @property
    def is_measured(self) -> bool:
        return all(layer.forward_flops is not None for layer in self.layers)

    @property
    def weights(self) -> tuple[int, ...]:
        """One number per layer, to balance chunks by: forward flops and a share for the parameters, or those alone."""
        if not self.is_measured:
            return tuple(layer.num_parameters for layer in self.layers)
        return tuple((layer.forward_flops or 0) + _FLOPS_PER_PARAMETER * layer.num_parameters for layer in self.layers)


def split_evenly(num_layers: int, num_chunks: int) -> tuple[range, ...]:
    """Sizes that differ by one layer at most, the longer chunks first: 10 layers in 4 chunks are 3, 3, 2, 2.

    Raises:
        StrategyError: fewer layers than chunks.
    """
    _check_enough(num_layers, num_chunks, what="layer")
    short, longer = divmod(num_layers, num_chunks)
    return _ranges([short + (chunk < longer) for chunk in range(num_chunks)])


def split_by_counts(
    counts: Sequence[int], num_layers: int, num_chunks: int, *, setting: str = "seg_method"
) -> tuple[range, ...]:
    """So many layers for each chunk, in order. `setting` is where the counts stand, for messages.

    Raises:
        StrategyError: not one count per chunk, a count below 1, or counts that do not add up to the layers; all
            that is wrong in one error.
    """
    _check_enough(num_layers, num_chunks, what="layer")
    given = list(counts)
    would_do = [len(chunk) for chunk in split_evenly(num_layers, num_chunks)]
    wrong = [count for count in given if isinstance(count, bool) or not isinstance(count, int) or count < 1]
    problems = []
    if wrong:
        problems.append(
            f"{setting} = {given}: each count must be a whole number of at least 1, not {wrong[0]!r}; "
            f"{would_do} would do"
        )
    if len(given) != num_chunks:
        problems.append(
            f"{setting} = {given}: {len(given)} counts for {num_chunks} pipeline chunks; {would_do} would do"
        )
    if not wrong and sum(given) != num_layers:
        problems.append(
            f"{setting} = {given}: the counts add up to {sum(given)}, the model has {num_layers} layers; "
            f"{would_do} would do"
        )
    if problems:
        raise StrategyError(problems)
    return _ranges(given)


def split_by_marks(
    names: Sequence[str], mark: str, num_chunks: int, *, setting: str = "seg_method"
) -> tuple[range, ...]:
    """Chunks with evenly many of the layers whose class name contains `mark`, as `seg_method = "layer:Name"` says.

    As in Fleet, `mark` is a regular expression that upper and lower case do not matter to, a chunk ends behind its
    last marked layer, and what follows goes with the next one; layers behind the last marked one stay with it.
    Unlike there the number of marked layers need not be a multiple of the chunks: the first ones take one more.

    Args:
        names: class name of each layer.
        mark: the part behind "layer:".
        num_chunks: how many chunks.
        setting: where the mark stands, for messages.

    Raises:
        StrategyError: a mark that no layer has, or too few layers have.
    """
    _check_enough(len(names), num_chunks, what="layer")
    try:
        pattern = re.compile(mark, re.IGNORECASE)
    except re.error as error:
        raise StrategyError(
            f'{setting} = "layer:{mark}" is not a regular expression ({error}); write a class name'
        ) from None
    marked = [index for index, name in enumerate(names) if pattern.search(name)] if mark else []
    if not marked:
        known = ", ".join(dict.fromkeys(names))
        raise StrategyError(f'{setting} = "layer:{mark}": no layer of that class; the model has {known}')
    _check_enough(len(marked), num_chunks, what="layer", of=f' that "layer:{mark}" marks')
    ends = [marked[chunk.stop - 1] + 1 for chunk in split_evenly(len(marked), num_chunks)]
    ends[-1] = len(names)
    return tuple(range(start, stop) for start, stop in pairwise([0, *ends]))


def split_by_names(
    firsts: Sequence[str], names: Sequence[str], num_chunks: int, *, setting: str = "split"
) -> tuple[range, ...]:
    """Chunks that begin at these: the first layer of every chunk but the first.

    Args:
        firsts: names of layers, or of modules around some, of which the first one is meant.
        names: of all layers in the order in which they run; one that runs twice stands there twice.
        num_chunks: how many chunks.
        setting: where the names stand, for messages.

    Raises:
        StrategyError: not one name for each chunk but the first, a name that is no layer's, or names that are not in
            the order of the layers; all that is wrong in one error.
    """
    problems = []
    if len(firsts) != num_chunks - 1:
        problems.append(
            f"{setting} = {list(firsts)}: {len(firsts)} names for {num_chunks} pipeline chunks; each chunk but the "
            f"first begins at one, so {num_chunks - 1} are needed"
        )
    bounds = [0]
    for name in firsts:
        places = [index for index, other in enumerate(names) if other == name or other.startswith(f"{name}.")]
        after = [index for index in places if index > bounds[-1]]
        if not places:
            known = ", ".join(dict.fromkeys(names))
            problems.append(f"{setting}: no layer runs under the name {name!r}; those that run are {known}")
        elif not after:
            problems.append(
                f"{setting}: {name!r} is layer {places[0]} in the order in which they run, and the chunk before begins "
                f"at layer {bounds[-1]}: each chunk must begin behind the one before"
            )
        else:
            bounds.append(after[0])
    if problems:
        raise StrategyError(problems)
    return tuple(range(start, stop) for start, stop in pairwise([*bounds, len(names)]))


def split_by_costs(costs: Sequence[float], num_chunks: int) -> tuple[range, ...]:
    """Contiguous chunks of which the costliest is as cheap as it can be.

    Of several such splits the one with the most even costs (least sum of squares), then the most even numbers of
    layers, then the longest first chunks: equal costs are split as `split_evenly` does. Exact: costs are compared
    without rounding.

    Args:
        costs: one number per layer, in any unit, none below 0.
        num_chunks: how many chunks.

    Raises:
        StrategyError: fewer layers than chunks, or a cost that is negative or not finite.
    """
    _check_enough(len(costs), num_chunks, what="layer")
    whole = whole_costs(costs)
    sums = list(accumulate(whole, initial=0))
    return _most_even(sums, num_chunks, limit=_least_limit(sums, num_chunks))


def whole_costs(costs: Sequence[float]) -> list[int]:
    """The same costs in a unit in which all are whole numbers, so that 0.1 thirty times is split like 1 thirty times.

    Raises:
        StrategyError: a cost that is negative or not finite.
    """
    for index, cost in enumerate(costs):
        if not isfinite(cost) or cost < 0:
            raise StrategyError(f"the cost of layer {index} is {cost}; costs must be finite and at least 0")
    whole = [cost for cost in costs if isinstance(cost, int)]
    if len(whole) == len(costs):
        return whole
    exact = [Fraction(cost) for cost in costs]
    scale = lcm(*(cost.denominator for cost in exact))
    return [int(cost * scale) for cost in exact]


def _least_limit(sums: Sequence[int], num_chunks: int) -> int:
    """The cost that the costliest chunk has at least, from the running sums of the costs.

    Chunks filled up to a limit are the fewest possible under it, and cutting one further never makes a costlier one;
    so a limit can be kept if they are `num_chunks` at most.
    """
    largest = max(after - before for before, after in pairwise(sums))
    low = max(largest, -(-sums[-1] // num_chunks))
    high = low + largest  # what is left of a chunk then is less than its next layer
    while low < high:
        limit = (low + high) // 2
        num_filled = end = costliest = 0
        next_limit = sums[-1]  # the least with which some chunk has a layer more
        while end < len(sums) - 1:
            start, end = end, bisect_right(sums, sums[end] + limit) - 1
            num_filled += 1
            costliest = max(costliest, sums[end] - sums[start])
            if end < len(sums) - 1:
                next_limit = min(next_limit, sums[end + 1] - sums[start])
        if num_filled <= num_chunks:
            high = costliest
        else:
            low = next_limit
    return low


def _most_even(sums: Sequence[int], num_chunks: int, *, limit: int) -> tuple[range, ...]:
    """Dynamic programming from the back: the most even split of layers `start` on, for each number of chunks left."""
    num_layers = len(sums) - 1
    impossible = (inf, inf)
    best: list[tuple[float, float]] = [impossible] * num_layers + [(0, 0)]  # no chunk left, no layer left
    stops: list[list[int]] = []
    for left in range(1, num_chunks + 1):  # chunks from here on
        now = [impossible] * (num_layers + 1)
        stop_of = [0] * (num_layers + 1)
        # Layers that the chunks before cannot hold within the limit, or these chunks not, start no split.
        first = max(num_chunks - left, bisect_left(sums, sums[-1] - limit * left))
        last = min(num_layers - left, bisect_right(sums, limit * (num_chunks - left)) - 1)
        for start in range(first, last + 1):
            for stop in range(start + 1, num_layers - left + 2):
                cost = sums[stop] - sums[start]
                if cost > limit:
                    break
                if best[stop] == impossible:
                    continue
                total = (best[stop][0] + cost * cost, best[stop][1] + (stop - start) ** 2)
                if total <= now[start]:  # the longest of equals
                    now[start], stop_of[start] = total, stop
        best = now
        stops.append(stop_of)
    bounds = [0]
    for stop_of in reversed(stops):
        bounds.append(stop_of[bounds[-1]])
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def _check_enough(num_layers: int, num_chunks: int, *, what: str, of: str = "") -> None:
    if num_chunks < 1:
        raise StrategyError(f"num_chunks = {num_chunks}: a model has at least 1 pipeline chunk")
    if num_layers < num_chunks:
        have = f"{num_layers} {what}{'' if num_layers == 1 else 's'}{of}"
        way = f"at most {num_layers} chunks (degree × virtual_stages) work" if num_layers else "give it layers"
        raise StrategyError(f"{have} cannot fill {num_chunks} pipeline chunks, each needs one: {way}")


def _ranges(sizes: Sequence[int]) -> tuple[range, ...]:
    bounds = list(accumulate(sizes, initial=0))
    return tuple(range(start, stop) for start, stop in pairwise(bounds))
