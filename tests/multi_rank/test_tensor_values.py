"""Values under tensor parallelism: where they start, which are dropped, what each rank holds, how they are read."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hybrid
from hybrid.tensor import RowParallelLinear
from tests.multi_rank.case_runs import ONE_STEP, assert_close, weights_of
from tests.ranks import run_plain, run_ranks
from tests.tensor_case import tensor_strategy, tensor_variant
from tests.tensor_gpt import GPT, GPT_PLAN, LORA_PLAN, WIDTH, logits_loss, tokens
from tests.tensor_models import MODELS, build
from tests.tensor_runs import assert_copies_alike, digest, own_samples

# -- BC-20: initial values -------------------------------------------------------------------------------------------


class Xavier(nn.Linear):
    """Its spread depends on both widths."""

    def reset_parameters(self) -> None:
        nn.init.xavier_normal_(self.weight)
        nn.init.zeros_(self.bias)


class Stack(nn.Module):
    """Three layers alike, and pairs whose row layer has a large fan-in."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.wide = nn.Linear(6, 1024)
        self.narrow = Xavier(1024, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.same:
            x = layer(x)
        return self.narrow(self.wide(x))


STACK_PLAN = {"wide": "colwise", "narrow": "rowwise"}
WAYS = ("built in full", "replay", "by_name")
LAYOUTS = {1: ((1, 0),), 2: ((2, 0), (2, 1)), 4: ((4, 1), (2, 0), (2, 3))}  # ranks -> (tp, stage)

TIED_GPT: tuple[Any, Any] = (lambda: GPT(tied=True), GPT_PLAN)


def initial(name: str, way: str, tp: int, stage: int) -> dict[str, str]:
    """Digests of the whole initial weights."""
    make, plan = {"stack": (Stack, STACK_PLAN), "gpt": TIED_GPT}.get(name) or (MODELS[name].build, MODELS[name].plan)
    torch.manual_seed(7)
    strategy = tensor_strategy(tp, stage=stage, plan=plan if tp > 1 else None, seed=7)
    if way == "built in full":
        model: Any = hybrid.distributed_model(make(), strategy)
    else:
        with torch.device("meta"):
            model = make()
        model = hybrid.distributed_model(model, strategy, init=way)  # type: ignore[arg-type]
    assert_copies_alike(model, name) if tp > 1 else None
    state = model.full_state_dict()
    if name == "stack":
        assert abs(state["narrow.weight"].std().item() / 0.0435 - 1) < 0.05
        same = [state[f"same.{index}.weight"] for index in range(3)]
        assert not any(torch.equal(one, other) for one in same for other in same if one is not other)
        rows = state["narrow.weight"].chunk(4, dim=1)
        assert not any(torch.equal(one, other) for one in rows for other in rows if one is not other)
    hybrid.shutdown()
    return {key: digest(value) for key, value in state.items()}


def all_initial(names: tuple[str, ...]) -> dict[Any, dict[str, str]]:
    return {
        (name, way, tp, stage): initial(name, way, tp, stage)
        for name in names
        for way in WAYS
        for tp, stage in LAYOUTS[dist.get_world_size()]
    }


def plain_initial(name: str) -> dict[str, str]:
    make = {"stack": Stack, "gpt": TIED_GPT[0]}.get(name) or MODELS[name].build
    torch.manual_seed(7)
    return {key: digest(value) for key, value in make().state_dict().items()}


def test_bc20_initial_values_do_not_depend_on_the_layout() -> None:
    """Fault: fan-in was read from the part, or all parts or layers got the same numbers."""
    names = ("stack", "gpt", *(("llama-tied",) if importlib.util.find_spec("transformers") else ()))
    plain = {name: run_plain(plain_initial, name) for name in names}
    by_name: dict[str, dict[str, str]] = {}
    for ranks in (1, 2, 4):
        for found in run_ranks(all_initial, ranks, names):
            for (name, way, tp, stage), digests in found.items():
                wanted = by_name.setdefault(name, digests) if way == "by_name" else plain[name]
                differing = [key for key in wanted if digests.get(key) != wanted[key]]
                assert not differing, f"{name}, {way}, tp {tp} of {ranks} ranks, stage {stage}: {differing}"
                assert list(digests) == list(wanted)


def by_hand() -> tuple[str, float]:
    """A layer built by hand draws the whole and keeps its part; so it does when it is drawn anew."""
    hybrid.init(tensor_strategy(dist.get_world_size()))
    torch.manual_seed(7)
    plain = nn.Linear(1024, 32)
    torch.manual_seed(7)
    layer = RowParallelLinear(1024, 32)
    part = 1024 // dist.get_world_size()
    wanted = plain.weight[:, part * dist.get_rank() :][:, :part]
    assert torch.equal(layer.weight, wanted)
    torch.manual_seed(7)
    layer.reset_parameters()
    assert torch.equal(layer.weight, wanted)
    return digest(plain.weight), layer.weight.std().item()


def test_bc20_layers_built_by_hand() -> None:
    assert len({whole for whole, _ in run_ranks(by_hand, 4)}) == 1


# -- dropout ---------------------------------------------------------------------------------------------------------


def masks(sequence_parallel: bool, recompute: str | None) -> tuple[dict[str, list[str]], dict[str, str]]:
    """By module, the masks of each call of its dropout in three steps; and the weights at the end."""
    torch.manual_seed(100 + dist.get_rank())
    settings: dict[str, Any] = {"sequence_parallel": sequence_parallel, "recompute": recompute, "seed": 3}
    seen: dict[str, list[str]] = {}
    with tensor_variant(2, stage=0, plan=GPT_PLAN, **settings) as strategy:
        torch.manual_seed(5)
        model: Any = hybrid.distributed_model(GPT(dropout=0.5), strategy)
        optimizer = hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(
                    lambda one, inputs, output, name=name: (
                        seen.setdefault(name, []).append(digest((output == 0) & (inputs[0] != 0)))
                        if one.training
                        else None
                    )
                )
        for step in range(3):
            model.train_batch(own_samples(tokens(step)), optimizer, forward_step=logits_loss)
            assert_copies_alike(model, step)
            states: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(states, digest(torch.get_rng_state()))
            tp_neighbour = states[dist.get_rank() ^ 1]
            assert tp_neighbour == states[dist.get_rank()], "random states of one data rank part"
        model.eval()
        with torch.no_grad():
            ids = tokens(0)["ids"]
            assert torch.equal(model(ids) + 0, model(ids) + 0)
        return seen, {name: digest(value) for name, value in model.full_state_dict().items()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout(sequence_parallel: bool) -> None:
    """Alike on whole activations, different on cut ones and on other data, and the same when computed again."""
    plain = run_ranks(masks, 4, sequence_parallel, None)
    again = run_ranks(masks, 4, sequence_parallel, "full")
    for name, calls in plain[0][0].items():
        assert len(calls) == len(set(calls)) == 3, "a mask came twice"
        per_rank = [seen[name] for seen, _ in plain]
        # Under sequence parallel, what follows a row layer is a part of the sequence.
        is_cut = name.endswith("inner_dropout") or (sequence_parallel and name.startswith("blocks"))
        assert (per_rank[0] == per_rank[1]) != is_cut, name
        assert (per_rank[2] == per_rank[3]) != is_cut, name
        assert per_rank[0] != per_rank[2], name
    for (seen, weights), (seen_again, weights_again) in zip(plain, again, strict=True):
        assert weights == weights_again
        for name, calls in seen.items():
            # A recompute ends before the last operation of a block.
            assert set(seen_again[name]) == set(calls), name
            if name.endswith("inner_dropout"):
                assert sorted(seen_again[name]) == sorted(calls * 2), name
    assert all(weights == plain[0][1] for _, weights in plain)


def test_dropout_replayed_selectively() -> None:
    plain, again = (run_ranks(masks, 4, True, policy) for policy in (None, "selective"))
    assert [weights for _, weights in plain] == [weights for _, weights in again]


# -- what each rank holds --------------------------------------------------------------------------------------------


def check_bytes() -> None:
    wanted = sum(p.numel() for p in build("gpt-lora").parameters())
    for stage, shards in ((0, 1), (1, 2), (2, 2), (3, 2)):
        with tensor_variant(2, stage=stage, plan=LORA_PLAN, bucket_bytes=1000) as strategy:
            plain = build("gpt-lora", dtype=torch.float32)
            model: Any = hybrid.distributed_model(plain, strategy)
            optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters()))
            model.train_batch(own_samples(tokens(0)), optimizer, forward_step=logits_loss)
            trainable = 2 * (3 * WIDTH + 3 * 3 * WIDTH // 2)  # lora_a whole, lora_b cut
            state = model.memory_bytes()["optimizer_state"]
            assert abs(state - 2 * 4 * trainable / shards) <= 64, (stage, state)
            local = sum(bucket.data.numel() for bucket in model.hybrid_runtime.engine.all_buckets())
            assert local < 0.65 * wanted
            gathered = model.full_state_dict()
            assert sum(value.numel() for value in gathered.values()) == wanted


def test_bc34_frozen_weights_cost_nothing_and_cut_ones_their_share() -> None:
    """Fault: gradients and moments as of a full fine-tune; whole weights left beside the cut ones."""
    run_ranks(check_bytes, 4)


def check_access() -> None:
    values = weights_of(build("gpt-tied", dtype=torch.float32))
    plain = build("gpt-tied", dtype=torch.float32)
    logits_loss(plain, tokens(0)).backward()
    for stage in (0, 2, 3):
        with tensor_variant(2, stage=stage, plan=GPT_PLAN, bucket_bytes=3000) as strategy:
            model: Any = hybrid.distributed_model(build("gpt-tied", dtype=torch.float32), strategy)
            optimizer: Any = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters()))
            logits_loss(model, own_samples(tokens(0))).backward()
            for (name, parameter), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(hybrid.full_parameter(parameter), values[name]), name
                assert_close(hybrid.full_gradient(parameter), wanted.grad, ONE_STEP, name)
            optimizer.zero_grad()
            name = "blocks.1.attn.qkv.weight"
            new = torch.arange(values[name].numel(), dtype=torch.float32).view_as(values[name])
            hybrid.set_full_parameter(model.get_parameter(name), new)
            assert torch.equal(model.full_state_dict()[name], new)
            state = model.state_dict()
            assert {key: value.shape for key, value in state.items()} == {k: v.shape for k, v in values.items()}
            model.load_state_dict(values)
            after = model.full_state_dict()
            assert list(after) == list(values)
            assert all(torch.equal(after[key], value) for key, value in values.items())
            with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.1\.attn\.qkv\.weight"):
                model.load_state_dict({**values, name: new[:-1]})
            with pytest.raises(RuntimeError, match="Missing key"):
                model.load_state_dict({key: value for key, value in values.items() if key != name})
            evaluation = model.eval_batch(own_samples(tokens(1)), forward_step=logits_loss)
            other = copy.deepcopy(plain)
            other.load_state_dict(values)
            with torch.no_grad():
                assert_close(evaluation.loss, logits_loss(other.eval(), tokens(1)), ONE_STEP, "evaluation")


def test_whole_values_are_read_and_written_by_the_plain_names() -> None:
    run_ranks(check_access, 4)
