"""`strategy.explain(model)` and `hybrid explain --model`: each weight before anything starts."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from hybrid.cli.explain import explain
from hybrid.errors import ModelError, StrategyError
from hybrid.strategy import DistributedStrategy

APP = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
APP.command()(explain)

D = 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_head = 4
        self.qkv = nn.Linear(D, 3 * D)
        self.proj = nn.Linear(D, D)


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(25, D)
        self.blocks = nn.ModuleList([Attention() for _ in range(3)])
        self.norm = nn.LayerNorm(D)


class ReadsItsValues(Gpt):
    """Cannot be built without values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = float(self.wte.weight.detach().sum())


PLAN: dict[str, Any] = {
    "blocks.*.qkv": {"style": "colwise", "fused": 3, "divide": ["n_head"]},
    "blocks.*.proj": "rowwise",
}


def cut(degree: int = 2, **tensor: Any) -> DistributedStrategy:
    return DistributedStrategy(tensor_parallel=True, tensor_parallel_configs={"degree": degree, **tensor})


def squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_each_weight_has_its_rule_and_source() -> None:
    """What stays whole is named with the reason, so that nobody has to guess what the memory goes to."""
    with torch.device("meta"):
        model = Gpt()
    lines = squeezed(cut(plan=PLAN).explain(model, world_size=8))
    assert (
        "blocks.*.qkv.weight (3 times) 48 × 16 24 × 16 colwise, 3 fused parts, 4 heads your plan: 'blocks.*.qkv'"
        in lines
    )
    assert "blocks.*.proj.bias (3 times) 16 16 whole: bias of a row layer, added once to the sum" in lines
    assert any(line.startswith("wte.weight 25 × 16 13 × 16 vocab") for line in lines)
    assert "norm.bias 16 16 whole: norm" in lines
    assert "- blocks.*.n_head: 4 in the model, 2 on each rank" in lines
    assert "tp (0 1) (2 3) (4 5) (6 7)" in lines


def test_without_a_model_nothing_changes() -> None:
    strategy = cut()
    assert strategy.explain(8) == strategy.explain(world_size=8)
    assert "model" not in strategy.explain(8).splitlines()[-1]
    with pytest.raises(StrategyError, match=r"expected a torch\.nn\.Module and a world size"):
        strategy.explain(8, world_size=8)


def test_without_tensor_parallel_parameters_are_whole() -> None:
    lines = squeezed(DistributedStrategy(sharding=True).explain(Gpt()))
    assert "blocks.*.qkv.weight (3 times) 48 × 16" in lines
    assert "- units of ZeRO: (around wte.weight), blocks.* (3 times), (around norm.weight)" in lines


def test_a_model_without_rules_is_told_a_plan() -> None:
    with pytest.raises(ModelError, match=r"'blocks\.\*\.qkv': \{'style': 'colwise', 'fused': 3"):
        cut().explain(Gpt(), 8)


def test_problems_of_settings_and_model_come_together() -> None:
    with pytest.raises(StrategyError) as caught:
        cut(3, plan=PLAN).explain(Gpt(), 8)
    assert any("does not divide world_size 8" in problem for problem in caught.value.problems)
    assert any("does not divide" in problem and "heads=4" in problem for problem in caught.value.problems)


# -- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's, with factories."""
    module = types.ModuleType("users_models")
    vars(module).update(gpt=Gpt, reads=ReadsItsValues, number=3, fails=lambda: 1 / 0, other=lambda: "text")
    monkeypatch.setitem(sys.modules, "users_models", module)
    monkeypatch.setattr(sys, "path", list(sys.path))


def run(tmp_path: Path, strategy: DistributedStrategy, *arguments: str) -> Any:
    path = tmp_path / "strategy.yaml"
    strategy.save(path)
    return CliRunner().invoke(APP, [str(path), *arguments], env={"COLUMNS": "200"})


@pytest.mark.usefixtures("models")
def test_command_shows_the_model(tmp_path: Path) -> None:
    result = run(tmp_path, cut(plan=PLAN), "-n", "8", "--model", "users_models:gpt")
    assert result.exit_code == 0, result.output
    assert "blocks.*.proj.weight (3 times) 16 × 16 16 × 8 rowwise, 4 heads your plan: 'blocks.*.proj'" in [
        line.strip() for line in squeezed(result.output)
    ]


@pytest.mark.usefixtures("models")
def test_command_as_json(tmp_path: Path) -> None:
    result = run(tmp_path, cut(plan=PLAN), "-n", "8", "--json", "--model", "users_models:gpt")
    table = json.loads(result.output)["model"]
    assert table["tensor_parallel_degree"] == 2
    assert len(table["parameters"]) == len(list(Gpt().parameters()))
    assert table["parameters"][1] == {
        "name": "blocks.0.qkv.weight",
        "shape": [48, 16],
        "local_shape": [24, 16],
        "rule": "colwise, 3 fused parts, 4 heads",
        "source": "your plan: 'blocks.*.qkv'",
    }


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.usefixtures("models")
def test_command_builds_in_full_what_needs_values(tmp_path: Path) -> None:
    result = run(tmp_path, DistributedStrategy(), "--model", "users_models:reads")
    assert result.exit_code == 0, result.output
    assert "built in full, since users_models:reads cannot be built on the meta device" in result.output


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("users_models", "expected package.module:factory"),
        ("no_such_module:gpt", "No module named 'no_such_module'"),
        ("users_models:nothing", "has no attribute 'nothing'"),
        ("users_models:fail", "has no attribute 'fail'; did you mean fails?"),
        ("users_models:number", "expected a function or a class, got int"),
        ("users_models:other", "expected a torch.nn.Module, got str"),
        ("users_models:fails", "the factory raised ZeroDivisionError"),
    ],
)
@pytest.mark.usefixtures("models")
def test_command_refuses_what_is_no_model(tmp_path: Path, reference: str, words: str) -> None:
    result = run(tmp_path, DistributedStrategy(), "--model", reference)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.usefixtures("models")
def test_command_lists_every_problem(tmp_path: Path) -> None:
    result = run(tmp_path, cut(), "-n", "3", "--json", "--model", "users_models:gpt")
    assert result.exit_code == 2
    problems = json.loads(result.output)["problems"]
    assert len(problems) == 2
    assert 'tensor_parallel_configs["plan"] = {' in problems[1]


def test_page_shows_what_its_example_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """The refusal and the table in docs/tensor_parallel.md are copied from nowhere."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "tensor_parallel.md").read_text(encoding="utf-8")
    before, output = page.split("<!-- output: the block above -->\n```text\n")
    exec(before.rpartition("```python\n")[2].rpartition("```")[0], {"__name__": "example"})
    assert output.startswith(capsys.readouterr().out.rstrip() + "\n```")
