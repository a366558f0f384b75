"""What tensor parallelism refuses: one clear sentence, with sizes that work, before a process group exists.

Most are raised by `distributed_model` in processes that have only the variables of a launcher: nobody waits for them
at any address, so a refusal that came after the group had been started would not come at all.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hybrid
from hybrid.errors import HybridError, LaunchError, StrategyError
from tests.ranks import run_environments
from tests.tensor_case import tensor_strategy
from tests.tensor_gpt import GPT, GPT_PLAN, GroupedAttention
from tests.tensor_models import TorchStack, build


class Heads(nn.Module):
    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.attn = GroupedAttention(12, num_heads, num_kv_heads)


class Words(nn.Module):
    """Three words, fewer than four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.up, self.down = nn.Embedding(3, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 3)


class NormBetween(nn.Module):
    """A norm over a width that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.between, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)


class Subclass(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Subclass(8, 16), nn.Linear(16, 8)


class TiedToBody(nn.Module):
    """The row layer's weight is also a layer of its own, which is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.again = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.again.weight = self.down.weight


class LowRankLinear(nn.Linear):
    """With its side path inside, as loralib has it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.lora_A, self.lora_B = nn.Parameter(torch.zeros(2, width)), nn.Parameter(torch.zeros(out, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T


class LowRankInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = LowRankLinear(8, 16), nn.Linear(16, 8)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.mlp = nn.Linear(8, 16), nn.Linear(16, 8), Router()


def mixtral() -> nn.Module:
    import transformers

    sizes = {"vocab_size": 67, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))


def gpt(**more: Any) -> tuple[Callable[[], nn.Module], dict[str, Any]]:
    return GPT, {"plan": GPT_PLAN | more}


PAIR = {"up": "colwise", "down": "rowwise"}
QKV = "blocks.*.attn.qkv"

# Name -> (degree, model, other settings of tensor_strategy, error, what its message says)
REFUSED: dict[str, tuple[int, Callable[[], nn.Module], dict[str, Any], type[HybridError], str]] = {
    "heads": (2, lambda: Heads(3, 3), {}, StrategyError, r"degree = 2 does not divide num_heads=3 of attn; .*: 1, 3"),
    "heads of a user's plan": (3, *gpt(), StrategyError, r"degree = 3 .*num_heads=4 .*: 1, 2, 4"),
    "kv heads": (3, lambda: Heads(6, 2), {}, StrategyError, r"degree = 3 .* num_kv_heads=2 of attn; .*: 1, 2, 6"),
    "kv heads that do not divide the heads": (
        2,
        lambda: Heads(4, 3),
        {},
        HybridError,
        r"4 query heads of attn are not a multiple of its 3 key/value heads",
    ),
    "ffn": (
        2,
        lambda: nn.ModuleDict({"up": nn.Linear(8, 15), "down": nn.Linear(15, 8)}),
        {"plan": PAIR},
        StrategyError,
        r"degree = 2 does not divide width 15 between up and down of the model; .*: 1, 3, 5, 15",
    ),
    "vocabulary": (
        4,
        Words,
        {"plan": PAIR},
        StrategyError,
        r"degree = 4 is more than vocabulary 3 of (wte|head); .*: 1, 2",
    ),
    "heads of torch.nn": (3, lambda: TorchStack("encoder", batch_first=True), {}, StrategyError, r"3 .*num_heads=4"),
    "a pattern that matches nothing": (
        2,
        *gpt(**{"blocks.*.attn.qkw": "colwise"}),
        StrategyError,
        r"'blocks\.\*\.attn\.qkw' matches no module; .*qkv",
    ),
    "patterns that overlap": (
        2,
        *gpt(**{"blocks.0.attn.proj": "colwise"}),
        StrategyError,
        r"'blocks\.\*\.attn\.proj' and 'blocks\.0\.attn\.proj' both match blocks\.0\.attn\.proj",
    ),
    "a style that does not fit": (
        2,
        *gpt(norm="colwise"),
        StrategyError,
        r"'norm': 'colwise' does not fit norm \(LayerNorm\); styles that do",
    ),
    "a style that nobody knows": (2, *gpt(head="colwize"), StrategyError, r"'colwize'; did you mean 'colwise'"),
    "a key that nobody knows": (
        2,
        *gpt(**{QKV: {"style": "colwise", "fusd": 3}}),
        StrategyError,
        r"unknown key 'fusd'; did you mean 'fused'",
    ),
    "parts that do not divide": (
        2,
        *gpt(**{QKV: {"style": "colwise", "fused": 5}}),
        StrategyError,
        r"fused = 5 .*does not divide its width 48",
    ),
    "attributes that are not there": (
        2,
        *gpt(**{QKV: {"style": "colwise", "fused": 3, "divide": ["n_heads"]}}),
        StrategyError,
        r"'n_heads'.*known: .*num_heads",
    ),
    "a column without its row": (
        2,
        NormBetween,
        {"plan": {"up": "colwise"}},
        HybridError,
        r"up is 'colwise' .*no 'rowwise' layer",
    ),
    "a row without its column": (
        2,
        NormBetween,
        {"plan": {"down": "rowwise"}},
        HybridError,
        r"down is 'rowwise' .*no 'colwise' layer",
    ),
    "a norm between": (2, NormBetween, {"plan": PAIR}, HybridError, r"between normalises over the whole width of 16"),
    "a forward of its own": (2, Odd, {"plan": PAIR}, HybridError, r"up \(Subclass\) has a forward .* of its own"),
    "tied layers cut differently": (
        2,
        TiedToBody,
        {"plan": PAIR | {"again": "replicated"}},
        HybridError,
        r"are one parameter and must be cut alike",
    ),
    "a model without rules": (2, GPT, {}, HybridError, r"(?s)no rule is known .*blocks\.\*\.attn\.qkv: 16 -> 48.*plan"),
    "experts": (2, Mixture, {"plan": PAIR}, HybridError, r"mlp \(Router\) is a mixture of experts|expert"),
    "sequence parallel without blocks": (
        2,
        lambda: nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}),
        {"plan": PAIR, "sequence_parallel": True},
        HybridError,
        r"sequence_parallel: ModuleDict has no stack of blocks",
    ),
    "a whole layer in a cut sequence": (
        2,
        lambda: build("gpt-lora"),
        {"plan": GPT_PLAN | {"blocks.*.attn.lora_*": "replicated"}, "sequence_parallel": True},
        HybridError,
        r"lora_a",
    ),
    "LoRA within a layer": (
        2,
        LowRankInside,
        {"plan": PAIR},
        HybridError,
        r"up \(LowRankLinear\) holds a low-rank side path \(LoRA\) as parameters of its own, lora_A and lora_B",
    ),
    "sequence parallel at degree 1": (
        1,
        GPT,
        {"sequence_parallel": True},
        StrategyError,
        r"sequence_parallel does nothing with .*degree of 1",
    ),
    "a plan at degree 1": (1, *gpt(), StrategyError, r"plan does nothing with .*degree of 1"),
    "verify at degree 1": (1, GPT, {"verify": True}, StrategyError, r"verify does nothing with .*degree of 1"),
    "Mixtral": (
        2,
        mixtral,
        {},
        HybridError,
        r"model\.layers\.0\.mlp \(MixtralSparseMoeBlock\) is a mixture of experts",
    ),
    "a degree that does not divide the ranks": (8, *gpt(), StrategyError, r"8"),
}


def refused(names: tuple[str, ...]) -> dict[str, tuple[str, str, bool]]:
    """By name: type of the error and its message; whether a process group was there."""
    found = {}
    for name in names:
        degree, make, settings, _, _ = REFUSED[name]
        try:
            hybrid.distributed_model(make(), tensor_strategy(degree, **settings))
            found[name] = ("nothing", "", dist.is_initialized())
        except Exception as error:
            kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
            found[name] = (kinds, str(error), dist.is_initialized())
    return found


def launched(world_size: int) -> dict[str, str]:
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    return {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **sizes}


@pytest.fixture(scope="module")
def refusals() -> dict[str, tuple[str, str, bool]]:
    """Of one process each that believes to be the first of 4, or of 3 ranks."""
    names = [name for name in REFUSED if name != "Mixtral" or importlib.util.find_spec("transformers")]
    thirds = tuple(name for name in names if REFUSED[name][0] == 3)
    others = tuple(name for name in names if name not in thirds)
    found: dict[str, tuple[str, str, bool]] = {}
    for chosen, ranks in ((others, 4), (thirds, 3)):
        (report,) = run_environments(refused, [launched(ranks)], chosen, timeout_seconds=30)
        assert not report.failed, report.traceback or report.error
        found |= report.value
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_a_process_group_exists(name: str, refusals: dict[str, tuple[str, str, bool]]) -> None:
    if name not in refusals:
        pytest.skip("needs transformers")
    kinds, message, started = refusals[name]
    assert REFUSED[name][3].__name__ in kinds.split(), (kinds, message)
    assert re.search(REFUSED[name][4], message), message
    assert not started


# -- warned about ----------------------------------------------------------------------------------------------------


def check_nodes() -> str:
    """The second of four ranks, alone: it warns, and then nobody comes."""
    strategy = tensor_strategy(4, plan=GPT_PLAN, timeout_seconds=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(LaunchError):
            hybrid.distributed_model(build("gpt"), strategy)
    return "\n".join(str(warning.message) for warning in caught)


def test_more_ranks_than_a_node_has() -> None:
    environment = {**launched(4), "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    (report,) = run_environments(check_nodes, [environment], timeout_seconds=30)
    assert not report.failed, report.traceback
    assert re.search(r"degree 4 is more than the 2 ranks of this node", report.value), report.value
