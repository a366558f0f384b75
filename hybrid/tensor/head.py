"""The output layer of a language model, cut over the vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import nn

from hybrid.collectives.group import Group
from hybrid.contracts.placement import Cut, even_cut
from hybrid.errors import ModelError
from hybrid.tensor.cut_module import CutModule, adopted_class, resolve_group
from hybrid.tensor.entry import Entry
from hybrid.tensor.foreign_reads import own_use
from hybrid.tensor.linear import column_linear
from hybrid.tensor.logits import VocabParallelLogits
from hybrid.tensor.region import CutRegion

__all__ = ["VocabParallelHead"]


class VocabParallelHead(CutModule, nn.Linear):
    """A linear layer whose output features are a vocabulary, cut over the tp ranks, unevenly where need be.

    The input is whole (with `sequence_dim`: cut along that dim); backward sends its gradient as a column-parallel
    layer does. The output are `VocabParallelLogits`, which look whole. The weight may be that of a
    `VocabParallelEmbedding` (`head.weight = embedding.weight`): both cut the vocabulary alike.

    Args:
        in_features, out_features, bias: of the whole layer; out_features is the size of the vocabulary.
        group: the tp ranks; None: those of the running job.
        sequence_dim: the dim along which the input is cut under sequence parallel; None: it is whole.
    """

    tensor_parallel_entry: Entry

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group | None = None,
        sequence_dim: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        group = resolve_group(group)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        cut = even_cut(0, out_features, rank=group.rank, degree=group.size)
        self.set_up_head(group=group, cut=cut, entry=Entry(group, sequence_dim=sequence_dim), region=None)
        self.cut_parameters()

    @classmethod
    def adopt(cls, module: nn.Module, *, group: Group, cut: Cut, entry: Entry, region: CutRegion | None = None) -> Self:
        """Cut the vocabulary of an existing output layer; its parameters' values are left to the caller.

        Raises:
            ModelError: a module that is no `nn.Linear` or computes in its own way; a cut that is not the even one.
        """
        if not isinstance(module, nn.Linear):
            raise ModelError(f"{type(module).__name__} is not an nn.Linear, so the style vocab_head does not fit it")
        if cut != even_cut(0, cut.global_size, rank=group.rank, degree=group.size):
            raise ModelError(f"vocab_head: the vocabulary is cut evenly along dim 0, not as {cut.pieces}")
        module.__class__ = adopted_class(module, cls, plain=nn.Linear)
        cast(Self, module).set_up_head(group=group, cut=cut, entry=entry, region=region)
        return cast(Self, module)

    def set_up_head(self, *, group: Group, cut: Cut, entry: Entry, region: CutRegion | None) -> None:
        cuts = {"weight": cut} if self.bias is None else {"weight": cut, "bias": replace(cut, dim=0)}
        self.set_up(group=group, style="vocab_head", cuts=cuts, partial=frozenset(), region=region)
        entry.num_consumers += 1
        self.tensor_parallel_entry = entry

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        entry = self.tensor_parallel_entry
        if entry.sequence_dim is not None:
            self.tensor_parallel_region.leave()  # the sequence is whole from here on
        with own_use(tensor, self.weight, self.bias):
            local = column_linear(self, tensor, entry, is_transposed=False)
        vocab_size = self.tensor_parallel.cuts["weight"].global_size
        group = self.tensor_parallel.group
        return VocabParallelLogits.of(local, group=group, vocab_size=vocab_size, is_hidden=True)
