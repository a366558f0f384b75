"""Closed forms against the classes of Transformers: every parameter of each family, tiny and at full width."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hybrid
from hybrid.contracts.tensor_rules import plan_tensor_parallel
from hybrid.dry import run
from hybrid.errors import PlanError, StrategyError
from hybrid.planner.describe_model import spec_of
from hybrid.planner.model_spec import ModelSpec
from hybrid.planner.presets import preset_table
from hybrid.tensor.facts import read_facts

_SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 51}
_LLAMA: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0}
_LATENT: dict[str, Any] = {
    **{**_LLAMA, "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 24, "n_group": 1},
    **{"num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 8, "qk_nope_head_dim": 8},
    **{"qk_rope_head_dim": 4, "v_head_dim": 6, "topk_group": 1},
}
# Type -> fields; a name in front of a slash tells variants of one type apart.
FAMILIES: dict[str, dict[str, Any]] = {
    "bert/mlm": {**_SIZES, "intermediate_size": 64, "architectures": ["BertForMaskedLM"]},
    "bert/pretraining": {**_SIZES, "intermediate_size": 64, "architectures": ["BertForPreTraining"]},
    "deepseek_v2": {**_LATENT, "q_lora_rank": 12, "n_shared_experts": 2},
    "deepseek_v2/lite": {**_LATENT, "q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v3": {**_LATENT, "q_lora_rank": 12, "n_shared_experts": 1},
    "gemma": {**_LLAMA, "head_dim": 16},
    "gemma2": {**_LLAMA, "head_dim": 16},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 51, "n_positions": 16},
    "gpt_neo": {
        **{"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 51, "max_position_embeddings": 16},
        "attention_types": [[["global", "local"], 1]],
    },
    "gpt_neox": {**_SIZES, "intermediate_size": 64},
    "llama": _LLAMA,
    "llama/biases": {**_LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": _LLAMA,
    "mixtral": {**_LLAMA, "num_local_experts": 4},
    "opt": {**_SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 16},
    "opt/350m": {
        **{**_SIZES, "ffn_dim": 64, "word_embed_proj_dim": 16, "max_position_embeddings": 16},
        "do_layer_norm_before": False,
    },
    "phi3": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, "head_dim": 16},
    "qwen3_moe": {**_LLAMA, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2},
    "vit": {
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
        **{"image_size": 32, "patch_size": 8, "num_labels": 10},
    },
}
_CLASSES = {
    "bert/mlm": transformers.BertForMaskedLM,
    "bert/pretraining": transformers.BertForPreTraining,
    "vit": transformers.ViTForImageClassification,
}


def _config(family: str) -> Any:
    return transformers.AutoConfig.for_model(family.partition("/")[0], **FAMILIES[family])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Transformers warns of ids that lie outside of a tiny vocabulary."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)


def build(family: str) -> nn.Module:
    """A tiny model on the meta device."""
    with _quiet(), torch.device("meta"):
        config = _config(family)
        made = _CLASSES.get(family)
        return made(config) if made is not None else transformers.AutoModelForCausalLM.from_config(config)


def parameters_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name in the whole model -> shape; a tied one by its first name only."""
    return {
        f"{unit.name}.{one.name}" if unit.kind == "block" else one.name: one.shape
        for unit in spec.units
        for one in unit.parameters
        if one.tied_to is None
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_gives_the_parameters_that_the_model_has(family: str) -> None:
    """Names, shapes and what is tied: a strategy that is planned on them must fit the model."""
    with _quiet():
        spec = spec_of(_config(family))
    model = build(family)
    assert parameters_of(spec) == {name: tuple(one.shape) for name, one in model.named_parameters()}
    assert spec.num_parameters == sum(one.numel() for one in model.parameters())
    held = [(spec.units[at], spec.units[at].parameters[index]) for at, index in spec.registered(range(len(spec.units)))]
    order = [f"{unit.name}.{one.name}" if unit.kind == "block" else one.name for unit, one in held if not one.tied_to]
    assert order == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    "family", ["bert/mlm", "gemma2", "gpt2", "gpt_neo", "gpt_neox", "llama", "opt", "phi3", "qwen3"]
)
def test_the_sequence_is_cut_where_the_rules_of_the_runtime_cut_it(family: str) -> None:
    """A plan with sequence_parallel that the runtime refuses does not start (Phi-3: fused layers are gathered)."""
    with _quiet():
        spec = spec_of(_config(family))
    facts = read_facts(build(family))
    if spec.sequence_refusal:
        with pytest.raises(StrategyError, match="sequence_parallel"):
            plan_tensor_parallel(facts, degree=2, sequence_parallel=True)
    else:
        plan_tensor_parallel(facts, degree=2, sequence_parallel=True)
    rules = plan_tensor_parallel(facts, degree=2).rules.values()
    is_gathered = any(rule.gather_output for rule in rules if rule.style == "colwise")
    assert is_gathered == any(unit.gathered_forward for unit in spec.blocks)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2-xl",
        "opt-66b",
        "internlm-20b",
        "llama3-70b",
        "qwen3-235b-a22b",
        "gemma2-27b",
        "deepseek-v3",
        "deepseek-v2-lite",
        "gpt-neo-2.7b",
    ],
)
def test_a_preset_is_the_class_of_transformers_at_full_size(name: str) -> None:
    """Each family once, on the meta device: the count is not only what we believe to be published."""
    config = dict(preset_table()[name]["config"])
    with _quiet(), torch.device("meta"):
        made = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        # One block of each kind is enough; all are alike.
        made.num_hidden_layers = min(4, made.num_hidden_layers)
        if hasattr(made, "layer_types"):
            made.layer_types = made.layer_types[:4]
        model = transformers.AutoModelForCausalLM.from_config(made)
    spec = spec_of(name, layers=made.num_hidden_layers)
    assert spec.num_parameters == sum(one.numel() for one in model.parameters())


def test_what_a_configuration_leaves_out_is_told_and_what_is_absurd_refused() -> None:
    """Sizes filled in without a word plan another model; a million layers would be worked on for hours."""
    given = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 51}
    assumed, ignored = spec_of({**given, "quantization_config": {"quant_method": "fp8"}}).notes
    assert "num_hidden_layers = 32" in assumed
    assert "hidden_size" not in assumed
    assert "quantization_config (fp8) does not count" in ignored
    with pytest.raises(PlanError, match="num_hidden_layers = 1000000: expected at most 10,000"):
        spec_of({**given, "num_hidden_layers": 10**6})
    with pytest.raises(PlanError, match=r"has no model_type, which says what kind .* add it \(bert, .*config\.json"):
        spec_of({"hidden_size": 64})
    with pytest.raises(
        PlanError, match=r"'albert' is not among those .* give package\.module:factory.*did you mean bert"
    ):
        spec_of({**given, "model_type": "albert"})


# -- large layouts: what the planner says of a rank, and what that rank does -------------------------------------------

_WALKED: dict[str, dict[str, Any]] = {
    "llama": {
        **{"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 7, "num_attention_heads": 8},
        **{"num_key_value_heads": 4, "intermediate_size": 704, "vocab_size": 4099, "pad_token_id": 0},
    },
    "gpt2": {"model_type": "gpt2", "n_layer": 7, "n_embd": 256, "n_head": 8, "vocab_size": 4099, "n_positions": 128},
    "qwen3": {
        **{"model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 7, "num_attention_heads": 8, "head_dim": 32},
        **{"num_key_value_heads": 2, "intermediate_size": 704, "vocab_size": 4099, "tie_word_embeddings": True},
    },
    "gemma": {
        **{"model_type": "gemma", "hidden_size": 256, "num_hidden_layers": 7, "num_attention_heads": 8, "head_dim": 32},
        **{"num_key_value_heads": 1, "intermediate_size": 704, "vocab_size": 4099, "pad_token_id": 0},
    },
}
_WALKED["opt"] = {
    **{"model_type": "opt", "hidden_size": 256, "num_hidden_layers": 7, "num_attention_heads": 8, "ffn_dim": 704},
    **{"word_embed_proj_dim": 128, "max_position_embeddings": 128, "vocab_size": 4099},
}
_ODD: dict[str, dict[str, Any]] = {
    "short opt": {**_WALKED["opt"], "num_hidden_layers": 3, "tie_word_embeddings": False, "vocab_size": 4096},
    "bert": {
        **{"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4},
        **{"intermediate_size": 400, "vocab_size": 64, "max_position_embeddings": 64},
        "architectures": ["BertForMaskedLM"],
    },
    "short gpt2": {**_WALKED["gpt2"], "n_layer": 2, "vocab_size": 64},
    "one block": {**_WALKED["gpt2"], "n_layer": 1, "vocab_size": 4096},
    "untied gemma": {**_WALKED["gemma"], "num_hidden_layers": 2, "tie_word_embeddings": False, "vocab_size": 4096},
    "long llama": {**_WALKED["llama"], "num_hidden_layers": 8, "vocab_size": 4096},
}
_WORLD_SIZE = 16_384
_PRECISE: dict[str, Any] = {"amp": True, "amp_configs": {"dtype": "bfloat16", "level": "O2"}}
_CAST: dict[str, Any] = {"amp": True, "amp_configs": {"dtype": "bfloat16", "level": "O1"}}


def _layout(
    stage: int, tp: int, pp: int, *, share: int = 1, sp: bool = False, schedule: str = "1f1b", **more: Any
) -> dict[str, Any]:
    """`share`: replicas of what ZeRO cuts; more than one micro-batch everywhere."""
    settings: dict[str, Any] = {"micro_batch_size": 1, "accumulate_steps": 8 if pp > 1 else 2, **more}
    if stage:
        settings |= {
            "sharding": True,
            "sharding_configs": {"stage": stage, "shard_size": _WORLD_SIZE // tp // pp // share},
        }
    if tp > 1:
        settings |= {"tensor_parallel": True, "tensor_parallel_configs": {"degree": tp, "sequence_parallel": sp}}
    if pp > 1:
        settings |= {"pipeline": True, "pipeline_configs": {"degree": pp, "schedule": schedule}}
    return settings


def _run_by_run(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {
        "sharding_configs": {**settings["sharding_configs"], "reshard_after": "run"},
        "pipeline_configs": {**settings["pipeline_configs"], "virtual_stages": 2},
    }


def _fetched_ahead(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {
        "sharding_configs": {**settings["sharding_configs"], "prefetch": 3},
        "pipeline_configs": {**settings["pipeline_configs"], "virtual_stages": 2},
    }


def _offloaded(settings: dict[str, Any], what: str) -> dict[str, Any]:
    return settings | {"sharding_configs": {**settings["sharding_configs"], "offload": what}}


_WALK: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 0, replicas only": ("llama", _layout(0, 1, 1)),
    "stage 1 x sequence parallel x pipeline": ("llama", {**_layout(1, 8, 4, share=8, sp=True), **_PRECISE}),
    "stage 2 x pipeline, tied over stages": ("gpt2", {**_layout(2, 1, 4, share=64), **_PRECISE}),
    "stage 3 x tensor, norms on heads": ("qwen3", {**_layout(3, 4, 1, share=256), **_PRECISE}),
    "stage 3 x pipeline, two layers before the blocks": ("gpt2", {**_layout(3, 1, 4, share=256), **_PRECISE}),
    "stage 3 x zero bubble: W gathers nothing": (
        "llama",
        {**_layout(3, 1, 4, share=64, schedule="zb-h1"), **_PRECISE},
    ),
    "stage 1 x zero bubble in a V, tied on one stage": ("gpt2", {**_layout(1, 4, 2, schedule="zbv"), **_PRECISE}),
    "stage 3 x pipeline, one bucket for the last block and what is called behind the norm": (
        "opt",
        {**_layout(3, 1, 4, share=256), **_PRECISE},
    ),
    "stage 3 x interleaved, fetched far ahead while chunks take turns": (
        "long llama",
        _fetched_ahead(_layout(3, 4, 2, schedule="interleaved")),
    ),
    "stage 3 x a V, tied on one stage: one chunk borrows of the other": (
        "gpt2",
        {**_layout(3, 4, 2, schedule="zbv"), **_PRECISE},
    ),
    "sequence parallel x pipeline, the head alone on its stage": (
        "short opt",
        {**_layout(1, 8, 4, sp=True), **_PRECISE},
    ),
    "stage 2 x tensor, optimizer on the host, norms on heads": (
        "qwen3",
        _offloaded(_layout(2, 4, 1), "optimizer"),
    ),
    "autocast x tensor x pipeline, registered before the blocks and called behind them": (
        "opt",
        {**_layout(1, 4, 4, share=8), **_CAST},
    ),
    "autocast x sequence parallel x pipeline, fp32 between layers": ("llama", {**_layout(1, 4, 4, sp=True), **_CAST}),
    "autocast x sequence parallel, one gather in fp32 and one not": (
        "opt",
        {**_layout(1, 4, 1, sp=True, recompute=True), **_CAST},
    ),
    "stage 3 x interleaved, chunks kept for a run": (
        "llama",
        _run_by_run(_layout(3, 1, 2, share=8, schedule="interleaved")),
    ),
    "stage 3 x replicas, parameters on the host": (
        "llama",
        _offloaded(_layout(3, 1, 1, share=8), "parameters"),
    ),
    "stage 3 x a V, a layer with weights of its own borrows one": ("bert", _layout(3, 1, 2, schedule="zbv")),
    "pipeline, tokens and positions sent before they are added": (
        "short gpt2",
        {**_layout(0, 1, 4), **_PRECISE},
    ),
    "stage 3, a block of which there is one": ("one block", {**_layout(3, 2, 1), **_PRECISE}),
    "stage 2 x tensor, whole table and cut head": ("untied gemma", {**_layout(2, 4, 1), **_PRECISE}),
    "stage 1 x tensor, whole parameters on a rank": (
        "short opt",
        {**_layout(1, 2, 1), "sharding_configs": {"stage": 1, "shard_size": 64, "partition": "parameter"}},
    ),
    "stage 1 x tensor, whole table": ("gemma", {**_layout(1, 8, 1, share=128, recompute=True), **_PRECISE}),
}
_ALL_OF_THEM = [
    pytest.param(
        (model, {**_layout(stage, tp, pp, share=share, sp=sp), **_PRECISE}),
        id=f"{model}-z{stage}-tp{tp}-pp{pp}-share{share}{'-sp' * sp}",
        marks=pytest.mark.full,
    )
    for model in _WALKED
    for stage in range(4)
    for tp, sp in ((1, False), (4, False), (8, True))
    for pp in (1, 4)
    for share in (8, 256)
]
_ALL_OF_THEM += [
    pytest.param(
        (model, {**_layout(1, tp, pp, share=8, sp=sp, recompute=recompute), **_CAST}),
        id=f"{model}-autocast-tp{tp}-pp{pp}{'-sp' * sp}{'-recompute' * recompute}",
        marks=pytest.mark.full,
    )
    for model in _WALKED
    for tp, pp, sp in ((4, 1, False), (4, 1, True), (1, 4, False), (4, 4, False), (4, 4, True))
    for recompute in (False, True)
]


@pytest.mark.parametrize("case", [*(pytest.param(case, id=name) for name, case in _WALK.items()), *_ALL_OF_THEM])
def test_the_planner_says_of_a_rank_what_it_does(case: tuple[str, dict[str, Any]]) -> None:
    """Bytes by kind and moment, bytes by axis, units per stage: on the first and the last rank that holds most."""
    model, settings = case
    last = _WORLD_SIZE - settings.get("tensor_parallel_configs", {}).get("degree", 1)
    found = hybrid.dryrun(
        hybrid.DistributedStrategy(settings),
        {**_WALKED, **_ODD}[model],
        world_size=_WORLD_SIZE,
        ranks=[0, last],
        seq=64,
    )
    for one in found.ranks:
        assert len(one.comparison) >= 7, one.notes
        assert one.differences == (), f"rank {one.rank}"


def test_values_that_a_model_passes_on_in_the_lower_type_are_sent_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast a residual stream is as wide as the model makes it, and Llama's norms widen what they give in any
    case: two bytes for all, or four, is wrong for one of them."""
    plain = run.dry_model

    def narrow(*args: Any, **kwargs: Any) -> Any:
        known = plain(*args, **kwargs)

        def make() -> tuple[nn.Module, Any]:
            model, sample = known.make()
            model.get_input_embeddings().register_forward_hook(lambda _, args, output: output.bfloat16())
            return model, sample

        return replace(known, make=make)

    monkeypatch.setattr(run, "dry_model", narrow)
    settings = {**_layout(1, 4, 4, sp=True), **_CAST}
    (one,) = hybrid.dryrun(hybrid.DistributedStrategy(settings), _WALKED["llama"], world_size=_WORLD_SIZE, seq=64).ranks
    assert one.differences == ()
    (sent,) = (figure.found for figure in one.comparison if figure.what == "sent over pp")
    assert sent == 8 * 64 * 256 * 2 // 4  # micro-batches x tokens x width x bytes, over four tp ranks
