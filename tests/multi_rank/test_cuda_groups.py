"""NCCL's rules on the stand-in for CUDA, and what of the library they would stop."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.cuda_devices import cuda_devices
from tests.cuda_groups import order_problems
from tests.cuda_streams import Race
from tests.gpu_parity import Case, check
from tests.ranks import RankFailure, run_ranks


def rules() -> dict[str, Any]:
    rank = dist.get_rank()
    with cuda_devices(2) as machine:
        torch.cuda.set_device(rank)
        value = torch.full((4,), rank + 1.0, device="cuda")
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(torch.ones(2))
        with pytest.raises(TypeError, match=r"Unconvertible NCCL type torch\.int16"):
            dist.broadcast(torch.ones(2, dtype=torch.int16, device="cuda"), src=0)
        work = dist.all_reduce(value, async_op=True)
        with pytest.raises(Race, match="NCCL's stream of world"):
            value.sum()
        assert work is not None
        work.wait()
        assert value.tolist() == [3.0] * 4
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": 0}, {"rank": 1}]
        # Both send first: gloo has room for it, NCCL's stream of the two would wait for ever.
        works = [dist.isend(value, 1 - rank), dist.irecv(torch.empty(4, device="cuda"), 1 - rank)]
        for one in works:
            assert one is not None
            one.wait()
        return {"launches": machine.groups.launches, "problems": machine.problems()}


def test_groups_refuse_what_nccl_refuses() -> None:
    found = run_ranks(rules, 2)
    assert all(one["problems"] == [] for one in found)
    (problem,) = order_problems([one["launches"] for one in found])
    assert "pair 0 1: launch 0" in problem
    assert "isend" in problem


def without_order(case: Case) -> None:
    from hybrid.sharding import offload

    with cuda_devices(2), mock.patch.object(offload._OnStream, "order", return_value=None):
        check(case, on_stand_in=True)


def test_a_copy_of_offload_that_nobody_orders_is_found() -> None:
    """The stand-in sees the streams of the library: without this wait a unit computes with what is not there yet."""
    case = Case(ranks=2, stage=3, sharding={"offload": "parameters"})
    with pytest.raises(RankFailure, match=r"Race: .* does not wait for it"):
        run_ranks(without_order, 2, case)


def sent_types() -> list[Any]:
    from hybrid.collectives import ops
    from hybrid.collectives.group import Group

    rank = dist.get_rank()
    with cuda_devices(2) as machine:
        torch.cuda.set_device(rank)
        group = Group(
            process_group=dist.group.WORLD, ranks=(0, 1), rank=rank, axis="world", backend="nccl", timeout_seconds=20
        )
        found: list[Any] = []
        for dtype in (torch.int16, torch.bool, torch.complex64, torch.float32):
            value = torch.full((3,), 1 - rank, device="cuda").to(dtype)
            ops.broadcast(value, source=0, group=group)
            cut = torch.full((5,), rank + 1, device="cuda").to(dtype)
            ops.all_gather(cut, bounds=(0, 3, 5), group=group).wait()
            found += [value.tolist(), cut.tolist()]
        for bounds in ((0, 2, 4), (0, 3, 4)):
            numbers = torch.full((4,), complex(rank + 1, 2), device="cuda")
            out = torch.empty(bounds[rank + 1] - bounds[rank], dtype=numbers.dtype, device="cuda")
            ops.reduce_scatter(numbers, bounds=bounds, out=out, group=group).wait()
            assert out.tolist() == [3 + 4j] * len(out)
        assert machine.problems() == []
    return found


def test_every_dtype_of_a_model_can_be_sent_on_nccl() -> None:
    """Buffers of complex numbers (tables of rotary positions) and of 16-bit integers are broadcast at the start."""
    first, second = run_ranks(sent_types, 2)
    assert first == second
    assert first == [[1] * 3, [1, 1, 1, 2, 2], [True] * 3, [True] * 5] + [[1] * 3, [1, 1, 1, 2, 2]] * 2
