"""Which features are on: by their flag, or by a degree above 1 in Fleet's `hybrid_configs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid.strategy.choice import Choice
from hybrid.strategy.gather import FLAGS, Gathered

if TYPE_CHECKING:
    from hybrid.strategy.strategy import DistributedStrategy

__all__ = ["find_features", "settle_stage"]


def find_features(strategy: DistributedStrategy, found: Gathered) -> dict[str, Choice]:
    """Flag -> whether it is on; a section without its flag, or a flag without what it needs, is a problem."""
    features: dict[str, Choice] = {}
    implied = _implied(strategy)
    for flag, section_name in FLAGS.items():
        on = bool(getattr(strategy, flag))
        explicit = strategy.is_set(flag)
        source = implied.get(flag)
        if source is not None and explicit and not on:
            found.problems.append(
                f"{flag} = False, but {source[0]} = {source[1]} asks for it; leave out {flag} or set the degree to 1"
            )
            if flag == "sharding":
                # Whether anything is cut is open: degrees that were solved for either would be a second problem.
                found.contested.add("zero_stage")
        if source is not None and not explicit:
            features[flag] = Choice(value=True, origin="derived", where=flag, why=f"{source[0]} = {source[1]}")
            found.notes.append(f"{source[0]} = {source[1]} switches {flag} on{_AS.get(flag, '')}")
            continue
        features[flag] = Choice(value=on, origin="user" if explicit else "default", where=flag)
        settings = getattr(strategy, section_name).to_dict()
        if settings and not on:
            shown = ", ".join(f"{key!r}: {value!r}" for key, value in settings.items())
            state = "is False" if explicit else "was not set"
            found.problems.append(
                f"{section_name} = {{{shown}}} is given, but {flag} {state}: set {flag} = True, or leave "
                f"{section_name} out{_ELSE.get(flag, '')}"
            )
        if on:
            _check_complete(flag, found)
    return features


_AS = {"sharding": " (stage 1 unless sharding_configs says otherwise, as in Fleet)"}
_ELSE = {
    "pipeline": " (accumulate_steps and micro_batch_size can be set on the strategy itself)",
    "gradient_merge": " (accumulate_steps can be set on the strategy itself)",
}


def _implied(strategy: DistributedStrategy) -> dict[str, tuple[str, Any]]:
    """Flag -> the degree, given outside the flag's own section, that asks for the feature."""
    hybrid, legacy = strategy.hybrid_configs, strategy.sharding_configs.fleet_settings()
    asked = {
        "sharding": [(hybrid.spelling("sharding_degree"), hybrid.sharding_degree)],
        "tensor_parallel": [
            (hybrid.spelling("mp_degree"), hybrid.mp_degree),
            ("sharding_configs.mp_degree", legacy.get("mp_degree")),
        ],
        "pipeline": [
            (hybrid.spelling("pp_degree"), hybrid.pp_degree),
            ("sharding_configs.pp_degree", legacy.get("pp_degree")),
        ],
    }
    return {
        flag: source for flag, sources in asked.items() for source in reversed(sources) if source[1] not in {None, 1}
    }


def _check_complete(flag: str, found: Gathered) -> None:
    """A flag that would change nothing is a slip: `tensor_parallel = True` without a degree."""
    needs = {
        "tensor_parallel": ("tp", "tensor_parallel_configs = {'degree': 2}"),
        "pipeline": ("pp", "pipeline_configs = {'degree': 2}"),
    }
    if flag in needs:
        setting, example = needs[flag]
        if found.choices[setting].value is None:
            found.problems.append(f"{flag} = True, but no degree is given; write for example {example}")
    batch = found.choices
    if flag == "gradient_merge" and batch["accumulate_steps"].value is None:
        derivable = batch["micro_batch_size"].value is not None and batch["global_batch_size"].value is not None
        if not derivable:
            found.problems.append(
                "gradient_merge = True, but no number of steps is given; write for example "
                "gradient_merge_configs = {'k_steps': 4}"
            )


def settle_stage(strategy: DistributedStrategy, features: dict[str, Choice], found: Gathered) -> Choice:
    """The ZeRO stage: 0 while sharding is off, the default of `sharding_configs` when only the flag is given."""
    stage = found.choices["zero_stage"]
    if features["sharding"].value or strategy.is_set("sharding_configs"):
        return stage
    flag = features["sharding"]
    return Choice(value=0, origin=flag.origin, where="sharding", why="sharding is off")
