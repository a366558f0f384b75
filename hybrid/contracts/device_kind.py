"""Kinds of devices: peak rates, memory, links; `data/devices.csv` holds every figure with its source.

Bandwidths are bytes per second and direction. Peaks are dense, without sparsity, with fp32 accumulation.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Literal

from hybrid.contracts.measurements import Measurements
from hybrid.errors import PlanError

__all__ = ["DeviceKind", "MeasuredDevice", "Topology", "device_kind", "device_kinds", "kind_like", "link_figure"]

Topology = Literal["switch", "mesh", "hybrid_mesh", "bridge", "none"]
"""How devices of one node meet: all on one switch; a link per pair; NVLink cube of 8 V100; bridged pairs; host only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One product, as one rank sees it.

    Args:
        name: of `data/devices.csv`, or of the user's own.
        like: the kind of `data/devices.csv` that it is or resembles: what is known of that one beside its figures (how
            products and collectives run on it) holds for this one, whatever its name.
        flops: dtype (`bf16`, `fp16`, `fp8`, `fp32`) -> dense peak per second; a dtype that it lacks is absent.
        memory_bytes: as a program sees it, before it has a context; see `_BYTES_PER_MEMORY_GIGABYTE`.
        memory_bytes_per_second: of its own memory.
        scale_up: name of its links to peers.
        topology: how the devices of a node meet.
        scale_up_bytes_per_second: to all peers together; without scale-up links what the host link gives.
        peer_bytes_per_second: to one peer.
        scale_up_latency_seconds: of a message to a peer.
        scale_up_domain: devices that these links join; 1 where there are none.
        is_domain_of_rack: the domain spans nodes (NVLink domain of 72).
        host_link: name of the link to the host.
        host_bytes_per_second: of that link.
        has_peer_to_peer: devices reach each other over PCIe without a copy in host memory.
        nic_bytes_per_second: what one device has of its node's network, typically.
        devices_per_nic: that share one network card, typically.
        matmul_fraction: best measured bf16 product as a fraction of `flops["bf16"]`; None where nobody measured.
        source: of the figures; with `date` of the look-up.
        notes: what the figures leave out.
        measured: how products, attention and pointwise work run on it, where `hybrid calibrate` measured that.
    """

    name: str
    like: str
    flops: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_second: float
    scale_up: str = ""
    topology: Topology = "switch"
    scale_up_bytes_per_second: float
    peer_bytes_per_second: float
    scale_up_latency_seconds: float = 0.9e-6
    scale_up_domain: int
    is_domain_of_rack: bool = False
    host_link: str = ""
    host_bytes_per_second: float
    has_peer_to_peer: bool = True
    nic_bytes_per_second: float
    devices_per_nic: int = 1
    matmul_fraction: float | None = None
    source: str = ""
    date: str = ""
    notes: str = ""
    measured: MeasuredDevice | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def __reduce__(self) -> tuple[object, ...]:
        # A mapping proxy does not pickle.
        values = {name: getattr(self, name) for name in self.__slots__}
        return (_restored, ({**values, "flops": dict(self.flops)},))

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.scale_up_bytes_per_second))

    @property
    def is_processor(self) -> bool:
        """Ranks compute on the processors of the host."""
        return self.like == "cpu"

    def peak(self, dtype: str) -> float:
        """Dense peak in flops per second; a PlanError that names the dtypes it has for any other."""
        if dtype not in self.flops:
            raise PlanError(f"{self.name} has no {dtype} rate; it computes in {', '.join(self.flops)}")
        return self.flops[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDevice:
    """`base`: the figures of the device that was measured, to which the points belong whatever becomes of its own."""

    base: DeviceKind
    points: Measurements


def _restored(values: dict[str, object]) -> DeviceKind:
    return DeviceKind(**values)  # type: ignore[arg-type]


def device_kind(name: str) -> DeviceKind:
    """The kind of this name; short names (`H100`, `A100-80GB`, `4090`) and any case do.

    Raises:
        PlanError: no kind has this name (the nearest are listed), or several have.
    """
    known = _spellings()
    wanted = _plain(name)
    if wanted in known:
        return _kinds()[known[wanted]]
    words = {_plain(word) for word in re.split(r"[\s_-]+", name) if _plain(word)}
    fits = [full for full in _kinds() if words and words <= {_plain(word) for word in full.split("-")}]
    if len(fits) == 1:
        return _kinds()[fits[0]]
    if fits:
        raise PlanError(f"device {name!r} may be any of {', '.join(fits)}; name one of them")
    near = difflib.get_close_matches(wanted, known, n=6, cutoff=0.5)
    nearest = list(dict.fromkeys(known[spelling] for spelling in near))[:3] or list(_kinds())
    hint = "the nearest known" if near else "known"
    raise PlanError(
        f"device {name!r} is not known; {hint}: {', '.join(nearest)} (`hybrid cluster list` shows all; "
        f"a YAML file may describe another)"
    )


def device_kinds() -> tuple[DeviceKind, ...]:
    """All of `data/devices.csv`, in its order."""
    return tuple(_kinds().values())


def kind_like(name: str, figures: Mapping[str, object]) -> DeviceKind:
    """A kind of the user's own: `like` names the known one that it resembles, the rest are columns of `devices.csv`.

    Raises:
        PlanError: `like` is missing or unknown, a column does not exist, a figure is no positive number.
    """
    if "like" not in figures:
        raise PlanError("say which known device it is like, for example `like: H100`")
    resembled = device_kind(str(figures["like"]))
    row = dict(_raw()[resembled.name])
    changed = {column: value for column, value in figures.items() if column != "like"}
    problems = []
    for column, value in changed.items():
        if column not in row or column in {"name", "aliases"}:
            near = difflib.get_close_matches(column, row, n=3, cutoff=0.4) or list(row)[2:]
            problems.append(f"no figure {column!r}; there are {', '.join(near)}")
        elif row[column].replace(".", "", 1).isdigit() and not (isinstance(value, int | float) and value > 0):
            problems.append(f"{column}: {value!r} is not a positive number")
    if problems:
        raise PlanError(problems)
    if "bf16_teraflops_per_second" in changed and "measured_bf16_teraflops_per_second" not in changed:
        row["measured_bf16_teraflops_per_second"] = ""  # a measurement on another device
    if "memory_gigabytes" in changed and "usable_gibibytes" not in changed:
        row["usable_gibibytes"] = ""
    own = {**row, **{column: str(value) for column, value in changed.items()}, "name": name}
    return _kind_of(own, like=resembled.name)


@cache
def link_figure(name: str) -> float:
    """A figure of `data/links.csv`, in the unit that stands there."""
    return {row["name"]: float(row["value"]) for row in _rows("links.csv")}[name]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def _spellings() -> dict[str, str]:
    """Every spelling, plain -> name."""
    spellings = {}
    for row in _rows("devices.csv"):
        for spelling in (row["name"], *row["aliases"].split(";")):
            spellings[_plain(spelling)] = row["name"]
    return spellings


@cache
def _raw() -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in _rows("devices.csv")}


@cache
def _kinds() -> dict[str, DeviceKind]:
    return {name: _kind_of(row, like=name) for name, row in _raw().items()}


def _rows(file: str) -> Iterator[dict[str, str]]:
    text = resources.files("hybrid.contracts").joinpath("data", file).read_text(encoding="utf-8")
    return csv.DictReader(text.splitlines())


# Vendors sell memory in binary gigabytes, of which driver and error correction keep some: torch reports 23.64 GiB of a
# card of 24 (github.com/ali-vilab/VGen/issues/104) and 31.51 of one of 32 (github.com/siliconflow/onediff/pull/1041).
# Where it is more, `usable_gibibytes` in `devices.csv` says what is left.
_BYTES_PER_MEMORY_GIGABYTE = 0.985 * 2**30


def _kind_of(row: Mapping[str, str], *, like: str) -> DeviceKind:
    flops = {
        dtype: float(round(float(row[f"{dtype}_teraflops_per_second"]) * 1e12))
        for dtype in ("bf16", "fp16", "fp8", "fp32")
        if row[f"{dtype}_teraflops_per_second"]
    }
    measured = row["measured_bf16_teraflops_per_second"]
    devices_per_nic = int(row["devices_per_nic"])
    return DeviceKind(
        name=row["name"],
        like=like,
        flops=flops,
        memory_bytes=float(row["usable_gibibytes"]) * 2**30
        if row["usable_gibibytes"]
        else float(row["memory_gigabytes"]) * _BYTES_PER_MEMORY_GIGABYTE,
        memory_bytes_per_second=float(row["memory_gigabytes_per_second"]) * 1e9,
        scale_up=row["scale_up"],
        topology=row["scale_up_topology"],  # type: ignore[arg-type]
        scale_up_bytes_per_second=float(row["scale_up_gigabytes_per_second"]) * 1e9,
        peer_bytes_per_second=float(row["peer_gigabytes_per_second"]) * 1e9,
        scale_up_latency_seconds=float(row["scale_up_latency_microseconds"]) * 1e-6,
        scale_up_domain=int(row["scale_up_domain_devices"]),
        is_domain_of_rack=row["domain_scope"] == "rack",
        host_link=row["host_link"],
        host_bytes_per_second=float(row["host_gigabytes_per_second"]) * 1e9,
        has_peer_to_peer=row["peer_to_peer"] == "yes",
        nic_bytes_per_second=float(row["nic_gigabits_per_second"]) / 8 * 1e9 / devices_per_nic,
        devices_per_nic=devices_per_nic,
        matmul_fraction=float(measured) * 1e12 / flops["bf16"] if measured else None,
        source=row["source"],
        date=row["date"],
        notes=row["notes"],
    )
