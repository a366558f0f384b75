"""Logits that are cut over the vocabulary and look whole.

An output layer cut over the vocabulary returns `VocabParallelLogits`. A model's own code goes on as if it held the
whole logits: the shape is the whole one, and a loss by `torch.nn.functional.cross_entropy` gives the plain result.

    without the whole logits, on every rank alone     casts, detach, clone, contiguous; arithmetic with numbers and with
                                                      tensors that broadcast over the vocabulary; some functions of one
                                                      number (tanh, ...); view, reshape, indexing and slicing that leave
                                                      the vocabulary whole; transpose and permute
    without the whole logits, O(tokens) are sent      cross_entropy (class indices, no class weights), argmax
    anything else                                     first gathers the whole logits, differentiably

A gather is a collective: all tp ranks must come to it. `print` shows this rank's part and gathers nothing. Hooks and
`.grad` see the gradient of this rank's part. Operations that write in place are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from hybrid.collectives.autograd import gather_from, split_sizes
from hybrid.collectives.group import Group
from hybrid.errors import ModelError
from hybrid.metadata import METADATA_CALLS

__all__ = [
    "VocabParallelLogits",
    "Vocabulary",
    "getters",
    "handles",
    "holds_logits",
    "is_last",
    "methods",
    "plain",
    "whole_shape",
    "wrapped",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """How logits are cut."""

    group: Group
    size: int
    """Of the whole vocabulary; the ranks hold parts that differ by one at most, the longer ones first."""
    dim: int
    """The dim of the logits that is the vocabulary, counted from 0."""
    is_hidden: bool = False
    """Nobody has the tensor inside: a layer has just made it."""

    @property
    def sizes(self) -> list[int]:
        return split_sizes(self.size, self.group.size)

    @property
    def start(self) -> int:
        """The first id of this rank."""
        return sum(self.sizes[: self.group.rank])

    @property
    def local_size(self) -> int:
        return self.sizes[self.group.rank]


class VocabParallelLogits(torch.Tensor):
    """This rank's part of the logits, with the shape and the meaning of the whole ones."""

    vocabulary: Vocabulary

    @staticmethod
    def of(local: torch.Tensor, *, group: Group, vocab_size: int, is_hidden: bool = False) -> torch.Tensor:
        """The logits [..., vocab_size] of which this rank holds `local` [..., own part]; plain ones on one rank.

        `is_hidden`: the caller has made `local` and keeps it nowhere. A gradient may then take its memory.
        """
        if group.size == 1:
            return local
        return wrapped(local, Vocabulary(group=group, size=vocab_size, dim=local.dim() - 1, is_hidden=is_hidden))

    def local(self) -> torch.Tensor:
        """This rank's part, a plain tensor."""
        return cast(torch.Tensor, plain(torch.Tensor.as_subclass, self, torch.Tensor))

    def whole(self) -> torch.Tensor:
        """The whole logits, a plain tensor. A collective over tp; the gradient's own part comes back."""
        cut = self.vocabulary
        # Afterwards all ranks compute the same with them, so each has the whole gradient.
        return gather_from(self.local(), group=cut.group, dim=cut.dim, sizes=cut.sizes, partial=False)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        cut = self.vocabulary
        return (
            f"VocabParallelLogits(shape={tuple(self.shape)}, ids {cut.start} to {cut.start + cut.local_size - 1} "
            f"on this rank:\n{self.local()!r})"
        )

    def __format__(self, spec: str) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        elif func in _AS_THEY_ARE:
            return plain(func, *args, **kwargs)
        _refuse_writing(func, args, kwargs)
        # Other subclasses among the arguments have their say in this call.
        return func(*_gathered(args), **_gathered(kwargs))


# -- pieces of the protocol --------------------------------------------------------------------------------------


def plain(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The call on the local tensors, without `__torch_function__` of any subclass."""
    return torch.Tensor.__torch_function__(func, (), args, kwargs)


def wrapped(local: torch.Tensor, vocabulary: Vocabulary) -> VocabParallelLogits:
    logits = cast(VocabParallelLogits, plain(torch.Tensor.as_subclass, local, VocabParallelLogits))
    logits.vocabulary = vocabulary
    return logits


def _gathered(value: Any) -> Any:
    """The value with every cut logits in it replaced by the whole ones."""
    if isinstance(value, VocabParallelLogits):
        return value.whole()
    if type(value) in (list, tuple):
        return type(value)(_gathered(item) for item in value)
    if type(value) is dict:
        return {key: _gathered(item) for key, item in value.items()}
    return value


def _refuse_writing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A write into gathered logits would be lost."""
    name = getattr(func, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_assignment = name in ("__setitem__", "__set__", "__delete__") or (
        name.startswith("__i") and name not in _NOT_IN_PLACE
    )
    writes_to_first = (is_in_place or is_assignment) and args and isinstance(args[0], VocabParallelLogits)
    if writes_to_first or isinstance(kwargs.get("out"), VocabParallelLogits):
        raise ModelError(
            f"{name} writes into logits that are cut over the vocabulary; take the whole logits first "
            "(logits = logits.whole(), on every tp rank), or write an operation that returns a new tensor"
        )


_NOT_IN_PLACE = ("__int__", "__index__", "__invert__", "__iter__", "__init_subclass__")

_Handler = Callable[..., Any]
_HANDLERS: dict[Any, _Handler] = {}


def methods(*names: str) -> list[Any]:
    """The descriptors of these methods of a tensor, and the functions of the same name in `torch`."""
    found = [getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name)]
    return found + [getattr(torch, name) for name in names if not name.startswith("_") and hasattr(torch, name)]


def getters(*names: str) -> list[Any]:
    return [getattr(torch.Tensor, name).__get__ for name in names]


def _is_method(name: str) -> bool:
    return callable(getattr(torch.Tensor, name))


def handles(*funcs: Any) -> Callable[[_Handler], _Handler]:
    def register(handler: _Handler) -> _Handler:
        _HANDLERS.update(dict.fromkeys(funcs, handler))
        return handler

    return register


# What is the same for the part and the whole, or belongs to this rank's tensor: hooks, gradients, graph. (The shape
# and what follows from it have handlers.)
_AS_THEY_ARE: frozenset[Any] = METADATA_CALLS | frozenset(
    [
        *getters(*(name for name in dir(torch.Tensor) if name.startswith("is_") and not _is_method(name))),
        *getters("_version", "output_nr", "name", "_backward_hooks"),
        *methods("ndimension", "is_inference", "as_subclass", "requires_grad_", "retain_grad", "register_hook"),
        *methods("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
        getattr(torch.Tensor, "requires_grad").__set__,  # noqa: B009
        getattr(torch.Tensor, "grad").__set__,  # noqa: B009
        getattr(torch.Tensor, "grad").__delete__,  # noqa: B009
        torch.autograd.grad,
    ]
)


def whole_shape(logits: VocabParallelLogits) -> list[int]:
    shape = list(plain(torch.Tensor.size, logits))
    shape[logits.vocabulary.dim] = logits.vocabulary.size
    return shape


def is_last(logits: Any) -> bool:
    """Whether this is cut logits whose last dim is the vocabulary (of more than one id, so that shapes are telling)."""
    if not isinstance(logits, VocabParallelLogits):
        return False
    cut = logits.vocabulary
    return cut.dim == plain(torch.Tensor.dim, logits) - 1 and cut.size > 1


def holds_logits(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(holds_logits(item) for item in value)
    if isinstance(value, dict):
        return holds_logits(list(value.values()))
    return isinstance(value, VocabParallelLogits)
