"""Real text that every machine with Python has: the source files of Python's own standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset

from hybrid.errors import BatchError

__all__ = ["ByteWindows", "read_corpus"]

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HELD_OUT_EVERY = 20  # files


class ByteWindows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Text as pairs of `length` bytes and the bytes that follow each; windows do not overlap."""

    def __init__(self, text: torch.Tensor, *, length: int) -> None:
        self._text = text  # [number of bytes], uint8
        self.length = length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.length
        window = self._text[start : start + self.length + 1].long()
        return window[:-1], window[1:]


def source_files(folder: Path) -> Iterator[Path]:
    """The folder's .py files in one fixed order, without tests and installed packages."""
    for entry in sorted(folder.iterdir(), key=lambda path: path.name):
        if entry.is_dir() and not entry.is_symlink() and entry.name not in SKIPPED_FOLDERS:
            yield from source_files(entry)
        elif entry.suffix == ".py" and entry.is_file():
            yield entry


def read_corpus(folder: Path | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Training text and held-out text, as bytes [number of bytes]; every 20th file is held out, whole.

    folder: by default that of the standard library of the running Python.

    Raises BatchError if there are no source files (some systems install Python without them).
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    files = list(source_files(folder)) if folder.is_dir() else []
    held_out = files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    if not held_out:
        raise BatchError(
            f"the demo trains on Python's own source files, but {folder} has {len(files)} of them and "
            f"{HELD_OUT_EVERY} are needed; use a Python that was installed with its standard library as .py files"
        )
    kept = set(held_out)
    return _text_of(file for file in files if file not in kept), _text_of(held_out)


def _text_of(files: Iterator[Path] | list[Path]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
