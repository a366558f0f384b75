"""Where settings come from: a file or a dict, and which tool wrote them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import StrategyError
from hybrid.strategy.fleet_fields import fleet_field
from hybrid.strategy.importing.key_table import key_table
from hybrid.strategy.sections import HybridConfigs
from hybrid.strategy.settings import Settings
from hybrid.strategy.strategy import DistributedStrategy
from hybrid.strategy.text_form import read_json, read_text
from hybrid.strategy.values import closest

__all__ = ["FORMATS", "Source", "read_source"]

FORMATS = ("deepspeed", "accelerate", "fleet")
_LOOKED_FOR = (
    "DeepSpeed (zero_optimization, train_batch_size, train_micro_batch_size_per_gpu, fp16, bf16, optimizer, ...), "
    "Accelerate (compute_environment, distributed_type, fsdp_config, deepspeed_config, num_processes, ...), "
    "Fleet (hybrid_configs, sharding_configs, amp_configs, ..., or the inside of hybrid_configs: dp_degree, mp_degree, "
    "pp_degree, ...)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Settings as they were written, the tool they are for, and the name of the file ("" for a dict)."""

    config: Mapping[str, Any]
    format: str
    name: str
    folder: Path | None


def read_source(source: str | Path | Mapping[str, Any], *, format: str | None) -> Source:
    """Read a file by its ending, .json, .yaml or .yml, or take a dict; find out whose it is.

    Raises:
        StrategyError: it cannot be read, is no dict, or is of no known format; with what was looked for.
    """
    if format is not None and format not in FORMATS:
        guess = closest(str(format), FORMATS)
        hint = f"; did you mean {guess!r}?" if guess else ""
        raise StrategyError(f"format = {format!r}: expected one of {', '.join(map(repr, FORMATS))}{hint}")
    path = None if isinstance(source, Mapping) else Path(source)
    name = "" if path is None else str(path)
    try:
        config = source if isinstance(source, Mapping) else _read(Path(source))
    except StrategyError as error:
        raise StrategyError([f"{name}: {problem}" for problem in error.problems]) from None
    where = f"{name}: " if name else ""
    if not isinstance(config, Mapping):
        raise StrategyError(f"{where}expected a dict of settings, got {type(config).__name__}: {config!r:.60}")
    if not config:
        raise StrategyError(f"{where}there is nothing in it; looked for {_LOOKED_FOR}")
    return Source(
        config=config,
        format=_format_of(config, where) if format is None else format,
        name=name,
        folder=None if path is None else path.parent,
    )


_STRING_OR_COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING_COMMA = re.compile(r'"(?:[^"\\\n]|\\.)*"|,(?=\s*[}\]])')


def _read(path: Path) -> Any:
    """As any settings; of JSON also with what DeepSpeed takes in it: comments, and commas behind the last."""
    try:
        return read_text(path)
    except StrategyError:
        if path.suffix.lower() != ".json":
            raise
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError):
            text = ""
        plain = _STRING_OR_COMMENT.sub(lambda found: found[0] if found[0].startswith('"') else " ", text)
        plain = _TRAILING_COMMA.sub(lambda found: found[0] if found[0].startswith('"') else "", plain)
        if plain == text:
            raise
        return read_json(plain)


def _format_of(config: Mapping[str, Any], where: str) -> str:
    """The format that knows most of the keys, and that none equals."""
    counts = {
        "deepspeed": sum(_known_to_table("deepspeed", key, value) for key, value in config.items()),
        "accelerate": sum(_known_to_table("accelerate", key, value) for key, value in config.items()),
        "fleet": max(
            sum(_known_to(DistributedStrategy, key, value) for key, value in config.items()),
            sum(_known_to(HybridConfigs, key, value) for key, value in config.items()),
        ),
    }
    most = max(counts.values())
    winners = [name for name, count in counts.items() if count == most]
    if most == 0:
        keys = ", ".join(map(str, list(config)[:6]))
        raise StrategyError(
            f"{where}of no known format: of its keys ({keys}{', ...' if len(config) > 6 else ''}) none is one of "
            f"{_LOOKED_FOR}{_slips(config)}"
        )
    if len(winners) > 1:
        raise StrategyError(
            f"{where}its keys ({', '.join(map(str, config))}) fit {' and '.join(winners)} alike; say which: --format "
            f"{winners[0]}"
        )
    return winners[0]


def _known_to_table(name: str, key: object, value: Any) -> int:
    """0 for a key that the format has not, 2 for one of the right shape (a section or a value), 1 otherwise."""
    table, word = key_table(name), str(key)
    row = table.rows.get(word)
    if name == "deepspeed" and word == "bfloat16":
        return 2
    if row is None and not table.is_section(word):
        return 0
    return 1 + (isinstance(value, Mapping) == (table.is_section(word) or (row is not None and row.type == "dict")))


def _known_to(kind: type[Settings], key: object, value: Any) -> int:
    """The same for our own settings and Fleet's names of them."""
    word = str(key)
    if word not in kind.all_keys() and fleet_field(kind.PATH, word) is None:
        return 0
    is_section = kind.section_type(kind.ALIASES.get(word, word)) is not None
    return 2 if word == "gradient_clipping" else 1 + (isinstance(value, Mapping) == is_section)


def _slips(config: Mapping[str, Any]) -> str:
    """What was probably meant where no key is known, but some are nearly: other cases, dashes, misspelt."""
    tables = [key_table(name) for name in ("deepspeed", "accelerate")]
    known = {
        *(path.partition(".")[0] for table in tables for path in table.rows),
        *DistributedStrategy.all_keys(),
        *HybridConfigs.all_keys(),
    }
    told = []
    for word in map(str, list(config)[:6]):
        homes = [home for table in tables for home in table.homes(word) or table.homes(f"fsdp_{word}")]
        guess = closest(word, sorted(known))
        if homes:
            told.append(f"{word!r} belongs at {' or '.join(homes[:3])}")
        elif guess is not None:
            told.append(f"for {word!r} did you mean {guess!r}?")
    return f"; {', '.join(told)}" if told else ""
