"""Parity: the same model, weights and batches through one plain torch process and through a layout of hybrid.

    problems = Worlds(cases).problems(case)        # one sentence for each number that differs; none is right

Compared, over `STEPS` steps: every loss, every gradient by name, the norm, and at the end every weight, the
optimizer's state and its groups by name, the buffers and an evaluation loss. Rank 0 is compared with the plain
process, and every other rank with rank 0, bitwise. Tolerances stand in one table and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hybrid
from tests.models import BATCH_SIZE, MODELS, build, cut
from tests.parity_case import CLIPS, PIECES, TRAIN_WAYS, Case, even_cuts, make_optimizer, pieces_of
from tests.ranks import RankFailure, run_ranks

__all__ = ["LOW", "STEPS", "TOLERANCES", "Record", "Worlds", "compare_tensors", "reference", "verify"]

STEPS = 5

# Gradients are read at these steps only: reading settles them, so the other steps take the way that nobody watches.
STEPS_WITH_GRADIENTS = (0, 1, 3)

# Largest |difference| allowed, as a part of the largest |value| of the plain run's tensor, or of `FLOORS` if that
# is more. float64 shows errors of the formulas (an epsilon, a scale); float32 is what users train in.
TOLERANCES = {
    torch.float32: {"loss": 1e-6, "norm": 1e-6, "gradient": 1e-5, "weight": 2e-6, "state": 1e-5, "buffer": 1e-6},
    # Losses and norms are returned in float32, whatever the dtype of the model.
    torch.float64: {"loss": 2e-7, "norm": 1e-7, "gradient": 1e-12, "weight": 1e-12, "state": 1e-12, "buffer": 1e-12},
}
# Half precision rounds each activation: only errors of a formula (a factor, a missing sum) are far outside.
LOW = {"loss": 2e-2, "norm": 5e-2, "gradient": 8e-2, "weight": 2e-2, "state": 0.1}
FLOORS = {"loss": 1e-2, "norm": 1e-2, "gradient": 1e-2, "weight": 1.0, "state": 1e-3, "buffer": 1.0}


@dataclass(slots=True, kw_only=True)
class Record:
    """What a run saw. `clipped` and `raw` gradients by step and name: a run of hybrid fills one of them."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    raw: dict[int, dict[str, torch.Tensor | None]] = field(default_factory=dict)
    clipped: dict[int, dict[str, torch.Tensor | None]] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    buffers: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """By rank: statistics are each rank's own."""
    saved_buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Those in the whole state: the first rank's, on every rank."""
    eval_loss: float = math.nan

    def digest(self) -> dict[str, str]:
        """Quantity -> hash of its bits, of all that must be equal on all ranks."""
        values: dict[str, Any] = {f"norm at step {step}": norm for step, norm in enumerate(self.norms)}
        for step, gradients in (self.raw | self.clipped).items():
            values |= {f"gradient of {fqn} at step {step}": gradient for fqn, gradient in gradients.items()}
        values |= {f"weight {fqn}": weight for fqn, weight in self.weights.items()}
        values |= {f"saved buffer {name}": buffer for name, buffer in self.saved_buffers.items()}
        values |= {f"state {key} of {fqn}": v for fqn, state in self.state.items() for key, v in state.items()}
        values |= {"groups": self.groups, "evaluation loss": self.eval_loss}
        return {name: _hash(value) for name, value in values.items()}


def _hash(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = (str(value.dtype), tuple(value.shape), value.contiguous().view(-1).numpy().tobytes())
    return hashlib.sha256(repr(value).encode()).hexdigest()


# -- one plain process ------------------------------------------------------------------------------------------


def reference(case: Case) -> Record:
    """The plain run that `case` must equal; cached, as many cases share one."""
    cuts = None
    if MODELS[case.model].couples_samples:
        ranks = even_cuts(0, BATCH_SIZE, case.world_size)
        cuts = tuple(tuple(pieces_of(case.way, start, end)) for start, end in ranks)
    return _train_plain(case.model, case.dtype, case.optimizer, case.clip, cuts)


@functools.cache
def _train_plain(
    name: str,
    dtype: torch.dtype,
    optimizer_name: str,
    clip: str,
    cuts: tuple[tuple[tuple[int, int], ...], ...] | None,
) -> Record:
    """Plain torch on the whole batch; for models that couple samples, piece by piece, with buffers per rank."""
    chosen, model = MODELS[name], build(name, dtype=dtype)
    optimizer = make_optimizer(optimizer_name, model)
    record = Record(buffers=[_copies(model.named_buffers()) for _ in cuts or (None,)])
    for step in range(STEPS):
        loss_sum = 0.0
        for rank, pieces in enumerate(cuts or (((0, BATCH_SIZE),),)):
            for buffer, saved in zip(model.buffers(), record.buffers[rank].values(), strict=True):
                buffer.copy_(saved)
            for start, end in pieces:
                if end > start:
                    batch = cut(chosen.batch(step), start, end, dtype=dtype)
                    loss = chosen.loss(model, batch) * ((end - start) / BATCH_SIZE)
                    loss.backward()
                    loss_sum += loss.item()
            record.buffers[rank] = _copies(model.named_buffers())
        record.losses.append(loss_sum)
        record.raw[step] = _gradients(model)
        record.norms.append(_clip_plain(model, clip))
        record.clipped[step] = _gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    record.weights = _copies(model.named_parameters(remove_duplicate=False))
    record.state = {names[id(p)]: dict(state) for p, state in optimizer.state.items()}
    record.groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    with torch.no_grad():
        record.eval_loss = chosen.loss(model.eval(), cut(chosen.batch(STEPS), 0, BATCH_SIZE, dtype=dtype)).item()
    return record


def _copies(named: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {fqn: tensor.detach().clone() for fqn, tensor in named}


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        fqn: None if parameter.grad is None else parameter.grad.clone()
        for fqn, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _clip_plain(model: nn.Module, clip: str) -> float:
    chosen = CLIPS[clip]
    max_norm, norm_type = chosen if isinstance(chosen, tuple) else (math.inf, 2.0)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    if isinstance(chosen, float):
        torch.nn.utils.clip_grad_value_(model.parameters(), chosen)
    return norm.item()


# -- one rank ---------------------------------------------------------------------------------------------------


def train_hybrid(case: Case) -> Record:
    """What this rank sees when it trains its part of every batch under the case's strategy."""
    rank = torch.distributed.get_rank()
    chosen, model = MODELS[case.model], build(case.model, dtype=case.dtype)
    if rank > 0:  # wrapping must give every rank the first one's values
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.add_(1)
    optimizer = make_optimizer(case.optimizer, model) if case.built == "before" else None
    model = hybrid.distributed_model(model, strategy=case.strategy())
    optimizer = hybrid.distributed_optimizer(optimizer or make_optimizer(case.optimizer, model))
    start, end = even_cuts(0, BATCH_SIZE, case.world_size)[rank]
    record = Record()
    if case.way in TRAIN_WAYS:
        _watch(model, optimizer, record)
    for step in range(STEPS):
        bounds = even_cuts(start, end, 1 if case.way == "train-mb3" else PIECES[case.way])
        parts = [cut(chosen.batch(step), *bound, dtype=case.dtype) for bound in bounds]
        if case.way in TRAIN_WAYS:
            _train_batches(model, optimizer, parts, chosen.keywords(), record)
        else:
            _plain_loop(case, model, optimizer, parts, end - start, step, record)
    record.buffers = [_copies(model.named_buffers())]
    record.weights = model.full_state_dict()
    record.saved_buffers = {name: record.weights.pop(name) for name in record.buffers[0]}
    saved = optimizer.full_state_dict()
    record.state, record.groups = saved["state"], saved["param_groups"]
    evaluation = cut(chosen.batch(STEPS), start, end, dtype=case.dtype)
    record.eval_loss = model.eval_batch(evaluation, **chosen.keywords()).loss.item()
    return record


def _watch(model: Any, optimizer: Any, record: Record) -> None:
    """Read the gradients inside train_batch, when they are clipped and the step is about to begin."""

    def look(*_: Any) -> None:
        step = len(record.losses)
        if step in STEPS_WITH_GRADIENTS:
            record.clipped[step] = dict(model.named_gradients())

    optimizer.register_step_pre_hook(look)


def _train_batches(model: Any, optimizer: Any, parts: Sequence[Any], keywords: dict[str, Any], record: Record) -> None:
    loss_sum = samples = 0.0
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        result = model.train_batch(part, optimizer, step=is_last, **keywords)
        loss_sum += result.loss.item() * result.samples
        samples += result.samples
    assert not result.skipped
    record.norms.append(result.grad_norm.item())
    record.losses.append(loss_sum / samples)


def _plain_loop(
    case: Case, model: Any, optimizer: Any, parts: Sequence[Any], num_samples: int, step: int, record: Record
) -> None:
    """Backward over the parts; a rank's loss is the mean over its own samples, as with any data-parallel wrapper."""
    loss_sum = 0.0
    for index, part in enumerate(parts):
        size = len(next(iter(part.values() if isinstance(part, dict) else part)))
        is_last = index == len(parts) - 1
        with model.no_sync() if case.way == "nosync" and not is_last else contextlib.nullcontext():
            loss = MODELS[case.model].loss(model, part) * (size / num_samples)
            loss.backward()
        loss_sum += loss.item()
    clip = CLIPS[case.clip]
    max_norm, norm_type = clip if isinstance(clip, tuple) else (math.inf, 2.0)
    norm = None
    by_call = case.clip_by == "call"
    if step in STEPS_WITH_GRADIENTS or (by_call and isinstance(clip, tuple)):
        norm = model.clip_grad_norm_(max_norm if by_call else math.inf, norm_type).item()
    if by_call and isinstance(clip, float):
        model.clip_grad_value_(clip)
    if step in STEPS_WITH_GRADIENTS:
        (record.clipped if by_call else record.raw)[step] = dict(model.named_gradients())
    optimizer.step()
    (optimizer if step % 2 else model).zero_grad()
    record.norms.append(norm)
    record.losses.append(loss_sum)


def _run_world(cases: Sequence[Case], folder: str) -> None:
    """On each rank: run the cases in turn, and leave each result in a file as soon as it is there."""
    from hybrid.sharding import arrivals, gradient_sink

    rank = torch.distributed.get_rank()
    usual, usual_stretches = gradient_sink._LEAST_ELEMENTS, arrivals._STRETCHES
    for index, case in enumerate(cases):
        # These models have no large matrix: in every other case small ones count as such.
        gradient_sink._LEAST_ELEMENTS = 1 if index % 2 else usual
        # And their buckets are too small for neighbours to wait for each other: in half of the cases they do.
        arrivals._STRETCHES = 1 if index // 2 % 2 else usual_stretches
        backend = contextlib.nullcontext()
        if case.backend == "deferred":
            from hybrid.collectives.deferred import deferred_backend

            backend = deferred_backend()
        with backend:
            record = train_hybrid(case)
            hybrid.shutdown()
        seen = record if rank == 0 else Record(losses=record.losses, buffers=record.buffers)
        path = Path(folder, f"{index}-{rank}")
        path.with_suffix(".part").write_bytes(pickle.dumps((seen, record.digest())))
        path.with_suffix(".part").rename(path)


# -- comparison -------------------------------------------------------------------------------------------------


class Worlds:
    """Runs all cases of one size and backend in one world, when the first of them is asked for."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases = list(cases)
        self._problems: dict[Case, list[str]] = {}

    def problems(self, case: Case) -> list[str]:
        """Everything in which the case differs from the plain run; a world that failed is a problem too."""
        if case not in self._problems:
            alike = [c for c in self._cases if (c.world_size, c.backend) == (case.world_size, case.backend)]
            self._run([c for c in alike if c not in self._problems] if case in alike else [case])
        return self._problems[case]

    def _run(self, cases: list[Case]) -> None:
        """A case that fails takes its world with it: the ones after it get a fresh world."""
        while cases:
            with tempfile.TemporaryDirectory(prefix="hybrid-parity-") as folder:
                failure = None
                try:
                    run_ranks(
                        _run_world, cases[0].world_size, cases, folder,
                        timeout_seconds=30 + 2 * len(cases), group_timeout_seconds=20,
                    )  # fmt: skip
                except RankFailure as error:
                    failure = error
                done = 0
                for index, case in enumerate(cases):
                    paths = [Path(folder, f"{index}-{rank}") for rank in range(case.world_size)]
                    if not all(path.exists() for path in paths):
                        break
                    self._problems[case] = verify(case, [pickle.loads(path.read_bytes()) for path in paths])
                    done = index + 1
            if done < len(cases):
                self._problems[cases[done]] = [str(failure)]
                done += 1
            cases = cases[done:]


def verify(case: Case, ranks: Sequence[tuple[Record, dict[str, str]]]) -> list[str]:
    """Sentences about what differs: from rank to rank in any bit, or from the plain run by more than the table."""
    plain, mine = reference(case), ranks[0][0]
    problems = [
        f"{name} differs between rank 0 and rank {rank}"
        for rank, (_, digest) in enumerate(ranks)
        for name, value in digest.items()
        if ranks[0][1].get(name) != value
    ]
    losses = [sum(record.losses[step] for record, _ in ranks) / len(ranks) for step in range(STEPS)]
    compare = functools.partial(compare_tensors, problems, TOLERANCES[case.dtype])
    for step in range(STEPS):
        compare("loss", f"loss at step {step}", losses[step], plain.losses[step])
        if mine.norms[step] is not None:
            compare("norm", f"norm at step {step}", mine.norms[step], plain.norms[step])
    for got, wanted in ((mine.raw, plain.raw), (mine.clipped, plain.clipped)):
        for step, gradients in got.items():
            assert set(gradients) == set(wanted[step]), (sorted(gradients), sorted(wanted[step]))
            for fqn, gradient in gradients.items():
                compare("gradient", f"gradient of {fqn} at step {step}", gradient, wanted[step][fqn])
    if tuple(mine.raw | mine.clipped) != STEPS_WITH_GRADIENTS:
        problems.append(f"gradients were read at steps {sorted(mine.raw | mine.clipped)}")
    if set(mine.weights) != set(plain.weights):
        problems.append(f"weights are {sorted(mine.weights)}, not {sorted(plain.weights)}")
    for fqn in plain.weights:
        compare("weight", f"weight {fqn}", mine.weights.get(fqn), plain.weights[fqn])
    _compare_state(mine, plain, problems, compare)
    for name, buffer in plain.buffers[0].items():
        compare("buffer", f"saved buffer {name}", mine.saved_buffers.get(name), buffer)
    for rank, wanted_buffers in enumerate(plain.buffers if MODELS[case.model].couples_samples else []):
        for name, buffer in wanted_buffers.items():
            compare("buffer", f"buffer {name} on rank {rank}", ranks[rank][0].buffers[0].get(name), buffer)
    if not MODELS[case.model].couples_samples:
        compare("loss", "evaluation loss", mine.eval_loss, plain.eval_loss)
    return problems


def _compare_state(mine: Record, plain: Record, problems: list[str], compare: Any) -> None:
    if mine.groups != plain.groups:
        problems.append(f"param groups are {mine.groups}, not {plain.groups}")
    if set(mine.state) != set(plain.state):
        problems.append(f"state exists for {sorted(mine.state)}, not for {sorted(plain.state)}")
    for fqn in set(plain.state) & set(mine.state):
        if list(mine.state[fqn]) != list(plain.state[fqn]):
            problems.append(f"state of {fqn} has keys {list(mine.state[fqn])}, not {list(plain.state[fqn])}")
        for key, value in plain.state[fqn].items():
            compare("state", f"state {key} of {fqn}", mine.state[fqn].get(key), value)


def compare_tensors(
    problems: list[str], tolerances: dict[str, float], kind: str, what: str, got: Any, wanted: Any
) -> None:
    """Add a sentence to `problems` if `got` (tensor, number or None) is not `wanted`, by the table's row `kind`."""
    if got is None or wanted is None:
        if got is not wanted:
            problems.append(f"{what} is {'missing' if got is None else 'there'}, unlike in the plain run")
        return
    if isinstance(wanted, torch.Tensor):
        if got.dtype != wanted.dtype:
            problems.append(f"{what} is {got.dtype}, not {wanted.dtype}")
        if (got.shape, got.stride()) != (wanted.shape, wanted.stride()):
            mine, theirs = (tuple(got.shape), got.stride()), (tuple(wanted.shape), wanted.stride())
            problems.append(f"{what} has shape and strides {mine}, not {theirs}")
            return
    got, wanted = (torch.as_tensor(value, dtype=torch.float64) for value in (got, wanted))
    if wanted.numel() == 0:
        return
    difference = (got - wanted).abs().max().item()
    allowed = tolerances[kind] * max(wanted.abs().max().item(), FLOORS[kind])
    if not difference <= allowed:  # also where it is NaN
        problems.append(f"{what} is off by {difference:.2e}, more than the allowed {allowed:.2e}")
