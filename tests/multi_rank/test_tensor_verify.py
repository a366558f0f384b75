"""`verify`: a wrong plan stops at the first module that differs; a right one changes nothing."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hybrid
from hybrid.errors import ModelError, StrategyError
from hybrid.strategy import DistributedStrategy
from tests.ranks import run_ranks

os.environ.setdefault("HF_HUB_OFFLINE", "1")

D, HEADS, VOCABULARY = 16, 4, 24


class Attention(nn.Module):
    """As people write it: one weight for q, k and v, and a number of heads that is counted on."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = HEADS
        self.qkv = nn.Linear(D, 3 * D)
        self.proj = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.heads(self.qkv(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, -1))

    def heads(self, qkv: torch.Tensor) -> list[torch.Tensor]:
        return [part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1)]


class HardCoded(Attention):
    def heads(self, qkv: torch.Tensor) -> list[torch.Tensor]:
        batch, length, _ = qkv.shape
        return [part.reshape(batch, length, 4, 4).transpose(1, 2) for part in qkv.chunk(3, dim=-1)]


class HardCodedHalf(Attention):
    """The shapes fit: half the width for each head."""

    def heads(self, qkv: torch.Tensor) -> list[torch.Tensor]:
        return [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1)]


class Splitting(Attention):
    def heads(self, qkv: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = qkv.split(D, dim=-1)
        return [part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in (q, k, v)]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class NormalisedMlp(Mlp):
    """A norm over features that are cut, without a size that would not fit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.up(x)
        return self.down(wide * wide.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt())


class ScaledMlp(Mlp):
    """Each rank has a part of the gradient of a number that all cut features are multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x) * self.gain))


class Block(nn.Module):
    def __init__(self, attention: type[Attention], mlp: type[Mlp]) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(D)
        self.attn = attention()
        self.ln2 = nn.LayerNorm(D)
        self.mlp = mlp()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attn(self.ln1(x)))
        return x + self.drop(self.mlp(self.ln2(x)))


class Gpt(nn.Module):
    def __init__(self, attention: type[Attention] = Attention, mlp: type[Mlp] = Mlp) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, D)
        self.blocks = nn.ModuleList([Block(attention, mlp) for _ in range(2)])
        self.head = nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x), x


PLAN: dict[str, Any] = {
    "blocks.*.attn.qkv": {"style": "colwise", "fused": 3, "heads": "n_head", "divide": ["n_head"]},
    "blocks.*.attn.proj": "rowwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
}


def strategy_of(*, tensor: dict[str, Any], **settings: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.tensor_parallel = True
    strategy.tensor_parallel_configs = {"degree": 2, **tensor}
    for name, value in settings.items():
        setattr(strategy, name, value)
    return strategy


def loss_of(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[0].flatten(0, 1), labels.flatten())


@contextlib.contextmanager
def job() -> Any:
    try:
        yield
    finally:
        hybrid.shutdown()


# -- plans that are wrong ----------------------------------------------------------------------------------------


WRONG: dict[str, tuple[tuple[type, type], dict[str, Any], list[str]]] = {
    "fused-qkv-as-one-part": (
        (Attention, Mlp),
        {"blocks.*.attn.qkv": {"style": "colwise", "divide": ["n_head"]}},
        ["output of blocks.0.attn.proj", "'fused'", "blocks.0.attn.qkv: colwise", "your plan: 'blocks.*.attn.qkv'"],
    ),
    "head-count-forgotten": (
        (Attention, Mlp),
        {"blocks.*.attn.qkv": {"style": "colwise", "fused": 3, "divide": []}},
        ["output of blocks.0.attn.proj", "'divide'"],
    ),
    "hard-coded-where-shapes-fit": ((HardCodedHalf, Mlp), {}, ["output of blocks.0.attn.proj", "'divide'"]),
    "norm-over-cut-features": ((Attention, NormalisedMlp), {}, ["output of blocks.0.mlp.down", "norm"]),
    "sum-that-is-too-much": (
        (Attention, Mlp),
        {"blocks.*.ln2.weight": "partial"},
        ["gradient of parameter blocks.1.ln2.weight", "forward agrees", "take 'partial' out"],
    ),
    "sum-that-is-missing": (
        (Attention, ScaledMlp),
        {"blocks.*.mlp.gain": "replicated"},
        ["gradient of parameter blocks.1.mlp.gain", "{'blocks.1.mlp.gain': 'partial'}"],
    ),
}


def stopped(cases: list[str]) -> dict[str, str]:
    ids = torch.randint(VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(1))
    found = {}
    for name in cases:
        (attention, mlp), more, _ = WRONG[name]
        with job():
            torch.manual_seed(0)
            model = hybrid.distributed_model(
                Gpt(attention, mlp), strategy=strategy_of(tensor={"plan": PLAN | more, "verify": True})
            )
            try:
                model(ids)
            except ModelError as error:
                found[name] = str(error)
    return found


def test_wrong_plans_stop_at_the_module() -> None:
    """Each of these trains another model than the plain one without any error, if nothing compares."""
    for found in run_ranks(stopped, 2, list(WRONG)):
        assert set(found) == set(WRONG)
        for name, (_, _, expected) in WRONG.items():
            for words in expected:
                assert words in found[name], f"{name}: {found[name]}"


# -- code that counts on the whole width -------------------------------------------------------------------------


def raised(attention: type[Attention], plan: dict[str, Any], verify: bool) -> tuple[str, str]:
    with job():
        model = hybrid.distributed_model(Gpt(attention), strategy=strategy_of(tensor={"plan": plan, "verify": verify}))
        try:
            model(torch.zeros(2, 6, dtype=torch.int64))
        except ModelError as error:
            return str(error), type(error.__cause__).__name__
    return "", ""


@pytest.mark.parametrize("verify", [False, True], ids=["plain", "verify"])
def test_hard_coded_width_is_named(verify: bool) -> None:
    """torch's own error names neither the module nor the reason."""
    for text, cause in run_ranks(raised, 2, HardCoded, PLAN, verify):
        assert "blocks.0.attn (HardCoded)" in text
        assert "view(B, T, -1, head_dim)" in text
        assert "part.reshape(batch, length, 4, 4)" in text
        assert cause == "RuntimeError"


def test_split_by_a_fixed_width_is_named() -> None:
    for text, cause in run_ranks(raised, 2, Splitting, PLAN, False):
        assert "blocks.0.attn (Splitting)" in text
        assert "chunk(3, dim=-1)" in text
        assert cause in {"RuntimeError", "ValueError"}


def other_errors() -> tuple[str, str]:
    """An error that is not about cut widths, and one of a later forward, stay what they are."""
    with job():
        model = hybrid.distributed_model(Gpt(), strategy=strategy_of(tensor={"plan": PLAN}))
        texts = []
        for ids in (torch.zeros(2, 6), torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 6)):
            try:
                model(ids)
            except RuntimeError as error:
                texts.append(type(error).__name__)
        return tuple(texts)


def test_other_errors_pass_through() -> None:
    assert run_ranks(other_errors, 2) == [("RuntimeError", "RuntimeError")] * 2


# -- models that are right ---------------------------------------------------------------------------------------


def trained(verify: bool | None, tensor: dict[str, Any], settings: dict[str, Any]) -> tuple[list[float], str]:
    """Losses with dropout, the sum of the weights, and what was printed."""
    printed = io.StringIO()
    with job(), contextlib.redirect_stdout(printed):
        torch.manual_seed(0)
        strategy = strategy_of(tensor={"plan": PLAN, "verify": verify, **tensor}, **settings)
        model = hybrid.distributed_model(Gpt(), strategy=strategy)
        optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        generator = torch.Generator().manual_seed(1)
        numbers = []
        for _ in range(2):
            ids = torch.randint(VOCABULARY, (4, 6), generator=generator)
            numbers.append(float(model.train_batch((ids, ids), optimizer, loss_fn=loss_of).loss))
        numbers.append(float(sum(gradient.double().sum() for gradient in model.full_state_dict().values())))
        numbers.append(float(torch.rand(())))
    return numbers, printed.getvalue()


RIGHT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage-0": ({}, {}),
    "stage-1-accumulation": ({}, {"sharding": True, "accumulate_steps": 2}),
    "stage-3-recompute": ({}, {"sharding": True, "sharding_configs": {"stage": 3}, "recompute": True}),
    "sequence-parallel": ({"sequence_parallel": True}, {}),
    "selective-recompute": ({}, {"recompute": True, "recompute_configs": {"policy": "selective"}}),
    "whole-model-recompute": ({}, {"recompute": True, "recompute_configs": {"units": ["Gpt"]}}),
    "compile": ({}, {"compile": True, "compile_configs": {"backend": "aot_eager"}}),
    "bf16-o2": ({}, {"amp": True, "amp_configs": {"level": "O2"}, "sharding": True, "sharding_configs": {"stage": 2}}),
}


def trained_all() -> list[tuple[Any, ...]]:
    return [tuple(trained(verify, *settings) for verify in (False, None, True)) for settings in RIGHT.values()]


def test_a_right_plan_changes_no_number() -> None:
    """The check draws nothing that training draws, and leaves no gradient or state."""
    for rank, results in enumerate(run_ranks(trained_all, 2)):
        for name, ((without, silent), by_default, (verified, printed)) in zip(RIGHT, results, strict=True):
            assert verified == without, name
            assert silent == ""
            assert by_default == (without, ""), name
            assert printed.count("tensor parallel verified") == (rank == 0), name


def torch_transformer() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Transformer(D, HEADS, 1, 1, 32, dropout=0.1)
    batch = (torch.randn(6, 3, D), torch.randn(4, 3, D))
    return model, (batch, {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(4)})


def torch_encoder() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, HEADS, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    return model, ((torch.randn(3, 6, D),), {"src_key_padding_mask": padding})


def hugging_face(name: str, config: str, **more: Any) -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 51,
        "num_hidden_layers": 2,
        "hidden_size": D,
        "num_attention_heads": HEADS,
        "intermediate_size": 32,
        "max_position_embeddings": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    }
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**(sizes | more)))
    ids = torch.arange(3 * 8).reshape(3, 8) % 51
    return model, ((), {"input_ids": ids, "labels": ids})


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "transformer": torch_transformer,
    "encoder": torch_encoder,
    "llama": lambda: hugging_face("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2),
    "llama-one-kv-head": lambda: hugging_face("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=1),
    "qwen3": lambda: hugging_face("Qwen3ForCausalLM", "Qwen3Config", num_key_value_heads=1, head_dim=8),
    "gpt2-tied": lambda: hugging_face("GPT2LMHeadModel", "GPT2Config", n_positions=16),
    "bert": lambda: hugging_face("BertForMaskedLM", "BertConfig"),
    "t5": lambda: hugging_face(
        "T5ForConditionalGeneration", "T5Config", d_model=D, d_kv=4, d_ff=32, num_layers=1, num_heads=HEADS
    ),
}


def verified(names: list[str], sequence_parallel: bool) -> dict[str, str]:
    found = {}
    for name in names:
        model, (args, kwargs) = MODELS[name]()
        with job():
            tensor = {"verify": True, "sequence_parallel": sequence_parallel}
            try:
                wrapped = hybrid.distributed_model(model, strategy=strategy_of(tensor=tensor))
                with torch.no_grad():
                    wrapped(*args, **kwargs)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def test_models_that_people_have_are_verified() -> None:
    """A check that cries wolf at a right plan is left out by everybody: tuples, model outputs, caches, kv copies."""
    assert run_ranks(verified, 2, list(MODELS), False) == [{}, {}]


def test_models_are_verified_under_sequence_parallel() -> None:
    """Between the blocks each rank has a part of the sequence, and of its gradients."""
    assert run_ranks(verified, 2, ["transformer", "qwen3", "gpt2-tied", "t5"], True) == [{}, {}]


# -- refusals ----------------------------------------------------------------------------------------------------


def refused_on_meta() -> str:
    with job(), torch.device("meta"):
        model = Gpt()
    with pytest.raises(StrategyError) as caught:
        hybrid.distributed_model(model, strategy=strategy_of(tensor={"plan": PLAN, "verify": True}))
    return str(caught.value)


def test_meta_models_are_refused() -> None:
    for text in run_ranks(refused_on_meta, 2):
        assert "'wte.weight' is on the meta device" in text
        assert "fewer layers" in text
