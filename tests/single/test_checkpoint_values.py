"""Values as JSON: what schedulers, scalers, samplers, generators and users keep comes back equal, or is refused."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import enum
import inspect
import json
import math
import pathlib
import random
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from hybrid.checkpoint.values import MAX_DEPTH, decode, encode
from hybrid.data.sampler import DistributedBatchSampler
from hybrid.errors import CheckpointError


def through_json(tree: Any) -> Any:
    """Written as text and read back; tensors as copies of their bytes, as from a file."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(tree, where="tree", tensors=tensors), allow_nan=False)
    files = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    return decode(json.loads(text), tensors=files.__getitem__)


def assert_same(got: Any, wanted: Any, path: str = "tree") -> None:
    """Equal in type and, floats to the bit, in value; dicts in order."""
    assert type(got) is type(wanted), f"{path}: {type(got)}, not {type(wanted)}"
    if isinstance(wanted, torch.Tensor):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), path
        raw = [one.resolve_conj().contiguous().view(-1).view(torch.uint8) for one in (got, wanted)]
        assert raw[0].equal(raw[1]), path
    elif isinstance(wanted, np.ndarray | np.generic):
        assert (got.dtype, got.shape, got.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes()), path
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted), path
        for (got_key, got_item), (key, item) in zip(got.items(), wanted.items(), strict=True):
            assert_same(got_key, key, f"{path}: key {key!r}")
            assert_same(got_item, item, f"{path}[{key!r}]")
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted), path
        for index, (got_item, item) in enumerate(zip(got, wanted, strict=True)):
            assert_same(got_item, item, f"{path}[{index}]")
    elif isinstance(wanted, argparse.Namespace):
        assert_same(vars(got), vars(wanted), path)
    elif isinstance(wanted, float | complex):
        parts = [struct.pack("dd", one.real, one.imag) for one in (got, wanted)]
        assert parts[0] == parts[1], f"{path}: {got!r}, not {wanted!r}"
    else:
        assert got == wanted, f"{path}: {got!r}, not {wanted!r}"


# -- schedulers --------------------------------------------------------------------------------------------------


class Decay:
    """A callable with a state: torch saves its attributes."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, number: float) -> float:
        return 1 / (1 + self.rate * number)


def halved(number: float) -> float:
    return 0.5


# `fresh` builds what a resumed script builds: the same, but for what the state is to bring.
SCHEDULERS: dict[str, Callable[[Any, bool], Any]] = {
    "LambdaLR": lambda o, fresh: lr_scheduler.LambdaLR(o, [Decay(9.0 if fresh else 0.3), lambda n: 0.9**n]),
    "MultiplicativeLR": lambda o, fresh: lr_scheduler.MultiplicativeLR(o, [halved, Decay(9.0 if fresh else 0.3)]),
    "StepLR": lambda o, fresh: lr_scheduler.StepLR(o, 2, gamma=0.7),
    "MultiStepLR": lambda o, fresh: lr_scheduler.MultiStepLR(o, [2, 4, 4, 6], gamma=0.7),
    "ConstantLR": lambda o, fresh: lr_scheduler.ConstantLR(o, 0.3, total_iters=5),
    "LinearLR": lambda o, fresh: lr_scheduler.LinearLR(o, 0.1, total_iters=6),
    "ExponentialLR": lambda o, fresh: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o, fresh: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 7)], milestones=[4]
    ),
    "PolynomialLR": lambda o, fresh: lr_scheduler.PolynomialLR(o, 6, power=1.5),
    "CosineAnnealingLR": lambda o, fresh: lr_scheduler.CosineAnnealingLR(o, 7, eta_min=0.01),
    "ChainedScheduler": lambda o, fresh: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, total_iters=6), lr_scheduler.LambdaLR(o, Decay(9.0 if fresh else 0.3))], o
    ),
    "ReduceLROnPlateau": lambda o, fresh: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1, cooldown=1),
    "CyclicLR": lambda o, fresh: lr_scheduler.CyclicLR(o, 0.1, 0.5, step_size_up=3, mode="exp_range", gamma=0.9),
    "CyclicLR, callable": lambda o, fresh: lr_scheduler.CyclicLR(
        o, 0.1, 0.5, step_size_up=3, scale_fn=Decay(9.0 if fresh else 0.3)
    ),
    "CyclicLR, function": lambda o, fresh: lr_scheduler.CyclicLR(o, 0.1, 0.5, step_size_up=3, scale_fn=halved),
    "CosineAnnealingWarmRestarts": lambda o, fresh: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, T_mult=2),
    "OneCycleLR": lambda o, fresh: lr_scheduler.OneCycleLR(o, [0.5, 0.2], total_steps=12, three_phase=True),
    "SWALR": lambda o, fresh: SWALR(o, 0.05, anneal_epochs=6, anneal_strategy="linear"),
}


def make_optimizer(as_tensor: bool) -> torch.optim.Optimizer:
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    lr = torch.tensor(0.4) if as_tensor else 0.4
    groups = [{"params": [first], "tag": "body"}, {"params": [second], "lr": lr / 3, "tag": None}]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


def advance(scheduler: Any, number: int) -> list[Any]:
    """Step once more; rates and momenta."""
    optimizer = scheduler.optimizer
    optimizer.step()
    scheduler.step(1.0 + number % 2) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()
    return [float(group[key]) for group in optimizer.param_groups for key in ("lr", "momentum")]


@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_where_it_was(name: str, as_tensor: bool) -> None:
    """A resumed schedule that starts again, or is refused by JSON, is a run with other rates."""
    scheduler = SCHEDULERS[name](make_optimizer(as_tensor), False)
    for number in range(3):
        advance(scheduler, number)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in scheduler.optimizer.param_groups]
    saved = through_json({"state": scheduler.state_dict(), "groups": groups})
    wanted = [advance(scheduler, number) for number in range(3, 8)]

    optimizer = make_optimizer(as_tensor)
    resumed = SCHEDULERS[name](optimizer, True)
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(options)
    resumed.load_state_dict(saved["state"])
    assert [advance(resumed, number) for number in range(3, 8)] == wanted
    assert [group["tag"] for group in optimizer.param_groups] == ["body", None]


def test_the_list_of_schedulers_is_whole() -> None:
    """A class that a newer torch adds must not go untested."""
    found = {name for name, one in vars(lr_scheduler).items() if inspect.isclass(one) and _is_scheduler(one)}
    assert found | {"SWALR"} == {name.split(",")[0] for name in SCHEDULERS}


def _is_scheduler(one: type) -> bool:
    return issubclass(one, lr_scheduler.LRScheduler) and not one.__name__.endswith("LRScheduler")


# -- other state -------------------------------------------------------------------------------------------------


def test_loss_scaler_sampler_and_generators() -> None:
    """What else a run keeps: all of it goes into the same file."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**31, growth_interval=7)
    sampler = DistributedBatchSampler(23, 2, num_replicas=2, rank=1, shuffle=True, seed=5)
    next(iter(sampler))
    random.gauss(0, 1)
    for state in (
        scaler.state_dict(),
        sampler.state_dict(),
        random.getstate(),
        np.random.get_state(),
        np.random.get_state(legacy=False),
        np.random.Generator(np.random.PCG64(3)).bit_generator.state,  # 128-bit numbers
        torch.get_rng_state(),
    ):
        assert_same(through_json(state), state)


def test_param_groups_keep_what_users_and_schedulers_add() -> None:
    """BC-54: a checkpoint that keeps only known keys loses initial_lr and the user's own."""
    one = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([{"params": [one], "tag": ("a", 1)}], lr=torch.tensor(1e-3), betas=(0.8, 0.99))
    lr_scheduler.ExponentialLR(optimizer, 0.5)
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    assert {"betas", "initial_lr", "tag", "foreach"} <= set(group)
    assert_same(through_json(group), group)


# -- values ------------------------------------------------------------------------------------------------------


def versioned() -> OrderedDict[str, Any]:
    """As nn.Module.state_dict() returns it, with the versions as an attribute."""
    state = nn.BatchNorm1d(3).state_dict()
    assert state._metadata  # type: ignore[attr-defined]
    return state  # type: ignore[return-value]


VALUES: dict[str, Any] = {
    "numbers": [0, -1, 2**63 - 1, -(2**63), 2**63, -(2**70), 10**5000, True, False, None],
    "floats": [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan],
    "a nan with a payload": struct.unpack("d", struct.pack("Q", 0x7FF8000000000ABC))[0],
    "complex": [1 - 2j, complex(math.nan, -0.0)],
    "texts": ["", "ä\n\x00\U0001f600", "\ud800", b"", b"\x00\xff"],
    "sequences": [(), (1,), [[], ()], torch.Size([2, 3])],
    "keys": {1: "a", "1": "b", None: {}, (2, "x"): 0, 2.5: 1, math.inf: 2, b"k": 3, torch.float16: 4, np.int8(7): 5},
    "keys that look like ours": {"__kind__": "tuple", "items": [1]},
    "ours in ours": {"a": {"__kind__": {"__kind__": 1}}},
    "dicts": [Counter({3: 2, "z": -1}), OrderedDict([("b", 1), ("a", 2)]), defaultdict(None, {1: 2})],
    "defaults": [defaultdict(list, {"a": [1]}), defaultdict(int), defaultdict(float, {2: 1.5})],
    "sets": [{"b", "a", 3}, frozenset({(1, 2), None}), set()],
    "torch": [torch.bfloat16, torch.device("cuda:1"), torch.device("cpu")],
    "tensors": [torch.arange(6.0).view(2, 3), torch.tensor(3), torch.empty(0, 4), torch.tensor([True])],
    "half": [torch.tensor([1.5, math.nan]).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float8_e5m2)],
    "strided": torch.arange(12.0).view(3, 4).t()[1:],
    "complex tensors": [torch.tensor(1 + 2j), torch.randn(2, dtype=torch.complex128).conj()],
    "arrays": [np.arange(6.0).reshape(2, 3), np.array(2, np.uint16), np.array([True]), np.zeros((0, 2), np.int8)],
    "complex arrays": np.array([1 + 2j], np.complex64),
    "numpy numbers": [np.float64(0.1), np.float32(math.nan), np.int64(-3), np.bool(True), np.uint64(2**64 - 1)],
    "the rest": [pathlib.Path("a/b"), datetime.datetime(2024, 2, 29, 1, 2, 3, 4), datetime.datetime.now(datetime.UTC)],
    "command line": argparse.Namespace(lr=0.1, layers=[1, 2], **{"__kind__": "odd", "no name": 1}),
    "state dict": versioned(),
}


@pytest.mark.parametrize("name", VALUES)
def test_comes_back_as_it_was(name: str) -> None:
    """A tuple that comes back as a list, or a float that is rounded, changes a resumed run in silence."""
    got = through_json(VALUES[name])
    assert_same(got, VALUES[name])
    for one, wanted in zip(got, VALUES[name], strict=True) if isinstance(got, list) else ():
        assert getattr(one, "default_factory", None) == getattr(wanted, "default_factory", None)
    assert getattr(got, "_metadata", None) == getattr(VALUES[name], "_metadata", None)


PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=3)
)
TREES = st.recursive(
    PLAIN,
    lambda parts: (
        st.lists(parts, max_size=4)
        | st.lists(parts, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.just("__kind__"), parts, max_size=4)
    ),
    max_leaves=12,
)


@given(tree=TREES)
@settings(max_examples=25, deadline=None)
def test_any_tree_comes_back(tree: Any) -> None:
    """No mixture of containers and keys is taken for another."""
    assert_same(through_json(tree), tree)


def test_tensors_get_free_names_and_are_not_copied() -> None:
    """Two trees in one file must not share a name; a copy of an `extra` of some GB would double its memory."""
    tensors = {"value.1": torch.zeros(1)}
    weight = torch.ones(3)
    first = encode([weight], where="first", tensors=tensors)
    second = encode({"a": torch.tensor(2.0)}, where="second", tensors=tensors)
    assert (first[0]["name"], second["a"]["name"], len(tensors)) == ("value.2", "value.3", 3)
    assert tensors["value.2"].data_ptr() == weight.data_ptr()


def test_sets_are_written_in_one_order() -> None:
    """Python orders texts in a set differently in each process: equal sets of two ranks must be equal files."""
    document = encode({"b", "c", "a", "d"}, where="tree", tensors={})
    assert document["items"] == ["a", "b", "c", "d"]


# -- what is refused ---------------------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Config:
    width: int = 3


Point = namedtuple("Point", "x y")

REFUSED: dict[str, tuple[Any, str]] = {
    "function": ({"hooks": [1, 2, halved]}, r"extra\['hooks'\]\[2\] is a function, .*it is code"),
    "method": ([Decay(1.0).__call__], r"extra\[0\] is a method"),
    "class": ([Config], r"extra\[0\] is a type, .*it is code"),
    "instance": ({"a": (Decay(1.0),)}, r"extra\['a'\]\[0\] is a tests\.single.*Decay, .*numbers, texts"),
    "module": ([nn.Linear(1, 1)], r"Linear, .*give its state_dict\(\)"),
    "parameter": ([nn.Parameter(torch.ones(1))], r"extra\[0\] is a torch.*Parameter, .*\.detach\(\)\.clone\(\)"),
    "enum": ({"c": Colour.RED}, r"extra\['c'\] is a .*Colour, .*\.value"),
    "named tuple": ([Point(1, 2)], r"Point, .*_asdict"),
    "dataclass": ([Config()], r"Config, .*dataclasses\.asdict"),
    "generator": ([torch.Generator()], r"Generator, .*get_state"),
    "object array": ([np.array([None])], r"extra\[0\] is an array of dtype\('O'\)"),
    "other byte order": ([np.zeros(1, ">f8")], r"extra\[0\] is an array of .*byte order"),
    "masked array": ([np.ma.masked_array([1.0], [True])], r"extra\[0\] is a numpy\.ma\S*MaskedArray"),
    "numpy text": ({"label": np.str_("a")}, r"extra\['label'\] is a numpy\.str_, .*plain number or text"),
    "sparse": ([torch.eye(2).to_sparse()], r"extra\[0\] is a tensor that is torch\.sparse_coo"),
    "meta": ([torch.empty(2, device="meta")], r"extra\[0\] is a tensor that is on the meta device"),
    "default": ({"d": defaultdict(lambda: 1)}, r"extra\['d'\]\.default_factory is a function"),
    "tensor as key": ({"a": {torch.tensor(1): 2}}, r"extra\['a'\] has a tensor as a key"),
    "object as key": ([{Config: 1}], r"extra\[0\]: the key .* is a type"),
    "zone": ([datetime.datetime(2024, 1, 1, tzinfo=type("Z", (datetime.tzinfo,), {})())], "datetime, .*in UTC"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_is_refused_by_place_and_type(name: str) -> None:
    """BC-53: found at the save, with the place; not at the load, and not as a guess in its stead."""
    tree, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message):
        encode(tree, where="extra", tensors={})


def test_memory_that_was_given_back_is_refused() -> None:
    """A parameter's data at stage 3 has a shape and no memory between steps: reading it would end the process."""
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match=r"extra\['w'\] is a tensor without memory.*stage 3"):
        encode({"w": tensor}, where="extra", tensors={})


def test_cycles_and_depth() -> None:
    """A tree that contains itself would never end; Python's JSON reader ends with a RecursionError at some depth."""
    ring: dict[str, Any] = {"a": [1]}
    ring["a"].append((ring,))
    with pytest.raises(CheckpointError, match=r"extra\['a'\]\[1\]\[0\] contains itself"):
        encode(ring, where="extra", tensors={})
    shared = [1]
    assert through_json([shared, shared]) == [[1], [1]]  # the same twice is no ring

    for wrap in (lambda tree: [tree], lambda tree: (tree,), lambda tree: {0: tree}):
        tree: Any = None
        for _ in range(MAX_DEPTH):
            tree = wrap(tree)
        assert_same(through_json(tree), tree)
        with pytest.raises(CheckpointError, match=rf"lies {MAX_DEPTH} containers deep"):
            encode(wrap(tree), where="extra", tensors={})
    for _ in range(100_000):
        tree = [tree]
    with pytest.raises(CheckpointError, match=r"^extra\[0\].{0,200} \.\.\. .{0,80}containers deep"):
        encode(tree, where="extra", tensors={})
    with pytest.raises(CheckpointError, match="damaged: it lies more than"):
        decode(tree, tensors={}.__getitem__)


def kind(kind_name: Any, /, **fields: Any) -> dict[str, Any]:
    return {"__kind__": kind_name, **fields}


DAMAGED: dict[str, tuple[Any, str]] = {
    "kind of a newer version": ({"a": [kind("table", items=[])]}, r"file\['a'\]\[0\] is of the unknown kind 'table'"),
    "a call": (kind("object", cls="os.system", args=["true"]), "file is of the unknown kind 'object'"),
    "kind that is no text": (kind(["tuple"]), "unknown kind"),
    "missing field": (kind("tuple"), r"a tuple has the fields \['items'\], found \[\]"),
    "field too many": (kind("tuple", items=[], size=1), r"found \['items', 'size'\]"),
    "items that are none": (kind("tuple", items="ab"), "file is damaged: no tuple"),
    "pair of three": ([kind("dict", items=[[1, 2, 3]])], r"file\[0\] is damaged: no dict"),
    "key twice": (kind("dict", items=[[1, 2], [1, 3]]), "a key is there twice"),
    "key without a hash": (kind("dict", items=[[[], 2]]), "no dict"),
    "member without a hash": (kind("set", items=[[1]]), "no set"),
    "size of texts": (kind("size", items=["a"]), "no size"),
    "float": (kind("float", value="7ff8"), "no float"),
    "float as a number": (kind("float", value=1.0), "no float .*a float instead of a str"),
    "int": (kind("int", value="0xg"), "no int"),
    "bytes": (kind("bytes", value="a*=="), "no bytes"),
    "dtype": (kind("dtype", value="torch.nn"), "no dtype"),
    "device": (kind("device", value="moon"), "no device"),
    "number": (kind("scalar", value="object:00"), "no scalar"),
    "factory": (kind("default", items=[], factory="eval"), "no default"),
    "attributes": (kind("namespace", attributes=kind("dict", items=[[1, 2]])), "no namespace"),
    "tensor": ([kind("tensor", name="value.7")], r"file\[0\]: the checkpoint has no tensor 'value.7'"),
    "tensor that is not complex": (kind("tensor", name="value.0", complex=True), "no tensor"),
    "what JSON has not": ([{1}], r"file\[0\] is damaged: a set"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_documents_are_refused_by_name(name: str) -> None:
    """A file from a stranger or a broken disk ends in an error that says where, and runs nothing."""
    document, message = DAMAGED[name]
    with pytest.raises(CheckpointError, match=message):
        decode(document, tensors={"value.0": torch.ones(3)}.__getitem__, where="file")
