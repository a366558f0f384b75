"""Random state of a run: alike where ranks must agree, different where they must not; taken out and put back."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hybrid.errors import CheckpointError

__all__ = ["check_random_states", "random_states", "seed_everything", "seed_for_data_rank", "set_random_states"]

# Far apart, so that the streams of neighbouring seeds and of data ranks do not meet.
_DATA_RANK_STRIDE = 1_000_003
_STAGE_STRIDE = 7_919_000_017


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch alike on all ranks: models built afterwards start from the same weights."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_for_data_rank(seed: int, *, data_rank: int, stage: int = 0) -> None:
    """Seed torch differently on each data-parallel rank and pipeline stage, so that their dropout masks differ."""
    torch.manual_seed(seed + _DATA_RANK_STRIDE * (data_rank + 1) + _STAGE_STRIDE * stage)


def random_states() -> dict[str, torch.Tensor]:
    """The states of this process's generators: "python", "numpy", "torch", and "cuda" where this process uses it.

    "python" and "numpy" are JSON as bytes. "cuda" is the current device: a rank works on one.
    """
    states = {
        "python": _as_bytes(random.getstate()),
        "numpy": _as_bytes(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # asking would start it otherwise
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, torch.Tensor]) -> None:
    """Put back what `random_states` returned, bit for bit; generators that `states` does not have go on as they are.

    Raises:
        CheckpointError: see `check_random_states`; nothing is changed then.
    """
    check_random_states(states)
    if "python" in states:
        random.setstate(_python_state(states["python"]))
    if "numpy" in states:
        np.random.set_state(json.loads(_text(states["numpy"])))
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def check_random_states(states: Mapping[str, torch.Tensor]) -> None:
    """Try each state on a generator of its own.

    Raises:
        CheckpointError: one is damaged, or of another generator than this process has; names it.
    """
    for name, state in states.items():
        try:
            match name:
                case "python":
                    random.Random().setstate(_python_state(state))
                case "numpy":
                    kind = np.random.get_state(legacy=False)["bit_generator"]
                    np.random.RandomState(getattr(np.random, kind)()).set_state(json.loads(_text(state)))
                case "torch":
                    torch.Generator().set_state(state)
                case "cuda":
                    torch.Generator("cuda").set_state(state)
                case _:
                    raise KeyError("no generator has this name")
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"the random state {name!r} cannot be put back here: {reason}") from error


def _python_state(state: torch.Tensor) -> tuple[Any, ...]:
    version, numbers, gauss = json.loads(_text(state))
    return version, tuple(numbers), gauss


def _as_bytes(state: Any) -> torch.Tensor:
    text = json.dumps(state, default=np.ndarray.tolist)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _text(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()
