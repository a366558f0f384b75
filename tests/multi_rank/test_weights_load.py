"""`load_weights`: files that others wrote, into any layout, and nothing but what fits."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import hybrid
from hybrid.errors import CheckpointError
from tests.checkpoint_faults import digest
from tests.multi_rank.case_runs import own_part, seeded, strategy_of, variant
from tests.multi_rank.meta_models import on_meta
from tests.multi_rank.weight_files import Small, assert_state, values_for
from tests.ranks import run_ranks
from tests.tensor_case import tensor_strategy
from tests.tensor_models import build as build_tensor

# ---- layouts, the meta device --------------------------------------------------------------------------------------

INTO: dict[str, Callable[[], hybrid.DistributedStrategy]] = {
    "tp4-one-kv-head": lambda: tensor_strategy(4, stage=1),
    "tp2-dp2-z3": lambda: tensor_strategy(2, stage=3),
    "dp4-z2-shard2": lambda: strategy_of(stage=2, shard_size=2),
    "dp4-z0": lambda: strategy_of(stage=0),
}


def load_pretrained(root: str) -> None:
    from transformers import LlamaForCausalLM

    for kind in ("llama-tied", "llama-one-kv-head"):
        folder = f"{root}/{kind}"
        plain: Any = build_tensor(kind, dtype=torch.float32, seed=9)
        if torch.distributed.get_rank() == 0:
            plain.save_pretrained(folder, max_shard_size="10KB")
        torch.distributed.barrier()
        assert os.path.exists(f"{folder}/model.safetensors.index.json")
        for name, strategy in INTO.items():
            for meta in (False, True):
                model: Any = (
                    on_meta(lambda: LlamaForCausalLM(plain.config))  # noqa: B023 (called at once)
                    if meta
                    else build_tensor(kind, dtype=torch.float32)
                )
                if meta:
                    with pytest.raises(CheckpointError, match=r"meta device.*init='by_name'"):
                        hybrid.load_weights(model, folder)
                model = hybrid.distributed_model(model, strategy=strategy(), init="by_name" if meta else None)
                assert hybrid.load_weights(model, folder).missing == ()
                assert_state(model.full_state_dict(), plain.state_dict(), f"{kind} {name} meta {meta}")
                tokens = torch.arange(8).view(1, 8)
                with torch.no_grad():
                    logits, wanted = model.eval()(tokens).logits, plain.eval()(tokens).logits
                assert (logits - wanted).abs().max() < 1e-5, (kind, name)
                hybrid.shutdown()


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_a_published_model_into_every_layout(tmp_path: Path) -> None:
    """Folders as `save_pretrained` writes them, several files with an index: GQA copies, vocabulary 67, ties, meta."""
    run_ranks(load_pretrained, 4, str(tmp_path), timeout_seconds=120)


# ---- training goes on ----------------------------------------------------------------------------------------------


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 5, generator=seeded(step)), torch.randn(4, 3, generator=seeded(50 + step))


def continue_training(path: str) -> None:
    torch.manual_seed(0)
    new = values_for(Small())
    for stage, low in ((0, False), (1, True), (2, False), (3, True), (3, False)):
        runs = []
        for way in ("load_weights", "load_state_dict"):
            with variant(stage=stage, bucket_bytes=100) as strategy:
                if low:
                    strategy.amp, strategy.amp_configs = True, {"level": "O2"}
                torch.manual_seed(0)
                model: Any = hybrid.distributed_model(Small(), strategy=strategy)
                optimizer: Any = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
                losses = [one_step(model, optimizer, step) for step in range(2)]
                before = optimizer.full_state_dict()
                if way == "load_weights":
                    hybrid.load_weights(model, path)
                    state = model.full_state_dict()
                    rounded = {"scale": new["scale"].bfloat16().float()} if low else {}
                    assert_state(state, new | rounded, f"stage {stage}, low {low}")
                    after = optimizer.full_state_dict()
                    for fqn, values in before["state"].items():
                        for key, value in values.items():
                            master = key == "master"  # it is the weight
                            assert torch.equal(after["state"][fqn][key], new[fqn] if master else value), (fqn, key)
                else:
                    model.load_state_dict(new)
                losses += [one_step(model, optimizer, step) for step in range(2, 4)]
                runs.append((losses, digest(model, optimizer)))
        assert runs[0] == runs[1], (stage, low)


def one_step(model: Any, optimizer: Any, step: int) -> float:
    batch = tuple(own_part(one) for one in batch_of(step))
    return float(model.train_batch(batch, optimizer, loss_fn=functional.mse_loss).loss)


def test_training_goes_on_from_the_weights_in_the_file(tmp_path: Path) -> None:
    """Masters must become the file's weights, or the next step takes the old ones back; moments stay as they are.

    As `load_state_dict` of the same values on every rank, to the bit, at every stage and with masters.
    """
    torch.manual_seed(0)
    save_file(values_for(Small()), tmp_path / "new.safetensors")
    run_ranks(continue_training, 2, str(tmp_path / "new.safetensors"))


def read_bytes(path: str) -> tuple[int, int]:
    with variant(stage=3) as strategy:
        layers = nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)])
        model: Any = hybrid.distributed_model(layers, strategy=strategy)
        before = _read_bytes()
        hybrid.load_weights(model, path)
        return _read_bytes() - before, os.path.getsize(path)


def _read_bytes() -> int:
    return int(next(line for line in Path("/proc/self/io").read_text().splitlines() if "rchar" in line).split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc")
def test_each_rank_reads_what_it_holds(tmp_path: Path) -> None:
    """Sharded over four ranks: a quarter of the file each. Four times the model is what a slow start is made of."""
    layers = nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)])
    save_file(layers.state_dict(), tmp_path / "new.safetensors")
    for read, total in run_ranks(read_bytes, 4, str(tmp_path / "new.safetensors")):
        assert total / 8 < read < total / 4 * 1.2 + 50_000, (read, total)
