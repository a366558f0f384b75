"""Scripts of four traditions, each as its users write it: Fleet, DDP, FSDP, and a configuration file with stage 3.

Every script runs on the ranks and, in its original form, in one plain process over the whole batch; losses and
weights must agree by the table of `tests/parity.py`. In low precision the plain process computes the rows of each
rank apart (as micro-batches), so that both round the same gradients and the table of float32 holds there too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hybrid
import hybrid as fleet
from tests.multi_rank.case_runs import own_part, seeded, weights_of
from tests.parity import TOLERANCES, compare_tensors
from tests.ranks import run_ranks

STEPS, SAMPLES, MICRO_BATCHES = 3, 8, 2
Pair = tuple[torch.Tensor, torch.Tensor]


def rows_of_ranks(pair: Pair) -> list[Pair]:
    """The whole batch, cut as `own_part` cuts it."""
    num_rows = SAMPLES // dist.get_world_size()
    return list(zip(pair[0].split(num_rows), pair[1].split(num_rows), strict=True))


def verify(model: Any, losses: list[float], plain: Mapping[str, torch.Tensor], plain_losses: list[float]) -> None:
    """The mean of the ranks' losses at each step, and every weight. All ranks call it."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, losses)
    problems: list[str] = []
    compare = functools.partial(compare_tensors, problems, TOLERANCES[torch.float32])
    assert len(losses) == len(plain_losses)
    for step, of_ranks in enumerate(zip(*everyone, strict=True)):
        compare("loss", f"loss at step {step}", sum(of_ranks) / len(of_ranks), plain_losses[step])
    weights = model.full_state_dict()
    assert list(weights) == list(plain)
    for name, value in plain.items():
        compare("weight", f"weight {name}", weights[name], value)
    assert not problems, "\n".join(problems)


# ---- Fleet: a strategy without init, amp with a GradScaler ---------------------------------------------------------


def classifier() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 15), nn.LayerNorm(15), nn.GELU(), nn.Linear(15, 15), nn.GELU(), nn.Linear(15, 4))


def labelled() -> list[Pair]:
    generator = seeded(2)
    return [
        (torch.randn(SAMPLES, 10, generator=generator), torch.randint(4, (SAMPLES,), generator=generator))
        for _ in range(STEPS)
    ]


def new_scaler() -> torch.amp.GradScaler:
    """Grows within the test; powers of two, so that scaling rounds nothing."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def fleet_script(amp: str, clip: bool, stage: int) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)

    strategy = fleet.DistributedStrategy()
    strategy.sharding = True
    strategy.sharding_configs = {"stage": stage, "shard_size": 2}
    auto_cast: Callable[[], Any] = functools.partial(torch.autocast, "cpu", dtype=torch.float16)
    if amp == "strategy":
        strategy.amp = True
        strategy.amp_configs = {"dtype": "float16", "level": "O1"}
        auto_cast = contextlib.nullcontext
    model = fleet.distributed_model(model, strategy=strategy)
    optimizer = fleet.distributed_optimizer(optimizer)

    scaler = fleet.distributed_scaler(new_scaler()) if clip else new_scaler()
    losses = []
    for batch in labelled():
        inputs, labels = map(own_part, batch)
        with auto_cast():
            loss = functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(0.3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())

    plain, plain_losses, plain_scaler = plain_fleet_script(clip)
    verify(model, losses, weights_of(plain), plain_losses)
    assert scaler.get_scale() == plain_scaler.get_scale() == 2.0**11
    fleet.shutdown()


def plain_fleet_script(clip: bool) -> tuple[nn.Module, list[float], torch.amp.GradScaler]:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    scaler, losses = new_scaler(), []
    for batch in labelled():
        parts = rows_of_ranks(batch)
        losses.append(0.0)
        for inputs, labels in parts:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = functional.cross_entropy(model(inputs), labels) / len(parts)
            scaler.scale(loss).backward()
            losses[-1] += loss.item()
        if clip:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            assert norm > 0.3
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model, losses, scaler


@pytest.mark.parametrize("clip", [False, True], ids=["step", "unscale-clip"])
@pytest.mark.parametrize("amp", ["autocast", "strategy"])
def test_fleet_script(amp: str, clip: bool) -> None:
    """`auto_cast` in the loop, or the strategy's amp; the scaler is torch's in both."""
    run_ranks(fleet_stages, 2, amp, clip)


def fleet_stages(amp: str, clip: bool) -> None:
    for stage in (1, 2, 3):
        fleet_script(amp, clip, stage)


# ---- DDP: two lines, and clipping ----------------------------------------------------------------------------------


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.norm, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.Linear(6, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(images))).mean((2, 3)))


def image_set() -> TensorDataset:
    generator = seeded(4)
    return TensorDataset(torch.randn(24, 3, 5, 5, generator=generator), torch.randint(5, (24,), generator=generator))


def epochs(model: Any, optimizer: Any, loader: Any, sampler: Any, clip_grad_norm: Callable[[], Any]) -> list[float]:
    """The loop that both forms of the script share."""
    loss_fn, losses = nn.CrossEntropyLoss(), []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(images), labels)
            loss.backward()
            clip_grad_norm()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
    return losses


def ddp_script(stage: int) -> None:
    assert dist.is_initialized()  # the script's own init_process_group("gloo")
    strategy = hybrid.DistributedStrategy(sharding=True, sharding_configs={"stage": stage})

    dataset = image_set()
    sampler = DistributedSampler(dataset, shuffle=True, seed=7)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    model: Any = Images()
    model = hybrid.distributed_model(model, strategy=strategy)  # was: DistributedDataParallel(model)
    optimizer: Any = hybrid.distributed_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    )
    losses = epochs(model, optimizer, loader, sampler, lambda: model.clip_grad_norm_(0.5))

    plain = Images()  # ... and alone: the batches of both ranks in one
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=7)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    wanted = epochs(plain, optimizer, loader, sampler, lambda: nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
    assert len(wanted) == 6
    verify(model, losses, weights_of(plain), wanted)
    hybrid.shutdown()


def ddp_stages() -> None:
    for stage in (0, 2):
        ddp_script(stage)


def test_ddp_script() -> None:
    """A process group that runs, torch's own sampler and loader, a schedule: the loop is the old one."""
    run_ranks(ddp_stages, 2)


# ---- FSDP: nn.Transformer in bfloat16, reduced in float32 ----------------------------------------------------------


def transformer() -> nn.Transformer:
    torch.manual_seed(5)
    return nn.Transformer(
        d_model=16,
        nhead=2,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dim_feedforward=24,
        dropout=0.0,
        batch_first=True,
    )


def sequences() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = seeded(6)
    shapes = ((SAMPLES, 6, 16), (SAMPLES, 5, 16), (SAMPLES, 5, 16))
    return [tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(STEPS)]


def masked_loss(model: Any, source: torch.Tensor, shifted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(shifted.shape[1])
    return functional.mse_loss(model(source, shifted, tgt_mask=mask).float(), target)


def fsdp_script() -> None:
    strategy = hybrid.DistributedStrategy(sharding=True, amp=True)
    strategy.sharding_configs = {"stage": 3, "reduce_dtype": "float32"}
    strategy.amp_configs = {"dtype": "bfloat16", "level": "O2"}
    model: Any = hybrid.distributed_model(transformer(), strategy=strategy)
    optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4))
    losses = []
    for batch in sequences():
        optimizer.zero_grad()
        loss = masked_loss(model, *map(own_part, batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert model.encoder.layers[0].linear1.weight.dtype == torch.bfloat16

    plain, masters, plain_losses = bf16_with_masters()
    verify(model, losses, {name: master.detach() for name, master in masters.items()}, plain_losses)
    for name, ((begin, end), shard) in model.shard_state_dict().items():
        torch.testing.assert_close(
            shard.flatten(),
            masters[name].detach().flatten()[begin:end],
            rtol=0,
            atol=TOLERANCES[torch.float32]["weight"],
        )
    # evaluation takes torch's fused path through the encoder, which reads the weights of inner modules itself
    source, shifted, _ = sequences()[0]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        got, wanted = (one.eval()(source, shifted) for one in (model, plain))
    torch.testing.assert_close(got.float(), wanted.float(), rtol=0, atol=2e-2)
    hybrid.shutdown()


def bf16_with_masters() -> tuple[nn.Module, dict[str, nn.Parameter], list[float]]:
    """Mixed precision by hand: bfloat16 weights, whose gradients are added up in float32 and update masters."""
    model = transformer()
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):  # keeps fp32 weights and computes in fp32
            module.forward = functools.partial(norm_in_fp32, module)
        else:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.bfloat16()
    optimizer, losses = torch.optim.AdamW(masters.values(), lr=1e-2, eps=1e-4), []
    for batch in sequences():
        losses.append(0.0)
        for half in zip(*(tensor.split(SAMPLES // 2) for tensor in batch), strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = masked_loss(model, *half) / 2
            loss.backward()
            losses[-1] += loss.item()
            for name, parameter in model.named_parameters():
                gradient = parameter.grad.float()
                masters[name].grad = gradient if masters[name].grad is None else masters[name].grad + gradient
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(masters[name])
    return model, masters, losses


def norm_in_fp32(norm: nn.LayerNorm, inputs: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        output = functional.layer_norm(inputs.float(), norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return output.to(inputs.dtype)


def test_fsdp_script() -> None:
    """MixedPrecision(param_dtype=bfloat16, reduce_dtype=float32) of a whole nn.Transformer."""
    run_ranks(fsdp_script, 2)


# ---- stage 3 with accumulation and recompute, as a configuration file says -----------------------------------------


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        layer = nn.TransformerEncoderLayer(d_model=12, nhead=3, dim_feedforward=20, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=3)
        self.head = nn.Linear(12, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(inputs).mean(1))


CONFIGURATION = """
sharding: true
sharding_configs: {stage: 3, shard_size: 2}
recompute: true
recompute_configs: {units: [TransformerEncoderLayer]}
gradient_clipping: 1.0
"""


def sentences() -> Iterable[Pair]:
    generator = seeded(9)
    for _ in range(STEPS):
        yield torch.randn(SAMPLES, 5, 12, generator=generator), torch.randint(4, (SAMPLES,), generator=generator)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)


def micro_batches(batch: Pair) -> Iterator[Pair]:
    own = [own_part(tensor) for tensor in batch]
    yield from zip(*(tensor.split(len(tensor) // MICRO_BATCHES) for tensor in own), strict=True)


def stage_3_script(way: str) -> None:
    strategy = hybrid.DistributedStrategy.from_yaml(CONFIGURATION)
    if way == "train_batch":
        strategy.accumulate_steps = MICRO_BATCHES
        strategy.global_batch_size = SAMPLES
    model: Any = hybrid.distributed_model(Encoder(), strategy=strategy)
    optimizer: Any = hybrid.distributed_optimizer(adam(model))
    losses = []
    for batch in sentences():
        if way == "train_batch":
            mine = tuple(map(own_part, batch))
            losses.append(model.train_batch(mine, optimizer, loss_fn=functional.cross_entropy).loss.item())
            continue
        losses.append(0.0)
        for number, (inputs, labels) in enumerate(micro_batches(batch), start=1):
            with contextlib.nullcontext() if number == MICRO_BATCHES else model.no_sync():
                loss = functional.cross_entropy(model(inputs), labels) / MICRO_BATCHES
                loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()

    plain = Encoder()
    plain_optimizer, plain_losses = adam(plain), []
    for inputs, labels in sentences():
        loss = functional.cross_entropy(plain(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        plain_losses.append(loss.item())
    verify(model, losses, weights_of(plain), plain_losses)
    hybrid.shutdown()


@pytest.mark.parametrize("way", ["train_batch", "no_sync"])
def test_stage_3_script(way: str) -> None:
    """Two ranks with two micro-batches each."""
    run_ranks(stage_3_script, 2, way)


def test_stage_3_script_with_replicas() -> None:
    """`shard_size: 2` on four ranks: two copies of the cut state."""
    run_ranks(stage_3_script, 4, "train_batch")
