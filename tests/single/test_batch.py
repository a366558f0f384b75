"""Cutting one rank's batch into micro-batches: every sample once, in order, whatever the batch is made of."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.compose.batch import num_samples, num_tokens, split_batch
from hybrid.errors import BatchError

Pair = namedtuple("Pair", ["inputs", "labels"])


def rows(count: int, width: int = 3) -> torch.Tensor:
    """Row i is filled with i, so that a sample shows where it went."""
    return torch.arange(count, dtype=torch.float32)[:, None].expand(count, width).clone()


def joined(pieces: list[torch.Tensor]) -> list[float]:
    return torch.cat([piece[:, 0] for piece in pieces]).tolist()


@given(st.integers(0, 40), st.integers(1, 9))
def test_every_sample_is_in_one_micro_batch_in_order(total: int, accumulate_steps: int) -> None:
    """Protects the equality with one process: no sample is lost or repeated, and sizes differ by at most one."""
    pieces = split_batch(rows(total), accumulate_steps=accumulate_steps, micro_batch_size=None)
    assert len(pieces) == accumulate_steps
    assert joined(pieces) == [float(index) for index in range(total)]
    sizes = [len(piece) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 9))
def test_a_given_micro_batch_size_is_kept_or_the_batch_is_refused(
    total: int, accumulate_steps: int, micro_batch_size: int
) -> None:
    """Protects the memory that micro_batch_size promises, and against a dropped tail."""
    if total > accumulate_steps * micro_batch_size:
        with pytest.raises(BatchError, match=f"{total} samples.*accumulate_steps={-(-total // micro_batch_size)}"):
            split_batch(rows(total), accumulate_steps=accumulate_steps, micro_batch_size=micro_batch_size)
        return
    pieces = split_batch(rows(total), accumulate_steps=accumulate_steps, micro_batch_size=micro_batch_size)
    assert len(pieces) == accumulate_steps
    assert joined(pieces) == [float(index) for index in range(total)]
    sizes = [len(piece) for piece in pieces]
    assert max(sizes) <= micro_batch_size
    # Full pieces first: a short batch fills the first ones.
    assert sizes == sorted(sizes, reverse=True)
    assert sum(0 < size < micro_batch_size for size in sizes) <= 1


def test_pieces_are_views_of_the_batch() -> None:
    """Protects memory: cutting a batch copies nothing."""
    batch = rows(6)
    pieces = split_batch(batch, accumulate_steps=3, micro_batch_size=None)
    assert all(piece.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr() for piece in pieces)


def test_a_dict_keeps_its_keys_and_its_other_values() -> None:
    """Protects model(**batch): numbers, texts, flags and None go into every micro-batch unchanged."""
    batch = {"input_ids": rows(4), "labels": rows(4, 1), "scale": 2.0, "name": "x", "mask": None, "use_cache": False}
    first, second = split_batch(batch, accumulate_steps=2, micro_batch_size=None)
    assert list(first) == list(batch)
    assert {key: first[key] for key in ("scale", "name", "mask", "use_cache")} == {
        "scale": 2.0,
        "name": "x",
        "mask": None,
        "use_cache": False,
    }
    assert joined([first["input_ids"], second["input_ids"]]) == [0.0, 1.0, 2.0, 3.0]
    assert torch.equal(second["labels"][:, 0], torch.tensor([2.0, 3.0]))


@pytest.mark.parametrize("make", [dict, OrderedDict, UserDict])
def test_mappings_keep_their_type(make: type) -> None:
    """Protects batches of tokenizers, which are mappings of a class of their own."""
    pieces = split_batch(make({"x": rows(4)}), accumulate_steps=2, micro_batch_size=None)
    assert [type(piece) for piece in pieces] == [make, make]
    assert joined([piece["x"] for piece in pieces]) == [0.0, 1.0, 2.0, 3.0]


def test_a_namedtuple_stays_one() -> None:
    """Protects batch.inputs and batch.labels in a forward_step."""
    pieces = split_batch(Pair(rows(4), rows(4, 1)), accumulate_steps=2, micro_batch_size=None)
    assert all(type(piece) is Pair for piece in pieces)
    assert joined([piece.inputs for piece in pieces]) == joined([piece.labels for piece in pieces])


@pytest.mark.parametrize("make", [tuple, list])
def test_sequences_keep_their_type(make: type) -> None:
    """Protects (inputs, labels) in either spelling."""
    pieces = split_batch(make([rows(4), rows(4)]), accumulate_steps=2, micro_batch_size=None)
    assert all(type(piece) is make for piece in pieces)


def test_nested_batches_are_cut_at_every_tensor() -> None:
    """Protects inputs that are dicts of lists of tuples: all leaves are cut alike, so labels stay with their inputs."""
    batch = ({"a": [rows(5), (rows(5, 2), None)], "b": Pair(rows(5), 3)}, rows(5, 1))
    pieces = split_batch(batch, accumulate_steps=2, micro_batch_size=None)
    assert [len(piece[1]) for piece in pieces] == [2, 3]
    for inputs, labels in pieces:
        leaves = [inputs["a"][0], inputs["a"][1][0], inputs["b"].inputs]
        assert all(joined([leaf]) == joined([labels]) for leaf in leaves)
        assert inputs["a"][1][1] is None
        assert inputs["b"].labels == 3


def test_0d_tensors_are_not_cut() -> None:
    """Protects a temperature or a step count that comes as a tensor: it has no samples."""
    step = torch.tensor(7)
    pieces = split_batch({"x": rows(4), "step": step}, accumulate_steps=2, micro_batch_size=None)
    assert all(piece["step"] is step for piece in pieces)
    assert num_samples({"x": rows(4), "step": step}) == 4


def test_a_batch_of_no_samples_gives_empty_micro_batches() -> None:
    """Protects ranks without data: they make the same number of micro-batches as the others."""
    pieces = split_batch((rows(0), rows(0)), accumulate_steps=3, micro_batch_size=None)
    assert [num_samples(piece) for piece in pieces] == [0, 0, 0]


def test_the_caller_keeps_its_batch() -> None:
    """Protects a batch that is used again (evaluation, logging): it is not changed."""
    batch: dict[str, Any] = {"x": rows(4), "inner": {"y": rows(4)}}
    split_batch(batch, accumulate_steps=2, micro_batch_size=None)
    assert len(batch["x"]) == len(batch["inner"]["y"]) == 4


def test_differing_leading_dims_are_refused_with_every_path_and_size() -> None:
    """Protects the pairing of labels with inputs: a batch that does not fit together is never cut."""
    batch = {"x": rows(4), "inner": [rows(4), rows(3)]}
    for call in (num_samples, lambda b: split_batch(b, accumulate_steps=1, micro_batch_size=None)):
        with pytest.raises(BatchError) as caught:
            call(batch)
        message = str(caught.value)
        assert "batch['x'] has 4" in message
        assert "batch['inner'][1] has 3" in message


@pytest.mark.parametrize("batch", [None, 3, "text", [], {}, {"step": 3}, torch.tensor(1.0), [None, torch.tensor(2)]])
def test_a_batch_without_samples_to_count_is_refused(batch: object) -> None:
    """Protects the weighting of the loss: without a sample count there is no mean over the world."""
    with pytest.raises(BatchError, match="no tensor with samples on dim 0"):
        num_samples(batch)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (torch.zeros(4, 6, dtype=torch.int64), 24),
        ({"attention": torch.zeros(4, 6), "ids": torch.zeros(4, 5, dtype=torch.int32)}, 20),
        ((torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64)), 4),
        ({"mask": torch.zeros(4, 6, dtype=torch.bool)}, 24),
        (torch.zeros(0, 6, dtype=torch.int64), 0),
    ],
)
def test_tokens_are_the_elements_of_the_first_integer_matrix(batch: Any, tokens: int) -> None:
    """Protects the tokens per second that a run reports."""
    assert num_tokens(batch) == tokens
