"""`load_weights`: names, shapes, types and ties that do not fit, and files that cannot be read, refused by name."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hybrid
from hybrid.errors import CheckpointError
from tests.multi_rank.case_runs import variant
from tests.multi_rank.meta_models import Tied
from tests.multi_rank.weight_files import Small, State, assert_state, values_for
from tests.ranks import run_ranks


def untied(state: Mapping[str, torch.Tensor]) -> State:
    """As a safetensors file has it: the first of tied names."""
    once: dict[int, str] = {}
    return {name: value for name, value in state.items() if once.setdefault(value.data_ptr(), name) == name}


def fitting(root: str) -> None:
    wanted = values_for(Small())
    with variant(stage=2, bucket_bytes=100) as strategy:
        torch.manual_seed(1)
        model: Any = hybrid.distributed_model(Small(), strategy=strategy)
        start = model.full_state_dict()

        def load(name: str, **options: Any) -> Any:
            model.load_state_dict(start)
            path = [f"{root}/{one}" for one in name.split("+")]
            loaded = hybrid.load_weights(model, path[0] if len(path) == 1 else path, **options)
            if not (loaded.missing or loaded.unexpected or loaded.mismatched):
                assert_state(model.full_state_dict(), wanted, name)
            return loaded

        def refused(name: str, said: str, **options: Any) -> None:
            with pytest.raises(CheckpointError) as refusal:
                load(name, **options)
            assert said in str(refusal.value), (name, str(refusal.value))
            everyone: list[Any] = [None, None]
            torch.distributed.all_gather_object(everyone, str(refusal.value))
            assert everyone[0] == everyone[1]
            assert_state(model.full_state_dict(), start, name)  # nothing was touched

        load("whole.safetensors")
        load("whole.pt")
        load("whole.bin")  # views and transposed tensors
        load("first.safetensors+second.safetensors")
        load("several")
        load("indexed")
        load("indexed/model.safetensors.index.json")
        load("torch")
        load("wrapped.safetensors", rename=lambda name: name.removeprefix("module."))
        load("more.safetensors", rename=lambda name: None if name.startswith("other") else name)
        refused("wrapped.safetensors", "the files have a prefix: rename=lambda name: name.removeprefix('module.')")
        refused("short.safetensors", "the model has a prefix: rename=lambda name: 'norm.' + name")
        refused("whole.safetensors", "the same name 'first.bias'", rename=lambda name: "first.bias")
        refused("whole.safetensors", "must return a name or None, got 3", rename=lambda name: 3)
        refused("whole.safetensors", "ZeroDivisionError", rename=lambda name: str(1 // 0))
        refused("eight.safetensors", "first.weight (float8_e4m3fn (7, 5) in the files, float32 (7, 5) here)")
        refused("counts.safetensors", "norm.num_batches_tracked (int32 () in the files, int64 () here)")
        text = (
            f"{root}/wrong.safetensors does not fit: missing: first.bias, second.bias; unexpected: other; of another "
            "shape or type: first.weight (float32 (5, 7) in the files, float32 (7, 5) here); strict=False loads what "
            "fits"
        )
        refused("wrong.safetensors", text)
        refused("wrong.pt", text.replace(".safetensors", ".pt"))
        for name in ("wrong.safetensors", "wrong.pt"):
            loaded = load(name, strict=False)
            assert (loaded.missing, loaded.unexpected) == (("first.bias", "second.bias"), ("other",))
            assert [one.partition(" ")[0] for one in loaded.mismatched] == ["first.weight"]
            kept = {"first.bias", "second.bias", "first.weight"}
            mixed = {key: start[key] if key in kept else value for key, value in wanted.items()}
            assert_state(model.full_state_dict(), mixed, name)
        with pytest.raises(CheckpointError, match="do not ask for the same: path is"):
            hybrid.load_weights(model, f"{root}/{torch.distributed.get_rank()}.safetensors")


def test_names_shapes_and_types(tmp_path: Path) -> None:
    """All that does not fit is listed at once, before anything is touched; the rest stays as it is to the bit."""
    state = values_for(Small())

    def save(name: str, state: State) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_file(state, tmp_path / name) if name.endswith("safetensors") else torch.save(state, tmp_path / name)

    for name in ("whole.safetensors", "whole.pt"):
        save(name, state)
    views = {name: torch.stack([value, value])[1] for name, value in state.items()}
    views["first.weight"] = state["first.weight"].t().contiguous().t()
    save("whole.bin", views)
    halves: list[State] = [dict(list(state.items())[:5]), dict(list(state.items())[5:])]
    for half, name in zip(halves, ("first", "second"), strict=True):
        save(f"{name}.safetensors", half)
        save(f"several/{name}.safetensors", half)
        save(f"indexed/{name}.safetensors", half)
        save(f"torch/{name}.bin", half)
    for folder, end, index in (("indexed", "safetensors", "model.safetensors"), ("torch", "bin", "pytorch_model.bin")):
        names = {key: f"{name}.{end}" for half, name in zip(halves, ("first", "second"), strict=True) for key in half}
        (tmp_path / folder / f"{index}.index.json").write_text(json.dumps({"weight_map": names}))
    save("wrapped.safetensors", {f"module.{name}": value for name, value in state.items()})
    save("more.safetensors", {**state, "other.weight": torch.ones(2)})
    save("short.safetensors", {n.removeprefix("norm."): v for n, v in state.items() if n.startswith("norm.")})
    save("eight.safetensors", {**state, "first.weight": state["first.weight"].to(torch.float8_e4m3fn)})
    save("counts.safetensors", {**state, "norm.num_batches_tracked": torch.zeros((), dtype=torch.int32)})
    wrong = {name: value for name, value in state.items() if name not in {"first.bias", "second.bias"}}
    wrong |= {"other": torch.ones(2), "first.weight": state["first.weight"].t().contiguous()}
    for name in ("wrong.safetensors", "wrong.pt"):
        save(name, wrong)
    run_ranks(fitting, 2, str(tmp_path), timeout_seconds=120)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def convert(root: str) -> None:
    for plain, stored, master in ((torch.float32, "bf16", False), (torch.bfloat16, "fp32", True)):
        with variant(stage=1) as strategy:
            model: Any = hybrid.distributed_model(Module().to(plain), strategy=strategy)
            for end in ("safetensors", "pt"):
                with torch.no_grad(), model.gather_parameters():
                    model.module.weight.zero_()
                hybrid.load_weights(model, f"{root}/{stored}.{end}")
                wanted = torch.load(f"{root}/{stored}.pt", weights_only=True)
                assert_state(model.full_state_dict(), {name: value.to(plain) for name, value in wanted.items()}, stored)
            if master:  # in the precision of the file
                bucket = model.hybrid_runtime.engine.buckets[0]
                exact = torch.cat([wanted["module.weight"].reshape(-1), wanted["module.bias"]])
                assert set(bucket.master.tolist()) <= {*exact.tolist(), 0.0}
                assert set(exact.tolist()) != set(exact.bfloat16().tolist())


def test_types_are_converted(tmp_path: Path) -> None:
    """bf16 files into an fp32 model, fp32 files into a bf16 one; and a parameter may be called `module`."""
    state = values_for(Module())
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        save_file({key: value.to(dtype) for key, value in state.items()}, tmp_path / f"{name}.safetensors")
        torch.save({key: value.to(dtype) for key, value in state.items()}, tmp_path / f"{name}.pt")
    run_ranks(convert, 2, str(tmp_path))


def load_tied(root: str) -> None:
    wanted = values_for(Tied())
    for stage in (1, 3):
        with variant(stage=stage, bucket_bytes=100) as strategy:
            model: Any = hybrid.distributed_model(Tied(), strategy=strategy)
            start = model.full_state_dict()
            for name in ("first.safetensors", "second.safetensors", "both.safetensors", "shared.pt", "both.pt"):
                model.load_state_dict(start)
                hybrid.load_weights(model, f"{root}/{name}")
                assert_state(model.full_state_dict(), wanted, name)
            model.load_state_dict(start)
            for name in ("differ.safetensors", "differ.pt"):
                for strict in (True, False):
                    with pytest.raises(CheckpointError, match=r"embedding\.weight and head\.weight are one tensor"):
                        hybrid.load_weights(model, f"{root}/{name}", strict=strict)
            assert_state(model.full_state_dict(), start)
            hybrid.load_weights(
                model, f"{root}/differ.pt", rename=lambda name: None if name == "embedding.weight" else name
            )
            assert model.full_state_dict()["embedding.weight"].eq(7).all()


def test_tied_weights(tmp_path: Path) -> None:
    """A file has one of the names, or both alike; two values for one tensor are never chosen between in silence."""
    state = values_for(Tied())
    first = untied(state)
    second = {("head.weight" if name == "embedding.weight" else name): value for name, value in first.items()}
    both = {name: value.clone() for name, value in state.items()}
    differ = {**both, "head.weight": torch.full((9, 4), 7.0)}
    assert len(first) == len(both) - 1
    for name, one in (("first", first), ("second", second), ("both", both), ("differ", differ)):
        save_file(one, tmp_path / f"{name}.safetensors")
        torch.save(one, tmp_path / f"{name}.pt")
    torch.save(state, tmp_path / "shared.pt")
    run_ranks(load_tied, 2, str(tmp_path))


# ---- files that cannot be read -------------------------------------------------------------------------------------


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def unreadable(root: str, cases: dict[str, str]) -> None:
    with variant(stage=2) as strategy:
        model: Any = hybrid.distributed_model(Small(), strategy=strategy)
        before = digest_of(model)
        for name, said in cases.items():
            with pytest.raises(CheckpointError) as refusal:
                hybrid.load_weights(model, f"{root}/{name}")
            assert said in str(refusal.value), (name, str(refusal.value))
            assert name.partition("/")[0] in str(refusal.value)
        with pytest.raises(CheckpointError, match="list of files of weights is empty"):
            hybrid.load_weights(model, [])
        with pytest.raises(CheckpointError, match="of one kind"):
            hybrid.load_weights(model, [f"{root}/good.safetensors", f"{root}/good.pt"])
        with pytest.raises(CheckpointError, match=r"is in .*good.safetensors and in .*good.safetensors"):
            hybrid.load_weights(model, [f"{root}/good.safetensors", f"{root}/good.safetensors"])
        assert digest_of(model) == before
        hybrid.save_checkpoint(f"{root}/checkpoints", model, step=1)
        for path in ("checkpoints", "checkpoints/step_00000001"):
            with pytest.raises(CheckpointError, match="use load_checkpoint"):
                hybrid.load_weights(model, f"{root}/{path}")


def digest_of(model: Any) -> bytes:
    return pickle.dumps({name: value.numpy().tobytes() for name, value in model.full_state_dict().items()})


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    """Cut short, changed, of another form, with code in them: refused by name before the model is touched."""
    state = values_for(Small())
    save_file(state, tmp_path / "good.safetensors")
    torch.save(state, tmp_path / "good.pt")
    good, good_pt = (tmp_path / "good.safetensors").read_bytes(), (tmp_path / "good.pt").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(good[:-5])
    (tmp_path / "long.safetensors").write_bytes(good + b"x")
    (tmp_path / "header.safetensors").write_bytes(good[:60] + b"\x00" + good[61:])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "cut.pt").write_bytes(good_pt[:-300])
    (tmp_path / "cut.bin").write_bytes(good_pt[: len(good_pt) // 2])
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({**state, "first.weight": Evil(str(tmp_path / "ran"))}, tmp_path / "evil.pt")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "nested.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({**state, "first.bias": torch.eye(7).to_sparse()}, tmp_path / "sparse.pt")
    (tmp_path / "words.txt").write_text("hello")
    (tmp_path / "nothing").mkdir()
    for folder in ("two", "gone", "outside", "stale", "garbage"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "part.safetensors").write_bytes(good)
    indices = {
        "two": {"first.weight": "part.safetensors"},
        "gone": {"first.weight": "part.safetensors", "first.bias": "part2.safetensors"},
        "outside": {"first.weight": "../good.safetensors"},
        "stale": {"first.weight": "part.safetensors", "third.weight": "part.safetensors"},
    }
    for folder, names in indices.items():
        (tmp_path / folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / "garbage" / "model.safetensors.index.json").write_text("{")
    (tmp_path / "two" / "model.safetensors").write_bytes(good)
    cases = {
        "cut.safetensors": "expected",
        "long.safetensors": "it is not whole, or was added to",
        "header.safetensors": "damaged",
        "empty.safetensors": "is no safetensors file",
        "cut.pt": "is damaged",
        "cut.bin": "is damaged",
        "old.pt": "from before torch 1.6",
        "evil.pt": "could run code",
        "nested.pt": "more than names and tensors: state_dict, epoch",
        "list.pt": "holds a list",
        "sparse.pt": "first.bias is sparse",
        "words.txt": "files of weights end in .safetensors, .bin, .pt, .pth",
        "nothing": "holds no weights",
        "missing.pt": "does not exist",
        "two": "two models",
        "gone": "names files that are not there: part2.safetensors",
        "outside": "does not name files beside it",
        "stale": "part.safetensors has no third.weight",
        "garbage": "is damaged, or no index of weights",
    }
    run_ranks(unreadable, 2, str(tmp_path), cases)
    assert not (tmp_path / "ran").exists()
