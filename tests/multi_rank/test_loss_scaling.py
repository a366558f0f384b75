"""Loss scaling: one rank overflows, all skip; the scale, the schedule and the moments are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import assert_close, assert_same_on_all_ranks, own_part, seeded, strategy_of, weights_of
from tests.ranks import run_ranks

STAGES = (0, 1, 2, 3)
STEPS, BAD_STEP = 5, 2
SCALE = 1024.0
TOLERANCE = 1e-5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.tanh(inputs))


def batch(step: int, bad: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """With `bad`, the loss of the last sample (the last rank's) is that at one step."""
    generator = seeded(70 + step)
    inputs, labels = torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)
    if bad is not None and step == BAD_STEP:
        labels[-1, 0] = bad
    return inputs, labels


def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def scaled_loop(
    model: Any, optimizer: Any, scaler: torch.amp.GradScaler, *, own: bool, way: str, bad: float | None
) -> list[Any]:
    """A plain script with a GradScaler. Returns, per step, (scale, lr, updated)."""
    scheduler = scheduler_of(optimizer)
    history = []
    for step in range(STEPS):
        inputs, labels = (own_part(t) if own else t for t in batch(step, bad))
        optimizer.zero_grad()
        before = scaler.get_scale()
        scaler.scale(functional.mse_loss(model(inputs), labels)).backward()
        if way == "clip":
            scaler.unscale_(optimizer)
            if own:
                model.clip_grad_norm_(0.3)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
        updated = scaler.get_scale() >= before
        if updated:
            scheduler.step()
        history.append((scaler.get_scale(), optimizer.param_groups[0]["lr"], updated))
    return history


def new_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)


def plain_run(way: str, bad: float | None) -> tuple[nn.Module, torch.optim.Optimizer, list[Any]]:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, optimizer, scaled_loop(model, optimizer, new_scaler(), own=False, way=way, bad=bad)


def compare(model: Any, optimizer: Any, plain: nn.Module, plain_optimizer: Any) -> None:
    got = model.full_state_dict()
    for name, value in weights_of(plain).items():
        assert_close(got[name], value, TOLERANCE, name)
    state = optimizer.full_state_dict()["state"]
    for name, p in plain.named_parameters():
        for key, value in plain_optimizer.state[p].items():
            assert_close(state[name][key], value, TOLERANCE, f"{name} {key}")


def in_a_plain_loop(way: str, bad: float | None, settings: dict[str, Any]) -> None:
    plain, plain_optimizer, wanted = plain_run(way, bad)
    for stage in STAGES:
        model = hybrid.distributed_model(Net(), strategy=strategy_of(stage=stage, bucket_bytes=150, **settings))
        optimizer = hybrid.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
        scaler = hybrid.distributed_scaler(new_scaler())
        got = scaled_loop(model, optimizer, scaler, own=True, way=way, bad=bad)
        assert got == wanted, (stage, got, wanted)
        assert any(not updated for *_, updated in got) == (bad is not None)
        compare(model, optimizer, plain, plain_optimizer)
        hybrid.shutdown()


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
@pytest.mark.parametrize("way", ["step", "clip"])
def test_plain_scaler_in_a_plain_loop(way: str, bad: float | None) -> None:
    """The last rank alone overflows: every rank skips that step, with the scale and schedule of one process."""
    run_ranks(in_a_plain_loop, 2, way, bad, {})


def test_plain_scaler_with_replicas() -> None:
    run_ranks(replicated_loop, 4)


def replicated_loop() -> None:
    plain, plain_optimizer, wanted = plain_run("clip", float("inf"))
    for stage in (1, 2, 3):
        strategy = strategy_of(stage=stage, bucket_bytes=150, shard_size=2)
        model = hybrid.distributed_model(Net(), strategy=strategy)
        optimizer = hybrid.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
        assert scaled_loop(model, optimizer, new_scaler(), own=True, way="clip", bad=float("inf")) == wanted
        compare(model, optimizer, plain, plain_optimizer)
        hybrid.shutdown()


CLIPPINGS: list[Any] = [
    0.3,
    {"max_norm": 0.3, "norm_type": float("inf")},
    {"max_norm": 0.3, "norm_type": 1},
    {"clip_value": 0.1},
]


# ---- train_batch -------------------------------------------------------------------------------------------------


def in_train_batch(clippings: list[Any], bad: float) -> None:
    """fp32 with a scaler given: only the step that overflowed is missing, in everything."""
    for stage, clipping in [(stage, None) for stage in STAGES] + [(s, c) for s in (0, 3) for c in clippings]:
        strategy = strategy_of(stage=stage, bucket_bytes=150, gradient_clipping=clipping, accumulate_steps=2)
        model = hybrid.distributed_model(Net(), strategy=strategy)
        optimizer = hybrid.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
        scheduler, scaler = scheduler_of(optimizer), new_scaler()
        before: Any = None
        for step in range(STEPS):
            if step == BAD_STEP:
                before = (model.full_state_dict(), optimizer.full_state_dict(), optimizer.param_groups[0]["lr"])
            scale = scaler.get_scale()
            mine = tuple(own_part(t) for t in batch(step, bad))
            result = model.train_batch(
                mine, optimizer, lr_scheduler=scheduler, scaler=scaler, loss_fn=functional.mse_loss
            )
            assert result.skipped == (step == BAD_STEP), (stage, step, result)
            if step == BAD_STEP:
                assert scaler.get_scale() == scale / 2
                after = (model.full_state_dict(), optimizer.full_state_dict(), optimizer.param_groups[0]["lr"])
                assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
                for name, state in before[1]["state"].items():
                    assert all(torch.equal(v, after[1]["state"][name][k]) for k, v in state.items()), name
                assert before[2] == after[2]
        assert all(bool(value.isfinite().all()) for value in model.full_state_dict().values())
        assert_same_on_all_ranks(scaler.get_scale(), "scale")
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5 ** (STEPS - 1))
        hybrid.shutdown()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_scaler_in_train_batch(bad: float) -> None:
    """Whatever is clipped: an overflow on one rank skips on all; weights, moments and schedule stay."""
    run_ranks(in_train_batch, 2, CLIPPINGS, bad)


def half_strategy(stage: int, **settings: Any) -> hybrid.DistributedStrategy:
    level = settings.pop("level", "O2")
    strategy = strategy_of(stage=stage, bucket_bytes=150, **settings)
    strategy.amp = True
    strategy.amp_configs = {
        "dtype": "float16",
        "level": level,
        "init_loss_scaling": 2.0**30,
        "growth_interval": 4,
    }
    return strategy


def own_scaler(level: str, grad_dtype: str) -> None:
    """A first scale far too large: steps are skipped until it fits, then training goes on as with scale 1."""
    for stage in STAGES:
        model = hybrid.distributed_model(Net(), strategy=half_strategy(stage, level=level, grad_dtype=grad_dtype))
        optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        skips, losses, norms = [], [], []
        for _ in range(36):
            mine = tuple(own_part(t) for t in batch(0))
            result = model.train_batch(mine, optimizer, loss_fn=functional.mse_loss)
            skips.append(result.skipped)
            losses.append(result.loss.item())
            norms.append(result.grad_norm.item())
        assert skips[0], skips
        assert not all(skips[24:]), (stage, skips)
        first = skips.index(False)
        plain = Net()
        functional.mse_loss(plain(batch(0)[0]), batch(0)[1]).backward()
        norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        assert norms[first] == pytest.approx(norm.item(), rel=2e-2), stage
        assert losses[-1] < 0.95 * losses[0], (stage, losses)
        assert_same_on_all_ranks((skips, losses), "skips and losses")
        scale = model.hybrid_runtime.scaler.get_scale()
        assert_same_on_all_ranks(scale, "scale")
        assert scale < 2.0**30
        hybrid.shutdown()


@pytest.mark.parametrize(("level", "grad_dtype"), [("O1", "float32"), ("O1", "param"), ("O2", "float32")])
def test_the_strategys_own_scaler(level: str, grad_dtype: str) -> None:
    run_ranks(own_scaler, 2, level, grad_dtype)


def half_in_a_plain_loop(grad_dtype: str) -> None:
    for stage in STAGES:
        model = hybrid.distributed_model(Net(), strategy=half_strategy(stage, grad_dtype=grad_dtype))
        optimizer = hybrid.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
        got = scaled_loop(model, optimizer, new_scaler(), own=True, way="clip", bad=float("inf"))
        wanted = plain_run("clip", float("inf"))[2]
        assert got == wanted, (stage, got)
        hybrid.shutdown()


@pytest.mark.parametrize("grad_dtype", ["float32"])
def test_float16_in_a_plain_loop_with_a_plain_scaler(grad_dtype: str) -> None:
    run_ranks(half_in_a_plain_loop, 2, grad_dtype)


# ---- refusals ----------------------------------------------------------------------------------------------------


def refused() -> None:
    with pytest.raises(hybrid.OptimizerError, match="GradScaler"):
        hybrid.distributed_scaler("scaler")  # type: ignore[arg-type]
    for stage in (0, 3):
        model = hybrid.distributed_model(Net(), strategy=half_strategy(stage))
        optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        mine = tuple(own_part(t) for t in batch(0))
        with pytest.raises(hybrid.OptimizerError, match="two loss scalers"):
            model.train_batch(mine, optimizer, scaler=new_scaler(), loss_fn=functional.mse_loss)
        before = model.full_state_dict()
        for _ in range(2):
            functional.mse_loss(model(mine[0]), mine[1]).backward()
            with pytest.raises(hybrid.OptimizerError, match=r"float16.*loss scaling"):
                optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(before[name], value) for name, value in model.full_state_dict().items())
        # ... and after all that, the right way works
        assert scaled_loop(model, optimizer, new_scaler(), own=True, way="step", bad=None)[-1][2]
        hybrid.shutdown()
    dist.barrier()


def test_two_scalers_and_no_scaler_are_refused() -> None:
    run_ranks(refused, 2)
