"""Stage 3: parameters are whole only while their unit computes.

    forward of a unit     gather its buckets ── compute ── (idle) ── freed when the next unit begins
    backward of a unit    gather again, when the gradient of its output is there ── freed when the backward of a
                          unit before it begins: autograd runs what was made later first, so this one is through

The buffer of a bucket stays the same storage object for ever; freed means resized to zero bytes. Autograd's saved
views of it therefore see the values again once it has been gathered. While freed, its parameters are
`AbsentParameter`s: a forward that reads one gathers it, anybody else gets an error with its name.

Buckets *around* the units (embeddings, final norm, head) are gathered when first read and stay whole to the end of
the model's forward, since the forward may hold views of them anywhere in it. A unit's parameter that is read
outside the unit's own forward (by a parent, a tied head) stays whole until the backward pass has ended, for the
same reason.

Kept for a run (`reshard_after`), what has been gathered while gradients are recorded stays whole where it would be
freed, though for others its parameters are absent, until `end_run`, an update, or a forward without gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hybrid import shims
from hybrid.collectives import ops
from hybrid.collectives.ranges import named_range
from hybrid.errors import ModelError
from hybrid.sharding.absence import mark_absent, mark_present
from hybrid.sharding.bucket import Bucket
from hybrid.sharding.gathered import GatheredBuckets
from hybrid.sharding.module_hook import ModuleHook
from hybrid.sharding.tensors import attribute_tensors, carried, tensors_in

__all__ = ["Unsharder"]


class Unsharder:
    """Gathers and frees the buckets of one model.

    Args:
        model: hooks go on it and on its units.
        buckets: all of them, in the launch order of gradients (the reverse of forward).
        groups: per bucket, its shard group.
        unit_names: names of the modules that are units; what lies outside them is *around*.
        prefetch: how many units ahead to gather, in the order of the last pass.
        keep_for_a_run: whether what is gathered stays whole until `end_run`.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Bucket],
        *,
        groups: Sequence[ops.Group],
        unit_names: Sequence[str],
        prefetch: int,
        keep_for_a_run: bool = False,
    ) -> None:
        self._model = model
        self._buckets = tuple(buckets)
        self._groups = tuple(groups)
        self._prefetch = prefetch
        self._keep_for_a_run = keep_for_a_run
        self._in_run = False
        self._fqn_of = {id(p): fqn for bucket in buckets for fqn, p in zip(bucket.fqns, bucket.parameters, strict=True)}
        self._bucket_of = {id(p): bucket for bucket in buckets for p in bucket.parameters}
        self._units = self._find_units(model, unit_names)
        self.gathered = GatheredBuckets(self._buckets, self._groups, contents=self._contents)
        # A parameter is present, that is an ordinary one, while its own unit runs. Any other use of it goes through
        # `bring`, also where its bucket happens to be whole: who read it must find it in backward.
        self._parameters = {name: tuple(model.get_submodule(name).parameters()) for name in self._units}
        inside = {bucket.index for buckets in self._units.values() for bucket in buckets}
        outside = {self._bucket_of[id(p)].index for p in self._parameters_outside(model, unit_names)}
        self._around = outside | ({bucket.index for bucket in self._buckets} - inside)
        self._active: list[str] = []  # units whose forward runs, innermost last
        self._given: list[Mapping[int, torch.Tensor]] = []  # tensors in containers that each of them was given
        self._forward_depth = 0
        self._in_backward = False
        self._needed_in_backward: set[int] = set()
        self._kept: set[int] = set()  # stay whole to the end of the backward
        self._unseen: set[int] = set()  # of those, for units that have returned no tensor in this pass
        self._lent: set[int] = set()  # a forward without gradients returned views of them: stay whole to the next one
        self._views: set[int] = set()  # were kept since the last step: graphs may hold views of them
        self._hold = False  # a graph of gradients was made, whose nodes no hook announces: free nothing until the step
        self._edited = 0
        # Units in the order in which their forwards began, of the last pass that each was in: chunks of a pipeline have
        # passes of their own.
        self._orders: dict[str, list[str]] = {}
        self._this_pass: list[str] = []
        for bucket in self._buckets:
            mark_absent(bucket.parameters, self)
        for module in (model, *self._callable_alone(model, unit_names)):
            module.register_forward_pre_hook(ModuleHook(self._before_model), prepend=True)
            module.register_forward_hook(ModuleHook(self._after_model), always_call=True, with_kwargs=True)
        for name in self._units:
            unit = model.get_submodule(name)
            unit.register_forward_pre_hook(ModuleHook(self._before_unit_hook(name)), prepend=True, with_kwargs=True)
            unit.register_forward_hook(ModuleHook(self._after_unit_hook(name)), always_call=True, with_kwargs=True)

    # -- construction ----------------------------------------------------------------------------------

    def _find_units(self, model: nn.Module, names: Sequence[str]) -> dict[str, tuple[Bucket, ...]]:
        units = {}
        for name in names:
            parameters = list(model.get_submodule(name).parameters())
            indices = sorted({self._bucket_of[id(p)].index for p in parameters if id(p) in self._bucket_of})
            if indices:
                units[name] = tuple(self._buckets[index] for index in reversed(indices))
        return units

    def _parameters_outside(self, model: nn.Module, names: Sequence[str]) -> Iterator[nn.Parameter]:
        prefixes = tuple(f"{name}." for name in names)
        for fqn, parameter in model.named_parameters():
            if not fqn.startswith(prefixes) and id(parameter) in self._bucket_of:
                yield parameter

    def _callable_alone(self, model: nn.Module, names: Sequence[str]) -> Iterator[nn.Module]:
        """Modules outside the units that hold parameters: `model.encoder(x)` is a forward of its own.

        Called inside the model's forward, they only count one level deeper.
        """
        prefixes = tuple(f"{name}." for name in names)
        for name, module in model.named_modules():
            if name and name not in names and not name.startswith(prefixes):
                if next(module.parameters(), None) is not None:
                    yield module

    # -- forward ---------------------------------------------------------------------------------------

    def _before_model(self, module: nn.Module, args: Any) -> None:
        if shims.in_backward() or self._in_transform():
            return
        if self._forward_depth == 0:
            self._in_backward = False
            self._active.clear()
            self._lent.clear()
            self._unseen.clear()
            self._this_pass = []
            self._in_run = self._in_run and torch.is_grad_enabled()
            self._free_idle()
        self._forward_depth += 1

    def _after_model(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if shims.in_backward() or shims.in_function_transform():
            return
        self._forward_depth = max(0, self._forward_depth - 1)
        if self._forward_depth > 0:
            return
        if self._this_pass:
            self._orders |= dict.fromkeys(self._this_pass, self._this_pass)
        self._active.clear()
        around = [self._buckets[index] for index in self._around]
        found = self._keep_views(around, output)
        if torch.is_grad_enabled():
            given = self._carried(args, kwargs).values()
            for tensor in (*found, *attribute_tensors(self._model), *given):
                if tensor.requires_grad:
                    tensor.register_hook(self._before_model_backward)
            self._keep_unseen(around, found)
        self._free_idle()

    def _before_unit_hook(self, name: str) -> Any:
        def before_unit(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._in_transform():
                return
            self._active.append(name)
            self._given.append(self._carried(args, kwargs))
            with named_range("gather unit", name):
                self._gather(self._units[name])
            mark_present(self._parameters[name])
            if not shims.in_backward():
                self._this_pass.append(name)
                self._free_idle(but=self._expected(name))
                self._fetch_ahead(name, step=1)

        return before_unit

    def _after_unit_hook(self, name: str) -> Any:
        def after_unit(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if shims.in_function_transform():
                return
            given: Mapping[int, torch.Tensor] = self._given.pop() if self._given else {}
            if name in self._active:
                del self._active[len(self._active) - 1 - self._active[::-1].index(name)]
            if name not in self._active and not shims.in_backward():
                self._guard(self._parameters[name])
            if shims.in_backward():
                return
            found = self._keep_views(self._units[name], output)
            if torch.is_grad_enabled():
                hook = self._before_unit_backward(name, self._this_pass, len(self._this_pass))
                # What it has put into a list that it was given is an output, too.
                now = self._carried(args, kwargs)
                found += [tensor for key, tensor in now.items() if given.get(key) is not tensor]
                for tensor in found:
                    if tensor.grad_fn is not None:
                        tensor.register_hook(hook)
                self._keep_unseen(self._units[name], found)
            if self._forward_depth == 0 and not self._active:
                self._free_idle()  # a unit called by itself

        return after_unit

    @staticmethod
    def _carried(args: Any, kwargs: Any) -> Mapping[int, torch.Tensor]:
        return carried((*args, *kwargs.values())) if torch.is_grad_enabled() and not shims.in_backward() else {}

    def _in_transform(self) -> bool:
        """Whether a transform of torch.func runs: everything it needs is whole, or it is refused.

        Raises:
            ModelError: outside `gather_parameters`; a transform may neither gather nor write into buffers.
        """
        if not shims.in_function_transform():
            return False
        if not self._edited:
            raise ModelError(
                "a transform of torch.func (grad, vmap, jacrev, jvp, ...) runs a model whose parameters are cut over "
                "ranks (ZeRO stage 3), and cannot gather them: put `with model.gather_parameters():` around the "
                "transform (every rank), or use stage 2"
            )
        return True

    def _guard(self, parameters: Iterable[nn.Parameter]) -> None:
        """From now on a use of these is one from outside their units, save of those whose unit runs."""
        if not self._edited:
            running = {id(p) for active in self._active for p in self._parameters[active]}
            mark_absent((p for p in parameters if id(p) not in running), self)

    def _keep_views(self, buckets: Sequence[Bucket], output: Any) -> list[torch.Tensor]:
        """Who returns (a view of) its own parameter: others will need it, also in backward, before our hook.

        Returns all tensors of the output.
        """
        memories = {shims.memory_of(bucket.data): bucket for bucket in buckets}
        found = list(tensors_in(output, all_of_them=True))
        for tensor in found:
            bucket = memories.get(shims.memory_of(tensor)) if tensor.layout == torch.strided else None
            if bucket is not None and torch.is_grad_enabled():
                self._keep(bucket)
            elif bucket is not None:
                self._lent.add(bucket.index)
        return found

    def _keep(self, bucket: Bucket) -> None:
        self._kept.add(bucket.index)
        self._views.add(bucket.index)

    def _keep_unseen(self, buckets: Sequence[Bucket], found: Collection[torch.Tensor]) -> None:
        """Where an output has no tensor, the values went where nobody sees them, or what was to return them raised."""
        for bucket in buckets if not found else ():
            self._keep(bucket)
            self._unseen.add(bucket.index)

    def abandon_pass(self) -> None:
        """A forward was left by an exception: nothing runs any more."""
        self._forward_depth = 0
        self._active.clear()
        self._given.clear()
        self._kept -= self._unseen  # a unit that raised has returned none; another one's are among the views
        if not shims.in_backward():
            # What is under way is left for the next forward: where a rank failed, it would be waited for in vain, and
            # that error would hide this one.
            self._free_idle(also_arriving=False)

    # -- backward --------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        if torch.is_grad_enabled():
            self._hold = True
        if not self._in_backward:
            self._in_backward = True
            self._needed_in_backward = set(self._around)
            shims.call_at_end_of_backward(self.end_backward)

    def _before_model_backward(self, gradient: torch.Tensor) -> None:
        self._begin_backward()
        self._kept |= self._views
        held = [self._buckets[index] for index in sorted(self._around | self._views)]
        self._gather(held)
        for bucket in held:
            mark_present(bucket.parameters)

    def _before_unit_backward(self, name: str, pass_order: list[str], calls: int) -> Any:
        """`calls`: how many units had begun in that forward when this one ended."""

        def before_unit_backward(gradient: torch.Tensor) -> None:
            self._begin_backward()
            # Units that came before in this forward may have begun their backward already (where this one returned
            # its input), so only later ones are through.
            before = pass_order[:calls]
            self._needed_in_backward = self._around | {b.index for unit in before for b in self._units[unit]}
            with named_range("gather unit", name):
                self._gather(self._units[name])
            mark_present(self._parameters[name])
            self._free_idle()
            self._fetch_ahead(name, step=-1)

        return before_unit_backward

    def end_backward(self) -> None:
        """Nothing is needed any more: free all, also what was kept."""
        self._in_backward = False
        self._kept.clear()
        if self._forward_depth == 0 and not self._edited:
            for bucket in self._buckets:
                self._free(bucket)

    # -- gather and free -------------------------------------------------------------------------------

    def bring(self, parameter: nn.Parameter) -> None:
        """An absent parameter is being used: gather it if a forward or a backward is running, else refuse.

        Raises:
            ModelError: nobody runs; the message names the parameter and the way.
        """
        bucket = self._bucket_of[id(parameter)]
        running = self._forward_depth > 0 or self._active or shims.in_backward()
        if not running:
            fqn, size = self._fqn_of[id(parameter)], self._groups[bucket.index].size
            where = f"is cut over {size} ranks (ZeRO stage 3)" if size > 1 else "lies in host memory (offload)"
            raise ModelError(
                f"parameter {fqn!r} {where} and its values are not here: read or edit it inside `with "
                f"model.gather_parameters({fqn!r}):`, or use "
                "hybrid.full_parameter(p), or model.full_state_dict() for all of them (every rank must call them)"
            )
        self._in_transform()
        self._gather([bucket])
        mark_present([parameter])
        if bucket.index not in self._around and torch.is_grad_enabled() and not shims.in_backward():
            self._keep(bucket)

    def _gather(self, buckets: Iterable[Bucket]) -> None:
        wanted = list(buckets)
        for bucket in wanted:
            self._start(bucket)
        for bucket in wanted:
            self.gathered.arrive(bucket)

    def _start(self, bucket: Bucket) -> None:
        if self.gathered.start(bucket):
            self._in_run = self._keep_for_a_run and (torch.is_grad_enabled() or shims.in_backward())

    def _contents(self, index: int) -> str:
        """The block, or what around the blocks, that lies in a bucket."""
        bucket = self._buckets[index]
        names = [name for name, buckets in self._units.items() if bucket in buckets]
        return f"block {', '.join(map(repr, names))}" if names else bucket.contents()

    def _expected(self, name: str) -> set[int]:
        """Buckets that the unit before this one has fetched ahead for those behind this one: no need to do so again."""
        order = self._orders.get(name)
        if order is None:
            return set()
        first = order.index(name) + 1
        return {b.index for unit in order[first : first + self._prefetch - 1] for b in self._units[unit]}

    def _fetch_ahead(self, name: str, *, step: int) -> None:
        """Start the gather of the units that followed (or preceded) this one in the last pass."""
        order = self._this_pass if step < 0 and name in self._this_pass else self._orders.get(name)
        if order is None:
            return
        place = order.index(name) if step > 0 else len(order) - 1 - order[::-1].index(name)
        for distance in range(1, self._prefetch + 1):
            neighbour = place + step * distance
            if 0 <= neighbour < len(order):
                with named_range("gather ahead unit", order[neighbour]):
                    for bucket in self._units[order[neighbour]]:
                        self._start(bucket)

    def _free_idle(self, *, also_arriving: bool = True, but: Collection[int] = ()) -> None:
        """Free what no running unit needs, and the model's forward or backward does not hold; `but` these buckets."""
        if self._edited:
            return
        needed = {bucket.index for name in self._active for bucket in self._units[name]}
        if self._forward_depth > 0:
            needed |= self._around
        if self._in_backward:
            needed |= self._needed_in_backward
        needed |= self._kept | self._lent
        needed.update(but)
        for bucket in self._buckets:
            if bucket.index not in needed and (also_arriving or self.gathered.is_whole(bucket)):
                self._free(bucket)

    def _free(self, bucket: Bucket, *, out_of_date: bool = False) -> None:
        """`out_of_date`: the own shard is newer; else what a forward wrote into the parameters goes into it."""
        if self.gathered.is_freed(bucket) or (self._hold and not out_of_date):
            return
        self.gathered.arrive(bucket)  # resizing a buffer that is being received into would lose the message
        if not out_of_date:
            bucket.take_edits_from_data()
        mark_absent(bucket.parameters, self)
        if self._in_run and not out_of_date:
            return
        self.gathered.free(bucket)

    def end_run(self) -> None:
        """Free what stayed whole for a run of micro-batches."""
        if self._in_run:
            self._in_run = False
            self._free_idle()

    def free_all(self) -> None:
        """After an update: whatever is whole is out of date, and no graph made before may be used any more."""
        self._in_run = False
        self._kept.clear()
        self._lent.clear()
        self._views.clear()
        self._hold = False
        for bucket in self._buckets:
            self._free(bucket, out_of_date=True)

    def check_nothing_edited(self, call: str) -> None:
        """Raises ModelError inside `gather_parameters`: an update there would be overwritten by the edit, or it."""
        if self._edited:
            raise ModelError(
                f"{call} inside `with model.gather_parameters():` at stage 3: leave the block first, so that its edits "
                "count before"
            )

    # -- reading and editing from outside --------------------------------------------------------------

    @contextmanager
    def whole(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Inside, these buckets' parameters are whole and may be edited, on all ranks alike. Collective."""
        self._gather(sorted(buckets, key=lambda bucket: -bucket.index))
        for bucket in buckets:
            mark_present(bucket.parameters)
        self._edited += 1
        try:
            yield
        finally:
            self._edited -= 1
            for bucket in buckets:
                bucket.take_own_from_data()
            for bucket in self._buckets if not self._edited else ():
                if self._forward_depth == 0:
                    self._free(bucket)
                elif bucket.index not in self._around:
                    self._guard(bucket.parameters)
