"""Facts of live models, also on the meta device, and the rules that follow for models that people have."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hybrid.contracts.tensor_plan import TensorPlan
from hybrid.contracts.tensor_rules import plan_tensor_parallel, working_degrees
from hybrid.errors import ModelError, StrategyError
from hybrid.tensor.facts import read_facts
from tests.pure.test_tensor_rules import covered

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SIZES: dict[str, Any] = {
    "vocab_size": 51,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def hugging_face(name: str, config: str, **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**(SIZES | more)))
    return model


def llama(*, tie: bool) -> nn.Module:
    return hugging_face("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, tie_word_embeddings=tie)


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    return hugging_face("T5ForConditionalGeneration", "T5Config", feed_forward_proj="gated-gelu", **sizes)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: llama(tie=False),
    "llama-tied": lambda: llama(tie=True),
    "qwen3": lambda: hugging_face("Qwen3ForCausalLM", "Qwen3Config", num_key_value_heads=2, head_dim=8),
    "gpt2": lambda: hugging_face("GPT2LMHeadModel", "GPT2Config", n_positions=8, add_cross_attention=True),
    "bert": lambda: hugging_face("BertForMaskedLM", "BertConfig", max_position_embeddings=8),
    "vit": lambda: hugging_face("ViTForImageClassification", "ViTConfig", image_size=8, patch_size=4),
    "t5": t5,
    "phi3": lambda: hugging_face("Phi3ForCausalLM", "Phi3Config", num_key_value_heads=2, pad_token_id=0),
    "torch": lambda: nn.Transformer(16, 4, 2, 2, 32, batch_first=True, device="meta"),
}


def planned(name: str, degree: int = 2, *, sequence_parallel: bool = False) -> TensorPlan:
    return plan_tensor_parallel(read_facts(MODELS[name]()), degree=degree, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("name", MODELS)
def test_known_models_are_cut_at_every_degree_that_works(name: str) -> None:
    """Protects each family by name: a rule for every weight that matters, and each element exactly where it belongs."""
    facts = read_facts(MODELS[name]())
    assert {2, 4} <= set(working_degrees(facts))
    for degree in (2, 4):
        for sequence_parallel in (False, True):
            if sequence_parallel and name == "phi3":  # its fused layers give and take whole activations
                with pytest.raises(StrategyError, match=r"self_attn\.o_proj, .* takes a whole input"):
                    plan_tensor_parallel(facts, degree=degree, sequence_parallel=True)
                continue
            plan = plan_tensor_parallel(facts, degree=degree, sequence_parallel=sequence_parallel)
            covered(facts, plan)
            local = sum(torch.Size(row.local_shape).numel() for row in plan.rows if len(row.global_shape) == 2)
            whole = sum(torch.Size(row.global_shape).numel() for row in plan.rows if len(row.global_shape) == 2)
            assert len(plan.rows) == len(list(MODELS[name]().parameters()))
            # Position tables, and heads over a few classes, are all that is whole.
            assert local < (0.4 if degree == 4 else 0.6) * whole


def test_llama_by_its_own_plan() -> None:
    """Protects grouped queries: kv heads copied on 4 ranks, and the one attribute that depends on it."""
    plan = planned("llama", 4)
    rule = plan.rules["model.layers.1.self_attn.k_proj"]
    assert (rule.parts, rule.copies) == (((2, 4),), 2)
    assert rule.source == "the model's own plan: 'model.layers.*.self_attn.k_proj'"
    assert plan.attributes["model.layers.1.self_attn"] == {"num_key_value_groups": 1}
    assert plan.rules["lm_head"].style == "head"
    assert planned("llama", 2).attributes == {}


def test_tied_weights_are_one_row_cut_alike() -> None:
    """Protects ties: embedding and output layer have the same rows of the one weight."""
    plan = planned("llama-tied")
    assert {plan.rules[fqn].style for fqn in ("model.embed_tokens", "lm_head")} == {"vocab", "head"}
    (row,) = [row for row in plan.rows if row.global_shape == (51, 16)]
    assert (row.fqn, row.local_shape) == ("model.embed_tokens.weight", (26, 16))


def test_qwen3_norms_of_heads() -> None:
    """BC-17: their gradient is a sum over the ranks, in any mode."""
    for sequence_parallel in (False, True):
        plan = planned("qwen3", sequence_parallel=sequence_parallel)
        assert plan.rules["model.layers.0.self_attn.q_norm"].style == "partial"
        assert plan.partial["model.layers.0.self_attn.k_norm.weight"] == "acts on cut heads"
        assert ("model.layers.0.input_layernorm.weight" in plan.partial) is sequence_parallel


def test_gpt_2() -> None:
    plan = planned("gpt2")
    assert plan.rules["transformer.h.0.attn.c_attn"].parts == ((4, 4),) * 3
    assert plan.rules["transformer.h.0.crossattention.c_attn"].parts == ((4, 4),) * 2
    assert plan.attributes["transformer.h.1.attn"] == {"num_heads": 2, "split_size": 8}
    assert plan.cross_attention == ("transformer.h.0.crossattention", "transformer.h.1.crossattention")
    assert "not over the vocabulary" in plan.replicated["transformer.wpe.weight"]


def test_bert_head_with_a_bias_of_two_names() -> None:
    """Protects the masked-LM head: its bias is cut with the decoder, under whichever name it comes."""
    plan = planned("bert")
    (row,) = [row for row in plan.rows if row.fqn == "cls.predictions.bias"]
    assert (row.local_shape, row.rule) == ((26,), "head")
    assert plan.rules["bert.encoder.layer.0.attention.output.dense"].parts == ((4, 4),)
    assert "token_type" in " ".join(plan.replicated)
    assert "no rule for this linear layer (16 -> 16)" in plan.replicated["cls.predictions.transform.dense.weight"]
    attributes = {"num_attention_heads": 2, "all_head_size": 8}
    assert plan.attributes["bert.encoder.layer.1.attention.self"] == attributes


def test_t5_bias_by_heads_and_two_stacks() -> None:
    plan = planned("t5", sequence_parallel=True)
    bias = plan.rules["encoder.block.0.layer.0.SelfAttention.relative_attention_bias"]
    assert (bias.style, bias.parts) == ("embedding_colwise", ((4, 1),))
    assert plan.blocks == (("encoder.block.0", "encoder.block.1"), ("decoder.block.0", "decoder.block.1"))
    assert plan.attributes["decoder.block.1.layer.1.EncDecAttention"] == {"n_heads": 2, "inner_dim": 8}
    assert "decoder.block.0.layer.1.EncDecAttention" in plan.cross_attention
    assert {plan.rules[fqn].style for fqn in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")} == {"vocab"}


def test_torch_transformer() -> None:
    """Protects attention as a whole, and blocks whose norms stand beside linear1 and linear2."""
    plan = planned("torch", sequence_parallel=True)
    assert plan.rules["decoder.layers.0.multihead_attn"].parts == ((4, 4),) * 3
    assert plan.gather_at[:2] == ("encoder.layers.0.self_attn", "encoder.layers.0.linear1")
    assert "encoder.layers.0.self_attn.out_proj.bias" in plan.partial
    shapes = {row.fqn: row.local_shape for row in plan.rows}
    assert shapes["encoder.layers.0.self_attn.in_proj_weight"] == (24, 16)
    assert shapes["encoder.layers.0.self_attn.out_proj.weight"] == (16, 8)
    assert plan.cross_attention == ("decoder.layers.0.multihead_attn", "decoder.layers.1.multihead_attn")


def test_attention_with_other_widths_and_learned_positions() -> None:
    """Protects every parameter that nn.MultiheadAttention may have."""
    attention = nn.MultiheadAttention(8, 4, add_bias_kv=True, kdim=6, vdim=10)
    facts = read_facts(nn.ModuleDict({"attention": attention}))
    plan = plan_tensor_parallel(facts, degree=2)
    covered(facts, plan)
    shapes = {row.fqn.removeprefix("attention."): row.local_shape for row in plan.rows}
    assert shapes == {
        "q_proj_weight": (4, 8),
        "k_proj_weight": (4, 6),
        "v_proj_weight": (4, 10),
        "in_proj_bias": (12,),
        "bias_k": (1, 1, 4),
        "bias_v": (1, 1, 4),
        "out_proj.weight": (8, 4),
        "out_proj.bias": (8,),
    }


def test_bare_attention() -> None:
    """Protects a model that is nothing but nn.MultiheadAttention: its name is empty."""
    facts = read_facts(nn.MultiheadAttention(8, 4))
    plan = plan_tensor_parallel(facts, degree=4)
    covered(facts, plan)
    assert {row.fqn: row.local_shape for row in plan.rows} == {
        "in_proj_weight": (6, 8),
        "in_proj_bias": (6,),
        "out_proj.weight": (8, 2),
        "out_proj.bias": (8,),
    }


def test_mixtral_is_refused() -> None:
    model = hugging_face("MixtralForCausalLM", "MixtralConfig", num_key_value_heads=2, num_local_experts=4)
    with pytest.raises(ModelError, match=r"layers\.0\.mlp \(MixtralSparseMoeBlock\) is a mixture of experts"):
        plan_tensor_parallel(read_facts(model), degree=2)


class Scaled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Renamed(nn.Linear):
    """A linear layer under another name."""


class Odd(nn.Module):
    """One of each thing that facts must tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.causal = True
        self.rate = 0.5
        self.plain = nn.Linear(4, 6)
        self.scaled = Scaled(4, 6)
        self.renamed = Renamed(4, 6, bias=False)
        self.patched = nn.Linear(4, 6)
        self.patched.forward = lambda input: input  # type: ignore[method-assign]
        self.normalised = parametrizations.weight_norm(nn.Linear(4, 6))
        self.sparse = nn.Embedding(5, 4, sparse=True)
        self.again = self.plain
        self.tied = nn.Linear(4, 6)
        self.tied.weight = self.plain.weight
        self.norm = nn.RMSNorm(4)
        self.batch_norm = nn.BatchNorm1d(4)
        self.table = nn.Parameter(torch.zeros(3, 4), requires_grad=False)


def test_facts_tell_stock_layers_from_others() -> None:
    """Protects layers whose weight is not what it seems: another forward, a patched one, a computed weight."""
    facts = read_facts(Odd())
    found = facts.by_fqn
    assert {fqn: found[fqn].exact for fqn in ("plain", "scaled", "renamed", "patched", "normalised")} == {
        "plain": True,
        "scaled": False,
        "renamed": True,
        "patched": False,
        "normalised": False,
    }
    assert {found[fqn].kind for fqn in ("plain", "scaled", "renamed", "patched", "normalised")} == {"linear"}
    assert (found["norm"].kind, found["batch_norm"].kind) == ("norm", "other")
    assert found["sparse"].options == ("sparse=True",)
    assert found["plain"].aliases == ("again",)
    assert found["tied"].tied == {"weight": ("plain.weight", "again.weight")}
    assert facts.first_names["again.weight"] == facts.first_names["tied.weight"] == "plain.weight"
    assert found[""].parameters == {"table": (3, 4)}
    assert found[""].trainable == frozenset()
    assert found["plain"].trainable == {"weight", "bias"}
    assert not found["renamed"].has_bias
    assert facts.attributes[""] == {"num_heads": 4}
    assert facts.model_plan is None


def test_the_plan_of_a_model_inside_a_model_gets_the_names_of_the_whole() -> None:
    """Protects a wrapper around a model that brings its plan along."""
    inner = llama(tie=False)
    facts = read_facts(nn.ModuleDict({"policy": inner, "value": nn.Linear(16, 1, device="meta")}))
    assert facts.model_plan is not None
    assert facts.model_plan["policy.model.layers.*.self_attn.q_proj"] == "colwise"
    plan = plan_tensor_parallel(facts, degree=2)
    assert plan.rules["policy.lm_head"].style == "head"
    assert "value" not in plan.rules
