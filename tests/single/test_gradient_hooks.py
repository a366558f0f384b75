"""How gradients get from autograd into the bucket, next to the user's own hooks. One process, no group."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hybrid import gradient_sinks
from hybrid.collectives import ops
from hybrid.contracts.partition import partition_bucket
from hybrid.errors import GradientAccessError, ModelError
from hybrid.sharding import arrivals, gradient_sink
from hybrid.sharding.bucket import Bucket, BucketKey
from hybrid.sharding.gradient_handle import GradientHandle
from hybrid.sharding.reduce import Reducer
from hybrid.weight_gradients import take_over_gradients


def alone() -> ops.Group:
    return ops.Group(process_group=None, ranks=(0,), rank=0, axis="world")


class Hooked:
    """A model of two layers whose gradients go into one bucket of one rank."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        parameters = dict(model.named_parameters())
        key = BucketKey(dtype=torch.float32, grad_dtype=torch.float32, sync_axes=("dp_shard",))
        partition = partition_bucket([(n, p.numel()) for n, p in parameters.items()], num_shards=1, element_bytes=4)
        self.bucket = Bucket(
            index=0,
            key=key,
            partition=partition,
            parameters=list(parameters.values()),
            shard=0,
            counts=True,
            device=torch.device("cpu"),
        )
        self.reducer = Reducer([self.bucket], groups=[(alone(), alone())], overlap=True)

    def gradient(self, fqn: str) -> torch.Tensor:
        """The sum of everything since the start, as the optimizer would see it."""
        self.reducer.reduce_all()
        self.bucket.settle(1.0)
        assert self.bucket.settled is not None
        return self.bucket.view(self.bucket.settled, self.bucket.position_of[fqn])


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def inputs() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3) / 6


@pytest.fixture(autouse=True, params=[8, 1], ids=["each", "together"])
def stretches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each small gradient goes into the bucket by itself, or all of them when the last one is there."""
    monkeypatch.setattr(arrivals, "_STRETCHES", request.param)


@pytest.fixture
def hooked() -> Hooked:
    return Hooked(layers())


@pytest.fixture
def plain() -> nn.Sequential:
    return layers()


def assert_gradients(hooked: Hooked, plain: nn.Module) -> None:
    for name, parameter in plain.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(hooked.gradient(name), wanted, rtol=1e-6, atol=1e-7)


def test_after_backward_every_gradient_is_in_the_bucket_and_a_placeholder_in_its_place(
    hooked: Hooked, plain: nn.Sequential
) -> None:
    """Protects against a gradient that is counted twice (bucket and p.grad) or is in neither."""
    for model in (hooked.model, plain):
        model(inputs()).sum().backward()
    assert all(type(p.grad) is GradientHandle for p in hooked.model.parameters())
    assert_gradients(hooked, plain)


@pytest.mark.parametrize("times", [2, 3])
def test_backwards_add_up(hooked: Hooked, plain: nn.Sequential, times: int) -> None:
    """Protects accumulation: the second backward must not meet the placeholder of the first."""
    for model in (hooked.model, plain):
        for scale in range(1, times + 1):
            (model(inputs()).sum() * scale).backward()
    assert_gradients(hooked, plain)


def test_two_losses_over_one_graph(hooked: Hooked, plain: nn.Sequential) -> None:
    """Protects retain_graph: both passes count."""
    for model in (hooked.model, plain):
        output = model(inputs())
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()
    assert_gradients(hooked, plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_counts_each_gradient_once(hooked: Hooked, plain: nn.Sequential, reentrant: bool) -> None:
    """Protects checkpointed layers, whose hooks fire inside another backward, or several times in it."""
    for model in (hooked.model, plain):
        hidden = inputs().requires_grad_()
        for layer in (model[0], model[1], model[2]):
            hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
        hidden.sum().backward()
    assert_gradients(hooked, plain)


def test_a_layer_used_three_times_sums_its_uses(plain: nn.Sequential) -> None:
    """Protects shared layers: the hook fires once, with the whole sum."""
    model = nn.Linear(3, 3)
    other = nn.Linear(3, 3)
    other.load_state_dict(model.state_dict())
    hooked = Hooked(model)
    for layer in (model, other):
        layer(layer(layer(inputs()))).sum().backward()
    assert_gradients(hooked, other)


@pytest.mark.parametrize("registered", ["before", "after"])
def test_the_users_hooks_change_the_gradient_as_in_plain_torch(registered: str) -> None:
    """Protects masks and scales on single parameters, whoever came first."""
    model, other = layers(), layers()
    for each in (model, other) if registered == "before" else (other,):
        each[0].weight.register_hook(lambda gradient: gradient * 3)
    hooked = Hooked(model)
    if registered == "after":
        model[0].weight.register_hook(lambda gradient: gradient * 3)
    for each in (model, other):
        for _ in range(2):
            each(inputs()).sum().backward()
    assert_gradients(hooked, other)


def test_a_gradient_hook_of_the_user_sees_a_gradient_every_time(hooked: Hooked) -> None:
    """Protects logging of gradient norms by hooks: it reads this rank's new gradient, never the placeholder."""
    norms: list[float] = []
    hooked.model[0].weight.register_hook(lambda gradient: norms.append(gradient.norm().item()))
    for _ in range(3):
        hooked.model(inputs()).sum().backward()
    assert len(norms) == 3
    assert len(set(norms)) == 1
    assert norms[0] > 0


def test_a_post_accumulate_hook_that_reads_the_placeholder_is_told(hooked: Hooked) -> None:
    """Protects against an optimizer inside backward that steps on a gradient which is not there."""

    def step_in_backward(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad)

    hooked.model[2].weight.register_post_accumulate_grad_hook(step_in_backward)
    loss = hooked.model(inputs()).sum()
    with pytest.raises(GradientAccessError, match=r"2\.weight"):
        loss.backward()


def test_autograd_grad_neither_fills_nor_empties_the_bucket(hooked: Hooked, plain: nn.Sequential) -> None:
    """Protects gradient penalties and probes: torch.autograd.grad gives values and leaves p.grad alone."""
    for model in (hooked.model, plain):
        model(inputs()).sum().backward()
        found = torch.autograd.grad(model(inputs()).square().sum(), list(model.parameters()), create_graph=True)
        assert all(type(gradient) is torch.Tensor for gradient in found)
        sum(gradient.square().sum() for gradient in found).backward()
    assert_gradients(hooked, plain)


class Silent(torch.autograd.Function):
    """Uses the weight and returns no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.saved_tensors[0], None


def test_a_hook_that_fires_without_a_gradient_counts_for_nothing() -> None:
    """Protects the count of real gradients: a parameter that got none is left alone by the optimizer."""
    hooked = Hooked(nn.Linear(3, 4))
    x = inputs().requires_grad_()
    Silent.apply(x, hooked.model.weight).sum().backward()
    assert hooked.bucket.has_gradient == [False, False]
    assert isinstance(hooked.model.weight.grad, GradientHandle)  # another rank may have one; the step finds out


def test_gradients_set_to_none_by_hand_are_forgotten(hooked: Hooked, plain: nn.Sequential) -> None:
    """Protects the oldest spelling of zero_grad."""
    for model in (hooked.model, plain):
        (model(inputs()).sum() * 100).backward()
        for parameter in model.parameters():
            parameter.grad = None
        model(inputs()).sum().backward()
    assert_gradients(hooked, plain)


def test_a_gradient_set_by_hand_is_refused_by_name(hooked: Hooked) -> None:
    """Protects against a value that only this rank has and that nobody sums."""
    hooked.model(inputs()).sum().backward()
    hooked.model[0].bias.grad = torch.ones(4)
    with pytest.raises(ModelError, match=r"0\.bias"):
        hooked.reducer.reduce_all()


@pytest.mark.parametrize("when", ["first", "further"])
def test_a_backward_that_raises_leaves_what_it_brought_as_in_plain_torch(
    hooked: Hooked, plain: nn.Sequential, when: str
) -> None:
    """Protects gradients that wait for their neighbours: those never come, and the next backward begins anew."""
    for model in (hooked.model, plain):
        if when == "further":
            model(inputs()).sum().backward()
        hidden = model[1](model[0](inputs()))
        hidden.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model[2](hidden).sum().backward()
        if model is hooked.model:
            hooked.reducer.finish_round()  # as the next forward does
        model(inputs()).sum().backward()
    assert_gradients(hooked, plain)


@pytest.fixture
def sunk(monkeypatch: pytest.MonkeyPatch) -> Hooked:
    """A layer whose backward writes its weight's gradient into the bucket."""
    monkeypatch.setattr(gradient_sink, "_LEAST_ELEMENTS", 1)
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    take_over_gradients(model)
    return Hooked(model)


def raise_between(layer: nn.Module) -> None:
    """A backward that raises when it has come through the second use of a layer, and not through the first."""
    hidden = layer(inputs())
    hidden.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        layer(torch.tanh(hidden)).sum().backward()


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("looks", [False, True])
def test_a_sum_that_a_backward_did_not_finish_counts_for_nothing_or_is_refused(
    sunk: Hooked, earlier: bool, looks: bool
) -> None:
    """Protects weights used twice: plain torch adds up apart from `p.grad`, a layer that writes itself does not."""
    plain = nn.Linear(3, 3)
    plain.load_state_dict(sunk.model.state_dict())
    sunk.reducer.synchronise = not earlier
    for layer in (sunk.model, plain):
        later = layer(layer(inputs())).square().sum()
        if earlier:
            layer(inputs()).sum().backward()
        raise_between(layer)
        if looks and layer is sunk.model:
            sunk.reducer.finish_round()  # as a forward does
        later.backward()
    if not earlier:
        assert_gradients(sunk, plain)
        return
    with pytest.raises(ModelError, match=r"raised between two uses of 'weight'.*zero_grad"):
        sunk.reducer.reduce_all()
    sunk.bucket.drop_all()
    for layer in (sunk.model, plain):
        layer.zero_grad()
        layer(layer(inputs())).sum().backward()
    assert_gradients(sunk, plain)


def test_what_is_dropped_after_a_backward_that_raised_stays_dropped(hooked: Hooked) -> None:
    """Protects `p.grad = None` from a round that the backward left open, which gave it its placeholder again."""
    hidden = hooked.model[1](hooked.model[0](inputs()))
    hidden.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hooked.model[2](hidden).sum().backward()
    hooked.model[2].weight.grad = None
    hooked.reducer.reduce_all()
    found = hooked.bucket.has_gradient
    assert [found[hooked.bucket.position_of[name]] for name in ("2.weight", "2.bias")] == [False, True]
    assert torch.count_nonzero(hooked.gradient("2.weight")) == 0
    assert torch.count_nonzero(hooked.gradient("2.bias")) > 0


def test_a_sink_ends_with_its_reducer_and_a_graph_that_holds_it_goes_autograds_way(sunk: Hooked) -> None:
    """Protects graphs and weights that outlive the model's training, and new weights at the places of old ones."""
    layer = sunk.model
    loss = layer(layer(inputs())).sum()
    assert gradient_sinks.has_sink(layer.weight)
    sunk.reducer.remove_hooks()
    del sunk.reducer
    loss.backward()
    del loss
    gc.collect()
    assert not gradient_sinks.has_sink(layer.weight)
    plain = nn.Linear(3, 3)
    plain.load_state_dict(layer.state_dict())
    plain(plain(inputs())).sum().backward()
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)


def test_one_that_came_without_a_gradient_does_not_keep_its_neighbours(hooked: Hooked) -> None:
    """Protects neighbours of a parameter that a step leaves out: what they have got counts, its range is zero."""
    for scale in (1.0, 2.0):
        (hooked.model[0](inputs()).sum() * scale).backward()
    hooked.reducer.reduce_all()
    assert [hooked.bucket.has_gradient[hooked.bucket.position_of[n]] for n in ("0.weight", "2.weight")] == [True, False]
    hooked.bucket.settle(1.0)
    assert hooked.bucket.settled is not None
    found = hooked.bucket.view(hooked.bucket.settled, hooked.bucket.position_of["0.bias"])
    assert found.tolist() == [6.0] * 4
    assert torch.count_nonzero(hooked.bucket.view(hooked.bucket.settled, hooked.bucket.position_of["2.weight"])) == 0


def test_what_another_looks_at_is_not_taken_from_him(hooked: Hooked) -> None:
    """Protects views of settled gradients that somebody keeps, from memory that goes and comes with the steps."""
    kept = []
    for step in range(3):
        (hooked.model(inputs()).sum() * (step + 1)).backward()
        hooked.reducer.reduce_all()
        hooked.bucket.settle(1.0)
        place = [part.fqn for part in hooked.bucket.slices].index("2.bias")
        views = hooked.bucket.settled_views(are_given_back=True)
        if step == 1:
            kept.append(views[place])
        del views
        hooked.bucket.drop_all()
        for parameter in hooked.model.parameters():
            parameter.grad = None
    assert kept[0].tolist() == [4.0, 4.0]


class OneParameter(nn.Module):
    """A weight that is a bucket without padding, used with another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(32.0).reshape(4, 8))

    def forward(self, other: torch.Tensor) -> torch.Tensor:
        return (self.weight.view(-1) + other).mul(torch.arange(32.0)).sum()


def test_a_gradient_that_nobody_else_sees_becomes_the_buffer() -> None:
    """Protects the saved copy: of a bucket of one parameter, half of the model where embeddings are large."""
    hooked, taken = Hooked(OneParameter()), []
    hooked.reducer.synchronise = False
    node = torch.autograd.graph.get_gradient_edge(hooked.model.weight).node
    node.register_prehook(lambda gradients: taken.append(gradients[0].data_ptr()))
    hooked.model(torch.zeros(32)).backward()
    assert hooked.bucket.local is not None
    assert hooked.bucket.local.data_ptr() == taken[0]
    hooked.model(torch.zeros(32)).backward()
    hooked.reducer.synchronise = True
    assert torch.equal(hooked.gradient("weight"), 2 * torch.arange(32.0).reshape(4, 8))


@pytest.mark.parametrize("who", ["another gradient", "a hook", "the graph"])
def test_a_gradient_that_somebody_else_sees_is_copied(who: str) -> None:
    """Protects what others hold from the sum over ranks, which is made in the buffer."""
    hooked, held = Hooked(OneParameter()), []
    hooked.reducer.synchronise = False
    other = torch.zeros(32, requires_grad=who == "another gradient")
    if who == "a hook":
        hooked.model.weight.register_hook(held.append)
    hooked.model(other).backward(create_graph=who == "the graph")
    if who == "another gradient":
        held.append(other.grad)  # autograd gave both the same memory
    assert hooked.bucket.local is not None
    hooked.bucket.local.fill_(-1)
    assert all(torch.equal(gradient.view(-1), torch.arange(32.0)) for gradient in held)
    assert held or who == "the graph"
