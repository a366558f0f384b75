"""The columns of other tools in docs/migrating_*.md, where those tools are installed: they train as ours do.

pip install deepspeed paddlepaddle && python -m pytest -m full -n 0 tests/runnable/test_docs_other_tools.py
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import hybrid
from tests.runnable.command import COMMAND, ROOT, environment
from tests.runnable.pages import fences_of

pytestmark = pytest.mark.full


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def script_of(page: str, package: str, folder: Path) -> Path:
    (theirs,) = (
        f for f in fences_of(ROOT / page, "python") if f.marks.get("not run", "").startswith(f"needs {package}")
    )
    path = folder / f"{package}_here.py"
    path.write_text(theirs.code, encoding="utf-8")
    return path


def run(command: list[str], cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"step \d: ([\d.]+)", output)]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))


@needs("deepspeed")
def test_deepspeeds_script_ends_with_our_weights(tmp_path: Path) -> None:
    """Three updates with accumulation, clipping and a schedule: a setting that means something else would show."""
    theirs = script_of("docs/migrating_deepspeed.md", "deepspeed", tmp_path)
    run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(theirs)], tmp_path)
    states = torch.load(tmp_path / "checkpoints/global_step3/mp_rank_00_model_states.pt", weights_only=False)["module"]
    (ours,) = (f for f in fences_of(ROOT / "docs/migrating_deepspeed.md", "python") if "file" in f.marks)
    (tmp_path / "deepspeed_there.py").write_text(ours.code, encoding="utf-8")
    run([*COMMAND, "run", "--nproc", "2", "deepspeed_there.py"], tmp_path)
    model = hybrid.distributed_model(layers())
    hybrid.load_checkpoint(tmp_path / "checkpoints", model)
    found = {name: value.clone() for name, value in model.state_dict().items()}
    hybrid.shutdown()
    torch.testing.assert_close(found, dict(states), rtol=1e-6, atol=1e-7)


# Paddle's build for CPUs lacks two things that a pipeline of Fleet asks for: the number of a device, and messages in
# the order of a device's stream; gloo's blocking ones take their place. Weights and samples are given, as Paddle draws
# others than torch.
DRIVER = """
import runpy, sys
import numpy, paddle
from paddle import distributed
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication as messages

def send(tensor, group, destination, *_):
    return group.process_group.send(tensor, group.get_group_rank(destination), True)

def receive(tensor, group, source, *_):
    return group.process_group.recv(tensor, group.get_group_rank(source), True)

def with_given_weights(model):
    for parameter in model.parameters():
        parameter.set_value(given["x".join(map(str, parameter.shape))])
    return wrap(model)

distributed.ParallelEnv._device_id = 0
messages._send_on_calc_stream, messages._recv_on_calc_stream = send, receive
given = numpy.load("given.npz")
samples = iter(given["samples"])
paddle.randn = lambda shape: paddle.to_tensor(next(samples))
wrap, fleet.distributed_model = fleet.distributed_model, with_given_weights
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@needs("paddle")
def test_fleets_script_has_the_losses_of_one_process(tmp_path: Path) -> None:
    """What the page says of Fleet's losses, clipping and schedule is what Paddle does; ours are compared elsewhere."""
    theirs = script_of("docs/migrating_fleet.md", "paddle", tmp_path)
    torch.manual_seed(0)
    model, samples = layers(), torch.randn(3, 8, 16)
    weights = {"x".join(map(str, value.t().shape)): value.detach().t().numpy() for value in model.parameters()}
    numpy.savez(tmp_path / "given.npz", samples=samples.numpy(), **weights)
    (tmp_path / "driver.py").write_text(DRIVER, encoding="utf-8")
    launch = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", "log"]
    run([*launch, "driver.py", str(theirs)], tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    wanted = []
    for x in samples:
        loss = nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        wanted.append(loss.item())
    for rank in range(2):
        assert losses((tmp_path / f"log/workerlog.{rank}").read_text()) == pytest.approx(wanted, abs=1e-3)
