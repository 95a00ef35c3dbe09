"""Hyperparameters of the named models: data only, as their authors published them.

Each entry holds the fields of :class:`litce.config.Config` that differ from its defaults.
"""

from typing import Any

_GPT2: dict[str, Any] = {"family": "gpt2"}

_PYTHIA: dict[str, Any] = {
    "family": "gpt_neox",
    "block_size": 2048,
    # The tokenizer uses fewer ids; this is the number of rows the published weights have.
    "vocab_size": 50304,
    "mlp": "gelu",
    "positions": "rope",
    "rotary_percentage": 0.25,
    "parallel_residual": True,
    "tie_embeddings": False,
}

_LLAMA: dict[str, Any] = {"family": "llama", "bias": False, "norm": "rmsnorm", "mlp": "swiglu", "positions": "rope"}
_LLAMA2: dict[str, Any] = {**_LLAMA, "block_size": 4096, "vocab_size": 32000, "tie_embeddings": False}
_LLAMA3: dict[str, Any] = {
    **_LLAMA,
    "block_size": 8192,
    "vocab_size": 128256,
    "n_query_groups": 8,
    "rope_base": 500000.0,
    "tie_embeddings": False,
}
_STRETCH = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
_LLAMA31: dict[str, Any] = {**_LLAMA3, "block_size": 131072, "rope_scaling": {"factor": 8.0, **_STRETCH}}
_LLAMA32: dict[str, Any] = {**_LLAMA31, "rope_scaling": {"factor": 32.0, **_STRETCH}, "tie_embeddings": True}

_SMOLLM2: dict[str, Any] = {**_LLAMA, "block_size": 8192, "vocab_size": 49152}

_MISTRAL: dict[str, Any] = {
    **_LLAMA,
    "family": "mistral",
    "block_size": 32768,
    "n_layer": 32,
    "n_head": 32,
    "n_embd": 4096,
    "n_query_groups": 8,
    "intermediate_size": 14336,
    "tie_embeddings": False,
}

_QWEN2: dict[str, Any] = {
    **_LLAMA,
    "family": "qwen2",
    "block_size": 131072,
    "vocab_size": 151936,
    "qkv_bias": True,
    "norm_eps": 1e-6,
    "rope_base": 1000000.0,
}
_QWEN2_LARGE: dict[str, Any] = {**_QWEN2, "vocab_size": 152064, "tie_embeddings": False}
_QWEN3: dict[str, Any] = {
    **_QWEN2,
    "family": "qwen3",
    "block_size": 40960,
    "qkv_bias": False,
    "qk_norm": True,
    "head_size": 128,
    "n_query_groups": 8,
}

_PHI3: dict[str, Any] = {
    **_LLAMA,
    "family": "phi3",
    "block_size": 4096,
    "vocab_size": 32064,
    "sliding_window": 2047,
    "tie_embeddings": False,
}

_GEMMA: dict[str, Any] = {
    **_LLAMA,
    "norm": "rmsnorm_unit_offset",
    "norm_eps": 1e-6,
    "mlp": "geglu_tanh",
    "post_norms": True,
    "scale_embeddings": True,
    "head_size": 256,
}
_GEMMA2: dict[str, Any] = {
    **_GEMMA,
    "family": "gemma2",
    "block_size": 8192,
    "vocab_size": 256000,
    "sliding_window": 4096,
    "sliding_window_pattern": [True, False],
    "attention_softcap": 50.0,
    "logit_softcap": 30.0,
}
_GEMMA3: dict[str, Any] = {
    **_GEMMA,
    "family": "gemma3_text",
    "block_size": 32768,
    "vocab_size": 262144,
    "n_query_groups": 1,
    "qk_norm": True,
    "rope_base": 1000000.0,
    "rope_local_base": 10000.0,
    "sliding_window": 512,
    "sliding_window_pattern": [True, True, True, True, True, False],
}

MODEL_CONFIGS: dict[str, dict[str, Any]] = {
    # Small enough to learn something in minutes on a CPU, with a vocabulary whose logits dominate its memory.
    "demo": {"block_size": 256, "vocab_size": 16384, "n_layer": 4, "n_head": 4, "n_embd": 256},
    # https://github.com/openai/gpt-2
    "gpt2": {**_GPT2, "n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-medium": {**_GPT2, "n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-large": {**_GPT2, "n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-xl": {**_GPT2, "n_layer": 48, "n_head": 25, "n_embd": 1600},
    # https://github.com/EleutherAI/pythia
    "pythia-14m": {**_PYTHIA, "block_size": 512, "n_layer": 6, "n_head": 4, "n_embd": 128},
    "pythia-31m": {**_PYTHIA, "n_layer": 6, "n_head": 8, "n_embd": 256},
    "pythia-70m": {**_PYTHIA, "n_layer": 6, "n_head": 8, "n_embd": 512},
    "pythia-160m": {**_PYTHIA, "n_layer": 12, "n_head": 12, "n_embd": 768},
    "pythia-410m": {**_PYTHIA, "n_layer": 24, "n_head": 16, "n_embd": 1024},
    "pythia-1b": {**_PYTHIA, "n_layer": 16, "n_head": 8, "n_embd": 2048},
    "pythia-1.4b": {**_PYTHIA, "n_layer": 24, "n_head": 16, "n_embd": 2048},
    "pythia-2.8b": {**_PYTHIA, "n_layer": 32, "n_head": 32, "n_embd": 2560},
    "pythia-6.9b": {**_PYTHIA, "vocab_size": 50432, "n_layer": 32, "n_head": 32, "n_embd": 4096},
    "pythia-12b": {**_PYTHIA, "vocab_size": 50688, "n_layer": 36, "n_head": 40, "n_embd": 5120},
    # https://huggingface.co/meta-llama
    "Llama-2-7b": {**_LLAMA2, "n_layer": 32, "n_head": 32, "n_embd": 4096, "intermediate_size": 11008},
    "Llama-2-13b": {**_LLAMA2, "n_layer": 40, "n_head": 40, "n_embd": 5120, "intermediate_size": 13824},
    "Llama-2-70b": {
        **_LLAMA2,
        "n_layer": 80,
        "n_head": 64,
        "n_embd": 8192,
        "n_query_groups": 8,
        "intermediate_size": 28672,
    },
    "Llama-3-8B": {**_LLAMA3, "n_layer": 32, "n_head": 32, "n_embd": 4096, "intermediate_size": 14336},
    "Llama-3-70B": {**_LLAMA3, "n_layer": 80, "n_head": 64, "n_embd": 8192, "intermediate_size": 28672},
    "Llama-3.1-8B": {
        **_LLAMA31,
        "n_layer": 32,
        "n_head": 32,
        "n_embd": 4096,
        "intermediate_size": 14336,
    },
    "Llama-3.1-70B": {
        **_LLAMA31,
        "n_layer": 80,
        "n_head": 64,
        "n_embd": 8192,
        "intermediate_size": 28672,
    },
    "Llama-3.2-1B": {
        **_LLAMA32,
        "n_layer": 16,
        "n_head": 32,
        "n_embd": 2048,
        "intermediate_size": 8192,
    },
    "Llama-3.2-3B": {
        **_LLAMA32,
        "n_layer": 28,
        "n_head": 24,
        "n_embd": 3072,
        "intermediate_size": 8192,
    },
    "Llama-3.3-70B-Instruct": {
        **_LLAMA31,
        "n_layer": 80,
        "n_head": 64,
        "n_embd": 8192,
        "intermediate_size": 28672,
    },
    # https://huggingface.co/collections/HuggingFaceTB/smollm2
    "SmolLM2-135M": {
        **_SMOLLM2,
        "n_layer": 30,
        "n_head": 9,
        "n_embd": 576,
        "n_query_groups": 3,
        "intermediate_size": 1536,
        "rope_base": 100000.0,
    },
    "SmolLM2-360M": {
        **_SMOLLM2,
        "n_layer": 32,
        "n_head": 15,
        "n_embd": 960,
        "n_query_groups": 5,
        "intermediate_size": 2560,
        "rope_base": 100000.0,
    },
    "SmolLM2-1.7B": {
        **_SMOLLM2,
        "n_layer": 24,
        "n_head": 32,
        "n_embd": 2048,
        "intermediate_size": 8192,
        "rope_base": 130000.0,
    },
    # https://huggingface.co/TinyLlama/TinyLlama_v1.1
    "TinyLlama-1.1B": {
        **_LLAMA2,
        "block_size": 2048,
        "n_layer": 22,
        "n_head": 32,
        "n_embd": 2048,
        "n_query_groups": 4,
        "intermediate_size": 5632,
    },
    # https://huggingface.co/mistralai
    "Mistral-7B-v0.1": {**_MISTRAL, "vocab_size": 32000, "sliding_window": 4096},
    "Mistral-7B-v0.3": {**_MISTRAL, "vocab_size": 32768, "rope_base": 1000000.0},
    # https://huggingface.co/Qwen
    "Qwen2.5-0.5B": {
        **_QWEN2,
        "block_size": 32768,
        "n_layer": 24,
        "n_head": 14,
        "n_embd": 896,
        "n_query_groups": 2,
        "intermediate_size": 4864,
    },
    "Qwen2.5-1.5B": {
        **_QWEN2,
        "n_layer": 28,
        "n_head": 12,
        "n_embd": 1536,
        "n_query_groups": 2,
        "intermediate_size": 8960,
    },
    "Qwen2.5-3B": {
        **_QWEN2,
        "block_size": 32768,
        "n_layer": 36,
        "n_head": 16,
        "n_embd": 2048,
        "n_query_groups": 2,
        "intermediate_size": 11008,
    },
    "Qwen2.5-7B": {
        **_QWEN2_LARGE,
        "n_layer": 28,
        "n_head": 28,
        "n_embd": 3584,
        "n_query_groups": 4,
        "intermediate_size": 18944,
    },
    "Qwen2.5-14B": {
        **_QWEN2_LARGE,
        "n_layer": 48,
        "n_head": 40,
        "n_embd": 5120,
        "n_query_groups": 8,
        "intermediate_size": 13824,
        "norm_eps": 1e-05,
    },
    "Qwen2.5-32B": {
        **_QWEN2_LARGE,
        "n_layer": 64,
        "n_head": 40,
        "n_embd": 5120,
        "n_query_groups": 8,
        "intermediate_size": 27648,
        "norm_eps": 1e-05,
    },
    "Qwen2.5-72B": {
        **_QWEN2_LARGE,
        "n_layer": 80,
        "n_head": 64,
        "n_embd": 8192,
        "n_query_groups": 8,
        "intermediate_size": 29568,
        "norm_eps": 1e-05,
    },
    "Qwen3-0.6B": {**_QWEN3, "n_layer": 28, "n_head": 16, "n_embd": 1024, "intermediate_size": 3072},
    "Qwen3-1.7B": {**_QWEN3, "n_layer": 28, "n_head": 16, "n_embd": 2048, "intermediate_size": 6144},
    "Qwen3-4B": {**_QWEN3, "n_layer": 36, "n_head": 32, "n_embd": 2560, "intermediate_size": 9728},
    "Qwen3-8B": {
        **_QWEN3,
        "n_layer": 36,
        "n_head": 32,
        "n_embd": 4096,
        "intermediate_size": 12288,
        "tie_embeddings": False,
    },
    "Qwen3-14B": {
        **_QWEN3,
        "n_layer": 40,
        "n_head": 40,
        "n_embd": 5120,
        "intermediate_size": 17408,
        "tie_embeddings": False,
    },
    "Qwen3-32B": {
        **_QWEN3,
        "n_layer": 64,
        "n_head": 64,
        "n_embd": 5120,
        "intermediate_size": 25600,
        "tie_embeddings": False,
    },
    # https://huggingface.co/microsoft; phi-4 is of Phi-3's family.
    "Phi-3-mini-4k-instruct": {**_PHI3, "n_layer": 32, "n_head": 32, "n_embd": 3072, "intermediate_size": 8192},
    "Phi-3-medium-4k-instruct": {
        **_PHI3,
        "n_layer": 40,
        "n_head": 40,
        "n_embd": 5120,
        "n_query_groups": 10,
        "intermediate_size": 17920,
    },
    "phi-4": {
        **_LLAMA,
        "family": "phi3",
        "block_size": 16384,
        "vocab_size": 100352,
        "n_layer": 40,
        "n_head": 40,
        "n_embd": 5120,
        "n_query_groups": 10,
        "intermediate_size": 17920,
        "rope_base": 250000.0,
        "tie_embeddings": False,
    },
    # https://huggingface.co/google
    "gemma-2-2b": {
        **_GEMMA2,
        "n_layer": 26,
        "n_head": 8,
        "n_embd": 2304,
        "n_query_groups": 4,
        "intermediate_size": 9216,
    },
    "gemma-2-9b": {
        **_GEMMA2,
        "n_layer": 42,
        "n_head": 16,
        "n_embd": 3584,
        "n_query_groups": 8,
        "intermediate_size": 14336,
    },
    "gemma-2-27b": {
        **_GEMMA2,
        "n_layer": 46,
        "n_head": 32,
        "n_embd": 4608,
        "n_query_groups": 16,
        "intermediate_size": 36864,
        "head_size": 128,
        "query_pre_attn_scalar": 144,
    },
    "gemma-3-270m": {**_GEMMA3, "n_layer": 18, "n_head": 4, "n_embd": 640, "intermediate_size": 2048},
    "gemma-3-1b-pt": {**_GEMMA3, "n_layer": 26, "n_head": 4, "n_embd": 1152, "intermediate_size": 6912},
}
