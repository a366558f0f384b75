"""The order of copies on CUDA's streams, on recorders that stand in for streams and events: no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hybrid.sharding import offload

log: list[str] = []


class Stream:
    def __init__(self, device: object, name: str = "") -> None:
        self.name = name or f"copies {sum(line.startswith('new') for line in log)}"
        log.append(f"new {self.name}")

    def wait_stream(self, other: Stream) -> None:
        log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        log.append(f"{self.name} waits for event of {event.on}")


class Event:
    def record(self, stream: Stream) -> None:
        self.on = stream.name
        log.append(f"event on {stream.name}")

    def synchronize(self) -> None:
        log.append(f"host waits for event of {self.on}")


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    log.append(f"enter {stream.name}")
    yield
    log.append(f"leave {stream.name}")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> offload.HostStore:
    log.clear()
    compute = Stream("", "compute")
    log.clear()
    for name, stand_in in {"Stream": Stream, "Event": Event, "stream": on_stream}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    made = offload.HostStore(torch.device("cuda"), holds_parameters=True)
    assert log == ["new copies 0", "new copies 1"]
    log.clear()
    return made


COPY_DOWN = ["copies 0 waits for compute", "enter copies 0", "event on copies 0", "leave copies 0"]
COPY_UP = ["copies 1 waits for compute", "enter copies 1", "event on copies 1", "leave copies 1"]


def test_gradients_are_taken_after_their_copy_and_two_at_most_are_under_way(store: offload.HostStore) -> None:
    """Protects memory and values: the host adds up what has come, and the device frees a bucket only then."""
    taken: list[Any] = []
    for number in range(3):
        buffer = torch.full((4,), float(number))
        store.start(buffer[:2], "gradients", held=buffer, take=taken.append)
        assert len(taken) == max(0, number - 1)
    assert log == [*COPY_DOWN, *COPY_DOWN, "host waits for event of copies 0", *COPY_DOWN]
    store.finish()
    assert [own.tolist() for own in taken] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert log[-2:] == ["host waits for event of copies 0"] * 2


def test_the_device_waits_for_what_comes_up_and_a_gather_for_its_own_part_alone(store: offload.HostStore) -> None:
    """Protects a unit that is fetched ahead: its gather follows the copy, and what computes meanwhile does not wait."""
    target, source = torch.zeros(3), torch.ones(3)
    ticket = store.fill(target, source, "parameters")
    with store.after_copies():
        log.append("gather")
    assert log == [*COPY_UP, "enter copies 1", "gather", "leave copies 1"]
    ticket.order()
    assert log[-1] == "compute waits for event of copies 1"
    log.clear()
    store.to_device(torch.zeros(3, dtype=torch.bfloat16), source, "parameters")
    assert log == [*COPY_UP, "compute waits for event of copies 1"]
    log.clear()
    store.finish_sending()
    assert log == ["host waits for event of copies 1"] * 2
