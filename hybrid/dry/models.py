"""The model of a dry run, however it is named: a function that builds it without memory, and what the planner knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybrid.errors import ModelError, PlanError
from hybrid.planner.describe_model import read_config_file, spec_of
from hybrid.planner.model_spec import ModelSpec
from hybrid.planner.presets import preset_config
from hybrid.strategy.live_model import build

__all__ = ["DryModel", "dry_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryModel:
    """Args:
    name: for the eye.
    make: builds (model, sample).
    spec: the planner's description; None where it has none in closed form.
    seq: tokens per sample; None: as the sample has them.
    notes: what a reader should know.
    """

    name: str
    make: Callable[[], tuple[nn.Module, Any]]
    spec: ModelSpec | None = None
    seq: int | None = None
    notes: tuple[str, ...] = ()


def dry_model(model: Any, *, sample: Any = None, seq: int | None = None) -> DryModel:
    """Find out what a model is.

    Args:
        model: the name of a preset; a `config.json` or its folder; a configuration, as a dict or an object of
            Transformers; `package.module:factory`; or a function that returns a model, or (model, sample).
        sample: an example batch, for a function that returns none.
        seq: tokens per sample.

    Raises:
        PlanError: no model of that name, with the nearest ones; a configuration without closed forms.
        ModelError, StrategyError: a factory that fails, or makes no model.
    """
    if isinstance(model, nn.Module):
        raise ModelError(
            "a dry run builds the model anew for each rank: give a function that makes it, such as "
            f"lambda: {type(model).__name__}(...), not the model itself"
        )
    if isinstance(model, str) and ":" in model and not model.endswith(".json"):
        return _of_factory(model.rpartition(":")[2], lambda: build(model)[:2], sample=sample, seq=seq)
    if callable(model) and not hasattr(model, "to_dict"):
        return _of_factory(getattr(model, "__name__", "factory"), lambda: _called(model), sample=sample, seq=seq)
    config, name = _config(model)
    given, notes = _as_gpt2(config, name)
    spec = spec_of({**given, "_name_or_path": name})
    length = seq or spec.default_seq
    if spec.max_seq and length > spec.max_seq:
        raise PlanError(f"seq = {length}: {name} takes at most {spec.max_seq} tokens")
    notes = (*notes, *spec.notes_on_length(length))
    return DryModel(name=name, make=_transformer(given, length), spec=spec, seq=seq, notes=notes)


def _of_factory(name: str, make: Callable[[], tuple[nn.Module, Any]], *, sample: Any, seq: int | None) -> DryModel:
    def made() -> tuple[nn.Module, Any]:
        model, own = make()
        return model, own if sample is None else sample

    return DryModel(name=name, make=made, seq=seq)


def _called(factory: Callable[[], Any]) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        made = factory()
    model, sample = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the factory made a {type(made).__name__}, expected a torch.nn.Module, or (model, sample) with an example "
            "batch"
        )
    return model, sample


def _config(model: Any) -> tuple[Mapping[str, Any], str]:
    if isinstance(model, Mapping):
        return model, str(model.get("_name_or_path") or model.get("model_type") or "model")
    if callable(getattr(model, "to_dict", None)):
        return model.to_dict(), type(model).__name__
    path = Path(str(model)).expanduser()
    if str(model).endswith(".json") or path.exists():
        return read_config_file(path)
    return preset_config(str(model))


def _as_gpt2(config: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Megatron-LM's GPT, which no library here has, as the GPT-2 of Transformers: the same layers and sizes."""
    if config.get("model_type") != "megatron_gpt":
        return config, ()
    same = {
        "model_type": "gpt2",
        "n_layer": config["num_layers"],
        "n_embd": config["hidden_size"],
        "n_head": config["num_attention_heads"],
        "n_inner": config.get("ffn_hidden_size", 4 * config["hidden_size"]),
        "vocab_size": config["padded_vocab_size"],
        "n_positions": config["seq_length"],
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }
    return same, (f"{name} is Megatron-LM's own module; in its place stands GPT-2 of Transformers, of the same sizes",)


def _transformer(config: Mapping[str, Any], seq: int) -> Callable[[], tuple[nn.Module, Any]]:
    """Builds the class of Transformers that a configuration is of, without memory."""

    def make() -> tuple[nn.Module, Any]:
        try:
            import transformers  # only where a model of it is to be built
        except ImportError as error:
            raise ModelError(
                "a model by name or config.json is built by Transformers, which is not installed: pip install "
                "transformers, or give package.module:factory"
            ) from error
        fields = {key: value for key, value in config.items() if key != "model_type"}
        made: Any = transformers.AutoConfig.for_model(str(config["model_type"]), **fields)
        made.use_cache = False
        names = [name for name in made.architectures or () if hasattr(transformers, name)]
        cls: Any = getattr(transformers, names[0] if names else _CLASSES.get(made.model_type, "AutoModelForCausalLM"))
        with torch.device("meta"):
            # An Auto class finds the class; the class itself is built as any other.
            model = cls.from_config(made, dtype=torch.float32) if hasattr(cls, "from_config") else cls(made)
            sample = _sample(made, seq)
        return model.train(), sample

    return make


_CLASSES = {"bert": "BertForMaskedLM", "vit": "ViTForImageClassification"}


def _sample(config: Any, seq: int) -> dict[str, torch.Tensor]:
    if config.model_type == "vit":
        size = config.image_size
        pixels = torch.zeros(1, config.num_channels, size, size)
        return {"pixel_values": pixels, "labels": torch.zeros(1, dtype=torch.int64)}
    ids = torch.zeros(1, seq, dtype=torch.int64)
    if any(name.endswith("ForPreTraining") for name in config.architectures or ()):
        return {"input_ids": ids, "labels": ids, "next_sentence_label": torch.zeros(1, dtype=torch.int64)}
    return {"input_ids": ids, "labels": ids}
