"""Types of elements by their names in torch, and what safetensors files call them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["CODES", "DTYPES"]

# torch's name without the prefix -> (code in the file, bytes per element)
DTYPES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "bool": ("BOOL", 1),
        "uint8": ("U8", 1),
        "int8": ("I8", 1),
        "uint16": ("U16", 2),
        "int16": ("I16", 2),
        "uint32": ("U32", 4),
        "int32": ("I32", 4),
        "uint64": ("U64", 8),
        "int64": ("I64", 8),
        "float8_e4m3fn": ("F8_E4M3", 1),
        "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
        "float8_e5m2": ("F8_E5M2", 1),
        "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
        "float8_e8m0fnu": ("F8_E8M0", 1),
        "float16": ("F16", 2),
        "bfloat16": ("BF16", 2),
        "float32": ("F32", 4),
        "float64": ("F64", 8),
        "complex64": ("C64", 8),
    }
)

CODES: Mapping[str, str] = MappingProxyType({code: name for name, (code, _) in DTYPES.items()})
