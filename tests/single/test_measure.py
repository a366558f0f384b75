"""Live models on fake tensors: bytes that backward needs, work and parameters, against closed forms and real runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import psutil
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import hybrid
from hybrid.contracts.cluster import parse_cluster
from hybrid.errors import PlanError
from hybrid.planner.cost import unit_seconds
from hybrid.planner.data_parallel import chunk_state
from hybrid.planner.describe_model import spec_of
from hybrid.planner.job import Candidate, Job
from hybrid.planner.model_spec import ActivationBytes, ModelSpec
from hybrid.planner.transformer import gpt_spec
from hybrid.strategy.live_model import chunks_of
from tests.single.test_measure_configs import FAMILIES, build

BATCH, SEQ, HIDDEN, HEADS, VOCAB = 3, 10, 48, 6, 53


class Attention(nn.Module):
    """Scores written out, as Megatron-LM has them without a fused kernel; names as in GPT-2."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, HIDDEN // HEADS
        self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.full((SEQ, SEQ), -1e4).triu(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (-1, (self.num_heads, self.head_dim))
        q, k, v = (part.unflatten(*heads).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5 + self.mask.to(x.dtype)
        mixed = self.dropout(scores.softmax(-1)) @ v
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(functional.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attn, self.mlp, self.dropout = Attention(dropout), Mlp(), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x)))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class Gpt(nn.Module):
    def __init__(self, *, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQ, HIDDEN), nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


IDS = torch.zeros(BATCH, SEQ, dtype=torch.long)
PLAN = {
    "h.*.attn.c_attn": {"style": "colwise", "fused": 3, "divide": ["num_heads"]},
    "h.*.attn.c_proj": "rowwise",
}
STATISTICS = 2 * 8  # of two layer norms, fp32: the closed form of the paper leaves them out


@pytest.fixture(scope="module")
def measured() -> ModelSpec:
    return spec_of(Gpt(), sample=IDS, plan=PLAN)


def test_a_gpt_block_measures_what_the_published_table_says(measured: ModelSpec) -> None:
    """arXiv:2205.05198, table 2; equal, but for the statistics of norms, which it neglects."""
    closed = gpt_spec("gpt", layers=2, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, seq=SEQ).blocks[0]
    for block in measured.blocks:
        extra = ActivationBytes(whole=STATISTICS)
        assert block.activations["none", False] == closed.activations["none", False] + extra
        assert block.activations["core_attention", False] == closed.activations["core_attention", False] + extra
        assert block.activations["full", False] == closed.activations["full", False]
        # The CPU's two products of attention are both kept; so are they in closed form.
        assert block.activations["selective", False] == closed.activations["selective", False]
        for t, sequence_parallel in ((1, False), (2, False), (2, True)):
            got = block.activations["none", False].of(
                tokens=BATCH * SEQ, seq=SEQ, tp=t, sequence_parallel=sequence_parallel
            )
            part = t if sequence_parallel else 1
            sbh, pairs = BATCH * SEQ * HIDDEN, 5 * HEADS * SEQ / HIDDEN
            assert got == sbh * (10 / part + 24 / t + pairs / t) + BATCH * SEQ * STATISTICS / part


def _saved_by_a_real_forward(model: nn.Module, ids: torch.Tensor) -> int:
    own = {one.untyped_storage().data_ptr() for one in [*model.parameters(), *model.buffers()]}
    found: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)  # so that no other storage gets its address
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids)
    return sum(found.values())


def test_measured_bytes_are_those_that_a_real_forward_saves() -> None:
    """No memory model is asked: plain torch on the CPU, in fp32, is."""
    model = Gpt(dropout=0.0)
    spec = spec_of(model, sample=IDS, activation_bytes=4)
    kept = [unit.activations["none", False].of(tokens=BATCH * SEQ, seq=SEQ) for unit in spec.units]
    assert sum(kept) == pytest.approx(_saved_by_a_real_forward(model, IDS), abs=1)


def test_what_does_not_grow_with_the_batch_counts_once() -> None:
    """Rotary tables and position ids: a larger micro-batch must not multiply them."""
    model = Gpt(dropout=0.0)
    spec = spec_of(model, sample=IDS, activation_bytes=4)
    large = torch.zeros(4 * BATCH, SEQ, dtype=torch.long)
    kept = [unit.activations["none", False].of(tokens=large.numel(), seq=SEQ) for unit in spec.units]
    assert sum(kept) == pytest.approx(_saved_by_a_real_forward(model, large), abs=1)
    assert spec.units[0].activations["none", False].fixed == 8 * SEQ  # the position ids


# Those without a difference; Llama stands for its relatives, Qwen3 has norms of queries and keys.
EQUAL = ["bert/mlm", "gpt2", "llama", "opt/350m", "qwen3", "vit"]


@cache
def _measured(family: str) -> ModelSpec:
    if family == "vit":
        return spec_of(build(family), sample={"pixel_values": torch.zeros(2, 3, 32, 32)})
    ids = torch.zeros(2, 16, dtype=torch.long)
    return spec_of(build(family), sample={"input_ids": ids, "labels": ids})


def _closed(family: str) -> ModelSpec:
    config = transformers.AutoConfig.for_model(family.partition("/")[0], **FAMILIES[family])
    return spec_of(config, counts_statistics=True)


@pytest.mark.parametrize("family", EQUAL)
def test_a_block_of_transformers_measures_what_its_closed_form_says(family: str) -> None:
    """Layer by layer as the library writes them: nothing is left over, in none of the policies."""
    spec, closed = _measured(family), _closed(family)
    block, expected = spec.blocks[-1], closed.blocks[-1]
    # GPT-2's one product of queries, keys and values stays for the queries alone: its cache copies keys and values.
    copies = ActivationBytes(cut=2 * 2 * spec.hidden if family == "gpt2" else 0)
    assert block.activations["none", True] == expected.activations["none", True] + copies
    assert block.activations["core_attention", True] == expected.activations["core_attention", True] + copies
    # Without a fused kernel torch computes in fp32, on copies.
    assert block.activations["none", False] == expected.activations["none", False]
    for policy in ("selective", "full"):
        for is_flash in (True, False):
            assert block.activations[policy, is_flash] == expected.activations[policy, is_flash]
    # The first block also holds what all of them share, once for any batch: the angles of rotary positions.
    first = spec.blocks[0].activations["none", True]
    assert replace(first, fixed=0.0) == expected.activations["none", True] + copies


@pytest.mark.slow
@pytest.mark.parametrize("family", [*EQUAL, "deepseek_v3", "gemma2", "gpt_neox", "mixtral", "phi3"])
def test_closed_forms_and_measurement_agree_on_parameters_and_products(family: str) -> None:
    """Two ways to the same numbers: exactly."""
    spec, closed = _measured(family), _closed(family)
    assert spec.num_parameters == closed.num_parameters
    seq = spec.default_seq
    for block, expected in zip(spec.blocks, closed.blocks, strict=True):
        assert [(one.name, one.shape) for one in block.parameters] == [
            (one.name, one.shape) for one in expected.parameters
        ]
        assert block.forward_flops_per_token(seq) == expected.forward_flops_per_token(seq)
    if family != "vit":  # patches have no class token, and the head reads one token only: a share of the products
        assert spec.forward_flops_per_token(seq) == closed.forward_flops_per_token(seq)
    if not spec.num_experts:
        assert spec.blocks[-1].parameters == closed.blocks[-1].parameters  # what tensor parallel cuts, too


def test_a_mixture_is_told_by_its_experts() -> None:
    """Grouped products over all experts, cut over expert-parallel ranks and not by tensor parallel."""
    spec = _measured("mixtral")
    products = [one for one in spec.blocks[0].matmuls if one.cut == "expert"]
    assert [(one.num_groups, one.tokens_share) for one in products] == [(4, 2.0), (4, 2.0)]
    assert spec.num_experts == 4
    assert any(one.is_expert for one in spec.blocks[0].parameters)
    assert any("mixture of experts" in note for note in spec.notes)


def test_a_large_model_takes_no_memory_and_no_time() -> None:
    """Blocks of Llama 3 70B on the meta device: 10 GB of weights, 100 GB of activations."""
    config = transformers.LlamaConfig(
        hidden_size=8192,
        num_hidden_layers=4,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    before, start = psutil.Process().memory_info().rss, time.process_time()
    ids = torch.zeros(4, 8192, dtype=torch.long, device="meta")
    spec = spec_of(model, sample={"input_ids": ids, "labels": ids})
    assert spec.num_parameters == sum(one.numel() for one in model.parameters())
    assert psutil.Process().memory_info().rss - before < 200e6
    assert time.process_time() - start < 30


def test_the_model_and_the_random_state_are_left_alone() -> None:
    """A plan is asked for before training starts, on the model that will be trained."""
    model = Gpt().eval()
    model.requires_grad_(True)
    held = {name: (id(one), one.clone()) for name, one in model.state_dict(keep_vars=True).items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    state = torch.random.get_rng_state()
    spec_of(model, sample=IDS)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not model.training
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    for name, one in model.state_dict(keep_vars=True).items():
        assert id(one) == held[name][0]
        assert torch.equal(one, held[name][1])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_fused_kernel_is_measured_although_dropout_keeps_the_cpu_from_it() -> None:
    """The CPU's kernel takes no dropout; GPUs' do, without a mask."""

    class Fused(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = (-1, (self.num_heads, self.head_dim))
            q, k, v = (part.unflatten(*heads).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
            return self.c_proj(mixed.transpose(1, 2).flatten(2))

    model = Gpt()
    for block in model.h:
        block.attn = Fused(0.1)
    block = spec_of(model, sample=IDS, plan=PLAN).blocks[0]
    closed = gpt_spec("gpt", layers=2, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, seq=SEQ).blocks[0]
    assert block.activations["none", True] == closed.activations["none", True] + ActivationBytes(whole=STATISTICS)
    assert block.attentions[0].is_causal


def test_rms_norms_count_as_their_fused_kernel() -> None:
    """`torch.nn.RMSNorm` is one kernel on GPUs that keeps its input and 1/deviation, six on the CPU that keep more."""
    model = nn.Sequential(*(nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 16)) for _ in range(3)))
    spec = spec_of(model, sample=torch.zeros(2, 5, 16))
    assert spec.blocks[1].activations["none", True].whole == 16 * 2 + 4 + 16 * 2
    assert spec.blocks[1].num_kernels == 2


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def test_why_a_model_is_not_cut_is_told_in_a_whole_sentence() -> None:
    """The runtime's message goes on with a list of layers, of which the plan showed "Its linear layers:" alone."""
    model = nn.Sequential(*(nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 16)) for _ in range(2)))
    (note,) = (note for note in spec_of(model, sample=torch.zeros(2, 16)).notes if "tensor parallel" in note)
    assert note.endswith("no rule is known for cutting the layers of Sequential")


def test_a_model_without_attention_is_measured_too() -> None:
    """Any module: here one of linear layers, whose first product needs no gradient of its input."""
    spec = spec_of(_Stack(), sample=torch.zeros(4, 8))
    assert [unit.kind for unit in spec.units] == ["embedding", "block", "block", "block", "head"]
    assert [one.has_input_gradient for unit in spec.units for one in unit.matmuls] == [False, True, True, True, True]
    assert spec.blocks[0].activations["full", True].whole == 32
    assert (spec.hidden, spec.default_seq, spec.is_seq_fixed) == (16, 1, True)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: spec_of(Gpt()), "a module is measured with a sample"),
        (lambda: spec_of(Gpt(), sample=IDS, activation_bytes=3), "activation_bytes = 3"),
        (lambda: spec_of(nn.Linear(8, 8), sample=torch.zeros(2, 4, 8), seq=7), "only token ids"),
        (lambda: spec_of(Gpt(), sample=torch.zeros(2, 8)), "on fake tensors it raised"),
        (lambda: spec_of(_Reads(), sample=torch.zeros(2, 8)), "Operations whose shapes depend on values"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_way_out(make: Callable[[], object], match: str) -> None:
    """A trace of torch's own would name a line of theirs."""
    with pytest.raises(PlanError, match=match):
        make()


class _Reads(nn.Module):
    """Its shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.linear(x)
        return rows[: int(rows.sum())]


def test_another_length_is_measured_at_that_length() -> None:
    """`--seq` beside a module: the sample's ids are as good as any."""
    model = build("llama")
    ids = torch.zeros(2, 16, dtype=torch.long)
    spec = spec_of(model, sample={"input_ids": ids, "labels": ids}, seq=24)
    assert spec.default_seq == 24
    same = spec_of(model, sample={"input_ids": ids, "labels": ids})
    assert spec.blocks[1].activations == same.blocks[1].activations
    assert spec.blocks[1].matmuls == same.blocks[1].matmuls


def test_frozen_weights_cost_no_gradient_no_update_and_no_reduction() -> None:
    """Fine-tuning a part would look as dear as training all: backward ends behind the first weight that is trained."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    for layer in (model[0], model[1], model[3]):
        layer.requires_grad_(False)
    spec = spec_of(model, sample=torch.zeros(8, 64))
    products = [one for unit in spec.units for one in unit.matmuls]
    assert [one.has_weight_gradient for one in products] == [False, False, True, False]
    assert [one.has_input_gradient for one in products] == [False, False, False, True]
    assert [unit.has_backward for unit in spec.units] == [False, False, True, True]
    job = Job(model=spec, cluster=parse_cluster("1x8xA100-80GB"), global_batch_size=8, seq=1)
    state = chunk_state(spec.units, tp=1, ep=1, job=job)
    assert (state.dense, state.frozen, state.frozen_behind) == (64 * 65, 3 * 64 * 65, 64 * 65)
    seconds = unit_seconds(job, Candidate(dp_shard=8, zero_stage=1))
    assert [one.backward_total > 0 for one in seconds.values()] == [False, False, True, True]


def test_a_mixture_is_measured_in_fp32_and_failures_log_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """Torch 2.13 knows the shapes of grouped products for bf16 alone; and it logs what a fake tensor cannot do."""
    fp32 = spec_of(build("mixtral"), sample={"input_ids": torch.zeros(2, 8, dtype=torch.long)}, activation_bytes=4)
    assert sum(one.cut == "expert" for unit in fp32.blocks[:1] for one in unit.matmuls) == 2
    with pytest.raises(PlanError, match="cannot be measured"):
        spec_of(nn.Bilinear(4, 4, 4), sample=(torch.zeros(2, 4), torch.zeros(3, 5)))
    assert "Traceback" not in caplog.text


class Alone(nn.Module):
    """One layer: no pipeline can be made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).pow(2).mean()


def test_a_live_model_is_planned_as_a_pipeline_where_the_runtime_cuts_it() -> None:
    """The fastest layout of a slow network was not even looked at; a plan that the runtime refuses helps nobody."""
    asked = {"cluster": "4x1xA100-40GB", "network": "1x1G", "global_batch_size": 16}
    plans = hybrid.plan(Gpt(layers=6), sample=IDS, num_plans=30, **asked)
    strategy = next(one.strategy for one in plans if one.candidate.pp == 4)
    settings = strategy.resolve(4).pipeline
    assert settings is not None
    assert sum(map(len, chunks_of(Gpt(layers=6), settings, sample=IDS))) >= 8
    plain = hybrid.plan(Alone(), sample=torch.zeros(BATCH, HIDDEN), **asked)
    assert {one.candidate.pp for one in plain} == {1}
    assert "planned without a pipeline: 1 layer cannot fill 2" in plain.request.job.model.notes[-1]
    with pytest.raises(PlanError, match="pp 2: 1 layer cannot fill 2"):
        hybrid.plan(Alone(), sample=torch.zeros(BATCH, HIDDEN), fixed="pp=2", **asked)
