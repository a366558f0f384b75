"""Optimizers that torch does not have, and an uneven net to train with any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import own_part, seeded

__all__ = [
    "Blockwise",
    "ClippedLamb",
    "Distance",
    "Factors",
    "Gathering",
    "Lamb",
    "Lookahead",
    "MatrixNet",
    "Net",
    "Noisy",
    "TwoPoints",
    "batch_of",
    "run_steps",
    "wrap",
]

Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """Widths that no rank count divides, a transposed weight, a 0-d and a one-element parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.wide, self.narrow = nn.Linear(7, 15), nn.Linear(15, 3)
        self.narrow.weight.data = self.narrow.weight.data.t().contiguous().t()
        self.scale = nn.Parameter(torch.tensor(1.2))
        self.offset = nn.Parameter(torch.randn(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.tanh(self.wide(x))) * self.scale + self.offset


class MatrixNet(nn.Sequential):
    """Matrices alone, as Muon wants them; contiguous, as LBFGS wants them."""

    def __init__(self) -> None:
        torch.manual_seed(6)
        super().__init__(
            nn.Linear(7, 15, bias=False),
            nn.Tanh(),
            nn.Linear(15, 9, bias=False),
            nn.Tanh(),
            nn.Linear(9, 3, bias=False),
        )


def batch_of(step: int, samples: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(2100 + step)
    return torch.randn(samples, 7, generator=generator), torch.randn(samples, 3, generator=generator)


def wrap(model: nn.Module, make: Make, strategy: hybrid.DistributedStrategy, *, built: str = "before") -> Any:
    """The wrapped model and its optimizer, which is built before or after it."""
    optimizer = make(model.parameters()) if built == "before" else None
    model = hybrid.distributed_model(model, strategy=strategy)
    return model, hybrid.distributed_optimizer(optimizer or make(model.parameters()))


def run_steps(model: Any, optimizer: Any, steps: range) -> list[float]:
    """Steps on this rank's part of each batch (all of it in one plain process); losses that the optimizer returned."""
    losses = []
    for step in steps:
        x, y = batch_of(step)
        if hasattr(model, "train_batch"):
            x, y = own_part(x), own_part(y)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS | TwoPoints):
            losses.append(optimizer.step(closure).item())
        else:
            closure()
            optimizer.step()
    return losses


class _Simple(torch.optim.Optimizer):
    """One that updates parameter by parameter; `update` is the rule."""

    def __init__(self, params: Any, lr: float = 0.02, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def update(self, parameter: Any, gradient: torch.Tensor, state: Any, group: Any) -> None:
        raise NotImplementedError


class Lamb(_Simple):
    """Adam's direction at the length of the parameter's norm."""

    def update(self, parameter: Any, gradient: torch.Tensor, state: Any, group: Any) -> None:
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 0.1)
        state["exp_avg_sq"].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        direction = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6)
        parameter.sub_(direction * (parameter.norm() / (direction.norm() + 1e-6)) * group["lr"])


class ClippedLamb(Lamb):
    """First clips by the norm over all of its parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        assert gradients
        return super().step(closure)


class Distance(_Simple):
    """Its step length grows with the distance that all parameters together have come, kept in the group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            moved = sum((p - self.state[p].setdefault("start", p.clone())).abs().sum() for p in group["params"])
            group["d"] = max(group.get("d", 1e-2), float(moved))
        return super().step(closure)

    def update(self, parameter: Any, gradient: torch.Tensor, state: Any, group: Any) -> None:
        parameter.sub_(gradient * group["d"] * group["lr"])


class Gathering(_Simple):
    """Written for many ranks: each updates its share of the parameters, and sends it to the others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                owner = place % dist.get_world_size()
                if owner == dist.get_rank():
                    parameter.sub_(parameter.grad, alpha=group["lr"])
                dist.broadcast(parameter, src=owner)
        return None


class TwoPoints(_Simple):
    """Goes half a step, evaluates there, and goes from the start by what it found."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            closure()
        starts = [[p.clone() for p in group["params"]] for group in self.param_groups]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / 2)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for group, values in zip(self.param_groups, starts, strict=True):
            for parameter, start in zip(group["params"], values, strict=True):
                parameter.copy_(start - parameter.grad * group["lr"])
        return loss


class Noisy(_Simple):
    """Adds noise, as Langevin dynamics does."""

    def update(self, parameter: Any, gradient: torch.Tensor, state: Any, group: Any) -> None:
        parameter.sub_(gradient * group["lr"] + torch.randn_like(parameter) * 1e-3)


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([{"params": group["params"]} for group in inner.param_groups], {})

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Blockwise(_Simple):
    """State as 8-bit optimizers have it: codes, one maximum for each four of them, a table, counts, and nothing."""

    def update(self, parameter: Any, gradient: torch.Tensor, state: Any, group: Any) -> None:
        count = parameter.numel()
        if not state:
            state["codes"] = torch.full((count,), 128, dtype=torch.uint8)
            state["absmax"] = torch.ones(-(-count // 4))
            state["table"] = torch.linspace(-1, 1, 256)
            state["number"], state["step"], state["nothing"] = 0, torch.zeros(()), None
        state["number"] += 1
        state["step"] += 1
        moment = state["table"][state["codes"].long()] * state["absmax"].repeat_interleave(4)[:count]
        moment = 0.9 * moment + 0.1 * gradient.reshape(-1)
        blocks = functional.pad(moment, (0, -count % 4)).view(-1, 4)
        state["absmax"] = blocks.abs().amax(1).clamp(min=1e-9)
        codes = (blocks / state["absmax"][:, None] + 1) / 2 * 255
        state["codes"] = codes.round().to(torch.uint8).view(-1)[:count]
        parameter.sub_(moment.view(parameter.shape) * group["lr"])


class Factors(_Simple):
    """State in lists and dicts, larger and smaller than the parameter: a square matrix for each of its dims."""

    def update(self, parameter: Any, gradient: torch.Tensor, state: Any, group: Any) -> None:
        if not state:
            state["factors"] = [torch.zeros(size, size) for size in parameter.shape]
            state["twice"] = torch.zeros(2, *parameter.shape)
            state["notes"] = {"seen": torch.ones(3), "kind": "matrix" if parameter.dim() == 2 else "other"}
        trace = torch.ones(())
        for dim, size in enumerate(parameter.shape):
            rows = gradient.movedim(dim, 0).reshape(size, -1)
            state["factors"][dim].add_(rows @ rows.T)
            trace = trace + state["factors"][dim].trace()
        state["twice"][0].add_(gradient)
        state["notes"]["seen"] += 1
        parameter.sub_(gradient / trace.sqrt() * group["lr"])
