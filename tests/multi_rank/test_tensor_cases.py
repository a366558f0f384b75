"""Reported faults of tensor parallelism, alone and beside sharding: norms, sums, heads, vocabularies, masks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import ONE_STEP, SEVERAL_STEPS, assert_close, assert_weights, seeded, weights_of
from tests.ranks import run_ranks
from tests.tensor_case import tensor_variant
from tests.tensor_gpt import GPT_PLAN, VOCABULARY, GroupedAttention, tokens
from tests.tensor_models import build
from tests.tensor_runs import assert_copies_alike, data_rank

Batch = tuple[torch.Tensor, torch.Tensor]
PAIR = {"up": "colwise", "down": "rowwise"}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def built(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(9)
    return kind()


def rows(batch: Batch) -> Batch:
    """This data rank's part."""
    rank, ranks = data_rank()
    inputs, labels = (tensor.chunk(ranks)[rank] for tensor in batch)
    return inputs, labels


def numbers(step: int, width: int = 8) -> Batch:
    generator = seeded(40 + step)
    return torch.randn(4, width, generator=generator), torch.randn(4, width, generator=generator)


# -- BC-06, BC-11: the norm ------------------------------------------------------------------------------------------


class Weighted(nn.Module):
    """Its gradients are 3, 4, 0, 12: two of a layer that is cut, two of a whole parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False)
        self.whole = nn.Parameter(torch.zeros(2))
        nn.init.ones_(self.up.weight)
        nn.init.ones_(self.down.weight)
        self.down.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fixed = torch.tensor([0.0, 12.0])
        # up.weight gets what comes back through down: 3 for the first column, 4 for the second.
        return self.down(self.up(x)).sum() / len(x) + (self.whole * fixed).sum()


def check_norms() -> None:
    plan = PAIR | {"whole": "replicated"}
    for stage in (0, 1, 2, 3):
        for clip, norm, factor in ((6.5, 13.0, 0.5), ((6.0, math.inf), 12.0, 0.5)):
            with tensor_variant(2, stage=stage, plan=plan) as strategy:
                model = Weighted()
                with torch.no_grad():
                    model.down.weight.copy_(torch.tensor([[3.0, 4.0]]))
                optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
                model, optimizer = hybrid.distributed_model(model, strategy), hybrid.distributed_optimizer(optimizer)
                model(torch.ones(2, 1)).backward()
                found = model.clip_grad_norm_(*(clip if isinstance(clip, tuple) else (clip,)))
                assert_close(found, norm, ONE_STEP, "norm")
                optimizer.step()
                state = model.full_state_dict()
                wanted = 1.0 - factor * torch.tensor([[3.0], [4.0]])
                assert_close(state["up.weight"], wanted, ONE_STEP, "up.weight")
                assert_close(state["whole"], torch.tensor([0.0, -12 * factor]), ONE_STEP, "whole")


def test_bc06_whole_weights_count_once_in_the_norm_and_cut_ones_in_full() -> None:
    """Fault: whole weights were counted by each tp rank, or each rank clipped by the norm of its own part."""
    run_ranks(check_norms, 2)
    run_ranks(check_norms, 4)


def train_scaled(stage: int, scale: float | None) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    with tensor_variant(2, stage=stage, plan=PAIR, gradient_clipping=1.0) as strategy:
        model = hybrid.distributed_model(built(MLP), strategy)
        optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        history = []
        for step in range(5):
            result = model.train_batch(rows(numbers(step)), optimizer, scaler=scaler, loss_fn=_times_twenty)
            history.append((result.loss.item(), result.grad_norm.item()))
            assert_copies_alike(model, step)
        before = model.full_state_dict()
        if scaler is not None:
            # An overflow on one data rank alone: nobody steps, and all go on with the same scale.
            inputs, labels = rows(numbers(7))
            bad = inputs.clone()
            bad[0, 0] = torch.inf if data_rank()[0] == 1 else bad[0, 0]
            assert model.train_batch((bad, labels), optimizer, scaler=scaler, loss_fn=_times_twenty).skipped
            assert scaler.get_scale() == scale / 2 if scale is not None else True
            after = model.full_state_dict()
            assert all(torch.equal(after[name], before[name]) for name in before)
        return history, before


def _times_twenty(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 20 * functional.mse_loss(output, labels)


def check_scaled() -> None:
    model = built(MLP)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wanted = []
    for step in range(5):
        loss = _times_twenty(model(numbers(step)[0]), numbers(step)[1])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm > 1
        wanted.append((loss.item(), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    for stage in (1, 3):
        for scale in (None, 1.0, 256.0):
            history, weights = train_scaled(stage, scale)
            for step, (loss, norm) in enumerate(wanted):
                assert_close(history[step][0], loss, SEVERAL_STEPS, f"loss {step}, stage {stage}, scale {scale}")
                assert_close(history[step][1], norm, SEVERAL_STEPS, f"norm {step}, stage {stage}, scale {scale}")
            for name, value in model.state_dict().items():
                assert_close(weights[name], value, SEVERAL_STEPS, f"{name}, stage {stage}, scale {scale}")


def test_bc11_stage_3_loss_scale_and_clip_together() -> None:
    """Fault: the combination died in the scaler; an overflow on one rank let the others step."""
    run_ranks(check_scaled, 4)


# -- BC-15: masked labels --------------------------------------------------------------------------------------------


def masked(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels of the first tp rank's words alone; in step 1 the second half is masked, in step 2 everything is."""
    batch = tokens(step)
    labels = batch["labels"] % (VOCABULARY // 2)
    labels[4 if step == 1 else 8 - 8 * (step == 2) :] = -100
    return batch["ids"], labels


def masked_loss(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids, labels = batch
    logits = model(ids)
    loss = functional.cross_entropy(logits.view(-1, VOCABULARY), labels.reshape(-1), ignore_index=-100, reduction="sum")
    return loss, (labels != -100).sum()


def check_masked(tp: int) -> None:
    model, losses = build("gpt-tied"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        total, count = masked_loss(model, masked(step))
        (total / count).backward()
        losses.append(total.item() / count.item())
        optimizer.step()
        optimizer.zero_grad()
    for stage in (0, 2, 3):
        for sequence_parallel in (False, True):
            with tensor_variant(tp, stage=stage, plan=GPT_PLAN, sequence_parallel=sequence_parallel) as strategy:
                cut: Any = hybrid.distributed_model(build("gpt-tied"), strategy)
                optimizer = hybrid.distributed_optimizer(torch.optim.SGD(cut.parameters(), lr=0.1))
                for step in range(3):
                    ids, labels = masked(step)
                    result = cut.train_batch(rows((ids, labels)), optimizer, forward_step=masked_loss)
                    assert_close(result.loss, (*losses, 0.0)[step], ONE_STEP, f"loss {step}")
                    assert result.skipped == (step == 2)
                assert_weights(cut, model.state_dict(), SEVERAL_STEPS)


def test_bc15_ranks_without_a_counted_label() -> None:
    """Fault: NaN spread from a rank that owns none of the labels, or all of whose labels are masked."""
    run_ranks(check_masked, 2, 2)
    run_ranks(check_masked, 4, 2)


# -- BC-17: sums over tp ---------------------------------------------------------------------------------------------


class SequenceBlock(nn.Module):
    """LayerNorm -> MLP -> LayerNorm, which all work on a part of the sequence, and one that sees it whole."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.LayerNorm(4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.LayerNorm(4))
        self.body, self.norm = nn.Sequential(*layers), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x) + x)


class ScaledHeads(nn.Module):
    """A vector of head size that scales each of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down((self.up(x).unflatten(-1, (-1, 4)) * self.scale).flatten(-2).tanh())


class SharedKeyValue(nn.Module):
    """Two query heads read one projection, with a bias, as keys and as values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(4, 8), nn.Linear(4, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, kv = self.q(x).unflatten(-1, (-1, 4)).transpose(1, 2), self.kv(x).unsqueeze(1)
        weights = torch.softmax(q @ kv.transpose(-1, -2) / 2, dim=-1)
        return self.o((weights @ kv).transpose(1, 2).flatten(-2))


SUMS: dict[type[nn.Module], tuple[Mapping[str, Any], bool]] = {
    SequenceBlock: ({"body.1": "colwise", "body.3": "rowwise"}, True),
    ScaledHeads: ({"up": {"style": "colwise", "heads": 2}, "down": "rowwise", "scale": "partial"}, False),
    SharedKeyValue: (
        {"q": {"style": "colwise", "heads": 2}, "kv": {"style": "colwise", "heads": 1}, "o": "rowwise"},
        False,
    ),
}


def sums_batch(step: int) -> Batch:
    generator = seeded(70 + step)
    return torch.randn(4, 4, 4, generator=generator), torch.randn(4, 4, 4, generator=generator)


def check_sums(stages: tuple[int, ...]) -> None:
    for kind, (plan, sequence_parallel) in SUMS.items():
        model, history = built(kind), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        for step in range(5):
            functional.mse_loss(model(sums_batch(step)[0]), sums_batch(step)[1]).backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
            history.append((gradients, weights_of(model)))
        for stage in stages:
            with tensor_variant(2, stage=stage, plan=plan, sequence_parallel=sequence_parallel) as strategy:
                cut: Any = hybrid.distributed_model(built(kind), strategy)
                optimizer = hybrid.distributed_optimizer(torch.optim.AdamW(cut.parameters(), lr=1e-2, eps=1e-3))
                for step, (gradients, weights) in enumerate(history):
                    inputs, labels = rows(sums_batch(step))
                    functional.mse_loss(cut(inputs), labels).backward()
                    for name, gradient in cut.named_gradients():
                        assert_close(gradient, gradients[name], ONE_STEP, f"{kind.__name__}: gradient of {name}")
                    optimizer.step()
                    optimizer.zero_grad()
                    assert_copies_alike(cut, f"{kind.__name__}, step {step}")
                    assert_weights(cut, weights, ONE_STEP)


def test_bc17_gradients_of_whole_weights_are_summed() -> None:
    """Fault: norms on a cut sequence, vectors on cut heads, shared keys and values kept a part of their gradient."""
    run_ranks(check_sums, 2, (0, 1))
    run_ranks(check_sums, 4, (2, 3))


# -- BC-18: heads ----------------------------------------------------------------------------------------------------


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = GroupedAttention(16, 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attn(x)


def check_grouped() -> None:
    plain = built(Grouped)
    inputs = torch.randn(2, 4, 16, generator=seeded(3))
    wanted = plain(inputs)
    wanted.pow(2).mean().backward()
    for stage in (0, 3):
        with tensor_variant(4, stage=stage) as strategy:
            model: Any = hybrid.distributed_model(built(Grouped), strategy)
            output = model(inputs)
            assert_close(output, wanted, ONE_STEP, "output")
            output.pow(2).mean().backward()
            gradients = dict(model.named_gradients())
            assert gradients["attn.k_proj.weight"].shape == (8, 16)
            for name, parameter in plain.named_parameters():
                assert_close(gradients[name], parameter.grad, ONE_STEP, name)


def test_bc18_fewer_heads_of_keys_and_values_than_ranks() -> None:
    """Fault: the forward died in a reshape, or a head was dropped. Each of two heads is on two of four ranks."""
    run_ranks(check_grouped, 4)


# -- BC-19: vocabularies ---------------------------------------------------------------------------------------------


class Eleven(nn.Module):
    """Eleven words, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.mlp, self.head = nn.Embedding(11, 8), nn.Module(), nn.Linear(8, 11, bias=False)
        self.mlp.up, self.mlp.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.wte(ids)
        return self.head(hidden + self.mlp.down(torch.tanh(self.mlp.up(hidden))))


ELEVEN_PLAN = {"mlp.up": "colwise", "mlp.down": "rowwise"}
State = tuple[dict[str, torch.Tensor], dict[str, Any]]


def words(step: int) -> Batch:
    ids = torch.randint(0, 11, (12, 6), generator=seeded(90 + step))
    return ids[:, :-1], ids[:, 1:]


def word_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.view(-1, 11), labels.reshape(-1))


def eleven_plain(steps: int) -> tuple[nn.Module, list[float]]:
    model, losses = built(Eleven), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(steps):
        loss = word_loss(model(words(step)[0]), words(step)[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def train_eleven(tp: int, stage: int, start: State | None) -> State:
    """Steps 0 and 1; or, from a state, step 2. Compared with the plain run; its state at the end."""
    with tensor_variant(tp, stage=stage, plan=ELEVEN_PLAN) as strategy:
        torch.manual_seed(9 if start is None else 1)
        model: Any = hybrid.distributed_model(Eleven(), strategy)
        optimizer: Any = hybrid.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))
        if start is not None:
            model.load_state_dict(start[0])
            optimizer.load_state_dict(start[1])
            state = model.full_state_dict()
            assert all(torch.equal(state[name], value) for name, value in start[0].items())
            saved = optimizer.full_state_dict()["state"]
            for name, entry in start[1]["state"].items():
                assert all(torch.equal(saved[name][key], value) for key, value in entry.items()), name
        first, steps = (0, 2) if start is None else (2, 3)
        plain, losses = eleven_plain(steps)
        for step in range(first, steps):
            result = model.train_batch(rows(words(step)), optimizer, loss_fn=word_loss)
            assert_close(result.loss, losses[step], SEVERAL_STEPS, f"loss {step}")
        assert_weights(model, plain.state_dict(), SEVERAL_STEPS)
        state = model.full_state_dict()
        assert state["head.weight"] is state["wte.weight"] or torch.equal(state["head.weight"], state["wte.weight"])
        with torch.no_grad():
            ids = words(5)[0]
            logits = model.eval()(ids)
            exported = Eleven()
            exported.load_state_dict(state)
            assert logits.shape == (12, 5, 11)
            assert torch.equal(logits.argmax(-1), exported(ids).argmax(-1))
            assert_close(torch.as_tensor(logits + 0), exported(ids), ONE_STEP, "logits")
        return state, optimizer.full_state_dict()


@pytest.mark.parametrize("tp", [2, 4])
def test_bc19_a_vocabulary_that_the_ranks_do_not_divide(tp: int) -> None:
    """Fault: padded rows in the export, in the loss, or in what another layout loads."""
    start = run_ranks(train_eleven, 4, tp, 3 if tp == 2 else 1, None)[0]
    for ranks, degree, stage in ((3, 3, 0), (4, 2, 2), (2, 2, 3)):
        run_ranks(train_eleven, ranks, degree, stage, start)
