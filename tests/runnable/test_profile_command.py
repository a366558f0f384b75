"""`hybrid profile` from a shell: a script as it is, its table and files; and what it says where there is nothing."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hybrid.cli import profile as command
from hybrid.cli.app import app
from hybrid.launch.job import LaunchJob
from hybrid.launch.run import RunOutcome
from hybrid.profile.timeline import read_timelines
from tests.runnable.command import hybrid

SCRIPT = """
import sys

import torch

import hybrid

model = hybrid.distributed_model(torch.nn.Linear(15, 17), strategy=hybrid.DistributedStrategy(sharding=True))
optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters()))
for step in range(1000):
    batch = (torch.ones(4, 15), torch.ones(4, 17))
    model.train_batch(batch, optimizer, loss_fn=torch.nn.functional.mse_loss)
    print("argument", sys.argv[1], "step", step, flush=True)
"""


def test_a_script_is_traced_and_ends_with_the_last_step(tmp_path: Path) -> None:
    """Protects who profiles a long training: some steps of it, the script's own arguments, files where they belong."""
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    done = hybrid("profile", "--steps", "2", "--warmup", "1", "--html", "p.html", "train.py", "--lr", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("argument --lr step 1", "2 steps of 1 rank", "backward", "tokens/s", "no peak is known"):
        assert words in done.stdout, done.stdout
    assert "step 2" not in done.stdout.split("2 steps of")[0]
    assert "profiler_start" not in done.stderr
    facts = json.loads((tmp_path / "hybrid_profile" / "profile.json").read_text())
    assert [rank["rank"] for rank in facts["ranks"]] == [0]
    for rank in facts["ranks"]:
        events = json.loads(Path(rank["trace_file"]).read_text())["traceEvents"]
        assert any(event.get("name") == "optimizer step" for event in events)
    (timeline,) = read_timelines(tmp_path / "hybrid_profile" / "timeline.json")
    covered = sum(end - start for start, end, *_ in timeline.stretches)
    assert covered == pytest.approx(timeline.stretches[-1].end_seconds, rel=1e-3)
    assert {"forward", "backward", "optimizer"} <= {stretch.part for stretch in timeline.stretches}
    assert 'id="timeline"' in (tmp_path / "p.html").read_text()


def test_a_script_that_trains_too_little_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects from an empty answer, and from the facts of an earlier run."""
    script = tmp_path / "train.py"
    script.write_text("")
    stale = tmp_path / "out" / "profile.json"
    stale.parent.mkdir()
    stale.write_text("{}")

    def ended(job: LaunchJob) -> RunOutcome:
        assert json.loads(job.environment["HYBRID_PROFILE"])["steps"] == 5
        return RunOutcome(exit_code=0, message="", log_dir=tmp_path)

    monkeypatch.setattr(command, "run_job", ended)
    done = CliRunner().invoke(app, ["profile", "--steps", "5", "--out", str(stale.parent), str(script)])
    assert done.exit_code == 1
    assert "before 8 calls of model.train_batch" in done.output
    assert not stale.exists()
    done = CliRunner().invoke(app, ["profile", "--html", str(tmp_path / "none" / "p.html"), str(script)])
    assert "there is no folder" in str(done.exception)  # before anything runs
    done = CliRunner().invoke(app, ["profile", "--html", str(tmp_path / "p.txt"), str(script)])
    assert "give it a name such as p.html" in str(done.exception)
