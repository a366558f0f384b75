"""What would fit where no split does: each setting that is named was tried, with the same figures.

Tried is one change at a time, and only what is not so already: what computes activations again, smaller micro-batches,
a schedule that keeps fewer, more of ZeRO, more stages, fewer ranks on a host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hybrid.compose.memory_limits import Limits
from hybrid.contracts.memory_split import MemorySplit, fullest_memory, split_by_memory
from hybrid.contracts.stage_memory import MemoryModel, StateRule
from hybrid.errors import StrategyError
from hybrid.strategy import ResolvedStrategy
from hybrid.strategy.resolved import PipelineSettings, RecomputeSettings
from hybrid.units import format_bytes

__all__ = ["MeasureAgain", "refusal", "state_rule"]

MeasureAgain = Callable[[ResolvedStrategy, bool], tuple[MemoryModel, str] | None]
"""(what changed, whether micro-batches are half as large) -> the memory, and how large they are, in words."""

_SHOWN = 3


def state_rule(resolved: ResolvedStrategy) -> StateRule:
    """How a strategy keeps the state of parameters."""
    return StateRule(
        zero_stage=resolved.zero_stage,
        num_shards=resolved.shard_size if resolved.zero_stage else 1,
        bucket_bytes=resolved.bucket_bytes,
        reduces_each=resolved.grad_reduce == "every_micro_batch",
        state_on_host=resolved.offload != "none",
        parameters_on_host=resolved.offload == "parameters",
        keeps_gathered=resolved.reshard_after == "run",
        step_bytes=8 if resolved.amp is not None and resolved.amp.level == "O2" else 4,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A way, in words, what the layers need then, and who shares a memory."""

    words: str
    memory: MemoryModel
    shared: Sequence[Sequence[int]]


def refusal(
    found: MemorySplit,
    costs: Sequence[float],
    memory: MemoryModel,
    resolved: ResolvedStrategy,
    limits: Limits,
    again: MeasureAgain,
) -> str:
    """Why no split fits, and what would do.

    Args:
        found: the leanest split.
        costs, memory: of the layers.
        resolved, limits: what was asked for.
        again: measures the layers under other settings.
    """
    most = limits.num_bytes
    assert most is not None
    fullest = found.fullest
    what = "temporaries of the optimizer's step" if fullest.is_step else "working memory of one layer"
    parts = {
        "state": fullest.state,
        "gradients": fullest.gradients,
        "activations": fullest.activations,
        what: fullest.working,
    }
    shown = ", ".join(f"{part} {format_bytes(size)}" for part, size in parts.items())
    sizes = ", ".join(str(len(chunk)) for chunk in found.chunks)
    split = f"no split of {len(memory.layers)} layers into {len(found.chunks)} chunks fits. The leanest, {sizes}, needs"
    if limits.host is None:
        needs = fullest.total
        said = f"{limits.source}: {split} {format_bytes(needs)} on stage {fullest.stage} ({shown})"
    else:
        needs = fullest_memory(found.stages, limits.host.ranks_of_stages(resolved))
        said = (
            f"the {limits.host.num_ranks} ranks of a host share {format_bytes(most)}: {split} {format_bytes(needs)} "
            f"for them together, most of it on stage {fullest.stage} ({shown} on a rank)"
        )
    fit: dict[str, str] = {}
    best: tuple[int, str] | None = None
    for change in _changes(memory, resolved, limits, again):
        setting = change.words.partition(" = ")[0]
        if setting in fit:  # its least value will do
            continue
        try:
            tried = split_by_memory(costs, change.memory, limit_bytes=most, shared=change.shared)
        except StrategyError:  # fewer layers than chunks
            continue
        total = fullest_memory(tried.stages, change.shared)
        if tried.fits:
            fit[setting] = f"{change.words} ({format_bytes(total)})"
        elif total < needs and (best is None or total < best[0]):
            best = total, change.words
        if len(fit) == _SHOWN:
            break
    if fit:
        said += f". Nearest: {'; or '.join(fit.values())}"
    elif best is not None:
        total, words = best
        said += (
            f". No one change of settings is enough; nearest: {words}, which leaves {format_bytes(total)}, "
            f"{format_bytes(total - most)} too much"
        )
    else:
        said += ". No other setting needs less: take more memory, or a smaller model"
    if limits.host is None:
        said += f"{'; or' if fit else '. Or'} pipeline_configs.memory_limit_bytes = {needs}, if there is as much"
    return said


def _changes(memory: MemoryModel, resolved: ResolvedStrategy, limits: Limits, again: MeasureAgain) -> Iterator[_Change]:
    """Those that are possible and not so already, those that cost least first."""
    assert resolved.pipeline is not None
    host = limits.host
    shared = () if host is None else host.ranks_of_stages(resolved)

    def ruled(words: str, changed: ResolvedStrategy) -> _Change:
        return _Change(
            words=words, memory=MemoryModel(memory.layers, state_rule(changed), memory.schedule), shared=shared
        )

    def scheduled(words: str, settings: PipelineSettings, changed: ResolvedStrategy) -> Iterator[_Change]:
        try:
            schedule = settings.order(changed.accumulate_steps)
        except StrategyError:  # not with so many micro-batches
            return
        yield _Change(words=words, memory=MemoryModel(memory.layers, state_rule(changed), schedule), shared=shared)

    # ZeRO over the ranks that there are.
    ranks = resolved.data_parallel_size
    if ranks > 1:
        if resolved.zero_stage and resolved.shard_size < ranks:
            yield ruled(f"sharding_configs.shard_size = {ranks}", replace(resolved, shard_size=ranks))
        for stage in range(resolved.zero_stage + 1, 4):
            reduced = resolved.grad_reduce if resolved.zero_stage >= 2 or stage < 2 else "every_micro_batch"
            size = resolved.shard_size if resolved.zero_stage else ranks
            yield ruled(
                f"sharding_configs.stage = {stage}" if resolved.zero_stage else f"sharding with stage = {stage}",
                replace(resolved, zero_stage=stage, shard_size=size, grad_reduce=reduced),
            )
    settings = resolved.pipeline
    if settings.schedule != "1f1b":
        plain = replace(settings, schedule="1f1b", virtual_stages=1)
        also = ", virtual_stages = 1" if settings.virtual_stages > 1 else ""
        yield from scheduled(f'pipeline_configs.schedule = "1f1b"{also}', plain, resolved)
    for recompute, words in _recomputes(resolved):
        measured = again(replace(resolved, recompute=recompute), False)
        if measured is not None:
            yield _Change(words=words, memory=measured[0], shared=shared)
    # Half as many samples are twice as many micro-batches, of which a schedule may keep more.
    steps = 2 * resolved.accumulate_steps
    measured = again(replace(resolved, accumulate_steps=steps), True)
    if measured is not None:
        words = f"micro-batches of {measured[1]}, accumulate_steps = {steps}"
        yield _Change(words=words, memory=measured[0], shared=shared)
    if host is None:
        if resolved.zero_stage and resolved.offload == "none" and limits.has_host_beside:
            yield ruled('sharding_configs.offload = "optimizer"', replace(resolved, offload="optimizer"))
        if resolved.zero_stage == 3 and resolved.offload != "parameters" and limits.has_host_beside:
            yield ruled('sharding_configs.offload = "parameters"', replace(resolved, offload="parameters"))
        for times in (2, 4, 8):
            degree = settings.degree * times
            if degree * settings.virtual_stages > len(memory.layers):
                break
            words, changed = f"pipeline_configs.degree = {degree}", resolved
            if ranks % times:
                words += f" on {resolved.world_size * times} ranks"
            else:  # fewer ranks get samples: each of them more micro-batches
                left, steps = ranks // times, resolved.accumulate_steps * times
                words += f", accumulate_steps = {steps}"
                if resolved.shard_size > left:
                    words += f", sharding_configs.shard_size = {left}"
                changed = replace(resolved, accumulate_steps=steps, shard_size=min(resolved.shard_size, left))
                if left % changed.shard_size:
                    continue
            yield from scheduled(words, replace(settings, degree=degree), changed)
    else:
        for number in range(host.num_ranks - 1, 0, -1):
            if host.num_ranks % number == 0:
                spread = replace(host, num_ranks=number).ranks_of_stages(resolved)
                words = f"{number} rank{'s' if number > 1 else ''} on each of {len(spread)} hosts"
                yield _Change(words=words, memory=memory, shared=spread)


def _recomputes(resolved: ResolvedStrategy) -> Iterator[tuple[RecomputeSettings, str]]:
    if resolved.recompute is None:
        yield RecomputeSettings(units=None, policy="full", preserve_rng=True), "recompute"
    elif resolved.recompute.policy == "selective":
        yield replace(resolved.recompute, policy="full"), 'recompute_configs.policy = "full"'
