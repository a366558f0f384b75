"""Collectives on real gloo worlds: right results, the same bits in every way, errors instead of hangs."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hybrid.collectives import exchange, ops
from hybrid.collectives.deferred import deferred_backend
from hybrid.collectives.group import Group
from hybrid.collectives.point_to_point import Stream
from hybrid.collectives.shared_memory import OFF_VARIABLE, arena
from hybrid.errors import CollectiveError
from tests.multi_rank.worlds import rank_buffer, shard_group
from tests.ranks import RankFailure, run_ranks

# Inside the header's message; alone; in two rounds and several segments (of 128 KB, so that the test is quick).
NUM_ELEMENTS = (0, 1, 5, 999, 40_001, 300_007)
SEGMENT_BYTES = 1 << 17
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.complex128)
# The rest that a model's buffers may have: no sum of these is asked for.
COPIED_DTYPES = (torch.bool, torch.int8, torch.uint16, torch.uint32, torch.uint64, torch.complex32)
COPIED_DTYPES += (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)


def raw_buffer(rank: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits."""
    generator = torch.Generator().manual_seed(rank)
    most = 2 if dtype is torch.bool else 256
    return torch.randint(most, (num_elements * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


def expected_sum(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """x0 + x1 + ..., in rank order, low precision in float32 and rounded once."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = rank_buffer(0, num_elements, dtype).to(wide)
    for rank in range(1, dist.get_world_size()):
        total = total + rank_buffer(rank, num_elements, dtype).to(wide)
    return total.to(dtype)


def bounds_of(num_elements: int, size: int, kind: str) -> tuple[int, ...]:
    """Shards of equal size, of growing size, or all in the last rank but one (the others are empty)."""
    if kind == "even":
        return ops.even_bounds(num_elements, size)
    if kind == "uneven":
        return (*(num_elements * index**2 // size**2 for index in range(size)), num_elements)
    owner = max(size - 2, 0)
    return tuple(0 if index <= owner else num_elements for index in range(size + 1))


def group_by_way(way: str) -> Group:
    """Messages through shared memory or over gloo."""
    if way == "gloo":
        os.environ[OFF_VARIABLE] = "0"
    group = shard_group()
    assert bool(group.near) == (way != "gloo" and group.size > 1)
    return group


def check_results(way: str) -> None:
    group = group_by_way(way)
    rank, size = group.rank, group.size
    exchange._SEGMENT_BYTES = SEGMENT_BYTES
    for num_elements in NUM_ELEMENTS:
        for dtype in DTYPES:
            total = expected_sum(num_elements, dtype)
            what = f"{num_elements} {dtype}"
            buffer = rank_buffer(rank, num_elements, dtype)
            ops.all_reduce(buffer, group=group).wait()
            assert torch.equal(buffer, total), f"all_reduce {what}"
            for kind in ("even", "uneven", "one owner"):
                bounds = bounds_of(num_elements, size, kind)
                own = slice(bounds[rank], bounds[rank + 1])
                buffer = rank_buffer(rank, num_elements, dtype)
                ops.reduce_scatter(buffer, bounds=bounds, group=group).wait()
                assert torch.equal(buffer[own], total[own]), f"reduce_scatter {what} {kind}"
                ops.all_gather(buffer, bounds=bounds, group=group).wait()
                assert torch.equal(buffer, total), f"all_gather {what} {kind}"
                buffer, out = rank_buffer(rank, num_elements, dtype), torch.empty_like(buffer[own])
                ops.reduce_scatter(buffer, bounds=bounds, group=group, out=out).wait()
                assert torch.equal(out, total[own]), f"reduce_scatter elsewhere {what} {kind}"
            for source in range(size):
                buffer = rank_buffer(rank, num_elements, dtype)
                ops.broadcast(buffer, source=source, group=group)
                assert torch.equal(buffer, rank_buffer(source, num_elements, dtype)), f"broadcast {what}"
    for dtype in COPIED_DTYPES:
        for num_elements in (3, 40_001):
            everyone = [raw_buffer(each, num_elements, dtype) for each in range(size)]
            buffer, bounds = everyone[rank].clone(), ops.even_bounds(num_elements, size)
            ops.all_gather(buffer, bounds=bounds, group=group).wait()
            own = (one[start:end] for one, start, end in zip(everyone, bounds, bounds[1:], strict=False))
            assert torch.equal(buffer.view(torch.uint8), torch.cat([part.view(torch.uint8) for part in own])), dtype
            buffer = everyone[rank].clone()
            ops.broadcast(buffer, source=size - 1, group=group)
            assert torch.equal(buffer.view(torch.uint8), everyone[-1].view(torch.uint8)), f"broadcast {dtype}"
    for op, reference in (("max", torch.maximum), ("min", torch.minimum)):
        buffer = rank_buffer(rank, 1234, torch.float32)
        expected = rank_buffer(0, 1234, torch.float32)
        for other in range(1, size):
            expected = reference(expected, rank_buffer(other, 1234, torch.float32))
        ops.all_reduce(buffer, group=group, op=op).wait()
        assert torch.equal(buffer, expected), op
    ops.barrier(group)
    assert arena().lent_bytes == 0, "what every rank has read is free again"


@pytest.mark.parametrize(
    ("way", "world_size"),
    [
        ("gloo", 1),
        ("gloo", 2),
        ("gloo", 3),
        ("gloo", 4),
        ("shared", 2),
        ("shared", 3),
        ("shared", 4),
        ("small segments", 3),
    ],
)
def test_every_collective_gives_the_plain_result(way: str, world_size: int) -> None:
    """Protects the sums and copies themselves, for each way of carrying them, uneven and empty shards."""
    run_ranks(check_results, world_size, way)


def check_against_torch() -> None:
    group = shard_group()
    buffer = rank_buffer(group.rank, 10_001, torch.float32)
    theirs = buffer.clone()
    ops.all_reduce(buffer, group=group).wait()
    dist.all_reduce(theirs)
    torch.testing.assert_close(buffer, theirs, rtol=1e-6, atol=1e-6)


def test_all_reduce_agrees_with_torch() -> None:
    """Protects against a mistake shared by our sum and the test's own reference."""
    run_ranks(check_against_torch, 3)


def check_offset_and_way_change_no_bit() -> None:
    group = group_by_way("shared")
    over_gloo = dataclasses.replace(group, near={})
    values = rank_buffer(group.rank, 6_001, torch.float32)
    results = []
    for two_rounds_bytes, segment_bytes in ((1 << 60, 1 << 22), (0, 1 << 22), (0, 1 << 12), (1 << 60, 1 << 12)):
        exchange._TWO_ROUNDS_BYTES = two_rounds_bytes
        exchange._SEGMENT_BYTES = segment_bytes
        for offset in (0, 17, 4_000):
            buffer = torch.ones(12_000)
            for way in (group, over_gloo):
                buffer[offset : offset + len(values)] = values
                ops.all_reduce(buffer, group=way).wait()
                results.append(buffer[offset : offset + len(values)].clone())
    small = values[:100].clone()
    ops.all_reduce(small, group=group).wait()
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.equal(small, results[0][:100])
    digests = ops.all_gather_object(results[0].tolist(), group=group)
    assert all(digest == digests[0] for digest in digests)


def test_the_sum_does_not_depend_on_size_place_or_algorithm() -> None:
    """Protects the promise that stages and bucket maps which reduce differently agree to the bit."""
    run_ranks(check_offset_and_way_change_no_bit, 4)


def check_many_in_flight(way: str) -> None:
    group = group_by_way(way)
    rank, size = group.rank, group.size
    for _ in range(3):
        buffers, handles = [], []
        for tag in range(40):
            num_elements = 100 + 1777 * tag
            buffer = rank_buffer(rank, num_elements, torch.float32) + tag
            bounds = ops.even_bounds(num_elements, size)
            if tag % 3 == 0:
                handles.append(ops.all_reduce(buffer, group=group, tag=tag))
            elif tag % 3 == 1:
                handles.append(ops.reduce_scatter(buffer, bounds=bounds, group=group, tag=tag))
            else:
                handles.append(ops.all_gather(buffer, bounds=bounds, group=group, tag=tag))
            buffers.append(buffer)
        # Waited for in another order on each rank.
        for tag in sorted(range(40), key=lambda tag: (tag * 7 + rank * 13) % 40):
            handles[tag].wait()
            handles[tag].wait()
        for tag, buffer in enumerate(buffers):
            everyone = [rank_buffer(other, len(buffer), torch.float32) + tag for other in range(size)]
            bounds = ops.even_bounds(len(buffer), size)
            own = slice(bounds[rank], bounds[rank + 1])
            if tag % 3 == 2:
                parts = [everyone[i][bounds[i] : bounds[i + 1]] for i in range(size)]
                assert torch.equal(buffer, torch.cat(parts)), tag
            else:
                total = everyone[0]
                for part in everyone[1:]:
                    total = total + part
                checked = own if tag % 3 == 1 else slice(None)
                assert torch.equal(buffer[checked], total[checked]), tag


@pytest.mark.parametrize(("way", "world_size"), [("gloo", 4), ("shared", 2), ("shared", 4)])
def test_many_collectives_in_flight_do_not_mix(way: str, world_size: int) -> None:
    """Protects concurrent buckets: 40 calls in flight, waited for in a different order on each rank, twice."""
    run_ranks(check_many_in_flight, world_size, way)


def check_objects() -> None:
    group = shard_group()
    payload = {"rank": group.rank, "text": "x" * (group.rank * 5_000)}
    everyone = ops.all_gather_object(payload, group=group)
    assert [item["rank"] for item in everyone] == list(range(group.size))
    assert [len(item["text"]) for item in everyone] == [rank * 5_000 for rank in range(group.size)]
    arrived = time.time()
    if group.rank == 0:
        time.sleep(0.3)
        arrived = time.time()
    ops.barrier(group)
    assert time.time() >= max(ops.all_gather_object(arrived, group=group)) - 0.01


def test_objects_and_barrier() -> None:
    """Protects control traffic: objects of unequal size, and that nobody passes a barrier early."""
    run_ranks(check_objects, 3)


# -- errors ---------------------------------------------------------------------------------------------------


def launch_differently(kind: str) -> None:
    group = shard_group(timeout_seconds=4.0)
    large = torch.ones(300_000)
    if kind == "size, small":
        ops.all_reduce(torch.ones(10 + group.rank), group=group).wait()
    elif kind == "size, large":
        ops.all_reduce(torch.ones(300_000 + group.rank), group=group).wait()
    elif kind == "bounds":
        middle = 100_000 + group.rank
        ops.reduce_scatter(large, bounds=(0, middle, 300_000), group=group).wait()
    elif kind == "operation" and group.rank == 0:
        ops.all_reduce(large, group=group, tag=1).wait()
    elif kind == "operation":
        ops.reduce_scatter(large, bounds=(0, 150_000, 300_000), group=group, tag=2).wait()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("size, small", ("10 float32 (40 bytes)", "11 float32 (44 bytes)", "buffers of one size")),
        ("size, large", ("300000 float32", "300001 float32", "buffers of one size")),
        ("bounds", ("reduce_scatter(sum)", "shard bounds")),
        ("operation", ("all_reduce(sum)", "reduce_scatter(sum)", "in the same order")),
    ],
)
def test_unequal_calls_are_errors_that_name_both(kind: str, said: tuple[str, ...]) -> None:
    """Protects against gloo's abort on a longer message, and its silence on a shorter one."""
    started = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(launch_differently, 2, kind, timeout_seconds=10)
    assert time.monotonic() - started < 4.0, "a mismatch is known from the header, not from the timeout"
    errors = [report.error for report in failure.value.reports]
    assert all(error.startswith("CollectiveError") and "dp_shard" in error for error in errors)
    assert any(all(text in error for text in said) for error in errors), errors


def go_wrong(kind: str, way: str) -> None:
    os.environ[OFF_VARIABLE] = "1" if way == "shared" else "0"
    group = shard_group(timeout_seconds=1.0)
    buffer = torch.ones(300_000)
    ops.all_reduce(torch.ones(3), group=group, tag=5).wait()
    if group.rank == 1:
        ops.all_gather(buffer, bounds=ops.even_bounds(len(buffer), group.size), group=group)
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "raises":
            raise ValueError("a fault of rank 1")
        time.sleep(30)
    ops.all_gather(buffer, bounds=ops.even_bounds(len(buffer), group.size), group=group).wait()
    ops.all_reduce(buffer, group=group, tag=7).wait()


@pytest.mark.parametrize(("way", "world_size"), [("gloo", 4), ("shared", 2), ("shared", 4)])
@pytest.mark.parametrize("kind", ["killed", "raises", "hangs"])
def test_a_rank_that_goes_ends_all_within_the_timeout(kind: str, way: str, world_size: int) -> None:
    """Protects against jobs that hang for ever, and errors that do not say what was waited for."""
    with pytest.raises(RankFailure) as failure:
        run_ranks(go_wrong, world_size, kind, way, timeout_seconds=3.5)
    reports = failure.value.reports
    own_end = {"killed": "exit code -9", "raises": "ValueError: a fault of rank 1", "hangs": "silent"}
    assert own_end[kind] in reports[1].error
    for report in reports[:1] + reports[2:]:
        assert report.seconds < 3.0
        assert "CollectiveError" in report.error
        assert "dp_shard" in report.error
        assert "(timeout 1 s)" in report.error
        assert "tag 5: launched" in report.error, "the collectives before the failing one"
    if kind == "hangs":
        assert "nothing came from rank 1" in reports[0].error
        assert "time.sleep(30)" in reports[1].traceback or "go_wrong" in reports[1].traceback


# -- the deferred backend -------------------------------------------------------------------------------------


def check_deferred_results() -> None:
    group = shard_group()
    with deferred_backend():
        buffers = [rank_buffer(group.rank, 1_000 + index, torch.float32) for index in range(6)]
        handles = [ops.all_reduce(buffer, group=group, tag=index) for index, buffer in enumerate(buffers)]
        assert all(buffer.isnan().all() for buffer in buffers)
        for index in (5, 0, 3, 1, 2, 4):
            handles[index].wait()
            assert torch.equal(buffers[index], expected_sum(1_000 + index, torch.float32))
        bounds = ops.even_bounds(1_000, group.size)
        shards = rank_buffer(group.rank, 1_000, torch.float32)
        ops.reduce_scatter(shards, bounds=bounds, group=group).wait()
        own = slice(bounds[group.rank], bounds[group.rank + 1])
        assert torch.equal(shards[own], expected_sum(1_000, torch.float32)[own])
        assert int(shards.isnan().sum()) == 1_000 - len(shards[own]), "the rest is undefined, so it shows NaN"
        other, out = rank_buffer(group.rank, 1_000, torch.float32), torch.empty_like(shards[own])
        handle = ops.reduce_scatter(other, bounds=bounds, group=group, out=out)
        assert out.isnan().all()
        handle.wait()
        assert torch.equal(out, shards[own])
        assert other.isnan().all()
        ops.all_gather(shards, bounds=bounds, group=group).wait()
        assert torch.equal(shards, expected_sum(1_000, torch.float32))
        counts = torch.ones(4, dtype=torch.int64)
        ops.all_reduce(counts, group=group).wait()
        assert counts.tolist() == [group.size] * 4
        ops.release(shards)
        assert shards.isnan().all()
    ops.release(counts)
    assert counts.tolist() == [group.size] * 4, "the real backend leaves released buffers alone"


def test_the_deferred_backend_gives_the_same_results() -> None:
    """Protects the test backend itself: late, in any order of waits, and NaN wherever nothing is promised."""
    run_ranks(check_deferred_results, 3)


def check_deferred_faults() -> None:
    group = shard_group()
    with deferred_backend():
        forgotten = torch.ones(100)
        ops.all_reduce(forgotten, group=group)
        other = torch.ones(100)
        ops.all_reduce(other, group=group).wait()
        assert torch.equal(other, torch.full((100,), float(group.size)))
        assert forgotten.isnan().all(), "nobody waited for it, so nobody may see its result"
        for write in WRITES:
            written = torch.ones(100)
            handle = ops.all_reduce(written, group=group, tag=3)
            write(written)
            with pytest.raises(CollectiveError, match=r"tag 3.*written to between launch and wait.*first at 41"):
                handle.wait()


def write_one(buffer: torch.Tensor) -> None:
    buffer[41] = 1.0


def write_some(buffer: torch.Tensor) -> None:
    buffer[41:50].copy_(torch.zeros(9))


WRITES: tuple[Callable[[torch.Tensor], None], ...] = (write_one, write_some)


def test_the_deferred_backend_shows_planted_faults() -> None:
    """Protects every test that runs on it: a missing wait and a write in flight do not pass unseen."""
    run_ranks(check_deferred_faults, 2)


def check_deferred_messages(spoil: Callable[[torch.Tensor], None]) -> None:
    group = shard_group()
    stream = Stream(group, headers=group, peer=1 - group.rank, device=torch.device("cpu"))
    with deferred_backend():
        values = torch.randn(1000, generator=torch.Generator().manual_seed(group.rank))
        kept = values.clone()
        stream.send("first", None, [values], window=2)
        _, (got,) = stream.receive("first")
        assert torch.equal(got, torch.randn(1000, generator=torch.Generator().manual_seed(1 - group.rank)))
        stream.flush()
        assert torch.equal(values, kept)
        if group.rank == 0:
            stream.send("second", None, [values], window=2)
            spoil(values)
            with pytest.raises(CollectiveError, match="written to or released before the peer had the message"):
                stream.flush()


def release(buffer: torch.Tensor) -> None:
    buffer.untyped_storage().resize_(0)


@pytest.mark.parametrize("spoil", [write_one, release])
def test_the_deferred_backend_shows_messages_that_were_touched(spoil: Callable[[torch.Tensor], None]) -> None:
    """A pipeline stage frees and reuses what it has sent: too early, and gloo sends other numbers now and then."""
    run_ranks(check_deferred_messages, 2, spoil)
