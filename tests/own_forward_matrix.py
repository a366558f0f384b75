"""Which unmodified models run as pipelines under which settings: pairs in the default run, the product in the full one.

In the default run every two settings meet, and the models take turns with them, the least used one next.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from tests.own_forward_models import MODELS
from tests.pairwise import cover, everything
from tests.parity import LOW
from tests.pipeline_models import SCHEDULES, TWO_CHUNKS, layout_words

__all__ = ["CASES", "DEFAULT", "PAIRS", "OwnCase", "allowed", "full_cases"]

PRECISIONS: dict[str, dict[str, Any] | None] = {
    "fp32": None,
    "bf16O1": {"level": "O1"},
    "bf16O2": {"level": "O2"},
    "fp16": {"level": "O1", "dtype": "float16", "init_loss_scaling": 256.0},
}
NO_TENSOR_PARALLEL = {"demo", "nano", "unet", "resnet", "mixtral", "whisper"}  # no plan is known for them
NO_SEQUENCE = {"vit", "t5", "transformer"}  # of 10 or 5: two ranks cannot share it
ONE_MICRO_BATCH_ALIKE = {"resnet"}  # BatchNorm sees what its rank has
# Rounding sends tokens to other experts, and turns units of ReLU on and off.
NO_LOW_PRECISION = {"mixtral", "nano", "encoder", "transformer", "unet", "resnet", "t5"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCase:
    """One run; the fields are the factors. `steps` 3: the last batch has other sizes."""

    model: str
    pp: int = 2
    tp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    zero_stage: int = 0
    schedule: str = "1f1b"
    mb: int = 2
    precision: str = "fp32"
    recompute: str = "none"
    sequence: bool = False
    built: str = "after"
    grad_reduce: str | int = "auto"
    odd_samples: bool = False
    steps: int = 2
    split: tuple[str, ...] | None = None

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.dp_shard * self.dp_replicate

    @property
    def id(self) -> str:
        words = [
            layout_words(self),
            f"z{self.zero_stage}",
            self.schedule,
            f"mb{self.mb}",
            "" if self.precision == "fp32" else self.precision,
            self.model,
            "sequence" if self.sequence else "",
            "" if self.recompute == "none" else f"recompute-{self.recompute}",
            "" if self.built == "after" else "built-before",
            "" if self.grad_reduce == "auto" else f"reduce-{str(self.grad_reduce).removesuffix('_micro_batch')}",
            "odd-samples" if self.odd_samples else "",
            "" if self.steps == 2 else f"steps{self.steps}",
            "" if self.split is None else "split",
        ]
        return "-".join(word for word in words if word)

    def settings(self) -> dict[str, Any]:
        """For `assert_like_plain`."""
        chosen: dict[str, Any] = {
            "pp": self.pp,
            "mb": self.mb,
            "schedule": self.schedule,
            "stage": self.zero_stage,
            "grad_reduce": self.grad_reduce,
            "built": self.built,
            "odd_samples": self.odd_samples,
            "steps": self.steps,
            "split": self.split,
        }
        if self.zero_stage > 0:
            chosen["shard_size"] = self.dp_shard
        if self.recompute != "none":
            chosen["recompute"] = self.recompute
        if self.tp > 1:
            chosen["tensor_parallel"] = True
            chosen["tensor_parallel_configs"] = {"degree": self.tp, "sequence_parallel": self.sequence}
        if (amp := PRECISIONS[self.precision]) is not None:
            chosen |= {"amp": amp, "tolerances": LOW}
        return chosen


FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "pp": (2, 4),
    "tp": (1, 2),
    "dp_shard": (1, 2),
    "dp_replicate": (1, 2),
    "zero_stage": (0, 1, 2, 3),
    "schedule": SCHEDULES,
    "mb": (2, 4),
    "precision": tuple(PRECISIONS),
    "recompute": ("none", "full", "selective"),
    "sequence": (False, True),
    "built": ("after", "before"),
    "grad_reduce": ("auto", "last_micro_batch", "every_micro_batch"),
    "odd_samples": (False, True),
    "steps": (2, 3),
}
# The full run multiplies these; of the others each case takes the next combination in turn.
CORE = ("model", "pp", "tp", "dp_shard", "dp_replicate", "zero_stage", "schedule")

# In the default run: what test_pipeline_parity.py has in pairs, with a model written for it, is left to the full run.
DEFAULT: dict[str, tuple[Any, ...]] = {name: values for name, values in FACTORS.items() if name != "model"} | {
    "pp": (2,),
    "dp_replicate": (1,),
    "zero_stage": (0, 3),
    "precision": ("fp32", "bf16O2"),
    "recompute": ("none", "full"),
    "grad_reduce": ("auto",),
    "steps": (2,),
}


def allowed(choice: dict[str, Any], *, most_ranks: int = 8) -> bool:
    """Leaves out what is refused, would not be used or cannot be compared, and too many ranks for this machine."""
    pp, tp, zero_stage = choice.get("pp", 2), choice.get("tp", 1), choice.get("zero_stage", 2)
    dp_shard, dp_replicate = choice.get("dp_shard", 1), choice.get("dp_replicate", 1)
    if pp * tp * dp_shard * dp_replicate > most_ranks or (zero_stage == 0 and dp_shard > 1):
        return False
    schedule, mb = choice.get("schedule", "1f1b"), choice.get("mb", 4)
    if schedule in TWO_CHUNKS and pp == 4:
        return False  # the smallest have fewer calls than 8 chunks
    if schedule == "interleaved" and mb % pp:
        return False
    if choice.get("sequence") and tp == 1 and "tp" in choice:
        return False
    if choice.get("grad_reduce") == "every_micro_batch" and zero_stage < 2:
        return False
    model = choice.get("model")
    if model in NO_TENSOR_PARALLEL and (tp > 1 or choice.get("sequence")):
        return False
    if model in NO_SEQUENCE and choice.get("sequence"):
        return False
    if choice.get("sequence") and choice.get("steps") == 3:
        return False  # the length of the last batch does not divide
    if model in ONE_MICRO_BATCH_ALIKE and dp_shard * dp_replicate > 1:
        return False
    return not (model in NO_LOW_PRECISION and choice.get("precision", "fp32") != "fp32")


# In this order the choice is smallest.
ORDER = ["zero_stage", "schedule", "pp", "tp", "dp_shard", "dp_replicate", "sequence", "mb", "precision", "recompute"]
ORDER += ["built", "grad_reduce", "odd_samples", "steps"]
ALLOWED = functools.partial(allowed, most_ranks=4)
PAIRS = cover({name: DEFAULT[name] for name in ORDER}, allowed=ALLOWED)


def _with_models() -> Iterator[OwnCase]:
    """The pairs; the models that are left over on two ranks, with a batch of other sizes at the end."""
    uses: Counter[str] = Counter()
    for choice in PAIRS:
        fitting = [model for model in MODELS if allowed({**choice, "model": model})]
        model = min(fitting, key=lambda name: uses[name])
        uses[model] += 1
        yield OwnCase(**choice, model=model)
    for place, model in enumerate(model for model in MODELS if not uses[model]):
        yield OwnCase(model=model, schedule=SCHEDULES[place % len(SCHEDULES)], zero_stage=1 + place % 2, steps=3)


CASES = [
    *_with_models(),
    OwnCase(model="t5", pp=4, split=("encoder.final_layer_norm", "decoder.block.0", "lm_head")),
    OwnCase(model="bert", recompute="selective", split=("bert.encoder.layer.3",)),
]


def full_cases(model: str) -> Iterator[OwnCase]:
    """The product, at up to four ranks."""
    rest = {name: values for name, values in FACTORS.items() if name not in CORE}
    turns = [dict(zip(rest, values, strict=True)) for values in product(*rest.values())]
    core = {name: FACTORS[name] for name in CORE} | {"model": (model,)}
    for index, choice in enumerate(everything(core, allowed=ALLOWED)):
        # A step that shares no divisor with the number of turns meets them all before it repeats one.
        first = index * 29 % len(turns)
        merged = ({**choice, **turn} for turn in turns[first:] + turns[:first])
        yield OwnCase(**next(filter(ALLOWED, merged)))
