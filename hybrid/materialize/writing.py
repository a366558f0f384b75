"""While a model on the meta device initialises itself, each parameter is there whole for as long as it is written.

A parameter of such a model has a shape and no values. Inside `Writing`, a call that uses one (`weight.normal_()`,
`nn.init.zeros_(bias)`) gets a real tensor of the whole parameter in its place; as soon as another one is used, the
values go to `keep`, which takes what this rank holds, and the tensor is gone. So a rank never has more than one whole
parameter beside its shards, whatever the initialisation does, and the random numbers are drawn in its own order.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from hybrid.errors import ModelError
from hybrid.metadata import METADATA_CALLS

__all__ = ["Target", "Writing"]

# Asked of the place where values are computed: an initialisation may leave a tensor on the meta device alone.
_DEVICE_CALLS: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in ("device", "is_meta", "is_cuda", "is_cpu")]
    + [torch.Tensor.get_device]
)

# What gives every element of its first argument a value, whatever it was.
_OVERWRITES = {"uniform_", "normal_", "zero_", "zeros_", "fill_", "ones_", "constant_", "copy_", "exponential_"}

# Named like calls that write, and write no value.
_NO_WRITES: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")]
    + [torch.Tensor.requires_grad_, torch.Tensor.detach_, torch.Tensor.share_memory_]
)


@dataclass(slots=True, kw_only=True, eq=False)
class Target:
    """A parameter or buffer of the model.

    Args:
        fqn: its name.
        tensor: the object in the model, whatever memory it has by now.
        stand_in: a tensor with the shape, strides and dtype of the whole.
        device: where its values are computed.
        keep: called with the whole values.
        wanted: whether this rank holds any of it; else `by_name` does not compute it at all.
        stays: keep the values until the end (buffers, which may be written in several passes).
        is_given: it has its values, and an initialisation that writes it writes into a copy that is thrown away.
    """

    fqn: str
    tensor: torch.Tensor
    stand_in: torch.Tensor
    device: torch.device
    keep: Callable[[torch.Tensor], None]
    wanted: bool = True
    stays: bool = False
    is_given: bool = False
    value: torch.Tensor | None = field(default=None, init=False)
    is_muted: bool = field(default=False, init=False)
    is_written: bool = field(default=False, init=False)
    is_changed: bool = field(default=False, init=False)  # `value`, by any call
    pass_number: int = field(default=0, init=False)  # of the present `value`, among all that there were
    num_calls: int = field(default=0, init=False)

    def allocate(self) -> torch.Tensor:
        """Fresh memory in which every element is marked as not written."""
        if self.is_given and self.tensor.untyped_storage().nbytes():
            self.value = self.tensor.detach().clone()
            return self.value
        shape, dtype = self.stand_in.shape, self.stand_in.dtype
        unset: float | int | bool = False
        if dtype.is_floating_point or dtype.is_complex:
            unset = float("nan")
        elif dtype is not torch.bool:
            unset = torch.iinfo(dtype).min
        self.value = torch.empty_strided(shape, self.stand_in.stride(), dtype=dtype, device=self.device).fill_(unset)
        return self.value

    def unset_elements(self) -> int:
        """How many elements nobody has written."""
        assert self.value is not None
        dtype = self.value.dtype
        if dtype.is_floating_point or dtype.is_complex:
            if dtype.itemsize > 1 and not bool(torch.isnan(self.value.sum())):
                return 0  # by far the most, and without a mask as large as the parameter's elements
            return int(torch.isnan(self.value).sum().item())
        if dtype in {torch.bool, torch.uint8}:  # every value is a fair one
            return 0 if self.is_changed else self.value.numel()
        return int((self.value == torch.iinfo(dtype).min).sum().item())

    def forget(self) -> None:
        self.value = None
        self.is_changed = False
        self.pass_number += 1


class Writing(TorchFunctionMode):
    """See the module's docstring.

    Args:
        targets: what may be written.
        order: "replay" draws from the random state as it is, one after the other; "by_name" seeds it from `seed` and
            the name before each one, so that values depend on nothing else.
    """

    def __init__(self, targets: Iterable[Target], *, order: Literal["replay", "by_name"], seed: int) -> None:
        super().__init__()
        self._targets: Mapping[int, Target] = {id(target.tensor): target for target in targets}
        self._order = order
        self._seed = seed
        self._draws_on_cuda = any(target.device.type == "cuda" for target in self._targets.values())
        self._under_way: list[Target] = []
        # Tensors over the memory of a target's value (`weight.data`, `weight[0]`) -> the target, and the pass.
        self._aliases: dict[int, tuple[weakref.ref[torch.Tensor], Target, int]] = {}
        self.muted: frozenset[int] = frozenset()
        """Ids of the tensors of which nothing is kept now: their random numbers are drawn and thrown away."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA_CALLS and func not in _DEVICE_CALLS:
            return func(*self._filled_in(args, absent=True), **self._filled_in(kwargs, absent=True))
        used = list(dict.fromkeys(self._used((args, kwargs))))
        if not used:
            return func(*args, **kwargs)
        self._finish([target for target in self._under_way if not target.stays and self._is_through(target, used)])
        first = args[0] if args else kwargs.get("tensor")  # nn.init passes its argument by name
        name = getattr(func, "__name__", "")
        is_overwrite = name in _OVERWRITES and kwargs.get("generator") is None and self._targets.get(id(first)) in used
        if self._order == "by_name" and is_overwrite and len(used) == 1 and not used[0].wanted:
            used[0].is_written = True  # nothing is drawn, nothing computed
            self._seed_for(used[0], "after")
            return used[0].tensor
        for target in used:
            if target.value is None:
                target.allocate()
                target.is_muted = id(target.tensor) in self.muted
                self._under_way.append(target)
        # Before and after each call: what is drawn beside it must not depend on what was skipped on this rank.
        self._seed_for(used[0], "before")
        result = func(*self._filled_in(args, absent=False), **self._filled_in(kwargs, absent=False))
        self._seed_for(used[0], "after")
        if (name.endswith("_") or name.startswith("__i")) and func not in _NO_WRITES:  # __set__, __iadd__, normal_
            used[0].is_changed = True
        for target in used:
            if result is target.value:
                return target.tensor  # of an operation in place: `self.weight += 1` assigns what it returns
        self._remember_aliases(result, used)
        return result

    def seed_for(self, place: str) -> None:
        """With "by_name", random numbers that belong to no parameter yet depend on the module alone."""
        if self._order == "by_name":
            seed = _seed_of(self._seed, place)
            torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a stack for each device in waiting
            if self._draws_on_cuda:
                torch.cuda.manual_seed_all(seed)

    def _seed_for(self, target: Target, moment: Literal["before", "after"]) -> None:
        self.seed_for(f"{target.fqn}/{moment}/{target.num_calls}")
        if moment == "after":
            target.num_calls += 1

    def finish(self) -> None:
        """Hand over what was written last."""
        self._finish(list(self._under_way))

    def _finish(self, targets: list[Target]) -> None:
        for target in targets:
            value = target.value
            assert value is not None
            if not target.is_muted and not target.is_given:
                unset = target.unset_elements()
                if unset == value.numel() > 0 and not target.is_changed:
                    pass  # was only looked at
                elif self._order == "by_name" and not target.wanted:
                    target.is_written = True
                elif unset:
                    raise ModelError(
                        f"the initialisation of {target.fqn!r} left {unset} of {value.numel()} elements without a "
                        "value (or wrote it in two passes, or from another parameter, with other parameters between); "
                        "write each parameter in one go, or build the model on a real device"
                    )
                else:
                    target.keep(value)
                    target.is_written = True
            target.forget()
            self._under_way.remove(target)

    def _is_through(self, target: Target, used: list[Target]) -> bool:
        """Whether another one is used now, or the same one by another module that is to leave it alone."""
        return target not in used or target.is_muted != (id(target.tensor) in self.muted)

    def _used(self, value: Any) -> Iterator[Target]:
        """The targets among the arguments, themselves or through a tensor over their memory, in their order."""
        if isinstance(value, torch.Tensor):
            target = self._targets.get(id(value))
            if target is not None:
                yield target
                return
            ref, target, pass_number = self._aliases.get(id(value), (None, None, 0))
            if target is not None and ref is not None and ref() is value:
                if target.pass_number != pass_number:
                    raise ModelError(
                        f"the initialisation of {target.fqn!r} went on after other parameters were used, through a "
                        "tensor over its memory that it had kept (weight.data, a view); write each parameter in one "
                        "go, or build the model on a real device"
                    )
                yield target
        elif isinstance(value, list | tuple):
            for item in value:
                yield from self._used(item)
        elif isinstance(value, dict):
            yield from self._used(list(value.values()))

    def _remember_aliases(self, result: Any, used: list[Target]) -> None:
        if isinstance(result, list | tuple):
            for item in result:
                self._remember_aliases(item, used)
        if not isinstance(result, torch.Tensor) or result.layout is not torch.strided or result.numel() == 0:
            return
        for target in used:
            if target.value is not None and target.value.untyped_storage().data_ptr() == (
                result.untyped_storage().data_ptr()
            ):
                self._aliases[id(result)] = (weakref.ref(result), target, target.pass_number)

    def _filled_in(self, value: Any, *, absent: bool) -> Any:
        """The same arguments with each target's values, or with its stand-in, in its place."""
        if isinstance(value, torch.Tensor):
            target = self._targets.get(id(value))
            if target is None:
                return value
            return target.stand_in if absent else target.value
        if isinstance(value, list):
            return [self._filled_in(item, absent=absent) for item in value]
        if type(value) is tuple:
            return tuple(self._filled_in(item, absent=absent) for item in value)
        if isinstance(value, dict):
            return {key: self._filled_in(item, absent=absent) for key, item in value.items()}
        return value


def _seed_of(seed: int, fqn: str) -> int:
    """A seed for one parameter: the first eight bytes of a hash of the run's seed and the name."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{fqn}".encode()).digest()[:8], "big") >> 1
