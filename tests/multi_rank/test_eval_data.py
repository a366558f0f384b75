"""Evaluation and loops over batches that ranks have unequally many of: right, refused by name, never a hang."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset

import hybrid
from tests.multi_rank.case_runs import SEVERAL_STEPS, assert_close, assert_weights, seeded, variant, weights_of, wrapped
from tests.ranks import run_ranks


def mlp() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 4))


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(70)
    return torch.randn(count, 3, generator=generator), torch.randint(0, 4, (count,), generator=generator)


def accuracy(output: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    return {"accuracy": ((output.argmax(-1) == labels).sum(), len(labels)), "seen": len(labels)}


def batches_of(rows: range, size: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs, labels = samples(count)
    return [(inputs[rows[i : i + size]], labels[rows[i : i + size]]) for i in range(0, len(rows), size)]


def plain_result(count: int) -> tuple[float, float]:
    inputs, labels = samples(count)
    with torch.no_grad():
        output = mlp()(inputs)
        right = (output.argmax(-1) == labels).double().mean().item()
        return functional.cross_entropy(output.double(), labels).item(), right


PLAN = {"0": "colwise", "1": "rowwise", "2": "replicated"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_parallel": True, "tensor_parallel_configs": {"degree": 2, "plan": PLAN}},
    "pp2": {"pipeline": True, "pipeline_configs": {"degree": 2}},
}


def check_mean(layouts: tuple[str, ...], counts: tuple[int, ...]) -> None:
    for layout in layouts:
        for stage in (1, 3):
            settings: dict[str, Any] = {"sharding": True, "sharding_configs": {"stage": stage}, "timeout_seconds": 20}
            strategy = hybrid.DistributedStrategy(settings | LAYOUTS[layout])
            strategy.accumulate_steps = 2
            model = hybrid.distributed_model(mlp(), strategy=strategy)
            group = hybrid.get_mesh().group("dp_replicate", "dp_shard")
            # On every rank, though the last stage alone would call them.
            for wrong, said in (({"accuracy": accuracy}, "got dict; it returns"), (len, "cannot be called with two")):
                with pytest.raises(
                    hybrid.BatchError, match=rf"metrics must be a function metrics\(output, labels\).*{said}"
                ):
                    hybrid.evaluate(model, [], nn.CrossEntropyLoss(), metrics=wrong)  # type: ignore[arg-type]
            for count in counts:
                wanted_loss, wanted_accuracy = plain_result(count)
                # As uneven as can be: contiguous shares of unequal length, the last one of one sample, or none.
                ends = [0, max(0, count - group.size + 1), *range(max(1, count - group.size + 2), count + 1)]
                ends = [*(ends + [count] * group.size)[: group.size], count]
                rows = range(ends[group.rank], ends[group.rank + 1])
                found = hybrid.evaluate(model, batches_of(rows, 3, count), nn.CrossEntropyLoss(), metrics=accuracy)
                what = f"{layout}, stage {stage}, {count} samples"
                assert (found.count, found.samples, found.metrics["seen"]) == (count, count, count), what
                assert_close(found.loss, wanted_loss, SEVERAL_STEPS, what)
                assert found.metrics["accuracy"] == pytest.approx(wanted_accuracy, abs=1e-12), what
                assert model.training
            hybrid.shutdown()


def test_the_mean_over_any_number_of_samples_is_the_plain_one() -> None:
    """Counted once each: 11 of 2 x 3, one sample for two ranks; a rank without any batch at stage 3 takes part."""
    run_ranks(check_mean, 2, ("dp2", "tp2", "pp2"), (11, 1))


def test_the_mean_over_ranks_that_share_samples() -> None:
    """Two data-parallel ranks of two each: a pipeline or a cut model whose other half has no batch."""
    run_ranks(check_mean, 4, ("tp2", "pp2"), (1,))


class Tagger(nn.Module):
    """Finds its loss by itself, a mean over the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.words = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 4)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor | None = None, num_items_in_batch: int | None = None
    ) -> dict[str, Any]:
        x = self.words(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        scores = self.head(x)
        if labels is None:
            return {"scores": scores}
        loss, count = tag_loss({"scores": scores}, labels)
        return {"loss": loss / (num_items_in_batch or count), "scores": scores}


def tag_loss(output: dict[str, Any], labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = functional.cross_entropy(output["scores"].flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, (labels != -100).sum()


def tags_found(output: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
    return {"found": ((output["scores"].argmax(-1) == batch["labels"]).sum(), (batch["labels"] != -100).sum())}


def check_labels(layout: str) -> None:
    strategy = hybrid.DistributedStrategy({"accumulate_steps": 2, "timeout_seconds": 20} | LAYOUTS[layout])
    ids = torch.randint(11, (8, 5), generator=seeded(71))
    uneven, even, first = ids % 4, ids % 4, ids % 4
    uneven[:4, 1:] = even[:, 1:3] = first[:3, 0] = first[3:, 1] = -100
    plain, sgd = Tagger(), functools.partial(torch.optim.SGD, lr=0.1)
    model = hybrid.distributed_model(Tagger(), strategy=strategy, sample={"ids": ids} if layout == "pp2" else None)
    optimizer = hybrid.distributed_optimizer(sgd(model.parameters()))
    own = slice(None) if layout == "pp2" else slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    here = {"ids": ids[own], "labels": uneven[own]}
    for refused in (lambda: model.train_batch(here, optimizer), lambda: model.eval_batch(here)):
        with pytest.raises(hybrid.BatchError, match=r"not -100: 24 in 8 samples, and in this rank's .* return"):
            refused()
    with pytest.raises(hybrid.BatchError, match=r"not -100 \(the first position aside, .*: 27 in 8 samples"):
        model.train_batch({"ids": ids[own], "labels": first[own]}, optimizer)
    with pytest.raises(hybrid.BatchError, match=r"num_items_in_batch = 24 .* Set strategy.loss_reduction = 'sum'"):
        model.train_batch(here | {"num_items_in_batch": 24}, optimizer)
    # Calls that are even each, and not together.
    model.train_batch({"ids": ids[own], "labels": even[own]}, step=False)
    with pytest.raises(hybrid.BatchError, match="accumulated calls"):
        model.train_batch({"ids": ids[own], "labels": ids[own] % 4}, optimizer)
    model.zero_grad()
    assert_weights(model, plain.state_dict(), SEVERAL_STEPS)
    plain_optimizer = sgd(plain.parameters())
    for labels, batch, loss_fn in (
        (even, {"ids": ids[own], "labels": even[own]}, None),
        (uneven, ({"ids": ids[own]}, uneven[own]), tag_loss),
    ):
        wanted = plain(ids, labels)["loss"]
        wanted.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        found = model.train_batch(batch, optimizer, loss_fn=loss_fn)
        assert_close(found.loss, wanted.item(), SEVERAL_STEPS, layout)
    assert_weights(model, plain.state_dict(), SEVERAL_STEPS)
    with torch.no_grad():
        wanted = plain(ids, even)
    evaluated = hybrid.evaluate(model, [{"ids": ids[own], "labels": even[own]}], metrics=tags_found)
    right = tags_found(wanted, {"labels": even})["found"]
    assert evaluated.metrics == {"found": pytest.approx(float(right[0] / right[1]))}
    assert_close(evaluated.loss, wanted["loss"].item(), SEVERAL_STEPS, layout)
    with pytest.warns(UserWarning, match="evaluate: the loss depends on how the data is cut into batches"):
        hybrid.evaluate(model, [here])
    hybrid.shutdown()


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_a_mean_of_unequal_means_is_refused(layout: str) -> None:
    """Labels that do not count, unequally many in micro-batches, ranks or calls; and metrics of dict batches."""
    run_ranks(check_labels, 2, layout)


def check_reduction() -> None:
    rank = dist.get_rank()
    with variant(stage=1):
        hybrid.init()
        values = [1.0, 2.0, 3.0, 4.0, 10.0]
        own = values[:1] if rank == 0 else values[1:]
        found = hybrid.reduce_metrics({"mean": (torch.tensor(own).sum(), len(own)), "seen": len(own)})
        assert found == {"mean": 4.0, "seen": 5.0}
        assert hybrid.reduce_metrics({} if rank else {"only here": (6, 4)}) == {"only here": 1.5}
        assert str(hybrid.reduce_metrics({"none": (0, 0)})["none"]) == "nan"
        with pytest.raises(hybrid.BatchError, match=r"'bad' is tensor.*give a pair"):
            hybrid.reduce_metrics({"bad": torch.ones(3)})
        with pytest.raises(hybrid.BatchError, match="'mixed' is a pair in one place and a number in another"):
            hybrid.reduce_metrics({"mixed": (1, 1) if rank else 1})


def check_uneven() -> None:
    """Rank 0 has five batches of two, rank 1 four."""
    rank = dist.get_rank()
    inputs, labels = samples(18)
    shares = [range(10), range(10, 18)]
    own = batches_of(shares[rank], 2, 18)
    plain = mlp()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(5):
        rows = [row for share in shares for row in share[2 * step : 2 * step + 2]]
        functional.cross_entropy(plain(inputs[rows]), labels[rows]).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    with variant(stage=2) as strategy:
        model, optimizer = wrapped(mlp(), lambda parameters: torch.optim.SGD(parameters, lr=0.1), strategy)
        loader = (batch for batch in own)
        for batch in hybrid.even_batches(loader, when_uneven="empty"):
            model.train_batch(batch, optimizer, loss_fn=functional.cross_entropy)
        assert_weights(model, weights_of(plain), SEVERAL_STEPS)
        assert len(list(hybrid.even_batches(own, when_uneven="stop"))) == 4
        never = hybrid.even_batches(own[:2] if rank else [], when_uneven="empty")
        assert [len(batch[0]) for batch in never] == ([2, 2] if rank else [0, 0])
        evenly = hybrid.even_batches(own)
        assert [len(next(evenly)[0]) for _ in range(4)] == [2, 2, 2, 2]
        with pytest.raises(hybrid.BatchError, match=r"uneven batches: rank 1 has 4, and rank 0 has more"):
            next(evenly)
        with pytest.raises(hybrid.BatchError, match="when_uneven is 'drop'"):
            hybrid.even_batches(own, when_uneven="drop")  # type: ignore[arg-type]


def check_uneven_in_a_group() -> None:
    settings = {"timeout_seconds": 20} | LAYOUTS["tp2"]
    model = hybrid.distributed_model(mlp(), strategy=hybrid.DistributedStrategy(settings))
    own = batches_of(range(8), 2, 8)[: 4 - dist.get_rank()]
    message = r"ranks 0, 1 work on the same samples, and rank 1 has no batch left where rank 0 has one"
    with pytest.raises(hybrid.BatchError, match=message):
        hybrid.evaluate(model, own, functional.cross_entropy)
    with pytest.raises(hybrid.BatchError, match=message):
        list(hybrid.even_batches(own, when_uneven="stop"))
    hybrid.shutdown()
    # Another batch than the other rank's is told also later than at the first forward.
    model = hybrid.distributed_model(mlp(), strategy=hybrid.DistributedStrategy(settings))
    model(samples(4)[0])
    with pytest.raises(hybrid.BatchError, match="work on one batch together"):
        model(samples(4)[0] + dist.get_rank())
    hybrid.shutdown()


def check_plain_loop() -> None:
    """A plain loop that nobody evens out: the rank with more batches is told, in time, which call nobody else made."""
    own = batches_of(range(10) if dist.get_rank() == 0 else range(8), 2, 10)
    with variant(stage=2, timeout_seconds=2) as strategy:
        model, optimizer = wrapped(mlp(), lambda parameters: torch.optim.SGD(parameters, lr=0.1), strategy)
        steps = [0]

        def loop() -> None:
            for inputs, labels in own:
                functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                steps.append(steps[-1] + 1)

        if dist.get_rank() == 0:
            with pytest.raises(hybrid.CollectiveError):
                loop()
        else:
            loop()
        assert steps[-1] == 4


def check_loops() -> None:
    check_reduction()
    check_uneven()
    check_uneven_in_a_group()
    check_plain_loop()


def test_loops_over_uneven_batches_end_by_the_rule_that_was_chosen() -> None:
    """Stop, go on with nothing, or an error on every rank with both numbers; plain loops in time; metrics weighted."""
    run_ranks(check_loops, 2)


# -- data loaders -------------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(23))


@pytest.mark.parametrize(("num_replicas", "num_workers"), [(1, 0), (2, 0), (3, 2)])
def test_an_iterable_is_read_once_over_all_ranks_and_workers(num_replicas: int, num_workers: int) -> None:
    """Without a share for each, every rank and worker reads everything."""
    read = []
    for rank in range(num_replicas):
        source = hybrid.DistributedIterable(Stream(), num_replicas=num_replicas, rank=rank)
        read += [int(n) for batch in DataLoader(source, batch_size=2, num_workers=num_workers) for n in batch]
    assert sorted(read) == list(range(23))


class Augmented(Dataset[list[float]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[float]:
        return [random.random(), numpy.random.rand(), torch.rand(()).item()]


def test_workers_draw_by_data_rank_and_not_by_the_state_of_torch() -> None:
    """The ranks of one sample (stages of a pipeline) must augment it alike, other ranks otherwise."""
    drawn = []
    for rank, state in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(state)  # as different stages of a pipeline have it
        generator = hybrid.loader_generator(7, num_replicas=2, rank=rank)
        loader = DataLoader(Augmented(), batch_size=2, num_workers=1, generator=generator)
        drawn.append([torch.stack(batch).tolist() for _ in range(2) for batch in loader])
    same, alike, other = drawn
    assert same == alike
    assert all(one != two for one, two in zip(same, other, strict=True))
    assert same[:2] != same[2:]  # another epoch
    with pytest.raises(hybrid.BatchError, match="seed is -1"):
        hybrid.loader_generator(-1)
