"""What a plan asks for: patterns of names, with a style or an entry each, read into one claim per module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from hybrid.contracts.tensor_facts import Kind, ModelFacts, ModuleFacts
from hybrid.errors import ModelError, StrategyError

__all__ = ["PLAN", "Claim", "Claims", "Problems", "general", "listed", "matching", "read_model_plan", "read_user_plan"]

PLAN = "tensor_parallel_configs.plan"

# Words of Hugging Face, torch and Megatron -> the style, and what else the word says.
_WORDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **dict.fromkeys(("colwise", "column", "columnwise", "column_parallel", "colwiseparallel"), ("colwise", {})),
    **dict.fromkeys(("columnparallellinear",), ("colwise", {})),
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), ("colwise", {"gather_output": True})),
    "packed_colwise": ("colwise", {"fused": 2}),
    **dict.fromkeys(("rowwise", "row", "row_parallel", "rowwiseparallel", "rowparallellinear"), ("rowwise", {})),
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), ("rowwise", {"split_input": True})),
    "packed_rowwise": ("rowwise", {"fused": 2}),
    **dict.fromkeys(("vocab", "vocab_parallel", "embedding_rowwise", "vocabparallelembedding"), ("vocab", {})),
    "vocab_parallel_rowwise": ("vocab", {}),
    "embedding_colwise": ("embedding_colwise", {}),
    **dict.fromkeys(("head", "vocab_head", "vocabparallelhead"), ("head", {})),
    **dict.fromkeys(("attention", "multiheadattention"), ("attention", {})),
    **dict.fromkeys(("partial", "replicated_with_grad_allreduce"), ("partial", {})),
    **dict.fromkeys(("replicated", "replicate", "sequence_parallel", "sequenceparallel"), ("replicated", {})),
}
_STYLES = ("colwise", "rowwise", "vocab", "embedding_colwise", "head", "attention", "partial", "replicated")
_KEYS = ("style", "fused", "heads", "divide", "gather_output")
_FITTING: Mapping[Kind, tuple[str, ...]] = {
    "linear": ("colwise", "rowwise", "head", "replicated"),
    "conv1d": ("colwise", "rowwise", "replicated"),
    "embedding": ("vocab", "embedding_colwise", "replicated"),
    "attention": ("attention", "replicated"),
    "norm": ("partial", "replicated"),
    "dropout": ("replicated",),
    "other": ("partial", "replicated"),
}
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one source asks for one module; sizes are not looked at yet."""

    style: str
    source: str
    explicit: bool = False
    fused: int | tuple[int, ...] = 1
    heads: int | str | None = None
    divide: tuple[str, ...] | None = None
    gather_output: bool = False
    split_input: bool = False
    in_attention: bool = False


@dataclass(slots=True)
class Claims:
    """All that a plan asks for."""

    modules: dict[str, Claim] = field(default_factory=dict)
    parameters: dict[str, Claim] = field(default_factory=dict)
    divided: dict[str, Claim] = field(default_factory=dict)


@dataclass(slots=True)
class Problems:
    """What is wrong, sentence by sentence; in the settings, or with the model."""

    texts: list[str] = field(default_factory=list)
    of_settings: bool = False

    def setting(self, text: str) -> None:
        self.of_settings = True
        self.model(text)

    def model(self, text: str) -> None:
        if text not in self.texts:
            self.texts.append(text)

    def raise_all(self) -> None:
        """All of them in one error."""
        if not self.texts:
            return
        if self.of_settings:
            raise StrategyError(self.texts)
        if len(self.texts) == 1:
            raise ModelError(self.texts[0])
        lines = "".join(f"\n  {number}. {text}" for number, text in enumerate(self.texts, 1))
        raise ModelError(f"{len(self.texts)} problems with tensor parallel on this model:{lines}")


def general(fqn: str) -> str:
    """The name with `*` for each number in it: the pattern for all blocks of a stack.

    A number at the end stays, for it tells the layers of a `Sequential` apart.
    """
    *path, name = fqn.split(".")
    return ".".join([*("*" if part.isdigit() else part for part in path), name])


def listed(names: Iterable[str]) -> str:
    """A few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _matches(pattern: list[str], names: list[str]) -> bool:
    """`*` and friends within one part of a name; `**` for any number of parts."""
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(_matches(pattern[1:], names[skip:]) for skip in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _matches(pattern[1:], names[1:])


def matching(pattern: str, facts: ModelFacts) -> tuple[list[ModuleFacts], list[str]]:
    """Modules of that name; if there are none, parameters."""
    parts = pattern.split(".")
    modules = [
        module
        for module in facts.modules
        if any(name and _matches(parts, name.split(".")) for name in (module.fqn, *module.aliases))
    ]
    if modules:
        return modules, []
    return [], [fqn for fqn in facts.parameters if _matches(parts, fqn.split("."))]


def read_user_plan(facts: ModelFacts, plan: Mapping[str, Any], problems: Problems) -> Claims:
    """Claims of the plan in the strategy; all that is wrong with it goes to `problems`."""
    claims = Claims()
    for pattern, value in plan.items():
        entry = _read_entry(pattern, value, problems)
        if entry is None:
            continue
        modules, parameters = matching(pattern, facts)
        if not modules and not parameters:
            problems.setting(_nothing(pattern, facts))
        elif entry.style == "":
            for module in modules:
                _put(claims.divided, module.fqn, entry, problems)
            if parameters:
                problems.setting(f"{PLAN}: {pattern!r} is a parameter; name the module whose attributes are divided")
        elif parameters:
            _claim_parameters(parameters, entry, pattern, claims, problems)
        elif inner := [module for module in modules if module.fqn and facts.by_fqn[module.parent].kind == "attention"]:
            problems.setting(
                f"{PLAN}: {pattern!r}: {listed(module.fqn for module in inner)} is a part of nn.MultiheadAttention, "
                f"which is cut as a whole; say {{{general(inner[0].parent)!r}: 'attention'}} (or 'replicated') instead"
            )
        else:
            fitting = [module for module in modules if entry.style in _FITTING[module.kind]]
            for module in fitting:
                _put(claims.modules, module.fqn, entry, problems)
            # Activations and containers that a wide pattern also names have nothing that could be cut.
            odd = [module for module in modules if module not in fitting and (module.parameters or not fitting)]
            if odd:
                words = ", ".join(_FITTING[odd[0].kind])
                problems.setting(
                    f"{PLAN}: {pattern!r}: {entry.style!r} does not fit {listed(module.fqn for module in odd)} "
                    f"({odd[0].class_name}); styles that do: {words}"
                )
    return claims


def _claim_parameters(names: list[str], entry: Claim, pattern: str, claims: Claims, problems: Problems) -> None:
    if entry.style in {"partial", "replicated"}:
        for fqn in names:
            _put(claims.parameters, fqn, entry, problems)
        return
    module = pattern.rpartition(".")[0]
    problems.setting(
        f"{PLAN}: {pattern!r} is a parameter; a parameter can be 'partial' or 'replicated', and {entry.style!r} is for "
        f"a module, such as {module!r}"
    )


def _put(into: dict[str, Claim], fqn: str, entry: Claim, problems: Problems) -> None:
    held = into.setdefault(fqn, entry)
    if replace(held, source="") != replace(entry, source=""):
        patterns = " and ".join(claim.source.removeprefix("your plan: ") for claim in (held, entry))
        problems.setting(f"{PLAN}: {patterns} both match {fqn} and ask for different things; keep one")


def _nothing(pattern: str, facts: ModelFacts) -> str:
    known = {general(module.fqn) for module in facts.modules if module.fqn}
    near = get_close_matches(general(pattern), sorted(known), n=_MOST_NAMES, cutoff=0.5)
    if not near:
        near = sorted({general(module.fqn) for module in facts.modules if module.is_linear})[:_MOST_NAMES]
    return f"{PLAN}: {pattern!r} matches no module; nearest: {', '.join(map(repr, near)) or 'none'}"


def _read_entry(pattern: str, value: object, problems: Problems) -> Claim | None:
    """One entry; its style is "" if it only divides attributes. None if it makes no sense."""
    where = f"{PLAN}: {pattern!r}"
    before = len(problems.texts)
    entry: Mapping[str, Any] = value if isinstance(value, Mapping) else {"style": value}
    for key in entry:
        if key not in _KEYS:
            near = get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_KEYS)}"
            problems.setting(f"{where}: unknown key {key!r}; {hint}")
    found: dict[str, Any] = {"style": ""}
    if "style" in entry or "divide" not in entry:
        found.update(_read_style(where, entry.get("style"), problems))
    if "fused" in entry:
        found["fused"] = entry["fused"] if isinstance(entry["fused"], int) else tuple(entry["fused"] or ())
        if not _is_fused(found["fused"]):
            problems.setting(
                f"{where}: fused = {entry['fused']!r}: expected a number of parts, or their sizes in a list"
            )
    if "heads" in entry:
        found["heads"] = entry["heads"]
        if not isinstance(entry["heads"], str) and not _is_count(entry["heads"]):
            problems.setting(f"{where}: heads = {entry['heads']!r}: expected a number, or the name of an attribute")
    if "divide" in entry:
        names = [entry["divide"]] if isinstance(entry["divide"], str) else list(entry["divide"] or ())
        found["divide"] = tuple(names)
        if not all(isinstance(name, str) for name in names):
            problems.setting(f"{where}: divide = {entry['divide']!r}: expected names of attributes in a list")
    if "gather_output" in entry:
        found["gather_output"] = entry["gather_output"]
        if not isinstance(entry["gather_output"], bool):
            problems.setting(f"{where}: gather_output = {entry['gather_output']!r}: expected True or False")
        elif found["style"] != "colwise" and entry["gather_output"]:
            problems.setting(f"{where}: gather_output goes with 'colwise', not with {found['style']!r}")
    if len(problems.texts) > before:
        return None
    return Claim(source=f"your plan: {pattern!r}", explicit=True, **found)


def _read_style(where: str, word: object, problems: Problems) -> Mapping[str, Any]:
    if isinstance(word, str) and word.lower() in _WORDS:
        style, more = _WORDS[word.lower()]
        return {"style": style, **more}
    near = get_close_matches(word.lower(), _WORDS, n=1) if isinstance(word, str) else []
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_STYLES)}"
    problems.setting(f"{where}: unknown style {word!r}; {hint}")
    return {}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_fused(value: int | tuple[int, ...]) -> bool:
    return all(map(_is_count, value)) and bool(value) if isinstance(value, tuple) else _is_count(value)


def read_model_plan(facts: ModelFacts, taken: Iterable[str], problems: Problems) -> Claims:
    """Claims of the plan that the model brings along, for modules that are not `taken`.

    Its patterns are written for a family: one that matches nothing concerns an option that this model does not have.
    """
    claims = Claims()
    taken = set(taken)
    for pattern, word in (facts.model_plan or {}).items():
        modules, parameters = matching(pattern, facts)
        modules = [
            module for module in modules if module.fqn not in taken and facts.by_fqn[module.parent].kind != "attention"
        ]
        parameters = [fqn for fqn in parameters if fqn not in taken]
        if not modules and not parameters:
            continue
        style, more = _WORDS.get(str(word).lower(), ("", {}))
        names = [module.fqn for module in modules] or parameters
        fits = all(style in _FITTING[module.kind] for module in modules)
        if not style or not fits or (parameters and style not in {"partial", "replicated"}):
            problems.model(
                f"the model's own plan has {word!r} for {listed(names)}, which is not available here; "
                f"say in {PLAN} what becomes of {general(names[0])!r}"
            )
            continue
        source = f"the model's own plan: {pattern!r}"
        claim = Claim(style=style, source=source, **more)
        for module in modules:
            claims.modules.setdefault(module.fqn, claim)
        for fqn in parameters:
            claims.parameters.setdefault(fqn, claim)
    return claims
