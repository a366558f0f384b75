"""Low-rank side paths (LoRA) beside cut layers: what rule each part has, what they drop, what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from hybrid.errors import HybridError, ModelError
from tests.ranks import run_ranks
from tests.tensor_case import tensor_strategy, tensor_variant
from tests.tensor_models import LowRank

WIDTH, HEADS = 8, 4


class Dropping(nn.Dropout):
    """Keeps the mask that it drew last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mask = functional.dropout(torch.ones_like(x), self.p, self.training)
        return x * self.mask


class Attention(nn.Module):
    """Names of a known family; each layer with a side path, but for the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for name in ("q_proj", "v_proj", "o_proj"):
            side = LowRank(getattr(self, name), rank=3)
            side.lora_dropout["default"] = Dropping(0.5)
            setattr(self, name, side)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q_proj, self.k_proj)]
        values = self.v_proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(*parts, values)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"attention": Attention()}) for _ in range(2)])
        self.lm_head: nn.Module = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block["attention"](x)
        return self.lm_head(x)


def masks(policy: str | None) -> dict[str, Any]:
    torch.manual_seed(1)
    with tensor_variant(2, stage=0, plan=None, seed=3) as strategy:
        if policy is not None:
            strategy.recompute, strategy.recompute_configs = True, {"policy": policy, "units": ["Attention"]}
        model: Any = hybrid.distributed_model(Model(), strategy)
        model.train()
        x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(2))
        model(x).square().mean().backward()
        names = [name for name, one in model.named_modules() if isinstance(one, Dropping)]
        drawn = {name: model.get_submodule(name).mask for name in names}
        gradients = {name: gradient for name, gradient in model.named_gradients() if "lora_A" in name}
        assert len(gradients) == 6
        return {"drawn": drawn, "gradients": gradients}


@pytest.mark.parametrize("policy", [None, "full", "selective"])
def test_masks_of_side_paths(policy: str | None) -> None:
    """A side path reads whole activations in the middle of cut ones: masks that differ there make the ranks part.

    What looks at the first forward leaves no product among those that selective recompute keeps.
    """
    first, second = run_ranks(masks, 2, policy)
    for name, mask in first["drawn"].items():
        alike = torch.equal(mask, second["drawn"][name])
        assert alike == ("o_proj" not in name), f"{name}: of a cut input each rank drops its own"
    for name, gradient in first["gradients"].items():
        if "o_proj" not in name:
            assert torch.equal(gradient, second["gradients"][name]), name


class OnTheFly(LowRank):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thin = self.lora_B["default"].weight @ self.lora_A["default"].weight
        return functional.linear(x, self.base_layer.weight + 2.0 * thin, self.base_layer.bias)


class Normalised(LowRank):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + functional.normalize(self.lora_B["default"](self.lora_A["default"](x)), dim=-1)


class SwitchedOff(LowRank):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x)


class DropsInBetween(LowRank):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = functional.dropout(self.lora_A["default"](x), 0.5, self.training)
        return self.base_layer(x) + self.lora_B["default"](low)


def forward_of(kind: type[LowRank]) -> str:
    with tensor_variant(2, stage=0, plan=None, seed=3) as strategy:
        plain = Model()
        for module in plain.modules():
            if isinstance(module, LowRank):
                module.__class__ = kind
        model: Any = hybrid.distributed_model(plain, strategy)
        try:
            for _ in range(2):
                model(torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(2))).square().mean().backward()
        except ModelError as error:
            return str(error)
        return ""


def forwards() -> dict[str, str]:
    return {kind.__name__: forward_of(kind) for kind in (OnTheFly, Normalised, SwitchedOff, DropsInBetween)}


def test_a_forward_that_is_none_of_a_side_path_is_refused() -> None:
    """Names alone do not tell what a module does: on a part of the features its numbers would be others."""
    for said in run_ranks(forwards, 2):
        assert re.match(r"blocks\.0\.attention\.q_proj has .*reads the weights of its layers", said["OnTheFly"])
        assert re.match(r"blocks\.0\.attention\.q_proj has .*more .* than add a multiple", said["Normalised"])
        assert said["SwitchedOff"] == said["DropsInBetween"] == ""


def explained(model: nn.Module, **settings: Any) -> str:
    return str(tensor_strategy(2, **settings).explain(model, world_size=2))


def test_every_part_has_its_rule() -> None:
    """Protects the way from a layer's rule to the parts that stand in its place."""
    said = explained(Model())
    for row in (
        r"q_proj\.base_layer\.weight \(2 times\) +8 × 8 +4 × 8 +colwise, 4 heads",
        r"q_proj\.lora_A\.default\.weight \(2 times\) +3 × 8 +3 × 8 +whole: side path, on whole activations",
        r"q_proj\.lora_B\.default\.weight \(2 times\) +8 × 3 +4 × 3 +colwise, 4 heads",
        r"o_proj\.lora_A\.default\.weight \(2 times\) +3 × 8 +3 × 4 +rowwise, 4 heads",
        r"o_proj\.lora_B\.default\.weight \(2 times\) +8 × 3 +8 × 3 +whole: side path",
    ):
        assert re.search(row, said), (row, said)


def with_side_path_of_head() -> nn.Module:
    model = Model()
    model.tokens = nn.Embedding(5, WIDTH)
    model.lm_head = LowRank(model.lm_head, rank=2)  # type: ignore[arg-type]
    return model


def with_a_norm() -> nn.Module:
    model = Model()
    for block in model.blocks:
        block["attention"].q_proj.magnitude = nn.LayerNorm(WIDTH)  # type: ignore[index]
    return model


class DownAndUp(nn.Module):
    """A side path by other names."""

    def __init__(self, side: LowRank) -> None:
        super().__init__()
        self.base_layer, self.lora_down, self.lora_up = side.base_layer, side.lora_A["default"], side.lora_B["default"]


def with_other_names() -> nn.Module:
    model = Model()
    for block in model.blocks:
        attention: Any = block["attention"]  # type: ignore[index]
        for name in ("q_proj", "v_proj", "o_proj"):
            setattr(attention, name, DownAndUp(getattr(attention, name)))
    return model


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a head": (with_side_path_of_head, {"plan": {"lm_head": "head"}}, r"lm_head .*'head'.*low-rank side path"),
    "the sequence": (Model, {"sequence_parallel": True}, r"sequence_parallel"),
    "other names": (with_other_names, {}, r"q_proj.*: a low-rank side path \(LoRA, DoRA\) is cut .* or use degree 1"),
    "more than a side path": (with_a_norm, {}, r"no 'colwise' layer|no rule|q_proj"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_answer_is_refused(name: str) -> None:
    """Protects against rules that only look as if they fitted."""
    make, settings, said = REFUSED[name]
    with pytest.raises(HybridError, match=said):
        explained(make(), **settings)


def test_an_adapter_may_have_any_name() -> None:
    """Protects against names of adapters that look like those of layers."""
    model = Model()
    for side in [module for module in model.modules() if isinstance(module, LowRank)]:
        for thin in (side.lora_A, side.lora_B):
            thin["lora_adapter"] = thin.pop("default")
    assert re.search(r"q_proj\.lora_B\.lora_adapter\.weight \(2 times\) +8 × 3 +4 × 3", explained(model))


def test_a_plan_for_one_block_leaves_the_others_their_rules() -> None:
    """Protects the rest of the model: a plan that names the parts of one side path rules there, and only there."""
    said = explained(Model(), plan={"blocks.0.**": "replicated"})
    assert re.search(r"q_proj\.base_layer\.weight +8 × 8 +4 × 8 +colwise", said)
    assert re.search(r"q_proj\.base_layer\.weight +8 × 8 +8 × 8 +whole: your plan", said)


def test_a_plan_with_words_for_the_parts_rules() -> None:
    """Protects whoever has written such a plan: it is not overruled."""
    plan = {f"blocks.*.attention.{name}_proj.base_layer": "colwise" for name in "qv"}
    plan |= {
        f"blocks.*.attention.{name}_proj.lora_B.default": {"style": "colwise", "gather_output": True} for name in "qv"
    }
    with pytest.raises(HybridError, match=r"base_layer"):
        explained(Model(), plan=plan)
