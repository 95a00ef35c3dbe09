"""`config.json` of Hugging Face's model families as fields of :class:`litce.config.Config`, and back.

What a key means, and its value when absent, is what the family's configuration class in `transformers` says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from litce.args import UsageError

REQUIRED = object()

# Fields that no config.json has a word for: `vocab_size` is less than its rows where a tokenizer says so.
UNSAID = ("name", "family", "vocab_size", "fp32_head")

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
GATED_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "gelu_fast": "geglu_tanh",
}


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers."""

    architecture: str
    """The class with a language-model head."""
    keys: Mapping[str, tuple[str, Any]]
    """Field -> key of the same value in config.json, and the value where that is absent."""
    fixed: Mapping[str, Any]
    """Fields that every model of the family shares."""
    activation: tuple[str, Mapping[str, str], str]
    """Key of the activation, its values -> field `mlp`, and the value where it is absent."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of features that litce lacks -> the values, None for absent, that leave them off."""
    rope_theta: float = 10000.0
    """Base of the rotary wavelengths where config.json names none."""
    window: str | None = None
    """How config.json says which layers have a sliding window: "all" of them, or by their "types"."""


_SIZES = {
    "padded_vocab_size": ("vocab_size", REQUIRED),
    "n_embd": ("hidden_size", REQUIRED),
    "n_layer": ("num_hidden_layers", REQUIRED),
    "n_head": ("num_attention_heads", REQUIRED),
    "intermediate_size": ("intermediate_size", REQUIRED),
    "block_size": ("max_position_embeddings", REQUIRED),
}
_LLAMA_KEYS: dict[str, tuple[str, Any]] = {
    **_SIZES,
    "n_query_groups": ("num_key_value_heads", None),
    "head_size": ("head_dim", None),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tie_embeddings": ("tie_word_embeddings", False),
}
_LLAMA_FIXED = {"positions": "rope", "norm": "rmsnorm", "bias": False}
_SILU = ("hidden_act", GATED_ACTIVATIONS, "silu")
_BIAS = {"bias": ("attention_bias", False)}
_FULL_ROTATION = {"partial_rotary_factor": (None, 1.0)}
_GEMMA_KEYS = {
    **_LLAMA_KEYS,
    **_BIAS,
    "head_size": ("head_dim", 256),
    "n_query_groups": ("num_key_value_heads", 4),
    "tie_embeddings": ("tie_word_embeddings", True),
    "query_pre_attn_scalar": ("query_pre_attn_scalar", 256),
}
_GEMMA_FIXED = {
    **_LLAMA_FIXED,
    "norm": "rmsnorm_unit_offset",
    "mlp_bias": False,
    "post_norms": True,
    "scale_embeddings": True,
}
_GELU_TANH = ("hidden_activation", GATED_ACTIVATIONS, "gelu_pytorch_tanh")
_CAUSAL = {**_FULL_ROTATION, "use_bidirectional_attention": (None, False)}

FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {
            "padded_vocab_size": ("vocab_size", REQUIRED),
            "n_embd": ("n_embd", REQUIRED),
            "n_layer": ("n_layer", REQUIRED),
            "n_head": ("n_head", REQUIRED),
            "intermediate_size": ("n_inner", None),
            "block_size": ("n_positions", 1024),
            "norm_eps": ("layer_norm_epsilon", 1e-5),
            "tie_embeddings": ("tie_word_embeddings", True),
        },
        {"positions": "learned", "norm": "layernorm", "bias": True},
        ("activation_function", ACTIVATIONS, "gelu_new"),
        only={
            "scale_attn_weights": (None, True),
            "scale_attn_by_inverse_layer_idx": (None, False),
            "add_cross_attention": (None, False),
        },
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        {
            **_SIZES,
            "norm_eps": ("layer_norm_eps", 1e-5),
            "tie_embeddings": ("tie_word_embeddings", False),
            "bias": ("attention_bias", True),
            "parallel_residual": ("use_parallel_residual", True),
        },
        {"positions": "rope", "norm": "layernorm", "mlp_bias": True},
        ("hidden_act", ACTIVATIONS, "gelu"),
    ),
    "llama": Family(
        "LlamaForCausalLM",
        {**_LLAMA_KEYS, **_BIAS, "mlp_bias": ("mlp_bias", False)},
        {"positions": "rope", "norm": "rmsnorm"},
        _SILU,
        only=_FULL_ROTATION,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {**_LLAMA_KEYS, "n_query_groups": ("num_key_value_heads", 8), "sliding_window": ("sliding_window", 4096)},
        _LLAMA_FIXED,
        _SILU,
        only={**_FULL_ROTATION, "layer_types": (None,)},
        window="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {**_LLAMA_KEYS, "n_query_groups": ("num_key_value_heads", 32), "sliding_window": ("sliding_window", 4096)},
        {**_LLAMA_FIXED, "qkv_bias": True},
        _SILU,
        only=_FULL_ROTATION,
        window="types",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {
            **_LLAMA_KEYS,
            **_BIAS,
            "n_query_groups": ("num_key_value_heads", 32),
            "head_size": ("head_dim", 128),
            "sliding_window": ("sliding_window", 4096),
        },
        {"positions": "rope", "norm": "rmsnorm", "mlp_bias": False, "qk_norm": True},
        _SILU,
        only=_FULL_ROTATION,
        window="types",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {**_LLAMA_KEYS, "norm_eps": ("rms_norm_eps", 1e-5), "sliding_window": ("sliding_window", None)},
        _LLAMA_FIXED,
        _SILU,
        window="all",
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            **_GEMMA_KEYS,
            "sliding_window": ("sliding_window", 4096),
            "attention_softcap": ("attn_logit_softcapping", 50.0),
            "logit_softcap": ("final_logit_softcapping", 30.0),
        },
        _GEMMA_FIXED,
        _GELU_TANH,
        only=_CAUSAL,
        window="types",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            **_GEMMA_KEYS,
            "sliding_window": ("sliding_window", 4096),
            "logit_softcap": ("final_logit_softcapping", None),
        },
        {**_GEMMA_FIXED, "qk_norm": True},
        _GELU_TANH,
        # transformers reads this key of Gemma 3 and then ignores it.
        only={**_CAUSAL, "attn_logit_softcapping": (None,)},
        rope_theta=1000000.0,
        window="types",
    ),
}


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `litce.config.Config` that a `config.json` describes, `vocab_size` being the number of rows.

    Raises:
        UsageError: if the family or one of its features is not supported, naming it.
    """
    name = config.get("model_type")
    if name not in FAMILIES:
        raise UsageError(f"config.json: model_type {name!r} is not supported; choose {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    for key, allowed in {**family.only, "quantization_config": (None,)}.items():
        if config.get(key) not in allowed:
            raise UsageError(f"config.json: {key} {config[key]!r} is not supported for {name}; {_way_out(allowed)}")
    fields: dict[str, Any] = {"family": name, **family.fixed}
    for ours, (key, default) in family.keys.items():
        fields[ours] = config.get(key, default)
        if fields[ours] is REQUIRED:
            raise UsageError(f"config.json: holds no {key}, which a model of {name} needs")
    fields["vocab_size"] = fields["padded_vocab_size"]
    key, kinds, default = family.activation
    activation = config.get(key, default)
    if activation not in kinds:
        raise UsageError(f"config.json: {key} {activation!r} is not supported for {name}; choose {', '.join(kinds)}")
    fields["mlp"] = kinds[activation]
    if family.window == "types":
        fields |= _read_layer_types(config, name, fields)
    if fields["positions"] == "rope":
        fields |= _read_rope(config, name, fields)
    return fields


def write(fields: Mapping[str, Any], family_name: str) -> dict[str, Any]:
    """A `config.json` of the family with what it can say of a Config's `fields`; transformers 4 reads its keys too."""
    family = FAMILIES[family_name]
    key, kinds, default = family.activation
    activation = next((name for name in (default, *kinds) if kinds[name] == fields["mlp"]), default)
    config: dict[str, Any] = {"model_type": family_name, "architectures": [family.architecture], key: activation}
    config |= {key: fields[ours] for ours, (key, _) in family.keys.items()}
    pattern = fields["sliding_window_pattern"] or [True]
    windowed = [fields["sliding_window"] is not None and pattern[i % len(pattern)] for i in range(fields["n_layer"])]
    if family.window == "types":
        config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in windowed]
        if family_name in ("qwen2", "qwen3"):
            config["use_sliding_window"] = any(windowed)
    if fields["positions"] == "rope":
        scaling = fields["rope_scaling"] and {key: value for key, value in fields["rope_scaling"].items() if value}
        if scaling and "original_max_seq_len" in scaling:
            scaling["original_max_position_embeddings"] = scaling.pop("original_max_seq_len")
        config |= {"rope_theta": fields["rope_base"], "rope_scaling": scaling or None}
        if family_name == "gpt_neox":
            config |= {"rotary_emb_base": config.pop("rope_theta"), "rotary_pct": fields["rotary_percentage"]}
        elif family_name == "phi3":
            config["partial_rotary_factor"] = fields["rotary_percentage"]
        elif family_name == "gemma3_text":
            config["rope_local_base_freq"] = fields["rope_local_base"]
    return config


def _way_out(allowed: tuple[Any, ...]) -> str:
    values = [str(value).lower() for value in allowed if value is not None]
    return f"only {' or '.join(values)} is" if values else "only a model without it is"


def _read_layer_types(config: Mapping[str, Any], name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, window = fields["n_layer"], fields["sliding_window"]
    if name in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        window = None
    types = config.get("layer_types")
    if types is None:
        if name == "gemma2":
            slides = [i % 2 == 0 for i in range(num_layers)]
        elif name == "gemma3_text":
            slides = [bool((i + 1) % config.get("sliding_window_pattern", 6)) for i in range(num_layers)]
        else:
            slides = [window is not None and i >= config.get("max_window_layers", 28) for i in range(num_layers)]
    else:
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise UsageError(f"config.json: layer_types {', '.join(unknown)} are not supported")
        if len(types) != num_layers:
            raise UsageError(f"config.json: layer_types names {len(types)} layers, of {num_layers}")
        slides = [kind == "sliding_attention" for kind in types]
    if not any(slides):
        return {"sliding_window": None, "sliding_window_pattern": None}
    if window is None:
        raise UsageError("config.json: layer_types has sliding_attention, and sliding_window gives it no size")
    period = next(p for p in range(1, num_layers + 1) if all(slides[i] == slides[i % p] for i in range(num_layers)))
    return {"sliding_window": window, "sliding_window_pattern": None if all(slides) else slides[:period]}


def _read_rope(config: Mapping[str, Any], name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    theta_key, share_key = (
        ("rotary_emb_base", "rotary_pct") if name == "gpt_neox" else ("rope_theta", "partial_rotary_factor")
    )
    theta = config.get(theta_key, FAMILIES[name].rope_theta)
    share = config.get(share_key, 0.25 if name == "gpt_neox" else 1.0)
    # transformers 4 had a key for the base and rope_scaling for the rest, which is absent from most files.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    local: Mapping[str, Any] = {}
    if name == "gemma3_text":
        layered = config.get("rope_parameters") or {}
        rope = {**(layered.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
        local = {"rope_theta": config.get("rope_local_base_freq", 10000.0), **(layered.get("sliding_attention") or {})}
        if local.get("rope_type", "default") != "default":
            raise UsageError(f"config.json: rope_type {local['rope_type']!r} of sliding_attention is not supported")
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and "partial_rotary_factor" in FAMILIES[name].only:
        raise UsageError(
            f"config.json: partial_rotary_factor {rope['partial_rotary_factor']} is not supported for {name}"
        )
    result = {
        "rope_base": rope.get("rope_theta", theta),
        "rotary_percentage": rope.get("partial_rotary_factor", share),
        "rope_scaling": _read_scaling(config, rope),
    }
    if local and fields["sliding_window"] is not None:
        result["rope_local_base"] = local["rope_theta"]
    return result


def _read_scaling(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise UsageError(
            f"config.json: rope_scaling of type {kind!r} is not supported; only default, linear and llama3 are"
        )
    names = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    missing = [key for key in names if key not in rope]
    if missing:
        raise UsageError(f"config.json: rope_scaling of type {kind!r} holds no {', '.join(missing)}")
    scaling = {"rope_type": kind, **{key: rope[key] for key in names}}
    if kind == "llama3":
        original = rope.get("original_max_position_embeddings", config.get("max_position_embeddings"))
        scaling["original_max_seq_len"] = config.get("original_max_position_embeddings", original)
    return scaling
