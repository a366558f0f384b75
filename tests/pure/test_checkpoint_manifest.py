"""The manifest: what it says comes back, and whatever contradicts itself, is damaged or foreign is told what it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybrid.checkpoint.manifest import Manifest, parse_manifest
from hybrid.errors import CheckpointError


def fields() -> dict[str, Any]:
    """A weight of 5 × 3 in two pieces, a step count, and a file without tensors."""
    return {
        "format": "hybrid-checkpoint",
        "format_version": 1,
        "hybrid_version": "0.1.0",
        "torch_version": "2.13.0",
        "created_at": "2026-01-02T03:04:05+00:00",
        "step": 100,
        "layout": {"world_size": 2, "zero_stage": 2, "degrees": {"tp": 1}},
        "contents": ["model", "optimizer"],
        "files": {
            "state.json": {"bytes": 40, "xxh3_64": None},
            "shard_00000_0.safetensors": {"bytes": 128, "xxh3_64": "0123456789abcdef"},
            "shard_00001_0.safetensors": {"bytes": 136, "xxh3_64": "fedcba9876543210"},
        },
        "entries": {
            "model.weight": {
                "kind": "parameter",
                "dtype": "float32",
                "shape": [5, 3],
                "chunks": [
                    {"file": "shard_00000_0.safetensors", "begin": 104, "offsets": [0, 0], "sizes": [2, 3]},
                    {"file": "shard_00001_0.safetensors", "begin": 96, "offsets": [2, 0], "sizes": [3, 3]},
                ],
            },
            "optimizer.weight.step": {
                "kind": "optimizer",
                "dtype": "float32",
                "shape": [],
                "chunks": [{"file": "shard_00001_0.safetensors", "begin": 132, "offsets": [], "sizes": []}],
            },
        },
        "tied": {"head.weight": "weight"},
    }


def parse(raw: Any) -> Manifest:
    return parse_manifest(json.dumps(raw), source="step_00000100/manifest.json")


def test_what_it_says_comes_back() -> None:
    """Its text form is the format: nothing added, nothing lost, one line per entry."""
    manifest = parse(fields())
    text = manifest.to_json()
    assert json.loads(text) == fields()
    assert parse_manifest(text, source="x") == manifest
    assert sum('"chunks"' in line for line in text.splitlines()) == len(manifest.entries)
    entry = manifest.entries["model.weight"]
    assert (entry.num_bytes, [entry.chunk_bytes(chunk) for chunk in entry.chunks]) == (60, [24, 36])
    assert manifest.num_bytes == 40 + 128 + 136
    empty = manifest.model_copy(update={"files": {}, "entries": {}, "tied": {}, "contents": ()})
    assert parse_manifest(empty.to_json(), source="x") == empty


def test_each_truncation_is_refused() -> None:
    """A manifest that was cut off anywhere is never taken for a smaller one."""
    text = parse(fields()).to_json()
    for length in range(len(text.rstrip())):
        with pytest.raises(CheckpointError, match=r"step_00000100/manifest\.json is damaged or not whole"):
            parse_manifest(text[:length], source="step_00000100/manifest.json")


def test_a_newer_form_says_so() -> None:
    """Fields that are not known yet must not read as damage: the way out is a newer version."""
    newer = fields() | {"format_version": 2, "hybrid_version": "7.8.9", "something": "new"}
    with pytest.raises(CheckpointError, match=r"format version 2.*reads up to 1.*hybrid 7\.8\.9"):
        parse(newer)


@pytest.mark.parametrize("raw", [[], 3, {}, {"format": "other"}, {"model": "gpt"}])
def test_another_json_is_not_ours(raw: Any) -> None:
    with pytest.raises(CheckpointError, match="is not the manifest of a hybrid checkpoint"):
        parse(raw)


@pytest.mark.parametrize(
    "name",
    ["../x", "..", ".", "", "a/b", "/etc/passwd", "a\\b", ".hidden", "a\0b", "manifest.json", "C:x", "-rf", "a\n"],
)
def test_a_file_name_cannot_leave_the_folder(name: str) -> None:
    """A manifest from elsewhere is read with the rights of the job: its names are names in its own folder."""
    raw = fields()
    raw["files"][name] = {"bytes": 1, "xxh3_64": None}
    with pytest.raises(CheckpointError, match="not allowed") as caught:
        parse(raw)
    assert repr(name) in str(caught.value)


def changed(*path: Any, to: Any) -> dict[str, Any]:
    raw = fields()
    inner = raw
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return raw


CHUNKS = ("entries", "model.weight", "chunks")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        pytest.param(changed(*CHUNKS, 1, "offsets", to=[1, 0]), "overlap", id="pieces-overlap"),
        pytest.param(changed(*CHUNKS, 1, "sizes", to=[2, 3]), "12 of 15 elements", id="a-piece-is-missing"),
        pytest.param(changed(*CHUNKS, 1, "offsets", to=[3, 0]), "leaves the shape", id="outside-of-the-shape"),
        pytest.param(changed(*CHUNKS, 1, "offsets", to=[2]), "in a tensor of shape", id="other-dims"),
        pytest.param(changed(*CHUNKS, to=[]), "0 of 15 elements", id="no-piece"),
        pytest.param(changed(*CHUNKS, 0, "begin", to=105), "which has 128", id="beyond-the-file"),
        pytest.param(changed(*CHUNKS, 0, "begin", to=-8), "begin", id="negative"),
        pytest.param(changed(*CHUNKS, 0, "begin", to=8.0), "begin", id="a-fraction"),
        pytest.param(changed(*CHUNKS, 0, "begin", to=True), "begin", id="a-truth-value"),
        pytest.param(changed(*CHUNKS, 1, "begin", to=100), "overlap at byte 132", id="bytes-of-two-entries"),
        pytest.param(changed(*CHUNKS, 0, "file", to="other"), "'other' is not among", id="unknown-file"),
        pytest.param(changed(*CHUNKS, 0, "file", to="../../secret"), "is not among", id="chunk-leaves-the-folder"),
        pytest.param(changed("entries", "model.weight", "dtype", to="float33"), "'float33'", id="type"),
        pytest.param(changed("entries", "model.weight", "kind", to="thing"), "kind", id="kind"),
        pytest.param(changed("entries", "model.weight", "colour", to=1), "colour", id="unknown-field"),
        pytest.param(changed("files", "state.json", "xxh3_64", to="0123"), "xxh3_64", id="checksum"),
        pytest.param(changed("files", "state.json", "xxh3_64", to="0123456789ABCDEG"), "xxh3_64", id="no-digits"),
        pytest.param(changed("contents", to=["model", "music"]), "contents", id="contents"),
        pytest.param(changed("tied", to={"head.weight": "wait"}), "tied to wait", id="tie-to-nothing"),
        pytest.param(changed("step", to=-1), "step", id="step"),
        pytest.param({k: v for k, v in fields().items() if k != "files"}, "files", id="without-files"),
        pytest.param(changed("format_version", to="1"), "format_version", id="version-as-text"),
    ],
)
def test_contradictions_are_found_before_any_file_is_opened(raw: dict[str, Any], message: str) -> None:
    """A load that trusted these would fill weights from wrong bytes, or leave some unfilled."""
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged or was not written by hybrid") as caught:
        parse(raw)
    assert message in str(caught.value)
