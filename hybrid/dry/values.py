"""Tensors without values: ordinary tensors on the CPU in memory that nobody ever touches.

While `Untouched` is on, no kernel runs on a tensor of floating point numbers. Its memory is asked of the system as
usual, and since nothing reads or writes it, none of it becomes real: a bucket of a gigabyte costs a line in a table.
What a kernel would have given is worked out on the meta device (shape, strides, type), once for each combination of
inputs, and made in the same way. So buffers, views, storages that are freed and filled again, autograd, autocast and
hooks are those of a real run, and so are all bytes that are counted.

Some tensors have values, for code decides by them:

    one number                                     counters, steps, losses
    integers and flags, up to 2^20 of them         token ids, positions, masks, digests
    float64, up to 2^16 of them                    sums that ranks agree on

A number that comes of tensors without values is 0; a model or a loss function that decides by such a number is refused.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hybrid import shims
from hybrid.collectives.autograd import IMPLEMENTATIONS
from hybrid.dry.addresses import is_refusal, too_large, untouched
from hybrid.errors import ModelError

__all__ = ["Untouched", "has_values", "without_values"]

_MOST_INTEGERS = 1 << 20
_MOST_FLOAT64 = 1 << 16

_EMPTY = frozenset({"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like"})
# Change what a tensor is, not what is in it.
_METADATA = frozenset({"set_", "resize_", "detach_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_"})
# Their result, or its shape, is decided by values.
_DECIDING = frozenset(
    {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
)
# Answers with flags, which are those of zeros.
_ASKING = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isposinf", "isneginf", "logical_not"})
_PACKAGE = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether kernels run on it while `Untouched` is on."""
    return _has_values(tensor.dtype, tensor.numel())


def _has_values(dtype: torch.dtype, num_elements: int) -> bool:
    if num_elements <= 1:
        return True
    if dtype is torch.float64:
        return num_elements <= _MOST_FLOAT64
    return not (dtype.is_floating_point or dtype.is_complex) and num_elements <= _MOST_INTEGERS


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """One like it, wherever it is, on the CPU: zeros if it is one that has values, else untouched memory."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.zero_() if has_values(tensor) else made


@dataclass(frozen=True, slots=True)
class _New:
    """A result to be made."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_number: bool
    value: bool = False


@dataclass(frozen=True, slots=True)
class _Given:
    """A result that is an argument: the tensor with this number among them."""

    number: int


class Untouched(shims.TorchDispatchMode):
    """Inside, operations on tensors without values give tensors without values; see above.

    Args:
        names: modules of the model by id -> name, for messages.
    """

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        super().__init__()
        self.names = dict(names or {})
        self._known: dict[Any, Any] = {}
        # Numbers that stand for what is not known, by their memory.
        self._doubtful: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        implementation = IMPLEMENTATIONS.get(func)
        if implementation is not None:
            with self:
                return implementation(*args, **kwargs)
        with shims.plain_tensors():  # some classes of tensors answer for more than their own memory
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: list[torch.Tensor] = []
        _collect(args, tensors)
        if kwargs:
            _collect(kwargs.values(), tensors)
        if not _is_here(tensors, kwargs):
            return func(*args, **kwargs)
        traits = _traits(func)
        if not tensors:
            return self._from_nothing(func, traits.name, args, kwargs)
        if traits.is_view:
            return func(*args, **kwargs)
        valued = all(map(has_values, tensors))
        if traits.name == "embedding":
            self._check_rows(*tensors[:2])
        if valued and _is_large(tensors) and self._is_too_large(func, traits, args, kwargs):
            return self._imagine(func, traits, args, kwargs, tensors)
        if valued or traits.name in _DECIDING:
            doubtful = bool(self._doubtful) and self._is_doubtful(tensors)
            if traits.name in _DECIDING and (doubtful or not valued):
                return self._decide(func, traits.name, args, kwargs, valued=valued)
            result = func(*args, **kwargs)
            if doubtful:
                self._doubt([result, *_written(func, traits, args, kwargs)])
            return result
        return self._imagine(func, traits, args, kwargs, tensors)

    def _from_nothing(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in _EMPTY:
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                if is_refusal(error):
                    raise too_large(math.prod(func(*args, **{**kwargs, "device": "meta"}).shape), error) from None
                raise
        try:
            like = func(*args, **{**kwargs, "device": torch.device("meta")})
        except (TypeError, RuntimeError, NotImplementedError):  # takes no device
            return func(*args, **kwargs)
        if not isinstance(like, torch.Tensor) or has_values(like):
            return func(*args, **kwargs)
        return untouched(like.shape, like.stride(), like.dtype)

    def _check_rows(self, table: torch.Tensor, rows: torch.Tensor) -> None:
        """Refuse a row that an embedding has not: nothing is looked up here, so nothing else would."""
        if not has_values(rows) or not rows.numel() or self._is_doubtful([rows]):
            return
        least, most = int(rows.min()), int(rows.max())
        if least < 0 or most >= table.shape[0]:
            where = _reader(self.names) or "the model"
            raise ModelError(
                f"{where} asks for row {most if least >= 0 else least} of an embedding that has {table.shape[0]}: a "
                "sample has more tokens than there are positions, or an id beyond the vocabulary; give a shorter one"
            )

    # -- what would come of it --------------------------------------------------------------------------------------

    def _imagine(
        self, func: Any, traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        key = (func, _key(args), _key(tuple(kwargs.items())))
        if key not in self._known:
            self._known[key] = _look(func, traits.name, args, kwargs)
        for tensor in _written(func, traits, args, kwargs) if traits.writes else ():
            if has_values(tensor):
                tensor.zero_()
                self._doubt([tensor])
        return self._made(self._known[key], tensors)

    def _is_too_large(self, func: Any, traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether what comes of tensors with values has none itself, as a mask of very many tokens."""
        if traits.writes:
            return False
        key = (func, _key(args), _key(tuple(kwargs.items())))
        if key not in self._known:
            try:
                self._known[key] = _look(func, traits.name, args, kwargs)
            except (TypeError, RuntimeError, NotImplementedError):  # values decide its shape
                return False
        plan = self._known[key]
        return type(plan) is _New and not plan.is_number

    def _made(self, plan: Any, tensors: list[torch.Tensor]) -> Any:
        if type(plan) is _New:
            made = untouched(plan.shape, plan.strides, plan.dtype)
            if plan.is_number:
                made.fill_(plan.value)
                self._doubt([made])
            return made
        if type(plan) is _Given:
            return tensors[plan.number]
        if isinstance(plan, list | tuple):
            return type(plan)(self._made(item, tensors) for item in plan)
        return plan

    # -- numbers that nobody knows ----------------------------------------------------------------------------------

    def _doubt(self, values: Iterable[Any]) -> None:
        found: list[torch.Tensor] = []
        _collect(values, found)
        for tensor in found:
            reference = StorageWeakRef(tensor.untyped_storage())
            self._doubtful[reference.cdata] = reference
        if len(self._doubtful) > 4096:
            self._doubtful = {at: one for at, one in self._doubtful.items() if not one.expired()}

    def _is_doubtful(self, tensors: Iterable[torch.Tensor]) -> bool:
        for tensor in tensors:
            known = self._doubtful.get(shims.memory_of(tensor))
            if known is not None and not known.expired():
                return True
        return False

    def _decide(self, func: Any, name: str, args: Any, kwargs: Any, *, valued: bool) -> Any:
        """The library itself goes on with a value that stands for the one of a run; nobody else may.

        Raises:
            ModelError: the model, or a function of the user, decides by it.
        """
        where = _reader(self.names)
        if where is not None:
            raise ModelError(
                f"{where} looks at values ({name.removeprefix('_')}), and a dry run has none: what the model does next "
                "depends on data. Leave that out of training (a check, a log line), or look at a smaller layout with "
                "`hybrid run`"
            )
        if name == "equal":
            return True
        return func(*args, **kwargs)


def _is_large(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether what these are broadcast to has more elements than one with values may have."""
    if len(tensors) < 2:
        return False
    sizes = zip_longest(*(reversed(tensor.shape) for tensor in tensors), fillvalue=1)
    return math.prod(map(max, sizes)) > _MOST_INTEGERS


@dataclass(frozen=True, slots=True)
class _Traits:
    """What an operation's schema says: whether its results are views, and which arguments it writes to."""

    name: str
    is_view: bool
    writes: tuple[tuple[int, str], ...]


@cache
def _traits(func: Any) -> _Traits:
    name = func.overloadpacket.__name__
    writes = tuple(shims.written_arguments(func))
    is_view = name in _METADATA or name == "_unsafe_view" or (not writes and shims.returns_view(func))
    return _Traits(name, is_view, writes)


def _written(func: Any, traits: _Traits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _collect([args[place] if place < len(args) else kwargs.get(name) for place, name in traits.writes], found)
    return found


def _collect(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, found)


_PLAIN = torch.Tensor.__torch_dispatch__


def _is_here(tensors: Iterable[torch.Tensor], kwargs: Mapping[str, Any]) -> bool:
    """Whether all of this is about ordinary tensors of the CPU: not about fake ones, or the meta device."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    return all(one.device.type == "cpu" and type(one).__torch_dispatch__ is _PLAIN for one in tensors)


def _key(value: Any) -> Any:
    """Equal for arguments of which the same comes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), value


def _look(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results on the meta device."""
    metas: list[torch.Tensor] = []

    def on_meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            metas.append(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"))
            return metas[-1]
        if isinstance(value, list | tuple):
            return type(value)(map(on_meta, value))
        return value

    if func is shims.GROUPED_PRODUCT.default:
        return _grouped(*args, **kwargs)
    placed = tuple(map(on_meta, args))
    moved = {name: on_meta(value) for name, value in kwargs.items()}
    if moved.get("device") is not None:
        moved["device"] = torch.device("meta")
    moved.pop("pin_memory", None)

    value = False
    if name in _ASKING and not kwargs:
        value = bool(func(*(torch.zeros((), dtype=a.dtype) if isinstance(a, torch.Tensor) else a for a in args)))

    def plan(result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            number = next((number for number, meta in enumerate(metas) if meta is result), None)
            if number is not None:
                return _Given(number)
            shape, strides = tuple(result.shape), result.stride()
            return _New(shape, strides, result.dtype, _has_values(result.dtype, result.numel()), value)
        if isinstance(result, list | tuple):
            return type(result)(map(plan, result))
        return result

    return plan(func(*placed, **moved))


def _grouped(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> _New:
    """Torch 2.13 knows what comes of a grouped product on the meta device in bfloat16 only.

    Forward [tokens, k] x [groups, k, n], the gradient of its weights [k, tokens] x [tokens, n]: one for each group.
    """
    shape = (*left.shape[:-1], right.shape[-1])
    if left.dim() == right.dim() == 2:
        assert offs is not None
        shape = (offs.shape[0], *shape)
    elif left.dim() == 3 and right.dim() == 2:
        shape = shape[1:]
    return _New(shape, torch.empty(shape, device="meta").stride(), out_dtype or left.dtype, False)


def _reader(names: Mapping[int, str]) -> str | None:
    """Whose code asks for a value: a module of the model or a function, in words; None: this library's."""
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE) and file != __file__:
            return None
        if file != __file__ and not file.startswith((_TORCH, "<")):
            break
        frame = frame.f_back
    line = "" if frame is None else f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            return f"{names[id(owner)] or 'the model itself'!r}, a {type(owner).__name__} ({line}),"
        frame = frame.f_back
    return f"{line or 'something'}"
