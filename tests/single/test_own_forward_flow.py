"""What is seen of a forward before it is cut: which values reach what, and which ones cannot be followed.

All of it on one process, without values: the plan is made before a process group exists.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hybrid.compose.own_forward import check_held, plan_own
from hybrid.errors import ModelError, StrategyError
from hybrid.pipeline.flow import crossing_values
from hybrid.pipeline.plan import OwnForwardPlan
from tests.own_forward_models import MODELS, build


def settings(num_chunks: int = 2, split: Any = None) -> Any:
    return SimpleNamespace(num_chunks=num_chunks, split=split, degree=num_chunks)


def plan(model: nn.Module, sample: Any, num_chunks: int = 2, split: Any = None) -> OwnForwardPlan:
    return plan_own(model, settings(num_chunks, split), sample=sample)


def crossing(found: OwnForwardPlan) -> list[list[str]]:
    return [
        [f"{found.flow.calls[index].unit}{':' if path else ''}{path}" for index, path in places]
        for places in crossing_values(found.flow, found.chunks)
    ]


class Blocks(nn.Module):
    """Four blocks; what happens between them is up to the test."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        for place, block in enumerate(self.blocks):
            x = self.between(place, x, block)
        return x

    def between(self, place: int, x: torch.Tensor, block: nn.Module) -> Any:
        return block(x)


class Block(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)


X = torch.randn(3, 4)


# ---- what is followed ------------------------------------------------------------------------------------------------


def test_skips_cross_every_cut_between_their_ends() -> None:
    """A U-Net: what goes down is needed when it comes up again, over all stages in between; one layer runs twice."""
    found = plan(build("unet"), MODELS["unet"].batch(0)[0], 4, split=["downs.1", "mix", "ups"])
    calls = [call.unit for call in found.flow.calls]
    assert calls == ["enter", "downs.0", "downs.1", "middle", "mix", "mix", "ups.0", "ups.1", "leave"]
    assert crossing(found) == [["downs.0"], ["downs.0", "downs.1", "middle"], ["downs.0", "downs.1", "mix", "mix"]]
    # `act` writes what `enter` returned, and `x += ...` what `mix` returned: both must cross as they were returned.
    assert found.flow.written == {(0, ""), (4, "")}
    assert found.flow.calls[6].parameters == found.flow.calls[7].parameters == {"scale"}


def test_masks_and_positions_are_computed_on_every_stage() -> None:
    """One tensor crosses each cut of a decoder: positions have done their part, a causal mask is local."""
    found = plan(build("demo"), MODELS["demo"].batch(0)[0], 4)
    assert crossing(found) == [["blocks.0"], ["blocks.2"], ["norm"]]
    assert [call.unit for call in found.flow.calls][:2] == ["embedding", "position"]
    assert found.flow.calls[2].reads == {(0, ""), (1, "")}


def test_parameters_outside_units_are_held_where_they_reach() -> None:
    """Positions are added behind the embedding, and its weight is the head: the first stage has one, both the other."""
    found = plan(build("nano"), MODELS["nano"].batch(0)[0])
    assert found.flow.calls[1].parameters == {"positions"}
    assert found.flow.output_parameters == {"words.weight"}


def test_a_memory_that_is_filled_piece_by_piece_carries_all_of_them() -> None:
    """Protects against a value that reaches others through a buffer that code outside units has made itself."""

    class Collecting(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = torch.zeros(2, *x.shape)
            found[0] = self.blocks[0](x)
            found[1] = self.blocks[1](x)
            return self.blocks[3](self.blocks[2](x) + found.sum(0))

    found = plan(Collecting(), X, split=[2, 2])
    assert crossing(found) == [["blocks.0", "blocks.1"]]
    assert found.flow.calls[2].reads == frozenset()


def test_what_a_unit_returns_as_it_got_it_does_not_cross() -> None:
    """A mask that goes along is at hand on every stage."""

    class Pair(Block):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:  # type: ignore[override]
            return super().forward(x) * mask, mask

    class Passing(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Pair() for _ in range(4))

        def between(self, place: int, x: Any, block: nn.Module) -> Any:
            return block(*(x if isinstance(x, tuple) else (x, torch.ones(3, 1))))

    found = plan(Passing(), X)
    assert [call.passes for call in found.flow.calls] == [(("1", "1"),)] * 4
    assert crossing(found) == [["blocks.1:0"]]


def test_statistics_are_units_even_without_parameters() -> None:
    """BatchNorm(affine=False) writes buffers: run on every stage, it would count what it did not see."""

    class Counting(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4, affine=False)

        def between(self, place: int, x: torch.Tensor, block: nn.Module) -> Any:
            return block(self.norm(x) if place == 1 else x)

    found = plan(Counting(), X)
    assert [call.unit for call in found.flow.calls] == ["blocks.0", "norm", "blocks.1", "blocks.2", "blocks.3"]
    assert {"norm.running_mean", "norm.running_var"} <= found.flow.written_buffers

    class Twice(Counting):
        def between(self, place: int, x: torch.Tensor, block: nn.Module) -> Any:
            return block(self.norm(x))

    model = Twice()
    found = plan(model, X)
    with pytest.raises(ModelError, match=r"'norm\.\w+' is written .* on pipeline stages 0 and 1"):
        check_held(model, found, num_stages=2)


def test_units_may_look_at_their_values() -> None:
    """As experts do, which choose tokens: such a unit is run on zeros, to see what it returns."""

    class Choosing(Block):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:  # type: ignore[override]
            chosen = (x.sum(1) >= 0).nonzero().flatten()
            return {"x": torch.zeros_like(x).index_add(0, chosen, super().forward(x[chosen])), "mask": mask}

    class Mixture(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Choosing() for _ in range(4))

        def between(self, place: int, x: Any, block: nn.Module) -> Any:
            return block(**(x if isinstance(x, dict) else {"x": x, "mask": torch.ones(3)}))

    found = plan(Mixture(), X)
    assert [call.passes for call in found.flow.calls] == [(("mask", "mask"),)] * 4
    assert crossing(found) == [["blocks.1:x"]]
    assert dict(found.flow.calls[0].values)["x"].shape == (3, 4)


def test_masks_may_be_looked_at_and_a_model_without_blocks_is_taken_apart() -> None:
    """What depends on the inputs alone has values; a wrapper around everything is no unit."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.first, self.inner.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            first = self.inner.first(x)
            return self.inner.second(first * mask if bool(mask.any()) else first)

    found = plan(Wrapper(), {"x": X, "mask": torch.ones(3, 1)})
    assert [call.unit for call in found.flow.calls] == ["inner.first", "inner.second"]


def test_units_without_gradients_may_give_their_parameters_to_their_parts() -> None:
    """As DeBERTa's positions: torch's counter of flops hooks what a part is given, which needs a gradient."""

    class Positions(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.project = nn.Parameter(torch.ones(3, 4)), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.project(self.table)

    model = Blocks().eval()
    model.blocks = nn.ModuleList(Positions() for _ in range(4)).eval()
    assert [call.forward_flops for call in plan(model, X).flow.calls] == [2 * 2 * 3 * 4 * 4] * 4


def test_a_cache_of_linear_attention_has_no_length() -> None:
    """As Mamba's: an empty one is left out, one with a state is refused."""

    class Recurrent(Cached):
        has_state = False

        def between(self, place: int, x: torch.Tensor, block: nn.Module) -> Any:
            return block(x, SimpleNamespace(get_seq_length=no_length, has_previous_state=lambda: self.has_state))

    def no_length() -> int:
        raise ValueError("only LinearAttention layers")

    model = Recurrent()
    assert len(plan(model, X).flow.calls) == 4
    model.has_state = True
    with pytest.raises(ModelError, match=r"'blocks.0' is given a cache of 1 position"):
        plan(model, X)


class Dropping(Blocks):
    """As LayerDrop of transformers' OPT, BART and Wav2Vec2."""

    probability = 0.2

    def between(self, place: int, x: torch.Tensor, block: nn.Module) -> Any:
        return x if torch.rand([]) < self.probability else block(x)


def test_random_numbers_that_change_no_call_are_no_layer_drop() -> None:
    """A probability of 0, which is transformers' default, costs no second look; a flip of the inputs goes on."""

    class Undropped(Dropping):
        probability = 0.0
        forwards = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Undropped.forwards += 1
            return super().forward(x)

    class Flipping(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.flip(0) if torch.rand([]) < 0.5 else x)

    assert len(plan(Undropped(), X).flow.calls) == 4
    assert Undropped.forwards == 1
    model, before = Flipping(), torch.random.get_rng_state()
    assert len(plan(model, X).flow.calls) == 4
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_loss_over_sequences_in_the_model() -> None:
    """CTC, as in Wav2Vec2: torch does not know on tensors without values how large what it keeps is."""

    class Listening(Blocks):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
            scores = super().forward(x).log_softmax(-1)[:, None].expand(3, 2, 4)
            return {"loss": functional.ctc_loss(scores, labels, torch.tensor([3, 3]), labels.ne(0).sum(-1))}

    found = plan(Listening(), {"x": X, "labels": torch.tensor([[1, 2], [3, 0]])})
    assert crossing(found) == [["blocks.1"]]
    assert found.flow.output_reads == {(3, "")}


def test_what_the_inputs_choose_of_values() -> None:
    """Sequence classifiers take the positions of the last tokens, losses the tokens that count. The shapes are those of
    the inputs: all of it was refused as a forward that cannot run."""

    class Choosing(Blocks):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
            x, counts = super().forward(x), labels != -100
            chosen = x[counts] + x.masked_select(counts[:, None]).view(-1, 4) + x[:, counts][:, :1].expand(3, 4)[counts]
            assert chosen.shape == (2, 4)
            return functional.cross_entropy(chosen, labels[counts])

        def between(self, place: int, x: torch.Tensor, block: nn.Module) -> torch.Tensor:
            x = block(x)
            if place == 1:
                x = x.clone()
                x[torch.tensor([True, False, True])] = 0.0
            return x

    found = plan(Choosing(), {"x": X, "labels": torch.tensor([3, -100, 1])})
    assert crossing(found) == [["blocks.1"]]
    assert found.flow.output_reads == {(3, "")}


def test_units_run_on_the_lengths_of_the_sample() -> None:
    """A packed sequence has its sizes among its values: on zeros an LSTM has nothing to do."""

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.LSTM(4, 4, batch_first=True) for _ in range(2))
            self.head = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            packed, _ = self.second(self.first(packed)[0])
            return self.head(nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0])

    sample = {"x": torch.randn(3, 5, 4), "lengths": torch.tensor([2, 5, 3])}
    found = plan(Reading(), sample, 3)
    assert [call.unit for call in found.flow.calls] == ["first", "second", "head"]
    assert crossing(found) == [["first:0.0"], ["second:0.0"]]
    shapes = [dict(call.values).popitem()[1].shape for call in found.flow.calls]
    assert shapes[2] == (3, 5, 4)


def test_a_grouped_product_has_the_type_that_is_asked_for() -> None:
    """It had the type of its inputs, and the rest of the layer failed where types must meet."""

    class Grouped(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = self.weight.bfloat16()[None]
            ends = torch.tensor([3], dtype=torch.int32)
            return functional.grouped_mm(x.bfloat16(), weights, offs=ends, out_dtype=torch.float32) @ self.weight

    model = Blocks()
    model.blocks = nn.ModuleList(Grouped() for _ in range(2))
    values = [value for call in plan(model, X).flow.calls for _, value in call.values]
    assert [(value.shape, value.dtype) for value in values] == [((3, 4), "float32")] * 2


# ---- what is refused -------------------------------------------------------------------------------------------------


class Deciding(Blocks):
    def between(self, place: int, x: torch.Tensor, block: nn.Module) -> Any:
        return block(x) if place < 2 or x.sum() > 0 else x


class Keeping(Blocks):
    """An auxiliary loss as an attribute."""

    def between(self, place: int, x: torch.Tensor, block: nn.Module) -> Any:
        return block(x) + (self.blocks[0].kept if place == 3 else 0)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Kept() for _ in range(4))


class Kept(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = super().forward(x)
        return self.kept * 2


class Recording(Blocks):
    """As `output_hidden_states` of transformers does."""

    def forward(self, x: torch.Tensor) -> Any:
        seen: list[torch.Tensor] = []
        hooks = [block.register_forward_hook(lambda m, args, output: seen.append(output)) for block in self.blocks]
        x = super().forward(x)
        for hook in hooks:
            hook.remove()
        return x + torch.stack(seen).sum(0)


class Overwriting(Blocks):
    def between(self, place: int, x: torch.Tensor, block: nn.Module) -> Any:
        return block(x) + x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlace() for _ in range(4))


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.relu_(x))


class Cached(Blocks):
    def between(self, place: int, x: torch.Tensor, block: nn.Module) -> Any:
        return block(x, SimpleNamespace(get_seq_length=lambda: 5))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Takes() for _ in range(4))


class Takes(Block):
    def forward(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


class Hiding(Cached):
    def between(self, place: int, x: torch.Tensor, block: nn.Module) -> Any:
        return block(x, SimpleNamespace(memory=x))


class Training(Blocks):
    def between(self, place: int, x: torch.Tensor, block: nn.Module) -> Any:
        with torch.no_grad():
            self.scale.mul_(0.9)
        return block(x * self.scale)


class Counted(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def between(self, place: int, x: torch.Tensor, block: nn.Module) -> Any:
        self.count += 1
        return block(x)


class Uncopied(Blocks):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("holds a file")


class Local(Blocks):
    """What pickle cannot name, from the block behind which the model is cut: behind the last it would go nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_hook(lambda module, args, output: (output, lambda: None))

    def between(self, place: int, x: torch.Tensor, block: nn.Module) -> Any:
        output = block(x)
        return output[0] if isinstance(output, tuple) else output


class Mapped(Blocks):
    def between(self, place: int, x: torch.Tensor, block: nn.Module) -> Any:
        return torch.func.vmap(block)(x) if place == 1 else block(x)


class Differentiating(Blocks):
    def between(self, place: int, x: torch.Tensor, block: nn.Module) -> Any:
        y = block(x)
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0] if place == 1 else y


REFUSED: dict[str, tuple[type[Blocks], Any, str]] = {
    "no-sample": (Blocks, None, "Blocks by its own forward, and needs a sample.*sample=.*PipelineLayer.*degree = 1"),
    "decides-by-values": (Deciding, X, "'blocks.1' returns decides how the forward.*PipelineLayer"),
    "layer-drop": (Dropping, X, "random numbers decide which units.*layerdrop = 0"),
    "attribute": (Keeping, X, r"shape \(3, 4\) leaves 'blocks.3' by another way than what it returns"),
    "recorder": (Recording, X, "by another way.*output_hidden_states.*Switch that off"),
    "writes-its-input": (Overwriting, X.clone(), "'blocks.0' writes into a tensor that it is given.*x = x \\+ y"),
    "cache": (Cached, X, "a cache of 5 positions.*use_cache = False"),
    "object": (Hiding, X, "'blocks.1' is given a SimpleNamespace that holds tensors.*dataclass"),
    "maps": (Mapped, X, "calls 'blocks.1' inside torch.func .*into one module"),
    "differentiates": (Differentiating, X, "takes a gradient .* through 'blocks.1'.*into one module"),
    "cannot-be-sent": (Local, X, "of what 'blocks.1' returns: .* cannot be sent: Can't pickle.*dataclasses"),
    "writes-a-parameter": (Training, X, "writes parameter 'scale'"),
    "writes-a-buffer": (Counted, X, "writes buffer 'count' outside of its units"),
    "no-copy": (Uncopied, X, "cannot be copied .RuntimeError: holds a file"),
    "another-sample": (Blocks, (X, X), "cannot be run with the sample.*TypeError.*a dict of its arguments, a tuple"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_by_name(name: str) -> None:
    """Each would else train on placeholders, or on values of one stage alone."""
    kind, sample, wanted = REFUSED[name]
    with pytest.raises(ModelError) as caught:
        plan(kind(), sample)
    assert re.search(wanted, str(caught.value), re.DOTALL), str(caught.value)


def test_splits_that_do_not_fit_are_refused() -> None:
    with pytest.raises(StrategyError, match="4 layers cannot fill 5 pipeline chunks"):
        plan(Blocks(), X, 5)
    with pytest.raises(StrategyError, match=r"no layer runs under the name 'blocks.9'; those that run are blocks.0"):
        plan(Blocks(), X, split=["blocks.9"])
    with pytest.raises(StrategyError, match="the counts add up to 3, the model has 4 layers"):
        plan(Blocks(), X, split=[1, 2])
    assert [len(chunk) for chunk in plan(Blocks(), X, split=["blocks.3"]).chunks] == [3, 1]
    assert [len(chunk) for chunk in plan(Blocks(), X, 3, split="layer:Block").chunks] == [2, 1, 1]
