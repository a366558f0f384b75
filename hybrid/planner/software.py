"""The constants that a software stack brings to the time of a step: kernels, launches, overlap, fixed costs.

Named sets lie in `data/software.yaml`, each constant with unit, source, date and what it was fitted on. What belongs to
a device or a network is not here: see `contracts/cluster.py`, `data/matmul.yaml` and `data/collectives.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import MappingProxyType
from typing import Any

from hybrid.errors import PlanError
from hybrid.planner.data_file import read_data_file
from hybrid.planner.nearest import nearest

__all__ = ["Constant", "Software", "software_names", "software_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Where one constant comes from."""

    value: float
    unit: str
    source: str
    date: str
    fitted_on: str


@dataclass(frozen=True, kw_only=True)
class Software:
    """One stack.

    Args:
        name: of the set.
        matmul_fraction: of the rate that `matmul.py` gives for a shape.
        attention_fraction: of the rate of a fused attention kernel of today on that device.
        is_attention_native: 1 where the fused kernel is made for the device that runs it (FlashAttention-3, cuDNN), 0
            where it is made for A100 (FlashAttention-2).
        is_causal_skipped: 1 where the fused kernel skips the masked half, 0 where it computes the square.
        memory_fraction: of the memory bandwidth that pointwise kernels reach.
        traffic_fraction: of the pointwise traffic that is left after fusion.
        pairs_fraction: of the softmax traffic that is left after fusion, without fused attention.
        kernel_fraction: of the kernels that are left after fusion or captured graphs.
        launch_seconds: host time per kernel of a forward.
        backward_launch_factor: host time of a backward, in forwards.
        is_launch_ahead: 1 where the host launches while the device computes, 0 where each does so in turn (processors).
        micro_batch_seconds: host time per micro-batch and pipeline chunk beside the kernels.
        step_seconds: per optimizer step: reading data, synchronising, logging.
        backward_traffic: pointwise traffic of a backward, in forwards.
        backward_pairs: softmax traffic of a backward without fused attention, in forwards.
        tp_overlap_fraction: of tensor-parallel traffic hidden behind products in a forward.
        tp_backward_overlap_fraction: in a backward, where products of weight gradients do not wait for it.
        cp_overlap_fraction: of ring-attention traffic hidden behind attention.
        ep_overlap_fraction: of expert traffic hidden.
        is_ep_awaited: 1 where the host waits in each forward of a mixture for how many rows its experts get, so that
            launches are not ahead of the device, 0 where they stay there.
        ep_sent_fraction: of the rows for experts that travel; below 1 where a token goes once to a rank that holds
            several of its experts.
        dp_overlap_fraction: of the last backward that gradients can travel behind.
        gather_overlap_fraction: of parameter gathers after the step hidden behind the next forward (stages 1 and 2).
        unit_overlap_fraction: of a unit's compute that the next unit's gather can hide behind (stage 3).
        unit_messages: in which a unit of stage 3 travels; 0: the buckets into which the runtime lays it.
        contention: how much longer compute takes while a collective runs beside it.
        pp_exposed_fraction: of a transfer between stages during which both ranks wait.
        is_gradient_first: 1 where a stage sends the gradient of its input before it computes the products of weight
            gradients that can wait, 0 where it sends it behind the whole backward.
        is_scatter_gather: 1 where tp ranks send 1/tp of a boundary each and gather it (Megatron-LM without sp).
        collective_seconds: host and synchronising time per collective, beside its own latency.
        across_pipeline_seconds: host time per tp collective and rank of its group, where a pipeline crosses domains.
        collective_fraction: of the speed that `collectives.py` gives.
        across_fraction: of the rate of the network cards that a collective reaches between two domains.
        across_falloff: how that falls with the number of domains: as (domains / 2) ^ -falloff.
        across_step_seconds: per step between domains, beside the latency of the links.
        is_log_gather: 1 where gathers over one rank per domain take log2 steps (NCCL from 2.23), 0 for rings only.
        owner_seconds: per shard, where gradients and parameters travel in one message per owner instead of one
            collective for all.
        dp_bucket_bytes: gradients that travel together; 0: the buckets of the runtime, by `bucket_bytes` of the job.
        accumulate_bytes: read and written per element and micro-batch to add gradients to their accumulators, beside
            what the products of weight gradients write.
        optimizer_bytes: read and written per element by the step, beside what the state dtype says.
        optimizer_memory_fraction: of the memory bandwidth that the step reaches.
        host_memory_bytes_per_second: of one rank, where the optimizer steps on the host.
    """

    name: str = "hybrid"
    matmul_fraction: float = 1.0
    attention_fraction: float = 1.0
    is_attention_native: float = 1.0
    is_causal_skipped: float = 1.0
    memory_fraction: float = 0.75
    traffic_fraction: float = 1.0
    pairs_fraction: float = 1.0
    kernel_fraction: float = 1.0
    launch_seconds: float = 6e-6
    backward_launch_factor: float = 2.0
    is_launch_ahead: float = 1.0
    micro_batch_seconds: float = 0.0
    step_seconds: float = 5e-3
    backward_traffic: float = 1.5
    backward_pairs: float = 1.25
    tp_overlap_fraction: float = 0.0
    tp_backward_overlap_fraction: float = 0.0
    cp_overlap_fraction: float = 0.8
    ep_overlap_fraction: float = 0.0
    is_ep_awaited: float = 0.0
    ep_sent_fraction: float = 1.0
    dp_overlap_fraction: float = 0.8
    gather_overlap_fraction: float = 0.0
    unit_overlap_fraction: float = 0.9
    unit_messages: float = 0.0
    contention: float = 1.1
    pp_exposed_fraction: float = 0.0
    is_gradient_first: float = 0.0
    is_scatter_gather: float = 0.0
    collective_seconds: float = 0.0
    across_pipeline_seconds: float = 0.0
    collective_fraction: float = 1.0
    across_fraction: float = 0.88
    across_falloff: float = 0.0
    across_step_seconds: float = 14e-6
    is_log_gather: float = 0.0
    owner_seconds: float = 0.0
    dp_bucket_bytes: float = 0.0
    accumulate_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    optimizer_memory_fraction: float = 0.7
    host_memory_bytes_per_second: float = 20e9
    sources: Mapping[str, Constant] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))


def software_names() -> tuple[str, ...]:
    """The sets of `data/software.yaml`."""
    return tuple(_sets())


@cache
def software_of(name: str) -> Software:
    """The set of this name.

    Raises:
        PlanError: no set has this name.
    """
    sets = _sets()
    if name not in sets:
        raise PlanError(f"software {name!r} is not known{nearest(name, sets)}")
    entries = dict(sets[name])
    parent = entries.pop("extends", None)
    base = software_of(parent) if parent else Software()
    known = {item.name for item in fields(Software)} - {"name", "sources"}
    strangers = sorted(set(entries) - known)
    if strangers:
        raise PlanError(f"software.yaml: {name}.{strangers[0]} is no constant{nearest(strangers[0], known)}")
    sources = {constant: Constant(**{"fitted_on": "", **entry}) for constant, entry in entries.items()}
    values = {item: getattr(base, item) for item in known} | {c: float(entry.value) for c, entry in sources.items()}
    return Software(name=name, sources={**base.sources, **sources}, **values)


@cache
def _sets() -> dict[str, dict[str, Any]]:
    return dict(read_data_file("software.yaml"))
