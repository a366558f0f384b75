"""Hybrid-parallel training for PyTorch: ZeRO sharding, composed with other axes, from one strategy object.

Nothing here imports torch until a name is used that needs it, so `import hybrid` and the command line
start fast and work on machines without torch (a login node, an editor).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that defines it. Importing a name imports its module, and only that.
_HOMES = {
    "BatchError": "hybrid.errors",
    "CheckpointError": "hybrid.errors",
    "CollectiveError": "hybrid.errors",
    "CsvLogger": "hybrid.profile.loggers",
    "DistributedBatchSampler": "hybrid.data.sampler",
    "DistributedIterable": "hybrid.data.iterable",
    "DistributedStrategy": "hybrid.strategy",
    "Evaluation": "hybrid.compose.evaluation",
    "GradientAccessError": "hybrid.errors",
    "HybridError": "hybrid.errors",
    "LaunchError": "hybrid.errors",
    "LayerDesc": "hybrid.pipeline.layers",
    "ModelError": "hybrid.errors",
    "OptimizerError": "hybrid.errors",
    "PipelineLayer": "hybrid.pipeline.layers",
    "PlanError": "hybrid.errors",
    "SharedLayerDesc": "hybrid.pipeline.layers",
    "StepRecord": "hybrid.profile.step_record",
    "StrategyError": "hybrid.errors",
    "TensorBoardLogger": "hybrid.profile.loggers",
    "async_save_checkpoint": "hybrid.compose.checkpoint_save",
    "calibrate": "hybrid.calibration.calibrate",
    "distributed_model": "hybrid.compose.model",
    "distributed_optimizer": "hybrid.compose.optimizer",
    "distributed_scaler": "hybrid.compose.scaler",
    "evaluate": "hybrid.compose.evaluation",
    "dryrun": "hybrid.dry.run",
    "even_batches": "hybrid.compose.even_batches",
    "export_weights": "hybrid.compose.weights_export",
    "full_gradient": "hybrid.compose.access",
    "full_parameter": "hybrid.compose.access",
    "get_hybrid_communicate_group": "hybrid.compose.context",
    "import_config": "hybrid.strategy.importing",
    "init": "hybrid.compose.context",
    "is_initialized": "hybrid.compose.context",
    "get_mesh": "hybrid.compose.context",
    "load_checkpoint": "hybrid.compose.checkpoint_load",
    "load_weights": "hybrid.compose.weights_load",
    "loader_generator": "hybrid.data.seeds",
    "measure_plans": "hybrid.calibration.measure_plans",
    "plan": "hybrid.planner.plan",
    "reduce_metrics": "hybrid.compose.evaluation",
    "resume_directory": "hybrid.launch.variables",
    "save_checkpoint": "hybrid.compose.checkpoint_save",
    "set_full_parameter": "hybrid.compose.access",
    "shutdown": "hybrid.compose.context",
    "trace": "hybrid.collectives.trace",
}

# Modules of public names: `hybrid.tensor.ColumnParallelLinear` after `import hybrid`.
_MODULES = ("tensor",)

__all__ = [*sorted(_HOMES), *_MODULES, "__version__"]  # noqa: PLE0604 (the names are strings; the linter cannot see it)

if TYPE_CHECKING:
    import hybrid.tensor as tensor  # noqa: F401 (for type checkers: the lazy name)
    from hybrid.calibration.calibrate import calibrate as calibrate
    from hybrid.calibration.measure_plans import measure_plans as measure_plans
    from hybrid.collectives.trace import trace as trace
    from hybrid.compose.access import full_gradient as full_gradient
    from hybrid.compose.access import full_parameter as full_parameter
    from hybrid.compose.access import set_full_parameter as set_full_parameter
    from hybrid.compose.checkpoint_load import load_checkpoint as load_checkpoint
    from hybrid.compose.checkpoint_save import async_save_checkpoint as async_save_checkpoint
    from hybrid.compose.checkpoint_save import save_checkpoint as save_checkpoint
    from hybrid.compose.context import get_hybrid_communicate_group as get_hybrid_communicate_group
    from hybrid.compose.context import get_mesh as get_mesh
    from hybrid.compose.context import init as init
    from hybrid.compose.context import is_initialized as is_initialized
    from hybrid.compose.context import shutdown as shutdown
    from hybrid.compose.evaluation import Evaluation as Evaluation
    from hybrid.compose.evaluation import evaluate as evaluate
    from hybrid.compose.evaluation import reduce_metrics as reduce_metrics
    from hybrid.compose.even_batches import even_batches as even_batches
    from hybrid.compose.model import distributed_model as distributed_model
    from hybrid.compose.optimizer import distributed_optimizer as distributed_optimizer
    from hybrid.compose.scaler import distributed_scaler as distributed_scaler
    from hybrid.compose.weights_export import export_weights as export_weights
    from hybrid.compose.weights_load import load_weights as load_weights
    from hybrid.data.iterable import DistributedIterable as DistributedIterable
    from hybrid.data.sampler import DistributedBatchSampler as DistributedBatchSampler
    from hybrid.data.seeds import loader_generator as loader_generator
    from hybrid.dry.run import dryrun as dryrun
    from hybrid.errors import BatchError as BatchError
    from hybrid.errors import CheckpointError as CheckpointError
    from hybrid.errors import CollectiveError as CollectiveError
    from hybrid.errors import GradientAccessError as GradientAccessError
    from hybrid.errors import HybridError as HybridError
    from hybrid.errors import LaunchError as LaunchError
    from hybrid.errors import ModelError as ModelError
    from hybrid.errors import OptimizerError as OptimizerError
    from hybrid.errors import PlanError as PlanError
    from hybrid.errors import StrategyError as StrategyError
    from hybrid.launch.variables import resume_directory as resume_directory
    from hybrid.pipeline.layers import LayerDesc as LayerDesc
    from hybrid.pipeline.layers import PipelineLayer as PipelineLayer
    from hybrid.pipeline.layers import SharedLayerDesc as SharedLayerDesc
    from hybrid.planner.plan import plan as plan
    from hybrid.profile.loggers import CsvLogger as CsvLogger
    from hybrid.profile.loggers import TensorBoardLogger as TensorBoardLogger
    from hybrid.profile.step_record import StepRecord as StepRecord
    from hybrid.strategy import DistributedStrategy as DistributedStrategy
    from hybrid.strategy.importing import import_config as import_config


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if name in _MODULES:
        return import_module(f"hybrid.{name}")
    if home is None:
        raise AttributeError(f"module 'hybrid' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
