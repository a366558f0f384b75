"""The numbering of ranks: every other part reads it, so it must be a bijection and its groups partitions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.contracts.layout import AXES, Axis, Layout, place_on


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    order = draw(st.permutations(AXES))
    return Layout(tuple(Axis(name=name, size=draw(st.integers(1, 4))) for name in order))


@given(layouts(), st.data())
def test_rank_and_coordinate_are_inverse(layout: Layout, data: st.DataObject) -> None:
    """Protects against two ranks with one coordinate, or a rank that comes back as another."""
    rank = data.draw(st.integers(0, layout.world_size - 1))
    coordinate = layout.coordinate(rank)
    assert layout.rank_of(**coordinate) == rank
    assert list(coordinate) == list(layout.axis_names)
    assert all(0 <= place < layout.degree(axis) for axis, place in coordinate.items())
    assert len({tuple(layout.coordinate(r).values()) for r in range(layout.world_size)}) == layout.world_size


@given(layouts(), st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_world(layout: Layout, axes: set[str]) -> None:
    """Protects against a rank in two groups or in none, and groups of unequal size."""
    groups = layout.groups(tuple(axes))
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {math.prod(layout.degree(axis) for axis in axes)}
    assert [min(group) for group in groups] == sorted(min(group) for group in groups)


@given(layouts(), st.sets(st.sampled_from(AXES)), st.data())
def test_group_of_a_rank_is_the_listed_one_and_keeps_the_other_coordinates(
    layout: Layout, axes: set[str], data: st.DataObject
) -> None:
    """Protects against `group_ranks` and `groups` disagreeing, which would hang the first collective."""
    rank = data.draw(st.integers(0, layout.world_size - 1))
    group = layout.group_ranks(rank, tuple(axes))
    assert rank in group
    assert group in layout.groups(tuple(axes))
    assert list(group) == sorted(group)
    kept = {axis: place for axis, place in layout.coordinate(rank).items() if axis not in axes}
    for member in group:
        assert {axis: layout.coordinate(member)[axis] for axis in kept} == kept


def test_the_numbering_of_a_small_world_is_the_documented_table() -> None:
    """Protects the order outer to inner: tp groups are neighbours, pp groups are far apart."""
    layout = Layout.of(pp=2, dp_shard=2, tp=2)
    assert layout.coordinate(5) == {"pp": 1, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}
    assert layout.groups(("tp",)) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups(("dp_shard",)) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups(("pp",)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.group_ranks(6, ("dp_shard", "tp")) == (4, 5, 6, 7)
    assert layout.group_ranks(6, ("tp", "dp_shard")) == (4, 5, 6, 7)


def test_groups_follow_the_order_of_the_axes() -> None:
    """Protects a user's order: with tp outermost its groups are strided, not contiguous."""
    layout = Layout.of(order=("tp", "pp", "dp_replicate", "dp_shard", "cp"), tp=2, dp_shard=4)
    assert layout.groups(("tp",)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.groups(("dp_shard",)) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_a_second_factorisation_of_the_same_ranks_may_stand_beside_the_first() -> None:
    """Protects the way to expert axes: a layout takes any names; dense axes it leaves out have degree 1."""
    experts = Layout((Axis(name="expert_data", size=2), Axis(name="expert", size=4)))
    assert experts.world_size == 8
    assert experts.groups(("expert",)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert experts.degree("tp") == 1


def test_one_process_is_a_layout_with_groups_of_one() -> None:
    layout = Layout.of()
    assert (layout.world_size, layout.groups(AXES), layout.describe()) == (1, ((0,),), "one process")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Axis(name="tp", size=0), ["'tp'", "at least 1", "0"]),
        (lambda: Axis(name="tp", size=True), ["'tp'", "whole number", "True"]),
        (lambda: Layout((Axis(name="tp", size=2), Axis(name="tp", size=2))), ["'tp'", "twice"]),
        (lambda: Layout.of(tpp=2), ["'tpp'", "order"]),
        (lambda: Layout.of(tp=2).coordinate(2), ["rank 2", "0..1"]),
        (lambda: Layout.of(tp=2).rank_of(tp=2), ["'tp'", "size 2", "coordinate 2"]),
        (lambda: Layout.of(tp=2).degree("mp"), ["'mp'", "tp"]),
        (lambda: Layout.of(tp=2).groups("tp"), ["'tp'", "('tp',)"]),
        (lambda: Layout.of(tp=2).groups(("model",)), ["'model'"]),
    ],
    ids=["zero", "bool", "twice", "stranger", "rank", "coordinate", "axis", "bare text", "group axis"],
)
def test_nonsense_is_refused_with_both_numbers(make: object, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        make()  # type: ignore[operator]
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_factor_of_an_axis_groups_neighbours() -> None:
    """Protects kv heads that fewer ranks than tp share: their gradients are summed over these ranks and no others."""
    layout = Layout.of(dp_shard=2, tp=4)
    assert layout.groups(("tp/2",)) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups(("dp_shard", "tp/2")) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert layout.degree("tp/2") == 2
    for wrong in ("tp/3", "tp/0", "tp/x"):
        with pytest.raises(ValueError, match="axis 'tp/"):
            layout.degree(wrong)


def test_some_places_of_an_axis_form_a_group_and_the_others_stand_alone() -> None:
    """Protects tied weights: their gradients are summed over the stages that hold them, wherever these are."""
    layout = Layout.of(pp=4, dp_shard=2)
    assert layout.groups(("pp:0,3",)) == ((0, 6), (1, 7), (2,), (3,), (4,), (5,))
    assert layout.group_ranks(7, ("pp:3,0", "dp_shard")) == (0, 1, 6, 7)
    assert layout.group_ranks(3, ("pp:0,3", "dp_shard")) == (2, 3)
    assert layout.degree("pp:0,3") == 2
    assert [place_on("pp:0,3", {"pp": place}) for place in range(4)] == [0, 0, 0, 1]
    assert [place_on("tp/2", {"tp": place}) for place in range(4)] == [0, 1, 0, 1]
    for wrong in ("pp:0,4", "pp:x"):
        with pytest.raises(ValueError, match="axis 'pp:"):
            layout.degree(wrong)
