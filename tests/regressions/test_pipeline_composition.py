"""Pipelines and what is combined with them: the same as in one process, or refused by name; nothing silent.

Each function tells one fault that was found. Most run in one world of two ranks, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from hybrid import LayerDesc, SharedLayerDesc
from tests.pipeline_models import assert_as_plain, batch_of, build, cross_entropy, make_adamw, own, pipeline_strategy
from tests.ranks import run_ranks

WIDTH = 6


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def batches(number: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)) for _ in range(number)
    ]


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def chain(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(linear(), *middle, linear())


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def refusal(
    model: nn.Module, strategy: hybrid.DistributedStrategy, *, error: type[Exception] = hybrid.ModelError
) -> str:
    """What is said, by `explain` and by a start that has not begun."""
    with pytest.raises(error) as explained:
        strategy.explain(model, world_size=2)
    with pytest.raises(error) as raised:
        hybrid.distributed_model(model, strategy=strategy)
    assert str(explained.value) == str(raised.value)
    assert not torch.distributed.is_initialized()
    return str(raised.value)


# ---- refused before anything starts ----------------------------------------------------------------------------------


@pytest.fixture
def of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29999"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


@pytest.mark.usefixtures("of_two_ranks")
def test_a_state_that_no_single_stage_owns_is_refused_before_anything_starts() -> None:
    """Faults: a BatchNorm (or a buffer) used by two stages became two, without a word; a parameter of the
    Sequential itself ended in `tuple.index(x): x not in tuple`."""
    norm = nn.BatchNorm1d(WIDTH)
    strategy = pipeline_strategy(2, split=[2, 2])
    text = refusal(nn.Sequential(linear(), norm, linear(), norm), strategy)
    assert "'1.running_mean' of a BatchNorm1d on pipeline stage 0" in text
    assert "'3.running_mean'" in text
    other = nn.BatchNorm1d(WIDTH)
    other.running_var = norm.running_var
    text = refusal(nn.Sequential(linear(), norm, linear(), other), strategy)
    assert "'1.running_var'" in text
    assert "'3.running_var'" in text
    view = nn.BatchNorm1d(WIDTH)
    view.running_var = norm.get_buffer("running_var")[:]
    assert "'3.running_var'" in refusal(nn.Sequential(linear(), norm, linear(), view), strategy)
    held = linear()
    held.weight = nn.Parameter(linear().weight.data)
    again = linear()
    again.weight = nn.Parameter(held.weight.data)
    assert "two nn.Parameters over one memory" in refusal(nn.Sequential(held, again), pipeline_strategy(2))
    model = chain()
    model.extra = nn.Parameter(torch.ones(3))  # type: ignore[assignment]
    assert "'extra' belongs to the Sequential itself" in refusal(model, pipeline_strategy(2))


@pytest.mark.usefixtures("of_two_ranks")
def test_settings_that_do_not_fit_the_model_are_refused_before_anything_starts() -> None:
    """Faults: unknown units of recompute were found after the group existed, in a list with `Elsewhere`; custom_fp32 at
    one place of a tie trained in two types; settings that would do nothing were refused by the stages they missed."""
    tied = chain(nn.Tanh())
    tied[2].weight = tied[0].weight
    for pp in (1, 2):
        strategy = pipeline_strategy(pp)
        strategy.recompute, strategy.recompute_configs = True, {"units": ["Foo"]}
        text = refusal(chain(), strategy)
        assert "['Foo']" in text
        assert text.endswith("it has the classes ['Linear', 'Sequential']")
        for level in ("O1", "O2"):
            text = refusal(tied, pipeline_strategy(pp, amp={"level": level, "custom_fp32": ["0"]}))
            assert "['0.weight', '2.weight'] is in custom_fp32 at one place" in text
        assert "would change no buffer" in refusal(chain(), pipeline_strategy(pp, amp={"buffer_dtype": "bfloat16"}))
    listed = hybrid.PipelineLayer(
        [SharedLayerDesc("w", nn.Linear, 4, 4), SharedLayerDesc("w", nn.Linear, 4, 4)], seed=1
    )
    text = refusal(listed, pipeline_strategy(2, amp={"level": "O2", "custom_fp32": ["1"]}))
    assert "['0.weight', '1.weight'] is in custom_fp32 at one place" in text
    text = refusal(nn.Sequential(nn.Tanh(), nn.Tanh()), pipeline_strategy(2, recompute="full"))
    assert "no repeated blocks" in text


@pytest.mark.usefixtures("of_two_ranks")
def test_a_split_is_named_as_it_was_given() -> None:
    """Fault: `pipeline_configs.split` was refused under the name `seg_method`."""
    model = nn.Sequential(*[linear() for _ in range(6)])
    text = refusal(model, pipeline_strategy(2, split=[3, 4]), error=hybrid.StrategyError)
    assert "pipeline_configs.split = [3, 4]: the counts add up to 7" in text
    assert "seg_method" not in text
    text = refusal(model, pipeline_strategy(2, split="layer:Block"), error=hybrid.StrategyError)
    assert 'pipeline_configs.split = "layer:Block": no layer of that class' in text
    listed = hybrid.PipelineLayer([LayerDesc(nn.Linear, 4, 4)] * 6, seg_method=[3, 2, 1])
    assert "seg_method = [3, 2, 1]: 3 counts" in refusal(listed, pipeline_strategy(2), error=hybrid.StrategyError)


# ---- buffers that a forward writes -----------------------------------------------------------------------------------


class SilentStatistics(nn.Module):
    """The kernel writes the statistics and says so to no version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(self.linear(value), self.mean, self.variance, training=self.training)


class Replacing(nn.Module):
    """A new tensor each time, which the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output = self.linear(value)
        if self.training:
            self.average = 0.9 * self.average + 0.1 * output.detach().mean(0)
        return output * (1 + self.average)


def block_with(norm: nn.Module) -> nn.Module:
    return nn.Sequential(linear(), norm)


def spectral() -> nn.Module:
    return block_with(torch.nn.utils.parametrizations.spectral_norm(linear()))


WRITERS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: block_with(nn.BatchNorm1d(WIDTH)),
    "silent": SilentStatistics,
    "replacing": Replacing,
    "spectral": spectral,
}


def recompute_writes_once() -> None:
    def trained(kind: str, pp: int, **settings: Any) -> Any:
        def make() -> nn.Module:
            return nn.Sequential(WRITERS[kind](), nn.Tanh(), WRITERS[kind](), nn.Tanh())

        model: Any = hybrid.distributed_model(seeded(make), strategy=pipeline_strategy(pp, mb=2, **settings))
        optimizer = hybrid.distributed_optimizer(sgd(model))
        got = [model.train_batch(own(batch), optimizer, loss_fn=functional.mse_loss) for batch in batches(2)]
        state = model.full_state_dict()
        hybrid.shutdown()
        return [(result.loss.item(), result.grad_norm.item()) for result in got], state

    for kind, pp, policies in (
        ("BatchNorm", 1, ("full", "selective")),
        ("spectral", 1, ("full",)),
        ("BatchNorm", 2, ("full", "selective")),
        ("spectral", 2, ("selective",)),
        ("silent", 2, ("full",)),
        ("replacing", 2, ("full", "selective")),
    ):
        wanted, wanted_state = trained(kind, pp, schedule="gpipe")
        for policy in policies:
            got, state = trained(kind, pp, schedule="gpipe", recompute=policy)
            case = (kind, pp, policy)
            assert got == wanted, (case, got, wanted)
            for name, value in wanted_state.items():
                assert torch.equal(state[name], value), (case, name)


# ---- edits of what is tied -------------------------------------------------------------------------------------------


def refused_edit(how: str, *, stage: int | None = None) -> str:
    """The third step's, after an edit on the first stage alone behind the second one."""
    model: Any = hybrid.distributed_model(build("tied"), strategy=pipeline_strategy(2, stage=stage))
    optimizer = hybrid.distributed_optimizer(make_adamw(model))
    is_first = hybrid.get_mesh().coordinate("pp") == 0
    for step in range(2):
        model.train_batch(own(batch_of(step)), optimizer, loss_fn=cross_entropy)
    half = hybrid.full_parameter(model[0 if is_first else 7].weight) / 2
    if how == "on both":
        hybrid.set_full_parameter(model[0 if is_first else 7].weight, half)
    elif how == "loaded":
        state = model.full_state_dict()
        model.load_state_dict({**state, "7.weight": half})
    elif is_first and how == "set":
        hybrid.set_full_parameter(model[0].weight, half)
    elif is_first and how in ("gathered", "evaluated"):
        with model.gather_parameters("0.weight"), torch.no_grad():
            model[0].weight.mul_(0.5)
    elif is_first:
        with torch.no_grad():
            model[0].weight.mul_(0.5)
    try:
        if how == "evaluated":
            model.eval_batch(own(batch_of(2)), loss_fn=cross_entropy)
        model.train_batch(own(batch_of(2)), optimizer, loss_fn=cross_entropy)
    except hybrid.ModelError as error:
        return str(error)
    finally:
        hybrid.shutdown()
    return ""


def edits_of_one_holder_are_refused() -> None:
    for how in ("set", "gathered", "in place", "evaluated"):
        text = refused_edit(how)
        assert "0.weight = 7.weight is one parameter, on pipeline stages 0 and 1" in text, (how, text)
        assert "edited on stage 0 and not on all ranks of stage 1" in text, (how, text)
    assert "has different values on them" in refused_edit("loaded")
    assert refused_edit("on both") == ""


def updates_of_one_holder_are_refused() -> None:
    model: Any = hybrid.distributed_model(build("tied"), strategy=pipeline_strategy(2))
    rate = 0.1 * (1 + hybrid.get_mesh().coordinate("pp"))
    with pytest.raises(hybrid.OptimizerError, match=r"'0.weight' is one parameter.*stage 0: group 0, lr 0\.1; stage 1"):
        hybrid.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=rate))
    held = [p for p in model.parameters() if p is not model[0].weight] if rate == 0.1 else model.parameters()
    with pytest.raises(hybrid.OptimizerError, match="stage 0: not in the optimizer; stage 1: group 0"):
        hybrid.distributed_optimizer(torch.optim.SGD(held, lr=0.1))
    hybrid.shutdown()


# ---- layers ----------------------------------------------------------------------------------------------------------

_seen: list[torch.dtype] = []


def project(layer: nn.Embedding, value: torch.Tensor) -> torch.Tensor:
    _seen.append(functional.linear(value, layer.weight).dtype)
    return functional.linear(value, layer.weight)


def twice(layer: nn.Module, value: torch.Tensor) -> torch.Tensor:
    return 2 * layer(value)


def a_forward_func_is_the_forward_of_its_layer() -> None:
    """Fault: custom_fp32, recompute and hooks went around it."""

    def make() -> hybrid.PipelineLayer:
        return hybrid.PipelineLayer(
            [
                SharedLayerDesc("words", nn.Embedding, 13, WIDTH, forward_func=twice),
                LayerDesc(nn.Linear, WIDTH, WIDTH),
                SharedLayerDesc("words", nn.Embedding, 13, WIDTH, forward_func=project),
            ],
            seed=1,
            seg_method=[2, 1],
        )

    ids = torch.randint(13, (8, 5), generator=torch.Generator().manual_seed(0))
    plain = make().build()
    wanted = cross_entropy(plain(ids), ids).item()
    for settings, dtype, calls in (
        ({"amp": {"level": "O1"}}, torch.bfloat16, 2),
        ({"amp": {"level": "O1", "custom_fp32": ["Embedding"]}}, torch.float32, 2),
        ({"recompute": "full"}, torch.float32, 4),
    ):
        model: Any = hybrid.distributed_model(make(), strategy=pipeline_strategy(2, mb=2, **settings))
        _seen.clear()
        result = model.train_batch((ids, ids), hybrid.distributed_optimizer(sgd(model)), loss_fn=cross_entropy)
        assert abs(result.loss.item() - wanted) < 0.05
        expected = [dtype] * calls if hybrid.get_mesh().coordinate("pp") == 1 else []
        assert _seen == expected, (settings, _seen)
        hybrid.shutdown()


class TwoNames(nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.v = self.w

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value @ self.w + value @ self.v.t()


def a_tie_by_a_second_name() -> None:
    """Fault: KeyError '3.w', after the start."""

    def make(attributes: tuple[str, str]) -> nn.Module:
        first, last = (SharedLayerDesc("a", TwoNames, shared_weight_attr=name) for name in attributes)
        middle = [LayerDesc(nn.Tanh), LayerDesc(nn.Linear, WIDTH, WIDTH)]
        return hybrid.PipelineLayer([first, *middle, last], seg_method=[2, 2], seed=1)

    for attributes in (("w", "v"), ("v", "w"), ("v", "v")):
        listed: Any = make(attributes)
        plain: Any = make(attributes)
        optimizer = sgd(plain.build())
        model: Any = hybrid.distributed_model(listed, strategy=pipeline_strategy(2))
        ours = hybrid.distributed_optimizer(sgd(model))
        for inputs, labels in batches():
            loss = functional.mse_loss(plain(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            result = model.train_batch((inputs, labels), ours, loss_fn=functional.mse_loss)
            assert abs(result.loss.item() - loss.item()) < 1e-6
        state = model.full_state_dict()
        assert list(state) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-6, rtol=0)
        assert list(ours.full_state_dict()["param_groups"][0]["params"]) == ["0.w", "2.weight", "2.bias"]
        hybrid.shutdown()


def what_is_added_later_is_refused() -> None:
    """Fault: `model.append(layer)` changed nothing, and nobody said so."""
    for pp, change, said in (
        (2, lambda model: model.append(linear()), "layer '2' of the model is Linear now and was not there"),
        (2, lambda model: model.append(nn.Tanh()), "layer '2' of the model is Tanh now and was not there"),
        (2, lambda model: model.pop(1), "layer '1' of the model is nothing now"),
        (1, lambda model: model.append(linear()), "parameter '2.weight' came into the model after"),
        (1, lambda model: setattr(model[1], "weight", nn.Parameter(torch.ones(WIDTH, WIDTH))), "parameter '1.weight'"),
    ):
        model: Any = hybrid.distributed_model(seeded(chain), strategy=pipeline_strategy(pp))
        optimizer = hybrid.distributed_optimizer(sgd(model))
        change(model)
        with pytest.raises(hybrid.ModelError, match=said):
            model.train_batch(own(batches()[0]), optimizer, loss_fn=functional.mse_loss)
        with pytest.raises(hybrid.ModelError, match=said):
            model.eval_batch(own(batches()[0]), loss_fn=functional.mse_loss)
        hybrid.shutdown()


class ReadsDict(nn.Linear):
    def forward(self, value: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(value["x"]) * value["scale"]


class ReadsPair(nn.Linear):
    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return super().forward(value[0]) * value[1]


def one_value_for_the_first_layer_at_any_degree() -> None:
    """Fault: a dict or a tuple as the input of a Sequential was taken apart at degree 1."""
    inputs, labels = batches()[0]
    for kind, batch in ((ReadsDict, {"x": inputs, "scale": labels}), (ReadsPair, (inputs, labels))):
        found = []
        for pp in (1, 2):
            model: Any = seeded(lambda kind=kind: nn.Sequential(kind(WIDTH, WIDTH), nn.Tanh(), linear()))
            wanted = functional.mse_loss(model(batch), labels).item()
            model = hybrid.distributed_model(model, strategy=pipeline_strategy(pp))
            optimizer = hybrid.distributed_optimizer(sgd(model))
            found.append(model.eval_batch(own((batch, labels)), loss_fn=functional.mse_loss).loss.item())
            found.append(model.train_batch(own((batch, labels)), optimizer, loss_fn=functional.mse_loss).loss.item())
            hybrid.shutdown()
        assert all(abs(one - wanted) < 1e-6 for one in found), (found, wanted)


# ---- what only some stages have --------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.scale


def settings_that_only_one_stage_needs() -> None:
    """Faults: a stage without buffers to cast, without low-precision parameters or without blocks refused the whole."""
    for make, settings in (
        (lambda: nn.Sequential(linear(), Scaled(), linear(), nn.Tanh()), {"amp": {"buffer_dtype": "bfloat16"}}),
        (
            lambda: nn.Sequential(nn.LayerNorm(WIDTH), Scaled(), linear(), nn.Tanh()),
            {"amp": {"buffer_dtype": "bfloat16", "custom_fp32": ["LayerNorm"]}},
        ),
        (lambda: nn.Sequential(linear(), linear(), nn.LayerNorm(WIDTH), nn.Tanh()), {"grad_dtype": "bfloat16"}),
        (lambda: nn.Sequential(linear(), linear(), nn.Tanh(), nn.Tanh()), {"recompute": "full"}),
    ):
        given = dict(settings)
        low = given.pop("grad_dtype", None)
        strategy = pipeline_strategy(2, split=[2, 2], **given)
        if low is not None:
            strategy.amp, strategy.amp_configs = True, {"level": "O2"}
            strategy.sharding, strategy.sharding_configs = True, {"stage": 1, "grad_dtype": low}
        model: Any = hybrid.distributed_model(seeded(make), strategy=strategy)
        optimizer = hybrid.distributed_optimizer(sgd(model))
        result = model.train_batch(batches()[0], optimizer, loss_fn=functional.mse_loss)
        assert torch.isfinite(result.loss), settings
        assert result.grad_norm > 0, settings
        hybrid.shutdown()


class Detached(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.detach()


def loss_scaling_with_a_stage_without_gradients() -> None:
    """Faults: the stage took no part in the decision on overflow, and the other waited for it; at degree 1 the norm
    held what the optimizer does not, still scaled."""

    def trained(pp: int, case: str, scaling: str) -> list[tuple[float, float, bool]]:
        model: Any = seeded(lambda: chain(Detached() if case == "detached" else nn.Tanh()))
        model[0].requires_grad_(case != "frozen")
        optimizer: Any = torch.optim.SGD((model[2] if case == "other stage" else model).parameters(), lr=0.1)
        split = {"split": [2, 1]} if pp == 2 else {}
        amp = {"amp": {"dtype": "float16", "init_loss_scaling": 64.0}} if scaling == "float16" else {}
        model = hybrid.distributed_model(model, strategy=pipeline_strategy(pp, **split, **amp))
        optimizer = hybrid.distributed_optimizer(optimizer)
        scaler = None
        if scaling == "own":
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        got = []
        for batch in batches():
            result = model.train_batch(own(batch), optimizer, loss_fn=functional.mse_loss, scaler=scaler)
            got.append((result.loss.item(), result.grad_norm.item(), result.skipped))
        if scaler is not None:
            assert scaler.get_scale() == 128.0
        hybrid.shutdown()
        return got

    for case in ("frozen", "detached", "other stage"):
        wanted = trained(1, case, "none")
        for pp, scaling in ((2, "none"), (1, "own"), (2, "own"), (1, "float16"), (2, "float16")):
            got = trained(pp, case, scaling)
            tolerance = 0.01 if scaling == "float16" else 1e-5
            for one, plain in zip(got, wanted, strict=True):
                assert abs(one[0] - plain[0]) < tolerance, (case, pp, scaling, got)
                assert abs(one[1] - plain[1]) < tolerance, (case, pp, scaling, got)
                assert not one[2]
    model: Any = seeded(chain)
    model[0].requires_grad_(False)
    model = hybrid.distributed_model(model, strategy=pipeline_strategy(2))
    optimizer = hybrid.distributed_optimizer(sgd(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    result = model.train_batch(batches()[0], optimizer, loss_fn=functional.mse_loss, scaler=scaler)
    assert (result.skipped, scaler.get_scale()) == (True, 2.0**126)  # also on the stage that has nothing to overflow
    hybrid.shutdown()


def an_optimizer_on_a_stage_that_trains_nothing() -> None:
    """Fault: none of the usual ways gave one."""

    def trainable(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def groups(model: nn.Module) -> torch.optim.Optimizer:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        decayed = [p for name, p in named if not name.endswith("bias")]
        return torch.optim.AdamW(
            [{"params": decayed}, {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0}],
            lr=0.01,
            eps=1e-3,
        )

    def frozen() -> nn.Module:
        model = seeded(lambda: chain(nn.Tanh()))
        model[0].requires_grad_(False)  # type: ignore[index]
        return model

    def bare() -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Tanh(), nn.Tanh(), linear()))

    for make in (frozen, bare):
        for make_optimizer in (trainable, groups):
            assert_as_plain(make, batches(), functional.mse_loss, make_optimizer=make_optimizer, split=[2, 1])
    model: Any = hybrid.distributed_model(frozen(), strategy=pipeline_strategy(1))
    with pytest.raises(hybrid.OptimizerError, match="the optimizer holds no parameters"):
        hybrid.distributed_optimizer(torch.optim.SGD([{"params": []}], lr=0.1))
    del model
    hybrid.shutdown()


def blocks_of_a_pipeline_layer_without_a_pipeline() -> None:
    """Fault: its layers were no blocks there. Sequence parallel and recompute were refused, and stage 3 gathered all of
    it at once."""
    block = LayerDesc(nn.TransformerEncoderLayer, 16, 4, 20, dropout=0.0, batch_first=True)

    def listed() -> nn.Module:
        ends = LayerDesc(nn.Embedding, 13, 16), LayerDesc(nn.Linear, 16, 13)
        return hybrid.PipelineLayer([ends[0], block, block, ends[1]], seed=5).build()

    tensors = [batch_of(step, length=6) for step in range(2)]
    tp = {"degree": 2, "sequence_parallel": True}
    assert_as_plain(
        listed, tensors, cross_entropy, pp=1, mb=2, stage=2, tensor_parallel=True, tensor_parallel_configs=tp
    )
    assert_as_plain(listed, tensors, cross_entropy, pp=1, mb=2, stage=3, recompute="full")


# ---- worlds ----------------------------------------------------------------------------------------------------------


def in_turn(cases: list[Callable[[], None]]) -> None:
    for case in cases:
        try:
            case()
        except BaseException as error:
            error.add_note(f"in {case.__name__}")
            raise


def test_recompute_writes_buffers_once() -> None:
    """Fault: running statistics moved twice per micro-batch, with and without a pipeline; a layer whose output depends
    on what it writes computed something else the second time."""
    run_ranks(recompute_writes_once, 2)


def test_a_tie_over_stages_stays_one_parameter() -> None:
    """Fault: an edit, or an update, of one holder left the copies apart for ever."""
    run_ranks(in_turn, 2, [edits_of_one_holder_are_refused, updates_of_one_holder_are_refused])


def test_layers_of_a_pipeline() -> None:
    run_ranks(
        in_turn,
        2,
        [
            a_forward_func_is_the_forward_of_its_layer,
            a_tie_by_a_second_name,
            what_is_added_later_is_refused,
            one_value_for_the_first_layer_at_any_degree,
            blocks_of_a_pipeline_layer_without_a_pipeline,
        ],
    )


def test_stages_that_lack_something() -> None:
    run_ranks(
        in_turn,
        2,
        [
            settings_that_only_one_stage_needs,
            loss_scaling_with_a_stage_without_gradients,
            an_optimizer_on_a_stage_that_trains_nothing,
        ],
    )
