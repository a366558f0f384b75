"""What one rank fails at, all of them fail at: the same error everywhere, and the ranks that are missing named."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from hybrid.collectives import meeting
from hybrid.collectives.group import Group
from hybrid.collectives.meeting import Word, gather_bytes
from hybrid.errors import CheckpointError, CollectiveError, HybridError

__all__ = ["describe", "gather", "joined", "meet", "ranks_text"]


def meet(problem: BaseException | None, *, group: Group) -> None:
    """Return when every rank has come here without a problem. *Collective* over a host group, from any thread.

    Raises:
        CheckpointError: the problem of any rank, on all of them.
        CollectiveError: which ranks are gone, or did not come within the timeout. This rank's own problem, if it has
            one, is said too.
    """
    _meet(problem, 0, group)


def gather(value: Any, *, group: Group) -> list[Any]:
    """The values of all ranks, on the first one of the group; nothing on the others. As `meet` for the rest."""
    data = pickle.dumps(value)
    sizes = _meet(None, len(data), group)
    return [pickle.loads(one) for one in gather_bytes(data, sizes, group=group)]


def _meet(problem: BaseException | None, number: int, group: Group) -> list[int]:
    text = "" if problem is None else describe(problem)
    try:
        words = meeting.meet(Word(text, number), group=group)
    except CollectiveError as error:
        if problem is None or isinstance(problem, CollectiveError):
            raise
        raise CollectiveError(f"{error}; and here: {text}") from problem
    if problem is not None and not isinstance(problem, Exception):
        raise problem  # such as Ctrl-C: no error of ours to hide it behind
    said = joined([word.text for word in words])
    if said:
        raise CheckpointError(said) from problem
    return [word.number for word in words]


def describe(problem: BaseException) -> str:
    """What to tell the other ranks. Errors that are not meant for users come with their type."""
    text = str(problem)
    if isinstance(problem, HybridError | OSError) and text:
        return text
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__


def joined(words: Sequence[str]) -> str:
    """The problems of all ranks in one text; empty if none has one. One that all have is said once."""
    problems = [(rank, word) for rank, word in enumerate(words) if word]
    if not problems:
        return ""
    first = problems[0][1]
    if len(problems) == len(words) and all(word == first for _, word in problems):
        return first
    if all(word == first for _, word in problems):
        return f"{first} (on {ranks_text([rank for rank, _ in problems])})"
    return "; ".join(f"rank {rank}: {word}" for rank, word in problems)


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
