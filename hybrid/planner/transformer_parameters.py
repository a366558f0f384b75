"""The parameters of each unit of a transformer, under the names that its family gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hybrid.planner.architecture import Architecture
from hybrid.planner.model_spec import ParameterSpec
from hybrid.planner.parameter_names import FAMILIES, Family

__all__ = ["before_blocks", "block_parameters", "embedding_parameters", "head_parameters"]

_Made = Iterator[ParameterSpec]


def embedding_parameters(arch: Architecture) -> tuple[ParameterSpec, ...]:
    """Named as the whole model names them."""
    return tuple(_of(FAMILIES[arch.family].embedding, lambda role, name: _of_embedding(arch, role, name)))


def block_parameters(arch: Architecture, layer: int) -> tuple[ParameterSpec, ...]:
    """Named inside of the block."""
    family = FAMILIES[arch.family]
    return tuple(_of(family.block, lambda role, name: _of_block(arch, family, role, name, layer)))


def head_parameters(arch: Architecture) -> tuple[ParameterSpec, ...]:
    """Named as the whole model names them; with the token table where it is the head's weight."""
    family = FAMILIES[arch.family]
    return tuple(_of(family.head, lambda role, name: _of_head(arch, family, role, name)))


def before_blocks(arch: Architecture) -> tuple[str, ...]:
    """Names of what is registered before the blocks, where that is not the embedding as it stands."""
    family = FAMILIES[arch.family]
    names = {**family.embedding, **family.head}
    made = [*embedding_parameters(arch), *head_parameters(arch)]
    early = [one.name for role in family.before_blocks for one in made if one.name.startswith(f"{names[role]}.")]
    return tuple(early)


def _of(names: Mapping[str, str], make: Callable[[str, str], _Made]) -> _Made:
    for role, name in names.items():
        yield from make(role, name)


def _linear(
    name: str,
    in_features: int,
    out_features: int,
    *,
    bias: bool,
    cut: str = "none",
    min_parts: int = 0,
    is_transposed: bool = False,
) -> _Made:
    shape = (in_features, out_features) if is_transposed else (out_features, in_features)
    out_dim = 1 if is_transposed else 0
    cut_dim = {"column": out_dim, "row": 1 - out_dim, "none": None}[cut]
    yield ParameterSpec(name=f"{name}.weight", shape=shape, cut_dim=cut_dim, min_parts=min_parts)
    if bias:
        bias_dim = 0 if cut == "column" else None
        yield ParameterSpec(name=f"{name}.bias", shape=(out_features,), cut_dim=bias_dim, min_parts=min_parts)


def _norm(name: str, width: int, *, bias: bool, is_on_heads: bool = False) -> _Made:
    """With a bias it is torch's own layer norm; the others are classes of the families."""
    yield ParameterSpec(name=f"{name}.weight", shape=(width,), is_on_heads=is_on_heads, is_norm=bias)
    if bias:
        yield ParameterSpec(name=f"{name}.bias", shape=(width,), is_norm=True)


def _of_embedding(arch: Architecture, role: str, name: str) -> _Made:
    hidden, width = arch.hidden, arch.embedding_width or arch.hidden
    match role:
        case "token":
            yield ParameterSpec(
                name=f"{name}.weight", shape=(arch.vocab, width), cut_dim=0 if arch.is_table_cut else None
            )
        case "position" if arch.position_rows:
            yield ParameterSpec(name=f"{name}.weight", shape=(arch.position_rows, hidden))
        case "segment" if arch.num_segments:
            yield ParameterSpec(name=f"{name}.weight", shape=(arch.num_segments, hidden))
        case "embedding_norm" if arch.embedding_norm:
            yield from _norm(name, hidden, bias=True)
        case "project_in" if width != hidden:
            yield from _linear(name, width, hidden, bias=False)
        case "class_token":
            yield ParameterSpec(name=name, shape=(1, 1, hidden))
        case "position_values":
            yield ParameterSpec(name=name, shape=(1, arch.position_rows, hidden))
        case "patch":
            yield ParameterSpec(name=f"{name}.weight", shape=(hidden, 3, arch.patch, arch.patch))
            yield ParameterSpec(name=f"{name}.bias", shape=(hidden,))


def _of_head(arch: Architecture, family: Family, role: str, name: str) -> _Made:
    hidden, width = arch.hidden, arch.embedding_width or arch.hidden
    has_transform = arch.head in {"mlm", "pretraining"}
    match role:
        case "final_norm" if arch.has_final_norm:
            yield from _norm(name, hidden, bias=arch.norm == "layer")
        case "project_out" if width != hidden:
            yield from _linear(name, hidden, width, bias=False)
        case "pooler" if arch.head == "pretraining":
            yield from _linear(name, hidden, hidden, bias=True)
        case "next_sentence" if arch.head == "pretraining":
            yield from _linear(name, hidden, 2, bias=True)
        case "transform" if has_transform:
            yield from _linear(name, hidden, hidden, bias=True)
        case "transform_norm" if has_transform:
            yield from _norm(name, hidden, bias=True)
        case "head_bias" if has_transform:
            yield ParameterSpec(name=f"{name}.bias", shape=(arch.vocab,), cut_dim=0)
        case "head" if arch.head == "classes":
            yield from _linear(name, hidden, arch.vocab, bias=arch.head_bias)
        case "head" if arch.head != "none":
            tied = f"embedding.{family.embedding['token']}.weight" if arch.is_tied else None
            cut_dim = 0 if arch.is_head_cut else None
            yield ParameterSpec(name=f"{name}.weight", shape=(arch.vocab, width), cut_dim=cut_dim, tied_to=tied)
            if arch.head_bias:
                yield ParameterSpec(name=f"{name}.bias", shape=(arch.vocab,), cut_dim=0)


def _of_block(arch: Architecture, family: Family, role: str, name: str, layer: int) -> _Made:
    if role in {"gate", "up", "gate_up", "down"}:
        if not arch.has_experts(layer):
            yield from _of_feed_forward(arch, family, role, name)
    elif role in {"router", "experts_up", "experts_down", "shared_gate", "shared_up", "shared_down"}:
        if arch.has_experts(layer):
            yield from _of_experts(arch, role, name)
    elif role in {"norm1", "norm2", "post1", "post2"}:
        yield from _norm(name, arch.hidden, bias=arch.norm == "layer")
    elif arch.latent is not None:
        yield from _of_latent_attention(arch, role, name)
    else:
        yield from _of_attention(arch, family, role, name)


def _of_attention(arch: Architecture, family: Family, role: str, name: str) -> _Made:
    hidden, query, kv = arch.hidden, arch.query_width, arch.kv_width
    flip = family.is_transposed
    fewer = arch.kv_heads if arch.kv_heads < arch.heads else 0
    match role:
        case "q":
            yield from _linear(name, hidden, query, bias=arch.qkv_bias, cut="column")
        case "k" | "v":
            yield from _linear(name, hidden, kv, bias=arch.qkv_bias, cut="column", min_parts=fewer)
        case "qkv":
            yield from _linear(name, hidden, query + 2 * kv, bias=arch.qkv_bias, cut="column", is_transposed=flip)
        case "q_norm" | "k_norm" if arch.has_qk_norm:
            yield from _norm(name, arch.head_dim, bias=False, is_on_heads=True)
        case "out":
            yield from _linear(name, query, hidden, bias=arch.out_bias, cut="row", is_transposed=flip)


def _of_latent_attention(arch: Architecture, role: str, name: str) -> _Made:
    latent = arch.latent
    assert latent is not None
    hidden, query = arch.hidden, arch.heads * (latent.nope_dim + latent.rope_dim)
    match role:
        case "q" if not latent.query_rank:
            yield from _linear(name, hidden, query, bias=False, cut="column")
        case "q_a" if latent.query_rank:
            yield from _linear(name, hidden, latent.query_rank, bias=arch.qkv_bias)
        case "q_a_norm" if latent.query_rank:
            yield from _norm(name, latent.query_rank, bias=False)
        case "q_b" if latent.query_rank:
            yield from _linear(name, latent.query_rank, query, bias=False, cut="column")
        case "kv_a":
            yield from _linear(name, hidden, latent.kv_rank + latent.rope_dim, bias=arch.qkv_bias)
        case "kv_a_norm":
            yield from _norm(name, latent.kv_rank, bias=False)
        case "kv_b":
            width = arch.heads * (latent.nope_dim + latent.value_dim)
            yield from _linear(name, latent.kv_rank, width, bias=False, cut="column")
        case "out":
            yield from _linear(name, arch.heads * latent.value_dim, hidden, bias=arch.out_bias, cut="row")


def _of_feed_forward(arch: Architecture, family: Family, role: str, name: str) -> _Made:
    hidden, ffn = arch.hidden, arch.ffn
    is_fused = arch.is_gated and "gate_up" in family.block
    flip = family.is_transposed
    match role:
        case "gate_up" if is_fused:
            yield from _linear(name, hidden, 2 * ffn, bias=arch.mlp_bias, cut="column")
        case "gate" if arch.is_gated:
            yield from _linear(name, hidden, ffn, bias=arch.mlp_bias, cut="column")
        case "up" if not is_fused:
            yield from _linear(name, hidden, ffn, bias=arch.mlp_bias, cut="column", is_transposed=flip)
        case "down":
            yield from _linear(name, ffn, hidden, bias=arch.mlp_bias, cut="row", is_transposed=flip)


def _of_experts(arch: Architecture, role: str, name: str) -> _Made:
    mixture = arch.experts
    assert mixture is not None
    hidden = arch.hidden
    match role:
        case "router":
            yield ParameterSpec(name=f"{name}.weight", shape=(mixture.num, hidden))
        case "experts_up":
            yield ParameterSpec(name=name, shape=(mixture.num, 2 * mixture.ffn, hidden), is_expert=True)
        case "experts_down":
            yield ParameterSpec(name=name, shape=(mixture.num, hidden, mixture.ffn), is_expert=True)
        case "shared_gate" | "shared_up" if mixture.shared_ffn:
            yield from _linear(name, hidden, mixture.shared_ffn, bias=False, cut="column")
        case "shared_down" if mixture.shared_ffn:
            yield from _linear(name, mixture.shared_ffn, hidden, bias=False, cut="row")
