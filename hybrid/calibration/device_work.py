"""What one rank computes: products, fused attention, pointwise work, the optimizer, launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from hybrid.calibration.clock import Clock
from hybrid.calibration.effort import Effort
from hybrid.contracts.measurements import AttentionPoint, Launch, MatmulPoint, PointwisePoint
from hybrid.cpu_products import matrix_product

__all__ = ["DeviceWork"]

_NAMES: Mapping[torch.dtype, Literal["fp32", "bf16", "fp16"]] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
_NORM_WIDTH = 256
# Adding two tensors reads and writes three, a norm and an activation function two each.
_KERNELS, _TENSORS = 3, 7
# Bytes per element of a step as `planner/data_parallel.py` counts them in fp32: gradients read twice, weights and both
# moments read and written, weights written as parameters.
_STEP_BYTES = 36
_OPTIMIZER_TENSORS = 8
_LAUNCH_LAYERS = 8


class DeviceWork:
    """Measures on one device, on all ranks alike; each function is one item of the progress bar."""

    def __init__(self, clock: Clock, device: torch.device, effort: Effort) -> None:
        self._clock, self._device, self._effort = clock, device, effort
        self._low = _low_dtype(device)
        self._dtype = self._low if device.type == "cuda" else torch.float32

    def _random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, device=self._device).to(dtype or self._dtype)

    def matmuls(self) -> Iterator[Callable[[], MatmulPoint]]:
        """Of linear layers, as they compute them here: forwards and weight gradients."""
        other = torch.float32 if self._dtype is self._low else self._low
        some = [self._effort.matmuls[place] for place in self._effort.more_dtypes if place < len(self._effort.matmuls)]
        for dtype, shapes in ((self._dtype, self._effort.matmuls), (other, some)):
            for shape in shapes:
                for is_weight in (False, True):
                    yield lambda dtype=dtype, shape=shape, is_weight=is_weight: self._matmul(  # type: ignore[misc]
                        dtype, *shape, is_weight=is_weight
                    )

    def _matmul(self, dtype: torch.dtype, rows: int, inner: int, outer: int, *, is_weight: bool) -> MatmulPoint:
        x = self._random(rows, inner, dtype=dtype)
        if is_weight:
            gradient = self._random(rows, outer, dtype=dtype)
            timed = self._clock.alone(torch.no_grad()(lambda: matrix_product(x.t(), gradient)))
            m, k, n = inner, rows, outer
        else:
            weight = self._random(outer, inner, dtype=dtype)
            timed = self._clock.alone(torch.no_grad()(lambda: matrix_product(x, weight.t())))
            m, k, n = rows, inner, outer
        return MatmulPoint(
            m=m, k=k, n=n, dtype=_NAMES[dtype], is_weight=is_weight, seconds=timed.seconds, spread=timed.spread
        )

    def attentions(self) -> Iterator[Callable[[], AttentionPoint]]:
        """Causal, forward and backward."""
        for shape in self._effort.attentions:
            for is_backward in (False, True):
                yield lambda shape=shape, is_backward=is_backward: self._attention(  # type: ignore[misc]
                    *shape, is_backward=is_backward
                )

    def _attention(self, batch: int, heads: int, seq: int, head_dim: int, *, is_backward: bool) -> AttentionPoint:
        q, k, v = (self._random(batch, heads, seq, head_dim).requires_grad_(is_backward) for _ in range(3))
        if is_backward:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            gradient = torch.randn_like(mixed)
            timed = self._clock.alone(lambda: torch.autograd.grad(mixed, (q, k, v), gradient, retain_graph=True))
        else:
            timed = self._clock.alone(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return AttentionPoint(
            batch=batch,
            heads=heads,
            seq=seq,
            head_dim=head_dim,
            dtype=_NAMES[self._dtype],
            is_backward=is_backward,
            seconds=timed.seconds,
            spread=timed.spread,
        )

    def pointwise(self) -> Iterator[Callable[[], PointwisePoint]]:
        """An addition, a norm and an activation function, one after the other."""
        for num_bytes in self._effort.pointwise:
            yield lambda num_bytes=num_bytes: self._pointwise(num_bytes)  # type: ignore[misc]

    def _pointwise(self, num_bytes: int) -> PointwisePoint:
        rows = max(1, num_bytes // (self._dtype.itemsize * _NORM_WIDTH))
        x, y = self._random(rows, _NORM_WIDTH), self._random(rows, _NORM_WIDTH)
        weight = self._random(_NORM_WIDTH)

        def work() -> None:
            torch.add(x, y)
            functional.layer_norm(x, (_NORM_WIDTH,), weight, weight)
            functional.gelu(x)

        timed = self._clock.alone(work)
        traffic = _TENSORS * rows * _NORM_WIDTH * self._dtype.itemsize
        return PointwisePoint(
            num_bytes=max(1, traffic // _KERNELS), bytes_per_second=traffic / timed.seconds, spread=timed.spread
        )

    def optimizer_bytes_per_second(self) -> float:
        """Of clipping and AdamW on fp32."""
        each = max(1, self._effort.optimizer_elements // _OPTIMIZER_TENSORS)
        parameters = [nn.Parameter(torch.randn(each, device=self._device)) for _ in range(_OPTIMIZER_TENSORS)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=1e-4)

        def work() -> None:
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()

        timed = self._clock.alone(work)
        return _STEP_BYTES * each * _OPTIMIZER_TENSORS / timed.seconds

    def launch(self) -> Launch:
        """Layers of a few numbers: nothing but calls, dispatch and autograd."""
        layers: list[nn.Module] = []
        for _ in range(_LAUNCH_LAYERS):
            layers += [nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)]
        model = nn.Sequential(*layers).to(self._device)
        x = torch.randn(2, 8, device=self._device)
        forward = self._clock.alone(lambda: model(x))
        both = self._clock.alone(lambda: model(x).sum().backward())
        backward = max(0.1 * forward.seconds, both.seconds - forward.seconds)
        return Launch(
            forward_seconds=forward.seconds / len(layers),
            backward_factor=backward / forward.seconds,
            spread=max(forward.spread, both.spread),
        )


def _low_dtype(device: torch.device) -> torch.dtype:
    """What is trained in beside fp32: V100 and T4 have no units for bf16, and torch would emulate it."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16
