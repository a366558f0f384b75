"""Matrix products in fp32 on the CPU, by the faster of the two libraries that torch has for them.

torch computes them by MKL, which keeps to AVX2 on processors of other makers. oneDNN, which torch takes for other
types, has kernels of AVX-512 for these processors too. One core of a Zen 5, [1024, 768] @ [768, 1152]: 108 GFLOP/s by
MKL and 244 by oneDNN, and about twice as fast for all products of a training step from 8 MFLOP on, transposed or not.
Where nobody has measured, torch's way stays. Sums are taken in another order, as between any two libraries: the same
on every rank, so all ranks of a job take the same library.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path
from typing import Final

import torch
from torch.utils.flop_counter import register_flop_formula

from hybrid import shims
from hybrid.errors import LaunchError

__all__ = [
    "VARIABLE",
    "add_product",
    "count_as_plain",
    "fast_product",
    "is_plain",
    "is_wanted",
    "matrix_product",
    "take",
]

VARIABLE: Final = "HYBRID_ONEDNN"  # "0": products as torch computes them; "1": by oneDNN wherever torch has it
_WORDS: Final = dict.fromkeys(("1", "on", "true", "yes"), True) | dict.fromkeys(("0", "off", "false", "no"), False)

# Below this many multiplications the call itself costs what the product saves.
_LEAST_MULTIPLICATIONS = 2**22
# A sum of products takes a product in memory of its own, of so many bytes at most (if that is this many rows).
_PIECE_BYTES = 4 << 20
_LEAST_PIECE_ROWS = 256

_EXACT = ("none", "ieee")  # else products may be rounded to fewer bits, each library in its own way
# Besides: classes that compute as these do where a layer runs (see `count_as_plain`).
_PLAIN: set[type] = {torch.Tensor, torch.nn.Parameter}


def count_as_plain(cls: type[torch.Tensor]) -> None:
    """Products of tensors of this class are those of ordinary ones."""
    _PLAIN.add(cls)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its class is an ordinary one, or counts as such."""
    return type(tensor) in _PLAIN


class _State:
    is_chosen = False
    least_multiplications = _LEAST_MULTIPLICATIONS


def is_wanted() -> bool:
    """Whether this process would take oneDNN: what the environment says, else where it is known to be faster.

    Raises:
        LaunchError: a word that says nothing.
    """
    word = os.environ.get(VARIABLE, "").strip().lower()
    if word and word not in _WORDS:
        raise LaunchError(
            f"{VARIABLE}={os.environ[VARIABLE]!r}: expected 1 (wherever torch has it), 0 (never), or nothing (where it "
            "is known to be faster)"
        )
    return torch.backends.mkldnn.is_available() and (_WORDS[word] if word else _is_faster_here())


def take(chosen: bool) -> None:
    """From now on products go to oneDNN, or do not; to be decided alike on all ranks."""
    _State.is_chosen = chosen


def fast_product(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """left [..., k] @ right [k, n], and a bias [n], in fresh memory and without a graph; None: not by oneDNN.

    Of more than two dims it is a view.
    """
    if not _takes(left, right) or not (bias is None or _is_bias(bias, right.shape[1])):
        return None
    # A bias is read as if its elements lay side by side.
    result: torch.Tensor = shims.ONEDNN_PRODUCT(
        left, right.t(), None if bias is None else bias.contiguous(), "none", (), ""
    )
    return result


def matrix_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left [m, k] @ right [k, n], differentiable where that is asked for."""
    result = fast_product(left, right)
    return result if result is not None else left @ right


def add_product(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, is_first: bool) -> None:
    """Add left [m, k] @ right [k, n] to `target` [m, n]; with `is_first`, write it there."""
    if not _takes(left, right):
        if is_first:
            torch.mm(left, right, out=target)
        else:
            torch.addmm(target, left, right, out=target)
        return
    step = max(_PIECE_BYTES // (right.shape[1] * right.element_size()), _LEAST_PIECE_ROWS)
    for begin in range(0, left.shape[0], step):
        piece = shims.ONEDNN_PRODUCT(left[begin : begin + step], right.t(), None, "none", (), "")
        part = target[begin : begin + step]
        if is_first:
            part.copy_(piece)
        else:
            part.add_(piece)


def _is_bias(bias: torch.Tensor, size: int) -> bool:
    return bias.dtype is torch.float32 and type(bias) in _PLAIN and bias.shape == (size,)


def _takes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        _State.is_chosen
        and left.numel() * right.shape[-1] >= _State.least_multiplications
        and left.dtype is torch.float32
        and right.dtype is torch.float32
        and type(left) in _PLAIN
        and type(right) in _PLAIN
        and left.is_cpu
        and left.layout is right.layout is torch.strided
        and not (left.is_nested or right.is_nested)
        and not torch.is_grad_enabled()
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.mkldnn.matmul.fp32_precision in _EXACT  # type: ignore[attr-defined]
        and not torch.compiler.is_compiling()
        and not shims.in_function_transform()
        and not shims.in_forward_mode()
    )


@functools.cache
def _is_faster_here() -> bool:
    """Known of AMD's family 26 (Zen 5), whose vectors of 512 bits are computed in one go."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or platform.system() != "Linux":
        return False
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0].splitlines()
    except OSError:
        return False
    pairs = (line.partition(":") for line in lines)
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    family = facts.get("cpu family", "")
    return facts.get("vendor_id") == "AuthenticAMD" and family.isdigit() and int(family) >= _ZEN_5


_ZEN_5 = 26


@register_flop_formula(shims.ONEDNN_PRODUCT.overloadpacket)
def _flops(left: torch.Size, weight: torch.Size, *_: object, out_shape: object = None, **__: object) -> int:
    """Those of a matrix product, for whoever counts with torch.utils.flop_counter."""
    return 2 * left.numel() * weight[0]
