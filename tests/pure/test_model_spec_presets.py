"""Models by name and by configuration: published sizes, names that are not known, fields that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid.errors import PlanError
from hybrid.planner.describe_model import spec_of
from hybrid.planner.presets import preset, preset_names, preset_table

# By hand, not from the data: what the publishers' weights hold.
KNOWN = {
    "bert-large": 336_226_108,
    "deepseek-v3": 671_026_404_352,
    "gpt2": 124_439_808,
    "llama2-7b": 6_738_415_616,
    "llama3-405b": 405_853_388_800,
    "llama3-70b": 70_553_706_496,
    "llama3-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-235b-a22b": 235_093_634_560,
    "vit-l16": 304_326_632,
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_preset_has_as_many_parameters_as_the_published_weights(name: str) -> None:
    """Memory and work follow from the dimensions; one that is wrong shows here."""
    assert preset(name).num_parameters == KNOWN[name]


def test_every_preset_has_the_size_that_its_entry_states() -> None:
    """Exactly where weights are published, within 4 % of what a paper rounds."""
    for name, entry in preset_table().items():
        found = preset(name).num_parameters
        if "parameters" in entry:
            assert found == entry["parameters"], name
        if "billions" in entry:
            assert found == pytest.approx(entry["billions"] * 1e9, rel=0.04), name
        assert entry["source"], name


@pytest.mark.parametrize(
    "family", ["gpt3-175b", "megatron-1t", "megatron-core-70b", "bert-large", "vit-h14", "llama2-70b", "llama3-405b"]
)
def test_the_families_that_are_promised_are_there(family: str) -> None:
    """A preset must not get lost."""
    assert family in preset_names()


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    """A slip of the pen is the usual reason."""
    with pytest.raises(PlanError, match=r"no model is known as 'llama3-80b'; did you mean .*llama3-70b"):
        spec_of("llama3-80b")


@pytest.mark.parametrize("name", ["meta-llama/Llama3-8B", "LLAMA3_8B", "Llama3-8b-hf"])
def test_the_spelling_of_a_name_makes_no_difference(name: str) -> None:
    """Vendors, capitals and underscores differ from page to page."""
    assert spec_of(name).name == "llama3-8b"


def test_dimensions_of_a_preset_can_be_changed() -> None:
    """Published measurements often run a large model with few layers."""
    spec = preset("llama3-70b", layers=12)
    assert len(spec.blocks) == 12
    assert spec.blocks[0].look == preset("llama3-70b").blocks[0].look


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 50,
}


def test_a_configuration_is_read_from_a_file_a_folder_a_dict_or_an_object(tmp_path: Path) -> None:
    """The ways in which people have it, all with the same result."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    given: list[Any] = [folder, str(folder / "config.json"), LLAMA, SimpleNamespace(to_dict=lambda: LLAMA)]
    specs = [spec_of(one) for one in given]
    assert len({tuple(unit.look for unit in spec.units) for spec in specs}) == 1
    assert specs[0].name == specs[1].name == "tiny"


def test_a_model_type_without_closed_forms_is_refused_with_the_way_out() -> None:
    """The module itself can always be measured."""
    with pytest.raises(PlanError, match=r"model_type 'llamas' is not among .*the module itself.*did you mean llama\?"):
        spec_of({**LLAMA, "model_type": "llamas"})


def test_all_that_is_wrong_with_a_configuration_is_said_at_once() -> None:
    """Each fix would else cost another run."""
    broken = {**LLAMA, "hidden_size": 0, "num_key_value_heads": 3, "vocab_size": "many"}
    with pytest.raises(PlanError) as caught:
        spec_of(broken)
    assert len(caught.value.problems) >= 3
    assert any("vocab_size = 'many': expected a whole number of at least 1" in one for one in caught.value.problems)


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    """The reader must not fall over inside of json."""
    with pytest.raises(PlanError, match="no such file"):
        spec_of(tmp_path / "absent.json")
    damaged = tmp_path / "config.json"
    damaged.write_text("{")
    with pytest.raises(PlanError, match="cannot be read as JSON"):
        spec_of(damaged)
    damaged.write_text("[]")
    with pytest.raises(PlanError, match="expected the fields of a model's configuration, got list"):
        spec_of(tmp_path)


def test_a_sample_beside_a_name_is_refused() -> None:
    """It would be ignored in silence."""
    with pytest.raises(PlanError, match="leave sample out"):
        spec_of("gpt2", sample=object())


def test_what_is_no_model_is_refused() -> None:
    """With the kinds that are."""
    with pytest.raises(PlanError, match="got int"):
        spec_of(3)
