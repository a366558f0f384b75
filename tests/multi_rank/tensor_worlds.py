"""A world whose ranks are one tp group, and what the tests of parallel layers compare with the plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from hybrid.collectives import trace
from hybrid.collectives.group import Group
from hybrid.collectives.ops import all_gather_object
from hybrid.contracts.layout import Layout
from hybrid.contracts.placement import Cut
from hybrid.mesh import Mesh
from hybrid.tensor.layers import CutModule, local_part

__all__ = ["Conv1D", "assert_gradients_match", "assert_same", "copy_weights", "counted", "tp_group", "whole_gradient"]


class Conv1D(nn.Module):
    """A linear layer with the weight (in, out), as GPT-2 has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.1)
        self.bias = nn.Parameter(torch.randn(nf) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


def tp_group() -> Group:
    """The group of all ranks on the axis tp."""
    mesh = Mesh(Layout.of(tp=dist.get_world_size()), timeout_seconds=30.0)
    mesh.prepare([("tp",)])
    return mesh.group("tp")


def assert_same(found: torch.Tensor, wanted: torch.Tensor, what: str, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(
        found, wanted, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}", check_stride=False
    )


def whole_gradient(gradient: torch.Tensor, cut: Cut, group: Group) -> torch.Tensor:
    """What all ranks hold, put together; copies add up."""
    shape = list(gradient.shape)
    shape[cut.dim] = cut.global_size
    total = gradient.new_zeros(shape)
    for part, pieces in all_gather_object((gradient, cut.pieces), group=group):
        place = 0
        for start, length in pieces:
            total.narrow(cut.dim, start, length).add_(part.narrow(cut.dim, place, length))
            place += length
    return total


def assert_gradients_match(cut_module: nn.Module, plain: nn.Module, group: Group, what: str, **options: float) -> None:
    """Every parameter's gradient, put together from the ranks (summed, where it is partial), is the plain one."""
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters(remove_duplicate=False)}
    for prefix, module in cut_module.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            assert parameter.grad is not None, f"{what}: no gradient of {name}"
            gradient = parameter.grad
            if isinstance(module, CutModule):
                key = name.rpartition(".")[2]
                info = module.tensor_parallel
                if key in info.cuts:
                    gradient = whole_gradient(gradient, info.cuts[key], group)
                elif key in info.partial:
                    gradient = sum(all_gather_object(gradient, group=group))
            assert_same(gradient, wanted[name], f"{what}: gradient of {name}", **options)


def copy_weights(cut_module: nn.Module, plain: nn.Module) -> None:
    """Give a cut model its part of the plain model's values."""
    values = dict(plain.named_parameters(remove_duplicate=False))
    for prefix, module in cut_module.named_modules():
        cuts = module.tensor_parallel.cuts if isinstance(module, CutModule) else {}
        for name, parameter in module.named_parameters(prefix, recurse=False):
            cut = cuts.get(name.rpartition(".")[2])
            whole = values[name].detach()
            parameter.data = whole.clone() if cut is None else local_part(whole, cut)


@contextmanager
def counted() -> Iterator[list[str]]:
    """The names of the collectives that the block carries out, control traffic apart."""
    names: list[str] = []
    with trace.trace() as recording:
        yield names
    names += [call.op for call in recording.calls if not call.control]
