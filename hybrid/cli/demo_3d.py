"""Pipeline × tensor × data parallel on the ranks of this machine: `hybrid demo --layout 3d`."""

from __future__ import annotations

from typing import Any

from hybrid.errors import StrategyError

__all__ = ["HEADS_3D", "RANKS_3D", "STEPS_3D", "check_ranks_3d", "settings_3d"]

RANKS_3D = 8
STEPS_3D = 40
HEADS_3D = 4  # of the model, whose usual five no two ranks can share
_STAGES, _TENSOR, _MICRO_BATCHES = 2, 2, 4

# The demo's model is nobody's family: its queries, keys and values lie in one layer.
_PLAN = {
    "blocks.*.query_key_value": {"style": "colwise", "fused": 3, "heads": "num_heads", "divide": ["num_heads"]},
    "blocks.*.attention_out": "rowwise",
    "blocks.*.mlp_in": "colwise",
    "blocks.*.mlp_out": "rowwise",
}


def check_ranks_3d(nproc: int) -> None:
    """Raises StrategyError: these ranks are not 2 stages × 2 tensor-parallel × 2 or more data-parallel ones."""
    each = _STAGES * _TENSOR
    if nproc % each == 0 and nproc >= RANKS_3D:
        return
    below = max(RANKS_3D, nproc // each * each)
    sizes = f"{below}" if nproc < RANKS_3D else f"{below} or {below + each}"
    raise StrategyError(
        f"--nproc is {nproc}, and --layout 3d cuts the model over pp {_STAGES} × tp {_TENSOR} and the batch over at "
        f"least 2 ranks, so it needs a multiple of {each} ranks, {RANKS_3D} or more; try {sizes}"
    )


def settings_3d() -> dict[str, Any]:
    """What the layout adds to the settings of the options; the ranks that are left are data parallel."""
    return {
        "tensor_parallel": True,
        "tensor_parallel_configs": {"degree": _TENSOR, "plan": _PLAN},
        "pipeline": True,
        "pipeline_configs": {"degree": _STAGES, "accumulate_steps": _MICRO_BATCHES, "schedule": "zb-h1"},
    }
