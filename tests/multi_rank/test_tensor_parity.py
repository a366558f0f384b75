"""Tensor parallel with all else that a strategy has: under every setting, the numbers of one plain process.

The default run is a cover of all pairs of settings at 2 and 4 ranks, and two cases at 8. The product of those that
interact most, the others taking turns, runs with

    python -m pytest tests/multi_rank/test_tensor_parity.py -m full        # some thousand cases
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from tests.pairwise import cover, everything, missing_pairs
from tests.tensor_case import AMP, CLIP, TensorCase
from tests.tensor_runs import STEPS, Runs, reference

# (ranks, tp, shard_size); a shard_size of all data-parallel ranks is what leaving it out means.
RANKS = ((2, 2, None), (4, 2, None), (4, 4, None), (4, 2, 1))

FACTORS: dict[str, tuple[Any, ...]] = {
    "ranks": RANKS,
    "zero_stage": (0, 1, 2, 3),
    "model": ("gpt", "gpt-tied", "gpt-unused", "gpt-lora", "gpt-grouped"),
    "amp": tuple(AMP),
    "recompute": ("none", "full", "selective"),
    "way": ("train", "micro", "nosync"),
    "clip": ("none", "strategy", "call"),
    "sequence_parallel": (False, True),
    "built": ("before", "after"),
    "backend": ("gloo", "deferred"),
}

# The full run multiplies these; of the others each case takes the next combination in turn.
CORE = ("ranks", "zero_stage", "model", "amp", "recompute", "sequence_parallel")


def allowed(choice: dict[str, Any]) -> bool:
    """Leaves out what a strategy refuses."""
    if choice.get("zero_stage") == 0 and choice.get("ranks", RANKS[0])[2] is not None:
        return False  # it would do nothing
    if choice.get("sequence_parallel") and choice.get("model") == "gpt-lora":
        return False  # a whole layer inside the attention would see a part of the sequence
    way = choice.get("way")
    if way == "nosync" and choice.get("amp") == "fp16-scaler":
        return False  # a plain loop has a scaler of its own (tests/multi_rank/test_loss_scaling.py)
    return choice.get("clip") != "call" or (way in {None, "nosync"} and choice.get("amp") != "fp16-scaler")


def to_case(choice: dict[str, Any]) -> TensorCase:
    world_size, tp, shard_size = choice["ranks"]
    rest = {name: value for name, value in choice.items() if name != "ranks"}
    return TensorCase(world_size=world_size, tp=tp, shard_size=shard_size, **rest)


def full_cases(ranks: tuple[int, int, int | None], zero_stage: int) -> Iterator[TensorCase]:
    rest = {name: values for name, values in FACTORS.items() if name not in CORE}
    turns = [dict(zip(rest, values, strict=True)) for values in product(*rest.values())]
    core = {name: FACTORS[name] for name in CORE} | {"ranks": (ranks,), "zero_stage": (zero_stage,)}
    for index, choice in enumerate(everything(core, allowed=allowed)):
        # A step that shares no divisor with the number of turns meets them all before it repeats one.
        first = index * 29 % len(turns)
        merged = ({**choice, **turn} for turn in turns[first:] + turns[:first])
        yield to_case(next(filter(allowed, merged)))


PAIRS = cover(FACTORS, allowed=allowed)
CASES = [
    *map(to_case, PAIRS),
    TensorCase(
        world_size=8, tp=2, zero_stage=3, shard_size=2, model="gpt-tied", recompute="full", sequence_parallel=True
    ),
    TensorCase(world_size=8, tp=4, zero_stage=2, model="gpt-grouped", way="micro", backend="deferred"),
    # BC-58: the first block that is computed again has no input that needs a gradient.
    *(TensorCase(model="gpt-frozen", zero_stage=stage, recompute="full") for stage in (0, 1, 2, 3)),
]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Runs:
    """One world per number of ranks, for the cases that this session has selected."""
    items = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params.get("case") for item in items if hasattr(item, "callspec")]
    return Runs([case for case in cases if isinstance(case, TensorCase)])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_equals_one_process(case: TensorCase, runs: Runs) -> None:
    """Losses, gradients, norm, weights, optimizer state: equal to plain torch, and alike on all ranks."""
    problems = runs.problems(case)
    assert not problems, "\n".join([f"{len(problems)} differences, among them", *problems[:8]])


@pytest.mark.full
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_whole_product_equals_one_process(ranks: tuple[int, int, int | None], zero_stage: int) -> None:
    """The same promise for every combination of the settings that interact most."""
    chosen = list(full_cases(ranks, zero_stage))
    all_runs = Runs(chosen)
    failed = {case.id: all_runs.problems(case) for case in chosen}
    wrong = [f"{name}: {len(found)} differences, first: {found[0]}" for name, found in failed.items() if found]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(chosen)} cases", *wrong])


def test_every_pair_of_settings_is_in_the_default_run() -> None:
    """The cover covers, and stays small."""
    assert missing_pairs(PAIRS, FACTORS, allowed=allowed) == []
    assert len(PAIRS) <= 25
    assert len({case.id for case in CASES}) == len(CASES)


@pytest.mark.parametrize("model", FACTORS["model"])
def test_clipping_bites_in_the_reference(model: str) -> None:
    """The matrix would prove nothing about clipping if the gradients stayed below its limit."""
    case = TensorCase(model=model)
    assert sum(norm > CLIP for norm in reference(model, case.dtype, True).norms) >= STEPS // 2
