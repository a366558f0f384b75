"""Unmodified models, cut over tp ranks: every number of one plain process, for stacks of torch.nn and of transformers.

Each model runs at tp 4, with sequence parallel where it has a stack of blocks, and some at tp 2 beside stage 3. The
product of degree, stage, recompute, sequence parallel and accumulation runs with `-m full`.
"""

from __future__ import annotations

import importlib.util
from itertools import product
from typing import Any

import pytest

from tests.multi_rank.test_tensor_parity import runs
from tests.tensor_case import TensorCase
from tests.tensor_models import MODELS
from tests.tensor_runs import Runs

__all__ = ["runs"]  # a fixture

HAND_WRITTEN = tuple(name for name in MODELS if name.startswith("gpt-") or name == "gpt")
TORCH = tuple(name for name in MODELS if MODELS[name].plan is None and name.startswith(("enc", "dec", "tr", "att")))
TRANSFORMERS = tuple(name for name in MODELS if name not in (*HAND_WRITTEN, *TORCH))
DEEP = ("decoder", "attention-weights", "llama-tied", "llama-lora", "gpt2")
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


def has_blocks(name: str) -> bool:
    """Bare attention has no stack of blocks, between which a sequence is cut, or that are computed again."""
    return not name.startswith("attention")


def divides(name: str, tp: int) -> bool:
    """Whether tp ranks can share the sequence: ViT has 9 patches and one token, side paths read it whole."""
    return has_blocks(name) and name != "llama-lora" and (name != "vit" or tp == 2)


def default_cases(name: str) -> list[TensorCase]:
    recompute = "full" if has_blocks(name) else "none"
    wide: dict[str, Any] = {"tp": 4, "zero_stage": 1, "sequence_parallel": divides(name, 4)}
    deep: dict[str, Any] = {"tp": 2, "zero_stage": 3, "way": "micro", "recompute": recompute, "built": "after"}
    return [TensorCase(model=name, world_size=4, **chosen) for chosen in (wide, deep) if chosen is wide or name in DEEP]


def full_cases(name: str) -> list[TensorCase]:
    recomputes = ("none", "full", "selective") if has_blocks(name) else ("none",)
    return [
        TensorCase(
            model=name, world_size=ranks, tp=tp, zero_stage=stage, recompute=recompute, sequence_parallel=cut, way=way
        )
        for (ranks, tp), stage, recompute, cut, way in product(
            ((2, 2), (4, 2), (4, 4)), (0, 1, 2, 3), recomputes, (False, True), ("train", "micro")
        )
        if not cut or divides(name, tp)
    ]


CASES = [case for name in TORCH for case in default_cases(name)]
FROM_TRANSFORMERS = [case for name in TRANSFORMERS if name != "t5-gated" for case in default_cases(name)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_torch_nn(case: TensorCase, runs: Runs) -> None:
    """nn.Transformer and its parts, both orders of dims, masks, weights asked for."""
    problems = runs.problems(case)
    assert not problems, "\n".join([f"{len(problems)} differences, among them", *problems[:8]])


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs transformers")
@pytest.mark.parametrize("case", FROM_TRANSFORMERS, ids=lambda case: case.id)
def test_transformers(case: TensorCase, runs: Runs) -> None:
    """Real models, tied and untied, with fewer heads of keys and values than ranks."""
    problems = runs.problems(case)
    assert not problems, "\n".join([f"{len(problems)} differences, among them", *problems[:8]])


@pytest.mark.full
@pytest.mark.parametrize("name", [*TORCH, *TRANSFORMERS])
def test_every_layout(name: str) -> None:
    if name in TRANSFORMERS and not HAS_TRANSFORMERS:
        pytest.skip("needs transformers")
    cases = full_cases(name)
    all_runs = Runs(cases)
    failed = {case.id: all_runs.problems(case) for case in cases}
    wrong = [f"{case}: {len(found)} differences, first: {found[0]}" for case, found in failed.items() if found]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)} cases", *wrong])
