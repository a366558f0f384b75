"""The promise as a matrix: under every setting, a run gives the numbers of one plain process (tests/parity.py).

The default run is a cover of all pairs of settings: every cut (ZeRO stage with shard_size) by every way of
accumulation, and both with every number of ranks. The backend is one of them: gloo, or the deferred one, where a
missing wait or a buffer read too early turns into NaN. Every layout (cut on a number of ranks) by every way, on both
backends, and the whole product of the settings that interact most (layout, way of accumulation, overlap, clip,
optimizer, partition, reduction), the others taking turns, run with

    python -m pytest tests/multi_rank/test_parity_matrix.py -m full -k gloo        # some thousand cases
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.models import MODELS
from tests.pairwise import cover, everything, missing_pairs
from tests.parity import STEPS, Worlds, reference
from tests.parity_case import CLIPS, WAYS, Case

BACKENDS = ("gloo", "deferred")

# (ZeRO stage, shard_size), and in LAYOUTS with a number of ranks before them. Stage 0 cuts nothing, and a shard_size
# of all ranks is what leaving it out means.
CUTS = tuple(
    (zero_stage, shard_size) for zero_stage in (0, 1, 2, 3) for shard_size in (None, 1, 2)[: 3 if zero_stage else 1]
)
LAYOUTS = tuple(
    (world_size, zero_stage, shard_size)
    for world_size in (1, 2, 3, 4)
    for zero_stage in (0, 1, 2, 3)
    for shard_size in (None, *(s for s in (1, 2) if zero_stage > 0 and s < world_size and world_size % s == 0))
)

FACTORS: dict[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "backend": BACKENDS,
    "way": tuple(WAYS),
    "clip": tuple(CLIPS),
    "clip_by": ("strategy", "call"),
    "grad_reduce": ("auto", "last_micro_batch", "every_micro_batch", 2),
    "overlap_comm": (True, False),
    "overlap_param_gather": (False, True),
    "optimizer": ("adamw", "sgd"),
    "partition": ("auto", "element", "parameter"),
    "built": ("before", "after"),
    "bucket_bytes": (4, 3000, 25 * 2**20),
    "model": tuple(MODELS),
    "dtype": (torch.float32, torch.float64),
}

# The full run multiplies these; of the others each case takes the next combination in turn.
CORE = ("layout", "way", "clip", "clip_by", "grad_reduce", "overlap_comm", "optimizer", "partition")


def allowed(choice: dict[str, Any]) -> bool:
    """Leaves out what a strategy refuses because it would do nothing, and what no case can tell apart."""
    zero_stage = choice["layout"][1] if "layout" in choice else 2
    way, clip, grad_reduce = choice.get("way", "calls"), choice.get("clip", "norm2"), choice.get("grad_reduce")
    if zero_stage == 0 and (choice.get("overlap_param_gather") or choice.get("partition", "auto") != "auto"):
        return False
    if zero_stage == 3 and choice.get("overlap_param_gather"):
        return False
    if zero_stage == 3 and choice.get("model") == "experts":
        return False  # ranks call their experts in different orders: an error at stage 3 (test_stage_3.py)
    if grad_reduce in {"every_micro_batch", 2} and zero_stage < 2:
        return False
    if grad_reduce == 2 and WAYS[way] < 2:
        return False
    if choice.get("clip_by") == "call":
        return clip != "none" and ("way" not in choice or way in {"loop", "nosync", "repeat"})
    return True


def to_case(choice: dict[str, Any]) -> Case:
    world_size, zero_stage, shard_size = choice["layout"]
    rest = {name: value for name, value in choice.items() if name != "layout"}
    return Case(world_size=world_size, zero_stage=zero_stage, shard_size=shard_size, **rest)


def full_cases(backend: str) -> Iterator[Case]:
    rest = {name: values for name, values in FACTORS.items() if name not in (*CORE, "backend")}
    turns = [dict(zip(rest, values, strict=True)) for values in product(*rest.values())]
    core = {name: FACTORS[name] for name in CORE}
    for index, choice in enumerate(everything(core, allowed=allowed)):
        # A step that shares no divisor with the number of turns meets them all before it repeats one.
        first = index * 37 % len(turns)
        merged = ({**choice, **turn} for turn in turns[first:] + turns[:first])
        yield to_case({**next(filter(allowed, merged)), "backend": backend})


DEFAULT_FACTORS = {"cut": CUTS, "world_size": (1, 2, 3, 4), **{n: v for n, v in FACTORS.items() if n != "layout"}}


def with_layout(choice: dict[str, Any]) -> dict[str, Any]:
    """The choice with its cut and number of ranks as one layout; of a part of a choice, the layout that fits most."""
    rest = {name: value for name, value in choice.items() if name not in ("cut", "world_size")}
    return {"layout": (choice.get("world_size", 4), *choice["cut"]), **rest} if "cut" in choice else rest


def allowed_by_cut(choice: dict[str, Any]) -> bool:
    merged = with_layout(choice)
    return merged.get("layout", LAYOUTS[0]) in LAYOUTS and allowed(merged)


PAIRS = cover(DEFAULT_FACTORS, allowed=allowed_by_cut)
PAIR_CASES = [to_case(with_layout(choice)) for choice in PAIRS]
LAYOUT_PAIRS = cover(FACTORS, allowed=allowed)
OTHER_BACKEND = dict(zip(BACKENDS, reversed(BACKENDS), strict=True))
LAYOUT_CASES = [to_case(choice) for choice in LAYOUT_PAIRS]
SWAPPED_CASES = [replace(case, backend=OTHER_BACKEND[case.backend]) for case in LAYOUT_CASES]
MORE_CASES = [case for case in (*LAYOUT_CASES, *SWAPPED_CASES) if case not in PAIR_CASES]


def _id(case: Case) -> str:
    return f"{case.backend}-{case.id}"


@pytest.fixture(scope="module")
def worlds(request: pytest.FixtureRequest) -> Worlds:
    """One world per number of ranks and backend, for the cases that this session has selected."""
    items = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params.get("case") for item in items if hasattr(item, "callspec")]
    return Worlds([case for case in cases if isinstance(case, Case)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=_id(case)) for case in PAIR_CASES),
        *(pytest.param(case, id=_id(case), marks=pytest.mark.full) for case in MORE_CASES),
    ],
)
def test_equals_one_process(case: Case, worlds: Worlds) -> None:
    """Losses, gradients, norm, weights, optimizer state: equal to plain torch, and alike on all ranks."""
    problems = worlds.problems(case)
    assert not problems, "\n".join([f"{len(problems)} differences, among them", *problems[:8]])


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_whole_product_equals_one_process(zero_stage: int, world_size: int, backend: str) -> None:
    """The same promise for every combination of the settings that interact most."""
    chosen = [c for c in full_cases(backend) if (c.zero_stage, c.world_size) == (zero_stage, world_size)]
    runs = Worlds(chosen)
    failed = {case.id: runs.problems(case) for case in chosen}
    wrong = [f"{name}: {len(found)} differences, first: {found[0]}" for name, found in failed.items() if found]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(chosen)} cases", *wrong])


def test_every_pair_of_settings_is_in_the_default_run() -> None:
    """The cover covers: two settings that are right alone and wrong together cannot hide."""
    assert missing_pairs(PAIRS, DEFAULT_FACTORS, allowed=allowed_by_cut) == []
    assert {(choice["cut"], choice["way"]) for choice in PAIRS} == set(product(CUTS, WAYS))
    assert {with_layout(choice)["layout"] for choice in PAIRS} == set(LAYOUTS)


def test_every_layout_meets_every_way_in_the_full_run() -> None:
    assert missing_pairs(LAYOUT_PAIRS, FACTORS, allowed=allowed) == []
    assert {(choice["layout"], choice["way"]) for choice in LAYOUT_PAIRS} == set(product(LAYOUTS, WAYS))


def test_cases_have_names_of_their_own() -> None:
    """A failing case can be run alone by its name."""
    names = [_id(case) for case in (*PAIR_CASES, *MORE_CASES)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("clip", [name for name in CLIPS if name != "none"])
def test_clipping_bites_in_the_reference(model: str, clip: str) -> None:
    """The matrix would prove nothing about clipping if the gradients stayed below its limits."""
    plain = reference(Case(world_size=1, zero_stage=0, model=model, clip=clip))
    changed = [
        any(g is not None and not torch.equal(g, plain.raw[step][fqn]) for fqn, g in plain.clipped[step].items())
        for step in range(STEPS)
    ]
    assert sum(changed) >= 2, changed
