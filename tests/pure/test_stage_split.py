"""Layers to pipeline chunks: nothing lost, nothing empty, balanced, and refusals that say what works."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.contracts.chunk_placement import ChunkPlacement, chunk_rank, chunks_on
from hybrid.contracts.stage_split import (
    LayerCost,
    LayerCosts,
    split_by_costs,
    split_by_counts,
    split_by_marks,
    split_by_names,
    split_evenly,
)
from hybrid.errors import StrategyError


def sizes(chunks: tuple[range, ...]) -> list[int]:
    return [len(chunk) for chunk in chunks]


def assert_whole(chunks: tuple[range, ...], num_layers: int, num_chunks: int) -> None:
    """Every layer exactly once and in order, no chunk empty."""
    assert [layer for chunk in chunks for layer in chunk] == list(range(num_layers))
    assert len(chunks) == num_chunks
    assert all(chunks)


@st.composite
def layers_and_chunks(draw: st.DrawFn, most: int = 60) -> tuple[int, int]:
    num_layers = draw(st.integers(1, most))
    return num_layers, draw(st.integers(1, num_layers))


@pytest.mark.parametrize(
    ("num_layers", "num_chunks", "expected"),
    [
        (30, 4, [8, 8, 7, 7]),
        (10, 3, [4, 3, 3]),
        (5, 4, [2, 1, 1, 1]),
        (38, 8, [5, 5, 5, 5, 5, 5, 4, 4]),
        (24, 2, [12, 12]),
        (3, 1, [3]),
    ],
)
def test_equal_layers_are_split_evenly(num_layers: int, num_chunks: int, expected: list[int]) -> None:
    """30 layers on 4 stages trained 28 elsewhere, 5 on 4 left a stage empty, 38 on 8 put ten on the last."""
    assert sizes(split_evenly(num_layers, num_chunks)) == expected
    for cost in (1, 0, 0.1, 7.3e11):
        assert sizes(split_by_costs([cost] * num_layers, num_chunks)) == expected
    assert sizes(split_by_marks(["Block"] * num_layers, "Block", num_chunks)) == expected


@given(layers_and_chunks())
def test_an_even_split_is_whole_and_even(drawn: tuple[int, int]) -> None:
    num_layers, num_chunks = drawn
    chunks = split_evenly(num_layers, num_chunks)
    assert_whole(chunks, num_layers, num_chunks)
    assert max(sizes(chunks)) - min(sizes(chunks)) <= 1
    assert sizes(chunks) == sorted(sizes(chunks), reverse=True)


@given(st.data(), layers_and_chunks(most=8))
def test_a_split_by_costs_is_the_best_of_all(data: st.DataObject, drawn: tuple[int, int]) -> None:
    """Protects the balance: greedy splits are not optimal. Compared with every split there is."""
    num_layers, num_chunks = drawn
    costs = data.draw(st.lists(st.integers(0, 9), min_size=num_layers, max_size=num_layers))

    def rating(chunks: tuple[range, ...]) -> tuple[int, int, int]:
        totals = [sum(costs[layer] for layer in chunk) for chunk in chunks]
        return max(totals), sum(total**2 for total in totals), sum(len(chunk) ** 2 for chunk in chunks)

    every_split = [
        tuple(range(start, stop) for start, stop in pairwise((0, *cuts, num_layers)))
        for cuts in combinations(range(1, num_layers), num_chunks - 1)
    ]
    chunks = split_by_costs(costs, num_chunks)
    assert_whole(chunks, num_layers, num_chunks)
    assert rating(chunks) == min(map(rating, every_split))


@given(st.data(), layers_and_chunks(most=30))
def test_a_split_by_any_costs_is_whole_and_does_not_depend_on_the_unit(
    data: st.DataObject, drawn: tuple[int, int]
) -> None:
    num_layers, num_chunks = drawn
    number = st.floats(0, 1e30, allow_subnormal=True)
    costs = data.draw(st.lists(number, min_size=num_layers, max_size=num_layers))
    chunks = split_by_costs(costs, num_chunks)
    assert_whole(chunks, num_layers, num_chunks)
    assert split_by_costs([cost * 2**10 for cost in costs], num_chunks) == chunks


def test_embedding_and_head_count() -> None:
    """Protects the layout of a small GPT, whose head weighs as much as several blocks."""
    chunks = split_by_costs([1, *[10] * 8, 50], 4)
    assert chunks[-1] == range(9, 10)
    assert sizes(chunks) == [3, 3, 3, 1]


def test_a_large_model_is_split_in_no_time() -> None:
    chunks = split_by_costs([(layer * 7919) % 1013 + 0.5 for layer in range(400)], 64)
    assert_whole(chunks, 400, 64)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_counts_are_taken_as_they_are(counts: list[int]) -> None:
    chunks = split_by_counts(counts, sum(counts), len(counts))
    assert sizes(chunks) == counts
    assert_whole(chunks, sum(counts), len(counts))


def test_a_preset_of_another_size_is_refused_with_both_numbers() -> None:
    """First and last counts that stayed behind when the number of stages or layers changed."""
    with pytest.raises(
        StrategyError, match=r"\[11, 11\]: the counts add up to 22, the model has 24 layers; \[12, 12\]"
    ):
        split_by_counts([11, 11], 24, 2)
    with pytest.raises(StrategyError, match=r"\[12, 12\]: 2 counts for 4 pipeline chunks; \[6, 6, 6, 6\] would do"):
        split_by_counts([12, 12], 24, 4)
    with pytest.raises(StrategyError) as caught:
        split_by_counts([0, 11], 24, 3)
    assert len(caught.value.problems) == 2
    with pytest.raises(StrategyError, match=r"not 2\.5"):
        split_by_counts([2.5, 1.5], 4, 2)  # type: ignore[list-item]
    with pytest.raises(StrategyError, match="not True"):
        split_by_counts([True, 1], 2, 2)


def test_fewer_layers_than_chunks_are_refused_with_both_numbers() -> None:
    message = r"3 layers cannot fill 4 pipeline chunks, each needs one: at most 3 chunks"
    for split in (
        lambda: split_evenly(3, 4),
        lambda: split_by_costs([1, 1, 1], 4),
        lambda: split_by_counts([1, 1, 1, 0], 3, 4),
        lambda: split_by_marks(["A", "A", "A"], "A", 4),
    ):
        with pytest.raises(StrategyError, match=message):
            split()
    with pytest.raises(StrategyError, match="0 layers cannot fill 1 pipeline chunks"):
        split_evenly(0, 1)
    with pytest.raises(StrategyError, match="num_chunks = 0"):
        split_evenly(3, 0)


@pytest.mark.parametrize("cost", [-1, float("nan"), float("inf")])
def test_costs_that_are_none_are_refused(cost: float) -> None:
    with pytest.raises(StrategyError, match="the cost of layer 1 is"):
        split_by_costs([1, cost, 2], 2)


GPT = ["Embedding", "Dropout", *["Block", "function"] * 5, "LayerNorm", "Linear"]


def test_marked_layers_are_shared_out_and_the_others_follow_them() -> None:
    """As Fleet does: a chunk ends behind a marked layer, the tail stays with the last one."""
    assert split_by_marks(GPT, "Block", 2) == (range(0, 7), range(7, 14))
    assert split_by_marks(GPT, "block", 5)[0] == range(0, 3)
    assert sizes(split_by_marks(GPT, "Block|Linear", 3)) == [5, 4, 5]
    assert sizes(split_by_marks(GPT, "Embedding", 1)) == [14]


@given(st.data(), st.lists(st.sampled_from(("Embedding", "TransformerBlock", "Norm")), min_size=1, max_size=20))
def test_marked_splits_are_whole_and_even(data: st.DataObject, names: list[str]) -> None:
    num_marked = names.count("TransformerBlock")
    if not num_marked:
        with pytest.raises(StrategyError, match="no layer of that class; the model has"):
            split_by_marks(names, "Block", 1)
        return
    num_chunks = data.draw(st.integers(1, num_marked))
    chunks = split_by_marks(names, "Block", num_chunks)
    assert_whole(chunks, len(names), num_chunks)
    marked = [sum(names[layer] == "TransformerBlock" for layer in chunk) for chunk in chunks]
    assert max(marked) - min(marked) <= 1


def test_marks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        StrategyError, match=r'"layer:Decoder": no layer of that class; the model has Embedding, Dropout'
    ):
        split_by_marks(GPT, "Decoder", 2)
    with pytest.raises(StrategyError, match='5 layers that "layer:Block" marks cannot fill 8 pipeline chunks'):
        split_by_marks(GPT, "Block", 8)
    with pytest.raises(StrategyError, match="not a regular expression"):
        split_by_marks(GPT, "Block(", 2)
    with pytest.raises(StrategyError, match="no layer of that class"):
        split_by_marks(GPT, "", 2)


def test_chunks_go_round_the_stages_or_down_and_up() -> None:
    assert [chunk_rank(chunk, 4) for chunk in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    v = ChunkPlacement.V
    assert [chunk_rank(chunk, 4, v) for chunk in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [chunks_on(rank, 2, 6, v) for rank in range(2)] == [(0, 3, 4), (1, 2, 5)]
    assert [chunks_on(rank, 2, 4) for rank in range(2)] == [(0, 2), (1, 3)]
    with pytest.raises(ValueError, match="num_stages at least 1"):
        chunk_rank(0, 0)
    with pytest.raises(ValueError, match="chunk -1"):
        chunk_rank(-1, 2)


def test_costs_weigh_flops_or_else_parameters() -> None:
    """An embedding has no flops, yet is not free; one layer that was not measured makes the others' flops useless."""
    embedding = LayerCost(name="Embedding", num_parameters=100, forward_flops=0)
    block = LayerCost(name="Block", num_parameters=10, forward_flops=1000)
    assert LayerCosts(layers=(embedding, block)).weights == (600, 1060)
    unknown = LayerCost(name="Odd", num_parameters=7)
    costs = LayerCosts(layers=(embedding, block, unknown), note="Odd cannot run")
    assert not costs.is_measured
    assert costs.weights == (100, 10, 7)


def test_names_begin_chunks_and_a_module_around_layers_means_its_first() -> None:
    """One that runs twice may be named for its second turn; all that does not fit is said at once."""
    names = ["embed", "encoder.0", "encoder.1", "embed", "decoder.0", "head"]
    assert split_by_names(["encoder.1", "decoder"], names, 3) == (range(2), range(2, 4), range(4, 6))
    assert split_by_names(["encoder", "embed"], names, 3) == (range(1), range(1, 3), range(3, 6))
    with pytest.raises(StrategyError) as caught:
        split_by_names(["decoder.0", "encoder.0", "tail"], names, 3)
    wrong_number, wrong_order, unknown = caught.value.problems
    assert "3 names for 3 pipeline chunks" in wrong_number
    assert "so 2 are needed" in wrong_number
    assert "'encoder.0' is layer 1" in wrong_order
    assert "begins at layer 4" in wrong_order
    assert "no layer runs under the name 'tail'; those that run are embed, encoder.0" in unknown
    with pytest.raises(StrategyError, match="'embed' is layer 0"):
        split_by_names(["embed"], ["embed", "head"], 2)
