"""Unmodified models as pipelines, cut by their own forward: the numbers of one plain process, gradients by name.

The default run has each model once, the settings spread over them; the product of models and settings runs with

    python -m pytest tests/multi_rank/test_own_forward.py -m full
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hybrid
from tests.own_forward_models import MODELS, VOCABULARY, OwnModel, build, llama, mixtral
from tests.own_forward_runs import assert_like_plain
from tests.pipeline_models import make_adamw, own, pipeline_strategy, pipeline_variant
from tests.ranks import RankFailure, run_ranks

needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")

TP = {"tensor_parallel": True, "tensor_parallel_configs": {"degree": 2}}
SEQUENCE = {"tensor_parallel": True, "tensor_parallel_configs": {"degree": 2, "sequence_parallel": True}}
INTERLEAVED = {"schedule": "interleaved"}
# Half precision rounds each activation: only errors of a formula are far outside.
LOW = {"loss": 2e-2, "norm": 5e-2, "gradient": 8e-2, "weight": 2e-2, "state": 0.1}

# World -> (model, settings) that run in it, one after the other. The third step has other sizes: in some of them only.
WORLDS: dict[str, tuple[int, list[tuple[str, dict[str, Any]]]]] = {
    "torch-2": (2, [
        ("demo", {"stage": 2, "recompute": "full", "steps": 3}),
        ("nano", {"stage": 3}),
        ("encoder", INTERLEAVED | {"odd_samples": True}),
        ("transformer", {"built": "before"}),
        ("demo", {"schedule": "zb-h1", "mb": 4}),
        ("unet", INTERLEAVED | {"stage": 1, "steps": 3}),
        ("resnet", {"recompute": "full"}),
    ]),
    "transformers-2": (2, [
        ("llama", {"stage": 3, "recompute": "full", "steps": 3}),
        ("llama-tied", INTERLEAVED | {"stage": 2}),
        ("qwen3", {"split": ["model.layers.3"]}),
        ("gpt2", {"stage": 1}),
        ("bert", {"recompute": "selective"}),
        ("vit", {}),
        ("t5", {"stage": 3, "steps": 3}),
        ("mixtral", {}),
        ("whisper", {"schedule": "gpipe"}),
    ]),
    "transformers-4": (4, [
        ("t5", {"pp": 4, "split": ["encoder.final_layer_norm", "decoder.block.0", "lm_head"]}),
        ("llama-tied", SEQUENCE | {"recompute": "full"}),
        ("demo", {"stage": 3, "shard_size": 2, "odd_samples": True}),
    ]),
}  # fmt: skip


def run_world(cases: list[tuple[str, dict[str, Any]]]) -> None:
    for name, settings in cases:
        assert_like_plain(name, **{"steps": 2, **settings})


@needs_transformers
@pytest.mark.parametrize("world", WORLDS)
def test_like_one_process(world: str) -> None:
    """Losses, norms, gradients and weights by name, over batches of other lengths and sizes."""
    ranks, cases = WORLDS[world]
    run_ranks(run_world, ranks, cases, timeout_seconds=240, group_timeout_seconds=60)


FULL_SETTINGS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, INTERLEAVED | {"stage": 3}),
    (2, {"stage": 3, "recompute": "full"}),
    (4, {"pp": 4, "mb": 4}),
    (4, {"pp": 2, "stage": 2, "mb": 4, "grad_reduce": "last_micro_batch"}),
    (4, {"pp": 2, "stage": 3, "schedule": "interleaved"}),
    (4, TP),
    (4, TP | {"schedule": "interleaved", "recompute": "full", "stage": 2}),
]
NO_TENSOR_PARALLEL = {"demo", "nano", "unet", "resnet", "mixtral", "whisper"}  # no plan is known for them
NO_DATA_PARALLEL = {"resnet"}  # BatchNorm sees what its rank has


@pytest.mark.full
@needs_transformers
@pytest.mark.parametrize("settings", range(len(FULL_SETTINGS)))
@pytest.mark.parametrize("name", MODELS)
def test_every_model_with_every_setting(name: str, settings: int) -> None:
    ranks, chosen = FULL_SETTINGS[settings]
    if ("tensor_parallel" in chosen and name in NO_TENSOR_PARALLEL) or (
        ranks == 4 and "pp" in chosen and chosen["pp"] == 2 and name in NO_DATA_PARALLEL
    ):
        pytest.skip("not a setting for this model")
    run_ranks(run_world, ranks, [(name, chosen)], timeout_seconds=120, group_timeout_seconds=60)


# ---- precision, meta device, dropout ---------------------------------------------------------------------------------


def meta(name: str) -> nn.Module:
    with torch.device("meta"):
        model = MODELS[name].make()
    torch.manual_seed(11)  # from which the model is initialised as it would have been
    return model.train()


def meta_llama() -> nn.Module:
    return meta("llama-tied")


def low_precision_and_meta() -> None:
    assert_like_plain("llama", stage=3, amp={"level": "O2"}, tolerances=LOW, steps=2)
    assert_like_plain("demo", stage=2, amp={"level": "O1"}, tolerances=LOW, steps=2)
    assert_like_plain("llama-tied", stage=3, make=meta_llama, steps=2)
    with pipeline_variant(2) as strategy:
        model: Any = hybrid.distributed_model(meta("llama-tied"), strategy=strategy, sample=MODELS["llama"].batch(0))
        stages = model.hybrid_runtime.stages
        # The parameters of the other stage never had memory.
        assert stages.elsewhere
        assert all(p.is_meta or p.untyped_storage().nbytes() == 0 for p in stages.elsewhere.values())
        held = {fqn for fqn, _ in model.named_parameters()}
        assert {"model.embed_tokens.weight", "lm_head.weight"} & held == {
            "model.embed_tokens.weight" if stages.staged.stage == 0 else "lm_head.weight"
        }
        # Attributes that the model reads of units that are elsewhere are there, and cannot be written.
        for layer in model.model.layers:
            assert layer.self_attn.q_proj.weight.shape == (24, 24)
        absent = model.model.layers[0 if stages.staged.stage else -1].mlp.up_proj.weight
        assert absent.dtype is torch.float32
        assert absent.untyped_storage().nbytes() <= 8
        with pytest.raises(RuntimeError), torch.no_grad():
            absent.add_(1)
        with pytest.raises(hybrid.ModelError, match="cannot run by itself"):
            model(**MODELS["llama"].batch(0))


def recorders() -> None:
    batch = MODELS["llama"].batch(0)
    for model, more in (
        (mixtral(output_router_logits=True), {}),
        (llama(), {"output_hidden_states": True}),
        (llama(attn_implementation="eager"), {"output_attentions": True}),
    ):
        strategy = pipeline_strategy(2)
        with pytest.raises(hybrid.ModelError, match=r"by another way than what it returns.*Switch that off"):
            hybrid.distributed_model(model.train(), strategy=strategy, sample=batch | more)


@needs_transformers
def test_values_that_hooks_record_are_refused() -> None:
    """transformers collects hidden states, attentions and router logits by hooks: no stage would have all of them."""
    run_ranks(recorders, 2, timeout_seconds=60)


@needs_transformers
def test_low_precision_and_the_meta_device() -> None:
    """bfloat16 at both levels; a stage gives memory to its own units alone, and the model is all there to look at."""
    run_ranks(low_precision_and_meta, 2, timeout_seconds=120, group_timeout_seconds=60)


def dropping(pp: int, recompute: bool, schedule: str) -> list[float]:
    MODELS["dropping"] = OwnModel(make=Dropping, batch=MODELS["demo"].batch, loss_fn=MODELS["demo"].loss_fn)
    losses: list[float] = []
    options: dict[str, Any] = {"recompute": "full"} if recompute else {}
    with pipeline_variant(pp, mb=4, schedule=schedule, seed=5, **options) as strategy:
        model: Any = hybrid.distributed_model(build("dropping"), strategy=strategy, sample=MODELS["demo"].batch(0)[0])
        optimizer = hybrid.distributed_optimizer(make_adamw(model))
        for step in (0, 1, 0):
            batch = own(MODELS["dropping"].batch(step))
            losses.append(model.train_batch(batch, optimizer, loss_fn=MODELS["demo"].loss_fn).loss.item())
        norms = {fqn: value.double().norm().item() for fqn, value in model.full_state_dict().items()}
    return [*losses, *norms.values()]


class Dropping(nn.Module):
    """Dropout in units and between them, in a value that two stages read."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.2, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4).layers
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = first = self.drop(self.words(ids))
        for block in self.blocks:
            x = block(x) + first
        return self.head(x)


def test_dropout_does_not_depend_on_the_stages() -> None:
    """Masks come from the step, the micro-batch and the call: what two stages read is dropped alike on both."""
    two = run_ranks(dropping, 2, 2, True, "1f1b")[0]
    four = run_ranks(dropping, 4, 4, False, "gpipe")[0]
    chunks = run_ranks(dropping, 2, 2, False, "interleaved")[0]
    assert two[0] != two[2], "the same batch, other masks and weights"
    for other in (four, chunks):
        assert all(math.isclose(a, b, rel_tol=2e-6) for a, b in zip(two, other, strict=True)), (two, other)


def states(folder: str) -> None:
    name, batch = "demo", MODELS["demo"].batch
    loss_fn, wanted = MODELS["demo"].loss_fn, 0.0
    for settings in ({"stage": 2}, {"stage": 3, "schedule": "interleaved"}):
        with pipeline_variant(2, mb=2, **settings) as strategy:
            model: Any = hybrid.distributed_model(build(name), strategy=strategy, sample=batch(0)[0])
            optimizer = hybrid.distributed_optimizer(make_adamw(model))
            if settings["stage"] == 2:
                model.train_batch(own(batch(1)), optimizer, loss_fn=loss_fn)
                hybrid.save_checkpoint(folder, model, optimizer, step=1)
                wanted = model.train_batch(own(batch(2)), optimizer, loss_fn=loss_fn).loss.item()
                weights = model.full_state_dict()
            else:
                hybrid.load_checkpoint(folder, model, optimizer)
                assert abs(model.train_batch(own(batch(2)), optimizer, loss_fn=loss_fn).loss.item() - wanted) < 1e-6
                model.load_state_dict({fqn: value + 1 for fqn, value in weights.items()})
                for fqn, value in model.full_state_dict().items():
                    assert torch.equal(value, weights[fqn] + 1), fqn
                loaded = build(name)
                loaded.load_state_dict(model.full_state_dict())


@pytest.mark.filterwarnings("ignore:load_checkpoint of")
def test_states_have_the_names_of_the_plain_model(tmp_path: Path) -> None:
    """A checkpoint of one cut is loaded by another; a state dict is the plain model's, ties under all their names."""
    run_ranks(states, 2, str(tmp_path))


# ---- what shows only while it runs -----------------------------------------------------------------------------------


class Skipping(Dropping):
    """Leaves out a block by chance, as LayerDrop does."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for place, block in enumerate(self.blocks):
            x = x if place == 1 and ids.shape[1] > 8 else block(x)
        return self.head(x)


def other_inputs() -> None:
    batch = MODELS["demo"].batch
    loss_fn = MODELS["demo"].loss_fn
    with pipeline_variant(2, mb=1) as strategy:
        torch.manual_seed(1)
        model: Any = hybrid.distributed_model(Skipping(), strategy=strategy, sample=batch(0)[0])
        optimizer = hybrid.distributed_optimizer(make_adamw(model))
        model.train_batch(batch(0), optimizer, loss_fn=loss_fn)
        model.train_batch(batch(2), optimizer, loss_fn=loss_fn)  # longer: looked at again, another way
        with pytest.raises(hybrid.BatchError, match="a dict batch calls"):
            model.train_batch({"ids": batch(0)[0]}, optimizer, loss_fn=loss_fn)
        model.blocks[0].forward = lambda x: {"first": x * 2, "second": x}  # not what was seen
        model.train_batch(batch(0), optimizer, loss_fn=loss_fn)


def test_a_forward_that_goes_another_way_is_seen() -> None:
    """Sizes may choose the way; what was not seen before ends the step on the rank that meets it, by name."""
    with pytest.raises(RankFailure) as caught:
        run_ranks(other_inputs, 2, group_timeout_seconds=20)
    text = str(caught.value)
    assert "'blocks.0' returns a tensor 'first', which it did not in the run on tensors without values" in text, text
