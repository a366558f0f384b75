"""One rank of `hybrid run`: `python -m hybrid.launch.worker`, started by torchrun.

Runs the script as `python SCRIPT ARGS...` (or `python -m`) would, and adds what a job of many processes
needs:

- its output goes to `rank<N>.stdout` and `rank<N>.stderr` in the log folder;
- an exception that ends it is recorded with time and traceback, so that the launcher can show the first one;
- when it is told to end in the middle of something, the stacks of its threads are written first: a rank that
  hangs in a collective shows where;
- on failure it first lets a save beside the training come to its end, as any process does at its exit: the ranks that
  have not failed still write, until they are told to end;
- then it leaves at once. A communicator's thread that still waits for other ranks would otherwise
  keep the process, and with it the job, until a timeout.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from hybrid.launch.lifeline import end_with_parent
from hybrid.launch.script import ScriptCommand
from hybrid.launch.status import RankStatus, failure_now, log_path, stacks_path
from hybrid.launch.variables import LOG_DIR_VARIABLE, PARENT_VARIABLE

__all__: list[str] = []

INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT


class Interruption:
    """Whether Ctrl-C has reached this rank: whatever it raises afterwards is no failure of its own."""

    def __init__(self) -> None:
        self.received = False
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.default_int_handler(signal_number, frame)


def main() -> None:
    interruption = Interruption()
    end_with_parent(signal.SIGKILL, parent=int(os.environ[PARENT_VARIABLE]))
    log_dir, rank = Path(os.environ[LOG_DIR_VARIABLE]), int(os.environ["RANK"])
    for stream, descriptor in (("stdout", 1), ("stderr", 2)):
        _redirect(descriptor, log_path(log_dir, rank, stream))
    faulthandler.enable()
    # Kept open for the life of the process: the handler writes to the descriptor when nothing else works.
    stacks = stacks_path(log_dir, rank).open("w", encoding="utf-8")
    faulthandler.register(signal.SIGTERM, file=stacks, all_threads=True, chain=True)
    status = RankStatus(rank=rank, pid=os.getpid())
    status.write(log_dir)

    try:
        _run_script(ScriptCommand.read(log_dir))
    except BaseException as error:
        if interruption.received:
            _leave(INTERRUPTED_EXIT_CODE)
        if isinstance(error, SystemExit) and not error.code:
            status.ended(0).write(log_dir)
            return
        exit_code = _exit_code_of(error)
        trace = _without_our_frames(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, trace))
        kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        sys.stderr.flush()
        failure = failure_now(kind=kind, message=str(error), traceback=text, stderr_bytes=os.fstat(2).st_size)
        # Before anything is printed: the launcher shows rank 0's stderr only up to the length noted here.
        status.ended(exit_code, failure).write(log_dir)
        _report(error, trace)
        _finish_saving()
        _leave(exit_code)
    status.ended(0).write(log_dir)


def _run_script(command: ScriptCommand) -> None:
    """As `python` does it: sys.argv, sys.path[0] and `__main__` are the script's."""
    sys.argv = [command.script, *command.arguments]
    if command.is_module:
        # sys.path[0] is the current folder already, for this module was started with -m too.
        runpy.run_module(command.script, run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(command.script).resolve().parent)
    runpy.run_path(command.script, run_name="__main__")


def _redirect(descriptor: int, path: Path) -> None:
    """Send everything that is written to the descriptor, from C as well, to the file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(file, descriptor)
    os.close(file)


def _exit_code_of(error: BaseException) -> int:
    """What the interpreter would exit with."""
    if isinstance(error, SystemExit):
        return error.code & 0xFF or 1 if isinstance(error.code, int) else 1
    return INTERRUPTED_EXIT_CODE if isinstance(error, KeyboardInterrupt) else 1


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first line on."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _report(error: BaseException, trace: TracebackType | None) -> None:
    """Print the error to this rank's own log, through the script's hook if it has set one."""
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _finish_saving() -> None:
    """Wait for what `async_save_checkpoint` has begun; if it fails too, the error that ends the script is the one."""
    saves = sys.modules.get("hybrid.compose.async_save")
    if saves is not None:
        with suppress(BaseException):
            saves.finish()


def _leave(exit_code: int) -> NoReturn:
    """End now, without the clean-up that may wait for other ranks for ever."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or its device is full: the exit code still says it
            stream.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main()
