"""A group of settings that is checked at every assignment: the base of the strategy and of its sections.

One way in for everything: `section["stage"] = 1`, `section.stage = 1`, a dict given as a whole and a file all
end in `Settings.__setattr__`, which knows the section's own fields (checked by pydantic), their aliases, and
the fields of Fleet's strategy that the table in `fleet_fields` answers. Only what was assigned is *set*; a
setting that was assigned `None` where None means "nothing given" is back at its default.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from hybrid.errors import StrategyError
from hybrid.strategy.fleet_fields import FleetField, fleet_field, fleet_keys
from hybrid.strategy.words import unknown_key

__all__ = ["Section", "Settings", "all_settings"]


class Settings(BaseModel):
    """Fields, aliases and Fleet's fields of one group of settings."""

    model_config = ConfigDict(validate_assignment=True, extra="forbid", use_attribute_docstrings=True)

    PATH: ClassVar[str] = ""
    """Where this group stands in the strategy; "" for the strategy itself."""
    ALIASES: ClassVar[Mapping[str, str]] = {}
    """Other spellings of the fields."""

    _fleet: dict[str, Any] = PrivateAttr(default_factory=dict)
    _spelled: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, settings: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        super().__init__()
        problems = self.assign({**(settings or {}), **more})
        if problems:
            raise StrategyError(problems)

    # ------------------------------------------------------------ keys

    @classmethod
    def path_of(cls, key: object) -> str:
        return f"{cls.PATH}.{key}" if cls.PATH else f"{key}"

    @classmethod
    def own_keys(cls) -> tuple[str, ...]:
        """The names of our own fields."""
        return tuple(cls.model_fields)

    @classmethod
    def all_keys(cls) -> tuple[str, ...]:
        """Every key that can be given here: fields, aliases, and Fleet's fields that can have a value."""
        return (*cls.model_fields, *cls.ALIASES, *fleet_keys(cls.PATH))

    @classmethod
    def section_type(cls, key: str) -> type[Section] | None:
        """The class of the section under this key, if the key is one of a section."""
        field = cls.model_fields.get(key)
        if field is None:
            return None
        candidates = typing.get_args(field.annotation) or (field.annotation,)
        for candidate in candidates:
            if isinstance(candidate, type) and issubclass(candidate, Section):
                return candidate
        return None

    # ------------------------------------------------------------ writing

    def assign(self, settings: Mapping[str, Any]) -> list[str]:
        """Assign all of these; return the problems. Two spellings of one setting must agree."""
        problems: list[str] = []
        spelled: dict[str, str] = {}
        for key, value in settings.items():
            name = self.ALIASES.get(key, key) if isinstance(key, str) else key
            before = getattr(self, name) if name in spelled else None
            try:
                self._assign_one(key, value)
            except StrategyError as error:
                problems.extend(error.problems)
                continue
            if name in spelled and getattr(self, name) != before:
                problems.append(
                    f"{self.path_of(spelled[name])} = {before!r} and {self.path_of(key)} = "
                    f"{getattr(self, name)!r} are two spellings of one setting with different values; "
                    f"keep {self.path_of(name)} alone"
                )
            spelled.setdefault(name, key)
        return problems

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            self._assign_one(name, value)

    def _assign_one(self, key: object, value: Any) -> None:
        if not isinstance(key, str):
            raise StrategyError(f"{self.path_of(key)}: a key must be text, got {key!r} ({type(key).__name__})")
        name = self.ALIASES.get(key, key)
        if name in type(self).model_fields:
            self._assign_field(name, key, value)
            return
        field = fleet_field(self.PATH, key)
        if field is None:
            raise StrategyError(unknown_key(key, type(self), all_settings()))
        if value is None:
            self._fleet.pop(key, None)
            return
        self._fleet[key] = self._read_fleet(field, value)

    def _read_fleet(self, field: FleetField, value: Any) -> Any:
        try:
            return field.read(value)
        except ValueError as error:
            raise StrategyError(f"{self.path_of(field.key)} = {value!r}: {error}") from None

    def _assign_field(self, name: str, key: str, value: Any) -> None:
        section = self.section_type(name)
        if value is None and (section is not None or self.default(name) is None):
            self._reset(name)
            return
        if section is not None:
            value = section.read(value)
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            details = [_sentence(detail) for detail in error.errors(include_url=False)]
            raise StrategyError([f"{self.path_of(key)} = {value!r}: {text}" for text in details]) from None
        self._spelled[name] = key

    def default(self, name: str) -> Any:
        """The default of one of our own fields."""
        return type(self).model_fields[name].get_default(call_default_factory=True)

    def _reset(self, name: str) -> None:
        if name in type(self).model_fields:
            super().__setattr__(name, self.default(name))
            self.model_fields_set.discard(name)
            self._spelled.pop(name, None)

    def reset(self, key: str) -> None:
        """Back to the default, as if it had never been given."""
        self._reset(self.ALIASES.get(key, key))
        self._fleet.pop(key, None)

    # ------------------------------------------------------------ reading

    if not TYPE_CHECKING:  # for a type checker an unknown attribute stays an error

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_"):
                if name in self.ALIASES:
                    return getattr(self, self.ALIASES[name])
                field = fleet_field(self.PATH, name)
                if field is not None:
                    return self._fleet.get(name, field.off[0] if field.off else None)
                raise AttributeError(unknown_key(name, type(self), all_settings()))
            return super().__getattr__(name)

    def is_set(self, name: str) -> bool:
        """Whether the user gave this field a value (for a section: any of its settings)."""
        value = getattr(self, name)
        if isinstance(value, Settings):
            return bool(value.to_dict())
        return name in self.model_fields_set

    def spelling(self, name: str) -> str:
        """The path under which the user gave the field: `sharding_configs.sharding_degree`."""
        return self.path_of(self._spelled.get(name, name))

    def fleet_settings(self) -> dict[str, Any]:
        """Fleet's fields that were given here."""
        return dict(self._fleet)

    def to_dict(self) -> dict[str, Any]:
        """What the user set, in plain values, aliases under our names; defaults are left out."""
        given: dict[str, Any] = {}
        for name in type(self).model_fields:
            if self.is_set(name):
                value = getattr(self, name)
                given[name] = value.to_dict() if isinstance(value, Settings) else plain(value)
        given.update({key: plain(value) for key, value in self._fleet.items()})
        return given

    def copy(self) -> Self:  # type: ignore[override]  # pydantic's own copy() is deprecated
        return self.model_copy(deep=True)

    def __copy__(self) -> Self:
        """As `copy()`: pydantic's shares the sections, so that a change of the copy would change both."""
        return self.copy()

    def __delattr__(self, name: str) -> None:
        """As `reset`; without a field the object could not be read any more."""
        if name in self.all_keys():
            self.reset(name)
        else:
            super().__delattr__(name)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # settings can change


class Section(Settings, MutableMapping[str, Any]):
    """A group of settings under one name; it is also a mapping of its own fields, defaults included."""

    @classmethod
    def read(cls, value: Any) -> Self:
        """A new section from a dict or from another section; the value given is not touched."""
        if isinstance(value, Settings):
            if not isinstance(value, cls):
                raise StrategyError(f"{cls.PATH}: expected its own settings, got those of {value.PATH}")
            return value.copy()
        if not isinstance(value, Mapping):
            raise StrategyError(
                f"{cls.PATH} = {value!r}: expected a dict such as {{{cls.own_or_first_key()!r}: ...}}, "
                f"got {type(value).__name__}"
            )
        section = cls()
        problems = section.assign(value)
        if problems:
            raise StrategyError(problems)
        return section

    @classmethod
    def own_or_first_key(cls) -> str:
        return cls.all_keys()[0]

    def __getitem__(self, key: str) -> Any:
        if key not in self.all_keys():
            raise KeyError(key)
        return getattr(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._assign_one(key, value)

    def __delitem__(self, key: str) -> None:
        if key not in self.all_keys():
            raise KeyError(key)
        self.reset(key)

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]  # a mapping's keys, not pydantic's pairs
        yield from type(self).model_fields
        yield from self._fleet

    def __len__(self) -> int:
        return len(type(self).model_fields) + len(self._fleet)

    def __contains__(self, key: object) -> bool:
        return key in self.all_keys()

    def update(self, other: Any = (), /, **more: Any) -> None:
        """All of these or, if one of them is refused, none."""
        changed = self.copy()
        problems = changed.assign({**dict(other), **more})
        if problems:
            raise StrategyError(problems)
        self.assign({**dict(other), **more})

    def clear(self) -> None:
        """Every setting back to its default."""
        for key in list(self.to_dict()):
            del self[key]

    def popitem(self) -> tuple[str, Any]:
        """Take the last setting that was given; KeyError if none was."""
        given = self.to_dict()
        if not given:
            raise KeyError("no setting was given")
        key = list(given)[-1]
        del self[key]
        return key, given[key]

    def __repr__(self) -> str:
        return repr(self.to_dict())

    __str__ = __repr__


def plain(value: Any) -> Any:
    """The value as JSON knows it; infinity, which JSON does not know, as the text that we read back."""
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, float) and value in {float("inf"), float("-inf")}:
        return "inf" if value > 0 else "-inf"
    return value


def all_settings() -> tuple[type[Settings], ...]:
    """The strategy's class and those of all sections."""
    found: list[type[Settings]] = []
    waiting = list(Settings.__subclasses__())
    while waiting:
        kind = waiting.pop(0)
        waiting.extend(kind.__subclasses__())
        if kind is not Section:
            found.append(kind)
    return tuple(found)


def _sentence(detail: Any) -> str:
    """pydantic's record of one error as our text; the readers' own sentences come through unchanged."""
    cause = detail.get("ctx", {}).get("error")
    return str(cause) if cause is not None else str(detail["msg"])
