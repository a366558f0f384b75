"""`python -m tests.support` writes docs/support.md anew; some minutes."""

from __future__ import annotations

from pathlib import Path

from tests.support.calls import said_by_calls
from tests.support.page import page_of
from tests.support.sweep import all_rules

PAGE = Path(__file__).resolve().parents[2] / "docs" / "support.md"

if __name__ == "__main__":
    PAGE.write_text(page_of(all_rules(), said_by_calls()), encoding="utf-8")
