"""A run of ranks that was stopped from outside, in the process that started it."""

from __future__ import annotations

import signal

from hybrid.launch.run import RunOutcome

__all__ = ["raise_if_stopped"]


def raise_if_stopped(outcome: RunOutcome) -> None:
    """As if the signal had come to this process alone: the run has taken it, and ended its ranks.

    Raises:
        KeyboardInterrupt: Ctrl-C.
        SystemExit: any other signal, with 128 and its number.
    """
    if outcome.failure is not None or outcome.exit_code <= 128:
        return
    if outcome.exit_code == 128 + signal.SIGINT:
        raise KeyboardInterrupt(outcome.message)
    raise SystemExit(outcome.exit_code)
