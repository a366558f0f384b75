"""A parameter on several stages of a pipeline is one: equal on all of its holders, to the bit, whoever changes it.

Updates keep it so. An edit by hand on one holder alone would not, and no later step would bring the copies together
again. So before each batch the holders tell each other whether theirs was written since the last one: one small
all-reduce. What was written on all of them is compared, and so is everything from time to time, for writes that leave
no trace.
"""

from __future__ import annotations

import torch
from xxhash import xxh3_64

from hybrid import shims
from hybrid.collectives import ops
from hybrid.compose.pipeline import Stages
from hybrid.errors import ModelError
from hybrid.mesh import Mesh
from hybrid.sharding.engine import ShardingEngine

__all__ = ["TiedHolders"]


class TiedHolders:
    """The parameters that several stages hold."""

    def __init__(self, engine: ShardingEngine, stages: Stages, mesh: Mesh) -> None:
        self._engine = engine
        self._mesh = mesh
        self._stages_of = {fqn: held for fqn, held in stages.whole.stages_of.items() if len(held) > 1}
        names = sorted(stages.whole.first, key=lambda name: (name not in self._stages_of, stages.staged.chunk_of(name)))
        self._names = {fqn: [name for name in names if stages.whole.first[name] == fqn] for fqn in self._stages_of}
        self._versions: dict[str, int | None] = {}
        self._checks = 0
        self.note()

    def note(self) -> None:
        """What was written so far was written on all holders alike."""
        self._versions = {fqn: self._version(fqn) for fqn in self._stages_of if fqn in self._engine.parameters}

    def check(self) -> None:
        """*Collective* over the world.

        Raises:
            ModelError: an edit on some of the holders, or other edits on each; on all ranks.
        """
        if not self._stages_of:
            return
        num_stages = self._mesh.degree("pp")
        written = torch.zeros(len(self._stages_of), num_stages, dtype=torch.float64, device=self._engine.device)
        for place, fqn in enumerate(self._stages_of):
            if fqn in self._versions and self._version(fqn) != self._versions[fqn]:
                written[place, self._mesh.coordinate("pp")] = 1.0
        ops.all_reduce(written, group=self._mesh.world, control=True).wait()
        ranks = self._mesh.world_size // num_stages
        for fqn, counts in zip(self._stages_of, written.tolist(), strict=True):
            edited = [stage for stage, count in enumerate(counts) if count > 0]
            missing = [stage for stage in self._stages_of[fqn] if counts[stage] < ranks]
            if edited and missing:
                self._refuse(fqn, f"was edited on stage {_and(edited)} and not on all ranks of stage {_and(missing)}")
        self._checks += 1
        is_turn = self._checks & (self._checks - 1) == 0  # the first, second, fourth, eighth ...
        if is_turn or written.any():
            self._compare()
        self.note()

    def _compare(self) -> None:
        mine = {fqn: self._digest(fqn) for fqn in self._versions}
        everyone = ops.all_gather_object(mine, group=self._mesh.group("pp"))
        here = [fqn for fqn, digest in mine.items() if any(other.get(fqn, digest) != digest for other in everyone)]
        found = {fqn for names in ops.all_gather_object(here, group=self._mesh.world) for fqn in names}
        for fqn in self._stages_of:
            if fqn in found:
                self._refuse(fqn, "has different values on them")

    def _refuse(self, fqn: str, what: str) -> None:
        raise ModelError(
            f"{' = '.join(self._names[fqn])} is one parameter, on pipeline stages {_and(self._stages_of[fqn])}, and "
            f"{what}: the copies would stay apart. Edit it on every rank of all of these stages, with the same values "
            "(hybrid.set_full_parameter, or in place inside model.gather_parameters)"
        )

    def _version(self, fqn: str) -> int | None:
        return shims.version_of(self._engine.parameters[fqn])

    def _digest(self, fqn: str) -> str:
        """Of what this rank owns; all holders are cut alike."""
        bucket = self._engine.home_of(fqn)
        if bucket is None:
            values = self._engine.parameters[fqn].detach()
        else:
            part = bucket.slice_of.get(fqn)
            if part is None:
                return ""
            values = bucket.slice_view(bucket.own_data(), part).detach()
        plain = values.cpu().contiguous()
        return xxh3_64(plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"").hexdigest()


def _and(numbers: tuple[int, ...] | list[int]) -> str:
    return " and ".join(map(str, numbers))
