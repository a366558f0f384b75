"""Reported faults with odd models: passes that are thrown away, several models, experts, sparse gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import (
    ONE_STEP,
    SEVERAL_STEPS,
    assert_close,
    assert_same_on_all_ranks,
    assert_weights,
    own_part,
    seeded,
    strategy_of,
    variant,
    weights_of,
    wrapped,
)
from tests.ranks import run_ranks


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def mlp(seed: int, width: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 9), nn.Tanh(), nn.Linear(9, width))


def rows(seed: int, count: int = 8, width: int = 5) -> torch.Tensor:
    return torch.randn(count, width, generator=seeded(seed))


# -- BC-47 ------------------------------------------------------------------------------------------------------


def passes(model: nn.Module, optimizer: Any, part: Any, *, is_hybrid: bool) -> list[float]:
    """Forward dropped; eval; train step; eval; backward in eval mode; two forwards, then both backwards."""
    losses: list[float] = []

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            losses.append(mean_over_ranks(model(part(rows(90))).square().mean(), is_hybrid))
        model.train()

    for step in range(3):
        model(part(rows(step)))  # dropped
        evaluate()
        inputs, labels = part(rows(10 + step)), part(rows(20 + step))
        if is_hybrid and step == 1:
            model.train_batch((inputs, labels), optimizer, loss_fn=functional.mse_loss)
        else:
            functional.mse_loss(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        evaluate()
        model.eval()
        model(part(rows(30 + step))).square().mean().backward()
        model.train()
        first, second = model(part(rows(40 + step))), model(part(rows(50 + step)))
        evaluate()
        second.square().mean().backward()
        first.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def mean_over_ranks(loss: torch.Tensor, is_hybrid: bool) -> float:
    total = loss.detach().clone()
    if is_hybrid:
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def check_passes() -> None:
    plain = mlp(1)
    losses = passes(plain, adamw(plain.parameters()), lambda rows: rows, is_hybrid=False)
    for stage in (0, 1, 2):
        for late in (False, True) if stage else (None,):
            with variant(stage=stage, bucket_bytes=100, overlap_param_gather=late) as strategy:
                model, optimizer = wrapped(mlp(1), adamw, strategy)
                got = passes(model, optimizer, own_part, is_hybrid=True)
                assert_close(torch.tensor(got), torch.tensor(losses), SEVERAL_STEPS, "eval losses")
                assert_weights(model, weights_of(plain), SEVERAL_STEPS)
                # What an exported file says is what eval computes with.
                exported = mlp(2)
                exported.load_state_dict(model.full_state_dict())
                assert torch.equal(exported(rows(60)), model(rows(60)))


def test_bc47_forwards_without_backward_and_evals_in_between_change_nothing() -> None:
    """Fault: a forward that was thrown away, or an eval, left stale weights or broke the next backward."""
    run_ranks(check_passes, 2)


def check_edits() -> None:
    for stage in (0, 1, 2):
        for late in (False, True) if stage else (None,):
            with variant(stage=stage, overlap_param_gather=late) as strategy:
                model, optimizer = wrapped(mlp(1), sgd, strategy)
                model.train_batch((own_part(rows(1)), own_part(rows(2))), optimizer, loss_fn=functional.mse_loss)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(0.5)
                assert all(bool((p == 0.5).all()) for p in model.parameters())
                assert all(bool((value == 0.5).all()) for value in model.full_state_dict().values())
                functional.mse_loss(model(own_part(rows(3))), own_part(rows(4))).backward()
                plain = mlp(1)
                with torch.no_grad():
                    for parameter in plain.parameters():
                        parameter.fill_(0.5)
                functional.mse_loss(plain(rows(3)), rows(4)).backward()
                for (name, gradient), parameter in zip(
                    sorted(model.named_gradients()), [p for _, p in sorted(plain.named_parameters())], strict=True
                ):
                    assert_close(gradient, parameter.grad, ONE_STEP, f"gradient of {name} after the edit")


def test_bc47_weights_edited_in_place_are_used_from_then_on() -> None:
    """Fault: edits between steps were lost, or reached the own shard only."""
    run_ranks(check_edits, 2)


def alternate(generator: Any, critic: Any, generator_optimizer: Any, critic_optimizer: Any, part: Any) -> None:
    """G steps twice while D steps once; D's loss and G's loss run through both models, on one shared input."""
    for step in range(4):
        shared = part(rows(70 + step))
        fake = generator(shared)
        if step % 2:
            loss = critic(fake.detach()).square().mean() - critic(part(rows(80 + step))).square().mean()
            loss.backward()
            critic_optimizer.step()
            critic_optimizer.zero_grad()
        critic(fake).square().mean().backward()
        generator_optimizer.step()
        generator_optimizer.zero_grad()
        critic.zero_grad()  # G's loss has left gradients there


def check_two_models() -> None:
    models = mlp(3), mlp(4)
    alternate(*models, sgd(models[0].parameters()), adamw(models[1].parameters()), lambda rows: rows)
    for stage in (0, 1, 2):
        with variant(stage=stage, bucket_bytes=100) as strategy:
            generator, generator_optimizer = wrapped(mlp(3), sgd, strategy)
            critic, critic_optimizer = wrapped(mlp(4), adamw, strategy)
            alternate(generator, critic, generator_optimizer, critic_optimizer, own_part)
            assert_weights(generator, weights_of(models[0]), SEVERAL_STEPS)
            assert_weights(critic, weights_of(models[1]), SEVERAL_STEPS)
            with pytest.raises(hybrid.OptimizerError, match="another"):
                generator.train_batch((rows(1), rows(2)), critic_optimizer, loss_fn=functional.mse_loss)


def test_bc47_two_models_keep_their_own_state() -> None:
    """Fault: a second wrapped model's step used the first one's flags, or its gradients."""
    run_ranks(check_two_models, 2)


# -- BC-48 ------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Top-1 router over two experts. An expert without tokens is not called, or called on no rows."""

    def __init__(self, *, call_idle: bool) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.router = nn.Linear(4, 2)
        with torch.no_grad():
            self.router.weight.copy_(torch.tensor([[4.0, 0, 0, 0], [-4.0, 0, 0, 0]]))
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.call_idle = call_idle

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chances = self.router(tokens).softmax(1)
        chosen = chances.argmax(1)
        output = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            places = (chosen == index).nonzero()[:, 0]
            if len(places) or self.call_idle:
                output = output.index_add(0, places, expert(tokens[places]) * chances[places, index, None])
        share = functional.one_hot(chosen, 2).to(chances.dtype).mean(0)
        return output, (share * chances.mean(0)).sum() * 2


def routed_tokens(step: int, world_size: int) -> torch.Tensor:
    """Eight tokens per rank. Step 0: all to expert 0. Step 1: expert 1 on rank 0 only. Later: mixed."""
    tokens = torch.randn(8 * world_size, 4, generator=seeded(600 + step))
    if step < 2:
        tokens[:, 0] = tokens[:, 0].abs() + 0.1
    if step == 1:
        tokens[1:3, 0] *= -1
    return tokens


def expert_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    output, balance = model(tokens)
    return (output - tokens.flip(1)).square().mean() + 0.1 * balance


def check_experts(world_size: int) -> None:
    for call_idle in (False, True):
        plain = Experts(call_idle=call_idle)
        plain_optimizer = adamw(plain.parameters())
        after = []
        for step in range(4):
            # The balance loss couples the tokens of a micro-batch, so one process takes the same micro-batches.
            micro_batches = routed_tokens(step, world_size).split(4)
            for tokens in micro_batches:
                (expert_loss(plain, tokens) / len(micro_batches)).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            after.append(weights_of(plain))
        layouts = [(0, None), (1, None), (2, None)] if world_size == 2 else [(1, 2), (2, None)]
        for stage, shard_size in layouts:
            with variant(stage=stage, shard_size=shard_size, accumulate_steps=2, bucket_bytes=64) as strategy:
                model, optimizer = wrapped(Experts(call_idle=call_idle), adamw, strategy)
                for step in range(4):
                    tokens = own_part(routed_tokens(step, world_size))
                    model.train_batch(tokens, optimizer, forward_step=expert_loss)
                    assert_weights(model, after[step], SEVERAL_STEPS)
                assert_same_on_all_ranks(dict(model.named_parameters()), "a weight")
                plain_state = plain_optimizer.state[plain.experts[1].weight]
                state = optimizer.full_state_dict()["state"]["experts.1.weight"]
                assert state["step"] == plain_state["step"] == (4 if call_idle else 3)


@pytest.mark.parametrize("world_size", [2, 4])
def test_bc48_an_idle_expert_is_treated_as_in_one_process(world_size: int) -> None:
    """Fault: expert gradients were off by a factor, an idle expert's state went its own way, the balance was lost."""
    run_ranks(check_experts, world_size, world_size)


# -- BC-50 ------------------------------------------------------------------------------------------------------

IDS = torch.tensor([[0, 1], [1, 1], [2, 9], [1, 0]])  # 1 on both ranks, twice in one bag


class Bag(nn.Module):
    """Bags of ids; tied: their table is also the head, so that sparse and dense gradients meet."""

    def __init__(self, *, sparse: bool, tied: bool, kind: str) -> None:
        super().__init__()
        torch.manual_seed(10)
        make = nn.EmbeddingBag if kind == "bag" else nn.Embedding
        self.table = make(10, 4, sparse=sparse, **({"mode": "sum"} if kind == "bag" else {}))
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.table(ids)
        return self.head(found if found.dim() == 2 else found.sum(1))


def check_sparse() -> None:
    for kind in ("bag", "table"):
        for tied in (False, True):
            for max_norm in (None, 0.5):
                plain = Bag(sparse=False, tied=tied, kind=kind)
                before = weights_of(plain)
                plain_optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
                plain(IDS).square().mean().backward()
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
                plain_optimizer.step()
                for stage in (0, 1, 2):
                    with variant(stage=stage, gradient_clipping=max_norm) as strategy:
                        model, optimizer = wrapped(
                            Bag(sparse=True, tied=tied, kind=kind), lambda p: torch.optim.SGD(p, lr=1.0), strategy
                        )
                        model(own_part(IDS)).square().mean().backward()
                        optimizer.step()
                        assert_weights(model, weights_of(plain), ONE_STEP)
                        untouched = [3, 4, 5, 6, 7, 8]
                        if not tied:
                            table = model.full_state_dict()["table.weight"]
                            assert torch.equal(table[untouched], before["table.weight"][untouched])


def test_bc50_sparse_embedding_gradients_are_summed_as_in_one_process() -> None:
    """Fault: the bucket's dense copy of a sparse gradient crashed or summed wrong rows."""
    run_ranks(check_sparse, 2)


def check_sparse_optimizer() -> None:
    model = hybrid.distributed_model(Bag(sparse=True, tied=False, kind="bag"), strategy=strategy_of(stage=2))
    with pytest.raises(hybrid.OptimizerError, match="SparseAdam"):
        hybrid.distributed_optimizer(torch.optim.SparseAdam([model.table.weight]))


def test_bc50_an_optimizer_for_sparse_gradients_is_refused_by_name() -> None:
    """Fault of the same kind: an optimizer that needs sparse gradients gets dense ones without a word."""
    run_ranks(check_sparse_optimizer, 2)
