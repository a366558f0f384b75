"""What a strategy can say but this version cannot do yet. Building a feature means deleting its line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid.strategy.choice import Choice

__all__ = ["not_available"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Missing:
    setting: str
    wanted: Callable[[Any], bool]
    feature: str
    instead: str


def _above_one(value: Any) -> bool:
    return value not in {None, 1}


_LINES = (("cp", _above_one, "context parallel", "use degree 1"),)

_MISSING = tuple(
    _Missing(setting=setting, wanted=wanted, feature=feature, instead=instead)
    for setting, wanted, feature, instead in _LINES
)


def not_available(choices: Mapping[str, Choice]) -> list[str]:
    """One sentence for each setting that the user gave and that nothing would act on."""
    return [
        f"{choices[missing.setting].where} = {choices[missing.setting].value!r}: {missing.feature} is not "
        f"available yet; {missing.instead}"
        for missing in _MISSING
        if missing.setting in choices
        and choices[missing.setting].origin != "default"
        and missing.wanted(choices[missing.setting].value)
    ]
