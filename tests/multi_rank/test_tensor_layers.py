"""Parallel layers against the plain ones: outputs, gradients, initial values, what they send, what they refuse."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from hybrid.collectives import autograd
from hybrid.collectives.deferred import deferred_backend
from hybrid.collectives.group import Group
from hybrid.contracts.placement import even_cut, fused_cut
from hybrid.errors import BatchError, ModelError
from hybrid.recompute import install_recompute
from hybrid.tensor import (
    ColumnParallelEmbedding,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from hybrid.tensor.entry import Entry
from hybrid.tensor.region import CutRegion
from tests.multi_rank.tensor_worlds import (
    Conv1D,
    assert_gradients_match,
    assert_same,
    copy_weights,
    counted,
    tp_group,
    whole_gradient,
)
from tests.ranks import run_ranks

HIDDEN, INNER, BATCH, SEQUENCE = 12, 24, 3, 8


class Mlp(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = up, down, nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(functional.gelu(self.up(x))))


def plain_mlp(bias: bool = True) -> Mlp:
    torch.manual_seed(0)
    return Mlp(nn.Linear(HIDDEN, INNER, bias), nn.Linear(INNER, HIDDEN, bias))


def cut_mlp(group: Group, *, bias: bool = True, sequence_dim: int | None = None, dropout: float = 0.0) -> Mlp:
    torch.manual_seed(0)
    up = ColumnParallelLinear(HIDDEN, INNER, bias, group=group, sequence_dim=sequence_dim)
    return Mlp(up, RowParallelLinear(INNER, HIDDEN, bias, group=group, sequence_dim=sequence_dim), dropout)


def inputs(seed: int = 1, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (BATCH, SEQUENCE, HIDDEN)), generator=generator)


def own_part(tensor: torch.Tensor, dim: int | None, group: Group) -> torch.Tensor:
    return tensor.detach().clone() if dim is None else tensor.detach().chunk(group.size, dim)[group.rank].clone()


def run_both(
    cut: nn.Module, plain: nn.Module, group: Group, what: str, *, dim: int | None = None, tolerance: float = 1e-5
) -> None:
    """One forward and backward through both; everything must agree."""
    x, weights = inputs(1), inputs(2)
    theirs = x.clone().requires_grad_()
    wanted = plain(theirs)
    (wanted * weights).sum().backward()
    ours = own_part(x, dim, group).requires_grad_()
    found = cut(ours)
    (found * own_part(weights, dim, group)).sum().backward()
    assert_same(found, own_part(wanted, dim, group), f"{what}: output", tolerance)
    assert_same(ours.grad, own_part(theirs.grad, dim, group), f"{what}: gradient of the input", tolerance)
    assert_gradients_match(cut, plain, group, what, tolerance=tolerance)


# -- linear layers -----------------------------------------------------------------------------------------------


def check_pairs() -> None:
    group = tp_group()
    for bias, dim in itertools.product((True, False), (None, 0, 1, -2)):
        if dim == 0:
            continue  # a batch of 3 is not divisible
        run_both(cut_mlp(group, bias=bias, sequence_dim=dim), plain_mlp(bias), group, f"bias {bias} dim {dim}", dim=dim)
    with deferred_backend():
        for dim in (None, 1):
            run_both(cut_mlp(group, sequence_dim=dim), plain_mlp(), group, f"deferred, dim {dim}", dim=dim)
    check_conv1d(group)
    check_frozen(group)
    check_gathered_and_fused(group)
    check_whole_input(group)
    check_empty_batch(group)


def check_conv1d(group: Group) -> None:
    for dim in (None, 1):
        torch.manual_seed(0)
        plain = Mlp(Conv1D(INNER, HIDDEN), Conv1D(HIDDEN, INNER))
        cut = copy.deepcopy(plain)
        weight = cut.up.weight
        up_cut = even_cut(1, INNER, rank=group.rank, degree=group.size)
        ColumnParallelLinear.adopt(cut.up, group=group, cut=up_cut, entry=Entry(group, sequence_dim=dim))
        down_cut = even_cut(0, INNER, rank=group.rank, degree=group.size)
        RowParallelLinear.adopt(cut.down, group=group, cut=down_cut, sequence_dim=dim)
        copy_weights(cut, plain)
        assert cut.up.weight is weight
        assert isinstance(cut.up, Conv1D)
        run_both(cut, plain, group, f"Conv1D, dim {dim}", dim=dim)


def check_frozen(group: Group) -> None:
    """Only what needs a gradient gets one, with the same collectives."""
    for frozen in ("up.weight", "up.bias", "down.weight"):
        plain, cut = plain_mlp(), cut_mlp(group)
        for model in (plain, cut):
            model.get_parameter(frozen).requires_grad_(False)
        x, theirs = inputs().requires_grad_(), inputs().requires_grad_()
        with counted() as calls:
            cut(x).square().sum().backward()
        plain(theirs).square().sum().backward()
        assert calls == ["all_reduce"] * 2, (frozen, calls)
        assert_same(x.grad, theirs.grad, f"{frozen} frozen")
        assert cut.get_parameter(frozen).grad is None
    cut = cut_mlp(group)
    with counted() as calls:
        cut(inputs()).sum().backward()
    assert calls == ["all_reduce"], "an input without a gradient sends none"


def check_gathered_and_fused(group: Group) -> None:
    parts: dict[str, tuple[Any, int]] = {
        "plain": (None, 24),
        "three": (3, 24),
        "heads": ([(4, 2), (4, 3)], 20),
        # One head each of keys and values, on every rank.
        "copied": ([(1, 6), (1, 6)], 12),
    }
    for name, (fused, width) in parts.items():
        torch.manual_seed(3)
        plain = nn.Linear(HIDDEN, width)
        for gather in (True, False):
            torch.manual_seed(3)
            cut = ColumnParallelLinear(HIDDEN, width, group=group, fused=fused, gather_output=gather)
            x, theirs, weights = inputs().requires_grad_(), inputs().requires_grad_(), inputs(4, BATCH, SEQUENCE, width)
            wanted = plain(theirs)
            plain.zero_grad()
            (wanted * weights).sum().backward()
            pieces = cut.tensor_parallel.cuts["weight"].pieces
            own = torch.cat([torch.arange(start, start + length) for start, length in pieces])
            found = cut(x)
            assert_same(found, wanted if gather else wanted[..., own], f"{name}, gather {gather}: output")
            if gather:
                (found * weights).sum().backward()
            else:
                copies = cut.tensor_parallel.cuts["weight"].copies
                (found * weights[..., own] / copies).sum().backward()
            assert_same(x.grad, theirs.grad, f"{name}, gather {gather}: input")
            assert_gradients_match(cut, plain, group, f"{name}, gather {gather}")


def check_empty_batch(group: Group) -> None:
    for dim in (None, 1):
        cut, x = cut_mlp(group, sequence_dim=dim), torch.empty(0, 2 * group.size, HIDDEN, requires_grad=True)
        cut(x).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert not cut.up.weight.grad.any()


def check_whole_input(group: Group) -> None:
    torch.manual_seed(5)
    plain = nn.Linear(HIDDEN, HIDDEN)
    torch.manual_seed(5)
    run_both(RowParallelLinear(HIDDEN, HIDDEN, group=group, input_is_parallel=False), plain, group, "whole input")


@pytest.mark.parametrize("world_size", [2, 4])
def test_linear_layers_are_the_plain_ones(world_size: int) -> None:
    """Protects values and gradients of every way to cut a linear layer, and of what is kept frozen."""
    run_ranks(check_pairs, world_size)


# -- embeddings --------------------------------------------------------------------------------------------------


def check_embeddings() -> None:
    group = tp_group()
    for vocab_size, padding, dim in ((11, None, None), (11, 4, None), (11, 0, 1), (11, 10, None), (3, 1, 1)):
        torch.manual_seed(0)
        plain = nn.Embedding(vocab_size, HIDDEN, padding)
        torch.manual_seed(0)
        cut = VocabParallelEmbedding(vocab_size, HIDDEN, padding, group=group, sequence_dim=dim)
        ids = torch.randint(0, vocab_size, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
        weights = inputs(2)
        wanted = plain(ids)
        (wanted * weights).sum().backward()
        found = cut(ids)
        (found * own_part(weights, dim, group)).sum().backward()
        what = f"vocabulary {vocab_size}, padding {padding}, dim {dim}"
        assert torch.equal(found, own_part(wanted, dim, group)), what
        assert_gradients_match(cut, plain, group, what)
    for wrong in (-1, 11):
        with pytest.raises(IndexError, match=rf"id {wrong} .*0 to 10"):
            VocabParallelEmbedding(11, 4, group=group)(torch.tensor([0, wrong]))
    torch.manual_seed(0)
    plain = nn.Embedding(5, 8)
    torch.manual_seed(0)
    columns = ColumnParallelEmbedding(5, 8, group=group)
    ids = torch.tensor([[0, 3], [4, 4]])
    plain(ids).square().sum().backward()
    with counted() as calls:
        found = columns(ids)
        found.square().sum().backward()
    assert not calls
    assert torch.equal(found, plain(ids).chunk(group.size, -1)[group.rank])
    assert_gradients_match(columns, plain, group, "columns")


@pytest.mark.parametrize("world_size", [2, 4])
def test_embeddings_are_the_plain_ones(world_size: int) -> None:
    """Protects uneven vocabularies, padding rows that lie on any rank, ranks without rows, wrong ids."""
    run_ranks(check_embeddings, world_size)


# -- entries, recompute, precision -------------------------------------------------------------------------------


class Attention(nn.Module):
    """Projections of one input by three layers, as models write them."""

    def __init__(self, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.head = HIDDEN // 4
        self.q = nn.Linear(HIDDEN, heads * self.head)
        self.k = nn.Linear(HIDDEN, kv_heads * self.head)
        self.v = nn.Linear(HIDDEN, kv_heads * self.head)
        self.o = nn.Linear(heads * self.head, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


def adopt_attention(plain: Attention, group: Group, *, dim: int | None, region: CutRegion | None = None) -> Attention:
    cut = copy.deepcopy(plain)
    entry = Entry(group, sequence_dim=dim)
    place = {"rank": group.rank, "degree": group.size}
    for layer in (cut.q, cut.k, cut.v):
        heads = layer.out_features // cut.head
        ColumnParallelLinear.adopt(
            layer, group=group, cut=fused_cut(0, [(heads, cut.head)], **place), entry=entry, region=region
        )
    RowParallelLinear.adopt(
        cut.o, group=group, cut=even_cut(1, cut.o.in_features, **place), sequence_dim=dim, region=region
    )
    cut.register_forward_hook(lambda *_: entry.clear(), always_call=True)
    copy_weights(cut, plain)
    return cut


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


def check_entries() -> None:
    group = tp_group()
    torch.manual_seed(0)
    plain = Block(Attention(), plain_mlp())
    for dim, autocast, policy in itertools.product((None, 1), (False, True), (None, "full", "selective")):
        cut = Block(adopt_attention(plain.attention, group, dim=dim), cut_mlp(group, sequence_dim=dim))
        reference = copy.deepcopy(plain)
        if policy is not None:
            install_recompute(cut, [""], policy=policy, preserve_rng=True)
        what = f"dim {dim}, autocast {autocast}, recompute {policy}"
        with counted() as calls, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            x = own_part(inputs(), dim, group).requires_grad_()
            found = cut(x)
        with counted() as backward_calls:
            found.float().square().mean().backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            theirs = inputs().requires_grad_()
            wanted = reference(theirs)
        wanted.float().square().mean().backward()
        scale = 1 if dim is None else group.size  # the mean over a part of the sequence
        tolerance = 3e-2 if autocast else 1e-5
        assert found.dtype == wanted.dtype
        assert_same(found, own_part(wanted, dim, group), f"{what}: output", tolerance)
        assert_same(x.grad, own_part(theirs.grad, dim, group) * scale, f"{what}: input", tolerance)
        for name in ("attention.q", "attention.k", "attention.o", "mlp.up", "mlp.down"):
            module = cut.get_submodule(name)
            gradient = whole_gradient(module.weight.grad, module.tensor_parallel.cuts["weight"], group)
            assert_same(gradient / scale, reference.get_submodule(name).weight.grad, f"{what}: {name}", tolerance)
        expected = ["all_reduce"] * 2 if dim is None else ["all_gather", "reduce_scatter"] * 2
        assert calls == expected, (what, calls)
        if policy is None:
            expected = ["all_reduce"] * 2 if dim is None else ["all_gather", "reduce_scatter"] * 2
            assert sorted(backward_calls) == sorted(expected), (what, backward_calls)
        assert not cut.attention.q.tensor_parallel_entry._kept
    check_shared_memory(group)


def check_shared_memory(group: Group) -> None:
    """An entry gives a result once per input, and never an old one."""
    entry = Entry(group, sequence_dim=1)
    entry.num_consumers = 3
    x, other = inputs().requires_grad_(), inputs(2).requires_grad_()
    with counted() as calls:
        first = entry(x)
        assert entry(x) is first
        assert entry(other) is not first
        assert not entry._kept  # the third call was the last consumer's
        first = entry(x)
        with torch.no_grad():
            assert entry(x) is not first
        entry.clear()
        first = entry(x)
        with torch.no_grad():
            x.add_(1.0)
        second = entry(x)
        entry.clear()
    assert calls == ["all_gather"] * 6
    assert_same(second, first + 1.0, "after a write")


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_collective_each_way_and_recompute_and_autocast(world_size: int) -> None:
    """Protects the count of collectives, shared entries, few kv heads, recompute and low precision at once."""
    run_ranks(check_entries, world_size)


def check_second_derivatives() -> None:
    group = tp_group()
    torch.manual_seed(0)
    attention = Attention()
    plain = Block(attention, plain_mlp())
    cut = Block(adopt_attention(attention, group, dim=None), cut_mlp(group))
    for model in (plain, cut):
        x = inputs().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):  # torch's fused attention has no second derivative
            (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            gradient.square().sum().backward()
        model.result = x.grad  # type: ignore[assignment]
    assert_same(cut.result, plain.result, "penalty: input", 1e-4)
    for name in ("attention.q", "attention.k", "mlp.up", "mlp.down"):
        module = cut.get_submodule(name)
        gradient = whole_gradient(module.weight.grad, module.tensor_parallel.cuts["weight"], group)
        assert_same(gradient, plain.get_submodule(name).weight.grad, f"penalty: {name}", 1e-4)
    x = own_part(inputs(), 1, group).requires_grad_()
    with pytest.raises(ModelError, match="no second derivative"):
        torch.autograd.grad(cut_mlp(group, sequence_dim=1)(x).sum(), x, create_graph=True)


def test_gradient_penalties_are_the_plain_ones() -> None:
    """Protects gradients of gradients: a backward without a right derivative of its own would be silent."""
    run_ranks(check_second_derivatives, 2)


# -- dropout -----------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Dropout on activations that all ranks hold, on cut ones, and on whole ones again."""

    def __init__(self, group: Group, dim: int | None = None) -> None:
        super().__init__()
        self.mlp = cut_mlp(group, sequence_dim=dim, dropout=0.5)
        self.before, self.after = nn.Dropout(0.5), nn.Dropout(0.5)
        self.masks: list[list[torch.Tensor]] = []
        for dropout in (self.before, self.mlp.dropout, self.after):
            dropout.register_forward_hook(self.note)

    def note(self, _: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.masks[-1].append(output.detach() == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.masks.append([])
        return self.after(self.mlp(self.before(x)))


def check_dropout() -> None:
    group = tp_group()
    for policy in (None, "full", "selective"):
        model = Dropping(group)
        if policy is not None:
            install_recompute(model, [""], policy=policy, preserve_rng=True)
        torch.manual_seed(7)
        outputs = [model(inputs().requires_grad_()) for _ in range(2)]
        state = torch.get_rng_state()
        for output in outputs:
            output.sum().backward()
        assert torch.equal(torch.get_rng_state(), state), "backward leaves the common stream alone"
        everyone = autograd.ops.all_gather_object((model.masks[:2], state), group=group)
        assert all(torch.equal(theirs, state) for _, theirs in everyone), "the common stream is common"
        for call in range(2):
            before, inside, after = zip(*(masks[call] for masks, _ in everyone), strict=True)
            for masks in (before, after):
                assert all(torch.equal(mask, masks[0]) for mask in masks)
            assert not torch.equal(inside[0], inside[1]), "cut activations have masks of their own"
            assert not any(torch.equal(mask, everyone[0][0][1 - call][1]) for mask in inside), "and anew in every call"
        if policy is not None:
            # Recompute stops after the closing layer's input: the last mask may not be drawn again.
            for first, again in zip(model.masks[:2], model.masks[2:], strict=True):
                assert all(torch.equal(one, other) for one, other in zip(first, again, strict=False))
                assert len(again) >= 2
        model.eval()
        model(inputs())
        assert torch.equal(torch.get_rng_state(), state), "nothing is drawn in evaluation"
    check_regions(group)


def check_regions(group: Group) -> None:
    region, device = CutRegion(group), torch.device("cpu")
    torch.manual_seed(1)
    region.enter(device)
    own = torch.get_rng_state()
    region.enter(device)
    assert torch.equal(torch.get_rng_state(), own), "entering twice is entering once"
    region.reset()  # a call that failed inside
    after = torch.get_rng_state()
    region.leave()
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(1)
    region.enter(device)
    assert torch.equal(torch.get_rng_state(), own), "the same draw, the same stream"
    torch.set_rng_state(after)  # as recompute does when it ends early
    torch.rand(3)
    now = torch.get_rng_state()
    region.leave()
    assert torch.equal(torch.get_rng_state(), now), "an old state is not brought back"
    CutRegion(group, active=False).enter(device)
    assert torch.equal(torch.get_rng_state(), now)
    # Under sequence parallel everything between the first and the last gather is cut.
    model = Dropping(group, dim=1)
    torch.manual_seed(3)
    model(own_part(inputs(), 1, group))
    model(own_part(inputs(), 1, group))
    masks = autograd.ops.all_gather_object(model.masks, group=group)
    assert all(not torch.equal(masks[0][call][at], masks[1][call][at]) for call in (0, 1) for at in (1, 2))
    # A unit that starts inside the region is recomputed from the region's own stream.
    install_recompute(model, [""], policy="full", preserve_rng=True)
    del model.masks[:]
    own = own_part(inputs(), 1, group).requires_grad_()
    output = model(model(own))
    model.mlp.down.tensor_parallel_region.reset()  # the end of the model's forward
    output.sum().backward()
    for first, again in ((0, 3), (1, 2)):
        assert all(torch.equal(a, b) for a, b in zip(model.masks[first], model.masks[again], strict=False))
        assert len(model.masks[again]) >= 2


def test_dropout_masks() -> None:
    """Protects: same masks on what all ranks hold, others on cut activations, and the same again in recompute."""
    run_ranks(check_dropout, 2)


# -- building and refusing ---------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    """A user's class that computes around super().forward, and initialises in its own way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.weight.div_(self.weight.shape[0])


class Replaced(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight) * 2


def check_building() -> None:
    group = tp_group()
    cut = even_cut(0, 8, rank=group.rank, degree=group.size)
    # reset_parameters draws the whole again; also for a layer that was built without values.
    torch.manual_seed(0)
    plain = nn.Linear(6, 8)
    layer = ColumnParallelLinear(6, 8, group=group, device="meta").to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    assert torch.equal(layer.weight, plain.weight.chunk(group.size)[group.rank])
    assert torch.equal(layer.bias, plain.bias.chunk(group.size)[group.rank])
    torch.manual_seed(0)
    doubled = Doubled(6, 8)
    adopted = Doubled(6, 8)
    ColumnParallelLinear.adopt(adopted, group=group, cut=cut, entry=Entry(group))
    copy_weights(adopted, doubled)
    assert isinstance(adopted, Doubled)
    assert isinstance(adopted, ColumnParallelLinear)
    x = inputs(1, 2, 6)
    assert_same(adopted(x), doubled(x).chunk(group.size, -1)[group.rank], "a user's class")
    torch.manual_seed(4)
    doubled.reset_parameters()
    torch.manual_seed(4)
    adopted.reset_parameters()
    assert torch.equal(adopted.weight, doubled.weight.chunk(group.size)[group.rank])
    assert f"tp rank {group.rank} of {group.size}" in repr(adopted)
    twin = copy.deepcopy(adopted)
    assert torch.equal(twin(x), adopted(x))
    assert twin.tensor_parallel_entry is not adopted.tensor_parallel_entry
    wrong: list[tuple[str, Any]] = [
        ("out_features = 7 .* tp = 2 ranks; 6 and 8 can", lambda: ColumnParallelLinear(6, 7, group=group)),
        ("in_features = 1 .* tp = 2 ranks; 2 can", lambda: RowParallelLinear(1, 6, group=group)),
        ("out_features = 8 is not 3 equal parts", lambda: ColumnParallelLinear(6, 8, group=group, fused=3)),
        ("8, but the parts .* are 6", lambda: ColumnParallelLinear(6, 8, group=group, fused=[(2, 3)])),
        ("3 heads", lambda: ColumnParallelLinear(6, 9, group=group, fused=[(3, 3)])),
        (
            "takes a whole input",
            lambda: RowParallelLinear(6, 6, group=group, input_is_parallel=False, sequence_dim=1),
        ),
        ("no tp group", lambda: ColumnParallelLinear(6, 8)),
        (
            "Replaced.forward replaces Linear.forward",
            lambda: ColumnParallelLinear.adopt(Replaced(6, 8), group=group, cut=cut, entry=Entry(group)),
        ),
        (
            "neither an nn.Linear nor a Conv1D",
            lambda: ColumnParallelLinear.adopt(nn.Conv1d(2, 2, 1), group=group, cut=cut, entry=Entry(group)),
        ),
        (
            "tensor parallel already",
            lambda: ColumnParallelLinear.adopt(adopted, group=group, cut=cut, entry=Entry(group)),
        ),
        (
            "not a parameter of its own",
            lambda: ColumnParallelLinear.adopt(
                nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), group=group, cut=cut, entry=Entry(group)
            ),
        ),
        (
            "cut along dim 1, not 0",
            lambda: RowParallelLinear.adopt(nn.Linear(8, 6), group=group, cut=cut),
        ),
        (
            "max_norm and sparse cannot be cut",
            lambda: VocabParallelEmbedding.adopt(nn.Embedding(8, 3, max_norm=1.0, sparse=True), group=group, cut=cut),
        ),
        (
            "not an nn.Linear",
            lambda: VocabParallelHead.adopt(nn.Embedding(8, 3), group=group, cut=cut, entry=Entry(group)),
        ),
    ]
    for text, build in wrong:
        with pytest.raises(ModelError, match=text):
            build()
    layer = RowParallelLinear(8, 4, group=group, sequence_dim=1)
    with pytest.raises(BatchError, match=r"sequence of 7 \(dim 1\).*tp = 2 ranks; pad or cut it to 6 or 8"):
        layer(torch.randn(2, 7, 4))


def test_building_and_refusals() -> None:
    """Protects initial values, user's classes, copies, and one clear sentence for each misuse."""
    run_ranks(check_building, 2)
