"""What a save finds on a rank, and the document that holds all that is no tensor of a parameter's shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch

from hybrid.checkpoint.export import EXTRA_STATE, STATE_FILE
from hybrid.checkpoint.held import PlainValue, Region
from hybrid.checkpoint.manifest import Content
from hybrid.checkpoint.values import encode
from hybrid.compose import training_state
from hybrid.compose.checkpoint_job import (
    Job,
    distinct_buffers,
    extra_states,
    held_by,
    writes_buffers,
)

__all__ = ["STATE_FILE", "Document", "Found", "Plain", "encoded", "find"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What is no tensor of a parameter's shape on one rank; sent to the first rank."""

    values: list[PlainValue]
    random: dict[str, torch.Tensor]
    extra_states: dict[str, Any]
    tied_buffers: dict[str, str]
    """Other name -> the first one, under which it is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    regions: list[Region]
    plain: Plain
    state: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(region.num_bytes for region in self.regions)


def find(job: Job, state: Mapping[str, Any]) -> Found:
    runtime = job.runtime
    held = held_by(runtime)
    runtime.engine.gather.finish()
    regions: list[Region] = []
    values: list[PlainValue] = []
    extra: dict[str, Any] = {}
    tied: dict[str, str] = {}
    writes = writes_buffers(runtime)
    if job.model is not None:
        regions += held.parameters("write")
        buffers, tied = distinct_buffers(job.model)
        regions += held.buffers(buffers, writes=writes, use="write")
        if writes:
            extra = {name: module.get_extra_state() for name, module in extra_states(job.model)}
    if job.optimizer is not None:
        shards = job.optimizer.hybrid_shards
        of_optimizer, values = held.optimizer(shards, shards.own_state(), "write")
        regions += of_optimizer
    trees = training_state.collect(runtime, **state)
    random = training_state.random_record(runtime)
    plain = Plain(values=values, random=random, extra_states=extra, tied_buffers=tied)
    return Found(regions=regions, plain=plain, state=trees)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    text: str
    regions: list[Region]
    contents: tuple[Content, ...]


def encoded(job: Job, found: Found, shared: list[Plain], groups: list[dict[str, Any]] | None) -> Document:
    """What goes into state.json, with the tensors in it as regions."""
    tree: dict[str, Any] = dict(found.state)
    if job.optimizer is not None:
        values: dict[str, dict[str, Any]] = {}
        for one in (one for plain in shared for one in plain.values):
            values.setdefault(one.fqn, {})[one.key] = one.value
        name = type(job.optimizer).__name__.removeprefix("Distributed")
        tree["optimizer"] = {"class": name, "groups": groups, "values": values}
    tree["random"] = [plain.random for plain in shared]
    extra = {name: value for plain in shared for name, value in plain.extra_states.items()}
    if extra:
        tree[EXTRA_STATE] = extra
    tensors: dict[str, torch.Tensor] = {}
    document = {key: encode(value, where=key, tensors=tensors) for key, value in tree.items()}
    regions = [
        Region(
            name=name,
            kind="value",
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            offsets=(0,) * tensor.dim(),
            tensor=tensor.detach().clone(),  # a user's tensor may change while an async save writes
        )
        for name, tensor in tensors.items()
    ]
    has_model = job.model is not None
    contents = tuple(part for part in get_args(Content) if part in tree or (part == "model" and has_model))
    return Document(text=json.dumps(document), regions=regions, contents=contents)
