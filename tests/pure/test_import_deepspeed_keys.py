"""Every key of DeepSpeed has its answer: used, said to be so anyway, or refused by name; none is passed over."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from hybrid.errors import StrategyError
from hybrid.strategy import DistributedStrategy
from hybrid.strategy.importing import import_config
from hybrid.strategy.importing.key_table import KeyRow, key_table

TABLE = key_table("deepspeed")
# Of the published list, what is no single key: two sections in one line, and "others".
SPLIT = {
    "data_efficiency / curriculum_learning": ("data_efficiency", "curriculum_learning"),
    "amp.opt_level and others": ("amp.opt_level", "amp.keep_batchnorm_fp32"),
    "optimizer.params": ("optimizer.params.lr",),
    "scheduler.params": ("scheduler.params.warmup_num_steps",),
}


def listed_keys() -> list[str]:
    """The paths of `deepspeed_keys.csv`, the list of keys of DeepSpeed at edaa7221."""
    with (Path(__file__).parent / "deepspeed_keys.csv").open(encoding="utf-8", newline="") as file:
        rows = [(row["section"], row["key"]) for row in csv.DictReader(file)]
    assert len(rows) == 235
    paths = [key if section == "(top)" else f"{section}.{key}" for section, key in rows]
    return [path for joined in paths for path in SPLIT.get(joined, (joined,))]


# Values that ask for something, where the type alone does not give one.
SAMPLES: dict[str, Any] = {
    "gradient_allreduce_op": "sum",
    "managed_gradient_accumulation": False,
    "seq_parallel_communication_data_type": "bf16",
    "zero_optimization.load_from_fp32_weights": False,
    "train_batch_size": 8,
    "zero_optimization.stage": 2,
    "zero_optimization.zenflow": {},  # with its defaults
    "zero_optimization.zero_hpz_partition_size": 8,
    "zero_optimization.mics_shard_size": 2,
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_optimizer.ratio": 0.5,
    "fp16.loss_scale": 128,
    "bf16.check_grad_overflow": True,  # its default; the rest of the answer is tested below
    "fp16.hysteresis": 4,
    "fp16.min_loss_scale": 16,
    "tensor_parallel.autotp_size": 2,
    "tensor_parallel.tp.tp_size": 2,
    "compile.passes": ["prefetch"],
    "optimizer.type": "AdamW",
    "optimizer.params.lr": 1e-4,
    "scheduler.type": "WarmupLR",
    "scheduler.params.warmup_num_steps": 10,
    "amp.opt_level": "O2",
    "data_types.grad_accum_dtype": "bf16",
    "data_types.param_dtype": "bf16",
    "data_types.buffer_dtype": "bf16",
    "communication_data_type": "bf16",
    "pipeline.stages": 2,
    "pipeline.partition": "uniform",
    "pipeline.activation_checkpoint_interval": 1,
}
BY_TYPE: dict[str, Any] = {
    "bool": True,
    "count": 3,
    "whole": 3,
    "stage": 3,
    "integer": 3,
    "number": 0.5,
    "text": "word",
    "list": ["a"],
    "dict": {"a": 1},
    "any": "word",
}
# What must be on for a key to act.
AROUND: dict[str, dict[str, Any]] = {
    "zero_optimization": {"zero_optimization": {"stage": 3}},
    "data_types": {"bf16": {"enabled": True}},
    "pipeline": {"pipeline": {"stages": 2}},
    "optimizer": {"optimizer": {"type": "AdamW"}},
    "scheduler": {"scheduler": {"type": "WarmupLR"}},
    "compile": {"compile": {"deepcompile": True}},
    **{
        section: {section: {"enabled": True}}
        for section in (
            "fp16",
            "bf16",
            "amp",
            "torch_autocast",
            "tensorboard",
            "wandb",
            "csv_monitor",
            "comet",
            "comms_logger",
            "flops_profiler",
        )
    },
}


def sample(path: str, row: KeyRow) -> Any:
    return SAMPLES[path] if path in SAMPLES else BY_TYPE.get(row.type, row.type.split("|")[-1])


def config_with(path: str, value: Any) -> dict[str, Any]:
    """A small configuration in which the key acts."""
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}
    for section, settings in AROUND.get(path.split(".")[0], {}).items():
        config[section] = dict(settings)
    home = config
    *sections, key = path.split(".")
    for section in sections:
        home = home.setdefault(section, {})
    home[key] = value
    return config


@pytest.mark.parametrize("path", listed_keys())
def test_every_key_has_its_answer(path: str) -> None:
    """A key that an importer passes over is a setting that is ignored in silence."""
    row = TABLE.row(path)
    if row is None:  # a section, whose keys have lines of their own
        assert TABLE.is_section(path)
        with pytest.raises(StrategyError, match=path):
            import_config({**config_with("zero_optimization.stage", 3), **config_with(path, 5)})
        return
    value = sample(path, row)
    config = config_with(path, value)
    if row.kind == "refused" and value not in row.default:
        with pytest.raises(StrategyError) as caught:
            import_config(config)
        assert [problem for problem in caught.value.problems if problem.startswith(f"{path} = ")]
    strategy, notes = import_config(config, allow_drop=True)
    (note,) = [note for note in notes.keys if note.path == path]
    assert note.value == value or path == "comet.api_key"
    assert note.answer or row.kind == "script"
    refused = "changed" if value in row.default else "dropped"
    assert note.kind == (refused if row.kind == "refused" else row.kind)
    if row.kind == "mapped":
        assert lookup(strategy, row.target) not in (None, {}), strategy
    if row.kind == "script":
        assert notes.script
    assert strategy.problems() == ()


def lookup(strategy: DistributedStrategy, setting: str) -> Any:
    found: Any = strategy.to_dict()
    for name in setting.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


@pytest.mark.parametrize("name", ["deepspeed", "accelerate"])
def test_rows_are_complete(name: str) -> None:
    """A line without a sentence would leave a reader with 'refused' and no way on."""
    rows = key_table(name).rows.values()
    assert {row.kind for row in rows} == {"mapped", "script", "equal", "harmless", "refused"}
    silent = [row.path for row in rows if row.kind in {"equal", "harmless", "refused"} and len(row.sentence) < 6]
    assert silent == []


@pytest.mark.parametrize("path", [path for path, row in TABLE.rows.items() if row.kind == "refused" and row.off])
def test_values_that_ask_for_nothing_are_accepted(path: str) -> None:
    """DeepSpeed's own defaults, written out, are in every file; they must not be refused."""
    row = TABLE.rows[path]
    for off in row.off:
        _, notes = import_config(config_with(path, off))
        (note,) = [note for note in notes.keys if note.path == path]
        assert note.kind == "equal"
    for default in row.default:
        _, notes = import_config(config_with(path, default))
        assert [note.kind for note in notes.keys if note.path == path] == ["changed"]
        assert notes.changes
