"""What the feed-forward layer of a block does and keeps."""

from __future__ import annotations

from hybrid.planner.architecture import Architecture
from hybrid.planner.parameter_names import FAMILIES
from hybrid.planner.unit_ledger import Ledger, Region

__all__ = ["add_feed_forward", "add_gate"]


def add_feed_forward(ledger: Ledger, arch: Architecture, name: str, ffn: int) -> None:
    """Up, activation, down; the input is saved by the caller."""
    if arch.is_gated:
        if "gate_up" in FAMILIES[arch.family].block:
            ledger.multiply(f"{name}.gate_up", arch.hidden, 2 * ffn, cut="column")
        else:
            ledger.multiply(f"{name}.gate", arch.hidden, ffn, cut="column")
            ledger.multiply(f"{name}.up", arch.hidden, ffn, cut="column")
        add_gate(ledger, arch, ffn, "cut")
    else:
        ledger.multiply(f"{name}.up", arch.hidden, ffn, cut="column")
        _add_activation(ledger, arch, ffn)
    ledger.save(ffn, "cut")
    ledger.multiply(f"{name}.down", ffn, arch.hidden, cut="row")


def add_gate(ledger: Ledger, arch: Architecture, elements: float, region: Region) -> None:
    """activation(gate) · up: both are saved; eager, the first factor too."""
    size = arch.activation_bytes
    ledger.save(2 * elements, region)
    if arch.is_eager:
        ledger.save(elements, region)
        ledger.move(*(size,) * 5, elements=elements, region=region, kernels=2)
    else:
        ledger.move(*(size,) * 3, elements=elements, region=region)


def _add_activation(ledger: Ledger, arch: Architecture, elements: int) -> None:
    size = arch.activation_bytes
    match arch.activation:
        case "relu":  # its output, which the next layer saves, tells where it was positive
            ledger.move(size, size, elements=elements, region="cut")
        case "gelu_new" if arch.is_eager:
            # 0.5·x · (1 + tanh(c·(x + 0.044715·x³))): x, both factors and the tanh are saved.
            ledger.save(4 * elements, "cut")
            ledger.move(*(size,) * 17, elements=elements, region="cut", kernels=8)
        case _:
            ledger.save(elements, "cut")
            ledger.move(size, size, elements=elements, region="cut")
