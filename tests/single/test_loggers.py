"""The two ready step callbacks, without a world."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import hybrid


class Unread(torch.Tensor):
    """A tensor whose value nobody may ask for: on a GPU that would wait for the device."""

    def item(self) -> Any:
        raise AssertionError("a step that is not written was read")

    __float__ = item


def record(step: int, *, rank: int = 0, may_be_read: bool = True) -> hybrid.StepRecord:
    kind = torch.Tensor if may_be_read else Unread
    return hybrid.StepRecord(
        step=step,
        rank=rank,
        loss=torch.tensor(1.5).as_subclass(kind),
        grad_norm=None,
        lr=(0.25, 0.5),
        seconds=0.125,
        skipped=False,
        totals=torch.tensor([6.0, 4.0, 4.0, 12.0]).as_subclass(kind),
        read_memory=lambda: {"parameters": 8, "gradients": 4, "peak": 100},
    )


def test_only_what_is_written_is_read(tmp_path: Path) -> None:
    """Protects the pace of a training that is logged every tenth step, and on one rank: the rest waits for nothing."""
    log = hybrid.CsvLogger(tmp_path / "run.csv", every=10)
    log(record(9, may_be_read=False))
    log(record(10, rank=1, may_be_read=False))
    assert not (tmp_path / "run.csv").exists()
    log(record(10))
    lines = (tmp_path / "run.csv").read_text().splitlines()
    assert lines == ["step,loss,grad_norm,lr,tokens,seconds,skipped,memory_bytes", "10,1.5,,0.25,12,0.125,0,12"]


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    """Protects a file that is somebody else's from lines in its middle."""
    (tmp_path / "run.csv").write_text("epoch,accuracy\n1,0.5\n")
    with pytest.raises(hybrid.HybridError, match=r"exists with the columns epoch, accuracy"):
        hybrid.CsvLogger(tmp_path / "run.csv")(record(1))
    assert (tmp_path / "run.csv").read_text() == "epoch,accuracy\n1,0.5\n"
    with pytest.raises(hybrid.HybridError, match=r"every is 0"):
        hybrid.CsvLogger(tmp_path / "other.csv", every=0)


def test_tensorboard_is_refused_before_training_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects from an ImportError of torch's after the first step."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(hybrid.HybridError, match=r"pip install tensorboard"):
        hybrid.TensorBoardLogger("runs")


def test_tensorboard_gets_scalars_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects the names of the curves, on a stand-in: the package is no dependency."""
    written: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, log_dir: str) -> None:
            assert log_dir == str(tmp_path)

        def add_scalar(self, name: str, value: float, global_step: int) -> None:
            written.append((name, value, global_step))

        def flush(self) -> None:
            """The real one may keep scalars back for minutes."""

        def close(self) -> None:
            written.append(("closed", 0.0, 0))

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log = hybrid.TensorBoardLogger(tmp_path)
    log(record(3))
    log.close()
    log.close()
    assert ("train/loss", 1.5, 3) in written
    assert ("train/tokens", 12, 3) in written
    assert written.count(("closed", 0.0, 0)) == 1
