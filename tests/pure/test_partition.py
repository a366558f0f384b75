"""The cut of a bucket into shards: every rank derives it alone, so an element lost or held twice is a wrong update."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid.contracts.partition import (
    ALIGNMENT_BYTES,
    BucketPartition,
    Entry,
    PartitionKind,
    Slice,
    alignment_bytes,
    partition_bucket,
)

Sizes = list[tuple[str, int]]

KINDS: tuple[PartitionKind, ...] = ("element", "parameter")

# Nothing, a scalar, tiny, around one alignment block, and larger than several shards.
NUM_ELEMENTS = st.one_of(st.just(0), st.just(1), st.integers(0, 40), st.integers(0, 4000))


@st.composite
def all_sizes(draw: st.DrawFn, *, at_most: int = 12) -> Sizes:
    numbers = draw(st.lists(NUM_ELEMENTS, max_size=at_most))
    return [(f"p{position}", number) for position, number in enumerate(numbers)]


SHARDS = st.integers(1, 8)
KIND = st.sampled_from(KINDS)
ELEMENT_BYTES = st.sampled_from((1, 2, 4, 8, 16, 256))


def cut(sizes: Sizes, num_shards: int, kind: PartitionKind, element_bytes: int = 4) -> BucketPartition:
    return partition_bucket(sizes, num_shards=num_shards, element_bytes=element_bytes, kind=kind)


@given(all_sizes(), SHARDS, KIND, ELEMENT_BYTES)
@example([("empty", 0)], 3, "element", 4)
@example([("empty", 0), ("also", 0)], 4, "parameter", 4)
@example([("scalar", 1)], 8, "element", 4)
def test_every_element_is_in_exactly_one_slice_of_exactly_one_shard(
    sizes: Sizes, num_shards: int, kind: PartitionKind, element_bytes: int
) -> None:
    """Protects against elements that no rank updates, or that two ranks update."""
    partition = cut(sizes, num_shards, kind, element_bytes)
    held: dict[str, list[int]] = {fqn: [0] * number for fqn, number in sizes}
    for shard in range(num_shards):
        for part in partition.slices(shard):
            for element in range(part.start, part.stop):
                held[part.fqn][element] += 1
    assert all(count == 1 for counts in held.values() for count in counts)


@given(all_sizes(), SHARDS, KIND)
def test_a_slice_lies_where_its_parameter_and_its_shard_say(sizes: Sizes, num_shards: int, kind: PartitionKind) -> None:
    """Protects against slices that read another parameter's elements or reach into another rank's shard."""
    partition = cut(sizes, num_shards, kind)
    offset_of = {entry.fqn: entry.offset_elements for entry in partition.entries}
    for shard in range(num_shards):
        parts = partition.slices(shard)
        assert [part.offset_elements for part in parts] == sorted(part.offset_elements for part in parts)
        assert len({part.fqn for part in parts}) == len(parts)
        for part in parts:
            assert part.num_elements == part.stop - part.start > 0
            assert part.offset_elements == offset_of[part.fqn] + part.start
            assert partition.bounds[shard] <= part.offset_elements
            assert part.offset_elements + part.num_elements <= partition.bounds[shard + 1]


@given(all_sizes(), SHARDS, KIND, ELEMENT_BYTES)
def test_parameters_and_shards_start_at_aligned_bytes(
    sizes: Sizes, num_shards: int, kind: PartitionKind, element_bytes: int
) -> None:
    """Protects the alignment that vectorised kernels and collectives need, whatever the element size."""
    partition = cut(sizes, num_shards, kind, element_bytes)
    starts = [entry.offset_elements for entry in partition.entries] + list(partition.bounds)
    total_bytes = element_bytes * sum(num_elements for _, num_elements in sizes)
    boundary = alignment_bytes(total_bytes, num_shards=num_shards)
    assert boundary in {16, 128}
    assert all(start * element_bytes % boundary == 0 for start in starts)


def test_a_small_bucket_gives_every_shard_its_share() -> None:
    """Protects a small model's ranks from a state that one of them holds alone (gaps of 128 bytes were most of it)."""
    partition = partition_bucket([("weight", 24), ("bias", 4)], num_shards=2, element_bytes=4)
    held = [sum(part.num_elements for part in partition.slices(shard)) for shard in range(2)]
    assert held == [16, 12]
    assert alignment_bytes(16 * 128 * 2, num_shards=2) == 128


@given(all_sizes(), SHARDS, KIND)
def test_gaps_and_entries_together_fill_the_buffer_once(sizes: Sizes, num_shards: int, kind: PartitionKind) -> None:
    """Protects against padding that is never zeroed (it would be in the norm) and gaps that zero a parameter."""
    partition = cut(sizes, num_shards, kind)
    ranges = [(entry.offset_elements, entry.offset_elements + entry.num_elements) for entry in partition.entries]
    marks = [0] * partition.num_elements
    for begin, end in [*ranges, *partition.gaps()]:
        for position in range(begin, end):
            marks[position] += 1
    assert marks == [1] * partition.num_elements
    assert partition.padding_elements == sum(end - begin for begin, end in partition.gaps())
    assert all(begin < end for begin, end in partition.gaps())


@given(all_sizes(), SHARDS, KIND)
def test_every_parameter_has_one_entry_of_its_own_size(sizes: Sizes, num_shards: int, kind: PartitionKind) -> None:
    """Protects against a parameter that is left out of its bucket, cut short, or there twice."""
    partition = cut(sizes, num_shards, kind)
    assert sorted((entry.fqn, entry.num_elements) for entry in partition.entries) == sorted(sizes)
    assert partition.num_shards == num_shards
    assert partition.bounds[0] == 0
    assert list(partition.bounds) == sorted(partition.bounds)
    assert partition.num_elements == partition.bounds[-1]


@given(all_sizes(), SHARDS, ELEMENT_BYTES)
def test_kind_element_keeps_the_order_and_cuts_into_equal_shards(
    sizes: Sizes, num_shards: int, element_bytes: int
) -> None:
    """Protects in-place collectives over even shards, the launch order, and the bound on padding."""
    partition = cut(sizes, num_shards, "element", element_bytes)
    assert [entry.fqn for entry in partition.entries] == [fqn for fqn, _ in sizes]
    lengths = {high - low for low, high in zip(partition.bounds, partition.bounds[1:], strict=False)}
    assert len(lengths) == 1
    align = max(1, ALIGNMENT_BYTES // element_bytes)
    assert partition.padding_elements < align * (len(sizes) + num_shards)


@given(all_sizes(), SHARDS)
def test_kind_parameter_gives_each_parameter_whole_to_one_shard(sizes: Sizes, num_shards: int) -> None:
    """Protects optimizers that need whole tensors: a cut parameter would get an update of its parts."""
    partition = cut(sizes, num_shards, "parameter")
    number_of = dict(sizes)
    for shard in range(num_shards):
        assert all(part.start == 0 and part.stop == number_of[part.fqn] for part in partition.slices(shard))


@given(st.lists(all_sizes(at_most=8), max_size=5), SHARDS)
def test_kind_parameter_balances_the_ranks_over_all_buckets(buckets: list[Sizes], num_shards: int) -> None:
    """Protects against one rank that owns (and updates) most of the model: list scheduling is bounded."""
    loads = [0] * num_shards
    owned = [0] * num_shards
    for sizes in buckets:
        partition = partition_bucket(sizes, num_shards=num_shards, element_bytes=4, kind="parameter", loads=loads)
        for shard in range(num_shards):
            owned[shard] += sum(part.num_elements for part in partition.slices(shard))
    assert loads == owned
    numbers = [number for sizes in buckets for _, number in sizes]
    # Graham 1966: no list schedule exceeds the mean by more than (1 - 1/N) of the largest item.
    assert max(owned) <= sum(numbers) / num_shards + (1 - 1 / num_shards) * max(numbers, default=0) + 1e-9


@given(st.lists(st.integers(0, 50), max_size=7), st.integers(1, 3))
def test_kind_parameter_balances_one_bucket_to_four_thirds_of_the_best(numbers: list[int], num_shards: int) -> None:
    """Protects the better bound of longest-first within a bucket, against the best split found by trying all."""
    partition = cut([(f"p{position}", number) for position, number in enumerate(numbers)], num_shards, "parameter")
    owned = [sum(part.num_elements for part in partition.slices(shard)) for shard in range(num_shards)]
    best = sum(numbers)
    for owners in product(range(num_shards), repeat=len(numbers)):
        totals = [0] * num_shards
        for owner, number in zip(owners, numbers, strict=True):
            totals[owner] += number
        best = min(best, max(totals))
    # Graham 1969: the longest-first rule is within 4/3 - 1/(3N) of the best.
    assert max(owned) * 3 * num_shards <= best * (4 * num_shards - 1)


def test_kind_element_as_a_table() -> None:
    """Protects the documented positions: aligned starts, equal shards, a parameter cut across the border."""
    partition = cut([("a", 3), ("b", 40), ("c", 1)], 2, "element")
    assert partition.entries == (
        Entry(fqn="a", offset_elements=0, num_elements=3),
        Entry(fqn="b", offset_elements=4, num_elements=40),
        Entry(fqn="c", offset_elements=44, num_elements=1),
    )
    assert partition.bounds == (0, 24, 48)
    assert partition.gaps() == ((3, 4), (45, 48))
    assert partition.padding_elements == 4
    assert partition.slices(0) == (
        Slice(fqn="a", start=0, stop=3, offset_elements=0),
        Slice(fqn="b", start=0, stop=20, offset_elements=4),
    )
    assert partition.slices(1) == (
        Slice(fqn="b", start=20, stop=40, offset_elements=24),
        Slice(fqn="c", start=0, stop=1, offset_elements=44),
    )


def test_kind_parameter_as_a_table() -> None:
    """Protects the documented positions: largest first to the least loaded rank, shards of unequal length."""
    partition = cut([("a", 3), ("b", 40), ("c", 1)], 2, "parameter")
    assert partition.entries == (
        Entry(fqn="b", offset_elements=0, num_elements=40),
        Entry(fqn="a", offset_elements=40, num_elements=3),
        Entry(fqn="c", offset_elements=44, num_elements=1),
    )
    assert partition.bounds == (0, 40, 48)
    assert partition.slices(0) == (Slice(fqn="b", start=0, stop=40, offset_elements=0),)
    assert [part.fqn for part in partition.slices(1)] == ["a", "c"]
    # Ranks that get nothing have an empty shard.
    alone = cut([("a", 3)], 3, "parameter")
    assert alone.bounds == (0, 4, 4, 4)
    assert [alone.slices(shard) for shard in (1, 2)] == [(), ()]


def test_loads_of_earlier_buckets_decide_who_gets_the_next() -> None:
    """Protects the balance over buckets: rank 0 already owns 100 elements, so rank 1 gets this one."""
    loads = [100, 0]
    partition = partition_bucket([("a", 7)], num_shards=2, element_bytes=4, kind="parameter", loads=loads)
    assert partition.bounds == (0, 0, 8)
    assert loads == [100, 7]


def test_ranks_that_hold_more_or_less_of_a_parameter_deal_out_alike() -> None:
    """Protects sums over tensor-parallel ranks: with 19 and 18 rows of a vocabulary the norms went to other shards."""
    found = []
    for rows in (19, 18):
        loads = [0, 0]
        for sizes, planned in (([("words", rows), ("head", 18)], [19, 18]), ([("norm", 10)], [10])):
            partition = partition_bucket(
                sizes, num_shards=2, element_bytes=4, kind="parameter", loads=loads, planned=planned
            )
            found.append([[part.fqn for part in partition.slices(shard)] for shard in range(2)])
    assert found[:2] == found[2:] == [[["words"], ["head"]], [[], ["norm"]]]


@pytest.mark.parametrize(
    ("num_shards", "element_bytes", "kind", "named"),
    [(0, 4, "element", "num_shards=0"), (2, 0, "element", "element_bytes=0"), (2, 4, "row", "'row'")],
)
def test_nonsense_is_refused_with_the_value(num_shards: int, element_bytes: int, kind: str, named: str) -> None:
    """Protects against a division by zero, or an unknown kind that is taken for another."""
    with pytest.raises(ValueError, match=named):
        partition_bucket([("a", 3)], num_shards=num_shards, element_bytes=element_bytes, kind=kind)  # type: ignore[arg-type]
