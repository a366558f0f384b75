"""The fields of a model's configuration: what is wrong with them, and what had to be assumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybrid.errors import PlanError

__all__ = ["Fields"]

_LAYERS = frozenset({"num_hidden_layers", "n_layer", "num_layers"})
_SIZES = _LAYERS | {
    "hidden_size", "n_embd", "intermediate_size", "ffn_dim", "vocab_size", "max_position_embeddings", "n_positions",
    "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "image_size", "patch_size",
}  # fmt: skip
# What is above these is a slip, and would be worked on for hours.
_MOST_LAYERS = 10_000
_MOST = 10**8


class Fields:
    """A configuration that notes what is wrong with it."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config, self.name = config, name
        self.problems: list[str] = []
        self.assumed: dict[str, int] = {}

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The first of these fields that is there."""
        most = _MOST_LAYERS if names[0] in _LAYERS else _MOST
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                self.problems.append(f"{self.name}: {name} = {value!r}: expected a whole number of at least {least}")
                return 1
            if value > most:
                self.problems.append(f"{self.name}: {name} = {value}: expected at most {most:,}")
                return 1
            return value
        if default is None:
            self.problems.append(f"{self.name}: {' or '.join(names)} is missing from the configuration")
            return 1
        if names[0] in _SIZES:
            self.assumed[names[0]] = default
        return default

    def notes(self) -> Iterator[str]:
        if self.assumed:
            values = ", ".join(f"{name} = {value}" for name, value in self.assumed.items())
            yield f"not in the configuration, so the default of its class is assumed: {values}"
        method = self.config.get("quantization_config")
        if method:
            words = method.get("quant_method", "") if isinstance(method, Mapping) else ""
            method = f" ({words})" if words else ""
            yield f"quantization_config{method} does not count: weights have the precision asked for"

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.config.get(name)
        return default if value is None else bool(value)

    def share(self, name: str, *, default: float = 0.0) -> bool:
        """Whether a dropout probability is more than nothing."""
        value = self.config.get(name)
        return float(default if value is None else value) > 0

    def word(self, name: str, *, default: str) -> str:
        return str(self.config.get(name) or default)

    def raise_all(self) -> None:
        if self.problems:
            raise PlanError(self.problems)
