"""`docs/support.md`, written from what the checks say; and read back, so that a test can try what a reader sees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.support.axes import MODEL, OPTIMIZER, WORLD_SIZE, Floor, known_axes, refusals
from tests.support.models import MODELS
from tests.support.rules import LEFT_OUT, Rule

__all__ = ["FEATURES", "calls_of", "in_order", "matrix", "matrix_of", "page_of", "rows_of", "shown"]

_PP: dict[str, Any] = {"pipeline_configs.degree": 2, "accumulate_steps": 4}


def _schedule(name: str) -> dict[str, Any]:
    chunks = {"pipeline_configs.virtual_stages": 2} if name == "interleaved" else {}
    return {**_PP, "pipeline_configs.schedule": name, **chunks}


# Short name -> the settings behind it.
FEATURES: dict[str, dict[str, Any]] = {
    "ZeRO 1": {"sharding_configs.stage": 1},
    "ZeRO 2": {"sharding_configs.stage": 2},
    "ZeRO 3": {"sharding_configs.stage": 3},
    "replicas": {"sharding_configs.stage": 2, "sharding_configs.shard_size": 2},
    "tp": {"tensor_parallel_configs.degree": 2},
    "sequence": {"tensor_parallel_configs.degree": 2, "tensor_parallel_configs.sequence_parallel": True},
    "1f1b": _schedule("1f1b"),
    "gpipe": _schedule("gpipe"),
    "interleaved": _schedule("interleaved"),
    "zb-h1": _schedule("zb-h1"),
    "zbv": _schedule("zbv"),
    "bf16": {"amp": True, "amp_configs.level": "O2"},
    "fp16": {"amp": True, "amp_configs.dtype": "float16"},
    "recompute": {"recompute": True},
    "compile": {"compile": True, "compile_configs.backend": "aot_eager"},
    "offload": {"sharding_configs.stage": 2, "sharding_configs.offload": "optimizer"},
    "offload all": {"sharding_configs.stage": 3, "sharding_configs.offload": "parameters"},
    "late gather": {"sharding_configs.stage": 2, "sharding_configs.overlap_param_gather": True},
    "clipping": {"gradient_clipping": 1.0},
}

_HEAD = """\
# What combines with what

<!-- Written by `python -m tests.support`, from what the checks of the code say. -->

Every setting combines with every other one, unless a table below says no. What is refused is refused by name: settings
and models before a process group exists, optimizers when they are given. `hybrid explain` says it without starting
anything. "Combines" means the numbers of one process, as [training.md](training.md) has it; the matrices of tests that
compare them are in [contributing.md](contributing.md#matrices).

The tables are made by asking the checks themselves, in a great many choices of {settings} settings, {models} kinds of
models and {optimizers} kinds of optimizers for {world} ranks: what is refused there is in a table, and nothing else is.
Not in them:

- values that a setting never takes; settings of a section whose flag is not set (`amp_configs` without `amp = True`);
  tensor parallel and a pipeline without a degree: all of it is refused;
- degrees that do not multiply to the world size, and batch sizes that do not to the global batch
  ([strategy.md](strategy.md));
- names that a model does not have, and what of a single model cannot be followed from stage to stage
  ([pipeline.md](pipeline.md#any-model)) or cut over ranks ([tensor_parallel.md](tensor_parallel.md));
- settings of other frameworks, which have tables of their own ([strategy.md](strategy.md#fleets-fields),
  [migrating.md](migrating.md)).

## At a glance

`·` combines; a number is the line below that says why not; an empty field is one setting with two values.

{matrix}

{features}
"""

_SECTIONS: tuple[tuple[str, str], ...] = (
    ("Refused: settings", "Each line is refused wherever all of its settings have one of the values."),
    (
        "Refused: settings that would do nothing",
        "No setting is ever ignored: one that nothing would act on is refused, and may be left out.",
    ),
    (
        "Refused: models",
        "For models of these kinds; the first one is that of the sentence. On one data-parallel rank an `nn.Embedding` "
        "with `max_norm` is fine.",
    ),
    ("Refused: optimizers", "With a model of layers in an `nn.Sequential`."),
)
_CALLS = "Refused: calls"
_WITH = "for example with "


def section_of(rule: Rule) -> str:
    if rule.floor == "strategy":
        is_idle = (
            re.search(r"do(es)? nothing|nothing is cut|no degree is given|would never come", rule.said) is not None
        )
        return _SECTIONS[1 if is_idle else 0][0]
    return _SECTIONS[2 if rule.floor == "model" else 3][0]


def in_order(rules: Sequence[Rule]) -> list[Rule]:
    """As on the page; of two that hold for the same choices the first."""
    order = [title for title, _ in _SECTIONS]
    kept = {repr(sorted(rule.conditions.items())): rule for rule in reversed(rules)}
    return [rule for title in order for rule in reversed(kept.values()) if section_of(rule) == title]


def page_of(rules: Sequence[Rule], calls: Mapping[str, str]) -> str:
    """The whole page."""
    rules = in_order(rules)
    number = {id(rule): place for place, rule in enumerate(rules, 1)}
    axes = known_axes()
    lines = [
        _HEAD.format(
            settings=len(axes) - 2,
            models=len(axes[MODEL]),
            optimizers=len(axes[OPTIMIZER]),
            world=WORLD_SIZE,
            matrix=matrix(rules),
            features=_features(),
        )
    ]
    for title, intro in _SECTIONS:
        lines += [f"## {title}", "", intro, "", "| | refused together | what is said |", "|---|---|---|"]
        held = [rule for rule in rules if section_of(rule) == title]
        lines += [f"| {number[id(rule)]} | {_conditions(rule)} | {_escaped(shown(rule.said))} |" for rule in held]
        lines.append("")
    lines += [f"## {_CALLS}", "", "What only the call shows, on the ranks that make it.", ""]
    lines += ["| call | what is said |", "|---|---|"]
    lines += [f"| {name} | {_escaped(shown(said))} |" for name, said in calls.items()]
    return "\n".join(lines) + "\n"


def _features() -> str:
    lines = ["| short name | settings |", "|---|---|"]
    for name, settings in FEATURES.items():
        lines.append(f"| {name} | {', '.join(f'`{path} = {value!r}`' for path, value in settings.items())} |")
    return "\n".join(lines)


def shown(sentence: str) -> str:
    """Its first line: some go on with what to paste."""
    first, *more = sentence.split("\n")
    return f"{first} ..." if more else first


def _conditions(rule: Rule) -> str:
    """One line for each axis; the value of the sentence first."""
    lines = []
    for axis, values in rule.conditions.items():
        first = rule.example.get(axis, LEFT_OUT)
        ordered = [first, *(value for value in values if value != first)]
        if axis == MODEL and len(values) > len(MODELS) // 2:
            others = [name for name in MODELS if name not in values]
            lines.append(f"`{axis}`: {first}, and any but: {', '.join(others)}")
            continue
        lines.append(f"`{axis}`: {', '.join('left out' if v is LEFT_OUT else _value(axis, v) for v in ordered)}")
    # What it takes to come so far: another value would be refused for another reason.
    more = {axis: value for axis, value in rule.example.items() if axis not in rule.conditions}
    return "<br>".join([*lines, *(f"{_WITH}`{axis}`: {_value(axis, value)}" for axis, value in more.items())])


def _value(axis: str, value: Any) -> str:
    return str(value) if axis in {MODEL, OPTIMIZER} else f"`{value!r}`"


def _escaped(sentence: str) -> str:
    return re.sub(r"([|*<>\\])", r"\\\1", sentence)


def matrix(rules: Sequence[Rule]) -> str:
    """Every two features."""
    names = list(FEATURES)
    lines = [f"| | {' | '.join(names[:-1])} |", f"|---|{'---|' * (len(names) - 1)}"]
    for place, name in enumerate(names[1:], 1):
        cells = [_cell(rules, name, other) if at < place else "" for at, other in enumerate(names[:-1])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(rules: Sequence[Rule], one: str, other: str) -> str:
    settings = dict(FEATURES[one])
    for path, value in FEATURES[other].items():
        if settings.setdefault(path, value) != value:
            return ""
    choice = {MODEL: next(iter(MODELS)), **settings}
    if refusals(choice)[0] is None:
        return "·"
    return ", ".join(str(place) for place, rule in enumerate(rules, 1) if rule.holds(choice))


# ---- read back -------------------------------------------------------------------------------------------------------


def rows_of(page: str) -> list[Rule]:
    """The lines of the page about settings, models and optimizers, in their order; the example is what comes first."""
    floors: dict[str, Floor] = {title: "strategy" for title, _ in _SECTIONS[:2]}
    floors |= {_SECTIONS[2][0]: "model", _SECTIONS[3][0]: "optimizer"}
    found = []
    for heading, cells in _table_lines(page):
        if heading in floors and cells[0].isdigit():
            lines = cells[1].split("<br>")
            conditions = dict(_read_condition(line) for line in lines if not line.startswith(_WITH))
            more = dict(_read_condition(line.removeprefix(_WITH)) for line in lines if line.startswith(_WITH))
            first = {axis: values[0] for axis, values in {**conditions, **more}.items()}
            example = {axis: value for axis, value in first.items() if value is not LEFT_OUT}
            found.append(Rule(floor=floors[heading], conditions=conditions, example=example, said=_plain(cells[2])))
    return found


def calls_of(page: str) -> dict[str, str]:
    """The lines of the page about calls."""
    lines = (cells for heading, cells in _table_lines(page) if heading == _CALLS)
    return {cells[0]: _plain(cells[1]) for cells in lines if cells[0] not in {"call", "---"}}


def matrix_of(page: str) -> str:
    """The table of every two features."""
    lines = page.partition("## At a glance")[2].splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("|"))
    return "\n".join(lines[start : lines.index("", start)])


def _table_lines(page: str) -> Iterator[tuple[str, list[str]]]:
    heading = ""
    for line in page.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("|"):
            yield heading, [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _plain(cell: str) -> str:
    return re.sub(r"\\(.)", r"\1", cell)


def _read_condition(line: str) -> tuple[str, tuple[Any, ...]]:
    axis, _, told = line.partition(": ")
    axis = axis.strip("`")
    if axis not in {MODEL, OPTIMIZER}:
        spans = re.findall(r"`([^`]*)`|left out", told)
        return axis, tuple(ast.literal_eval(span) if span else LEFT_OUT for span in spans)
    told, _, but = told.partition(", and any but: ")
    named = tuple(_read_names(axis, told))
    if not but:
        return axis, named
    others = {*named, *_read_names(axis, but)}
    return axis, (*named, *(name for name in known_axes()[axis] if name not in others))


def _read_names(axis: str, told: str) -> Iterator[Any]:
    """Names may hold commas: the longest known one comes next."""
    known = sorted([*known_axes()[axis], "left out"], key=len, reverse=True)
    while told:
        name = next(name for name in known if told.startswith(name))
        yield LEFT_OUT if name == "left out" else name
        told = told.removeprefix(name).removeprefix(", ")
