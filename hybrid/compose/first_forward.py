"""What happens at the first forward of a model that is cut: `verify`, and errors about shapes in words that help."""

from __future__ import annotations

from typing import Any

from torch import nn

from hybrid import shims
from hybrid.compose.tensor_parallel import Planned
from hybrid.contracts.tensor_plan import TensorPlan
from hybrid.errors import ModelError, StrategyError
from hybrid.mesh import Mesh
from hybrid.strategy import ResolvedStrategy
from hybrid.tensor.cuts import TensorCuts
from hybrid.tensor.self_check import SelfCheck
from hybrid.tensor.shape_errors import explain_shape_error

__all__ = ["FirstForward", "check_verify", "plain_copy"]


def check_verify(model: nn.Module, resolved: ResolvedStrategy) -> None:
    """Raises StrategyError: `verify` is asked for, and the model has no values to compare."""
    settings = resolved.tensor_parallel
    if settings is None or not settings.verify:
        return
    on_meta = next((fqn for fqn, parameter in model.named_parameters() if parameter.is_meta), None)
    if on_meta is not None:
        raise StrategyError(
            f"tensor_parallel_configs.verify compares with the whole plain model, and {on_meta!r} is on the meta "
            "device, for a model that no rank is to hold whole: check the plan once on the same model with fewer "
            "layers, built as usual, and leave verify out here"
        )


def plain_copy(model: nn.Module, resolved: ResolvedStrategy) -> nn.Module | None:
    """The model as it is before it is cut, if it is to be compared."""
    settings = resolved.tensor_parallel
    return SelfCheck.copy_of(model) if settings is not None and settings.verify else None


class FirstForward:
    """Watches a model that is cut by a plan until one forward has come to its end."""

    def __init__(self, plan: TensorPlan, check: SelfCheck | None, *, mesh: Mesh) -> None:
        self._plan = plan
        self._check = check
        self._mesh = mesh
        self._done = False

    @staticmethod
    def watch(
        model: nn.Module, planned: Planned | None, cuts: TensorCuts | None, *, plain: nn.Module | None, mesh: Mesh
    ) -> FirstForward | None:
        """Put its hooks on the model; they take themselves away."""
        if planned is None or planned.plan is None or cuts is None:
            return None
        check = SelfCheck(plain=plain, plan=planned.plan, cuts=cuts) if plain is not None else None
        watcher = FirstForward(planned.plan, check, mesh=mesh)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not shims.in_backward():
                watcher.verify(args, kwargs)
                handle.remove()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            watcher._done = True
            end.remove()

        if check is not None:
            handle = model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        end = model.register_forward_hook(after)
        return watcher

    def verify(self, args: Any, kwargs: Any) -> None:
        """Compare with the plain model, and let go of it. *Collective* over tp.

        Raises:
            ModelError: the cut model differs.
        """
        assert self._check is not None
        comparison = self._check.run(args, kwargs)
        self._check = None
        if self._mesh.rank == 0:
            print(
                f"hybrid: tensor parallel verified: outputs and gradients of {comparison.num_modules} modules are the "
                f"plain model's, to {comparison.largest_share:.1e} of their size",
                flush=True,
            )

    def explained(self, model: nn.Module, error: BaseException) -> ModelError | None:
        """A better error for one that the model's first forward raised; None if there is nothing to add."""
        return None if self._done else explain_shape_error(model, self._plan, error)
