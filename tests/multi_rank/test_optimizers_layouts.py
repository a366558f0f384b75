"""Optimizers under a pipeline and tensor parallelism, and their state in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import SEVERAL_STEPS, assert_close, assert_weights, variant, weights_of
from tests.optimizers import Blockwise, ClippedLamb, Factors, Lamb, MatrixNet, Net, batch_of, run_steps, wrap
from tests.pipeline_models import pipeline_variant
from tests.ranks import run_ranks
from tests.tensor_case import tensor_variant

Make = Callable[[Any], Any]

# -- pipeline --------------------------------------------------------------------------------------------------------

ON_STAGES: dict[str, Make] = {
    "AdamW": lambda p: optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.02),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    "Adafactor": optim.Adafactor,
    "Muon": lambda p: optim.Muon(p, lr=0.02),
    "Lamb": Lamb,
}


def check_stages() -> None:
    for number, (name, make) in enumerate(ON_STAGES.items()):
        plain = MatrixNet()
        # Adagrad makes its state when it is built: a group that comes later has none in plain torch either.
        late = ["4.weight"] if name != "Adagrad" else []
        named = dict(plain.named_parameters())
        plain_optimizer = make([(fqn, p) for fqn, p in named.items() if fqn not in late])
        run_steps(plain, plain_optimizer, range(1))
        if late:
            plain_optimizer.add_param_group({"params": [(fqn, named[fqn]) for fqn in late], "lr": 0.01})
        run_steps(plain, plain_optimizer, range(1, 3))
        with pipeline_variant(2, mb=2, stage=1 + number % 2) as strategy:
            model = MatrixNet()
            named = dict(model.named_parameters())
            optimizer = make([(fqn, p) for fqn, p in named.items() if fqn not in late])
            model = hybrid.distributed_model(model, strategy=strategy)
            optimizer = hybrid.distributed_optimizer(optimizer)
            for step in range(3):
                if step == 1 and late:
                    optimizer.add_param_group({"params": [(fqn, named[fqn]) for fqn in late], "lr": 0.01})
                model.train_batch(part_of(step), optimizer, loss_fn=functional.mse_loss)
            assert_weights(model, weights_of(plain), SEVERAL_STEPS)
            full = optimizer.full_state_dict()
            assert [group["param_names"] for group in full["param_groups"]] == [
                group["params"] for group in full["param_groups"]
            ]
            optimizer.load_state_dict(full)
            wanted = {fqn: plain_optimizer.state[p] for fqn, p in plain.named_parameters()}
            for fqn, state in wanted.items():
                for key, value in state.items():
                    assert_close(full["state"][fqn][key], value, 1e-4, f"{key} of {fqn}")
    for make, message in (
        (ClippedLamb, r"ClippedLamb .* pipeline_configs\.degree = 1"),
        (optim.LBFGS, r"LBFGS .* stages"),
    ):
        with pipeline_variant(2, mb=2) as strategy:
            model = hybrid.distributed_model(MatrixNet(), strategy=strategy)
            with pytest.raises(hybrid.OptimizerError, match=message):
                hybrid.distributed_optimizer(make(model.parameters()))


def part_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This data-parallel rank's part of a step's batch; all stages of a pipeline get the same."""
    x, y = batch_of(step)
    mesh = hybrid.get_mesh()
    rank, ranks = mesh.coordinate("dp_shard"), mesh.degree("dp_shard")
    size = len(x) // ranks
    return x[rank * size : (rank + 1) * size], y[rank * size : (rank + 1) * size]


def test_each_stage_of_a_pipeline_steps_its_own_parameters() -> None:
    """Fault: names of a group did not follow its parameters to the stages; a later group came to no stage, or to all;
    an optimizer that couples all parameters coupled those of a stage."""
    run_ranks(check_stages, 4)


# -- tensor parallel -------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """A pair of cut layers, and a whole one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.widen, self.narrow, self.last = nn.Linear(7, 18), nn.Linear(18, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.narrow(torch.tanh(self.widen(x))))


CUT = {"widen": "colwise", "narrow": "rowwise", "last": "replicated"}


def check_tensor_parallel() -> None:
    for make in (
        lambda p: optim.Adagrad(p, lr=0.02, initial_accumulator_value=0.1),
        lambda p: optim.ASGD(p, lr=0.05, t0=1),
        lambda p: optim.NAdam(p, lr=0.02),
    ):
        plain = Gated()
        plain_optimizer = make(plain.parameters())
        run_steps(plain, plain_optimizer, range(2))
        with tensor_variant(2, plan=CUT | {"last": "head"}) as strategy:  # of 3 outputs: 2 and 1
            model, optimizer = wrap(Gated(), make, strategy, built="after")
            for step in range(2):
                model.train_batch(batch_of(step), optimizer, loss_fn=functional.mse_loss)
            assert_weights(model, weights_of(plain), SEVERAL_STEPS)
            full = optimizer.full_state_dict()["state"]
            for fqn, parameter in plain.named_parameters():
                for key, value in plain_optimizer.state[parameter].items():
                    assert_close(full[fqn][key], value, 1e-4, f"{key} of {fqn}")
    plain = Gated()
    pair = [
        optim.AdamW([*plain.widen.parameters(), *plain.narrow.parameters()]),
        optim.Adafactor(plain.last.parameters()),
    ]
    x, y = batch_of(0)
    functional.mse_loss(plain(x), y).backward()
    for one in pair:
        one.step()
    with tensor_variant(2, plan=CUT) as strategy:
        model = hybrid.distributed_model(Gated(), strategy=strategy)
        for optimizer in (optim.Adafactor(model.parameters()), Lamb(model.widen.parameters())):
            with pytest.raises(hybrid.OptimizerError, match=r"'widen\.weight' is cut over 2 tensor-parallel ranks"):
                hybrid.distributed_optimizer(optimizer)
        cut = hybrid.distributed_optimizer(optim.AdamW([*model.widen.parameters(), *model.narrow.parameters()]))
        whole = hybrid.distributed_optimizer(optim.Adafactor([model.last.weight]))
        with pytest.raises(hybrid.OptimizerError, match="cut over 2 tensor-parallel ranks"):
            whole.add_param_group({"params": [nn.Parameter(torch.ones(1)), model.narrow.weight][1:]})
        whole.param_groups[0]["params"].append(model.narrow.weight)
        with pytest.raises(hybrid.OptimizerError, match=r"'narrow\.weight' is cut"):
            whole.step()
        whole.param_groups[0]["params"].pop()
        whole.add_param_group({"params": [model.last.bias]})
        functional.mse_loss(model(x), y).backward()
        cut.step()
        whole.step()
        assert_weights(model, weights_of(plain), SEVERAL_STEPS)


def test_cut_weights_take_element_wise_optimizers_and_refuse_others() -> None:
    """Fault: a whole-tensor update ran on a column of a cut weight; a group with one was let in later."""
    run_ranks(check_tensor_parallel, 2)


# -- checkpoints -----------------------------------------------------------------------------------------------------

ODD: dict[str, tuple[type[nn.Module], Make]] = {
    "Blockwise": (Net, Blockwise),
    "Factors": (Net, Factors),
    "tensor rate": (Net, lambda p: optim.Adam(p, lr=torch.tensor(0.02))),
    "LBFGS": (MatrixNet, lambda p: optim.LBFGS(p, max_iter=3)),
}


def first_half(folder: str) -> None:
    for name, (net, make) in ODD.items():
        with variant(stage=0 if name == "LBFGS" else 2) as strategy:
            model, optimizer = wrap(net(), make, strategy)
            run_steps(model, optimizer, range(2))
            hybrid.save_checkpoint(Path(folder) / name, model, optimizer, step=2)


def second_half(folder: str) -> None:
    for name, (net, make) in ODD.items():
        plain = net()
        run_steps(plain, make(plain.parameters()), range(4))
        with variant(stage=0 if name == "LBFGS" else 1) as strategy:
            model = net()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            model, optimizer = wrap(model, make, strategy)
            hybrid.load_checkpoint(Path(folder) / name, model, optimizer)
            run_steps(model, optimizer, range(2, 4))
            assert_weights(model, weights_of(plain), SEVERAL_STEPS)


@pytest.mark.parametrize("world_size", [2, 3])
def test_bc53_state_of_any_shape_comes_back_under_another_layout(tmp_path: Path, world_size: int) -> None:
    """Fault: blocks, tables and lists were cut like a weight, or could not be saved after hours of training."""
    run_ranks(first_half, 2, str(tmp_path))
    run_ranks(second_half, world_size, str(tmp_path))
