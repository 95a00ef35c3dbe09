"""Low-rank additions in PEFT's format, adapter_config.json and its tensors, and in ours.

transformers fuses some layers that litce keeps apart: queries, keys and values, or gate and up. PEFT has one addition
for such a layer, which is ours one below the other, A = [A_q; A_k; A_v], and side by side, B = diag(B_q, B_k, B_v). Its
rank is the sum of theirs, and its alpha grows with it, so that the scale stays.

What a key of adapter_config.json means is what `peft.LoraConfig` says (version 0.21).
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litce.args import UsageError
from litce.config import Config
from litce.hf_weights import Source, sources
from litce.model import GPT
from litce.peft.lora import TARGETS, LoRA, LoRALinear

TENSOR = re.compile(r"base_model\.model\.(.+)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?")
BASE_TENSOR = re.compile(r"base_model\.model\.(.+?)(?:\.base_layer)?\.weight")

# Modules that have another name in the files of the model, and had it in older versions of transformers.
RENAMED = {"embed_out": "lm_head"}

# Keys that say how the additions came to be, or repeat what their tensors say.
IGNORED = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
    *("megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("qalora_group_size", "runtime_config", "ensure_weight_tying"),
}
READ = {"peft_type", "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"}
# Values of keys that would change what is computed -> those that leave it. The other ways to draw the first weights
# change the weights that the additions belong to.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


def to_peft(
    config: Config, lora: LoRA, state: Mapping[str, Tensor], base_model: str | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content of adapter_config.json and the tensors of adapter_model.safetensors.

    Args:
        config: The model; its family says the names.
        lora: The method.
        state: Its parameters by name.
        base_model: Where transformers finds the model that they add to.

    Raises:
        UsageError: for DoRA on some of the layers that transformers has in one, as those without would have lengths.
    """
    layers = _layers(config)
    tensors: dict[str, Tensor] = {}
    targets: list[str] = []
    ranks: dict[str, int] = {}
    adapted = [module for module, layer in layers.items() if any(f"{name}.lora_A" in state for name in layer.names)]
    for kind, group in groupby(sorted(adapted, key=_kind), key=_kind):
        targets.append(_shortest(kind, layers))
        of_kind = {module: [name for name in layers[module].names if f"{name}.lora_A" in state] for module in group}
        # As they are when they come from one of PEFT's.
        shared = all(
            torch.equal(state[f"{names[0]}.lora_A"], state[f"{name}.lora_A"])
            for names in of_kind.values()
            for name in names
        )
        for module, names in of_kind.items():
            layer = layers[module]
            if lora.dora and len(names) < len(layer.names):
                missing = ", ".join(name for name in layer.names if name not in names)
                raise UsageError(
                    f"DoRA on {', '.join(names)} has no counterpart in PEFT: transformers has them in one layer "
                    f"{module} with {missing}, whose rows would get lengths too; merge it with litce merge_lora"
                )
            rank = lora.r if shared else lora.r * len(names)
            a, b = _join(layer, names, state, rank)
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = b
            if lora.dora:
                lengths = layer.join({name: state[f"{name}.lora_magnitude"] for name in names})
                tensors[f"base_model.model.{module}.lora_magnitude_vector"] = lengths.contiguous()
            if rank != lora.r:
                ranks[targets[-1]] = rank
    alphas = {target: lora.scaling * (math.sqrt(rank) if lora.rslora else rank) for target, rank in ranks.items()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "bias": "none",
        "r": lora.r,
        "lora_alpha": _number(lora.alpha),
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "target_modules": targets,
        "rank_pattern": ranks,
        "alpha_pattern": {target: _number(alpha) for target, alpha in alphas.items()},
        "fan_in_fan_out": config.family == "gpt2",  # the weights of its layers are (in, out)
    }, tensors


def from_peft(
    config: Config, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], base: Callable[[str], Tensor]
) -> tuple[LoRA, dict[str, Tensor]]:
    """The method and its parameters by name, in the wider of the dtypes of the additions and the model.

    A layer that has none where others of its kind do gets zeros, which change nothing.

    Args:
        config: The model; its family says the names.
        settings: The content of adapter_config.json.
        tensors: Those of adapter_model.safetensors.
        base: Gives the model's tensor of a name.

    Raises:
        UsageError: for what litce's LoRA lacks, and tensors that do not fit the model or the settings, naming them.
    """
    _check_settings(settings)
    layers = _layers(config)
    found = _by_module(config, layers, tensors, base)
    scales: dict[float, str] = {}
    parts: dict[str, _Part] = {}
    for module, pieces in found.items():
        rank, alpha = (_setting(settings, key, module) for key in ("r", "lora_alpha"))
        _check_shapes(module, layers[module], pieces, rank, bool(settings.get("use_dora")))
        scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        if not any(math.isclose(scale, other, rel_tol=1e-9) for other in scales):
            scales[scale] = module
        parts |= _split(layers[module], pieces)
    if len(scales) > 1:
        listed = ", ".join(f"{scale:g} in {module}" for scale, module in scales.items())
        raise UsageError(f"alpha / r differs between layers ({listed}); litce's LoRA has one for all")

    rank = max(part.a.size(0) for part in parts.values())
    (scale,) = scales
    rslora = bool(settings.get("use_rslora"))
    alpha = settings["lora_alpha"]
    if not math.isclose(alpha / (math.sqrt(rank) if rslora else rank), scale, rel_tol=1e-9):
        alpha = scale * (math.sqrt(rank) if rslora else rank)
    targets = {target: any(_is_target(name, target) for name in parts) for target in TARGETS}
    # The head takes no dropout, which acts in training alone.
    dropout = 0.0 if targets["head"] else float(settings.get("lora_dropout", 0.0))
    lora = LoRA(rank, float(alpha), dropout, rslora, bool(settings.get("use_dora")), **targets)

    dtypes = [base("transformer.wte.weight").dtype, *(tensor.dtype for tensor in tensors.values())]
    dtype = reduce(torch.promote_types, dtypes)
    with torch.device("meta"):
        model = GPT(config)
        lora.extend(model)
    state: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            part = parts.get(name) or _Part.nothing(module.in_features, module.out_features)
            more = rank - part.a.size(0)
            state[f"{name}.lora_A"] = F.pad(part.a, (0, 0, 0, more)).to(dtype)
            state[f"{name}.lora_B"] = F.pad(part.b, (0, more)).to(dtype)
            if lora.dora:
                lengths = part.lengths
                if lengths is None:
                    weight = base(f"{name}.weight")
                    lengths = torch.linalg.vector_norm(weight.to(torch.promote_types(weight.dtype, dtype)), dim=1)
                state[f"{name}.lora_magnitude"] = lengths.to(dtype).contiguous()
    return lora, {name: tensor.contiguous() for name, tensor in state.items()}


@dataclass(frozen=True)
class _Part:
    """The addition to one of our layers: A (r, D), B (V, r), and with DoRA the lengths (V,)."""

    a: Tensor
    b: Tensor
    lengths: Tensor | None

    @classmethod
    def nothing(cls, in_features: int, out_features: int) -> "_Part":
        return cls(torch.zeros(0, in_features), torch.zeros(out_features, 0), None)


def _layers(config: Config) -> dict[str, Source]:
    """Linear layers by their names in transformers; names of ours are those of layers too, as in `TARGETS`."""
    untied = replace(config, tie_embeddings=False)
    with torch.device("meta"):
        linear = {name for name, module in GPT(untied).named_modules() if isinstance(module, nn.Linear)}
    found = {}
    for name, source in sources(untied).items():
        module, _, parameter = name.rpartition(".")
        ours = tuple(part.rpartition(".")[0] for part in source.names)
        if parameter == "weight" and linear.issuperset(ours):
            # A and B are those of a linear layer, also where the weight that they add to is transposed.
            found[RENAMED.get(module, module)] = replace(source, names=ours, transposed=False)
    return found


def _join(layer: Source, names: list[str], state: Mapping[str, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """A (rank, D) and B (V, rank) of the layer that holds `names` and maybe others."""
    a = [state[f"{name}.lora_A"] for name in names]
    shared = rank == a[0].size(0)
    blocks = {}
    for name, shape in zip(layer.names, layer.shapes, strict=True):
        if name not in names:
            blocks[name] = a[0].new_zeros(shape[0], rank)
            continue
        b = state[f"{name}.lora_B"]
        before = 0 if shared else names.index(name) * b.size(1)
        blocks[name] = F.pad(b, (before, rank - before - b.size(1)))
    return (a[0] if shared else torch.cat(a)).contiguous(), layer.join(blocks).contiguous()


def _split(layer: Source, pieces: Mapping[str, Tensor]) -> dict[str, _Part]:
    """The additions to ours by name. Columns of B that are zero for one of several fused layers add nothing to it."""
    a, b = pieces["lora_A"], pieces["lora_B"]
    lengths = layer.split(pieces["lora_magnitude_vector"]) if "lora_magnitude_vector" in pieces else {}
    parts = {}
    for name, rows in layer.split(b).items():
        used = rows.ne(0).any(dim=0)
        if len(layer.names) == 1 or not b.any():
            used = torch.ones_like(used)
        if used.any() or lengths:
            parts[name] = _Part(a[used], rows[:, used], lengths.get(name))
    return parts


def _by_module(
    config: Config, layers: Mapping[str, Source], tensors: Mapping[str, Tensor], base: Callable[[str], Tensor]
) -> dict[str, dict[str, Tensor]]:
    """The tensors of each layer of transformers, by lora_A, lora_B, lora_magnitude_vector."""
    found: dict[str, dict[str, Tensor]] = {}
    unknown = []
    weights = {
        RENAMED.get(name.removesuffix(".weight"), name.removesuffix(".weight")): source
        for name, source in sources(replace(config, tie_embeddings=False)).items()
    }
    for name, tensor in tensors.items():
        if (match := TENSOR.fullmatch(name)) and (module := RENAMED.get(match[1], match[1])) in layers:
            found.setdefault(module, {})[match[2]] = tensor
        elif (match := BASE_TENSOR.fullmatch(name)) and (module := RENAMED.get(match[1], match[1])) in weights:
            # PEFT adds the embedding, and the head that has additions.
            source = weights[module]
            ours = source.join({part: base(part) for part in source.names})
            if ours.shape != tensor.shape or not torch.equal(ours.to(tensor.dtype), tensor):
                raise UsageError(f"{name} is not that of the checkpoint; litce's LoRA leaves it as it is")
        else:
            unknown.append(name)
    if unknown or not found:
        listed = ", ".join(sorted(unknown)[:8]) or "nothing"
        raise UsageError(f"litce's LoRA for a model of {config.family} has no place for {listed}")
    return found


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raise `UsageError` for what would change what the additions compute, and is not known here."""
    if settings.get("peft_type") != "LORA":
        raise UsageError(f"peft_type {settings.get('peft_type')!r} is not supported; only LORA is")
    for key, value in settings.items():
        if key in IGNORED or key in READ or value in HARMLESS.get(key, (None, False, [], {})):
            continue
        raise UsageError(f"{key} {value!r} is not supported; only a LoRA without it is")
    numbers: dict[str, Any] = {key: settings.get(key) for key in ("r", "lora_alpha")}
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = settings.get(key) or {}
        if not isinstance(patterns, dict):
            raise UsageError(f"{key} {patterns!r} is no mapping from layers to numbers")
        numbers |= {f"{key} of {name}": value for name, value in patterns.items()}
    for name, value in numbers.items():
        if type(value) not in (int, float) or not value > 0:
            raise UsageError(f"{name} {value!r} is no positive number")
    dropout = settings.get("lora_dropout", 0.0)
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        raise UsageError(f"lora_dropout {dropout!r} is not from 0 to below 1")


def _setting(settings: Mapping[str, Any], key: str, module: str) -> float:
    """`r` or `lora_alpha` of a layer, found as `peft.utils.other.get_pattern_key` does."""
    patterns = settings.get("rank_pattern" if key == "r" else "alpha_pattern") or {}
    for name, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({name})$", module):
                return value
        except re.error as error:
            raise UsageError(f"the pattern {name!r} of {key} is no regular expression ({error})") from error
    return settings[key]


def _check_shapes(module: str, layer: Source, pieces: Mapping[str, Tensor], rank: float, dora: bool) -> None:
    out_features, in_features = layer.shape
    wanted: dict[str, tuple[float, ...]] = {"lora_A": (rank, in_features), "lora_B": (out_features, rank)}
    if dora:
        wanted["lora_magnitude_vector"] = (out_features,)
    shapes = {piece: tuple(tensor.shape) for piece, tensor in pieces.items()}
    if shapes != wanted:
        raise UsageError(f"{module} has {shapes}, which the checkpoint and adapter_config.json say is {wanted}")


def _is_target(name: str, target: str) -> bool:
    return re.fullmatch(f".*(?:{TARGETS[target]})", name) is not None


def _kind(module: str) -> str:
    """The name within a layer, such as self_attn.q_proj, which all layers share."""
    return re.sub(r"^.*?\.\d+\.", "", module)


def _shortest(kind: str, layers: Mapping[str, Source]) -> str:
    """The last word of `kind` if no other kind ends in it."""
    last = kind.rpartition(".")[-1]
    return last if sum(other.rpartition(".")[-1] == last for other in {_kind(name) for name in layers}) == 1 else kind


def _number(value: float) -> float:
    """An int where it is one, as PEFT has them."""
    return int(value) if float(value).is_integer() else value
