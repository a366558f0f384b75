"""A model, however it is given, as a `ModelSpec`: a name, a configuration, or the module itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid.errors import PlanError
from hybrid.planner.hugging_face import read_config
from hybrid.planner.model_spec import ModelSpec
from hybrid.planner.presets import preset
from hybrid.planner.transformer import transformer_spec

__all__ = ["is_module", "read_config_file", "spec_of"]


def spec_of(
    model: Any, *, seq: int | None = None, sample: Any = None, plan: Mapping[str, Any] | None = None, **changes: Any
) -> ModelSpec:
    """Describe a model.

    Args:
        model: the name of a preset; a `config.json`, or a folder with one; a configuration, as a dict or as an object
            of Transformers; or an `nn.Module`, which needs a `sample`.
        seq: tokens per sample; a module is measured at that length instead of its sample's.
        sample: example batch for a module: a tensor, a tuple of arguments, or a dict of keyword arguments.
        plan: the user's tensor-parallel plan for a module that is measured.
        changes: `activation_bytes=4` for fp32; for models in closed form any other field of `Architecture`, such as
            `kernels="fused"`. Left out, norms, rotary positions and gates are as Transformers writes them, one
            operation after the other, which keep more to backward (`preset` and the builders: fused).

    Raises:
        PlanError: nothing of that name, a configuration without closed forms, or a module that cannot be measured.
    """
    if isinstance(model, ModelSpec):
        return model
    if is_module(model):
        from hybrid.planner.measure import measure_model  # torch comes with it

        return measure_model(model, sample=sample, seq=seq, plan=plan, **changes)
    if sample is not None:
        raise PlanError("a sample is for a module; a name or a configuration says all that is needed: leave sample out")
    if isinstance(model, str) and not _is_path(model):
        return preset(model, **_as_written(changes))
    if isinstance(model, str | Path):
        config, name = read_config_file(Path(model))
        return _of_config(config, name=name, source=f"{model}", changes=changes)
    if isinstance(model, Mapping):
        return _of_config(model, name="", source="a configuration", changes=changes)
    to_dict = getattr(model, "to_dict", None)
    if callable(to_dict):
        return _of_config(to_dict(), name="", source=type(model).__name__, changes=changes)
    raise PlanError(
        "model: expected the name of a preset, a config.json, a configuration or an nn.Module, got "
        f"{type(model).__name__}"
    )


def _of_config(config: Mapping[str, Any], *, name: str, source: str, changes: Mapping[str, Any]) -> ModelSpec:
    shown = name or str(config.get("_name_or_path") or config.get("model_type") or "model")
    architecture, notes = read_config(config, name=shown, **_as_written(changes))
    return transformer_spec(architecture, source=source, notes=notes)


def _as_written(changes: Mapping[str, Any]) -> dict[str, Any]:
    """What will be trained is, if nothing else is said, the class of Transformers: it fuses nothing."""
    return {"kernels": "eager", **changes}


def is_module(model: object) -> bool:
    """Where torch is not loaded there are none."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _is_path(text: str) -> bool:
    return text.endswith(".json") or text.startswith((".", "~")) or Path(text).expanduser().exists()


def read_config_file(path: Path) -> tuple[Mapping[str, Any], str]:
    """(configuration, name of the model): that of its folder, or of a file that is not called `config.json`.

    Raises:
        PlanError: no such file, or no configuration in it.
    """
    path = path.expanduser()
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PlanError(f"{file}: no such file; give a config.json or a folder that has one") from error
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise PlanError(f"{file}: expected the fields of a model's configuration, got {type(found).__name__}")
    return found, file.resolve().parent.name if file.name == "config.json" else file.stem
