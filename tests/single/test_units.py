"""Units and buckets: what is gathered, freed and reduced together, and in which order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import hybrid
from hybrid.errors import ModelError
from hybrid.sharding.units import Unit, plan_buckets, plan_units


class Block(nn.Module):
    """A residual block; its inner Sequential repeats a class, which must not become a unit of its own."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 7), nn.GELU(), nn.Linear(7, width))


class Stack(nn.Module):
    """Embedding, blocks, norm, head: the usual order of registration."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.position = nn.Parameter(torch.zeros(4, 5))
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 11, bias=False)


def names(units: tuple[Unit, ...]) -> list[str]:
    return [unit.name for unit in units]


def all_fqns(units: tuple[Unit, ...]) -> list[str]:
    return [fqn for unit in units for fqn in unit.fqns]


def test_each_block_of_a_stack_is_a_unit_and_the_rest_stands_before_and_after() -> None:
    """Protects the order of launches: blocks one by one, embedding and head not in one unit with each other."""
    units = plan_units(Stack())
    blocks = [unit for unit in units if unit.name.startswith("blocks.")]
    assert names(tuple(blocks)) == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(len(unit.fqns) == 6 for unit in blocks)
    before, after = units[0], units[-1]
    assert set(before.fqns) == {"embed.weight", "position"}
    assert set(after.fqns) == {"norm.weight", "norm.bias", "head.weight"}
    assert names(units)[1:-1] == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_sequential_of_equal_layers_is_a_stack() -> None:
    """Protects models without a ModuleList; layers without parameters are no units."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))
    units = plan_units(model)
    assert names(units)[:2] == ["0", "2"]
    assert units[-1].fqns == ("4.weight", "4.bias")


def test_nothing_repeats_then_everything_is_one_unit() -> None:
    """Protects small models: no unit is invented, none is lost."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4))
    units = plan_units(model)
    assert len(units) == 1
    assert units[0].fqns == ("0.weight", "0.bias", "2.weight", "2.bias")


def test_a_model_without_parameters_has_no_units() -> None:
    """Protects against an index into an empty list."""
    assert plan_units(nn.Sequential(nn.ReLU(), nn.ReLU())) == ()


def test_the_outermost_repetition_counts() -> None:
    """Protects nested stacks: a block with an inner stack is gathered as a whole."""
    stages = nn.ModuleList([nn.Sequential(Block(), Block()) for _ in range(2)])
    assert names(plan_units(stages)) == ["0", "1"]


def test_two_stacks_of_one_model_are_both_found() -> None:
    """Protects encoder-decoder models, whose stacks have different classes."""
    model = nn.Transformer(d_model=4, nhead=2, num_encoder_layers=2, num_decoder_layers=3, dim_feedforward=6)
    expected = [f"encoder.layers.{i}" for i in range(2)] + [f"decoder.layers.{i}" for i in range(3)]
    found = [name for name in names(plan_units(model)) if not name.startswith("(")]
    assert found == expected


def test_a_stack_that_mixes_classes_takes_those_that_repeat() -> None:
    """Protects hybrid stacks: convolution and attention layers in turn, and one odd layer between them."""
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Bilinear(2, 2, 3), nn.Linear(3, 3), nn.LayerNorm(3)])
    units = plan_units(layers)
    assert {"0", "2"} <= set(names(units))
    assert "1" not in names(units)
    assert all_fqns(units) == [fqn for fqn, _ in layers.named_parameters()]


def test_names_as_in_published_models() -> None:
    """Protects deep prefixes and digits in names: layer 1 is not a prefix of layer 10."""
    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = nn.Embedding(7, 5)
    model.model.layers = nn.ModuleList([Block() for _ in range(12)])
    model.model.norm = nn.LayerNorm(5)
    model.lm_head = nn.Linear(5, 7, bias=False)
    units = plan_units(model)
    inner = [unit for unit in units if unit.name.startswith("model.layers.")]
    assert names(tuple(inner)) == [f"model.layers.{i}" for i in range(12)]
    assert all(fqn.startswith(f"{unit.name}.") for unit in inner for fqn in unit.fqns)


def test_a_tied_weight_belongs_to_its_first_unit_only() -> None:
    """Protects against a weight that is in two buckets, so that one of them never gets its gradient."""
    model = Stack()
    model.head.weight = model.embed.weight
    model.blocks[2].mlp[0].weight = model.blocks[0].mlp[0].weight
    units = plan_units(model)
    fqns = all_fqns(units)
    assert len(fqns) == len(set(fqns))
    assert "head.weight" not in fqns
    assert "blocks.0.mlp.0.weight" in units[1].fqns
    assert "blocks.2.mlp.0.weight" not in fqns


def test_one_block_used_at_several_places_is_one_unit() -> None:
    """Protects shared layers (ALBERT's way): the same module object registered three times."""
    block = Block()
    model = nn.ModuleList([block, block, block])
    fqns = all_fqns(plan_units(model))
    assert fqns == [fqn for fqn, _ in model.named_parameters()]


def test_class_names_override_what_repeats() -> None:
    """Protects the user's choice: units where they say, also for a class that stands once."""
    model = Stack()
    assert [name for name in names(plan_units(model, class_names=["LayerNorm"])) if not name.startswith("(")] == [
        "blocks.0.norm",
        "blocks.1.norm",
        "blocks.2.norm",
        "norm",
    ]
    both = plan_units(model, class_names=["Block", "LayerNorm"])
    # A norm inside a block belongs to the block.
    assert [name for name in names(both) if not name.startswith("(")] == ["blocks.0", "blocks.1", "blocks.2", "norm"]


def test_an_unknown_class_name_is_refused_with_the_names_that_exist() -> None:
    """Protects against a misspelt unit that silently leaves the whole model in one unit."""
    with pytest.raises(ModelError, match=r"\['Blok'\].*'Block'"):
        plan_units(Stack(), class_names=["Block", "Blok"])


@pytest.mark.parametrize("class_names", [None, ["Block"], ["Linear"], ["Stack"]])
def test_every_parameter_is_in_exactly_one_unit(class_names: list[str] | None) -> None:
    """Protects against parameters without a bucket, whatever the units are."""
    model = Stack()
    fqns = all_fqns(plan_units(model, class_names=class_names))
    assert sorted(fqns) == sorted(fqn for fqn, _ in model.named_parameters())


def test_parameters_registered_after_their_blocks_do_not_join_another_unit() -> None:
    """Protects against a unit whose name lies: parameters around blocks are never counted to a block."""
    model = nn.Module()
    model.first = nn.Linear(3, 3)
    model.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model.last = nn.Linear(3, 3)
    for unit in plan_units(model):
        inside = {fqn.startswith("blocks.") for fqn in unit.fqns}
        assert inside == {unit.name.startswith("blocks.")}


# -- buckets ----------------------------------------------------------------------------------------------------

UNIT_SIZES = st.lists(st.lists(st.integers(0, 120), min_size=1, max_size=6), max_size=8)


def units_of(sizes: list[list[int]]) -> list[tuple[tuple[str, int], ...]]:
    return [tuple((f"u{u}.p{p}", size) for p, size in enumerate(unit)) for u, unit in enumerate(sizes)]


@given(UNIT_SIZES, st.integers(1, 200))
def test_every_fqn_is_in_one_bucket_and_the_order_is_kept(sizes: list[list[int]], bucket_bytes: int) -> None:
    """Protects the launch order, and against a parameter that is never reduced."""
    units = units_of(sizes)
    buckets = plan_buckets(units, bucket_bytes=bucket_bytes)
    assert [fqn for bucket in buckets for fqn in bucket] == [fqn for unit in units for fqn, _ in unit]
    assert all(buckets)


@given(UNIT_SIZES, st.integers(1, 200))
def test_a_bucket_exceeds_the_size_only_for_one_large_parameter(sizes: list[list[int]], bucket_bytes: int) -> None:
    """Protects the bound on transient memory: bucket_bytes means something, and a huge weight still works."""
    units = units_of(sizes)
    size_of = dict(pair for unit in units for pair in unit)
    for bucket in plan_buckets(units, bucket_bytes=bucket_bytes):
        filled = [fqn for fqn in bucket if size_of[fqn] > 0]
        assert sum(size_of[fqn] for fqn in filled) <= bucket_bytes or len(filled) == 1


@given(UNIT_SIZES, st.integers(1, 200))
@example([[1], [0, 1]], 1)
def test_a_unit_that_fits_is_never_cut(sizes: list[list[int]], bucket_bytes: int) -> None:
    """Protects the overlap: a block's gradients leave in one piece when they can."""
    buckets = plan_buckets(units_of(sizes), bucket_bytes=bucket_bytes)
    bucket_of = {fqn: place for place, bucket in enumerate(buckets) for fqn in bucket}
    for unit in units_of(sizes):
        if sum(size for _, size in unit) <= bucket_bytes:
            assert len({bucket_of[fqn] for fqn, _ in unit}) == 1


def test_small_units_share_a_bucket_and_large_ones_are_cut() -> None:
    """Protects the documented sizes as a table: merged towards, cut at, and started anew for a unit that fits."""
    merged = plan_buckets([(("a", 30), ("b", 10)), (("c", 20),), (("d", 60),)], bucket_bytes=64)
    assert merged == (("a", "b", "c"), ("d",))
    large = plan_buckets([(("a", 40), ("b", 40), ("c", 20)), (("d", 1000), ("e", 1))], bucket_bytes=64)
    assert large == (("a",), ("b", "c"), ("d",), ("e",))
    assert plan_buckets([], bucket_bytes=64) == ()


def test_the_layers_of_a_pipeline_layer_are_units_without_a_pipeline_too() -> None:
    """As one unit, stage 3 would gather the whole model at once, and recompute would find nothing to run again."""
    model = hybrid.PipelineLayer([hybrid.LayerDesc(Block) for _ in range(3)]).build()
    assert names(plan_units(model)) == ["0", "1", "2"]
