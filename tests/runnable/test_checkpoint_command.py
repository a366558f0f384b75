"""`hybrid checkpoint`: what it prints, what it reads, what it refuses, and what it exports."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from hybrid.checkpoint.folder import read_manifest, step_folder_name
from hybrid.checkpoint.manifest import FileRecord
from hybrid.cli.app import app, main
from hybrid.errors import CheckpointError
from tests.checkpoint_folders import save, weights
from tests.runnable.command import ROOT, environment

SHARD = "shard_00001_0.safetensors"


def run(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    if isinstance(result.exception, CheckpointError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


def lines(text: str) -> list[str]:
    return [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Steps 5 (saved without sums), 100, 110, and 120, which has lost a file."""
    for step in (5, 100, 110, 120):
        save(tmp_path / "run", step, checksums=step != 5)
    (tmp_path / "run" / step_folder_name(120) / SHARD).unlink()
    return tmp_path / "run"


# ---------------------------------------------------------------- ls


def test_ls_says_which_one_a_resume_takes_and_why(directory: Path) -> None:
    printed = lines(run("ls", directory))
    assert printed[0] == "step written files size saved by state"
    assert printed[1].startswith("120 2026-01-02 03:04:00 UTC 4 ")
    assert [line.split(": ")[-1] for line in printed[1:5]] == [
        "tp 3, stage 2 not complete",
        "tp 3, stage 2 latest",
        "tp 3, stage 2 complete",
        "tp 3, stage 2 complete",
    ]
    assert printed[5:] == [
        f"step_00000120: {SHARD} is missing",
        "a resume takes step_00000110, passing over step_00000120",
    ]


def test_ls_json(directory: Path) -> None:
    told = json.loads(run("ls", directory, "--json"))
    assert told["latest"] == "step_00000110"
    assert [(step["step"], step["complete"]) for step in told["steps"]] == [
        (120, False),
        (110, True),
        (100, True),
        (5, True),
    ]
    assert told["steps"][0]["problem"] == f"{SHARD} is missing"
    assert told["steps"][1]["layout"]["world_size"] == 3


def test_ls_of_nothing_and_of_one_step(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert run("ls", tmp_path / "empty") == f"{tmp_path / 'empty'} holds no checkpoints\n"
    (tmp_path / "empty" / ".writing-step_00000007-1").mkdir()
    assert lines(run("ls", tmp_path / "empty")) == [
        f"{tmp_path / 'empty'} holds no whole checkpoints",
        ".writing-step_00000007-1: a save under way, or one that died; the next save removes it",
    ]
    assert json.loads(run("ls", tmp_path / "empty", "--json"))["writing"] == [".writing-step_00000007-1"]
    assert "a resume takes step_00000100" in run("ls", directory / "step_00000100")
    shutil.rmtree(directory / "step_00000005")
    for step in (100, 110):
        os.truncate(directory / step_folder_name(step) / "manifest.json", 10)
    assert lines(run("ls", directory))[-1] == "none of them is complete"


# ---------------------------------------------------------------- verify


def test_verify_has_a_line_for_each_problem_and_an_exit_code(directory: Path) -> None:
    """Scripts go by the code; people by the line."""
    assert lines(run("verify", directory, "--step", "110")) == ["step_00000110: whole (4 files, 1.37 KiB)"]
    step = directory / "step_00000100"
    data = bytearray((step / SHARD).read_bytes())
    data[-1] ^= 64
    (step / SHARD).write_bytes(data)
    (step / "state.json").write_bytes(b"")
    printed = lines(run("verify", directory, code=1))
    assert printed[0] == f"step_00000120: {SHARD} is missing"
    assert printed[1] == "step_00000110: whole (4 files, 1.37 KiB)"
    assert re.fullmatch(rf"step_00000100: {SHARD} has the checksum \w{{16}}, expected \w{{16}}: .*", printed[2])
    assert printed[3] == "step_00000100: state.json has 0 bytes, expected 8"
    assert printed[4].startswith("step_00000005: sizes and headers as saved")
    assert "saved without checksums" in printed[4]
    assert len(printed) == 5
    assert run("verify", step, code=1) == "".join(f"{line}\n" for line in printed[2:4])
    os.truncate(step / "manifest.json", 10)
    assert "not whole" in run("verify", directory, "--step", "100", code=1)


# ---------------------------------------------------------------- show


def test_show(directory: Path) -> None:
    printed = lines(run("show", directory))
    assert printed[:3] == [
        f"step 110 in {directory / 'step_00000110'}",
        "written 2026-01-02 03:04:50 UTC by hybrid 0.1.0, torch 2.13.0",
        "holds model, extra; 4 files, 1.37 KiB",
    ]
    assert "model.layers.0.weight parameter float32 5 × 3 60 B 3" in printed
    assert "model.scale parameter float32 scalar 4 B 1" in printed
    assert "parameter 5 25 100 B" in printed
    assert "axes dp_replicate 1, tp 3" in printed
    assert "tied head.weight is layers.0.weight" in printed


def test_one_long_name_does_not_widen_every_row(tmp_path: Path) -> None:
    """Each row was as wide as the longest name; that row must still be whole, on one line."""
    long = "layers." * 20 + "weight"
    save(tmp_path, 1, arrays={"bias": np.ones(3, np.float32), long: np.ones((5, 3), np.float32)}, tied={})
    printed = [line for line in run("show", tmp_path).splitlines() if line.startswith("model.")]
    assert lines("\n".join(printed)) == [
        "model.bias parameter float32 3 12 B 1",
        f"model.{long} parameter float32 5 × 3 60 B 3",
    ]
    assert len(printed[0]) < 100


def test_show_filters_and_json(directory: Path) -> None:
    told = json.loads(run("show", directory, "--step", "100", "--match", "*.bias", "--json"))
    assert told["step"] == 100
    assert told["entries"][0] == {
        "name": "model.layers.1.bias",
        "kind": "parameter",
        "dtype": "float32",
        "shape": [7],
        "bytes": 28,
        "pieces": 1,
    }
    assert told["totals"] == {"parameter": {"entries": 2, "elements": 9, "bytes": 36}}
    assert "2 of 5 entries" in run("show", directory, "--match", "*.bias")
    run("show", directory, "--match", "nothing.like.it", code=2)


def test_show_of_a_damaged_step_says_so(directory: Path) -> None:
    """When it is asked for by number; otherwise it is passed over."""
    assert f"NOT COMPLETE: {SHARD} is missing" in run("show", directory, "--step", "120")


# ---------------------------------------------------------------- what is read, and refused


@pytest.mark.parametrize("command", ["ls", "show"])
def test_only_manifests_are_read(directory: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at a terabyte must not read it."""
    opened: list[str] = []
    real = io.open

    def noted(file: Any, *arguments: Any, **options: Any) -> Any:
        opened.append(Path(file).name if isinstance(file, str | Path) else "")
        return real(file, *arguments, **options)

    monkeypatch.setattr(io, "open", noted)
    run(command, directory)
    assert set(opened) == {"manifest.json"}


def test_no_torch(directory: Path) -> None:
    """These are for login nodes; torch alone takes seconds to import."""
    code = (
        "import sys\nfrom hybrid.cli.app import app\n"
        f"for command in ('ls', 'show', 'verify'): app(['checkpoint', command, {str(directory / 'step_00000110')!r}], "
        "standalone_mode=False)\n"
        f"app(['checkpoint', 'export', {str(directory)!r}, {str(directory.parent / 'out')!r}], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "missing"), "missing is not a folder"),
        (("verify", "."), "holds no checkpoint: expected folders such as step_"),
        (("show", "run", "--step", "7"), "holds no checkpoint of step 7"),
        (("show", "run/step_00000110", "--step", "7"), "holds no checkpoint of step 7"),
        (("export", "run", "out", "--step", "120"), f"is not complete: {SHARD} is missing"),
        (("export", "run", "out", "--format", "onnx"), "expected one of safetensors, torch"),
        (("export", "run", "out", "--max-shard-bytes", "many"), "cannot read 'many'"),
        (("export", "run", "out", "--max-shard-bytes", "0"), "max_shard_bytes is 0"),
        (("export", "run", "out", "--format", "torch", "--max-shard-bytes", "5GB"), "is for safetensors files"),
        (("export", "run", "out.safetensors"), "is to be a folder"),
        (("export", "run", "run"), "holds 'step_00000005', which an export does not make"),
    ],
)
def test_refusals_are_one_sentence_with_code_2(
    directory: Path,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(directory.parent)
    monkeypatch.setattr(sys, "argv", ["hybrid", "checkpoint", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert message in re.sub(r"\s+", " ", capsys.readouterr().err)
    assert not (directory.parent / "out").exists()


# ---------------------------------------------------------------- export


def test_export(directory: Path, tmp_path: Path) -> None:
    """Plain names, each once: no prefix of the manifest, and no second name of a tied weight."""
    printed = lines(run("export", directory, tmp_path / "out"))
    assert printed == [
        f"step 110: 5 tensors, {(tmp_path / 'out' / 'model.safetensors').stat().st_size} B in {tmp_path / 'out'}: "
        "model.safetensors",
        "tied, stored once: head.weight (is layers.0.weight)",
        "a model of transformers needs its config.json beside these: copy it from the original model's folder, or use "
        "hybrid.export_weights, which writes it",
    ]
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(read) == sorted(weights(110))
    for name, array in weights(110).items():
        np.testing.assert_array_equal(read[name], array)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_export_says_what_it_leaves_out(tmp_path: Path) -> None:
    """State of a module's own that is no tensor: the weights come without it, and not in silence."""
    step = save(tmp_path / "run", 1, checksums=False)
    manifest = read_manifest(step)
    text = json.dumps({"model_extra_state": {"norm._extra_state": {"seen": 3}}}).encode()
    (step / "state.json").write_bytes(text)
    files = {**manifest.files, "state.json": FileRecord(bytes=len(text))}
    (step / "manifest.json").write_text(manifest.model_copy(update={"files": files}).to_json())
    result = CliRunner().invoke(app, ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "left out" in result.stderr
    assert "norm._extra_state (dict)" in result.stderr


def test_export_for_torch(directory: Path, tmp_path: Path) -> None:
    """All names, as `state_dict` has them; loaded without running code; a tied weight is stored once."""
    run("export", directory, tmp_path / "out", "--format", "torch", "--step", "100")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["pytorch_model.bin"]
    state = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert sorted(state) == sorted([*weights(100), "head.weight"])
    assert state["head.weight"].data_ptr() == state["layers.0.weight"].data_ptr()
    for name, array in weights(100).items():
        np.testing.assert_array_equal(state[name].numpy(), array)
        assert state[name].untyped_storage().nbytes() == array.nbytes, "a piece of a map would be saved whole"


def test_export_again_replaces_what_it_made_and_nothing_else(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("export", directory, out, "--max-shard-bytes", "40")
    assert len(list(out.iterdir())) > 2
    run("export", directory, out, "--step", "100")
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    (out / "tokenizer.json").touch()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        run("export", directory, out)
    np.testing.assert_array_equal(load_file(out / "model.safetensors")["scale"], weights(100)["scale"])


def no_room(*_: Any) -> Any:
    return shutil._ntuple_diskusage(10**9, 10**9, 100)  # type: ignore[attr-defined]


def full_disk(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("module", "name", "call", "message"),
    [
        pytest.param(shutil, "disk_usage", no_room, r"needs \d+ B .* which has 100 B", id="before"),
        pytest.param(os, "pwrite", full_disk, r"No space left on device; \d+ bytes are needed", id="while"),
    ],
)
def test_an_export_that_fails_leaves_nothing(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    call: Callable[..., Any],
    message: str,
) -> None:
    """And what was there stays."""
    run("export", directory, tmp_path / "out", "--step", "100")
    monkeypatch.setattr(module, name, call)
    with pytest.raises(CheckpointError, match=message):
        run("export", directory, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    np.testing.assert_array_equal(load_file(tmp_path / "out" / "model.safetensors")["scale"], weights(100)["scale"])


def test_damaged_weights_are_not_exported(directory: Path, tmp_path: Path) -> None:
    """They would be damaged there without anything to tell it by."""
    shard = directory / "step_00000110" / SHARD
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{SHARD} has the checksum"):
        run("export", directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run("export", directory, tmp_path / "out", "--no-checksums")


def test_the_weights_are_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    """A model larger than memory can be exported: in pieces, from maps that the system may drop."""
    arrays = {f"layers.{number}.weight": np.ones((1024, 1024), np.float32) for number in range(8)}
    save(tmp_path / "run", 1, arrays=arrays, tied={})
    tracemalloc.start()
    try:
        run("export", tmp_path / "run", tmp_path / "out", "--max-shard-bytes", "10MB")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * 2**20, "a block of 4 MiB for the checksums, and no weight"
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("format_", ["safetensors", "torch"])
def test_transformers_loads_the_export(tmp_path: Path, is_tied: bool, format_: str) -> None:
    """The point of an export: somebody else's loader takes it, with no key missing and none left over."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=12,
        intermediate_size=15,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=is_tied,
    )
    model = LlamaForCausalLM(config)
    arrays = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    assert ("lm_head.weight" in arrays) != is_tied
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {}
    save(tmp_path / "run", 1, arrays=arrays, tied=tied)
    shards = ["--max-shard-bytes", "2kB"] if format_ == "safetensors" else []
    run("export", tmp_path / "run", tmp_path / "out", "--format", format_, *shards)
    assert len(list((tmp_path / "out").iterdir())) > 2 or format_ == "torch"
    config.save_pretrained(tmp_path / "out")

    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)

    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0)
