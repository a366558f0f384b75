"""Attention cut between its heads against the plain module: outputs, weights and every gradient, for every option.

The plain module computes in each rank's own process from the same values; cut parameters and their gradients are put
together from all ranks by the cuts that the module itself names. All in fp64 unless a test says otherwise.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hybrid.collectives import ops
from hybrid.collectives.deferred import deferred_backend
from hybrid.collectives.group import Group
from hybrid.collectives.trace import trace
from hybrid.contracts.layout import Layout
from hybrid.errors import BatchError, ModelError
from hybrid.mesh import Mesh
from hybrid.tensor.attention import ParallelMultiheadAttention, disable_fast_paths
from hybrid.tensor.entry import Entry
from tests.ranks import run_ranks

BATCH, QUERIES, KEYS, WIDTH, HEADS = 3, 4, 5, 24, 4
TOLERANCE = 1e-12


def tp_group() -> Group:
    size = torch.distributed.get_world_size()
    mesh = Mesh(Layout.of(tp=size), timeout_seconds=20)
    mesh.prepare([("tp",)])
    return mesh.group("tp")


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomise(module: nn.Module) -> None:
    """Biases, too: plain torch starts them at zero, where a mistake is not seen."""
    for number, parameter in enumerate(module.parameters()):
        parameter.data = (values(900 + number, *parameter.shape) * 0.3).to(parameter.dtype)


def cut_attention(model: nn.Module, group: Group, **settings: Any) -> dict[str, Any]:
    """Cut each attention module of the model, values and all; the cuts by parameter name."""
    cuts = {}
    for prefix, module in model.named_modules():
        if type(module) is nn.MultiheadAttention:
            module = ParallelMultiheadAttention.adopt(module, group=group, **settings)
            for name, cut in module.tensor_parallel.cuts.items():
                parameter = module.get_parameter(name)
                parts = [parameter.data.narrow(cut.dim, start, length) for start, length in cut.pieces]
                parameter.data = torch.cat(parts, dim=cut.dim)
                cuts[f"{prefix}.{name}".lstrip(".")] = cut
    return cuts


def close(actual: Tensor | None, expected: Tensor | None, what: str, tolerance: float = TOLERANCE) -> None:
    assert (actual is None) == (expected is None), what
    if actual is not None and expected is not None:
        assert actual.dtype == expected.dtype, what
        note = f"{what}, rank {torch.distributed.get_rank()}: {{}}".format
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=note)


class Gradients:
    """Gradients of cut models beside those of plain ones; put together and compared at the end, in one exchange."""

    def __init__(self) -> None:
        self.own: list[dict[str, tuple[Any, Tensor | None]]] = []
        self.expected: list[tuple[str, dict[str, Tensor | None], float]] = []

    def add(
        self, model: nn.Module, cuts: dict[str, Any], plain: nn.Module, what: str, tolerance: float = TOLERANCE
    ) -> None:
        self.own.append({name: (cuts.get(name), one.grad) for name, one in model.named_parameters()})
        self.expected.append((what, {name: one.grad for name, one in plain.named_parameters()}, tolerance))

    def check(self, group: Group) -> None:
        for ranks, (what, expected, tolerance) in zip(
            zip(*ops.all_gather_object(self.own, group=group), strict=True), self.expected, strict=True
        ):
            assert list(ranks[0]) == list(expected)
            for name, wanted in expected.items():
                for actual in self._whole([one[name] for one in ranks]):
                    close(actual, wanted, f"gradient of {name}, {what}", tolerance)

    @staticmethod
    def _whole(ranks: list[tuple[Any, Tensor | None]]) -> list[Tensor | None]:
        """A cut parameter's gradient, put together; of another, that of each rank."""
        cut, local = ranks[0]
        if cut is None or local is None:
            return [gradient for _, gradient in ranks]
        shape = list(local.shape)
        shape[cut.dim] = cut.global_size
        whole = local.new_full(shape, torch.nan)
        for other, gradient in ranks:
            parts = gradient.split([length for _, length in other.pieces], dim=cut.dim)
            for (start, length), part in zip(other.pieces, parts, strict=True):
                whole.narrow(cut.dim, start, length).copy_(part)
        return [whole]


# -- the module by itself ----------------------------------------------------------------------------------------

MASKS: dict[str, Callable[[int], Tensor]] = {
    "bool": lambda keys: values(11, QUERIES, keys) > 0.6,
    "float": lambda keys: values(12, QUERIES, keys),
    "trained": lambda keys: values(13, QUERIES, keys).requires_grad_(),
    "heads bool": lambda keys: values(14, BATCH * HEADS, QUERIES, keys) > 0.6,
    "heads float": lambda keys: values(15, BATCH * HEADS, QUERIES, keys),
    "heads trained": lambda keys: values(16, BATCH * HEADS, QUERIES, keys).requires_grad_(),
    "causal": lambda keys: torch.ones(QUERIES, keys, dtype=torch.bool).triu(1),
}
PADDINGS: dict[str, Callable[[int], Tensor]] = {
    "bool": lambda keys: torch.arange(keys) >= torch.tensor([[keys], [keys - 1], [keys - 2]]),
    "float": lambda keys: values(17, BATCH, keys),
    "trained": lambda keys: values(18, BATCH, keys).requires_grad_(),
}
INPUTS = ("self", "memory", "apart", "query is key", "key is query's value")


@dataclass(frozen=True, kw_only=True)
class Case:
    inputs: str = "self"
    mask: str | None = None
    padding: str | None = None
    batched: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)


def all_cases() -> Iterator[Case]:
    averaged, per_head, none = {}, {"average_attn_weights": False}, {"need_weights": False}
    for batch_first in (False, True):
        first = {"batch_first": batch_first}
        for call in (averaged, per_head, none):
            for inputs in INPUTS:
                yield Case(inputs=inputs, options=first, call=call)
            for batched in (True, False):
                for mask in MASKS:
                    yield Case(mask=mask, batched=batched, options=first, call=call)
                for padding in PADDINGS:
                    yield Case(inputs="memory", padding=padding, batched=batched, options=first, call=call)
            yield Case(mask="bool", padding="bool", inputs="memory", options=first, call=call)
            yield Case(mask="heads trained", padding="trained", options=first, call=call)
            yield Case(mask="causal", options=first, call={**call, "is_causal": True})
            yield Case(mask="causal", padding="bool", options=first, call={**call, "is_causal": True})
            for option in (
                {"bias": False},
                {"add_bias_kv": True},
                {"add_zero_attn": True},
                {"kdim": 10, "vdim": 7},
                {"kdim": 10, "bias": False},
                {"add_bias_kv": True, "add_zero_attn": True, "vdim": 7},
            ):
                apart = "apart" if {"kdim", "vdim"} & option.keys() else "self"
                yield Case(inputs=apart, options={**first, **option}, call=call)
                yield Case(inputs=apart, mask="heads float", padding="float", options={**first, **option}, call=call)
        yield Case(mask="causal", options={**first, "add_bias_kv": True}, call={**none, "is_causal": True})


def make_inputs(case: Case, plain: nn.MultiheadAttention) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Query, key, value and the masks: leaves, among them the same ones where the case says so."""
    keys = QUERIES if case.inputs in ("self", "query is key", "key is query's value") else KEYS

    def sequence(seed: int, length: int, width: int) -> Tensor:
        shape = (BATCH, length, width) if plain.batch_first else (length, BATCH, width)
        return values(seed, *(shape if case.batched else (length, width))).requires_grad_()

    query = sequence(1, QUERIES, WIDTH)
    key = query if case.inputs in ("self", "query is key") else sequence(2, keys, plain.kdim)
    value = {"self": query, "memory": key, "key is query's value": query}.get(case.inputs)
    value = sequence(3, keys, plain.vdim) if value is None else value
    masks = {}
    if case.mask is not None:
        mask = masks["attn_mask"] = MASKS[case.mask](keys)
        if mask.dim() == 3 and not case.batched:
            masks["attn_mask"] = mask[:HEADS].detach().requires_grad_(mask.requires_grad)
    if case.padding is not None:
        padding = PADDINGS[case.padding](keys)
        masks["key_padding_mask"] = padding
        if not case.batched:
            masks["key_padding_mask"] = padding[1].detach().requires_grad_(padding.requires_grad)
    return [query, key, value], masks


def run_module(module: nn.Module, inputs: list[Tensor], masks: dict[str, Tensor], call: dict[str, Any]) -> list[Any]:
    """Output, weights, and the gradients of everything that has one."""
    for tensor in (*inputs, *masks.values()):
        tensor.grad = None
    output, weights = module(*inputs, **masks, **call)
    loss = (output * values(5, *output.shape)).sum()
    if weights is not None:
        loss = loss + (weights * values(6, *weights.shape)).sum()
    loss.backward()
    return [output, weights, *(one.grad for one in (*inputs, *masks.values()))]


def check_case(case: Case, group: Group, gradients: Gradients) -> None:
    plain = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **case.options)
    randomise(plain)
    cut = copy.deepcopy(plain)
    before = {name: id(parameter) for name, parameter in cut.named_parameters()}
    cuts = cut_attention(cut, group)
    assert {name: id(parameter) for name, parameter in cut.named_parameters()} == before
    inputs, masks = make_inputs(case, plain)
    expected = run_module(plain, inputs, masks, case.call)
    actual = run_module(cut, inputs, masks, case.call)
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        close(one, other, f"result {number} of {case}")
    gradients.add(cut, cuts, plain, str(case))


def check_cases(first: int) -> None:
    group, gradients = tp_group(), Gradients()
    for case in list(all_cases())[first::2]:
        check_case(case, group, gradients)
    gradients.check(group)


@pytest.mark.parametrize(("world_size", "first"), [(2, 0), (4, 1)])
def test_every_option_gives_the_plain_result(world_size: int, first: int) -> None:
    """Protects each of the forward's branches, in both layouts, with their gradients."""
    run_ranks(check_cases, world_size, first)


# -- sequence parallel -------------------------------------------------------------------------------------------


def check_sequence_parallel() -> None:
    group, gradients = tp_group(), Gradients()
    for batch_first, batched, memory_is_whole, need_weights in itertools.product((False, True), repeat=4):
        what = f"{batch_first=} {batched=} {memory_is_whole=} {need_weights=}"
        plain = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, batch_first=batch_first)
        randomise(plain)
        cut = copy.deepcopy(plain)
        cuts = cut_attention(cut, group, sequence_dim=int(batch_first), memory_is_whole=memory_is_whole)
        assert cut.tensor_parallel.partial == {"out_proj.bias"}
        # A memory of QUERIES keys where it is cut: the ranks do not divide KEYS.
        (query, key, _), masks = make_inputs(Case(inputs="memory", mask="float", batched=batched), plain)
        if not memory_is_whole:
            key, masks["attn_mask"] = query.detach().flip(0).requires_grad_(), MASKS["float"](QUERIES)
        dim = int(batch_first and batched)

        def own(tensor: Tensor, dim: int = dim) -> Tensor:
            return tensor.detach().chunk(group.size, dim=dim)[group.rank].clone().requires_grad_()

        expected = run_module(plain, [query, key, key], masks, {"need_weights": need_weights})
        query_part, key_part = own(query), key.detach().requires_grad_() if memory_is_whole else own(key)
        output, weights = cut(query_part, key_part, key_part, **masks, need_weights=need_weights)
        close(output, own(expected[0]), f"output, {what}")
        close(weights, expected[1], f"weights, {what}")
        loss = (output * own(values(5, *expected[0].shape))).sum()
        if weights is not None:
            loss = loss + (weights * values(6, *weights.shape)).sum()
        loss.backward()
        close(query_part.grad, own(query.grad), f"query, {what}")
        close(key_part.grad, key.grad if memory_is_whole else own(key.grad), f"key, {what}")
        torch.distributed.all_reduce(cut.out_proj.bias.grad)
        gradients.add(cut, cuts, plain, what)
    gradients.check(group)


@pytest.mark.parametrize("world_size", [2, 4])
def test_sequence_parallel(world_size: int) -> None:
    """The query is gathered, the output scattered; a memory that is whole already is not gathered."""
    run_ranks(check_sequence_parallel, world_size)


# -- dropout, recompute, autocast, traffic -----------------------------------------------------------------------


def attend(plain: nn.MultiheadAttention, inputs: Tensor, kept: Tensor) -> Tensor:
    """The plain module's formula (self-attention, batch first) with a given scaled dropout mask."""
    heads = functional.linear(inputs, plain.in_proj_weight, plain.in_proj_bias).unflatten(-1, (3, HEADS, -1))
    query, key, value = heads.permute(2, 0, 3, 1, 4)
    weights = torch.softmax(query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5, dim=-1) * kept
    return plain.out_proj((weights @ value).transpose(1, 2).flatten(2))


def check_dropout() -> None:
    group, gradients = tp_group(), Gradients()
    plain = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.4, batch_first=True, dtype=torch.float64)
    randomise(plain)
    cut = copy.deepcopy(plain)
    cuts = cut_attention(cut, group)
    inputs = values(1, BATCH, QUERIES, WIDTH).requires_grad_()
    options = {"average_attn_weights": False}
    _, undropped = cut.eval()(inputs, inputs, inputs, **options)
    torch.manual_seed(5)
    output, weights = cut.train()(inputs, inputs, inputs, **options)
    after = torch.rand(1)
    kept = (weights / undropped).detach()
    expected = attend(plain, inputs, kept)
    close(output, expected, "output with the returned weights' mask")
    masks = (kept > 0).unbind(1)
    for one in range(HEADS):
        assert 0 < masks[one].sum() < masks[one].numel()
        assert not any(torch.equal(masks[one], masks[other]) for other in range(one))
    (plain_gradient,) = torch.autograd.grad((expected * values(5, *output.shape)).sum(), inputs, retain_graph=True)
    (expected * values(5, *output.shape)).sum().backward(inputs=list(plain.parameters()))
    (output * values(5, *output.shape)).sum().backward()
    close(inputs.grad, plain_gradient, "gradient with dropout")
    gradients.add(cut, cuts, plain, "dropout")
    gradients.check(group)
    assert all(torch.equal(after, other) for other in ops.all_gather_object(after, group=group))
    # The fused kernel draws from the same stream, and recompute draws again what was drawn.
    results = []
    for recompute in (False, True, "reentrant"):
        cut.zero_grad()
        inputs.grad = None
        torch.manual_seed(5)
        arguments = (inputs, inputs, inputs, None, False)
        if recompute:
            output, _ = checkpoint(cut, *arguments, use_reentrant=recompute == "reentrant")
        else:
            output, _ = cut(*arguments)
        (output * values(5, *output.shape)).sum().backward()
        results.append([output, inputs.grad, *(one.grad for one in cut.parameters())])
    for other in results[1:]:
        for one, same in zip(other, results[0], strict=True):
            close(one, same, "recompute")


@pytest.mark.parametrize("world_size", [2, 4])
def test_dropout_differs_between_heads_and_is_replayed(world_size: int) -> None:
    """Protects against the same mask for the heads of each rank, and against other masks in recompute."""
    run_ranks(check_dropout, world_size)


def check_autocast_and_bfloat16() -> None:
    group, gradients = tp_group(), Gradients()
    for dtype, low in ((torch.float32, True), (torch.bfloat16, False)):
        for options in ({}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": WIDTH // 2}):
            for call in ({}, {"average_attn_weights": False}, {"need_weights": False}):
                case = Case(inputs="apart", mask="bool", padding="bool", options=options, call=call)
                plain = nn.MultiheadAttention(WIDTH, HEADS, dtype=dtype, **options)
                randomise(plain)
                cut = copy.deepcopy(plain)
                cuts = cut_attention(cut, group)
                inputs, masks = make_inputs(case, plain)
                inputs = [one.detach().to(dtype).requires_grad_() for one in inputs]
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
                    expected = run_module(plain, inputs, masks, call)
                    actual = run_module(cut, inputs, masks, call)
                for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
                    close(one, other, f"{number}, {case}, {dtype}", 0.1)
                gradients.add(cut, cuts, plain, f"{case}, {dtype}", 0.15)
    gradients.check(group)


def test_autocast_and_low_precision_keep_the_plain_dtypes() -> None:
    """The bias that is added after the sum must not lift the output out of autocast's dtype."""
    run_ranks(check_autocast_and_bfloat16, 2)


def check_traffic() -> None:
    group = tp_group()
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    cut_attention(module, group)
    query, memory = torch.randn(BATCH, QUERIES, WIDTH), torch.randn(BATCH, KEYS, WIDTH)
    for inputs, call, wanted in (
        ((query, query, query), {"need_weights": False}, {"all_reduce": 2}),
        ((query, memory, memory), {"need_weights": False}, {"all_reduce": 3}),
        ((query, query, query), {}, {"all_reduce": 3}),
        ((query, query, query), {"average_attn_weights": False}, {"all_reduce": 2, "all_gather": 1}),
    ):
        for tensor in inputs:
            tensor.requires_grad_()
        for backend in (deferred_backend, None):
            with backend() if backend else trace() as recording:
                output, weights = module(*inputs, **call)
                (output.sum() + (0 if weights is None else weights.square().sum())).backward()
            assert not torch.isnan(module.in_proj_weight.grad).any()
        assert {op: totals.calls for op, totals in recording.totals()["tp"].items()} == wanted
    # Layers of a decoder read one memory: with a shared entry its gradient is summed once for all of them.
    shared, plain = Entry(group), [nn.MultiheadAttention(WIDTH, HEADS).double() for _ in range(3)]
    cut = copy.deepcopy(plain)
    for one in cut:
        cut_attention(one, group, memory_entry=shared)
    gradients = []
    for modules in (plain, copy.deepcopy(cut)):
        query, memory = (values(n, n, BATCH, WIDTH).requires_grad_() for n in (QUERIES, KEYS))
        with trace() as recording:
            hidden = query
            for one in modules:
                hidden = one(hidden, memory, memory, need_weights=False)[0]
            hidden.square().sum().backward()
        gradients.append([query.grad, memory.grad])
    for one, other in zip(*gradients, strict=True):
        close(other, one, "gradients with a shared entry")
    assert recording.totals()["tp"]["all_reduce"].calls == 3 + 3 + 1


def test_collectives_are_counted() -> None:
    """One sum forward and one per input tensor backward; weights cost one more only where they are asked for."""
    run_ranks(check_traffic, 2)


# -- whole models ------------------------------------------------------------------------------------------------


def build(kind: str, *, batch_first: bool, norm_first: bool, dropout: float = 0.0) -> nn.Module:
    options: dict[str, Any] = {
        "nhead": HEADS, "dim_feedforward": 17, "dropout": dropout, "batch_first": batch_first, "norm_first": norm_first,
        "dtype": torch.float64,
    }  # fmt: skip
    if kind == "transformer":
        model: nn.Module = nn.Transformer(WIDTH, num_encoder_layers=2, num_decoder_layers=2, **options)
    elif kind == "encoder":
        layer = nn.TransformerEncoderLayer(WIDTH, **options)
        model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH).double(), enable_nested_tensor=not norm_first)
    else:
        model = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, **options), 2)
    randomise(model)
    return model


def model_inputs(kind: str, *, batch_first: bool) -> tuple[list[Tensor], dict[str, Any]]:
    """Inputs, and masks that leave every query something to attend to."""
    lengths = {"transformer": (KEYS, QUERIES), "encoder": (KEYS,), "decoder": (QUERIES, KEYS)}[kind]
    inputs = [values(30 + n, BATCH, n, WIDTH) for n in lengths]
    padding = PADDINGS["bool"](KEYS)
    causal = nn.Transformer.generate_square_subsequent_mask(QUERIES).double() == -torch.inf
    masks = {
        "transformer": {"src_key_padding_mask": padding, "tgt_mask": causal, "memory_key_padding_mask": padding},
        "encoder": {"src_key_padding_mask": padding},
        "decoder": {"tgt_mask": causal, "memory_mask": MASKS["float"](KEYS).double()},
    }[kind]
    return [(one if batch_first else one.transpose(0, 1)).contiguous().requires_grad_() for one in inputs], masks


def run_model(model: nn.Module, inputs: list[Tensor], masks: dict[str, Any]) -> list[Any]:
    for tensor in inputs:
        tensor.grad = None
    output = model(*inputs, **masks)
    (output * values(7, *output.shape)).sum().backward()
    return [output, *(tensor.grad for tensor in inputs)]


def recompute_layers(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)


def check_models() -> None:
    group, gradients = tp_group(), Gradients()
    for kind in ("encoder", "decoder", "transformer"):
        for batch_first, norm_first in itertools.product((False, True), repeat=2):
            recompute = batch_first == norm_first
            what = f"{kind} {batch_first=} {norm_first=} {recompute=}"
            plain = build(kind, batch_first=batch_first, norm_first=norm_first)
            inputs, masks = model_inputs(kind, batch_first=batch_first)
            cut = copy.deepcopy(plain)
            cuts = cut_attention(cut, group)
            disable_fast_paths(cut)
            if recompute:
                recompute_layers(cut)
            expected, actual = run_model(plain, inputs, masks), run_model(cut, inputs, masks)
            for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
                close(one, other, f"result {number}, {what}")
            gradients.add(cut, cuts, plain, what)
    gradients.check(group)
    # Dropout of replicated values is alike on all ranks, of attention weights is not; recompute replays both.
    cut = build("transformer", batch_first=True, norm_first=False, dropout=0.3)
    cut_attention(cut, group)
    inputs, masks = model_inputs("transformer", batch_first=True)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        cut.zero_grad()
        results.append([*run_model(cut, inputs, masks), *(one.grad for one in cut.parameters())])
        recompute_layers(cut)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    for other in ops.all_gather_object(results[0][0], group=group):
        assert torch.equal(other, results[0][0])


@pytest.mark.parametrize("world_size", [2, 4])
def test_whole_transformers(world_size: int) -> None:
    """Protects the ways in which torch's own layers call attention, in training, with and without recompute."""
    run_ranks(check_models, world_size)


def check_fast_paths() -> None:
    group, fused_calls = tp_group(), []
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
        function = getattr(torch, name)
        setattr(torch, name, lambda *args, function=function: fused_calls.append(1) or function(*args))

    def run(module: nn.Module, *inputs: Tensor, fused: bool, **masks: Tensor) -> Tensor:
        fused_calls.clear()
        output = module(*inputs, **masks)
        assert bool(fused_calls) == fused
        return output

    plain = build("encoder", batch_first=True, norm_first=False).eval()
    inputs, masks = model_inputs("encoder", batch_first=True)
    ordinary, cut = copy.deepcopy(plain), copy.deepcopy(plain)
    cut_attention(cut, group)
    for model in (ordinary, cut):
        disable_fast_paths(model)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            close(run(cut, *inputs, fused=False), run(plain, *inputs, fused=True), "without padding")
            actual, expected = run(cut, *inputs, fused=False, **masks), run(plain, *inputs, fused=True, **masks)
            kept = ~masks["src_key_padding_mask"]
            close(actual[kept], expected[kept], "rows that are not padding")
            close(run(cut.layers[0], *inputs, fused=False), run(plain.layers[0], *inputs, fused=True), "one layer")
            three = inputs * 3
            output, weights = run(cut.layers[0].self_attn, *three, fused=False)
            expected, expected_weights = run(plain.layers[0].self_attn, *three, fused=True)
            close(output, expected, "attention alone")
            close(weights, expected_weights, "weights alone")
    close(cut(*inputs, **masks), plain(*inputs, **masks), "rows of padding, on the ordinary path")
    results = [run_model(model.train(), inputs, masks) for model in (plain, ordinary)]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_the_fused_inference_path_is_never_taken() -> None:
    """It reads weights past the modules that own them: parts of weights there gave wrong results or a crash."""
    run_ranks(check_fast_paths, 2)


# -- construction and refusals -----------------------------------------------------------------------------------


def check_construction() -> None:
    group = tp_group()
    for options in ({}, {"add_bias_kv": True, "kdim": 10}, {"bias": False, "dtype": torch.bfloat16}):
        torch.manual_seed(2)
        plain = nn.MultiheadAttention(WIDTH, HEADS, **options)
        torch.manual_seed(2)
        cut = ParallelMultiheadAttention(WIDTH, HEADS, **options, group=group)
        for reset in (None, lambda one: one._reset_parameters(), lambda one: one.out_proj.reset_parameters()):
            states = []
            for module in (plain, cut):
                torch.manual_seed(4)
                if reset is not None:
                    reset(module)
                states.append(torch.get_rng_state())
            assert torch.equal(*states)
            for name, parameter in plain.named_parameters():
                local, piece = cut.get_parameter(name), cut.tensor_parallel.cuts.get(name)
                if piece is not None:
                    parts = [parameter.narrow(piece.dim, start, length) for start, length in piece.pieces]
                    parameter = torch.cat(parts, dim=piece.dim)
                    assert parameter.numel() * group.size == plain.get_parameter(name).numel()
                assert torch.equal(parameter, local), name
    assert (cut.embed_dim, cut.head_dim, cut.num_heads, cut.global_num_heads) == (WIDTH, 6, HEADS // group.size, HEADS)


def test_initial_values_are_those_of_the_whole_module() -> None:
    """Built by hand or drawn again, they depend on the seed only, and so does the random state after."""
    run_ranks(check_construction, 4)


class OwnAttention(nn.MultiheadAttention):
    pass


def check_refusals() -> None:
    group = tp_group()
    adopt = functools.partial(ParallelMultiheadAttention.adopt, group=group)
    with pytest.raises(ModelError, match=r"tp=4 does not divide num_heads=6.*: 1, 2, 3, 6"):
        adopt(nn.MultiheadAttention(24, 6))
    with pytest.raises(ModelError, match="num_heads=6"):
        ParallelMultiheadAttention(24, 6, group=group)
    with pytest.raises(ModelError, match=r"OwnAttention is a subclass"):
        adopt(OwnAttention(24, 4))
    wrapped = nn.MultiheadAttention(24, 4)
    wrapped.out_proj = nn.Sequential(wrapped.out_proj)
    with pytest.raises(ModelError, match="replaced by a Sequential"):
        adopt(wrapped)
    with pytest.raises(ModelError, match="sequence_dim=1, but with batch_first=False"):
        adopt(nn.MultiheadAttention(24, 4), sequence_dim=1)
    module = adopt(nn.MultiheadAttention(24, 4, batch_first=True))
    with pytest.raises(ModelError, match="subclass"):
        adopt(module)
    cut_attention(whole := nn.MultiheadAttention(24, 4, batch_first=True), group)
    inputs = torch.randn(3, 5, 24)
    with pytest.raises(BatchError, match=r"\(5, 5\) .* or \(12, 5, 5\)"):
        whole(inputs, inputs, inputs, attn_mask=torch.zeros(3, 5, 5))
    with pytest.raises(BatchError, match=r"key_padding_mask has the shape \(3, 4\), not .* \(3, 5\)"):
        whole(inputs, inputs, inputs, key_padding_mask=torch.zeros(3, 4))
    with pytest.raises(BatchError, match=r"int64; it must be bool"):
        whole(inputs, inputs, inputs, attn_mask=torch.zeros(5, 5, dtype=torch.int64))
    with pytest.raises(BatchError, match="attn_mask, which is None"):
        whole(inputs, inputs, inputs, is_causal=True)
    with pytest.raises(BatchError, match=r"\(3, 2, 2\) dims"):
        whole(inputs, inputs[0], inputs[0])
    nested = torch.nested.nested_tensor([torch.randn(2, 24), torch.randn(3, 24)])
    with pytest.raises(BatchError, match="nested"):
        whole(nested, nested, nested)


def test_refusals_name_the_sizes() -> None:
    """Each refusal is one sentence, before anything is sent."""
    run_ranks(check_refusals, 4)
