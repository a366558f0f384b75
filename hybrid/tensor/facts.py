"""Read a live model into the facts that the rules of tensor parallelism work on. Works on the meta device too."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import nn

from hybrid.contracts.tensor_facts import Kind, ModelFacts, ModuleFacts

__all__ = ["read_facts"]

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# Norms over the last dim: each token by itself, so that they work on a part of the sequence.
# Families whose every parameter and gradient the tests hold against the plain model's.
_FAMILIES = ("bert", "gpt2", "llama", "qwen3", "t5", "vit")
_KNOWN_CODE = (
    "torch.nn.",
    *(f"transformers.models.{family}." for family in _FAMILIES),
    *(f"transformers.{module}." for module in ("activations", "modeling_layers", "pytorch_utils")),
)
_TOKEN_NORMS = ("LayerNorm", "RMSNorm")


def read_facts(model: nn.Module) -> ModelFacts:
    """Names, kinds and sizes of all modules and parameters, in registration order."""
    names: dict[nn.Module, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(fqn)
    parameters: dict[nn.Parameter, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        parameters.setdefault(parameter, []).append(fqn)
    return ModelFacts(
        class_name=type(model).__name__,
        modules=tuple(_module_facts(module, fqns, parameters) for module, fqns in names.items()),
        attributes={fqns[0]: numbers for module, fqns in names.items() if (numbers := _numbers(module))},
        model_plan=_model_plan(names),
    )


def _module_facts(module: nn.Module, fqns: list[str], parameters: Mapping[nn.Parameter, list[str]]) -> ModuleFacts:
    own = dict(module.named_parameters(recurse=False))
    kind = _kind(module)
    prefix = f"{fqns[0]}." if fqns[0] else ""
    others = {
        name: tuple(fqn for fqn in parameters[parameter] if fqn != f"{prefix}{name}") for name, parameter in own.items()
    }
    in_features, out_features = _sizes(module, kind)
    return ModuleFacts(
        fqn=fqns[0],
        class_name=type(module).__name__,
        kind=kind,
        in_features=in_features,
        out_features=out_features,
        has_bias=_has_bias(module, own),
        exact=_is_exact(module, kind, own),
        parameters={name: tuple(parameter.shape) for name, parameter in own.items()},
        trainable=frozenset(name for name, parameter in own.items() if parameter.requires_grad),
        tied={name: tied for name, tied in others.items() if tied},
        aliases=tuple(fqns[1:]),
        options=_options(module),
        is_known=_is_known(module),
    )


def _is_known(module: nn.Module) -> bool:
    """Whether its class, and what runs for `forward`, come from torch or from a family that the rules were made for."""
    if "forward" in vars(module):
        return False
    # Looked up without asking the class, which may be one of TorchScript's.
    code = getattr(inspect.getattr_static(type(module), "forward", None), "__module__", "")
    return all(where.startswith(_KNOWN_CODE) for where in (f"{type(module).__module__}.", f"{code}."))


def _kind(module: nn.Module) -> Kind:
    if isinstance(module, nn.Linear):
        return "linear"
    if _is_transposed_linear(module):
        return "conv1d"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.MultiheadAttention):
        return "attention"
    if isinstance(module, _DROPOUTS):
        return "dropout"
    if type(module).__name__.endswith(_TOKEN_NORMS) or isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return "norm"
    return "other"


def _is_transposed_linear(module: nn.Module) -> bool:
    """GPT-2's linear layer, told by its form: a class Conv1D with `nf` and a weight (in, out)."""
    if type(module).__name__ != "Conv1D":
        return False
    width, weight = vars(module).get("nf"), dict(module.named_parameters(recurse=False)).get("weight")
    return weight is not None and weight.ndim == 2 and weight.shape[1] == width


def _sizes(module: nn.Module, kind: Kind) -> tuple[int | None, int | None]:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, nn.MultiheadAttention):
        return module.embed_dim, module.embed_dim
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if kind == "conv1d" and weight is not None:
        return weight.shape[0], weight.shape[1]
    return None, None


def _has_bias(module: nn.Module, own: Mapping[str, nn.Parameter]) -> bool:
    return "bias" in own or "in_proj_bias" in own


def _is_exact(module: nn.Module, kind: Kind, own: Mapping[str, nn.Parameter]) -> bool:
    """Whether the forward is the stock one, and uses its weight as it stands (no parametrization, no pruning)."""
    if "forward" in vars(module):
        return False
    match kind:
        case "linear":
            return type(module).forward is nn.Linear.forward and "weight" in own
        case "embedding":
            return type(module).forward is nn.Embedding.forward and "weight" in own
        case "attention":
            return type(module).forward is nn.MultiheadAttention.forward and bool(own)
        case "conv1d":
            # Its class is not known here; what is computed is checked where the layer is cut.
            return set(own) <= {"weight", "bias"}
    return True


def _options(module: nn.Module) -> tuple[str, ...]:
    if not isinstance(module, nn.Embedding):
        return ()
    options = {
        f"max_norm={module.max_norm}": module.max_norm is not None,
        "sparse=True": module.sparse,
        "scale_grad_by_freq=True": module.scale_grad_by_freq,
    }
    return tuple(words for words, given in options.items() if given)


def _numbers(module: nn.Module) -> dict[str, int]:
    """Plain whole numbers among its attributes; a bool is none."""
    return {name: value for name, value in vars(module).items() if type(value) is int and not name.startswith("_")}


def _model_plan(names: Mapping[nn.Module, list[str]]) -> dict[str, str] | None:
    """The plans of the outermost modules that bring one along, with the names that the whole model has."""
    found: dict[str, str] = {}
    holders: list[str] = []
    for module, fqns in names.items():
        if any(not holder or fqns[0].startswith(f"{holder}.") for holder in holders):
            continue
        plan = getattr(module, "_tp_plan", None) or getattr(module, "tp_plan", None)
        if isinstance(plan, Mapping) and plan:
            holders.append(fqns[0])
            prefix = f"{fqns[0]}." if fqns[0] else ""
            found.update({f"{prefix}{pattern}": str(style) for pattern, style in plan.items()})
    return found or None
