"""What is compared with the plain model unless `verify` says otherwise: a block of each kind, in the first forward."""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hybrid
from hybrid.errors import ModelError
from tests.multi_rank.test_tensor_verify import (
    HEADS,
    PLAN,
    VOCABULARY,
    Attention,
    Block,
    D,
    Gpt,
    Mlp,
    ScaledMlp,
    job,
    loss_of,
    strategy_of,
)
from tests.ranks import RankFailure, run_ranks


class Inside(Block):
    """A block with something of its own in front."""

    def __init__(self, before: str = "", attention: type[Attention] = Attention, mlp: type[Mlp] = Mlp) -> None:
        super().__init__(attention, mlp)
        self.before = before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.before:
            case "arange":
                places = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.arange(1, D + 1)
                x = x + torch.sin(places)
            case "cumsum":
                x = x + 0.1 * x.cumsum(1)
            case "mean":
                x = x + x.mean(1, keepdim=True)
            case "roll":
                x = x + torch.roll(x, 1, 1)
            case "mask":
                self.attn.mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype).triu(1)
        return super().forward(x)


class Masked(Attention):
    """Takes a mask that the block made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(self.qkv(x))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Gated(Mlp):
    """Forward is right; the gate's input has a part of its gradient on each rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)) * torch.sigmoid(x.mean(-1, keepdim=True)))


class GateFirst(nn.Module):
    """No module lies between the input of a block and the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class Drawing(Mlp):
    """Noise in eval mode, too: no two runs are alike."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.gelu(self.up(x))
        return self.down(wide + torch.rand_like(wide))


class Handle:
    """Of something outside of Python."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a handle cannot be copied")


class Held(Block):
    def __init__(self) -> None:
        super().__init__(Attention, Mlp)
        self.handle = Handle()


class HeldByOne(Block):
    """On one rank only, as what writes a log."""

    def __init__(self) -> None:
        super().__init__(Attention, Mlp)
        self.handle = Handle() if os.environ["RANK"] == "1" else None


class Marked(torch.Tensor):
    pass


class Marking(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).as_subclass(Marked)


def marked() -> nn.Module:
    model = Gpt()
    model.wte = Marking(VOCABULARY, D)
    return model


class Places(nn.TransformerEncoderLayer):
    """A class with rules of its own, and a forward that they do not know."""

    def forward(self, src: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        places = torch.arange(src.shape[1], dtype=src.dtype)[:, None] * torch.arange(1, D + 1)
        return super().forward(src + torch.sin(places), *args, **kwargs)


class Torchs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, D)
        self.layers = nn.ModuleList([Places(D, HEADS, 2 * D, batch_first=True) for _ in range(2)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def gpt(*blocks: nn.Module) -> nn.Module:
    model = Gpt()
    model.blocks = nn.ModuleList(blocks)
    return model


def unfused(**more: Any) -> dict[str, Any]:
    return PLAN | {"blocks.*.attn.qkv": {"style": "colwise", **more}}


MLP_PLAN = {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
IN_SEQUENCE = ["blocks.0", "sees 1/2 of the sequence", "sequence_parallel to False"]


def wrong_models() -> dict[str, tuple[nn.Module, dict[str, Any], list[str]]]:
    torch.manual_seed(0)
    cases: dict[str, tuple[nn.Module, dict[str, Any], list[str]]] = {
        before: (gpt(Inside(before), Inside(before)), {"plan": PLAN, "sequence_parallel": True}, IN_SEQUENCE)
        for before in ("arange", "cumsum", "mean", "roll")
    }
    masked = [Inside("mask", Masked) for _ in range(2)]
    cases["mask"] = (gpt(*masked), {"plan": PLAN, "sequence_parallel": True}, ["blocks.0.attn (Masked)", *IN_SEQUENCE])
    # Its first block is right, and blocks after the first are called with a part of the sequence.
    second = gpt(Inside(), Inside("mean"))
    cases["second-block"] = (second, {"plan": PLAN, "sequence_parallel": True}, ["output of blocks.1"])
    cases["subclass"] = (Torchs(), {"sequence_parallel": True}, ["layers.0", "sequence_parallel to False"])
    cases["fused"] = (Gpt(), {"plan": unfused(divide=["n_head"])}, ["output of blocks.0.attn.proj", "'fused'"])
    cases["divide"] = (Gpt(), {"plan": unfused(fused=3, divide=[])}, ["output of blocks.0.attn.proj", "'divide'"])
    cases["input"] = (
        gpt(GateFirst(), GateFirst()),
        {"plan": MLP_PLAN},
        ["gradient of what blocks.0 is called with", "besides them"],
    )
    cases["too-much"] = (
        Gpt(),
        {"plan": PLAN | {"blocks.*.ln2.weight": "partial"}},
        ["gradient of parameter blocks.0.ln2.weight", "take 'partial' out"],
    )
    cases["missing"] = (
        gpt(*(Block(Attention, ScaledMlp) for _ in range(2))),
        {"plan": PLAN | {"blocks.*.mlp.gain": "replicated"}},
        ["gradient of parameter blocks.0.mlp.gain", "{'blocks.0.mlp.gain': 'partial'}"],
    )
    return cases


def refused() -> dict[str, str]:
    # One token all over: what depends on the place alone must show, too.
    ids = torch.zeros(4, 8, dtype=torch.int64)
    found = {}
    for name, (model, tensor, _) in wrong_models().items():
        with job():
            wrapped = hybrid.distributed_model(model, strategy=strategy_of(tensor=tensor))
            for _ in range(2):  # whoever goes on all the same is stopped again
                with pytest.raises(ModelError) as caught:
                    wrapped(ids)
            found[name] = str(caught.value)
    return found


def test_models_that_would_be_wrong_are_refused_by_default() -> None:
    """Each of these trains another model than the plain one without any error, if nothing compares."""
    expected = {name: words for name, (_, _, words) in wrong_models().items()}
    for found in run_ranks(refused, 2):
        for name, parts in expected.items():
            for words in parts:
                assert words in found[name], f"{name}: {found[name]}"


def losses(model: nn.Module, tensor: dict[str, Any], **settings: Any) -> tuple[list[float], list[str]]:
    ids = torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(1))
    with job(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        random.seed(0)
        wrapped = hybrid.distributed_model(model, strategy=strategy_of(tensor=tensor, **settings))
        optimizer = hybrid.distributed_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))
        numbers = [float(wrapped.train_batch((ids, ids), optimizer, loss_fn=loss_of).loss) for _ in range(2)]
        numbers += [float(torch.rand(())), random.random()]
    return numbers, [str(one.message) for one in caught if "tensor parallel" in str(one.message)]


def left_alone() -> dict[str, tuple[Any, Any]]:
    makers = {
        "switched-off": lambda: gpt(Inside("mean"), Inside("mean")),
        "draws": lambda: gpt(*(Block(Attention, Drawing) for _ in range(2))),
        "no-copy": lambda: gpt(Held(), Held()),
        "no-copy-on-one": lambda: gpt(HeldByOne(), HeldByOne()),
        "own-class": marked,
    }
    found = {}
    for name, make in makers.items():
        torch.manual_seed(0)
        off = losses(make(), {"plan": PLAN, "verify": False, "sequence_parallel": name == "switched-off"})
        torch.manual_seed(0)
        found[name] = (off, off if name == "switched-off" else losses(make(), {"plan": PLAN}))
    return found


def test_what_cannot_be_compared_trains_with_a_warning() -> None:
    """`verify: False` trains without a word; a block that may well be right is told about, once, and left alone."""
    for rank, found in enumerate(run_ranks(left_alone, 2)):
        assert found["switched-off"][0][1] == []
        reasons = {
            "draws": "draws random numbers in eval mode",
            "no-copy": "cannot be copied",
            "no-copy-on-one": "a handle cannot be copied) on rank 1",
            "own-class": "tensors of a class of their own (Marked)",
        }
        for name, words in reasons.items():
            (without, silent), (numbers, told) = found[name]
            assert numbers == without, name
            assert silent == []
            assert len(told) == (rank == 0), told
            if rank == 0:
                assert words in told[0]
                assert "blocks.0 (" in told[0]
                assert "and 1 more like it" in told[0]
                assert "tensor_parallel_configs.verify = True" in told[0]


def staged(before: str, meta: bool) -> list[float]:
    with torch.device("meta" if meta else "cpu"):
        torch.manual_seed(0)
        layers = [nn.Embedding(VOCABULARY, D), *(Inside(before) for _ in range(4)), nn.Linear(D, VOCABULARY)]
        model = nn.Sequential(*layers)
    plan = {name.replace("blocks.*", "*"): style for name, style in PLAN.items()}
    ids = torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(1))

    def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), labels.flatten())

    with job():
        strategy = strategy_of(tensor={"plan": plan, "sequence_parallel": True})
        strategy.pipeline = True
        strategy.pipeline_configs = {"degree": 2, "accumulate_steps": 2}
        wrapped = hybrid.distributed_model(model, strategy=strategy)
        optimizer = hybrid.distributed_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))
        return [float(wrapped.train_batch((ids, ids), optimizer, loss_fn=loss_fn).loss) for _ in range(2)]


def test_stages_of_a_pipeline_compare_their_own_blocks() -> None:
    assert len({tuple(losses) for losses in run_ranks(staged, 4, "", True)}) == 1
    with pytest.raises(RankFailure) as caught:
        run_ranks(staged, 4, "mean", False)
    assert "ModelError: tensor parallel is not right for this model: the output of 1.ln1" in str(caught.value)
