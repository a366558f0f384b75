"""What one forward of a model does: which units it calls, in which order, and which values reach which of them.

A value is one tensor that a unit's call returns, known by its place: (number of the call in the forward, path of the
tensor in what it returned: "" for all of it, "0" for the first of a tuple). Chunks are runs of neighbouring calls, so a
value can only be read by the chunk that made it and by later ones: exactly those that a later one reads cross the cut
between two chunks, and every cut on the way.

    calls    embed   block 0   block 1 │ block 2   norm   head        a cut behind call 2
    reads      ·     (0, "")   (1, "") │ (2, "") (3, "") (4, "")      crosses: (2, "")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hybrid.errors import ModelError

__all__ = ["Call", "Flow", "Place", "ValueSize", "assign_chunks", "crossing_values"]

Place = tuple[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSize:
    """One tensor of what a call returned, on the sample."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a unit.

    Args:
        unit: its name in the model.
        reads: values that reach what it is given, also through operations outside units.
        parameters: first names of parameters that reach it from outside the unit.
        passes: tensors that it returns as it was given them: (path of the output, path of the argument).
        forward_flops: of matrix products, convolutions and attention, on the sample.
        values: what it returns, by path; without those that it passes on.
        stays: why what holds these cannot go on to another stage; "" if it can.
    """

    unit: str
    reads: frozenset[Place]
    parameters: frozenset[str]
    passes: tuple[tuple[str, str], ...]
    forward_flops: int = field(compare=False)
    values: tuple[tuple[str, ValueSize], ...] = field(compare=False)
    stays: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One forward; two are equal if the same values go the same ways, whatever their sizes.

    Args:
        calls: in order.
        output_reads: values that reach the model's output.
        output_parameters: first names of parameters that reach it from outside units.
        written: values that are written to after their call has returned them.
        writes_inputs: whether the forward writes into its own inputs.
        read_buffers: names of buffers of units that are read outside of them.
        written_buffers: names of buffers that units write (statistics).
        counted: names of other attributes that each call of a unit changes from what the call before has left.
        together: numbers of calls that one checkpoint of the model's own runs again in backward.
        checkpointed: numbers of all calls that run again, together with others or not.
        unkept: numbers of those of them for which the random state is not kept.
        draws: numbers of calls that draw from one generator of the model's own.
        returns: class of the output, if that is a tuple or list and so has no `.loss`.
    """

    calls: tuple[Call, ...]
    output_reads: frozenset[Place]
    output_parameters: frozenset[str]
    written: frozenset[Place]
    writes_inputs: bool
    read_buffers: frozenset[str]
    written_buffers: frozenset[str]
    counted: frozenset[str] = frozenset()
    together: tuple[frozenset[int], ...] = ()
    checkpointed: frozenset[int] = frozenset()
    unkept: frozenset[int] = frozenset()
    draws: tuple[frozenset[int], ...] = ()
    returns: str = field(default="", compare=False)

    def size_of(self, place: Place) -> ValueSize:
        return dict(self.calls[place[0]].values)[place[1]]


def crossing_values(flow: Flow, chunks: Sequence[range]) -> tuple[tuple[Place, ...], ...]:
    """Of each chunk but the last, the values that cross the cut behind it, in the order in which they come to be.

    Raises:
        ModelError: what a unit before the last chunk returns cannot go on to another stage.
    """
    for call in flow.calls[: chunks[-1].start]:
        if call.stays:
            raise ModelError(f"of what {call.unit!r} returns: {call.stays}")
    last_reader: dict[Place, int] = {}
    for index, chunk in enumerate(chunks):
        for call in flow.calls[chunk.start : chunk.stop]:
            last_reader |= dict.fromkeys(call.reads, index)
    last_reader |= dict.fromkeys(flow.output_reads, len(chunks) - 1)
    return tuple(
        tuple(sorted(place for place, reader in last_reader.items() if place[0] < chunk.stop and reader > index))
        for index, chunk in enumerate(chunks[:-1])
    )


def assign_chunks(flow: Flow, planned: Flow, chunks: Sequence[range]) -> tuple[range, ...]:
    """The calls of each chunk in another forward of a model that is cut already.

    Args:
        flow: of the other forward.
        planned: by which the model was cut.
        chunks: the calls of each chunk in it.

    Raises:
        ModelError: a unit is called where its chunk is over.
    """
    if [call.unit for call in flow.calls] == [call.unit for call in planned.calls]:
        return tuple(chunks)
    holders: dict[str, list[int]] = {}
    for index, own in enumerate(chunks):
        for call in planned.calls[own.start : own.stop]:
            holders.setdefault(call.unit, []).append(index)
    ends = [0] * len(chunks)
    now = 0
    for number, call in enumerate(flow.calls):
        there = [index for index in holders.get(call.unit, []) if index >= now]
        if not there:
            before = flow.calls[number - 1].unit if number else "the beginning"
            raise ModelError(
                f"with these inputs the model calls {call.unit!r} after {before!r}, unlike with the sample by which it "
                "was cut: the stage that holds it has no turn any more. Give distributed_model(sample=...) inputs of "
                "the kind that you train with"
            )
        for index in range(now, there[0]):
            ends[index] = number
        now = there[0]
        ends[now] = number + 1
    for index in range(now, len(chunks)):
        ends[index] = max(ends[index], len(flow.calls))
    starts = [0, *ends[:-1]]
    assigned = tuple(range(start, max(start, end)) for start, end in zip(starts, ends, strict=True))
    for chunk, held in enumerate(assigned[:-1]):
        if not held:
            raise ModelError(
                f"with these inputs the model calls none of the units of pipeline chunk {chunk}, unlike with the "
                "sample by which it was cut. Give distributed_model(sample=...) inputs of the kind that you train with"
            )
    return assigned


def names_of(calls: Sequence[Call]) -> Iterator[str]:
    """Names of the units, each once, in the order of their first calls."""
    yield from dict.fromkeys(call.unit for call in calls)
