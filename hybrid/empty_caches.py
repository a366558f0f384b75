"""Key/value caches of transformers: they are for generation, and a forward for training goes without one.

They carry values from call to call beside what a module returns: a module that runs twice would append to one twice,
and what it holds does not travel from stage to stage of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hybrid.errors import ModelError

__all__ = ["without_caches"]


def without_caches(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, refusal: Callable[[str, int], str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module, with nothing in the place of an empty cache.

    Args:
        refusal: (which argument, positions in its cache) -> why it cannot be left out.

    Raises:
        ModelError: a cache holds something already: leaving it out would change the result.
    """

    def without(name: str, value: Any) -> Any:
        # A dict's attributes may be its keys.
        if isinstance(value, Mapping) or not callable(getattr(value, "get_seq_length", None)):
            return False if name == "use_cache" else value
        if (length := _length(value)) > 0:
            raise ModelError(refusal(name, length))
        return None

    return (
        tuple(without(f"argument {place}", value) for place, value in enumerate(args)),
        {name: without(name, value) for name, value in kwargs.items()},
    )


def _length(cache: Any) -> int:
    """Positions that a cache holds. The state of linear attention has no length; one that is there counts as one."""
    try:
        length = int(cache.get_seq_length())
    except ValueError:  # there is no other attention in it
        length = 0
    try:
        has_state = bool(cache.has_previous_state())
    except (AttributeError, ValueError):  # no linear attention in it; a cache of another kind
        has_state = False
    return max(length, int(has_state))
