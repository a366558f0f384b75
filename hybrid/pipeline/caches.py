"""Key/value caches of transformers: they are for generation, and would carry values around what a unit returns."""

from __future__ import annotations

from typing import Any

from hybrid.errors import ModelError

__all__ = ["without_cache"]


def without_cache(unit: str, name: str, value: Any) -> Any:
    """An argument of a unit; instead of an empty cache none, since a forward for training starts without one.

    Raises:
        ModelError: the cache holds something already: leaving it out would change the result.
    """
    length = getattr(value, "get_seq_length", None)
    if not callable(length):
        return False if name == "use_cache" else value
    if length() > 0:
        raise ModelError(
            f"{unit!r} is given a cache of {length()} positions ({name}): what other calls put into a cache does not "
            "travel from stage to stage of a pipeline. Train without one (model.config.use_cache = False)"
        )
    return None
