"""Pipelines with all else that a strategy has: under every setting, the numbers of one plain process.

The default run is a cover of all pairs of settings at 2 and 4 ranks, and three cases at 8. The product of those that
interact most, the others taking turns, runs with

    python -m pytest tests/multi_rank/test_pipeline_parity.py -m full        # some thousand cases
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import hybrid
from hybrid.collectives.deferred import deferred_backend
from hybrid.sharding import gradient_sink
from tests.case_worlds import CaseWorlds, selected_cases
from tests.cpu_products import small_products_by_onednn
from tests.pairwise import cover, everything, missing_pairs
from tests.parity import LOW, TOLERANCES, compare_tensors
from tests.pipeline_models import (
    CLIPS,
    MODELS,
    PRECISIONS,
    SCHEDULES,
    TWO_CHUNKS,
    Case,
    batch_of,
    build,
    cross_entropy,
    make_adamw,
    own,
)

STEPS = 5
STEPS_WITH_GRADIENTS = (0, 2)  # reading settles them, so the other steps take the way that nobody watches

FACTORS: dict[str, tuple[Any, ...]] = {
    "pp": (2, 4, 1),
    "tp": (1, 2),
    "dp_shard": (1, 2),
    "dp_replicate": (1, 2),
    "zero_stage": (0, 1, 2, 3),
    "schedule": SCHEDULES,
    "mb": (4, 2, 3, 1),
    "model": tuple(MODELS),
    "precision": tuple(PRECISIONS),
    "clip": tuple(CLIPS),
    "recompute": ("none", "full"),
    "split": ("auto", "uneven"),
    "built": ("after", "before"),
    "grad_reduce": ("auto", "every_micro_batch", "last_micro_batch", 2),
    "backend": ("gloo", "deferred"),
}

# In the default run: what the rest of the suite covers without a pipeline is left to the full run.
DEFAULT: dict[str, tuple[Any, ...]] = FACTORS | {
    "schedule": ("1f1b", "interleaved", "zb-h1", "zbv"),
    "mb": (4, 3, 1),
    "pp": (2, 4),
    "model": ("thrice", "shared", "own"),
    "precision": ("fp64", "bf16O2", "fp16"),
    "grad_reduce": ("auto", "every_micro_batch"),
    "clip": ("norm", "value"),
}

# The full run multiplies these; of the others each case takes the next combination in turn.
CORE = ("pp", "tp", "dp_shard", "dp_replicate", "zero_stage", "schedule", "mb", "model")


def allowed(choice: dict[str, Any], *, most_ranks: int = 8) -> bool:
    """Leaves out what a strategy refuses or would not use, and too many ranks for this machine."""
    pp, mb, zero_stage = choice.get("pp", 2), choice.get("mb", 4), choice.get("zero_stage", 2)
    ranks = pp * choice.get("tp", 1) * choice.get("dp_shard", 1) * choice.get("dp_replicate", 1)
    if ranks > most_ranks or (zero_stage == 0 and choice.get("dp_shard", 1) > 1):
        return False
    if choice.get("model") == "thrice" and choice.get("tp", 1) > 1:
        return False  # tensor parallel cuts the embedding, and its third user computes with it whole
    if choice.get("schedule", "1f1b") == "interleaved" and (pp == 1 or mb % pp):
        return False
    if pp == 1 and (choice.get("schedule", "1f1b") != "1f1b" or choice.get("split", "auto") != "auto"):
        return False
    if choice.get("split") == "uneven" and pp == 4 and choice.get("schedule", "1f1b") in TWO_CHUNKS:
        return False  # 8 layers in 8 chunks
    grad_reduce = choice.get("grad_reduce", "auto")
    if grad_reduce in {"every_micro_batch", 2} and zero_stage < 2:
        return False
    return not (grad_reduce == 2 and mb < 2)


def full_cases(pp: int, zero_stage: int) -> Iterator[Case]:
    rest = {name: values for name, values in FACTORS.items() if name not in CORE}
    turns = [dict(zip(rest, values, strict=True)) for values in product(*rest.values())]
    core = {name: FACTORS[name] for name in CORE} | {"pp": (pp,), "zero_stage": (zero_stage,)}
    for index, choice in enumerate(everything(core, allowed=allowed)):
        # A step that shares no divisor with the number of turns meets them all before it repeats one.
        first = index * 29 % len(turns)
        merged = ({**choice, **turn} for turn in turns[first:] + turns[:first])
        yield Case(**next(filter(allowed, merged)))


ALLOWED = functools.partial(allowed, most_ranks=4)
# In this order the choice is smallest.
ORDER = ["recompute", "tp", "dp_replicate", "model", "pp", "backend", "clip", "mb", "zero_stage", "split"]
ORDER += ["grad_reduce", "dp_shard", "built", "schedule", "precision"]
PAIRS = cover({name: DEFAULT[name] for name in ORDER}, allowed=ALLOWED)
CASES = [
    *(Case(**choice) for choice in PAIRS),
    Case(pp=2, tp=2, dp_shard=2, zero_stage=3, schedule="interleaved", model="tied", clip="norm"),
    Case(pp=2, dp_shard=2, dp_replicate=2, zero_stage=2, model="layers", grad_reduce=2, mb=3),
    Case(pp=4, dp_shard=2, zero_stage=3, model="thrice", precision="fp64", recompute="full", backend="deferred"),
]


# ---- both runs -------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Record:
    """What a run saw; gradients are those when the step begins."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[int, dict[str, torch.Tensor | None]] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    eval_loss: float = math.nan
    held: list[dict[str, str]] = field(default_factory=list)
    """By step: digests of the parameters that this rank holds, under names that say which part it is."""

    def whole(self) -> dict[str, str]:
        """Digests of all that must be equal on all ranks."""
        values: dict[str, Any] = {"losses": self.losses, "norms": self.norms, "evaluation loss": self.eval_loss}
        for step, gradients in self.gradients.items():
            values |= {f"gradient of {fqn} at step {step}": gradient for fqn, gradient in gradients.items()}
        values |= {f"weight {fqn}": weight for fqn, weight in self.weights.items()}
        values |= {f"state {key} of {fqn}": v for fqn, state in self.state.items() for key, v in state.items()}
        return {name: digest(value) for name, value in {**values, "groups": self.groups}.items()}


def digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        value = (str(value.dtype), tuple(value.shape), bits)
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


@functools.cache
def reference(name: str, dtype: torch.dtype, clip: str) -> Record:
    model, record, chosen = build(name, dtype=dtype), Record(), CLIPS[clip]
    if isinstance(model, hybrid.PipelineLayer):
        model.build()
    optimizer = make_adamw(model)
    for step in range(STEPS):
        tokens, labels = batch_of(step)
        loss = cross_entropy(model(tokens), labels)
        loss.backward()
        record.losses.append(loss.item())
        record.norms.append(
            nn.utils.clip_grad_norm_(model.parameters(), chosen if isinstance(chosen, float) else math.inf).item()
        )
        if isinstance(chosen, dict):
            nn.utils.clip_grad_value_(model.parameters(), chosen["clip_value"])
        record.gradients[step] = {
            fqn: None if p.grad is None else p.grad.clone() for fqn, p in model.named_parameters() if p.requires_grad
        }
        optimizer.step()
        optimizer.zero_grad()
    names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    record.weights = {fqn: value.detach().clone() for fqn, value in model.state_dict().items()}
    record.state = {names[id(p)]: dict(state) for p, state in optimizer.state.items()}
    record.groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    tokens, labels = batch_of(STEPS)
    with torch.no_grad():
        record.eval_loss = cross_entropy(model.eval()(tokens), labels).item()
    return record


def train(case: Case) -> Record:
    """What this rank sees when it trains under the case's strategy."""
    usual, chance = gradient_sink._LEAST_ELEMENTS, zlib.crc32(case.id.encode())
    # These models have no large matrix: in about every other case small ones count as such.
    gradient_sink._LEAST_ELEMENTS = 1 if chance % 2 else usual
    backend = deferred_backend() if case.backend == "deferred" else contextlib.nullcontext()
    try:
        with small_products_by_onednn(chance // 2 % 2 == 1), backend:
            record = _train(case)
            hybrid.shutdown()
    finally:
        gradient_sink._LEAST_ELEMENTS = usual
    return record


def _train(case: Case) -> Record:
    model: Any = build(case.model, split=case.counts, dtype=case.dtype)
    if isinstance(model, hybrid.PipelineLayer) and case.built == "before":
        model.build()
    if torch.distributed.get_rank() > 0 and not isinstance(model, hybrid.PipelineLayer):
        with torch.no_grad():  # wrapping must give every rank the first one's values
            for parameter in model.parameters():
                parameter.add_(1)
    optimizer: Any = make_adamw(model) if case.built == "before" else None
    sample = batch_of(0)[0][:2] if case.model == "own" and case.pp > 1 else None
    model = hybrid.distributed_model(model, strategy=case.strategy(), sample=sample)
    optimizer = hybrid.distributed_optimizer(optimizer or make_adamw(model))
    keywords = {} if case.model in {"layers", "shared"} and case.pp > 1 else {"loss_fn": cross_entropy}
    record, mesh = Record(), hybrid.get_mesh()
    layout = [mesh.degree(axis) for axis in ("pp", "tp", "dp_shard", "dp_replicate")]
    assert layout == [case.pp, case.tp, case.dp_shard, case.dp_replicate], layout

    def look(*_: Any) -> None:
        if len(record.losses) in STEPS_WITH_GRADIENTS:
            record.gradients[len(record.losses)] = dict(model.named_gradients())

    optimizer.register_step_pre_hook(look)
    for step in range(STEPS):
        result = model.train_batch(own(batch_of(step)), optimizer, **keywords)
        assert not result.skipped
        assert result.samples == len(batch_of(step)[0])
        record.norms.append(result.grad_norm.item())
        record.losses.append(result.loss.item())
        record.held.append(dict(held_here(model, mesh.coordinate("tp"))))
    record.weights = model.full_state_dict()
    saved = optimizer.full_state_dict()
    record.groups = saved["param_groups"]
    for fqn, state in saved["state"].items():
        master = state.pop("master", None)  # under O2; even of a parameter that had no gradient yet
        assert master is None or torch.equal(master, record.weights[fqn]), f"the master of {fqn} is not its value"
        if state:
            record.state[fqn] = state
    record.eval_loss = model.eval_batch(own(batch_of(STEPS)), **keywords).loss.item()
    return record


def held_here(model: Any, tp_rank: int) -> Iterator[tuple[str, str]]:
    """Tied parameters have one name on all their stages. *Collective* at stage 3."""
    runtime = model.hybrid_runtime
    for fqn, parameter in runtime.engine.parameters.items():
        is_cut = runtime.cuts is not None and runtime.cuts.own(fqn) is not None
        with runtime.engine.whole([fqn]):
            yield f"{fqn}{f' part {tp_rank}' if is_cut else ''}", digest(parameter.detach().clone())


# ---- comparison ------------------------------------------------------------------------------------------------------


def worlds(cases: Sequence[Case]) -> CaseWorlds[Case]:
    return CaseWorlds(cases, run=train, verify=verify)


def verify(case: Case, records: Sequence[Record]) -> list[str]:
    """Sentences about what differs: between ranks in any bit, or from the plain run by more than the table."""
    mine, problems = records[0], list(_differences(records))
    plain = reference(case.model, case.dtype, case.clip)
    is_low = isinstance(PRECISIONS[case.precision], dict)
    compare = functools.partial(compare_tensors, problems, LOW if is_low else TOLERANCES[case.dtype])
    for step in range(STEPS):
        compare("loss", f"loss at step {step}", mine.losses[step], plain.losses[step])
        compare("norm", f"norm at step {step}", mine.norms[step], plain.norms[step])
    compare("loss", "evaluation loss", mine.eval_loss, plain.eval_loss)
    for step in STEPS_WITH_GRADIENTS:
        gradients, wanted = mine.gradients[step], plain.gradients[step]
        if set(gradients) != set(wanted):
            problems.append(f"gradients of {list(gradients)}, not {list(wanted)}")
        # Clipping by value leaves a rounding of what was larger than the limit as large as it was.
        for fqn in wanted if not (is_low and case.clip == "value") else ():
            compare("gradient", f"gradient of {fqn} at step {step}", gradients.get(fqn), wanted[fqn])
    if list(mine.weights) != list(plain.weights):
        problems.append(f"weights are {list(mine.weights)}, not {list(plain.weights)}")
    for fqn, weight in plain.weights.items():
        compare("weight", f"weight {fqn}", mine.weights.get(fqn), weight)
    if mine.groups != plain.groups:
        problems.append(f"param groups are {mine.groups}, not {plain.groups}")
    if set(mine.state) != set(plain.state):
        more, less = set(mine.state) - set(plain.state), set(plain.state) - set(mine.state)
        problems.append(f"state exists for {sorted(more)} too, and not for {sorted(less)}")
    for fqn in set(plain.state) & set(mine.state):
        for key, value in plain.state[fqn].items():
            compare("state", f"state {key} of {fqn}", mine.state[fqn].get(key), value)
    fresh = build(case.model, dtype=case.dtype)
    if isinstance(fresh, hybrid.PipelineLayer):
        fresh.build()
    fresh.load_state_dict(mine.weights, strict=True)  # raises where a name or a shape is not the plain model's
    return problems


def _differences(records: Sequence[Record]) -> Iterator[str]:
    """Whatever two ranks both have, and not to the bit."""
    first = records[0].whole()
    for rank, record in enumerate(records):
        other = record.whole()
        yield from (f"{name} differs on rank {rank}" for name in first if other.get(name) != first[name])
    for step in range(STEPS):
        seen: dict[str, tuple[int, str]] = {}
        for rank, record in enumerate(records):
            for name, value in record.held[step].items():
                before = seen.setdefault(name, (rank, value))
                if before[1] != value:
                    yield f"after step {step}, {name} differs between ranks {before[0]} and {rank}"


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> CaseWorlds[Case]:
    """One world per number of ranks, for the cases that this session has selected."""
    return worlds(selected_cases(request, Case))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_equals_one_process(case: Case, runs: CaseWorlds[Case]) -> None:
    """Losses, gradients, norm, weights, optimizer state: equal to plain torch, and alike on all ranks."""
    problems = runs.problems(case)
    assert not problems, "\n".join([f"{len(problems)} differences, among them", *problems[:8]])


@pytest.mark.full
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_whole_product_equals_one_process(pp: int, zero_stage: int) -> None:
    """The same promise for every combination of the settings that interact most."""
    chosen = list(full_cases(pp, zero_stage))
    all_runs = worlds(chosen)
    failed = {case.id: all_runs.problems(case) for case in chosen}
    wrong = [f"{name}: {len(found)} differences, first: {found[0]}" for name, found in failed.items() if found]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(chosen)} cases", *wrong])


def test_every_pair_of_settings_is_in_the_default_run() -> None:
    """The cover covers, and stays small."""
    assert missing_pairs(PAIRS, {name: DEFAULT[name] for name in ORDER}, allowed=ALLOWED) == []
    assert len(CASES) <= 25
    assert len({case.id for case in CASES}) == len(CASES)


@pytest.mark.parametrize("model", MODELS)
def test_clipping_bites_in_the_reference(model: str) -> None:
    """The matrix would prove nothing about clipping if the gradients stayed below its limits."""
    free, limited = reference(model, torch.float32, "none"), reference(model, torch.float32, "value")
    assert sum(norm > CLIPS["norm"] for norm in free.norms) >= STEPS // 2
    assert limited.losses != free.losses
