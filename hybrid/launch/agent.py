"""torchrun, as `hybrid run` starts it: `python -m hybrid.launch.agent <torchrun's arguments>`.

It is torchrun's own entry point, run by name, with two additions: it ends with the launcher, and it writes
how each rank left (`status/outcome.json`), so that nobody has to read torchrun's report with a pattern.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

from hybrid.launch.lifeline import end_with_parent
from hybrid.launch.variables import LOG_DIR_VARIABLE, PARENT_VARIABLE

__all__: list[str] = []


def main() -> None:
    end_with_parent(signal.SIGTERM, parent=int(os.environ[PARENT_VARIABLE]))
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # the ranks' parent
    status = Path(os.environ[LOG_DIR_VARIABLE]) / "status"
    try:
        runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
    except SystemExit as leave:
        _write(status, exit_codes={}, error=None if not leave.code else f"torchrun exited with {leave.code}")
        raise
    except BaseException as error:
        traceback.print_exc()
        # torchrun's ChildFailedError: failures by global rank, each with its exit code (negative: a signal).
        failures = getattr(error, "failures", {})
        exit_codes = {str(rank): failure.exitcode for rank, failure in failures.items()}
        last_line = traceback.format_exception_only(error)[-1].strip()
        _write(status, exit_codes=exit_codes, error=None if exit_codes else last_line)
        sys.stderr.flush()
        # Nothing is left to do here, and a thread of the rendezvous may not end by itself.
        os._exit(1)
    _write(status, exit_codes={}, error=None)


def _write(status: Path, *, exit_codes: dict[str, int], error: str | None) -> None:
    text = json.dumps({"exit_codes": exit_codes, "error": error})
    (status / "outcome.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
