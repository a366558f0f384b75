"""What the embedding before the blocks and the head after them do and keep."""

from __future__ import annotations

from hybrid.planner.architecture import Architecture
from hybrid.planner.blocks import add_norm
from hybrid.planner.unit_ledger import Ledger

__all__ = ["add_embedding", "add_head"]

_ID = 8  # bytes of a token's number, and of a label
_MASK = 1


def add_embedding(ledger: Ledger, arch: Architecture) -> None:
    """Ids that backward needs, the tables' rows, their sum, a norm, the dropout mask."""
    hidden, size = arch.hidden, arch.activation_bytes
    if arch.patch:
        ledger.multiply("patches", 3 * arch.patch**2, hidden, has_input_gradient=False)
        ledger.save(3 * arch.patch**2)
        ledger.move(size, size, size, elements=hidden, kernels=2)
    else:
        width = arch.embedding_width or hidden
        ledger.save(1, width=_ID)
        ledger.move(size, size, elements=width)
        ledger.num_tp_reductions = int(arch.is_table_cut)
        if width != hidden:
            ledger.save(width)
            ledger.multiply("project_in", width, hidden)
        for is_there in (arch.position_rows, arch.num_segments):
            if is_there:
                ledger.save(1, width=_ID)
                ledger.move(size, size, size, size, size, elements=hidden, kernels=2)
    if arch.embedding_norm:
        add_norm(ledger, arch)
    if arch.embedding_dropout:
        ledger.save(hidden, width=_MASK)
        ledger.move(size, size, _MASK, elements=hidden)


def add_head(ledger: Ledger, arch: Architecture) -> None:
    """The last norm, the product with the vocabulary, logits as the loss keeps them, labels.

    Logits: `Architecture.logit_bytes` each, divided by tp: where they are cut, the loss never builds them whole.
    """
    hidden, size = arch.hidden, arch.activation_bytes
    if arch.head == "none":
        return
    if arch.has_final_norm:
        add_norm(ledger, arch)
    if arch.head == "classes":  # reads the first token only: next to nothing
        return
    if arch.head in {"mlm", "pretraining"}:
        ledger.save(hidden)
        ledger.multiply("transform", hidden, hidden)
        ledger.save(hidden)  # the input of GELU
        ledger.move(size, size, elements=hidden)
        add_norm(ledger, arch)
    width = arch.embedding_width or hidden
    ledger.save_column_input(hidden)
    if width != hidden:
        ledger.multiply("project_out", hidden, width)
        ledger.save_column_input(width)
    ledger.multiply("head", width, arch.vocab, cut="column" if arch.is_head_cut else "none")
    ledger.num_tp_reductions = int(arch.is_head_cut)
    ledger.save(arch.vocab, "cut" if arch.is_head_cut else "whole", width=arch.logit_bytes)
    ledger.save(1, width=_ID)
    ledger.move(size, 4, 4, 4, elements=arch.vocab, region="cut", kernels=3)  # to fp32, log-softmax, the target's
