"""The comparison of one block by itself: what a copy of it must not share, and what it is called with. One process."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hybrid.collectives.group import Group
from hybrid.contracts.tensor_plan import CutUnit, TensorPlan
from hybrid.tensor.block_check import BlockCheck, structure_of
from hybrid.tensor.block_kinds import block_kinds
from hybrid.tensor.comparison import Comparison
from hybrid.tensor.cuts import TensorCuts
from hybrid.tensor.self_check import NotComparable

D = 8


class Block(nn.Module):
    """Calls a function that it holds; notes what it is called with."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(D, D)
        self.call = call

    def forward(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        return self.up(x) if self.call is None else self.call(self.up(x), *others)


def compared(block: nn.Module, *args: Any) -> Comparison:
    model = nn.Sequential(block)
    check = BlockCheck(
        structure=structure_of(block, model),
        plan=TensorPlan(degree=1),
        cuts=TensorCuts(group=Group(process_group=None, ranks=(0,), rank=0, axis="tp"), cuts={}),
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return check.run("0", block, args, {}, first_names=names)


class OwnCopy(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        return self


def through(function: Callable[[Block], Any]) -> Block:
    block = Block()
    block.call = function(block)
    return block


SHARING: dict[str, Callable[[Block], Any]] = {
    "closure": lambda block: lambda x: block.up(x) + 1,
    "default": lambda block: lambda x, layer=block.up: layer(x),
    "partial of a closure": lambda block: functools.partial(lambda x: block.up(x) + 1),
    "in containers": lambda block: {"f": [(lambda x: x @ block.up.weight,)]},
    "weak reference": lambda block: weakref.ref(block.up),
    "method of a closure": lambda block: types.MethodType(lambda self, x: block.up(x), block),
    "method in a closure": lambda block: (lambda forward: lambda x: forward(x) + 1)(block.up.forward),
    "built-in method": lambda block: block.up.weight.add,
    "its own copy": lambda block: [OwnCopy(D, D)],
}


@pytest.mark.parametrize("name", SHARING)
def test_a_copy_that_would_call_the_model_is_none(name: str) -> None:
    block = through(SHARING[name])
    if name == "its own copy":
        block.shared = block.call[0]  # type: ignore[index]
    with pytest.raises(NotComparable, match="still refers to the model itself"):
        structure_of(block, nn.Sequential(block))
    assert block.training
    assert {parameter.dtype for parameter in block.parameters()} == {torch.float32}


@pytest.mark.parametrize("call", [F.gelu, nn.GELU(), torch.tanh, functools.partial(F.gelu, approximate="tanh")])
def test_functions_without_layers_are_no_reason(call: Any) -> None:
    assert compared(Block(call), torch.randn(2, 3, D)).num_modules > 1


@pytest.mark.parametrize("make", [lambda block: block.up.__call__, lambda block: functools.partial(block.up.__call__)])
def test_methods_and_partials_of_layers_are_copied_with_them(make: Callable[[Block], Any]) -> None:
    block, called = through(make), list[int]()
    block.up.register_forward_hook(lambda *_: called.append(1))
    compared(block, torch.randn(2, 3, D))
    assert not called


class Kept(list[Any]):
    def __init__(self, items: Any, size: int) -> None:
        super().__init__(items)
        self.size = size


def test_containers_are_made_again_without_their_constructors() -> None:
    compared(Block(lambda x, scale: x * scale[0]), torch.randn(2, 3, D), Kept([torch.ones(D)], 1))


def test_containers_that_cannot_be_made_again_are_a_reason() -> None:
    other = types.MappingProxyType({0: torch.ones(D)})
    with pytest.raises(NotComparable, match="cannot pickle 'mappingproxy'"):
        compared(Block(lambda x, scale: x * scale[0]), torch.randn(2, 3, D), other)


@pytest.mark.parametrize(
    ("shape", "numbers", "expected"),
    [
        ((1, 1024, D), torch.tensor([0, 500, 1024]), (1, 1024, D)),  # offsets
        ((1024, D), torch.tensor([0, 500, 1024]), (1024, D)),
        ((4, 1024, D), torch.tensor([0, 1024, 4096]), (4, 1024, D)),  # of all samples in a row
        ((6, 4, D), torch.tensor([5, 0, 3], dtype=torch.uint32), (6, 4, D)),  # samples in another order
        ((6, 1024, D), torch.arange(1024), (2, 256, D)),  # positions
        ((64, 16, D), torch.arange(16)[None], (2, 16, D)),
        ((6, 1024, D), torch.ones(6, 1024, dtype=torch.int64), (2, 256, D)),  # a mask
        ((6, 1024, D), torch.ones(6, 1024, dtype=torch.bool), (2, 256, D)),
    ],
)
def test_nothing_is_cut_off_that_integers_point_to(
    shape: tuple[int, ...], numbers: torch.Tensor, expected: tuple[int, ...]
) -> None:
    seen: list[tuple[int, ...]] = []

    def note(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return x

    compared(Block(note), torch.randn(shape), numbers)
    assert set(seen) == {expected}


class Rotating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, D)
        self.register_buffer("turns", torch.polar(torch.ones(D // 2), torch.arange(D // 2.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        DTYPES.append(self.turns.dtype)
        return torch.view_as_real(torch.view_as_complex(self.up(x).unflatten(-1, (-1, 2))) * self.turns).flatten(-2)


DTYPES: list[torch.dtype] = []


def test_complex_buffers_stay_complex_and_complex_parameters_are_a_reason() -> None:
    DTYPES.clear()
    compared(Rotating(), torch.randn(2, 3, D))
    assert set(DTYPES) == {torch.complex128}
    block = Block()
    block.turns = nn.Parameter(torch.ones(D, dtype=torch.complex64))
    with pytest.raises(NotComparable, match="has complex parameters"):
        compared(block, torch.randn(2, 3, D))


class Numbered(Block):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def test_numbers_in_texts_do_not_tell_blocks_apart() -> None:
    model = nn.Sequential(*map(Numbered, ("block0", "block1", "block10", "last")))
    units = tuple(CutUnit(fqn=str(place), by_user=False, is_known=False) for place in range(4))
    kinds = block_kinds(model, TensorPlan(degree=1, units=units))
    assert [kind.fqns for kind in kinds] == [("0", "1", "2"), ("3",)]


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Failing(Block):
    def __init__(self, dtypes: set[torch.dtype], weights: list[weakref.ref[Any]]) -> None:
        super().__init__()
        self.note = [lambda: (dtypes, weights)]  # not copied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtypes, weights = self.note[0]()
        weights.append(weakref.ref(self.up.weight))
        if x.dtype in dtypes:
            raise RuntimeError("not in this precision")
        return self.up(x)


@pytest.mark.parametrize("fails", [{torch.float64}, {torch.float64, torch.float32}])
@pytest.mark.usefixtures("no_collection")
def test_copies_are_freed_also_after_errors(fails: set[torch.dtype]) -> None:
    copies: list[weakref.ref[Any]] = []
    try:
        compared(Failing(fails, copies), torch.randn(2, 3, D))
    except NotComparable:
        assert len(fails) == 2
    assert copies
    assert all(copy() is None for copy in copies)
