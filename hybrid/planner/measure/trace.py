"""One forward on fake tensors, operation by operation: who makes which memory, what is multiplied, what stays.

A storage belongs to the first part of the model that saves it for backward; else to the first unit that is given it (a
recomputed unit holds its inputs); else to the part that made it (results that selective recompute keeps).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hybrid import shims
from hybrid.planner.measure.records import Attention, Made, Product, Work

__all__ = ["Trace", "tensors_in"]

# Operation -> place of the two factors among its arguments.
_PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1), "aten::baddbmm": (1, 2)}
_SOFTMAX = {"aten::_softmax", "aten::_safe_softmax"}
_ATTENTION = {str(operation).rpartition(".")[0].replace(".", "::") for operation in shims.ATTENTION_OPERATIONS}
_ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}
_FP32 = 4  # bytes
_MASKS = {"aten::bernoulli_"}
_PARTS_OF_DROPOUT = {"aten::bernoulli_", "aten::div_"}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of a tree, model outputs and dataclasses included."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        for item in vars(value).values():
            if isinstance(item, torch.Tensor | list | tuple | Mapping):
                yield from tensors_in(item)


class Trace(shims.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what a forward does; `part` says where in the model it is.

    Args:
        model: on fake tensors; its parameters and buffers are nobody's activations.
        sample: what it is called with: an activation once somebody saves it.
        styles: name of a parameter -> how tensor parallel cuts the layer that multiplies with it.
    """

    def __init__(self, model: nn.Module, sample: Any, styles: Mapping[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = ""
        self.order: list[Made] = []
        self.products: list[Product] = []
        self.attentions: list[Attention] = []
        self.work: dict[str, Work] = defaultdict(Work)
        self.used_in: dict[str, list[str]] = {}  # parameter -> the parts that use it
        self._styles = styles
        self._made: dict[int, Made] = {}
        self._scores: dict[Made, tuple[int, int, int, int]] = {}  # product -> its sizes, until it is known what it is
        self._is_paused = False
        own = [(reference, name) for name, one in model.named_parameters() for reference in [_reference(one)]]
        own += [(_reference(buffer), "") for buffer in model.buffers()]
        self._own = own  # while a reference is held, its number belongs to no other storage
        self._names = {reference.cdata: name for reference, name in own}
        for tensor in tensors_in(sample):
            self._add(tensor)

    def find(self, tensor: torch.Tensor) -> Made | None:
        """Its storage, if a forward made it."""
        return self._made.get(_reference(tensor).cdata)

    def saves(self, tensor: torch.Tensor) -> torch.Tensor:
        """For `saved_tensors_hooks`."""
        made = self.find(tensor)
        if made is not None and made.saver is None:
            made.saver = self.part
        return tensor

    def receives(self, values: Any) -> None:
        """A unit is given these."""
        for tensor in tensors_in(values):
            made = self.find(tensor)
            if made is not None and made.receiver is None:
                made.receiver = self.part

    def settle(self) -> None:
        """Forward is over, and nobody holds its results but the graph: note what is left."""
        for made in self.order:
            made.is_kept = not made.reference.expired()  # type: ignore[no-untyped-call]

    def as_one_kernel(self, make: Callable[[], tuple[torch.Tensor, ...]], *inputs: torch.Tensor) -> Any:
        """Run `make` unseen; its results count as those of one kernel that reads `inputs`."""
        self._is_paused = True
        try:
            made = make()
        finally:
            self._is_paused = False
        self._work_out("fused", list(inputs), list(made), list(made), self._weights(inputs), self._sources(inputs))
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if name == "aten::_grouped_mm" and args[0].dtype is torch.float32:
            # The shapes of fp32 are those of bf16, the only type that torch 2.13 knows them for.
            result = func(*(arg.bfloat16() for arg in args[:2]), *args[2:], **(kwargs or {})).float()
        else:
            result = func(*args, **(kwargs or {}))
        if self._is_paused:
            return result
        inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(result))
        weights = self._weights(inputs)
        sources = self._sources(inputs)
        fresh = [value for value in outputs if not self._is_known(value)]
        if name in _PRODUCTS:
            self._multiply(name, args, fresh[0], weights, sources)
        elif name in _ATTENTION:
            self._attend(args, kwargs or {}, fresh, sources)
        elif name == "aten::convolution":
            self._convolve(args, fresh[0], weights, sources)
        elif name == "aten::_grouped_mm":
            self._multiply_groups(args, fresh[0], weights, sources)
        else:
            self._work_out(name, inputs, outputs, fresh, weights, sources)
        return result

    # -- products ------------------------------------------------------------------------------------------------

    def _multiply(self, name: str, args: Any, out: torch.Tensor, weights: list[str], sources: tuple[Made, ...]) -> None:
        first, second = (args[place] for place in _PRODUCTS[name])
        groups = first.shape[0] if first.dim() == 3 else 1
        rows, in_features, out_features = first.shape[-2], first.shape[-1], second.shape[-1]
        if first.dim() == 3 and not weights:
            self._multiply_activations(first, second, out, sources)
            return
        if self._name(first) and not self._name(second):  # weight · input
            rows, out_features = out_features, rows
        has_gradient = any(value.requires_grad for value in (first, second) if not self._name(value))
        self._count_product(out, weights, sources, rows * groups, in_features, out_features, groups, has_gradient)

    def _multiply_activations(
        self, first: torch.Tensor, second: torch.Tensor, out: torch.Tensor, sources: tuple[Made, ...]
    ) -> None:
        """Scores of queries and keys, or of scores and values; the first are known by the softmax that follows."""
        rows, queries, inner = first.shape
        scores = self.find(first)
        made = self._add(out, is_cut=any(one.is_cut for one in sources), sources=sources)
        self.work[self.part].kernels += 1
        if scores is not None and scores.is_pairs:
            found = next((self._scores.pop(one) for one in _with_sources(scores) if one in self._scores), None)
            if found is None:
                return
            self.attentions.append(
                Attention(
                    part=self.part,
                    rows=rows,
                    num_kv_rows=rows,
                    queries=queries,
                    keys=inner,
                    head_dim=found[2],
                    value_dim=second.shape[-1],
                    is_causal=False,
                    is_fused=False,
                    is_cut=made.is_cut,
                )
            )
            return
        made.is_scores = True
        self._scores[made] = (rows, queries, inner, second.shape[-1])

    def _multiply_groups(self, args: Any, out: torch.Tensor, weights: list[str], sources: tuple[Made, ...]) -> None:
        first, second = args[0], args[1]
        groups = second.shape[0] if second.dim() == 3 else 1
        sizes = prod(first.shape[:-1]), first.shape[-1], second.shape[-1], groups
        self._count_product(out, weights, sources, *sizes, first.requires_grad)

    def _convolve(self, args: Any, out: torch.Tensor, weights: list[str], sources: tuple[Made, ...]) -> None:
        kernel = args[1].shape
        sizes = out.numel() // out.shape[1], prod(kernel[1:]), kernel[0], 1
        self._count_product(out, weights, sources, *sizes, args[0].requires_grad)

    def _count_product(
        self,
        out: torch.Tensor,
        weights: list[str],
        sources: tuple[Made, ...],
        rows: int,
        in_features: int,
        out_features: int,
        groups: int,
        has_gradient: bool,
    ) -> None:
        matrices = [name for name in weights if name.rpartition(".")[2] != "bias"] or weights
        weight = next((name for name in matrices if name in self._styles), matrices[-1] if matrices else "")
        style = self._styles.get(weight, "")
        style = "head" if style == "vocab" else style  # the token table is the head too
        is_cut = style in {"colwise", "head"} or (style != "rowwise" and any(made.is_cut for made in sources))
        self._add(out, is_cut=is_cut, sources=sources, is_row_result=style == "rowwise")
        if style in {"colwise", "head"}:
            for one in sources:
                one.is_column_input = not one.is_cut
        work = self.work[self.part]
        work.kernels += 1
        work.reductions += style in {"rowwise", "head"}
        self.products.append(
            Product(
                part=self.part,
                weight=weight,
                rows=rows,
                in_features=in_features,
                out_features=out_features,
                num_groups=groups,
                has_input_gradient=has_gradient,
            )
        )

    def _attend(self, args: Any, kwargs: Any, fresh: list[torch.Tensor], sources: tuple[Made, ...]) -> None:
        query, key, value = args[:3]
        is_cut = any(made.is_cut for made in sources)
        for place, tensor in enumerate(fresh):
            self._add(tensor, is_cut=is_cut, sources=sources, is_statistics=place > 0)
        self.work[self.part].kernels += 1
        causal = args[4] if len(args) > 4 else kwargs.get("is_causal", False)
        self.attentions.append(
            Attention(
                part=self.part,
                rows=prod(query.shape[:-2]),
                num_kv_rows=prod(key.shape[:-2]),
                queries=query.shape[-2],
                keys=key.shape[-2],
                head_dim=query.shape[-1],
                value_dim=value.shape[-1],
                is_causal=bool(causal),
                is_fused=True,
                is_cut=is_cut,
            )
        )

    # -- all else ------------------------------------------------------------------------------------------------

    def _work_out(
        self,
        name: str,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        fresh: list[torch.Tensor],
        weights: list[str],
        sources: tuple[Made, ...],
    ) -> None:
        is_looked_up = any(self._styles.get(weight) == "vocab" for weight in weights)
        is_cut = any(made.is_cut for made in sources) and not is_looked_up
        scores = max((value.numel() for value in inputs if _is(self.find(value), "is_scores")), default=0)
        is_pairs = any(made.is_pairs for made in sources)
        for value in fresh:
            of_scores = 0 < scores == value.numel()
            made = self._add(
                value, is_cut=is_cut, sources=sources, is_scores=of_scores, is_pairs=is_pairs and of_scores
            )
            if name == "aten::native_layer_norm" and value is not fresh[0]:
                made.num_bytes = value.numel() * _FP32
            if name in _SOFTMAX and of_scores:
                for one in _with_sources(made):
                    one.is_pairs = True
        if name in _MASKS:
            for mask in (self.find(value) for value in outputs):
                if mask is not None and not mask.is_mask:
                    mask.is_mask, mask.num_bytes = True, prod(outputs[0].shape)
        is_in_place = name.endswith("_") and bool(outputs)
        if name in _ALLOCATIONS or not (fresh or is_in_place):
            return  # memory alone, or a view
        if name in _PARTS_OF_DROPOUT and all(_is(self.find(value), "is_mask") for value in outputs):
            return  # on a GPU one kernel makes and applies the mask
        work = self.work[self.part]
        work.kernels += 1
        work.reductions += is_looked_up
        num_bytes = float(sum(self._size(value) for value in (*fresh, *(inputs if not is_looked_up else fresh))))
        if is_in_place and not fresh:
            num_bytes += sum(self._size(value) for value in outputs)
        touched = [self.find(value) for value in outputs]
        if any(_is(made, "is_pairs") for made in (*touched, *sources)):
            work.pairs += num_bytes
        elif is_cut:
            work.cut += num_bytes
        else:
            work.whole += num_bytes

    def _size(self, value: torch.Tensor) -> int:
        made = self.find(value)
        if made is not None:
            return min(value.numel() * value.element_size(), made.num_bytes)
        return value.numel() * value.element_size()

    def _sources(self, inputs: Iterable[torch.Tensor]) -> tuple[Made, ...]:
        return tuple(dict.fromkeys(made for value in inputs if (made := self.find(value)) is not None))

    def _is_known(self, tensor: torch.Tensor) -> bool:
        number = _reference(tensor).cdata
        return number in self._made or number in self._names

    def _add(self, tensor: torch.Tensor, **facts: Any) -> Made:
        reference = _reference(tensor)
        made = Made(reference=reference, part=self.part, num_bytes=tensor.untyped_storage().nbytes(), **facts)
        self._made[reference.cdata] = made
        self.order.append(made)
        return made

    def _name(self, tensor: torch.Tensor) -> str:
        """Of a parameter; a cast of one is none."""
        return self._names.get(_reference(tensor).cdata, "")

    def _weights(self, inputs: Iterable[torch.Tensor]) -> list[str]:
        names = list(dict.fromkeys(name for value in inputs if (name := self._name(value))))
        for name in names:
            parts = self.used_in.setdefault(name, [])
            if self.part not in parts:
                parts.append(self.part)
        return names


def _reference(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is(made: Made | None, fact: str) -> bool:
    return made is not None and bool(getattr(made, fact))


def _with_sources(made: Made) -> Iterator[Made]:
    """It and the scores that it was worked out from."""
    seen, waiting = set(), [made]
    while waiting:
        one = waiting.pop()
        if one in seen or not (one.is_scores or one is made):
            continue
        seen.add(one)
        yield one
        waiting += [source for source in one.sources if source.is_scores]
