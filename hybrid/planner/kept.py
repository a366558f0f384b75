"""Answers kept by the identity of what they are about: models and jobs are large values, slow to hash."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["Kept"]

T = TypeVar("T")


class Kept(Generic[T]):
    """The newest `most` answers, each for one object and what else it depends on.

    The object is held with its answer, so that its id is not given to another.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._answers: OrderedDict[tuple[object, ...], tuple[object, T]] = OrderedDict()

    def get(self, about: object, *key: Any, make: Callable[[], T]) -> T:
        """What is known, or what `make` makes now."""
        place = (id(about), *key)
        known = self._answers.get(place)
        if known is None:
            known = self._answers[place] = (about, make())
            while len(self._answers) > self._most:
                self._answers.popitem(last=False)
        return known[1]
