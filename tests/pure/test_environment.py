"""Reading the launch variables: what is derived, and what is refused with the variable and its value."""

from __future__ import annotations

import pytest

from hybrid.errors import LaunchError
from hybrid.launch.environment import read_environment

COMPLETE = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in COMPLETE.items() if name not in names}


def test_no_variables_mean_a_process_alone() -> None:
    """Protects plain `python script.py`."""
    environment = read_environment({})
    assert (environment.rank, environment.world_size, environment.launched) == (0, 1, False)


def test_all_variables_are_read() -> None:
    """Protects the usual start by torchrun."""
    environment = read_environment(COMPLETE)
    assert (environment.rank, environment.world_size) == (5, 8)
    assert (environment.local_rank, environment.local_world_size, environment.node_rank) == (1, 4, 1)
    assert (environment.master_addr, environment.master_port) == ("node0", 29500)
    assert environment.launched
    assert environment.derived == ()


def test_local_variables_are_derived() -> None:
    """Protects starts by a scheduler, which sets no LOCAL_*: never silently 0 and 1 for everybody."""
    environment = read_environment(without("LOCAL_RANK"))
    assert (environment.local_rank, environment.local_world_size) == (1, 4)
    assert environment.derived == ("LOCAL_RANK",)
    environment = read_environment(without("LOCAL_WORLD_SIZE") | {"GROUP_RANK": "1"})
    assert (environment.local_rank, environment.local_world_size, environment.node_rank) == (1, 8, 1)
    assert environment.derived == ("LOCAL_WORLD_SIZE",)
    environment = read_environment(without("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    assert (environment.local_rank, environment.local_world_size) == (5, 8)
    slurm = {"SLURM_LOCALID": "2", "SLURM_NODEID": "3"}
    environment = read_environment(without("LOCAL_RANK") | slurm)
    assert (environment.local_rank, environment.node_rank) == (2, 3)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_partly_set_variables_are_refused(missing: str) -> None:
    """Protects against a process that believes to be alone because one variable got lost."""
    with pytest.raises(LaunchError, match=f"{missing} is not set, expected"):
        read_environment(without(missing))
    only = {missing: COMPLETE[missing]}
    with pytest.raises(LaunchError) as error:
        read_environment(only)
    absent = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - {missing}
    assert all(f"{name} is not set" in str(error.value) for name in absent)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "8"}, "RANK=8 with WORLD_SIZE=8, expected a rank from 0 to 7"),
        ({"RANK": "-1"}, "RANK=-1, expected 0 or more"),
        ({"RANK": "one"}, "RANK='one' is not a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0, expected 1 or more"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='' is not a whole number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000, expected 1 to 65535"),
        ({"MASTER_ADDR": " "}, "MASTER_ADDR is empty"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 with LOCAL_WORLD_SIZE=4, expected a local rank from 0 to 3"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 with WORLD_SIZE=8, expected at most 8"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x' is not a whole number"),
    ],
)
def test_impossible_values_are_refused(changed: dict[str, str], said: str) -> None:
    """Protects the first minutes of a job: variable, value and what was expected, before anything starts."""
    with pytest.raises(LaunchError) as error:
        read_environment(COMPLETE | changed)
    assert said in str(error.value)


def test_all_problems_are_told_at_once() -> None:
    """Protects against mending one variable per start."""
    with pytest.raises(LaunchError) as error:
        read_environment(without("MASTER_ADDR") | {"RANK": "9", "MASTER_PORT": "x", "LOCAL_RANK": "7"})
    text = str(error.value)
    assert text.count("\n  - ") == 4
    assert "set: RANK=9, WORLD_SIZE=8" in text


@pytest.mark.parametrize("size", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_scheduler_without_launch_variables_is_noticed(size: str) -> None:
    """Protects against srun or mpirun starting N processes that each train alone."""
    with pytest.raises(LaunchError, match=f"started 4 processes .{size}=4.: each would train alone"):
        read_environment({size: "4"})
    assert not read_environment({size: "1"}).launched
