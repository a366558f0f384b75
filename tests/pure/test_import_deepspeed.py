"""`hybrid.import_config` on DeepSpeed's files: 'auto' and text (BC-73), one setting from two places (BC-76), sizes."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

import hybrid
from hybrid.errors import StrategyError
from hybrid.strategy.importing.key_table import key_table
from tests.pure.strategy_cases import problems_of

# The file that transformers' documentation starts from, with everything open that its Trainer fills in.
TRAINER_FILE: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "sub_group_size": 1e9,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
FILLED = {
    "bf16": True,
    "lr": 3e-4,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "weight_decay": 0.1,
    "warmup_min_lr": 0,
    "warmup_steps": 100,
    "hidden_size": 1024,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": "2",
    "max_grad_norm": 1.0,
}


def imported(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The settings of the strategy."""
    return hybrid.import_config(config, **more)[0].to_dict()


def refused(config: dict[str, Any], *words: str, **more: Any) -> str:
    """Refused with exactly one problem, which holds all these words."""
    (problem,) = problems_of(lambda: hybrid.import_config(config, **more))
    assert all(word in problem for word in words), problem
    return problem


def test_every_auto_is_listed_with_its_path() -> None:
    """BC-73: placeholders of another tool reach no comparison; all of them are in one error, with what to give."""
    problems = problems_of(lambda: hybrid.import_config(TRAINER_FILE))
    paths = [problem.split(" = 'auto'")[0] for problem in problems]
    assert set(paths) == {
        "fp16.enabled",
        "bf16.enabled",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "optimizer.params.eps",
        "optimizer.params.weight_decay",
        "scheduler.params.warmup_min_lr",
        "scheduler.params.warmup_num_steps",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "train_micro_batch_size_per_gpu",
    }
    assert all(f"--set {path}=" in problem for path, problem in zip(paths, problems, strict=True))


def test_autos_are_resolved_from_given_values() -> None:
    """BC-73: none is left in the result, which works on the given number of processes."""
    strategy, notes = hybrid.import_config(TRAINER_FILE, world_size=8, given=FILLED)
    assert "auto" not in strategy.to_yaml() + "".join(notes.script)
    resolved = strategy.resolve(8)
    assert (resolved.zero_stage, resolved.offload, resolved.bucket_bytes) == (3, "optimizer", 2 * 1024**2)
    assert (resolved.micro_batch_size, resolved.accumulate_steps, resolved.global_batch_size) == (4, 2, 64)
    assert resolved.gradient_clipping is not None
    assert resolved.gradient_clipping.max_norm == 1.0
    assert resolved.amp is not None
    assert (resolved.amp.dtype, resolved.amp.level) == ("bfloat16", "O2")
    assert "lr=0.0003, betas=(0.9, 0.95), eps=1e-08, weight_decay=0.1" in notes.script[0]


@pytest.mark.parametrize("size", ["5e8", 5e8, 500000000, "500000000"])
def test_numbers_as_text_are_numbers(size: object) -> None:
    """BC-73: YAML and people write 5e8; it is elements there and bytes here."""
    settings = imported({"zero_optimization": {"stage": "1", "reduce_bucket_size": size, "overlap_comm": "true"}})
    assert settings["sharding_configs"] == {"stage": 1, "bucket_bytes": 2_000_000_000, "overlap_comm": True}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"overlap_comm": "yes"}}, ["zero_optimization.overlap_comm = 'yes'", "true or false"]),
        ({"zero_optimization": {"reduce_bucket_size": "big"}}, ["reduce_bucket_size = 'big'", "a whole number"]),
        ({"zero_optimization": {"stage": 4}}, ["stage = 4", "from 0 to 3"]),
        ({"train_batch_size": 3.5}, ["train_batch_size = 3.5", "nearest are 3 and 4"]),
        ({"zero_optimization": 2}, ["zero_optimization = 2", "a section such as {'stage': ...}"]),
        ({"train_batch_size": 8, "gradient_clipping": -1}, ["gradient_clipping = -1", "0 for off"]),
        ({"fp16": {"enabled": True, "initial_scale_power": 200}}, ["initial_scale_power = 200", "2**127"]),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ["fp16.enabled = true and bf16.enabled", "keep one"]),
    ],
)
def test_wrong_values_are_named(config: dict[str, Any], words: list[str]) -> None:
    """A wrong type must not pass, nor fail later under another name."""
    refused(config, *words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"gradient_cliping": 1.0}, ["gradient_cliping: unknown key", "'gradient_clipping'"]),
        ({"zero_optimization": {"stages": 2}}, ["zero_optimization.stages", "did you mean 'stage'"]),
        ({"bf16": {}, "overlap_comm": True}, ["overlap_comm", "belongs at zero_optimization.overlap_comm"]),
        ({"bf16": {}, "lr": 1.0}, ["belongs at optimizer.params.lr"]),
        ({"optimizer": {"type": "Adamm"}}, ["optimizer.type = 'Adamm'", "did you mean 'adam"]),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}, ["warmup_steps", "'warmup_num_steps'"]),
    ],
)
def test_unknown_keys_are_named_with_the_nearest(config: dict[str, Any], words: list[str]) -> None:
    """A misspelt key that passes is a setting that is ignored."""
    refused({"train_batch_size": 8, **config}, *words)


def test_all_problems_come_at_once() -> None:
    """One round for a person, whatever is wrong: unknown, refused, wrong type, open."""
    config = {
        "zero_optimization": {"stage": 7, "zero_quantized_weights": True, "nonsense_of_somebody": 1},
        "gradient_clipping": "auto",
    }
    assert len(problems_of(lambda: hybrid.import_config(config))) == 4


def test_a_given_value_must_agree_with_the_file() -> None:
    """BC-76: two values for one setting are refused with path, both values and both places; equal ones pass."""
    config = {"gradient_clipping": 1.1, "gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": 2}
    refused(config, "gradient_clipping = 1.1", "1.0 is given", "two places", given={"gradient_clipping": 1.0})
    refused(config, "gradient_accumulation_steps = 4", "2 is given", given={"gradient_accumulation_steps": 2})
    refused(config, "(as max_grad_norm)", given={"max_grad_norm": 3})
    assert imported(config, given={"gradient_accumulation_steps": "4"})["accumulate_steps"] == 4


def test_a_given_value_keeps_the_rest_of_its_section() -> None:
    """BC-76: giving one key must not replace the section."""
    config = {"zero_optimization": {"stage": 2, "overlap_comm": False}}
    settings = imported(config, given={"zero_optimization.reduce_bucket_size": 1000})
    assert settings["sharding_configs"] == {"stage": 2, "overlap_comm": False, "bucket_bytes": 4000}
    assert config == {"zero_optimization": {"stage": 2, "overlap_comm": False}}
    refused(config, "enabled", "several places", given={"enabled": True})
    refused(config, "reduce_bucket_sise", "did you mean", given={"reduce_bucket_sise": 1})
    refused(config, "it is a section", given={"zero_optimization": 3})


def test_two_places_in_the_file_must_agree() -> None:
    """BC-76, inside the file."""
    config = {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}
    refused(config, "tensor_parallel.tp.tp_size", "= 4", "tensor_parallel.autotp_size gives 2", "keep one")
    config["tensor_parallel"]["tp"] = {"tp_size": 2}
    assert imported(config)["tensor_parallel_configs"] == {"degree": 2}


SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize(
    ("sizes", "want"),
    [
        ((64, 4, 2), (64, 4, 2)),
        ((64, 4, None), (64, 4, 2)),
        ((64, None, 2), (64, 4, 2)),
        ((None, 4, 2), (64, 4, 2)),
        ((64, None, None), (64, 8, 1)),
        ((None, 4, None), (32, 4, 1)),
        (("auto", 4, 2), (64, 4, 2)),
        ((64, "auto", 2), (64, 4, 2)),
        ((64, 4, "auto"), (64, 4, 2)),
    ],
)
def test_two_batch_sizes_give_the_third(sizes: tuple[object, ...], want: tuple[int, ...]) -> None:
    """Total = micro × accumulation × ranks, as DeepSpeed derives them: 16 processes, tensor parallel 2."""
    config = {name: size for name, size in zip(SIZES, sizes, strict=True) if size is not None}
    strategy, _ = hybrid.import_config({**config, "tensor_parallel": {"autotp_size": 2}}, world_size=16)
    resolved = strategy.resolve(16)
    assert (resolved.global_batch_size, resolved.micro_batch_size, resolved.accumulate_steps) == want


def test_contradictory_batch_sizes_are_refused_with_all_numbers() -> None:
    """Nobody can tell which of the three was meant."""
    sizes = dict(zip(SIZES, (60, 4, 2), strict=True))
    refused(sizes, "train_batch_size = 60", "gpu 4 × gradient", "steps 2 × data-parallel size 8", "= 64", world_size=8)
    refused({**sizes, "train_batch_size": 128}, "gradient_accumulation_steps = 4", world_size=8)
    refused({"train_batch_size": 60, "train_micro_batch_size_per_gpu": 7}, "not a multiple", "= 7", "train_batch_size")
    _, notes = hybrid.import_config({**sizes, "train_batch_size": 64})
    assert any("data-parallel size of 64 / (4 × 2) = 8" in change for change in notes.changes)


def test_degrees_that_do_not_fit_are_named_by_the_key_of_the_file() -> None:
    """BC-75: the message speaks of the strategy's setting; the reader has another word in his file."""
    config = {"zero_optimization": {"stage": 3, "mics_shard_size": 3}}
    refused(config, "sharding_configs.shard_size = 3", "from zero_optimization.mics_shard_size", world_size=8)


@pytest.mark.parametrize(
    ("stage", "offload", "want"),
    [
        (0, {"offload_optimizer": {"device": "cpu"}}, "optimizer"),
        (2, {"offload_optimizer": {"device": "cpu"}}, "optimizer"),
        (2, {"cpu_offload": True}, "optimizer"),
        (3, {"offload_param": {"device": "cpu"}}, "parameters"),
        (3, {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}, "parameters"),
        (3, {"offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}}, None),
    ],
)
def test_stages_and_offload(stage: int, offload: dict[str, Any], want: str | None) -> None:
    """What the keys of stages 0 to 3 become."""
    strategy, _ = hybrid.import_config({"zero_optimization": {"stage": stage, **offload}}, world_size=4)
    assert strategy.to_dict()["sharding_configs"].get("offload") == want
    assert strategy.resolve(4).zero_stage == stage


def test_offload_that_cannot_be_is_refused() -> None:
    """Parameters that are not cut cannot lie in host memory; disks are not there."""
    refused({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "stage 3 has and stage 2 not")
    refused({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "not on disks: use cpu")


def test_defaults_that_change_numbers_are_written_out_or_said() -> None:
    """What the file does not say, DeepSpeed does by default: clipping at 1, a window of 1000, hysteresis 2."""
    strategy, notes = hybrid.import_config({"train_batch_size": 8, "fp16": {"enabled": True}})
    settings = strategy.to_dict()
    assert settings["gradient_clipping"] == {"max_norm": 1.0}
    assert settings["amp_configs"] == {"dtype": "float16", "level": "O2", "growth_interval": 1000}
    text = "\n".join(notes.changes)
    for words in (
        "then clips at 1",
        "growth_interval",
        "hysteresis",
        "accumulated and sent in float32",
        "do not divide it",
    ):
        assert words in text
    assert "gradient_clipping" not in imported({"train_batch_size": 8}, given={"gradient_clipping": 0})


def test_the_loss_scale_is_copied() -> None:
    """Another first scale or window skips other steps."""
    config = {"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500}}
    amp = imported(config)["amp_configs"]
    assert (amp["init_loss_scaling"], amp["growth_interval"]) == (4096.0, 500)


def test_allow_drop_lists_what_it_leaves_out() -> None:
    """Asked for by name, and never in silence; mistakes are not dropped."""
    config = {"train_batch_size": 8, "sparse_gradients": True, "elasticity": {"enabled": True}}
    assert len(problems_of(lambda: hybrid.import_config(config))) == 2
    _, notes = hybrid.import_config(config, allow_drop=True)
    assert [key.path for key in notes.keys if key.kind == "dropped"] == ["sparse_gradients", "elasticity.enabled"]
    assert "LEFT OUT" in notes.to_text()
    refused({**config, "fp17": {}}, "fp17", allow_drop=True)


@pytest.mark.parametrize(
    ("section", "line"),
    [
        (
            {"type": "Adam"},
            "torch.optim.AdamW(model.parameters(), lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0)",
        ),
        (
            {"type": "Adam", "params": {"adam_w_mode": False, "lr": "1e-4"}},
            "torch.optim.Adam(model.parameters(), lr=0.0001,",
        ),
        (
            {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
        ),
    ],
)
def test_the_optimizers_line_is_what_deepspeed_makes(section: dict[str, Any], line: str) -> None:
    """Its 'Adam' is AdamW, and its default decay is 0 where torch's is 0.01."""
    _, notes = hybrid.import_config({"train_batch_size": 8, "optimizer": section})
    assert line in notes.script[0]


def test_optimizers_that_torch_has_not_are_refused() -> None:
    """A line that does not run would be worse than none."""
    refused({"train_batch_size": 8, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1}}}, "one bit")
    refused({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "write gradient_clipping")


def rates(params: dict[str, Any], kind: str, updates: int) -> list[float]:
    """The factor of the printed `rate` at each update."""
    _, notes = hybrid.import_config({"train_batch_size": 8, "scheduler": {"type": kind, "params": params}})
    lines = notes.script[: next(i for i, line in enumerate(notes.script) if line.startswith("scheduler ="))]
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    return [names["rate"](step) for step in range(updates)]


def test_schedule_lines_follow_the_closed_forms() -> None:
    """A printed schedule that is off by one step trains another model. (Compared once with DeepSpeed 0.19.8: equal.)"""
    log = rates({"warmup_num_steps": 10}, "WarmupLR", 14)
    assert log == pytest.approx([0, *(math.log(k) / math.log(10) for k in range(1, 11)), 1, 1, 1])
    decay = rates({"warmup_num_steps": 4, "total_num_steps": 8, "warmup_type": "linear"}, "WarmupDecayLR", 10)
    assert decay == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0])
    cosine = rates({"warmup_num_steps": 4, "total_num_steps": 8, "warmup_type": "linear"}, "WarmupCosineLR", 9)
    falling = [1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(1, 5)]
    assert cosine == pytest.approx([0, 0, 0.25, 0.5, 0.75, *falling])


def test_secrets_are_not_printed() -> None:
    """Notes go to terminals and logs."""
    _, notes = hybrid.import_config({"train_batch_size": 8, "comet": {"enabled": True, "api_key": "s3cret"}})
    assert "s3cret" not in notes.to_text() + json.dumps(notes.to_dict())


def test_any_mixture_of_keys_is_answered_or_refused() -> None:
    """Whatever stands together: a StrategyError, or a strategy that resolves with one note for each key."""
    table, taken = key_table("deepspeed"), 0
    values = {"bool": [True, False], "count": [1, 2, 8], "whole": [0, 1, 2], "integer": [-1, 1, 2], "number": [0, 0.5]}
    plain = [row for path, row in table.rows.items() if "*" not in path and not table.is_section(path)]
    for seed in range(150):
        choose = random.Random(seed)
        config: dict[str, Any] = {}
        chosen = choose.sample(plain, 12)
        for row in chosen:
            home = config
            *sections, key = row.path.split(".")
            for section in sections:
                home = home.setdefault(section, {})
            home[key] = choose.choice([*values.get(row.type, row.type.split("|")), *row.off])
        try:
            strategy, notes = hybrid.import_config(config, world_size=8, allow_drop=True, format="deepspeed")
        except StrategyError:
            continue
        taken += 1
        strategy.resolve(8)
        assert sorted(note.path for note in notes.keys) == sorted(row.path for row in chosen)
    assert taken > 20


def test_files_are_told_apart_and_named(tmp_path: Path) -> None:
    """A file of no known format is refused with what was looked for; errors name the file."""
    file = tmp_path / "ds.json"
    file.write_text('{"foo": 1, "bar": {}}', encoding="utf-8")
    (problem,) = problems_of(lambda: hybrid.import_config(file))
    assert re.search(r"ds\.json: of no known format.*foo, bar.*zero_optimization.*fsdp_config.*hybrid_configs", problem)
    (problem,) = problems_of(lambda: hybrid.import_config({"gradient_clipping": 1.0}))
    assert "fit deepspeed and fleet alike" in problem
    assert "--format" in problem
    assert imported({"gradient_clipping": 1.0}, format="deepspeed") == {"gradient_clipping": {"max_norm": 1.0}}
    file.write_text('{"bf16": {"enabled": true}, "bf16": {}}', encoding="utf-8")
    (problem,) = problems_of(lambda: hybrid.import_config(file))
    assert "ds.json: 'bf16' stands twice" in problem
    for broken in ({}, {"x": 1}, tmp_path / "absent.json", tmp_path / "ds.txt"):
        with pytest.raises(StrategyError):
            hybrid.import_config(broken)


def test_a_key_of_many_sections_names_what_stands_beside_it() -> None:
    """`enabled` belonged "at" twenty sections."""
    (problem,) = problems_of(
        lambda: hybrid.import_config({"zero_optimization": {"stage": 1}, "compile": {"enabled": True}})
    )
    assert "known beside it: deepcompile" in problem
    assert "fp16.enabled" not in problem
