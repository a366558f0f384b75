"""Side paths (LoRA) on the meta device: they are drawn after the model that they are put around."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybrid.compose.initial_values import check_meta
from hybrid.errors import ModelError
from tests.tensor_models import LowRank


def test_wrapped_layers_on_the_meta_device_need_by_name() -> None:
    """Replay goes layer by layer; building draws all layers first, and then what is put around them."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        check_meta(model, None)
        model[1] = LowRank(model[1], rank=2)
    for init in (None, "replay"):
        with pytest.raises(ModelError, match=r"'1' is a layer with a low-rank side path \(LoRA\).*\"by_name\""):
            check_meta(model, init)
    check_meta(model, "by_name")
