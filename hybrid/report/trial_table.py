"""What measured layouts took, beside what their plan said."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from hybrid.planner.trials import Trial
from hybrid.units import format_bytes, format_seconds

__all__ = ["trial_table"]


def trial_table(trials: Sequence[Trial]) -> Table:
    """One row per layout; a ratio is measured over predicted, as the plan was before these runs."""
    load = max(trial.load for trial in trials)
    table = Table(
        title=escape(f"Measured: {trials[0].model} on {trials[0].hosts[0]}, load before {load:.1f}"),
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    table.add_column("layout", no_wrap=True)
    for head in ("step planned", "measured", "ratio", "spread", "state", "measured", "ratio", "process", "measured"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    for trial in trials:
        table.add_row(
            escape(trial.candidate.label),
            format_seconds(trial.predicted_seconds),
            format_seconds(trial.step_seconds),
            _ratio(trial.step_seconds, trial.predicted_seconds),
            f"{trial.spread:.0%}",
            format_bytes(trial.predicted_state_bytes),
            format_bytes(trial.state_bytes),
            _ratio(trial.state_bytes, trial.predicted_state_bytes),
            format_bytes(trial.predicted_process_bytes),
            format_bytes(trial.process_bytes),
            _ratio(trial.process_bytes, trial.predicted_process_bytes),
        )
    return table


def _ratio(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.2f}" if predicted else "–"
