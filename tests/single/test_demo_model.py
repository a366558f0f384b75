"""The demo's model and text are what the demo says they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybrid.demo.corpus import ByteWindows, read_corpus, source_files
from hybrid.demo.gpt import GPT
from hybrid.errors import BatchError


def test_about_ten_million_parameters() -> None:
    """The demo's memory table is about a model of this size; the head is the embedding, counted once."""
    model = GPT()
    assert 9.5e6 < sum(parameter.numel() for parameter in model.parameters()) < 10.5e6
    assert model.head.weight is model.embedding.weight


def test_model_is_ordinary() -> None:
    """It must show that a model needs no change: nothing of hybrid in its file."""
    lines = Path(__import__("hybrid.demo.gpt", fromlist=["GPT"]).__file__).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith(("import hybrid", "from hybrid"))] == []


def test_model_is_causal() -> None:
    """A model that sees the next byte has a loss of nothing."""
    torch.manual_seed(0)
    model = GPT(width=32, num_layers=2, num_heads=2, max_length=12)
    before = torch.randint(256, (2, 12))
    after = before.clone()
    after[:, 7] = (after[:, 7] + 1) % 256
    changed = (model(before) - model(after)).abs().amax(dim=(0, 2)) > 1e-6
    assert changed.tolist() == [False] * 7 + [True] * 5


def test_corpus_is_pythons_own_source() -> None:
    """Real text of some megabytes on every machine, the same in each call; no file in both parts."""
    train, held_out = read_corpus()
    assert train.dtype == torch.uint8
    assert len(train) > 2e6
    assert len(train) > 5 * len(held_out) > 0
    assert b"def __init__(self" in bytes(train.numpy())
    assert torch.equal(read_corpus()[1], held_out)


def test_corpus_leaves_out_tests_and_installed_packages(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "site-packages/other.py", "test/test_a.py", "json/tests/test_b.py", "json/c.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    assert [str(path.relative_to(tmp_path)) for path in source_files(tmp_path)] == ["a.py", "b.py", "json/c.py"]


def test_python_without_sources_is_named(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=r"has 0 of them and 20 are needed; use a Python"):
        read_corpus(tmp_path)


def test_windows_are_bytes_and_their_followers() -> None:
    windows = ByteWindows(torch.arange(10, dtype=torch.uint8), length=3)
    assert len(windows) == 3
    inputs, followers = windows[2]
    assert (inputs.tolist(), followers.tolist()) == ([6, 7, 8], [7, 8, 9])
