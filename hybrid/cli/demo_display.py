"""What `hybrid demo` shows: a live display on a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hybrid.cli.demo_tables import bubble_text, layout_name, rank_map, stage_split, traffic_table
from hybrid.demo.progress import Finished, Layout, Memory, ProgressReader, Started, StepDone, Stepped
from hybrid.strategy import ResolvedStrategy
from hybrid.units import format_bytes, format_count, format_seconds

__all__ = ["DemoDisplay"]

BYTES_PER_ELEMENT = 4  # the demo trains in fp32
NUM_PLAIN_LINES = 10


class DemoDisplay:
    """Follows the events of the ranks. Use as a context around the run; `print_result` after it."""

    def __init__(
        self, *, resolved: ResolvedStrategy, num_steps: int, first_step: int = 0, console: Console | None = None
    ) -> None:
        self._console = Console(highlight=False) if console is None else console
        self._resolved = resolved
        self._num_steps = num_steps
        self._first_step = first_step  # those up to it were trained by an earlier run
        self._reader = ProgressReader(num_ranks=resolved.world_size)
        self._memory: dict[int, Memory] = {}
        self._started: Started | None = None
        self._finished: Finished | None = None
        self._layout: Layout | None = None
        self._steps: dict[int, list[Stepped]] = {}  # by rank
        self._last: StepDone | None = None
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
        )
        self._task = self._bar.add_task("train", total=num_steps, completed=first_step, text="starting the ranks")
        self._below = Text()
        self._live = Live(Group(self._bar, self._below), console=self._console, transient=True)

    def __enter__(self) -> DemoDisplay:
        sharding = f"ZeRO stage {self._resolved.zero_stage}"
        if self._resolved.shard_size not in (1, self._resolved.data_parallel_size):
            sharding += f", shard_size {self._resolved.shard_size}"
        if self._is_cut:
            sharding = f"{layout_name(self._resolved.layout)}, {sharding}"
        self._console.print(
            f"A byte-level GPT on the source of Python's standard library: {self._resolved.world_size} ranks, "
            f"{sharding}, {self._num_steps} steps{f', on from step {self._first_step}' if self._first_step else ''}. "
            "Ctrl-C ends all ranks.",
            soft_wrap=True,
        )
        if self._is_cut:
            self._console.print(rank_map(self._resolved.layout))
        if self._console.is_terminal:
            self._live.start()
        return self

    @property
    def _is_cut(self) -> bool:
        """Whether ranks hold different parts of the model."""
        return self._resolved.pipeline is not None or self._resolved.tensor_parallel is not None

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def update(self, log_dir: Path) -> None:
        """Show what the ranks have written since the last call."""
        for event in self._reader.new_events(log_dir):
            if isinstance(event, Started):
                self._started = event
                self._console.print(
                    f"{format_count(event.num_parameters)} parameters; {format_count(event.train_bytes)} bytes "
                    f"of text, {format_count(event.held_out_bytes)} held out; held-out loss "
                    f"{event.held_out_loss:.3f} nats per byte",
                    soft_wrap=True,
                )
            elif isinstance(event, Memory):
                self._memory[event.rank] = event
            elif isinstance(event, StepDone):
                self._show_step(event)
            elif isinstance(event, Layout):
                self._layout = event
                for part in stage_split(event):
                    self._console.print(part, soft_wrap=True)
            elif isinstance(event, Stepped):
                self._steps.setdefault(event.rank, []).append(event)
            else:
                self._finished = event

    def _show_step(self, event: StepDone) -> None:
        self._last = event
        text = f"loss {event.loss:.3f}, {event.tokens_per_second:,.0f} tokens/s"
        memory = ""
        if self._memory:
            state = max(memory.state_bytes for memory in self._memory.values())
            resident = max(memory.resident_bytes for memory in self._memory.values())
            on_host = max(memory.host_bytes for memory in self._memory.values())
            also = f" (and {format_bytes(on_host)} in host memory)" if on_host else ""
            memory = f"memory per rank: training state {format_bytes(state)}{also}, process {format_bytes(resident)}"
        self._bar.update(self._task, completed=event.step, text=text)
        self._below.plain = memory
        every = max(1, self._num_steps // NUM_PLAIN_LINES)
        if not self._console.is_terminal and (event.step % every == 0 or event.step == self._num_steps):
            self._console.print(f"step {event.step}/{self._num_steps}: {text}; {memory}", soft_wrap=True)

    def print_result(self) -> None:
        """The table against plain data parallel, and where to go from here."""
        assert self._started is not None, "a run that ended well has started"
        assert self._finished is not None, "a run that ended well has finished"
        seconds = self._finished.train_seconds
        self._console.print(
            f"{self._num_steps - self._first_step} steps in {format_seconds(seconds)}. Held-out loss: "
            f"{self._started.held_out_loss:.3f} nats per byte before, "
            f"[bold]{self._finished.held_out_loss:.3f}[/] after.",
            soft_wrap=True,
        )
        if self._finished.plain_losses:
            self._console.print(self._beside_one_process(), soft_wrap=True)
        self._console.print(self._table())
        if self._steps:
            self._console.print(traffic_table(self._layout, self._steps))
            self._console.print(bubble_text(self._resolved, self._steps), soft_wrap=True)
        self._console.print(
            "Next: docs/3d.md and examples/train_3d.py (hybrid run --nproc 8 examples/train_3d.py)."
            if self._is_cut
            else "Next: README.md shows how your own model and loop run this way; examples/train_gpt.py is a short one "
            "(hybrid run --nproc 4 examples/train_gpt.py).",
            soft_wrap=True,
        )

    def _beside_one_process(self) -> str:
        assert self._finished is not None
        here, alone = self._finished.losses, self._finished.plain_losses
        apart = max(abs(own - other) for own, other in zip(here, alone, strict=True))
        kind = "" if self._resolved.amp is None else " in float32"
        return (
            f"One process{kind} on the same batches: loss {alone[-1]:.6f} at step {len(alone)}, here {here[-1]:.6f}; "
            f"largest difference in {len(alone)} steps {apart:.1e}."
        )

    def _table(self) -> Table:
        """Bytes per rank: this run as measured where it is most; plain data parallel by formula, save activations."""
        assert self._started is not None
        assert self._finished is not None
        parameters = self._started.num_parameters * BYTES_PER_ELEMENT
        ranks = list(self._memory.values())
        num_ranks = self._resolved.world_size
        kept = "activations at their peak" if self._resolved.pipeline is not None else "activations of a forward"
        table = Table(title="Each rank holds and sends", title_justify="left")
        table.add_column("")
        table.add_column("plain data parallel", justify="right")
        table.add_column("this run", justify="right")
        table.add_column("this / plain", justify="right")
        rows = (
            ("parameters", parameters, max(memory.parameter_bytes for memory in ranks)),
            ("gradients", parameters, max(memory.gradient_bytes for memory in ranks)),
            ("optimizer state (AdamW)", 2 * parameters, max(memory.optimizer_bytes for memory in ranks)),
            ("together", 4 * parameters, max(memory.state_bytes for memory in ranks)),
            *([("in host memory", 0, on_host)] if (on_host := max(memory.host_bytes for memory in ranks)) else []),
            (
                kept,
                self._finished.plain_activation_bytes,
                max(memory.activation_bytes or 0 for memory in ranks),
            ),
            # A ring all-reduce of the gradients sends 2 (N-1)/N of them.
            (
                "sent per step",
                2 * (num_ranks - 1) * parameters // num_ranks,
                max(self._finished.sent_bytes, *(sum(own[-1].sent_bytes.values()) for own in self._steps.values()), 0),
            ),
        )
        for name, plain, measured in rows:
            ratio = f"{measured / plain:.0%}" if plain else ""
            ends = name == ("in host memory" if on_host else "together")
            table.add_row(name, format_bytes(plain), format_bytes(measured), ratio, end_section=ends)
        return table
