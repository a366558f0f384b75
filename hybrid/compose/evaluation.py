"""Evaluation over a whole data set, and metrics over all ranks: every sample counts once, whoever read it.

Ranks may have different numbers of batches, and none at all. Where a forward is the work of one data-parallel rank
alone, each goes through its own batches and all meet at the end. Where ranks work on a forward together they agree
before each batch:

    tensor parallel, pipeline    ranks of one sample must all have a batch, or none; else all of them are told
    stage 3                      a rank that has no (micro-)batch left takes part with one that counts nothing
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid.collectives import ops
from hybrid.compose import context
from hybrid.compose.batch import num_samples, on_device, split_batch
from hybrid.compose.context import DATA_AXES
from hybrid.compose.even_batches import borrowed, check_same_group, everyones
from hybrid.compose.label_counts import NUM_LABEL_SUMS, uneven_labels
from hybrid.compose.losses import ForwardStep, LossFunction, check_functions, run_forward
from hybrid.compose.pipeline_step import evaluate_pipeline
from hybrid.compose.runtime import Runtime
from hybrid.compose.train_step import NUM_TOTALS, evaluating, mean_of
from hybrid.errors import BatchError, ModelError
from hybrid.pipeline.layers import PipelineLayer

__all__ = ["Evaluation", "evaluate", "reduce_metrics"]

Metrics = Callable[[Any, Any], Mapping[str, Any]]

_EXHAUSTED = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What `evaluate` found over all ranks.

    loss: mean over all samples (or tokens), 0-d; their sum under loss_reduction "sum"; 0 if there were none.
    count: samples or tokens that it is the mean of.
    samples: samples, each counted once.
    metrics: as `reduce_metrics` returns them.
    """

    loss: torch.Tensor
    count: int
    samples: int
    metrics: dict[str, float]


def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    loss_fn: LossFunction | None = None,
    *,
    forward_step: ForwardStep | None = None,
    metrics: Metrics | None = None,
) -> Evaluation:
    """Loss and metrics over all batches of all ranks' loaders, in eval mode, without gradients. *Collective.*

    Args:
        model: from `distributed_model`.
        loader: this rank's batches, any number of them, of any sizes, in what `eval_batch` takes.
        loss_fn, forward_step: as in `eval_batch`.
        metrics: `metrics(output, labels)` for each micro-batch (a dict batch: `metrics(output, batch)`), called where
            the loss is; returns what `reduce_metrics` takes.

    Raises:
        BatchError: batches without a way to a loss; `metrics`, `loss_fn` or `forward_step` that is no function of two
            arguments; ranks that work on the same samples have different numbers of batches (raised on every rank, with
            the ranks and the numbers).

    Warns:
        UserWarning: mean losses of batches with unequally many labels that count, which `train_batch` refuses.
    """
    runtime: Runtime | None = vars(model).get("hybrid_runtime")
    if runtime is None:
        raise ModelError(f"evaluate needs a model of distributed_model, got {type(model).__name__}")
    if forward_step is not None and (metrics is not None or runtime.stages is not None):
        what = "a pipeline, where no rank has the whole model" if runtime.stages is not None else "metrics"
        raise BatchError(f"evaluate: forward_step with {what}: give (inputs, labels) or dict batches, and loss_fn")
    check_functions("evaluate", metrics=metrics, loss_fn=loss_fn, forward_step=forward_step)
    runtime.check_parts()
    noted = _Noted(metrics)
    totals = torch.zeros(NUM_TOTALS, dtype=torch.float64, device=runtime.engine.device)
    with evaluating(model), torch.no_grad():
        for piece, counts in _pieces(runtime, loader):
            into = totals if counts else torch.zeros_like(totals)
            noted.is_open = counts
            if runtime.stages is not None:
                evaluate_pipeline(runtime, [piece], loss_fn, into, note=noted.note)
            else:
                step = forward_step
                if metrics is not None and isinstance(piece, Mapping):
                    step = noted.forward_step
                given = model.loss_fn if loss_fn is None and isinstance(model, PipelineLayer) else loss_fn
                run_forward(model, piece, noted.around(given), step, into, runtime.strategy.loss_reduction)
    ops.all_reduce(totals, group=runtime.mesh.group(*DATA_AXES, "pp"), control=True).wait()
    if said := uneven_labels(totals[-NUM_LABEL_SUMS:], ()):
        # Other batches of the same data would give another mean; the metrics, which are right, may have taken an hour.
        warnings.warn(f"evaluate: the loss depends on how the data is cut into batches: {said}", stacklevel=2)
    axes = (*DATA_AXES, "pp") if runtime.stages is not None else DATA_AXES
    return Evaluation(
        loss=mean_of(totals[0], totals[1], runtime.strategy.loss_reduction).to(runtime.engine.result_dtype),
        count=int(totals[1].item()),
        samples=int(totals[2].item()),
        metrics=_joined(noted.sums, runtime.mesh.group(*axes)) if metrics is not None else {},
    )


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of this rank's samples, over all data-parallel ranks. *Collective.*

    A pair (sum, count) becomes the mean over all ranks, sum / count (nan if nothing was counted); a number becomes the
    sum over all ranks. So ranks with fewer samples, or none, weigh what they have. Ranks may leave names out.

        correct, seen = (logits.argmax(-1) == labels).sum(), len(labels)
        hybrid.reduce_metrics({"accuracy": (correct, seen), "seen": seen})

    Raises:
        BatchError: a value that is neither; a name that is a pair on one rank and a number on another.
        HybridError: no job yet.
    """
    return _joined(_added({}, metrics), context.get_mesh().group(*DATA_AXES))


def _pieces(runtime: Runtime, loader: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Micro-batches with samples, each with whether it counts."""
    strategy = runtime.strategy
    together = strategy.zero_stage == 3 and strategy.shard_size > 1
    agrees = together or runtime.stages is not None or runtime.cuts is not None
    num_batches, last = 0, None
    batches = iter(loader)
    while True:
        batch = next(batches, _End)
        pieces = [] if batch is _End else _cut(runtime, batch)
        if not agrees:
            if batch is _End:
                return
            yield from ((piece, True) for piece in pieces)
            continue
        num_batches += batch is not _End
        here = _EXHAUSTED if batch is _End else float(len(pieces))
        counts = everyones(here, runtime.mesh)
        check_same_group(runtime.mesh, [count != _EXHAUSTED for count in counts], num_batches)
        if all(count == _EXHAUSTED for count in counts):
            return
        if batch is not _End:
            runtime.check_batch(batch)
        last = pieces[-1] if pieces else last
        # All that ranks say to each other comes before the forwards, in which some gather and some do not.
        if together and max(counts) > 0 >= min(counts) and min(everyones(float(last is not None), runtime.mesh)) == 0:
            last = borrowed(_first_sample(last), runtime.mesh)
        yield from ((piece, True) for piece in pieces)
        for _ in range(int(max(counts)) - len(pieces) if together else 0):
            yield last, False


_End = object()


def _cut(runtime: Runtime, batch: Any) -> list[Any]:
    """A batch in pieces of micro_batch_size samples, all of them with samples."""
    size, total = runtime.strategy.micro_batch_size, num_samples(batch)
    steps = runtime.strategy.accumulate_steps if size is None else -(-total // size)
    pieces = split_batch(batch, accumulate_steps=max(steps, 1), micro_batch_size=size, training=False)
    return on_device([piece for piece in pieces if num_samples(piece) > 0], runtime.engine.device)


def _first_sample(piece: Any) -> Any:
    if piece is None:
        return None
    return split_batch(piece, accumulate_steps=num_samples(piece), micro_batch_size=None)[0]


class _Noted:
    """Calls the user's metrics where output and labels are, and adds up what they return."""

    def __init__(self, metrics: Metrics | None) -> None:
        self._metrics = metrics
        self.is_open = True
        self.sums: dict[str, list[Any]] = {}

    def around(self, loss_fn: LossFunction | None) -> LossFunction | None:
        if self._metrics is None or loss_fn is None:
            return loss_fn

        def loss_and_metrics(output: Any, labels: Any) -> Any:
            self.note(output, labels)
            return loss_fn(output, labels)

        return loss_and_metrics

    def forward_step(self, model: nn.Module, batch: Any) -> Any:
        """Of a dict batch, as `run_forward` would go about it."""
        output = model(**batch)
        self.note(output, batch)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise BatchError(
                f"model(**batch) returned a {type(output).__name__} without a loss; put labels into the batch"
            )
        return loss

    def note(self, output: Any, labels: Any) -> None:
        """Labels, or the batch where the model takes them from it."""
        if self._metrics is not None and self.is_open:
            self.sums = _added(self.sums, self._metrics(output, labels))


def _added(sums: dict[str, list[Any]], more: Mapping[str, Any]) -> dict[str, list[Any]]:
    """[sum, count], or [sum] alone, of each name; tensors stay on their device until the end."""
    added = dict(sums)
    for name, value in more.items():
        parts = list(value) if isinstance(value, tuple | list) and len(value) == 2 else [value]
        for part in parts:
            is_number = part.numel() == 1 if isinstance(part, torch.Tensor) else isinstance(part, int | float)
            if not is_number:
                raise BatchError(
                    f"metric {name!r} is {value!r}; give a pair (sum, count) for a mean, or a number for a sum"
                )
        wide = [part.detach().double().reshape(()) if isinstance(part, torch.Tensor) else part for part in parts]
        known = added.get(name, [0] * len(wide))
        if len(known) != len(wide):
            raise BatchError(f"metric {name!r} is a pair in one place and a number in another")
        added[name] = [one + other for one, other in zip(known, wide, strict=True)]
    return added


def _joined(sums: Mapping[str, list[Any]], group: ops.Group) -> dict[str, float]:
    mine = {name: [float(part) for part in parts] for name, parts in sums.items()}
    joined: dict[str, list[Any]] = {}
    for theirs in ops.all_gather_object(mine, group=group):
        joined = _added(joined, {name: parts[0] if len(parts) == 1 else tuple(parts) for name, parts in theirs.items()})
    return {
        name: parts[0] if len(parts) == 1 else (parts[0] / parts[1] if parts[1] else math.nan)
        for name, parts in joined.items()
    }
