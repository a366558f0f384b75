"""ZeRO: parameters, gradients and optimizer state in flat buckets, cut over the data-parallel ranks.

One engine serves all stages; a stage is only a choice of how long each buffer lives (docs/zero.md).
"""

from __future__ import annotations

__all__: list[str] = []
