"""The demo's model as `hybrid plan --model hybrid.demo.sample:gpt` and `hybrid explain --model` take it."""

from __future__ import annotations

import torch

from hybrid.demo.gpt import DEMO_LENGTH, GPT

__all__ = ["gpt"]


def gpt() -> tuple[GPT, torch.Tensor]:
    """(model, one sample of byte values [1, T])."""
    return GPT(max_length=DEMO_LENGTH), torch.zeros(1, DEMO_LENGTH, dtype=torch.long)
