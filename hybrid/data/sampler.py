"""Which sample indices each data-parallel replica reads, batch by batch, in every epoch.

The epoch is one permutation of the data set that depends on (seed, epoch, length) alone. With R replicas and
`batch_size` B samples per replica, global batch g is positions [g*B*R, (g+1)*B*R) of that permutation, and
replica r reads the r-th part of it. One process with batch_size B*R therefore reads the same global batches,
in the same order, as any number of replicas:

    permutation   | 7 2 9 4 | 0 5 8 1 | 3 6 |          length 10, R = 2, B = 2
    replica 0     | 7 2     | 0 5     | 3   |
    replica 1     |     9 4 |     8 1 |   6 |

**Tail rule.** All replicas always yield the same number of batches, so none waits for another at the end of
an epoch. `drop_last=True` drops the incomplete last global batch. `drop_last=False` reads every sample once
and repeats none: the last global batch is divided so that the shares differ by at most one sample. When fewer
samples are left than there are replicas, `tail` decides:

    "fold"    (default) they join the global batch before, so some replicas get batch_size + 1 samples there.
              No batch is ever empty, so every collate function works.
    "empty"   they stay a global batch of their own, as one process would have it, and the replicas left over
              yield an empty list. A DataLoader then needs `collate_fn=sampler.collate_fn()`.

Batches of unequal size give the result of one process only if they are weighted by their number of samples:
`train_batch` and `eval_batch` do that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy
import numpy.typing

from hybrid.data.collate import EmptyAwareCollate
from hybrid.data.coordinate import replica
from hybrid.errors import BatchError

__all__ = ["DistributedBatchSampler", "Tail", "epoch_order"]

Tail = Literal["fold", "empty"]


def epoch_order(length: int, *, seed: int, epoch: int) -> numpy.typing.NDArray[numpy.int64]:
    """The permutation of range(length) for one epoch, the same on every platform and numpy version.

    Sorting the raw 64-bit output of a bit generator is used instead of numpy's own `permutation`, because
    numpy promises to keep the raw stream for ever, but not what its distribution functions make of it; a
    resumed run must meet the order of the run that wrote its state.
    """
    keys = numpy.random.PCG64(numpy.random.SeedSequence((seed, epoch))).random_raw(length)
    return numpy.argsort(keys, kind="stable").astype(numpy.int64)


class DistributedBatchSampler:
    """Yields lists of sample indices for this data-parallel coordinate: a `batch_sampler` for a DataLoader.

    dataset_or_length: the data set (anything with a length), or the number of samples.
    batch_size: samples per replica and step. The global batch is batch_size * num_replicas.
    num_replicas, rank: the data-parallel coordinate; by default that of the running job.
    shuffle, seed: a new permutation in each epoch, from (seed, epoch). Without shuffle: 0, 1, 2, ...
    drop_last, tail: the tail rule, see the head of this file.

    Each full pass moves on to the next epoch; `set_epoch` chooses one. `state_dict()` in mid-epoch and
    `load_state_dict()` on the same or another number of replicas and batch size continue with exactly the
    samples of the epoch that were not read yet.
    """

    def __init__(
        self,
        dataset_or_length: Sized | int,
        batch_size: int,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        tail: Tail = "fold",
    ) -> None:
        self._dataset = None if isinstance(dataset_or_length, int) else dataset_or_length
        self.length = dataset_or_length if isinstance(dataset_or_length, int) else len(dataset_or_length)
        coordinate = replica("DistributedBatchSampler", num_replicas, rank, checks_rank=False)  # see _check
        self.batch_size = batch_size
        self.num_replicas = coordinate.num_replicas
        self.rank = coordinate.rank
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.tail: Tail = tail
        self.epoch = 0
        self._start = 0  # sample position at which the running or next pass begins
        self._position = 0  # samples of this epoch handed out so far, over all replicas
        self._begun_at: int | None = None  # epoch of a loaded state that no pass has continued yet
        self._pass = (0, 0)  # epoch and start of the running or last pass, which a loader may draw ahead of the loop
        self._check()

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all replicas."""
        return self.batch_size * self.num_replicas

    def __len__(self) -> int:
        """Number of batches of the running or next pass, the same on every replica."""
        return len(self._bounds(self._start)) - 1

    def __iter__(self) -> Iterator[list[int]]:
        self._begun_at = None
        epoch, start = self._pass = self.epoch, self._start
        self._position = start
        bounds = self._bounds(start)
        order = epoch_order(self.length, seed=self.seed, epoch=epoch) if self.shuffle else None
        for first, last in pairwise(bounds):
            begin, end = _share(first, last, self.num_replicas, self.rank)
            # The position moves before the batch is handed out: whoever holds the batch sees it counted.
            self._position = last
            yield list(range(begin, end)) if order is None else order[begin:end].tolist()
        # The pass is over (a loop that was left early never comes here). A caller that has meanwhile chosen
        # another epoch keeps it.
        if self.epoch == epoch:
            self.epoch = epoch + 1
            self._start = self._position = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; a loaded mid-epoch position is kept if it is of this epoch.

        Raises BatchError directly after `load_state_dict` for an earlier epoch than the loaded one: the loop
        that calls it started from 0 instead of from `sampler.epoch`, and would read samples again.
        """
        if epoch < 0:
            raise BatchError(f"set_epoch: epoch is {epoch}; expected 0 or more")
        if self._begun_at is not None and epoch < self._begun_at:
            raise BatchError(
                f"set_epoch({epoch}): the loaded state stands in epoch {self._begun_at} at sample "
                f"{self._start} of {self.length}; start the loop there: for epoch in range(sampler.epoch, num_epochs)"
            )
        if epoch != self.epoch:
            self.epoch = epoch
            self._start = self._position = 0
            self._begun_at = None
        self._pass = (self.epoch, self._start)

    def state_dict(self, *, num_batches: int | None = None) -> dict[str, Any]:
        """Epoch and position, the same on every replica; small and JSON-like.

        num_batches: how many batches of the running pass, or of the one that has just ended, were trained. Needed with
        DataLoader workers only: they draw indices ahead, so the sampler has handed out more than the loop has
        received.
        """
        epoch, position = self.epoch, self._position
        if num_batches is not None:
            epoch, start = self._pass
            bounds = self._bounds(start)
            if not 0 <= num_batches < len(bounds):
                raise BatchError(f"state_dict: num_batches is {num_batches}; this pass has {len(bounds) - 1} batches")
            position = bounds[num_batches]
        if position >= self.length or self._num_left(position) == 0:
            epoch, position = epoch + 1, 0  # everything of this epoch was read
        return {
            "epoch": epoch,
            "position_samples": position,
            "length": self.length,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after `state`, on any number of replicas and with any batch size.

        Raises BatchError, with all differences, for another data set length, shuffle or seed: the order would
        not be the one in which samples were read.
        """
        expected = {"epoch", "position_samples", "length", "shuffle", "seed"}
        if set(state) != expected:
            raise BatchError(f"load_state_dict: the state has keys {sorted(state)}; expected {sorted(expected)}")
        own = {"length": self.length, "shuffle": self.shuffle, "seed": self.seed}
        differing = [
            f"{name} is {value!r} here and {state[name]!r} in the state"
            for name, value in own.items()
            if state[name] != value
        ]
        if differing:
            raise BatchError(
                f"load_state_dict: the samples already read cannot be found again: {'; '.join(differing)}; "
                "create the sampler with the values of the state"
            )
        if not 0 <= state["position_samples"] < self.length or state["epoch"] < 0:
            raise BatchError(
                f"load_state_dict: epoch {state['epoch']}, position_samples {state['position_samples']}; "
                f"expected an epoch of 0 or more and a position in 0..{self.length - 1}"
            )
        left = self.length - state["position_samples"]
        if left < self.num_replicas and not self.drop_last and self.tail == "fold":
            raise BatchError(
                f"load_state_dict: {left} samples are left of epoch {state['epoch']}, which cannot give each "
                f"of {self.num_replicas} replicas one; continue on at most {left} data-parallel replicas, or "
                'with tail="empty" and collate_fn=sampler.collate_fn()'
            )
        self.epoch = self._begun_at = state["epoch"]
        self._start = self._position = state["position_samples"]
        if len(self) == 0:
            # What is left is a tail that this sampler drops. The next epoch begins.
            self.epoch, self._start, self._position = self.epoch + 1, 0, 0
        self._pass = (self.epoch, self._start)

    def collate_fn(self, collate: Callable[[list[Any]], Any] | None = None) -> EmptyAwareCollate:
        """A `collate_fn` for DataLoader that also makes a batch of an empty list (`tail="empty"`).

        collate: what makes a batch of a list of samples; torch's default_collate by default.
        """
        if self._dataset is None:
            raise BatchError(
                f"collate_fn: this sampler was given the length {self.length} only; give it the data set "
                "itself, whose first sample shows the shapes of an empty batch"
            )
        return EmptyAwareCollate(self._dataset, collate)

    def _bounds(self, start: int) -> list[int]:
        """Positions at which the global batches from `start` on begin, and the end of the last one."""
        bounds = list(range(start, self.length, self.global_batch_size))
        left = self.length - bounds[-1] if bounds else 0
        if left == self.global_batch_size:
            return [*bounds, self.length]
        if self.drop_last:
            return bounds  # the last entry is where the dropped tail begins
        if left < self.num_replicas and self.tail == "fold" and len(bounds) > 1:
            bounds.pop()
        return [*bounds, self.length]

    def _num_left(self, position: int) -> int:
        return len(self._bounds(position)) - 1

    def _check(self) -> None:
        """Everything that can be wrong, at once, before the first step."""
        problems = []
        if self.batch_size < 1:
            problems.append(f"batch_size is {self.batch_size}; expected 1 or more")
        if self.num_replicas < 1:
            problems.append(f"num_replicas is {self.num_replicas}; expected 1 or more")
        elif not 0 <= self.rank < self.num_replicas:
            problems.append(f"rank is {self.rank}; expected 0..{self.num_replicas - 1} of {self.num_replicas} replicas")
        if self.seed < 0:
            problems.append(f"seed is {self.seed}; expected 0 or more")
        if self.tail not in get_args(Tail):
            problems.append(f"tail is {self.tail!r}; expected one of {', '.join(map(repr, get_args(Tail)))}")
        if self.length < 1:
            problems.append("the data set has 0 samples, so an epoch would have no batch")
        if not problems and self.drop_last and self.length < self.global_batch_size:
            problems.append(
                f"an epoch would have no batch: {self.length} samples are fewer than one global batch of "
                f"{self.batch_size} per replica x {self.num_replicas} replicas = {self.global_batch_size}, "
                "and drop_last=True drops them; use drop_last=False"
                + (f" or batch_size={smaller}" if (smaller := self.length // self.num_replicas) else "")
            )
        if not problems and not self.drop_last and self.tail == "fold" and self.length < self.num_replicas:
            problems.append(
                f"{self.length} samples cannot give each of {self.num_replicas} replicas one; use at most "
                f'{self.length} data-parallel replicas, or tail="empty" with collate_fn=sampler.collate_fn()'
            )
        if problems:
            raise BatchError("DistributedBatchSampler: " + "; ".join(problems))


def _share(first: int, last: int, num_replicas: int, rank: int) -> tuple[int, int]:
    """The part [begin, end) of the global batch [first, last) for one replica; sizes differ by at most 1."""
    base, extra = divmod(last - first, num_replicas)
    begin = first + rank * base + min(rank, extra)
    return begin, begin + base + (rank < extra)
