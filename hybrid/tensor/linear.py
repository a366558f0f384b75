"""Linear layers cut over the tp ranks, by columns or by rows.

                          weight                 forward over tp          backward over tp
    column parallel       output features cut    -                        all-reduce of the input gradient
      sequence_dim                               all-gather of the input  reduce-scatter of the input gradient
      gather_output                              all-gather of the output -
    row parallel          input features cut     all-reduce               -
      sequence_dim                               reduce-scatter           all-gather

One of each with whatever lies between (heads of attention, an activation function) makes a block that communicates
once each way. The modules keep the names and attributes of the plain ones; sizes such as `out_features` stay the
whole ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import nn

from hybrid.collectives.autograd import gather_from, reduce_from, reduce_scatter_from, scatter_to, split_sizes
from hybrid.collectives.group import Group
from hybrid.contracts.placement import Cut, even_cut, fused_cut
from hybrid.errors import BatchError, ModelError
from hybrid.tensor.cut_module import CutModule, adopted_class, check_divides, resolve_group
from hybrid.tensor.entry import Entry
from hybrid.tensor.foreign_reads import own_use
from hybrid.tensor.overlap import overlapped_linear
from hybrid.tensor.region import CutRegion
from hybrid.weight_gradients import linear

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "check_sequence", "column_linear"]


class ColumnParallel(CutModule):
    """The forward of a column-parallel layer, for `nn.Linear` and for modules with a transposed weight."""

    weight: torch.Tensor
    bias: nn.Parameter  # None where the layer has none
    tensor_parallel_entry: Entry
    gather_output: bool

    def set_up_column(
        self, *, group: Group, cut: Cut, entry: Entry, gather_output: bool, region: CutRegion | None
    ) -> None:
        cuts = {"weight": cut} if self.bias is None else {"weight": cut, "bias": replace(cut, dim=0)}
        self.set_up(group=group, style="colwise", cuts=cuts, partial=frozenset(), region=region)
        entry.num_consumers += 1
        self.tensor_parallel_entry = entry
        self.gather_output = gather_output
        if gather_output:
            _gathered_order(cut, group)  # refuses what it cannot put in order

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        entry = self.tensor_parallel_entry
        with own_use(tensor, self.weight, self.bias):
            output = column_linear(self, tensor, entry, is_transposed=self._is_transposed)
        if not self.gather_output:
            if self.training:
                self.tensor_parallel_region.enter(tensor.device)
            return output
        if entry.sequence_dim is not None:
            self.tensor_parallel_region.leave()
        return self._gather(output)

    @property
    def _is_transposed(self) -> bool:
        return self.tensor_parallel.cuts["weight"].dim == 1

    def _gather(self, output: torch.Tensor) -> torch.Tensor:
        group, cut = self.tensor_parallel.group, self.tensor_parallel.cuts["weight"]
        if group.size == 1:
            return output
        order = _gathered_order(cut, group)
        if order is None:
            sizes = split_sizes(cut.global_size, group.size)
            return gather_from(output, group=group, dim=-1, sizes=sizes, partial=False)
        # A part that several ranks hold is taken from the first of them: its gradient goes there, and is summed
        # over the copies like every other.
        whole = gather_from(output, group=group, dim=-1, partial=False)
        return whole.index_select(-1, torch.tensor(order, device=output.device))


def column_linear(module: Any, tensor: torch.Tensor, entry: Entry, *, is_transposed: bool) -> torch.Tensor:
    """This rank's output features; communication and computation overlap where the entry serves this layer only."""
    weight, bias = module.weight, module.bias
    alone = entry.num_consumers == 1 and entry.group.size > 1 and not entry.passes
    alone = alone and not torch.compiler.is_compiling()  # a graph of operations that are done when they return
    if alone and torch.is_grad_enabled() and tensor.requires_grad:
        return overlapped_linear(
            tensor,
            weight,
            bias,
            group=entry.group,
            sequence_dim=entry.sequence_dim,
            is_transposed=is_transposed,
        )
    return linear(entry(tensor), weight, bias, is_transposed=is_transposed)


class ColumnParallelLinear(ColumnParallel, nn.Linear):
    """A linear layer whose output features are cut over the tp ranks.

    The input is whole and the same on every tp rank (with `sequence_dim`: cut along that dim, evenly). The output
    is this rank's part of the features. Initial values are those of the plain layer for the same seed.

    Args:
        in_features, out_features, bias: of the whole layer.
        group: the tp ranks; None: those of the running job.
        fused: parts that lie one behind the other in the output and are cut each by itself: how many equal ones, or
            (heads, size of a head) of each. `fused=3` for q, k and v; `[(8, 64), (2, 64), (2, 64)]` with fewer heads
            of keys and values.
        gather_output: return the whole output on every rank.
        sequence_dim: the dim along which the input is cut under sequence parallel; None: it is whole.

    Raises:
        ModelError: sizes that the ranks cannot share.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group | None = None,
        fused: int | Sequence[tuple[int, int]] | None = None,
        gather_output: bool = False,
        sequence_dim: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        group = resolve_group(group)
        cut = _column_cut(out_features, fused, group)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        entry = Entry(group, sequence_dim=sequence_dim)
        self.set_up_column(group=group, cut=cut, entry=entry, gather_output=gather_output, region=None)
        self.cut_parameters()

    @classmethod
    def adopt(
        cls,
        module: nn.Module,
        *,
        group: Group,
        cut: Cut,
        entry: Entry,
        gather_output: bool = False,
        region: CutRegion | None = None,
    ) -> Self:
        """Make an existing linear layer, or a Conv1D, column parallel. Its parameters' values are left to the caller.

        Args:
            module: the layer; the object, its name, attributes and hooks stay.
            group: the tp ranks.
            cut: of the weight, along dim 0 (Conv1D: 1).
            entry: where its input comes in; shared by layers that get the same input.
            gather_output: return the whole output on every rank.
            region: switches random streams; None: that of the layers built by hand.

        Raises:
            ModelError: a module that is not such a layer, or computes in its own way.
        """
        if isinstance(module, nn.Linear):
            kind: type[ColumnParallel] = cls
            plain: type[nn.Module] = nn.Linear
        else:
            kind, plain = ColumnParallel, _conv1d_class(module)
        _check_cut_dim(module, cut, expected=0 if kind is cls else 1, style="colwise")
        module.__class__ = adopted_class(module, kind, plain=plain)
        column = cast("ColumnParallel", module)
        column.set_up_column(group=group, cut=cut, entry=entry, gather_output=gather_output, region=region)
        return cast(Self, module)


class RowParallel(CutModule):
    """The forward of a row-parallel layer, for `nn.Linear` and for modules with a transposed weight."""

    weight: torch.Tensor
    bias: nn.Parameter  # None where the layer has none
    input_is_parallel: bool
    sequence_dim: int | None

    def set_up_row(
        self,
        *,
        group: Group,
        cut: Cut,
        input_is_parallel: bool,
        sequence_dim: int | None,
        region: CutRegion | None,
    ) -> None:
        if not input_is_parallel and sequence_dim is not None:
            raise ModelError("input_is_parallel=False takes a whole input, but under sequence_dim each rank has a part")
        if not input_is_parallel and cut != even_cut(cut.dim, cut.global_size, rank=group.rank, degree=group.size):
            raise ModelError(
                f"input_is_parallel=False cuts its input evenly, which does not give the pieces {cut.pieces}"
            )
        partial = frozenset({"bias"}) if self.bias is not None and sequence_dim is not None else frozenset()
        self.set_up(group=group, style="rowwise", cuts={"weight": cut}, partial=partial, region=region)
        self.input_is_parallel = input_is_parallel
        self.sequence_dim = sequence_dim

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        group, region = self.tensor_parallel.group, self.tensor_parallel_region
        if self.sequence_dim is None:
            # Before the product: recompute stops as soon as it has the product's input.
            region.leave()
        if not self.input_is_parallel:
            tensor = scatter_to(tensor, group=group, dim=-1)
        is_transposed = self.tensor_parallel.cuts["weight"].dim == 0
        with own_use(tensor, self.weight):
            partial_sum = linear(tensor, self.weight, None, is_transposed=is_transposed)
        # Added once, after the sum; in the product's dtype, as autocast casts the bias of a plain layer.
        bias = None if self.bias is None else self.bias.to(partial_sum.dtype)
        if self.sequence_dim is None:
            return reduce_from(partial_sum, group=group, bias=bias, given_up=True)
        check_sequence(partial_sum, self.sequence_dim, group)
        output = reduce_scatter_from(partial_sum, group=group, dim=self.sequence_dim, bias=bias, given_up=True)
        if self.training:
            region.enter(tensor.device)  # what follows is cut along the sequence
        return output


class RowParallelLinear(RowParallel, nn.Linear):
    """A linear layer whose input features are cut over the tp ranks.

    The input is this rank's part of the features. The output is the whole sum, the same on every tp rank (with
    `sequence_dim`: this rank's part along that dim). Initial values are those of the plain layer for the same seed.

    Args:
        in_features, out_features, bias: of the whole layer. The bias is whole on every rank.
        group: the tp ranks; None: those of the running job.
        input_is_parallel: False: the input is whole on every rank, and is cut here.
        sequence_dim: the dim along which the output is cut under sequence parallel; None: it is whole. The bias's
            gradient is then a part of the sum over tp.

    Raises:
        ModelError: sizes that the ranks cannot share.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group | None = None,
        input_is_parallel: bool = True,
        sequence_dim: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        group = resolve_group(group)
        check_divides("RowParallelLinear: in_features", in_features, group.size)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        cut = even_cut(1, in_features, rank=group.rank, degree=group.size)
        self.set_up_row(
            group=group, cut=cut, input_is_parallel=input_is_parallel, sequence_dim=sequence_dim, region=None
        )
        self.cut_parameters()

    @classmethod
    def adopt(
        cls,
        module: nn.Module,
        *,
        group: Group,
        cut: Cut,
        input_is_parallel: bool = True,
        sequence_dim: int | None = None,
        region: CutRegion | None = None,
    ) -> Self:
        """Make an existing linear layer, or a Conv1D, row parallel. Its parameters' values are left to the caller.

        `cut` is that of the weight, along dim 1 (Conv1D: 0); the rest as for `ColumnParallelLinear.adopt`.
        """
        if isinstance(module, nn.Linear):
            kind: type[RowParallel] = cls
            plain: type[nn.Module] = nn.Linear
        else:
            kind, plain = RowParallel, _conv1d_class(module)
        _check_cut_dim(module, cut, expected=1 if kind is cls else 0, style="rowwise")
        if cut.copies > 1:
            raise ModelError(f"a row-parallel weight cannot be copied: its {cut.copies} copies would be summed")
        module.__class__ = adopted_class(module, kind, plain=plain)
        cast("RowParallel", module).set_up_row(
            group=group, cut=cut, input_is_parallel=input_is_parallel, sequence_dim=sequence_dim, region=region
        )
        return cast(Self, module)


# -- checks ------------------------------------------------------------------------------------------------------


def check_sequence(tensor: torch.Tensor, dim: int, group: Group) -> None:
    """Refuse a sequence that the ranks cannot share evenly, before it is cut along `dim`."""
    length = tensor.shape[dim]
    if length % group.size:
        below = length // group.size * group.size
        near = f"{below} or {below + group.size}" if below else str(group.size)
        raise BatchError(
            f"sequence parallel: a sequence of {length} (dim {dim}) cannot be cut over tp = {group.size} ranks; "
            f"pad or cut it to {near} (to generate token by token, set sequence_parallel to False)"
        )


def _column_cut(out_features: int, fused: int | Sequence[tuple[int, int]] | None, group: Group) -> Cut:
    what = "ColumnParallelLinear: out_features"
    if fused is None:
        check_divides(what, out_features, group.size)
        return even_cut(0, out_features, rank=group.rank, degree=group.size)
    if isinstance(fused, int):
        if out_features % fused:
            raise ModelError(f"{what} = {out_features} is not {fused} equal parts")
        check_divides(f"{what} / {fused}", out_features // fused, group.size)
        parts: Sequence[tuple[int, int]] = [(out_features // fused, 1)] * fused
    else:
        parts = fused
    width = sum(heads * size for heads, size in parts)
    if width != out_features:
        raise ModelError(f"{what} = {out_features}, but the parts {list(parts)} are {width} features")
    try:
        return fused_cut(0, parts, rank=group.rank, degree=group.size)
    except ValueError as error:
        raise ModelError(f"{what} = {out_features} in parts {list(parts)}: {error}") from None


def _gathered_order(cut: Cut, group: Group) -> list[int] | None:
    """Where each whole feature lies in what all ranks hold, one behind the other; None: there already."""
    degree = group.size
    if cut == even_cut(cut.dim, cut.global_size, rank=group.rank, degree=degree):
        return None
    holders = degree // cut.copies
    if sum(length for _, length in cut.pieces) * holders != cut.global_size:
        raise ModelError(f"gather_output: pieces {cut.pieces} of {cut.global_size} are not the same for every rank")
    lengths = [length for _, length in cut.pieces]
    order: list[int] = []
    for length, place in zip(lengths, itertools.accumulate(lengths, initial=0), strict=False):
        for holder in range(holders):
            first = holder * cut.copies * cut.local_size + place
            order += range(first, first + length)
    return order


def _conv1d_class(module: nn.Module) -> type[nn.Module]:
    """The class among the module's own that is a Conv1D: a linear layer with the weight (in, out)."""
    for kind in type(module).__mro__:
        if kind.__name__ == "Conv1D":
            return cast("type[nn.Module]", kind)
    raise ModelError(f"{type(module).__name__} is neither an nn.Linear nor a Conv1D, so this style does not fit it")


def _check_cut_dim(module: nn.Module, cut: Cut, *, expected: int, style: str) -> None:
    if cut.dim != expected:
        raise ModelError(f"{style}: the weight of a {type(module).__name__} is cut along dim {expected}, not {cut.dim}")
