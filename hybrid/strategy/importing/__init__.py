"""Settings of other tools read into a strategy: DeepSpeed, Accelerate, Fleet. Every key is answered. No torch."""

from __future__ import annotations

from hybrid.strategy.importing.conversion import import_config
from hybrid.strategy.importing.notes import ImportNotes, KeyNote

__all__ = ["ImportNotes", "KeyNote", "import_config"]
