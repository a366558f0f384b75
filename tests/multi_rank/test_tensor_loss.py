"""Losses over a vocabulary that is cut, and logits that look whole, against the plain ones."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hybrid.collectives.deferred import deferred_backend
from hybrid.collectives.group import Group
from hybrid.collectives.trace import trace
from hybrid.contracts.placement import even_cut
from hybrid.errors import ModelError
from hybrid.tensor import (
    ParallelCrossEntropy,
    VocabParallelEmbedding,
    VocabParallelHead,
    VocabParallelLogits,
    cross_entropy,
)
from hybrid.tensor import loss as loss_module
from tests.multi_rank.tensor_worlds import assert_gradients_match, assert_same, counted, tp_group, whole_gradient
from tests.ranks import run_ranks

IGNORED = -100


def own_columns(group: Group, vocab_size: int) -> slice:
    ((start, length),) = even_cut(0, vocab_size, rank=group.rank, degree=group.size).pieces
    return slice(start, start + length)


def some_logits(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def some_targets(vocab_size: int, *shape: int) -> torch.Tensor:
    target = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(2))
    target.view(-1)[::4] = IGNORED
    return target


# -- the loss ----------------------------------------------------------------------------------------------------


def check_losses() -> None:
    group = tp_group()
    loss_module._BLOCK_ELEMENTS["cpu"] = 12  # several blocks, the last one shorter
    targets = {
        "mixed": some_targets(11, 7),
        "none valid": torch.full((7,), IGNORED),
        # All in the first rank's part: the others own none.
        "one rank": torch.tensor([0, 1, 0, IGNORED, 1, 1, 0]),
        "last": torch.full((7,), 10),
    }
    cases = itertools.product(targets, ("mean", "sum", "none"), (0.0, 0.1), (torch.float32, torch.float64))
    for name, reduction, smoothing, dtype in cases:
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        plain = some_logits(7, 11, dtype=dtype).requires_grad_()
        wanted = functional.cross_entropy(plain, targets[name], **options)
        local = plain.detach()[:, own_columns(group, 11)].clone().requires_grad_()
        found = cross_entropy(local, targets[name], group=group, vocab_size=11, **options)
        what = f"{name}, {options}, {dtype}"
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6, equal_nan=True, msg=lambda text: what + text)  # noqa: B023
        wanted.sum().backward(retain_graph=True)
        found.sum().backward(retain_graph=True)
        found.sum().backward()  # a graph that is kept gives the same again
        assert local.grad is not None
        assert_same(local.grad / 2, plain.grad[:, own_columns(group, 11)], f"{what}: gradient", 1e-6)
    check_low_precision(group)
    check_masked_logits(group)
    check_traffic_and_memory(group)
    check_wrong_use(group)
    check_second_derivative(group)


def check_low_precision(group: Group) -> None:
    target = some_targets(50, 2, 9)
    plain = some_logits(2, 9, 50, dtype=torch.bfloat16).requires_grad_()
    local = plain.detach()[..., own_columns(group, 50)].clone().requires_grad_()
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            wanted = functional.cross_entropy(plain.view(-1, 50), target.view(-1))
            found = cross_entropy(local, target, group=group, vocab_size=50)
        assert found.dtype == wanted.dtype, autocast
        exact = functional.cross_entropy(plain.float().view(-1, 50), target.view(-1))
        assert_same(found.float(), exact, "bfloat16", 1e-6 if autocast else 4e-3)
    (gradient,) = torch.autograd.grad(found, local)
    (exact_gradient,) = torch.autograd.grad(exact, plain)
    assert gradient.dtype == torch.bfloat16
    assert_same(gradient, exact_gradient[..., own_columns(group, 50)], "bfloat16 gradient", 4e-3)


def check_masked_logits(group: Group) -> None:
    """All of one rank's logits may be -inf."""
    target = torch.tensor([9, 10, 10])
    plain = some_logits(3, 11)
    plain[:, :9] = -torch.inf
    plain.requires_grad_()
    local = plain.detach()[:, own_columns(group, 11)].clone().requires_grad_()
    wanted = functional.cross_entropy(plain, target)
    found = cross_entropy(local, target, group=group, vocab_size=11)
    wanted.backward()
    found.backward()
    assert plain.grad is not None
    assert_same(found, wanted, "masked loss", 1e-6)
    assert_same(local.grad, plain.grad[:, own_columns(group, 11)], "masked gradient", 1e-6)


def check_traffic_and_memory(group: Group) -> None:
    """Three numbers for each token, whatever the vocabulary; backward sends nothing."""
    target = some_targets(1000, 16)
    local = some_logits(16, 1000 // group.size).requires_grad_()
    with trace() as recording:
        cross_entropy(local, target, group=group, vocab_size=1000).backward()
    assert [(call.op, call.payload_bytes) for call in recording.calls] == [("all_reduce", 64), ("all_reduce", 128)]


def check_wrong_use(group: Group) -> None:
    local = some_logits(4, 11)[:, own_columns(group, 11)]
    target = torch.tensor([1, 2, 3, 4])
    with pytest.raises(IndexError, match=r"target 11 is out of range.*0 to 10"):
        cross_entropy(local, target + 7, group=group, vocab_size=11)
    with pytest.raises(ModelError, match=r"which has \d+ of a vocabulary of 40"):
        cross_entropy(local, target, group=group, vocab_size=40)
    with pytest.raises(ModelError, match="pass vocab_size"):
        cross_entropy(local, target, group=group)
    with pytest.raises(ValueError, match=r"targets of shape \(3,\)"):
        cross_entropy(local, target[:3], group=group, vocab_size=11)
    with pytest.raises(ValueError, match="'avg' is not a reduction"):
        cross_entropy(local, target, group=group, vocab_size=11, reduction="avg")
    with pytest.raises(ValueError, match="between 0 and 1"):
        cross_entropy(local, target, group=group, vocab_size=11, label_smoothing=2.0)


def check_second_derivative(group: Group) -> None:
    target = some_targets(11, 7)
    plain = some_logits(7, 11, dtype=torch.float64).requires_grad_()
    local = plain.detach()[:, own_columns(group, 11)].clone().requires_grad_()
    weights = some_logits(7, 11, seed=3, dtype=torch.float64)
    for smoothing in (0.0, 0.2):
        wanted = functional.cross_entropy(plain, target, label_smoothing=smoothing)
        (first,) = torch.autograd.grad(wanted, plain, create_graph=True)
        (wanted_second,) = torch.autograd.grad((first * weights).sum(), plain)
        found = cross_entropy(local, target, group=group, vocab_size=11, label_smoothing=smoothing)
        (first,) = torch.autograd.grad(found, local, create_graph=True)
        # A sum over ranks, as a norm of the gradients would be.
        (second,) = torch.autograd.grad((first * weights[:, own_columns(group, 11)]).sum(), local)
        assert_same(second, wanted_second[:, own_columns(group, 11)], "second derivative", 1e-9)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_loss_is_the_plain_one(world_size: int) -> None:
    """Protects each reduction, smoothing, ignored targets, uneven vocabularies, low precision and what is sent."""
    run_ranks(check_losses, world_size)


# -- a tied model ------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, embedding: nn.Embedding, head: nn.Linear) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = embedding, nn.LayerNorm(8), head
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(ids)))


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor, how: str) -> torch.Tensor:
    """The loss as models write it."""
    shifted, labels = logits[..., :-1, :], ids[..., 1:]
    if how == "contiguous":
        return functional.cross_entropy(shifted.contiguous().view(-1, logits.size(-1)), labels.reshape(-1))
    if how == "module":
        return nn.CrossEntropyLoss(label_smoothing=0.1)(shifted.flatten(0, 1).float(), labels.flatten())
    if how == "transposed":
        return functional.cross_entropy(shifted.transpose(1, 2), labels, reduction="sum") / labels.numel()
    if how == "padded":
        padded = functional.pad(ids, (0, 1), value=IGNORED)[..., 1:]
        return functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), padded.reshape(-1))
    if how == "scaled":
        return functional.cross_entropy((shifted / 2 * 3).reshape(-1, logits.shape[-1]), labels.reshape(-1))
    assert how == "gathered", how
    return -functional.log_softmax(shifted, -1).gather(-1, labels[..., None]).mean()


def check_tied() -> None:
    group = tp_group()
    ids = torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(1))
    for how in ("contiguous", "module", "transposed", "padded", "scaled", "gathered"):
        for dim in (None, 1):
            torch.manual_seed(0)
            plain = Tied(nn.Embedding(11, 8, 3), nn.Linear(8, 11))
            torch.manual_seed(0)
            cut = Tied(
                VocabParallelEmbedding(11, 8, 3, group=group, sequence_dim=dim),
                VocabParallelHead(8, 11, group=group, sequence_dim=dim),
            )
            wanted = next_token_loss(plain(ids), ids, how)
            wanted.backward()
            with counted() as calls:
                logits = cut(ids)
                found = next_token_loss(logits, ids, how)
                found.backward()
            assert type(logits) is VocabParallelLogits
            assert logits.shape == (2, 8, 11)
            assert_same(found, wanted, f"{how}, dim {dim}", 1e-6)
            if dim is not None:
                for parameter in cut.norm.parameters():  # it saw a part of the sequence
                    parameter.grad = whole_sum(parameter.grad, group)
            assert_gradients_match(cut, plain, group, f"{how}, dim {dim}")
            if how != "gathered" and dim is None:
                assert calls == ["all_reduce"] * 4, "embedding, two for the loss, the head's input"


def whole_sum(gradient: torch.Tensor, group: Group) -> torch.Tensor:
    cut = even_cut(0, gradient.numel(), rank=0, degree=1)
    return whole_gradient(gradient, cut, group)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_tied_head_under_every_form_of_the_loss(world_size: int) -> None:
    """Protects the forms in which models write their loss, and both ways of a tied weight."""
    run_ranks(check_tied, world_size)


# -- logits ------------------------------------------------------------------------------------------------------

VOCABULARY = 11
Operation = Callable[[torch.Tensor], Any]

# Without a collective of more than O(tokens).
CHEAP: dict[str, Operation] = {
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "to": lambda x: x.to(torch.float64),
    "to device": lambda x: x.to(device="cpu", dtype=torch.float32, copy=True),
    "contiguous": lambda x: x.contiguous(),
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "number": lambda x: (2 * x / 3 + 1 - 0.5) ** 2,
    "softcap": lambda x: torch.tanh(x / 5) * 5,
    "0-d tensor": lambda x: x * torch.tensor(0.5),
    "per token": lambda x: x / torch.full((2, 1, 1), 3.0),
    "per id": lambda x: x + torch.arange(VOCABULARY) / 7,
    "with itself": lambda x: x - x * 2,
    "view": lambda x: x.view(-1, VOCABULARY),
    "view size": lambda x: x.view(-1, x.size(-1)),
    "view all": lambda x: x.view(1, 6, -1),
    "reshape": lambda x: x.reshape((6, 1, VOCABULARY)),
    "flatten": lambda x: x.flatten(0, -2),
    "unflatten": lambda x: x.flatten(0, 1).unflatten(0, (3, 2)),
    "unsqueeze": lambda x: x.unsqueeze(0).squeeze(0),
    "leading slice": lambda x: x[:, :-1],
    "ellipsis": lambda x: x[..., :-1, :],
    "last token": lambda x: x[:, -1, :],
    "one": lambda x: x[0, 1],
    "none": lambda x: x[None, :, 0],
    "indices": lambda x: x[torch.tensor([1, 0, 1]), torch.tensor([0, 2, 1])],
    "mask": lambda x: x[torch.tensor([[True, False, True], [False, True, False]])],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "select": lambda x: x.select(0, 1),
    "split": lambda x: x.split(2, dim=1)[1],
    "chunk": lambda x: x.chunk(3, dim=1)[1],
    "unbind": lambda x: x.unbind(0)[1],
    "transpose": lambda x: x.transpose(1, 2).transpose(-1, -2),
    "permute": lambda x: x.permute(2, 0, 1),
    "transposed": lambda x: x.mT,
    "argmax": lambda x: x.argmax(-1),
    "argmax kept": lambda x: torch.argmax(x, dim=2, keepdim=True),
    "new": lambda x: x.new_zeros(3),
    "other to": lambda x: torch.zeros(2).to(x),
}
# After a gather.
GATHERED: dict[str, Operation] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: functional.log_softmax(x.float(), dim=-1),
    "topk": lambda x: x.topk(3)[0],
    "max": lambda x: torch.max(x, dim=-1)[0],
    "sum": lambda x: x.sum(),
    "vocabulary slice": lambda x: x[..., 2:5],
    "column": lambda x: x[:, :, 3],
    "after the vocabulary": lambda x: x[..., None],
    "flat": lambda x: x.reshape(-1),
    "view across": lambda x: x.view(2, 33),
    "matmul": lambda x: x @ torch.ones(VOCABULARY, 2),
    "argmax of all": lambda x: x.argmax(),
    "argmax of tokens": lambda x: x.argmax(1),
    "cat": lambda x: torch.cat([x, x], dim=1),
    "where": lambda x: torch.where(torch.ones(VOCABULARY, dtype=torch.bool), x, x.new_zeros(())),
    "zeros_like": torch.zeros_like,
    "list": lambda x: torch.tensor(x.tolist()),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "probabilities": lambda x: functional.cross_entropy(x[0], torch.ones(3, VOCABULARY) / VOCABULARY),
    "class weights": lambda x: functional.cross_entropy(
        x[0], torch.tensor([1, 2, 3]), weight=torch.arange(VOCABULARY) / 3
    ),
    "backward": lambda x: x.backward(torch.ones(2, 3, VOCABULARY)),
}


def cut_logits(whole: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf with this rank's columns, and logits made of it."""
    leaf = whole.detach()[..., own_columns(group, whole.shape[-1])].clone().requires_grad_()
    return leaf, VocabParallelLogits.of(leaf * 1.0, group=group, vocab_size=whole.shape[-1], is_hidden=True)


def check_operations() -> None:
    group = tp_group()
    own = own_columns(group, VOCABULARY)
    for name, operation in (CHEAP | GATHERED).items():
        plain = some_logits(2, 3, VOCABULARY).requires_grad_()
        leaf, logits = cut_logits(plain, group)
        wanted = operation(plain * 1.0)
        with counted() as calls:
            found = operation(logits)
        if name in CHEAP:
            assert calls == (["all_gather"] * 2 if name.startswith("argmax") else []), (name, calls)
        else:
            assert "all_gather" in calls, name
        if isinstance(wanted, torch.Tensor):
            assert found.shape == wanted.shape, (name, found.shape, wanted.shape)
            assert found.dtype == wanted.dtype, name
            assert found.requires_grad == wanted.requires_grad, name
            if wanted.requires_grad:
                weights = torch.linspace(0.5, 1.5, wanted.numel(), dtype=wanted.dtype).view(wanted.shape)
                (wanted * weights).sum().backward()
                (found * weights).sum().backward()
            whole = found.whole() if isinstance(found, VocabParallelLogits) else found
            torch.testing.assert_close(whole, wanted, rtol=1e-6, atol=1e-6, msg=lambda text: f"{name}: {text}")  # noqa: B023
        if plain.grad is not None:
            assert_same(leaf.grad, plain.grad[..., own], f"{name}: gradient", 1e-6)
    check_shapes(group)
    check_factor(group)
    check_argmax(group)
    check_refused(group)


def check_shapes(group: Group) -> None:
    plain = some_logits(2, 3, VOCABULARY)
    leaf, logits = cut_logits(plain, group)
    assert logits.shape == (2, 3, VOCABULARY)
    assert (logits.size(-1), logits.size(dim=0), len(logits), logits.dim(), logits.ndim) == (VOCABULARY, 2, 2, 3, 3)
    assert (logits.numel(), torch.numel(logits), logits.nbytes) == (66, 66, 264)
    assert logits.stride() == plain.stride()
    assert logits.stride(1) == plain.stride(1)
    assert logits.is_contiguous()
    assert logits.is_floating_point()
    assert logits.requires_grad
    assert not logits.is_leaf
    assert torch.is_tensor(logits)
    seen: list[torch.Size] = []
    logits.register_hook(lambda gradient: seen.append(gradient.shape))
    with counted() as calls:
        text = f"{logits!r} {logits}"
    assert not calls
    assert "shape=(2, 3, 11)" in text
    cross_entropy(logits, some_targets(VOCABULARY, 2, 3)).backward()
    assert seen == [leaf.shape], "a hook sees this rank's part"
    loss = ParallelCrossEntropy(reduction="sum")(logits, some_targets(VOCABULARY, 2, 3))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.shape == leaf.shape
    again = pickle.loads(pickle.dumps(logits.detach()))
    assert type(again) is torch.Tensor
    assert torch.equal(again, plain)
    with torch.no_grad():
        assert torch.equal(logits[:, -1].argmax(-1), plain[:, -1].argmax(-1))


def check_factor(group: Group) -> None:
    """A factor that is learnt has a gradient over the whole vocabulary; one per id is cut and put together."""
    for shape in ((), (2, 1, 1), (VOCABULARY,), (1, VOCABULARY)):
        plain = some_logits(2, 3, VOCABULARY)
        theirs = torch.full(shape, 0.7, requires_grad=True)
        functional.cross_entropy((plain * theirs).view(-1, VOCABULARY), some_targets(VOCABULARY, 6)).backward()
        ours = torch.full(shape, 0.7, requires_grad=True)
        logits = cut_logits(plain, group)[1] * ours
        functional.cross_entropy(logits.view(-1, VOCABULARY), some_targets(VOCABULARY, 6)).backward()
        assert_same(ours.grad, theirs.grad, f"factor {shape}", 1e-6)


def check_argmax(group: Group) -> None:
    """torch's rules: the first of equal ones, NaN before everything."""
    plain = torch.zeros(5, VOCABULARY)
    plain[1, 3] = plain[1, 9] = 2.0
    plain[2] = -torch.inf
    plain[3, 1], plain[3, 8] = torch.inf, torch.nan
    plain[4, 10] = 1.0
    assert cut_logits(plain, group)[1].argmax(-1).tolist() == plain.argmax(-1).tolist()
    small = some_logits(4, 3)  # fewer ids than ranks, at 4
    assert cut_logits(small, group)[1].argmax(-1).tolist() == small.argmax(-1).tolist()
    target = torch.tensor([0, 2, 1, 1])
    leaf, logits = cut_logits(small, group)
    small.requires_grad_()
    wanted = functional.cross_entropy(small, target, label_smoothing=0.1)
    found = functional.cross_entropy(logits, target, label_smoothing=0.1)
    wanted.backward()
    found.backward()
    assert_same(found, wanted, "three ids", 1e-6)
    assert_same(leaf.grad, small.grad[..., own_columns(group, 3)], "three ids: gradient", 1e-6)


def check_refused(group: Group) -> None:
    logits = cut_logits(some_logits(2, 3, VOCABULARY), group)[1].detach()

    def assign() -> None:
        logits[..., 3] = 0.0

    def divide() -> None:
        nonlocal logits
        logits /= 2

    writes: list[Callable[[], Any]] = [
        assign,
        divide,
        lambda: logits.mul_(2),
        lambda: logits.masked_fill_(torch.tensor(True), 0.0),
        lambda: torch.mul(torch.ones(VOCABULARY), 2.0, out=logits),
    ]
    for write in writes:
        with pytest.raises(ModelError, match=r"writes into logits .* logits.whole\(\)"):
            write()
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        logits.view(5, VOCABULARY)
    with pytest.raises(ValueError, match="batch_size"):
        functional.cross_entropy(logits.view(-1, VOCABULARY), torch.tensor([1, 2]))


def check_deferred() -> None:
    with deferred_backend():
        check_tied()


@pytest.mark.parametrize("world_size", [2, 4])
def test_logits_look_whole(world_size: int) -> None:
    """Protects values, shapes and gradients of what models do with logits, and which of it sends a vocabulary."""
    run_ranks(check_operations, world_size)


def test_a_tied_head_with_late_collectives() -> None:
    """Protects against a result that is read before it has arrived."""
    run_ranks(check_deferred, 2)
