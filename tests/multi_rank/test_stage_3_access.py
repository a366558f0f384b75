"""ZeRO stage 3: values that are elsewhere are gathered or refused by name, never read; what may be read and edited."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hybrid
from tests.multi_rank.case_runs import assert_close, own_part, variant, wrapped
from tests.multi_rank.test_stage_3 import WIDTH, Stack, batch, built, sgd
from tests.ranks import run_ranks

NAME = "blocks.1.inner.weight"


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda p: p.norm(),
    "sum": lambda p: p.sum(),
    "torch.sum": torch.sum,
    "clone": lambda p: p.clone(),
    "numpy": lambda p: p.numpy(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "save": lambda p: torch.save(p, io.BytesIO()),
    "indexing": lambda p: p[0],
    "item assignment": lambda p: p.__setitem__(0, 1.0),
    "arithmetic": lambda p: p + 1,
    "in place": lambda p: p.mul_(2),
    "in a list": lambda p: torch.stack([torch.zeros(WIDTH, WIDTH).double(), p]),
    "data": lambda p: p.data,
    "set data": lambda p: setattr(p, "data", torch.zeros(WIDTH, WIDTH)),
    "detach": lambda p: p.detach(),
    "view": lambda p: p.view(-1),
    "transpose": lambda p: p.T,
    "tolist": lambda p: p.tolist(),
    "iteration": list,
    "item": lambda p: p[0, 0].item(),
    "storage": lambda p: p.untyped_storage(),
    "data_ptr": lambda p: p.data_ptr(),
    "repr": repr,
    "cpu": lambda p: p.to(torch.float32),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "matmul": lambda p: torch.zeros(2, WIDTH).double() @ p,
    "linear": lambda p: functional.linear(torch.zeros(2, WIDTH).double(), p),
    "init": nn.init.zeros_,
    "sqrt out": lambda p: torch.mul(torch.ones(1).double(), 2, out=p),
    "copy from": lambda p: torch.empty(WIDTH, WIDTH).double().copy_(p),
    "equal": lambda p: torch.equal(p, p),
    "foreach": lambda p: torch._foreach_norm([p]),
    "buffer protocol": lambda p: memoryview(p.__array__()),
    "new parameter": lambda p: nn.Parameter(p).sum(),
    "as_tensor": lambda p: torch.as_tensor(p).sum(),
    "autograd.grad": lambda p: torch.autograd.grad((p * 1).sum(), p),
}


def read_outside(moment: str) -> dict[str, str]:
    """What each way to read says: a ModelError's text, or what else happened."""
    inputs, targets = batch()
    with variant(stage=3, bucket_bytes=200, timeout_seconds=6) as strategy:
        model, optimizer = wrapped(built(Stack), sgd, strategy)
        parameter = model.get_parameter(NAME)
        if moment == "after forward":
            loss = model(own_part(inputs)).square().mean()
            assert loss.isfinite()
        elif moment == "after step":
            functional.mse_loss(model(own_part(inputs)), own_part(targets)).backward()
            optimizer.step()
        elif moment == "after eval":
            with torch.no_grad():
                model(own_part(inputs))
        said = {}
        for name, read in READS.items():
            try:
                with torch.no_grad() if name in {"in place", "item assignment", "sqrt out"} else torch.enable_grad():
                    said[name] = f"no error: {read(parameter)}"
            except hybrid.ModelError as error:
                said[name] = str(error)
            except Exception as error:
                said[name] = f"{type(error).__name__}: {error}"
        return said


def read_at_moments() -> list[dict[str, str]]:
    return [read_outside(moment) for moment in ("after wrapping", "after forward", "after step", "after eval")]


def test_reading_a_freed_parameter_is_refused_by_name() -> None:
    """Each way to touch a value that is elsewhere: one sentence with the name and a way, not a crash, not garbage."""
    for said in [said for results in run_ranks(read_at_moments, 2, timeout_seconds=20) for said in results]:
        bad = {name: text for name, text in said.items() if NAME not in text or "gather_parameters" not in text}
        assert not bad, bad


def facts_while_freed() -> None:
    plain = built(Stack)
    with variant(stage=3, bucket_bytes=200) as strategy:
        model, _ = wrapped(built(Stack), sgd, strategy)
        names = [name for name, _ in plain.named_parameters()]
        assert [name for name, _ in model.named_parameters()] == names
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert isinstance(p, nn.Parameter), name
            assert (p.shape, p.dtype, p.numel(), p.stride()) == (q.shape, q.dtype, q.numel(), q.stride()), name
            assert p.requires_grad
            assert p.grad is None
            assert p.is_leaf
            assert len({p, p}) == 1
        first = next(iter(model.parameters()))
        assert any(p is first for p in model.parameters())
        assert str(model) == str(plain)
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())


def test_metadata_of_a_freed_parameter() -> None:
    run_ranks(facts_while_freed, 2)


# ---- reading and editing -----------------------------------------------------------------------------------------


def gather_and_edit() -> None:
    plain = built(Stack)
    values = dict(plain.state_dict())
    with variant(stage=3, bucket_bytes=200) as strategy:
        model, optimizer = wrapped(built(Stack), sgd, strategy)
        parameter = model.get_parameter(NAME)
        for what in (None, NAME, "blocks.1", "blocks", parameter, [NAME, "last"], [parameter, "first.bias"]):
            with model.gather_parameters(what):
                assert torch.equal(parameter, values[NAME]), what
                assert parameter.norm().isfinite()
            with pytest.raises(hybrid.ModelError, match=NAME):
                parameter.norm()
        with pytest.raises(hybrid.ModelError, match=r"blocks\.7"):
            model.gather_parameters("blocks.7")
        # edits of all, one, a module
        with model.gather_parameters(), torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
        assert all(bool((value == 0.5).all()) for value in model.full_state_dict().values())
        with model.gather_parameters("blocks.0"), torch.no_grad():
            model.blocks[0].inner.bias.fill_(2.0)
        assert model.full_state_dict()["blocks.0.inner.bias"].tolist() == [2.0] * WIDTH
        assert model.full_state_dict()["blocks.0.inner.weight"].eq(0.5).all()
        # an error inside
        with pytest.raises(ZeroDivisionError), model.gather_parameters("first"):
            raise ZeroDivisionError
        with pytest.raises(hybrid.ModelError, match=r"first\.bias"):
            model.first.bias.sum()
        # one parameter
        hybrid.set_full_parameter(parameter, values[NAME])
        assert torch.equal(hybrid.full_parameter(parameter), values[NAME])
        with pytest.raises(hybrid.ModelError, match="shape"):
            hybrid.set_full_parameter(parameter, torch.zeros(2))
        # the edits are what the forward and the optimizer see
        edited = built(Stack)
        edited.load_state_dict(model.full_state_dict())
        inputs, targets = batch()
        plain_optimizer = sgd(edited.parameters())
        functional.mse_loss(edited(inputs), targets).backward()
        functional.mse_loss(model(own_part(inputs)), own_part(targets)).backward()
        gradient = hybrid.full_gradient(parameter)
        assert_close(gradient, edited.get_parameter(NAME).grad, 1e-12, "gradient")
        plain_optimizer.step()
        optimizer.step()
        state = model.full_state_dict()
        for name, value in edited.state_dict().items():
            assert_close(state[name], value, 1e-12, name)


def test_gather_parameters_reads_and_edits() -> None:
    run_ranks(gather_and_edit, 2)


def nested() -> None:
    with variant(stage=3, bucket_bytes=200) as strategy:
        model, _ = wrapped(built(Stack), sgd, strategy)
        with model.gather_parameters("first"), model.gather_parameters("last"), torch.no_grad():
            model.first.bias.fill_(3.0)
            model.last.bias.fill_(4.0)
        for name, value in (("first.bias", 3.0), ("last.bias", 4.0)):
            with pytest.raises(hybrid.ModelError, match=name):
                model.get_parameter(name).sum()
            assert hybrid.full_parameter(model.get_parameter(name)).tolist() == [value] * WIDTH


def test_nested_gathers_free_what_both_held() -> None:
    """After the outer block nothing is whole, and both edits count."""
    run_ranks(nested, 2)


def gather_a_stranger() -> None:
    with variant(stage=3) as strategy:
        model, _ = wrapped(built(Stack), sgd, strategy)
        with pytest.raises(hybrid.ModelError, match="not in the model"):
            model.gather_parameters(nn.Parameter(torch.zeros(2)))


def test_gathering_a_parameter_of_another_model_is_refused() -> None:
    run_ranks(gather_a_stranger, 2)


def step_inside_gather() -> str:
    inputs, targets = batch()
    with variant(stage=3, bucket_bytes=200, timeout_seconds=6) as strategy:
        model, optimizer = wrapped(built(Stack), sgd, strategy)
        plain = built(Stack)
        plain_optimizer = sgd(plain.parameters())
        functional.mse_loss(plain(inputs), targets).backward()
        plain_optimizer.step()
        try:
            with model.gather_parameters():
                functional.mse_loss(model(own_part(inputs)), own_part(targets)).backward()
                optimizer.step()
        except hybrid.HybridError as error:
            return str(error)
        state = model.full_state_dict()
        for name, value in plain.state_dict().items():
            assert_close(state[name], value, 1e-12, name)
        return ""


def test_a_step_inside_gather_parameters() -> None:
    """The block's end writes whole values back into the shards: either the updated ones, or an error before."""
    run_ranks(step_inside_gather, 2, timeout_seconds=20)


def failing_pass(where: str) -> None:
    inputs, targets = batch()
    with variant(stage=3, bucket_bytes=200, timeout_seconds=6) as strategy:
        plain = built(Stack)
        plain_optimizer = sgd(plain.parameters())
        model, optimizer = wrapped(built(Stack), sgd, strategy)

        def fail(*_: Any) -> None:
            if where == "forward interrupted":
                raise KeyboardInterrupt
            raise ZeroDivisionError

        def failing(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            if where == "backward":
                output.register_hook(fail)
            else:
                fail()

        for step in range(3):
            if step == 1:
                handle = model.blocks[1].register_forward_hook(failing)
                with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
                    functional.mse_loss(model(own_part(inputs)), own_part(targets)).backward()
                handle.remove()
                # After a failed backward what it had gathered stays whole, and right, until the next pass.
                for name in (NAME, "first.weight", "blocks.2.scale") if where != "backward" else ():
                    with pytest.raises(hybrid.ModelError, match=name):
                        model.get_parameter(name).sum()
                optimizer.zero_grad()
            functional.mse_loss(plain(inputs), targets).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            functional.mse_loss(model(own_part(inputs)), own_part(targets)).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = model.full_state_dict()
        for name, value in plain.state_dict().items():
            assert_close(state[name], value, 1e-12, name)


@pytest.mark.parametrize("where", ["forward", "backward", "forward interrupted"])
def test_training_goes_on_after_a_pass_that_raised(where: str) -> None:
    run_ranks(failing_pass, 2, where, timeout_seconds=20)


# ---- state dicts -------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """Buffers that are views of one another, and parameters without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("head", self.table[:2])
        self.register_buffer("square", self.table.view(2, 3))
        self.none = nn.Parameter(torch.empty(0))
        self.rows = nn.Parameter(torch.empty(0, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight


def shared_state() -> None:
    plain = Shared()
    with variant(stage=3, bucket_bytes=200) as strategy:
        model, _ = wrapped(Shared(), lambda p: torch.optim.SGD(list(p), lr=0.1), strategy)
        state = model.state_dict()
        for name, value in plain.state_dict().items():
            assert state[name].shape == value.shape, (name, state[name].shape)
            assert torch.equal(state[name], value), name
    dist.barrier()


def test_state_dict_of_tensors_at_one_address() -> None:
    run_ranks(shared_state, 2)
