"""What a start of stage 3 needs at its peak, and models of `transformers` on the meta device."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hybrid
from tests.multi_rank.case_runs import assert_same_on_all_ranks, strategy_of
from tests.multi_rank.meta_models import SEED, everything, on_meta
from tests.ranks import run_ranks

# ---- memory ------------------------------------------------------------------------------------------------------

WIDTH, BLOCKS = 256, 8
UNIT_BYTES = 2 * (WIDTH * WIDTH + WIDTH) * 4
SLACK_BYTES = 64 * 1024  # states of random generators, counts and flags


class LiveBytes(TorchDispatchMode):
    """Polls after every operation how many bytes all storages have that any operation has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[int, StorageWeakRef] = {}
        self._bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                self.see(value.untyped_storage())
        self.poll()
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        self._seen.setdefault(storage._cdata, StorageWeakRef(storage))
        self._bytes[storage._cdata] = storage.nbytes()

    def poll(self) -> None:
        for key in [key for key, ref in self._seen.items() if ref.expired()]:
            del self._seen[key], self._bytes[key]
        self.peak = max(self.peak, sum(self._bytes.values()))

    def watch_resizes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Freeing and allocating again is a method of the storage and no operation."""
        resize = torch.UntypedStorage.resize_
        live = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            live.see(storage)
            live.poll()
            return result

        monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_)


def blocks() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))
    )


def peak_of_start(init: str | None, o2: bool) -> tuple[int, int, int]:
    """(peak bytes, bytes of the model as given, bytes of this rank's shards)."""
    made = strategy_of(stage=3, bucket_bytes=UNIT_BYTES // (2 if o2 else 1))
    if o2:
        made.amp = True
        made.amp_configs = {"dtype": "bfloat16", "level": "O2"}
    hybrid.init(made)
    live = LiveBytes()
    with pytest.MonkeyPatch.context() as monkeypatch:
        live.watch_resizes(monkeypatch)
        with live:
            model = blocks() if init is None else on_meta(blocks)
            built = live.peak
            model = hybrid.distributed_model(model, strategy=made, init=init)
    shards = model.memory_bytes()["parameters"]
    return live.peak, built, shards


@pytest.mark.parametrize("o2", [False, True], ids=["fp32", "O2"])
@pytest.mark.parametrize("init", ["replay", "by_name", None])
def test_the_start_of_stage_3_needs_its_shards_and_one_unit(init: Any, o2: bool) -> None:
    for peak, built, shards in run_ranks(peak_of_start, 4, init, o2):
        elements = BLOCKS * UNIT_BYTES // 4
        assert abs(shards - elements * (6 if o2 else 4) // 4) < SLACK_BYTES, shards
        allowed = shards + UNIT_BYTES + SLACK_BYTES + (BLOCKS * UNIT_BYTES if init is None else 0)
        assert built >= (BLOCKS * UNIT_BYTES if init is None else 0), built
        lowest = built if init is None else shards + UNIT_BYTES // 2  # else the meter sees nothing
        assert lowest < peak <= allowed, f"peak {peak:,} bytes, allowed {allowed:,} = shards {shards:,} + a unit"


# ---- transformers ------------------------------------------------------------------------------------------------


def tiny() -> dict[str, Callable[[], nn.Module]]:
    import transformers as hf

    common = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {
        "llama": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(**common, intermediate_size=24, num_key_value_heads=1, tie_word_embeddings=True)
        ),
        "llama untied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**common, intermediate_size=24)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**common, intermediate_size=24, max_position_embeddings=8)),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=37, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
        ),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=37, n_embd=16, n_layer=2, n_head=2, n_positions=8)),
        "vit": lambda: hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=24,
                image_size=8,
                patch_size=4,
            )
        ),
    }


DRAWN_BY_HAND = {"gpt2", "vit"}  # in their constructors, so not as building does; but alike under every layout


def transformers_models() -> None:
    for name, build in tiny().items():
        torch.manual_seed(SEED)
        plain = everything(build())
        for order in ("replay", "by_name"):
            wanted = plain if order == "replay" and name not in DRAWN_BY_HAND else None
            for stage in (0, 3):
                torch.manual_seed(SEED)
                model = on_meta(build)
                model = hybrid.distributed_model(model, strategy=strategy_of(stage=stage), init=order)
                got = everything(model)
                assert got.keys() == plain.keys(), (name, order, stage)
                assert all(value.is_cpu for value in got.values()), (name, order, stage)
                wanted = wanted or got
                for fqn, value in wanted.items():
                    assert torch.equal(got[fqn], value), (name, order, stage, fqn, got[fqn], value)
                assert_same_on_all_ranks({fqn: value.float() for fqn, value in got.items()}, f"{name}, {order}")
                hybrid.shutdown()


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_transformers_models_are_initialised_as_when_built() -> None:
    run_ranks(transformers_models, 2, timeout_seconds=120)
