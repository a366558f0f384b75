"""Time of one unit of a model on one rank: a forward and a backward of one micro-batch, in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hybrid.contracts.cluster import DeviceKind, GroupLinks
from hybrid.planner.collectives import Collective, Fabric, collective_seconds
from hybrid.planner.device_profile import profile_of
from hybrid.planner.matmul import attention_seconds, matmul_seconds
from hybrid.planner.measured import pointwise_rate
from hybrid.planner.model_spec import AttentionSpec, MatmulSpec, Recompute, UnitSpec
from hybrid.planner.rules import rule
from hybrid.planner.software import Software
from hybrid.planner.tensor_traffic import tensor_messages

__all__ = ["PhaseSeconds", "UnitSeconds", "UnitSetting", "recomputing", "unit_time"]

# As in `sharding/gradient_sink.py`: smaller weights get their gradient from autograd, at once.
_LEAST_ELEMENTS = 2**15
# What casting an input or a gradient of a product takes; weights are cast once per step, which is little.
_CAST_BYTES: float = rule("fp8_cast_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """A forward or a backward. `host` is what launching takes beyond the device's time."""

    compute: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    host: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.attention + self.elementwise + self.host + self.tp + self.cp + self.ep


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSeconds:
    """Args:
    recompute: runs before the backward, all of it, its communication included.
    weights: of the backward, what a schedule that splits it leaves to W.
    apart: what both halves take beyond the backward, for each waits for its own launches.
    later: of a whole backward, what follows when the gradient of the input is there.
    """

    forward: PhaseSeconds
    backward: PhaseSeconds
    recompute: float = 0.0
    weights: float = 0.0
    apart: float = 0.0
    later: float = 0.0

    @property
    def backward_total(self) -> float:
        return self.backward.total + self.recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSetting:
    """What the time of a unit depends on beside the unit.

    Args:
        device, fabric, software: what runs it.
        dtype: of products.
        activation: bytes of an element that travels or is stored.
        hidden: width between blocks.
        batch: samples of a micro-batch.
        seq: tokens per sample, whole.
        tp, cp, ep: ranks.
        sequence_parallel, recompute, is_flash: as in the candidate and the job.
        is_split: the schedule runs the products of weight gradients apart from the rest of a backward.
        is_gradient_first: products of weight gradients may wait until the gradient of the input is there.
        is_pipeline_across: a message between stages leaves a domain, and the software says what that costs the host.
        tp_links, cp_links, ep_links: of the groups; None for one rank.
    """

    device: DeviceKind
    fabric: Fabric
    software: Software
    dtype: str
    activation: int
    hidden: int
    batch: float
    seq: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    is_flash: bool = True
    is_split: bool = False
    is_gradient_first: bool = False
    is_pipeline_across: bool = False
    tp_links: GroupLinks | None = None
    cp_links: GroupLinks | None = None
    ep_links: GroupLinks | None = None

    @property
    def tokens(self) -> float:
        """Per rank and micro-batch, before tensor parallel."""
        return self.batch * self.seq / self.cp

    @property
    def whole_tokens(self) -> float:
        """Per rank, of what tensor parallel does not cut: a part of them under sequence parallel."""
        return self.tokens / self.tp if self.sequence_parallel else self.tokens


def unit_time(unit: UnitSpec, setting: UnitSetting) -> UnitSeconds:
    """The parts of a forward and a backward, and what is computed again between them."""
    products = [_matmul(matmul, unit, setting) for matmul in unit.matmuls]
    forward = _phase(unit, setting, sum(forward for forward, _, _ in products), is_backward=False)
    if not unit.has_backward:
        return UnitSeconds(forward=forward, backward=PhaseSeconds())
    backward = _phase(unit, setting, sum(of_weight + of_input for _, of_weight, of_input in products), is_backward=True)
    of_weights = [of_weight for _, of_weight, _ in products]
    inputs, weights = _halves(unit, setting, backward, of_weights, [one.is_put_off for one in unit.matmuls])
    apart = max(0.0, inputs + weights - backward.total)
    later = 0.0
    if setting.is_gradient_first:
        later = backward.total - _halves(unit, setting, backward, of_weights, list(_waiting(unit, setting)))[0]
    whole = UnitSeconds(forward=forward, backward=backward, weights=weights, apart=apart, later=later)
    return recomputing(unit, whole, setting)


def _halves(
    unit: UnitSpec, setting: UnitSetting, backward: PhaseSeconds, of_weights: Sequence[float], is_second: Sequence[bool]
) -> tuple[float, float]:
    """Seconds of a backward without the products of some weights' gradients, and of these: each at least as long as the
    host takes to launch it, so that a faster device makes neither of them longer."""
    software = setting.software
    device = backward.total - backward.host
    launches = _launches(unit, setting, is_backward=True)
    second = sum(seconds for seconds, is_late in zip(of_weights, is_second, strict=True) if is_late)
    # A product has two in a backward, one of its weight and one of its input.
    of_one = software.kernel_fraction * software.launch_seconds * software.backward_launch_factor / 2
    of_second = min(sum(is_second) * of_one, launches)
    first, of_first = device - second, launches - of_second
    ahead = software.is_launch_ahead
    return first + max(0.0, of_first - first * ahead), second + max(0.0, of_second - second * ahead)


def recomputing(unit: UnitSpec, plain: UnitSeconds, setting: UnitSetting) -> UnitSeconds:
    """The same forward and backward, with what `setting.recompute` computes again between them."""
    forward = plain.forward
    if not unit.has_backward:
        return plain
    match setting.recompute if unit.kind == "block" else "none":
        case "full":
            recompute = forward.total
        case "selective":
            launches = setting.software.launch_seconds * setting.software.kernel_fraction * unit.num_kernels
            recompute = max(forward.elementwise, launches / 2)
        case "core_attention":
            recompute = forward.attention
        case _:
            recompute = 0.0
    # What is computed again would be held as long as all that waits.
    later = plain.later if recompute == 0.0 else 0.0
    return replace(plain, recompute=recompute, later=later)


def _waiting(unit: UnitSpec, setting: UnitSetting) -> Iterator[bool]:
    """Of each product, whether that of its weight's gradient may wait: if it hides no message, and the weight is large.

    A column layer hides the sum of its input's gradient where that is summed for it alone; for several in a row, such
    as queries, keys and values, it is summed once, behind all of them.
    """
    for place, matmul in enumerate(unit.matmuls):
        beside = unit.matmuls[max(0, place - 1) : place + 2]
        is_alone = sum(one.cut == "column" for one in beside) == 1
        hides = setting.tp > 1 and matmul.cut == "column" and is_alone
        parts = 1 if matmul.cut == "none" else setting.tp
        is_large = matmul.in_features * matmul.out_features >= _LEAST_ELEMENTS * parts
        yield matmul.is_put_off and is_large and not hides


def _phase(unit: UnitSpec, setting: UnitSetting, compute: float, *, is_backward: bool) -> PhaseSeconds:
    software = setting.software
    attention = sum(_attention(spec, unit, setting, is_backward=is_backward) for spec in unit.attentions)
    elementwise = _elementwise(unit, setting, is_backward=is_backward) + _casts(unit, setting, is_backward=is_backward)
    hidden = software.tp_overlap_fraction
    if is_backward and not setting.is_split:
        # Weight gradients hide the sum of an input gradient; of a gather and a scatter, which take its place under
        # sequence parallel, only the scatter: the gradient that has to be gathered comes before both products.
        behind = software.tp_backward_overlap_fraction / (2 if setting.sequence_parallel else 1)
        hidden = max(hidden, behind)
    tp = _tensor_parallel(unit, setting, is_backward=is_backward) * (1.0 - hidden)
    cp = _context_parallel(unit, setting, is_backward=is_backward)
    cp = max(cp - attention * software.cp_overlap_fraction, 0.0)
    ep = _expert_parallel(unit, setting) * (1.0 - software.ep_overlap_fraction)
    launches = _launches(unit, setting, is_backward=is_backward)
    device = compute + attention + elementwise + tp + cp + ep
    ahead = software.is_launch_ahead
    if unit.expert_rows and not is_backward and software.is_ep_awaited:
        ahead = 0.0
    return PhaseSeconds(
        compute=compute,
        attention=attention,
        elementwise=elementwise,
        host=max(0.0, launches - device * ahead),
        tp=tp,
        cp=cp,
        ep=ep,
    )


def _launches(unit: UnitSpec, setting: UnitSetting, *, is_backward: bool) -> float:
    """Seconds that the host takes."""
    software = setting.software
    launches = (unit.num_kernels * software.kernel_fraction + _num_collectives(unit, setting)) * software.launch_seconds
    if setting.is_pipeline_across:
        launches += _num_tensor_collectives(unit, setting) * setting.tp * software.across_pipeline_seconds
    return launches * (software.backward_launch_factor if is_backward else 1.0)


def _matmul(matmul: MatmulSpec, unit: UnitSpec, setting: UnitSetting) -> tuple[float, float, float]:
    """Of the product forward, of the gradient of its weight, and of that of its input."""
    rows, k, n, groups = _shape(matmul, setting)
    dtype = _product_dtype(unit, setting)
    return (
        _product(setting, rows, k, n, groups, dtype=dtype),
        _product(setting, k, rows, n, groups, dtype=dtype, is_weight=True) if matmul.has_weight_gradient else 0.0,
        _product(setting, rows, n, k, groups, dtype=dtype) if matmul.has_input_gradient else 0.0,
    )


def _shape(matmul: MatmulSpec, setting: UnitSetting) -> tuple[float, float, float, int]:
    """Rows of one product, its inner dimension and its columns, on one rank; how many of them."""
    parts = min(setting.tp, matmul.min_parts) if matmul.min_parts else setting.tp
    k, n = float(matmul.in_features), float(matmul.out_features)
    rows, groups = setting.tokens * matmul.tokens_share, 1
    if matmul.cut == "column":
        n = -(-n // parts)
    elif matmul.cut == "row":
        k = -(-k // parts)
    else:
        rows = setting.whole_tokens * matmul.tokens_share
    if matmul.num_groups > 1:
        groups = max(1, matmul.num_groups // setting.ep)
        rows /= groups
    return rows, k, n, groups


def _product_dtype(unit: UnitSpec, setting: UnitSetting) -> str:
    """8 bits are for the linear layers of blocks: embedding and head stay wide in all recipes, as attention does."""
    return setting.dtype if unit.kind == "block" else _wide(setting.dtype)


def _wide(dtype: str) -> str:
    return "bf16" if dtype == "fp8" else dtype


def _casts(unit: UnitSpec, setting: UnitSetting, *, is_backward: bool) -> float:
    """Inputs of products in 8 bits are cast in a forward, gradients of their outputs in a backward."""
    if _product_dtype(unit, setting) != "fp8":
        return 0.0
    elements = 0.0
    for matmul in unit.matmuls:
        rows, k, n, groups = _shape(matmul, setting)
        elements += groups * rows * (n if is_backward else k)
    rate = setting.device.memory_bytes_per_second * setting.software.memory_fraction
    return elements * _CAST_BYTES / rate


def _product(
    setting: UnitSetting,
    m: float,
    k: float,
    n: float,
    groups: int,
    *,
    dtype: str,
    is_weight: bool = False,
    is_batch: bool = False,
) -> float:
    time = matmul_seconds(
        setting.device, m=m, k=k, n=n, dtype=dtype, groups=groups, is_weight=is_weight, is_batch=is_batch
    )
    return time / setting.software.matmul_fraction


def _attention(spec: AttentionSpec, unit: UnitSpec, setting: UnitSetting, *, is_backward: bool) -> float:
    software = setting.software
    parts = setting.tp if spec.is_cut else 1
    heads = -(-spec.num_heads // parts)
    dtype = _wide(setting.dtype)
    if setting.is_flash:
        whole, half = (
            attention_seconds(
                setting.device,
                batch=setting.batch,
                heads=heads,
                queries=setting.seq / setting.cp,
                keys=setting.seq,
                head_dim=spec.head_dim,
                value_dim=spec.value_dim,
                is_half=is_half,
                dtype=dtype,
                is_backward=is_backward,
            )
            for is_half in (False, True)
        )
        skipped = software.is_causal_skipped if spec.is_causal else 0.0
        rate = software.attention_fraction
        if not software.is_attention_native:
            rate *= profile_of(setting.device.like).attention_ampere
        return (whole + (half - whole) * skipped) / rate
    groups = max(1, round(setting.batch * heads))
    rows = setting.seq / setting.cp
    scores = _product(setting, rows, spec.head_dim, setting.seq, groups, dtype=dtype, is_batch=True)
    values = _product(setting, rows, setting.seq, spec.value_dim, groups, dtype=dtype, is_batch=True)
    traffic = setting.tokens * setting.seq * unit.traffic_pairs / parts * setting.activation / 2
    softmax = traffic * software.pairs_fraction / len(unit.attentions)
    softmax /= setting.device.memory_bytes_per_second * software.memory_fraction
    if is_backward:
        return 2.0 * (scores + values) + software.backward_pairs * softmax
    return scores + values + softmax


def _elementwise(unit: UnitSpec, setting: UnitSetting, *, is_backward: bool) -> float:
    software = setting.software
    traffic = setting.whole_tokens * unit.traffic_whole + setting.tokens * unit.traffic_cut / setting.tp
    traffic *= software.traffic_fraction * setting.activation / 2
    traffic *= software.backward_traffic if is_backward else 1.0
    return traffic / (pointwise_rate(setting.device, traffic / max(1, unit.num_kernels)) * software.memory_fraction)


# ---------------------------------------------------------------- communication inside a unit


def _collective(setting: UnitSetting, kind: Collective, num_bytes: float, links: GroupLinks | None) -> float:
    return collective_seconds(kind, num_bytes, links, fabric=setting.fabric, software=setting.software)


def _tensor_parallel(unit: UnitSpec, setting: UnitSetting, *, is_backward: bool) -> float:
    if setting.tp == 1:
        return 0.0
    messages = tensor_messages(
        unit,
        tokens=setting.tokens,
        hidden=setting.hidden,
        element_bytes=setting.activation,
        sequence_parallel=setting.sequence_parallel,
        is_backward=is_backward,
    )
    return sum(one.count * _collective(setting, one.kind, one.num_bytes, setting.tp_links) for one in messages)


def _num_collectives(unit: UnitSpec, setting: UnitSetting) -> int:
    """That a forward or a backward launches, each of which takes the host as long as a kernel."""
    count = _num_tensor_collectives(unit, setting)
    count += 2 if setting.ep > 1 and unit.expert_rows else 0
    return count + (setting.cp - 1 if setting.cp > 1 and unit.attentions else 0)


def _num_tensor_collectives(unit: UnitSpec, setting: UnitSetting) -> int:
    count = unit.num_tp_reductions * (1 + setting.sequence_parallel) + len(unit.gathered_forward)
    return count if setting.tp > 1 else 0


def _context_parallel(unit: UnitSpec, setting: UnitSetting, *, is_backward: bool) -> float:
    """Keys and values go once round the ring; backward they go again, with their gradients."""
    if setting.cp == 1:
        return 0.0
    width = sum(-(-spec.num_kv_heads // setting.tp) * (spec.head_dim + spec.value_dim) for spec in unit.attentions)
    passed = setting.tokens * width * setting.activation
    time = (setting.cp - 1) * _collective(setting, "send", passed, setting.cp_links)
    return time * (2.0 if is_backward else 1.0)


def _expert_parallel(unit: UnitSpec, setting: UnitSetting) -> float:
    if setting.ep == 1 or not unit.expert_rows:
        return 0.0
    rows = setting.whole_tokens * unit.expert_rows * setting.hidden * setting.activation
    rows *= setting.software.ep_sent_fraction
    return 2 * _collective(setting, "all_to_all", rows, setting.ep_links)
