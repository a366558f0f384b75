"""Settings of the whole suite."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

# Before anything imports torch: models of tests are too small for a second thread, which would spin beside the other
# files' ranks and cost more than the first one computes. Ranks have one, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

# A machine that runs three files at a time stops any of them for longer than a deadline allows.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: whoever gets one of them last keeps all the others waiting.

    Of these and of the others, folders take turns: a file that waits for processes runs beside one that computes.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    turns: dict[Path, int] = {}
    files: Counter[tuple[bool, Path]] = Counter()
    for item in items:
        if item.path not in turns:
            kind = (item.path in slow, item.path.parent)
            turns[item.path] = files[kind]
            files[kind] += 1
    items.sort(key=lambda item: (item.path not in slow, turns[item.path]))  # stable: the order within a file stays


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: looking through it again and again takes a fifth of the collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
