"""Settings of the whole suite."""

from __future__ import annotations

import pytest
from hypothesis import settings

# A machine that runs three files at a time stops any of them for longer than a deadline allows.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: whoever gets one of them last keeps all the others waiting."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)  # stable: the order within a file stays
