"""`hybrid import`: what it prints is a strategy file; what is wrong is listed, with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hybrid.cli.app import app
from hybrid.errors import StrategyError
from hybrid.strategy import DistributedStrategy
from hybrid.strategy.importing import import_config

CONFIG = {
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return path


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["import", *map(str, arguments)])


MICRO = ("--set", "train_micro_batch_size_per_gpu=4")


def test_the_output_is_a_strategy_file(file: Path, tmp_path: Path) -> None:
    """`hybrid import ds.json > strategy.yaml` must give a file that loads, notes and all."""
    result = invoke(file, *MICRO, "--world-size", 8)
    assert result.exit_code == 0, result.output
    written = tmp_path / "strategy.yaml"
    written.write_text(result.stdout, encoding="utf-8")
    resolved = DistributedStrategy.load(written).resolve(8)
    assert (resolved.zero_stage, resolved.global_batch_size) == (2, 32)
    for words in (
        "# what changes in meaning",
        "torch.optim.AdamW(",
        "# worked out for 8 processes",
        "(0 1 2 3 4 5 6 7)",
    ):
        assert words in result.stdout


def test_out_takes_the_strategy_alone(file: Path, tmp_path: Path) -> None:
    """The file is plain; the notes are printed."""
    out = tmp_path / "strategy.yaml"
    result = invoke(file, *MICRO, "--out", out)
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(out.read_text(encoding="utf-8"))["sharding_configs"] == {"stage": 2}
    assert "became a setting" in result.stdout
    assert "sharding: true" not in result.stdout
    assert invoke(file, *MICRO, "--out", tmp_path / "strategy.txt").exit_code == 2
    assert invoke(file, *MICRO, "--out", tmp_path / "absent" / "s.yaml").exit_code == 2


def test_json_holds_everything(file: Path) -> None:
    """For programs: strategy, keys, changes, lines."""
    told = json.loads(invoke(file, *MICRO, "--json").stdout)
    assert DistributedStrategy(told["strategy"]).resolve(2).zero_stage == 2
    assert {key["path"] for key in told["keys"]} >= {"zero_optimization.stage", "optimizer.params.lr"}
    assert {key["kind"] for key in told["keys"]} == {"mapped", "script"}
    assert told["changes"]
    assert told["script"]


def test_odd_files_and_numbers_are_read_or_refused_in_a_sentence(tmp_path: Path) -> None:
    """A mark that editors put first, worlds that nobody has, widths without end: no traceback, no wait."""
    marked = tmp_path / "größe mit blank.json"
    marked.write_text(
        json.dumps({**CONFIG, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}), "utf-8-sig"
    )
    result = invoke(marked, *MICRO, "--set", "hidden_size=1024")
    assert result.exit_code == 0, result.output
    for options, words in (
        (("--set", "hidden_size=inf"), "expected a whole number of at least 1, got inf"),
        (("--set", "hidden_size=1e300"), "expected a whole number of at most"),
        (("--set", "hidden_size=64", "--world-size", 10**12), "processes: more than 4194304 are not worked out"),
    ):
        result = invoke(marked, *MICRO, *options)
        assert result.exit_code == 2
        assert words in result.stderr
    marked.write_text(json.dumps({"zero_optimization": ["x" * 10**6]}), "utf-8")
    assert len(invoke(marked).stderr) < 3000


def test_problems_are_listed(file: Path) -> None:
    """Exit code 2 and every problem, on stderr or as JSON."""
    result = invoke(file, "--set", "gradient_clipping=2", "--set", "nonsense")
    assert result.exit_code == 2
    assert "--set nonsense: expected KEY=VALUE" in result.stderr
    result = invoke(file, "--set", "gradient_clipping=2", "--json")
    problems = json.loads(result.stdout)["problems"]
    assert result.exit_code == 2
    assert len(problems) == 2
    assert invoke(file, *MICRO, "--set", "train_micro_batch_size_per_gpu=5").exit_code == 2
    assert invoke(file, *MICRO, "--world-size", 0).exit_code == 2
    assert "did you mean 'deepspeed'" in invoke(file, "--format", "depspeed").stderr


COMMENTED = """{
  // of a tutorial: "stage" 2
  "train_micro_batch_size_per_gpu": 4, /* and
  more */
  "gradient_clipping": 1.0, # the norm
  "csv_monitor": {"enabled": true, "output_path": "http://a#b//c /* d */ ,}"},
  "zero_optimization": {"stage": 2, /* "stage": 3 */},
}
"""


def test_comments_are_read_as_deepspeed_reads_them(tmp_path: Path) -> None:
    """Published files have them; what is between quotes is none, and a key twice is still told."""
    (tmp_path / "ds.json").write_text(COMMENTED)
    strategy, notes = import_config(tmp_path / "ds.json")
    assert strategy.to_dict()["sharding_configs"]["stage"] == 2
    assert any(note.value == "http://a#b//c /* d */ ,}" for note in notes.keys)
    (tmp_path / "ds.json").write_text(COMMENTED.replace(', /* "stage": 3 */', ', "stage": 3,'))
    with pytest.raises(StrategyError, match="'stage' stands twice"):
        import_config(tmp_path / "ds.json")
    (tmp_path / "ds.json").write_text('{"a": 1 // no end')
    with pytest.raises(StrategyError, match="not JSON"):
        import_config(tmp_path / "ds.json")
