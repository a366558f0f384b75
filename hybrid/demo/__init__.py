"""The main job: a byte-level GPT, the text it is trained on, and the training script that `hybrid demo` runs.

Written as a user would write it: an ordinary module, an ordinary optimizer, and the public names of hybrid.
"""

from __future__ import annotations

__all__: list[str] = []
