"""A model as the planner sees it: units in order, each with its parameters, its work and what it saves for backward.

Everything counts per token or per pair of tokens, for one process; which part tensor parallel cuts is marked, so that
the same description serves every layout. Where it comes from: `planner/presets.py`, `planner/hugging_face.py` (closed
forms) or `planner/measure.py` (a live module on fake tensors).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Literal

__all__ = [
    "ActivationBytes",
    "AttentionSpec",
    "MatmulSpec",
    "ModelSpec",
    "ParameterSpec",
    "Recompute",
    "SentWidths",
    "UnitKind",
    "UnitSpec",
]

Recompute = Literal["none", "core_attention", "selective", "full"]
"""What backward computes again: nothing; scores and softmax of attention only (Megatron-LM's "selective"); all but the
results of matrix products and attention (`recompute_configs.policy = "selective"`); everything but the unit's input."""

UnitKind = Literal["embedding", "block", "head", "other"]
Cut = Literal["column", "row", "expert", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter of a unit.

    Args:
        name: in the unit, as the plain model has it (`attention.q_proj.weight`).
        shape: whole, before anything is cut.
        cut_dim: the dimension that tensor parallel cuts; None for one that every tp rank holds whole.
        min_parts: more tp ranks than this hold copies (key and value heads); 0 where cutting is not limited.
        is_expert: one of a mixture's experts: cut over `ep` and replicated over expert-data-parallel ranks.
        tied_to: `unit.name` of the parameter of another unit that this one is; it is stored once per stage.
        trainable: has gradient, master and optimizer state.
        is_on_heads: whole on every tp rank, and works on the heads that are there: each has a part of its gradient.
        is_norm: of one of torch's own normalisation layers, which may keep another type (`Precision.norm`).
    """

    name: str
    shape: tuple[int, ...]
    cut_dim: int | None = None
    min_parts: int = 0
    is_expert: bool = False
    tied_to: str | None = None
    trainable: bool = True
    is_on_heads: bool = False
    is_norm: bool = False

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def local_elements(self, tp: int, *, ep: int = 1) -> int:
        """Elements of the largest part that one rank holds: uneven cuts round up."""
        if self.is_expert:
            return -(-self.num_elements // ep)
        if self.cut_dim is None or tp == 1:
            return self.num_elements
        parts = min(tp, self.min_parts) if self.min_parts else tp
        size = self.shape[self.cut_dim]
        return self.num_elements // size * -(-size // parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulSpec:
    """`[tokens, in_features] · [in_features, out_features]`, forward; backward is two of the same size.

    Args:
        name: for the eye.
        in_features, out_features: whole.
        cut: `column` divides out_features by tp, `row` in_features, `expert` is one expert's product.
        tokens_share: rows per token of the unit's input: 1; for experts top_k (rows over all experts together).
        num_groups: experts over which the rows are spread (a grouped product); 1 otherwise.
        min_parts: as in `ParameterSpec`: parts are not smaller than 1/min_parts.
        has_input_gradient: False where nothing before it is trained (the first layer on data).
        has_weight_gradient: False where its weight is frozen.
    """

    name: str
    in_features: int
    out_features: int
    cut: Cut = "none"
    tokens_share: float = 1.0
    num_groups: int = 1
    min_parts: int = 0
    has_input_gradient: bool = True
    has_weight_gradient: bool = True

    @property
    def flops_per_token(self) -> float:
        """Forward, whole: two per multiply-add."""
        return 2.0 * self.in_features * self.out_features * self.tokens_share

    @property
    def is_put_off(self) -> bool:
        """Whether a split backward leaves the gradient of its weight to W; those of experts and on data come in I."""
        return self.has_weight_gradient and self.has_input_gradient and self.num_groups == 1 and self.cut != "expert"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Scores and the sum over values; `2 · seq · heads · (head_dim + value_dim)` forward flops per token, full square.

    Args:
        num_heads, num_kv_heads: whole, before tp divides the heads.
        head_dim: of queries and keys.
        value_dim: of values.
        is_causal: only half of the square is needed; a kernel that skips it takes half of the time.
        is_cut: False where every tp rank computes all heads.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    is_causal: bool = True
    is_cut: bool = True

    def flops_per_token(self, seq: int) -> float:
        """Forward, the whole square, whatever the kernel skips."""
        return 2.0 * seq * self.num_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """What one unit keeps from forward to backward; all figures of one process.

    bytes(tokens, seq, t, sequence_parallel) = tokens · (whole / (t if sequence_parallel else 1) + cut / t)
                                               + tokens · seq · pairs / t + fixed

    Megatron-LM gathers the inputs of column layers again in backward; a runtime that keeps the gathered ones, as this
    one does, has `gathered` undivided under sequence parallel and, where results of collectives are kept (selective
    recompute), `collective` beside; of a product that is summed over tp only the sum is kept.

    Args:
        whole: per token, on every tp rank alike (divided under sequence parallel).
        cut: per token, divided by tp.
        pairs: per token and position attended to (scores, softmax, their dropout mask), divided by tp.
        pairs_whole: the same where every tp rank computes all heads.
        fixed: whatever the number of tokens.
        gathered: the part of `whole` that lies around the edges of a cut region, whole even under sequence parallel.
        collective: per token, what is gathered for the column layers where the sequence is cut, beside their results.
    """

    whole: float = 0.0
    cut: float = 0.0
    pairs: float = 0.0
    pairs_whole: float = 0.0
    fixed: float = 0.0
    gathered: float = 0.0
    collective: float = 0.0

    def of(
        self, *, tokens: float, seq: int, tp: int = 1, sequence_parallel: bool = False, keeps_gathered: bool = False
    ) -> float:
        """Bytes on one tp rank; `keeps_gathered`: by a runtime that does not gather again in backward."""
        whole = self.whole / tp if sequence_parallel else self.whole
        if keeps_gathered and tp > 1 and sequence_parallel:
            whole += self.collective + self.gathered * (1 - 1 / tp)
        pairs = self.pairs_whole + self.pairs / tp
        return tokens * (whole + self.cut / tp + seq * pairs) + self.fixed

    def __add__(self, other: ActivationBytes) -> ActivationBytes:
        return ActivationBytes(
            whole=self.whole + other.whole,
            cut=self.cut + other.cut,
            pairs=self.pairs + other.pairs,
            pairs_whole=self.pairs_whole + other.pairs_whole,
            fixed=self.fixed + other.fixed,
            gathered=self.gathered + other.gathered,
            collective=self.collective + other.collective,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWidths:
    """Bytes of an element of what ranks send of a unit, and of its gradient: autocast leaves some values in fp32.

    Args:
        between: what the unit takes from the one before, as stages of a pipeline send it and as the sequence is cut
            and joined at the ends of the blocks; of an embedding: what it hands on.
        result: what its row layers, or its table, give.
        entries: what goes into its column layers, where tensor parallel gathers it or sums its gradient: as many as
            `UnitSpec.num_tp_reductions`; one of a head.
    """

    between: int
    result: int
    entries: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """A part of the model that is gathered, freed, recomputed and placed as a whole.

    Args:
        name: of the module (`model.layers.3`).
        kind: an embedding, one of the repeated blocks, the head (final norm, projection to logits, loss), other.
        parameters: in registration order; outside the blocks layer by layer, in the order of their calls.
        matmuls, attentions: its work; attention is beside the products of its projections.
        activations: (recompute, is_flash) -> what it saves. All four policies, with and without a fused attention
            kernel that does not store the scores.
        traffic_whole, traffic_cut: bytes per token that norms, activation functions, residuals, dropout and copies
            read and write in a forward, by whether tp divides them. Backward: twice.
        traffic_pairs: bytes per token and position attended to (softmax and what is around it) without a fused kernel.
        num_kernels: device kernels that a forward launches without fusion by a compiler.
        input_bytes: per token, of the value that crosses into it from the unit before (2 · hidden).
        num_tp_reductions: sums over the tp group in a forward (2 for a transformer block, 1 for a cut embedding or
            head); backward has as many.
        gathered_forward, gathered_backward: elements per token of what a forward and a backward gather over the tp
            group beside them (fused layers without parts).
        leaves_last_sum: backward needs nothing behind the last sum over tp, so that full recompute leaves that out.
        expert_rows: token rows per token that travel to experts and back (top_k); 0 without experts.
        logits_per_token: elements of the logits per token (the head only).
        sent: widths of what ranks send of it, where they are not those of all activations.
        adds_positions: of an embedding whose rows of positions are added to those of tokens behind its layers: where a
            chunk ends with it, both go on; the rows of one `sample`, which all share, or of the `batch`.
    """

    name: str
    kind: UnitKind
    parameters: tuple[ParameterSpec, ...]
    matmuls: tuple[MatmulSpec, ...] = ()
    attentions: tuple[AttentionSpec, ...] = ()
    activations: Mapping[tuple[Recompute, bool], ActivationBytes] = field(default_factory=dict)
    traffic_whole: float = 0.0
    traffic_cut: float = 0.0
    traffic_pairs: float = 0.0
    num_kernels: int = 0
    input_bytes: float = 0.0
    num_tp_reductions: int = 0
    gathered_forward: tuple[int, ...] = ()
    gathered_backward: tuple[int, ...] = ()
    leaves_last_sum: bool = False
    expert_rows: float = 0.0
    logits_per_token: int = 0
    sent: SentWidths | None = None
    adds_positions: Literal["", "sample", "batch"] = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "activations", MappingProxyType(dict(self.activations)))

    def num_parameters(self, *, tp: int = 1, ep: int = 1) -> int:
        """Elements on one rank; a tied one counts where it is."""
        return sum(parameter.local_elements(tp, ep=ep) for parameter in self.parameters)

    @property
    def has_backward(self) -> bool:
        """False where neither it nor anything before it is trained: backward ends behind it."""
        is_trained = any(parameter.trainable for parameter in self.parameters)
        return is_trained or any(matmul.has_input_gradient for matmul in self.matmuls)

    def forward_flops_per_token(self, seq: int) -> float:
        """Matrix products and the whole attention square, all ranks together."""
        products = sum(matmul.flops_per_token for matmul in self.matmuls)
        return products + sum(attention.flops_per_token(seq) for attention in self.attentions)

    @property
    def look(self) -> tuple[object, ...]:
        """Equal for units that cost the same: all but the name."""
        return (
            self.kind, self.parameters, self.matmuls, self.attentions, tuple(sorted(self.activations.items())),
            self.traffic_whole, self.traffic_cut, self.traffic_pairs, self.num_kernels, self.input_bytes,
            self.num_tp_reductions, self.gathered_forward, self.gathered_backward, self.leaves_last_sum,
            self.expert_rows, self.logits_per_token, self.sent, self.adds_positions,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model.

    Args:
        name: as the user gave it.
        units: in the order of the model: embedding, blocks, head.
        hidden: width of what crosses between blocks.
        num_heads, num_kv_heads, ffn, vocab: what tp must divide; 0 where there is none.
        max_seq: longest sequence that it can take; 0 without a limit.
        made_for_seq: longest that its configuration names, where it can take longer ones; 0 without.
        default_seq: tokens of a sample where the user names none.
        is_seq_fixed: measured at `default_seq`; activations hold for no other length.
        num_experts: of each mixture; 0 without.
        num_cut_layers: that a pipeline of a live model can be cut into; 0: as many as units.
        tensor_refusal, sequence_refusal: why the runtime cuts it for no tp, and why not along the sequence
            (`contracts/tensor_rules.py`); empty where it does.
        before_blocks: names of the parameters outside the blocks that are registered before them, in that order; empty
            where parameters are registered as the units stand.
        source: where the figures come from: `preset llama3-70b`, `config.json of …`, `measured: MyModel`.
        notes: what the figures leave out.
    """

    name: str
    units: tuple[UnitSpec, ...]
    hidden: int
    num_heads: int = 0
    num_kv_heads: int = 0
    ffn: int = 0
    vocab: int = 0
    max_seq: int = 0
    made_for_seq: int = 0
    default_seq: int = 2048
    is_seq_fixed: bool = False
    num_experts: int = 0
    num_cut_layers: int = 0
    tensor_refusal: str = ""
    sequence_refusal: str = ""
    before_blocks: tuple[str, ...] = ()
    source: str = ""
    notes: tuple[str, ...] = ()

    def notes_on_length(self, seq: int) -> tuple[str, ...]:
        """What to know of samples that are longer than the model was made for."""
        if not 0 < self.made_for_seq < seq:
            return ()
        return (
            f"seq = {seq:,}, but {self.name} was made for {self.made_for_seq:,} positions (max_position_embeddings): "
            "it runs, with rotary positions that it has not learned",
        )

    @property
    def blocks(self) -> tuple[UnitSpec, ...]:
        return tuple(unit for unit in self.units if unit.kind == "block")

    @cached_property
    def num_parameters(self) -> int:
        """Elements, a tied parameter once."""
        return sum(p.num_elements for unit in self.units for p in unit.parameters if p.tied_to is None)

    def forward_flops_per_token(self, seq: int) -> float:
        return sum(unit.forward_flops_per_token(seq) for unit in self.units)

    def step_flops_per_token(self, seq: int) -> float:
        """Forward and backward without recompute: three times the forward, the whole attention square counted."""
        return 3.0 * self.forward_flops_per_token(seq)

    def registered(self, units: Iterable[int]) -> list[tuple[int, int]]:
        """(unit, parameter) of what these units have, in the order in which the model registers it."""
        places = [(at, index) for at in units for index in range(len(self.units[at].parameters))]
        early = {name: place for place, name in enumerate(self.before_blocks)}

        def place(one: tuple[int, int]) -> int:
            unit = self.units[one[0]]
            return len(early) if unit.kind == "block" else early.get(unit.parameters[one[1]].name, len(early))

        return sorted(places, key=place) if early else places

    @cached_property
    def look_indices(self) -> tuple[int, ...]:
        """For each unit the index of the first one that looks like it: a short name for tables of what units cost."""
        first: dict[tuple[object, ...], int] = {}
        return tuple(first.setdefault(unit.look, index) for index, unit in enumerate(self.units))

    def looks(self) -> Iterator[tuple[UnitSpec, int]]:
        """Each different kind of unit once, with the number of units like it."""
        counts: dict[tuple[object, ...], int] = {}
        first: dict[tuple[object, ...], UnitSpec] = {}
        for unit in self.units:
            counts[unit.look] = counts.get(unit.look, 0) + 1
            first.setdefault(unit.look, unit)
        yield from ((first[look], count) for look, count in counts.items())
