"""Mixed precision: what is kept, what is computed in which type, and that no bit of a master is lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import assert_close, assert_same_on_all_ranks, own_part, seeded, strategy_of
from tests.ranks import run_ranks

STAGES = (0, 1, 2, 3)


def amp(stage: int, level: str = "O2", *, dtype: str = "bfloat16", custom_fp32: Any = None, **settings: Any) -> Any:
    strategy = strategy_of(stage=stage, **settings)
    strategy.amp = True
    strategy.amp_configs = {"dtype": dtype, "level": level}
    if custom_fp32 is not None:
        strategy.amp_configs = {"dtype": dtype, "level": level, "custom_fp32": custom_fp32}
    return strategy


def masters(model: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, (_, value) in model.shard_state_dict().items()}


# ---- BC-30 -------------------------------------------------------------------------------------------------------


class Ones(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, factor: float) -> torch.Tensor:
        return self.weight.float().sum() * factor


def tiny_updates(cast_first: bool) -> None:
    for stage in STAGES:
        strategy = strategy_of(stage=stage) if cast_first else amp(stage)
        model = hybrid.distributed_model(Ones().bfloat16() if cast_first else Ones(), strategy=strategy)
        optimizer = hybrid.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
        for step in range(100):
            model(1.0).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 7 == 0:  # reading, in any way, rounds no master
                model.full_state_dict()
                hybrid.full_parameter(model.weight)
                with model.gather_parameters():
                    assert model.weight.dtype == torch.bfloat16
            if step == 50:  # nor does saving and loading what is there
                optimizer.load_state_dict(optimizer.full_state_dict())
                model.load_state_dict(model.full_state_dict())
        assert hybrid.full_parameter(model.weight).tolist() == [0.8984375] * 4, stage
        assert model.full_state_dict()["weight"].dtype == (torch.bfloat16 if cast_first else torch.float32)
        for value in masters(model).values():
            assert value.dtype == torch.float32
            assert_close(value, torch.full_like(value, 0.9), 1e-4, f"master at stage {stage}")
        state = optimizer.full_state_dict()["state"]["weight"]
        assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {torch.float32}
        hybrid.shutdown()


@pytest.mark.parametrize(("world_size", "cast_first"), [(2, True), (2, False), (3, False)])
def test_a_bf16_weight_moves_through_its_master(world_size: int, cast_first: bool) -> None:
    """BC-30: updates below half a bf16 step add up in the master; without one the weight stays at 1.0."""
    run_ranks(tiny_updates, world_size, cast_first)


def edited_masters() -> None:
    """An edit goes into the master: in full precision by set_full_parameter, rounded by an edit in place."""
    for stage in STAGES:
        torch.manual_seed(1)
        plain = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        exact = plain[0].weight.detach().clone()
        model = hybrid.distributed_model(copy.deepcopy(plain), strategy=amp(stage))
        flat = exact.flatten()
        for name, ((begin, end), value) in model.shard_state_dict().items():
            assert torch.equal(value.flatten(), plain.get_parameter(name).detach().flatten()[begin:end]), (stage, name)
        value = torch.full((5, 5), 1 / 3)
        hybrid.set_full_parameter(model[0].weight, value)
        assert torch.equal(hybrid.full_parameter(model[0].weight), value.bfloat16())
        assert all(bool((v == 1 / 3).all()) for name, v in masters(model).items() if name == "0.weight")
        with model.gather_parameters("0"), torch.no_grad():
            model[0].weight[0, 0] = 2.0
        for name, ((begin, _), own) in model.shard_state_dict().items():
            if name == "0.weight":
                wanted = value.flatten().clone()
                wanted[0] = 2.0
                assert torch.equal(own.flatten(), wanted[begin : begin + own.numel()]), stage
        assert flat.numel() == 25
        hybrid.shutdown()


def test_edits_reach_the_masters_and_round_only_what_changed() -> None:
    run_ranks(edited_masters, 2)


# ---- what computes in which type ---------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Blocks with norms; records the types that its modules see."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        self.seen["blocks"] = hidden.dtype
        normed = self.norm(hidden)
        self.seen["norm"] = normed.dtype
        logits = self.head(normed)
        self.seen["head"] = logits.dtype
        return {"logits": logits, "count": torch.tensor([3])}


def mixed_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def types() -> None:
    for stage in STAGES:
        for level in ("O1", "O2"):
            for custom in (None, ["LayerNorm", "head"]):
                strategy = amp(stage, level, custom_fp32=custom, bucket_bytes=300)
                model = hybrid.distributed_model(Mixed(), strategy=strategy)
                optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
                low = torch.float32 if level == "O1" else torch.bfloat16
                assert model.embed.weight.dtype == low
                kept = torch.float32 if custom else low
                assert (model.norm.weight.dtype, model.blocks[0][1].bias.dtype) == (torch.float32,) * 2
                assert model.head.weight.dtype == kept
                losses = []
                for _ in range(15):
                    inputs, labels = (own_part(t) for t in mixed_batch(0))
                    output = model(inputs)
                    assert output["logits"].dtype == torch.float32
                    assert output["count"].dtype == torch.int64
                    loss = functional.mse_loss(output["logits"], labels)
                    loss.backward()
                    assert hybrid.full_gradient(model.embed.weight).dtype == torch.float32
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
                assert model.seen["blocks"] == torch.bfloat16
                assert losses[-1] < 0.95 * losses[0], (stage, level, custom, losses)
                assert {v.dtype for v in model.full_state_dict().values()} == {torch.float32}  # the plain model's
                assert all(v.dtype == torch.float32 for v in masters(model).values())
                hybrid.shutdown()


def test_levels_custom_fp32_and_outputs() -> None:
    run_ranks(types, 2, timeout_seconds=60)


def same_over_stages() -> None:
    """Stages change nothing under bf16 either; and it stays near fp32."""
    everything: dict[Any, dict[str, torch.Tensor]] = {}
    for level in ("O1", "O2"):
        for stage in STAGES:
            model = hybrid.distributed_model(Mixed(), strategy=amp(stage, level, bucket_bytes=300))
            optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for step in range(3):
                inputs, labels = (own_part(t) for t in mixed_batch(step))
                functional.mse_loss(model(inputs)["logits"], labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            everything[level, stage] = model.full_state_dict()
            for name, value in everything[level, stage].items():
                tolerance = 1e-2 if level == "O2" else 1e-5
                assert_close(value.float(), everything[level, 0][name].float(), tolerance, f"{level} {stage} {name}")
            hybrid.shutdown()


def test_stages_agree_in_low_precision() -> None:
    run_ranks(same_over_stages, 2)


class FloatInputs(nn.Module):
    """Norms that meet fp32 activations: features come in fp32, or a residual keeps them so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.second = nn.LayerNorm(8)
        self.group = nn.GroupNorm(2, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs + self.linear(self.first(inputs))
        return self.group(self.second(hidden)) * self.scale


def float_inputs() -> None:
    for level in ("O1", "O2"):
        for stage in (0, 3):
            model = hybrid.distributed_model(FloatInputs(), strategy=amp(stage, level))
            optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            model(torch.randn(4, 8, generator=seeded(1))).square().mean().backward()
            optimizer.step()
            hybrid.shutdown()


def test_norms_over_fp32_activations() -> None:
    run_ranks(float_inputs, 2)


# ---- BC-38, BC-32 ------------------------------------------------------------------------------------------------


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(36, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(images))).flatten(1))


def batch_norm() -> None:
    images, labels = torch.randn(16, 3, 5, 5, generator=seeded(4)), torch.randn(16, 2, generator=seeded(5))
    for level in ("O1", "O2"):
        for stage in STAGES:
            model = hybrid.distributed_model(Convolutional(), strategy=amp(stage, level, accumulate_steps=2))
            optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(4):
                model.train_batch((own_part(images), own_part(labels)), optimizer, loss_fn=functional.mse_loss)
            assert model.norm.running_mean.dtype == model.norm.running_var.dtype == torch.float32
            assert model.norm.num_batches_tracked.item() == 8
            assert model.norm.num_batches_tracked.dtype == torch.int64
            state = model.full_state_dict()
            assert state["norm.running_mean"].dtype == torch.float32
            assert state["norm.running_mean"].abs().sum() > 0
            assert_same_on_all_ranks({name: value.float() for name, value in state.items()}, "state")
            hybrid.shutdown()


def test_batch_norm_statistics_stay_fp32() -> None:
    """BC-38."""
    run_ranks(batch_norm, 2)


class ManyTypes(nn.Module):
    """A frozen bf16 linear, an fp32 norm and adapter, an int8 buffer (BC-32)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.base = nn.Linear(6, 4).bfloat16().requires_grad_(False)
        self.norm = nn.LayerNorm(4)
        self.down, self.up = nn.Parameter(torch.randn(2, 6) * 0.3), nn.Parameter(torch.randn(4, 2) * 0.3)
        self.register_buffer("code", torch.arange(4, dtype=torch.int8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.base(inputs.bfloat16()).float() + inputs @ self.down.T @ self.up.T) * self.code


def many_types() -> None:
    inputs, labels = torch.randn(8, 6, generator=seeded(1)), torch.randn(8, 4, generator=seeded(2))
    plain = ManyTypes()
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        functional.mse_loss(plain(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = plain.state_dict()
    for stage in STAGES:
        model = hybrid.distributed_model(ManyTypes(), strategy=strategy_of(stage=stage))
        optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for _ in range(3):
            functional.mse_loss(model(own_part(inputs)), own_part(labels)).backward()
            optimizer.step()
            optimizer.zero_grad()
        got = model.full_state_dict()
        assert {name: (v.dtype, v.shape) for name, v in got.items()} == {
            name: (v.dtype, v.shape) for name, v in wanted.items()
        }
        for name in ("base.weight", "base.bias", "code"):
            assert torch.equal(got[name], wanted[name]), (stage, name)
        for name, value in wanted.items():
            assert_close(got[name].float(), value.float(), 1e-5, f"{name} at stage {stage}")
        model.load_state_dict(got)
        assert all(torch.equal(value, got[name]) for name, value in model.full_state_dict().items())
        hybrid.shutdown()


def test_several_dtypes_in_one_block() -> None:
    """BC-32: each parameter keeps its own type in memory and in the state."""
    run_ranks(many_types, 2)


# ---- BC-31 -------------------------------------------------------------------------------------------------------


class Slope(nn.Module):
    """Its gradient is the input."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, slope: torch.Tensor) -> torch.Tensor:
        return (self.weight * slope).sum()


def ranges() -> None:
    for stage in STAGES:
        for shard_size in (None, 2) if stage else (None,):
            for dtype, reduce_dtype, value, wanted in (
                (torch.float32, "float16", 20000.0, 20000.0),
                (torch.float32, "bfloat16", 20000.0, 20000.0),
                (torch.float32, "grad", 2.0**-24, 2.0**-24),
                (torch.float16, "float32", 2.0**-24, 2.0**-24),
                (torch.float16, "float16", 20000.0, 20000.0),
            ):
                strategy = strategy_of(stage=stage, reduce_dtype=reduce_dtype, shard_size=shard_size)
                model = hybrid.distributed_model(Slope(dtype), strategy=strategy)
                model(torch.full((3,), value, dtype=dtype)).backward()
                gradient = hybrid.full_gradient(model.weight)
                what = f"stage {stage}, {shard_size}, {dtype}, {reduce_dtype}"
                assert_close(gradient / value, torch.ones(3) * wanted / value, 5e-3, what)
                hybrid.shutdown()


def test_the_range_of_a_half_precision_reduction() -> None:
    """BC-31: eight ranks with 20000 each have a finite mean; the smallest step survives an fp32 reduction."""
    run_ranks(ranges, 8)


def own_half_gradients() -> None:
    for stage in (0, 2):
        strategy = strategy_of(stage=stage, reduce_dtype="float16", grad_dtype="param")
        model = hybrid.distributed_model(Slope(torch.float16), strategy=strategy)
        model(torch.full((3,), 20000.0, dtype=torch.float16)).backward()
        gradient = hybrid.full_gradient(model.weight)
        assert_close(gradient.float() / 20000, torch.ones(3), 5e-3, f"stage {stage}")
        hybrid.shutdown()
    dist.barrier()


def test_the_range_where_gradients_are_float16_themselves() -> None:
    """BC-31 with grad_dtype "param": sums over ranks leave the range of float16 as well."""
    run_ranks(own_half_gradients, 8)


# ---- refusals ----------------------------------------------------------------------------------------------------


class TiedOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def refused() -> None:
    with pytest.raises(hybrid.ModelError, match=r"custom_fp32.*Nothing"):
        hybrid.distributed_model(Mixed(), strategy=amp(1, custom_fp32=["Nothing"]))
    hybrid.shutdown()
    with pytest.raises(hybrid.ModelError, match=r"tied.*custom_fp32"):
        hybrid.distributed_model(TiedOut(), strategy=amp(1, custom_fp32=["head"]))
    hybrid.shutdown()
    model = hybrid.distributed_model(TiedOut(), strategy=amp(3, custom_fp32=["head", "embedding"]))
    assert model.head.weight is model.embedding.weight
    assert model(torch.tensor([[1, 2]])).dtype == torch.float32
    hybrid.shutdown()


def test_names_that_are_not_there_are_refused() -> None:
    run_ranks(refused, 2)
