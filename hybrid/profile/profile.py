"""What was measured of some steps, on every rank; as data, for a table, for advice and for comparing runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["PARTS", "Advice", "Profile", "RankProfile", "Traffic"]

# The parts of a step that lie one after the other; `exposed` is what communication adds to them.
PARTS = ("forward", "backward", "optimizer", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One operation on one axis, mean of a step where nothing else is said."""

    axis: str
    op: str
    exposed_by_step: tuple[float, ...]
    """Seconds of each step in which the rank launches it or is blocked in it, and computes nothing."""
    calls: float = 0.0
    sent_bytes: float = 0.0

    @property
    def exposed_seconds(self) -> float:
        return sum(self.exposed_by_step) / len(self.exposed_by_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """Means over the traced steps of one rank, in seconds. Parts and exposed communication add up to the step."""

    rank: int
    step_seconds: float
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    other_seconds: float
    between_seconds: float
    """From the end of a step to the begin of the next one: data, evaluation, whatever the script does."""
    traffic: tuple[Traffic, ...]
    communication_seconds: Mapping[str, float]
    """axis -> time in which anything was under way on it, hidden behind computation or not."""
    flops: float | None
    trace_file: str

    @property
    def compute_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def exposed_seconds(self) -> float:
        return sum(one.exposed_seconds for one in self.traffic)

    def exposed(self, axis: str) -> float:
        """Exposed communication of one axis."""
        return sum(one.exposed_seconds for one in self.traffic if one.axis == axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A sentence on where time goes, and the settings to change."""

    axis: str
    """Empty: no axis is to blame."""
    fraction: float
    """Of the step that is spent so."""
    text: str
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Some steps on all ranks."""

    world_size: int
    num_steps: int
    degrees: Mapping[str, int]
    settings: Mapping[str, Any]
    """What the advice looks at: zero_stage, bucket_bytes, num_buckets, accumulate_steps and others."""
    device: str
    dtype: str
    versions: Mapping[str, str]
    ranks: tuple[RankProfile, ...]
    untraced_step_seconds: float | None
    """Of the steps just before, without torch's profiler: slowest rank; None where there were none."""
    tokens: float
    peak_flops_per_device: float | None
    peak_source: str
    """Which peak that is, or why there is none."""
    advice: tuple[Advice, ...] = ()

    @property
    def step_seconds(self) -> float:
        """Of the slowest rank: nobody begins the next step before."""
        return max(rank.step_seconds for rank in self.ranks)

    @property
    def is_on_device(self) -> bool:
        """Whether the host only launches the work, so that its times are not those of the work."""
        return self.device != "cpu"

    @property
    def axes(self) -> tuple[str, ...]:
        """All on which anything was sent, those that cost most first."""
        sums: dict[str, float] = {}
        for rank in self.ranks:
            for one in rank.traffic:
                sums[one.axis] = sums.get(one.axis, 0.0) + one.exposed_seconds
        return tuple(sorted(sums, key=lambda axis: -sums[axis]))

    @property
    def tokens_per_second(self) -> float:
        """Of the whole world, at the untraced pace where that is known."""
        return self.tokens / (self.untraced_step_seconds or self.step_seconds)

    @property
    def flops_per_step(self) -> float | None:
        """Of all ranks: products, convolutions and attention, forwards of recompute included."""
        counts = [rank.flops for rank in self.ranks if rank.flops is not None]
        return sum(counts) if len(counts) == len(self.ranks) else None

    @property
    def flops_per_second(self) -> float | None:
        flops = self.flops_per_step
        return None if flops is None else flops / (self.untraced_step_seconds or self.step_seconds)

    @property
    def mfu(self) -> float | None:
        """Fraction of the devices' peak; None where no peak is known."""
        if self.flops_per_second is None or self.peak_flops_per_device is None:
            return None
        return self.flops_per_second / (self.peak_flops_per_device * self.world_size)

    def mean(self, part: str) -> float:
        """Mean over the ranks of `<part>_seconds`."""
        values: list[float] = [getattr(rank, f"{part}_seconds") for rank in self.ranks]
        return sum(values) / len(values)

    def to_dict(self) -> dict[str, Any]:
        """Everything, what is derived as well; `from_dict` reads it back."""
        derived = {
            name: getattr(self, name)
            for name in ("step_seconds", "tokens_per_second", "flops_per_step", "flops_per_second", "mfu")
        }
        exposed = {"exposed_fraction": self.mean("exposed") / self.mean("step")}
        return {**asdict(self), **derived, **exposed}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Profile:
        own = {name: facts[name] for name in cls.__dataclass_fields__}
        own["ranks"] = tuple(_rank(rank) for rank in own["ranks"])
        own["advice"] = tuple(Advice(**{**one, "settings": tuple(one["settings"])}) for one in own["advice"])
        return cls(**own)


def _rank(facts: Mapping[str, Any]) -> RankProfile:
    traffic = (Traffic(**{**one, "exposed_by_step": tuple(one["exposed_by_step"])}) for one in facts["traffic"])
    return RankProfile(**{**facts, "traffic": tuple(traffic)})
