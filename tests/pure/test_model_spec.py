"""Closed forms of transformers: published activation bytes, published sizes, work per token."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid.planner.architecture import Experts, LatentAttention
from hybrid.planner.model_spec import ModelSpec, Recompute
from hybrid.planner.transformer import deepseek_spec, gpt_spec, llama_spec, moe_spec

GPT = {"layers": 3, "hidden": 96, "heads": 6, "vocab": 101, "seq": 40}
LLAMA = {"layers": 3, "hidden": 96, "heads": 6, "kv_heads": 2, "ffn": 160, "vocab": 101, "seq": 40}

# Korthikanti et al., arXiv:2205.05198, table 2: bytes per layer.
TABLE_2: tuple[tuple[str, Recompute, bool, bool], ...] = (
    ("s*b*h*(34+5*a*s/h)", "none", False, False),
    ("s*b*h*(10+24/t+5*a*s/(h*t))", "none", True, False),
    ("s*b*h*(34/t+5*a*s/(h*t))", "none", True, True),
    ("s*b*h*(10+24/t)", "core_attention", True, False),
    ("s*b*h*34/t", "core_attention", True, True),
    ("s*b*h*2", "full", True, False),
)


@pytest.mark.parametrize(("formula", "recompute", "is_cut", "sequence_parallel"), TABLE_2)
@pytest.mark.parametrize(("hidden", "heads"), [(96, 6), (12288, 96)])
def test_a_gpt_block_keeps_what_the_published_table_says(
    formula: str, recompute: Recompute, is_cut: bool, sequence_parallel: bool, hidden: int, heads: int
) -> None:
    """The whole memory model rests on these sums; equal, not near."""
    s, b, t = 40, 2, 2 if is_cut else 1
    block = gpt_spec("gpt", **{**GPT, "hidden": hidden, "heads": heads, "seq": s}).blocks[0]
    expected = eval(formula, {"s": s, "b": b, "h": hidden, "a": heads, "t": t})
    got = block.activations[recompute, False].of(tokens=s * b, seq=s, tp=t, sequence_parallel=sequence_parallel)
    assert got == expected


def test_the_published_table_in_the_repository_is_the_one_tested() -> None:
    """A formula that changes in the data would go unnoticed."""
    path = Path(__file__).parents[3] / "shared/data/korthikanti_table2_activation_bytes_per_layer.csv"
    if not path.exists():
        pytest.skip("the data lies beside the repository")
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    published = [row["bytes_per_layer_formula"] for row in csv.DictReader(lines)]
    assert published == [formula for formula, *_ in TABLE_2]


def test_another_width_of_the_feed_forward_changes_34_to_18_and_4_per_width() -> None:
    """Most models have no ffn of 4·hidden."""
    block = gpt_spec("gpt", **GPT, ffn=200).blocks[0]
    assert block.activations["core_attention", False].of(tokens=1, seq=40) == 96 * 18 + 4 * 200


def test_a_fused_kernel_keeps_its_log_sum_exp_instead_of_scores() -> None:
    """Flash attention: 4 bytes per head and token more than recomputing core attention, none per pair."""
    block = gpt_spec("gpt", **GPT).blocks[0]
    flash, core = block.activations["none", True], block.activations["core_attention", False]
    assert flash.pairs == 0
    assert flash.of(tokens=7, seq=40) - core.of(tokens=7, seq=40) == 7 * 6 * 4


def test_selective_keeps_the_input_and_the_results_of_products() -> None:
    """As `recompute_configs.policy = "selective"` does; with the scores where they are a product of their own."""
    block = gpt_spec("gpt", **GPT).blocks[0]
    hidden, ffn, heads = 96, 384, 6
    kept = 2 * (hidden + 3 * hidden + hidden + ffn + hidden)  # input; q, k, v; out; up; down
    assert block.activations["selective", True].of(tokens=1, seq=40) == kept + 2 * hidden + 4 * heads
    assert block.activations["selective", False].of(tokens=1, seq=40) == kept + 2 * hidden + 2 * heads * 40


def test_a_runtime_that_keeps_gathered_inputs_has_them_undivided() -> None:
    """Under sequence parallel this runtime saves the gathered input of column layers; Megatron-LM gathers again."""
    kept = gpt_spec("gpt", **GPT).blocks[0].activations["none", True]
    again = kept.of(tokens=1, seq=40, tp=2, sequence_parallel=True)
    held = kept.of(tokens=1, seq=40, tp=2, sequence_parallel=True, keeps_gathered=True)
    assert held - again == 2 * 2 * 96 / 2  # two inputs of 2·h bytes, the other half of each
    assert kept.of(tokens=1, seq=40, keeps_gathered=True) == kept.of(tokens=1, seq=40)


def test_a_llama_block_saves_its_tensors_and_nothing_else() -> None:
    """SwiGLU, fewer heads of keys and values, no dropout, no biases: counted tensor by tensor."""
    block = llama_spec("llama", **LLAMA).blocks[0]
    h, kv, f = 96, 32, 160
    whole = 2 * (h + h + h + h)  # inputs of two norms, inputs of two groups of column layers
    cut = 2 * (h + 2 * kv + h) + 2 * (2 * f + f)  # q, k, v, result of attention; gate and up, their product
    kept = block.activations["core_attention", False]
    assert (kept.whole, kept.cut, kept.pairs) == (whole, cut, 0)
    assert block.activations["none", False].pairs == 2 * 6


def test_four_byte_activations_double_all_but_masks_and_statistics() -> None:
    """fp32 training; masks stay a byte, log-sum-exp stays fp32."""
    small, large = (gpt_spec("gpt", **GPT, activation_bytes=size).blocks[0] for size in (2, 4))
    masks, statistics = 2 * 96, 4 * 6
    for key, extra in ((("none", True), masks + statistics), (("core_attention", False), masks), (("full", True), 0)):
        two, four = small.activations[key].of(tokens=1, seq=1), large.activations[key].of(tokens=1, seq=1)
        assert four - extra == 2 * (two - extra), key


def _flops(spec: ModelSpec, seq: int) -> float:
    return spec.forward_flops_per_token(seq)


def test_flops_are_those_of_the_published_formula() -> None:
    """72·B·s·l·h²·(1 + s/6h + V/16lh) per step (arXiv:2104.04473) is three forwards."""
    layers, hidden, vocab, seq = 24, 2304, 51200, 2048
    spec = gpt_spec("gpt", layers=layers, hidden=hidden, heads=24, vocab=vocab, seq=seq)
    # 72·l·h²·V/16lh = 4.5·h·V is their count of the head; the products of forward and backward are 6·h·V.
    expected = 72 * layers * hidden**2 * (1 + seq / (6 * hidden)) + 6 * hidden * vocab
    assert spec.step_flops_per_token(seq) == pytest.approx(expected, rel=1e-12)


def test_experts_multiply_only_what_a_token_passes() -> None:
    """A mixture's work is that of its active experts; its parameters are those of all."""
    dimensions = {key: value for key, value in LLAMA.items() if key != "ffn"}
    moe = moe_spec("moe", num_experts=8, top_k=2, expert_ffn=64, **dimensions)
    dense = llama_spec("dense", **{**LLAMA, "ffn": 128})
    router = 3 * 2 * 96 * 8
    assert _flops(moe, 40) == _flops(dense, 40) + router
    block = moe.blocks[0]
    held = sum(parameter.num_elements for parameter in block.parameters if parameter.is_expert)
    assert held == 8 * 3 * 96 * 64
    assert block.num_parameters(ep=4) == block.num_parameters() - held * 3 // 4
    assert block.expert_rows == 2


def test_the_first_blocks_of_deepseek_are_dense() -> None:
    """Stages are cut between them, so they must not look like the others."""
    latent = LatentAttention(query_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=8)
    experts = Experts(num=4, top_k=2, ffn=24, shared_ffn=48, first_dense=1)
    spec = deepseek_spec("deepseek", **LLAMA, latent=latent, experts=experts)
    assert [block.expert_rows for block in spec.blocks] == [0, 2, 2]
    assert len(list(spec.looks())) == 4  # embedding, dense block, block with experts, head
    assert spec.blocks[0].attentions[0].value_dim == 8


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_key_and_value_heads_are_copied_not_cut_further(tp: int) -> None:
    """Two heads of keys over four ranks: each holds one."""
    spec = llama_spec("llama", **{**LLAMA, "hidden": 64, "heads": 4, "head_dim": 16})
    keys = next(one for one in spec.blocks[0].parameters if one.name == "self_attn.k_proj.weight")
    assert keys.local_elements(tp) == 32 * 64 // min(tp, 2)


def test_a_tied_head_counts_once() -> None:
    """The token table is one tensor however many modules hold it."""
    tied, untied = (gpt_spec("gpt", **GPT, is_tied=is_tied) for is_tied in (True, False))
    assert untied.num_parameters - tied.num_parameters == 101 * 96
    assert tied.units[-1].parameters[-1].tied_to == "embedding.embedding.word_embeddings.weight"


def test_equal_blocks_have_one_look() -> None:
    """The search prices each look once; a name in it would make hundreds."""
    spec = llama_spec("llama", **{**LLAMA, "layers": 50})
    assert [count for _, count in spec.looks()] == [1, 50, 1]
    assert replace(spec.blocks[0], name="") == replace(spec.blocks[49], name="")


@pytest.mark.parametrize("changes", [{"kernels": "eager"}, {"counts_statistics": True}, {"activation_bytes": 4}])
def test_what_kernels_keep_is_never_less_when_they_are_not_fused(changes: dict[str, Any]) -> None:
    """Each option adds bytes, and full recompute is left at the unit's input."""
    plain, other = llama_spec("llama", **LLAMA), llama_spec("llama", **LLAMA, **changes)
    for key in (("none", True), ("none", False)):
        assert other.blocks[0].activations[key].of(tokens=1, seq=40) > plain.blocks[0].activations[key].of(
            tokens=1, seq=40
        )
    assert other.blocks[0].activations["full", True].whole == 96 * changes.get("activation_bytes", 2)
