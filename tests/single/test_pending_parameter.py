"""A parameter whose new value is on its way: whoever touches the value waits for it, and sees all of it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hybrid.contracts.partition import partition_bucket
from hybrid.sharding import absence
from hybrid.sharding import gather as gather_module
from hybrid.sharding.absence import AbsentParameter
from hybrid.sharding.bucket import Bucket, BucketKey
from hybrid.sharding.gather import ParameterGather

OLD, NEW = 1.0, 2.0


class Arrival:
    """What all_gather returns here: the new values come with `wait`, and not before."""

    def __init__(self, flat: torch.Tensor, log: list[int], tag: int) -> None:
        self._flat, self._log, self._tag = flat, log, tag

    def wait(self) -> None:
        self._log.append(self._tag)
        self._flat.fill_(NEW)


class World:
    """Buckets of one process whose gather is under way; `waited` is the order in which they came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shapes: list[list[tuple[int, ...]]]) -> None:
        self.waited: list[int] = []
        self.parameters = [[nn.Parameter(torch.full(shape, OLD)) for shape in bucket] for bucket in shapes]
        self.buckets = [self._bucket(index, members) for index, members in enumerate(self.parameters)]
        monkeypatch.setattr(gather_module.ops, "all_gather", lambda flat, *, tag, **_: Arrival(flat, self.waited, tag))
        group: Any = SimpleNamespace(size=2)
        self.gather = ParameterGather([group] * len(self.buckets))

    @staticmethod
    def _bucket(index: int, parameters: list[nn.Parameter]) -> Bucket:
        partition = partition_bucket(
            [(f"b{index}.p{place}", p.numel()) for place, p in enumerate(parameters)], num_shards=2, element_bytes=4
        )
        key = BucketKey(dtype=torch.float32, grad_dtype=torch.float32, sync_axes=("dp_shard",))
        return Bucket(
            index=index,
            key=key,
            partition=partition,
            parameters=parameters,
            shard=0,
            counts=True,
            device=torch.device("cpu"),
        )

    def send(self) -> None:
        self.gather.start(self.buckets)
        self.gather.defer()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(monkeypatch, [[(3, 4)]])
    made.send()
    return made


def layer(weight: nn.Parameter) -> nn.Linear:
    module = nn.Linear(4, 3, bias=False)
    module.weight = weight
    return module


def inputs() -> torch.Tensor:
    return torch.ones(2, 4)


def without_grad(function: Callable[[nn.Parameter], Any]) -> Callable[[nn.Parameter], Any]:
    return torch.no_grad()(function)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Tagged(torch.Tensor):
    """A tensor subclass that keeps torch's rules."""


def under_autocast(weight: nn.Parameter) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return nn.functional.linear(inputs(), weight)


def loaded(weight: nn.Parameter) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(weight, buffer)
    buffer.seek(0)
    return torch.load(buffer)


# Each returns something whose elements all follow from the weight's: 1 from old values, 2 from new ones.
READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "F.linear": lambda p: nn.functional.linear(inputs(), p) / 4,
    "its module": lambda p: layer(p)(inputs()) / 4,
    "matmul": lambda p: (inputs() @ p.t()) / 4,
    "keyword argument": lambda p: nn.functional.linear(input=inputs(), weight=p) / 4,
    "F.embedding": lambda p: nn.functional.embedding(torch.tensor([0, 2]), p),
    "functional_call": lambda p: torch.func.functional_call(layer(nn.Parameter(p * 0)), {"weight": p}, inputs()) / 4,
    "checkpoint": lambda p: checkpoint(nn.functional.linear, inputs(), p, use_reentrant=False) / 4,
    "autocast": lambda p: under_autocast(p).float() / 4,
    "autograd function": Scaled.apply,
    "torch.ops": lambda p: torch.ops.aten.mm(inputs(), p.t()) / 4,
    "subclass first": lambda p: torch.ones(3, 4).as_subclass(Tagged) * p,
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "numpy.asarray": lambda p: torch.from_numpy(numpy.asarray(p.detach())),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "item": lambda p: torch.tensor(p[0, 0].item()),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "float": lambda p: torch.tensor(float(p.mean().detach())),
    "index": lambda p: p[1],
    "iterate": lambda p: next(iter(p)),
    "view": lambda p: p.view(-1),
    "transpose": lambda p: p.T,
    "as_strided": lambda p: p.as_strided((2, 2), (1, 1)),
    "clone": lambda p: p.clone(),
    "to": lambda p: p.to(torch.float64),
    "half": lambda p: p.half(),
    "copied from": lambda p: torch.zeros(3, 4).copy_(p),
    "out": without_grad(lambda p: torch.add(p, 0, out=torch.empty(3, 4))),
    "cat": lambda p: torch.cat([torch.full((1, 4), NEW), p]),
    "stack": lambda p: torch.stack((p,)),
    "foreach": lambda p: torch._foreach_add([torch.zeros(3, 4)], [p])[0],
    "foreach first": without_grad(lambda p: torch._foreach_mul([p], 1.0)[0]),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "norm": lambda p: p.norm() / 12**0.5,
    "state_dict": lambda p: layer(p).state_dict()["weight"],
    "state_dict of parameters": lambda p: layer(p).state_dict(keep_vars=True)["weight"] * 1,
    "storage": lambda p: torch.tensor(p.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float32)[:12],
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch.save": loaded,
    "copy": lambda p: copy.copy(p) * 1,
    "deepcopy": lambda p: copy.deepcopy(p) * 1,
    "deepcopy of its module": lambda p: copy.deepcopy(layer(p))(inputs()) / 4,
    "text": lambda p: torch.tensor(float(str(p.data[0, 0].item()))),
    "where": lambda p: torch.where(p > 0, p, p),
    "lerp towards it": lambda p: torch.full((3, 4), 2 * NEW - OLD).lerp(p, 1.0),
    "compiled function": lambda p: torch.compile(nn.functional.linear, backend="eager")(inputs(), p) / 4,
    "compiled module": lambda p: torch.compile(layer(p), backend="eager")(inputs()) / 4,
}


@pytest.mark.parametrize("name", READS)
def test_a_read_sees_the_new_value(world: World, name: str) -> None:
    """Protects against a forward, a log or a file with the weights from before the step."""
    result = READS[name](world.parameters[0][0])
    assert world.waited == [0]
    assert bool((result.detach() == NEW).all()), result


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "copy_": without_grad(lambda p: p.copy_(torch.full((3, 4), 7.0))),
    "fill_": without_grad(lambda p: p.fill_(7.0)),
    "setitem": without_grad(lambda p: p.__setitem__(slice(None), 7.0)),
    "out": without_grad(lambda p: torch.full((3, 4), 7.0, out=p)),
    "foreach": without_grad(lambda p: torch._foreach_copy_([p], [torch.full((3, 4), 7.0)])),
    "init": lambda p: nn.init.constant_(p, 7.0),
    "data": lambda p: p.data.fill_(7.0),
    "load_state_dict": lambda p: layer(p).load_state_dict({"weight": torch.full((3, 4), 7.0)}),
    "vector_to_parameters": lambda p: nn.utils.vector_to_parameters(torch.full((12,), 7.0), [p]),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_not_overwritten_by_what_arrives_later(world: World, name: str) -> None:
    """Protects edits and load_state_dict right after a step: the late arrival must not undo them."""
    (parameter,) = world.parameters[0]
    WRITES[name](parameter)
    assert world.waited == [0]
    world.gather.finish()
    assert parameter.tolist() == [[7.0] * 4] * 3


METADATA: dict[str, Callable[[nn.Parameter], Any]] = {
    "shape": lambda p: p.shape,
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "ndim": lambda p: p.ndim,
    "size": lambda p: p.size(0),
    "dim": lambda p: p.dim(),
    "numel": lambda p: p.numel(),
    "stride": lambda p: p.stride(),
    "element_size": lambda p: p.element_size(),
    "requires_grad": lambda p: p.requires_grad,
    "is_leaf": lambda p: p.is_leaf,
    "grad": lambda p: p.grad,
    "hash": lambda p: p in {p},
    "isinstance": lambda p: isinstance(p, nn.Parameter),
    "in a module": lambda p: [name for name, _ in layer(p).named_parameters()],
    "in an optimizer": lambda p: torch.optim.SGD([p], lr=0.1),
    "zero_grad": lambda p: layer(p).zero_grad(),
    "set grad": lambda p: setattr(p, "grad", None),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_does_not_wait(world: World, name: str) -> None:
    """Protects the overlap: walking over parameters, counting them or clearing gradients costs no wait."""
    METADATA[name](world.parameters[0][0])
    assert world.waited == []
    world.gather.finish()


def test_after_the_wait_it_is_an_ordinary_parameter_again(world: World) -> None:
    """Protects speed and `type(p)`: nothing is left of the pending class once the value is there."""
    (parameter,) = world.parameters[0]
    assert type(parameter) is AbsentParameter
    assert (parameter * 1).tolist() == [[NEW] * 4] * 3
    assert type(parameter) is nn.Parameter
    assert type(parameter * 1) is torch.Tensor
    assert world.waited == [0]
    assert id(parameter) not in absence._keepers


def test_gradients_flow_through_a_parameter_that_was_pending(world: World) -> None:
    """Protects training: the weight's gradient is that of an ordinary parameter."""
    (parameter,) = world.parameters[0]
    nn.functional.linear(inputs(), parameter).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [[2.0] * 4] * 3


def test_a_wait_brings_its_bucket_and_those_sent_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects the order of completion, the same on all ranks, and the overlap of what is needed later."""
    world = World(monkeypatch, [[(2,)], [(3,)], [(4,)]])
    world.send()
    # Sent in forward order, which is the reverse of the launch order of gradients: buckets 2, 1, 0.
    assert (world.parameters[1][0] * 1).tolist() == [NEW] * 3
    assert world.waited == [2, 1]
    assert type(world.parameters[0][0]) is AbsentParameter
    assert type(world.parameters[2][0]) is nn.Parameter
    world.gather.finish()
    assert world.waited == [2, 1, 0]


def test_one_call_that_reads_two_buckets_waits_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects calls over many parameters (foreach, cat, LSTM): none of them may still be old."""
    world = World(monkeypatch, [[(2,), (2,)], [(2,)], [(2,)]])
    world.send()
    flat = [parameter for bucket in world.parameters for parameter in bucket]
    assert torch.cat(flat).tolist() == [NEW] * 8
    assert sorted(world.waited) == [0, 1, 2]


def test_nested_arguments_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects modules that hand lists of weights to one kernel: an LSTM reads all of its weights at once."""
    lstm = nn.LSTM(3, 2, batch_first=True)
    parameters = list(lstm.parameters())
    world = World(monkeypatch, [[(1,)]])
    buckets = [world._bucket(index, [parameter]) for index, parameter in enumerate(parameters)]
    group: Any = SimpleNamespace(size=2)
    world.gather = ParameterGather([group] * len(buckets))
    world.buckets = buckets
    world.send()
    output, _ = lstm(torch.ones(1, 2, 3))
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(NEW)
    assert torch.equal(output, lstm(torch.ones(1, 2, 3))[0])
    assert len(world.waited) == len(parameters)


def test_a_subclass_of_parameter_keeps_its_class_and_is_waited_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects libraries that mark parameters by class: their behaviour stays, and no read is early."""

    class Marked(nn.Parameter):
        pass

    world = World(monkeypatch, [[(2,)], [(2,)], [(2,)]])
    marked = Marked(torch.full((2,), OLD))
    world.buckets[1] = world._bucket(1, [marked])
    group: Any = SimpleNamespace(size=2)
    world.gather = ParameterGather([group] * 3)
    world.send()
    assert world.waited == [2, 1]
    assert type(marked) is Marked
    assert marked.tolist() == [NEW] * 2
    assert type(world.parameters[0][0]) is AbsentParameter
    world.gather.finish()


def test_nothing_is_pending_without_a_group_to_gather_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects one process and stage 0: no message, no wait, no change of class."""
    world = World(monkeypatch, [[(2,)]])
    group: Any = SimpleNamespace(size=1)
    world.gather = ParameterGather([group])
    world.send()
    assert type(world.parameters[0][0]) is nn.Parameter
    assert world.waited == []
