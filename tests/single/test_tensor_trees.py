"""The two walkers over what modules take and return: finding tensors, and replacing them in the same containers."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from hybrid.precision.tree import map_tensors
from hybrid.sharding.tensors import tensors_in


class Pair(NamedTuple):
    value: torch.Tensor
    note: str


@dataclasses.dataclass(frozen=True)
class Record:
    value: torch.Tensor
    nothing: None = None
    derived: Any = dataclasses.field(init=False, default=None)


class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """As model outputs of common libraries: a mapping with attributes."""

    def __init__(self, *, loss: torch.Tensor) -> None:
        super().__init__(loss=loss)

    @property
    def loss(self) -> torch.Tensor:
        return self["loss"]


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def test_every_tensor_with_a_gradient_is_found_once() -> None:
    tensors = [leaf() for _ in range(6)]
    value = [tensors[0], (tensors[1], {"a": [tensors[2]], "b": tensors[0]}), Pair(tensors[3], "n"), Record(tensors[4])]
    value.append(Output(loss=tensors[5]))
    assert {id(t) for t in tensors_in(value)} == {id(t) for t in tensors}
    assert len(list(tensors_in(value))) == 6
    assert list(tensors_in([torch.ones(2), None, "text", 3, b"x", torch.arange(2)])) == []


def test_a_cycle_ends() -> None:
    value: list[Any] = [leaf()]
    value.append(value)
    assert len(list(tensors_in(value))) == 1


def test_plain_objects_are_looked_into() -> None:
    class Holder:
        def __init__(self) -> None:
            self.inside = leaf()

    assert len(list(tensors_in(Holder()))) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t,
        lambda t: (t, None),
        lambda t: [t, 1],
        lambda t: {"a": t, "b": "x"},
        lambda t: {"a": [t]},
        lambda t: Pair(t, "note"),
        Record,
        lambda t: Output(loss=t),
        lambda t: collections.OrderedDict(a=t),
        lambda t: collections.defaultdict(list, a=t),
    ],
)
def test_containers_keep_their_type(make: Any) -> None:
    before = make(torch.ones(2, dtype=torch.bfloat16))
    after = map_tensors(before, lambda t: t.float())
    assert type(after) is type(before)
    found: list[torch.Tensor] = []
    map_tensors(after, lambda t: found.append(t) or t)
    assert [t.dtype for t in found] == [torch.float32]
    kept: list[torch.Tensor] = []
    map_tensors(before, lambda t: kept.append(t) or t)
    assert [t.dtype for t in kept] == [torch.bfloat16], "the original is not changed"


def test_other_objects_are_the_same_objects() -> None:
    marker = object()
    assert map_tensors([marker, None, torch.Size([2])], torch.clone)[0] is marker


def test_a_size_stays_a_size() -> None:
    assert map_tensors({"shape": torch.Size([2, 3])}, torch.clone)["shape"] == torch.Size([2, 3])
