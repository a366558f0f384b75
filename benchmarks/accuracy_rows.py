"""Published runs as what the planner takes: a job, the layout that ran, the seconds of a step.

The facts lie in `benchmarks/data/`, one row per run. What is published about a whole data set (device, network, number
formats, kernels) and what is not (and is assumed here) stands in `SETTINGS`; `accuracy_others.csv` names devices and
formats run by run.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from benchmarks.accuracy_models import model_of
from hybrid.contracts.cluster import Cluster, parse_cluster
from hybrid.planner.job import Candidate, Job, Precision
from hybrid.planner.memory import memory

__all__ = ["DATA", "SETTINGS", "Point", "Setting", "datasets", "points"]

DATA = Path(__file__).parent / "data"

# Gradients accumulate and travel in the parameters' own format, without `--accumulate-allreduce-grads-in-fp32`.
_FP16 = Precision(compute="fp16", gradient=2, reduce=2)
_BF16 = Precision(compute="bf16", gradient=2, reduce=2)
_BF16_FP32_GRADIENTS = Precision(compute="bf16", gradient=4, reduce=4)
# PaLM's and Megatron-LM's count: the whole attention square; the other one counts the half that causal masks leave.
Flops = Literal["hardware", "model", "model_causal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all runs of a data set share.

    Args:
        title: for the table.
        software: set of constants in `hybrid/planner/data/software.yaml`.
        device, per_node, network: of the machines.
        precision, is_flash: as published, or as the software did then.
        flops: how throughput was counted where it is printed instead of seconds.
        limit: largest median error that the project allows itself, percent; None: reported only.
        is_bounded: whether the bound of the 90th percentile and that of the order of layouts are for it.
        fit: which rows the constants of `software` may be fitted on, as shown to the reader.
    """

    title: str
    software: str
    device: str
    per_node: int
    network: str
    precision: Precision
    is_flash: bool
    flops: Flops = "model"
    limit: float | None = None
    is_bounded: bool = True
    fit: str = "none"


# Of the column `precision`; FSDP's `DEFAULT` mixture reduces in fp32, its `PURE` one in bf16.
_FORMATS = {
    "fp8": Precision(compute="fp8", gradient=4, reduce=4),
    "bf16": _BF16_FP32_GRADIENTS,
    "mixed": _BF16_FP32_GRADIENTS,
    "pure": _BF16,
}
_DGX_A100 = {"device": "A100-SXM-80GB", "per_node": 8, "network": "8x200G", "precision": _FP16, "is_flash": False}
_DGX_H100 = {
    "device": "H100-SXM-80GB", "per_node": 8, "network": "8x400G", "precision": _BF16_FP32_GRADIENTS, "is_flash": True,
}  # fmt: skip

SETTINGS: dict[str, Setting] = {
    "sc21": Setting(
        title="Megatron-LM SC21, table 1", software="megatron-2021", flops="hardware", limit=8,
        fit="3.6B, 39.1B, 145.6B, 529.6B", **_DGX_A100,
    ),
    "sc21_table2": Setting(
        title="Megatron-LM SC21, table 2, PTD-P", software="megatron-2021", flops="hardware", **_DGX_A100
    ),
    "sc21_zero3": Setting(
        title="Megatron-LM SC21, table 2, ZeRO-3", software="deepspeed-zero3-2021", flops="hardware", fit="174.6B",
        **_DGX_A100,
    ),
    "korthikanti": Setting(
        title="Korthikanti et al., table 5", software="megatron-2022", limit=8, fit="175B", **_DGX_A100
    ),
    "mtnlg": Setting(
        title="MT-NLG 530B", software="megatron-deepspeed-bf16", limit=8, fit="2240 devices",
        **{**_DGX_A100, "precision": _BF16_FP32_GRADIENTS},
    ),
    "bloom": Setting(
        title="BLOOM 176B", software="megatron-deepspeed-bf16", flops="hardware",
        **{**_DGX_A100, "network": "4x100G", "precision": _BF16_FP32_GRADIENTS},
    ),
    "vtrain_single": Setting(
        title="vTrain, one node", software="megatron-deepspeed", limit=10, fit="0.31B, 0.91B",
        **{**_DGX_A100, "network": "4x200G"},
    ),
    "vtrain_multi": Setting(
        title="vTrain, 8 to 64 nodes", software="megatron-deepspeed", limit=12, fit="3.56B, 174.62B",
        **{**_DGX_A100, "network": "4x200G"},
    ),
    "h100_readme": Setting(
        title="Megatron-Core 0.8 README", software="megatron-core-2024", device="H100-SXM-80GB", per_node=8,
        network="8x400G", precision=_BF16_FP32_GRADIENTS, is_flash=True, limit=8, fit="7.1B, 70B, 314B",
    ),
    "llama3": Setting(
        title="Llama 3 405B", software="llama3", device="H100-SXM-80GB", per_node=8, network="8x400G",
        precision=_BF16_FP32_GRADIENTS, is_flash=True, flops="model_causal", limit=8, fit="none",
    ),
    "internevo": Setting(
        title="InternEvo 7B", software="internevo", device="A100-SXM-80GB", per_node=8, network="4x100G",
        precision=_BF16, is_flash=True, limit=12, fit="tp 1, micro-batch 2, 4 micro-batches, up to 512 devices",
    ),
    "sailor": Setting(
        title="Sailor, GH200", software="sailor", device="GH200-96GB", per_node=4, network="4x200G", precision=_FP16,
        is_flash=False, limit=12, fit="OPT-350M",
    ),
    "simumax": Setting(
        title="SimuMax, B200", software="megatron-core-2025", device="B200-SXM-180GB", per_node=8, network="8x400G",
        precision=_BF16_FP32_GRADIENTS, is_flash=True, fit="Llama-3 70B, 4096 tokens",
    ),
    "mosaic_a100": Setting(
        title="MPT, FSDP, A100-80GB", software="llm-foundry-2023", limit=12, fit="1B",
        **{**_DGX_A100, "precision": _BF16_FP32_GRADIENTS, "is_flash": True},
    ),
    "mosaic_a100_40": Setting(
        title="MPT, FSDP, A100-40GB", software="llm-foundry-2023", limit=12,
        **{**_DGX_A100, "device": "A100-SXM-40GB", "precision": _BF16, "is_flash": True},
    ),
    "mosaic_h100": Setting(title="MPT, FSDP, H100", software="llm-foundry-2023", limit=12, fit="3B", **_DGX_H100),
    "mosaic_fp8": Setting(title="MPT, FSDP, H100, fp8", software="llm-foundry-2023", limit=12, **_DGX_H100),
    "nanotron": Setting(
        title="nanotron, one node or no pipeline", software="nanotron-2024", limit=12, fit="1.34B, one node",
        **_DGX_H100,
    ),
    "nanotron_pp": Setting(
        title="nanotron, pipelines over nodes", software="nanotron-2024", limit=12, fit="1.34B, 2 nodes",
        **_DGX_H100,
    ),
    "bloom_2022": Setting(
        title="BLOOM, trials of 177B to 196B", software="bigscience-2022", limit=12,
        **{**_DGX_A100, "network": "4x100G"},
    ),
    "bloom_2022_later": Setting(
        title="BLOOM, later trials, tp 2 to 8", software="bigscience-2022", limit=12, fit="181B, tp 8",
        **{**_DGX_A100, "network": "4x100G"},
    ),
    "bloom_2022_bf16": Setting(
        title="BLOOM, trials with fp32 gradients", software="bigscience-2022-bf16", limit=12,
        **{**_DGX_A100, "network": "4x100G", "precision": _BF16_FP32_GRADIENTS},
    ),
    "nemo_fp8": Setting(title="NeMo 24.07, H100, fp8", software="megatron-core-2024", limit=12, **_DGX_H100),
    "bridge": Setting(
        title="Megatron-Bridge, fp8", software="megatron-bridge-2025", limit=12, fit="25.09; all of GB300", **_DGX_H100
    ),
    "torchtitan": Setting(
        title="torchtitan, FSDP with tp, pp, cp", software="torchtitan-2024", is_bounded=False,
        fit="8B, 8 devices, bf16", **_DGX_H100,
    ),
    "bridge_moe": Setting(
        title="Megatron-Bridge, mixtures, GB200, GB300", software="megatron-bridge-2025", is_bounded=False, **_DGX_H100
    ),
    "bridge_moe_a2a": Setting(
        title="Megatron-Bridge, mixtures, B200, H100", software="megatron-bridge-2025-alltoall", is_bounded=False,
        **_DGX_H100,
    ),
    "nemo_2412": Setting(title="NeMo 24.12, H100, fp8", software="megatron-core-2024", limit=12, **_DGX_H100),
    "nemo_long": Setting(
        title="NeMo 24.03, 4,096 to 1,048,576 tokens, H100", software="megatron-core-2024-03", limit=12, fit="cp 2",
        **_DGX_H100,
    ),
    "nemo_gb200": Setting(title="NeMo 25.04, GB200, fp8", software="megatron-bridge-2025", limit=12, **_DGX_H100),
    "automodel": Setting(title="NeMo AutoModel, H100, bf16", software="automodel-2025", limit=12, **_DGX_H100),
    "fms_a100": Setting(
        title="fms-fsdp, Llama 2, A100", software="hybrid", limit=12,
        **{**_DGX_A100, "network": "4x100G", "is_flash": True},
    ),
    "fms_h100": Setting(
        title="fms-fsdp, Llama 2, H100", software="hybrid", limit=12, **{**_DGX_H100, "network": "8x100G"}
    ),
    "titan_a100": Setting(
        title="torchtitan of 2024-07, A100", software="hybrid", limit=12, **{**_DGX_A100, "is_flash": True}
    ),
    "dlperf": Setting(
        title="DLPerf, Megatron-LM on V100", software="megatron-2021", device="V100-SXM2-16GB", per_node=8,
        network="1x100G", precision=_FP16, is_flash=False, limit=12,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run.

    Args:
        id: row of the data file.
        dataset: key of `SETTINGS`.
        job: what ran, where.
        candidates: the layout; several where the source leaves micro-batch or virtual stages open, of which the one
            that the planner finds fastest counts, as whoever tuned the run would have.
        seconds: of a step, measured.
        rival_seconds: another simulator's prediction of it, or 0.
        is_fit: whether constants were fitted on it.
        cell: runs that differ in the layout only share it.
    """

    id: str
    dataset: str
    job: Job
    candidates: tuple[Candidate, ...]
    seconds: float
    rival_seconds: float
    is_fit: bool
    cell: str


def datasets() -> tuple[str, ...]:
    return tuple(SETTINGS)


@cache
def points(dataset: str) -> tuple[Point, ...]:
    """All runs of one data set."""
    return tuple(_point(row, dataset) for row in _rows(dataset))


def _rows(dataset: str) -> Iterator[dict[str, str]]:
    if dataset == "vtrain_single":
        for row in _read("accuracy_vtrain_single.csv"):
            gpus = int(row["tp"]) * int(row["pp"]) * int(row["dp"])
            shared = {"dataset": dataset, "heads": "16", "kv_heads": "16", "vocab": "50257", "seq": "1024"}
            shared |= {"ffn": str(4 * int(row["hidden"])), "gpus": str(gpus), "recompute": "none"}
            yield {**row, **shared, "id": f"vtrain_single-{row['id']}", "model": f"gpt-{row['hidden']}x{row['layers']}"}
        return
    for name in ("accuracy_points.csv", "accuracy_others.csv", "accuracy_later.csv"):
        yield from (row for row in _read(name) if row["dataset"] == dataset)


@cache
def _read(name: str) -> tuple[dict[str, str], ...]:
    with (DATA / name).open(encoding="utf-8") as file:
        return tuple(csv.DictReader(line for line in file if not line.startswith("#")))


def _point(row: dict[str, str], dataset: str) -> Point:
    setting = SETTINGS[dataset]
    model = model_of(row, dataset)
    job = Job(
        model=model,
        cluster=_cluster(
            int(row["gpus"]), row.get("device") or setting.device, int(row.get("per_node") or setting.per_node),
            setting.network,
        ),
        global_batch_size=int(row["gbs"]),
        seq=int(row["seq"]),
        precision=_FORMATS[row["precision"]] if row.get("precision") else setting.precision,
        is_flash=setting.is_flash,
        software=setting.software,
    )  # fmt: skip
    return Point(
        id=row["id"],
        dataset=dataset,
        job=job,
        candidates=_fitting(job, tuple(_candidates(row))),
        seconds=float(row["seconds"]) if row["seconds"] else _seconds(row, job, setting),
        rival_seconds=float(row.get("rival_seconds") or 0.0),
        is_fit=_is_fit(row, dataset),
        cell="/".join((row["model"], row["gpus"], row["gbs"], row["seq"])),
    )


@cache
def _cluster(gpus: int, device: str, per_node: int, network: str) -> Cluster:
    per_node = min(gpus, per_node)
    nodes = -(-gpus // per_node)
    if per_node > 8:  # an NVLink domain, each device with a card of its own
        network = f"{per_node}x{network.partition('x')[2]}"
    return parse_cluster(f"{nodes}x{per_node}x{device}", network=network if nodes > 1 else None)


def _candidates(row: dict[str, str]) -> Iterator[Candidate]:
    def number(name: str, default: int = 1) -> int:
        return int(row.get(name) or default)

    layers, pp, dp = number("layers"), number("pp"), number("dp")
    shard = number("shard") if number("zero", 0) else 1
    batches = [number("mbs")] if row["mbs"] else [size for size in (1, 2, 4) if number("gbs") // dp % size == 0]
    depths = [number("vpp")] if row.get("vpp", "1") else [v for v in range(1, 33) if layers % (pp * v) == 0]
    for batch in batches:
        micro_batches = number("gbs") // (dp * batch)
        for depth in depths if pp > 1 else [1]:
            if depth > 1 and micro_batches % pp:
                continue
            yield Candidate(
                tp=number("tp"),
                pp=pp,
                dp_replicate=dp // shard,
                dp_shard=shard,
                cp=number("cp"),
                ep=number("ep"),
                sequence_parallel=row.get("sp") == "1",
                zero_stage=number("zero", 0),
                schedule="interleaved" if depth > 1 else "1f1b",
                virtual_stages=depth,
                micro_batch_size=batch,
                num_micro_batches=micro_batches,
                recompute=row["recompute"],  # type: ignore[arg-type]
                # DeepSpeed and FSDP hold shards of gradients, and so reduce each time; under pipelines torchtitan does
                # not, and keeps what it has gathered.
                grad_reduce="every_micro_batch" if number("zero", 0) == 3 and pp == 1 else "last_micro_batch",
                reshard_after="run" if number("zero", 0) == 3 and pp > 1 else "unit",
                split=_split(row.get("split", ""), layers, pp * depth),
            )


def _fitting(job: Job, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Where the layout is not published whole: what the devices' memory admits."""
    if len(candidates) == 1:
        return candidates
    room = job.cluster.device.memory_bytes
    return tuple(layout for layout in candidates if memory(job, layout).worst.device.expected <= room)


def _split(text: str, layers: int, chunks: int) -> tuple[int, ...]:
    """As Megatron-LM cuts: equal numbers of blocks, the embedding with the first, the head with the last; `auto`: by
    what embedding, blocks and head cost, as nanotron does."""
    if text == "auto":
        return ()
    if text:
        return tuple(int(part) for part in text.split())
    if chunks == 1:
        return ()
    counts = [layers // chunks] * chunks
    counts[0] += 1
    counts[-1] += 1
    return tuple(counts)


def _seconds(row: dict[str, str], job: Job, setting: Setting) -> float:
    """From printed tokens/s or TFLOP/s per device, those with the count of flops that the source uses."""
    if row.get("tokens"):
        return job.global_batch_size * job.seq / (float(row["tokens"]) * int(row["gpus"]))
    layers, hidden, seq, vocab = (int(row[name]) for name in ("layers", "hidden", "seq", "vocab"))
    tokens = job.global_batch_size * seq
    match setting.flops:
        case "hardware":  # arXiv:2104.04473, equation 3: one more forward for recompute
            flops = 96 * tokens * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
        case "model":
            flops = tokens * job.model.step_flops_per_token(seq)
        case "model_causal":
            attention = sum(spec.flops_per_token(seq) for unit in job.model.units for spec in unit.attentions)
            flops = tokens * (job.model.step_flops_per_token(seq) - 1.5 * attention)
    return flops / (float(row["tflops"]) * 1e12 * int(row["gpus"]))


def _is_fit(row: dict[str, str], dataset: str) -> bool:
    model = row["model"]
    match dataset:
        case "sc21":
            return model in {"gpt-3.6B", "gpt-39.1B", "gpt-145.6B", "gpt-529.6B"}
        case "sc21_zero3":
            return model == "gpt-174.6B"
        case "mtnlg":
            return row["gpus"] == "2240"
        case "korthikanti":
            return model == "gpt3-175B"
        case "vtrain_single":
            return model in {"gpt-1024x20", "gpt-2048x16"}
        case "vtrain_multi":
            return model in {"gpt-3.56B", "gpt-174.62B"}
        case "h100_readme":
            return model in {"gpt-7.1B", "gpt-70B", "gpt-314B"}
        case "internevo":
            return (row["tp"], row["mbs"], row["gbs"]) == ("1", "2", str(8 * int(row["gpus"]))) and int(
                row["gpus"]
            ) <= 512
        case "sailor":
            return model == "OPT-350M"
        case "simumax":
            return model == "llama3-70b" and row["seq"] == "4096"
        case "mosaic_a100":
            return model == "mpt-1b"
        case "mosaic_h100":
            return model == "mpt-3b"
        case "nanotron":
            return model == "nanotron-1.34B" and row["gpus"] == "8"
        case "nanotron_pp":
            return model == "nanotron-1.34B" and row["gpus"] == "16"
        case "torchtitan":
            return (model, row["gpus"], row["precision"]) == ("llama3-8b", "8", "bf16")
        case "nemo_long":
            return row["cp"] == "2"
        case "bloom_2022_later":
            return (model, row["tp"]) == ("bloom-72x14336", "8")
        case "bridge":
            return model.endswith("-2509") or row["device"].startswith("GB300")
        case _:
            return False
