"""`split = "auto"` weighs memory: what it predicts of each stage is what a real run has, and a limit is kept."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hybrid
from hybrid.collectives.scratch import SCRATCH
from hybrid.compose import memory_limits
from hybrid.compose.stage_plan import plan_stages
from hybrid.contracts.stage_memory import StageBytes
from hybrid.errors import ModelError, StrategyError
from hybrid.units import format_bytes
from tests.multi_rank.test_memory_and_traffic import in_one_world, live_bytes, live_storages
from tests.pipeline_models import own, pipeline_strategy, pipeline_variant
from tests.ranks import run_ranks

# No tensor is whole pages large: messages of gloo are.
WIDTH, TOKENS, SAMPLES, WORDS = 34, 30, 16, 101
# Prediction and count differ by what lives for a moment only (temporaries inside an operation's backward, two
# gradients of which one is counted) and by padding of shards: a fifth of a stage at most, on models as small as these.
TOLERANCE = 0.20


class Peak(TorchDispatchMode):
    """The most bytes, at any product or operation of a backward, of storages that operations have made in here."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._before = set(live_storages())
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dtype in {torch.float32, torch.bfloat16} and tensor.dim():
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._before and storage.nbytes() % 4096:  # messages are whole pages
                    reference = StorageWeakRef(storage)
                    self._made[reference.cdata] = reference, storage.nbytes()
        if any(word in str(func) for word in ("mm", "backward", "foreach", "mul", "sqrt")):
            SCRATCH.clear()  # messages of gloo, seen through views of other types
            self._made = {place: one for place, one in self._made.items() if not one[0].expired()}
            self.most = max(self.most, sum(size for _, size in self._made.values()))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.widen, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 150), nn.Linear(150, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(functional.gelu(self.widen(self.norm(x))))


class Model(nn.Module):
    """Tied, uneven, with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return {"loss": functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(5)), nn.Linear(WIDTH, WORDS))


def ids() -> torch.Tensor:
    return torch.randint(WORDS, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(0))


def flat_entropy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def peak_of_a_step(kind: str, schedule: str, stage: int, extra: str) -> tuple[int, int]:
    """(bytes at the fullest moment of a step, predicted) of this rank's stage."""
    more: dict[str, Any] = {"recompute": {"recompute": "full"}, "O2": {"amp": {"level": "O2"}}}.get(extra, {})
    pp = 2
    if stage:
        more["bucket_bytes"] = 20_000
    strategy = pipeline_strategy(pp, mb=4, schedule=schedule, stage=stage or None, **more)
    model: Any = Model() if kind == "own" else chain()
    world = torch.distributed.get_world_size()
    micro_batch = ids()[: SAMPLES * pp // world // 4]
    sample: Any = {"ids": micro_batch, "labels": micro_batch} if kind == "own" else micro_batch
    planned = plan_stages(model, strategy.resolve(world), sample=sample)
    assert planned is not None
    predicted: StageBytes = planned.memory[torch.distributed.get_rank() * pp // world]
    model = hybrid.distributed_model(model, strategy=strategy, sample=sample)
    optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    batch: Any = own({"ids": ids(), "labels": ids()} if kind == "own" else (ids(), ids()))
    loss_fn = None if kind == "own" else flat_entropy
    model.train_batch(batch, optimizer, loss_fn=loss_fn)
    before = live_bytes()
    with Peak() as peak:
        model.train_batch(batch, optimizer, loss_fn=loss_fn)
    return before + peak.most, predicted.total


CASES = (("own", "1f1b", 0, ""), ("chain", "gpipe", 0, "recompute"))
MORE = (
    ("own", "zb-h1", 2, "O2"),
    ("own", "zbv", 0, ""),
    ("chain", "1f1b", 0, ""),
    ("own", "gpipe", 2, ""),
    ("own", "1f1b", 3, "recompute"),
    ("own", "zb-h1", 2, ""),
    ("own", "1f1b", 2, "O2"),
    ("chain", "interleaved", 1, "recompute"),
)


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_prediction_is_what_a_run_has(case: tuple[Any, ...]) -> None:
    """A limit that is kept on paper only would be none."""
    world = 4 if case[2] else 2
    alike = tuple(one for one in (CASES if case in CASES else MORE) if bool(one[2]) == bool(case[2]))
    for rank, (counted, predicted) in enumerate(in_one_world(peak_of_a_step, world, alike)[case]):
        assert abs(predicted / counted - 1) < TOLERANCE, (rank, counted, predicted)


# ---- what the prediction decides -------------------------------------------------------------------------------------


def strategy(pp: int = 2, **settings: Any) -> hybrid.DistributedStrategy:
    configs = {"degree": pp, "accumulate_steps": 4, **settings}
    return hybrid.DistributedStrategy(pipeline=True, pipeline_configs=configs)


def listed() -> hybrid.PipelineLayer:
    return hybrid.PipelineLayer(
        [
            hybrid.LayerDesc(nn.Embedding, WORDS, WIDTH),
            *[hybrid.LayerDesc(Block) for _ in range(5)],
            hybrid.LayerDesc(nn.Linear, WIDTH, WORDS),
        ]
    )


MODELS: dict[str, Any] = {"own": Model, "chain": chain, "listed": listed}


def sample_of(kind: str) -> Any:
    return {"ids": ids(), "labels": ids()} if kind == "own" else ids()


@pytest.mark.parametrize("kind", MODELS)
def test_a_limit_that_the_fastest_split_exceeds(kind: str) -> None:
    """Each kind of model takes a slower split that fits, and is refused with a value that would do where none does."""
    model, sample = MODELS[kind](), sample_of(kind)
    free = plan_stages(model, strategy().resolve(2), sample=sample)
    assert free is not None
    most = max(stage.total for stage in free.memory)
    limited = plan_stages(model, strategy(memory_limit_bytes=most * 9 // 10).resolve(2), sample=sample)
    assert limited is not None
    assert limited.chunks != free.chunks
    assert max(stage.total for stage in limited.memory) <= most * 9 // 10
    with pytest.raises(
        StrategyError, match=r"no split of . layers into 2 chunks fits.*on stage \d.*[Nn]earest: "
    ) as told:
        plan_stages(model, strategy(memory_limit_bytes=most // 4).resolve(2), sample=sample)
    would_do = int(str(told.value).rpartition("memory_limit_bytes = ")[2].partition(",")[0])
    assert plan_stages(model, strategy(memory_limit_bytes=would_do).resolve(2), sample=sample) is not None
    shown = strategy(memory_limit_bytes=most * 9 // 10).explain(model, 2, sample=sample)
    assert f"memory of a rank on each stage: {format_bytes(limited.memory[0].total)}, " in shown


def test_what_cannot_be_held_is_said() -> None:
    """Without a sample nobody knows what a chain keeps; a split that was given has nothing to choose."""
    with pytest.raises(ModelError, match=r"memory_limit_bytes = 1048576 cannot be kept.*without a sample"):
        plan_stages(chain(), strategy(memory_limit_bytes="1MiB").resolve(2))
    with pytest.raises(StrategyError, match=r"memory_limit_bytes = 5.*split = 'uniform'.*choose 'auto'"):
        strategy(memory_limit_bytes=5, split="uniform").resolve(2)
    layers = hybrid.PipelineLayer([hybrid.LayerDesc(Block) for _ in range(3)], seg_method="uniform")
    resolved = strategy(memory_limit_bytes=5).resolve(2)
    with pytest.raises(StrategyError, match=r"memory_limit_bytes = 5 is kept where.*seg_method = 'uniform'"):
        plan_stages(layers, resolved)


def test_limits_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU limits each stage, a host its ranks together; a limit of one's own replaces both; `explain` has none."""
    resolved, place = strategy().resolve(2), SimpleNamespace(local_rank=0, local_world_size=2, launched=True)
    monkeypatch.setattr(memory_limits, "read_environment", lambda: place)
    sample = sample_of("own")
    free = plan_stages(Model(), resolved, sample=sample, is_here=False)
    assert free is not None
    needs = sum(stage.total for stage in free.memory)
    monkeypatch.setattr(memory_limits, "_host_bytes", lambda: needs)
    assert plan_stages(Model(), resolved, sample=sample) == replace(free, own_forward=mock.ANY)
    # Another split needs less in all, though its fullest stage needs more.
    assert free.own_forward is not None
    assert free.own_forward.memory is not None
    memory, last = free.own_forward.memory, len(free.own_forward.flow.calls)
    splits = [(range(cut), range(cut, last)) for cut in range(1, last)]
    leanest = min(sum(stage.total for stage in memory.of_stages(split)) for split in splits)
    assert leanest < needs
    monkeypatch.setattr(memory_limits, "_host_bytes", lambda: leanest)
    lean = plan_stages(Model(), resolved, sample=sample)
    assert lean is not None
    assert sum(stage.total for stage in lean.memory) == leanest
    monkeypatch.setattr(memory_limits, "_host_bytes", lambda: leanest - 1)
    with pytest.raises(StrategyError, match=r"the 2 ranks of a host share .*: no split.* for them together.*") as told:
        plan_stages(Model(), resolved, sample=sample)
    assert "1 rank on each of 2 hosts" in str(told.value) or "recompute" in str(told.value)
    assert "memory_limit_bytes" not in str(told.value)
    assert plan_stages(Model(), strategy(memory_limit_bytes=needs).resolve(2), sample=sample) is not None
    most = max(stage.total for stage in free.memory)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for has, fits in ((most * 2, True), (most // 3, False)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, has=has: SimpleNamespace(total_memory=has))
        assert memory_limits.limits_of(resolved, is_here=True).stage_bytes == int(has * 0.92)
        if not fits:
            with pytest.raises(StrategyError, match=r"the device has .* of which 92% are counted on: no split"):
                plan_stages(Model(), resolved, sample=sample)
    assert plan_stages(Model(), resolved, sample=sample, is_here=False) is not None


def test_recompute_precision_and_tensor_parallel_need_less() -> None:
    """Each way that a refusal names is one: the predicted figure of what it is about falls."""
    sample = sample_of("own")

    def needs(**settings: Any) -> StageBytes:
        wanted = strategy()
        for name, value in settings.items():
            setattr(wanted, name, value)
        planned = plan_stages(Model(), wanted.resolve(8), sample=sample)
        assert planned is not None
        return planned.memory[0]

    plain = needs()
    assert needs(recompute=True).activations < plain.activations / 3
    selective = needs(recompute=True, recompute_configs={"policy": "selective"}).activations
    assert needs(recompute=True).activations < selective < plain.activations
    low = needs(amp=True, amp_configs={"level": "O2"})
    assert plain.activations * 0.4 < low.activations < plain.activations * 0.75
    plan = dict.fromkeys(("words", "head", "blocks.*.norm"), "replicated")
    plan |= {"blocks.*.widen": "colwise", "blocks.*.narrow": "rowwise"}
    cut = needs(tensor_parallel=True, tensor_parallel_configs={"degree": 2, "plan": plan})
    assert plain.activations * 0.5 < cut.activations < plain.activations * 0.75
    assert cut.state < plain.state
    states = [needs(sharding=True, sharding_configs={"stage": stage}) for stage in (1, 2, 3)]
    assert plain.state > states[0].state == states[1].state > states[2].state
    assert needs(sharding=True, sharding_configs={"stage": 1, "offload": "optimizer"}).state < states[0].state


def changed(words: str, wanted: Any, sample: Any, world: int) -> tuple[Any, Any, int]:
    """(strategy, sample, ranks) after what a refusal proposes."""
    first, *others = words.partition(" (")[0].split(", ")
    for other in (one for one in others if " = " in one):  # accumulate_steps, shard_size
        wanted, sample, world = changed(other, wanted, sample, world)
    name, _, value = first.partition(" = ")
    value, _, ranks = value.partition(" on ")
    if name == "recompute":
        wanted.recompute = True
    elif name.startswith("micro-batches of "):
        rows = int(name.split()[2])
        sample = {key: tensor[:rows] for key, tensor in sample.items()}
    elif name.startswith("sharding"):
        wanted.sharding = True
        key = name.rpartition(".")[2] if "." in name else "stage"
        setattr(wanted.sharding_configs, key, int(value) if value.isdigit() else value.strip('"'))
    elif name == "pipeline_configs.memory_limit_bytes":
        wanted.pipeline_configs = {**wanted.pipeline_configs, "memory_limit_bytes": int(value)}
    else:
        key = name.removeprefix("pipeline_configs.")
        wanted.pipeline_configs = {**wanted.pipeline_configs, key: int(value) if value.isdigit() else value.strip('"')}
    return wanted, sample, int(ranks.split()[0]) if ranks else world


@pytest.mark.parametrize(
    ("world", "settings", "never"),
    [
        (2, {}, ("sharding",)),
        (2, {"recompute": True, "schedule": "gpipe"}, ("recompute", "sharding")),
        (8, {"sharding": True, "stage": 2}, ("stage = 2",)),
        (
            8,
            {"sharding": True, "stage": 3, "offload": "parameters", "recompute": True},
            ("offload", "recompute", "stage ="),
        ),
    ],
)
def test_what_a_refusal_names_would_do(world: int, settings: dict[str, Any], never: tuple[str, ...]) -> None:
    """Nothing that is so already, nothing that there are no ranks for, nothing that would not fit."""
    configs: Any = {key: settings[key] for key in ("stage", "offload") if key in settings}

    def wanted(limit: int) -> hybrid.DistributedStrategy:
        more = {"schedule": settings["schedule"]} if "schedule" in settings else {}
        made = strategy(memory_limit_bytes=limit, **more)
        made.recompute = settings.get("recompute", False)
        made.sharding = settings.get("sharding", False)
        if configs:
            made.sharding_configs = configs
        return made

    def refused(limit: int) -> str:
        with pytest.raises(StrategyError, match="no split of") as told:
            plan_stages(Model(), wanted(limit).resolve(world), sample=sample_of("own"))
        return str(told.value)

    least = int(refused(1000).rpartition("memory_limit_bytes = ")[2].partition(",")[0])
    text = refused(least * 9 // 10)
    named = text.partition("Nearest: ")[2].split("; or ")
    assert len(named) > 1, text
    for words in named:
        assert not any(word in words for word in never), text
        after, sample, ranks = changed(words, wanted(least * 9 // 10), sample_of("own"), world)
        assert plan_stages(Model(), after.resolve(ranks), sample=sample) is not None
    assert "No one change of settings is enough; nearest: " in refused(1000)
    assert " too much. Or pipeline_configs.memory_limit_bytes = " in refused(1000)


def test_a_callers_autocast_changes_nothing() -> None:
    """The training is not inside it."""
    planned = plan_stages(Model(), strategy().resolve(2), sample=sample_of("own"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = plan_stages(Model(), strategy().resolve(2), sample=sample_of("own"))
    assert planned is not None
    assert inside is not None
    assert inside.memory == planned.memory


def test_a_buffer_that_layers_share_is_there_once() -> None:
    """A mask that every block holds."""

    def state(num_holders: int) -> int:
        model, mask = chain(), torch.ones(1000)
        for block in list(model)[1 : 1 + num_holders]:
            block.register_buffer("mask", mask)
        planned = plan_stages(model, strategy().resolve(2), sample=ids())
        assert planned is not None
        return planned.memory[0].state

    assert state(2) == state(1) == state(0) + 4000


def cut_by_ranks_of_different_samples() -> tuple[Any, float]:
    with pipeline_variant(2, mb=2) as wanted:
        rows = 1 + 15 * torch.distributed.get_rank()
        model: Any = hybrid.distributed_model(chain(), strategy=wanted, sample=ids()[:rows, : 1 + rows])
        optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        result = model.train_batch((ids(), ids()), optimizer, loss_fn=flat_entropy)
        return model.hybrid_runtime.stages.staged.chunks, float(result.loss)


def test_ranks_with_other_samples_cut_alike() -> None:
    """The first rank's samples decide, or a layer would be on two stages, or on none."""
    first, second = run_ranks(cut_by_ranks_of_different_samples, 2)
    assert first == second


class Reading(nn.Module):
    """With `reads` it cannot run without values."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.first, self.last, self.reads = nn.Linear(8, 512), nn.Linear(512, 8), reads

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.reads:
            value.sum().item()
        return self.last(self.first(value).tanh().exp().sin())


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_that_runs_on_zeros_keeps_what_it_keeps(recompute: bool) -> None:
    """Wherever it stands: what it saves must not be counted for the next layer, or for none."""
    asked = strategy(memory_limit_bytes="1GiB")
    asked.recompute = recompute
    resolved = asked.resolve(2)
    wanted, found = [], []
    for place in (None, 0, 1, 2):
        model = nn.Sequential(*(Reading(reads=index == place) for index in range(3)))
        planned = plan_stages(model, resolved, sample=torch.randn(64, 8))
        assert planned is not None
        (wanted if place is None else found).append([stage.total for stage in planned.memory])
    assert found == wanted * 3
