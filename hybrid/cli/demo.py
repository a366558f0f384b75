"""`hybrid demo`: the main job, from one command."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from hybrid.checkpoint.folder import latest_complete
from hybrid.cli.demo_3d import HEADS_3D, RANKS_3D, STEPS_3D, check_ranks_3d, settings_3d
from hybrid.cli.demo_display import DemoDisplay
from hybrid.cli.folder import given_folder
from hybrid.errors import StrategyError
from hybrid.launch.job import LaunchJob
from hybrid.launch.run import run_job
from hybrid.launch.variables import resume_directory
from hybrid.strategy import DistributedStrategy, ResolvedStrategy

__all__ = ["demo"]

DEFAULT_RANKS = 4
DEFAULT_STEPS = 120
DEFAULT_STAGE = 2
DEFAULT_BATCH = 8
DEFAULT_SAVE_EVERY = 20
COMPARED_STEPS = 10  # that one process takes as well, under --layout 3d


def demo(
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            help=f"Ranks on this machine.  [default: {DEFAULT_RANKS}, with --layout 3d {RANKS_3D}]",
        ),
    ] = None,
    stage: Annotated[
        int | None, typer.Option("--stage", help=f"ZeRO stage: 0 to 3.  [default: {DEFAULT_STAGE}]")
    ] = None,
    shard_size: Annotated[
        int | None, typer.Option("--shard-size", help="Ranks that share one copy of the state.  [default: all]")
    ] = None,
    amp: Annotated[
        str | None, typer.Option("--amp", metavar="bf16|fp16", help="Low-precision weights with fp32 masters (O2).")
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compute the blocks' activations again in backward.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option("--steps", help=f"Optimizer steps.  [default: {DEFAULT_STEPS}, with --layout 3d {STEPS_3D}]"),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", help=f"Sequences per step over all ranks.  [default: about {DEFAULT_BATCH}]"),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="DIR",
            parser=given_folder,
            help="Save checkpoints into DIR, and go on from the newest complete one there, on any number of ranks.",
        ),
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option(
            "--save-every", help=f"Steps between checkpoints, with --resume.  [default: {DEFAULT_SAVE_EVERY}]"
        ),
    ] = None,
    strategy: Annotated[
        Path | None,
        typer.Option("--strategy", metavar="FILE", help="Strategy file (YAML or JSON) instead of the options."),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            metavar="auto|3d",
            help="auto: the planner chooses, for this machine's own CPUs. 3d: two stages of a pipeline, each layer "
            "over two ranks, the batch over the rest; 8 ranks or more, a multiple of 4.",
        ),
    ] = None,
) -> None:
    """Train a real model on this machine and show what sharding saves.

    A byte-level GPT of about 10 M parameters learns Python from the source files of the standard library.
    With the defaults: 4 ranks, ZeRO stage 2, under two minutes on 2 cores. At the end a table compares the
    memory and the traffic of each rank with plain data parallel. Ctrl-C ends all ranks.

    \b
    Examples:
      hybrid demo
      hybrid demo --stage 1 --steps 50
      hybrid demo --nproc 4 --stage 2 --shard-size 2
      hybrid demo --stage 3 --amp bf16 --recompute
      hybrid demo --strategy strategy.yaml
      hybrid demo --layout auto               # the planner's choice
      hybrid demo --layout 3d                 # pipeline x tensor x data parallel, 8 ranks
      hybrid demo --resume checkpoints        # stop it with Ctrl-C; the same command goes on
    """
    is_3d = layout == "3d"
    nproc = (RANKS_3D if is_3d else DEFAULT_RANKS) if nproc is None else nproc
    steps = (STEPS_3D if is_3d else DEFAULT_STEPS) if steps is None else steps
    if steps < 1:
        raise typer.BadParameter(f"is {steps}; expected 1 or more", param_hint="--steps")
    if nproc < 1:
        raise typer.BadParameter(f"is {nproc}; expected 1 or more", param_hint="--nproc")
    if save_every is not None and save_every < 1:
        raise typer.BadParameter(f"is {save_every}; expected 1 or more", param_hint="--save-every")
    if amp is not None and amp not in _AMP_DTYPES:
        raise typer.BadParameter(f"is {amp!r}; expected one of {', '.join(_AMP_DTYPES)}", param_hint="--amp")
    if layout is not None:
        _check_layout(layout, strategy, stage=stage, shard_size=shard_size, amp=amp, recompute=recompute)
    if is_3d:
        check_ranks_3d(nproc)
        chosen = _from_options(stage, shard_size, amp, recompute=recompute, more=settings_3d())
    elif layout is not None:
        chosen = _planned(nproc, DEFAULT_BATCH if batch is None else batch)
    elif strategy is None:
        chosen = _from_options(stage, shard_size, amp, recompute=recompute)
    else:
        chosen = DistributedStrategy.load(strategy)
    resolved = chosen.resolve(nproc)
    if strategy is not None:
        _check_agreement(strategy, resolved, stage=stage, shard_size=shard_size, amp=amp, recompute=recompute)
    batch_per_rank = _batch_per_rank(resolved, batch)
    directory = resume_directory() if resume is None else resume
    if save_every is not None and directory is None:
        raise typer.BadParameter(f"is {save_every}, without --resume DIR, where to save", param_hint="--save-every")
    first_step = 0 if directory is None else _step_to_go_on_from(directory, steps)

    log_dir = Path(tempfile.mkdtemp(prefix="hybrid-demo-"))
    strategy_file = log_dir / "strategy.yaml"
    chosen.save(strategy_file)
    job = LaunchJob(
        script="hybrid.demo.train",
        is_module=True,
        arguments=(
            f"--steps={steps}",
            f"--batch={batch_per_rank}",
            f"--save-every={DEFAULT_SAVE_EVERY if save_every is None else save_every}",
            *([f"--heads={HEADS_3D}"] if is_3d else []),
            # fp16 leaves out the first steps, until the loss scale fits.
            *([f"--compare={COMPARED_STEPS}"] if is_3d and amp != "fp16" else []),
        ),
        num_processes=nproc,
        strategy=strategy_file,
        resume=resume,
        log_dir=log_dir,
        show_output=False,
    )
    display = DemoDisplay(resolved=resolved, num_steps=steps, first_step=first_step)
    with display:
        outcome = run_job(job, on_poll=display.update)
    if outcome.exit_code != 0:
        print(f"hybrid demo: {outcome.message}", file=sys.stderr)
        if directory is not None and (newest := latest_complete(directory)[0]) is not None:
            print(f"hybrid demo: the same command goes on after step {newest.step}", file=sys.stderr)
        raise typer.Exit(outcome.exit_code)
    display.print_result()
    shutil.rmtree(log_dir)


_AMP_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def _from_options(
    stage: int | None,
    shard_size: int | None,
    amp: str | None,
    *,
    recompute: bool,
    more: Mapping[str, object] | None = None,
) -> DistributedStrategy:
    configs: dict[str, int] = {"stage": DEFAULT_STAGE if stage is None else stage}
    if shard_size is not None:
        configs["shard_size"] = shard_size
    settings: dict[str, object] = {
        "sharding": True,
        "sharding_configs": configs,
        "gradient_clipping": 1.0,
        "timeout_seconds": 120,
    }
    if amp is not None:
        settings |= {"amp": True, "amp_configs": {"dtype": _AMP_DTYPES[amp], "level": "O2"}}
    if recompute:
        settings["recompute"] = True
    return DistributedStrategy(settings | dict(more or {}))


def _check_layout(layout: str, strategy: Path | None, **options: object) -> None:
    """What the options say that the layout decides by itself is refused."""
    if layout not in {"auto", "3d"}:
        raise typer.BadParameter(f"is {layout!r}; expected auto or 3d", param_hint="--layout")
    if layout == "3d":
        if strategy is not None:
            raise StrategyError("--layout 3d is a strategy of its own, and --strategy another; leave one of them out")
        return
    said = [name for name, value in options.items() if value is not None and value is not False]
    given = [f"--{name.replace('_', '-')}" for name in said]
    given += ["--strategy"] * (strategy is not None)
    if given:
        raise StrategyError(f"--layout auto chooses what {', '.join(given)} would say; leave one of them out")


def _planned(nproc: int, batch: int) -> DistributedStrategy:
    """As the planner has it, with the demo's clipping; says what it chose and why."""
    from hybrid.cli.demo_layout import plan_demo  # torch comes with it, to look at the model

    plans = plan_demo(nproc, batch)
    best = plans.best
    print(
        f"layout {best.candidate.label}: {best.time.total_seconds * 1e3:.0f} ms a step expected ({plans.advice.loss})"
    )
    settings = best.strategy.to_dict() | {"gradient_clipping": 1.0, "timeout_seconds": 120}
    return DistributedStrategy(settings)


def _step_to_go_on_from(directory: Path, steps: int) -> int:
    """The step of the newest complete checkpoint; 0 if there is none."""
    newest, _ = latest_complete(directory)
    if newest is not None and newest.step >= steps:
        raise typer.BadParameter(
            f"is {steps}, and the newest checkpoint in {directory} is of step {newest.step}: nothing is left to train; "
            "give more steps, or another folder",
            param_hint="--steps",
        )
    return 0 if newest is None else newest.step


def _check_agreement(
    file: Path,
    resolved: ResolvedStrategy,
    *,
    stage: int | None,
    shard_size: int | None,
    amp: str | None,
    recompute: bool,
) -> None:
    """Two words on one setting must be the same word."""
    pairs: tuple[tuple[str, object, object], ...] = (
        ("--stage", stage, resolved.zero_stage),
        ("--shard-size", shard_size, resolved.shard_size),
        ("--amp", None if amp is None else f"{_AMP_DTYPES[amp]} O2", str(resolved.amp or "off")),
        ("--recompute", recompute or None, resolved.recompute is not None),
    )
    problems = [
        f"{option} is {given} but {file} says {in_file}; leave one of them out"
        for option, given, in_file in pairs
        if given is not None and given != in_file
    ]
    if problems:
        raise StrategyError(problems)


def _batch_per_rank(resolved: ResolvedStrategy, batch: int | None) -> int:
    """Sequences per rank and step, from the strategy's batch fields or the option."""
    num_replicas = resolved.data_parallel_size
    in_strategy = resolved.global_batch_size
    if in_strategy is None and resolved.micro_batch_size is not None:
        in_strategy = resolved.micro_batch_size * resolved.accumulate_steps * num_replicas
    if batch is not None and in_strategy is not None and batch != in_strategy:
        raise StrategyError(f"--batch is {batch} but the strategy gives {in_strategy}; leave one of them out")
    # A pipeline has as many micro-batches at each step, of one sequence at least.
    pieces = resolved.accumulate_steps if resolved.pipeline is not None else 1
    wanted = batch if in_strategy is None else in_strategy
    if wanted is None:
        return max(pieces, DEFAULT_BATCH // num_replicas // pieces * pieces)
    if wanted < 1 or wanted % (num_replicas * pieces):
        nearest = max(1, round(wanted / num_replicas / pieces)) * num_replicas * pieces
        over = f"{num_replicas} data-parallel ranks" + (f" of {pieces} micro-batches each" if pieces > 1 else "")
        raise StrategyError(f"--batch is {wanted}, which does not divide over {over}; try {nearest}")
    return wanted // num_replicas
