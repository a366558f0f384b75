"""State beside what units return, of a model that is cut by its own forward: seen before it is cut, refused by name.

Each would train on an old value on some stage, or change it once per chunk. On one process, without values.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hybrid.compose.own_forward import check_held, plan_own
from hybrid.errors import ModelError
from hybrid.pipeline.absent import Absent, check_present
from hybrid.pipeline.function_caches import check_not_kept
from hybrid.pipeline.plan import OwnForwardPlan, modes_of, signature_of
from hybrid.pipeline.root_hooks import around_units, check_backward_hooks_around
from hybrid.pipeline.skeleton import FakeTensorMode, fake_like, is_fake

X = torch.randn(3, 4)


def plan(model: nn.Module, sample: Any = X, *, num_chunks: int = 2, num_stages: int = 2) -> OwnForwardPlan:
    settings: Any = SimpleNamespace(num_chunks=num_chunks, split="uniform")
    found = plan_own(model, settings, sample=sample)
    check_held(model, found, num_stages=num_stages)
    return found


class Blocks(nn.Module):
    """Four blocks, and what a test does around them."""

    def __init__(
        self,
        kind: Callable[[int, int], nn.Module] = nn.Linear,
        around: Callable[[Any, torch.Tensor], Any] = lambda model, x: x,
        *,
        end: Callable[[Any, torch.Tensor], Any] = lambda model, x: x,
        call: Callable[[Any, nn.Module, torch.Tensor], Any] = lambda model, block, x: block(x),
        **attributes: Any,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(4, 4) for _ in range(4))
        self.around, self.end, self.call = around, end, call
        for name, value in attributes.items():
            self.register_buffer(name, value) if isinstance(value, torch.Tensor) else setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.around(self, x)
        for block in self.blocks:
            x = self.call(self, block, x)
        return self.end(self, x)


class Scaling(nn.Linear):
    scale: Any = 1.0

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = 1.0 + x.shape[0]
        return super().forward(x)


class Choosing(Scaling):
    """Looks at its values, so that a copy of it runs on zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x.sum(1) >= 0).nonzero().flatten()
        self.scale = x.sum()
        return torch.zeros_like(x).index_add(0, chosen, nn.functional.linear(x[chosen], self.weight))


class Adding(nn.Linear):
    def forward(self, x: torch.Tensor, seen: Any) -> torch.Tensor:  # type: ignore[override]
        y = super().forward(x)
        if isinstance(seen, dict):
            seen["last"] = y
        else:
            seen.append(len(seen))
        return y


class AddingByValues(Adding):
    def forward(self, x: torch.Tensor, seen: Any) -> torch.Tensor:
        return super().forward(x[x.sum(1) >= 0], seen)


class Averaging(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


class Counting(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x) * self.count


class Drawing(nn.Linear):
    def __init__(self, own: torch.Generator, *sizes: int) -> None:
        super().__init__(*sizes)
        self.own = own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.rand(4, generator=self.own)


def count(model: Any, x: torch.Tensor, by: int = 1) -> torch.Tensor:
    model.count = model.count + by
    return x * model.count


def average(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.mean = model.mean * 0.9 + x.detach().mean(0)
    return x


def twice(module: nn.Module) -> Blocks:
    """A module before and behind the blocks."""
    model = Blocks(around=lambda model, x: model.shared(x), end=lambda model, x: model.shared(x))
    model.shared = module
    return model


def read_scales(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * sum(block.scale for block in model.blocks)


def through(model: Any, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def with_list(model: Any, block: nn.Module, x: torch.Tensor) -> Any:
    return block(x, model.seen)


def each(model: Any, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def again(model: Any, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for keep in (True, False):
        x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=keep)
    return x


def all_again(model: Any, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = again(model, block, x)
    return x


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attribute": (
        lambda: Blocks(Scaling, end=read_scales),
        "'blocks.0' changes its attribute 'blocks.0.scale'",
    ),
    "attribute-of-the-step-before": (lambda: Blocks(Scaling, read_scales), "'blocks.0' changes its attribute"),
    "attribute-by-values": (lambda: Blocks(Choosing, end=read_scales), "'blocks.0' changes its attribute"),
    "list": (lambda: Blocks(Adding, call=with_list, seen=[]), "'blocks.0' writes into a list, dict or object"),
    "dict": (lambda: Blocks(Adding, call=with_list, seen={"last": 0}), "'blocks.0' writes into a list, dict or object"),
    "list-by-values": (lambda: Blocks(AddingByValues, call=with_list, seen=[]), "'blocks.0' writes into a list"),
    "counter": (lambda: Blocks(around=count, count=0), "changes attribute 'count' of the model, which is around units"),
    "set-back": (
        lambda: Blocks(around=count, end=functools.partial(count, by=-1), count=0),
        "changes attribute 'count' of the model",
    ),
    "buffer": (lambda: Blocks(end=average, mean=torch.zeros(4)), "writes buffer 'mean' outside of its units"),
    "generator": (
        lambda: Blocks(around=lambda model, x: x * torch.rand((), generator=model.own), own=torch.Generator()),
        r"from a torch.Generator of its own \(rand\)",
    ),
    "generator-of-all-units": (
        lambda: Blocks(functools.partial(Drawing, torch.Generator())),
        "drawn from in 'blocks.0' to 'blocks.3', which are in pipeline chunks 0 and 1",
    ),
    "reentrant": (
        lambda: Blocks(call=lambda model, block, x: checkpoint(block, x.requires_grad_(), use_reentrant=True)),
        "with use_reentrant=True .* covers 'blocks.0'.*Use use_reentrant=False",
    ),
    "checkpoint-over-chunks": (
        lambda: Blocks(
            end=lambda model, x: checkpoint(functools.partial(through, model), x, use_reentrant=False),
            call=lambda model, block, x: x,
        ),
        "covers 'blocks.0' to 'blocks.3', which are in pipeline chunks 0 and 1",
    ),
    "reentrant-around-another": (
        lambda: Blocks(
            call=lambda model, block, x: checkpoint(
                functools.partial(checkpoint, block, use_reentrant=False), x.requires_grad_(), use_reentrant=True
            )
        ),
        "with use_reentrant=True .* covers 'blocks.0'.*Use use_reentrant=False",
    ),
    "checkpoint-over-chunks-around-others": (
        lambda: Blocks(
            end=lambda model, x: checkpoint(functools.partial(each, model), x, use_reentrant=False),
            call=lambda model, block, x: x,
        ),
        "covers 'blocks.0' to 'blocks.3', which are in pipeline chunks 0 and 1",
    ),
    "checkpoints-that-look-alike": (
        lambda: Blocks(call=again, end=all_again),
        "cover 4 calls of 'blocks.3', in several chunks of the pipeline.*preserve_rng_state=True",
    ),
    "counted-twice": (lambda: twice(Counting(4, 4)), "attribute 'shared.count' is changed .* pipeline stages 0 and 1"),
    "statistics-in-eval-mode": (
        lambda: twice(nn.BatchNorm1d(4)).eval(),
        r"buffer 'shared.\w+' is written .* pipeline stages 0 and 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_state_that_stages_would_not_share_is_refused(name: str) -> None:
    """Each would else give a number, and not that of one process."""
    make, wanted = REFUSED[name]
    with pytest.raises(ModelError) as caught:
        plan(make())
    assert re.search(wanted, str(caught.value), re.DOTALL), str(caught.value)


def test_calls_of_one_chunk_may_look_alike() -> None:
    """Whichever of them comes again in a backward: the block runs again."""
    assert plan(Blocks(call=again)) is not None


def test_statistics_in_two_chunks_of_one_stage_are_refused() -> None:
    """Micro-batches come to the second chunk after others have gone through the first."""
    with pytest.raises(ModelError, match=r"'shared.\w+' is written .* on chunks 0 and 2 of pipeline stage 0"):
        plan(twice(nn.BatchNorm1d(4)), num_chunks=3)
    plan(twice(nn.BatchNorm1d(4)), num_chunks=1, num_stages=1)


def cached(model: Any, x: torch.Tensor) -> torch.Tensor:
    if model.table is None or len(model.table) != len(x):
        model.table = torch.arange(len(x))
    model.last = model.latest = x
    model.positions = torch.arange(len(x)) if model.positions is None else model.positions.clone()
    return x + model.table[:, None] + model.positions[:, None]


def test_caches_go_and_nothing_is_left_behind() -> None:
    """What is filled once, or anew from the same inputs, is the same on all stages; what nobody reads does no harm."""
    model = Blocks(Averaging, cached, table=None, positions=None, last=None)
    found = plan(model)
    assert "blocks.0.mean" in found.flow.written_buffers
    skeleton: Any = found.following.skeleton
    for _ in range(2):
        assert skeleton.table is skeleton.positions is skeleton.last is None
        assert not hasattr(skeleton, "latest")
        assert found.follow((X,), {}, training=modes_of(model)) == found.flow
    assert isinstance(dict(skeleton.blocks[0].named_buffers())["mean"], torch.Tensor)
    assert model.table is None


def test_statistics_without_parameters_are_units_of_a_model_in_eval_mode() -> None:
    """`from_pretrained` returns models in eval mode: what they do in training decides too what is cut as a whole."""
    model = Blocks(around=lambda model, x: model.norm(x))
    model.norm = nn.BatchNorm1d(4, affine=False)
    found = plan(model.eval())
    assert next(call.unit for call in found.flow.calls) == "norm"
    assert found.in_training is not None
    assert "norm.running_mean" in found.in_training.written_buffers


@functools.lru_cache
def table(size: int) -> torch.Tensor:
    return torch.arange(size)


class Looking(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + table(4)


def test_caches_of_functions_hold_no_tensor_without_values() -> None:
    table.cache_clear()
    plan(Blocks(Looking))
    assert not is_fake(table(4))


def test_a_tensor_without_values_in_a_real_forward_is_named() -> None:
    """Kept where nobody looks for it; operations on it go on, and fail anywhere or nowhere."""
    fake = fake_like(X, FakeTensorMode(allow_non_fake_inputs=True))

    def use(kept: torch.Tensor) -> None:
        kept.view(5)

    check_not_kept("block", {"x": X})
    with pytest.raises(ModelError, match="'block' uses a tensor without values"):
        check_not_kept("block", {"x": X + fake})
    with pytest.raises(RuntimeError) as caught:
        use(fake)
    with pytest.raises(ModelError, match="'block' uses a tensor without values"):
        check_not_kept("block", caught.value)


def test_backward_hooks_on_modules_around_units_are_found() -> None:
    model = nn.Module()
    model.inner = Blocks()
    model.inner.register_full_backward_hook(lambda *_: None)
    units = [f"inner.blocks.{index}" for index in range(4)]
    with pytest.raises(ModelError, match="a backward hook on 'inner', which a pipeline cuts inside"):
        check_backward_hooks_around(around_units(model, units))
    model.inner.blocks[0].register_full_backward_hook(lambda *_: None)
    assert "inner.blocks.0" not in around_units(model, units)


def test_integers_that_did_not_cross_are_refused_where_they_are_used() -> None:
    """Zero would be a number like others, where a float is NaN."""
    absent = Absent.of(torch.zeros((), dtype=torch.long).expand(3), "router")
    plain = torch.zeros(3)
    check_present((absent.shape, plain.expand_as(absent), plain.to(absent.device), absent.dtype), "reach it")
    for used in (absent + 1, torch.ones(4)[absent], (absent > 0).float() * plain, torch.stack([absent, absent])):
        with pytest.raises(ModelError, match="that 'router' returns reach 'head', which they did not"):
            check_present(({"x": used},), "reach 'head'")
    mask = torch.ones(3, dtype=torch.bool)
    assert isinstance(mask & (absent > 0), Absent)
    check_present(mask, "reach it")
    plain[absent] = 1.0
    with pytest.raises(ModelError, match="reach the output"):
        check_present(plain, "reach the output")
    for decides in (bool, torch.Tensor.tolist, lambda tensor: int(tensor[0])):
        with pytest.raises(ModelError, match="decides how it goes on"):
            decides(absent[:1])


def test_a_wrong_sample_is_named_as_one(caplog: pytest.LogCaptureFixture) -> None:
    """And torch's log of the operation that failed is kept back."""
    for sample in ("words", torch.zeros(3, 5)):
        with pytest.raises(ModelError, match=r"with this sample 'blocks.0' runs neither .* a dict of its arguments"):
            plan(Blocks(), sample)
    assert not caplog.records
    with pytest.raises(ModelError, match=r"returns a tuple .return_dict=False.* a sample without labels"):
        plan(Labelled(), {"x": X, "labels": X})


class Labelled(Blocks):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), labels


def test_numbers_among_the_inputs_are_looked_at_as_sizes_are() -> None:
    """One that changes with every step (the labels of a batch) would be followed anew with every step."""
    one, other = ({"x": X, "num_items": number} for number in (7, 8))
    assert signature_of(one, sizes=False) == signature_of(other, sizes=False)
    assert signature_of(one, sizes=True) != signature_of(other, sizes=True)
    assert signature_of({"flag": True}, sizes=False) != signature_of({"flag": False}, sizes=False)
