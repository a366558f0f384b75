"""A model given as a list of layers: the same names and values whichever layers a process builds."""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hybrid.errors import ModelError, StrategyError
from hybrid.pipeline.layers import LayerDesc, PipelineLayer, SharedLayerDesc

VOCAB, WIDTH = 11, 5
built: Counter[tuple[str, str]] = Counter()  # (what, device) of each constructor that ran


class Counted(nn.Linear):
    def __init__(self, name: str, width: int = WIDTH) -> None:
        super().__init__(width, width)
        built[name, self.weight.device.type] += 1


class Odd(nn.Module):
    """Draws from Python's and NumPy's random states as well; has a buffer and a nested module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(random.random() + np.random.rand()))
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


class Position(nn.Module):
    """Its shared parameter lies deeper, and has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(WIDTH, WIDTH, bias=False)
        self.alias = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(x) + x @ self.alias


def project(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.get_parameter("weight").T


def tied_layers() -> list[Any]:
    """Two keys, one of them in three layers of two classes, beside all other kinds of layers."""
    return [
        SharedLayerDesc("embed", nn.Embedding, VOCAB, WIDTH),
        SharedLayerDesc("position", Position, shared_weight_attr="table.weight"),
        LayerDesc(Odd),
        torch.relu,
        SharedLayerDesc("embed", nn.Embedding, VOCAB, WIDTH, forward_func=project),
        lambda x: x.softmax(-1),
        SharedLayerDesc("embed", nn.Linear, WIDTH, VOCAB, bias=False, forward_func=lambda layer, x: x @ layer.weight),
        SharedLayerDesc("position", Position, shared_weight_attr="table.weight"),
        LayerDesc(nn.Linear, WIDTH, 3),
    ]


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.fixture(autouse=True)
def _count_from_zero() -> None:
    built.clear()


def test_nothing_is_built_at_construction_and_only_own_layers_later() -> None:
    """Protects the memory of a rank, which may be too small for the layers of others."""
    model = PipelineLayer([LayerDesc(Counted, name) for name in "abcd"], seed=1)
    assert not built
    assert not model.is_built
    assert model.num_layers == 4
    assert model.layer_names() == ("Counted",) * 4
    assert model.build([1, 2]) is model
    assert built == {("b", "cpu"): 1, ("c", "cpu"): 1}
    assert model.owned == (1, 2)
    assert [name for name, _ in model.named_parameters()] == ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert model.build([2, 1]) is model
    assert built.total() == 2
    with pytest.raises(ModelError, match=r"layers \[1, 2\] are built already, \[0, 1, 2, 3\] cannot"):
        model.build()
    with pytest.raises(ModelError, match=r"holds layers \[1, 2\] of 4: .* use train_batch"):
        model(torch.ones(2, WIDTH))
    torch.testing.assert_close(model.run_layer(1, torch.ones(2, WIDTH)), model.get_submodule("1")(torch.ones(2, WIDTH)))


def test_used_plainly_it_is_the_sequential_of_its_layers() -> None:
    """Protects the one-process run that every layout is compared with, and the names of its state dict."""
    first, activation = nn.Linear(WIDTH, 7), nn.ReLU()
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    model = PipelineLayer(
        [
            first,
            activation,
            LayerDesc(nn.Linear, 7, 7),
            activation,
            functools.partial(torch.clamp, max=2.0),
            nn.Dropout(),
        ],
        loss_fn=loss,
    )
    model.eval()
    x = torch.randn(4, WIDTH)
    output = model(x)
    assert not model.get_submodule("2").training
    plain = nn.Sequential(first, activation, nn.Linear(7, 7), activation, nn.Identity(), nn.Dropout()).eval()
    assert list(model.state_dict()) == list(plain.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(output, plain(x).clamp(max=2.0), rtol=0, atol=0)
    assert model.layer_names() == ("Linear", "ReLU", "Linear", "ReLU", "clamp", "Dropout")
    assert model.loss_fn is loss
    model.loss_fn = other = nn.MSELoss()
    assert model.loss_fn is other
    assert set("012345") < {name for name, _ in model.named_modules(remove_duplicate=False)}


@settings(max_examples=25)
@given(st.data())
def test_values_are_the_same_for_every_split(data: st.DataObject) -> None:
    """Protects "the numbers of one process": whoever builds a layer, and after whatever else was drawn."""
    layers = tied_layers()
    whole = values(PipelineLayer(layers, seed=3).build())
    holders = data.draw(st.lists(st.integers(0, 2), min_size=len(layers), max_size=len(layers)))
    for stage in set(holders):
        torch.manual_seed(data.draw(st.integers(0, 9)))
        owned = [index for index, holder in enumerate(holders) if holder == stage]
        part = values(PipelineLayer(layers, seed=3).build(owned))
        assert part.keys() == {name for name in whole if int(name.partition(".")[0]) in owned}
        for name, value in part.items():
            torch.testing.assert_close(value, whole[name], rtol=0, atol=0)


def test_the_base_seed_is_drawn_once_and_building_draws_nothing() -> None:
    """Protects the random state of the user's script, and models that differ where the script's seeds do."""
    torch.manual_seed(7)
    model = PipelineLayer(tied_layers())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = values(model.build())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    second = values(PipelineLayer(tied_layers()).build())
    assert not torch.equal(first["8.weight"], second["8.weight"])
    torch.manual_seed(7)
    torch.testing.assert_close(values(PipelineLayer(tied_layers()).build()), first, rtol=0, atol=0)
    twins = PipelineLayer([LayerDesc(nn.Linear, 4, 4), LayerDesc(nn.Linear, 4, 4)], seed=0).build()
    assert not torch.equal(twins.get_parameter("0.weight"), twins.get_parameter("1.weight"))


def test_defaults_of_the_construction_hold_for_the_build() -> None:
    """Protects `set_default_dtype` around the construction, where a plain model would have been built."""
    torch.set_default_dtype(torch.float64)
    try:
        model = PipelineLayer([LayerDesc(nn.Linear, 2, 2)])
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.build().get_parameter("0.weight").dtype is torch.float64
    assert torch.get_default_dtype() is torch.float32
    with torch.device("meta"):
        model = PipelineLayer([LayerDesc(nn.Linear, 2, 2)])
    assert not model.build().get_parameter("0.weight").is_meta


def test_a_shared_parameter_is_one_object_under_its_first_name() -> None:
    model = PipelineLayer(tied_layers(), seed=3)
    assert model.shared_keys() == {
        "embed": [(0, "weight"), (4, "weight"), (6, "weight")],
        "position": [(1, "table.weight"), (7, "table.weight")],
    }
    model.build()
    embed, position = model.get_parameter("0.weight"), model.get_parameter("1.table.weight")
    assert model.get_parameter("4.weight") is embed is model.get_parameter("6.weight")
    assert model.get_parameter("7.table.weight") is position is model.get_submodule("7").get_parameter("alias")
    names = [name for name, _ in model.named_parameters()]
    assert {"0.weight", "1.alias"} <= set(names)
    assert not {"1.table.weight", "4.weight", "6.weight", "7.table.weight", "7.alias"} & set(names)
    assert {"4.weight", "7.alias"} <= set(model.state_dict())
    assert model.shared_elsewhere() == {}
    model(torch.randint(VOCAB, (6,))).sum().backward()
    assert embed.grad is not None


def test_a_shared_parameter_whose_first_layer_is_elsewhere_starts_from_its_values() -> None:
    """Protects tied layers on several stages, of which each has a copy: all start alike, and it is known which."""
    whole = PipelineLayer(tied_layers(), seed=3).build()
    last = PipelineLayer(tied_layers(), seed=3).build([4, 6, 7])
    assert last.get_parameter("4.weight") is last.get_parameter("6.weight")
    torch.testing.assert_close(last.get_parameter("4.weight"), whole.get_parameter("0.weight"), rtol=0, atol=0)
    assert last.shared_elsewhere() == {
        "4.weight": "0.weight",
        "6.weight": "0.weight",
        "7.alias": "1.alias",
    }
    middle = PipelineLayer(tied_layers(), seed=3).build([2, 3])
    assert middle.shared_elsewhere() == {}


def test_a_meta_build_has_the_shapes_and_no_memory() -> None:
    model = PipelineLayer(tied_layers(), seed=3).build([0, 4, 7, 8], device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.get_parameter("4.weight") is model.get_parameter("0.weight")
    assert model.get_parameter("8.weight").shape == (3, WIDTH)


ASKED: dict[str, Callable[[PipelineLayer], Any]] = {
    "parameters": lambda model: list(model.parameters()),
    "named_parameters": lambda model: dict(model.named_parameters()),
    "buffers": lambda model: list(model.buffers()),
    "state_dict": lambda model: model.state_dict(),
    "load_state_dict": lambda model: model.load_state_dict({}, strict=False),
    "to": lambda model: model.to(torch.float64),
    "half": lambda model: model.half(),
    "apply": lambda model: model.apply(print),
    "requires_grad_": lambda model: model.requires_grad_(False),
    "zero_grad": lambda model: model.zero_grad(),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED.keys())
def test_what_an_unbuilt_model_does_not_have_is_refused(ask: Callable[[PipelineLayer], Any]) -> None:
    """An optimizer over no parameters, or a cast of nothing, would be silent."""
    model = PipelineLayer([LayerDesc(nn.Linear, 2, 2)])
    with pytest.raises(ModelError, match=r"hybrid\.distributed_model first, or call \.build\(\)"):
        ask(model)
    model.build()
    if ask is not ASKED["load_state_dict"]:
        ask(model)


def test_it_can_be_printed_and_copied_before_and_after_it_is_built() -> None:
    model = PipelineLayer(tied_layers(), seed=3)
    assert "0 of 9 layers built here: Embedding, Position, Odd, relu" in repr(model)
    copied = copy.deepcopy(model).build()
    again = copy.deepcopy(copied)
    torch.testing.assert_close(values(again), values(model.build()), rtol=0, atol=0)
    assert again.get_parameter("4.weight") is again.get_parameter("0.weight")
    assert repr(tied_layers()[6]) == "SharedLayerDesc(Linear, 5, 11, bias=False)"


def test_segments_by_each_method() -> None:
    def segments(num_chunks: int, method: Any, **kwargs: Any) -> list[int]:
        layers = [
            LayerDesc(nn.Embedding, 50, WIDTH),
            *[LayerDesc(Counted, "block") for _ in range(6)],
            torch.relu,
            nn.Linear(WIDTH, 60),
        ]
        return [len(chunk) for chunk in PipelineLayer(layers, seg_method=method).segments(num_chunks, **kwargs)]

    assert segments(4, "uniform") == [3, 2, 2, 2]
    assert segments(3, "layer:counted") == [3, 2, 4]
    assert segments(2, [8, 1]) == [8, 1]
    assert segments(3, "auto") == [1, 6, 2]  # 250 parameters, 6 times 30, 0 and 360
    assert built[("block", "meta")] == 6
    assert built[("block", "cpu")] == 0
    assert segments(3, "auto", costs=[1.0] * 9) == [3, 3, 3]
    with pytest.raises(StrategyError, match="8 costs for 9 layers"):
        segments(3, "auto", costs=[1.0] * 8)
    with pytest.raises(StrategyError, match="9 layers cannot fill 10 pipeline chunks"):
        segments(10, "auto")
    with pytest.raises(StrategyError, match=r"\[8, 1\]: 2 counts for 3 pipeline chunks"):
        segments(3, [8, 1])


class ReadsValues(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.largest = self.weight.max().item()


def test_a_layer_that_cannot_be_counted_is_named() -> None:
    model = PipelineLayer([LayerDesc(nn.Linear, 2, 2), LayerDesc(ReadsValues)])
    with pytest.raises(ModelError, match=r'layer 1, ReadsValues, cannot be built on the meta device.*"uniform"'):
        model.segments(2)
    assert len(model.build().segments(2)) == 2


def test_modules_that_run_elsewhere_are_let_go() -> None:
    """Protects the memory of a model that was built whole before it was put into the list."""
    model = PipelineLayer([nn.Linear(2, 2), nn.Linear(2, 3)]).build([0])
    assert model.layer_here(1) is None
    assert model.num_parameters_of(1) == 9
    assert [len(chunk) for chunk in model.segments(2)] == [1, 1]
    with pytest.raises(ModelError, match="layer 1 was a module that this process has given up"):
        model.make_layer(1)


def test_a_constructor_that_fails_names_its_layer_and_leaves_nothing() -> None:
    model = PipelineLayer([LayerDesc(nn.Linear, 2, 2), LayerDesc(nn.Linear, 2, 2, nothing=1)])
    with pytest.raises(TypeError) as caught:
        model.build()
    assert caught.value.__notes__ == ["while layer 1 was built: LayerDesc(Linear, 2, 2, nothing=1)"]
    assert not model.is_built
    assert model.build([0]).owned == (0,)
