"""The account of one unit: each operation enters what it multiplies, moves and keeps; the sums are a `UnitSpec`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hybrid.planner.model_spec import ActivationBytes, AttentionSpec, Cut, MatmulSpec, Recompute

__all__ = ["Ledger", "Region"]

Region = Literal["whole", "cut", "pairs"]
"""What tensor parallel does to a tensor: nothing, divides it by tp, or it is one of scores (and divided)."""

_Amounts = dict[str, float]


def _nothing() -> _Amounts:
    names = ("whole", "cut", "pairs", "pairs_whole", "gathered", "collective")
    return dict.fromkeys(names, 0.0)


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Bytes per token (per pair of tokens in the region `pairs`), forward.

    Args:
        element_bytes: of an activation.
        hidden: width of what crosses units, which row layers give back.
        is_gathered: what column layers give is gathered, so that only weights and products are cut.
    """

    element_bytes: int
    hidden: int
    is_gathered: bool = False
    gathered_forward: list[int] = field(default_factory=list)
    gathered_backward: list[int] = field(default_factory=list)
    matmuls: list[MatmulSpec] = field(default_factory=list)
    attentions: list[AttentionSpec] = field(default_factory=list)
    saved: _Amounts = field(default_factory=_nothing)  # without recompute, whatever the kernel of attention
    scores: _Amounts = field(default_factory=_nothing)  # in addition without a fused kernel
    statistics: _Amounts = field(default_factory=_nothing)  # in addition with one: its log-sum-exp
    results: _Amounts = field(default_factory=_nothing)  # what selective recompute keeps
    score_results: _Amounts = field(default_factory=_nothing)  # in addition without a fused kernel
    traffic: _Amounts = field(default_factory=_nothing)
    num_kernels: int = 0
    num_tp_reductions: int = 0
    expert_rows: float = 0.0

    def save(self, elements: float, region: Region = "whole", *, width: float | None = None) -> None:
        """Backward needs a tensor of `elements` per token; `width`: bytes of one, if not an activation's."""
        self.saved[self._where(region)] += elements * (self.element_bytes if width is None else width)

    def save_column_input(self, elements: float) -> None:
        """The input of column layers: gathered over tp where the sequence is cut."""
        self.save(elements)
        self.saved["gathered"] += elements * self.element_bytes

    def move(self, *widths: float, elements: float, region: Region = "whole", kernels: int = 1) -> None:
        """Operations without products: `widths` are the bytes of an element in each tensor read or written."""
        self.traffic[self._where(region)] += elements * sum(widths)
        self.num_kernels += kernels

    def _where(self, region: Region) -> Region:
        return "whole" if self.is_gathered and region == "cut" else region

    def multiply(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        cut: Cut = "none",
        share: float = 1.0,
        num_groups: int = 1,
        min_parts: int = 0,
        has_input_gradient: bool = True,
    ) -> None:
        """One matrix product; its result is kept under selective recompute."""
        self.matmuls.append(
            MatmulSpec(
                name=name,
                in_features=in_features,
                out_features=out_features,
                cut=cut,
                tokens_share=share,
                num_groups=num_groups,
                min_parts=min_parts,
                has_input_gradient=has_input_gradient,
            )
        )
        self.num_kernels += 1
        if cut == "expert":  # a grouped product is none of those whose results the runtime keeps
            return
        size = out_features * share * self.element_bytes
        self.results[self._where("cut") if cut == "column" else "whole"] += size
        if self.is_gathered and cut == "column":
            self.gathered_forward.append(out_features)
        if self.is_gathered and cut == "row":
            self.gathered_backward.append(in_features)
        if cut == "row":  # of a product that tp ranks sum the sum is kept, and what was gathered before the columns
            self.results["collective"] += size
            self.num_tp_reductions += 1

    def attend(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        *,
        is_causal: bool,
        dropout: bool,
        is_eager: bool,
    ) -> None:
        """Scores, softmax, dropout and the sum over values. The result is saved by the layer that takes it.

        Without a fused kernel backward needs the softmax, and with dropout its mask and the masked softmax too
        (arXiv:2205.05198, section 4.1: 5·a bytes per pair); with one, the log-sum-exp per head, in fp32. Eager:
        torch's `scaled_dot_product_attention` computes in fp32 without a fused kernel, on copies of queries, keys and
        values with all heads.
        """
        size = self.element_bytes
        self.attentions.append(
            AttentionSpec(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                value_dim=value_dim,
                is_causal=is_causal,
                is_cut=not self.is_gathered,
            )
        )
        pairs, cut = ("pairs_whole", "whole") if self.is_gathered else ("pairs", "cut")
        fine = 4 if is_eager else size
        self.scores[pairs] += num_heads * (2 * fine + 1 if dropout else fine)
        self.statistics[cut] += num_heads * 4
        self.results[cut] += num_heads * value_dim * size
        self.score_results[pairs] += num_heads * fine  # both products are results: the scores are the first
        if is_eager:
            plain = size * (num_heads * head_dim + num_kv_heads * (head_dim + value_dim))
            self.scores[cut] += fine * num_heads * (2 * head_dim + value_dim) - plain
            self.score_results[cut] += num_heads * value_dim * (fine - size)
        # Scale and mask with the softmax: one kernel that reads and writes; dropout another.
        self.traffic["pairs"] += num_heads * (2 * size + (2 * size + 1 if dropout else 0))
        self.num_kernels += 1

    def activations(self, *, is_recomputed: bool) -> dict[tuple[Recompute, bool], ActivationBytes]:
        """By policy and kernel of attention; units that are never recomputed keep the same under all."""
        none = {flash: _sum(self.saved, self.statistics if flash else self.scores) for flash in (False, True)}
        if not is_recomputed:
            return {(policy, flash): none[flash] for policy in _POLICIES for flash in (False, True)}
        size = self.hidden * self.element_bytes
        own = {**_nothing(), "whole": float(size)}
        found: dict[tuple[Recompute, bool], ActivationBytes] = {}
        for flash in (False, True):
            found["none", flash] = none[flash]
            found["core_attention", flash] = _sum(self.saved)
            found["selective", flash] = _sum(own, self.results, self.statistics if flash else self.score_results)
            found["full", flash] = _sum(own)
        return found


_POLICIES: tuple[Recompute, ...] = ("none", "core_attention", "selective", "full")


def _sum(*amounts: _Amounts) -> ActivationBytes:
    return ActivationBytes(**{name: sum(one[name] for one in amounts) for name in _nothing()})
