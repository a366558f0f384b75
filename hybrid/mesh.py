"""The processes of the job and their groups over the axes of a layout."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hybrid import cpu_products
from hybrid.collectives.group import Group
from hybrid.collectives.ops import all_gather_object
from hybrid.collectives.process_groups import (
    connect,
    end_default_group,
    end_unused_groups,
    forget_ended_groups,
    make_process_group,
)
from hybrid.collectives.rendezvous import open_store
from hybrid.collectives.shared_memory import Neighbour, forget_arena, introduction, is_wanted, neighbours
from hybrid.contracts.layout import Layout, axis_name
from hybrid.errors import LaunchError
from hybrid.launch.check_in import check_in
from hybrid.launch.environment import LaunchEnvironment
from hybrid.launch.variables import planned_places

__all__ = ["Mesh", "running_world_size", "start_process_group", "stop_process_group"]

WORLD = "world"


class Mesh:
    """This process's place in the layout and its process groups. *Collective.*

    Groups are made by `prepare`, by all ranks in one order: making one later, by some ranks only, would hang.
    """

    def __init__(self, layout: Layout, *, timeout_seconds: float) -> None:
        world_size = dist.get_world_size()
        if layout.world_size != world_size:
            product = " * ".join(f"{axis.name} {axis.size}" for axis in layout.axes)
            raise LaunchError(
                f"the layout is for {layout.world_size} processes ({product}), but WORLD_SIZE={world_size}; "
                f"start {layout.world_size} processes or resolve the strategy for {world_size}"
            )
        self.layout = layout
        self.timeout_seconds = timeout_seconds
        self.rank = dist.get_rank()
        self.world_size = world_size
        self.backend = _backend()
        self.device = _device(self.backend, self.rank)
        self._coordinate = layout.coordinate(self.rank)
        self._groups: dict[frozenset[str], Group] = {}
        everyone = tuple(range(world_size))
        self._process_groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {
            everyone: dist.group.WORLD if world_size > 1 else None
        }
        self._neighbours: dict[int, Neighbour] = {}
        self._reached: list[set[int]] = []
        if world_size > 1 and self.backend == "gloo":
            world = self._make_group(everyone, WORLD)
            self._neighbours, self._reached = meet_neighbours(world)
            cpu_products.take(all(all_gather_object(cpu_products.is_wanted(), group=world)))
        else:
            cpu_products.take(world_size == 1 and cpu_products.is_wanted())
        self.world = self._make_group(everyone, WORLD)
        self._host_world: Group | None = None

    def degree(self, axis: str) -> int:
        return self.layout.degree(axis)

    def coordinate(self, axis: str) -> int:
        """This rank's place on the axis; 0 where the layout does not list it."""
        return self._coordinate.get(axis, 0)

    def group_ranks(self, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from this one in these axes only, this one included."""
        return self.layout.group_ranks(self.rank, axes)

    def prepare(self, axis_sets: Iterable[Sequence[str]]) -> None:
        """Make the groups over each set of axes. All ranks call this with the same list.

        Sets whose groups hold the same ranks share a process group; a group of one rank gets none (an
        NCCL communicator costs about half a gigabyte).
        """
        for axes in axis_sets:
            key = frozenset(axes)
            if key in self._groups:
                continue
            made = []
            for ranks in self.layout.groups(axes):
                if len(ranks) > 1 and ranks not in self._process_groups:
                    self._process_groups[ranks] = self._new_process_group(ranks, self.backend)
                    made.append(ranks)
            for ranks in made:
                if self.rank in ranks and self.backend == "nccl":
                    connect(self._process_groups[ranks], self.device)
            order = {name: place for place, name in enumerate(self.layout.axis_names)}
            label = "+".join(sorted(key, key=lambda axis: order.get(axis_name(axis), -1)))
            self._groups[key] = self._make_group(self.group_ranks(*axes), label)

    def another_group(self, *axes: str, label: str, on_host: bool = False, of_model: object | None = None) -> Group:
        """A group over `axes` with a process group of its own (on the host: gloo). All ranks call this alike.

        Args:
            of_model: what it is made for, if that may be gone before the mesh is.
        """
        made: dist.ProcessGroup | None = None
        backend = "gloo" if on_host else self.backend
        for ranks in self.layout.groups(axes):
            if len(ranks) > 1:
                group = self._new_process_group(ranks, backend, of_model=of_model)
                made = group if self.rank in ranks else made
        return self._group_of(made, self.group_ranks(*axes), label, backend)

    def end_unused_groups(self) -> None:
        """Those made for models that are gone on all ranks. All ranks call this alike."""
        if self.world_size > 1:
            end_unused_groups(self.world, of_models=True)

    def _new_process_group(
        self, ranks: tuple[int, ...], backend: str, *, of_model: object | None = None
    ) -> dist.ProcessGroup | None:
        return make_process_group(
            ranks,
            backend=backend,
            timeout_seconds=self.timeout_seconds,
            user=self if of_model is None else of_model,
            of_model=of_model is not None,
        )

    def host_world(self) -> Group:
        """All ranks, on the host and apart from all other traffic: for work beside the training. All call it alike."""
        if self._host_world is None:
            self._host_world = self.another_group(*self.layout.axis_names, label="host world", on_host=True)
        return self._host_world

    def group(self, *axes: str) -> Group:
        """The group of this rank over `axes`, which `prepare` made."""
        made = self._groups.get(frozenset(axes))
        assert made is not None, f"no group over {axes}: Mesh.prepare was not given these axes"
        return made

    def _make_group(self, ranks: tuple[int, ...], axis: str) -> Group:
        process_group = self._process_groups[ranks] if len(ranks) > 1 else None
        return self._group_of(process_group, ranks, axis, self.backend)

    def _group_of(
        self, process_group: dist.ProcessGroup | None, ranks: tuple[int, ...], axis: str, backend: str
    ) -> Group:
        return Group(
            process_group=process_group,
            ranks=ranks,
            rank=ranks.index(self.rank),
            axis=axis,
            backend=backend,
            timeout_seconds=self.timeout_seconds,
            near=self._near(ranks),
            keeps=self,
        )

    def _near(self, ranks: tuple[int, ...]) -> dict[int, Neighbour]:
        """The others' memory by index, if all of these ranks reach each other: they must choose alike."""
        if not self._reached or not all(set(ranks) <= self._reached[rank] for rank in ranks):
            return {}
        return {index: self._neighbours[rank] for index, rank in enumerate(ranks) if rank != self.rank}


def meet_neighbours(world: Group) -> tuple[dict[int, Neighbour], list[set[int]]]:
    """The ranks whose memory this one can read, and for every rank which ones it can, itself included. *Collective.*"""
    introductions = all_gather_object(introduction(), group=world)
    found = neighbours({rank: one for rank, one in enumerate(introductions) if rank != world.rank})
    return found, all_gather_object({world.rank, *found}, group=world)


def _device(backend: str, rank: int) -> torch.device:
    """This rank's: what the caller has bound the default group to, or made the current one; else by LOCAL_RANK."""
    if backend != "nccl":
        return torch.device("cpu")
    seen = torch.cuda.device_count()
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    if bound is not None and bound.index is not None:
        index = bound.index
    elif current != 0 or seen == 1:  # alone, it is what CUDA_VISIBLE_DEVICES leaves to this process
        index = current
    else:
        index = int(os.environ.get("LOCAL_RANK", rank % seen))
    if index >= seen:
        raise LaunchError(
            f"LOCAL_RANK is {index}, and this process sees {seen} accelerators: call torch.cuda.set_device with the "
            "one of this rank before init_process_group, or let each process see all of its machine "
            "(CUDA_VISIBLE_DEVICES)"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def start_process_group(
    environment: LaunchEnvironment | None, *, timeout_seconds: float, agreement: str
) -> LaunchEnvironment | None:
    """Start the default process group: NCCL where CUDA is, else gloo. Returns the environment, completed.

    The processes first compare their ranks, world sizes and `agreement` (the digest of the strategy); any
    contradiction, or a rank that does not come, is a LaunchError on all of them within the timeout. A default
    process group that somebody started already is taken as it is. A process that runs alone is a world of one.
    """
    forget_ended_groups()
    if dist.is_initialized():
        _join_running(agreement, timeout_seconds=timeout_seconds)
        return environment
    is_wanted()
    cpu_products.is_wanted()
    assert environment is not None, "only a group that runs already needs no launch variables"
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    store: dist.Store = dist.HashStore()
    if environment.launched:
        store, keeps_store = open_store(environment, timeout_seconds=timeout_seconds)
        environment = check_in(
            store,
            environment,
            agreement=agreement,
            timeout_seconds=timeout_seconds,
            keeps_store=keeps_store,
            planned=planned_places(),
        )
        # What was worked out is as good as given: for the choice of the device, and for child processes.
        os.environ.setdefault("LOCAL_RANK", str(environment.local_rank))
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(environment.local_world_size))
    if backend == "nccl":
        _check_devices(environment)
        torch.cuda.set_device(environment.local_rank)
    dist.init_process_group(
        backend,
        store=store,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    return environment


def _check_devices(environment: LaunchEnvironment) -> None:
    """Raise LaunchError where ranks of this machine would have to share an accelerator, which NCCL refuses later."""
    seen, ranks = torch.cuda.device_count(), max(environment.local_world_size, environment.local_rank + 1)
    if ranks > seen:
        raise LaunchError(
            f"LOCAL_RANK is {environment.local_rank} of {ranks} ranks on this machine, and this process sees {seen} "
            f"accelerator{'s' if seen != 1 else ''}: each rank takes the one of its LOCAL_RANK; start at most {seen} "
            "here, or let every process see all of its machine (CUDA_VISIBLE_DEVICES; under Slurm --gpus-per-node, and "
            "no binding of one GPU to each task)"
        )


def _join_running(agreement: str, *, timeout_seconds: float) -> None:
    """Where somebody else started the group, without our check-in: compare digests, end what earlier jobs left."""
    everyone = tuple(range(dist.get_world_size()))
    world = Group(
        process_group=dist.group.WORLD if len(everyone) > 1 else None,
        ranks=everyone,
        rank=dist.get_rank(),
        axis=WORLD,
        backend=_backend(),
        timeout_seconds=timeout_seconds,
    )
    digests = all_gather_object(agreement, group=world)
    if len(set(digests)) > 1:
        said = "; ".join(
            f"digest {digest or 'none'} on rank {', '.join(str(r) for r in everyone if digests[r] == digest)}"
            for digest in dict.fromkeys(digests)
        )
        raise LaunchError(f"the strategies differ: {said}; expected the same strategy on all processes")
    end_unused_groups(world)


def _backend() -> str:
    return "nccl" if "nccl" in dist.get_backend() else "gloo"


def running_world_size() -> int | None:
    """Size of the default process group if somebody has started one, else None."""
    return dist.get_world_size() if dist.is_initialized() else None


def stop_process_group() -> None:
    """Leave the default process group and all groups made from it."""
    if dist.is_initialized():
        end_default_group()
        forget_arena()
