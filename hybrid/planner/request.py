"""What the user asks for: a job, what of the layout is already decided, and how careful to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hybrid.contracts.host_kind import HostKind
from hybrid.contracts.schedule import SCHEDULE_NAMES
from hybrid.errors import PlanError
from hybrid.planner.correction import Correction
from hybrid.planner.job import Job
from hybrid.planner.nearest import nearest
from hybrid.units import format_bytes

__all__ = ["FIXABLE", "Request", "read_fixed"]

# Name on the command line and in `hybrid.plan(fixed=...)` -> attribute of `Candidate`.
FIXABLE: Mapping[str, str] = MappingProxyType(
    {
        "tp": "tp",
        "pp": "pp",
        "dp": "dp",
        "dp_replicate": "dp_replicate",
        "shard_size": "dp_shard",
        "cp": "cp",
        "ep": "ep",
        "sequence_parallel": "sequence_parallel",
        "zero_stage": "zero_stage",
        "schedule": "schedule",
        "virtual_stages": "virtual_stages",
        "micro_batch_size": "micro_batch_size",
        "accumulate_steps": "num_micro_batches",
        "recompute": "recompute",
        "grad_reduce": "grad_reduce",
        "reshard_after": "reshard_after",
        "offload": "offload",
    }
)

_ALIASES = {
    "mp": "tp",
    "tensor_parallel": "tp",
    "pipeline": "pp",
    "stages": "pp",
    "dp_shard": "shard_size",
    "sharding_degree": "shard_size",
    "stage": "zero_stage",
    "zero": "zero_stage",
    "micro_batch": "micro_batch_size",
    "mbs": "micro_batch_size",
    "num_micro_batches": "accumulate_steps",
    "sp": "sequence_parallel",
    "v": "virtual_stages",
}
_DEGREES = {"tp", "pp", "dp", "dp_replicate", "shard_size", "cp", "ep"}
_WORDS = {
    "schedule": SCHEDULE_NAMES,
    "recompute": ("none", "core_attention", "selective", "full"),
    "grad_reduce": ("every_micro_batch", "last_micro_batch"),
    "reshard_after": ("unit", "run"),
    "offload": ("none", "optimizer", "parameters"),
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """Args:
    job: model, cluster, batch, precision.
    fixed: field of `Candidate` -> its value: only layouts with these are looked at.
    is_all: also what this version of hybrid cannot run (context and expert parallel, recompute of attention only).
    risk: highest chance of running out of memory that a plan may have.
    memory_bytes: of a device; None for all that it has.
    host_memory_bytes: of one host; None where it is not known, so that offload is planned whatever it needs there.
    host: the usual machine whose memory that is, where nobody said what the hosts have.
    num_plans: how many to rank.
    correction: what measured layouts of this model on this machine have made of the job's constants.
    """

    job: Job
    fixed: Mapping[str, Any] = field(default_factory=dict)
    is_all: bool = False
    risk: float = 0.05
    memory_bytes: float | None = None
    host_memory_bytes: float | None = None
    host: HostKind | None = None
    num_plans: int = 10
    correction: Correction | None = None

    @property
    def limit_bytes(self) -> float:
        """Memory of a device that a plan may fill."""
        return self.job.cluster.device.memory_bytes if self.memory_bytes is None else self.memory_bytes

    @property
    def host_words(self) -> str:
        """What one host has, and who says so."""
        if self.host_memory_bytes is None:
            return "how much memory a host has is not known; --host-memory (host_memory_bytes) says it"
        words = f"{format_bytes(self.host_memory_bytes)}"
        if self.host is not None:
            said = ", ".join(filter(None, (self.host.source, self.host.date, self.host.notes)))
            words += f", assumed, as in a {self.host.name} ({said}); --host-memory (host_memory_bytes) says otherwise"
        return words


def read_fixed(given: Mapping[str, Any] | str, *, option: str = "--fix") -> dict[str, Any]:
    """`{"tp": 4}` or `"tp=4,pp=2"` -> attribute of `Candidate` -> value. A degree of -1 is left to the search.

    Raises:
        PlanError: an unknown name, a value of the wrong kind, a name twice with different values; all at once.
    """
    problems: list[str] = []
    pairs: list[tuple[str, Any]] = []
    if isinstance(given, str):
        for part in filter(None, (part.strip() for part in given.split(","))):
            name, equals, value = part.partition("=")
            if not equals or not value.strip():
                problems.append(f"{option} {part!r}: expected name=value, such as tp=4")
            else:
                pairs.append((name.strip(), value.strip()))
    elif isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        pairs = list(given.items())
    else:
        raise PlanError(f"fixed = {given!r}: expected names and values, such as 'tp=4,pp=2' or {{'tp': 4, 'pp': 2}}")
    fixed: dict[str, Any] = {}
    for name, value in pairs:
        known = name.replace("-", "_").lower()
        known = _ALIASES.get(known, known)
        if known not in FIXABLE:
            problems.append(f"{option} {name}={value}: unknown name{nearest(name, [*FIXABLE, *_ALIASES])}")
            continue
        read, problem = _value(known, value)
        if problem:
            problems.append(f"{option} {name}={value}: {problem}")
        elif read == -1:
            continue
        elif fixed.get(FIXABLE[known], read) != read:
            problems.append(f"{option}: {known} is given twice, as {fixed[FIXABLE[known]]} and {read}")
        else:
            fixed[FIXABLE[known]] = read
    if problems:
        raise PlanError(problems)
    return fixed


def _value(name: str, value: Any) -> tuple[Any, str]:
    if name in _WORDS:
        text = str(value)
        if name == "offload":  # a boolean, as Fleet has it
            text = {"true": "optimizer", "on": "optimizer", "false": "none", "off": "none"}.get(text.lower(), text)
        return (text, "") if text in _WORDS[name] else (None, f"expected one of {', '.join(_WORDS[name])}")
    if name == "sequence_parallel":
        truth = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}.get(str(value).lower())
        return (truth, "") if truth is not None else (None, "expected true or false")
    try:
        number = int(str(value))
    except ValueError:
        return None, "expected a whole number"
    if number == -1 and name in _DEGREES:
        return -1, ""
    least = 0 if name == "zero_stage" else 1
    if number < least or (name == "zero_stage" and number > 3):
        if name == "zero_stage":
            return None, "expected 0, 1, 2 or 3"
        return None, f"expected a whole number of at least 1{', or -1 to leave it open' * (name in _DEGREES)}"
    return number, ""
