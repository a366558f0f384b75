"""JSON Schema of the text form, built from the same fields, aliases and table that validation uses."""

from __future__ import annotations

from typing import Any

from hybrid.strategy.fleet_fields import fleet_field, fleet_keys
from hybrid.strategy.settings import Settings

__all__ = ["schema_of"]

_NUMBER_CLIPS = {"type": "number", "exclusiveMinimum": 0}


def schema_of(kind: type[Settings]) -> dict[str, Any]:
    """The schema of a whole strategy; sections stand in it in full, there are no references to follow."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": kind.__name__,
        **_object(kind),
    }


def _object(kind: type[Settings]) -> dict[str, Any]:
    generated = kind.model_json_schema()["properties"] if kind.model_fields else {}
    properties: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        section = kind.section_type(name)
        if section is None:
            own = {key: value for key, value in generated[name].items() if key != "title"}
            properties[name] = _nullable(own) if field.default is None else own
        else:
            properties[name] = _section(name, section, field.description)
    for alias, name in kind.ALIASES.items():
        properties[alias] = {**properties[name], "description": f"Other spelling of {name}."}
    for key in fleet_keys(kind.PATH):
        answer = fleet_field(kind.PATH, key)
        assert answer is not None, key
        properties[key] = {**answer.schema, "description": f"Fleet's field. {answer.note}"}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if kind.__doc__:
        schema["description"] = kind.__doc__.split("\n\n")[0].strip()
    return schema


def _section(name: str, section: type[Settings], description: str | None) -> dict[str, Any]:
    forms: list[dict[str, Any]] = [_object(section), {"type": "null"}]
    if name == "gradient_clipping":
        forms.insert(0, _NUMBER_CLIPS)
    return {"anyOf": forms, **({"description": description} if description else {})}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """None on an optional setting is "not given"; pydantic's own `anyOf` already says so where it is used."""
    options = schema.get("anyOf", [])
    return schema if {"type": "null"} in options else {"anyOf": [schema, {"type": "null"}]}
