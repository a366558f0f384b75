"""Every field of Fleet's `DistributedStrategy` that has no field of the same meaning here, and what becomes of it.

    maps     the value is used, as one of our settings (`fuse_grad_size_in_MB` -> `bucket_bytes`)
    agrees   whatever is asked for is what always happens here; accepted, with a note in `explain()`
    refuses  not done here: the value that means "off" is accepted, any other is refused with the reason

Read the table as: section, key, answer. Fields that are plain aliases of ours (`sharding_degree`, `mp_degree`,
`incr_every_n_steps`, ...) stand with the sections themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybrid.strategy.fleet_refusals import REFUSALS
from hybrid.strategy.values import one_of, read_boolean, whole

__all__ = ["FleetField", "fleet_field", "fleet_keys", "mapped_values"]

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetField:
    """One field of Fleet: how its value is read and what it does here."""

    section: str
    key: str
    reader: Callable[[object], Any]
    schema: Mapping[str, Any]
    note: str
    setting: str | None = None
    """The setting of ours that it gives a value; None where it changes nothing."""
    convert: Callable[[Any], Any] | None = None
    """How its value becomes one of ours, where it is not the same; None where it asks for nothing."""
    also: Mapping[str, Any] = field(default_factory=dict)
    """What it gives besides `setting` (`use_pure_bf16` is a level and a dtype)."""
    off: tuple[Any, ...] = ()
    """Values that ask for nothing (of a refused field)."""
    refused: bool = False

    @property
    def path(self) -> str:
        return f"{self.section}.{self.key}" if self.section else self.key

    @property
    def acceptable(self) -> bool:
        """Whether any value at all can be given."""
        return not self.refused or bool(self.off)

    def read(self, value: object) -> Any:
        """The value, converted; ValueError where it cannot be taken."""
        if not self.refused:
            return self.reader(value)
        for off in self.off:
            if _same(value, off):
                return off
        accepted = f" (only {' or '.join(map(repr, self.off))} is accepted)" if self.off else ""
        raise ValueError(f"{self.note}{accepted}")


def _same(value: object, off: object) -> bool:
    if isinstance(off, bool):
        try:
            return read_boolean(value) is off
        except ValueError:
            return False
    if isinstance(off, int):
        try:
            return whole(off, off)(value) == off
        except ValueError:
            return False
    return value == off


_BOOL: Mapping[str, Any] = {"type": "boolean"}
_read_count = whole(1)
_COUNT: Mapping[str, Any] = {"type": "integer", "minimum": 1}


def _maps(
    path: str,
    setting: str,
    note: str,
    *,
    reader: Callable[[object], Any] = _read_count,
    schema: Mapping[str, Any] = _COUNT,
    convert: Callable[[Any], Any] | None = None,
    also: Mapping[str, Any] | None = None,
) -> FleetField:
    section, _, key = path.rpartition(".")
    return FleetField(
        section=section,
        key=key,
        reader=reader,
        schema=schema,
        note=note,
        setting=setting,
        convert=convert,
        also=also or {},
    )


def _agrees(
    path: str, note: str, *, reader: Callable[[object], Any] = read_boolean, schema: Mapping[str, Any] = _BOOL
) -> FleetField:
    section, _, key = path.rpartition(".")
    return FleetField(section=section, key=key, reader=reader, schema=schema, note=note)


def _read_degree(value: object) -> int:
    number = whole(-1, name="a degree")(value)
    if number == 0:
        raise ValueError("0 is not a degree; 1 switches the axis off, -1 has it derived from the world size")
    return number


_DEGREE: Mapping[str, Any] = {"type": "integer", "minimum": -1, "not": {"const": 0}}
_SEED: Mapping[str, Any] = {"type": "integer", "minimum": -1}


def _degree(path: str, setting: str, name: str) -> FleetField:
    return _maps(path, setting, f"is the {name}", reader=_read_degree, schema=_DEGREE)


_USED = (
    # ---- one bucket size for all collectives of sharding and data parallel
    _maps("fuse_grad_size_in_MB", "bucket_bytes", "is bucket_bytes, in MiB", convert=lambda mib: mib * _MIB),
    _maps(
        "sharding_configs.segment_broadcast_MB",
        "bucket_bytes",
        "is bucket_bytes, in MiB",
        convert=lambda mib: mib * _MIB,
    ),
    _maps(
        "hybrid_configs.sharding_configs.comm_buffer_size_MB",
        "bucket_bytes",
        "is bucket_bytes, in MiB",
        convert=lambda mib: mib * _MIB,
    ),
    # ---- low precision
    _maps(
        "fp16_allreduce",
        "reduce_dtype",
        "true is reduce_dtype 'float16', false leaves it open",
        reader=read_boolean,
        schema=_BOOL,
        convert=lambda on: "float16" if on else None,
    ),
    *(
        _maps(
            f"amp_configs.{key}",
            "amp_level",
            f"true is level 'O2' with dtype {dtype!r}, false leaves them open",
            reader=read_boolean,
            schema=_BOOL,
            convert=lambda on: "O2" if on else None,
            also={"amp_dtype": dtype},
        )
        for key, dtype in (("use_pure_fp16", "float16"), ("use_pure_bf16", "bfloat16"))
    ),
    # ---- host memory
    _maps(
        "sharding_configs.optimize_offload",
        "offload",
        "true is offload 'optimizer', false leaves it open",
        reader=read_boolean,
        schema=_BOOL,
        convert=lambda on: "optimizer" if on else None,
    ),
    # ---- accumulation under three names
    _maps("sharding_configs.gradient_merge_acc_step", "accumulate_steps", "is accumulate_steps"),
    _maps("hybrid_configs.sharding_configs.accumulate_steps", "accumulate_steps", "is accumulate_steps"),
    # ---- degrees in the older place
    _degree("sharding_configs.dp_degree", "dp_replicate", "number of replicas of the cut state (dp_replicate)"),
    _degree("sharding_configs.mp_degree", "tp", "tensor-parallel degree"),
    _degree("sharding_configs.pp_degree", "pp", "number of pipeline stages"),
    # ---- overlap
    *(
        _maps(
            f"hybrid_configs.{path}",
            "overlap_comm",
            "is overlap_comm",
            reader=read_boolean,
            schema=_BOOL,
        )
        for path in (
            "sharding_configs.comm_overlap",
            "pp_configs.sharding_comm_overlap",
            "pp_configs.dp_comm_overlap",
        )
    ),
    # ---- how state is cut: Fleet's V1 gives whole parameters to ranks, V2 (split_param) cuts flat buffers
    _maps(
        "hybrid_configs.sharding_configs.split_param",
        "partition",
        "is partition: true cuts anywhere ('element'), false gives each parameter whole to one rank",
        reader=read_boolean,
        schema=_BOOL,
        convert=lambda split: "element" if split else "parameter",
    ),
    _maps(
        "gradient_scale_configs.scale_strategy",
        "loss_reduction",
        "is loss_reduction: 'avg' is 'mean'",
        reader=one_of("avg", "sum"),
        schema={"enum": ["avg", "sum"]},
        convert=lambda word: {"avg": "mean"}.get(word, word),
    ),
    _maps(
        "tensor_parallel_configs.tensor_init_seed",
        "seed",
        "is seed; -1 leaves it open",
        reader=whole(-1),
        schema=_SEED,
        convert=lambda seed: None if seed == -1 else seed,
    ),
)

_ALWAYS = (
    _agrees("find_unused_parameters", "unused parameters are always handled, at no cost when there are none"),
    _agrees("fuse_all_reduce_ops", "gradients always travel in buckets; bucket_bytes is their size"),
    _agrees("fuse_grad_merge", "accumulation always runs on flat buffers"),
    _agrees("sync_nccl_allreduce", "collectives are always waited for before their result is read"),
    _agrees("without_graph_optimization", "there is no static graph: nothing is optimized away either way"),
    _agrees("sharding_configs.hybrid_dp", "replicas follow from the degrees: dp_degree or world size / shard_size"),
    _agrees("hybrid_configs.split_norm_comm", "the gradient norm is always one all-reduce over the world"),
    _agrees("hybrid_configs.mp_configs.need_broadcast_data", "whether tp ranks got one batch is checked instead"),
    _agrees("hybrid_configs.mp_configs.sync_param", "replicated weights are equal by construction"),
    _agrees("hybrid_configs.mp_configs.sync_grad", "replicated weights are equal by construction"),
    _agrees("hybrid_configs.mp_configs.sync_moment", "replicated weights are equal by construction"),
    _agrees("hybrid_configs.pp_configs.sync_param", "weights held by several stages are equal by construction"),
    _agrees("hybrid_configs.pp_configs.sync_grad", "weights held by several stages are equal by construction"),
    _agrees("hybrid_configs.pp_configs.sync_moment", "weights held by several stages are equal by construction"),
    _agrees("hybrid_configs.pp_configs.delay_scale_loss", "gradients are scaled in one place, once"),
    _agrees("hybrid_configs.pp_configs.release_gradients", "gradient buffers are freed as the stage says"),
    _agrees("hybrid_configs.pp_configs.enable_dynamic_shape", "shapes may change between steps anyway"),
    _agrees("hybrid_configs.sharding_configs.tensor_fusion", "parameters always live in flat buckets"),
    _agrees("hybrid_configs.sharding_configs.fuse_optimizer", "your optimizer runs on the shards as it is"),
    _agrees("hybrid_configs.sharding_configs.use_reduce_avg", "the mean is exact either way; scaled in one place"),
    _agrees("hybrid_configs.sharding_configs.release_gradients", "gradient buffers are freed as the stage says"),
    _agrees("hybrid_configs.sharding_configs.free_grads_in_comm", "gradient buffers are freed as the stage says"),
    _agrees("pipeline_configs.p2p_cache_shape", "shapes travel with each message, in its header"),
)


def _refusals() -> list[FleetField]:
    fields = []
    for path, off, reason in REFUSALS:
        section, _, key = path.rpartition(".")
        fields.append(
            FleetField(
                section=section,
                key=key,
                reader=lambda value: value,
                schema={"enum": list(off)},
                note=reason,
                off=off,
                refused=True,
            )
        )
    return fields


_TABLE: dict[tuple[str, str], FleetField] = {
    (field.section, field.key): field for field in (*_USED, *_ALWAYS, *_refusals())
}


def fleet_field(section: str, key: str) -> FleetField | None:
    """The answer to Fleet's field `key` in `section` ("" is the strategy itself)."""
    return _TABLE.get((section, key))


def fleet_keys(section: str) -> tuple[str, ...]:
    """Fleet's fields that can be given a value in this section."""
    return tuple(key for (home, key), field in _TABLE.items() if home == section and field.acceptable)


def mapped_values(field: FleetField, value: Any) -> dict[str, Any]:
    """Fleet's value as values of our settings; empty where it asks for nothing."""
    ours = value if field.convert is None else field.convert(value)
    return {} if field.setting is None or ours is None else {field.setting: ours, **field.also}
