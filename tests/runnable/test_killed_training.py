"""Training that is killed and goes on, against training that nobody disturbs: the same weights at the end.

On as many ranks in the default run; on half of them with

    python -m pytest tests/runnable/test_killed_training.py -m full -n 0
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hybrid.launch.variables import RESUME_VARIABLE, STRATEGY_VARIABLE
from tests.parity import FLOORS, TOLERANCES
from tests.runnable.command import run_script, start_hybrid
from tests.runnable.test_restart import spoken
from tests.runnable.test_run import write

NUM_STEPS = 60
SAVE_EVERY = 4
START_SECONDS = 240  # many times what four ranks need to start, for a machine that does more than this

# Odd widths, a tied pair, dropout (random states), a schedule, uneven epochs (44 samples in batches of 8). Saves
# alternate between the two kinds.
SCRIPT = f"""
import random, sys, time
import numpy, torch
from torch import nn
import hybrid

dropout, dtype, num_steps, save_every = float(sys.argv[1]), getattr(torch, sys.argv[2]), {NUM_STEPS}, {SAVE_EVERY}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(7, 15), nn.Linear(15, 15)
        self.norm, self.head = nn.LayerNorm(15), nn.Linear(7, 15, bias=False)
        self.head.weight = self.first.weight
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        hidden = self.dropout(torch.tanh(self.second(self.first(x))))
        return self.norm(hidden) @ self.head.weight

data = torch.randn(44, 7, generator=torch.Generator().manual_seed(1), dtype=dtype)
for seed in (random.seed, numpy.random.seed, torch.manual_seed):  # all states that are saved
    seed(0)
model = hybrid.distributed_model(Model().to(dtype))
optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
mesh = hybrid.get_mesh()
sampler = hybrid.DistributedBatchSampler(data, 8 // mesh.world_size, shuffle=True)
state = dict(lr_scheduler=scheduler, sampler=sampler)
directory = hybrid.resume_directory()
step = hybrid.load_checkpoint(None, model, optimizer, **state).step
print("from", step, "on", mesh.world_size, flush=True)
while step < num_steps:
    for indices in sampler:
        x = data[indices]
        model.train_batch((x, x), optimizer, lr_scheduler=scheduler, loss_fn=nn.functional.mse_loss)
        step += 1
        print("step", step, flush=True)
        time.sleep(0.02)
        if step % save_every == 0:
            save = hybrid.async_save_checkpoint if step % (2 * save_every) else hybrid.save_checkpoint
            save(directory, model, optimizer, step=step, keep_last=3, **state)
        if step == num_steps:
            break
if mesh.rank == 0:
    torch.save({{name: value.detach().clone() for name, value in model.named_parameters()}}, "weights.pt")
hybrid.shutdown()
"""

STRATEGY = "sharding: true\nsharding_configs: {stage: 2, shard_size: 2}\ntimeout_seconds: 120\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """In one attempt `rank` gets SIGKILL `seconds` after training step number `after_steps`; 0: after the start."""

    rank: int
    after_steps: int
    seconds: float


def write_job(folder: Path) -> Path:
    folder.mkdir()
    write(folder, "strategy.yaml", STRATEGY)
    return write(folder, "job.py", SCRIPT)


def train_undisturbed(folder: Path, *, num_ranks: int, dropout: float, dtype: str) -> None:
    """The same script, without a launcher; one rank alone has no strategy."""
    script = write_job(folder)
    variables = {RESUME_VARIABLE: "saved"}
    if num_ranks > 1:
        variables[STRATEGY_VARIABLE] = "strategy.yaml"
    run_script(script, str(dropout), dtype, cwd=folder, num_ranks=num_ranks, variables=variables)


def train_with_kills(
    folder: Path, *options: str, num_ranks: int, kills: Sequence[Kill], dropout: float, dtype: str
) -> str:
    """One kill in each of the first attempts; returns what the launcher said."""
    script = write_job(folder)
    layout = ("--nproc", str(num_ranks), "--strategy", "strategy.yaml")
    command = ("run", "--resume", "saved", *layout, *options, script.name, str(dropout), dtype)
    process = start_hybrid(*command, cwd=folder)
    try:
        for number, kill in enumerate(kills, 1):
            carry_out(kill, folder, number, num_ranks, process)
        _, stderr = process.communicate(timeout=START_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, stderr
    assert stderr.count("was killed by SIGKILL") == len(kills), stderr
    return stderr


def carry_out(kill: Kill, folder: Path, number: int, num_ranks: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not (pid := pid_if_due(kill, folder, number, num_ranks)):
        assert time.monotonic() < deadline, f"attempt {number} did not come to {kill}"
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    time.sleep(kill.seconds)
    os.kill(pid, signal.SIGKILL)


def pid_if_due(kill: Kill, folder: Path, number: int, num_ranks: int) -> int | None:
    """The process to kill, once its attempt has come so far."""
    ranks = sorted(folder.glob(f"hybrid_logs/*/attempt_{number}/status/rank*.json"))
    if len(ranks) < num_ranks:
        return None
    printed = (ranks[0].parents[1] / "rank0.stdout").read_text(encoding="utf-8")
    if printed.count("\nstep ") < kill.after_steps:
        return None
    return json.loads(ranks[kill.rank].read_text(encoding="utf-8"))["pid"]


def last_checkpoint(folder: Path) -> dict[str, bytes]:
    """File -> content, of what was saved at the end; the manifest, which has the time in it, is left out."""
    step = folder / "saved" / f"step_{NUM_STEPS:08d}"
    return {path.name: path.read_bytes() for path in step.iterdir() if path.name != "manifest.json"}


@pytest.mark.slow
def test_two_kills_change_no_bit(tmp_path: Path) -> None:
    """Weights, moments, schedule, order of samples, dropout: a run that was killed twice is the run that was not.

    Any rank, at any moment from the start on: in a step, in a save, beside an async save.
    """
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    chosen = random.Random(seed)
    steps = (chosen.randrange(10), chosen.randrange(14))
    kills = [Kill(rank=chosen.randrange(2), after_steps=after, seconds=chosen.uniform(0, 0.1)) for after in steps]
    print(*kills, sep="\n")
    train_undisturbed(tmp_path / "undisturbed", num_ranks=2, dropout=0.1, dtype="float32")
    stderr = train_with_kills(
        tmp_path / "killed", "--max-restarts", "2", num_ranks=2, kills=kills, dropout=0.1, dtype="float32"
    )
    print(stderr)
    restarts = [line for line in spoken(stderr) if line.startswith("restart ")]
    assert len(restarts) == 2
    assert all(line.endswith("on 2 ranks") for line in restarts)
    expected, weights = (torch.load(tmp_path / name / "weights.pt") for name in ("undisturbed", "killed"))
    assert weights.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(weights[name], expected[name])]
    assert not different
    assert last_checkpoint(tmp_path / "killed") == last_checkpoint(tmp_path / "undisturbed")


@pytest.mark.full
def test_run_that_goes_on_with_two_ranks_comes_to_the_same_weights(tmp_path: Path) -> None:
    """A rank that is killed twice is given up; half the ranks, same samples in each step, within the table.

    Ten processes that import torch. In the default run are its parts: that such a rank is given up (test_restart.py),
    and that a layout loads what another saved (test_checkpoint_layouts.py), sampler and random states with it
    (test_training_state.py).
    """
    kills = [Kill(rank=1, after_steps=2 * SAVE_EVERY + 1, seconds=0.02 * number) for number in range(2)]
    train_undisturbed(tmp_path / "undisturbed", num_ranks=1, dropout=0.0, dtype="float64")
    options = ("--max-restarts", "3", "--min-nproc", "2")
    stderr = train_with_kills(tmp_path / "killed", *options, num_ranks=4, kills=kills, dropout=0.0, dtype="float64")
    said = spoken(stderr)
    assert re.fullmatch(r"restart 1 of 3 from step_\d{8} on 4 ranks", said[2])
    assert re.fullmatch(r"restart 2 of 3 from step_\d{8} on 2 ranks", said[-2])
    expected, weights = (torch.load(tmp_path / name / "weights.pt") for name in ("undisturbed", "killed"))
    bound = TOLERANCES[torch.float64]["weight"]
    for name, tensor in expected.items():
        largest = max(FLOORS["weight"], tensor.abs().max().item())
        assert (weights[name] - tensor).abs().max().item() <= bound * largest, name
