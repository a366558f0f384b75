"""How much is measured: sizes, and how long each of them is looked at."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PROGRESS_FILE", "RESULT_FILE", "Effort", "effort_of"]

# In the log folder of a run, from the first rank to whoever started it.
PROGRESS_FILE, RESULT_FILE = "calibration.progress", "calibration.json"

KI, MI = 2**10, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Args:
    window_seconds, num_windows: each measurement is the median of so many windows of at least this length.
    matmuls: (rows, in_features, out_features) of linear layers, whose weight gradients are measured too.
    more_dtypes: which of `matmuls` are also measured in every other dtype.
    attentions: (batch, heads, seq, head_dim).
    pointwise: bytes of a tensor.
    optimizer_elements: that AdamW updates.
    messages: bytes of a collective's value.
    """

    window_seconds: float
    num_windows: int
    matmuls: tuple[tuple[int, int, int], ...]
    more_dtypes: tuple[int, ...]
    attentions: tuple[tuple[int, int, int, int], ...]
    pointwise: tuple[int, ...]
    optimizer_elements: int
    messages: tuple[int, ...]


_CPU = Effort(
    window_seconds=0.05,
    num_windows=5,
    matmuls=(
        (64, 256, 256), (64, 256, 1024), (64, 1024, 256), (64, 1024, 1024),
        (256, 256, 256), (256, 256, 1024), (256, 1024, 256), (256, 1024, 1024),
        (1024, 256, 1024), (1024, 1024, 1024),
    ),
    more_dtypes=(0, 5, 9),
    attentions=((2, 4, 64, 64), (2, 4, 256, 64), (1, 8, 512, 64), (1, 4, 256, 128)),
    pointwise=(16 * KI, 128 * KI, MI, 8 * MI),
    optimizer_elements=2 * MI,
    messages=(KI, 16 * KI, 256 * KI, 2 * MI, 16 * MI),
)  # fmt: skip
_CUDA = Effort(
    window_seconds=0.05,
    num_windows=5,
    matmuls=(
        (512, 1024, 1024), (512, 4096, 4096), (2048, 1024, 4096), (2048, 4096, 1024),
        (2048, 4096, 4096), (4096, 4096, 11008), (4096, 8192, 8192), (8192, 4096, 14336),
    ),
    more_dtypes=(1, 4),
    attentions=((1, 16, 1024, 64), (1, 32, 2048, 128), (1, 32, 8192, 128), (4, 16, 2048, 128)),
    pointwise=(MI, 16 * MI, 256 * MI),
    optimizer_elements=64 * MI,
    messages=(16 * KI, 256 * KI, 4 * MI, 64 * MI, 256 * MI),
)  # fmt: skip


def effort_of(*, on_cuda: bool, is_quick: bool) -> Effort:
    """The usual one of a kind of device; quick: a third of the sizes, for shorter."""
    whole = _CUDA if on_cuda else _CPU
    if not is_quick:
        return whole
    return Effort(
        window_seconds=0.02,
        num_windows=5,
        matmuls=whole.matmuls[1::3],
        more_dtypes=(0,),
        attentions=whole.attentions[:2],
        pointwise=whole.pointwise[::2],
        optimizer_elements=whole.optimizer_elements // 4,
        messages=whole.messages[::2],
    )
