"""Products that make gradients of weights, left until the gradient of a pipeline stage's input has been sent.

    backward inside `collecting()`   layers whose gradients are written where they are to lie leave their products here
    ── the input's gradient goes to the stage before, which has waited for it ──
    `run()`                          the products, in the order in which backward came to them

It is still one backward: what a product needs is kept a little longer, in turn for what the rest of the backward frees.
A schedule that splits its backwards does more (`weight_gradients`): it keeps the halves apart over other actions.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator

__all__ = ["LaterProducts"]


class LaterProducts:
    """What one backward has left."""

    _current: LaterProducts | None = None  # of the backward that runs: autograd may run it in threads of its own

    def __init__(self) -> None:
        self._left: deque[tuple[Hashable, Callable[[], None], Callable[[], None]]] = deque()
        self._missing: Counter[Hashable] = Counter()

    @classmethod
    def current(cls) -> LaterProducts | None:
        """Those of the backward that runs now; None: nothing is to be left."""
        return cls._current

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, a backward leaves products here."""
        before, LaterProducts._current = LaterProducts._current, self
        try:
            yield
        finally:
            LaterProducts._current = before

    def add(self, place: Hashable, write: Callable[[], None], *, then: Callable[[], None]) -> None:
        """`write` computes a product for the gradient at `place`; `then` follows the last one for that place."""
        self._left.append((place, write, then))
        self._missing[place] += 1

    def misses(self, place: Hashable) -> bool:
        """Whether a product for that place is still to come."""
        return self._missing[place] > 0

    def run(self) -> None:
        """Compute what is left; what a product needed is freed with it."""
        while self._left:
            place, write, then = self._left.popleft()
            write()
            del write
            self._missing[place] -= 1
            if not self._missing[place]:
                then()
