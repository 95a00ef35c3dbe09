"""Hyperparameters of the named models: data only, as their authors published them.

Each entry holds the fields of :class:`litce.config.Config` that differ from its defaults.
"""

from typing import Any

_PYTHIA: dict[str, Any] = {
    "block_size": 2048,
    # The tokenizer uses fewer ids; this is the number of rows the published weights have.
    "vocab_size": 50304,
    "mlp": "gelu",
    "positions": "rope",
    "rotary_percentage": 0.25,
    "parallel_residual": True,
    "tie_embeddings": False,
}

_LLAMA: dict[str, Any] = {"bias": False, "norm": "rmsnorm", "mlp": "swiglu", "positions": "rope"}

_QWEN2: dict[str, Any] = {
    **_LLAMA,
    "vocab_size": 151936,
    "qkv_bias": True,
    "norm_eps": 1e-6,
    "rope_base": 1000000.0,
}

MODEL_CONFIGS: dict[str, dict[str, Any]] = {
    # Small enough to learn something in minutes on a CPU, with a vocabulary whose logits dominate its memory.
    "demo": {"block_size": 256, "vocab_size": 16384, "n_layer": 4, "n_head": 4, "n_embd": 256},
    # https://github.com/openai/gpt-2
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
    # https://github.com/EleutherAI/pythia
    "pythia-14m": {**_PYTHIA, "block_size": 512, "n_layer": 6, "n_head": 4, "n_embd": 128},
    "pythia-70m": {**_PYTHIA, "n_layer": 6, "n_head": 8, "n_embd": 512},
    "pythia-160m": {**_PYTHIA, "n_layer": 12, "n_head": 12, "n_embd": 768},
    # https://huggingface.co/HuggingFaceTB/SmolLM2-135M
    "SmolLM2-135M": {
        **_LLAMA,
        "block_size": 8192,
        "vocab_size": 49152,
        "n_layer": 30,
        "n_head": 9,
        "n_embd": 576,
        "n_query_groups": 3,
        "intermediate_size": 1536,
        "rope_base": 100000.0,
    },
    # https://huggingface.co/Qwen/Qwen2.5-0.5B
    "Qwen2.5-0.5B": {
        **_QWEN2,
        "block_size": 32768,
        "n_layer": 24,
        "n_head": 14,
        "n_embd": 896,
        "n_query_groups": 2,
        "intermediate_size": 4864,
    },
    # https://huggingface.co/Qwen/Qwen2.5-1.5B
    "Qwen2.5-1.5B": {
        **_QWEN2,
        "block_size": 131072,
        "n_layer": 28,
        "n_head": 12,
        "n_embd": 1536,
        "n_query_groups": 2,
        "intermediate_size": 8960,
    },
    # https://huggingface.co/Qwen/Qwen2.5-3B
    "Qwen2.5-3B": {
        **_QWEN2,
        "block_size": 32768,
        "n_layer": 36,
        "n_head": 16,
        "n_embd": 2048,
        "n_query_groups": 2,
        "intermediate_size": 11008,
    },
    # https://huggingface.co/Qwen/Qwen2.5-7B
    "Qwen2.5-7B": {
        **_QWEN2,
        "block_size": 131072,
        "vocab_size": 152064,
        "n_layer": 28,
        "n_head": 28,
        "n_embd": 3584,
        "n_query_groups": 4,
        "intermediate_size": 18944,
        "tie_embeddings": False,
    },
    # https://huggingface.co/meta-llama/Llama-3.2-1B
    "Llama-3.2-1B": {
        **_LLAMA,
        "block_size": 131072,
        "vocab_size": 128256,
        "n_layer": 16,
        "n_head": 32,
        "n_embd": 2048,
        "n_query_groups": 8,
        "intermediate_size": 8192,
        "rope_base": 500000.0,
        "rope_scaling": {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 8192,
        },
    },
    # https://huggingface.co/TinyLlama/TinyLlama_v1.1
    "TinyLlama-1.1B": {
        **_LLAMA,
        "block_size": 2048,
        "vocab_size": 32000,
        "n_layer": 22,
        "n_head": 32,
        "n_embd": 2048,
        "n_query_groups": 4,
        "intermediate_size": 5632,
        "tie_embeddings": False,
    },
}
