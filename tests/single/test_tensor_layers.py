"""Parallel layers on one rank, and what about them needs no ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from hybrid.collectives import autograd
from hybrid.collectives.group import Group
from hybrid.contracts.placement import Cut, even_cut
from hybrid.errors import ModelError
from hybrid.tensor import (
    ColumnParallelEmbedding,
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    VocabParallelLogits,
)
from hybrid.tensor.cut_module import check_divides, resolve_group, set_group_provider
from hybrid.tensor.entry import Entry
from hybrid.tensor.layers import local_part

ALONE = Group(process_group=None, ranks=(0,), rank=0, axis="tp")


@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_on_one_rank_the_layers_are_the_plain_ones(sequence_dim: int | None) -> None:
    torch.manual_seed(0)
    plain = [nn.Embedding(11, 6), nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 11)]
    torch.manual_seed(0)
    cut = [
        VocabParallelEmbedding(11, 6, group=ALONE, sequence_dim=sequence_dim),
        ColumnParallelLinear(6, 8, group=ALONE, sequence_dim=sequence_dim, fused=2, gather_output=True),
        RowParallelLinear(8, 6, group=ALONE, sequence_dim=sequence_dim),
        VocabParallelHead(6, 11, group=ALONE, sequence_dim=sequence_dim),
    ]
    ids = torch.tensor([[0, 10, 3], [2, 2, 7]])
    results = []
    for layers in (plain, cut):
        state = torch.get_rng_state()
        logits = nn.Sequential(*layers)(ids)
        assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"
        loss = functional.cross_entropy(logits.view(-1, 11), ids.view(-1))
        loss.backward()
        results.append((logits, loss, [parameter.grad for layer in layers for parameter in layer.parameters()]))
    assert type(results[1][0]) is torch.Tensor
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(one, other) for one, other in zip(results[0][2], results[1][2], strict=True))
    loss = ParallelCrossEntropy(group=ALONE, vocab_size=11)(results[1][0], ids)
    torch.testing.assert_close(loss, results[0][1])


def test_values_of_a_part_are_drawn_like_the_whole() -> None:
    """A rank of many, looked at alone: building needs no communication."""
    ranks = tuple(range(4))
    for rank in ranks:
        group = Group(process_group=object(), ranks=ranks, rank=rank, axis="tp")  # type: ignore[arg-type]
        torch.manual_seed(0)
        plain = nn.Linear(6, 24)
        torch.manual_seed(0)
        layer = ColumnParallelLinear(6, 24, group=group, fused=[(4, 3), (4, 3)])
        own = [*range(rank * 3, rank * 3 + 3), *range(12 + rank * 3, 12 + rank * 3 + 3)]
        assert torch.equal(layer.weight, plain.weight[own])
        assert torch.equal(layer.bias, plain.bias[own])
        assert layer.out_features == 24
        torch.manual_seed(0)
        table = nn.Embedding(7, 8, 5)
        torch.manual_seed(0)
        columns = ColumnParallelEmbedding(7, 8, 5, group=group)
        assert torch.equal(columns.weight, table.weight[:, rank * 2 : rank * 2 + 2])
        assert not VocabParallelEmbedding(7, 8, 5, group=group).weight[even_padding(rank)].any()


def even_padding(rank: int) -> list[int]:
    """Where the row 5 of 7 lies on this rank of four (2, 2, 2 and 1 rows)."""
    return [1] if rank == 2 else []


def test_local_part() -> None:
    whole = torch.arange(12.0).view(2, 6)
    pieces = Cut(dim=1, global_size=6, pieces=((4, 2), (0, 1)))
    part = local_part(whole, pieces)
    assert part.tolist() == [[4, 5, 0], [10, 11, 6]]
    one = local_part(whole, even_cut(0, 2, rank=1, degree=2))
    assert one.data_ptr() != whole[1].data_ptr(), "a part does not keep the whole alive"


@pytest.mark.parametrize(
    ("size", "degree", "near"), [(10, 4, "8 and 12 can"), (3, 4, "; 4 can"), (9, 2, "8 and 10 can")]
)
def test_the_refusal_names_the_sizes_that_work(size: int, degree: int, near: str) -> None:
    with pytest.raises(ModelError, match=f"heads = {size} cannot be cut over tp = {degree} ranks.*{near}"):
        check_divides("heads", size, degree)


def test_the_group_of_the_running_job() -> None:
    set_group_provider(lambda: ALONE)
    try:
        assert ColumnParallelLinear(2, 2).tensor_parallel.group is ALONE
    finally:
        set_group_provider(None)
    with pytest.raises(ModelError, match=r"after hybrid\.init"):
        resolve_group(None)


def test_a_copied_entry_counts_as_the_original() -> None:
    layer = ColumnParallelLinear(2, 2, group=ALONE)
    entry = copy.deepcopy(layer).tensor_parallel_entry
    assert isinstance(entry, Entry)
    assert entry is not layer.tensor_parallel_entry
    assert entry.num_consumers == 1


def test_operations_have_shapes_without_values() -> None:
    """Protects selective recompute and estimates, which run the operations on tensors without values."""
    ranks = (0, 1, 2)
    group = Group(process_group=object(), ranks=ranks, rank=1, axis="tp")  # type: ignore[arg-type]
    with torch.device("meta"):
        x = torch.empty(4, 7)
    # Fake tensors go the same way as meta ones.
    assert autograd.reduce_from(x, group=group).shape == (4, 7)
    assert autograd.gather_from(x, group=group, dim=-1, partial=True).shape == (4, 21)
    assert autograd.scatter_to(x, group=group, dim=1).shape == (4, 2)
    assert autograd.reduce_scatter_from(x, group=group, dim=1).shape == (4, 2)


def test_logits_on_one_rank_are_plain() -> None:
    local = torch.zeros(2, 3)
    assert VocabParallelLogits.of(local, group=ALONE, vocab_size=3) is local
