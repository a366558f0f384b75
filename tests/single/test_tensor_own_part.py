"""Which part of an activation of the plain model a rank of the cut one should hold."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from hybrid.collectives.group import Group
from hybrid.contracts.placement import Cut, fused_cut
from hybrid.tensor.own_part import candidates

LAST = Group(process_group=cast(Any, object()), ranks=(0, 1), rank=1, axis="tp")
QKV = fused_cut(0, [(4, 2)] * 3, rank=1, degree=2)


def parts_of(whole: torch.Tensor, local: torch.Tensor, cuts: tuple[Cut, ...] = (), samples: int = 2) -> list[Any]:
    found = candidates(whole, local, tensor=local, cuts=cuts, group=LAST, samples=samples)
    return [part.of(whole).tolist() for part in found]


def test_same_shapes_are_compared_whole() -> None:
    whole = torch.arange(6.0).view(2, 3)
    assert parts_of(whole, whole) == [whole.tolist()]


def test_an_even_slice_of_the_dim_that_differs() -> None:
    whole = torch.arange(8.0).view(2, 4)
    assert parts_of(whole, torch.empty(2, 2)) == [[[2.0, 3.0], [6.0, 7.0]]]
    assert parts_of(whole, torch.empty(1, 4), samples=1) == [[[4.0, 5.0, 6.0, 7.0]]]


def test_what_comes_of_fused_parts_is_cut_in_these_parts() -> None:
    """A module behind a fused layer sees the second half of q, of k and of v, not the second half of all."""
    whole = torch.arange(24.0)
    found = parts_of(whole, torch.empty(12), (QKV,), samples=1)
    assert [*range(4, 8), *range(12, 16), *range(20, 24)] in found
    heads = torch.arange(12.0)
    assert [2, 3, 6, 7, 10, 11] in parts_of(heads, torch.empty(6), (QKV,), samples=1)


def test_samples_and_heads_in_one_dim() -> None:
    """Attention by batched products: of two samples with four heads a rank has two heads of each."""
    whole = torch.arange(8.0).view(8, 1)
    assert [[2.0], [3.0], [6.0], [7.0]] in parts_of(whole, torch.empty(4, 1))


def test_copies_are_known() -> None:
    """Each copy of a kv head has the gradient of its own queries only, so gradients there are not compared."""
    cut = Cut(dim=0, global_size=8, pieces=((6, 2),), copies=2)
    whole, local = torch.arange(8.0), torch.empty(2)
    found = candidates(whole, local, tensor=local, cuts=(cut,), group=LAST, samples=1)
    assert [(part.of(whole).tolist(), part.copies) for part in found] == [([6.0, 7.0], 2)]


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 2), (2, 7)])
def test_shapes_that_tell_nothing(shape: tuple[int, ...]) -> None:
    assert parts_of(torch.empty(4, 5), torch.empty(shape)) == []
