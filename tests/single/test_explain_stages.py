"""`strategy.explain(model, n)` and `hybrid explain --model` show the stages of a pipeline, and start nothing."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

import hybrid
from hybrid.cli.explain import explain
from hybrid.compose import stage_plan
from hybrid.contracts.schedule import make_schedule
from hybrid.contracts.schedule_timing import time_schedule
from hybrid.errors import ModelError, StrategyError
from hybrid.strategy.explain import explanation
from hybrid.strategy.live_model import layers_of
from hybrid.strategy.stage_table import StageTable
from tests.own_forward_models import build

APP = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
APP.command()(explain)

WORDS, WIDTH = 40, 8
SAMPLE = torch.zeros(3, 5, dtype=torch.long)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.narrow(torch.relu(self.widen(value)))


class OwnLayers(nn.Module):
    """No chain: a forward of its own."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = layer(value)
        return value


class ReadsItsValues(Block):
    """Cannot be built on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = float(self.widen.weight.detach().sum())


def project(layer: nn.Embedding, value: torch.Tensor) -> torch.Tensor:
    return functional.linear(value, layer.weight)


def listed(block: type[nn.Module] = Block, *, method: Any = "auto") -> hybrid.PipelineLayer:
    tie = hybrid.SharedLayerDesc
    return hybrid.PipelineLayer(
        [
            tie("words", nn.Embedding, WORDS, WIDTH),
            *[hybrid.LayerDesc(block) for _ in range(4)],
            torch.tanh,
            tie("words", nn.Embedding, WORDS, WIDTH, forward_func=project),
        ],
        seg_method=method,
        seed=1,
    )


def chain() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *[Block() for _ in range(4)], nn.Tanh(), nn.Linear(WIDTH, WORDS))
    model[6].weight = model[0].weight
    return model


BLOCK = 2 * 2 * WIDTH * WIDTH + 3 * WIDTH
BLOCK_FLOPS, HEAD_FLOPS = 2 * 15 * 2 * 2 * WIDTH * WIDTH, 2 * 15 * WIDTH * WORDS


def piped(degree: int = 2, *, steps: int = 4, **configs: Any) -> hybrid.DistributedStrategy:
    return hybrid.DistributedStrategy(
        pipeline=True, pipeline_configs={"degree": degree, "accumulate_steps": steps, **configs}
    )


def stages(strategy: hybrid.DistributedStrategy, model: Any, world: int | None = None, **more: Any) -> StageTable:
    told = explanation(strategy, world, model=model, **more)
    assert told.model is not None
    assert told.model.stages is not None
    return told.model.stages


INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}


@pytest.mark.parametrize("sample", [None, SAMPLE], ids=["parameters", "flops"])
@pytest.mark.parametrize(
    ("make", "configs"),
    [
        pytest.param(listed, {}, id="listed"),
        pytest.param(lambda: listed().build(), {}, id="listed-and-built"),
        pytest.param(lambda: listed(method="layer:Block"), {}, id="listed-by-class"),
        pytest.param(lambda: listed(method=[1, 2, 3, 1]), INTERLEAVED, id="listed-by-counts"),
        pytest.param(chain, {}, id="chain"),
        pytest.param(chain, {"split": "uniform", **INTERLEAVED}, id="chain-uniform"),
    ],
)
def test_layers_are_cut_as_they_will_be(make: Any, configs: Any, sample: Any) -> None:
    """A table of other stages than those that train would be worse than none; so would other costs."""
    strategy = piped(2, **configs)
    table = stages(strategy, make(), 2, sample=sample)
    model, resolved = make(), strategy.resolve(2)
    is_auto = getattr(model, "seg_method", resolved.pipeline.split or "auto") == "auto"
    planned = stage_plan.plan_stages(model, resolved, sample=sample if is_auto else None)
    assert planned is not None
    assert [row.layers for row in table.chunks] == [tuple(map(str, chunk)) for chunk in planned.chunks]
    whole = stage_plan.all_on_meta(model)
    weights = stage_plan._costs(whole, [whole.get_submodule(str(index)) for index in range(7)], sample)
    assert [layer.weight for layer in layers_of(whole, sample=sample)[0]] == list(weights)


@pytest.mark.parametrize("make", [listed, chain])
def test_numbers_of_each_stage(make: Any) -> None:
    """Parameters, flops, micro-batches in flight and the bubble, each from a formula of its own."""
    strategy = piped(2, steps=8, **({"split": [3, 4]} if make is chain else {}))
    table = stages(strategy, make() if make is chain else listed(method=[3, 4]), 4, sample=SAMPLE)
    first, last = table.chunks
    bias = WORDS if make is chain else 0
    assert (first.num_parameters, last.num_parameters) == (
        WORDS * WIDTH + 2 * BLOCK,
        WORDS * WIDTH + 2 * BLOCK + bias,
    )
    assert table.num_parameters == WORDS * WIDTH + 4 * BLOCK + bias
    assert (first.forward_flops, last.forward_flops) == (2 * BLOCK_FLOPS, 2 * BLOCK_FLOPS + HEAD_FLOPS)
    assert (first.ranks, last.ranks) == ((0, 1), (2, 3))
    assert first.classes[:2] == ("Embedding", "Block")
    assert table.timeline is not None
    assert table.timeline.max_in_flight == (2, 1)
    costs = [flops + 6.0 * row.num_parameters for row in table.chunks for flops in [float(row.forward_flops or 0)]]
    schedule = make_schedule("1f1b", num_stages=2, num_micro_batches=8)
    wanted = time_schedule(schedule, forward_seconds=costs, backward_seconds=[2 * cost for cost in costs])
    assert table.timeline.bubble_fraction == pytest.approx(wanted.bubble_fraction)
    [tied] = table.tied
    assert (tied.names, tied.stages) == (("0.weight", "6.weight"), (0, 1))


def test_text_names_what_a_stage_keeps_and_idles() -> None:
    text = piped(2, **INTERLEAVED).explain(listed(method="uniform"), 2, sample=SAMPLE)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "pipeline of 2 stages, 2 chunks each, schedule interleaved, 4 micro-batches, layers split 'uniform'" in lines
    assert "0 0 0 0, 1 Embedding, Block 600 41.7% 7.68 k 19.0% 4" in lines
    assert "3 1 1 6 Embedding 320 22.2% 9.6 k 23.8% 1" in lines
    assert "- in flight at peak on each stage: 5, 3 (micro-batches of a chunk, 1/2 of a stage)" in lines
    assert any(line.startswith("- bubble ") and line.endswith("; 11.1% with stages of equal cost") for line in lines)
    assert (
        "- one parameter: 0.weight = 6.weight, on stages 0 and 1, its gradient summed over them once per step" in lines
    )


def test_a_tie_within_one_stage_is_no_traffic() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    text = piped(2, split=[2, 2]).explain(model, 2)
    assert "one parameter: 0.weight = 1.weight, on stage 0 only" in text
    assert "shares count a tied one" not in text
    model[3].weight, model[1].weight = model[0].weight, nn.Parameter(torch.zeros(4, 4))
    text = piped(2, schedule="zbv").explain(model, 2)
    assert "one parameter: 0.weight = 3.weight, on stage 0 only" in text
    table = stages(piped(2, schedule="zbv"), model).to_dict()
    assert [stage["chunks"] for stage in table["stages"]] == [[0, 3], [1, 2]]
    assert [row["stage"] for row in table["chunks"]] == [0, 1, 1, 0]


def test_a_schedule_of_ones_own_lays_its_chunks() -> None:
    """In a V of three chunks per stage, chunks 0 and 3 are neighbours on stage 0, and may look at one memory."""
    in_a_v = "F0.0 F3.0 F4.0 B4.0 B3.0 B0.0\nF1.0 F2.0 F5.0 B5.0 B2.0 B1.0"
    strategy = piped(2, schedule=in_a_v, virtual_stages=3, accumulate_steps=1)
    model = OwnLayers(6)
    model.layers[3].weight = nn.Parameter(model.layers[0].weight.detach())
    table = stages(strategy, model, sample=torch.zeros(2, WIDTH)).to_dict()
    assert [stage["chunks"] for stage in table["stages"]] == [[0, 3, 4], [1, 2, 5]]
    model.layers[2].weight = nn.Parameter(model.layers[0].weight.detach())
    with pytest.raises(ModelError, match=r"on pipeline stages \[0\] and 'layers.2.weight' on \[1\]"):
        stages(strategy, model, sample=torch.zeros(2, WIDTH))


def test_recompute_makes_a_backward_longer() -> None:
    """Timed with the forward that runs again: without it the bubble of uneven stages would be that of another run."""
    strategy = piped(2)
    plain = stages(strategy, listed(), 2, sample=SAMPLE)
    strategy.recompute = True
    again = stages(strategy, listed(), 2, sample=SAMPLE)
    assert (plain.backward, again.backward) == (2, 3)
    assert plain.timeline is not None
    assert again.timeline is not None
    assert again.timeline.busy_seconds == pytest.approx([seconds * 4 / 3 for seconds in plain.timeline.busy_seconds])


def test_nothing_is_built_or_drawn() -> None:
    """`distributed_model` comes later, and gives the values that it would have given."""
    model, state = listed(), torch.get_rng_state()
    piped(2).explain(model, 2, sample=SAMPLE)
    assert not model.is_built
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:Converting a tensor")
def test_layers_that_read_their_values_are_built_in_full() -> None:
    text = piped(2).explain(listed(ReadsItsValues, method="uniform"), 2, sample=SAMPLE)
    assert "built in full, since a layer cannot be built on the meta device" in text
    assert "forward flops" in text
    with pytest.raises(ModelError, match=r"cannot be built on the meta device to count its parameters"):
        piped(2).explain(listed(ReadsItsValues), 2)  # as distributed_model


def test_layers_that_cannot_be_measured_say_why() -> None:
    model = nn.Sequential(nn.Linear(4, 4), hybrid.LayerDesc(lambda: reads).make(), nn.Linear(4, 4))
    table = stages(piped(2), model, 2, sample=torch.zeros(2, 4))
    assert "layer 1, reads, cannot run on fake tensors" in table.notes[0]
    assert "forward flops" not in table.header
    assert "timed by parameters" in "\n".join(table.remarks())


def reads(value: torch.Tensor) -> torch.Tensor:
    return value * float(value.sum())


def test_tensor_parallel_inside_and_ranks_of_a_stage() -> None:
    strategy = piped(2)
    strategy.tensor_parallel = True
    strategy.tensor_parallel_configs = {"degree": 2, "plan": {"*.widen": "colwise", "*.narrow": "rowwise"}}
    told = explanation(strategy, 8, model=listed())
    assert told.model is not None
    assert told.model.stages is not None
    rows = {row.fqn: row.local_shape for row in told.model.rows}
    assert rows["2.widen.weight"] == (WIDTH, WIDTH)
    assert [row.ranks for row in told.model.stages.chunks] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert told.model.units == ("0", "1", "2", "3", "4", "6")


def test_what_is_open_is_said() -> None:
    strategy = hybrid.DistributedStrategy(pipeline=True, pipeline_configs={"degree": 2}, micro_batch_size=1)
    strategy.global_batch_size = 8
    assert "the number of micro-batches follows from the world size" in strategy.explain(listed())
    assert "in flight" in strategy.explain(listed(), 2)
    strategy.pipeline_configs.degree = -1
    assert "the number of pipeline stages follows from the world size" in strategy.explain(listed())


def test_without_a_pipeline() -> None:
    """A factory that returns a sample serves strategies with and without stages; the list of layers is shown too."""
    text = hybrid.DistributedStrategy(sharding=True).explain(listed(), 2, sample=SAMPLE)
    assert "the sample is for counting what the stages of a pipeline compute, and there are none here" in text
    assert "*.widen.weight (4 times)" in text
    with pytest.raises(StrategyError, match="a sample is an input of a model"):
        hybrid.DistributedStrategy().explain(2, sample=SAMPLE)


def test_a_model_that_is_no_chain_shows_what_crosses() -> None:
    """Each value with the unit that returned it and its bytes; a parameter outside units is held where it reaches."""
    table = stages(piped(split=["blocks.2"]), build("nano"), 2, sample=torch.zeros(2, 8, dtype=torch.long))
    assert [row.layers for row in table.chunks] == [("words", "blocks.0", "blocks.1"), ("blocks.2", "blocks.3")]
    block = 3 * 16 * 16 + 16 * 16 + 2 * 16 * 24 + 4 * 16 + 24 + 16 + 4 * 16  # attention, feed-forward, biases, norms
    words, positions = 37 * 16, 16 * 16
    assert [row.num_parameters for row in table.chunks] == [words + positions + 2 * block, words + 2 * block]
    flops = 2 * 16 * (4 * 16 * 16 + 2 * 16 * 24) + 2 * 2 * 2 * 2 * 8 * 8 * 8  # products with weights, and attention
    assert [row.forward_flops for row in table.chunks] == [2 * flops] * 2
    assert [(tied.names, tied.stages) for tied in table.tied] == [(("words.weight",), (0, 1))]
    text = "\n".join(table.remarks())
    assert "behind blocks.1 1 KiB of the sample cross: blocks.1, 2 × 8 × 16 of float32" in text, text
    ((crossing,),) = table.to_dict()["crossing"]
    assert crossing == {
        "unit": "blocks.1", "call": 0, "path": "", "shape": (2, 8, 16), "dtype": "float32", "num_bytes": 1024,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "strategy", "words"),
    [
        (listed, piped(8), "7 layers cannot fill 8 pipeline chunks"),
        (listed, piped(2, split="uniform"), "a PipelineLayer, which has its own seg_method"),
        (chain, piped(2, split=[3, 3]), "the counts add up to 6, the model has 7 layers"),
        (chain, piped(2, split="layer:Bloc2"), "no layer of that class"),
        (Block, piped(2), "cuts a Block by its own forward, and needs a sample of its inputs"),
    ],
)
def test_refusals_are_those_of_distributed_model(model: Any, strategy: Any, words: str) -> None:
    with pytest.raises((StrategyError, ModelError), match=words) as shown:
        strategy.explain(model(), 8)
    with pytest.raises((StrategyError, ModelError)) as met:
        stage_plan.plan_stages(model(), strategy.resolve(8))
    assert str(shown.value) == str(met.value)


def test_all_that_is_wrong_comes_at_once() -> None:
    strategy = piped(8, steps=3, **INTERLEAVED)
    strategy.tensor_parallel = True
    strategy.tensor_parallel_configs = {"degree": 2, "plan": {"*.wide": "colwise"}}
    with pytest.raises(StrategyError) as caught:
        strategy.explain(listed(), 16)
    problems = "\n".join(caught.value.problems)
    assert problems.count("micro-batches in groups of num_stages = 8") == 1
    assert "7 layers cannot fill 16 pipeline chunks" in problems
    assert "*.wide" in problems


# -- the command -------------------------------------------------------------------------------------------------


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: Any, factory: Any, *arguments: str) -> Any:
    """`hybrid explain` with a factory in a module of the user's."""
    module = types.ModuleType("users_stages")
    vars(module).update(build=factory)
    monkeypatch.setitem(sys.modules, "users_stages", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "strategy.yaml"
    strategy.save(path)
    return CliRunner().invoke(APP, [str(path), "--model", "users_stages:build", *arguments], env={"COLUMNS": "200"})


def test_command_counts_flops_on_the_factorys_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, monkeypatch, piped(2), lambda: (listed(), torch.zeros(3, 5, dtype=torch.long)), "-n", "2")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "stage ranks layers classes parameters share forward flops share in flight" in lines
    assert any(line.startswith("note: bubble ") for line in lines)


def test_command_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, monkeypatch, piped(2), lambda: (listed(), SAMPLE), "-n", "2", "--json")
    table = json.loads(result.output)["model"]["pipeline"]
    assert [stage["in_flight"] for stage in table["stages"]] == [2, 1]
    assert sum(chunk["flops_share"] for chunk in table["chunks"]) == pytest.approx(1)
    assert [layer["name"] for chunk in table["chunks"] for layer in chunk["layers"]] == [str(n) for n in range(7)]
    assert table["tied"] == [{"names": ["0.weight", "6.weight"], "stages": [0, 1]}]


def test_command_refuses_with_exit_code_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, monkeypatch, piped(8, steps=3, **INTERLEAVED), listed, "-n", "8", "--json")
    assert result.exit_code == 2
    assert len(json.loads(result.output)["problems"]) == 2


def test_page_shows_what_its_example_prints() -> None:
    """The table in docs/pipeline.md is copied from nowhere."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")
    before, output = page.split("<!-- output: the block above -->\n```text\n")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(before.rpartition("```python\n")[2].rpartition("```")[0], {"__name__": "example"})
    assert output.startswith(printed.getvalue().rstrip() + "\n```")
