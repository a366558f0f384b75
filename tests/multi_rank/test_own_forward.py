"""Unmodified models as pipelines, cut by their own forward: the numbers of one plain process, gradients by name.

The default run has each model, the pairs of settings spread over them (own_forward_matrix.py); the product of models
and settings runs with

    python -m pytest tests/multi_rank/test_own_forward.py -m full         # some thousand cases
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hybrid
from tests.case_worlds import CaseWorlds, selected_cases
from tests.own_forward_matrix import CASES, DEFAULT, PAIRS, OwnCase, allowed, full_cases
from tests.own_forward_models import MODELS, VOCABULARY, OwnModel, build
from tests.own_forward_runs import assert_like_plain, differences_from_plain
from tests.pairwise import missing_pairs
from tests.parity import LOW
from tests.pipeline_models import make_adamw, own, pipeline_strategy, pipeline_variant
from tests.ranks import RankFailure, run_ranks
from tests.tiny_transformers import tiny

needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


def run(case: OwnCase) -> list[str]:
    return differences_from_plain(case.model, **case.settings())


def worlds(cases: Sequence[OwnCase]) -> CaseWorlds[OwnCase]:
    def verify(case: OwnCase, problems: list[list[str]]) -> list[str]:
        return [problem for rank in problems for problem in rank]

    return CaseWorlds(cases, run=run, verify=verify, seconds_per_case=10)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> CaseWorlds[OwnCase]:
    return worlds(selected_cases(request, OwnCase))


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_like_one_process(case: OwnCase, runs: CaseWorlds[OwnCase]) -> None:
    """Losses, norms, gradients and weights by name, over batches of other lengths and sizes."""
    problems = runs.problems(case)
    assert not problems, "\n".join([f"{len(problems)} differences, among them", *problems[:8]])


@pytest.mark.full
@needs_transformers
@pytest.mark.parametrize("name", MODELS)
def test_whole_product_is_like_one_process(name: str) -> None:
    cases = list(full_cases(name))
    all_runs = worlds(cases)
    failed = {case.id: all_runs.problems(case) for case in cases}
    wrong = [f"{case}: {len(found)} differences, first: {found[0]}" for case, found in failed.items() if found]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)} cases", *wrong])


def test_every_pair_of_settings_and_every_model_is_in_the_default_run() -> None:
    """The cover covers, and stays small."""
    assert missing_pairs(PAIRS, DEFAULT, allowed=functools.partial(allowed, most_ranks=4)) == []
    assert {case.model for case in CASES} == set(MODELS)
    assert len(CASES) <= 21
    assert len({case.id for case in CASES}) == len(CASES)


# ---- precision, meta device, dropout ---------------------------------------------------------------------------------


def meta(name: str) -> nn.Module:
    with torch.device("meta"):
        model = MODELS[name].make()
    torch.manual_seed(11)  # from which the model is initialised as it would have been
    return model.train()


def meta_llama() -> nn.Module:
    return meta("llama-tied")


def low_precision_and_meta() -> None:
    assert_like_plain("llama", stage=3, amp={"level": "O2"}, tolerances=LOW, steps=2)
    assert_like_plain("demo", stage=2, amp={"level": "O1"}, tolerances=LOW, steps=2)
    assert_like_plain("llama-tied", stage=3, make=meta_llama, steps=2)
    with pipeline_variant(2) as strategy:
        model: Any = hybrid.distributed_model(meta("llama-tied"), strategy=strategy, sample=MODELS["llama"].batch(0))
        stages = model.hybrid_runtime.stages
        # The parameters of the other stage never had memory.
        assert stages.elsewhere
        assert all(p.is_meta or p.untyped_storage().nbytes() == 0 for p in stages.elsewhere.values())
        held = {fqn for fqn, _ in model.named_parameters()}
        assert {"model.embed_tokens.weight", "lm_head.weight"} & held == {
            "model.embed_tokens.weight" if stages.staged.stage == 0 else "lm_head.weight"
        }
        # Attributes that the model reads of units that are elsewhere are there, and cannot be written.
        for layer in model.model.layers:
            assert layer.self_attn.q_proj.weight.shape == (24, 24)
        absent = model.model.layers[0 if stages.staged.stage else -1].mlp.up_proj.weight
        assert absent.dtype is torch.float32
        assert absent.untyped_storage().nbytes() <= 8
        with pytest.raises(RuntimeError), torch.no_grad():
            absent.add_(1)
        with pytest.raises(hybrid.ModelError, match="cannot run by itself"):
            model(**MODELS["llama"].batch(0))


def recorders() -> None:
    batch = MODELS["llama"].batch(0)
    for model, more in (
        (tiny("mixtral", output_router_logits=True), {}),
        (tiny("llama"), {"output_hidden_states": True}),
        (tiny("llama", attn_implementation="eager"), {"output_attentions": True}),
    ):
        strategy = pipeline_strategy(2)
        with pytest.raises(hybrid.ModelError, match=r"by another way than what it returns.*Switch that off"):
            hybrid.distributed_model(model.train(), strategy=strategy, sample=batch | more)


@needs_transformers
def test_values_that_hooks_record_are_refused() -> None:
    """transformers collects hidden states, attentions and router logits by hooks: no stage would have all of them."""
    run_ranks(recorders, 2, timeout_seconds=60)


@needs_transformers
def test_low_precision_and_the_meta_device() -> None:
    """bfloat16 at both levels; a stage gives memory to its own units alone, and the model is all there to look at."""
    run_ranks(low_precision_and_meta, 2, timeout_seconds=120, group_timeout_seconds=60)


def dropping(pp: int, recompute: bool, schedule: str) -> list[float]:
    MODELS["dropping"] = OwnModel(make=Dropping, batch=MODELS["demo"].batch, loss_fn=MODELS["demo"].loss_fn)
    losses: list[float] = []
    options: dict[str, Any] = {"recompute": "full"} if recompute else {}
    with pipeline_variant(pp, mb=4, schedule=schedule, seed=5, **options) as strategy:
        model: Any = hybrid.distributed_model(build("dropping"), strategy=strategy, sample=MODELS["demo"].batch(0)[0])
        optimizer = hybrid.distributed_optimizer(make_adamw(model))
        for step in (0, 1, 0):
            batch = own(MODELS["dropping"].batch(step))
            losses.append(model.train_batch(batch, optimizer, loss_fn=MODELS["demo"].loss_fn).loss.item())
        norms = {fqn: value.double().norm().item() for fqn, value in model.full_state_dict().items()}
    return [*losses, *norms.values()]


class Dropping(nn.Module):
    """Dropout in units and between them, in a value that two stages read; numbers from Python and numpy beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.2, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4).layers
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = first = self.drop(self.words(ids))
        for block in self.blocks:
            x = block(x) + first * (0.5 + random.random()) * float(np.random.rand())
        return self.head(x)


def test_dropout_does_not_depend_on_the_stages() -> None:
    """Masks come from the step, the micro-batch and the call: what two stages read is dropped alike on both."""
    two = run_ranks(dropping, 2, 2, True, "1f1b")[0]
    four = run_ranks(dropping, 4, 4, False, "gpipe")[0]
    chunks = run_ranks(dropping, 2, 2, False, "interleaved")[0]
    assert two[0] != two[2], "the same batch, other masks and weights"
    for other in (four, chunks):
        assert all(math.isclose(a, b, rel_tol=2e-6) for a, b in zip(two, other, strict=True)), (two, other)


class Counted(nn.Linear):
    stage = 0  # where it is

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(7 + self.stage)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = int(state)


def beside_the_layers(folder: str) -> None:
    """Buffers and other state of the whole model are on every stage, and in a file once."""

    def made(kind: str, value: float) -> nn.Module:
        layers = [Counted(4, 4) for _ in range(4)]
        model = nn.Sequential(*layers) if kind == "chain" else Wide(layers)
        model.register_buffer("table", torch.full((3,), value))
        return model

    for kind in ("chain", "own"):
        path = Path(folder, kind)
        for value in (1.0, 2.0):
            with pipeline_variant(2, mb=2) as strategy:
                model: Any = hybrid.distributed_model(made(kind, value), strategy=strategy, sample=torch.ones(2, 4))
                counted = {name: one for name, one in model.named_modules() if isinstance(one, Counted)}
                if value == 1.0:
                    for one in counted.values():
                        one.stage = torch.distributed.get_rank()  # also where nobody calls it
                    hybrid.save_checkpoint(path, model, step=1)
                    hybrid.export_weights(model, path / "weights")
                else:
                    hybrid.load_checkpoint(path, model)
                    stages_of = model.hybrid_runtime.stages.staged.stages_of
                    where = {name: one.seen - 7 for name, one in counted.items()}
                    assert where == {name: stages_of(name)[0] for name in counted}
                    assert torch.distributed.get_rank() in where.values()
                assert torch.equal(model.table, torch.ones(3)), kind


class Wide(nn.Module):
    """A unit that is on both stages has a buffer that it only reads."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.again = nn.Linear(4, 4)
        self.again.register_buffer("table", torch.ones(4))
        self.blocks = nn.ModuleList(layers)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(3)

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert int(state) == 3

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.again(value)
        for block in self.blocks:
            value = block(value)
        return self.again(value) * self.table.sum()


def states(folder: str) -> None:
    name, batch = "demo", MODELS["demo"].batch
    loss_fn, wanted = MODELS["demo"].loss_fn, 0.0
    for settings in ({"stage": 2}, {"stage": 3, "schedule": "interleaved"}):
        with pipeline_variant(2, mb=2, **settings) as strategy:
            model: Any = hybrid.distributed_model(build(name), strategy=strategy, sample=batch(0)[0])
            optimizer = hybrid.distributed_optimizer(make_adamw(model))
            if settings["stage"] == 2:
                model.train_batch(own(batch(1)), optimizer, loss_fn=loss_fn)
                hybrid.save_checkpoint(folder, model, optimizer, step=1)
                wanted = model.train_batch(own(batch(2)), optimizer, loss_fn=loss_fn).loss.item()
                weights = model.full_state_dict()
            else:
                hybrid.load_checkpoint(folder, model, optimizer)
                assert abs(model.train_batch(own(batch(2)), optimizer, loss_fn=loss_fn).loss.item() - wanted) < 1e-6
                model.load_state_dict({fqn: value + 1 for fqn, value in weights.items()})
                for fqn, value in model.full_state_dict().items():
                    assert torch.equal(value, weights[fqn] + 1), fqn
                loaded = build(name)
                loaded.load_state_dict(model.full_state_dict())


@pytest.mark.filterwarnings("ignore:load_checkpoint of")
def test_states_have_the_names_of_the_plain_model(tmp_path: Path) -> None:
    """A checkpoint of one cut is loaded by another; a state dict is the plain model's, ties under all their names."""
    run_ranks(states, 2, str(tmp_path))


def test_what_lies_beside_the_layers_is_saved_once(tmp_path: Path) -> None:
    run_ranks(beside_the_layers, 2, str(tmp_path))


class Averaging(nn.Linear):
    """Replaces its buffer, as a running mean that is not written in place."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(super().forward(x))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean((0, 1))
        return y - self.mean


class Means(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(Averaging() for _ in range(3))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x if self.training else x + sum(block.mean for block in self.blocks))


def buffers_of_stages() -> None:
    batch, loss_fn = MODELS["demo"].batch, MODELS["demo"].loss_fn
    with pipeline_variant(2, mb=1, stage=2) as strategy:
        torch.manual_seed(1)
        plain = Means()
        model: Any = hybrid.distributed_model(copy.deepcopy(plain), strategy=strategy, sample=batch(0)[0])
        optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        for step in range(2):
            model.train_batch(batch(step), optimizer, loss_fn=loss_fn)
            plain(batch(step)[0])
        state = model.full_state_dict()
        for fqn, buffer in plain.named_buffers():
            torch.testing.assert_close(state[fqn], buffer)
        # Alike on all ranks, before anything is sent: the next step goes on.
        with pytest.raises(hybrid.ModelError, match=r"reads buffer 'blocks.0.mean' outside of its unit"):
            model.eval_batch(batch(0), loss_fn=loss_fn)
        first = model.hybrid_runtime.stages.staged.stage == 0
        with pytest.raises(hybrid.ModelError, match=f"is on pipeline stage {int(first)}, not on this rank"):
            (model.head if first else model.words)(torch.zeros(1, 16))
        other = next(block for block in model.blocks if block.weight.isnan().any()).inner
        with pytest.raises(hybrid.ModelError, match=r"'blocks.\d.inner' is on pipeline stage"):
            other(torch.zeros(1, 16))
        model.train_batch(batch(0), optimizer, loss_fn=loss_fn)


def test_buffers_that_units_replace_are_those_of_their_stage() -> None:
    """A state dict has what the unit left; a mode that reads it elsewhere is refused; units elsewhere say where."""
    run_ranks(buffers_of_stages, 2, group_timeout_seconds=20)


# ---- what shows only while it runs -----------------------------------------------------------------------------------


class Skipping(Dropping):
    """Leaves out a block by chance, as LayerDrop does."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for place, block in enumerate(self.blocks):
            x = x if place == 1 and ids.shape[1] > 8 else block(x)
        return self.head(x)


def other_inputs() -> None:
    batch = MODELS["demo"].batch
    loss_fn = MODELS["demo"].loss_fn
    with pipeline_variant(2, mb=1) as strategy:
        torch.manual_seed(1)
        model: Any = hybrid.distributed_model(Skipping(), strategy=strategy, sample=batch(0)[0])
        optimizer = hybrid.distributed_optimizer(make_adamw(model))
        model.train_batch(batch(0), optimizer, loss_fn=loss_fn)
        model.train_batch(batch(2), optimizer, loss_fn=loss_fn)  # longer: looked at again, another way
        with pytest.raises(hybrid.BatchError, match="a dict batch calls"):
            model.train_batch({"ids": batch(0)[0]}, optimizer, loss_fn=loss_fn)
        model.blocks[0].forward = lambda x: {"first": x * 2, "second": x}  # not what was seen
        model.train_batch(batch(0), optimizer, loss_fn=loss_fn)


def test_a_forward_that_goes_another_way_is_seen() -> None:
    """Sizes may choose the way; what was not seen before ends the step on the rank that meets it, by name."""
    with pytest.raises(RankFailure) as caught:
        run_ranks(other_inputs, 2, group_timeout_seconds=20)
    text = str(caught.value)
    assert "'blocks.0' returns a tensor 'first', which it did not in the run on tensors without values" in text, text
