"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import settings

# A machine that runs three files at a time stops any of them for longer than a deadline allows.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
