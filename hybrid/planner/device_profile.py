"""How products and attention run on a kind of device: the constants of `data/matmul.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from hybrid.contracts.cluster import DeviceKind
from hybrid.planner.data_file import read_data_file

__all__ = ["DeviceProfile", "peak_flops", "profile_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """The fields are explained at the top of `data/matmul.yaml`."""

    prefix: str
    num_processors: int
    tiles: tuple[tuple[float, float, float], ...]
    best: float
    short: float
    long: float
    sharpness: float
    inner_half: float
    weight: float
    kernel_seconds: float
    group_seconds: float
    memory: float
    attention: tuple[float, float, float, float]
    attention_widths: tuple[tuple[float, float], ...]
    source: str
    date: str
    attention_ampere: float = 1.0
    long_fp8: float = 0.0


@cache
def profile_of(name: str) -> DeviceProfile:
    """Of the device of this name; a device that no entry names has the last one, which fits all."""
    return next(profile for profile in _profiles() if name.upper().startswith(profile.prefix.upper()))


def peak_flops(device: DeviceKind, dtype: str) -> float:
    """Dense peak; of the next wider kind of product where the device has none of this kind."""
    for kind in dict.fromkeys((dtype, *{"fp8": ("bf16", "fp16"), "bf16": ("fp16",)}.get(dtype, ()), "fp16", "fp32")):
        if device.flops.get(kind):
            return device.flops[kind]
    return max(device.flops.values())


@cache
def _profiles() -> tuple[DeviceProfile, ...]:
    entries = read_data_file("matmul.yaml")
    return tuple(_profile(entry) for entry in entries)


def _profile(entry: dict[str, Any]) -> DeviceProfile:
    pairs = {name: tuple(tuple(item) for item in entry[name]) for name in ("tiles", "attention_widths")}
    values = {**entry, **pairs, "attention": tuple(entry["attention"]), "date": str(entry["date"])}
    return DeviceProfile(**values)
