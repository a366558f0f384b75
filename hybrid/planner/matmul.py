"""Time of a matrix product on one device, by its shape.

    rate = peak · lesser of (short · tiles · k / (k + inner_half),  long)        · weight, for a weight gradient
    time = greater of (flops / rate, bytes / memory bandwidth, groups · group_seconds) + kernel_seconds

`tiles` is the work that is wanted over the work that is done: an output is cut into tiles, of the kind that wastes
least, and tiles run in waves over the processors of the device, the last of which may be nearly empty. A long product
runs into the power limit (`long`), which clocks down all processors: there an idle one costs nothing.

On a device that `hybrid calibrate` has measured, these times are corrected to what it found (`measured.py`).

The constants and where they come from: `data/matmul.yaml`, `data/rules.yaml`. How well they describe the shapes they
were fitted on: tests/pure/test_planner_matmul.py.
"""

from __future__ import annotations

import math
from typing import Any

from hybrid.contracts.cluster import DeviceKind
from hybrid.contracts.measurements import AttentionPoint, MatmulPoint
from hybrid.planner.device_profile import DeviceProfile, peak_flops, profile_of
from hybrid.planner.measured import attention_factor, matmul_factor
from hybrid.planner.rules import rule

__all__ = ["attention_seconds", "matmul_seconds"]

_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "fp32": 4}
# What these are, and where they come from: `data/rules.yaml`.
_BACKWARD_FLOPS: float = rule("attention_backward_products")
_QUERY_TILE: int = rule("attention_query_tile")
_SPLIT_INNER: int = rule("split_inner")
_SPLIT_RATE: float = rule("split_rate")
_ALIGNED: list[list[float]] = rule("aligned")


def matmul_seconds(
    device: DeviceKind,
    *,
    m: float,
    k: float,
    n: float,
    dtype: str = "bf16",
    groups: int = 1,
    is_weight: bool = False,
    is_batch: bool = False,
) -> float:
    """`groups` products `[m, k] · [k, n]` in one launch.

    Args:
        device: what computes.
        m, k, n: of one product.
        dtype: of its factors.
        groups: products.
        is_weight: a weight gradient, added to an fp32 buffer.
        is_batch: the groups lie at equal distances, as heads do: nothing is looked up per group.
    """
    if min(m, k, n) <= 0:
        return 0.0
    time = _by_formula(device, m=m, k=k, n=n, dtype=dtype, groups=groups, is_weight=is_weight, is_batch=is_batch)
    if device.measured is None:
        return time
    return time * matmul_factor(device, _of_point, m=m, k=k, n=n, dtype=dtype, is_weight=is_weight)


def _of_point(device: DeviceKind, point: MatmulPoint) -> float:
    return _by_formula(
        device, m=point.m, k=point.k, n=point.n, dtype=point.dtype, groups=1, is_weight=point.is_weight, is_batch=False
    )


def _by_formula(
    device: DeviceKind, *, m: float, k: float, n: float, dtype: str, groups: int, is_weight: bool, is_batch: bool
) -> float:
    profile = profile_of(device.like)
    best = device.matmul_fraction or profile.best
    short = profile.short * _tile_fraction(profile, m, k, n, groups) * k / (k + profile.inner_half)
    power = profile.sharpness
    long = profile.long_fp8 if dtype == "fp8" and profile.long_fp8 else profile.long
    fraction = best * math.pow(short**-power + long**-power, -1 / power)
    if is_weight:
        fraction *= profile.weight
    fraction *= min(_alignment(n), _alignment(m if is_weight else k))
    flops = 2.0 * m * k * n * groups
    size = _BYTES[dtype]
    traffic = (size * (m * k + k * n) + (8 if is_weight else size) * m * n) * groups
    return profile.kernel_seconds + max(
        flops / (peak_flops(device, dtype) * fraction),
        traffic / (profile.memory * device.memory_bytes_per_second),
        groups * profile.group_seconds if groups > 1 and not is_batch else 0.0,
    )


def _alignment(size: float) -> float:
    return next((rate for multiple, rate in _ALIGNED if size % multiple == 0), 1.0)


def _tile_fraction(profile: DeviceProfile, m: float, k: float, n: float, groups: int) -> float:
    """Work wanted over work done, for the tiles that waste least."""
    found = 0.0
    processors = profile.num_processors
    for rows, columns, rate in profile.tiles:
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * groups
        filled = m * n * groups / (tiles * rows * columns)
        waves = tiles / processors
        found = max(found, rate * filled * waves / math.ceil(waves))
        splits = min(processors // tiles, int(k // _SPLIT_INNER))
        if splits > 1:
            found = max(found, _SPLIT_RATE * rate * filled * tiles * splits / processors)
    return found


def attention_seconds(
    device: DeviceKind,
    *,
    batch: float,
    heads: int,
    queries: float,
    keys: float,
    head_dim: int,
    value_dim: int,
    is_half: bool = True,
    dtype: str = "bf16",
    is_backward: bool = False,
) -> float:
    """A fused kernel, which stores no scores; `is_half`: it skips the part that a causal mask hides."""
    shape: dict[str, Any] = {"batch": batch, "heads": heads, "queries": queries, "keys": keys, "head_dim": head_dim}
    time = _attention_by_formula(
        device, **shape, value_dim=value_dim, is_half=is_half, dtype=dtype, is_backward=is_backward
    )
    if device.measured is None:
        return time
    return time * attention_factor(
        device, _of_attention_point, rows=batch * heads, seq=keys, head_dim=head_dim, is_backward=is_backward
    )


def _of_attention_point(device: DeviceKind, point: AttentionPoint) -> float:
    return _attention_by_formula(
        device,
        batch=point.batch,
        heads=point.heads,
        queries=point.seq,
        keys=point.seq,
        head_dim=point.head_dim,
        value_dim=point.head_dim,
        is_half=True,
        dtype=point.dtype,
        is_backward=point.is_backward,
    )


def _attention_by_formula(
    device: DeviceKind,
    *,
    batch: float,
    heads: int,
    queries: float,
    keys: float,
    head_dim: int,
    value_dim: int,
    is_half: bool,
    dtype: str,
    is_backward: bool,
) -> float:
    profile = profile_of(device.like)
    tiles = batch * heads * max(1.0, queries / _QUERY_TILE) / profile.num_processors
    rate, half = profile.attention[is_backward], profile.attention[2 + is_backward]
    width = next((rate for widest, rate in profile.attention_widths if head_dim <= widest), None)
    rate *= width or profile.attention_widths[-1][1]
    flops = 2.0 * batch * heads * queries * keys * (head_dim + value_dim)
    flops *= (0.5 if is_half else 1.0) * (_BACKWARD_FLOPS if is_backward else 1.0)
    rate *= tiles / (tiles + half)
    return profile.kernel_seconds + flops / (peak_flops(device, dtype) * rate)
