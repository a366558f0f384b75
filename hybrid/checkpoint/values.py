"""Trees of Python values and tensors as JSON and back: equal in type and value, floats to the bit.

    None, True, 3, 2.5, "text", [1, 2]   as they are; a dict too, if its keys are texts and none is "__kind__"
    (1, 2)                               {"__kind__": "tuple", "items": [1, 2]}
    {7: "x"}, Counter, defaultdict       {"__kind__": "dict", "items": [[7, "x"]]}
    nan, inf, 2**70, b"", complex        {"__kind__": "float", "value": "7ff0000000000000"}: bits, or a text
    a tensor or numpy array              {"__kind__": "tensor", "name": "value.0"}: it goes elsewhere, under that name

Reading looks each kind up in a fixed table. It imports nothing, calls nothing that a document names, and makes no
object of a class that is not in the table: a document from a stranger can be wrong, but it cannot run anything.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import functools
import json
import math
import struct
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybrid.checkpoint.dtypes import DTYPES
from hybrid.errors import CheckpointError

__all__ = ["CODE_TYPES", "MAX_DEPTH", "decode", "encode"]

KIND = "__kind__"
NAMES = "value."  # of tensors: "value.0", "value.1", ...

# Containers in containers. Each level is up to three of JSON, and Python's own reader ends at some hundred.
MAX_DEPTH = 100

# What holds code: it is not saved, by nobody.
CODE_TYPES = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, type)

# JSON readers elsewhere know 64 bits, and Python refuses to read decimal numbers of some thousand digits.
_PLAIN_INTS = range(-(2**63), 2**63)


def encode(tree: Any, *, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """What `json.dumps` takes. Tensors and arrays are put into `tensors` under the next free name.

    A tensor is put there as it is, not copied: it must not change before it has been written.

    Args:
        tree: numbers, texts, bytes, None, lists, tuples, dicts and sets of each other; tensors and arrays; and what
            the table of this file lists beside them.
        where: what the tree is called in errors: "extra".
        tensors: gets the tensors; may hold others already.

    Raises:
        CheckpointError: something in the tree is none of these, contains itself or lies too deep; names its place.
    """
    return _Encoder(tensors).encode(tree, where, 0)


def decode(document: Any, *, tensors: Callable[[str], torch.Tensor], where: str = "the document") -> Any:
    """The tree that `encode` was given, all of it new objects.

    Args:
        document: what `json.loads` gave back.
        tensors: the tensor of a name. One that was saved on a CUDA device goes to the current one, if there is one.
        where: what the tree is called in errors.

    Raises:
        CheckpointError: the document is damaged or was not written by `encode`; names the place.
    """
    return _Decoder(tensors).decode(document, where, 0)


# -- what needs a kind, and has no parts -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A type with a text for each of its values."""

    type: type
    write: Callable[[Any], str]
    read: Callable[[str], Any]


def _read_complex(text: str) -> complex:
    return complex(*struct.unpack(">dd", bytes.fromhex(text)))


def _write_scalar(value: np.generic) -> str:
    return f"{value.dtype.name}:{np.array(value).astype(value.dtype.newbyteorder('<')).tobytes().hex()}"


def _read_scalar(text: str) -> np.generic:
    name, _, digits = text.partition(":")
    if name not in _NUMPY_TYPES:
        raise ValueError(f"unknown type of number {name!r}")
    dtype = np.dtype(name)
    (value,) = np.frombuffer(bytes.fromhex(digits), dtype.newbyteorder("<")).astype(dtype)
    return value


_TORCH_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_NUMPY_TYPES = frozenset(
    {f"{name}{bits}" for name in ("int", "uint") for bits in (8, 16, 32, 64)}
    | {"bool", "float16", "float32", "float64", "complex64", "complex128"}
)

_LEAVES: Mapping[str, _Leaf] = {
    "int": _Leaf(int, hex, lambda t: int(t, 16)),
    "float": _Leaf(float, lambda v: struct.pack(">d", v).hex(), lambda t: struct.unpack(">d", bytes.fromhex(t))[0]),
    "complex": _Leaf(complex, lambda v: struct.pack(">dd", v.real, v.imag).hex(), _read_complex),
    "bytes": _Leaf(bytes, lambda v: base64.b64encode(v).decode(), lambda t: base64.b64decode(t, validate=True)),
    "dtype": _Leaf(torch.dtype, str, lambda t: _TORCH_DTYPES[t]),
    "device": _Leaf(torch.device, str, torch.device),
    "path": _Leaf(type(Path()), str, Path),
    "datetime": _Leaf(datetime, datetime.isoformat, datetime.fromisoformat),
    "scalar": _Leaf(np.generic, _write_scalar, _read_scalar),
}
_LEAF_OF = {leaf.type: kind for kind, leaf in _LEAVES.items()}

_SEQUENCES: Mapping[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "size": torch.Size}
_SETS: Mapping[str, Callable[[list[Any]], Any]] = {"set": set, "frozenset": frozenset}
_MAPPINGS: Mapping[str, Callable[[dict[Any, Any]], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": Counter,
    "default": lambda items: defaultdict(None, items),
}
_CONTAINER_OF: Mapping[type, str] = {
    **{tuple: "tuple", torch.Size: "size", set: "set", frozenset: "frozenset"},
    **{dict: "dict", OrderedDict: "ordered", Counter: "counter", defaultdict: "default", list: "list"},
    argparse.Namespace: "namespace",
}
# What a defaultdict may make; anything else would be code.
_FACTORIES: Mapping[str, type] = {t.__name__: t for t in (list, dict, set, tuple, int, float, bool, str)}

_FIELDS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {  # required, and allowed beside these
    **{kind: (frozenset({"value"}), frozenset()) for kind in _LEAVES},
    **{kind: (frozenset({"items"}), frozenset()) for kind in (*_SEQUENCES, *_SETS, *_MAPPINGS)},
    "default": (frozenset({"items", "factory"}), frozenset()),
    "ordered": (frozenset({"items"}), frozenset({"attributes"})),
    "namespace": (frozenset({"attributes"}), frozenset()),
    "tensor": (frozenset({"name"}), frozenset({"complex", "device"})),
    "array": (frozenset({"name"}), frozenset({"complex"})),
}


# -- writing -----------------------------------------------------------------------------------------------------


class _Encoder:
    """Walks one tree."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._open: set[int] = set()  # the containers around the current place
        self._next = len(tensors)

    def encode(self, value: Any, path: str, depth: int) -> Any:
        # By exact type: a subclass (an Enum of numbers, a named tuple) would come back as what it is not.
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind in (int, float) and (value in _PLAIN_INTS if kind is int else math.isfinite(value)):
            return value
        if kind in _CONTAINER_OF:
            return self._container(value, path, depth)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind is np.ndarray:
            return self._array(value, path)
        leaf = "scalar" if isinstance(value, np.generic) else _LEAF_OF.get(kind)
        if leaf is None or _advice_for(leaf, value):
            raise _refusal(value, path, _advice_for(leaf, value) or _advice(value))
        return {KIND: leaf, "value": _LEAVES[leaf].write(value)}

    def _container(self, value: Any, path: str, depth: int) -> Any:
        if id(value) in self._open:
            raise CheckpointError(f"{_short(path)} contains itself; a checkpoint holds trees only")
        if depth == MAX_DEPTH:
            raise CheckpointError(
                f"{_short(path)} lies {MAX_DEPTH} containers deep; a checkpoint takes no deeper trees"
            )
        self._open.add(id(value))
        kind, depth = _CONTAINER_OF[type(value)], depth + 1
        result: Any
        if kind == "namespace":
            result = {KIND: kind, "attributes": self.encode(dict(vars(value)), path, depth)}
        elif kind in _MAPPINGS:
            result = self._mapping(kind, value, path, depth)
        elif kind in _SETS:
            items = [self._key(item, path, depth) for item in value]
            # Sets of texts have another order in each process; ranks are compared.
            result = {KIND: kind, "items": sorted(items, key=json.dumps)}
        else:
            items = [self.encode(item, f"{path}[{index}]", depth) for index, item in enumerate(value)]
            result = items if kind == "list" else {KIND: kind, "items": items}
        self._open.remove(id(value))
        return result

    def _mapping(self, kind: str, value: dict[Any, Any], path: str, depth: int) -> Any:
        if kind == "dict" and KIND not in value and all(type(key) is str for key in value):
            return {key: self.encode(item, f"{path}[{key!r}]", depth) for key, item in value.items()}
        items = [
            [self._key(key, path, depth), self.encode(item, f"{path}[{key!r}]", depth)] for key, item in value.items()
        ]
        result: dict[str, Any] = {KIND: kind, "items": items}
        if isinstance(value, defaultdict):
            factory = value.default_factory
            if factory is not None and factory not in _FACTORIES.values():
                raise _refusal(factory, f"{path}.default_factory", f"use one of {', '.join(_FACTORIES)}, or a dict")
            result["factory"] = None if factory is None else factory.__name__
        if kind == "ordered" and vars(value):  # the versions that nn.Module.state_dict() notes
            result["attributes"] = self.encode(dict(vars(value)), f"{path}.__dict__", depth)
        return result

    def _key(self, key: Any, path: str, depth: int) -> Any:
        before = len(self._tensors)
        result = self.encode(key, f"{path}: the key {key!r}", depth)
        if len(self._tensors) > before:
            raise CheckpointError(f"{_short(path)} has a tensor as a key or in a set; use its number, or a name")
        return result

    def _tensor(self, value: torch.Tensor, path: str) -> dict[str, Any]:
        if type(value) is not torch.Tensor:
            raise _refusal(value, path, "give a plain tensor with its values, as .detach().clone() makes one")
        if value.is_meta or value.layout is not torch.strided or value.is_quantized:
            kind = "quantized" if value.is_quantized else "on the meta device" if value.is_meta else str(value.layout)
            raise CheckpointError(f"{_short(path)} is a tensor that is {kind}; give a dense one with its values")
        if value.numel() > 0 and value.untyped_storage().nbytes() == 0:
            raise CheckpointError(
                f"{_short(path)} is a tensor without memory, as parameters of a wrapped model are between steps at "
                "stage 3; give model.full_state_dict(), or leave it out: the checkpoint has the model anyway"
            )
        node: dict[str, Any] = {KIND: "tensor"}
        if value.device.type != "cpu":
            node["device"] = value.device.type
        return self._put(value.detach().resolve_conj().resolve_neg(), node, path)

    def _array(self, value: np.ndarray[Any, Any], path: str) -> dict[str, Any]:
        if value.dtype.name not in _NUMPY_TYPES or not value.dtype.isnative:
            raise CheckpointError(
                f"{_short(path)} is an array of {value.dtype!r}; a checkpoint holds arrays of numbers and bools in the "
                "byte order of the machine"
            )
        return self._put(torch.from_numpy(np.array(value, order="C")), {KIND: "array"}, path)

    def _put(self, tensor: torch.Tensor, node: dict[str, Any], path: str) -> dict[str, Any]:
        if tensor.is_complex():  # files know not all complex types
            tensor, node["complex"] = torch.view_as_real(tensor), True
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
            raise CheckpointError(f"{_short(path)} is a tensor of {tensor.dtype}; a checkpoint has no such type")
        if tensor.numel() == 0:
            tensor = tensor.new_empty(tensor.shape)  # those from numpy have strides of 0
        while f"{NAMES}{self._next}" in self._tensors:
            self._next += 1
        node["name"] = f"{NAMES}{self._next}"
        self._tensors[node["name"]] = tensor
        return node


def _short(path: str) -> str:
    return path if len(path) <= 200 else f"{path[:100]} ... {path[-60:]}"


def _refusal(value: Any, path: str, advice: str) -> CheckpointError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return CheckpointError(f"{_short(path)} is a {name}, which a checkpoint cannot hold: {advice}")


def _advice_for(leaf: str | None, value: Any) -> str:
    """Why this value of a type that has a text has none."""
    if leaf == "scalar" and value.dtype.name not in _NUMPY_TYPES:
        return "give it as a plain number or text"
    if leaf == "datetime" and value.tzinfo is not None and type(value.tzinfo) is not timezone:
        return "give it in UTC: .astimezone(datetime.timezone.utc)"
    return ""


def _advice(value: Any) -> str:
    if isinstance(value, CODE_TYPES):
        return "it is code; leave it out, and give it again to what is built at the resume"
    if callable(getattr(value, "state_dict", None)):
        return "give its state_dict()"
    if isinstance(value, torch.Generator):
        return "give its get_state()"
    if isinstance(value, Enum):
        return "give its .value"
    if isinstance(value, tuple):
        return "give a plain tuple, or ._asdict() of it"
    if dataclasses.is_dataclass(value):
        return "give dataclasses.asdict() of it"
    return "give it as numbers, texts, lists, dicts and tensors"


# -- reading -----------------------------------------------------------------------------------------------------


class _Decoder:
    """Walks one document, and trusts nothing in it."""

    def __init__(self, tensors: Callable[[str], torch.Tensor]) -> None:
        self._tensors = tensors

    def decode(self, node: Any, path: str, depth: int) -> Any:
        if node is None or type(node) in (bool, int, float, str):
            return node
        if type(node) not in (list, dict):
            raise CheckpointError(f"{_short(path)} is damaged: a {type(node).__name__}, which JSON does not have")
        if depth == MAX_DEPTH:
            raise CheckpointError(f"{_short(path)} is damaged: it lies more than {MAX_DEPTH} containers deep")
        depth += 1
        if type(node) is list:
            return [self.decode(item, f"{path}[{index}]", depth) for index, item in enumerate(node)]
        if KIND not in node:
            return {key: self.decode(item, f"{path}[{key!r}]", depth) for key, item in node.items()}
        kind = node[KIND]
        if type(kind) is not str or kind not in _FIELDS:
            raise CheckpointError(
                f"{_short(path)} is of the unknown kind {kind!r}: it is damaged, or a newer version of hybrid wrote it"
            )
        required, allowed = _FIELDS[kind]
        fields = set(node) - {KIND}
        if not required <= fields <= required | allowed:
            raise CheckpointError(
                f"{_short(path)} is damaged: a {kind} has the fields {sorted(required)}, found {sorted(fields)}"
            )
        try:
            return self._of_kind(kind, node, path, depth)
        except CheckpointError:
            raise
        except (ValueError, TypeError, KeyError, ArithmeticError, RuntimeError, struct.error) as error:
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{_short(path)} is damaged: no {kind} ({_short(reason)})") from None

    def _of_kind(self, kind: str, node: dict[str, Any], path: str, depth: int) -> Any:
        if kind in _LEAVES:
            return _LEAVES[kind].read(_checked(node["value"], str))
        if "name" in node:
            return self._tensor(kind, node, path)
        if kind == "namespace":
            result = argparse.Namespace()
            vars(result).update(self._attributes(node, path, depth))
            return result
        items = _checked(node["items"], list)
        if kind in _MAPPINGS:
            return self._mapping(kind, node, items, path, depth)
        values = [self.decode(item, f"{path}[{index}]", depth) for index, item in enumerate(items)]
        return _SETS[kind](values) if kind in _SETS else _SEQUENCES[kind](values)

    def _mapping(self, kind: str, node: dict[str, Any], items: list[Any], path: str, depth: int) -> Any:
        found: dict[Any, Any] = {}
        for pair in items:
            key, item = _checked(pair, list)
            key = self.decode(key, f"{path}: a key", depth)
            found[key] = self.decode(item, f"{path}[{key!r}]", depth)
        if len(found) != len(items):
            raise ValueError("a key is there twice")
        result = _MAPPINGS[kind](found)
        if kind == "default" and node["factory"] is not None:
            result.default_factory = _FACTORIES[node["factory"]]
        if "attributes" in node:
            vars(result).update(self._attributes(node, path, depth))
        return result

    def _attributes(self, node: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        found = _checked(self.decode(node["attributes"], path, depth), dict)
        return {_checked(name, str): value for name, value in found.items()}

    def _tensor(self, kind: str, node: dict[str, Any], path: str) -> Any:
        name = _checked(node["name"], str)
        try:
            tensor = self._tensors(name)
        except KeyError:
            raise CheckpointError(f"{_short(path)}: the checkpoint has no tensor {name!r}") from None
        if _checked(node.get("complex", False), bool):
            tensor = torch.view_as_complex(tensor)
        if kind == "array":
            return tensor.numpy()
        if _checked(node.get("device", "cpu"), str) == "cuda" and torch.cuda.is_available():
            tensor = tensor.to("cuda")
        return tensor


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value
