"""Data between ranks of one host: read in place, by those only who may, and used again when all have read it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hybrid.collectives import ops, shared_memory
from hybrid.collectives.point_to_point import Stream
from hybrid.collectives.shared_memory import OFF_VARIABLE, Arena, Introduction, Neighbour, Place, arena
from tests.multi_rank.worlds import shard_group
from tests.ranks import run_ranks


def lend(lender: Arena, num_elements: int, value: float, readers: tuple[int, ...] = (1,)) -> Place:
    return lender.lend(torch.full((num_elements,), value), readers=readers, marks=3)


def test_a_place_is_lent_again_when_all_have_read_it() -> None:
    """Protects what one rank has not read yet from the next message of another."""
    lender = Arena()
    reader = Neighbour(lender.introduction())
    first = lend(lender, 1000, 1.0, readers=(1, 2))
    second = lend(lender, 1000, 2.0)
    reader.has_read(first, reader=1)
    third = lend(lender, 1000, 3.0)
    assert len({first, second, third}) == 3, "rank 2 has not read the first one"
    for place, value in ((first, 1.0), (second, 2.0), (third, 3.0)):
        read = reader.read(place, num_elements=1000, dtype=torch.float32)
        assert torch.equal(read, torch.full((1000,), value))
    reader.has_read(first, reader=2)
    assert lend(lender, 2000, 4.0) not in (first, second, third), "one that is too long goes behind them"
    assert lend(lender, 1000, 5.0) == first
    assert lender.sent_bytes == 4000 * 7


def resident_bytes(lender: Arena) -> int:
    """Memory behind the files of an arena."""
    return sum(512 * os.fstat(segment.descriptor).st_blocks for segment in lender._segments)


def test_without_room_an_arena_grows_and_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects against waiting for room (two full ranks would wait for each other), and against keeping a peak."""
    monkeypatch.setattr(shared_memory, "SEGMENT_BYTES", 1 << 16)
    lender = Arena()
    reader = Neighbour(lender.introduction())
    places = [lend(lender, 12_000, float(number)) for number in range(5)]
    places.append(lend(lender, 1 << 20, 5.0))
    assert resident_bytes(lender) > 4 << 20
    for number, place in enumerate(places):
        num_elements = 1 << 20 if number == 5 else 12_000
        read = reader.read(place, num_elements=num_elements, dtype=torch.float32)
        assert torch.equal(read, torch.full((num_elements,), float(number)))
        reader.has_read(place, reader=1)
    assert lend(lender, 12_000, 6.0) == places[0]
    assert resident_bytes(lender) <= 1 << 16, "only the first segment keeps its memory"


def test_a_buffer_that_is_given_up_is_read_where_it_lies() -> None:
    """Protects it from being lent again while a tensor sees it, or a rank has not read it."""
    lender = Arena()
    reader = Neighbour(lender.introduction())
    buffer = lender.empty(3000, torch.float32, marks=3)
    buffer.copy_(torch.arange(3000.0))
    places = [
        lender.lend(buffer[1000 * rank : 1000 * (rank + 1)], readers=(rank,), marks=3, given_up=True) for rank in (0, 2)
    ]
    assert places[0].marks == places[1].marks, "one range, in which nothing was copied"
    again = lender.lend(buffer[:1000], readers=(0,), marks=3, given_up=True)
    assert again.marks != places[0].marks, "rank 0 has a message there that it has not read"
    copied = lender.lend(buffer[:1000], readers=(1,), marks=3)
    assert copied.marks != places[0].marks, "the sender may write to what it has not given up"
    view = buffer[2500:]
    del buffer
    gc.collect()
    for rank, place in zip((0, 2), places, strict=True):
        read = reader.read(place, num_elements=1000, dtype=torch.float32)
        assert torch.equal(read, torch.arange(1000.0) + 1000 * rank)
        reader.has_read(place, reader=rank)
    other = lender.empty(3000, torch.float32, marks=3)
    assert other.data_ptr() > view.data_ptr(), "somebody still sees the end of it"
    assert view[-1] == 2999
    first = view.data_ptr() - 4 * 2500
    del view
    assert lender.empty(3000, torch.float32, marks=3).data_ptr() == first


def other_process(introduced: Introduction) -> Introduction:
    return introduced._replace(process=os.getppid())


def other_kernel(introduced: Introduction) -> Introduction:
    return introduced._replace(boot="another")


def other_arena(introduced: Introduction) -> Introduction:
    return introduced._replace(token=b"0" * 16)


@pytest.mark.parametrize("change", [other_process, other_kernel, other_arena])
def test_only_the_arena_that_was_introduced_is_read(change: Callable[[Introduction], Introduction]) -> None:
    """Containers number their processes apart: behind the same numbers may be a pipe, or another job's arena."""
    with pytest.raises(OSError, match=r"arena|another host|No such file|Permission"):
        Neighbour(change(Arena().introduction()))


def check_one_without() -> list[int]:
    if dist.get_rank() == 1:
        os.environ[OFF_VARIABLE] = "0"
    group = shard_group()
    buffer = torch.full((50_000,), 1.0 + group.rank)
    ops.all_reduce(buffer, group=group).wait()
    assert torch.equal(buffer, torch.full((50_000,), 6.0))
    return sorted(group.near)


def test_a_group_uses_it_only_if_all_do() -> None:
    """Protects against ranks that choose unlike: one would look for data where the other has laid none."""
    assert run_ranks(check_one_without, 3) == [[], [], []]


def check_stream() -> None:
    group = shard_group()
    stream = Stream(group, headers=group, peer=1 - group.rank, device=torch.device("cpu"))
    before = arena().sent_bytes
    tensors = [torch.arange(5000) + group.rank, torch.zeros(0, 3), torch.full((70, 90), 0.5, dtype=torch.bfloat16).T]
    for epoch in range(3):
        stream.begin(epoch)
        for number in range(4):
            stream.send(number, "said", [tensor + number for tensor in tensors], window=4)
        for number in reversed(range(4)):
            description, got = stream.receive(number)
            assert description == "said"
            assert torch.equal(got[0], torch.arange(5000) + 1 - group.rank + number)
            assert got[1].shape == (0, 3)
            assert torch.equal(got[2], tensors[2] + number)
        stream.flush()
    assert arena().sent_bytes - before == 12 * (5000 * 8 + 70 * 90 * 2)
    ops.barrier(group)
    assert arena().lent_bytes == 0


def test_messages_of_a_pipeline() -> None:
    """Protects tensors between stages: in place of a transfer, in any order of use, over several steps."""
    run_ranks(check_stream, 2)


def check_fork() -> None:
    mine = arena()
    seen: list[int] = []
    child = os.fork()
    if child == 0:
        os._exit(0 if arena() is not mine and arena().introduction().process == os.getpid() else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    thread = threading.Thread(target=lambda: seen.append(id(arena())))
    thread.start()
    thread.join()
    assert seen == [id(mine)]


def test_a_forked_process_has_its_own() -> None:
    """Protects the parent's messages from a data loader's worker, or a saving process, that sends some of its own."""
    run_ranks(check_fork, 1)
