"""The gradient of logits that are cut over the vocabulary lies where they did, where nobody else can see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from hybrid.tensor import VocabParallelHead, VocabParallelLogits
from tests.multi_rank.tensor_worlds import assert_same, tp_group
from tests.multi_rank.test_tensor_loss import IGNORED, own_columns, some_targets
from tests.ranks import run_ranks


def check_the_memory_of_logits() -> None:
    """Where nobody else can see them, which takes no more than the values of plain torch to be right."""
    group = tp_group()
    torch.manual_seed(3)
    table, inputs, target = torch.randn(11, 4), torch.randn(6, 4), some_targets(11, 6)

    def gradients(look: Callable[[Any], Any]) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
        """Of the weight and the input of a head, twice; and whether the gradient of its logits lay where they did."""
        head = VocabParallelHead(4, 11, bias=False, group=group)
        with torch.no_grad():
            head.weight.copy_(table[own_columns(group, 11)])
        rows, here = inputs.clone().requires_grad_(), []
        logits = head(rows)
        place = logits.local().data_ptr()
        node = logits.grad_fn
        node.register_prehook(lambda grads: here.append(grads[0].data_ptr() == place))
        kept = look(logits)
        loss = functional.cross_entropy(logits, target, ignore_index=IGNORED) + (0.0 if kept is None else kept[1])
        del logits
        loss.backward(retain_graph=kept is not None and kept[2])
        if kept is not None and kept[2]:
            loss.backward()
        assert head.weight.grad is not None
        assert rows.grad is not None
        return head.weight.grad, rows.grad, here

    plain_table, plain_inputs = table.clone().requires_grad_(), inputs.clone().requires_grad_()
    functional.cross_entropy(plain_inputs @ plain_table.t(), target, ignore_index=IGNORED).backward()
    assert plain_table.grad is not None
    assert plain_inputs.grad is not None
    wanted = plain_table.grad[own_columns(group, 11)], plain_inputs.grad
    for look, is_there, times in (
        (lambda logits: None, [True], 1),
        (lambda logits: (logits, 0.0, False), [False], 1),
        (lambda logits: (logits.local()[:1], 0.0, False), [False], 1),
        (lambda logits: (None, 0.0, True), [False, True], 2),
    ):
        of_table, of_inputs, here = gradients(look)
        assert here == is_there, (here, is_there)
        assert_same(of_table / times, wanted[0], "gradient of the table", 1e-6)
        assert_same(of_inputs / times, wanted[1], "gradient of the input", 1e-6)
    # Two losses of the same logits, of which the first in backward must leave them to the second.
    of_table, _, here = gradients(
        lambda logits: (None, functional.cross_entropy(logits, target, ignore_index=IGNORED), False)
    )
    assert_same(of_table / 2, wanted[0], "gradient of two losses", 1e-6)
    # Logits that somebody has made himself, and still has.
    for scale in (None, 1.0):
        local = torch.randn(6, own_columns(group, 11).stop - own_columns(group, 11).start, requires_grad=True)
        local = local if scale is None else local * scale
        before = local.detach().clone()
        functional.cross_entropy(VocabParallelLogits.of(local, group=group, vocab_size=11), target).backward()
        assert torch.equal(local, before)


def test_the_gradient_takes_the_memory_of_logits() -> None:
    run_ranks(check_the_memory_of_logits, 2)
