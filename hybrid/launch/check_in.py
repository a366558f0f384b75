"""The processes of a job meet before the process group starts, and compare what they were told.

torch's own start waits for WORLD_SIZE processes without looking at them: a rank given twice, two sizes of one
world or a rank that never comes end in a hang or in an error about a key. Here each process puts down what it
knows; the first one to arrive judges all of them and puts down the verdict, which ends every process alike.

    arrivals      how many have come; gives each one its number
    arrival/<n>   rank, world size, digests of strategy and planned placement, host, local rank and pid of number n
    verdict       problems (none: go on), and the processes of each machine
    seen          how many have read the verdict: whoever keeps the store stays until then
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, Protocol

from hybrid.contracts.rank_map import RankMap
from hybrid.errors import LaunchError
from hybrid.launch.environment import LaunchEnvironment
from hybrid.launch.variables import PLACEMENT_VARIABLE

__all__ = ["Store", "check_in"]

_POLL_SECONDS = 0.01
_GRACE_SECONDS = 0.5
"""After the first contradiction: how long others may still come, so that the verdict shows them as well."""
_LINGER_SECONDS = 3.0


class Store(Protocol):
    """The part of torch's stores that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """What one process was told, and who it is."""

    rank: int
    world_size: int
    agreement: str
    placement: str
    """Digest of the planned places of all ranks; empty without a plan."""
    host: str
    local_rank: int
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def check_in(
    store: Store,
    environment: LaunchEnvironment,
    *,
    agreement: str,
    timeout_seconds: float,
    keeps_store: bool,
    planned: RankMap | None = None,
) -> LaunchEnvironment:
    """Meet the other processes; returns the environment with LOCAL_* as the machines really share the ranks.

    Raises LaunchError on every process when any two contradict each other, when a rank does not come, or when ranks are
    not where `planned` has them. `keeps_store`: the store ends with this process, so it leaves last.
    """
    deadline = time.monotonic() + timeout_seconds
    number = store.add("arrivals", 1) - 1
    me = _Arrival(
        rank=environment.rank,
        world_size=environment.world_size,
        agreement=agreement,
        placement="" if planned is None else _digest(planned),
        host=socket.gethostname(),
        local_rank=environment.local_rank,
        pid=os.getpid(),
    )
    store.set(f"arrival/{number}", json.dumps(astuple(me)))
    if number == 0:
        verdict = _judge(store, environment, planned, deadline=deadline, timeout_seconds=timeout_seconds)
        store.set("verdict", json.dumps(verdict))
    else:
        verdict = _await_verdict(store, environment, deadline=deadline, timeout_seconds=timeout_seconds)
    store.add("seen", 1)
    problems = list(verdict["problems"])
    if not problems and number >= environment.world_size:
        problems.append(
            f"RANK={me.rank} came after all {environment.world_size} ranks of the job (WORLD_SIZE) had met; "
            f"expected each rank once, and no second job at {_place(environment)}"
        )
        raise LaunchError(_text(problems))
    if problems:
        if keeps_store:
            _linger(store)
        raise LaunchError(_text(problems))
    return _with_local_size(environment, verdict["hosts"])


def _judge(
    store: Store,
    environment: LaunchEnvironment,
    planned: RankMap | None,
    *,
    deadline: float,
    timeout_seconds: float,
) -> dict[str, Any]:
    arrivals: list[_Arrival] = []
    while True:
        arrivals += _read_arrivals(store, start=len(arrivals), deadline=deadline)
        problems = _contradictions(arrivals)
        if problems:
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            while time.monotonic() < deadline:
                arrivals += _read_arrivals(store, start=len(arrivals), deadline=deadline)
                time.sleep(_POLL_SECONDS)
            return {"problems": _contradictions(arrivals)}
        if len(arrivals) >= environment.world_size:
            hosts: dict[str, list[int]] = defaultdict(list)
            for arrival in arrivals:
                hosts[arrival.host].append(arrival.rank)
            return {
                "problems": [] if planned is None else _elsewhere(planned, hosts, arrivals, environment),
                "hosts": {host: sorted(ranks) for host, ranks in hosts.items()},
            }
        if time.monotonic() > deadline:
            return {"problems": [_missing(arrivals, environment, timeout_seconds)]}
        time.sleep(_POLL_SECONDS)


def _read_arrivals(store: Store, *, start: int, deadline: float) -> list[_Arrival]:
    """The arrivals from number `start` on; a process that has its number writes its line right after."""
    arrivals: list[_Arrival] = []
    for number in range(start, store.add("arrivals", 0)):
        while not store.check([f"arrival/{number}"]):
            if time.monotonic() > deadline:
                return arrivals
            time.sleep(_POLL_SECONDS)
        values = json.loads(store.get(f"arrival/{number}"))
        names = (field.name for field in fields(_Arrival))
        arrivals.append(_Arrival(**dict(zip(names, values, strict=True))))
    return arrivals


def _contradictions(arrivals: Sequence[_Arrival]) -> list[str]:
    problems = []
    by_rank: dict[int, list[_Arrival]] = defaultdict(list)
    for arrival in arrivals:
        by_rank[arrival.rank].append(arrival)
    for rank, same in sorted(by_rank.items()):
        if len(same) > 1:
            who = ", ".join(f"host {arrival.host} pid {arrival.pid}" for arrival in same)
            problems.append(
                f"RANK={rank} is set on {len(same)} processes ({who}), expected each rank of the job once "
                "(or two jobs use one MASTER_ADDR and MASTER_PORT)"
            )
    sizes: dict[int, list[_Arrival]] = defaultdict(list)
    digests: dict[str, list[_Arrival]] = defaultdict(list)
    placements: dict[str, list[_Arrival]] = defaultdict(list)
    for arrival in arrivals:
        placements[arrival.placement].append(arrival)
        sizes[arrival.world_size].append(arrival)
        digests[arrival.agreement].append(arrival)
    if len(sizes) > 1:
        said = "; ".join(f"WORLD_SIZE={size} on {', '.join(map(str, who))}" for size, who in sorted(sizes.items()))
        problems.append(f"{said}: expected one WORLD_SIZE on all processes")
    if len(digests) > 1:
        said = "; ".join(f"digest {digest or 'none'} on {', '.join(map(str, who))}" for digest, who in digests.items())
        problems.append(
            f"the strategies differ: {said}; expected the same strategy on all processes "
            "(compare strategy.to_yaml() of two of them)"
        )
    if len(placements) > 1:
        said = "; ".join(
            f"digest {digest or 'none'} on {', '.join(map(str, who))}" for digest, who in placements.items()
        )
        problems.append(f"the files of {PLACEMENT_VARIABLE} differ: {said}; expected the same file on all processes")
    return problems


def _elsewhere(
    planned: RankMap, hosts: dict[str, list[int]], arrivals: Sequence[_Arrival], environment: LaunchEnvironment
) -> list[str]:
    """Ranks that are not where the plan has them."""
    locals_set = "LOCAL_RANK" not in environment.derived
    problems = planned.differences(hosts, {one.rank: one.local_rank for one in arrivals} if locals_set else {})
    way = f"start them in the order of the plan's hostfile, or unset {PLACEMENT_VARIABLE} to train as they are"
    return [f"{problem}; {way}" for problem in problems]


def _digest(planned: RankMap) -> str:
    return hashlib.sha256(planned.to_csv().encode()).hexdigest()[:12]


def _missing(arrivals: Sequence[_Arrival], environment: LaunchEnvironment, timeout_seconds: float) -> str:
    came = {arrival.rank for arrival in arrivals}
    missing = [rank for rank in range(environment.world_size) if rank not in came]
    shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
    return (
        f"RANK={shown} did not come within {timeout_seconds:g} s: {len(came)} of "
        f"WORLD_SIZE={environment.world_size} processes met at {_place(environment)}; expected all of them. "
        "Look for the first error of the missing ranks, or whether they reach that address"
    )


def _await_verdict(
    store: Store, environment: LaunchEnvironment, *, deadline: float, timeout_seconds: float
) -> dict[str, Any]:
    # The judge came first and its time ends first; a little longer here lets its verdict arrive.
    while time.monotonic() < deadline + 1.0:
        if store.check(["verdict"]):
            verdict: dict[str, Any] = json.loads(store.get("verdict"))
            return verdict
        time.sleep(_POLL_SECONDS)
    raise LaunchError(
        f"rank {environment.rank} met another process at {_place(environment)}, which then went silent for "
        f"{timeout_seconds:g} s; expected WORLD_SIZE={environment.world_size} processes. "
        "Look for the first error of another rank"
    )


def _linger(store: Store) -> None:
    until = time.monotonic() + _LINGER_SECONDS
    while time.monotonic() < until and store.add("seen", 0) < store.add("arrivals", 0):
        time.sleep(_POLL_SECONDS)


def _with_local_size(environment: LaunchEnvironment, hosts: dict[str, list[int]]) -> LaunchEnvironment:
    """Variables that were not set, from the ranks that met on this machine."""
    here = next(ranks for ranks in hosts.values() if environment.rank in ranks)
    if "LOCAL_WORLD_SIZE" not in environment.derived:
        return environment
    derived_rank = "LOCAL_RANK" in environment.derived
    local_rank = here.index(environment.rank) if derived_rank else environment.local_rank
    return replace(environment, local_world_size=len(here), local_rank=local_rank)


def _place(environment: LaunchEnvironment) -> str:
    return f"MASTER_ADDR={environment.master_addr} MASTER_PORT={environment.master_port}"


def _text(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return f"the processes of the job do not fit together: {problems[0]}"
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return f"the processes of the job do not fit together:{lines}"
