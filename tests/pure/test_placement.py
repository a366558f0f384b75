"""The record of a parameter: who counts an element, and which rectangle a rank holds."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.contracts.layout import AXES, Axis, Layout
from hybrid.contracts.partition import partition_bucket
from hybrid.contracts.placement import Box, Placement, replicated

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
    coordinate = layout.coordinate(rank)
    begin, end = rows_of(rank, layout, shape[0]) if cut_rows else (0, shape[0])
    copies = ("pp",) if cut_rows else ("pp", "tp")
    return Placement(
        fqn="weight",
        global_shape=shape,
        dtype="float32",
        boxes=(Box(local_start=(0, 0), global_start=(begin, 0), sizes=(end - begin, shape[1])),),
        partial_axes=DATA_AXES,
        trainable=True,
        replica_id=sum(coordinate[axis] for axis in copies),
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
    placement = replicated("p", (3,), dtype="float32", partial_axes=sorted(partial), trainable=True)
    others = [axis for axis in AXES if axis not in partial]
    for group in layout.groups([axis for axis in partial if axis not in cut]):
        owners = [rank for rank in group if placement.is_owner(layout.coordinate(rank), sorted(cut))]
        assert len(owners) == 1
        assert all(layout.coordinate(owners[0])[axis] == layout.coordinate(group[0])[axis] for axis in others)


def test_a_copy_with_another_replica_id_never_counts() -> None:
    """Protects weights that several stages or tp ranks hold: they count once, at replica 0."""
    box = Box(local_start=(0,), global_start=(0,), sizes=(4,))
    for replica_id in (1, 2):
        copy = Placement(
            fqn="p",
            global_shape=(4,),
            dtype="float32",
            boxes=(box,),
            partial_axes=(),
            trainable=True,
            replica_id=replica_id,
        )
        assert not copy.is_owner({}, ())


def test_an_axis_that_is_not_in_the_coordinates_counts_as_place_0() -> None:
    """Protects layouts that leave an axis of size 1 out."""
    placement = replicated("p", (2,), dtype="float32", partial_axes=("dp_replicate", "dp_shard"), trainable=True)
    assert placement.is_owner({"dp_shard": 0}, ())
    assert not placement.is_owner({"dp_shard": 1}, ())
    assert placement.is_owner({"dp_shard": 1}, ("dp_shard",))
    assert not placement.is_owner({"dp_shard": 1, "dp_replicate": 1}, ("dp_shard",))


def test_boxes_count_their_elements_in_any_number_of_dims() -> None:
    """Protects fused weights (several boxes), scalars (one element) and empty parameters (none)."""
    scalar = replicated("s", (), dtype="float32", partial_axes=(), trainable=True)
    empty = replicated("e", (0, 3), dtype="float32", partial_axes=(), trainable=True)
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
    placement = replicated(
        "embed.weight", [7, 3], dtype="bfloat16", partial_axes=["dp_shard"], trainable=False, tied_fqns=["head.weight"]
    )
    assert placement.boxes == (Box(local_start=(0, 0), global_start=(0, 0), sizes=(7, 3)),)
    assert placement.global_shape == (7, 3)
    assert placement.partial_axes == ("dp_shard",)
    assert placement.tied_fqns == ("head.weight",)
    assert not placement.trainable
    assert (placement.replica_id, placement.chunks, placement.mesh) == (0, (0,), "dense")


def test_a_box_needs_one_start_and_one_size_per_dim() -> None:
    """Protects against records whose boxes silently cover the wrong region."""
    with pytest.raises(ValueError, match="1 local starts, 2 global starts and 2 sizes"):
        Box(local_start=(0,), global_start=(0, 0), sizes=(2, 2))
