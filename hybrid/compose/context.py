"""The job that this process is part of: one strategy, one mesh, and the models wrapped so far.

One process is in one job, so this is process-wide state, and the only such state of the package's upper floors.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hybrid.data.coordinate import DataCoordinate, set_coordinate_provider
from hybrid.errors import HybridError, StrategyError
from hybrid.launch.environment import LaunchEnvironment, read_environment
from hybrid.launch.variables import STRATEGY_VARIABLE
from hybrid.mesh import Mesh, running_world_size, start_process_group, stop_process_group
from hybrid.rng import seed_everything, seed_for_data_rank
from hybrid.strategy import DistributedStrategy, ResolvedStrategy
from hybrid.tensor.cut_module import set_group_provider

if TYPE_CHECKING:
    from hybrid.compose.runtime import Runtime

__all__ = [
    "DATA_AXES",
    "HybridCommunicateGroup",
    "Scope",
    "before_shutdown",
    "check_same_strategy",
    "ensure",
    "entered",
    "foresee",
    "get_hybrid_communicate_group",
    "get_mesh",
    "init",
    "is_initialized",
    "remember",
    "runtimes",
    "seed_for_training",
    "shutdown",
]

# Every data-parallel rank computes part of the batch: gradients are partial over these axes.
DATA_AXES = ("dp_replicate", "dp_shard")

# Every set of axes over which each model needs a group, in the order in which all ranks make them.
_GROUPS: tuple[tuple[str, ...], ...] = (
    (),
    ("dp_shard",),
    ("dp_replicate",),
    DATA_AXES,
    ("tp",),
    (*DATA_AXES, "tp"),
    ("pp",),
    (*DATA_AXES, "pp"),
    (*DATA_AXES, "pp", "tp"),
    ("pp", "tp"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What `init` set up."""

    strategy: DistributedStrategy
    resolved: ResolvedStrategy
    mesh: Mesh
    started_group: bool


_scope: Scope | None = None
_runtimes: list[weakref.ref[Runtime]] = []
# What goes on beside the training, and must end before its groups do.
_before_shutdown: list[Callable[[], None]] = []


def init(strategy: DistributedStrategy | None = None, *, is_collective: bool = True) -> None:
    """Join the job: check the strategy, start torch.distributed if nobody has, build the mesh.

    `distributed_model(model, strategy=strategy)` does this by itself; calling `init` first is Fleet's way, and
    makes `seed` cover the building of the model.

    Args:
        strategy: None takes the file of `hybrid run --strategy`, else the defaults (plain data parallel).
        is_collective: must be True; parameter servers are not part of hybrid.

    Raises:
        StrategyError: wrong settings, or a strategy that differs from the one in force.
        LaunchError: launch variables or a rendezvous that went wrong.
    """
    if not is_collective:
        raise StrategyError("is_collective=False asks for parameter servers, which hybrid does not have; use True")
    ensure(strategy, at_init=True)


def foresee(strategy: DistributedStrategy | None) -> ResolvedStrategy:
    """The strategy worked out for this job, before anything is started: what a model can be checked against."""
    if _scope is not None:
        return _scope.resolved
    world_size = running_world_size()
    return _choose(strategy).resolve(read_environment().world_size if world_size is None else world_size)


def ensure(strategy: DistributedStrategy | None, *, at_init: bool = False) -> Scope:
    """The job, joined now if it was not yet."""
    if _scope is not None:
        if strategy is not None:
            check_same_strategy(strategy)
        return _scope
    chosen = _choose(strategy).copy()
    world_size = running_world_size()
    environment = None
    if world_size is None:
        environment = read_environment()
        world_size = environment.world_size
    resolved = chosen.resolve(world_size)
    _warn_of_slow_links(resolved, environment)
    if at_init and resolved.seed is not None:
        seed_everything(resolved.seed)
    start_process_group(environment, timeout_seconds=resolved.timeout_seconds, agreement=chosen.digest())
    mesh = Mesh(resolved.layout, timeout_seconds=resolved.timeout_seconds)
    mesh.prepare(_GROUPS)
    return _enter(Scope(strategy=chosen, resolved=resolved, mesh=mesh, started_group=environment is not None))


def _enter(scope: Scope) -> Scope:
    global _scope  # noqa: PLW0603 (one process is in one job)
    _scope = scope
    set_coordinate_provider(_data_coordinate)
    set_group_provider(lambda: scope.mesh.group("tp"))
    return scope


@contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """Inside, this process is in a job that somebody else has put together; it is left on the way out.

    Raises:
        HybridError: it is in a job already.
    """
    if _scope is not None:
        raise HybridError("this process is in a job already: call hybrid.shutdown() first, or use another process")
    scope.mesh.prepare(_GROUPS)
    _enter(scope)
    try:
        yield
    finally:
        shutdown()


def _warn_of_slow_links(resolved: ResolvedStrategy, environment: LaunchEnvironment | None) -> None:
    tp = resolved.layout.degree("tp")
    if environment is not None:
        local = environment.local_world_size if environment.launched else tp
    else:  # somebody else started the process group
        said = os.environ.get("LOCAL_WORLD_SIZE", "")
        local = int(said) if said.isdecimal() and int(said) > 0 else tp
    if tp > local:
        warnings.warn(
            f"tensor-parallel degree {tp} is more than the {local} ranks of this node: every layer then waits for the "
            f"network between nodes; use at most {local}, and sharding over the nodes",
            stacklevel=4,
        )


def check_same_strategy(strategy: DistributedStrategy) -> None:
    """Raises StrategyError if a job runs with another strategy."""
    _check_type(strategy)
    if _scope is None or strategy == _scope.strategy:
        return
    resolved = strategy.resolve(_scope.mesh.world_size)
    if replace(resolved, notes=()) != replace(_scope.resolved, notes=()):  # a default written out is no difference
        raise StrategyError(
            "this process already runs with another strategy (the first given to hybrid.init or distributed_model):\n"
            f"  in force: {_scope.strategy!r}\n  given:    {strategy!r}\n"
            "give the same one, or call hybrid.shutdown() before starting with another"
        )


def _check_type(strategy: Any) -> None:
    """Raises StrategyError: a dict or the path of a file, as other tools take them."""
    if strategy is None or isinstance(strategy, DistributedStrategy):
        return
    instead = ""
    if isinstance(strategy, Mapping):
        instead = ": hybrid.DistributedStrategy.from_dict(...) makes one of a dict"
    elif isinstance(strategy, str | os.PathLike):
        instead = f": hybrid.DistributedStrategy.load({os.fspath(strategy)!r}) reads one"
    raise StrategyError(f"strategy must be a hybrid.DistributedStrategy, got {type(strategy).__name__}{instead}")


def _choose(strategy: DistributedStrategy | None) -> DistributedStrategy:
    _check_type(strategy)
    path = os.environ.get(STRATEGY_VARIABLE)
    if not path:
        return strategy if strategy is not None else DistributedStrategy()
    from_file = DistributedStrategy.load(path)
    if strategy is not None and strategy != from_file:
        raise StrategyError(
            f"the script's strategy and the file {path} ({STRATEGY_VARIABLE}, set by hybrid run --strategy) differ:\n"
            f"  script: {strategy!r}\n  file:   {from_file!r}\nremove one of them"
        )
    return from_file


def remember(runtime: Runtime) -> None:
    _runtimes.append(weakref.ref(runtime))


def runtimes() -> list[Runtime]:
    """The runtimes of all wrapped models that are still alive."""
    alive = [(ref, ref()) for ref in _runtimes]
    _runtimes[:] = [ref for ref, runtime in alive if runtime is not None]
    return [runtime for _, runtime in alive if runtime is not None]


def seed_for_training(resolved: ResolvedStrategy, mesh: Mesh) -> None:
    """After the model is wrapped: other random numbers on each data-parallel rank, if the strategy has a seed."""
    if resolved.seed is not None:
        seed_for_data_rank(resolved.seed, data_rank=mesh.group(*DATA_AXES).rank, stage=mesh.coordinate("pp"))


def is_initialized() -> bool:
    """Whether `init` or `distributed_model` has joined a job in this process."""
    return _scope is not None


def get_mesh() -> Mesh:
    """The mesh of the job: `.degree(axis)`, `.coordinate(axis)`, `.group_ranks(*axes)`, `.rank`, `.world_size`.

    Raises:
        HybridError: no job yet.
    """
    if _scope is None:
        raise HybridError("no mesh yet: call hybrid.init(strategy=...) or hybrid.distributed_model(...) first")
    return _scope.mesh


def before_shutdown(finish: Callable[[], None]) -> None:
    """Let `finish` be called by every `shutdown`, while the process groups are still there."""
    _before_shutdown.append(finish)


def shutdown() -> None:
    """Leave the job; the process group is stopped if hybrid started it, and then wrapped models are done.

    In a group that somebody else started, models wrapped before go on as they were.
    """
    global _scope  # noqa: PLW0603
    if _scope is None:
        return
    try:
        for finish in _before_shutdown:
            finish()
    finally:
        for runtime in runtimes():
            runtime.engine.gather.finish()
        if _scope.started_group:
            stop_process_group()
        _scope = None
        _runtimes.clear()
        set_coordinate_provider(None)
        set_group_provider(None)


def _data_coordinate() -> DataCoordinate | None:
    if _scope is None:
        return None
    group = _scope.mesh.group(*DATA_AXES)
    return DataCoordinate(num_replicas=group.size, rank=group.rank)


class HybridCommunicateGroup:
    """Fleet's names for the mesh: `get_data_parallel_world_size()`, `get_model_parallel_rank()` and so on."""

    _AXES: ClassVar[dict[str, str]] = {
        "data_parallel": "dp_replicate",
        "sharding_parallel": "dp_shard",
        "model_parallel": "tp",
        "pipe_parallel": "pp",
        "sep_parallel": "cp",
        "context_parallel": "cp",
    }

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def __getattr__(self, name: str) -> Any:
        for fleet_name, axis in self._AXES.items():
            if name == f"get_{fleet_name}_world_size":
                return lambda axis=axis: self._mesh.degree(axis)
            if name == f"get_{fleet_name}_rank":
                return lambda axis=axis: self._mesh.coordinate(axis)
            if name == f"get_{fleet_name}_group":
                return lambda axis=axis: self._mesh.group_ranks(axis)
            if name == f"get_{fleet_name}_group_src_rank":
                return lambda axis=axis: self._mesh.group_ranks(axis)[0]
        raise AttributeError(
            f"{name!r} is none of Fleet's getters that hybrid has: get_<axis>_world_size, _rank, _group, "
            f"_group_src_rank for <axis> in {sorted(self._AXES)}, get_global_rank, get_stage_id, topology"
        )

    def get_global_rank(self) -> int:
        return self._mesh.rank

    def get_stage_id(self) -> int:
        return self._mesh.coordinate("pp")

    def topology(self) -> Any:
        """The layout: rank <-> coordinate."""
        return self._mesh.layout


def get_hybrid_communicate_group() -> HybridCommunicateGroup:
    """Fleet's view of the mesh. Groups are tuples of ranks.

    Raises:
        HybridError: no job yet.
    """
    return HybridCommunicateGroup(get_mesh())
