"""Containers of classes of one's own, cast and looked through, without ranks."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

from hybrid.empty_caches import without_caches
from hybrid.errors import ModelError
from hybrid.pipeline.opaque import check_objects
from hybrid.pipeline.skeleton import FakeTensorMode
from hybrid.precision.tree import map_tensors


class Doubled(list[Any]):
    def __init__(self, items: Any) -> None:
        super().__init__(item * 2 for item in items)


class Turned(tuple[Any, ...]):
    def __new__(cls, items: Any) -> Turned:
        return super().__new__(cls, reversed(list(items)))


class Fixed(Mapping[str, Any]):
    def __init__(self, **held: Any) -> None:
        self.held = held

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class Dotted(dict[str, Any]):
    __getattr__ = dict.__getitem__


def test_constructors_do_nothing_again() -> None:
    """Every cast and every boundary called them with what the container held: it came out doubled, or turned again. A
    mapping that nobody writes to was a TypeError, a dict whose keys are its attributes a KeyError."""
    one, two = torch.ones(2), torch.zeros(2)
    for value, wanted in ((Doubled([one, two]), [3.0, 1.0]), (Turned([two, one]), [2.0, 1.0])):
        mapped = map_tensors(value, lambda tensor: tensor + 1)
        assert type(mapped) is type(value)
        assert [tensor[0].item() for tensor in mapped] == wanted
    assert map_tensors(torch.Size([2]), torch.clone) == torch.Size([2])
    for mapping in (Fixed(x=one), MappingProxyType({"x": one})):
        mapped = map_tensors(mapping, lambda tensor: tensor + 1)
        assert type(mapped) is type(mapping)
        assert mapped["x"][0] == 2
    dotted = Dotted(x=one)
    assert without_caches((dotted,), {}, refusal=lambda name, length: name)[0][0] is dotted


def test_tensors_in_other_collections_are_refused_before_they_cross() -> None:
    """They were found while they were sent: the other ranks waited for their timeout."""
    with FakeTensorMode():
        fake = torch.zeros(2)

    class Slotted:
        __slots__ = ("held",)

    slotted = Slotted()
    slotted.held = fake
    for value in (collections.deque([fake]), slotted):
        with pytest.raises(ModelError, match=f"'blocks.0' returns a {type(value).__name__} that holds tensors"):
            check_objects("blocks.0", value, "returns")
