"""Rules for models without a plan, from the names of their layers: torch.nn, Llama-like, GPT-2, BERT, T5.

Also the token embedding and the output layer over the vocabulary, which plans often leave out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hybrid.contracts.tensor_claims import Claim
from hybrid.contracts.tensor_facts import ModelFacts, ModuleFacts, parent_of

__all__ = [
    "HEADS",
    "HEAD_SIZES",
    "Families",
    "experts",
    "family_claims",
    "is_width_norm",
    "output_layers",
    "token_embeddings",
]

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "num_q_heads", "num_query_heads", "heads")
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "dim_head", "d_head")

_LLAMA = "known family: Llama-like names"
_BERT = "known family: BERT"
_GPT2 = "known family: GPT-2"
_T5 = "known family: T5"
_TORCH = "known family: torch.nn"

# (family, column layers -> number of fused parts, row layer); attention first, then feed-forward.
_ATTENTION: tuple[tuple[str, Mapping[str, int], str], ...] = (
    (_LLAMA, {"q_proj": 1, "k_proj": 1, "v_proj": 1}, "o_proj"),
    (_LLAMA, {"q_proj": 1, "k_proj": 1, "v_proj": 1}, "out_proj"),
    (_GPT2, {"q_attn": 1, "c_attn": 2}, "c_proj"),
    (_GPT2, {"c_attn": 3}, "c_proj"),
    (_T5, {"q": 1, "k": 1, "v": 1}, "o"),
    # `attention.self.query` closes in `attention.output.dense`
    (_BERT, {"query": 1, "key": 1, "value": 1}, "^output.dense"),
)
_FEED_FORWARD: tuple[tuple[str, Mapping[str, int], str], ...] = (
    (_LLAMA, {"gate_proj": 1, "up_proj": 1}, "down_proj"),
    (_LLAMA, {"gate_up_proj": 2}, "down_proj"),
    (_LLAMA, {"up_proj": 1}, "down_proj"),
    (_LLAMA, {"fc1": 1}, "fc2"),
    (_LLAMA, {"w1": 1, "w3": 1}, "w2"),
    (_GPT2, {"c_fc": 1}, "c_proj"),
    (_T5, {"wi_0": 1, "wi_1": 1}, "wo"),
    (_T5, {"wi": 1}, "wo"),
    (_TORCH, {"linear1": 1}, "linear2"),
)

_TOKENS = (
    "embed_tokens",
    "wte",
    "word_embeddings",
    "word_embedding",
    "shared",
    "tok_emb",
    "tok_embed",
    "tok_embeddings",
    "token_emb",
    "token_embed",
    "token_embedding",
    "token_embeddings",
    "tokens_embed",
    "embed_in",
)
_LIKELY_TOKENS = ("embed", "embedding", "embeddings", "emb", "tok", "token", "tokens")
_OUTPUTS = ("lm_head", "embed_out", "decoder", "head", "output", "output_projection", "output_layer", "to_logits")
_EXPERT_CLASSES = ("MoE", "Moe", "MoEBlock", "MoeBlock", "MoELayer")
_OTHER_OUTPUTS = ("unembed", "vocab_head", "logits", "lm_proj", "generator")


@dataclass(slots=True)
class Families:
    """What names tell.

    `groups` are layers that only make sense cut together; `left` are groups that have known names and are left whole
    all the same -> why.
    """

    claims: dict[str, Claim] = field(default_factory=dict)
    groups: list[tuple[str, ...]] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def add(self, group: Mapping[str, Claim]) -> None:
        self.claims.update(group)
        self.groups.append(tuple(group))


def family_claims(facts: ModelFacts) -> Families:
    """Claims by the names of layers."""
    found = Families()
    for parent in facts.modules:
        if parent.kind == "attention":
            if parent.exact:
                found.add({parent.fqn: Claim(style="attention", source=_TORCH, in_attention=True)})
            continue
        if parent.fqn and facts.by_fqn[parent.parent].kind == "attention":
            continue
        for group, in_attention in ((_ATTENTION, True), (_FEED_FORWARD, False)):
            _claim_group(facts, parent.fqn, group, in_attention, found)
    for pair in _bert_feed_forward(facts):
        found.add(pair)
    for module in facts.modules:
        queries = f"{module.parent}.q"
        if module.name == "relative_attention_bias" and module.kind == "embedding" and queries in found.claims:
            if module.out_features == facts.attribute(module.parent, *HEADS):
                claim = Claim(style="embedding_colwise", source=_T5, in_attention=True)
                found.add({queries: found.claims[queries], module.fqn: claim})
    return found


def _claim_group(
    facts: ModelFacts,
    parent: str,
    groups: tuple[tuple[str, Mapping[str, int], str], ...],
    in_attention: bool,
    found: Families,
) -> None:
    """Claim the first of the groups that `parent` holds."""
    children = {child.name: child for child in facts.children(parent) if child.is_linear}
    for source, columns, closing in groups:
        row = _row(facts, parent, closing, children)
        if row is None or not all(name in children for name in columns):
            continue
        layers = [(children[name], fused) for name, fused in columns.items()]
        if not _fit(layers, row, in_attention):
            continue
        norm = next((one for one in facts.children(parent) if is_width_norm(one, row)), None)
        if norm is not None:
            reason = f"{norm.fqn} normalises over the whole width between these layers"
            found.left.update(dict.fromkeys((*(layer.fqn for layer, _ in layers), row.fqn), reason))
            return
        cut = {
            layer.fqn: Claim(style="colwise", source=source, fused=fused, in_attention=in_attention)
            for layer, fused in layers
        }
        found.add(cut | {row.fqn: Claim(style="rowwise", source=source, in_attention=in_attention)})
        return


def _row(facts: ModelFacts, parent: str, closing: str, children: Mapping[str, ModuleFacts]) -> ModuleFacts | None:
    if not closing.startswith("^"):
        return children.get(closing)
    found = facts.by_fqn.get(f"{parent_of(parent)}.{closing[1:]}")
    return found if found is not None and found.is_linear else None


def _fit(layers: list[tuple[ModuleFacts, int]], row: ModuleFacts, in_attention: bool) -> bool:
    """Whether the sizes are those that the names promise."""
    width = row.sizes[0]
    separate = [layer.sizes[1] for layer, fused in layers if fused == 1]
    fused_parts = [layer for layer, fused in layers if fused > 1]
    if any(layer.sizes[1] != fused * width for layer, fused in layers if fused > 1):
        return False
    if not in_attention:
        return all(size == width for size in separate)
    # As a Linear, q, k and v in one weight may as well lie head by head: only the Conv1D of GPT-2 is known.
    if any(layer.kind != "conv1d" for layer in fused_parts):
        return False
    # Queries come first; keys and values may be narrower (grouped-query attention).
    return not separate or (separate[0] == width and len(set(separate[1:])) <= 1)


def _bert_feed_forward(facts: ModelFacts) -> Iterator[dict[str, Claim]]:
    """`intermediate.dense`, closed by `output.dense` beside it."""
    for module in facts.modules:
        if not module.is_linear or module.name != "dense" or module.parent.rpartition(".")[2] != "intermediate":
            continue
        row = facts.by_fqn.get(f"{parent_of(module.parent)}.output.dense".lstrip("."))
        if row is not None and row.is_linear and row.in_features == module.out_features:
            columns = Claim(style="colwise", source=_BERT)
            yield {module.fqn: columns, row.fqn: Claim(style="rowwise", source=_BERT)}


def is_width_norm(module: ModuleFacts, row: ModuleFacts) -> bool:
    """Whether a norm works on the width that is cut between column layers and this row layer.

    Where that width is also the model's own, the name must say that it is the queries' or keys'.
    """
    if module.kind != "norm" or not module.parameters:
        return False
    width, hidden = row.sizes
    if any(shape != (width,) for shape in module.parameters.values()):
        return False
    return width != hidden or module.name.startswith(("q_", "k_", "query_", "key_"))


def token_embeddings(facts: ModelFacts) -> dict[str, str]:
    """Embeddings over the vocabulary -> how they were told from position and type embeddings."""
    embeddings = [module for module in facts.modules if module.kind == "embedding"]
    linears = {module.parameter_fqn("weight"): module for module in facts.modules if module.kind == "linear"}
    found: dict[str, str] = {}
    for module in embeddings:
        heads = [name for name in module.tied.get("weight", ()) if name in linears]
        if heads:
            found[module.fqn] = f"embedding tied to {linears[heads[0]].fqn}"
        elif module.name in _TOKENS:
            found[module.fqn] = "known name of a token embedding"
    if not found and embeddings:
        largest = max(embeddings, key=lambda module: module.sizes[0])
        if largest.name in _LIKELY_TOKENS:
            found[largest.fqn] = "the largest embedding"
    for module in embeddings:
        tied = [fqn for fqn in found if facts.is_tied_to(module, facts.by_fqn[fqn])]
        if tied:
            found.setdefault(module.fqn, f"embedding tied to {tied[0]}")
    return found


def output_layers(facts: ModelFacts, tokens: Mapping[str, str]) -> dict[str, str]:
    """Linear layers over the vocabulary -> how they were told."""
    found: dict[str, str] = {}
    vocabularies = {facts.by_fqn[fqn].sizes[0] for fqn in tokens}
    for module in facts.modules:
        if module.kind != "linear":
            continue
        tied = [fqn for fqn in tokens if facts.is_tied_to(module, facts.by_fqn[fqn])]
        if tied:
            found[module.fqn] = f"output layer tied to {tied[0]}"
        elif module.out_features in vocabularies and module.name in {*_OUTPUTS, *_OTHER_OUTPUTS}:
            found[module.fqn] = "output layer over the vocabulary"
    return found


def experts(facts: ModelFacts) -> ModuleFacts | None:
    """The first module of a mixture of experts, if there is one."""
    for module in facts.modules:
        name = module.class_name
        if name.endswith(_EXPERT_CLASSES) or "Experts" in name or "SparseMoe" in name:
            return module
        if module.name == "experts" and (facts.children(module.fqn) or module.parameters):
            return module
    return None
