"""`hybrid.dryrun`: what ranks of a job of any size would hold and do, found out by doing it without values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from hybrid.compose.own_forward import keeping_plans
from hybrid.dry.batch import make_batch, sample_length
from hybrid.dry.comparison import compare, job_of, with_comparison
from hybrid.dry.models import DryModel, dry_model
from hybrid.dry.rank_run import DryJob, RankRun, passing, run_rank
from hybrid.dry.result import DryRun, RankDryRun
from hybrid.errors import HybridError, ModelError, StrategyError
from hybrid.planner.job import OptimizerSpec
from hybrid.planner.request_reading import OPTIMIZERS
from hybrid.strategy import DistributedStrategy, ResolvedStrategy

__all__ = ["OPTIMIZER_NAMES", "dryrun"]

Optimizer = Callable[[Any], torch.optim.Optimizer]
Progress = Callable[[int, int], None]
"""(ranks done, ranks to do)."""

_OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(
    {
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
    }
)
OPTIMIZER_NAMES = tuple(_OPTIMIZERS)
_MOST_DISTINCT = 256
_MOST_PROCESSES = 1 << 20


def dryrun(
    strategy: DistributedStrategy,
    model: Any,
    *,
    world_size: int,
    ranks: Iterable[int] | None = None,
    all_distinct: bool = False,
    sample: Any = None,
    seq: int | None = None,
    optimizer: str | Optimizer = "adamw",
    progress: Progress | None = None,
) -> DryRun:
    """Rewrite a model as single ranks of a large job would, and run one step of each, without values and without them.

    `distributed_model`, `distributed_optimizer` and `train_batch` are the real ones. Tensors have shapes and types but
    no memory that is ever touched, and the other ranks are not there (`docs/dryrun.md`).

    Args:
        strategy: of the job.
        model: a function that makes the model, or (model, sample); `package.module:factory`; the name of a preset
            (`llama3-70b`); or a `config.json` of Transformers.
        world_size: processes of the job.
        ranks: which of them; None: the first.
        all_distinct: one of each kind of ranks that hold and send the same, instead of `ranks`.
        sample: an example batch as the model is called with it, where the function returns none; only shapes and types
            matter.
        seq: tokens per sample instead of the sample's.
        optimizer: a name of `OPTIMIZER_NAMES`, or parameters -> an ordinary optimizer.
        progress: called with (ranks done, ranks to do).

    Raises:
        StrategyError: settings that cannot work on this many processes, all of them; a rank that is not there.
        ModelError, OptimizerError, BatchError: as the real run would; a model that decides by values.
        PlanError: no model of that name.
        HybridError: this process is in a job already.
    """
    if isinstance(world_size, int) and world_size > _MOST_PROCESSES:
        raise StrategyError(
            f"world_size = {world_size:,}: a dry run takes at most {_MOST_PROCESSES:,} processes, for it lists all "
            "that are in a group with the rank; fewer replicas change neither shapes nor state: a smaller world_size"
        )
    resolved, notes = _without_values(strategy.resolve(world_size))
    if all_distinct and ranks is not None:
        raise StrategyError("all_distinct chooses the ranks, and ranks names others: leave one of them out")
    asked = [0] if ranks is None else list(dict.fromkeys(ranks))
    wrong = [
        rank for rank in asked if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size
    ]
    if wrong:
        raise StrategyError(
            f"rank {', '.join(map(str, wrong))}: the ranks of {world_size} processes are 0 to {world_size - 1}"
        )
    make_optimizer, spec = _optimizer(optimizer)
    described = dry_model(model, sample=sample, seq=seq)
    job = DryJob(
        strategy=strategy,
        resolved=resolved,
        make_model=described.make,
        make_batch=lambda own: make_batch(
            own,
            micro_batch_size=resolved.micro_batch_size,
            accumulate_steps=resolved.accumulate_steps,
            seq=described.seq,
        ),
        make_optimizer=make_optimizer,
        notes=(*described.notes, *notes),
        has_signatures=all_distinct,
    )
    with keeping_plans(), _of_another_length(described):
        if all_distinct:
            runs, alike = _distinct(job, progress)
        else:
            runs, alike = [], None
            for number, rank in enumerate(asked):
                runs.append(run_rank(job, rank))
                if progress is not None:
                    progress(number + 1, len(asked))
        if described.spec is not None and spec is not None:
            described = replace(described, spec=passing(job, described.spec))
    return DryRun(
        world_size=world_size,
        layout=resolved.layout.describe(),
        model=described.name,
        ranks=tuple(_compared(run, described, resolved, spec) for run in runs),
        alike=alike,
    )


@contextmanager
def _of_another_length(described: DryModel) -> Iterator[None]:
    """What torch says inside of a model that is given more tokens than it was made for tells nobody what to change."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        if described.seq is None or isinstance(error, HybridError):
            raise
        own = sample_length(described.make()[1])
        raise ModelError(
            f"seq = {described.seq}: {described.name} fails with samples of that length, its own have {own} "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); leave seq out, or give what the model takes"
        ) from error


def _without_values(resolved: ResolvedStrategy) -> tuple[ResolvedStrategy, tuple[str, ...]]:
    """The strategy without what needs values or kernels, and what was left out."""
    notes = []
    if resolved.compile is not None:
        notes.append("compile is left out: its kernels may keep other activations; state and collectives are the same")
    if resolved.tensor_parallel is not None:
        if resolved.tensor_parallel.verify:
            notes.append("tensor_parallel_configs.verify is left out: there are no values to compare")
        resolved = replace(resolved, tensor_parallel=replace(resolved.tensor_parallel, verify=False))
    return replace(resolved, compile=None, profile=None), tuple(notes)


def _optimizer(given: str | Optimizer) -> tuple[Optimizer, OptimizerSpec | None]:
    if not isinstance(given, str):
        return given, None
    if given not in _OPTIMIZERS:
        raise StrategyError(f"optimizer {given!r} is not known; known: {', '.join(_OPTIMIZERS)}")
    return _OPTIMIZERS[given], OPTIMIZERS[given]


def _compared(
    run: RankRun, described: DryModel, resolved: ResolvedStrategy, optimizer: OptimizerSpec | None
) -> RankDryRun:
    if described.spec is None or optimizer is None:
        return run.found
    job = job_of(
        described.spec,
        resolved,
        parameter_dtype=run.parameter_dtype,
        optimizer=optimizer,
        seq=run.seq if run.seq > 1 else described.spec.default_seq,
        size=run.micro_batch_size,
    )
    figures, notes = compare(
        run.found,
        job,
        resolved,
        size=run.micro_batch_size,
        chunks=run.chunks,
        local_sizes=run.local_sizes,
    )
    return with_comparison(run.found, figures, notes)


def _distinct(job: DryJob, progress: Progress | None) -> tuple[list[RankRun], Mapping[int, int]]:
    """One rank of each kind, and how many there are of it.

    Ranks of one pipeline stage differ by what tensor parallel leaves them (where it divides nothing evenly), and by the
    place in the shard group (what of the buckets' parameters, and how much padding, is there).
    """
    layout = job.resolved.layout
    replicas = layout.degree("dp_replicate") * layout.degree("cp")
    runs: list[RankRun] = []
    counts: dict[int, int] = {}
    for stage in range(layout.degree("pp")):
        first = run_rank(job, layout.rank_of(pp=stage))
        kinds: dict[tuple[int, ...], list[int]] = {}
        for tp, sizes in enumerate(first.local_sizes):
            kinds.setdefault(sizes, []).append(tp)
        for number, tps in enumerate(kinds.values()):
            run = first if number == 0 else run_rank(job, layout.rank_of(pp=stage, tp=tps[0]))
            places: dict[tuple[int, ...], list[int]] = {}
            for place, signature in enumerate(run.shard_signatures):
                places.setdefault(signature, []).append(place)
            if len(places) > _MOST_DISTINCT:
                raise StrategyError(
                    f"{len(places)} places of the shard group of {layout.degree('dp_shard')} ranks hold different "
                    f"slices on stage {stage}: more than {_MOST_DISTINCT} runs; name ranks instead"
                )
            for at, members in enumerate(places.values()):
                rank = layout.rank_of(pp=stage, tp=tps[0], dp_shard=members[0])
                one = run if at == 0 and members[0] == 0 else run_rank(job, rank)
                runs.append(one)
                counts[rank] = len(members) * len(tps) * replicas
                if progress is not None:
                    progress(len(runs), len(runs) + 1)
    return runs, MappingProxyType(counts)
