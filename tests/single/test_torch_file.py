"""Files of `torch.save` from strangers: refused in words of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hybrid.checkpoint.torch_file import open_torch_files
from hybrid.errors import CheckpointError


@pytest.mark.parametrize(
    ("state", "message"),
    [
        pytest.param(nn.Linear(2, 2), "holds a torch.nn.modules.linear.Linear, which is no plain tensor", id="module"),
        pytest.param({"epoch": print}, "which is no plain tensor and could run code", id="code"),
    ],
)
def test_code_is_refused_without_advice_to_run_it(tmp_path: Path, state: Any, message: str) -> None:
    """torch's own text, with codes for terminals in it, says how to run what is in the file."""
    torch.save(state, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=message) as raised:
        open_torch_files([tmp_path / "file.pt"])
    assert "weights_only" not in str(raised.value)
    assert "\x1b" not in str(raised.value)


def test_a_damaged_pickle_is_not_called_code(tmp_path: Path) -> None:
    """A byte that is no operation of pickle's: torch asks for an issue to be filed."""
    torch.save({"weight": torch.ones(3)}, tmp_path / "file.pt")
    data = (tmp_path / "file.pt").read_bytes()
    (tmp_path / "file.pt").write_bytes(data.replace(b"\x80\x02}", b"\xf0\x02}", 1))
    with pytest.raises(CheckpointError, match="is damaged, or holds something else than tensors by name"):
        open_torch_files([tmp_path / "file.pt"])
