"""Chains of uneven layers with their batches, strategies with a pipeline, and training both ways.

    chain     Embedding, five residual blocks of different widths, LayerNorm, head: 8 layers; a block holds a frozen
              vector and a parameter that nobody uses, one block is frozen whole
    tied      the head is the embedding
    thrice    the embedding's weight also mixes in the middle: over 4 stages it is on three of them
    layers    as chain, a hybrid.PipelineLayer of LayerDesc; its own loss_fn
    shared    as tied, by SharedLayerDesc
    own       no chain: a forward of its own with a skip over all blocks; tied, and a parameter outside the layers

Models and batches are functions of their names and seeds alone; a batch is that of the whole world.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import hybrid

__all__ = [
    "CLIPS",
    "MODELS",
    "PLAN",
    "PRECISIONS",
    "SAMPLES",
    "SCHEDULES",
    "TWO_CHUNKS",
    "Case",
    "assert_as_plain",
    "batch_of",
    "build",
    "cross_entropy",
    "layout_words",
    "make_adamw",
    "own",
    "pipeline_strategy",
    "pipeline_variant",
    "train_plain",
]

SAMPLES, LENGTH, VOCABULARY, WIDTH = 24, 5, 13, 15
HIDDEN = (18, 30, 18, 34, 22)
PLAN = {"*.widen": "colwise", "*.narrow": "rowwise", "*.scale": "replicated", "*.unused": "replicated"}
OWN_PLAN = {f"blocks.{pattern}": style for pattern, style in PLAN.items()}

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv")
TWO_CHUNKS = {"interleaved", "zbv"}  # per stage

# Name -> settings of amp_configs; a dtype for a run without amp.
PRECISIONS: Mapping[str, Any] = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16O1": {"level": "O1"},
    "bf16O2": {"level": "O2"},
    "fp16": {"level": "O1", "dtype": "float16", "init_loss_scaling": 256.0},
}
CLIPS: Mapping[str, Any] = {"none": None, "norm": 0.1, "value": {"clip_value": 0.05}}


class Block(nn.Module):
    """Residual; `scale` is frozen, `unused` gets no gradient."""

    def __init__(self, hidden: int, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, hidden)
        self.narrow = nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.full((width,), 0.9), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.narrow(functional.gelu(self.widen(self.norm(value)))) * self.scale


class Mixing(nn.Module):
    """Its weight has the shape of the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + torch.tanh(value @ self.weight.t()) @ self.weight / VOCABULARY


class Own(nn.Module):
    """Eight calls of units, as the chains have layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = _embedding()
        self.blocks = nn.ModuleList(Block(hidden) for hidden in HIDDEN)
        self.blocks[1].requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight
        self.skip = nn.Parameter(torch.tensor([0.7]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = value = self.words(tokens)
        for block in self.blocks:
            value = block(value)
        return self.head(self.norm(value + first * self.skip))


def _embedding() -> nn.Embedding:
    return nn.Embedding(VOCABULARY, WIDTH)


def _project(layer: nn.Embedding, value: torch.Tensor) -> torch.Tensor:
    return functional.linear(value, layer.weight)


def _frozen_block(hidden: int) -> nn.Module:
    return Block(hidden).requires_grad_(False)


def cross_entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def _sequential(*, tied: bool = False, thrice: bool = False) -> nn.Module:
    blocks: list[nn.Module] = [Block(hidden) for hidden in HIDDEN]
    blocks[1].requires_grad_(False)
    if thrice:
        blocks[2] = Mixing()
    layers = [_embedding(), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)]
    model = nn.Sequential(*layers)
    if tied or thrice:
        model[7].weight = model[0].weight
    if thrice:
        model[3].weight = model[0].weight
    return model


def _pipeline_layer(*, shared: bool, split: Sequence[int] | None) -> nn.Module:
    tie = hybrid.SharedLayerDesc
    first: Any = tie("words", _embedding) if shared else hybrid.LayerDesc(_embedding)
    blocks = [hybrid.LayerDesc(_frozen_block if place == 1 else Block, hidden) for place, hidden in enumerate(HIDDEN)]
    head = hybrid.LayerDesc(nn.Linear, WIDTH, VOCABULARY, bias=False)
    last: Any = tie("words", _embedding, forward_func=_project) if shared else head
    layers = [first, *blocks, hybrid.LayerDesc(nn.LayerNorm, WIDTH), last]
    return hybrid.PipelineLayer(layers, loss_fn=cross_entropy, seg_method=split or "auto", seed=5)


MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "chain": lambda split: _sequential(),
    "tied": lambda split: _sequential(tied=True),
    "thrice": lambda split: _sequential(thrice=True),
    "layers": lambda split: _pipeline_layer(shared=False, split=split),
    "shared": lambda split: _pipeline_layer(shared=True, split=split),
    "own": lambda split: Own(),
}


def build(name: str, *, split: Sequence[int] | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model; a PipelineLayer is not built yet, and takes `split` itself."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            return MODELS[name](split)
        finally:
            torch.set_default_dtype(before)


def batch_of(step: int, *, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(700 + step)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, length), generator=generator)
    return tokens, torch.randint(0, VOCABULARY, (SAMPLES, length), generator=generator)


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, also where one is empty; a large eps keeps rounding of gradients that should be 0 small."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "lr": 3e-3, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, eps=1e-3)


# ---- strategies ------------------------------------------------------------------------------------------------------


def pipeline_strategy(
    pp: int, *, mb: int = 4, schedule: str = "1f1b", tp: int = 1, stage: int | None = None, **settings: Any
) -> hybrid.DistributedStrategy:
    """In one line: `virtual_stages`, `split`, `shard_size`, `bucket_bytes`, `grad_reduce`, `recompute`, `amp` (its
    configs) and the strategy's own settings go where they belong."""
    strategy = hybrid.DistributedStrategy()
    strategy.timeout_seconds = 20
    configs: dict[str, Any] = {"degree": pp, "accumulate_steps": mb, "schedule": schedule}
    if schedule == "interleaved" or "virtual_stages" in settings:
        configs["virtual_stages"] = settings.pop("virtual_stages", 2)
    if (split := settings.pop("split", None)) is not None:
        configs["split"] = split
    if pp > 1:
        strategy.pipeline, strategy.pipeline_configs = True, configs
    else:
        strategy.accumulate_steps = mb
    if tp > 1:
        strategy.tensor_parallel, strategy.tensor_parallel_configs = True, {"degree": tp, "plan": PLAN}
    names = (
        "shard_size",
        "bucket_bytes",
        "grad_reduce",
        "overlap_comm",
        "partition",
        "overlap_param_gather",
        "reshard_after",
    )
    sharding = {name: settings.pop(name) for name in names if name in settings}
    if stage is not None:
        strategy.sharding, strategy.sharding_configs = (
            True,
            {
                "stage": stage,
                "bucket_bytes": 3000,
                **{name: value for name, value in sharding.items() if value is not None},
            },
        )
    if (amp := settings.pop("amp", None)) is not None:
        strategy.amp, strategy.amp_configs = True, amp
    if policy := settings.pop("recompute", None):
        strategy.recompute, strategy.recompute_configs = True, {"policy": policy}
    for name, value in settings.items():
        setattr(strategy, name, value)
    return strategy


@contextlib.contextmanager
def pipeline_variant(pp: int, **settings: Any) -> Iterator[hybrid.DistributedStrategy]:
    """One strategy of several in this world; the job is left at the end, so that the next may begin."""
    try:
        yield pipeline_strategy(pp, **settings)
    except BaseException as error:
        error.add_note(f"with pp {pp}, {settings}, rank {torch.distributed.get_rank()}")
        raise
    finally:
        hybrid.shutdown()


def own(batch: Any) -> Any:
    """What this rank gets of a global batch: the data-parallel ranks have other samples, all others the same."""
    mesh = hybrid.get_mesh()
    rank = mesh.coordinate("dp_replicate") * mesh.degree("dp_shard") + mesh.coordinate("dp_shard")
    ranks = mesh.degree("dp_replicate") * mesh.degree("dp_shard")

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cut(one) for name, one in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(map(cut, value))
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return value[len(value) * rank // ranks : len(value) * (rank + 1) // ranks]
        return value

    return cut(batch)


# Chunks -> layers of each, as uneven as they can be.
UNEVEN = {2: (6, 2), 4: (1, 4, 1, 2), 8: None}


def layout_words(case: Any) -> str:
    """`pp2_tp2_dp2_rep2`, degrees of 1 left out but for pp: how the id of a case begins."""
    words = [f"{word}{n}" for word, n in (("tp", case.tp), ("dp", case.dp_shard), ("rep", case.dp_replicate)) if n > 1]
    return "_".join([f"pp{case.pp}", *words])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run; the fields are the factors."""

    pp: int
    tp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    zero_stage: int = 0
    schedule: str = "1f1b"
    mb: int = 4
    model: str = "chain"
    precision: str = "fp32"
    clip: str = "none"
    recompute: str = "none"
    split: str = "auto"
    built: str = "after"
    grad_reduce: str | int = "auto"
    backend: str = "gloo"

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.dp_shard * self.dp_replicate

    @property
    def id(self) -> str:
        words = [
            layout_words(self),
            f"z{self.zero_stage}",
            self.schedule,
            f"mb{self.mb}",
            "" if self.precision == "fp32" else self.precision,
            self.model,
            "" if self.clip == "none" else f"clip{self.clip}",
            "" if self.recompute == "none" else "recompute",
            "" if self.split == "auto" else self.split,
            "" if self.built == "after" else "built-before",
            "" if self.grad_reduce == "auto" else f"reduce-{str(self.grad_reduce).removesuffix('_micro_batch')}",
            "" if self.backend == "gloo" else self.backend,
        ]
        return "-".join(word for word in words if word)

    @property
    def counts(self) -> tuple[int, ...] | None:
        """Layers of each chunk."""
        return UNEVEN[self.pp * (2 if self.schedule in TWO_CHUNKS else 1)] if self.split == "uneven" else None

    @property
    def _cuts_own(self) -> bool:
        return self.model == "own" and self.tp > 1

    @property
    def dtype(self) -> torch.dtype:
        chosen = PRECISIONS[self.precision]
        return chosen if isinstance(chosen, torch.dtype) else torch.float32

    def strategy(self) -> hybrid.DistributedStrategy:
        amp = PRECISIONS[self.precision]
        is_listed = self.model in {"layers", "shared"}
        return pipeline_strategy(
            self.pp,
            mb=self.mb,
            schedule=self.schedule,
            tp=self.tp,
            stage=self.zero_stage,
            shard_size=self.dp_shard if self.zero_stage > 0 else None,
            grad_reduce=self.grad_reduce,
            recompute="full" if self.recompute == "full" else None,
            split=None if is_listed else self.counts,
            amp=amp if isinstance(amp, dict) else None,
            gradient_clipping=CLIPS[self.clip],
            **({"tensor_parallel_configs": {"degree": self.tp, "plan": OWN_PLAN}} if self._cuts_own else {}),
        )


# ---- both ways -------------------------------------------------------------------------------------------------------


def train_plain(
    model: nn.Module,
    batches: Sequence[Any],
    loss_fn: Callable[..., Any],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    clip: float = math.inf,
) -> tuple[list[float], list[float], torch.optim.Optimizer]:
    """Plain torch on whole batches: losses, norms, the optimizer. A loss may be a pair (sum, count)."""
    optimizer = make_optimizer(model)
    losses, norms = [], []
    for inputs, labels in batches:
        loss = loss_fn(model(inputs), labels)
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], clip)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, optimizer


def assert_as_plain(
    make: Callable[[], nn.Module],
    batches: Sequence[Any],
    loss_fn: Callable[..., Any],
    *,
    pp: int = 2,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = make_adamw,
    built: str = "after",
    tolerance: float = 2e-6,
    clip: float = math.inf,
    sample: Any = None,
    **settings: Any,
) -> None:
    """On each rank: plain torch on the whole batches, then a pipeline on this rank's part; the same numbers, and
    the same on all ranks to the bit. *Collective.*"""
    plain = make()
    losses, norms, _ = train_plain(plain, batches, loss_fn, make_optimizer, clip=clip)
    plain.eval()
    with torch.no_grad():
        wanted_eval = loss_fn(plain(batches[0][0]), batches[0][1])
    wanted_eval = wanted_eval[0] / wanted_eval[1] if isinstance(wanted_eval, tuple) else wanted_eval
    with pipeline_variant(pp, gradient_clipping=clip, **settings) as strategy:
        model: Any = make()
        optimizer: Any = make_optimizer(model) if built == "before" else None
        model = hybrid.distributed_model(model, strategy=strategy, sample=sample)
        optimizer = hybrid.distributed_optimizer(optimizer or make_optimizer(model))
        got = []
        for step, batch in enumerate(batches):
            result = model.train_batch(own(batch), optimizer, loss_fn=loss_fn)
            got.append((result.loss.item(), result.grad_norm.item()))
            for what, one, wanted in (("loss", got[-1][0], losses[step]), ("norm", got[-1][1], norms[step])):
                assert abs(one - wanted) <= tolerance * max(abs(wanted), 1), f"{what} at step {step}: {one}, {wanted}"
        evaluated = model.eval_batch(own(batches[0]), loss_fn=loss_fn).loss.item()
        assert abs(evaluated - wanted_eval) <= tolerance * max(abs(wanted_eval), 1), (evaluated, wanted_eval)
        weights, wanted_weights = model.full_state_dict(), plain.state_dict()
        assert list(weights) == list(wanted_weights), (list(weights), list(wanted_weights))
        for name, value in wanted_weights.items():
            assert weights[name].dtype == value.dtype, name
            off = (weights[name].double() - value.double()).abs().max().item() if value.numel() else 0.0
            assert off <= tolerance * 10, f"weight {name} is off by {off:.2e}"
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        mine = (got, evaluated, {name: value.tolist() for name, value in weights.items()})
        torch.distributed.all_gather_object(everyone, mine)
        assert all(other == mine for other in everyone), "ranks differ"
