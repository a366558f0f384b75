"""Models by name: their published dimensions, in `data/models.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from hybrid.errors import PlanError
from hybrid.planner.data_file import read_data_file
from hybrid.planner.hugging_face import architecture_of
from hybrid.planner.model_spec import ModelSpec
from hybrid.planner.nearest import nearest
from hybrid.planner.transformer import transformer_spec

__all__ = ["preset", "preset_config", "preset_names", "preset_table"]


@lru_cache(maxsize=1)
def preset_table() -> Mapping[str, Mapping[str, Any]]:
    """Name -> its entry: `config` (fields of a config.json), `parameters` (published), `source`."""
    found: dict[str, Mapping[str, Any]] = {}
    for family in read_data_file("models.yaml").values():
        shared = family.get("shared", {})
        for name, entry in family["models"].items():
            found[name] = {**entry, "config": {**shared, **entry["config"]}}
    return found


def preset_names() -> tuple[str, ...]:
    return tuple(preset_table())


def preset(name: str, **changes: Any) -> ModelSpec:
    """A model by name; upper case, `_` and a vendor in front of a slash make no difference.

    Args:
        name: one of `preset_names()`.
        changes: fields of `Architecture` to replace, such as `layers=4` or `activation_bytes=4`.

    Raises:
        PlanError: no model of that name; with the nearest names.
    """
    config, found = preset_config(name)
    entry = preset_table()[found]
    architecture = architecture_of(config, name=found, **changes)
    notes = (str(entry["note"]),) if "note" in entry else ()
    return transformer_spec(architecture, source=f"preset {found}: {entry['source']}", notes=notes)


def preset_config(name: str) -> tuple[Mapping[str, Any], str]:
    """(fields of a config.json, the name as it is listed) of a model by name.

    Raises:
        PlanError: no model of that name; with the nearest names.
    """
    table = preset_table()
    known = {_plain(other): other for other in table}
    found = known.get(_plain(name))
    if found is None:
        hint = nearest(_plain(name), table)
        raise PlanError(
            f"no model is known as {name!r}{hint}{'' if hint.endswith('?') else ';'} A config.json, a folder with "
            "one, or the module itself with an example batch works too"
        )
    return table[found]["config"], found


def _plain(name: str) -> str:
    return name.rpartition("/")[2].lower().replace("_", "-").removesuffix("-hf")
