"""What a save finds on a rank, and the document that holds all that is no tensor of a parameter's shape.

find       every rank: live tensors of parameters, and copies of the rest; refuses what a document cannot hold
begun      first rank: what it alone has, encoded before training goes on
finished   first rank: with what every rank has, which may be later, and beside the training
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch

from hybrid.checkpoint.dtypes import DTYPES
from hybrid.checkpoint.export import EXTRA_STATE, STATE_FILE
from hybrid.checkpoint.held import PlainValue, Region
from hybrid.checkpoint.manifest import Content
from hybrid.checkpoint.values import encode
from hybrid.collectives.pickled import pickled
from hybrid.compose import training_state
from hybrid.compose.checkpoint_job import (
    Job,
    distinct_buffers,
    extra_states,
    held_by,
    writes_first,
)

__all__ = ["STATE_FILE", "Beginning", "Document", "Found", "Plain", "begun", "find", "finished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What is no tensor of a parameter's shape on one rank; sent to the first rank. Training changes nothing in it."""

    values: list[PlainValue]
    random: dict[str, torch.Tensor]
    extra_states: dict[str, Any]
    tied_buffers: dict[str, str]
    """Other name -> the first one, under which it is stored."""

    @property
    def num_bytes(self) -> int:
        """Of the tensors, as far as they are seen at once: what a file needs."""
        tensors = [*(one.value for one in self.values), *self.random.values(), *self.extra_states.values()]
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    regions: list[Region]
    plain: Plain
    state: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(region.num_bytes for region in self.regions) + self.plain.num_bytes


def find(job: Job, state: Mapping[str, Any]) -> Found:
    """Raises CheckpointError: what cannot be saved."""
    runtime = job.runtime
    held = held_by(runtime)
    runtime.engine.gather.finish()
    regions: list[Region] = []
    values: list[PlainValue] = []
    extra: dict[str, Any] = {}
    tied: dict[str, str] = {}
    if job.model is not None:
        regions += held.parameters("write")
        buffers, tied = distinct_buffers(job.model)
        regions += held.buffers({fqn: buffer for fqn, buffer in buffers.items() if writes_first(runtime, fqn)})
        extra = {
            name: module.get_extra_state() for name, module in extra_states(job.model) if writes_first(runtime, name)
        }
    if job.optimizer is not None:
        shards = job.optimizer.hybrid_shards
        of_optimizer, values = held.optimizer(shards, shards.own_state(), "write")
        regions += of_optimizer
    trees = training_state.collect(runtime, **state)
    plain = Plain(
        values=[
            PlainValue(
                fqn=one.fqn, key=one.key, value=_kept(one.value, f"optimizer['values'][{one.fqn!r}][{one.key!r}]")
            )
            for one in values
        ],
        random=training_state.random_record(runtime),
        extra_states={name: _kept(value, f"{EXTRA_STATE}[{name!r}]") for name, value in extra.items()},
        tied_buffers=tied,
    )
    return Found(regions=regions, plain=plain, state=trees)


def _kept(value: Any, where: str) -> Any:
    """A copy that nothing changes any more, of what a document can hold.

    Raises:
        CheckpointError: it cannot; said now and not by the thread that writes.
    """
    if (
        type(value) is torch.Tensor
        and value.is_cpu
        and value.layout is torch.strided
        and str(value.dtype).removeprefix("torch.") in DTYPES
        and value.untyped_storage().nbytes() > 0
    ):  # what most are: the count of steps
        return value.detach().clone()
    encode(value, where=where, tensors={})
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return pickle.loads(pickled(value))  # as it goes to the first rank; a deep copy refuses some tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Part of a document, as JSON takes it, and the tensors in it: copies."""

    document: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    contents: tuple[Content, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values()) + len(json.dumps(self.document))


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    text: str
    regions: list[Region]
    contents: tuple[Content, ...]
    tied_buffers: dict[str, str]


def begun(job: Job, found: Found, groups: list[dict[str, Any]] | None) -> Beginning:
    """What only the first rank knows of."""
    tree: dict[str, Any] = dict(found.state)
    if job.optimizer is not None:
        name = type(job.optimizer).__name__.removeprefix("Distributed")
        tree["optimizer"] = {"class": name, "groups": groups}
    tensors: dict[str, torch.Tensor] = {}
    document = {key: encode(value, where=key, tensors=tensors) for key, value in tree.items()}
    has_model = job.model is not None
    parts = {*tree, "random", *(("model",) if has_model else ())}
    return Beginning(
        document=document,
        # A user's tensor may change while an async save writes.
        tensors={name: tensor.detach().clone() for name, tensor in tensors.items()},
        contents=tuple(part for part in get_args(Content) if part in parts),
    )


def finished(beginning: Beginning, shared: list[Plain]) -> Document:
    """What goes into state.json, with the tensors in it as regions."""
    document, tensors = dict(beginning.document), dict(beginning.tensors)
    if "optimizer" in document:
        values: dict[str, dict[str, Any]] = {}
        for one in (one for plain in shared for one in plain.values):
            values.setdefault(one.fqn, {})[one.key] = one.value
        encoded = encode(values, where="optimizer['values']", tensors=tensors)
        document["optimizer"] = {**document["optimizer"], "values": encoded}
    document["random"] = encode([plain.random for plain in shared], where="random", tensors=tensors)
    extra = {name: value for plain in shared for name, value in plain.extra_states.items()}
    if extra:
        document[EXTRA_STATE] = encode(extra, where=EXTRA_STATE, tensors=tensors)
    regions = [
        Region(
            name=name,
            kind="value",
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            offsets=(0,) * tensor.dim(),
            tensor=tensor,
        )
        for name, tensor in tensors.items()
    ]
    return Document(
        text=json.dumps(document),
        regions=regions,
        contents=beginning.contents,
        tied_buffers={name: stored for plain in shared for name, stored in plain.tied_buffers.items()},
    )
