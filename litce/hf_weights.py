"""Which tensors of a Hugging Face model hold which of ours, and how: names, fused layers and transposed ones."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from litce.args import UsageError
from litce.config import Config
from litce.model import GPT

Modules = Mapping[str, str | tuple[str, ...]]

_LLAMA: Modules = {
    "model.embed_tokens": "transformer.wte",
    "model.layers.{}.input_layernorm": "transformer.h.{}.norm_1",
    "model.layers.{}.self_attn.q_proj": "transformer.h.{}.attn.q",
    "model.layers.{}.self_attn.k_proj": "transformer.h.{}.attn.k",
    "model.layers.{}.self_attn.v_proj": "transformer.h.{}.attn.v",
    "model.layers.{}.self_attn.q_norm": "transformer.h.{}.attn.norm_q",
    "model.layers.{}.self_attn.k_norm": "transformer.h.{}.attn.norm_k",
    "model.layers.{}.self_attn.o_proj": "transformer.h.{}.attn.proj",
    "model.layers.{}.post_attention_layernorm": "transformer.h.{}.norm_2",
    "model.layers.{}.mlp.gate_proj": "transformer.h.{}.mlp.gate",
    "model.layers.{}.mlp.up_proj": "transformer.h.{}.mlp.up",
    "model.layers.{}.mlp.down_proj": "transformer.h.{}.mlp.down",
    "model.norm": "transformer.ln_f",
    "lm_head": "lm_head",
}
_GEMMA: Modules = {
    **_LLAMA,
    "model.layers.{}.post_attention_layernorm": "transformer.h.{}.post_norm_1",
    "model.layers.{}.pre_feedforward_layernorm": "transformer.h.{}.norm_2",
    "model.layers.{}.post_feedforward_layernorm": "transformer.h.{}.post_norm_2",
}
_FUSED = re.compile(r"self_attn\.[qkv]_proj$|mlp\.(gate|up)_proj$")
_QKV = ("transformer.h.{}.attn.q", "transformer.h.{}.attn.k", "transformer.h.{}.attn.v")

# Module of transformers -> the module, or the modules fused in it. Parts that a model lacks are left out.
MODULES: Mapping[str, Modules] = {
    "gpt2": {
        "transformer.wte": "transformer.wte",
        "transformer.wpe": "transformer.wpe",
        "transformer.h.{}.ln_1": "transformer.h.{}.norm_1",
        "transformer.h.{}.attn.c_attn": _QKV,
        "transformer.h.{}.attn.c_proj": "transformer.h.{}.attn.proj",
        "transformer.h.{}.ln_2": "transformer.h.{}.norm_2",
        "transformer.h.{}.mlp.c_fc": "transformer.h.{}.mlp.up",
        "transformer.h.{}.mlp.c_proj": "transformer.h.{}.mlp.down",
        "transformer.ln_f": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    "gpt_neox": {
        "gpt_neox.embed_in": "transformer.wte",
        "gpt_neox.layers.{}.input_layernorm": "transformer.h.{}.norm_1",
        "gpt_neox.layers.{}.attention.query_key_value": _QKV,
        "gpt_neox.layers.{}.attention.dense": "transformer.h.{}.attn.proj",
        "gpt_neox.layers.{}.post_attention_layernorm": "transformer.h.{}.norm_2",
        "gpt_neox.layers.{}.mlp.dense_h_to_4h": "transformer.h.{}.mlp.up",
        "gpt_neox.layers.{}.mlp.dense_4h_to_h": "transformer.h.{}.mlp.down",
        "gpt_neox.final_layer_norm": "transformer.ln_f",
        "embed_out": "lm_head",
    },
    "phi3": {
        **{name: ours for name, ours in _LLAMA.items() if not _FUSED.search(name)},
        "model.layers.{}.self_attn.qkv_proj": _QKV,
        "model.layers.{}.mlp.gate_up_proj": ("transformer.h.{}.mlp.gate", "transformer.h.{}.mlp.up"),
    },
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
}

# Constants that older versions saved as buffers: causal masks and rotary frequencies.
CONSTANTS = re.compile(r"(\.attn|\.attention)\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Source:
    """Where a tensor of transformers comes from: tensors of ours, one after the other along the first dimension."""

    names: tuple[str, ...]
    """Ours; queries, keys and values, or gate and up, where they are fused."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of ours."""
    num_heads: int | None = None
    """GPT-NeoX: not q, k, v of the whole, but of one head after the other; the number of heads."""
    transposed: bool = False
    """GPT-2: weights are (in, out)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor of transformers."""
        joined = (sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])
        return joined[::-1] if self.transposed else joined

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Ours by name, views of `tensor`, which has the shape `shape`."""
        if self.transposed:
            tensor = tensor.t()
        if self.num_heads is not None:
            by_head = tensor.unflatten(0, (self.num_heads, len(self.names), -1))
            return {name: by_head[:, i].flatten(0, 1) for i, name in enumerate(self.names)}
        return dict(zip(self.names, tensor.split([shape[0] for shape in self.shapes]), strict=True))

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The tensor of transformers, from all of ours by name."""
        parts = [tensors[name] for name in self.names]
        if self.num_heads is not None:
            by_head = [part.unflatten(0, (self.num_heads, -1)) for part in parts]
            return torch.stack(by_head, dim=1).flatten(0, 2)
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.t() if self.transposed else joined


def sources(config: Config) -> dict[str, Source]:
    """Every tensor of transformers' model of `config.family`, by name, in the order of its layers.

    A tied head is in neither model's files.

    Raises:
        UsageError: if `config.family` is None.
    """
    if config.family is None:
        raise UsageError("family: give the model_type whose names to use, such as llama")
    with torch.device("meta"):
        ours = {name: tuple(tensor.shape) for name, tensor in GPT(config).state_dict().items()}
    found = {}
    for module, of_ours in MODULES[config.family].items():
        modules = (of_ours,) if isinstance(of_ours, str) else of_ours
        for layer in range(config.n_layer if "{}" in module else 1):
            for parameter in ("weight", "bias"):
                names = tuple(f"{name.format(layer)}.{parameter}" for name in modules)
                if names[0] in ours:
                    found[f"{module.format(layer)}.{parameter}"] = Source(
                        names,
                        tuple(ours[name] for name in names),
                        num_heads=config.n_head if module.endswith("query_key_value") else None,
                        transposed=config.family == "gpt2"
                        and parameter == "weight"
                        and module.endswith(("c_attn", "c_proj", "c_fc")),
                    )
    named = [name for source in found.values() for name in source.names]
    assert sorted(named) == sorted(ours), set(named) ^ set(ours)
    return found
