"""What becomes of each module and parameter under tensor parallelism: the rules, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hybrid.contracts.placement import Cut, even_cut, fused_cut
from hybrid.contracts.tensor_facts import ModuleFacts, parent_of

__all__ = ["TABLE_HEADER", "CutUnit", "ModuleRule", "ParameterRow", "SidePathRule", "Style", "TensorPlan"]

Style = Literal["colwise", "rowwise", "vocab", "embedding_colwise", "head", "attention", "partial"]
"""How a module is cut.

    colwise            linear: output features; the input's gradient is summed
    rowwise            linear: input features; the output is summed, the bias added once
    vocab              embedding: rows
    embedding_colwise  embedding: columns (heads of a relative position bias)
    head               output layer over the vocabulary: output features, as uneven as they come
    attention          `nn.MultiheadAttention` with its `out_proj`: heads
    partial            whole, but applied to cut activations: its gradient is summed
"""

TABLE_HEADER = ("parameter", "shape", "local shape", "rule", "source")

# Parameters of nn.MultiheadAttention -> the dim along which heads lie, and how many of q, k and v are in it.
_ATTENTION_DIMS = {
    "in_proj_weight": (0, 3),
    "in_proj_bias": (0, 3),
    "q_proj_weight": (0, 1),
    "k_proj_weight": (0, 1),
    "v_proj_weight": (0, 1),
    "bias_k": (2, 1),
    "bias_v": (2, 1),
    "out_proj.weight": (1, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRule:
    """How one module is cut.

    Args:
        fqn: the module.
        style: see `Style`.
        parts: (number of heads, size of a head) of each part along the dim that is cut: of the output if colwise, of
            the input if rowwise; of q, k and v for `attention`. A width without heads has heads of size 1. Empty for
            `vocab` and `head`, which are cut evenly with a remainder.
        copies: so many neighbouring ranks hold the same heads (fewer kv heads than ranks).
        gather_output: a column layer whose output is gathered to the whole.
        split_input: a row layer whose input is whole, so that it takes its part of it first.
        in_blocks: it lies in a stack of blocks between which the sequence is cut (sequence parallel only).
        source: where the rule comes from, in words.
    """

    fqn: str
    style: Style
    source: str
    parts: tuple[tuple[int, int], ...] = ()
    copies: int = 1
    gather_output: bool = False
    split_input: bool = False
    in_blocks: bool = False

    def cuts(self, module: ModuleFacts, *, rank: int, degree: int) -> dict[str, Cut]:
        """Name of each parameter of `module` that is cut -> what a rank holds of it.

        For `attention` the name "out_proj.weight" is among them; it belongs to the module in there.
        """
        found: dict[str, Cut] = {}
        if self.style == "attention":
            for name, (heads_dim, count) in _ATTENTION_DIMS.items():
                if name in module.parameters or name == "out_proj.weight":
                    found[name] = fused_cut(heads_dim, self.parts[:count], rank=rank, degree=degree)
            return found
        for name, shape in module.parameters.items():
            dim = self._dim(name, module)
            if dim is None:
                continue
            if self.style in {"vocab", "head"}:
                found[name] = even_cut(dim, shape[dim], rank=rank, degree=degree)
            else:
                found[name] = fused_cut(dim, self.parts, rank=rank, degree=degree)
        return found

    def _dim(self, name: str, module: ModuleFacts) -> int | None:
        """Dim along which parameter `name` is cut; None if it stays whole."""
        transposed = module.kind == "conv1d"
        match self.style, name:
            case ("colwise" | "head", "weight"):
                return 1 if transposed else 0
            case ("colwise" | "head", "bias"):
                return 0
            case ("rowwise", "weight"):
                return 0 if transposed else 1
            case ("vocab", "weight"):
                return 0
            case ("embedding_colwise", "weight"):
                return 1
        return None

    def describe(self) -> str:
        """A few words for a table: style, parts, copies."""
        words: list[str] = [self.style]
        if len(self.parts) > 1 and self.style != "attention":
            words.append(f"{len(self.parts)} fused parts")
        if any(size > 1 for _, size in self.parts):
            heads = list(dict.fromkeys(heads for heads, _ in self.parts))
            words.append(f"{' / '.join(map(str, heads))} heads")
        if self.copies > 1:
            words.append(f"each on {self.copies} ranks")
        if self.gather_output:
            words.append("output gathered")
        if self.split_input:
            words.append("input split")
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class SidePathRule:
    """A cut layer with low-rank ones beside it.

    Args:
        reads_whole, leaves_whole: whether the activations that go in and come out are whole on every rank.
        base, narrow, widen: the layer, and those of each product.
    """

    reads_whole: bool
    leaves_whole: bool
    base: str
    narrow: tuple[str, ...]
    widen: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutUnit:
    """A module that takes and returns what the plain model has there, and works on parts in between.

    Args:
        fqn: the module: a block, or the smallest around what is cut outside of blocks.
        by_user: whether the user's plan says something of what is in it.
        is_known: whether all code in it is that for which the rules were made.
        holds_others: whether other units lie in it.
    """

    fqn: str
    by_user: bool
    is_known: bool
    holds_others: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """One parameter in an explanation; `rule` also says why it stays whole."""

    fqn: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    rule: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """What becomes of a whole model.

    Args:
        degree: number of tp ranks.
        sequence_parallel: whether activations between layers are cut along the sequence.
        rules: module fqn -> its rule, in registration order. A module that is not in it stays as it is.
        attributes: module fqn -> attribute -> the value it has on each rank (head counts and such).
        replicated: parameter fqn -> why it stays whole; each parameter by its first name.
        partial: those of them whose gradient is a part of the sum over tp -> why.
        gather_at: modules at whose entry the sequence is gathered (sequence parallel only): the parent of column
            layers, or the column layer itself where the parent holds norms that work on the cut sequence.
        cross_attention: modules that also attend over another sequence, which comes whole.
        blocks: stacks of blocks; the sequence is cut where the first begins and whole where the last ends.
        rows: one per parameter, by its first name.
        side_paths: modules that hold a cut layer and low-rank ones beside it.
        units: what can be compared with the plain model by itself.
    """

    degree: int
    sequence_parallel: bool = False
    rules: Mapping[str, ModuleRule] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    replicated: Mapping[str, str] = field(default_factory=dict)
    partial: Mapping[str, str] = field(default_factory=dict)
    gather_at: tuple[str, ...] = ()
    cross_attention: tuple[str, ...] = ()
    blocks: tuple[tuple[str, ...], ...] = ()
    rows: tuple[ParameterRow, ...] = ()
    side_paths: Mapping[str, SidePathRule] = field(default_factory=dict)
    units: tuple[CutUnit, ...] = ()

    def caller(self, fqn: str) -> str:
        """The module whose forward calls this layer: a side path stands in for it."""
        parent = parent_of(fqn)
        return parent_of(parent) if parent in self.side_paths else parent

    def table(self) -> list[tuple[str, str, str, str, str]]:
        """The rows as text, under `TABLE_HEADER`."""
        return [(row.fqn, _shape(row.global_shape), _shape(row.local_shape), row.rule, row.source) for row in self.rows]


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "scalar"
