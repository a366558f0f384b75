"""Starting a job with good, missing and contradictory launch variables, in real processes.

The recipes of a much-reported class of faults: silent defaults that make each process believe it is alone,
and starts that wait for the full timeout without naming what they wait for.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hybrid.collectives import ops
from hybrid.contracts.layout import Layout
from hybrid.launch.environment import LaunchEnvironment, read_environment
from hybrid.mesh import Mesh, start_process_group, stop_process_group
from tests.ranks import RankReport, run_environments

TIMEOUT_SECONDS = 3.0


def start_and_sum(strategies: Sequence[str] = (), starts: int = 1) -> tuple[float, LaunchEnvironment]:
    """Start, meet, sum once, stop; a process that ran alone would get 1."""
    for _ in range(starts):
        environment = read_environment()
        agreement = strategies[environment.rank] if strategies else "same"
        environment = start_process_group(environment, timeout_seconds=TIMEOUT_SECONDS, agreement=agreement)
        mesh = Mesh(Layout.of(dp_shard=environment.world_size), timeout_seconds=TIMEOUT_SECONDS)
        total = torch.ones(1)
        ops.all_reduce(total, group=mesh.world).wait()
        stop_process_group()
    return total.item(), environment


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def variables(ranks: Sequence[int], *, world_size: int = 2, port: int | None = None) -> list[dict[str, str]]:
    port = free_port() if port is None else port
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in ranks
    ]


def changed(environments: list[dict[str, str]], index: int | None = None, **values: str | None) -> list[dict[str, str]]:
    """The same with variables of one process, or of all, set or (None) taken away."""
    result = []
    for position, environment in enumerate(environments):
        copy = dict(environment)
        if index in (None, position):
            for name, value in values.items():
                copy.pop(name, None)
                if value is not None:
                    copy[name] = value
        result.append(copy)
    return result


def refused(environments: Sequence[dict[str, str]], *said: str, strategies: Sequence[str] = ()) -> list[RankReport]:
    """Every process ends in a LaunchError within the timeout plus 5 s; at least one says all of `said`."""
    started = time.monotonic()
    reports = run_environments(start_and_sum, environments, strategies, timeout_seconds=TIMEOUT_SECONDS + 5)
    assert time.monotonic() - started < TIMEOUT_SECONDS + 6
    for report in reports:
        assert report.error.startswith("LaunchError"), report
    assert any(all(text in report.error for text in said) for report in reports), [r.error for r in reports]
    return reports


def runs(environments: Sequence[dict[str, str]], *, starts: int = 1) -> list[LaunchEnvironment]:
    """Every process runs and sums over the whole world."""
    reports = run_environments(start_and_sum, environments, starts=starts, timeout_seconds=30)
    for report in reports:
        assert not report.error, report.traceback
        assert report.value[0] == len(environments)
    return [report.value[1] for report in reports]


def test_complete_variables_start_a_world() -> None:
    """Protects the usual start, and a second one in the same processes at the same port."""
    environments = runs(variables([0, 1, 2], world_size=3), starts=2)
    assert [environment.local_rank for environment in environments] == [0, 1, 2]


@pytest.mark.parametrize("missing", ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "both"])
def test_missing_local_variables_are_derived(missing: str) -> None:
    """Protects starts without torchrun: the processes of a machine are counted where they meet."""
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if missing == "both" else (missing,)
    environments = runs(changed(variables([0, 1]), **dict.fromkeys(names)))
    assert [environment.local_rank for environment in environments] == [0, 1]
    assert [environment.local_world_size for environment in environments] == [2, 2]


def test_world_size_absent_never_trains_alone() -> None:
    """Protects against two models trained side by side: RANK without WORLD_SIZE is no world of one."""
    for report in refused(changed(variables([0, 1]), WORLD_SIZE=None), "WORLD_SIZE is not set"):
        assert "the number of processes of the job" in report.error


def test_rank_beyond_the_world_is_refused() -> None:
    """Protects the others as well: RANK=2 of 2 ends at once, and rank 0 learns that rank 1 never came."""
    reports = refused(variables([0, 2]), "RANK=2 with WORLD_SIZE=2, expected a rank from 0 to 1")
    assert "RANK=1 did not come within 3 s: 1 of WORLD_SIZE=2" in reports[0].error


@pytest.mark.parametrize("twice", [0, 1])
def test_a_rank_given_twice_is_refused(twice: int) -> None:
    """Protects against a hang, or a port error that hides the reason (rank 0 twice)."""
    ranks = [0, 0] if twice == 0 else [0, 1, 1]
    environments = variables(ranks, world_size=len(ranks))
    for report in refused(environments, f"RANK={twice} is set on 2 processes", "pid"):
        assert "expected each rank of the job once" in report.error


def test_differing_world_sizes_are_refused() -> None:
    """Protects a job whose machines were told different sizes: both values, and who has which."""
    environments = changed(variables([0, 1]), 1, WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")
    for report in refused(environments, "WORLD_SIZE=2 on rank 0", "WORLD_SIZE=3 on rank 1"):
        assert "expected one WORLD_SIZE" in report.error


def test_differing_strategies_are_refused() -> None:
    """Protects against ranks that cut the model in different ways."""
    for report in refused(variables([0, 1]), strategies=["digest-a", "digest-b"]):
        assert "digest-a on rank 0" in report.error
        assert "digest-b on rank 1" in report.error


def test_a_rank_that_never_comes_is_named() -> None:
    """Protects the one who waits: which ranks are missing, how many came, and where they were awaited."""
    environments = variables([0, 3], world_size=4)
    for report in refused(environments, "RANK=1, 2 did not come within 3 s: 2 of WORLD_SIZE=4"):
        assert "MASTER_ADDR=127.0.0.1" in report.error


def test_no_rank_0_is_said() -> None:
    """Protects against a connection error that names neither the variable nor what should be there."""
    refused(variables([1]), "nobody answered at MASTER_ADDR=127.0.0.1 MASTER_PORT=", "RANK=0")


@contextmanager
def another_program() -> Iterator[int]:
    """A listener that speaks another protocol."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        yield server.getsockname()[1]


def test_a_port_in_use_is_refused_on_all() -> None:
    """Protects against torch's client, which waits without end for a listener of another kind."""
    with another_program() as port:
        reports = refused(variables([0, 1], port=port), f"MASTER_PORT={port} is already in use", "free port")
    assert f"another program answers at MASTER_ADDR=127.0.0.1 MASTER_PORT={port}" in reports[1].error


def test_the_store_of_another_job_is_not_joined() -> None:
    """Protects two jobs on one port: the second must not meet in a store that belongs to the first."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    refused(variables([0, 1], port=store.port), f"MASTER_PORT={store.port} is already in use")


def test_an_address_that_does_not_resolve_is_refused() -> None:
    """Protects against waiting for a host that does not exist."""
    environments = changed(variables([0, 1]), MASTER_ADDR="no-such-host.invalid")
    for report in refused(environments, "MASTER_ADDR=no-such-host.invalid does not resolve"):
        assert "the machine of rank 0" in report.error
        assert report.seconds < TIMEOUT_SECONDS


def test_the_store_of_an_agent_is_used() -> None:
    """Protects the start under torchrun, whose agent keeps the store, also after it restarted the ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    for restart in ("0", "1"):
        agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": restart}
        runs(changed(variables([0, 1], port=store.port), **agent))
    twice = changed(variables([0, 0], port=store.port), **(agent | {"TORCHELASTIC_RESTART_COUNT": "2"}))
    refused(twice, "RANK=0 is set on 2 processes")
