"""The sampler inside torch's DataLoader."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset

from hybrid.data.sampler import DistributedBatchSampler


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Samples of two tensors and a string."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"x": torch.full((3,), float(index)), "y": index, "name": f"sample {index}"}


def test_default_rule_works_with_default_collate() -> None:
    """5 samples on 4 ranks: nobody may hand default_collate an empty list."""
    read = []
    for rank in range(4):
        sampler = DistributedBatchSampler(Numbers(), 1, num_replicas=4, rank=rank)
        loader = DataLoader(Numbers(), batch_sampler=sampler)
        assert len(loader) == 1
        read += [number for batch in loader for number in batch["y"].tolist()]
    assert sorted(read) == [0, 1, 2, 3, 4]


def test_empty_batch_has_the_shapes_of_the_others() -> None:
    """A rank without samples still runs the model, on tensors with no rows of the right width and dtype."""
    sampler = DistributedBatchSampler(Numbers(), 2, num_replicas=2, rank=1, tail="empty")
    loader = DataLoader(Numbers(), batch_sampler=sampler, collate_fn=sampler.collate_fn())
    whole, empty = loader
    assert whole["x"].shape == (2, 3)
    assert (empty["x"].shape, empty["x"].dtype) == ((0, 3), torch.float32)
    assert (empty["y"].shape, empty["y"].dtype) == ((0,), torch.int64)
    assert empty["name"] == []


def test_epochs_follow_one_another_through_a_loader() -> None:
    """The loader makes a new iterator for each epoch; the sampler moves on by itself."""
    sampler = DistributedBatchSampler(Numbers(), 5, num_replicas=1, rank=0, shuffle=True)
    loader = DataLoader(Numbers(), batch_sampler=sampler)
    orders = [batch["y"].tolist() for _ in range(2) for batch in loader]
    assert sorted(orders[0]) == sorted(orders[1]) == [0, 1, 2, 3, 4]
    assert orders[0] != orders[1]
    assert sampler.epoch == 2
