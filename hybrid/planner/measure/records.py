"""What a trace of a forward writes down: storages, products, attentions, and sums of all else."""

from __future__ import annotations

from dataclasses import dataclass

from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Attention", "Made", "Product", "Work"]


@dataclass(eq=False, slots=True, kw_only=True)
class Made:
    """One storage.

    Args:
        reference: tells whether it is still there.
        part: that made it.
        num_bytes: of it; of a dropout mask one per element, as the kernels of GPUs keep it.
        is_cut: tensor parallel divides it.
        is_scores: a product of two activations or worked out from one element by element: scores, if a softmax follows.
        is_pairs: scores, softmax, its mask.
        is_statistics: the log-sum-exp of a fused attention kernel.
        is_mask: a dropout mask.
        is_column_input, is_row_result: whole, at the edges of what tensor parallel cuts.
        is_fixed: as large for any batch.
        is_kept: it is there when forward is over and its results are gone.
        sources: that it was made from.
        saver, receiver: the first part that saved it, the first unit that was given it.
    """

    reference: StorageWeakRef
    part: str
    num_bytes: int
    is_cut: bool = False
    is_scores: bool = False
    is_pairs: bool = False
    is_statistics: bool = False
    is_mask: bool = False
    is_column_input: bool = False
    is_row_result: bool = False
    is_fixed: bool = False
    is_kept: bool = False
    sources: tuple[Made, ...] = ()
    saver: str | None = None
    receiver: str | None = None

    @property
    def owner(self) -> str:
        return self.saver or self.receiver or self.part


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """[rows, in] · [in, out]; `weight` names the parameter, "" for two activations; rows over all groups together."""

    part: str
    weight: str
    rows: int
    in_features: int
    out_features: int
    num_groups: int = 1
    has_input_gradient: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Scores and the sum over values of one call, in a kernel or written out."""

    part: str
    rows: int  # samples · heads
    num_kv_rows: int  # samples · heads of keys and values
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    is_causal: bool
    is_fused: bool
    is_cut: bool


@dataclass(slots=True)
class Work:
    """Sums over one part: bytes read and written by what multiplies nothing; kernels; sums over the tp ranks."""

    whole: float = 0.0
    cut: float = 0.0
    pairs: float = 0.0
    kernels: int = 0
    reductions: int = 0
