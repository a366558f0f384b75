"""Rules of tensor parallelism from facts: sources, pairs, heads, refusals, cuts that cover each weight."""

from __future__ import annotations

from ast import literal_eval
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.contracts.tensor_facts import ModelFacts, ModuleFacts
from hybrid.contracts.tensor_plan import TensorPlan
from hybrid.contracts.tensor_rules import plan_tensor_parallel, working_degrees
from hybrid.errors import ModelError, StrategyError

Modules = list[ModuleFacts]


def linear(fqn: str, in_features: int, out_features: int, *, bias: bool = True, **more: Any) -> ModuleFacts:
    shapes: dict[str, tuple[int, ...]] = {"weight": (out_features, in_features)}
    if bias:
        shapes["bias"] = (out_features,)
    facts: dict[str, Any] = {"class_name": "Linear", "kind": "linear", "parameters": shapes} | more
    return ModuleFacts(fqn=fqn, in_features=in_features, out_features=out_features, has_bias=bias, **facts)


def conv1d(fqn: str, in_features: int, out_features: int) -> ModuleFacts:
    shapes = {"weight": (in_features, out_features), "bias": (out_features,)}
    return linear(fqn, in_features, out_features, class_name="Conv1D", kind="conv1d", parameters=shapes)


def embedding(fqn: str, rows: int, columns: int, **more: Any) -> ModuleFacts:
    return ModuleFacts(
        fqn=fqn,
        class_name=more.pop("class_name", "Embedding"),
        kind="embedding",
        in_features=rows,
        out_features=columns,
        parameters={"weight": (rows, columns)},
        **more,
    )


def norm(fqn: str, width: int) -> ModuleFacts:
    shapes = {"weight": (width,), "bias": (width,)}
    return ModuleFacts(fqn=fqn, class_name="LayerNorm", kind="norm", parameters=shapes)


def other(fqn: str, class_name: str = "Block", **shapes: tuple[int, ...]) -> ModuleFacts:
    return ModuleFacts(fqn=fqn, class_name=class_name, parameters=shapes)


def facts(
    modules: Iterable[ModuleFacts],
    attributes: Mapping[str, Mapping[str, int]] | None = None,
    model_plan: Mapping[str, str] | None = None,
    root: ModuleFacts | None = None,
) -> ModelFacts:
    return ModelFacts(
        class_name="Net",
        modules=(root or other("", "Net"), *modules),
        attributes=attributes or {},
        model_plan=model_plan,
    )


def tied(head: ModuleFacts, to: str) -> ModuleFacts:
    return replace(head, tied={"weight": (f"{to}.weight",)})


def llama_block(prefix: str, *, hidden: int = 12, heads: int = 6, kv_heads: int = 6, ffn: int = 24) -> Modules:
    size = hidden // heads
    return [
        other(prefix),
        norm(f"{prefix}.norm1", hidden),
        other(f"{prefix}.attn", "Attention"),
        linear(f"{prefix}.attn.q_proj", hidden, heads * size),
        linear(f"{prefix}.attn.k_proj", hidden, kv_heads * size),
        linear(f"{prefix}.attn.v_proj", hidden, kv_heads * size),
        linear(f"{prefix}.attn.o_proj", heads * size, hidden),
        norm(f"{prefix}.norm2", hidden),
        other(f"{prefix}.mlp", "MLP"),
        linear(f"{prefix}.mlp.gate_proj", hidden, ffn),
        linear(f"{prefix}.mlp.up_proj", hidden, ffn),
        linear(f"{prefix}.mlp.down_proj", ffn, hidden),
    ]


def llama(num_blocks: int = 2, *, vocabulary: int = 11, **sizes: int) -> ModelFacts:
    hidden, heads = sizes.get("hidden", 12), sizes.get("heads", 6)
    modules: Modules = [embedding("tok_emb", vocabulary, hidden), other("blocks", "ModuleList")]
    attributes = {}
    for index in range(num_blocks):
        modules += llama_block(f"blocks.{index}", **sizes)
        kv_heads = sizes.get("kv_heads", 6)
        attributes[f"blocks.{index}.attn"] = {
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": hidden // heads,
            "num_key_value_groups": heads // kv_heads,
            "layer_idx": index,
        }
    modules += [norm("norm", hidden), linear("lm_head", hidden, vocabulary, bias=False)]
    return facts(modules, attributes)


def gpt(num_blocks: int = 2, *, hidden: int = 12, heads: int = 6, tie: bool = True) -> ModelFacts:
    """A hand-written GPT: no name is known but that of its embedding."""
    modules: Modules = [
        replace(embedding("wte", 11, hidden)),
        embedding("wpe", 7, hidden),
        other("blocks", "ModuleList"),
    ]
    attributes = {}
    for index in range(num_blocks):
        prefix = f"blocks.{index}"
        modules += [
            other(prefix),
            norm(f"{prefix}.ln1", hidden),
            other(f"{prefix}.attn", "Attention"),
            linear(f"{prefix}.attn.qkv", hidden, 3 * hidden),
            linear(f"{prefix}.attn.proj", hidden, hidden),
            norm(f"{prefix}.ln2", hidden),
            other(f"{prefix}.ffn", "Sequential"),
            linear(f"{prefix}.ffn.0", hidden, 4 * hidden),
            other(f"{prefix}.ffn.1", "GELU"),
            linear(f"{prefix}.ffn.2", 4 * hidden, hidden),
        ]
        attributes[f"{prefix}.attn"] = {"n_head": heads, "width": hidden}
    modules += [norm("ln_f", hidden), tied(linear("unembed", hidden, 11, bias=False), "wte")]
    if tie:
        modules[0] = replace(modules[0], tied={"weight": ("unembed.weight",)})
    return facts(modules, attributes)


GPT_PLAN: dict[str, Any] = {
    "blocks.*.attn.qkv": {"style": "colwise", "fused": 3, "heads": "n_head", "divide": ["n_head", "width"]},
    "blocks.*.attn.proj": "rowwise",
    "blocks.*.ffn.0": "colwise",
    "blocks.*.ffn.2": "rowwise",
}


def covered(model: ModelFacts, plan: TensorPlan) -> None:
    """Each element of each cut dim is held by exactly as many ranks as the rule says."""
    for fqn, rule in plan.rules.items():
        module = model.by_fqn[fqn]
        held: dict[tuple[str, int, int], Counter[int]] = {}
        for rank in range(plan.degree):
            for name, cut in rule.cuts(module, rank=rank, degree=plan.degree).items():
                count = held.setdefault((name, cut.dim, cut.global_size), Counter())
                count.update(at for start, length in cut.pieces for at in range(start, start + length))
                assert cut.copies == rule.copies
        for (name, dim, size), count in held.items():
            assert count == Counter(dict.fromkeys(range(size), rule.copies)), (fqn, name)
            if name in module.parameters:
                assert module.parameters[name][dim] == size


def problem(model: ModelFacts, plan: Mapping[str, Any] | None = None, *, degree: int = 2, **more: Any) -> str:
    with pytest.raises((StrategyError, ModelError)) as caught:
        plan_tensor_parallel(model, degree=degree, plan=plan, **more)
    return str(caught.value)


# ---------------------------------------------------------------- sources


def test_llama_like_names_give_columns_rows_vocabulary_and_head() -> None:
    """Protects the commonest shape of model without any plan, and what its modules keep as numbers."""
    plan = plan_tensor_parallel(llama(), degree=3)
    assert {fqn: rule.style for fqn, rule in plan.rules.items() if not fqn.startswith("blocks.1")} == {
        "tok_emb": "vocab",
        "blocks.0.attn.q_proj": "colwise",
        "blocks.0.attn.k_proj": "colwise",
        "blocks.0.attn.v_proj": "colwise",
        "blocks.0.attn.o_proj": "rowwise",
        "blocks.0.mlp.gate_proj": "colwise",
        "blocks.0.mlp.up_proj": "colwise",
        "blocks.0.mlp.down_proj": "rowwise",
        "lm_head": "head",
    }
    assert plan.rules["blocks.1.attn.q_proj"].parts == ((6, 2),)
    assert plan.rules["blocks.1.mlp.down_proj"].parts == ((24, 1),)
    assert plan.rules["blocks.1.attn.q_proj"].source == "known family: Llama-like names"
    # The number of query heads per kv head stays; a layer's index is no head count.
    assert plan.attributes["blocks.1.attn"] == {"num_heads": 2, "num_kv_heads": 2}
    assert plan.replicated["blocks.0.attn.o_proj.bias"] == "bias of a row layer, added once to the sum"
    assert plan.replicated["norm.weight"] == "norm"
    covered(llama(), plan)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_fewer_kv_heads_than_ranks_are_copied(degree: int) -> None:
    """BC-18: grouped queries on more ranks than kv heads: neighbours hold the same kv head, and all heads are there."""
    model = llama(hidden=16, heads=8, kv_heads=2, ffn=32)
    plan = plan_tensor_parallel(model, degree=degree)
    covered(model, plan)
    if degree == 1:
        assert plan.rules == {}
        return
    copies = max(1, degree // 2)
    assert [plan.rules[f"blocks.0.attn.{name}"].copies for name in ("q_proj", "k_proj", "v_proj", "o_proj")] == [
        1,
        copies,
        copies,
        1,
    ]
    held = {"num_heads": 8 // degree, "num_kv_heads": max(1, 2 // degree)}
    if degree > 2:
        held["num_key_value_groups"] = 8 // degree
    assert plan.attributes["blocks.0.attn"] == held


def test_the_users_plan_comes_before_the_models_own_and_that_before_known_names() -> None:
    """Protects the order of sources: the first that knows a layer wins, layer by layer."""
    own = {"blocks.*.mlp.gate_proj": "colwise", "blocks.*.mlp.up_proj": "colwise", "blocks.*.mlp.down_proj": "rowwise"}
    model = replace(llama(), model_plan=own)
    sources = {
        fqn: rule.source
        for fqn, rule in plan_tensor_parallel(
            model, degree=2, plan={"blocks.*.mlp.up_proj": "colwise", "tok_emb": "replicated"}
        ).rules.items()
    }
    assert sources["blocks.0.mlp.up_proj"] == "your plan: 'blocks.*.mlp.up_proj'"
    assert sources["blocks.0.mlp.gate_proj"] == "the model's own plan: 'blocks.*.mlp.gate_proj'"
    assert sources["blocks.0.attn.q_proj"] == "known family: Llama-like names"
    assert "tok_emb" not in sources


def test_a_hand_written_model_is_cut_by_the_users_plan() -> None:
    """Protects fused q, k and v of a user's own attention, and the attributes that its forward reads."""
    model = gpt()
    plan = plan_tensor_parallel(model, degree=3, plan=GPT_PLAN)
    assert plan.rules["blocks.0.attn.qkv"].parts == ((6, 2),) * 3
    assert plan.rules["blocks.0.attn.proj"].parts == ((6, 2),)
    assert plan.attributes == {f"blocks.{index}.attn": {"n_head": 2, "width": 4} for index in (0, 1)}
    assert {fqn: plan.rules[fqn].style for fqn in ("wte", "unembed")} == {"wte": "vocab", "unembed": "head"}
    assert "wpe" not in plan.rules
    covered(model, plan)
    (row,) = [row for row in plan.table() if row[0] == "blocks.1.attn.qkv.weight"]
    assert row == (
        "blocks.1.attn.qkv.weight",
        "36 × 12",
        "12 × 12",
        "colwise, 3 fused parts, 6 heads",
        "your plan: 'blocks.*.attn.qkv'",
    )
    # A tied weight is one row.
    assert [row.fqn for row in plan.rows if row.rule in {"vocab", "head"}] == ["wte.weight"]


def test_head_counts_are_found_without_heads_and_divide() -> None:
    """Protects plans that say only the style: the attributes beside the layer tell the heads, and are divided."""
    short = GPT_PLAN | {"blocks.*.attn.qkv": {"style": "colwise", "fused": 3}}
    plan = plan_tensor_parallel(gpt(), degree=2, plan=short)
    assert plan.rules["blocks.0.attn.qkv"].parts == ((6, 2),) * 3
    assert plan.attributes["blocks.0.attn"] == {"n_head": 3}


def test_heads_of_unequal_fused_parts() -> None:
    """Protects q, k and v of grouped attention in one weight: each part by its own heads, none copied."""
    fused = [replace(one, out_features=12 + 8) if one.name == "qkv" else one for one in gpt().modules]
    model = replace(gpt(), modules=tuple(fused))
    entry = {"style": "colwise", "fused": [12, 4, 4], "heads": 6, "divide": []}
    plan = plan_tensor_parallel(model, degree=2, plan=GPT_PLAN | {"blocks.*.attn.qkv": entry})
    assert plan.rules["blocks.0.attn.qkv"].parts == ((6, 2), (2, 2), (2, 2))
    assert plan.attributes == {}
    message = problem(model, GPT_PLAN | {"blocks.*.attn.qkv": entry}, degree=6)
    assert "num_kv_heads=2" in message
    assert "cannot be copied" in message


@pytest.mark.parametrize(
    "divide",
    [
        {"blocks.*.attn.qkv": {"style": "colwise", "fused": 3, "divide": ["attn.n_head"]}},
        {"blocks.*.attn": {"divide": "n_head"}},
    ],
    ids=["dotted", "entry-of-the-module"],
)
def test_attributes_to_divide_by_a_path_or_an_entry_of_their_module(divide: Mapping[str, Any]) -> None:
    """Protects attributes that do not stand in the parent of a layer."""
    plan = plan_tensor_parallel(
        gpt(), degree=2, plan=GPT_PLAN | {"blocks.*.attn.qkv": {"style": "colwise", "fused": 3}} | divide
    )
    assert plan.attributes["blocks.1.attn"] == {"n_head": 3}


@pytest.mark.parametrize(
    ("word", "style"),
    [
        ("colwise", "colwise"),
        ("ColwiseParallel", "colwise"),
        ("column", "colwise"),
        ("ColumnParallelLinear", "colwise"),
    ],
)
def test_words_of_other_frameworks(word: str, style: str) -> None:
    """Protects plans that come from Hugging Face, torch or Megatron."""
    plan = plan_tensor_parallel(gpt(), degree=2, plan=GPT_PLAN | {"blocks.*.ffn.0": word})
    assert plan.rules["blocks.0.ffn.0"].style == style


def test_gathered_columns_and_split_rows_need_no_partner() -> None:
    """Protects layers whose output is looked at whole in between (a norm over all heads)."""
    plan = plan_tensor_parallel(
        gpt(),
        degree=2,
        plan=GPT_PLAN
        | {
            "blocks.*.ffn.0": {"style": "colwise", "gather_output": True},
            "blocks.*.ffn.2": "rowwise_split_input",
        },
    )
    assert plan.rules["blocks.0.ffn.0"].gather_output
    assert plan.rules["blocks.0.ffn.2"].split_input
    covered(gpt(), plan)


def test_gpt_2_and_its_cross_attention() -> None:
    """Protects Conv1D: weights lie as (in, out), q, k and v in one of them, or k and v beside q."""
    modules: Modules = [
        other("h", "ModuleList"),
        other("h.0"),
        other("h.0.attn", "GPT2Attention"),
        conv1d("h.0.attn.c_attn", 8, 24),
        conv1d("h.0.attn.c_proj", 8, 8),
        other("h.0.crossattention", "GPT2Attention"),
        conv1d("h.0.crossattention.c_attn", 8, 16),
        conv1d("h.0.crossattention.q_attn", 8, 8),
        conv1d("h.0.crossattention.c_proj", 8, 8),
        other("h.0.mlp", "GPT2MLP"),
        conv1d("h.0.mlp.c_fc", 8, 32),
        conv1d("h.0.mlp.c_proj", 32, 8),
    ]
    numbers = {"num_heads": 4, "head_dim": 2, "split_size": 8, "embed_dim": 8}
    model = facts(modules, {"h.0.attn": numbers, "h.0.crossattention": numbers})
    plan = plan_tensor_parallel(model, degree=2)
    cuts = plan.rules["h.0.attn.c_attn"].cuts(model.by_fqn["h.0.attn.c_attn"], rank=1, degree=2)
    assert cuts["weight"].dim == 1
    assert cuts["weight"].pieces == ((4, 4), (12, 4), (20, 4))
    assert cuts["bias"].pieces == ((4, 4), (12, 4), (20, 4))
    assert plan.rules["h.0.crossattention.c_attn"].parts == ((4, 2),) * 2
    assert plan.rules["h.0.mlp.c_proj"].cuts(model.by_fqn["h.0.mlp.c_proj"], rank=0, degree=2)["weight"].dim == 0
    assert plan.attributes["h.0.attn"] == {"num_heads": 2, "split_size": 4}
    assert plan.cross_attention == ("h.0.crossattention",)
    covered(model, plan)


def test_the_name_c_attn_alone_does_not_say_how_q_k_and_v_lie() -> None:
    """Protects models that lay them head by head under GPT-2's names in a Linear: a wrong cut would be silent."""
    modules = [other("attn", "Attention"), linear("attn.c_attn", 8, 24), linear("attn.c_proj", 8, 8)]
    assert "no rule is known" in problem(facts(modules, {"attn": {"num_heads": 4}}))


def test_the_row_layer_may_stand_beside_the_module_of_its_columns() -> None:
    """Protects BERT: attention.self holds the columns, attention.output the row; intermediate and output likewise."""
    modules: Modules = [
        other("layer", "ModuleList"),
        other("layer.0"),
        other("layer.0.attention"),
        other("layer.0.attention.self", "BertSelfAttention"),
        *(linear(f"layer.0.attention.self.{name}", 8, 8) for name in ("query", "key", "value")),
        other("layer.0.attention.output"),
        linear("layer.0.attention.output.dense", 8, 8),
        norm("layer.0.attention.output.LayerNorm", 8),
        other("layer.0.intermediate"),
        linear("layer.0.intermediate.dense", 8, 32),
        other("layer.0.output"),
        linear("layer.0.output.dense", 32, 8),
        norm("layer.0.output.LayerNorm", 8),
    ]
    numbers = {"num_attention_heads": 4, "attention_head_size": 2, "all_head_size": 8}
    model = facts(modules, {"layer.0.attention.self": numbers})
    plan = plan_tensor_parallel(model, degree=4, sequence_parallel=True)
    assert plan.rules["layer.0.attention.output.dense"].parts == ((4, 2),)
    assert plan.attributes == {"layer.0.attention.self": {"num_attention_heads": 1, "all_head_size": 2}}
    assert plan.gather_at == ("layer.0.attention.self", "layer.0.intermediate")
    assert plan.blocks == (("layer.0",),)
    assert set(plan.partial) == {
        f"layer.0.{name}"
        for name in (
            "attention.output.dense.bias",
            "attention.output.LayerNorm.weight",
            "attention.output.LayerNorm.bias",
            "output.dense.bias",
            "output.LayerNorm.weight",
            "output.LayerNorm.bias",
        )
    }


def test_norms_of_heads_are_whole_with_a_summed_gradient() -> None:
    """BC-17: a norm applied to each cut head sees only the local heads, whether or not a plan says so."""
    extra = [norm("blocks.0.attn.q_norm", 2), norm("blocks.0.attn.k_norm", 2)]
    model = llama(1)
    model = replace(model, modules=(*model.modules, *extra))
    plan = plan_tensor_parallel(model, degree=2)
    assert plan.rules["blocks.0.attn.q_norm"].style == "partial"
    assert set(plan.partial) == {f"blocks.0.attn.{name}_norm.{kind}" for name in "qk" for kind in ("weight", "bias")}
    assert "its gradient is summed" in plan.replicated["blocks.0.attn.q_norm.weight"]


def test_a_norm_over_all_heads_keeps_its_attention_whole() -> None:
    """Protects against a norm over a part of its width: whole where we choose, refused in a plan."""
    model = llama(1)
    model = replace(model, modules=(*model.modules, norm("blocks.0.attn.q_norm", 12)))
    plan = plan_tensor_parallel(model, degree=2)
    assert {fqn for fqn in plan.rules if "attn" in fqn} == set()
    assert "q_norm normalises over the whole width" in plan.replicated["blocks.0.attn.q_proj.weight"]
    styles = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise") | {"o_proj": "rowwise"}
    message = problem(model, {f"blocks.*.attn.{name}": style for name, style in styles.items()})
    assert "normalises over the whole width of 12" in message


def test_a_parameter_beside_cut_layers_needs_a_word_from_the_user() -> None:
    """BC-17: a scale on each head and a scale on the input look alike; the wrong guess would be a wrong gradient."""
    model = llama(1)
    modules = [
        other(one.fqn, one.class_name, scale=(2,)) if one.fqn == "blocks.0.attn" else one for one in model.modules
    ]
    model = replace(model, modules=tuple(modules))
    assert "{'blocks.*.attn.scale': 'partial'}" in problem(model)
    plan = plan_tensor_parallel(model, degree=2, plan={"blocks.*.attn.scale": "partial"})
    assert set(plan.partial) == {"blocks.0.attn.scale"}
    plan = plan_tensor_parallel(model, degree=2, plan={"blocks.*.attn.scale": "replicated"})
    assert plan.partial == {}
    assert plan.replicated["blocks.0.attn.scale"] == "your plan: 'blocks.*.attn.scale'"


def test_a_vocabulary_is_cut_unevenly_and_not_padded() -> None:
    """BC-19: 11 rows on 4 ranks are 3 + 3 + 3 + 2."""
    model = llama(hidden=16, heads=8, kv_heads=8, ffn=32)
    plan = plan_tensor_parallel(model, degree=4)
    lengths = [
        plan.rules["lm_head"].cuts(model.by_fqn["lm_head"], rank=rank, degree=4)["weight"].local_size
        for rank in range(4)
    ]
    assert lengths == [3, 3, 3, 2]
    covered(model, plan)


# ---------------------------------------------------------------- refusals


def test_a_model_without_rules_is_refused_with_a_plan_that_works() -> None:
    """Protects the way out: the plan in the message is one that the rules accept."""
    message = problem(gpt())
    assert "no rule is known for cutting the layers of Net" in message
    assert "blocks.*.attn.qkv: 12 -> 36, 2 times" in message
    start = message.index('["plan"] = ') + len('["plan"] = ')
    pasted = literal_eval(message[start:])
    plan = plan_tensor_parallel(gpt(), degree=2, plan=pasted)
    assert plan.rules["blocks.1.attn.qkv"].parts == ((6, 2),) * 3
    assert plan.attributes["blocks.1.attn"] == {"n_head": 3}
    assert plan.rules["blocks.1.ffn.2"].style == "rowwise"


def test_a_model_without_linear_layers_is_refused() -> None:
    assert "no linear layers" in problem(facts([other("conv", "Conv2d", weight=(4, 3, 2, 2))]))


@pytest.mark.parametrize(
    "experts",
    [
        [other("moe", "SwitchMoE"), linear("moe.gate", 4, 2)],
        [other("mlp"), other("mlp.experts", "ModuleList"), linear("mlp.experts.0", 4, 8)],
        [other("mlp", "FancySparseMoeBlock"), other("mlp.experts", "FancyExperts", up=(2, 8, 4))],
    ],
)
def test_a_mixture_of_experts_is_refused(experts: Modules) -> None:
    """Protects experts from being cut as if every token went through them."""
    message = problem(facts(experts))
    assert "expert parallel is not available" in message
    assert "degree = 1" in message
    assert working_degrees(facts(experts)) == [1]


def test_degrees_that_do_not_fit_are_told_with_those_that_do() -> None:
    """BC-18: head by head, not feature by feature, before anything starts; each number once for all blocks."""
    model = llama(hidden=16, heads=8, kv_heads=2, ffn=24, vocabulary=3)
    message = problem(model, degree=16)
    assert message.startswith("4 problems")
    for words in (
        "degree = 16 does not divide num_heads=8 of blocks.*.attn; degrees that work for this model: 1, 2",
        "degree = 16 does not divide width 24 between gate_proj and down_proj of blocks.*.mlp",
        "is more than vocabulary 3 of tok_emb",
        "is more than vocabulary 3 of lm_head",
    ):
        assert words in message
    assert "blocks.0" not in message
    assert working_degrees(model) == [1, 2]
    message = problem(llama(hidden=18, heads=9, kv_heads=3, ffn=36), degree=2)
    assert "degree = 2 does not divide num_heads=9" in message
    assert "neither divides nor is a multiple of num_kv_heads=3" in message
    message = problem(llama(hidden=18, heads=9, kv_heads=6, ffn=36), degree=9)
    assert "9 query heads of blocks.*.attn are not a multiple of its 6 key/value heads" in message


@given(
    st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([1, 2, 3, 6]), st.sampled_from([12, 18, 30]), st.integers(2, 9)
)
@settings(deadline=None, max_examples=60)
def test_every_working_degree_covers_each_weight_and_no_other_is_accepted(
    kv_factor: int, kv_heads: int, ffn: int, vocabulary: int
) -> None:
    """Protects against lost or doubled rows at any degree, and against a list of degrees that promises too much."""
    heads = kv_factor * kv_heads
    model = llama(1, hidden=2 * heads, heads=heads, kv_heads=kv_heads, ffn=ffn, vocabulary=vocabulary)
    working = working_degrees(model)
    for degree in range(2, 13):
        if degree in working:
            covered(model, plan_tensor_parallel(model, degree=degree))
        else:
            assert "degrees that work for this model" in problem(model, degree=degree)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"blocks.*.atn.qkv": "colwise"}, ["'blocks.*.atn.qkv' matches no module; nearest: 'blocks.*.attn.qkv'"]),
        ({"blocks.*.attn.qkv": "colwize"}, ["unknown style 'colwize'; did you mean 'colwise'?"]),
        ({"blocks.*.attn.qkv": {"style": "colwise", "fuse": 3}}, ["unknown key 'fuse'; did you mean 'fused'?"]),
        ({"blocks.*.attn.qkv": {"fused": 3}}, ["unknown style None; known: colwise"]),
        ({"blocks.*.attn.qkv": {"style": "colwise", "fused": 0}}, ["fused = 0: expected a number of parts"]),
        ({"blocks.*.attn.qkv": {"style": "colwise", "heads": -1}}, ["heads = -1: expected a number"]),
        ({"blocks.*.attn.proj": {"style": "rowwise", "gather_output": True}}, ["gather_output goes with 'colwise'"]),
        (
            {"blocks.0.**": "replicated"},
            ["'blocks.*.attn.qkv' and 'blocks.0.**' both match blocks.0.attn.qkv and ask for different things"],
        ),
        ({"wte": "rowwise"}, ["'rowwise' does not fit wte (Embedding); styles that do: vocab, embedding_colwise"]),
        ({"wte.weight": "vocab"}, ["'wte.weight' is a parameter", "such as 'wte'"]),
        (
            {"wte": "replicated", "unembed": "head"},
            ["are one parameter and must be cut alike", "unembed.weight is 'head'"],
        ),
        ({"blocks.*.attn.proj": "replicated"}, ["blocks.*.attn.qkv is 'colwise' (your plan", "no 'rowwise' layer"]),
        ({"blocks.*.attn.qkv": "replicated"}, ["blocks.*.attn.proj is 'rowwise' (your plan", "no 'colwise' layer"]),
        (
            {"blocks.*.ffn.0": {"style": "colwise", "gather_output": True}},
            ["blocks.*.ffn.2 is 'rowwise'", "'rowwise_split_input'"],
        ),
        (
            {"blocks.*.attn.qkv": {"style": "colwise", "fused": 5}},
            ["fused = 5 of blocks.*.attn.qkv does not divide its width 36"],
        ),
        ({"blocks.*.attn.qkv": {"style": "colwise", "fused": [12, 12]}}, ["12 + 12 = 24, but its width is 36"]),
        (
            {"blocks.*.attn.qkv": {"style": "colwise", "fused": 3, "heads": 5}},
            ["5 heads do not divide the width 12 of blocks.*.attn.qkv"],
        ),
        (
            {"blocks.*.attn.qkv": {"style": "colwise", "fused": 3, "heads": "heads"}},
            ["heads = 'heads' of blocks.*.attn.qkv: blocks.*.attn has no such attribute", "known: n_head, width"],
        ),
        (
            {"blocks.*.attn.qkv": {"style": "colwise", "fused": 3, "divide": ["n_heads"]}},
            ["divide = 'n_heads' of blocks.*.attn.qkv: blocks.*.attn has no such attribute", "known: n_head, width"],
        ),
        ({"blocks.*.attn": {"divide": ["heads"]}}, ["divide = 'heads' of blocks.*.attn: no such attribute"]),
    ],
)
def test_a_plan_that_does_not_fit(plan: Mapping[str, Any], words: list[str]) -> None:
    """Protects against a plan that is not followed: what is wrong, where, and what would fit."""
    message = problem(gpt(), GPT_PLAN | plan)
    for part in words:
        assert part in message


@pytest.mark.parametrize("entry", ["replicated", "colwise_gather_output"])
def test_layers_of_one_attention_are_cut_together(entry: str) -> None:
    """Protects against whole queries beside cut keys, whose shapes may fit by chance."""
    message = problem(llama(), {"blocks.*.attn.q_proj": entry})
    assert "blocks.*.attn.q_proj gives or takes whole activations (your plan" in message
    assert "blocks.*.attn.k_proj works on cut ones (known family" in message


def test_a_norm_of_heads_has_a_summed_gradient_whatever_the_plan_calls_it() -> None:
    model = llama(1)
    model = replace(model, modules=(*model.modules, norm("blocks.0.attn.q_norm", 2)))
    plan = plan_tensor_parallel(model, degree=2, plan={"blocks.*.attn.q_norm": "replicated"})
    assert set(plan.partial) == {"blocks.0.attn.q_norm.weight", "blocks.0.attn.q_norm.bias"}


def test_a_part_of_torch_attention_has_no_style_of_its_own() -> None:
    model = facts(
        [
            ModuleFacts(fqn="mha", class_name="MultiheadAttention", kind="attention", in_features=8, out_features=8),
            linear("mha.out_proj", 8, 8),
        ],
        {"mha": {"num_heads": 4, "head_dim": 2}},
    )
    assert "mha.out_proj is a part of nn.MultiheadAttention" in problem(model, {"**.out_proj": "rowwise"})


def test_all_problems_of_a_plan_come_at_once() -> None:
    message = problem(gpt(), GPT_PLAN | {"nothing": "colwise", "wte": "rowwise", "blocks.*.attn.proj": "replicated"})
    assert message.startswith("3 problems in the strategy:")


def test_a_layer_with_a_forward_of_its_own_is_not_cut() -> None:
    """Protects subclasses (quantised, adapted, normalised weights): nobody knows what they do with a cut weight."""
    model = llama(1)
    modules = [
        replace(one, exact=False, class_name="LowRankLinear") if one.name == "k_proj" else one for one in model.modules
    ]
    message = problem(replace(model, modules=tuple(modules)))
    assert "blocks.*.attn.k_proj (LowRankLinear) has a forward or a weight of its own" in message
    assert "'replicated'" in message


def test_an_odd_embedding_stays_whole_with_all_that_is_tied_to_it() -> None:
    """Protects scaled embeddings and sparse gradients: whole unless the plan insists, and then refused."""
    model = gpt()
    odd = replace(model.by_fqn["wte"], options=("sparse=True",))
    model = replace(model, modules=tuple(odd if one.fqn == "wte" else one for one in model.modules))
    plan = plan_tensor_parallel(model, degree=2, plan=GPT_PLAN)
    assert not {"wte", "unembed"} & plan.rules.keys()
    assert plan.replicated["wte.weight"] == "wte has sparse=True"
    assert "an embedding with sparse=True cannot be cut" in problem(
        model, GPT_PLAN | {"wte": "vocab", "unembed": "head"}
    )


def test_the_models_own_plan_may_ask_for_what_is_not_there() -> None:
    """Protects against leaving a layer out of the model's own plan in silence; what it does not have, it may name."""
    model = replace(gpt(), model_plan={"blocks.*.attn.qkv": "mla_kv_a_proj", "blocks.*.other": "colwise"})
    message = problem(model)
    assert "the model's own plan has 'mla_kv_a_proj' for blocks.0.attn.qkv, blocks.1.attn.qkv" in message
    plan = plan_tensor_parallel(model, degree=2, plan=GPT_PLAN)
    assert plan.rules["blocks.0.attn.qkv"].source.startswith("your plan")


def test_attention_without_a_number_of_heads_is_refused() -> None:
    """Protects against cutting through a head where only the configuration knows how many there are."""
    model = replace(llama(1), attributes={})
    message = problem(model)
    assert "the number of heads of blocks.*.attn (q_proj, k_proj, v_proj) is not in its attributes" in message
    layers = {f"blocks.*.attn.{name}": {"style": "colwise", "heads": 6} for name in ("q_proj", "k_proj", "v_proj")}
    plan = plan_tensor_parallel(model, degree=2, plan=layers)
    assert plan.rules["blocks.0.attn.o_proj"].parts == ((6, 2),)


def test_degree_1_cuts_nothing_but_still_reads_the_plan() -> None:
    plan = plan_tensor_parallel(gpt(), degree=1)
    assert plan.rules == {}
    assert set(plan.replicated) == {row.fqn for row in plan.rows}
    assert "matches no module" in problem(gpt(), {"nothing": "colwise"}, degree=1)


# ---------------------------------------------------------------- sequence parallel


def test_the_sequence_is_cut_between_blocks_and_gathered_at_attention_and_mlp() -> None:
    """Protects forwards that read x.shape: they see whole sequences; norms and row biases see parts (BC-17)."""
    plan = plan_tensor_parallel(llama(), degree=2, sequence_parallel=True)
    assert plan.blocks == (("blocks.0", "blocks.1"),)
    assert plan.gather_at == ("blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp")
    assert {fqn for fqn in plan.partial if fqn.startswith("blocks.1")} == {
        "blocks.1.norm1.weight",
        "blocks.1.norm1.bias",
        "blocks.1.norm2.weight",
        "blocks.1.norm2.bias",
        "blocks.1.attn.o_proj.bias",
        "blocks.1.mlp.down_proj.bias",
    }
    assert not any(fqn.startswith(("norm", "tok_emb", "lm_head")) for fqn in plan.partial)
    assert plan.rules["blocks.0.mlp.down_proj"].in_blocks
    assert not plan.rules["lm_head"].in_blocks


def test_a_layer_beside_norms_gathers_by_itself() -> None:
    """Protects blocks that hold linear1 and linear2 directly, as those of torch.nn: their norms work on parts."""
    modules: Modules = [
        other("layers", "ModuleList"),
        other("layers.0"),
        linear("layers.0.linear1", 4, 8),
        linear("layers.0.linear2", 8, 4),
        norm("layers.0.norm", 4),
    ]
    plan = plan_tensor_parallel(facts(modules), degree=2, sequence_parallel=True)
    assert plan.gather_at == ("layers.0.linear1",)
    assert "layers.0.norm.weight" in plan.partial


def test_a_sequential_of_layers_is_a_stack_by_itself() -> None:
    """BC-17: norm, column, row, norm in one Sequential: all of them work on parts of the sequence."""
    modules = [norm("0", 4), linear("1", 4, 8), other("2", "GELU"), linear("3", 8, 4), norm("4", 4)]
    model = facts(modules, root=other("", "Sequential"))
    plan = plan_tensor_parallel(model, degree=2, plan={"1": "colwise", "3": "rowwise"}, sequence_parallel=True)
    assert plan.blocks == (("0", "1", "2", "3", "4"),)
    assert plan.gather_at == ("1",)
    assert set(plan.partial) == {"0.weight", "0.bias", "3.bias", "4.weight", "4.bias"}


def test_lists_in_a_list_are_not_called_so_what_they_hold_is_the_stack() -> None:
    modules: Modules = [other("layers", "ModuleList")]
    for index in range(2):
        modules.append(other(f"layers.{index}", "ModuleList"))
        modules += [
            replace(one, fqn=one.fqn.replace("blocks.0", f"layers.{index}.0")) for one in llama_block("blocks.0")
        ]
    attributes = {f"layers.{index}.0.attn": {"num_heads": 6} for index in range(2)}
    plan = plan_tensor_parallel(facts(modules, attributes), degree=2, sequence_parallel=True)
    assert plan.blocks == (("layers.0.0", "layers.1.0"),)


def test_what_stays_whole_in_a_block_must_not_see_a_part_of_the_sequence() -> None:
    """Protects attention that no rule cuts: on a part of the sequence it would be wrong without an error."""
    model = gpt()
    message = problem(model, {"blocks.*.ffn.0": "colwise", "blocks.*.ffn.2": "rowwise"}, sequence_parallel=True)
    assert "sequence_parallel: layers that stay whole would see only a part of the sequence" in message
    assert "blocks.*.attn.qkv (no rule)" in message


def test_a_model_without_blocks_has_no_place_to_cut_the_sequence() -> None:
    modules = [other("mlp"), linear("mlp.fc1", 4, 8), linear("mlp.fc2", 8, 4)]
    assert "has no stack of blocks" in problem(facts(modules), sequence_parallel=True)
