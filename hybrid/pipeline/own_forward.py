"""A model that is cut by its own forward: what a rank holds of it, and how a chunk runs.

Each chunk runs the unmodified forward. Of the calls of units that it makes

    calls of chunks before        return what crossed the cut, or a tensor like it without values
    own calls                     run; behind the last one the chunk leaves the forward, unless it is the last chunk
    calls of chunks behind        are not reached

and everything between the calls, modules without parameters too, runs in every chunk. Random state is set at the
beginning of a forward and behind each call, from the step, the micro-batch and the number of the call, so that what
is drawn between calls is the same in every chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from hybrid import shims
from hybrid.contracts.chunk_placement import ChunkPlacement, chunk_rank, chunks_on
from hybrid.empty_caches import without_caches
from hybrid.errors import ModelError
from hybrid.pipeline.absent import check_present
from hybrid.pipeline.boundary import full_cache, memories_of
from hybrid.pipeline.chunk_run import ChunkRun
from hybrid.pipeline.fast_paths import slow_paths
from hybrid.pipeline.function_caches import check_not_kept
from hybrid.pipeline.holders import Holders
from hybrid.pipeline.loss_scope import LossScope
from hybrid.pipeline.outline import Returned
from hybrid.pipeline.plan import OwnForwardPlan
from hybrid.pipeline.random_state import kept_generators, set_generators
from hybrid.pipeline.reruns import Reruns
from hybrid.pipeline.root_hooks import around_units, check_backward_hooks_around, keep_to_the_ends
from hybrid.pipeline.shells import Shells
from hybrid.pipeline.unit_class import watch_calls
from hybrid.pipeline.ways import Inputs, Way, Ways
from hybrid.precision.tree import map_tensors

__all__ = ["OwnForwardModel"]


class _Leave(BaseException):
    """Ends a forward behind the last call of a chunk. No Exception, which a model may catch."""


class OwnForwardModel:
    """One model over the stages of a pipeline, cut by its own forward.

    Args:
        model: with all of its parameters.
        plan: how it is cut.
        num_stages, stage: of the pipeline; this rank's.
        placement: of chunks on stages.
        device: of this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: OwnForwardPlan,
        *,
        num_stages: int,
        stage: int,
        placement: ChunkPlacement = ChunkPlacement.ROUND,
        device: torch.device,
    ) -> None:
        self._model = model
        self.chunks = plan.chunks
        self._calls = tuple(call.unit for call in plan.flow.calls)
        self.num_stages, self.stage = num_stages, stage
        self.placement = placement
        self.names = plan.units
        self._device = device
        self._holders = Holders(model, plan.units, plan.held_by, plan.chunks)
        self._ways = Ways(model, plan, self._holders, stage_of=self._stage_of)
        self._around = around_units(model, plan.units)
        self._known: dict[Returned, Returned] = {}
        self._run: ChunkRun | None = None
        self._reruns = Reruns()
        self.loss_scope = LossScope()
        self._seed = 0
        self.on_leave: Callable[[], None] = lambda: None
        """Called when a chunk leaves the forward in its middle."""
        self._forward: Callable[..., Any] = model.forward
        self._batch: Sequence[tuple[Inputs, Way]] | None = None  # by micro-batch
        self._shells = Shells(
            model,
            lambda module, name: any(self._is_own(c) for c in self._holders.of_slot(module, name)),
            device=device,
            is_running=lambda: self._run is not None,
            before_call=self._check_call,
            before_walk=lambda module: self.loss_scope.check_walk(repr(self._names_of.get(id(module), ""))),
        )
        self._names_of = {id(module): name for name, module in model.named_modules()}

    # -- what is where ---------------------------------------------------------------------------------------------

    @property
    def num_chunks(self) -> int:
        return len(self.chunks)

    def _is_own(self, chunk: int) -> bool:
        return self._stage_of(chunk) == self.stage

    def _stage_of(self, chunk: int) -> int:
        return chunk_rank(chunk, self.num_stages, self.placement)

    def chunks_of(self, fqn: str) -> tuple[int, ...]:
        """The chunks that hold what has this name."""
        return self._holders.of(fqn)

    def own_chunks_of(self, fqn: str) -> tuple[int, ...]:
        """Those of this stage."""
        return tuple(chunk for chunk in self._holders.of(fqn) if self._is_own(chunk))

    def chunk_of(self, fqn: str) -> int:
        """The first of them."""
        return self._holders.of(fqn)[0]

    def stages_of(self, fqn: str) -> tuple[int, ...]:
        """The stages that hold what has this name."""
        return tuple(sorted({self._stage_of(chunk) for chunk in self._holders.of(fqn)}))

    def is_here(self, fqn: str) -> bool:
        """Whether this stage holds it; what stands around units is everywhere."""
        held = self._holders.of(fqn)
        return not held or any(map(self._is_own, held))

    def chunks_here(self) -> tuple[int, ...]:
        """The chunks on this stage."""
        return chunks_on(self.stage, self.num_stages, self.num_chunks, self.placement)

    def chunk_names(self) -> tuple[tuple[str, ...], ...]:
        """Of the calls of each chunk, the units."""
        return tuple(tuple(self._calls[index] for index in calls) for calls in self.chunks)

    def names_here(self) -> list[str]:
        """Names of the units on this stage."""
        return [name for name in self.names if self.is_here(name)]

    def remove_the_rest(self) -> list[nn.Parameter]:
        """Take the parameters of other stages out of the model; returns those that nothing here holds now."""
        return self._shells.remove()

    def take_over(self) -> None:
        """From now on the model's forward is that of its chunks. Behind all that looks at classes of modules."""
        watch_calls({name: self._model.get_submodule(name) for name in self.names}, self._called)
        self._forward = self._model.forward
        self._model.forward = self.forward

    def all_layers(self) -> AbstractContextManager[None]:
        """Inside, the model has the parameters of all stages again (to be initialised in order, on the meta device)."""
        return self._shells.put_back()

    def forget_the_rest(self) -> None:
        """Let go of the parameters of other stages."""
        self._shells.forget()

    # -- one forward -----------------------------------------------------------------------------------------------

    def runs_first_chunk(self) -> bool:
        return self._run is not None  # every chunk gets the model's own inputs

    def runs_last_chunk(self) -> bool:
        """Whether what runs now gives the model's own output."""
        return self._run is not None and self._run.is_last

    def begin_backward(self, chunk: int, micro_batch: int) -> None:
        """The backward of this chunk begins: recompute draws again what its forward drew."""
        self._reruns.begin_backward(chunk, micro_batch)

    @contextmanager
    def batch(self, inputs: Sequence[Inputs], *, seed: int) -> Iterator[None]:
        """Inside, chunks run on this batch. The ways of all micro-batches are looked at first, alike on all stages.

        Args:
            inputs: of each micro-batch, what the model is called with.
            seed: where random numbers come from, equal on all ranks of a pipeline; afterwards they go on as before.

        Raises:
            ModelError: a forward that cannot be followed, or needs what the stages do not hold.
        """
        batch = list(zip(inputs, self._ways.of_all(inputs, model=self._model), strict=True))
        self._seed, self._batch = seed, batch
        try:
            with kept_generators(self._device):
                yield
        finally:
            self._batch = None
            self._reruns.clear()

    def run_chunk(self, chunk: int, micro_batch: int, value: Any) -> Any:
        """Call the model, hooks and all, for one chunk.

        Args:
            value: what the chunk before returned; of no meaning for the first.

        Returns:
            Of the last chunk the model's output; of others what the next one gets.

        Raises:
            ModelError: a forward that goes another way than the run on tensors without values.
        """
        keep_to_the_ends(
            self._model, runs_first=self.runs_first_chunk, runs_last=self.runs_last_chunk, inputs_here=True
        )
        check_backward_hooks_around(self._around)
        assert self._batch is not None
        (args, kwargs), way = self._batch[micro_batch]
        if way.flow.writes_inputs:
            args, kwargs = (map_tensors(one, torch.clone) for one in (args, kwargs))
        run = ChunkRun(
            way=way,
            chunk=chunk,
            micro_batch=micro_batch,
            device=self._device,
            batch=memories_of((args, kwargs)),
            known=self._known,
        )
        if chunk > 0:
            run.receive(value)
        self._run = run
        self._draw_from(-1, micro_batch)
        try:
            with slow_paths():
                return self._model(*args, **kwargs)
        finally:
            self._run = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the model on this rank.

        Raises:
            ModelError: the model was called by hand.
        """
        run = self._run
        if run is None:
            raise ModelError(
                f"this rank holds stage {self.stage} of {self.num_stages} of the model, which cannot run by itself: "
                "use model.train_batch or model.eval_batch, on all ranks"
            )
        try:
            output = self._forward(*args, **kwargs)
        except _Leave:
            self.on_leave()
            return run.outgoing(self._model)
        if run.next_call < len(run.way.flow.calls):
            run.refuse("ends")
        check_present(output, "reach the output of the model")
        return output

    def _called(self, name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        if run is None:
            if shims.in_backward():
                return self._called_again(name, own, args, kwargs)
            return own(*args, **kwargs)
        if run.is_inside:  # a unit that runs inside another one is part of that
            return own(*args, **kwargs)
        index = run.begin_call(name)
        if index in run.way.flow.checkpointed:
            self._reruns.note(run, index)
        if index < run.calls.start:
            output = run.returned_elsewhere(index, args, kwargs)
        else:
            if kwargs or not all(type(arg) is torch.Tensor for arg in args):  # else there is nothing to find
                args, kwargs = without_caches(args, kwargs, refusal=functools.partial(full_cache, name))
                check_present((args, kwargs), f"reach {name!r}")
            run.is_inside = True
            try:
                output = own(*args, **kwargs)
            except Exception as error:
                check_not_kept(name, error)
                raise
            finally:
                run.is_inside = False
            check_not_kept(name, output)
            if not run.is_last:
                output = run.note_output(index, args, kwargs, output)
        self._draw_from(index, run.micro_batch)
        if index == run.calls.stop - 1 and not run.is_last:
            raise _Leave
        return output

    def _check_call(self, module: nn.Module) -> None:
        """Raises ModelError: a module of another stage is called by hand, or a part of one."""
        name = self._names_of.get(id(module), "")
        if self._run is None and not shims.in_backward() and self.stages_of(name):
            raise ModelError(
                f"{name!r} is on pipeline stage {' and '.join(map(str, self.stages_of(name)))}, not on this rank "
                f"(stage {self.stage}), which has only its shape: use model.train_batch or model.eval_batch"
            )

    def _called_again(self, name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In a backward: by a checkpoint that the model itself has put around the unit, or around more."""
        reruns = self._reruns
        if reruns.is_inside:
            return own(*args, **kwargs)
        chunk, micro_batch = reruns.place
        again = reruns.find(name)
        # A function of the model's own may run its unit again without a checkpoint.
        index = again.index if again is not None else next(self._ways.calls_of(name, chunk), None)
        if index is None:
            raise ModelError(
                f"{name!r} runs again in backward by code of the model's own, on a stage that does not hold it: "
                "checkpoint single units, by torch.utils.checkpoint with use_reentrant=False, or use strategy.recompute"
            )
        if again is not None and again.elsewhere is not None:
            output = again.elsewhere.returned_elsewhere(index, args, kwargs)
        else:
            with reruns.inside():
                output = own(*args, **kwargs)
        self._draw_from(index, micro_batch)
        return output

    def _draw_from(self, index: int, micro_batch: int) -> None:
        """Set the random state to what follows call `index` (-1: the beginning) of a micro-batch in this step."""
        seed = (self._seed + micro_batch * 0x9E3779B97F4A7C15 + (index + 2) * 0xBF58476D1CE4E5B9) % 2**63
        set_generators(seed, self._device)
