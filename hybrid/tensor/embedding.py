"""Embedding tables cut over the tp ranks, by rows (the vocabulary) or by columns.

                      weight           forward over tp                          backward over tp
vocabulary parallel   rows cut         all-reduce of the output                 -
  sequence_dim                         reduce-scatter of the output             all-gather
column parallel       columns cut      -                                        -
"""

from __future__ import annotations

from typing import Any, Self, cast

import torch
from torch import nn

from hybrid.collectives.autograd import reduce_from, reduce_scatter_from
from hybrid.collectives.group import Group
from hybrid.contracts.placement import Cut, even_cut
from hybrid.errors import ModelError
from hybrid.tensor.cut_module import CutModule, adopted_class, check_divides, resolve_group
from hybrid.tensor.foreign_reads import own_use
from hybrid.tensor.linear import check_sequence
from hybrid.tensor.region import CutRegion
from hybrid.weight_gradients import embedding

__all__ = ["ColumnParallelEmbedding", "VocabParallelEmbedding"]


class VocabParallelEmbedding(CutModule, nn.Embedding):
    """An embedding whose rows are cut over the tp ranks, unevenly where the vocabulary is not divisible.

    Each rank looks up the ids whose rows it holds; the sum over tp is the plain embedding's output, the same on
    every rank (with `sequence_dim`: this rank's part along that dim of the output). On the CPU an id outside the
    vocabulary is an IndexError, as with the plain layer; on CUDA it gives zeros.

    Args:
        num_embeddings, embedding_dim, padding_idx: of the whole table.
        group: the tp ranks; None: those of the running job.
        sequence_dim: the dim along which the output is cut under sequence parallel; None: it is whole.
    """

    sequence_dim: int | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: Group | None = None,
        sequence_dim: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        group = resolve_group(group)
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        cut = even_cut(0, num_embeddings, rank=group.rank, degree=group.size)
        self.set_up_vocabulary(group=group, cut=cut, sequence_dim=sequence_dim, region=None)
        self.cut_parameters()

    @classmethod
    def adopt(
        cls,
        module: nn.Module,
        *,
        group: Group,
        cut: Cut,
        sequence_dim: int | None = None,
        region: CutRegion | None = None,
    ) -> Self:
        """Cut the vocabulary of an existing embedding; its weight's values are left to the caller.

        Raises:
            ModelError: a module that is no `nn.Embedding` or computes in its own way; `max_norm`,
                `scale_grad_by_freq`, `sparse`.
        """
        _check_embedding(module, cut, expected_dim=0, style="vocab_embedding")
        if len(cut.pieces) != 1 or cut.copies != 1:
            raise ModelError(f"vocab_embedding: each rank holds one range of the vocabulary, not {cut.pieces}")
        module.__class__ = adopted_class(module, cls, plain=nn.Embedding)
        cast(Self, module).set_up_vocabulary(group=group, cut=cut, sequence_dim=sequence_dim, region=region)
        return cast(Self, module)

    def set_up_vocabulary(self, *, group: Group, cut: Cut, sequence_dim: int | None, region: CutRegion | None) -> None:
        self.set_up(group=group, style="vocab_embedding", cuts={"weight": cut}, partial=frozenset(), region=region)
        self.sequence_dim = sequence_dim

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        group, cut = self.tensor_parallel.group, self.tensor_parallel.cuts["weight"]
        _check_ids(ids, cut.global_size)
        with own_use(ids, self.weight):
            partial_sum = self._look_up(ids, cut)
        if self.sequence_dim is None:
            return reduce_from(partial_sum, group=group)
        check_sequence(partial_sum, self.sequence_dim, group)
        output = reduce_scatter_from(partial_sum, group=group, dim=self.sequence_dim)
        if self.training:
            self.tensor_parallel_region.enter(ids.device)  # what follows is cut along the sequence
        return output

    def _look_up(self, ids: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Own rows where this rank has the id, zeros elsewhere."""
        ((start, length),) = cut.pieces
        padding = self.padding_idx
        if length == cut.global_size:
            return embedding(ids, self.weight, padding)
        if length == 0:  # more ranks than ids; part of the graph all the same, as backward may communicate
            return self.weight.new_zeros(*ids.shape, self.embedding_dim) + self.weight.sum()
        local = ids - start
        elsewhere = (local < 0) | (local >= length)
        local = local.masked_fill(elsewhere, 0)
        own_padding = padding - start if padding is not None and start <= padding < start + length else None
        rows = embedding(local, self.weight, own_padding)
        return rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)


class ColumnParallelEmbedding(CutModule, nn.Embedding):
    """An embedding whose columns are cut over the tp ranks; each returns its own columns.

    For tables whose columns belong to heads: relative position biases.

    Args:
        num_embeddings, embedding_dim, padding_idx: of the whole table.
        group: the tp ranks; None: those of the running job.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: Group | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        group = resolve_group(group)
        check_divides("ColumnParallelEmbedding: embedding_dim", embedding_dim, group.size)
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        cut = even_cut(1, embedding_dim, rank=group.rank, degree=group.size)
        self.set_up(group=group, style="column_embedding", cuts={"weight": cut}, partial=frozenset(), region=None)
        self.cut_parameters()

    @classmethod
    def adopt(cls, module: nn.Module, *, group: Group, cut: Cut, region: CutRegion | None = None) -> Self:
        """Cut the columns of an existing embedding; its weight's values are left to the caller."""
        _check_embedding(module, cut, expected_dim=1, style="column_embedding")
        module.__class__ = adopted_class(module, cls, plain=nn.Embedding)
        cast(Self, module).set_up(
            group=group, style="column_embedding", cuts={"weight": cut}, partial=frozenset(), region=region
        )
        return cast(Self, module)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with own_use(ids, self.weight):
            return embedding(ids, self.weight, self.padding_idx)


def _check_embedding(module: nn.Module, cut: Cut, *, expected_dim: int, style: str) -> None:
    if not isinstance(module, nn.Embedding):
        raise ModelError(f"{type(module).__name__} is not an nn.Embedding, so the style {style} does not fit it")
    if cut.dim != expected_dim:
        raise ModelError(f"{style}: the weight is cut along dim {expected_dim}, not {cut.dim}")
    options = {
        "max_norm": module.max_norm is not None,
        "scale_grad_by_freq": module.scale_grad_by_freq,
        "sparse": module.sparse,
    }
    given = [option for option, is_given in options.items() if is_given]
    if given:
        raise ModelError(f"an embedding with {' and '.join(given)} cannot be cut; build it without, or leave it whole")


def _check_ids(ids: torch.Tensor, vocab_size: int) -> None:
    """On the CPU it costs microseconds; on CUDA it would wait for the device."""
    if ids.device.type != "cpu" or ids.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise IndexError(f"id {wrong} is out of range: the vocabulary has the ids 0 to {vocab_size - 1}")
