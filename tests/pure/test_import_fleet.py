"""`hybrid.import_config` on Fleet's dictionaries (BC-78), as files and dicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hybrid
from hybrid.strategy.fleet_refusals import REFUSALS
from tests.pure.strategy_cases import nested, problems_of

LEGACY = {"sharding": True, "sharding_configs": {"sharding_degree": 4, "mp_degree": 1, "pp_degree": 1, "dp_degree": 4}}
DEGREES = {"dp_degree": 2, "mp_degree": 2, "pp_degree": 2, "sharding_degree": 1, "order": "pp,dp,sharding,mp"}


def lines_of(config: dict[str, Any], world_size: int) -> str:
    """What is worked out, as printed."""
    return "\n".join(hybrid.import_config(config, world_size=world_size)[1].worked_out)


def test_legacy_degrees_print_their_groups() -> None:
    """BC-78 (a): 4 replica groups of 4-way shards; (e) the default stage is printed."""
    told = lines_of(LEGACY, 16)
    assert "(0 1 2 3) (4 5 6 7) (8 9 10 11) (12 13 14 15)" in told
    assert "zero_stage" in told
    assert "1  (default)" in told


def test_legacy_degrees_equal_the_native_setting() -> None:
    """BC-78 (a), scaled to 4 processes as 2x2."""
    small = {**LEGACY, "sharding_configs": {"sharding_degree": 2, "mp_degree": 1, "pp_degree": 1, "dp_degree": 2}}
    native = hybrid.DistributedStrategy(sharding=True, sharding_configs={"shard_size": 2})
    assert hybrid.import_config(small)[0].resolve(4).layout == native.resolve(4).layout


@pytest.mark.parametrize("config", [DEGREES, {"hybrid_configs": DEGREES}])
def test_hybrid_configs_alone_or_inside(config: dict[str, Any]) -> None:
    """BC-78 (b): the order is kept, mp innermost."""
    strategy, notes = hybrid.import_config(config, world_size=8)
    assert strategy.resolve(8).layout.groups(("tp",))[0] == (0, 1)
    assert {note.path for note in notes.keys} == {f"hybrid_configs.{key}" for key in DEGREES}


def test_disagreeing_dictionaries() -> None:
    """BC-78 (c): refused with both values."""
    (problem,) = problems_of(lambda: hybrid.import_config({**LEGACY, "hybrid_configs": {"sharding_degree": 2}}))
    assert "sharding_configs.sharding_degree = 4" in problem or "sharding_configs.shard_size = 4" in problem
    assert "hybrid_configs.sharding_degree = 2" in problem


def test_a_missing_degree_is_derived_and_said() -> None:
    """BC-78 (d)."""
    told = lines_of({"sharding": True, "sharding_configs": {"sharding_degree": 8}}, 16)
    assert "dp_replicate" in told
    assert "2  (derived: data-parallel size 16 / dp_shard 8)" in told


@pytest.mark.parametrize("order", ["pp,dp,dp,sharding,mp", "pp,sharding,mp"])
def test_a_bad_order_is_refused(order: str) -> None:
    """BC-78 (f): an axis twice, or left out."""
    (problem, *_) = problems_of(lambda: hybrid.import_config({**DEGREES, "order": order}, world_size=8))
    assert "hybrid_configs.order" in problem


def test_every_field_has_its_note() -> None:
    """Used, so anyway, off, refused: as the table of Fleet's fields says."""
    config = {
        "sharding": True,
        "sharding_configs": {"stage": 2, "optimize_offload": True, "sharding_degree": 2},
        "fuse_grad_size_in_MB": 16,
        "find_unused_parameters": True,
        "lamb": False,
        "nccl_comm_num": None,
    }
    strategy, notes = hybrid.import_config(config, world_size=4)
    kinds = {note.path: note.kind for note in notes.keys}
    assert kinds == {
        "sharding": "mapped",
        "sharding_configs.stage": "mapped",
        "sharding_configs.optimize_offload": "mapped",
        "sharding_configs.sharding_degree": "mapped",
        "fuse_grad_size_in_MB": "mapped",
        "find_unused_parameters": "equal",
        "lamb": "equal",
        "nccl_comm_num": "equal",
    }
    resolved = strategy.resolve(4)
    assert (resolved.zero_stage, resolved.offload, resolved.bucket_bytes) == (2, "optimizer", 16 * 2**20)


def test_refused_fields_can_be_left_out() -> None:
    """A flag that Fleet has and hybrid not; mistakes stay mistakes."""
    config = {"lars": True, "sharding": True, "sharding_configs": {"stage": 1, "use_calc_stream": True}}
    assert len(problems_of(lambda: hybrid.import_config(config))) == 2
    strategy, notes = hybrid.import_config(config, allow_drop=True)
    assert [note.path for note in notes.keys if note.kind == "dropped"] == ["lars", "sharding_configs.use_calc_stream"]
    assert strategy.to_dict() == {"sharding": True, "sharding_configs": {"stage": 1}}
    (problem,) = problems_of(lambda: hybrid.import_config({**config, "shardng": True}, allow_drop=True))
    assert "shardng" in problem
    assert "'sharding'" in problem


def test_fleets_amp_is_float16(tmp_path: Path) -> None:
    """The default dtype of amp differs: silence in the file must not change it."""
    file = tmp_path / "fleet.json"
    file.write_text(json.dumps({"amp": True, "amp_configs": {"use_pure_fp16": False}}), encoding="utf-8")
    strategy, notes = hybrid.import_config(file)
    assert strategy.amp_configs.dtype == "float16"
    assert any("float16 in Fleet" in change for change in notes.changes)
    assert hybrid.import_config({"amp": True, "amp_configs": {"use_pure_bf16": True}})[0].resolve(1).amp == (
        hybrid.DistributedStrategy(amp=True, amp_configs={"level": "O2", "dtype": "bfloat16"}).resolve(1).amp
    )


def test_auto_and_given_values() -> None:
    """BC-73 and BC-76 in Fleet's words."""
    config = {"hybrid_configs": {"mp_degree": "auto", "dp_degree": 2}}
    (problem,) = problems_of(lambda: hybrid.import_config(config))
    assert "hybrid_configs.mp_degree = 'auto'" in problem
    assert "--set hybrid_configs.mp_degree=" in problem
    strategy, _ = hybrid.import_config(config, given={"hybrid_configs.mp_degree": 2}, world_size=4)
    assert strategy.resolve(4).layout.degree("tp") == 2
    given = {"hybrid_configs.mp_degree": 2, "hybrid_configs.dp_degree": 4}
    (problem,) = problems_of(lambda: hybrid.import_config(config, given=given))
    assert "hybrid_configs.dp_degree = 2" in problem
    assert "4 is given" in problem


@pytest.mark.parametrize("path", [path for path, _, _ in REFUSALS])
def test_every_refused_field_is_refused_with_its_reason(path: str) -> None:
    """The table of Fleet's fields is the importer's too: refused by name, or left out and listed."""
    config = nested(path, "something")
    reason = next(reason for name, _, reason in REFUSALS if name == path)
    (problem,) = problems_of(lambda: hybrid.import_config(config, format="fleet"))
    assert problem.startswith(f"{path} = 'something': {reason}")
    strategy, notes = hybrid.import_config(config, format="fleet", allow_drop=True)
    assert [(note.path, note.kind) for note in notes.keys] == [(path, "dropped")]
    assert strategy == hybrid.DistributedStrategy()


def test_what_agrees_is_not_called_off() -> None:
    """`use_dynamic_loss_scaling = true` was "off", and defaults were not copied where the file gives every value."""
    given = {"init_loss_scaling": 1024, "incr_every_n_steps": 500, "decr_ratio": 0.25, "use_dynamic_loss_scaling": True}
    _, notes = hybrid.import_config({"amp": True, "amp_configs": given, "dgc": False})
    said = {note.path: note.sentence for note in notes.keys}
    assert said["amp_configs.use_dynamic_loss_scaling"] == "as it is here"
    assert said["dgc"] == "off"
    assert not any("not copied" in change for change in notes.changes)
    _, notes = hybrid.import_config({"amp": True})
    assert any("init_loss_scaling 65536 where Fleet has 32768" in change for change in notes.changes)
