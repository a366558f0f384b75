"""Data between ranks of one host: read in place, by those only who may, and used again when all have read it."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid.collectives import ops, shared_memory
from hybrid.collectives.point_to_point import Stream
from hybrid.collectives.shared_memory import OFF_VARIABLE, Arena, Introduction, Neighbour, Place, arena
from hybrid.errors import CollectiveError, LaunchError
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
    """Memory behind the file of an arena."""
    return 512 * os.fstat(lender.descriptor).st_blocks


def test_what_large_messages_took_comes_back() -> None:
    """Protects against keeping the memory of one large message, such as the first broadcast of a model, for ever."""
    lender = Arena()
    reader = Neighbour(lender.introduction())
    place = lend(lender, 1 << 20, 5.0)
    assert resident_bytes(lender) > 4 << 20
    reader.has_read(place, reader=1)
    for number in range(400):
        place = lend(lender, 1000, float(number))
        assert reader.read(place, num_elements=1000, dtype=torch.float32)[-1] == number
        reader.has_read(place, reader=1)
    assert resident_bytes(lender) <= 1 << 16


def test_without_room_the_error_says_what_holds_it() -> None:
    """Protects against waiting for room: two ranks with full arenas would wait for each other."""
    lender = Arena(1 << 16)
    lend(lender, 12_000, 1.0)
    with pytest.raises(CollectiveError, match=r"(?s)48064 of 65536 bytes.*HYBRID_SHARED_MEMORY=0"):
        lend(lender, 12_000, 2.0)


def no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")


def no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(shared_memory.mmap, "mmap", refuse)


def switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OFF_VARIABLE, " Off")


@pytest.mark.parametrize("without", [no_memfd, no_addresses, switched_off])
def test_without_such_memory_a_process_takes_no_part(
    without: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protects systems that have none: their messages go over gloo."""
    monkeypatch.setattr(shared_memory, "_arenas", [])
    without(monkeypatch)
    assert shared_memory.introduction() is None


def test_a_word_that_says_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects the one who writes another word for no."""
    monkeypatch.setenv(OFF_VARIABLE, "never")
    with pytest.raises(LaunchError, match=r"HYBRID_SHARED_MEMORY='never'.*1 \(the default\) or 0"):
        shared_memory.introduction()


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


def resident_here(reader: Neighbour) -> int:
    """Bytes of a neighbour's arena that count as memory of this process: in the kernel's list of what it has mapped."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(reader._memory))
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{address:x}-"))
    return 1024 * int(next(line for line in lines if line.startswith("Rss:")).split()[1])


def test_what_a_neighbour_laid_out_does_not_stay_in_this_process() -> None:
    """Protects the peak of memory: pages of messages are there once, and counted in sender and reader."""
    lender, values = Arena(), torch.randn(1 << 20)
    reader = Neighbour(lender.introduction())
    place, into = lender.lend(values, readers=(1,), marks=3), torch.empty(1 << 20)
    reader.copy(place, into)
    assert torch.equal(into, values)
    assert torch.equal(reader.read(place, num_elements=1 << 20, dtype=torch.float32), values)
    assert resident_here(reader) >= 4 << 20
    reader.leave(place, values.nbytes)
    assert resident_here(reader) <= 1 << 16
    assert torch.equal(reader.read(place, num_elements=1 << 20, dtype=torch.float32), values), "they come again"
    into.untyped_storage().resize_(0)  # of a parameter at stage 3: to be read into must not pin it


def other_process(introduced: Introduction) -> Introduction:
    return introduced._replace(process=os.getppid())


def other_kernel(introduced: Introduction) -> Introduction:
    return introduced._replace(boot="another")


def other_arena(introduced: Introduction) -> Introduction:
    return introduced._replace(token=b"0" * 16)


@pytest.mark.parametrize("change", [other_process, other_kernel, other_arena])
def test_only_the_arena_that_was_introduced_is_read(change: Callable[[Introduction], Introduction]) -> None:
    """Containers number their processes apart: behind the same numbers may be a pipe, or another job's arena."""
    with pytest.raises(OSError, match=r"arena|No such file|Permission"):
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


def leave_early() -> float:
    group = shard_group()
    values = torch.full((3_000_000,), 1.0 + group.rank)
    ops.broadcast(values, source=1, group=group)
    handle = ops.all_gather(values, bounds=(0, 1_500_000, 3_000_000), group=group)
    if group.rank == 0:
        time.sleep(0.5)
    handle.wait()
    return float(values.sum())


def test_what_a_rank_laid_out_outlives_it() -> None:
    """Protects the last message of a rank that ends before the others read it."""
    assert run_ranks(leave_early, 2) == [6_000_000.0, 6_000_000.0]


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


def check_gradients(stage: int) -> tuple[list[torch.Tensor], int]:
    strategy = hybrid.DistributedStrategy()
    strategy.sharding = True
    strategy.sharding_configs = {"stage": stage}
    torch.manual_seed(0)
    plain = torch.nn.Sequential(*(torch.nn.Linear(1100, 1100) for _ in range(3)))
    model = hybrid.distributed_model(plain, strategy=strategy)
    optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    rank = dist.get_rank()
    for step in range(3):
        for micro_batch in range(2):
            x = torch.randn(4, 1100, generator=torch.Generator().manual_seed(10 * step + 2 * micro_batch + rank))
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    given = arena().sent_bytes if model.hybrid_runtime.mesh.world.near else 0
    return [value.clone() for value in model.full_state_dict().values()], given


def gradients(way: str, stage: int) -> tuple[list[torch.Tensor], int]:
    os.environ[OFF_VARIABLE] = "1" if way == "shared" else "0"
    return check_gradients(stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_gives_the_same_bits_either_way(stage: int) -> None:
    """Protects gradients of several megabytes, which the others read where they lie while the next ones are made."""
    (shared, given), *_ = run_ranks(gradients, 2, "shared", stage)
    (over_gloo, none), *_ = run_ranks(gradients, 2, "gloo", stage)
    assert given > 3 * 4 * 1100 * 1100
    assert none == 0
    assert all(torch.equal(one, other) for one, other in zip(shared, over_gloo, strict=True))
