"""Any layout loads any layout: weights, moments, step counts and masters to the bit, and the next losses.

Every two of a set of layouts that covers all axes: ZeRO stages, shard groups with replicas, tensor and pipeline
parallel and both, schedules with several chunks per stage, partitions, bucket sizes, precision, world sizes; over
models with frozen parameters, uneven parts, parameters that never had a gradient, and a weight on two or three stages.
And every two layouts with tensor parallel, over models with fused weights, transposed ones, heads of keys that are
fewer than the ranks, and a vocabulary that does not divide (67), two of them from `transformers`.

In the default run each layout loads what it saved itself, what the plainest one saved and the other way round; of any
other two, one loads what the other saved. Every pair both ways:

    python -m pytest tests/multi_rank/test_checkpoint_layouts.py -m full -n 0
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint_runs import load_all, save_all
from tests.ranks import run_ranks

# Name -> number of ranks, strategy.
Layouts = Mapping[str, tuple[int, dict[str, Any]]]

PIPELINES: Layouts = {
    "one": (1, {"pp": 1}),
    "dp2-z0": (2, {"pp": 1, "stage": 0}),
    "dp4-z1-shard2-whole": (4, {"pp": 1, "stage": 1, "shard_size": 2, "partition": "parameter"}),
    "dp3-z3-tiny-buckets": (3, {"pp": 1, "stage": 3, "bucket_bytes": 300}),
    "pp2-dp2-z1-bf16": (4, {"pp": 2, "stage": 1, "amp": "bf16"}),
    "pp2-interleaved-z0": (2, {"pp": 2, "stage": 0, "schedule": "interleaved"}),
    "pp3-split-z2": (3, {"pp": 3, "stage": 2, "split": [1, 6, 1]}),
    "tp2-dp2-z2-bf16": (4, {"pp": 1, "tp": 2, "stage": 2, "amp": "bf16"}),
    "pp2-tp2-dp2-z3-zbv": (8, {"pp": 2, "tp": 2, "stage": 3, "schedule": "zbv"}),
}
TENSORS: Layouts = {
    "dp2-z1": (2, {"tp": 1, "stage": 1, "bucket_bytes": 3000}),
    "tp2-sequence": (2, {"tp": 2, "sequence_parallel": True}),
    "tp2-dp2-z3-bf16": (4, {"tp": 2, "stage": 3, "bucket_bytes": 3000, "amp": "bf16"}),
    "tp4-z0": (4, {"tp": 4, "stage": 0}),
}
TENSOR_KINDS = ("gpt-tied", "gpt-grouped", "gpt2", "llama-tied", "llama-one-kv-head")


def pipeline_kinds(layout: str) -> tuple[str, ...]:
    """A weight that also mixes within a block cannot be cut by tensor parallel."""
    return ("tied",) if "tp2" in layout else ("tied", "thrice")


def tensor_kinds(layout: str) -> tuple[str, ...]:
    return TENSOR_KINDS


def sources(layouts: Layouts, loader: str, *, both_ways: bool) -> list[str]:
    """The layouts whose files `loader` loads. Of a circle: itself, the half after it, and the first one; or all."""
    names = list(layouts)
    here = names.index(loader)

    def is_after(place: int) -> bool:
        steps = (place - here) % len(names)
        return 2 * steps < len(names) or (2 * steps == len(names) and here < place)

    return [name for place, name in enumerate(names) if both_ways or 0 in {here, place} or is_after(place)]


@pytest.mark.parametrize("layouts", [PIPELINES, TENSORS], ids=["pp", "tp"])
def test_every_two_layouts_meet_in_the_default_run(layouts: Layouts) -> None:
    """And the first one, the plainest, loads and is loaded by every other."""
    met = {(loader, name) for loader in layouts for name in sources(layouts, loader, both_ways=False)}
    assert all((one, other) in met or (other, one) in met for one in layouts for other in layouts)
    first = next(iter(layouts))
    assert all({(first, name), (name, first)} <= met for name in layouts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "both_ways", [pytest.param(False, id="one-way"), pytest.param(True, id="both-ways", marks=pytest.mark.full)]
)
@pytest.mark.parametrize(("layouts", "kinds"), [(PIPELINES, pipeline_kinds), (TENSORS, tensor_kinds)], ids=["pp", "tp"])
def test_every_layout_loads_every_layout(layouts: Layouts, kinds: Any, both_ways: bool) -> None:
    root = Path(tempfile.mkdtemp())  # not tmp_path, of which the last three runs stay
    try:
        roots = {name: str(root / name) for name in layouts}
        saved = {
            name: run_ranks(save_all, world, roots[name], kinds(name), settings, timeout_seconds=120)[0]
            for name, (world, settings) in layouts.items()
        }
        for name, (world, settings) in layouts.items():
            chosen = {source: roots[source] for source in sources(layouts, name, both_ways=both_ways)}
            run_ranks(load_all, world, chosen, kinds(name), settings, saved, timeout_seconds=240)
    finally:
        shutil.rmtree(root)
