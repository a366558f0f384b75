"""What a device could compute at best, for the MFU."""

from __future__ import annotations

import re

from hybrid.contracts.device_kind import DeviceKind, device_kinds

__all__ = ["peak_flops"]

# Products of one chip that differ in their peak are told apart by these words; without one it is the plain module.
_VARIANTS = ("PCIE", "NVL")


def peak_flops(device: str, dtype: str) -> tuple[float | None, str]:
    """Dense peak per second of the product that torch calls `device`, and its kind; None, and why, if it is not known.

    Args:
        device: as `torch.cuda.get_device_name` says it ("NVIDIA H200", "NVIDIA A100 80GB PCIe"), or "cpu".
        dtype: of the products: "float32", "bfloat16", "float16".
    """
    if device == "cpu":
        return None, "no peak is known for CPUs"
    words = set(re.split(r"[\s_-]+", device.upper()))
    variant = {word for word in _VARIANTS if word in words}
    found = [kind for kind in device_kinds() if _chip(kind) in words and _variant(kind) == variant]
    if not found:
        return None, f"no peak is known for {device!r}; `hybrid cluster list` shows the kinds that are"
    key = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "fp32")
    peaks = {kind.flops[key]: kind.name for kind in found if key in kind.flops}
    if len(peaks) != 1:
        return None, f"no peak in {dtype} is known for {device!r}"
    return next(iter(peaks.items()))


def _chip(kind: DeviceKind) -> str:
    """The word that every name of the chip has: H200, A100, MI300X, 4090."""
    return kind.name.split("-", 1)[0].upper().removeprefix("RTX")


def _variant(kind: DeviceKind) -> set[str]:
    return {word for word in kind.name.upper().split("-") if word in _VARIANTS}
