"""Live bytes of one process: all that torch's allocator gave out, and what autograd keeps for backward."""

from __future__ import annotations

import gc
import json
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from hybrid.collectives.shared_memory import arena

__all__ = ["Kept", "kept_by", "peak_of_last_step"]

_MARK = "measured step"

# With torch 2.13 a profiler that recorded memory crashed when it was freed (in ~MemoryTraceLogger), or losses of models
# trained in the same process afterwards drifted or became nan; kept ones did neither. So: one per process, and kept.
_never_freed: list[profile] = []


def peak_of_last_step(prepare: Callable[[], object], step: Callable[[], object], *, counts_shared: bool = False) -> int:
    """Most bytes alive during `step`, of all that was allocated since before `prepare`.

    Both run under the profiler, so nothing that lives during the step escapes. Buffers outside of torch (gloo's) do.
    With `counts_shared`, what lies in memory that ranks share when the update begins is added: gradients, which live
    through most of the step of a pipeline. Once per process, which is to leave by `os._exit`.
    """
    gc.collect()
    shared: list[int] = [0]
    if counts_shared:
        register_optimizer_step_pre_hook(lambda *_: shared.append(arena().lent_bytes))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        prepare()
        gc.collect()
        with record_function(_MARK):
            step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    _never_freed.append(profiler)
    begin, end = next((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == _MARK and "dur" in e)
    changes = sorted((e["ts"], e["args"]["Ev Idx"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    alive = most = 0
    for when, _, num_bytes in changes:
        before, alive = alive, alive + num_bytes
        if begin <= when <= end:
            most = max(most, before, alive)
    return most + max(shared)


class Holder:
    """Lives as long as autograd keeps the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Kept:
    """Bytes of the storages that autograd keeps now, and the most there were; parameters are not counted."""

    def __init__(self, model: nn.Module) -> None:
        self._whole = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._times: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self._now = 0
        self.most = 0

    def pack(self, tensor: torch.Tensor) -> Holder:
        holder = Holder(tensor)
        storage = tensor.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if num_bytes and address not in self._whole:
            if not self._times.get(address):
                self._bytes[address] = num_bytes
                self._now += num_bytes
                self.most = max(self.most, self._now)
            self._times[address] = self._times.get(address, 0) + 1
            weakref.finalize(holder, self._gone, address)
        return holder

    def _gone(self, address: int) -> None:
        self._times[address] -= 1
        if not self._times[address]:
            self._now -= self._bytes[address]


@contextmanager
def kept_by(model: nn.Module) -> Iterator[Kept]:
    """Count what autograd keeps of all that is computed inside."""
    kept = Kept(model)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda holder: holder.tensor):
        yield kept
