import json

import pytest
import torch
import transformers

from litce.args import UsageError
from litce.config import Config
from litce.hf_config import FAMILIES, read
from litce.tools.model_parity import CASES
from tests.test_config import PARAMETERS

SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 32,
    "max_position_embeddings": 128,
}

LLAMA31_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}

# What the files at https://huggingface.co say of the model, less keys that are the same for all.
PUBLISHED = {
    "gpt2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "pythia-160m": {
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_act": "gelu",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "gpt_neox",
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "vocab_size": 50304,
    },
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA31_SCALING,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    "SmolLM2-135M": {
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    },
    "Mistral-7B-v0.1": {
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "Qwen2.5-0.5B": {
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Phi-3-mini-4k-instruct": {
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "model_type": "phi3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "vocab_size": 32064,
    },
    "gemma-2-2b": {
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
    "gemma-3-1b-pt": {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_file_is_the_named_model(name):
    assert Config.from_hf(PUBLISHED[name], name=name) == Config.from_name(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_understands_both_files_alike(name):
    """Ours and the published one, and says so in the words of version 5."""
    config = Config.from_name(name)
    for file in (PUBLISHED[name], config.to_hf()):
        hf_config = transformers.AutoConfig.for_model(**json.loads(json.dumps(file)))
        assert Config.from_hf(json.loads(json.dumps(hf_config.to_dict())), name=name) == config
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(hf_config)
    assert type(reference).__name__ == FAMILIES[config.family].architecture
    assert sum(parameter.numel() for parameter in reference.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_mean_what_they_mean_to_transformers(family):
    sizes = SIZES
    if family == "gpt2":
        sizes = {"vocab_size": 64, "n_embd": 256, "n_layer": 7, "n_head": 32}
    hf_config = transformers.AutoConfig.for_model(family, **sizes)
    full = json.loads(json.dumps(hf_config.to_dict()))
    short = Config.from_hf({"model_type": family, **sizes})
    assert Config.from_hf(full) == short


@pytest.mark.parametrize("case", CASES)
def test_old_and_new_keys_of_rope_say_the_same(case):
    new = json.loads(json.dumps(transformers.AutoConfig.for_model(**CASES[case]).to_dict()))
    config = Config.from_hf(new)
    old = config.to_hf()
    assert "rope_parameters" not in old
    assert Config.from_hf(old) == config


def test_older_spellings():
    scaled = {"model_type": "llama", **SIZES, "rope_scaling": {"type": "linear", "factor": 4.0}}
    scaling = Config.from_hf(scaled).rope_scaling
    assert (scaling.rope_type, scaling.factor) == ("linear", 4.0)
    no_length = {key: value for key, value in LLAMA31_SCALING.items() if key != "original_max_position_embeddings"}
    assert Config.from_hf({**scaled, "rope_scaling": no_length}).rope_scaling.original_max_seq_len == 128


def test_vocabulary_and_rows():
    config = Config.from_hf(PUBLISHED["Qwen2.5-0.5B"], vocab_size=151665)
    assert (config.vocab_size, config.padded_vocab_size) == (151665, 151936)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported; choose gpt2, gpt_neox, llama, "),
        ({"model_type": None}, "model_type None is not supported"),
        ({"model_type": "gemma3", "text_config": {}}, "model_type 'gemma3' is not supported"),
        ({"hidden_size": "REMOVED"}, "holds no hidden_size, which a model of llama needs"),
        ({"hidden_size": "x"}, "n_embd: must be a positive whole number, got 'x'"),
        ({"num_key_value_heads": 5}, "n_query_groups: must divide n_head=32, got 5"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported for llama; choose silu, "),
        ({"quantization_config": {"bits": 4}}, "quantization_config .* is not supported .*a model without it"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling of type 'yarn' is not supported; only "),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_scaling of type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling of type 'linear' holds no factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "holds no low_freq_factor, high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported for llama; only 1.0 is"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported for llama"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "rope_scaling of type 'longrope' is not "),
        ({"model_type": "phi3", "rope_scaling": {"type": "su"}}, "rope_scaling of type 'su' is not supported"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 7}, "layer_types .* is not supported for mis"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 7}, "layer_types chunked_attention are not"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types names 1 layers, of 7"),
        ({"model_type": "gemma2", "sliding_window": None}, "layer_types has sliding_attention, and sliding_window "),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention True .*false is"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supp"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            "rope_type 'linear' of sliding_attention is not supported",
        ),
        ({"model_type": "gpt_neox", "hidden_act": "silu"}, "hidden_act 'silu' is not supported for gpt_neox"),
        ({"model_type": "gpt2", "scale_attn_weights": False}, "scale_attn_weights False is not supported for gpt2"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention True is not supported"),
    ],
)
def test_what_is_not_supported_is_named(changes, message):
    config = {"model_type": "llama", **SIZES, **changes}
    config = {key: value for key, value in config.items() if value != "REMOVED"}
    with pytest.raises(UsageError, match=f"config.json: .*{message}" if "must" in message else message):
        Config.from_hf(config)


def test_read_gives_fields_alone():
    fields = read({"model_type": "llama", **SIZES})
    assert Config(**fields) == Config.from_hf({"model_type": "llama", **SIZES})
