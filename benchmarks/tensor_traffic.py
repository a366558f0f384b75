"""What one step of a model under tensor parallelism sends, counted by `hybrid.trace`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import hybrid
from benchmarks.gpt import Size, make_batch

__all__ = ["Traffic", "measure_traffic"]

# The layers outside of the blocks, in one step: (phase, collective) -> how many of the size of an activation.
_OUTSIDE = {
    False: {("forward", "all_reduce"): 1, ("backward", "all_reduce"): 1},  # embedding; input of the head
    True: {
        ("forward", "all_reduce"): 1,  # embedding
        ("forward", "all_gather"): 1,  # end of the blocks
        ("backward", "all_gather"): 1,  # begin of the blocks
        ("backward", "all_reduce"): 1,  # input of the head
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of one step on this rank."""

    per_block: dict[tuple[str, str], float]
    """(forward or backward, collective) -> how many of the size of an activation each block has."""
    sent_bytes: int
    """Of the whole step, without control traffic."""
    loss_bytes: int
    """Sent by the loss."""
    other: dict[tuple[str, str, int], int]
    """(phase, collective, bytes of the buffer) -> how many there are besides."""
    logits_bytes: int
    """Of the logits on this rank."""

    def text(self, size: Size) -> str:
        tokens = size.micro_batch * size.sequence
        whole = tokens * size.vocabulary * 4
        blocks = ", ".join(f"{count:g} {op} {phase}" for (phase, op), count in sorted(self.per_block.items()))
        other = ", ".join(
            f"{count} {op} of {num_bytes:,} bytes {phase}" for (phase, op, num_bytes), count in self.other.items()
        )
        return (
            f"  per block: {blocks}\n"
            f"  besides embedding, head and ends of the blocks: {other or 'nothing'}\n"
            f"  sent: {self.sent_bytes:,} bytes, of them {self.loss_bytes:,} by the loss "
            f"({self.loss_bytes / tokens:g} per token; its logits are {whole / tokens:,g} per token)\n"
            f"  logits: {self.logits_bytes:,} of {whole:,} bytes; saved {whole - self.logits_bytes:,}, "
            "and as many in backward"
        )


def measure_traffic(model: Any, size: Size, *, with_sequence_parallel: bool) -> Traffic:
    """Run forward and backward once; gradients are emptied again. *Collective.*"""
    tokens, labels = make_batch(size, step=0, rank=0, num_ranks=1)
    logits_bytes = 0

    def remember(module: Any, args: Any, output: Any) -> None:
        nonlocal logits_bytes
        logits_bytes = output.local().nbytes

    hook = model.head.register_forward_hook(remember)
    with hybrid.trace() as recording:
        loss = model(tokens, labels)
        recording.mark_step()
        loss.backward()
        recording.mark_step()
    hook.remove()
    model.zero_grad()
    phases = ("forward", "backward", "after")
    activation_bytes = tokens.numel() * size.width * 4
    loss_sizes = {tokens.numel() * 4, tokens.numel() * 8}  # the largest logit; its sum and the target's
    blocks: Counter[tuple[str, str]] = Counter()
    other: Counter[tuple[str, str, int]] = Counter()
    loss_bytes = 0
    for call in recording.calls:
        phase = phases[call.step]
        if call.control:
            continue
        if call.payload_bytes == activation_bytes:
            blocks[phase, call.op] += 1
        elif phase == "forward" and call.op == "all_reduce" and call.payload_bytes in loss_sizes:
            loss_bytes += call.sent_bytes
        else:
            other[phase, call.op, call.payload_bytes] += 1
    blocks.subtract(_OUTSIDE[with_sequence_parallel])
    return Traffic(
        per_block={key: count / size.num_layers for key, count in blocks.items() if count},
        sent_bytes=recording.sent_bytes(),
        loss_bytes=loss_bytes,
        other=dict(other),
        logits_bytes=logits_bytes,
    )
