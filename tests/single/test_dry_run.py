"""Dry runs: huge worlds on this machine, what is left as it was, and what is refused by name."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from hybrid.contracts.partition import partition_bucket
from hybrid.dry.models import dry_model
from hybrid.dry.rank_run import _add_steps
from hybrid.dry.values import Untouched
from hybrid.errors import BatchError, HybridError, ModelError, PlanError, StrategyError
from tests.tensor_gpt import GPT, GPT_PLAN

WORLD_SIZE = 16_384
MEBIBYTE = 2**20


class Wide(nn.Sequential):
    """A chain whose weights alone would be 34 GB."""

    def __init__(self) -> None:
        width = 16_384
        super().__init__(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(32)))


def wide() -> tuple[nn.Module, torch.Tensor]:
    return Wide(), torch.zeros(1, 16_384)


def gpt() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return GPT(), {"ids": torch.zeros(1, 8, dtype=torch.int64)}


def make_strategy(**settings: Any) -> hybrid.DistributedStrategy:
    return hybrid.DistributedStrategy(settings)


def test_a_rank_of_a_huge_job_costs_no_memory() -> None:
    """The point of it: neither the size of the model nor that of the world is there."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    strategy = make_strategy(
        sharding=True,
        sharding_configs={"stage": 2, "shard_size": 1024},
        pipeline=True,
        pipeline_configs={"degree": 8},
        accumulate_steps=8,
        amp=True,
        amp_configs={"level": "O2"},
    )
    (one,) = hybrid.dryrun(strategy, wide, world_size=WORLD_SIZE, ranks=[WORLD_SIZE - 1]).ranks
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < 300 * MEBIBYTE
    elements = 4 * (16_384**2 + 16_384)  # of the last four layers
    kinds = one.bytes_by_point["after_step"]
    assert one.stage == 7
    assert one.layers == ("28", "29", "30", "31")
    assert 0 <= kinds["parameters"] - 2 * elements < 8 * 1024 * 128  # at most 128 bytes of padding for each shard
    assert kinds["masters"] == 2 * kinds["parameters"] // 1024
    assert one.sent_bytes("dp_shard") == (8 * 2 + 1) * kinds["parameters"] * 1023 // 1024
    assert one.sent_bytes("dp_replicate") == 2 * kinds["masters"] // 2  # two replicas


def test_every_kind_of_rank_once_and_all_of_them_counted() -> None:
    """67 words over 2 tp ranks, and buckets of which the last shards have less than the first."""
    strategy = make_strategy(
        sharding=True,
        sharding_configs={"stage": 1, "shard_size": 4, "bucket_bytes": 4096},
        tensor_parallel=True,
        tensor_parallel_configs={"degree": 2, "plan": GPT_PLAN},
    )
    found = hybrid.dryrun(strategy, gpt, world_size=16, all_distinct=True)
    assert found.alike is not None
    assert sum(found.alike.values()) == 16
    assert len(found.ranks) > 1
    state = [one.bytes_by_point["after_step"]["optimizer_state"] for one in found.ranks]
    assert len(set(state)) > 1
    every = hybrid.dryrun(strategy, gpt, world_size=16, ranks=range(16))
    held = [one.bytes_by_point["after_step"]["optimizer_state"] for one in every.ranks]
    assert sum(held) == sum(size * found.alike[one.rank] for size, one in zip(state, found.ranks, strict=True))
    assert json.loads(json.dumps(found.to_dict()))["alike"]


def test_places_of_a_shard_group_are_told_apart_without_looking_at_each() -> None:
    """Elements and slices of every place, also where buckets are cut by whole parameters, or have empty shards."""
    random = Random(5)
    for kind in ("element", "parameter"):
        for num_shards in (1, 3, 8, 40):
            sizes = [(str(number), random.choice((0, 1, 7, 100, 1000))) for number in range(9)]
            partition = partition_bucket(sizes, num_shards=num_shards, element_bytes=4, kind=kind)  # type: ignore[arg-type]
            elements, slices = [0] * (num_shards + 1), [0] * (num_shards + 1)
            _add_steps(partition, elements, slices)
            parts = [partition.slices(shard) for shard in range(num_shards)]
            assert list(accumulate(slices))[:-1] == [len(one) for one in parts]
            assert list(accumulate(elements))[:-1] == [sum(part.num_elements for part in one) for one in parts]


def test_a_world_of_a_hundred_thousand_ranks_is_no_more_work_than_a_small_one() -> None:
    """What is done for each rank of a group is a list of its number, and nothing that is compared or cut."""
    started = time.process_time()
    (one,) = hybrid.dryrun(make_strategy(sharding=True, sharding_configs={"stage": 1}), gpt, world_size=1 << 17).ranks
    assert one.coordinates["dp_shard"] == 0
    assert time.process_time() - started < 5  # 1 alone; 8 when each rank's options were compared


def test_a_tensor_larger_than_the_machine_has_shape_and_nothing_else() -> None:
    """Systems refuse an allocation beyond their memory, though nobody would touch it."""
    with Untouched():
        left = torch.empty(1 << 19, 8, requires_grad=True)
        product = left @ torch.empty(8, 1 << 24)  # 32 TiB
        product.sum().backward()
    assert product.shape == (1 << 19, 1 << 24)
    assert left.grad is not None
    assert left.grad.shape == left.shape


def test_a_mask_of_very_many_tokens_is_not_computed() -> None:
    """Rows and columns have values, being few; what they are compared to would fill the machine."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Untouched():
        places = torch.arange(1 << 17)
        mask = places[None, :] <= places[:, None]  # 16 GiB
        small = places[None, :8] <= places[:8, None]
    assert mask.shape == (1 << 17, 1 << 17)
    assert small.sum() == 36
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_nothing_is_left_behind() -> None:
    """Random state, the job and the model's factory are as before; a real model may be wrapped right after."""
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    hybrid.dryrun(make_strategy(), gpt, world_size=4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not hybrid.is_initialized()
    hybrid.init()
    try:
        with pytest.raises(HybridError, match=r"in a job already: call hybrid\.shutdown\(\)"):
            hybrid.dryrun(make_strategy(), gpt, world_size=4)
    finally:
        hybrid.shutdown()


class Deciding(nn.Module):
    """Skips a layer where an activation is large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Gate(), Gate()])

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            value = layer(value)
        return value


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.layer(value) if value.abs().max() > 1 else value


class Placed(nn.Module):
    """Has four places for tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(3, 2), nn.Embedding(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids) + self.places(torch.arange(ids.shape[1]))


def placed() -> tuple[nn.Module, torch.Tensor]:
    return Placed(), torch.zeros(1, 5, dtype=torch.int64)


def deciding() -> tuple[nn.Module, torch.Tensor]:
    return Deciding(), torch.zeros(2, 4)


REFUSALS: dict[str, tuple[Callable[[], Any], type[HybridError], str]] = {
    "a rank that is not there": (
        lambda: hybrid.dryrun(make_strategy(), gpt, world_size=8, ranks=[0, 8]),
        StrategyError,
        "rank 8: the ranks of 8 processes are 0 to 7",
    ),
    "degrees that do not divide": (
        lambda: hybrid.dryrun(
            make_strategy(pipeline=True, pipeline_configs={"degree": 3}), gpt, world_size=16, ranks=[0]
        ),
        StrategyError,
        "16",
    ),
    "an unknown model": (
        lambda: hybrid.dryrun(make_strategy(), "llama3-70", world_size=8),
        PlanError,
        "did you mean .*llama3-70b",
    ),
    "a model instead of a factory": (
        lambda: hybrid.dryrun(make_strategy(), nn.Linear(2, 2), world_size=8),
        ModelError,
        "give a function that makes it",
    ),
    "no sample": (
        lambda: hybrid.dryrun(make_strategy(), lambda: nn.Linear(2, 2), world_size=8),
        BatchError,
        "needs a sample",
    ),
    "a model that decides by values": (
        lambda: hybrid.dryrun(make_strategy(), deciding, world_size=8),
        ModelError,
        r"'inner\.0', a Gate \(test_dry_run\.py, line \d+\), looks at values",
    ),
    "more tokens than positions": (
        lambda: hybrid.dryrun(make_strategy(), gpt, world_size=8, seq=999),
        ModelError,
        r"seq = 999: gpt fails with samples of that length, its own have 8 \(RuntimeError: .*\[8, 16\]",
    ),
    "a row that an embedding has not": (
        lambda: hybrid.dryrun(make_strategy(), placed, world_size=8),
        ModelError,
        r"asks for row 4 of an embedding that has 4: a sample has more tokens than there are positions",
    ),
    "more ranks than can be listed": (
        lambda: hybrid.dryrun(make_strategy(), gpt, world_size=16_000_000),
        StrategyError,
        "world_size = 16,000,000: a dry run takes at most 1,048,576 processes",
    ),
    "an unknown optimizer": (
        lambda: hybrid.dryrun(make_strategy(), gpt, world_size=8, optimizer="lamb"),
        StrategyError,
        "known: adamw",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_run_dry_is_refused_by_name(case: str) -> None:
    """A guess at what a model would have decided is worse than no answer."""
    call, kind, words = REFUSALS[case]
    with pytest.raises(kind, match=words):
        call()
    assert not hybrid.is_initialized()


@pytest.mark.parametrize("amp", [{}, {"amp": True, "amp_configs": {"level": "O1"}}], ids=["fp32", "autocast"])
def test_a_mixture_of_experts_runs_in_fp32(amp: dict[str, Any]) -> None:
    """Torch works out the shapes of grouped products in bfloat16 only, and of a backward's there are other ones."""
    config = {
        **{"model_type": "mixtral", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64, "num_local_experts": 4},
    }
    (one,) = hybrid.dryrun(make_strategy(micro_batch_size=1, **amp), config, world_size=8, seq=8).ranks
    assert one.bytes_by_point["after_step"]["optimizer_state"] > 0
    assert one.differences == ()
    assert len(one.comparison) >= 5


@pytest.mark.parametrize(("given", "wanted"), [(None, torch.bfloat16), (torch.float32, torch.float32)])
def test_a_grouped_product_has_the_type_that_is_asked_for(given: torch.dtype | None, wanted: torch.dtype) -> None:
    """What is counted for it would be half of what a device has that gives it in fp32."""
    left, right = torch.zeros(8, 16, dtype=torch.bfloat16), torch.zeros(4, 16, 32, dtype=torch.bfloat16)
    with Untouched():
        made = functional.grouped_mm(left, right, offs=torch.tensor([3, 5, 8, 8], dtype=torch.int32), out_dtype=given)
    assert (made.shape, made.dtype) == ((8, 32), wanted)


@pytest.mark.parametrize(
    ("text", "words"),
    [("[1, 2]", "got list"), ("{", "cannot be read as JSON"), ('{"hidden_size": 32}', "has no model_type")],
)
def test_a_file_without_a_configuration_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "lab.json"
    file.write_text(text)
    with pytest.raises(PlanError, match=f"lab.*{words}"):
        hybrid.dryrun(make_strategy(), str(file), world_size=8)


SETTINGS: dict[str, dict[str, Any]] = {
    "fp16": {"amp": True, "amp_configs": {"dtype": "float16", "level": "O2"}, "gradient_clipping": 1.0},
    "offload": {"sharding": True, "sharding_configs": {"stage": 3, "offload": "parameters"}, "accumulate_steps": 2},
    "deferred gather": {"sharding": True, "sharding_configs": {"stage": 1, "overlap_param_gather": True}},
    "recompute": {"recompute": True, "recompute_configs": {"policy": "selective"}, "compile": True},
    "whole parameters": {"sharding": True, "sharding_configs": {"stage": 2, "partition": "parameter"}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_comes_to_its_end_under_every_setting(name: str) -> None:
    """A step that is skipped, or left half-way, would show too little memory and traffic."""
    strategy = make_strategy(micro_batch_size=1, **SETTINGS[name])
    (one,) = hybrid.dryrun(strategy, gpt, world_size=8, ranks=[3]).ranks
    kinds = one.bytes_by_point["after_step"]
    assert kinds.get("optimizer_state", 0) + kinds.get("host_optimizer_state", 0) > 0
    assert "optimizer step" in one.actions
    assert ("compile is left out" in " ".join(one.notes)) == (name == "recompute")


MEETINGS: dict[str, dict[str, Any]] = {
    "interleaved, each chunk once in a row": {"schedule": "interleaved", "micro_batches": 2},
    "halves of backwards": {"schedule": "zbv", "micro_batches": 2},
    "halves of backwards, a weight of two chunks": {"schedule": "zbv", "micro_batches": 3, "tied": True},
    "a weight of two chunks, reduced again and again": {
        **{"schedule": "zbv", "micro_batches": 2, "tied": True, "stage": 2},
    },
    "host": {"schedule": "interleaved", "micro_batches": 2, "stage": 2, "offload": "optimizer", "tied": True},
    "host, and replicas": {"schedule": "zbv", "micro_batches": 3, "shard_size": 1, "offload": "optimizer"},
}


@pytest.mark.parametrize("name", MEETINGS)
def test_gradients_that_never_meet_are_not_counted_together(name: str) -> None:
    """Of two chunks the later one's gradients are reduced before the first one's come, if each runs once in a row."""
    case = MEETINGS[name]
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 64,
        "tie_word_embeddings": case.get("tied", False),
    }  # fmt: skip
    sharding = {"stage": case.get("stage", 1), "shard_size": case.get("shard_size", 2)}
    strategy = make_strategy(
        pipeline=True, pipeline_configs={"degree": 2, "schedule": case["schedule"], "virtual_stages": 2},
        sharding=True, sharding_configs={**sharding, "offload": case.get("offload", "none")},
        micro_batch_size=1, accumulate_steps=case["micro_batches"],
    )  # fmt: skip
    (rank,) = hybrid.dryrun(strategy, config, world_size=4, seq=16).ranks
    assert any("between_backwards" in figure.what for figure in rank.comparison)
    assert not rank.differences
    assert not rank.notes


@pytest.mark.parametrize("reshard_after", ["unit", "run"])
def test_parameters_that_come_from_the_host_alone_are_seen(reshard_after: str) -> None:
    """One layer is no unit, and a rank whose own part is all of it sends nothing: neither tells of what is whole."""
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": 64,
    }  # fmt: skip
    sharding = {"stage": 3, "shard_size": 1, "offload": "parameters", "reshard_after": reshard_after}
    strategy = make_strategy(sharding=True, sharding_configs=sharding, micro_batch_size=1)
    (rank,) = hybrid.dryrun(strategy, config, world_size=4, seq=16).ranks
    assert rank.gathered_bytes == rank.bytes_by_point["after_wrap"]["host_parameter_shards"]
    assert not rank.differences


def test_samples_longer_than_a_model_was_made_for_run_dry_with_a_note() -> None:
    """As they are planned."""
    assert any("was made for 8,192 positions" in note for note in dry_model("llama3-8b", seq=8200).notes)
    assert not dry_model("llama3-8b", seq=8192).notes
