"""Gradients of which layers have written a part, in a backward that may yet raise.

    a weight is used twice       first addend ──► bucket      second addend ──► bucket, then the hook: it is finished
    backward raises in between   plain torch has added neither

Then the first one counts for nothing, if there was nothing before it. Else it cannot be told from what was there, and
the sum is spoilt until somebody empties it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Before", "UnfinishedSums"]


class Before(NamedTuple):
    """A gradient before its first addend of this backward came."""

    is_filled: bool
    """It had a value that counts."""
    has_gradient: bool
    """One had come since zero_grad."""


class UnfinishedSums:
    """Of one bucket, by position.

    spoilt: the positions whose values are those of no backward.
    """

    def __init__(self) -> None:
        self._begun: dict[int, Before] = {}
        self.spoilt: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._begun)

    def begin(self, position: int, before: Before) -> None:
        """An addend is about to be written."""
        self._begun.setdefault(position, before)

    def finish(self, position: int) -> None:
        """All addends are there."""
        self._begun.pop(position, None)

    def finish_all(self) -> None:
        """The backward has ended."""
        self._begun.clear()

    def leave(self) -> None:
        """What is there goes to the other ranks: it cannot be taken back."""
        for position, before in self._begun.items():
            self._begun[position] = before._replace(is_filled=True)

    def abandon(self) -> Iterator[tuple[int, Before]]:
        """The backward has raised: the positions that are to be as before. Others that it had begun are spoilt."""
        begun, self._begun = self._begun, {}
        for position, before in begun.items():
            if before.is_filled:
                self.spoilt.add(position)
            else:
                yield position, before

    def empty(self, position: int) -> None:
        """Its gradient is thrown away."""
        self._begun.pop(position, None)
        self.spoilt.discard(position)

    def empty_all(self) -> None:
        """All are."""
        self._begun.clear()
        self.spoilt.clear()
