"""`nn.MultiheadAttention` cut between its heads, with every option of the plain module.

Each rank projects to its own heads, attends within them, and adds its part of the output projection; one all-reduce
(one reduce-scatter under sequence parallel) makes the output whole, one in backward the input's gradient. Attention
weights, where they are asked for, are those of all heads: their average costs one all-reduce more, the weights of
each head one all-gather. With `need_weights=False` neither is sent.

    B batch   L queries   S keys   H heads   D size of a head   E = H * D   one rank has H/tp heads
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from hybrid import shims
from hybrid.collectives.autograd import copy_to, gather_from, reduce_from, reduce_scatter_from, scatter_to
from hybrid.collectives.group import Group
from hybrid.contracts.placement import Cut, fused_cut
from hybrid.errors import BatchError, ModelError
from hybrid.tensor.cut_module import CutModule, local_part, resolve_group
from hybrid.tensor.entry import Entry
from hybrid.tensor.foreign_reads import own_use
from hybrid.tensor.overlap import overlapped_linear
from hybrid.tensor.region import CutRegion
from hybrid.weight_gradients import Rows, linear

__all__ = ["ParallelMultiheadAttention", "attention_cuts", "disable_fast_paths"]


_Mask = Tensor | None


def attention_cuts(module: nn.MultiheadAttention, *, rank: int, degree: int) -> dict[str, Cut]:
    """How each cut parameter of a plain module lies on one of `degree` ranks, which divide its heads.

    `out_proj.bias` is not among them: it stays whole.
    """
    head = (module.num_heads, module.head_dim)
    dim_and_parts = {
        **{"in_proj_weight": (0, 3), "q_proj_weight": (0, 1), "k_proj_weight": (0, 1), "v_proj_weight": (0, 1)},
        **{"in_proj_bias": (0, 3), "bias_k": (2, 1), "bias_v": (2, 1), "out_proj.weight": (1, 1)},
    }
    names = {name for name, _ in module.named_parameters()}
    return {
        name: fused_cut(dim, [head] * parts, rank=rank, degree=degree)
        for name, (dim, parts) in dim_and_parts.items()
        if name in names
    }


class ParallelMultiheadAttention(CutModule, nn.MultiheadAttention):
    """`nn.MultiheadAttention` of which each tp rank holds an equal number of heads.

    Arguments are those of `nn.MultiheadAttention`; the initial values are those that the whole module would have.
    Inputs, masks and results are those of the plain module, whole on every rank: a mask of (B * H, L, S) has all
    heads, returned weights are those of all heads. `embed_dim`, `kdim`, `vdim` and `head_dim` stay those of the whole
    module, because callers compare them with their inputs; `num_heads` is the number of this rank's heads,
    `global_num_heads` that of all.

    Args:
        group: the tp ranks; None: those of the running job.
        sequence_dim: dim along which queries arrive cut over the group and the output leaves cut (sequence parallel);
            None: both are whole on every rank. It is 1 with `batch_first`, else 0. Masks, and weights that are
            returned, cover the whole sequence on every rank.
        memory_is_whole: under sequence parallel, keys and values that are not the query arrive whole on every rank
            (a memory gathered once for many layers); False: cut like the query.
    """

    global_num_heads: int

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        group: Group | None = None,
        sequence_dim: int | None = None,
        memory_is_whole: bool = False,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        group = resolve_group(group)
        _check_fit(self, group=group, sequence_dim=sequence_dim)
        self._set_up(group=group, sequence_dim=sequence_dim, memory_is_whole=memory_is_whole)
        self.cut_parameters()

    @classmethod
    def adopt(
        cls,
        module: nn.MultiheadAttention,
        *,
        group: Group,
        region: CutRegion | None = None,
        entry: Entry | None = None,
        memory_entry: Entry | None = None,
        sequence_dim: int | None = None,
        memory_is_whole: bool = False,
    ) -> Self:
        """Make a plain module, in place, one that computes with its own heads.

        Its parameters stay the same objects under the same names and keep their values: the caller cuts those by
        `module.tensor_parallel.cuts`, before the first forward.

        Args:
            module, group: an `nn.MultiheadAttention`, not of a subclass; the tp ranks.
            region: where dropout of attention weights draws its numbers; None: the one of all layers of the group.
            entry: where the query enters, to share with other layers that read the same tensor; None: its own, which
                lets backward's communication overlap with the weight's gradient.
            memory_entry: the same for keys and values that are not the query.
            sequence_dim, memory_is_whole: as for the constructor.

        Raises:
            ModelError: code other than torch's would meet parts of weights; the ranks do not divide the heads.
        """
        if type(module) is not nn.MultiheadAttention or "forward" in vars(module):
            raise ModelError(
                f"{type(module).__name__} is a subclass of nn.MultiheadAttention, or has a forward on the instance: "
                "that code would find parts of weights; leave it whole, or use nn.MultiheadAttention itself"
            )
        if type(module.out_proj) not in (NonDynamicallyQuantizableLinear, nn.Linear):
            raise ModelError(
                f"out_proj of a MultiheadAttention was replaced by a {type(module.out_proj).__name__}, whose code "
                "would find a part of its weight; leave the attention whole"
            )
        _check_fit(module, group=group, sequence_dim=sequence_dim)
        module.__class__ = cls
        adopted = cast(Self, module)
        cls._set_up(
            adopted,
            group=group,
            region=region,
            entry=entry,
            memory_entry=memory_entry,
            sequence_dim=sequence_dim,
            memory_is_whole=memory_is_whole,
        )
        return adopted

    def _set_up(
        self,
        *,
        group: Group,
        sequence_dim: int | None,
        memory_is_whole: bool,
        region: CutRegion | None = None,
        entry: Entry | None = None,
        memory_entry: Entry | None = None,
    ) -> None:
        """Record how the module is cut; its parameters are still whole."""
        cuts = attention_cuts(self, rank=group.rank, degree=group.size)
        # Under sequence parallel each rank adds the bias to its part of the sequence.
        partial = {"out_proj.bias"} if sequence_dim is not None and self.out_proj.bias is not None else set()
        self.set_up(group=group, style="attention", cuts=cuts, partial=frozenset(partial), region=region)
        self.global_num_heads, self.num_heads = self.num_heads, self.num_heads // group.size
        self._sequence_dim = sequence_dim
        self._entry = entry or Entry(group, sequence_dim=sequence_dim)
        self._memory_entry = memory_entry or Entry(group, sequence_dim=None if memory_is_whole else sequence_dim)
        self._entry.num_consumers += 1
        self._memory_entry.num_consumers += 1
        self.out_proj.__class__ = _OutputProjection
        cast(_OutputProjection, self.out_proj).cut = cuts["out_proj.weight"]

    def cut_parameters(self) -> None:
        for name, cut in self.tensor_parallel.cuts.items():
            parameter = self.get_parameter(name)
            parameter.data = local_part(parameter.data, cut)

    def _reset_parameters(self) -> None:
        """Draw what the whole module would draw and keep the own part; as there, `out_proj` draws its own weight."""
        cuts = self.tensor_parallel.cuts if "tensor_parallel" in vars(self) else {}  # the plain constructor is at work
        own = {name: cut for name, cut in cuts.items() if name != "out_proj.weight"}
        _redraw(self, own, super()._reset_parameters)

    reset_parameters = _reset_parameters

    # -- forward -------------------------------------------------------------------------------------------------

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`; the same on every rank."""
        if is_causal and attn_mask is None:
            raise BatchError("is_causal=True is a hint about attn_mask, which is None; pass the mask too")
        batched = _check_inputs(query, key, value)
        group, batch_dim = self.tensor_parallel.group, 0 if self.batch_first else 1
        dtype = query.dtype
        if not batched:
            batches = {id(one): one.unsqueeze(batch_dim) for one in (query, key, value)}  # what was one stays one
            query, key, value = (batches[id(one)] for one in (query, key, value))
        own, of_output = shims.own_parts(self)[0].values(), shims.own_parts(self.out_proj)[0].values()
        with own_use(query, key, value, *own):
            q, k, v = self._project(query, key, value)
        # With the hint, and where nothing else needs the mask, the kernel makes the mask itself, as in plain torch.
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = self._mask(None if causal else attn_mask, key_padding_mask, dtype=dtype, q=q, k=k)
        dropout = self.dropout if self.training else 0.0
        weights = None
        with ExitStack() as stack:
            if dropout > 0.0:
                self.tensor_parallel_region.enter(query.device)
                stack.callback(self.tensor_parallel_region.leave)
            if need_weights:
                context, weights = _attend_with_weights(q, k, v, mask, dropout)
            else:
                context = functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        with own_use(context, *of_output):
            output = self._close(context)
        if weights is not None and average_attn_weights:
            weights = reduce_from(weights.sum(dim=1), group=group) / self.global_num_heads
        elif weights is not None:
            weights = gather_from(weights, group=group, dim=1, partial=False)
        if not batched:
            output = output.squeeze(batch_dim)
            weights = weights if weights is None else weights.squeeze(0)
        return output, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H/tp, L, D), keys and values (B, H/tp, S, D) of the own heads, with those that options add."""
        width = self.num_heads * self.head_dim
        runs = [(query, self._entry, 1), (key, self._memory_entry, 1), (value, self._memory_entry, 1)]
        if self.in_proj_weight is not None and key is value:
            # One product for the neighbours that read the same tensor.
            runs = [(query, self._entry, 3)] if query is key else [runs[0], (key, self._memory_entry, 2)]
        sizes = [width * count for *_, count in runs]
        weights: tuple[Tensor, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        parts: list[Rows | None] = [None] * len(runs)
        if self.in_proj_weight is not None and len(runs) > 1:
            weights, stops = self.in_proj_weight.split(sizes), accumulate(sizes)
            parts = [Rows(self.in_proj_weight, stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
        elif self.in_proj_weight is not None:
            weights = (self.in_proj_weight,)
        biases = [None] * len(runs) if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
        projected: list[Tensor] = []
        entered: dict[int, Tensor] = {}
        for (tensor, entry, _), weight, bias, part_of in zip(runs, weights, biases, parts, strict=True):
            alone = entry.num_consumers == 1 and sum(one is tensor for one, *_ in runs) == 1
            alone = alone and not torch.compiler.is_compiling()
            if alone and entry.group.size > 1 and tensor.requires_grad and torch.is_grad_enabled():
                product = overlapped_linear(
                    tensor,
                    weight,
                    bias,
                    group=entry.group,
                    sequence_dim=entry.sequence_dim,
                    is_transposed=False,
                    part_of=part_of,
                )
            else:
                if id(tensor) not in entered:
                    entered[id(tensor)] = entry(tensor)
                product = linear(entered[id(tensor)], weight, bias, part_of=part_of)
            projected += product.split(width, dim=-1)
        heads = (one.unflatten(-1, (self.num_heads, self.head_dim)) for one in projected)
        q, k, v = (one.transpose(1, 2) if self.batch_first else one.permute(1, 2, 0, 3) for one in heads)
        if self.bias_k is not None and self.bias_v is not None:
            ends = (one.view(1, self.num_heads, 1, -1).expand(len(k), -1, -1, -1) for one in (self.bias_k, self.bias_v))
            k, v = (torch.cat(pair, dim=2) for pair in zip((k, v), ends, strict=True))
        if self.add_zero_attn:
            k, v = (functional.pad(one, (0, 0, 0, 1)) for one in (k, v))
        return q, k, v

    def _mask(self, attn_mask: _Mask, padding: _Mask, *, dtype: torch.dtype, q: Tensor, k: Tensor) -> _Mask:
        """What is added to the scores of the own heads: [B or 1, H/tp or 1, L or 1, S].

        A mask may be trained: it is a replicated value that cut computation reads, so its gradient is summed.
        """
        num_added = (self.bias_k is not None) + bool(self.add_zero_attn)
        batch, num_queries, num_keys = q.shape[0], q.shape[2], k.shape[2] - num_added
        group = self.tensor_parallel.group
        mask = None
        if attn_mask is not None:
            mask = _additive(attn_mask, dtype, "attn_mask")
            whole = (batch * self.global_num_heads, num_queries, num_keys)
            if mask.shape == whole[1:]:
                mask = copy_to(mask, group=group)[None, None]
            elif mask.shape == whole:
                mask = scatter_to(mask.unflatten(0, (batch, self.global_num_heads)), group=group, dim=1)
            else:
                raise BatchError(
                    f"attn_mask has the shape {tuple(attn_mask.shape)}; it must be {whole[1:]} (queries, keys) or "
                    f"{whole} (batch × all {self.global_num_heads} heads, queries, keys)"
                )
        if padding is not None:
            if padding.shape != (batch, num_keys) and (batch > 1 or padding.shape != (num_keys,)):
                shape = tuple(padding.shape)
                raise BatchError(f"key_padding_mask has the shape {shape}, not (batch, keys) = {(batch, num_keys)}")
            padding = copy_to(_additive(padding, dtype, "key_padding_mask"), group=group).view(batch, 1, 1, num_keys)
            mask = padding if mask is None else mask + padding
        return functional.pad(mask, (0, num_added)) if mask is not None and num_added else mask

    def _close(self, context_BHLD: Tensor) -> Tensor:
        """The output: this rank's part of it, summed over the group, then the bias, once."""
        order = (0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)
        partial = linear(context_BHLD.permute(*order).flatten(2), self.out_proj.weight, None)
        group = self.tensor_parallel.group
        # Under autocast the sum is in the lower dtype and the bias is not: plain torch returns the lower one.
        bias = None if self.out_proj.bias is None else self.out_proj.bias.to(partial.dtype)
        if self._sequence_dim is None:
            return reduce_from(partial, group=group, bias=bias, given_up=True)
        return reduce_scatter_from(partial, group=group, dim=self._sequence_dim, bias=bias, given_up=True)


class _OutputProjection(NonDynamicallyQuantizableLinear):
    """The output layer of attention that is cut; the attention module reads its parameters."""

    cut: Cut

    def reset_parameters(self) -> None:
        _redraw(self, {"weight": self.cut}, super().reset_parameters)


def disable_fast_paths(model: nn.Module) -> None:
    """Keep `nn.TransformerEncoderLayer` and `nn.TransformerEncoder` in a model from torch's fused inference path.

    That path reads the parameters of the modules inside a layer directly and would take parts for whole weights. The
    attributes set here are read nowhere else, so training is untouched. Without gradients, in eval mode, rows of
    padding are no longer zeros but what the ordinary path computes.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # "neither": the layer calls `self.activation` itself
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _check_fit(module: nn.MultiheadAttention, *, group: Group, sequence_dim: int | None) -> None:
    what = f"MultiheadAttention(embed_dim={module.embed_dim}, num_heads={module.num_heads})"
    if module.num_heads % group.size:
        fitting = [size for size in range(1, module.num_heads + 1) if module.num_heads % size == 0]
        raise ModelError(
            f"{what}: tp={group.size} does not divide num_heads={module.num_heads}; tensor-parallel degrees that do: "
            f"{', '.join(map(str, fitting))}"
        )
    expected = 1 if module.batch_first else 0
    if sequence_dim not in (None, expected):
        raise ModelError(
            f"{what}: sequence_dim={sequence_dim}, but with batch_first={module.batch_first} its inputs have the "
            f"sequence in dim {expected}"
        )


def _check_inputs(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the inputs have a batch dim."""
    if query.is_nested or key.is_nested or value.is_nested:
        raise BatchError("a cut MultiheadAttention takes no nested tensors; pad them and pass a key_padding_mask")
    dims = (query.dim(), key.dim(), value.dim())
    if dims not in {(2, 2, 2), (3, 3, 3)}:
        raise BatchError(f"query, key and value have {dims} dims; all must have 3, or all 2 (without a batch)")
    return dims[0] == 3


def _additive(mask: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """A mask as values to add: -inf where a bool mask is True."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    if not mask.is_floating_point():
        raise BatchError(f"{name} has the dtype {mask.dtype}; it must be bool or floating point")
    return mask


def _attend_with_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: _Mask, dropout: float
) -> tuple[Tensor, Tensor]:
    """Attention whose weights can be returned; the same operations as plain torch, for the same rounding."""
    sizes = query.shape[:2]
    q, k, v = (one.flatten(0, 1) for one in (query * math.sqrt(1.0 / query.shape[-1]), key, value))
    if mask is None:
        scores = torch.bmm(q, k.transpose(1, 2))
    else:
        added = mask.flatten(0, 1) if mask.shape[:2] == (1, 1) else mask.expand(*sizes, -1, -1).flatten(0, 1)
        scores = torch.baddbmm(added, q, k.transpose(1, 2))
    weights = functional.softmax(scores, dim=-1)
    if dropout > 0.0:
        weights = functional.dropout(weights, p=dropout)
    return torch.bmm(weights, v).unflatten(0, sizes), weights.unflatten(0, sizes)


def _redraw(module: nn.Module, cuts: dict[str, Cut], draw: Callable[[], None]) -> None:
    """Let `draw` fill whole parameters in the place of the cut ones, which then take their part."""
    own = {name: module.get_parameter(name) for name in cuts}
    if all(own[name].shape[cut.dim] == cut.global_size for name, cut in cuts.items()):
        draw()  # they are whole: the module is given its values before it is cut
        return
    for name, cut in cuts.items():
        shape = list(own[name].shape)
        shape[cut.dim] = cut.global_size
        setattr(module, name, nn.Parameter(own[name].new_empty(shape)))
    draw()
    for name, cut in cuts.items():
        own[name].data.copy_(local_part(module.get_parameter(name).detach(), cut))
        setattr(module, name, own[name])
