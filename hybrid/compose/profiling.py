"""Profiles the first steps of a wrapped model, where the strategy or `hybrid profile` asks for it."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybrid import __version__
from hybrid.collectives import ops
from hybrid.launch.profile_request import ProfileRequest
from hybrid.mesh import Mesh
from hybrid.profile.advice import advise
from hybrid.profile.peak import peak_flops
from hybrid.profile.profile import Profile
from hybrid.profile.step_profiler import StepProfiler
from hybrid.profile.timeline import RankTimeline, write_timelines
from hybrid.strategy import ResolvedStrategy

if TYPE_CHECKING:
    from hybrid.compose.runtime import Runtime

__all__ = ["Profiling"]


class Profiling:
    """Of one wrapped model.

    Args:
        request: of `hybrid profile`; None: as the strategy says.
    """

    def __init__(self, strategy: ResolvedStrategy, mesh: Mesh, request: ProfileRequest | None) -> None:
        asked = request or strategy.profile
        assert asked is not None
        self._request = request
        self._directory = Path(asked.directory)
        self._num_steps = asked.warmup + asked.steps
        self._profiler = StepProfiler(
            rank=mesh.rank, steps=asked.steps, warmup=asked.warmup, directory=self._directory, device=mesh.device
        )

        if request is None and mesh.rank == 0:
            atexit.register(self._say_if_unfinished)

    def _say_if_unfinished(self) -> None:
        """A setting that came to nothing must not do so in silence; `hybrid profile` says it itself."""
        if not self._profiler.is_over:
            print(
                f"hybrid: profile = True, but the script ended before {self._num_steps} calls of model.train_batch: "
                "there is no profile. Lower profile_configs' warmup and steps, or train longer",
                file=sys.stderr,
            )

    @classmethod
    def asked_for(cls, strategy: ResolvedStrategy, mesh: Mesh) -> Profiling | None:
        """None where nobody wants to know."""
        request = ProfileRequest.of_environment()
        return cls(strategy, mesh, request) if request is not None or strategy.profile is not None else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one train_batch."""
        if self._profiler.is_over:
            yield
            return
        with self._profiler.step():
            yield

    def after_step(self, runtime: Runtime, *, tokens: torch.Tensor) -> None:
        """Note what the step worked on; after the last one gather, write and show. *Collective.*

        Raises SystemExit, on all ranks, where `hybrid profile` wants no more than that.
        """
        if not self._profiler.has_ended:
            return
        profile, timelines = self._gathered(runtime, tokens=float(tokens.item()))
        if runtime.mesh.rank == 0:
            write_timelines(self._directory, timelines)
            facts = json.dumps(profile.to_dict(), indent=2)
            (self._directory / "profile.json").write_text(facts, encoding="utf-8")
            if self._request is None:
                _show(profile)
        if self._request is not None and not self._request.goes_on:
            raise SystemExit(0)

    def _gathered(self, runtime: Runtime, *, tokens: float) -> tuple[Profile, list[RankTimeline]]:
        mesh, strategy = runtime.mesh, runtime.strategy
        own = (self._profiler.result(), self._profiler.untraced_step_seconds, self._profiler.timeline())
        everybody = ops.all_gather_object(own, group=mesh.world)
        untraced = [seconds for _, seconds, _ in everybody if seconds is not None]
        dtype = _dtype(runtime)
        device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else mesh.device.type
        peak, source = peak_flops(device, dtype)
        profile = Profile(
            world_size=mesh.world_size,
            num_steps=self._profiler.num_steps,
            degrees={axis.name: axis.size for axis in mesh.layout.axes},
            settings=_settings(runtime, strategy),
            device=device,
            dtype=dtype,
            versions={"hybrid": __version__, "torch": torch.__version__},
            ranks=tuple(rank for rank, _, _ in everybody),
            untraced_step_seconds=max(untraced) if untraced else None,
            tokens=tokens,
            peak_flops_per_device=peak,
            peak_source=source,
        )
        return replace(profile, advice=advise(profile)), [timeline for _, _, timeline in everybody]


def _dtype(runtime: Runtime) -> str:
    """In which products are computed."""
    if runtime.strategy.amp is not None:
        return runtime.strategy.amp.dtype
    buckets = runtime.engine.buckets
    return str(buckets[0].key.dtype).removeprefix("torch.") if buckets else "float32"


def _settings(runtime: Runtime, strategy: ResolvedStrategy) -> dict[str, Any]:
    """What the traffic of a step follows from."""
    buckets = runtime.engine.buckets
    return {
        "zero_stage": strategy.zero_stage,
        "shard_size": strategy.shard_size,
        "bucket_bytes": strategy.bucket_bytes,
        "num_buckets": len(buckets),
        "gradient_bytes": sum(bucket.partition.num_elements * bucket.key.grad_dtype.itemsize for bucket in buckets),
        "overlap_comm": strategy.overlap_comm,
        "overlap_param_gather": strategy.overlap_param_gather,
        "grad_reduce": strategy.grad_reduce,
        "reshard_after": strategy.reshard_after,
        "prefetch": strategy.prefetch,
        "accumulate_steps": strategy.accumulate_steps,
        "schedule": None if strategy.pipeline is None else strategy.pipeline.schedule,
        "virtual_stages": 1 if strategy.pipeline is None else strategy.pipeline.virtual_stages,
        "recompute": str(strategy.recompute or "off"),
        "amp": str(strategy.amp or "off"),
        "local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", runtime.mesh.world_size)),
    }


def _show(profile: Profile) -> None:
    from rich.console import Console  # some tenths of a second that an ordinary start does without

    from hybrid.profile.table import profile_as_text

    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print()
    for part in profile_as_text(profile):
        console.print(part)
