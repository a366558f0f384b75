"""Recompute and mixed precision on the deferred backend: no wait is missing where forwards run twice or types differ.

The deferred backend shows a buffer that is read too early, or written too early, as NaN or as an error (see
hybrid/collectives/deferred.py). It carries out the same operations in the same order as gloo, so a run that waits
where it must gives gloo's bits.
"""

from __future__ import annotations

import contextlib
from itertools import cycle
from typing import Any

import pytest
import torch
from torch.nn import functional

import hybrid
from hybrid.collectives.deferred import deferred_backend, is_enabled
from tests.multi_rank.case_runs import own_part, seeded, strategy_of
from tests.multi_rank.test_recompute import WIDTH, Net
from tests.ranks import run_ranks

O1, O2 = {"level": "O1"}, {"level": "O2"}
FULL, SELECTIVE = {"policy": "full"}, {"policy": "selective"}

# Name -> amp_configs, recompute_configs (None: off), sharding_configs.
FEATURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "recompute": (None, FULL, {}),
    "recompute selective": (None, SELECTIVE, {}),
    "O1": (O1, None, {}),
    "O2": (O2, None, {}),
    "O2 sent in bf16, recompute": (O2, FULL, {"grad_dtype": "param", "reduce_dtype": "bfloat16"}),
    "O1 in float16, recompute": ({**O1, "dtype": "float16", "init_loss_scaling": 256}, FULL, {}),
    "O2 with fp32 modules, recompute selective": ({**O2, "custom_fp32": ["last"]}, SELECTIVE, {}),
}
# The features take turns.
SETTINGS: dict[int, tuple[dict[str, Any], ...]] = {
    2: ({"overlap_param_gather": True}, {"overlap_comm": False}, {}),
    3: ({"prefetch": 2}, {"prefetch": 0}, {"prefetch": 1, "overlap_comm": False}),
}


def train(stage: int, feature: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Everything that a run gives: two steps, an evaluation in between, the second over two calls."""
    amp, recompute, sharding = FEATURES[feature]
    # Buckets of one or two parameters, so that many collectives are under way.
    strategy = strategy_of(stage=stage, bucket_bytes=600, accumulate_steps=2, seed=3, **sharding, **settings)
    if amp is not None:
        strategy.amp, strategy.amp_configs = True, amp
    if recompute is not None:
        strategy.recompute, strategy.recompute_configs = True, recompute
    model = hybrid.distributed_model(Net(dropout=0.3), strategy=strategy)
    optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    seen: dict[str, Any] = {}
    for step in range(2):
        generator = seeded(60 + step)
        inputs, labels = torch.randn(12, WIDTH, generator=generator), torch.randn(12, 2, generator=generator)
        batch = own_part(inputs), own_part(labels)
        if step == 1:
            seen["evaluation"] = model.eval_batch(batch, loss_fn=functional.mse_loss).loss
            model.train_batch(batch, loss_fn=functional.mse_loss, step=False)
            seen |= {f"gradient of {name}": gradient for name, gradient in model.named_gradients()}
        result = model.train_batch(batch, optimizer, loss_fn=functional.mse_loss)
        seen |= {f"loss {step}": result.loss, f"norm {step}": result.grad_norm}
    state = optimizer.full_state_dict()["state"]
    seen |= {f"{key} of {name}": value for name, entry in state.items() for key, value in entry.items()}
    seen |= model.full_state_dict()
    hybrid.shutdown()
    return seen


def compare(stage: int) -> list[str]:
    problems = []
    for feature, settings in zip(FEATURES, cycle(SETTINGS[stage])):
        runs = []
        for backend in (contextlib.nullcontext, deferred_backend):
            with backend():
                assert is_enabled() == (backend is deferred_backend)
                runs.append(train(stage, feature, settings))
        direct, deferred = runs
        assert list(direct) == list(deferred)
        assert all(torch.isfinite(value).all() for value in direct.values()), (feature, settings)
        problems += [
            f"{feature}, {settings}: {name}" for name in direct if not torch.equal(direct[name], deferred[name])
        ]
    return problems


@pytest.mark.parametrize("stage", [2, 3])
def test_features_wait_for_what_they_read(stage: int) -> None:
    """Losses, norms, gradients, weights and optimizer state, to the bit, on every rank."""
    for problems in run_ranks(compare, 2, stage, timeout_seconds=60):
        assert not problems, "\n".join([f"{len(problems)} numbers differ, among them", *problems[:8]])
