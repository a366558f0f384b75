"""Cases of offload: models, ways to train, settings. Each is one combination that must not change a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import hybrid

__all__ = ["BF16", "ON_FOUR_RANKS", "ON_TWO_RANKS", "Case", "by_train_batch"]

WIDTH = 15


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width + 2), nn.Linear(2 * width + 2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Uneven widths; a frozen and an unused parameter, a tied one read outside its module, a 0-d and an empty one."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.enter = nn.Linear(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.leave = nn.Linear(width, 7, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0))
        self.unused = nn.Parameter(torch.randn(5))
        self.blocks[1].up.weight.requires_grad_(False)
        self.leave.weight = nn.Parameter(torch.randn(7, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.leave(x) + nn.functional.linear(x, self.leave.weight)


def chain() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, WIDTH), *(Block(WIDTH) for _ in range(2)), nn.Linear(WIDTH, 7))


def net() -> nn.Module:
    torch.manual_seed(3)
    return Net()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    wide = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.SGD([{"params": wide, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}], lr=0.01, momentum=0.9)


Train = Callable[[Any, Any, int], list[Any]]


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rank = hybrid.get_mesh().group("dp_replicate", "dp_shard").rank
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 7, generator=generator), torch.randn(6, 7, generator=generator)


def by_train_batch(model: Any, optimizer: Any, step: int) -> list[Any]:
    result = model.train_batch(batch_of(step), optimizer, loss_fn=nn.functional.mse_loss)
    return [result.loss, result.grad_norm, result.skipped]


def in_two_calls(model: Any, optimizer: Any, step: int) -> list[Any]:
    model.train_batch(batch_of(step + 50), optimizer, loss_fn=nn.functional.mse_loss, step=False)
    return by_train_batch(model, optimizer, step)


def in_a_loop(model: Any, optimizer: Any, step: int) -> list[Any]:
    """No `train_batch`: two backwards, one of them not synchronised, a clip by hand, gradients read, values edited."""
    inputs, labels = batch_of(step)
    with model.no_sync():
        nn.functional.mse_loss(model(inputs), labels).backward()
    nn.functional.mse_loss(model(labels), inputs).backward()
    seen: list[Any] = [model.clip_grad_norm_(0.7), hybrid.full_gradient(model.blocks[0].up.weight)]
    optimizer.step()
    seen += [gradient for _, gradient in model.named_gradients()]
    optimizer.zero_grad()
    with model.gather_parameters(["blocks.0", "scale"]), torch.no_grad():
        model.scale.mul_(0.9)
        model.blocks[0].down.bias.data.add_(0.25)  # behind the version counter
    seen.append(model(inputs).detach())
    return seen


def with_a_closure(model: Any, optimizer: Any, step: int) -> list[Any]:
    inputs, labels = batch_of(step)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), labels)
        loss.backward()
        return loss

    return [optimizer.step(closure)]


def by_a_scaler(model: Any, optimizer: Any, step: int, scalers: dict[int, Any] = {}) -> list[Any]:  # noqa: B006
    if step == 0:
        scalers[0] = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    inputs, labels = batch_of(step)
    loss = nn.functional.mse_loss(model(inputs), labels)
    scalers[0].scale(loss * (float("inf") if step == 1 else 1.0)).backward()
    scalers[0].unscale_(optimizer)
    scalers[0].step(optimizer)
    scalers[0].update()
    optimizer.zero_grad()
    return [scalers[0].get_scale()]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`sharding` and `settings` of a strategy; how the model is made and trained."""

    offload: str = "optimizer"
    sharding: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = net
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    train: Train = by_train_batch
    late: bool = False
    """On the deferred backend: copies to the host come as late as they may."""
    meta: bool = False
    is_guarded: bool = True
    """Between two memories; not where state is a list, which is copied as bytes."""

    def strategy(self, offload: str) -> hybrid.DistributedStrategy:
        sharding = {"bucket_bytes": 4096, **self.sharding, "offload": offload}
        return hybrid.DistributedStrategy({"sharding": True, "sharding_configs": sharding, **self.settings})


BF16 = {"amp": True, "amp_configs": {"dtype": "bfloat16", "level": "O2"}}
FP16 = {"amp": True, "amp_configs": {"dtype": "float16", "level": "O2", "init_loss_scaling": 2.0**18}}
O1 = {"amp": True, "amp_configs": {"dtype": "bfloat16", "level": "O1"}}
CLIP = {"gradient_clipping": {"max_norm": 0.5}, "accumulate_steps": 2}
CUT = {"offload": "parameters"}

ON_TWO_RANKS = {
    "stage 0": Case(sharding={"stage": 0}, settings=CLIP, optimizer=fused),
    "stage 1": Case(
        sharding={"stage": 1, "reduce_dtype": "bfloat16", "overlap_param_gather": True}, settings={**CLIP, **BF16}
    ),
    "stage 2": Case(
        sharding={"stage": 2, "grad_reduce": 2},
        settings={**BF16, "accumulate_steps": 3, "gradient_clipping": {"clip_value": 0.01}},
        train=in_two_calls,
    ),
    "stage 3": Case(sharding={"stage": 3}, settings={**CLIP, **BF16}),
    "late": Case(sharding={"stage": 2}, settings=CLIP, late=True),
    "late, cut parameters": Case(
        **CUT, sharding={"stage": 3, "grad_dtype": "param"}, settings={**CLIP, **BF16}, late=True
    ),
    "overflow": Case(**CUT, sharding={"stage": 3}, settings=FP16),
    "O1": Case(**CUT, sharding={"stage": 3}, settings={**O1, "recompute": True}),
    "a loop": Case(sharding={"stage": 1, "overlap_param_gather": True}, settings=BF16, train=in_a_loop),
    "a loop, stage 3": Case(sharding={"stage": 3}, train=in_a_loop),
    "a loop, cut parameters": Case(**CUT, sharding={"stage": 3}, settings=BF16, train=in_a_loop),
    "a scaler": Case(sharding={"stage": 2}, train=by_a_scaler),
    "kept for a run, groups": Case(
        **CUT,
        sharding={"stage": 3, "reshard_after": "run", "grad_reduce": "last_micro_batch", "prefetch": 0},
        settings=CLIP,
        optimizer=in_groups,
    ),
    "meta device": Case(**CUT, sharding={"stage": 3}, settings={"recompute": True, **BF16}, model=chain, meta=True),
    "whole parameters": Case(
        sharding={"stage": 2}, settings=CLIP, optimizer=lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01)
    ),
    "state from the start": Case(sharding={"stage": 2}, optimizer=lambda m: torch.optim.Adagrad(m.parameters())),
    "closures": Case(
        sharding={"stage": 0},
        optimizer=lambda model: torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=2),
        model=chain,
        train=with_a_closure,
        is_guarded=False,
    ),
    "one rank has all": Case(**CUT, sharding={"stage": 3, "shard_size": 1}, settings={**CLIP, **BF16}),
}
TP = {"tensor_parallel": True, "tensor_parallel_configs": {"degree": 2, "plan": {"*.up": "column", "*.down": "row"}}}
PP = {"pipeline": True, "pipeline_configs": {"degree": 2}, **CLIP}
ON_FOUR_RANKS = {
    "replicas": Case(**CUT, sharding={"stage": 3, "shard_size": 2}, settings={**CLIP, **BF16}, late=True),
    "tp": Case(sharding={"stage": 2}, settings={**TP, **CLIP, **BF16}, model=chain),
    "tp, cut parameters": Case(**CUT, sharding={"stage": 3}, settings={**TP, **CLIP}, model=chain),
    "pp": Case(sharding={"stage": 1}, settings={**PP, **BF16}, model=chain),
    "pp, cut parameters": Case(**CUT, sharding={"stage": 3}, settings=PP, model=chain),
}
