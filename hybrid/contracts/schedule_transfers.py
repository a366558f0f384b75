"""The messages that actions imply: activations towards the end of the model, gradients towards its start.

An F receives the output of the chunk before and sends its own to the chunk after; a B or an I receives the gradient of
its output from the chunk after and sends that of its input to the chunk before; a W neither. Where the neighbour chunk
lives on the same rank there is no message.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hybrid.contracts.schedule import Action, ActionKind, Schedule

__all__ = ["ActionTransfers", "Payload", "Transfer", "transfers"]


class Payload(Enum):
    """What crosses a cut: `activation` towards the end of the model, `gradient` towards its start."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One message; the same value describes it on the rank that sends and on the rank that receives."""

    payload: Payload
    micro_batch: int
    source_chunk: int
    target_chunk: int
    source_rank: int
    target_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTransfers:
    """What an action takes from another rank before it runs, and what it gives to another rank after."""

    action: Action
    receive: Transfer | None
    send: Transfer | None


def transfers(schedule: Schedule) -> tuple[tuple[ActionTransfers, ...], ...]:
    """Per rank, in the order of its actions. A neighbour chunk on the same rank needs no message."""
    return tuple(tuple(_action_transfers(action, schedule) for action in order) for order in schedule.actions)


def _action_transfers(action: Action, schedule: Schedule) -> ActionTransfers:
    if action.kind is ActionKind.W:
        return ActionTransfers(action=action, receive=None, send=None)
    step, payload = (1, Payload.ACTIVATION) if action.kind is ActionKind.F else (-1, Payload.GRADIENT)

    def message(source: int, target: int) -> Transfer | None:
        if min(source, target) < 0 or max(source, target) >= schedule.num_chunks:
            return None
        source_rank, target_rank = schedule.rank_of(source), schedule.rank_of(target)
        if source_rank == target_rank:
            return None
        return Transfer(
            payload=payload,
            micro_batch=action.micro_batch,
            source_chunk=source,
            target_chunk=target,
            source_rank=source_rank,
            target_rank=target_rank,
        )

    return ActionTransfers(
        action=action,
        receive=message(action.chunk - step, action.chunk),
        send=message(action.chunk, action.chunk + step),
    )
