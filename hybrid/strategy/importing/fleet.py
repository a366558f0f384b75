"""Fleet's settings as a strategy: most keys have the same name here; each is said what it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid.errors import StrategyError
from hybrid.strategy.fleet_fields import fleet_field, mapped_values
from hybrid.strategy.importing.draft import Draft
from hybrid.strategy.importing.walk import is_auto, open_auto
from hybrid.strategy.sections import HybridConfigs
from hybrid.strategy.settings import Settings
from hybrid.strategy.strategy import DistributedStrategy

__all__ = ["convert"]

_AUTO_WORDS = frozenset({"sharding_configs.partition", "sharding_configs.grad_reduce", "pipeline_configs.split"})


def convert(config: Mapping[str, Any], draft: Draft) -> None:
    """All keys of Fleet's strategy, or of the inside of its `hybrid_configs`."""
    if not any(key in DistributedStrategy.all_keys() for key in config) and any(
        key in HybridConfigs.all_keys() for key in config
    ):
        config = {"hybrid_configs": config}
    _walk(DistributedStrategy, config, draft)
    _changes(draft)


def _walk(kind: type[Settings], config: Mapping[Any, Any], draft: Draft) -> None:
    for key, value in config.items():
        name = kind.ALIASES.get(key, key)
        section = kind.section_type(name)
        if section is not None and isinstance(value, Mapping):
            _walk(section, value, draft)
        else:
            _one(kind, key, name, value, draft)


def _one(kind: type[Settings], key: Any, name: str, value: Any, draft: Draft) -> None:
    path = kind.path_of(key)
    field = fleet_field(kind.PATH, str(key))
    if value is None:
        draft.note(path, None, "equal", sentence="null: not given")
        return
    if is_auto(value) and kind.path_of(name) not in _AUTO_WORDS:
        open_auto(draft, path)
        return
    try:
        kind({key: value})
    except StrategyError as error:
        if field is not None and field.refused:
            draft.refuse(path, value, field.note)
        else:
            draft.problems.extend(error.problems)
        return
    ours = kind.path_of(name)
    if field is None:
        if draft.give(ours, value, path=path):
            same = "" if ours != path else "the same setting"
            draft.note(path, value, "mapped", target=f"{ours} = {value}" if ours != path else "", sentence=same)
    elif field.refused:
        # What agrees is a switch that is off, or a word for what is done here anyway.
        is_off = field.read(value) in (False, 0, None)
        draft.note(path, value, "equal", sentence="off" if is_off else "as it is here")
    elif field.setting is None:
        draft.note(path, value, "equal", sentence=field.note)
    elif not mapped_values(field, field.read(value)):
        draft.note(path, value, "equal", sentence="asks for nothing")
    elif draft.give(path, value, path=path):
        draft.note(path, value, "mapped", sentence=field.note)


# Setting -> Fleet's default and ours.
_LOSS_SCALE = {
    "init_loss_scaling": "init_loss_scaling 65536 where Fleet has 32768",
    "growth_interval": "incr_every_n_steps 2000 where Fleet has 1000",
    "backoff_factor": "decr_ratio 0.5 where Fleet has 0.8",
}


def _changes(draft: Draft) -> None:
    """What Fleet's own defaults are, where the file leaves them."""
    if draft.lookup("amp"):
        pure = any(draft.lookup(f"amp_configs.{word}") for word in ("use_pure_bf16", "use_pure_fp16"))
        if not pure and draft.lookup("amp_configs.dtype") is None:
            draft.give("amp_configs.dtype", "float16", path="amp (Fleet's default dtype)")
            draft.changes.append("precision: amp is in float16 in Fleet unless it says otherwise; dtype is written out")
        if draft.lookup("amp_configs.dtype") == "float16" or draft.lookup("amp_configs.use_pure_fp16"):
            open_ones = [
                words for setting, words in _LOSS_SCALE.items() if draft.lookup(f"amp_configs.{setting}") is None
            ]
            if open_ones:
                draft.changes.append(f"loss scale: Fleet's defaults are not copied: {', '.join(open_ones)}")
            draft.changes.append("loss scale: it shrinks after each overflow, Fleet's after 2 unless it says otherwise")
    if any(draft.lookup(flag) for flag in ("sharding", "recompute", "gradient_merge")):
        draft.changes.append(
            "in Fleet's dygraph mode sharding with its stage, recompute and gradient_merge of the strategy do nothing; "
            "here each of them acts"
        )
    if draft.lookup("sharding") and draft.lookup("sharding_configs.stage") is None:
        draft.changes.append("sharding: no stage is given: 1, the default in both; 2 and 3 cut more")
    if draft.lookup("sharding") and not any(
        draft.lookup(path) for path in ("sharding_configs.shard_size", "hybrid_configs.sharding_degree")
    ):
        draft.changes.append("sharding: no degree is given: all data-parallel ranks (Fleet's static default is 8)")
    if draft.lookup("hybrid_configs.order") is None and draft.lookup("hybrid_configs") is not None:
        draft.changes.append(
            "order: the axes run pp, dp, sharding, sep, mp from outer to inner, Fleet's dp, pp, sharding, sep, mp; "
            "give hybrid_configs.order where rank numbers matter"
        )
    draft.changes.append(
        "clipping: Fleet clips by its optimizer's grad_clip; here gradient_clipping does, over all parameters and ranks"
    )
    draft.changes.append(
        "loss: train_batch gives the mean over all samples of all micro-batches and ranks; do not divide it"
    )
