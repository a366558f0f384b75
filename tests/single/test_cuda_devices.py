"""The stand-in for CUDA finds what it is there to find."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from tests.cuda_devices import cuda_devices
from tests.cuda_streams import Race


def test_tensors_say_where_they_would_be_and_do_not_mix() -> None:
    with cuda_devices(2):
        here = torch.randn(4, 4, device="cuda")
        assert here.is_cuda
        assert here.t().device == (here + 1).device == torch.device("cuda", 0)
        assert here.to("cuda") is here
        assert not here.cpu().is_cuda
        with pytest.raises(RuntimeError, match="same device, but found at least two devices"):
            here + torch.ones(4)
        with pytest.raises(RuntimeError, match="same device"):
            here @ torch.ones(4, 4, device="cuda:1")
        assert (here + torch.tensor(1.0)).is_cuda  # a number of the host's
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            here.numpy()
        layer = nn.Linear(4, 4).to("cuda")
        assert copy.deepcopy(layer).weight.is_cuda
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(here).dtype == torch.float32
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = layer(here)
        assert output.dtype == torch.bfloat16
        output.float().sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.is_cuda
        torch.optim.AdamW(layer.parameters()).step()
    assert not torch.cuda.is_available()
    assert here.device.type == "cpu"


def test_two_streams_that_do_not_wait_for_each_other_are_found() -> None:
    with cuda_devices() as machine:
        copies, value = torch.cuda.Stream(), torch.ones(3, device="cuda")
        with torch.cuda.stream(copies), pytest.raises(Race, match=r"aten::add_ by stream .* writes .* does not wait"):
            value.add_(1)  # it is told once it has been done
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            value.add_(1)
            done = copies.record_event()
        with pytest.raises(Race, match="reads bytes 0 to 12"):
            value.sum()
        torch.cuda.current_stream().wait_event(done)
        assert value.sum().item() == 9
        assert machine.problems() == []


def test_memory_that_is_freed_while_another_stream_uses_it_is_found() -> None:
    with cuda_devices() as machine:
        copies = torch.cuda.Stream()

        def use(*, records: bool) -> None:
            value = torch.ones(3, device="cuda")
            copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(copies):
                value.add_(1)
            if records:
                value.record_stream(copies)

        use(records=True)
        gc.collect()
        assert machine.problems() == []
        use(records=False)
        gc.collect()
        (problem,) = machine.problems()
        assert "goes back to the compute stream of cuda:0 while aten::add_" in problem


def test_the_host_that_reads_before_a_copy_has_come_is_found() -> None:
    """Only pinned memory goes beside the host; into any other the copy keeps it."""
    with cuda_devices() as machine:
        source = torch.ones(3, device="cuda")
        torch.empty(3).copy_(source, non_blocking=True).add_(1)
        pinned = torch.empty(3, pin_memory=True)
        pinned.copy_(source, non_blocking=True)
        done = torch.cuda.current_stream().record_event()
        with pytest.raises(Race, match="by the host reads"):
            pinned.sum()
        done.synchronize()
        assert pinned.sum() == 3
        waits = sum(machine.host_waits.values())
        source.sum().item()
        assert sum(machine.host_waits.values()) == waits + 1


def test_each_device_has_a_generator_whose_state_is_a_seed_and_an_offset() -> None:
    with cuda_devices(2):
        torch.manual_seed(5)
        host = torch.get_rng_state()
        state = torch.cuda.get_rng_state()
        first = torch.rand(3, device="cuda")
        assert len(state) == 16
        assert not torch.equal(first, torch.rand(3, device="cuda"))
        torch.cuda.set_rng_state(state)
        assert torch.equal(first, torch.rand(3, device="cuda"))
        assert torch.equal(host, torch.get_rng_state())
        with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
            torch.rand(3, device="cuda", generator=torch.Generator())
