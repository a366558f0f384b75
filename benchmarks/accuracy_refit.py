"""Which constants are fitted on which rows, in which order: later stages take what earlier ones found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from benchmarks.accuracy_fit import Overrides, Parameter, fitted, loss_of, predicted_seconds, software_with
from benchmarks.accuracy_metrics import errors_of
from benchmarks.accuracy_rows import Point, points

__all__ = ["STAGES", "Stage", "fit_rows", "leave_one_out", "refit"]

# Of a data set with more rows than this, so many enter the fit, evenly spaced.
_MOST_ROWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Constants that are fitted together, and the data sets whose fit parts they are fitted on."""

    datasets: tuple[str, ...]
    parameters: tuple[Parameter, ...]


def _of(software: str, **bounds: tuple[float, float]) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(software=software, constant=constant, low=low, high=high) for constant, (low, high) in bounds.items()
    )


STAGES = (
    Stage(
        datasets=("sc21", "korthikanti", "vtrain_single", "vtrain_multi"),
        parameters=(
            *_of("hybrid", matmul_fraction=(0.8, 1.05)),
            *_of(
                "megatron-2021", traffic_fraction=(0.5, 3.0), pairs_fraction=(0.5, 2.5), launch_seconds=(2e-5, 3e-4),
                backward_launch_factor=(0.7, 2.5), micro_batch_seconds=(1e-5, 3e-3), pp_exposed_fraction=(0.05, 1.0),
            ),
        ),
    ),
    Stage(
        datasets=("h100_readme", "simumax"),
        parameters=_of(
            "megatron-core-2024", traffic_fraction=(0.5, 4.0), launch_seconds=(5e-6, 2e-4),
            collective_seconds=(1e-6, 3e-4),
        ),
    ),
    Stage(
        datasets=("internevo",),
        parameters=_of(
            "internevo", matmul_fraction=(0.7, 1.05), owner_seconds=(1e-5, 1e-2)
        ),
    ),
    Stage(
        datasets=("sailor",),
        parameters=_of(
            "sailor", launch_seconds=(2e-5, 3e-4), traffic_fraction=(0.5, 4.0), pairs_fraction=(0.5, 12.0),
            collective_fraction=(0.05, 1.0), collective_seconds=(1e-6, 1e-3),
        ),
    ),
    Stage(datasets=("mtnlg",), parameters=_of("megatron-deepspeed-bf16", accumulate_bytes=(10.0, 60.0))),
    Stage(
        datasets=("mosaic_a100", "mosaic_h100"),
        parameters=(*_of("hybrid", contention=(1.02, 2.0)), *_of("llm-foundry-2023", attention_fraction=(0.3, 1.0))),
    ),
    Stage(
        datasets=("nanotron",),
        parameters=_of("nanotron-2024", traffic_fraction=(0.5, 2.5), launch_seconds=(5e-6, 2e-4)),
    ),
    Stage(datasets=("nanotron_pp",), parameters=_of("nanotron-2024", across_pipeline_seconds=(1e-5, 2e-3))),
    Stage(datasets=("torchtitan",), parameters=_of("torchtitan-2024", matmul_fraction=(0.5, 1.05))),
    Stage(datasets=("bridge",), parameters=_of("megatron-bridge-2025", traffic_fraction=(0.5, 4.0))),
    Stage(datasets=("nemo_long",), parameters=_of("megatron-core-2024-03", attention_fraction=(0.3, 1.0))),
    Stage(datasets=("sc21_zero3",), parameters=_of("deepspeed-zero3-2021", collective_fraction=(0.03, 1.0))),
)  # fmt: skip


def fit_rows(datasets: Sequence[str]) -> list[Point]:
    """The fit parts, thinned."""
    found: list[Point] = []
    for dataset in datasets:
        rows = [point for point in points(dataset) if point.is_fit]
        step = -(-len(rows) // _MOST_ROWS)
        found += rows[::step]
    return found


def refit(console: Console, *, evaluations: int = 300) -> Overrides:
    """Fit every stage and print what it found."""
    values: dict[tuple[str, str], float] = {}
    for stage in STAGES:
        rows = fit_rows(stage.datasets)
        before = loss_of(rows, values)
        values |= fitted(rows, stage.parameters, values, evaluations=evaluations)
        after = loss_of(rows, values)
        console.print(f"{', '.join(stage.datasets)}: {len(rows)} rows, mean error {before:.1%} -> {after:.1%}")
        for parameter in stage.parameters:
            value, width = values[parameter.key], parameter.high / parameter.low
            note = "  (at its bound)" if min(value / parameter.low, parameter.high / value) < width**0.03 else ""
            console.print(f"  {parameter.software}.{parameter.constant}: {value:.4g}{note}")
    return values


def leave_one_out(console: Console, *, evaluations: int = 300) -> None:
    """Constants that several data sets share: fitted without one of them, tried on all of its rows."""
    for stage in STAGES:
        for left in stage.datasets if len(stage.datasets) > 1 else ():
            others = [dataset for dataset in stage.datasets if dataset != left]
            values = fitted(fit_rows(others), stage.parameters, {}, evaluations=evaluations)
            rows = points(left)
            software = {str(row.job.software) for row in rows}
            assert len(software) == 1
            chosen = software_with(software.pop(), values)
            errors = errors_of([(predicted_seconds(row, chosen), row.seconds) for row in rows])
            assert errors is not None
            console.print(
                f"{left}, fitted on {', '.join(others)}: median {errors.median:.1f} %, p90 {errors.p90:.1f} %"
            )
