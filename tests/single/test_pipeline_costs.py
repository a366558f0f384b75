"""Costs of layers on fake tensors: torch's flops, nothing allocated, nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hybrid.errors import ModelError
from hybrid.pipeline.costs import layer_costs
from hybrid.pipeline.layers import LayerDesc, PipelineLayer, SharedLayerDesc

VOCAB, WIDTH, HEADS = 33, 12, 3


class Attention(nn.Module):
    """Keeps what it computed, as rotary tables are kept; draws a mask in training."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("scale", torch.tensor(2.0))
        self.kept: Any = None

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        x, shift = value
        heads = self.qkv(x + shift).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        self.kept = F.scaled_dot_product_attention(*heads, is_causal=True)
        return {"x": F.dropout(self.kept.transpose(1, 2).flatten(2) * self.scale, training=self.training)}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, value: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.head(self.norm(value["x"].transpose(1, 2)).transpose(1, 2))


class Embed(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> Any:
        x = super().forward(ids)
        return x, torch.ones(WIDTH)


SAMPLE = torch.zeros(2, 7, dtype=torch.long)
ATTENTION = 2 * 2 * HEADS * 7 * 7 * (WIDTH // HEADS) * 2
FLOPS = [0, 2 * 14 * WIDTH * 3 * WIDTH + ATTENTION, 2 * 14 * WIDTH * VOCAB]
PARAMETERS = [VOCAB * WIDTH, 3 * WIDTH * WIDTH + 3 * WIDTH, 2 * WIDTH + WIDTH * VOCAB]


def check(costs: Any) -> None:
    assert costs.note == ""
    assert [layer.forward_flops for layer in costs.layers] == FLOPS
    assert [layer.num_parameters for layer in costs.layers] == PARAMETERS


def test_a_sequential_is_measured_and_left_as_it_was() -> None:
    """Protects the model and the script's random numbers from a question about costs."""
    torch.manual_seed(0)
    model = nn.Sequential(Embed(VOCAB, WIDTH), Attention(), Head())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    costs = layer_costs(model, SAMPLE)
    check(costs)
    assert [layer.name for layer in costs.layers] == ["Embed", "Attention", "Head"]
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert model[1].kept is None
    assert model(SAMPLE).shape == (2, 7, VOCAB)


def test_flops_are_those_that_torch_counts_in_a_real_forward() -> None:
    model = nn.Sequential(nn.Conv1d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 6, 4))
    x = torch.randn(2, 3, 8)
    with FlopCounterMode(display=False) as counter:
        model(x)
    costs = layer_costs(model, x)
    assert sum(layer.forward_flops or 0 for layer in costs.layers) == counter.get_total_flops() > 0


def test_layers_on_the_meta_device_and_layers_not_yet_built_are_measured() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Embed(VOCAB, WIDTH), Attention(), Head())
    check(layer_costs(model, SAMPLE))
    check(layer_costs(model, SAMPLE.to("meta")))
    listed = PipelineLayer([LayerDesc(Embed, VOCAB, WIDTH), LayerDesc(Attention), LayerDesc(Head)])
    state = torch.get_rng_state()
    check(layer_costs(listed, SAMPLE))
    assert not listed.is_built
    assert torch.equal(torch.get_rng_state(), state)
    check(layer_costs(listed.build(), SAMPLE))


def test_a_large_model_is_measured_without_its_memory() -> None:
    """A layer of 256 GiB, which no machine of the suite has."""
    side = 2**18
    listed = PipelineLayer([LayerDesc(nn.Linear, side, side, bias=False), torch.relu])
    costs = layer_costs(listed, torch.empty(4, side, device="meta"))
    assert costs.layers[0].num_parameters == side * side
    assert costs.layers[0].forward_flops == 2 * 4 * side * side
    assert costs.layers[1].forward_flops == 0


def test_costs_balance_a_model_with_a_heavy_head() -> None:
    """Protects the balance of a small GPT: an even number of layers would give the last stage most of the work."""

    def project(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.get_parameter("weight").T

    listed = PipelineLayer(
        [
            SharedLayerDesc("embed", nn.Embedding, 400, WIDTH),
            *[LayerDesc(nn.Linear, WIDTH, WIDTH) for _ in range(8)],
            SharedLayerDesc("embed", nn.Embedding, 400, WIDTH, forward_func=project),
        ]
    )
    costs = layer_costs(listed, torch.zeros(8, 64, dtype=torch.long))
    assert [layer.forward_flops for layer in costs.layers] == [
        0,
        *[2 * 512 * WIDTH * WIDTH] * 8,
        2 * 512 * WIDTH * 400,
    ]
    assert listed.segments(2, costs) == (range(9), range(9, 10))


class ReadsValues(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


def test_a_layer_that_reads_values_leaves_the_parameters_and_a_note() -> None:
    model = nn.Sequential(nn.Linear(4, 4), ReadsValues(4, 4), nn.Linear(4, 2))
    costs = layer_costs(model, torch.ones(2, 4))
    assert costs.note.startswith("layer 1, ReadsValues, cannot run on fake tensors (DataDependentOutputException")
    assert not costs.is_measured
    assert costs.weights == (20, 20, 10)


def test_a_model_of_which_a_part_is_built_is_refused() -> None:
    listed = PipelineLayer([torch.relu, torch.relu]).build([0])
    with pytest.raises(ModelError, match=r"layers \[0\] of 2 are built here"):
        layer_costs(listed, torch.ones(2))
