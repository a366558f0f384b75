"""Runs the cases of a matrix, all of one size in one world, and asks each for what is wrong with it."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import pytest
import torch

from tests.ranks import RankFailure, run_ranks

__all__ = ["CaseWorlds", "selected_cases"]


class AnyCase(Hashable, Protocol):
    """One run of a matrix."""

    @property
    def world_size(self) -> int: ...

    @property
    def id(self) -> str: ...


C = TypeVar("C", bound=AnyCase)


def _run_world(run: Callable[[Any], Any], cases: Sequence[Any], folder: str) -> None:
    """On each rank: run the cases in turn, and leave each result in a file as soon as it is there."""
    for index, case in enumerate(cases):
        path = Path(folder, f"{index}-{torch.distributed.get_rank()}")
        path.with_suffix(".part").write_bytes(pickle.dumps(run(case)))
        path.with_suffix(".part").rename(path)


class CaseWorlds(Generic[C]):
    """Runs all cases of one size in one world, when the first of them is asked for.

    Args:
        cases: those of this session.
        run: on each rank: a case -> a result that can be pickled. *Collective.*
        verify: a case and its results by rank -> sentences about what is wrong.
        seconds_per_case: the world has 40 s, and this for each case.
    """

    def __init__(
        self,
        cases: Sequence[C],
        *,
        run: Callable[[C], Any],
        verify: Callable[[C, list[Any]], list[str]],
        seconds_per_case: float = 4,
    ) -> None:
        self._cases = list(cases)
        self._run_case = run
        self._verify = verify
        self._seconds = seconds_per_case
        self._problems: dict[C, list[str]] = {}

    def problems(self, case: C) -> list[str]:
        """Everything in which the case differs from the plain run; a world that failed is a problem too."""
        if case not in self._problems:
            alike = [other for other in self._cases if other.world_size == case.world_size]
            self._run(alike if case in alike else [case])
        return self._problems[case]

    def _run(self, cases: list[C]) -> None:
        """A case that fails takes its world with it: the ones after it get a fresh world."""
        while cases:
            failure, done = "", 0
            with tempfile.TemporaryDirectory(prefix="hybrid-parity-") as folder:
                try:
                    run_ranks(
                        _run_world,
                        cases[0].world_size,
                        self._run_case,
                        cases,
                        folder,
                        timeout_seconds=40 + self._seconds * len(cases),
                        group_timeout_seconds=30,
                    )
                except RankFailure as error:
                    failure = str(error)
                for index, case in enumerate(cases):
                    paths = [Path(folder, f"{index}-{rank}") for rank in range(case.world_size)]
                    if not all(path.exists() for path in paths):
                        self._problems[case], done = [failure], index + 1
                        break
                    self._problems[case] = self._verify(case, [pickle.loads(path.read_bytes()) for path in paths])
                    done = index + 1
            cases = cases[done:]


def selected_cases(request: pytest.FixtureRequest, kind: type[C]) -> list[C]:
    """The cases of this kind that this session has selected of a file, for a fixture of its worlds."""
    items = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params.get("case") for item in items if hasattr(item, "callspec")]
    return [case for case in cases if isinstance(case, kind)]
