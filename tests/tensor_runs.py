"""Runs of tests/tensor_models.py over tp ranks, compared with one plain process.

    problems = Runs(cases).problems(case)          # one sentence for each number that differs; none is right

Compared, over `STEPS` steps: every loss, every gradient by name at some steps, the norm, and at the end every weight
and the optimizer's state by name. Whole values must be the same on all ranks to the bit; so must, after each step,
whatever two ranks both hold: replicated weights, and copies of one head. Tolerances: tests/parity.py.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import traceback
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import hybrid
from hybrid.collectives.deferred import deferred_backend
from tests.cpu_products import small_products_by_onednn
from tests.parity import LOW, TOLERANCES, compare_tensors
from tests.ranks import RankFailure, run_plain, run_ranks
from tests.tensor_case import CLIP, TensorCase
from tests.tensor_gpt import SAMPLES, Batch
from tests.tensor_models import MODELS, build

__all__ = ["STEPS", "Record", "Runs", "assert_copies_alike", "data_rank", "digest", "own_samples", "reference"]

STEPS = 5
CASES_OF_A_WORLD = 16
"""At most: what ends a world is then to be looked for among these, and only they are lost."""
STEPS_WITH_GRADIENTS = (0, 2)


@dataclass(slots=True, kw_only=True)
class Record:
    """What a run saw; gradients are those when the step begins, `raw` those before clipping."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[int, dict[str, torch.Tensor | None]] = field(default_factory=dict)
    raw: dict[int, dict[str, torch.Tensor | None]] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    held: list[dict[str, str]] = field(default_factory=list)
    """By step: digests of what this rank has in common with others, each under a name of the values."""

    def whole(self) -> dict[str, str]:
        """Digests of all that must be equal on all ranks."""
        values: dict[str, Any] = {f"norm at step {step}": norm for step, norm in enumerate(self.norms)}
        for step, gradients in self.gradients.items():
            values |= {f"gradient of {fqn} at step {step}": gradient for fqn, gradient in gradients.items()}
        values |= {f"weight {fqn}": weight for fqn, weight in self.weights.items()}
        values |= {f"state {key} of {fqn}": v for fqn, state in self.state.items() for key, v in state.items()}
        return {name: digest(value) for name, value in values.items()}


def digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        value = (str(value.dtype), tuple(value.shape), raw)
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


# ---- one plain process -----------------------------------------------------------------------------------------------


@functools.cache
def reference(model: str, dtype: torch.dtype, clip: bool) -> Record:
    """The plain run; models of transformers run in a process that has it loaded already."""
    return _train_plain(model, dtype, clip) if MODELS[model].plan else run_plain(_train_plain, model, dtype, clip)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """With a large eps: biases of keys have gradient 0, of which rounding makes 1e-10 of either sign."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "lr": 1e-2, "weight_decay": 0.1},
        {"params": others, "lr": 3e-3, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], eps=1e-3)


def _train_plain(name: str, dtype: torch.dtype, clip: bool) -> Record:
    chosen, model = MODELS[name], build(name, dtype=dtype)
    optimizer, record = make_optimizer(model), Record()
    for step in range(STEPS):
        loss = chosen.loss(model, _cut(chosen.batch(step), 0, SAMPLES, dtype))
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        loss.backward()
        record.losses.append(loss.item())
        record.raw[step] = _gradients(model)
        record.norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP if clip else math.inf).item())
        record.gradients[step] = _gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    record.weights = {fqn: value.detach().clone() for fqn, value in model.state_dict().items()}
    record.state = {names[id(p)]: dict(state) for p, state in optimizer.state.items()}
    return record


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        fqn: None if parameter.grad is None else parameter.grad.clone()
        for fqn, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _cut(batch: Batch, start: int, end: int, dtype: torch.dtype) -> Batch:
    part = {name: value[start:end] for name, value in batch.items()}
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in part.items()}


# ---- one rank --------------------------------------------------------------------------------------------------------


def data_rank() -> tuple[int, int]:
    """This rank's place among those with other data, and their number."""
    mesh = hybrid.get_mesh()
    rank = mesh.coordinate("dp_replicate") * mesh.degree("dp_shard") + mesh.coordinate("dp_shard")
    return rank, mesh.degree("dp_replicate") * mesh.degree("dp_shard")


def own_samples(batch: Batch, dtype: torch.dtype = torch.float32, *, piece: int = 0, pieces: int = 1) -> Batch:
    """What this rank gets of a global batch, or a piece of that."""
    rank, ranks = data_rank()
    size = SAMPLES // ranks // pieces
    start = rank * (SAMPLES // ranks) + piece * size
    return _cut(batch, start, start + size, dtype)


def held_twice(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Values of this rank that others hold as well, under a name that says what they are. *Collective* at stage 3."""
    cuts = model.hybrid_runtime.cuts
    engine = model.hybrid_runtime.engine
    for fqn, parameter in engine.parameters.items():
        cut = cuts.own(fqn)
        with engine.whole([fqn]):
            yield f"{fqn} {'' if cut is None else cut.pieces}", parameter.detach().clone()


def assert_copies_alike(model: Any, when: object = "") -> None:
    """What two ranks both hold is the same to the bit. *Collective* over all ranks."""
    mine = {name: digest(value) for name, value in held_twice(model)}
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    for rank, other in enumerate(everyone):
        differing = [name for name in mine if name in other and other[name] != mine[name]]
        assert not differing, f"{when}: {differing} differ from those of rank {rank}"


def train(case: TensorCase) -> Record:
    """What this rank sees when it trains under the case's strategy; in about every other case by other products."""
    with small_products_by_onednn(zlib.crc32(case.id.encode()) % 2 == 1):
        return _train(case)


def _train(case: TensorCase) -> Record:
    chosen, model = MODELS[case.model], build(case.model, dtype=case.dtype)
    if torch.distributed.get_rank() > 0:  # wrapping must give every rank the first one's values
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    optimizer = make_optimizer(model) if case.built == "before" else None
    model: Any = hybrid.distributed_model(model, strategy=case.strategy())
    optimizer: Any = hybrid.distributed_optimizer(optimizer or make_optimizer(model))
    record = Record()

    def look(*_: Any) -> None:
        step = len(record.losses)
        if step in STEPS_WITH_GRADIENTS:
            record.gradients[step] = dict(model.named_gradients())

    optimizer.register_step_pre_hook(look)
    for step in range(STEPS):
        if case.way == "nosync":
            loss, norm = _plain_step(case, model, optimizer, step)
        else:
            batch = own_samples(chosen.batch(step), case.dtype)
            result = model.train_batch(batch, optimizer, forward_step=chosen.loss)
            assert not result.skipped
            loss, norm = result.loss.item(), result.grad_norm.item()
        record.norms.append(norm)
        record.losses.append(loss)
        record.held.append({name: digest(value) for name, value in held_twice(model)})
    record.weights = model.full_state_dict()
    record.state = optimizer.full_state_dict()["state"]
    for fqn, state in list(record.state.items()):
        master = state.pop("master", None)  # under O2; even of a parameter that had no gradient yet
        assert master is None or torch.equal(master, record.weights[fqn]), f"the master of {fqn} is not its value"
        if not state:
            del record.state[fqn]
    return record


def _plain_step(case: TensorCase, model: Any, optimizer: Any, step: int) -> tuple[float, float]:
    """Backward over two halves of the batch; the loss is that of the own samples."""
    chosen, loss_sum = MODELS[case.model], 0.0
    for piece in range(2):
        with model.no_sync() if piece == 0 else contextlib.nullcontext():
            loss = chosen.loss(model, own_samples(chosen.batch(step), case.dtype, piece=piece, pieces=2)) / 2
            loss.backward()
        loss_sum += loss.item()
    norm = model.clip_grad_norm_(CLIP if case.clip == "call" else math.inf).item()
    optimizer.step()
    (optimizer if step % 2 else model).zero_grad()
    return loss_sum, norm


def _run_world(cases: Sequence[TensorCase]) -> list[Record | str]:
    """All cases of one world in turn; one that raises alike on all ranks does not take the others with it."""
    results: list[Record | str] = []
    for case in cases:
        try:
            with deferred_backend() if case.backend == "deferred" else contextlib.nullcontext():
                results.append(train(case))
        except Exception:
            results.append(traceback.format_exc())
        finally:
            hybrid.shutdown()
    return results


# ---- comparison ------------------------------------------------------------------------------------------------------


class Runs:
    """Runs all cases of one size in one world, when the first of them is asked for."""

    def __init__(self, cases: Sequence[TensorCase]) -> None:
        self._cases = list(cases)
        self._problems: dict[TensorCase, list[str]] = {}

    def problems(self, case: TensorCase) -> list[str]:
        """Everything in which the case differs from the plain run; a world that failed is a problem too."""
        if case not in self._problems:
            alike = [other for other in self._cases if other.world_size == case.world_size] or [case]
            first = alike.index(case) // CASES_OF_A_WORLD * CASES_OF_A_WORLD if case in alike else 0
            alike = alike[first : first + CASES_OF_A_WORLD]
            try:
                ranks = run_ranks(
                    _run_world, case.world_size, alike,
                    timeout_seconds=30 + 12 * len(alike), group_timeout_seconds=20,
                )  # fmt: skip
            except RankFailure as error:
                self._problems |= {other: [f"one of {len(alike)} cases: {error}"] for other in alike}
                return self._problems[case]
            for index, other in enumerate(alike):
                self._problems[other] = verify(other, [results[index] for results in ranks])
        return self._problems[case]


def verify(case: TensorCase, ranks: Sequence[Record | str]) -> list[str]:
    """Sentences about what differs: between ranks in any bit, or from the plain run by more than the table."""
    failed = {result.strip().rpartition("\n")[2]: result for result in ranks if isinstance(result, str)}
    if failed:
        return list(failed.values())  # what all ranks raise is told once
    records = [record for record in ranks if isinstance(record, Record)]
    mine, problems = records[0], list(_differences(case, records))
    plain = reference(case.model, case.dtype, case.clip != "none")
    compare = functools.partial(compare_tensors, problems, TOLERANCES[case.dtype] if case.amp == "none" else LOW)
    for step in range(STEPS):
        loss = math.fsum(record.losses[step] for record in records) / len(records)
        compare("loss", f"loss at step {step}", loss, plain.losses[step])
        compare("norm", f"norm at step {step}", mine.norms[step], plain.norms[step])
    if tuple(mine.gradients) != STEPS_WITH_GRADIENTS:
        problems.append(f"gradients were read at steps {list(mine.gradients)}")
    # In a plain loop the strategy clips inside of the step.
    wanted_gradients = plain.raw if (case.way, case.clip) == ("nosync", "strategy") else plain.gradients
    for step, gradients in mine.gradients.items():
        if set(gradients) != set(wanted_gradients[step]):
            problems.append(f"gradients of {sorted(gradients)}, not {sorted(wanted_gradients[step])}")
        for fqn, wanted in wanted_gradients[step].items():
            compare("gradient", f"gradient of {fqn} at step {step}", gradients.get(fqn), wanted)
    if list(mine.weights) != list(plain.weights):
        problems.append(f"weights are {list(mine.weights)}, not {list(plain.weights)}")
    for fqn, weight in plain.weights.items():
        compare("weight", f"weight {fqn}", mine.weights.get(fqn), weight)
    if set(mine.state) != set(plain.state):
        more, less = set(mine.state) - set(plain.state), set(plain.state) - set(mine.state)
        problems.append(f"state exists for {sorted(more)} too, and not for {sorted(less)}")
    for fqn in set(plain.state) & set(mine.state):
        for key, value in plain.state[fqn].items():
            compare("state", f"state {key} of {fqn}", mine.state[fqn].get(key), value)
    return problems


def _differences(case: TensorCase, records: Sequence[Record]) -> Iterator[str]:
    """Whatever two ranks both have, and not to the bit."""
    first = records[0].whole()
    for rank, record in enumerate(records):
        other = record.whole()
        yield from (f"{name} differs on rank {rank}" for name in first if other.get(name) != first[name])
        if record.losses != records[rank - rank % case.tp].losses:
            yield f"losses differ between tp ranks: {record.losses}"
    for step in range(STEPS):
        seen: dict[str, tuple[int, str]] = {}
        for rank, record in enumerate(records):
            for name, value in record.held[step].items():
                before = seen.setdefault(name, (rank, value))
                if before[1] != value:
                    yield f"after step {step}, {name} differs between ranks {before[0]} and {rank}"
