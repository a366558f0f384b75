"""What a pipeline keeps and sends equals what its schedule and layout say, in bytes and counts; what it saves fits any
other number of stages.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hybrid
from hybrid.contracts.schedule import make_schedule, max_in_flight
from hybrid.contracts.schedule_transfers import Payload, transfers
from tests.pipeline_models import batch_of, build, cross_entropy, make_adamw, own, pipeline_variant, train_plain
from tests.ranks import run_ranks

# A sample's activations are more than what travels inside a message's header.
WIDTH, SAMPLES, LAYERS = 128, 24, 8
UNIT_BYTES = 4 * WIDTH * WIDTH
ACTIVATION_BYTES = 4 * WIDTH


class Square(nn.Module):
    """One matrix: a unit whose gradient has a size of its own to be counted by."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(value))


def squares() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Square() for _ in range(LAYERS)))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, WIDTH, generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# ---- gradients -------------------------------------------------------------------------------------------------------


def whole_gradients(stage: int, schedule: str, grad_reduce: str) -> tuple[int, int, int]:
    """The most bytes of whole gradients seen at any gradient's arrival, of shards, and the number of looks."""
    with pipeline_variant(
        2, stage=stage, schedule=schedule, grad_reduce=grad_reduce, bucket_bytes=UNIT_BYTES
    ) as strategy:
        model: Any = hybrid.distributed_model(squares(), strategy=strategy)
        optimizer = hybrid.distributed_optimizer(sgd(model))
        engine = model.hybrid_runtime.engine
        peak = looks = 0

        def look(_: Any) -> None:
            nonlocal peak, looks
            whole = sum(b.local.numel() * b.local.element_size() for b in engine.buckets if b.local is not None)
            in_flight = sum(b.numel() * b.element_size() for _, b, *_ in engine.reducer._in_flight)
            peak, looks = max(peak, whole + in_flight), looks + 1
            assert engine.gradient_bytes() >= whole

        for _, parameter in engine.trainable():
            parameter.register_post_accumulate_grad_hook(look)
        for _ in range(2):
            model.train_batch(own(batch()), optimizer, loss_fn=functional.mse_loss)
        held: list[int] = []
        optimizer.register_step_pre_hook(lambda *_: held.append(engine.gradient_bytes()))
        model.train_batch(own(batch()), optimizer, loss_fn=functional.mse_loss)
        assert engine.gradient_bytes() == 0
        return peak, held[0], looks


GRADIENTS = [(stage, schedule) for stage in (2, 3) for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")]


def all_whole_gradients() -> dict[Any, tuple[int, int, int]]:
    wanted = [(*pair, "every_micro_batch") for pair in GRADIENTS] + [(2, "1f1b", "last_micro_batch")]
    return {settings: whole_gradients(*settings) for settings in wanted}


def test_at_most_two_whole_gradients_at_a_time() -> None:
    """Stage 2 and 3 under a pipeline: gradient memory is that of the shards, which rivals give up."""
    for seen in run_ranks(all_whole_gradients, 4):
        for settings, (peak, held, looks) in seen.items():
            assert looks == 3 * 4 * LAYERS // 2, (settings, looks)
            assert held == UNIT_BYTES * (LAYERS // 2) // 2, (settings, held)
            if settings[2] == "every_micro_batch":
                assert UNIT_BYTES <= peak <= 2 * UNIT_BYTES, (settings, peak)
            else:
                assert peak == UNIT_BYTES * LAYERS // 2, (settings, peak)


# ---- activations -----------------------------------------------------------------------------------------------------


class Token:
    """Something that can be referred to weakly."""


def kept(schedule: str, mb: int, pp: int) -> tuple[int, int, int]:
    """(peak micro-batches in flight by the runner, peak of graphs alive, boundary outputs with memory at the end)."""
    with pipeline_variant(pp, mb=mb, schedule=schedule) as strategy:
        model: Any = hybrid.distributed_model(squares(), strategy=strategy)
        optimizer = hybrid.distributed_optimizer(sgd(model))
        runtime = model.hybrid_runtime
        staged, alive = runtime.stages.staged, weakref.WeakSet()
        most, sent = 0, []

        def count(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            nonlocal most
            assert output.grad_fn is not None
            alive.add(token := Token())
            output.grad_fn.metadata["token"] = token  # lives as long as the graph
            most = max(most, len(alive))

        def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            sent.append(weakref.ref(output))

        for chunk in staged.chunks_here():
            first, last = staged.chunks[chunk][0], staged.chunks[chunk][-1]
            model.get_submodule(staged.names[first]).linear.register_forward_hook(count)
            model.get_submodule(staged.names[last]).register_forward_hook(keep)
        gc.disable()  # what only the collector frees is a cycle that keeps activations
        try:
            for _ in range(2):
                model.train_batch(own(batch()), optimizer, loss_fn=functional.mse_loss)
        finally:
            gc.enable()
        return runtime.stages.runner.peak_in_flight, most, sum(ref() is not None for ref in sent)


KEPT = [("gpipe", 8, 2), ("1f1b", 8, 2), ("1f1b", 1, 2), ("interleaved", 4, 2), ("gpipe", 4, 4), ("1f1b", 8, 4),
        ("1f1b", 3, 4), ("interleaved", 8, 4), ("zbv", 4, 2), ("zbv", 8, 4)]  # fmt: skip


def all_kept(cases: list[tuple[str, int, int]]) -> dict[Any, tuple[int, int, int]]:
    return {case: kept(*case) for case in cases}


@pytest.mark.parametrize("pp", [2, 4])
def test_micro_batches_kept_are_those_of_the_schedule(pp: int) -> None:
    """Activations of a micro-batch live from its forward to its backward, not longer; sent outputs are gone."""
    cases = [case for case in KEPT if case[2] == pp]
    for rank, seen in enumerate(run_ranks(all_kept, pp, cases)):
        for (name, mb, _), (counted, graphs, outputs) in seen.items():
            schedule = make_schedule(
                name, num_stages=pp, num_micro_batches=mb, virtual_stages=2 if name == "interleaved" else None
            )
            wanted = max_in_flight(schedule, rank)
            assert counted == wanted, (name, mb, rank, counted, wanted)
            assert graphs == wanted, (name, mb, rank, graphs, wanted)
            assert outputs == 0, (name, mb, rank, outputs)


# ---- traffic ---------------------------------------------------------------------------------------------------------


def sent(schedule: str, mb: int, settings: dict[str, Any]) -> dict[str, int]:
    with pipeline_variant(2, mb=mb, schedule=schedule, **settings) as strategy:
        model: Any = hybrid.distributed_model(squares(), strategy=strategy)
        optimizer = hybrid.distributed_optimizer(sgd(model))
        model.train_batch(own(batch()), optimizer, loss_fn=functional.mse_loss)
        with hybrid.trace() as recording:
            model.train_batch(own(batch()), optimizer, loss_fn=functional.mse_loss)
        by_axis = recording.totals()
        return {
            f"{axis} {op}": totals.sent_bytes for axis, by_op in by_axis.items() for op, totals in by_op.items()
        } | {"pp rank": hybrid.get_mesh().coordinate("pp")}


TRAFFIC: list[tuple[str, int, dict[str, Any]]] = [
    ("1f1b", 4, {}),
    ("gpipe", 3, {}),
    ("interleaved", 4, {}),
    ("1f1b", 4, {"stage": 2, "grad_reduce": "every_micro_batch"}),
    ("1f1b", 4, {"stage": 2, "grad_reduce": "last_micro_batch"}),
    ("interleaved", 4, {"stage": 2, "grad_reduce": 2}),
    ("1f1b", 4, {"stage": 1}),
    ("1f1b", 4, {"stage": 3}),
    ("gpipe", 4, {"stage": 3, "reshard_after": "run"}),
    ("1f1b", 4, {"stage": 3, "reshard_after": "run", "grad_reduce": "every_micro_batch"}),
    ("interleaved", 4, {"stage": 3, "reshard_after": "run"}),
    ("zbv", 4, {}),
    ("zbv", 4, {"stage": 3}),
]


def all_sent() -> list[dict[str, int]]:
    return [sent(*case) for case in TRAFFIC]


def test_bytes_sent_are_those_of_layout_and_schedule() -> None:
    """pp_forward and pp_backward by the schedule's messages; dp_shard by how often gradients are reduced."""
    for seen in run_ranks(all_sent, 4):
        for (name, mb, settings), found in zip(TRAFFIC, seen, strict=True):
            schedule = make_schedule(
                name, num_stages=2, num_micro_batches=mb, virtual_stages=2 if name == "interleaved" else None
            )
            rank, wanted = found.pop("pp rank"), Counter()
            samples = SAMPLES // 2  # per data-parallel rank
            sizes = [samples * (index + 1) // mb - samples * index // mb for index in range(mb)]
            for one in transfers(schedule)[rank]:
                if one.send is not None:
                    way = "pp_forward" if one.send.payload is Payload.ACTIVATION else "pp_backward"
                    wanted[f"{way} send"] += sizes[one.action.micro_batch] * ACTIVATION_BYTES
            own_bytes = UNIT_BYTES * LAYERS // 2
            stage = settings.get("stage", 0)
            usual = "every_micro_batch" if stage >= 2 else "last_micro_batch"
            reductions = {"every_micro_batch": mb, 2: mb // 2}.get(settings.get("grad_reduce", usual), 1)
            chunks_run = [chunk for chunk, _ in groupby(action.chunk for action in schedule.actions[rank])]
            gathers = 1.0  # of everything that the stage holds
            if stage == 3:
                gathers = len(chunks_run) / schedule.virtual_stages if "reshard_after" in settings else 2 * mb
            if stage == 0:
                wanted["dp_replicate+dp_shard all_reduce"] = own_bytes
            else:
                wanted["dp_shard reduce_scatter"] = reductions * own_bytes // 2
                wanted["dp_shard all_gather"] = int(gathers * own_bytes / 2)
            assert found == dict(wanted), (name, mb, settings, rank)


# ---- state ----------------------------------------------------------------------------------------------------------

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"pp": 1, "mb": 4, "stage": 2},
    {"pp": 2, "stage": 3},
    {"pp": 4, "schedule": "interleaved", "stage": 1},
    {"pp": 4, "schedule": "zbv"},
    {"pp": 2, "stage": 2, "grad_reduce": "every_micro_batch"},
)


def state_goes_from_layout_to_layout() -> None:
    """Two steps each under another layout, weights and optimizer state handed on, are ten steps of one process."""
    plain = build("thrice")
    losses, _, wanted = train_plain(plain, [batch_of(step) for step in range(10)], cross_entropy, make_adamw)
    weights = states = None
    got = []
    for place, layout in enumerate(LAYOUTS):
        with pipeline_variant(**layout) as strategy:
            model: Any = build("thrice")
            with torch.no_grad():
                for parameter in model.parameters():  # what is not loaded is wrong
                    parameter.add_(float(place))
            model = hybrid.distributed_model(model, strategy=strategy)
            optimizer = hybrid.distributed_optimizer(make_adamw(model))
            if weights is not None:
                assert str(model.load_state_dict(weights)) == "<All keys matched successfully>"
                optimizer.load_state_dict(states)
            else:
                model.load_state_dict(build("thrice").state_dict())
            for step in (2 * place, 2 * place + 1):
                got.append(model.train_batch(own(batch_of(step)), optimizer, loss_fn=cross_entropy).loss.item())
            weights, states = model.full_state_dict(), optimizer.full_state_dict()
    torch.testing.assert_close(got, losses, atol=1e-5, rtol=1e-5)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(weights[name], value, atol=2e-5, rtol=0)
    names = {id(parameter): name for name, parameter in plain.named_parameters()}
    for parameter, state in wanted.state.items():
        for key, value in state.items():
            torch.testing.assert_close(states["state"][names[id(parameter)]][key], value, atol=1e-5, rtol=1e-4)


def models_without_memory_start_with_the_values_of_one_process() -> None:
    for pp, stage in ((2, 3), (4, None)):
        with pipeline_variant(pp, stage=stage, split=None) as strategy:
            torch.manual_seed(0)
            with torch.device("meta"):
                layers = [nn.Embedding(13, 15), *(nn.Linear(15, 15) for _ in range(5)), nn.Linear(15, 13, bias=False)]
                model: Any = nn.Sequential(*layers)
                model[6].weight = model[0].weight
            model = hybrid.distributed_model(model, strategy=strategy)
            torch.manual_seed(0)
            layers = [nn.Embedding(13, 15), *(nn.Linear(15, 15) for _ in range(5)), nn.Linear(15, 13, bias=False)]
            plain = nn.Sequential(*layers)
            plain[6].weight = plain[0].weight
            for name, value in model.full_state_dict().items():
                assert torch.equal(value, plain.state_dict()[name]), name


def test_state_goes_from_layout_to_layout() -> None:
    """Saved under one number of stages, loaded under another: no moment, no step count, no tied weight is lost."""
    run_ranks(state_goes_from_layout_to_layout, 4)


def test_models_without_memory_start_with_the_values_of_one_process() -> None:
    """On the meta device, every stage draws what one process would have drawn for its layers."""
    run_ranks(models_without_memory_start_with_the_values_of_one_process, 4)
