"""What no list of layers can be made of, refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hybrid.errors import ModelError, StrategyError
from hybrid.pipeline.layers import LayerDesc, PipelineLayer, SharedLayerDesc

LINEAR = nn.Linear(2, 2)
GIVEN: dict[str, tuple[Callable[[], Any], str]] = {
    "empty": (lambda: PipelineLayer([]), "empty list"),
    "no-list": (lambda: PipelineLayer(LayerDesc(nn.Linear, 2, 2)), "takes a list of layers"),  # type: ignore[arg-type]
    "no-layers": (lambda: PipelineLayer([torch.relu, 5, "x"]), r"layer 1 is 5 \(int\).*; layer 2 is 'x' \(str\)"),
    "class": (lambda: PipelineLayer([nn.ReLU]), r"layer 0 is the class ReLU, not built: write LayerDesc\(ReLU"),
    "nested": (lambda: PipelineLayer([PipelineLayer([torch.relu])]), "layer 0 is a PipelineLayer itself"),
    "twice": (lambda: PipelineLayer([LINEAR, torch.relu, LINEAR]), "layers 0 and 2 hold the same parameter"),
    "given-twice": (
        lambda: PipelineLayer([LayerDesc(nn.Sequential, LINEAR), LayerDesc(nn.Sequential, LINEAR)]),
        "layers 0 and 1 hold the same parameter",
    ),
    "bound": (lambda: PipelineLayer([LINEAR.forward]), "uses the parameters of a Linear that is no part of it"),
    "global": (lambda: PipelineLayer([lambda x: x @ LINEAR.weight]), "uses the parameters of a Linear"),
    "instance": (lambda: LayerDesc(nn.ReLU()), "not the built module ReLU"),
    "not-callable": (lambda: LayerDesc(3), r"not 3 \(int\)"),  # type: ignore[arg-type]
    "returns-no-layer": (lambda: PipelineLayer([LayerDesc(dict)]).build(), r"LayerDesc\(dict\) gave \{\} \(dict\)"),
    "no-key": (lambda: SharedLayerDesc(nn.Linear, 2, 2), "takes the key first"),  # type: ignore[arg-type]
    "no-forward": (lambda: SharedLayerDesc("k", nn.Linear, 2, 2, forward_func=1), "forward_func must be"),  # type: ignore
    "no-attribute-name": (
        lambda: SharedLayerDesc("k", nn.Linear, 2, 2, shared_weight_attr=["weight"]),  # type: ignore[arg-type]
        "names one parameter",
    ),
    "no-loss": (lambda: PipelineLayer([torch.relu], loss_fn=3), "loss_fn must be"),  # type: ignore[arg-type]
    "loss-class": (lambda: PipelineLayer([torch.relu], loss_fn=nn.MSELoss), "loss_fn must be"),
    "loss-with-parameters": (lambda: PipelineLayer([torch.relu], loss_fn=nn.Linear(2, 1)), "loss_fn is a Linear with"),
    "seed": (lambda: PipelineLayer([torch.relu], seed=-1), "seed must be"),
    "not-there": (lambda: PipelineLayer([torch.relu]).build([1]), r"build\(\[1\]\): layer 1 is not there"),
    "none": (lambda: PipelineLayer([torch.relu]).build([]), "no layer at all"),
    "device": (lambda: PipelineLayer([torch.relu]).build(device="cpu"), "'real' or 'meta'"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("give", "message"), GIVEN.values(), ids=GIVEN.keys())
def test_what_is_no_layer_is_refused(give: Callable[[], Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        give()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ([1, 1], r"\[1, 1\]: the counts add up to 2, the model has 3 layers; \[2, 1\] would do"),
        ([1, 1, 1, 1], "3 layers cannot fill 4 pipeline chunks"),
        ([], "must be 'auto', 'uniform'"),
        ("even", "seg_method = 'even': must be 'auto', 'uniform'"),
        ("layer:Block", '"layer:Block": no layer of that class; the model has relu'),
        (3, "must be 'auto'"),
    ],
)
def test_a_method_that_does_not_fit_is_refused(method: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        PipelineLayer([torch.relu] * 3, seg_method=method)


@pytest.mark.parametrize("owned", [None, [0], [1], [2]], ids=["all", "first", "middle", "last"])
def test_shared_parameters_that_do_not_fit_are_refused_by_every_process(owned: list[int] | None) -> None:
    """One stage that refuses while the others wait for it would look like a hang."""

    def build(first: SharedLayerDesc, last: SharedLayerDesc) -> None:
        PipelineLayer([first, torch.relu, last]).build(owned)

    linear = SharedLayerDesc("k", nn.Linear, 4, 3)
    with pytest.raises(ModelError, match=r"weight of layer 2 \(Linear\) is 4 × 4 float32, that of layer 0 is 3 × 4"):
        build(linear, SharedLayerDesc("k", nn.Linear, 4, 4))
    with pytest.raises(ModelError, match=r"is 3 × 4 float64, that of layer 0 is 3 × 4 float32"):
        build(linear, SharedLayerDesc("k", nn.Linear, 4, 3, dtype=torch.float64))
    with pytest.raises(ModelError, match="Linear has no parameter 'kernel' to share; it has weight, bias"):
        build(linear, SharedLayerDesc("k", nn.Linear, 4, 3, shared_weight_attr="kernel"))
    misspelt = SharedLayerDesc("k", nn.Linear, 4, 3, shared_weight_attr="lin.kernel")
    with pytest.raises(ModelError, match=r"no parameter 'lin\.kernel'"):
        build(misspelt, misspelt)
    with pytest.raises(ModelError, match="ReLU has no parameter 'weight' to share; it has no parameters"):
        build(linear, SharedLayerDesc("k", nn.ReLU))
