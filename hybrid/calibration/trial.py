"""One rank of a layout that `hybrid plan --measure` runs: some steps of the model, timed, and the memory they took."""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hybrid.calibration.clock import spread_of
from hybrid.collectives import ops
from hybrid.compose import context
from hybrid.compose.model import distributed_model
from hybrid.compose.optimizer import distributed_optimizer
from hybrid.errors import ModelError
from hybrid.launch.variables import LOG_DIR_VARIABLE
from hybrid.mesh import Mesh
from hybrid.planner.measure.trace import tensors_in
from hybrid.precision.tree import map_tensors

__all__ = ["RESULT_FILE", "SPEC_FILE", "TRIAL_OPTIMIZERS", "TrialResult", "TrialSpec", "run_trial"]

SPEC_FILE, RESULT_FILE = "trial_spec.json", "trial.json"
WARM_UP_STEPS = 2
LEAST_STEPS, MOST_STEPS = 5, 40

# Name of an `OptimizerSpec` -> what runs.
TRIAL_OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """What a layout's strategy does not say.

    Args:
        model: `package.module:factory`, which returns (model, sample).
        seq: tokens per sample.
        rows: samples per data-parallel rank and step.
        micro_batch_size: of them.
        optimizer: in `TRIAL_OPTIMIZERS`.
        steps: to measure; 0 for as many as `seconds` have room for.
        seconds: see `steps`.
    """

    model: str
    seq: int
    rows: int
    micro_batch_size: int
    optimizer: str
    steps: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """Over all ranks: median of the steps, their spread and number; bytes of the fullest rank.

    Args:
        state_bytes: parameters, gradients and optimizer state, between a backward and its step.
        process_bytes: the most that the process had.
        num_parameters: of the model that ran.
        torch: version that ran.
    """

    step_seconds: float
    spread: float
    num_steps: int
    state_bytes: int
    process_bytes: int
    num_parameters: int
    torch: str


def run_trial(spec: TrialSpec, strategy: Any = None) -> TrialResult:
    """Train as one rank of a world; all ranks call it alike, and get the same. `strategy`: None for the launcher's.

    Raises:
        ModelError: a factory that returns no sample, or a sample that gives no loss.
    """
    torch.manual_seed(0)
    plain, sample = _made(spec.model)
    num_parameters = sum(parameter.numel() for parameter in plain.parameters())
    sample = _at_length(sample, spec.seq)
    model = distributed_model(plain, strategy=strategy, sample=_rows(sample, spec.micro_batch_size))
    optimizer = distributed_optimizer(TRIAL_OPTIMIZERS[spec.optimizer](model.parameters()))
    mesh = context.get_mesh()
    batch = map_tensors(_rows(sample, spec.rows), lambda one: one.to(mesh.device))
    step = _step_of(model, optimizer, batch)
    once = 0.0
    for _ in range(WARM_UP_STEPS):
        once = _timed(step, mesh)
    number = spec.steps
    if not number:
        slowest = max(ops.all_gather_object(once, group=mesh.world))
        number = min(MOST_STEPS, max(LEAST_STEPS, round(spec.seconds / slowest)))
    steps = [_timed(step, mesh) for _ in range(number)]
    state = _state_bytes(model, optimizer, step)
    everywhere = ops.all_gather_object((steps, state, _process_bytes(mesh)), group=mesh.world)
    slowest_steps = [max(times) for times in zip(*(one[0] for one in everywhere), strict=True)]
    result = TrialResult(
        step_seconds=median(slowest_steps),
        spread=spread_of(slowest_steps),
        num_steps=number,
        state_bytes=max(one[1] for one in everywhere),
        process_bytes=max(one[2] for one in everywhere),
        num_parameters=num_parameters,
        torch=torch.__version__,
    )
    context.shutdown()
    return result


def _made(reference: str) -> tuple[nn.Module, Any]:
    """The model itself, in memory: the plan looked at it on the meta device."""
    name, _, attribute = reference.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    factory: Any = importlib.import_module(name)
    for part in attribute.split("."):
        factory = getattr(factory, part)
    made = factory() if callable(factory) else factory
    if not (isinstance(made, tuple) and len(made) == 2):
        raise ModelError(f"{reference} returned {type(made).__name__}; to run it, it must return (model, sample)")
    return made


def _at_length(sample: Any, seq: int) -> Any:
    """Token ids repeated or cut to so many tokens; anything else as it is."""
    first = next(tensors_in(sample))
    if first.dim() != 2 or first.is_floating_point() or first.shape[1] == seq:
        return sample
    places = torch.arange(seq) % first.shape[1]
    length = first.shape[1]
    return map_tensors(sample, lambda one: one[:, places] if one.dim() > 1 and one.shape[1] == length else one)


def _rows(sample: Any, number: int) -> Any:
    """So many samples, the given ones again and again."""
    batch = next(tensors_in(sample)).shape[0]
    places = torch.arange(number) % batch
    return map_tensors(sample, lambda one: one[places] if one.dim() and one.shape[0] == batch else one)


def _step_of(model: Any, optimizer: Any, batch: Any) -> Callable[[], object]:
    """A call of `train_batch`: with the model's own loss, or a cross-entropy on what it returns."""
    if isinstance(batch, Mapping):
        return lambda: model.train_batch(batch, optimizer)
    if isinstance(batch, torch.Tensor):
        return lambda: model.train_batch((batch, batch), optimizer, loss_fn=_loss)
    return lambda: model.train_batch(batch, optimizer, forward_step=_forward_step)


def _forward_step(model: Any, micro_batch: Any) -> torch.Tensor:
    return _loss(model(*micro_batch), micro_batch[0])


def _loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over the last dim, towards the inputs where they are indices that fit, else towards the first."""
    scores = next(one for one in tensors_in(output) if one.is_floating_point())
    if scores.dim() < 2 or scores.shape[-1] < 2:
        return scores.float().square().mean()
    rows = scores.flatten(0, -2)
    if labels.is_floating_point() or labels.numel() != len(rows):
        targets = torch.zeros(len(rows), dtype=torch.long, device=rows.device)
    else:
        targets = labels.flatten() % rows.shape[-1]
    return functional.cross_entropy(rows, targets)


def _state_bytes(model: Any, optimizer: Any, step: Callable[[], object]) -> int:
    """Of one step more, when its gradients are there and nothing is updated yet."""
    found: list[dict[str, int]] = []
    handle = optimizer.register_step_pre_hook(lambda *_: found.append(model.memory_bytes()))
    try:
        step()
    finally:
        handle.remove()
    return sum(size for name, size in found[0].items() if not name.startswith("host_"))


def _timed(step: Callable[[], object], mesh: Mesh) -> float:
    started = time.perf_counter()
    step()
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    return time.perf_counter() - started


def _process_bytes(mesh: Mesh) -> int:
    """Resident at most; on an accelerator what the allocator had at most, and what lies outside of it."""
    if mesh.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(mesh.device)
        outside = total - free - torch.cuda.memory_reserved(mesh.device)
        return torch.cuda.max_memory_reserved(mesh.device) + outside
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Under `hybrid plan --measure`; the strategy is the launcher's."""
    folder = Path(os.environ[LOG_DIR_VARIABLE]).parent
    spec = TrialSpec(**json.loads((folder / SPEC_FILE).read_text(encoding="utf-8")))
    result = run_trial(spec)
    if int(os.environ["RANK"]) == 0:
        (folder / RESULT_FILE).write_text(json.dumps(asdict(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
