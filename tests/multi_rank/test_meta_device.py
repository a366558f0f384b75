"""Models on the meta device get the values of a plain model, part by part, under every layout."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import (
    SEVERAL_STEPS,
    assert_close,
    assert_same_on_all_ranks,
    own_part,
    seeded,
    strategy_of,
)
from tests.ranks import run_plain, run_ranks

SEED = 11
STAGES = (0, 1, 2, 3)
State = dict[str, torch.Tensor]

# ---- models ------------------------------------------------------------------------------------------------------


class Zoo(nn.Module):
    """torch's own layers, with buffers, padding, frozen parts, and parameters that start as constants."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=2)
        self.bag = nn.EmbeddingBag(5, 3, padding_idx=1)
        self.conv, self.norm = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)
        self.up = nn.ConvTranspose1d(2, 3, 2)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.cross = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, bias=False)
        self.norms = nn.ModuleList([nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(3, affine=True)])
        self.prelu, self.bilinear = nn.PReLU(2), nn.Bilinear(2, 3, 4)
        self.recurrent, self.cell = nn.LSTM(3, 4, 2, bidirectional=True), nn.GRUCell(2, 3)
        self.frozen = nn.Linear(3, 5).requires_grad_(False)
        self.no_statistics = nn.BatchNorm1d(3, track_running_stats=False)
        self.empty = nn.Linear(0, 3)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4, bias=False))
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.last = nn.Linear(2, 2)  # draws after the head, whose own weight was thrown away

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(tokens)))


class Initials(nn.Module):
    """Everything from nn.init, and the ways to write a parameter."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("trunc", "orthogonal", "xavier_u", "xavier_n", "kaiming_n", "sparse", "eye", "data", "copied"):
            self.register_parameter(name, nn.Parameter(torch.empty(6, 5)))
        self.dirac = nn.Parameter(torch.empty(3, 2, 3))
        self.pieces, self.scalar = nn.Parameter(torch.empty(4, 3)), nn.Parameter(torch.empty(()))
        self.replaced = nn.Parameter(torch.empty(2, 3))
        self.moments = nn.Parameter(torch.empty(5))
        self.permuted = nn.Parameter(torch.empty(3, 4).t())
        self.register_buffer("positions", torch.empty(4, dtype=torch.int64))
        self.register_buffer("mask", torch.empty(3, 3, dtype=torch.bool), persistent=False)
        self.register_buffer("assigned", torch.empty(3), persistent=False)
        self.register_buffer("noise", torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.trunc, std=0.5, a=-0.5, b=0.5)
        nn.init.orthogonal_(self.orthogonal)
        nn.init.xavier_uniform_(self.xavier_u, gain=nn.init.calculate_gain("relu"))
        nn.init.xavier_normal_(self.xavier_n)
        nn.init.kaiming_normal_(self.kaiming_n, mode="fan_out")
        nn.init.sparse_(self.sparse, 0.4)
        nn.init.eye_(self.eye)
        nn.init.dirac_(self.dirac)
        self.data.data.normal_(0, 0.02)
        self.data.data[1].zero_()
        self.moments.data = torch.rand(5)
        with torch.no_grad():
            self.copied.copy_(torch.randn(6, 5))
            self.copied[0] = torch.randn(5)
            for row in self.pieces:
                row.uniform_()
            self.scalar.fill_(3.0).mul_(0.5)
            self.permuted.uniform_(-1, 1)
            self.permuted += 1
        self.replaced = nn.Parameter(torch.randn(2, 3))
        self.positions.copy_(torch.arange(4))
        self.mask.fill_(False)
        self.mask[0] = True
        self.assigned = torch.linspace(0, 1, 3)
        nn.init.normal_(self.noise)


class ByApply(nn.Module):
    """`_init_weights(module)` over all modules, as nanoGPT does; one module at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.again = self.first
        self.inner = Inner()
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=1.0, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)


class Inner(nn.Module):
    """Has an `_init_weights` of its own, without argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 2), nn.Parameter(torch.empty(3))
        self._init_weights()

    def _init_weights(self) -> None:
        nn.init.uniform_(self.scale, 2, 3)
        nn.init.constant_(self.linear.bias, 0.25)


class ByInitWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(4, 4), nn.Linear(4, 2)
        self.gain = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.init_weights()

    def init_weights(self, std: float = 0.5) -> None:
        nn.init.normal_(self.linear.weight, std=std)
        nn.init.ones_(self.gain)
        self.table = torch.arange(4.0)
        nn.init.normal_(self.out.weight, std=std)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(4, 4))


def transformer() -> nn.Module:
    return nn.Sequential(nn.Transformer(4, 2, 2, 2, 6, batch_first=True), nn.Linear(4, 4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "zoo": Zoo,
    "tied": Tied,
    "initials": Initials,
    "by apply": ByApply,
    "by init_weights": ByInitWeights,
    "encoder": encoder,
    "transformer": transformer,
}


def strategy(stage: int, *, o2: bool = False, **settings: Any) -> hybrid.DistributedStrategy:
    made = strategy_of(stage=stage, bucket_bytes=200, **settings)
    if o2:
        made.amp = True
        made.amp_configs = {"dtype": "bfloat16", "level": "O2"}
    return made


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def everything(model: Any) -> State:
    """The state, and buffers that are not in it."""
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else dict(model.state_dict())
    return state | {name: buffer for name, buffer in model.named_buffers() if name not in state}


# ---- replay ------------------------------------------------------------------------------------------------------


def replayed(names: list[str]) -> None:
    for name in names:
        torch.manual_seed(SEED)
        plain = MODELS[name]()
        wanted, next_number = everything(plain), torch.rand(())
        for stage in STAGES:
            for o2 in (False, True):
                what = f"{name}, stage {stage}, O2 {o2}"
                torch.manual_seed(SEED)
                model = on_meta(MODELS[name])
                parameters = dict(model.named_parameters(remove_duplicate=False))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                model = hybrid.distributed_model(model, strategy=strategy(stage, o2=o2))
                assert torch.equal(torch.rand(()), next_number), f"{what}: draws more or less than building does"
                after = dict(model.named_parameters(remove_duplicate=False))
                assert list(after) == list(parameters), what
                assert all(after[fqn] is parameter for fqn, parameter in parameters.items()), what
                hybrid.distributed_optimizer(optimizer)
                assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())), what
                assert model.state_dict().keys() == plain.state_dict().keys(), what
                assert [p.stride() for p in model.parameters()] == [p.stride() for p in plain.parameters()], what
                got = everything(model)
                assert got.keys() == wanted.keys(), what
                for fqn, value in wanted.items():
                    parameter = dict(plain.named_parameters(remove_duplicate=False)).get(fqn)
                    if o2 and parameter is not None and not parameter.requires_grad:
                        value = value.bfloat16().float()  # frozen: no master
                    assert got[fqn].dtype == value.dtype, (what, fqn)
                    assert torch.equal(got[fqn], value), (what, fqn, got[fqn], value)
                hybrid.shutdown()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_replay_is_building_plainly(world_size: int) -> None:
    """Bitwise, at every stage, with and without masters; the random state goes on as after building."""
    run_ranks(replayed, world_size, list(MODELS))


def other_random_states() -> None:
    torch.manual_seed(SEED)
    wanted = everything(Tied())
    for order in ("replay", "by_name"):
        torch.manual_seed(SEED + dist.get_rank())
        after = torch.random.get_rng_state()
        model = hybrid.distributed_model(on_meta(Tied), strategy=strategy(3), init=order)
        assert torch.equal(torch.random.get_rng_state(), after), f"{order}: each rank keeps its own stream"
        got = everything(model)
        if order == "replay":
            assert all(torch.equal(got[name], value) for name, value in wanted.items())
        assert_same_on_all_ranks(got, order)
        hybrid.shutdown()


def test_ranks_whose_random_states_differ_take_the_first_ones() -> None:
    run_ranks(other_random_states, 3)


# ---- by name -----------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Weights large enough to see their spread; one whose draws are computed beside it, before and after others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.beside = Beside()


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "c", "d"):
            self.register_parameter(name, nn.Parameter(torch.empty(40, 40)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.a.normal_()
            self.b.copy_(torch.randn(40, 40))  # drawn before the parameter is touched
            self.c.fill_(0.0).add_(torch.randn(40, 40))
            self.d.data = torch.randn(40, 40)


def by_name(seed: int | None) -> dict[str, State]:
    results = {}
    models: dict[str, Callable[[], nn.Module]] = {
        **{name: MODELS[name] for name in ("zoo", "tied", "initials", "encoder")},
        "wide": Wide,
    }
    for name, build in models.items():
        for stage in STAGES:
            for o2 in (False, True):
                for partition in ("element", "parameter") if stage >= 2 and not o2 else (None,):
                    torch.manual_seed(SEED)
                    settings = {"seed": seed, "partition": partition}
                    made = strategy(stage, o2=o2, **settings)
                    model = hybrid.distributed_model(on_meta(build), strategy=made, init="by_name")
                    got = everything(model)
                    # Frozen parameters have no master, so O2 rounds them.
                    low = {n for n, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
                    exact = {n: value.bfloat16() if n in low else value for n, value in got.items()}
                    first = results.setdefault(name, exact)
                    for fqn, value in exact.items():
                        assert torch.equal(value, first[fqn]), (name, stage, o2, partition, fqn)
                    hybrid.shutdown()
    return results


@functools.cache
def values_by_name(world_size: int, seed: int | None) -> dict[str, State]:
    return run_ranks(by_name, world_size, seed)[-1]


@pytest.mark.parametrize(("world_size", "seed"), [(1, None), (3, None), (2, SEED)])
def test_by_name_is_the_same_under_every_layout(world_size: int, seed: int | None) -> None:
    """The seed is the strategy's, or that of torch's generator."""
    got, wanted = values_by_name(world_size, seed), values_by_name(2, None)
    for name, state in wanted.items():
        for fqn, value in state.items():
            assert torch.equal(got[name][fqn], value), (name, fqn)


def test_by_name_draws_each_parameter_anew() -> None:
    state = values_by_name(2, None)["wide"]
    bound = 1 / 8  # of nn.Linear with 64 inputs: uniform between the two
    for name in ("first", "second"):
        weight = state[f"{name}.weight"]
        assert weight.abs().max() <= bound
        assert abs(weight.std().item() - bound / 3**0.5) < 0.03 * bound
        assert state[f"{name}.bias"].abs().max() <= bound
    normal = [state[f"beside.{name}"] for name in "abcd"]
    for value in normal:
        assert abs(value.std().item() - 1) < 0.1
        assert abs(value.mean().item()) < 0.1
    drawn = [state["first.weight"].flatten()[:1600] / bound * 3**0.5, *(value.flatten() for value in normal)]
    correlations = torch.corrcoef(torch.stack([*drawn, state["second.weight"].flatten()[:1600]])) - torch.eye(6)
    assert correlations.abs().max() < 0.15, correlations
    zoo = values_by_name(2, None)["zoo"]
    assert zoo["embedding.weight"][2].tolist() == [0.0] * 4
    assert zoo["norm.running_var"].tolist() == [1.0] * 3


def test_another_seed_gives_other_values() -> None:
    one, other = values_by_name(2, None)["wide"], run_ranks(by_name_seed, 2, SEED + 1)[0]
    assert not any(torch.equal(value, other[name]) for name, value in one.items())


def by_name_seed(seed: int) -> State:
    return everything(hybrid.distributed_model(on_meta(Wide), strategy=strategy(3, seed=seed), init="by_name"))


# ---- partly on meta ----------------------------------------------------------------------------------------------


class Partly(nn.Module):
    """A backbone with trained values, and a new head; one module has some of each."""

    def __init__(self, on: str) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        with torch.no_grad():
            self.backbone[0].weight.fill_(5.0)
            self.backbone[1].running_mean.fill_(6.0)
        with torch.device(on):
            self.head = nn.Linear(4, 3)
            self.norm = nn.BatchNorm1d(3)
            self.mixed = nn.Linear(4, 2)
        self.mixed.weight = nn.Parameter(torch.full((2, 4), 7.0))
        self.norm.running_var = torch.full((3,), 8.0)

    def _init_weights(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.uniform_(parameter, 1, 2)


def partly() -> None:
    for stage in STAGES:
        for order in ("replay", "by_name"):
            for o2 in (False, True):
                torch.manual_seed(SEED)
                model = Partly("meta")
                backbone = {name: value.clone() for name, value in model.backbone.state_dict().items()}
                model = hybrid.distributed_model(model, strategy=strategy(stage, o2=o2), init=order)
                got = everything(model)
                what = f"stage {stage}, {order}, O2 {o2}"
                for name, value in backbone.items():
                    assert torch.equal(got[f"backbone.{name}"], value), (what, name, got[f"backbone.{name}"])
                assert bool((got["mixed.weight"] == 7.0).all()), (what, got["mixed.weight"])
                assert got["norm.running_var"].tolist() == [8.0] * 3, what
                assert got["norm.running_mean"].tolist() == [0.0] * 3, what
                for name in ("head.weight", "head.bias", "mixed.bias", "norm.weight"):
                    assert bool(((got[name] >= 1) & (got[name] < 2)).all()), (what, name, got[name])
                hybrid.shutdown()


def test_what_has_its_values_keeps_them() -> None:
    run_ranks(partly, 2)


# ---- refusals ----------------------------------------------------------------------------------------------------


class Drawn(nn.Module):
    """What its constructor does by hand: three things that nothing can repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.token, self.scale = nn.Parameter(torch.randn(3)), nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool))


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.angles = [torch.arange(4.0)]


class OneWeight(nn.Module):
    """`reset_parameters` is given from outside."""

    reset: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.empty(4, 3)), nn.Parameter(torch.empty(2))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            type(self).reset(self)


def half(module: Any) -> None:
    module.weight[:2].normal_()
    module.other.zero_()


def two_passes(module: Any) -> None:
    module.weight.normal_()
    module.other.zero_()
    module.weight.mul_(2)


def two_passes_by_data(module: Any) -> None:
    data = module.weight.data
    data.normal_()
    module.other.zero_()
    data.mul_(2)


def from_another(module: Any) -> None:
    module.other.fill_(2.0)
    module.weight.copy_(module.other.sum().expand(4, 3))
    module.other.add_(module.weight.sum())


def replaces(module: Any) -> None:
    module.weight = nn.Parameter(torch.zeros(2, 2))
    module.other.zero_()


def raises(module: Any) -> None:
    module.other.zero_()
    raise RuntimeError("no luck today")


REFUSED: dict[str, tuple[Any, str]] = {
    "half": (half, r"'weight' left 6 of 12 elements without a value"),
    "two passes": (two_passes, r"'weight' left 12 of 12|'weight' left \d+ of 12|parameter 'weight'"),
    "two passes, by .data": (two_passes_by_data, r"'weight' went on after other parameters were used"),
    "from another": (from_another, r"'(weight|other)' left \d+ of \d+ elements without a value"),
    "replaces": (replaces, r"put other parameters in the place of \['weight'\]"),
    "raises": (raises, r"no luck today"),
}


def refused() -> None:
    for stage in (0, 3):
        for order in ("replay", "by_name"):
            wanted = r"parameter 'token' of Drawn, parameter 'scale' of Drawn, buffer 'table' of Drawn, buffer 'mask'"
            with pytest.raises(hybrid.ModelError, match=wanted):
                hybrid.distributed_model(on_meta(Drawn), strategy=strategy(stage), init=order)
            hybrid.shutdown()
            with pytest.raises(hybrid.ModelError, match=r"'angles'.*neither parameter nor buffer"):
                hybrid.distributed_model(on_meta(Attribute), strategy=strategy(stage), init=order)
            hybrid.shutdown()
            for name, (reset, message) in REFUSED.items():
                OneWeight.reset = reset
                model = on_meta(OneWeight)
                try:
                    hybrid.distributed_model(model, strategy=strategy(stage), init=order)
                except (hybrid.ModelError, RuntimeError) as error:
                    assert re.search(message, str(error)), (name, order, stage, str(error))
                else:
                    raise AssertionError(f"{name}, {order}, stage {stage}: not refused")
                dist.barrier()  # all ranks came here
                hybrid.shutdown()
    for order in ("replay", "by_name"):
        with pytest.raises(hybrid.ModelError, match=rf"init = '{order}' is for models built on the meta device"):
            hybrid.distributed_model(nn.Linear(2, 2), strategy=strategy(0), init=order)
        hybrid.shutdown()
    with pytest.raises(hybrid.ModelError, match=r"init = 'magic': must be 'replay' or 'by_name'"):
        hybrid.distributed_model(on_meta(Tied), strategy=strategy(0), init="magic")
    hybrid.shutdown()


def test_what_cannot_be_repeated_is_refused_by_name() -> None:
    run_ranks(refused, 3, timeout_seconds=40)


def fails_on_one(module: Any) -> None:
    module.weight.normal_()
    module.other.zero_()
    if dist.get_rank() == 1:
        raise RuntimeError("only here")


def failing_alone() -> None:
    OneWeight.reset = fails_on_one
    kind = RuntimeError if dist.get_rank() == 1 else hybrid.ModelError
    with pytest.raises(kind, match=r"^only here$" if dist.get_rank() == 1 else r"rank 1 could not.*only here"):
        hybrid.distributed_model(on_meta(OneWeight), strategy=strategy(3))


def test_an_initialisation_that_fails_on_one_rank_fails_on_all() -> None:
    run_ranks(failing_alone, 3)


# ---- training ----------------------------------------------------------------------------------------------------


def train(model: Any, optimizer: torch.optim.Optimizer, part: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    losses = []
    for step in range(3):
        tokens = torch.randint(9, (6, 5), generator=seeded(step))
        targets = torch.randint(9, (6, 5), generator=seeded(step + 100))

        def loss_fn(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())

        if hasattr(model, "train_batch"):
            losses.append(model.train_batch((part(tokens), part(targets)), optimizer, loss_fn=loss_fn).loss)
        else:
            loss = loss_fn(model(tokens), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def trained_plainly() -> tuple[list[float], State]:
    torch.manual_seed(SEED)
    model = Tied()
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), lambda tensor: tensor)
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def trained(wanted: tuple[list[float], State]) -> None:
    for stage in STAGES:
        torch.manual_seed(SEED)
        model = on_meta(Tied)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # built before
        model = hybrid.distributed_model(model, strategy=strategy(stage))
        optimizer = hybrid.distributed_optimizer(optimizer)
        losses = train(model, optimizer, own_part)
        for step, (loss, plain) in enumerate(zip(losses, wanted[0], strict=True)):
            assert_close(loss, plain, SEVERAL_STEPS, f"loss of step {step} at stage {stage}")
        for name, value in model.full_state_dict().items():
            assert_close(value, wanted[1][name], SEVERAL_STEPS, f"{name} at stage {stage}")
        hybrid.shutdown()


@pytest.mark.parametrize("world_size", [2, 3])
def test_it_trains_as_one_plain_process(world_size: int) -> None:
    run_ranks(trained, world_size, run_plain(trained_plainly))
