"""The store through which the processes of a launched job meet."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from hybrid.errors import LaunchError
from hybrid.launch.environment import LaunchEnvironment

__all__ = ["open_store"]

_HOST_KEY = "hybrid/host"
_HANDSHAKE_SECONDS = 10.0
_POLL_SECONDS = 0.05

# A process that starts, stops and starts again must not read the keys of its first start.
_starts = itertools.count()
# And it meets at the store it has: one that is closed and opened again would race with its own port. By process,
# address and port; with whether it lives here.
_stores: dict[tuple[int, str, int], tuple[dist.Store, bool]] = {}


def open_store(environment: LaunchEnvironment, *, timeout_seconds: float) -> tuple[dist.Store, bool]:
    """The store at MASTER_ADDR:MASTER_PORT, and whether it lives in this process.

    Under torchrun the agent keeps it; otherwise rank 0 does. Raises LaunchError when the address does not
    resolve, the port belongs to another program, or nobody answers within the timeout.
    """
    address, port = environment.master_addr, environment.master_port
    try:
        socket.getaddrinfo(address, port)
    except OSError as error:
        raise LaunchError(
            f"MASTER_ADDR={address} does not resolve on {socket.gethostname()} ({error.strerror}), expected "
            "the host name or address of the machine of rank 0"
        ) from error
    deadline = time.monotonic() + timeout_seconds
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = False
    place = (os.getpid(), address, port)
    if place in _stores:
        store, hosts = _stores[place]
    elif environment.rank == 0 and not by_agent:
        store, hosts = _host(environment, timeout_seconds=timeout_seconds)
    else:
        store = _connect(environment, deadline=deadline, timeout_seconds=timeout_seconds)
        if not by_agent:
            _await_host(store, environment, deadline=deadline)
    if hosts == (environment.rank == 0) or by_agent:  # else this rank has no right to the place: it will be refused
        _stores[place] = store, hosts
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"hybrid/{restart}/{next(_starts)}", store), hosts


def _host(environment: LaunchEnvironment, *, timeout_seconds: float) -> tuple[dist.Store, bool]:
    """Keep the store here. If the port is taken by another rank 0 of this job, meet there and be refused."""
    store: dist.Store
    try:
        store = dist.TCPStore(
            environment.master_addr,
            environment.master_port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except dist.DistError as error:
        if "in use" not in str(error):
            raise LaunchError(
                f"RANK=0 cannot listen at MASTER_ADDR={environment.master_addr} "
                f"MASTER_PORT={environment.master_port}, expected an address of this machine "
                f"({socket.gethostname()}) and a free port: {str(error).splitlines()[0]}"
            ) from error
        taken = (
            f"MASTER_PORT={environment.master_port} is already in use on {socket.gethostname()}, expected a "
            "free port for RANK=0; choose another one for all processes"
        )
        soon = time.monotonic() + min(timeout_seconds, _HANDSHAKE_SECONDS / 2)
        try:
            store = _connect(environment, deadline=soon, timeout_seconds=timeout_seconds)
            _await_host(store, environment, deadline=soon)
        except LaunchError:
            raise LaunchError(taken) from error
        return store, False
    store.set(_HOST_KEY, "rank 0")
    return store, True


def _connect(environment: LaunchEnvironment, *, deadline: float, timeout_seconds: float) -> dist.Store:
    _await_listener(environment, deadline=deadline, timeout_seconds=timeout_seconds)
    found: list[dist.Store | Exception] = []

    def connect() -> None:
        try:
            found.append(
                dist.TCPStore(
                    environment.master_addr,
                    environment.master_port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=timeout_seconds),
                )
            )
        except Exception as error:
            found.append(error)

    # A listener that does not speak the store's protocol keeps torch waiting for ever, whatever its timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(max(min(deadline - time.monotonic(), _HANDSHAKE_SECONDS), 0.1))
    if found and isinstance(found[0], dist.Store):
        return found[0]
    raise _foreign(environment) from (found[0] if found and isinstance(found[0], Exception) else None)


def _await_listener(environment: LaunchEnvironment, *, deadline: float, timeout_seconds: float) -> None:
    """Wait until somebody listens. torch's own wait overshoots its timeout by several seconds."""
    address = (environment.master_addr, environment.master_port)
    while True:
        try:
            socket.create_connection(address, timeout=max(deadline - time.monotonic(), 0.1)).close()
            return
        except OSError as error:
            if time.monotonic() + _POLL_SECONDS >= deadline:
                raise LaunchError(
                    f"rank {environment.rank}: nobody answered at MASTER_ADDR={address[0]} "
                    f"MASTER_PORT={address[1]} within {timeout_seconds:g} s ({error}), expected the process "
                    f"with RANK=0 of WORLD_SIZE={environment.world_size} to listen there"
                ) from error
        time.sleep(_POLL_SECONDS)


def _await_host(store: dist.Store, environment: LaunchEnvironment, *, deadline: float) -> None:
    until = max(min(deadline, time.monotonic() + _HANDSHAKE_SECONDS), time.monotonic() + 0.2)
    while not store.check([_HOST_KEY]):
        if time.monotonic() > until:
            raise _foreign(environment)
        time.sleep(_POLL_SECONDS)


def _foreign(environment: LaunchEnvironment) -> LaunchError:
    return LaunchError(
        f"rank {environment.rank}: another program answers at MASTER_ADDR={environment.master_addr} "
        f"MASTER_PORT={environment.master_port}, expected RANK=0 of this job; the port is in use there, choose "
        "a free one for all processes"
    )
