"""What crosses from stage to stage: values that are kept, freed, changed or hidden while they are being sent."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from hybrid.precision.tree import map_tensors
from tests.multi_rank.case_runs import own_part
from tests.pipeline_models import assert_as_plain, own, pipeline_strategy, pipeline_variant, train_plain
from tests.ranks import RankFailure, run_ranks

WIDTH = 64  # so that no message is small enough to travel inside its header, which is a copy


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


class Layer(nn.Module):
    """A linear layer, and a function of it and what comes in."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(self, value)


def chain(*functions: Callable[[Any, Any], Any]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*map(Layer, functions))


def plain_layer(layer: Any, value: Any) -> Any:
    return layer.linear(value)


def in_turn(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        try:
            function()
        except BaseException as error:
            error.add_note(f"in {function.__name__}")
            raise


def as_plain(*functions: Callable[[Any, Any], Any], **settings: Any) -> None:
    assert_as_plain(
        lambda: chain(*functions), [batch(seed) for seed in range(2)], functional.mse_loss,
        make_optimizer=sgd, **settings,
    )  # fmt: skip


# ---- parameters --------------------------------------------------------------------------------------------------


def give_weights(layer: Any, x: torch.Tensor) -> Any:
    return layer.linear(x), layer.linear.weight, layer.linear.bias[None].expand(len(x), WIDTH)


def go_through(layer: Any, value: Any) -> Any:
    return layer.linear(value[0]), *value[1:]


def use_weights(layer: Any, value: Any) -> torch.Tensor:
    return layer.linear(torch.tanh(value[0])) @ value[1] + value[2]


def parameters_cross() -> None:
    is_cut = torch.distributed.get_world_size() > 2
    settings: tuple[dict[str, Any], ...] = ({"stage": 3}, {"stage": 3, "reshard_after": "run"}) if is_cut else ({},)
    for one in settings:
        as_plain(give_weights, use_weights, **one)
        as_plain(give_weights, go_through, go_through, use_weights, split=(2, 2), **one)


def frozen_parameters_cross() -> None:
    def make() -> nn.Module:
        model = chain(give_weights, go_through, go_through, use_weights)
        model[0].linear.requires_grad_(False)
        return model

    assert_as_plain(make, [batch()], functional.mse_loss, split=(2, 2), stage=3, make_optimizer=sgd)


def test_parameters_that_cross_a_boundary() -> None:
    """At stage 3 they were freed while they were under way: inf, or numbers of another layer. In an evaluation a
    view of one was an AssertionError, at stage 3 the end of the process."""
    run_ranks(parameters_cross, 2)
    run_ranks(in_turn, 4, [parameters_cross, frozen_parameters_cross])


def views_without_gradients() -> None:
    inputs, labels = batch()
    for is_frozen in (False, True):
        model: Any = chain(give_weights, go_through, use_weights)
        model[0].linear.requires_grad_(not is_frozen)
        wanted = functional.mse_loss(model(inputs), labels).item()
        strategy = hybrid.DistributedStrategy(sharding=True)
        strategy.sharding_configs = {"stage": 3, "units": ["Layer"]}
        model = hybrid.distributed_model(model, strategy=strategy)
        mine = own_part(inputs), own_part(labels)
        for _ in range(2):
            got = model.eval_batch(mine, loss_fn=functional.mse_loss).loss.item()
            assert abs(got - wanted) < 1e-6, (got, wanted)
        optimizer = hybrid.distributed_optimizer(sgd(model))
        got = model.train_batch(mine, optimizer, loss_fn=functional.mse_loss).loss.item()
        assert abs(got - wanted) < 1e-6, (got, wanted)
        hybrid.shutdown()


def test_a_unit_returns_a_view_of_what_needs_no_gradient() -> None:
    """Stage 3 kept a view's memory only where a gradient was to come: elsewhere the process ended in a crash."""
    run_ranks(views_without_gradients, 2)


# ---- what a layer keeps ------------------------------------------------------------------------------------------


class Counting(Layer):
    """Returns memory that its next call writes to: a buffer, a view of an attribute, what it keeps in a set."""

    def __init__(self, what: str) -> None:
        super().__init__(plain_layer)
        self.what = what
        self.register_buffer("counted", torch.zeros(2000))
        self.attribute = torch.zeros(2000)
        self.kept = {torch.zeros(2000)}

    def forward(self, x: torch.Tensor) -> Any:
        (hidden,) = self.kept
        memory = {"buffer": self.counted, "attribute": self.attribute.view(2, -1), "set": hidden}[self.what]
        memory += 1
        return {"x": self.linear(x), "memory": memory}


def scale(layer: Any, value: Any) -> torch.Tensor:
    return layer.linear(value["x"]) * value["memory"].mean()


def counting_chain(what: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Counting(what), Layer(scale))


def kept_memory_crosses(what: str) -> None:
    inputs, labels = batch()
    plain = counting_chain(what)
    pieces = zip(inputs.split(2), labels.split(2), strict=True)
    wanted = sum(functional.mse_loss(plain(x), y).item() / 4 for x, y in pieces)
    for schedule in ("1f1b", "gpipe"):
        with pipeline_variant(2, schedule=schedule) as strategy:
            model: Any = hybrid.distributed_model(counting_chain(what), strategy=strategy)
            optimizer = hybrid.distributed_optimizer(sgd(model))
            got = model.train_batch((inputs, labels), optimizer, loss_fn=functional.mse_loss).loss.item()
            assert abs(got - wanted) < 1e-5, (schedule, got, wanted)


def test_a_layer_writes_to_what_it_has_returned() -> None:
    """The next micro-batch changed a buffer while the last one's values were being sent."""
    for what in ("buffer", "attribute"):
        run_ranks(kept_memory_crosses, 2, what)
    with pytest.raises(RankFailure) as failure:
        run_ranks(kept_memory_crosses, 2, "set")
    assert "written to while it was being sent to rank 1" in failure.value.error_of(0)


# ---- objects -----------------------------------------------------------------------------------------------------


class Box:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def boxed_values_cross() -> None:
    model: Any = chain(lambda layer, x: Box(layer.linear(x)), lambda layer, box: layer.linear(box.x))
    inputs, labels = batch()
    wanted = functional.mse_loss(model(inputs), labels).item()
    model = hybrid.distributed_model(model, strategy=pipeline_strategy(2))
    optimizer = hybrid.distributed_optimizer(sgd(model))
    assert abs(model.eval_batch((inputs, labels), loss_fn=functional.mse_loss).loss.item() - wanted) < 1e-6
    model.train_batch((inputs, labels), optimizer, loss_fn=functional.mse_loss)


def test_a_tensor_with_a_gradient_inside_an_object() -> None:
    """It arrived as a value, and its gradient was lost without a word; without gradients it may pass."""
    with pytest.raises(RankFailure) as failure:
        run_ranks(boxed_values_cross, 2)
    assert "inside an object of type Box" in failure.value.error_of(0), failure.value
    assert "dataclass" in failure.value.error_of(0)


@dataclasses.dataclass
class Late:
    x: torch.Tensor
    mask: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Solid:
    x: torch.Tensor
    mask: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass(frozen=True)
class ByHand:
    __slots__ = ("mask", "x")
    x: torch.Tensor
    mask: Any


@dataclasses.dataclass
class Prepared:
    x: torch.Tensor
    factor: dataclasses.InitVar[int]

    def __post_init__(self, factor: int) -> None:
        self.mask = torch.full((2,), float(factor))


class Pieces(list[Any]):
    """A list with an attribute."""


class Checked(collections.namedtuple("Checked", ("x", "mask"))):
    """A named tuple whose constructor looks at what it gets."""

    def __new__(cls, x: torch.Tensor, mask: Any) -> Checked:
        assert x.dim() == 2
        return super().__new__(cls, x, mask)


class Both(tuple[Any, ...]):
    def __new__(cls, x: torch.Tensor, mask: Any) -> Both:
        return super().__new__(cls, (x, mask))


class Two(list[Any]):
    def __init__(self, x: torch.Tensor, mask: Any) -> None:
        super().__init__((x, mask))


def test_every_field_of_a_dataclass_stays() -> None:
    """Fields that the constructor does not take were dropped by every cast and every boundary."""
    ones = torch.ones(2)
    late, solid = Late(ones), Solid(ones)
    late.mask = [ones]
    object.__setattr__(solid, "mask", [ones])
    for value in (late, solid, ByHand(ones, [ones])):
        mapped = map_tensors(value, lambda tensor: tensor + 1)
        assert torch.equal(mapped.x, ones + 1), value
        assert torch.equal(mapped.mask[0], ones + 1), value
        assert torch.equal(value.x, ones), "the original is as it was"
    assert torch.equal(map_tensors(Prepared(ones, 3), lambda tensor: tensor + 1).mask, torch.full((2,), 3.0))
    pieces = Pieces([ones])
    pieces.name = "a name"
    assert map_tensors(pieces, lambda tensor: tensor + 1).name == "a name"


def dataclasses_cross() -> None:
    def make_late(layer: Any, x: torch.Tensor) -> Late:
        value = Late(layer.linear(x))
        value.mask = (x > 0).float()
        return value

    as_plain(make_late, lambda layer, value: layer.linear(value.x) * value.mask)


def containers_of_ones_own_cross() -> None:
    for kind in (Checked, Both, Two, collections.UserDict, MappingProxyType):

        def make(layer: Any, x: torch.Tensor, kind: Any = kind) -> Any:
            parts = {"x": layer.linear(x), "mask": (x > 0).float()}
            return kind(parts) if kind is MappingProxyType else kind(**parts)

        def use(layer: Any, value: Any, kind: Any = kind) -> torch.Tensor:
            assert type(value) is kind
            x, mask = value.values() if isinstance(value, Mapping) else value
            return layer.linear(x) * mask

        as_plain(make, use)


def test_containers_with_constructors_of_their_own() -> None:
    """The receiving rank called the constructor with what stands for the tensors: an AttributeError in mid-step. One
    that pickle does not know was refused in mid-step."""
    run_ranks(containers_of_ones_own_cross, 2)


# ---- other tensors -----------------------------------------------------------------------------------------------


class Marked(torch.Tensor):
    """A class of its own, whose operations may mean something else."""


def odd_values_cross() -> None:
    def rows(layer: Any, x: torch.Tensor) -> Any:
        return layer.linear(x), layer.linear(x * 2), torch.complex(x, x).conj()

    def look_up(layer: Any, value: Any, *, sparse: bool = False) -> torch.Tensor:
        places = torch.arange(len(value[1]))  # with `sparse` the gradient of the table is
        return layer.linear(value[0]) * functional.embedding(places, value[1], sparse=sparse) + value[2].imag

    as_plain(rows, look_up)
    plain = chain(rows, look_up)
    _, (wanted,), _ = train_plain(plain, [batch()], functional.mse_loss, sgd)
    with pipeline_variant(2) as strategy:
        sparse = chain(rows, functools.partial(look_up, sparse=True))
        model: Any = hybrid.distributed_model(sparse, strategy=strategy)
        optimizer = hybrid.distributed_optimizer(sgd(model))
        norm = model.train_batch(batch(), optimizer, loss_fn=functional.mse_loss).grad_norm.item()
        assert abs(norm - wanted) < 1e-5, (norm, wanted)


def refused_values(kind: str) -> None:
    odd = {"sparse": lambda x: x.to_sparse(), "Marked": lambda x: x.as_subclass(Marked)}[kind]
    model: Any = chain(lambda layer, x: (layer.linear(x), odd(x)), lambda layer, value: layer.linear(value[0]))
    model = hybrid.distributed_model(model, strategy=pipeline_strategy(2))
    model.eval_batch(batch(), loss_fn=functional.mse_loss)


def test_dataclasses_and_unusual_tensors_cross_whole() -> None:
    """A field was dropped; lazily conjugated numbers and sparse gradients cannot be sent as they lie."""
    run_ranks(in_turn, 2, [dataclasses_cross, odd_values_cross])


@pytest.mark.parametrize("kind", ["sparse", "Marked"])
def test_tensors_that_are_more_than_their_elements(kind: str) -> None:
    """Sparse ones ended in an error of torch, others arrived as plain ones."""
    with pytest.raises(RankFailure) as failure:
        run_ranks(refused_values, 2, kind)
    assert f"layer '0' returns a {'tensor with layout torch.sparse' if kind == 'sparse' else kind}" in (
        failure.value.error_of(0)
    )


# ---- hooks on the model ------------------------------------------------------------------------------------------


def hooked_chain(kind: str) -> nn.Sequential:
    model = chain(plain_layer, plain_layer, plain_layer, plain_layer)
    if kind == "before":
        model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    elif kind == "after":
        model.register_forward_hook(lambda module, args, kwargs, output: output * 2, with_kwargs=True)
    return model


def hooks_run_once() -> None:
    for kind in ("before", "after"):
        for schedule in ("1f1b", "interleaved"):
            assert_as_plain(
                lambda kind=kind: hooked_chain(kind), [batch()], functional.mse_loss,
                schedule=schedule, make_optimizer=sgd,
            )  # fmt: skip
    calls = []
    with pipeline_variant(2) as strategy:
        model: Any = hybrid.distributed_model(hooked_chain("none"), strategy=strategy)
        handle = model.register_forward_hook(lambda module, args, output: calls.append(tuple(output.shape)))
        model.eval_batch(own(batch()), loss_fn=functional.mse_loss)
        assert calls == ([(2, WIDTH)] * 4 if torch.distributed.get_rank() == 1 else [])
        handle.remove()
        model.eval_batch(own(batch()), loss_fn=functional.mse_loss)
        assert len(calls) in {0, 4}


def hook_reads_inputs() -> None:
    model: Any = hooked_chain("none")
    model.register_forward_hook(lambda module, args, output: output + args[0])
    model = hybrid.distributed_model(model, strategy=pipeline_strategy(2))
    model.eval_batch(batch(), loss_fn=functional.mse_loss)


def test_hooks_of_the_whole_model_run_once() -> None:
    """They ran for every chunk: an output was doubled on each stage."""
    run_ranks(hooks_run_once, 2)
    with pytest.raises(RankFailure) as failure:
        run_ranks(hook_reads_inputs, 2)
    assert "reads its inputs" in failure.value.error_of(1)


def test_backward_hooks_of_the_whole_model_are_refused() -> None:
    """No rank has what such a hook is given."""
    model = hooked_chain("none")
    model.register_full_backward_hook(lambda module, given, received: None)
    with pytest.raises(hybrid.ModelError, match="backward hook on the whole model"):
        pipeline_strategy(2).explain(model, 2)
