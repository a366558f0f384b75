"""Files, repr, `explain()` and the command: what a person reads and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hybrid.cli.explain import explain
from hybrid.errors import StrategyError
from hybrid.strategy import DistributedStrategy
from tests.pure.strategy_cases import problems_of

SETTINGS: dict[str, Any] = {
    "sharding": True,
    "sharding_configs": {"stage": 2, "shard_size": 4, "bucket_bytes": 2**24},
    "hybrid_configs": {"order": ["pp", "dp", "sharding", "mp"]},
    "gradient_clipping": {"max_norm": 1.0, "norm_type": "inf"},
    "micro_batch_size": 2,
    "find_unused_parameters": False,
}


def test_only_what_was_set_is_written() -> None:
    """Protects files from freezing the defaults of the version that wrote them."""
    assert DistributedStrategy(SETTINGS).to_dict() == SETTINGS
    assert DistributedStrategy().to_json() == "{}"


@pytest.mark.parametrize("name", ["plan.json", "plan.yaml", "plan.yml"])
def test_files_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    strategy = DistributedStrategy(SETTINGS)
    strategy.save(tmp_path / name)
    loaded = DistributedStrategy.load(tmp_path / name)
    assert loaded == strategy
    assert loaded.hybrid_configs.order == ("pp", "dp", "sharding", "mp")
    assert loaded.explain(8) == strategy.explain(8)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "sharding: [", ["a.yaml", "not YAML"]),
        ("a.json", "{", ["a.json", "not JSON"]),
        ("a.yaml", "seed: 1\nseed: 2\n", ["a.yaml", "'seed' stands twice", "line 2"]),
        ("a.json", '{"seed": 1, "seed": 2}', ["'seed' stands twice", "1 and 2"]),
        ("a.yaml", "- sharding\n", ["a dict of settings", "list"]),
        ("a.toml", "seed = 1", ["a.toml", ".yaml"]),
        ("a.yaml", "sharding_configs: {stge: 1}\n", ["a.yaml", "sharding_configs.stge", "'stage'"]),
        ("ds.json", '{"bf16": {"enabled": true}}', ["a file of DeepSpeed: `hybrid import", "ds.json` writes"]),
        ("a.yaml", "distributed_type: FSDP\nnum_processes: 8\n", ["a file of Accelerate: `hybrid import"]),
        ("a.yaml", "seed: 3\nx: 2026-13-01\n", ["a.yaml", "not YAML", "line 2", "month"]),
        ("a.yaml", "? [seed]\n: 1\n", ["a.yaml", "not YAML", "unhashable key"]),
        ("a.yaml", "sharding_configs: &a {stage: *a}\n", ["a.yaml", "one holds itself"]),
        pytest.param("a.json", '{"seed":' * 2000 + "1" + "}" * 2000, ["a.json", "more than 50 levels"], id="deep"),
        pytest.param(
            "a.json", '{"seed": 1' + "0" * 5000 + "}", ["a.json", "not JSON", "digits"], id="unreadable number"
        ),
        pytest.param(
            "a.json",
            '{"accumulate_steps": 1' + "0" * 400 + "}",
            ["accumulate_steps", "more than 300 digits"],
            id="long number",
        ),
    ],
)
def test_bad_files_are_refused_with_their_name(tmp_path: Path, name: str, text: str, words: list[str]) -> None:
    (tmp_path / name).write_text(text)
    problems = problems_of(lambda: DistributedStrategy.load(tmp_path / name))
    assert all(word in problems[0] for word in words), problems


def test_yaml_takes_keys_over_from_another_section(tmp_path: Path) -> None:
    """`<<` is YAML's own way to write a section once; what stands beside it counts."""
    (tmp_path / "a.yaml").write_text("sharding: true\nsharding_configs: {<<: {stage: 1, shard_size: 2}, stage: 3}\n")
    assert DistributedStrategy.load(tmp_path / "a.yaml").to_dict()["sharding_configs"] == {"stage": 3, "shard_size": 2}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"absent\.yaml: cannot be read: No such file"):
        DistributedStrategy.load(tmp_path / "absent.yaml")


def test_yaml_text_numbers_are_read(tmp_path: Path) -> None:
    """BC-73: YAML reads 5e8 as text."""
    (tmp_path / "a.yaml").write_text("sharding: true\nsharding_configs: {stage: '2', bucket_bytes: 5e8}\nseed:\n")
    resolved = DistributedStrategy.load(tmp_path / "a.yaml").resolve(2)
    assert (resolved.zero_stage, resolved.bucket_bytes, resolved.seed) == (2, 500_000_000, None)


def test_repr_shows_the_whole_plan() -> None:
    """Protects against a repr that hides a section (in Fleet: hybrid_configs); a broken plan prints as well."""
    strategy = DistributedStrategy(SETTINGS)
    text = repr(strategy)
    for words in ("'stage': 2", "'order': ['pp', 'dp', 'sharding', 'mp']", "zero_stage 2", "bucket 16 MiB", "timeout"):
        assert words in text
    assert max(map(len, text.splitlines())) < 140
    broken = repr(DistributedStrategy(gradient_merge=True))
    assert "1 problem (see explain())" in " ".join(broken.replace("# ", "").split())


def test_mixed_precision_recompute_and_stage_3_show_everywhere() -> None:
    """Protects against a plan that is printed without what changes the numbers and the memory most."""
    strategy = DistributedStrategy(
        sharding=True,
        sharding_configs={"stage": 3, "units": ["Block"], "prefetch": 2},
        amp=True,
        amp_configs={"dtype": "fp16", "level": "O2", "custom_fp32": ["LayerNorm"]},
        recompute=True,
        recompute_configs={"policy": "selective", "preserve_rng": False},
    )
    amp = "float16 O2, LayerNorm in float32, loss scale from 65536"
    recompute = "selective, every block, with other random numbers"
    plan = " ".join(repr(strategy).split("# ", maxsplit=1)[1].replace("# ", "").split())
    for words in (f"amp {amp}", f"recompute {recompute}", "units Block", "prefetch 2"):
        assert words in plan
    described = strategy.resolve(4).describe()
    for words in (f"{amp}; recompute {recompute}", "parameters gathered by unit (Block), 2 ahead"):
        assert words in described
    lines = [" ".join(line.split()) for line in strategy.explain(4).splitlines()]
    for line in (
        "amp on user: amp",
        "amp_level O2 user: amp_configs.level",
        "amp_init_loss_scaling 65536 default",
        "recompute_units as units of sharding default",
        "recompute_preserve_rng false user: recompute_configs.preserve_rng",
        "overlap_param_gather not used at stage 3 default",
        "prefetch 2 user: sharding_configs.prefetch",
    ):
        assert line in lines
    bfloat16 = [" ".join(line.split()) for line in DistributedStrategy(amp=True, recompute=True).explain().splitlines()]
    assert "amp_init_loss_scaling not used with bfloat16 default" in bfloat16
    assert "recompute_units repeated blocks of the model default" in bfloat16
    off = repr(DistributedStrategy())
    assert "amp off; recompute off" in " ".join(off.replace("# ", "").split())


def test_explain_lists_values_with_their_origin() -> None:
    lines = {
        line.split()[0]: " ".join(line.split())
        for line in DistributedStrategy(SETTINGS).explain(8).splitlines()
        if line
    }
    assert lines["zero_stage"] == "zero_stage 2 user: sharding_configs.stage"
    assert lines["overlap_comm"] == "overlap_comm true default"
    assert lines["grad_reduce"] == "grad_reduce every_micro_batch derived: zero_stage 2"
    assert lines["bucket_bytes"] == "bucket_bytes 16777216 (16 MiB) user: sharding_configs.bucket_bytes"
    assert lines["global_batch_size"].startswith("global_batch_size 16 derived: micro_batch_size 2 ×")
    assert lines["find_unused_parameters"].startswith("find_unused_parameters false user:")


def test_explain_without_a_world_size_leaves_the_equations_open() -> None:
    text = DistributedStrategy(sharding=True).explain()
    assert "give world_size" in text
    assert "all data-parallel ranks" in text


def test_explain_names_the_alias_that_was_used() -> None:
    text = DistributedStrategy(sharding=True, sharding_configs={"sharding_degree": 2}).explain(4)
    assert "user: sharding_configs.sharding_degree" in text


def test_large_worlds_print_short() -> None:
    text = DistributedStrategy(sharding=True, sharding_configs={"shard_size": 64}).explain(4096)
    assert "… (64 groups)" in text
    assert max(map(len, text.splitlines())) < 400


APP = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
APP.command()(explain)


def run(*arguments: str, columns: int = 200) -> Any:
    return CliRunner().invoke(APP, list(arguments), env={"COLUMNS": str(columns)})


def test_the_command_prints_tables(tmp_path: Path) -> None:
    DistributedStrategy(SETTINGS).save(tmp_path / "plan.yaml")
    result = run(str(tmp_path / "plan.yaml"), "--world-size", "8")
    assert result.exit_code == 0
    for words in ("Strategy on 8 processes", "zero_stage", "user: sharding_configs.stage", "(0 1 2 3) (4 5 6 7)"):
        assert words in result.stdout


def test_the_command_prints_json(tmp_path: Path) -> None:
    DistributedStrategy(SETTINGS).save(tmp_path / "plan.yaml")
    result = run(str(tmp_path / "plan.yaml"), "-n", "8", "--json")
    told = json.loads(result.stdout)
    assert told["world_size"] == 8
    assert told["groups"]["dp_shard"] == "(0 1 2 3) (4 5 6 7)"
    assert {
        "section": "sharding",
        "setting": "zero_stage",
        "value": "2",
        "origin": "user: sharding_configs.stage",
    } in told["settings"]


@pytest.mark.parametrize("columns", [80, 50])
def test_the_command_keeps_paths_whole(tmp_path: Path, columns: int) -> None:
    """A path that is broken over two lines can be neither searched for nor copied."""
    path = tmp_path / "plan.yaml"
    settings = {
        **SETTINGS,
        "hybrid_configs": {
            "sharding_degree": 4,
            "dp_degree": 2,
            "order": "pp,dp,sharding,mp",
            "sharding_configs": {"comm_overlap": False},
        },
    }
    DistributedStrategy(settings).save(path)
    result = run(str(path), "-n", "8", columns=columns)
    assert result.exit_code == 0, result.output
    words = set(result.output.split())
    for word in (
        "sharding_configs.shard_size",
        "hybrid_configs.sharding_degree",
        "gradient_clipping.max_norm",
        "hybrid_configs.sharding_configs.comm_overlap",
    ):
        assert word in words
    if columns == 80:
        assert max(map(len, result.output.splitlines())) <= 80


def test_the_command_lists_all_problems_with_exit_code_2(tmp_path: Path) -> None:
    """Protects people from a traceback, and scripts from a zero exit code."""
    path = tmp_path / "plan.yaml"
    DistributedStrategy(sharding=True, sharding_configs={"shard_size": 3}, gradient_merge=True).save(path)
    result = run(str(path), "-n", "8")
    assert result.exit_code == 2
    assert "2 problems" in result.stderr
    assert "data-parallel size 8" in result.stderr
    assert "Traceback" not in result.output
    as_json = run(str(path), "-n", "8", "--json")
    assert as_json.exit_code == 2
    assert len(json.loads(as_json.stdout)["problems"]) == 2


def test_the_command_prints_the_schema_and_asks_for_a_file() -> None:
    assert json.loads(run("--schema").stdout) == DistributedStrategy.json_schema()
    nothing = run()
    assert nothing.exit_code == 2
    assert "STRATEGY_FILE" in nothing.output
    assert "hybrid explain strategy.yaml --world-size 16" in run("--help").output
    for beside in (("none.yaml",), ("-n", "3"), ("--model", "nope:x"), ("--json",)):
        refused = run("--schema", *beside)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert "has no effect beside it" in refused.output


def test_a_file_with_wrong_keys_is_told_its_wrong_degrees_as_well(tmp_path: Path) -> None:
    """All problems at once: one misspelled key does not hide that shard_size does not divide."""
    file = tmp_path / "strategy.yaml"
    file.write_text("foo: 1\nsharding: true\nsharding_configs: {stage: 2, shard_size: 3}\n")
    with pytest.raises(StrategyError) as caught:
        DistributedStrategy.load(file, world_size=4)
    assert len(caught.value.problems) == 2
    assert "foo" in caught.value.problems[0]
    assert "shard_size = 3" in caught.value.problems[1]


def test_a_section_can_be_cleared() -> None:
    """`clear()` and `popitem()` of a section end, and leave defaults."""
    strategy = DistributedStrategy({"sharding": True, "sharding_configs": {"stage": 2, "bucket_bytes": 100}})
    assert strategy.sharding_configs.popitem() == ("bucket_bytes", 100)
    strategy.sharding_configs.clear()
    assert strategy.sharding_configs.to_dict() == {}
