"""`export_weights`: the plain model's files from any layout, loadable by `transformers`.

Bitwise throughout: a weight that goes through a file and comes back changed is a weight that somebody else evaluates.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hybrid
from hybrid.checkpoint.export import export_step, model_files
from hybrid.checkpoint.folder import read_manifest
from hybrid.errors import CheckpointError
from tests.multi_rank.case_runs import seeded, strategy_of, variant
from tests.pipeline_models import build, pipeline_strategy
from tests.ranks import run_plain, run_ranks
from tests.tensor_case import tensor_strategy
from tests.tensor_models import MODELS as TENSOR_MODELS
from tests.tensor_models import build as build_tensor

State = dict[str, torch.Tensor]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def read_all(folder: Path) -> State:
    """What is in the folder, each name from the file that the index has it in."""
    index = next(folder.glob("*.index.json"), None)
    if index is None:
        (file,) = [path for path in folder.iterdir() if path.suffix in {".safetensors", ".bin"}]
        return _read(file)
    places = json.loads(index.read_text())["weight_map"]
    assert {path.name for path in folder.iterdir() if path != index} == set(places.values())
    found = {name: _read(folder / name) for name in set(places.values())}
    assert sum(map(len, found.values())) == len(places)
    return {name: found[place][name] for name, place in places.items()}


def _read(file: Path) -> State:
    if file.suffix == ".safetensors":
        return load_file(file)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def assert_equal(got: State, wanted: State, what: str = "") -> None:
    assert set(got) == set(wanted), (what, set(got) ^ set(wanted))
    for name, value in wanted.items():
        assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), (what, name)
        assert torch.equal(got[name], value), (what, name)


# ---- layouts -------------------------------------------------------------------------------------------------------

# Name -> number of ranks, strategy.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp4-z1-shard2-whole": (4, {"pp": 1, "stage": 1, "shard_size": 2, "partition": "parameter"}),
    "dp3-z3-tiny-buckets": (3, {"pp": 1, "stage": 3, "bucket_bytes": 300}),
    "pp2-interleaved-z0": (2, {"pp": 2, "stage": 0, "schedule": "interleaved"}),
    "pp2-tp2-dp2-z3": (8, {"pp": 2, "tp": 2, "stage": 3}),
    "tp2-dp2-z2-bf16": (4, {"pp": 1, "tp": 2, "stage": 2, "amp": {"level": "O2"}}),
}


def through(source: str, root: str, name: str) -> State:
    """Load plain weights, export them and save a checkpoint."""
    _, settings = LAYOUTS[name]
    strategy = pipeline_strategy(**settings)
    strategy.timeout_seconds = 60
    model: Any = hybrid.distributed_model(build("tied"), strategy=strategy)
    hybrid.load_weights(model, source)
    hybrid.export_weights(model, f"{root}/{name}")
    hybrid.export_weights(model, f"{root}/{name}-torch", format="torch", max_shard_bytes=2000)
    hybrid.save_checkpoint(f"{root}/{name}-checkpoint", model, step=1)
    exported: State = model.full_state_dict()
    hybrid.load_weights(model, f"{root}/zeros.safetensors")
    assert not any(value.any() for value in model.full_state_dict().values())
    hybrid.load_weights(model, f"{root}/{name}")
    assert_equal(model.full_state_dict(), exported)
    return exported


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_writes_the_same_file(name: str, tmp_path: Path) -> None:
    """Shards, replicas, tp parts, chunks of a pipeline, fp32 masters: no layout may show in what others get.

    To the byte, and to the byte what `hybrid checkpoint export` makes of a checkpoint of the same weights.
    """
    plain = build("tied")
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=seeded(parameter.numel())))
            if not parameter.requires_grad and name.endswith("bf16"):
                parameter.copy_(parameter.bfloat16())  # it has no master, and comes back rounded
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    save_file(
        {key: torch.zeros_like(value) for key, value in plain.state_dict().items()}, tmp_path / "zeros.safetensors"
    )
    state = run_ranks(through, LAYOUTS[name][0], str(tmp_path / "plain.pt"), str(tmp_path), name, timeout_seconds=90)[0]
    assert_equal(state, plain.state_dict(), name)
    exported = read_all(tmp_path / name)
    assert_equal(exported | {"7.weight": exported["0.weight"]}, plain.state_dict(), name)
    assert "7.weight" not in exported  # tied, written once
    in_torch = read_all(tmp_path / f"{name}-torch")
    assert_equal(in_torch, plain.state_dict(), name)
    assert in_torch["7.weight"].data_ptr() == in_torch["0.weight"].data_ptr()
    step = tmp_path / f"{name}-checkpoint" / "step_00000001"
    manifest = read_manifest(step)
    files = model_files(manifest, 10**9)
    (tmp_path / "by command").mkdir()
    export_step(step, manifest, tmp_path / "by command", files)
    assert files_of(tmp_path / "by command") == files_of(tmp_path / name)


# ---- transformers --------------------------------------------------------------------------------------------------

Strategy = Callable[[], hybrid.DistributedStrategy]

# Vocabulary 67: no degree divides it. Four query heads share two (or one) of keys and values, fewer than ranks at tp 4.
PRETRAINED: dict[str, tuple[str, torch.dtype, Strategy]] = {
    "tp2-dp2-z3": ("llama", torch.float32, lambda: tensor_strategy(2, stage=3)),
    "tied-tp2-dp2-z3": ("llama-tied", torch.float32, lambda: tensor_strategy(2, stage=3)),
    "tied-tp4-O2": ("llama-tied", torch.float32, lambda: tensor_strategy(4, amp=True, amp_configs={"level": "O2"})),
    "one-kv-head-tp4-bf16": ("llama-one-kv-head", torch.bfloat16, lambda: tensor_strategy(4, stage=1)),
    "dp4-z2-bf16": ("qwen3", torch.bfloat16, lambda: strategy_of(stage=2)),
    "bert-dp4-z3": ("bert", torch.float32, lambda: strategy_of(stage=3)),
    "t5-tp2-dp2-z1": ("t5", torch.float32, lambda: tensor_strategy(2, stage=1)),
}


def pretrained_exports(root: str) -> dict[str, tuple[State, torch.Tensor | None]]:
    found: dict[str, tuple[State, torch.Tensor | None]] = {}
    for number, (name, (kind, dtype, make_strategy)) in enumerate(PRETRAINED.items()):
        model: Any = hybrid.distributed_model(build_tensor(kind, dtype=dtype), strategy=make_strategy())
        optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        batch = TENSOR_MODELS[kind].batch(0)
        model.train_batch(batch, optimizer, forward_step=TENSOR_MODELS[kind].loss)
        before = model.config.to_dict()
        hybrid.export_weights(model, f"{root}/{name}", max_shard_bytes="6kB" if number % 2 else "5GB")
        hybrid.export_weights(
            model, f"{root}/{name}-torch", format="torch", max_shard_bytes=10**9 if number % 2 else 6000
        )
        assert model.config.to_dict() == before
        logits = None
        if dtype == torch.float32 and "O2" not in name and kind != "t5":
            model.eval()
            with torch.no_grad():
                logits = model(input_ids=batch["input_ids"]).logits
        found[name] = (model.full_state_dict(), logits)
        hybrid.shutdown()
    return found


def load_pretrained(root: str, wanted: dict[str, tuple[State, torch.Tensor | None]]) -> None:
    import transformers

    for name, (state, logits) in wanted.items():
        kind, dtype, _ = PRETRAINED[name]
        plain: Any = build_tensor(kind)
        for folder in (f"{root}/{name}", f"{root}/{name}-torch"):
            model, report = type(plain).from_pretrained(folder, output_loading_info=True)
            assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
            assert model.dtype == dtype, name
            assert_equal(model.state_dict(), state, name)
            assert model.config.architectures == [type(plain).__name__]
            assert hasattr(model, "generation_config") == (kind != "bert")
            again = {key: value for key, value in model.config.to_dict().items() if key not in _FILLED_IN}
            asked = {key: value for key, value in plain.config.to_dict().items() if key not in _FILLED_IN}
            assert again == asked, name
            if "tied" in name:
                assert model.lm_head.weight is model.model.embed_tokens.weight
            if logits is not None:
                with torch.no_grad():
                    got = model.eval()(input_ids=TENSOR_MODELS[kind].batch(0)["input_ids"]).logits
                assert (got - logits).abs().max() < 1e-5, name
        auto = getattr(transformers, "AutoModelForMaskedLM" if kind == "bert" else "AutoModel")
        assert auto.from_pretrained(f"{root}/{name}") is not None


_FILLED_IN = {"architectures", "dtype", "_name_or_path", "transformers_version"}


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_from_pretrained_loads_the_folder_alone(tmp_path: Path) -> None:
    """Every weight to the bit and the logits, from tp × ZeRO layouts, in both formats, in one file and in many.

    Protects from padding of the vocabulary, copies of kv heads, a cut left in a weight, masters' types, ties that come
    back as two tensors, and a config that has learned something of the layout.
    """
    wanted = run_ranks(pretrained_exports, 4, str(tmp_path), timeout_seconds=180)[0]
    assert (tmp_path / "tied-tp2-dp2-z3" / "model.safetensors.index.json").exists()
    assert (tmp_path / "tp2-dp2-z3-torch" / "pytorch_model.bin.index.json").exists()
    run_plain(load_pretrained, str(tmp_path), wanted, timeout_seconds=120)


# ---- what is in a file ---------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """BatchNorm whose module is there twice, buffers of several types, no elements, a scalar, channels last, frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.again = self.norm
        self.first = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.low = nn.Parameter(torch.randn(3).half(), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("skipped", torch.ones(2), persistent=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.again(self.first(self.norm(value))) * self.scalar
        return self.frozen(value).sum() + self.conv(torch.ones(1, 2, 2, 2)).sum()


def export_odd(root: str) -> None:
    for stage in (0, 3):
        with variant(stage=stage, bucket_bytes=100) as strategy:
            torch.manual_seed(0)
            model: Any = hybrid.distributed_model(Odd(), strategy=strategy)
            rank = torch.distributed.get_rank()
            for step in range(2):  # the statistics of the ranks differ from here on
                model(torch.randn(4, 5, generator=seeded(10 * step + rank)))
            state = model.full_state_dict()
            for format in ("safetensors", "torch"):
                path = hybrid.export_weights(model, f"{root}/{stage}-{format}", format=format)
                assert path == Path(f"{root}/{stage}-{format}")
            if rank == 0:
                exported = read_all(Path(root, f"{stage}-safetensors"))
                shared = {name.replace("norm.", "again."): value for name, value in exported.items() if "norm." in name}
                assert not shared.keys() & exported.keys()  # a module at two places is written once
                assert_equal(exported | shared, state, f"stage {stage}")
                assert_equal(read_all(Path(root, f"{stage}-torch")), state, f"stage {stage}")
                assert exported["norm.num_batches_tracked"] == 4
                Odd().load_state_dict(torch.load(f"{root}/{stage}-torch/pytorch_model.bin", weights_only=True))
                assert "mask" in exported
                assert "skipped" not in exported
                model.norm.running_mean.fill_(7)
            missing = hybrid.load_weights(model, f"{root}/{stage}-safetensors")
            assert missing == hybrid.load_weights(model, f"{root}/{stage}-torch")
            after = {name: buffer.clone() for name, buffer in model.named_buffers() if name != "skipped"}
            assert all(torch.equal(state[name], buffer) for name, buffer in after.items())


def test_buffers_and_odd_tensors(tmp_path: Path) -> None:
    """Statistics are the first rank's and reach all ranks again; nothing that a state dict has is left out (BC-36)."""
    run_ranks(export_odd, 2, str(tmp_path))


def export_cut(root: str, limits: list[int]) -> State:
    with variant(stage=2) as strategy:
        torch.manual_seed(1)
        model: Any = hybrid.distributed_model(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 10, bias=False)), strategy=strategy
        )
        for limit in limits:
            hybrid.export_weights(model, f"{root}/{limit}", max_shard_bytes=limit)
            hybrid.export_weights(model, f"{root}/{limit}-torch", format="torch", max_shard_bytes=limit)
        return model.full_state_dict()


def test_max_shard_bytes_at_its_boundaries(tmp_path: Path) -> None:
    """16, 64 and 160 bytes: a file takes what fits exactly, and a tensor that is larger than the limit has its own."""
    numbers = {1: 3, 79: 3, 80: 2, 239: 2, 240: 1, 10**9: 1}
    state = run_ranks(export_cut, 2, str(tmp_path), list(numbers))[0]
    for limit, number in numbers.items():
        for folder, pattern in ((f"{limit}", "model*.safetensors"), (f"{limit}-torch", "pytorch_model*.bin")):
            assert len(list((tmp_path / folder).glob(pattern))) == number, folder
            assert_equal(read_all(tmp_path / folder), state, folder)
            assert len(files_of(tmp_path / folder)) == number + (number > 1)


class Remembering(nn.Linear):
    """Has state of its own, that is a tensor or is none."""

    def __init__(self, state: Any) -> None:
        super().__init__(3, 3)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def export_extra(root: str) -> None:
    with variant(stage=2) as strategy:
        model: Any = hybrid.distributed_model(nn.Sequential(Remembering(torch.arange(3))), strategy=strategy)
        hybrid.export_weights(model, f"{root}/tensor")
        model[0].state = None
        hybrid.load_weights(model, f"{root}/tensor")
        assert torch.equal(model[0].state, torch.arange(3))
        model[0].state = {"amax": 1.0}
        with pytest.raises(CheckpointError, match=r"0\._extra_state \(dict\); save_checkpoint"):
            hybrid.export_weights(model, f"{root}/dict")
    assert not os.path.exists(f"{root}/dict")


def test_state_of_modules(tmp_path: Path) -> None:
    """`get_extra_state()` is part of a state dict: a tensor goes along, anything else is refused by name."""
    run_ranks(export_extra, 2, str(tmp_path))
