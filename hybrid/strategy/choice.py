"""One value for each setting, with where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Choice", "Origin"]

Origin = Literal["user", "default", "derived"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A setting's value; `where` names the paths that gave it, `why` says how it was derived."""

    value: Any
    origin: Origin
    where: str
    why: str = ""
    written: str = ""
    """The value as the user wrote it, where that differs (`split_param = True` is partition `element`)."""

    @property
    def said(self) -> str:
        """`sharding_configs.stage = 2`: what the user can search for in his own text."""
        return f"{self.where} = {self.written or repr(self.value)}"

    @property
    def given(self) -> bool:
        return self.origin == "user"
