"""Bytes of activations on one rank: what waits for backward, by the action list that runs, and what backward adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hybrid.contracts.chunk_placement import chunk_rank, chunks_on
from hybrid.contracts.schedule_choice import schedule_placement, schedule_splits_backward
from hybrid.planner.in_flight import Held, Rows, in_flight
from hybrid.planner.job import Candidate, Job
from hybrid.planner.memory_layers import FrameworkProfile
from hybrid.planner.model_spec import ActivationBytes, ParameterSpec, Recompute, UnitSpec

__all__ = ["ActivationTable", "RankActivations", "num_tokens"]

_NOTHING = ActivationBytes()
_MOST_INT64 = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class RankActivations:
    """Bytes of one rank; at the moments when its micro-batches wait for backward.

    Args:
        before: kept when the first backward begins.
        after: kept, at most, when a later one begins.
        recomputed, working, logits: what is there besides at the fullest moment of a backward: activations computed
            again, gradients of activations, copies of the logits.
        boundary: gradients under way, one from the next rank and one to the rank before.
    """

    before: int
    after: int
    recomputed: int
    working: int
    logits: int
    boundary: int

    @property
    def added(self) -> int:
        return self.recomputed + self.working + self.logits


class ActivationTable:
    """Answers for one model, sequence length and kernel; remembers units by their look and by what cuts them."""

    def __init__(self, job: Job, profile: FrameworkProfile) -> None:
        self._model, self._seq, self._is_flash = job.model, job.seq, job.is_flash
        self._element_bytes = job.precision.activation
        self._parameter_bytes, self._gradient_bytes = job.precision.parameter, job.precision.gradient
        self._dummy_bytes: dict[tuple[object, ...], int] = {}
        self._profile = profile
        self._units: dict[tuple[object, ...], _UnitBytes] = {}
        self._chunks: dict[tuple[object, ...], _ChunkBytes] = {}
        self._kinds: dict[tuple[object, ...], int] = {}
        self._staying: set[int] = set()  # of them, those whose result the same rank takes: it is kept there
        # With the chunks, which are known by their id, so that it stays theirs.
        self._placed: dict[
            tuple[object, ...], tuple[tuple[range, ...], dict[int, range], tuple[tuple[int, ...], ...]]
        ] = {}
        self._ranks: dict[tuple[object, ...], tuple[tuple[range, ...], dict[int, RankActivations]]] = {}

    def of_ranks(self, chunks: tuple[range, ...], candidate: Candidate) -> tuple[RankActivations, ...]:
        """Bytes on each pipeline rank; `chunks`: the units of each chunk of the model."""
        return self.of(chunks, candidate, range(candidate.pp))

    def of(self, chunks: tuple[range, ...], candidate: Candidate, ranks: Sequence[int]) -> tuple[RankActivations, ...]:
        """Of these pipeline ranks alone."""
        cutting = _cutting(candidate)
        held = in_flight(candidate.schedule, candidate.pp, candidate.num_micro_batches, len(chunks) // candidate.pp)
        key = (id(chunks), held, cutting)
        known = self._ranks.get(key)
        if known is None:
            known = self._ranks[key] = chunks, {}
        found = known[1]
        missing = [rank for rank in ranks if rank not in found]
        if missing:
            kinds, of_ranks = self._kinds_of(chunks, candidate)
            for rank in missing:
                bytes_of = [self._of_chunk(kind, kinds[kind], candidate, cutting) for kind in of_ranks[rank]]
                own = [kinds[kind] for kind in of_ranks[rank]]
                found[rank] = self._of_rank(own, bytes_of, held.of(rank), candidate)
        return tuple(map(found.__getitem__, ranks))

    def _kinds_of(
        self, chunks: tuple[range, ...], candidate: Candidate
    ) -> tuple[dict[int, range], tuple[tuple[int, ...], ...]]:
        """Kind -> a chunk of it, and the kinds of each rank's chunks; chunks of a kind keep and take the same."""
        pp, placement = candidate.pp, schedule_placement(candidate.schedule)
        key = (id(chunks), pp, placement)
        known = self._placed.get(key)
        if known is None:
            units, looks = self._model.units, self._model.look_indices
            kinds: list[int] = []
            found: dict[int, range] = {}
            ranks = [chunk_rank(chunk, pp, placement) for chunk in range(len(chunks))]
            for number, chunk in enumerate(chunks):
                ends = tuple(units[at].input_bytes if 0 < at < len(units) else -1 for at in (chunk.start, chunk.stop))
                stays = number + 1 < len(ranks) and ranks[number] == ranks[number + 1]
                kind = self._kinds.setdefault((looks[chunk.start : chunk.stop], ends, stays), len(self._kinds))
                self._staying |= {kind} if stays else set()
                kinds.append(kind)
                found.setdefault(kind, chunk)
            placed = (chunks_on(rank, pp, len(chunks), placement) for rank in range(pp))
            known = self._placed[key] = chunks, found, tuple(tuple(kinds[at] for at in mine) for mine in placed)
        return known[1], known[2]

    def _of_rank(
        self, chunks: Sequence[range], bytes_of: Sequence[_ChunkBytes], held: Held, candidate: Candidate
    ) -> RankActivations:
        kept = [chunk.kept for chunk in bytes_of]
        if len(held.between):
            kept += [chunk.put_off for chunk in bytes_of]
        fullest = max(bytes_of, key=lambda chunk: chunk.added)
        after = _most(held.after, kept)
        if len(held.between):
            # What a backward adds is gone then, but for one gradient of a weight, which W computes.
            one = max(chunk.weight for chunk in bytes_of)
            after = max(after, _most(held.between, kept) + one - fullest.added)
        else:
            after = max(after, max(chunk.end for chunk in bytes_of) - fullest.added)
        return RankActivations(
            before=_most(held.before, kept),
            after=after,
            recomputed=fullest.recomputed,
            working=fullest.working + self._dummies(chunks, candidate),
            logits=fullest.logits,
            boundary=max(chunk.taken for chunk in bytes_of) + max(chunk.given for chunk in bytes_of),
        )

    def _of_chunk(self, kind: int, chunk: range, candidate: Candidate, cutting: tuple[object, ...]) -> _ChunkBytes:
        key = (kind, cutting)
        if key not in self._chunks:
            units = [self._waiting(at, chunk, candidate, cutting) for at in chunk]
            # When a unit's backward runs, what the units after it kept is gone; a split one has put other things off.
            freed, kept, most = 0, 0, -1
            best = _UnitBytes(0, 0, 0, 0, 0, 0, 0)
            is_split = schedule_splits_backward(candidate.schedule)
            for unit in reversed(units):
                added = unit.recomputed + unit.working + unit.logits - freed
                if added > most:
                    most, best = added, unit
                kept += unit.kept
                freed += unit.kept - unit.put_off * is_split
            # With all gradients there: the last of the backward has those of the units before it still to give.
            held = end = 0
            missing = 0
            for unit in units:
                held += unit.kept
                end = max(end, held + unit.recomputed + unit.working + unit.logits - missing)
                missing += unit.gradients
            # Parts that are there in place of what has been freed show as less of themselves, the logits first.
            gone = best.recomputed + best.working + best.logits - max(most, 0)
            parts = []
            for part in (best.logits, best.working + max(0, -gone), best.recomputed):
                parts.append(part - min(part, max(0, gone)))
                gone -= part
            taken, given = self._crossing(chunk.start, candidate), self._crossing(chunk.stop, candidate)
            if kind not in self._staying:
                kept += given * self._profile.keeps_sent
            self._chunks[key] = _ChunkBytes(
                kept, parts[2], parts[1], parts[0], taken, given,
                put_off=sum(unit.put_off for unit in units), weight=max(unit.weight for unit in units), end=end,
            )  # fmt: skip
        return self._chunks[key]

    def _waiting(self, at: int, chunk: range, candidate: Candidate, cutting: tuple[object, ...]) -> _UnitBytes:
        """With gradients of tied weights that wait, from their last use on, for that of the first one to be added."""
        unit = self._of_unit(at, candidate, cutting)
        if self._profile.has_static_gradients or schedule_splits_backward(candidate.schedule):
            return unit
        ties = ((first, last, tied) for first, last, tied in self._ties if chunk.start <= first <= at < last)
        waiting = sum(tied.local_elements(candidate.tp) for _, last, tied in ties if last < chunk.stop)
        return replace(unit, working=unit.working + self._parameter_bytes * waiting) if waiting else unit

    @cached_property
    def _ties(self) -> Sequence[tuple[int, int, ParameterSpec]]:
        """Of each trained weight that stands in two places: units of both, and the second of them."""
        places = [(at, unit, one) for at, unit in enumerate(self._model.units) for one in unit.parameters]
        tied = [(at, one.tied_to, one) for at, _, one in places if one.tied_to and one.trainable]
        owners = {f"{unit.name}.{one.name}": at for at, unit, one in places} if tied else {}
        return [(owners[owner], at, one) for at, owner, one in tied if owners.get(owner, at) < at]

    def _of_unit(self, at: int, candidate: Candidate, cutting: tuple[object, ...]) -> _UnitBytes:
        look = self._model.look_indices[at]
        key = (look, *cutting)
        if key not in self._units:
            unit, count = self._model.units[look], num_tokens(candidate, self._seq)
            kept = self._kept(unit, candidate, candidate.recompute)
            again = self._kept(unit, candidate, "none") - kept if candidate.recompute != "none" else 0
            logits = count * unit.logits_per_token * self._profile.logits_bytes / candidate.tp
            weights = (p.local_elements(candidate.tp) for p in unit.parameters if p.trainable and not p.is_expert)
            self._units[key] = _UnitBytes(
                kept, max(0, again), round(self._working(unit, candidate)), round(logits),
                round(self._put_off(unit, candidate)), self._parameter_bytes * max(weights, default=0),
                self._gradient_bytes * sum(
                    p.local_elements(candidate.tp, ep=candidate.ep) for p in unit.parameters if p.trainable
                ),
            )  # fmt: skip
        return self._units[key]

    def _put_off(self, unit: UnitSpec, candidate: Candidate) -> float:
        """What is kept between the halves of a split backward.

        Input and output gradient of each linear layer, gathered where the sequence is cut, one input for layers that
        share it; and the gradients of all other weights.
        """
        tp, count, size = candidate.tp, num_tokens(candidate, self._seq), self._element_bytes
        inputs: dict[tuple[str, str, int], float] = {}
        gradients, weights = 0.0, 0.0
        for product in unit.matmuls:
            if product.is_put_off:
                parts = 1 if product.cut != "none" or not candidate.sequence_parallel else tp
                inputs[product.name.partition(".")[0], product.cut, product.in_features] = (
                    product.in_features * product.tokens_share / (tp if product.cut == "row" else parts)
                )
                own = min(tp, product.min_parts or tp) if product.cut == "column" else parts
                gradients += product.out_features * product.tokens_share / own
                weights += product.in_features * product.out_features / (tp if product.cut == "row" else own)
        trained = sum(p.local_elements(tp, ep=candidate.ep) for p in unit.parameters if p.trainable)
        return count * size * (sum(inputs.values()) + gradients) + self._parameter_bytes * max(0.0, trained - weights)

    def _kept(self, unit: UnitSpec, candidate: Candidate, recompute: Recompute) -> int:
        spec = unit.activations.get((recompute, self._is_flash), _NOTHING)
        count = num_tokens(candidate, self._seq)
        return round(
            spec.of(
                tokens=count,
                seq=self._seq,
                tp=candidate.tp,
                sequence_parallel=candidate.sequence_parallel,
                keeps_gathered=self._profile.keeps_gathered,
            )
        )

    def _working(self, unit: UnitSpec, candidate: Candidate) -> float:
        """Gradients while the fullest product of the unit runs backward.

        Those of the unit's output, of the widest layer's result, and of the parameter with most elements, which
        autograd gives as a tensor of its own. The saved input of the product behind that layer is gone by then.
        """
        count, size = num_tokens(candidate, self._seq), self._element_bytes
        parts = candidate.tp if candidate.sequence_parallel else 1
        widths: dict[tuple[str, int], float] = {}
        is_cut = False
        for product in unit.matmuls:
            if product.cut in {"column", "expert"} and not unit.logits_per_token:
                group = (product.name.partition(".")[0], product.in_features)
                share = product.out_features * product.tokens_share
                is_cut = is_cut or product.cut == "column"
                split = candidate.tp if product.cut == "column" else parts
                widths[group] = widths.get(group, 0.0) + share / split
        width = max(widths.values(), default=0.0)
        hidden = unit.input_bytes / size
        working = count * size * (width + hidden / parts)
        if parts > 1 and (is_cut or unit.logits_per_token):
            # What a column layer takes is gathered: its gradient is whole, and where it is gathered anew, so is it.
            working += count * unit.input_bytes * (1 if self._profile.keeps_gathered else 2)
        if not (self._profile.keeps_dummy_gradients and unit.kind == "block"):
            trained = (p.local_elements(candidate.tp) for p in unit.parameters if p.trainable and not p.is_expert)
            working += self._parameter_bytes * max(trained, default=0)
        return working

    def _dummies(self, chunks: Sequence[range], candidate: Candidate) -> int:
        """One gradient that is never read for each shape of a weight: Transformer Engine keeps them."""
        if not self._profile.keeps_dummy_gradients:
            return 0
        looks = frozenset(self._model.look_indices[at] for chunk in chunks for at in chunk)
        key = (looks, candidate.tp)
        if key not in self._dummy_bytes:
            blocks = [self._model.units[look] for look in looks if self._model.units[look].kind == "block"]
            shapes = {
                (p.name, p.shape): p.local_elements(candidate.tp) if not p.is_expert else p.shape[-1] * p.shape[-2]
                for unit in blocks
                for p in unit.parameters
                if len(p.shape) > 1
            }
            self._dummy_bytes[key] = self._parameter_bytes * sum(shapes.values())
        return self._dummy_bytes[key]

    def _crossing(self, at: int, candidate: Candidate) -> int:
        """The value of one micro-batch that goes into the unit at this place; 0 behind the last one."""
        if not 0 < at < len(self._model.units):
            return 0
        parts = candidate.tp if candidate.sequence_parallel else 1
        return round(num_tokens(candidate, self._seq) * self._model.units[at].input_bytes / parts)


@dataclass(frozen=True, slots=True)
class _UnitBytes:
    kept: int
    recomputed: int
    working: int
    logits: int
    put_off: int  # between the halves of a split backward
    weight: int  # the gradient of its largest weight
    gradients: int  # of all its parameters


@dataclass(frozen=True, slots=True)
class _ChunkBytes:
    kept: int
    recomputed: int
    working: int
    logits: int
    taken: int  # the value that comes in, or its gradient
    given: int  # the value that goes out
    put_off: int
    weight: int
    end: int  # at the end of a backward, less the gradients that come after that

    @property
    def added(self) -> int:
        return self.recomputed + self.working + self.logits


def num_tokens(candidate: Candidate, seq: int) -> int:
    """Tokens of one micro-batch on one rank."""
    return -(-candidate.micro_batch_size * seq // candidate.cp)


def _cutting(candidate: Candidate) -> tuple[object, ...]:
    return (
        candidate.micro_batch_size, candidate.cp, candidate.tp, candidate.sequence_parallel, candidate.recompute,
        schedule_splits_backward(candidate.schedule), candidate.ep,
    )  # fmt: skip


def _most(rows: Rows, weights: Sequence[int]) -> int:
    if not len(rows):
        return 0
    # Micro-batches of billions of samples keep more bytes than 64 bits count.
    is_small = max(weights) * len(weights) * int(rows.max()) < _MOST_INT64
    return int((rows @ np.array(weights, np.int64 if is_small else object)).max())
