"""The record of a parameter: who counts an element, and which rectangle a rank holds."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.contracts.layout import AXES, Axis, Layout
from hybrid.contracts.partition import partition_bucket
from hybrid.contracts.placement import Box, Placement, even_cut, fused_cut, placed

DATA_AXES = ("dp_replicate", "dp_shard", "cp")
CUT_AXES = ("dp_shard", "cp")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return Layout(tuple(Axis(name=name, size=draw(st.integers(1, 3))) for name in draw(st.permutations(AXES))))


def rows_of(rank: int, layout: Layout, num_rows: int) -> tuple[int, int]:
    """Rows [begin, end) of a weight that is cut over tp, evenly or not."""
    tp, place = layout.degree("tp"), layout.coordinate(rank)["tp"]
    return num_rows * place // tp, num_rows * (place + 1) // tp


def record(rank: int, layout: Layout, shape: tuple[int, int], *, cut_rows: bool) -> Placement:
    """A weight on every pipeline stage (tied), cut by rows over tp or replicated there."""
    begin, end = rows_of(rank, layout, shape[0]) if cut_rows else (0, shape[0])
    copies = ("pp",) if cut_rows else ("pp", "tp")
    return Placement(
        fqn="weight",
        global_shape=shape,
        dtype="float32",
        boxes=(Box(local_start=(0, 0), global_start=(begin, 0), sizes=(end - begin, shape[1])),),
        partial_axes=DATA_AXES,
        trainable=True,
        copy_axes=copies,
    )


@given(
    layouts(),
    st.tuples(st.integers(0, 5), st.integers(0, 4)),
    st.booleans(),
    st.sampled_from(((), ("dp_shard",), CUT_AXES, DATA_AXES)),
    st.sampled_from(("element", "parameter")),
)
def test_each_global_element_is_counted_by_exactly_one_rank(
    layout: Layout, shape: tuple[int, int], cut_rows: bool, cut_axes: tuple[str, ...], kind: str
) -> None:
    """Protects the global norm under every layout and stage: no element is missed, none is summed twice."""
    counted: Counter[tuple[int, int]] = Counter()
    for rank in range(layout.world_size):
        placement = record(rank, layout, shape, cut_rows=cut_rows)
        if not placement.is_owner(layout.coordinate(rank), cut_axes):
            continue
        group = layout.group_ranks(rank, cut_axes)
        partition = partition_bucket(
            [("before", 5), ("weight", placement.num_elements)],
            num_shards=len(group),
            element_bytes=4,
            kind=kind,  # type: ignore[arg-type]
        )
        (box,) = placement.boxes
        for part in partition.slices(group.index(rank)):
            if part.fqn == "weight":
                for element in range(part.start, part.stop):
                    row, column = divmod(element, box.sizes[1])
                    counted[box.global_start[0] + row, box.global_start[1] + column] += 1
    assert counted == Counter(product(range(shape[0]), range(shape[1])))


@given(layouts(), st.sets(st.sampled_from(DATA_AXES)), st.sets(st.sampled_from(DATA_AXES)))
def test_one_owner_per_place_on_the_cut_axes(layout: Layout, partial: set[str], cut: set[str]) -> None:
    """Protects against replicas that count too (a norm that is sqrt(replicas) too large), for any set of axes."""
    placement = placed("p", (3,), dtype="float32", partial_axes=sorted(partial), trainable=True)
    others = [axis for axis in AXES if axis not in partial]
    for group in layout.groups([axis for axis in partial if axis not in cut]):
        owners = [rank for rank in group if placement.is_owner(layout.coordinate(rank), sorted(cut))]
        assert len(owners) == 1
        assert all(layout.coordinate(owners[0])[axis] == layout.coordinate(group[0])[axis] for axis in others)


def test_of_the_copies_over_an_axis_or_a_factor_of_it_the_first_counts() -> None:
    """Protects weights that several stages or tp ranks hold, and kv heads that two ranks share: they count once."""
    box = Box(local_start=(0,), global_start=(0,), sizes=(4,))
    copies = {"tp": [0], "tp/2": [0, 2], "tp/4": [0]}
    for axis, owners in copies.items():
        copy = Placement(
            fqn="p",
            global_shape=(4,),
            dtype="float32",
            boxes=(box,),
            partial_axes=(),
            trainable=True,
            copy_axes=(axis,),
        )
        assert [place for place in range(4) if copy.is_owner({"tp": place}, ())] == owners


@given(st.integers(1, 6), st.integers(0, 20))
def test_an_even_cut_covers_every_element_once_whatever_divides(degree: int, size: int) -> None:
    """Protects vocabularies that the ranks do not divide: no row is lost or held twice, parts differ by one at most."""
    cuts = [even_cut(0, size, rank=rank, degree=degree) for rank in range(degree)]
    covered = [element for cut in cuts for start, length in cut.pieces for element in range(start, start + length)]
    assert covered == list(range(size))
    lengths = [cut.local_size for cut in cuts]
    assert max(lengths) - min(lengths) <= 1


@given(
    st.sampled_from((1, 2, 4)),
    st.lists(st.tuples(st.sampled_from((4, 8)), st.integers(1, 3)), min_size=1, max_size=3),
)
def test_a_fused_cut_takes_whole_heads_of_every_part(degree: int, parts: list[tuple[int, int]]) -> None:
    """Protects q, k and v in one weight: a cut across the whole would mix them."""
    cuts = [fused_cut(0, parts, rank=rank, degree=degree) for rank in range(degree)]
    start = 0
    for index, (heads, size) in enumerate(parts):
        held = [cut.pieces[index] for cut in cuts]
        assert held == [(start + rank * (heads // degree) * size, heads // degree * size) for rank in range(degree)]
        start += heads * size


def test_fewer_heads_than_ranks_are_copied_to_neighbours() -> None:
    """Protects grouped-query attention on many ranks, and the refusal where it cannot be dealt out."""
    cuts = [fused_cut(0, [(2, 3)], rank=rank, degree=4) for rank in range(4)]
    assert [cut.pieces for cut in cuts] == [((0, 3),), ((0, 3),), ((3, 3),), ((3, 3),)]
    assert {cut.copies for cut in cuts} == {2}
    with pytest.raises(ValueError, match="3 heads cannot be dealt out to 2 ranks"):
        fused_cut(0, [(3, 1)], rank=0, degree=2)
    with pytest.raises(ValueError, match="would be copied"):
        fused_cut(0, [(4, 1), (2, 1)], rank=0, degree=4)


def test_an_axis_that_is_not_in_the_coordinates_counts_as_place_0() -> None:
    """Protects layouts that leave an axis of size 1 out."""
    placement = placed("p", (2,), dtype="float32", partial_axes=("dp_replicate", "dp_shard"), trainable=True)
    assert placement.is_owner({"dp_shard": 0}, ())
    assert not placement.is_owner({"dp_shard": 1}, ())
    assert placement.is_owner({"dp_shard": 1}, ("dp_shard",))
    assert not placement.is_owner({"dp_shard": 1, "dp_replicate": 1}, ("dp_shard",))


def test_boxes_count_their_elements_in_any_number_of_dims() -> None:
    """Protects fused weights (several boxes), scalars (one element) and empty parameters (none)."""
    scalar = placed("s", (), dtype="float32", partial_axes=(), trainable=True)
    empty = placed("e", (0, 3), dtype="float32", partial_axes=(), trainable=True)
    assert (scalar.num_elements, empty.num_elements) == (1, 0)
    fused = Placement(
        fqn="qkv",
        global_shape=(12, 4),
        dtype="float32",
        boxes=tuple(Box(local_start=(2 * k, 0), global_start=(4 * k, 0), sizes=(2, 4)) for k in range(3)),
        partial_axes=(),
        trainable=True,
    )
    assert fused.num_elements == 24


def test_replicated_is_one_box_over_everything() -> None:
    """Protects plain data parallel: each rank holds the whole parameter, and its tied names are kept."""
    placement = placed(
        "embed.weight", [7, 3], dtype="bfloat16", partial_axes=["dp_shard"], trainable=False, tied_fqns=["head.weight"]
    )
    assert placement.boxes == (Box(local_start=(0, 0), global_start=(0, 0), sizes=(7, 3)),)
    assert placement.global_shape == (7, 3)
    assert placement.partial_axes == ("dp_shard",)
    assert placement.tied_fqns == ("head.weight",)
    assert not placement.trainable
    assert (placement.copy_axes, placement.chunks, placement.mesh) == ((), (0,), "dense")


def test_a_box_needs_one_start_and_one_size_per_dim() -> None:
    """Protects against records whose boxes silently cover the wrong region."""
    with pytest.raises(ValueError, match="1 local starts, 2 global starts and 2 sizes"):
        Box(local_start=(0,), global_start=(0, 0), sizes=(2, 2))
