"""An optimizer on one stage of a pipeline: which of its parameters it keeps there."""

from __future__ import annotations

import torch

from hybrid.collectives import ops
from hybrid.compose.optimizer_alike import comparable_options
from hybrid.compose.runtime import Runtime
from hybrid.errors import OptimizerError
from hybrid.sharding.slice_state import SliceState

__all__ = ["drop_elsewhere"]


def drop_elsewhere(optimizer: torch.optim.Optimizer, runtime: Runtime) -> None:
    """Parameters that other pipeline stages train, and their state, are theirs."""
    if runtime.stages is None:
        return
    for group in optimizer.param_groups:
        here = [place for place, p in enumerate(group["params"]) if id(p) in runtime.engine.fqn_of]
        for key in ("params", "param_names"):
            if key in group:
                group[key][:] = [group[key][place] for place in here]
    if not isinstance(optimizer.state, SliceState):  # not wrapped yet
        for parameter in [p for p in optimizer.state if id(p) not in runtime.engine.fqn_of]:
            del optimizer.state[parameter]
    stages_of = {fqn: held for fqn, held in runtime.stages.whole.stages_of.items() if len(held) > 1}
    tied = {
        fqn: (index, comparable_options(group))
        for index, group in enumerate(optimizer.param_groups)
        for fqn in (runtime.engine.fqn_of[id(parameter)] for parameter in group["params"])
        if fqn in stages_of
    }
    everyone = ops.all_gather_object((len(optimizer.param_groups), tied), group=runtime.mesh.group("pp"))
    counts = [count for count, _ in everyone]
    if len(set(counts)) > 1:
        raise OptimizerError(
            f"the stages of the pipeline have {', '.join(map(str, counts))} param groups: each needs the same ones, "
            "empty where it has no parameters of a group. Keep empty groups, or build the optimizer before "
            "distributed_model"
        )
    for fqn, held in stages_of.items():
        found = [everyone[stage][1].get(fqn) for stage in held]
        if any(other != found[0] for other in found):
            options = [one[1] for one in found if one is not None]
            unlike = {key for each in options for key in each if any(each[key] != other.get(key) for other in options)}
            shown = "; ".join(
                f"stage {stage}: not in the optimizer"
                if one is None
                else f"stage {stage}: group {one[0]}" + "".join(f", {key} {one[1].get(key)}" for key in sorted(unlike))
                for stage, one in zip(held, found, strict=True)
            )
            raise OptimizerError(
                f"{fqn!r} is one parameter on pipeline stages {', '.join(map(str, held))}, and is not updated alike "
                f"there ({shown}): give it to the same group with the same options on each of them, or to none"
            )
