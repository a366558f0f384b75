"""`async_save_checkpoint`: the state at the call, written while training goes on; errors that nobody can miss."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid.checkpoint.tensor_file import TensorFileWriter
from hybrid.compose import async_save
from hybrid.errors import CheckpointError
from tests import pipeline_models
from tests.checkpoint_faults import digest, file_operations, on_all_ranks, train, wrap
from tests.ranks import run_ranks

# -- the state at the call ---------------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2-z1-bf16": (2, {"pp": 1, "stage": 1, "amp": {"level": "O2"}}),
    "dp2-z3": (2, {"pp": 1, "stage": 3, "bucket_bytes": 300}),
    "pp2": (2, {"pp": 2, "stage": 0}),
    "tp2-dp2-z2": (4, {"pp": 1, "tp": 2, "stage": 2}),
}


@contextmanager
def held_writing() -> Iterator[threading.Event]:
    """No file gets its content before the event is set."""
    may_write = threading.Event()
    write = TensorFileWriter.write

    def waiting(self: TensorFileWriter, data: Any) -> None:
        assert may_write.wait(30)
        write(self, data)

    with mock.patch.object(TensorFileWriter, "write", waiting):
        yield may_write


class Job:
    """A pipeline model with a schedule."""

    def __init__(self, settings: dict[str, Any]) -> None:
        strategy = pipeline_models.pipeline_strategy(**settings)
        self.model: Any = hybrid.distributed_model(pipeline_models.build("tied"), strategy=strategy)
        self.optimizer = hybrid.distributed_optimizer(pipeline_models.make_adamw(self.model))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    def train(self, first: int, count: int) -> None:
        for step in range(first, first + count):
            batch = pipeline_models.own(pipeline_models.batch_of(step))
            self.model.train_batch(
                batch, self.optimizer, lr_scheduler=self.scheduler, loss_fn=pipeline_models.cross_entropy
            )

    def digest(self) -> str:
        return digest(self.model, self.optimizer)


def train_while_it_is_written(directory: str, settings: dict[str, Any]) -> None:
    job = Job(settings)
    job.train(0, 2)
    at_call, schedule = job.digest(), job.scheduler.state_dict()
    extra = {"tensor": torch.arange(5.0), "list": [1, 2]}
    with held_writing() as may_write:
        save = hybrid.async_save_checkpoint(
            directory, job.model, job.optimizer, step=2, lr_scheduler=job.scheduler, extra=extra
        )
        job.train(2, 2)
        extra["tensor"].zero_()
        extra["list"].append(3)
        assert not save.done()
        assert not list(Path(directory).glob("step_*"))
        may_write.set()
        job.train(4, 1)
        assert save.wait() == Path(directory, "step_00000002")
    trained_beside = job.digest()
    loaded = hybrid.load_checkpoint(directory, job.model, job.optimizer, lr_scheduler=job.scheduler)
    assert job.digest() == at_call
    assert job.scheduler.state_dict() == schedule
    torch.testing.assert_close(loaded.extra["tensor"], torch.arange(5.0), rtol=0, atol=0)
    assert loaded.extra["list"] == [1, 2]
    job.train(2, 3)
    assert job.digest() == trained_beside


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_checkpoint_has_the_state_at_the_call(layout: str, tmp_path: Path) -> None:
    """Protects against a save of weights from one step and moments from another; and training from the save."""
    world_size, settings = LAYOUTS[layout]
    run_ranks(train_while_it_is_written, world_size, str(tmp_path), settings)


class Counting(torch.nn.Linear):
    """Has state of its own, which it changes in place."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.seen: dict[str, Any] = {"count": torch.zeros(()), "log": []}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen["count"] += len(inputs)
        self.seen["log"].append(len(inputs))
        return super().forward(inputs)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def change_before_it_is_gathered(directory: str) -> None:
    strategy = hybrid.DistributedStrategy(sharding=True, sharding_configs={"stage": 2})
    model: Any = hybrid.distributed_model(torch.nn.Sequential(torch.nn.Linear(5, 5), Counting()), strategy=strategy)
    optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters()))
    train(model, optimizer)
    at_call, drawn = digest(model, optimizer), torch.get_rng_state()
    with mock.patch.object(async_save, "_HEAD_START_SECONDS", 0.3):
        save = hybrid.async_save_checkpoint(directory, model, optimizer, step=1)
        train(model, optimizer, steps=2)
        torch.rand(1)
        assert not save.done()
    save.wait()
    hybrid.load_checkpoint(directory, model, optimizer)
    assert digest(model, optimizer) == at_call
    assert torch.equal(torch.get_rng_state(), drawn)
    (counting,) = (module for module in model.modules() if isinstance(module, Counting))
    assert counting.seen == {"count": torch.tensor(4.0), "log": [4]}
    # What a document cannot hold is said by the call itself, to all ranks, though one alone has it.
    if dist.get_rank() == 1:
        for state in optimizer.state.values():
            state["odd"] = object()
    with pytest.raises(CheckpointError, match=r"\['odd'\] is a object, which a checkpoint cannot hold.*rank 1"):
        hybrid.async_save_checkpoint(directory, model, optimizer, step=2)
    dist.barrier()
    assert [path.name for path in Path(directory).iterdir()] == ["step_00000001"]


def test_small_state_is_that_of_the_call_though_the_ranks_tell_it_later(tmp_path: Path) -> None:
    """Protects against counts of steps, module state and random numbers of later steps than the weights."""
    run_ranks(change_before_it_is_gathered, 2, str(tmp_path))


# -- one at a time -----------------------------------------------------------------------------------------------------


def save_twice(directory: str) -> None:
    path = Path(directory)
    model, optimizer = wrap()
    train(model, optimizer)
    with held_writing() as may_write:
        first = hybrid.async_save_checkpoint(path, model, optimizer, step=1)
        threading.Timer(0.2, may_write.set).start()
        hybrid.async_save_checkpoint(path, model, optimizer, step=2)
        assert first.done()
        assert (path / "step_00000001").is_dir()
    train(model, optimizer)
    loaded = hybrid.load_checkpoint(path, model, optimizer)
    assert loaded.step == 2  # it was waited for
    hybrid.async_save_checkpoint(path, model, optimizer, step=3)
    assert hybrid.save_checkpoint(path, model, optimizer, step=4, keep_last=1) == path / "step_00000004"
    hybrid.async_save_checkpoint(path, model, optimizer, step=5)
    hybrid.shutdown()
    assert sorted(one.name for one in path.iterdir()) == ["step_00000004", "step_00000005"]


def test_a_save_waits_for_the_one_before_and_so_do_load_and_shutdown(tmp_path: Path) -> None:
    """Protects against two saves in one folder, a load of the one before, and a process that leaves too early."""
    run_ranks(save_twice, 2, str(tmp_path))


def keep_copies(directory: str) -> None:
    model, optimizer = wrap()
    train(model, optimizer)
    hybrid.async_save_checkpoint(directory, model, optimizer, step=1).wait()

    def copies() -> dict[Any, tuple[int, int]]:
        return {key: (copy.data_ptr(), copy.nbytes) for key, copy in async_save._copies.items()}

    first = copies()
    with file_operations() as operations:
        hybrid.async_save_checkpoint(directory, model, optimizer, step=2).wait()
    assert operations.count > 0
    # What this rank writes: half of the weights and both moments, one copy; what is in state.json on the first rank.
    weights = sum(value.nbytes for value in model.full_state_dict().values())
    own = sum(num_bytes for (name, _), (_, num_bytes) in first.items() if not name.startswith("value."))
    total = torch.tensor(own)
    dist.all_reduce(total)
    frozen_or_buffer = 3 * 4 + 4
    steps = 4 * sum(name.endswith(".step") for name, _ in first)
    all_steps = torch.tensor(steps)
    dist.all_reduce(all_steps)
    assert int(total) == weights + 2 * (weights - frozen_or_buffer) + int(all_steps)
    assert copies() == first


def test_one_copy_of_what_a_rank_writes_is_kept_and_used_again(tmp_path: Path) -> None:
    """Protects the memory that the docstring promises, and the stall: fresh memory costs more than the copy."""
    run_ranks(keep_copies, 2, str(tmp_path))


# -- errors ------------------------------------------------------------------------------------------------------------


def fail_beside_training(directory: str) -> None:
    def full(what: str) -> None:
        raise OSError(28, "No space left on device")

    model, optimizer = wrap()
    said = rf"checkpoint of step \d could not be written to {directory}, it needs \d.*No space left on device.*rank 1"

    def failing(step: int, *, waits_on: int | None = None) -> None:
        train(model, optimizer)
        with file_operations(0 if dist.get_rank() == 1 else None, full):
            save = hybrid.async_save_checkpoint(directory, model, optimizer, step=step)
            train(model, optimizer)
            while not save.done():
                time.sleep(0.001)
        if dist.get_rank() == waits_on:
            with pytest.raises(CheckpointError, match=said):
                save.wait()

    hybrid.save_checkpoint(directory, model, optimizer, step=0)
    expected = digest(model, optimizer)
    for late in (
        lambda: hybrid.save_checkpoint(directory, model, optimizer, step=9),
        lambda: hybrid.async_save_checkpoint(directory, model, optimizer, step=9),
        lambda: hybrid.load_checkpoint(directory, model, optimizer),
    ):
        failing(1)
        with pytest.raises(CheckpointError, match=said) as caught:
            late()
        on_all_ranks(str(caught.value))
        # Told once: then the job goes on.
        assert hybrid.load_checkpoint(directory, model, optimizer).step == 0
        assert digest(model, optimizer) == expected
    failing(2, waits_on=0)  # only rank 0 knows of it
    with pytest.raises(CheckpointError, match=said) as caught:
        hybrid.save_checkpoint(directory, model, optimizer, step=9)
    on_all_ranks(str(caught.value))
    with (
        mock.patch.object(async_save, "staged", side_effect=MemoryError() if dist.get_rank() == 1 else None),
        pytest.raises(CheckpointError, match=r"^MemoryError \(on rank 1\)"),
    ):
        hybrid.async_save_checkpoint(directory, model, optimizer, step=3)
    dist.barrier()
    assert [path.name for path in Path(directory).iterdir()] == ["step_00000000"]
    failing(4)
    with pytest.raises(CheckpointError, match=said):
        hybrid.shutdown()


def test_an_error_in_the_background_is_told_once_to_every_rank(tmp_path: Path) -> None:
    """Protects against a run that believes for a week that it is saved; and against ranks that go on apart."""
    run_ranks(fail_beside_training, 2, str(tmp_path))
