"""Which layers a rank of a pipeline holds, and how the model computes with them alone.

The model stays the same object, with the names it had: a layer of another stage becomes an `Elsewhere`, which holds
nothing. What one stage computes is one or more *chunks*, runs of neighbouring layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from hybrid.contracts.chunk_placement import ChunkPlacement, chunk_rank, chunks_on
from hybrid.errors import ModelError
from hybrid.pipeline.boundary import check_tensors, memories_of, with_own_memory
from hybrid.pipeline.loss_scope import LossScope
from hybrid.pipeline.root_hooks import keep_to_the_ends

__all__ = ["Elsewhere", "StagedModel"]


class Elsewhere(nn.Module):
    """Stands where a layer of another stage stood."""

    def __init__(self, name: str, stage: int, loss_scope: LossScope) -> None:
        super().__init__()
        self._where = f"layer {name!r} is on pipeline stage {stage}"
        self._check_walk = functools.partial(loss_scope.check_walk, repr(name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ModelError(f"{self._where}, not on this rank: use model.train_batch or model.eval_batch")

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        self._check_walk()
        yield from super().named_modules(memo, prefix, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(f"{name!r} is no attribute here: {self._where}, not on this rank") from None

    def extra_repr(self) -> str:
        return self._where


class StagedModel:
    """The layers of one model over the stages of a pipeline.

    Args:
        model: its children are the layers; those of other stages may be missing.
        names: names of all layers, in order.
        chunks: the layers of each chunk, all of them once.
        num_stages, stage: of the pipeline; this rank's.
        placement: of chunks on stages.
        call: (index of a layer, value) -> output.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        chunks: Sequence[range],
        *,
        num_stages: int,
        stage: int,
        placement: ChunkPlacement = ChunkPlacement.ROUND,
        call: Callable[[int, Any], Any],
    ) -> None:
        self._model = model
        self.chunks = tuple(chunks)
        self.num_stages, self.stage = num_stages, stage
        self.placement = placement
        self.names = tuple(names)
        self._call = call
        self._chunk_of = {index: chunk for chunk, layers in enumerate(chunks) for index in layers}
        self._removed: dict[str, nn.Module] = {}
        self.loss_scope = LossScope()
        self.current_chunk: int | None = None
        self.on_leave: Callable[[], None] = lambda: None

    @property
    def num_chunks(self) -> int:
        return len(self.chunks)

    def stage_of(self, fqn: str) -> int:
        """The stage that holds what has this name."""
        return chunk_rank(self.chunk_of(fqn), self.num_stages, self.placement)

    def stages_of(self, fqn: str) -> tuple[int, ...]:
        """The stages that hold what has this name: all of them, if it is the model's own and no layer's."""
        is_layers = fqn.partition(".")[0] in self.names
        return (self.stage_of(fqn),) if is_layers else tuple(range(self.num_stages))

    def chunk_of(self, fqn: str) -> int:
        """The chunk that holds what has this name."""
        return self._chunk_of[self.names.index(fqn.partition(".")[0])]

    def own_chunks_of(self, fqn: str) -> tuple[int, ...]:
        """The chunks of this stage that hold what has this name."""
        chunk = self.chunk_of(fqn)
        return (chunk,) if self.is_here(fqn) else ()

    def is_here(self, fqn: str) -> bool:
        return self.stage_of(fqn) == self.stage

    def chunks_here(self) -> tuple[int, ...]:
        """The chunks on this stage."""
        return chunks_on(self.stage, self.num_stages, self.num_chunks, self.placement)

    def chunk_names(self) -> tuple[tuple[str, ...], ...]:
        """Names of the layers of each chunk."""
        return tuple(tuple(self.names[index] for index in layers) for layers in self.chunks)

    def names_here(self) -> list[str]:
        """Names of the layers on this stage."""
        return [name for name in self.names if self.is_here(name)]

    def remove_the_rest(self) -> list[nn.Parameter]:
        """Take the layers of other stages out of the model; returns the parameters that nothing here holds now."""
        here = {id(p) for name in self.names_here() for p in self._model.get_submodule(name).parameters()}
        gone: dict[int, nn.Parameter] = {}
        for name in self.names:
            if not self.is_here(name) and hasattr(self._model, name):
                layer = self._model.get_submodule(name)
                gone |= {id(p): p for p in layer.parameters() if id(p) not in here}
                self._removed[name] = layer
                setattr(self._model, name, Elsewhere(name, self.stage_of(name), self.loss_scope))
        return list(gone.values())

    @contextmanager
    def all_layers(self) -> Iterator[None]:
        """Inside, the model has the layers of all stages again (to be initialised in order, on the meta device)."""
        placeholders = {name: self._model.get_submodule(name) for name in self._removed}
        for name, layer in self._removed.items():
            setattr(self._model, name, layer)
        try:
            yield
        finally:
            for name, placeholder in placeholders.items():
                setattr(self._model, name, placeholder)

    def forget_the_rest(self) -> None:
        """Let go of the layers of other stages."""
        self._removed.clear()

    def forward(self, value: Any) -> Any:
        """The forward of the model on this rank: that of the chunk that runs now.

        Raises:
            ModelError: the model was called by hand.
        """
        if self.current_chunk is None:
            raise ModelError(
                f"this rank holds stage {self.stage} of {self.num_stages} of the model, which cannot run by itself: "
                "use model.train_batch or model.eval_batch, on all ranks"
            )
        given = memories_of(value)
        for index in self.chunks[self.current_chunk]:
            value = self._call(index, value)
        if self.runs_last_chunk():
            return value
        # Here, since parameters that are cut may be freed when the model's forward has ended.
        check_tensors(value, layer=self.names[self.chunks[self.current_chunk][-1]])
        return with_own_memory(value, given=given, is_batch=self.runs_first_chunk(), model=self._model)

    def runs_first_chunk(self) -> bool:
        """Whether what runs now gets the model's own input."""
        return self.current_chunk == 0

    def runs_last_chunk(self) -> bool:
        """Whether what runs now gives the model's own output."""
        return self.current_chunk == self.num_chunks - 1

    def begin_backward(self, chunk: int, micro_batch: int) -> None:
        """Nothing depends on it here."""

    def take_over(self) -> None:
        """From now on the model's forward is that of its chunks."""
        self._model.forward = self.forward

    def run_chunk(self, chunk: int, micro_batch: int, value: Any) -> Any:
        """Call the model, hooks and all, for one chunk; `value` is what it gets of this micro-batch."""
        keep_to_the_ends(self._model, runs_first=self.runs_first_chunk, runs_last=self.runs_last_chunk)
        before, self.current_chunk = self.current_chunk, chunk
        try:
            return self._model(value)
        finally:
            self.current_chunk = before
