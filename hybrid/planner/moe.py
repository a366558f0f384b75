"""What a mixture of experts does and keeps in place of a feed-forward layer.

Tensor parallel does not cut experts: with the sequence cut, each tp rank sends its own tokens to them.
"""

from __future__ import annotations

from typing import Any

from hybrid.planner.architecture import Architecture
from hybrid.planner.feed_forward import add_feed_forward, add_gate
from hybrid.planner.unit_ledger import Ledger

__all__ = ["add_experts"]

_INDEX = 8  # bytes of an expert's number
_WEIGHT = 4  # of its weight, and of a probability


def add_experts(ledger: Ledger, arch: Architecture) -> None:
    """Router, rows to the experts and back, the experts, those that every token passes; the input is saved already.

    Fused: rows are put in the order of the experts, two grouped products, each row's weight applied with the gate.
    Eager: the weight is applied to what the experts give back, which is saved for it.
    """
    mixture, size, hidden = arch.experts, arch.activation_bytes, arch.hidden
    assert mixture is not None
    rows = float(mixture.top_k)
    ledger.multiply("router", hidden, mixture.num)
    ledger.save(mixture.num, width=_WEIGHT)  # probabilities
    ledger.save(mixture.top_k, width=_INDEX + _WEIGHT)
    ledger.move(size, _WEIGHT, _WEIGHT, elements=mixture.num, kernels=4)  # softmax, largest, their sum, division
    ledger.move(size, size, elements=rows * hidden, kernels=4)  # sort the rows, and copy them
    ledger.save(rows * hidden)
    spread: dict[str, Any] = {"cut": "expert", "share": rows, "num_groups": mixture.num}
    ledger.multiply("experts.gate_up", hidden, 2 * mixture.ffn, **spread)
    add_gate(ledger, arch, rows * mixture.ffn, "whole")
    ledger.save(rows * mixture.ffn)
    ledger.multiply("experts.down", mixture.ffn, hidden, **spread)
    if arch.is_eager:
        ledger.save(rows * hidden)
        ledger.move(size, size, elements=rows * hidden)
    ledger.move(size, elements=rows * hidden)  # the rows of a token are summed
    ledger.move(size, elements=hidden, kernels=1)
    ledger.expert_rows = rows
    if mixture.shared_ffn:
        add_feed_forward(ledger, arch, "shared", mixture.shared_ffn)
        ledger.move(size, size, size, elements=hidden)
