"""`hybrid.import_config` on files of `accelerate config`: FSDP, DDP, DeepSpeed and Megatron-LM underneath."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hybrid
from tests.pure.strategy_cases import problems_of

FSDP: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "FSDP",
    "downcast_bf16": "no",
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_forward_prefetch": False,
        "fsdp_offload_params": False,
        "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_sync_module_states": True,
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_use_orig_params": True,
    },
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 2,
    "num_processes": 16,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}


def fsdp(**settings: Any) -> dict[str, Any]:
    """The file with these keys of fsdp_config; None takes one out."""
    config = {**FSDP["fsdp_config"], **{f"fsdp_{key}": value for key, value in settings.items()}}
    return {**FSDP, "fsdp_config": {key: value for key, value in config.items() if value is not None}}


def sharding(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    return dict(hybrid.import_config(config, **more)[0].to_dict()["sharding_configs"])


def test_a_whole_fsdp_file() -> None:
    """Every key of the file that `accelerate config` writes has a note, and the result resolves on its processes."""
    strategy, notes = hybrid.import_config(FSDP)
    assert len(notes.keys) == len(FSDP) - 1 + len(FSDP["fsdp_config"])
    assert notes.world_size == 16
    resolved = strategy.resolve(16)
    assert (resolved.zero_stage, resolved.shard_size, resolved.units) == (3, 16, ("LlamaDecoderLayer",))
    assert resolved.amp is not None
    assert (resolved.amp.level, resolved.reduce_dtype) == ("O2", "bfloat16")
    assert "# start it: torchrun --nnodes 2 --nproc-per-node 8 train.py" in notes.script


@pytest.mark.parametrize(
    ("strategy", "stage", "shard_size"),
    [
        ("FULL_SHARD", 3, None),
        ("SHARD_GRAD_OP", 2, None),
        ("NO_SHARD", 0, None),
        ("HYBRID_SHARD", 3, 8),
        ("HYBRID_SHARD_ZERO2", 2, 8),
        (1, 3, None),
        (5, 2, 8),
    ],
)
def test_sharding_strategies_are_stages(strategy: object, stage: int, shard_size: int | None) -> None:
    """HYBRID_ cuts within a machine: 16 processes on 2 machines."""
    settings = sharding(fsdp(sharding_strategy=strategy))
    assert (settings["stage"], settings.get("shard_size")) == (stage, shard_size)


def test_version_2_says_it_by_resharding() -> None:
    """true is FULL_SHARD, false SHARD_GRAD_OP; a name beside it must agree."""
    config = fsdp(version=2, reshard_after_forward=False, sharding_strategy=None)
    assert sharding(config)["stage"] == 2
    (problem,) = problems_of(lambda: hybrid.import_config(fsdp(reshard_after_forward=False)))
    assert "FULL_SHARD" in problem
    assert "False" in problem
    assert "keep one" in problem


def test_offload_prefetch_recompute_and_wrapping() -> None:
    """The rest of fsdp_config; below stage 3 there are no cut parameters to put away."""
    settings = sharding(fsdp(offload_params=True, backward_prefetch="NO_PREFETCH"))
    assert (settings["offload"], settings["prefetch"]) == ("parameters", 0)
    assert sharding(fsdp(offload_params=True, sharding_strategy="SHARD_GRAD_OP"))["offload"] == "optimizer"
    two = sharding(fsdp(transformer_layer_cls_to_wrap="T5Block, a.b.Other"))
    assert two["units"] == ["T5Block", "Other"]
    assert hybrid.import_config(fsdp(activation_checkpointing=True))[0].recompute is True


def test_the_world_size_must_agree() -> None:
    """BC-76: num_processes of the file and the given world size."""
    (problem,) = problems_of(lambda: hybrid.import_config(FSDP, world_size=8))
    assert "num_processes = 16" in problem
    assert "8" in problem
    assert hybrid.import_config(FSDP, world_size=16)[1].world_size == 16


def test_a_given_value_that_does_nothing_is_refused() -> None:
    """Whoever gives a value wants it to act: of DeepSpeed's section nothing acts under FSDP."""
    (problem,) = problems_of(lambda: hybrid.import_config(FSDP, given={"gradient_clipping": 1.0}))
    assert "gradient_clipping = 1.0 is given, but does nothing" in problem
    assert "distributed_type DEEPSPEED" in problem


def test_ddp_is_autocast() -> None:
    """Without FSDP Accelerate runs autocast over float32 parameters: level O1, not O2."""
    strategy, _ = hybrid.import_config({"distributed_type": "MULTI_GPU", "mixed_precision": "fp16", "num_processes": 4})
    assert strategy.to_dict() == {"amp": True, "amp_configs": {"dtype": "float16", "level": "O1"}}


def test_deepspeed_underneath(tmp_path: Path) -> None:
    """Its few keys in DeepSpeed's words; or the file they name, which they must not contradict."""
    config: dict[str, Any] = {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16",
        "num_processes": 4,
        "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 4, "offload_optimizer_device": "none"},
    }
    strategy, _ = hybrid.import_config(config, given={"train_micro_batch_size_per_gpu": 2})
    resolved = strategy.resolve(4)
    assert (resolved.zero_stage, resolved.accumulate_steps, resolved.global_batch_size) == (2, 4, 32)
    inside = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "gradient_clipping": 0.5}
    (tmp_path / "ds.json").write_text(json.dumps(inside), encoding="utf-8")
    file = tmp_path / "accelerate.yaml"
    lines = ["distributed_type: DEEPSPEED", "mixed_precision: bf16", "num_processes: 4", "deepspeed_config:"]
    file.write_text("\n".join([*lines, "  deepspeed_config_file: ds.json"]), encoding="utf-8")
    strategy, notes = hybrid.import_config(file)
    assert strategy.to_dict()["amp_configs"] == {"dtype": "bfloat16", "level": "O2"}
    assert strategy.resolve(4).zero_stage == 3
    assert any(note.path == "gradient_clipping" and note.kind == "mapped" for note in notes.keys)
    file.write_text("\n".join([*lines, "  deepspeed_config_file: ds.json", "  zero_stage: 2"]), encoding="utf-8")
    (problem,) = problems_of(lambda: hybrid.import_config(file))
    assert "zero_optimization.stage = 3 in ds.json, but 2" in problem


def test_megatron_parallelism_and_compile() -> None:
    """Degrees from the other sections."""
    megatron = {
        "distributed_type": "MEGATRON_LM",
        "num_processes": 8,
        "megatron_lm_config": {
            "megatron_lm_tp_degree": 2,
            "megatron_lm_pp_degree": 2,
            "megatron_lm_num_micro_batches": 4,
            "megatron_lm_sequence_parallelism": True,
            "megatron_lm_recompute_activations": True,
            "megatron_lm_use_distributed_optimizer": True,
            "megatron_lm_gradient_clipping": 1.0,
        },
        "dynamo_config": {"dynamo_backend": "EAGER", "dynamo_use_dynamic": True},
    }
    resolved = hybrid.import_config(megatron)[0].resolve(8)
    assert resolved.tensor_parallel is not None
    assert resolved.tensor_parallel.sequence_parallel
    assert resolved.pipeline is not None
    assert (resolved.pipeline.degree, resolved.accumulate_steps) == (2, 4)
    assert resolved.recompute is not None
    assert resolved.recompute.policy == "selective"
    assert resolved.compile is not None
    assert (resolved.compile.backend, resolved.compile.dynamic) == ("eager", True)
    assert (resolved.zero_stage, resolved.data_parallel_size) == (1, 2)
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2, "cp_size": 1}
    section = {f"parallelism_config_{key}": value for key, value in sizes.items()}
    mesh = hybrid.import_config({**fsdp(), "num_processes": 8, "parallelism_config": section})[0].resolve(8)
    assert [mesh.layout.degree(axis) for axis in ("dp_replicate", "dp_shard", "tp")] == [2, 2, 2]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**FSDP, "mixed_precision": "fp8"}, ["mixed_precision = 'fp8'", "use bf16"]),
        ({**FSDP, "mixed_precision": "auto"}, ["mixed_precision = 'auto'", "--set mixed_precision="]),
        ({**FSDP, "num_procesess": 3}, ["num_procesess: unknown key", "'num_processes'"]),
        (fsdp(sharding_strategy="FULL_SHRD"), ["FULL_SHRD", "did you mean 'FULL_SHARD'"]),
        ({**FSDP, "distributed_type": "XLA"}, ["distributed_type = 'XLA'", "not supported"]),
        ({**fsdp(sharding_strategy="HYBRID_SHARD"), "num_processes": 7}, ["how many ranks", "num_processes 7"]),
        ({**FSDP, "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "reduce-overhead"}}, ["CUDA graphs"]),
        ({**FSDP, "parallelism_config": {"parallelism_config_cp_size": 2}}, ["cp_size = 2", "not available yet"]),
    ],
)
def test_what_cannot_be_is_refused_by_name(config: dict[str, Any], words: list[str]) -> None:
    """Open, misspelt, unknown and impossible values, each with the way on."""
    (problem,) = problems_of(lambda: hybrid.import_config(config))
    assert all(word in problem for word in words), problem
