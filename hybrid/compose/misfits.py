"""What of a model and a file does not fit together, as one rank sees it and over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["Misfits"]


@dataclass(slots=True)
class Misfits:
    """Names and sentences.

    Args:
        known: names in the files that the model has.
        missing: names of the model that the files have not.
        mismatched: names whose shape or type differs, with both.
        problems: sentences about anything else, which stop a load in any case.
    """

    known: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of_all(cls, ranks: Sequence[Misfits]) -> Misfits:
        """What any rank sees, each once."""
        return cls(
            known={name for one in ranks for name in one.known},
            missing=list(dict.fromkeys(name for one in ranks for name in one.missing)),
            mismatched=list(dict.fromkeys(name for one in ranks for name in one.mismatched)),
            problems=list(dict.fromkeys(problem for one in ranks for problem in one.problems)),
        )

    def unexpected(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the files' names that the model has not."""
        return tuple(name for name in names if name not in self.known)

    def reasons(self, unexpected: Sequence[str], *, strict: bool) -> list[str]:
        """All that stops the load: sentences and, if it is strict, the lists of names."""
        lists = {"missing": self.missing, "unexpected": unexpected, "of another shape or type": self.mismatched}
        named = [f"{title}: {', '.join(names)}" for title, names in lists.items() if names]
        return [*self.problems, *(named if strict else ())]
