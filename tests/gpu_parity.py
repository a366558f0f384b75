"""The main combinations against plain torch on the host, for worlds of GPUs on NCCL: real ones, or the stand-in.

`check(case)` runs on every rank of a started world whose default group is NCCL's. The plain run is on the CPU in
float32, on the whole batch; so what differs is the layout, the device's kernels, and the dtype.

    dtype    losses, norms, weights as a part of the plain run's largest value (or of 1 if that is more)
    fp32     2e-4 on a GPU, whose products are told not to use TF32 and add in another order; 5e-6 on the stand-in
    bf16     3e-2: each activation is rounded to 8 bits
    fp16     1e-2: to 11 bits
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch

import hybrid
from tests import pipeline_models, tensor_gpt
from tests.pipeline_models import OWN_PLAN, batch_of, cross_entropy, make_adamw, own, pipeline_strategy, train_plain

__all__ = ["CASES", "TOLERANCES", "Case", "check"]

STEPS, LENGTH = 3, 6
TOLERANCES = {"fp32": 2e-4, "bf16": 3e-2, "fp16": 1e-2}
STAND_IN_TOLERANCE = 5e-6
_PRECISIONS: dict[str, Any] = {
    "bf16-O1": {"level": "O1"},
    "bf16-O2": {"level": "O2"},
    "fp16-O1": {"level": "O1", "dtype": "float16", "init_loss_scaling": 256.0},
    "fp16-O2": {"level": "O2", "dtype": "float16", "init_loss_scaling": 256.0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layout. `way`: "train" is `train_batch`, "loop" the caller's own loop of two backwards."""

    ranks: int
    pp: int = 1
    tp: int = 1
    stage: int | None = None
    schedule: str = "1f1b"
    precision: str = "fp32"
    way: str = "train"
    model: str = "own"
    saves: bool = False
    scaler: bool = False
    is_chosen: bool = False
    """Part of the default run, on the stand-in."""
    sharding: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        more = [f"{key}={value}" for key, value in (*self.sharding.items(), *self.settings.items())]
        words = [
            f"{self.ranks}ranks", f"pp{self.pp}" if self.pp > 1 else "", f"tp{self.tp}" if self.tp > 1 else "",
            "" if self.stage is None else f"z{self.stage}", self.schedule if self.pp > 1 else "",
            "" if self.precision == "fp32" else self.precision, "" if self.way == "train" else self.way,
            "" if self.model == "own" else self.model, "saves" if self.saves else "", "scaler" if self.scaler else "",
            *more,
        ]  # fmt: skip
        return "-".join(word for word in words if word)

    def strategy(self) -> hybrid.DistributedStrategy:
        settings = dict(self.settings)
        if self.tp > 1:
            plan = {"own": OWN_PLAN, "gpt": tensor_gpt.GPT_PLAN}.get(self.model, pipeline_models.PLAN)
            settings["tensor_parallel_configs"] = {
                "degree": self.tp, "plan": plan, "sequence_parallel": settings.pop("sequence_parallel", False)
            }  # fmt: skip
        strategy = pipeline_strategy(
            self.pp, mb=4 if self.pp > 1 else 2 if self.way == "train" else 1, schedule=self.schedule, tp=self.tp,
            stage=self.stage, gradient_clipping=0.3, amp=_PRECISIONS.get(self.precision), **settings,
        )  # fmt: skip
        if self.sharding:
            strategy.sharding_configs = {**strategy.to_dict()["sharding_configs"], **self.sharding}
        return strategy


def _build(name: str) -> torch.nn.Module:
    if name != "gpt":
        return pipeline_models.build(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tensor_gpt.GPT()


def _sample(case: Case) -> torch.Tensor | None:
    return torch.zeros(3, LENGTH, dtype=torch.long) if case.pp > 1 else None


def check(case: Case, *, on_stand_in: bool = False) -> dict[str, Any]:
    """Raises AssertionError where this rank's run differs from plain torch. Returns the losses and what was watched."""
    torch.backends.cuda.matmul.allow_tf32 = False
    plain = _build(case.model)
    batches = [batch_of(step, length=LENGTH) for step in range(STEPS)]
    losses, norms, _ = train_plain(plain, batches, cross_entropy, make_adamw, clip=0.3)
    family = case.precision.partition("-")[0]
    allowed = STAND_IN_TOLERANCE if on_stand_in and family == "fp32" else TOLERANCES[family]
    try:
        model: Any = hybrid.distributed_model(_build(case.model), strategy=case.strategy(), sample=_sample(case))
        optimizer: Any = hybrid.distributed_optimizer(make_adamw(model))
        device = hybrid.get_mesh().device
        assert device.type == "cuda", device
        assert all(parameter.device == device for parameter in model.parameters())
        got, got_norms = [], []
        with tempfile.TemporaryDirectory() as folder:
            for step, batch in enumerate(batches):
                loss, norm = _step(case, model, optimizer, batch, device)
                got.append(loss)
                got_norms.append(norm)
                if case.saves and step == 0:
                    model, optimizer = _saved_and_loaded(case, model, optimizer, folder)
        weights = model.full_state_dict()
        plain.eval()
        evaluated = model.eval_batch(own(batches[0]), loss_fn=cross_entropy).loss.item()
        with torch.no_grad():
            wanted = cross_entropy(plain(batches[0][0]), batches[0][1]).item()
        pairs = [*zip(got, losses, strict=True), *zip(got_norms, norms, strict=True), (evaluated, wanted)]
        for place, (one, other) in enumerate(pairs):
            assert abs(one - other) <= allowed * max(1.0, abs(other)), f"number {place}: {one}, {other}"
        for name, value in plain.state_dict().items():
            off = (weights[name].double().cpu() - value.double()).abs().max().item()
            assert off <= allowed * max(1.0, value.abs().max().item()), f"weight {name} is off by {off:.3g}"
    finally:
        hybrid.shutdown()
    return {"losses": got, "norms": got_norms}


def _step(case: Case, model: Any, optimizer: Any, batch: Any, device: torch.device) -> tuple[float, float]:
    mine = own(batch)
    if case.way == "train":
        result = model.train_batch(mine, optimizer, loss_fn=cross_entropy)
        assert not result.skipped
        return result.loss.item(), result.grad_norm.item()
    inputs, labels = (part.to(device) for part in mine)
    half = len(inputs) // 2
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0, enabled=case.scaler)
    total = torch.zeros((), device=device)
    for part in (slice(0, half), slice(half, None)):
        with torch.autocast("cuda", dtype=torch.float16, enabled=case.scaler):
            loss = cross_entropy(model(inputs[part]), labels[part]) / 2
        scaler.scale(loss).backward()
        total += loss.detach()
    scaler.unscale_(optimizer)
    norm = model.clip_grad_norm_(0.3).item()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    mesh = hybrid.get_mesh()
    ranks = mesh.world_size // case.tp
    if mesh.world_size > 1:
        torch.distributed.all_reduce(total)
    return total.item() / (ranks * case.tp), norm


def _saved_and_loaded(case: Case, model: Any, optimizer: Any, folder: str) -> tuple[Any, Any]:
    """Into a second model of the same strategy, which starts with other weights; and out of it a file of weights."""
    folders = [folder]
    if torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast_object_list(folders, src=0)
    hybrid.save_checkpoint(folders[0], model, optimizer, step=1)
    strategy = case.strategy()
    hybrid.shutdown()
    torch.manual_seed(3)
    plain = _build(case.model)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.5)
    model = hybrid.distributed_model(plain, strategy=strategy, sample=_sample(case))
    optimizer = hybrid.distributed_optimizer(make_adamw(model))
    assert hybrid.load_checkpoint(folders[0], model, optimizer).step == 1
    return model, optimizer


CASES = [
    Case(ranks=1, way="loop", is_chosen=True),
    Case(ranks=1, stage=None, precision="fp16-O1"),
    Case(ranks=2, stage=0),
    Case(ranks=2, stage=1, way="loop", is_chosen=True),
    Case(ranks=2, stage=2, saves=True),
    Case(ranks=2, stage=3, way="loop"),
    Case(ranks=2, stage=3, settings={"recompute": "full"}, is_chosen=True),
    Case(ranks=2, stage=3, sharding={"prefetch": 0}, precision="bf16-O2"),
    Case(ranks=2, stage=1, sharding={"overlap_param_gather": True}, precision="bf16-O1"),
    Case(ranks=2, stage=2, sharding={"offload": "optimizer"}),
    Case(ranks=2, stage=2, sharding={"offload": "optimizer"}, precision="bf16-O2", saves=True, is_chosen=True),
    Case(ranks=2, stage=3, sharding={"offload": "parameters"}),
    Case(ranks=2, stage=3, sharding={"offload": "parameters"}, precision="bf16-O2", is_chosen=True),
    Case(ranks=2, stage=1, sharding={"partition": "parameter"}),
    Case(ranks=2, stage=2, precision="fp16-O2"),
    Case(ranks=2, stage=2, way="loop", precision="fp16-O1", scaler=True, is_chosen=True),
    Case(ranks=2, tp=2),
    Case(ranks=2, tp=2, model="gpt", settings={"sequence_parallel": True}, precision="bf16-O1", is_chosen=True),
    Case(ranks=2, pp=2),
    Case(ranks=2, pp=2, schedule="interleaved", model="tied"),
    Case(ranks=2, pp=2, schedule="zb-h1", model="chain"),
    Case(ranks=2, pp=2, schedule="zbv", model="tied", is_chosen=True),
    Case(ranks=4, pp=2, stage=2, schedule="1f1b", saves=True),
    Case(ranks=4, pp=2, stage=3, schedule="interleaved", precision="bf16-O2", is_chosen=True),
    Case(ranks=4, pp=2, tp=2, schedule="gpipe", precision="fp16-O1"),
    Case(ranks=4, tp=2, stage=3, model="gpt", settings={"sequence_parallel": True}, is_chosen=True),
    Case(ranks=4, tp=2, stage=2, sharding={"offload": "optimizer"}, saves=True),
    Case(ranks=4, stage=3, sharding={"shard_size": 2}),
    Case(ranks=8, pp=2, tp=2, stage=3, schedule="zb-h1", model="own"),
]  # fmt: skip
