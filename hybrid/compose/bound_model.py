"""What a wrapped model refuses: to be copied, pickled or moved, since its parameters lie in buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hybrid.compose.model_checks import refuse_changed_parameters
from hybrid.errors import ModelError

__all__ = ["BoundModel"]


class BoundModel(nn.Module):
    """A model that belongs to process groups."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """`to()`, `half()`, `cuda()` and their like: for parameters that are so already; buffers follow.

        Raises:
            ModelError: parameters would change; they would leave their buckets.
        """
        runtime = vars(self).get("hybrid_runtime")
        if runtime is None:
            return super()._apply(fn, recurse)
        refuse_changed_parameters(runtime.engine.parameters, fn)
        for module in self.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, fn(buffer))
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ModelError(
            "a distributed model cannot be deep-copied: it belongs to process groups. Copy it before distributed_model "
            "(a moving average: AveragedModel(plain copy), then average.update_parameters(model), at stage 3 inside "
            "`with model.gather_parameters():`), or load model.full_state_dict() into a new plain model"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError(
            "a distributed model cannot be pickled: it belongs to process groups. Save model.full_state_dict() instead"
        )
