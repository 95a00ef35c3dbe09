import dataclasses

import pytest
import torch
import yaml

from litce.args import UsageError
from litce.config import Config, RopeScaling
from litce.model import GPT
from litce.model_configs import MODEL_CONFIGS

# Counts of the published weights; `demo` is ours: V D + 256 D + 4 (12 D^2 + 13 D) + 2 D for D = 256.
PARAMETERS = {
    "demo": 7_419_392,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "pythia-14m": 14_067_712,
    "pythia-31m": 30_494_720,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "Llama-2-7b": 6_738_415_616,
    "Llama-2-13b": 13_015_864_320,
    "Llama-2-70b": 68_976_648_192,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.3-70B-Instruct": 70_553_706_496,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
    "TinyLlama-1.1B": 1_100_048_384,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Phi-3-mini-4k-instruct": 3_821_079_552,
    "Phi-3-medium-4k-instruct": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b-pt": 999_885_952,
}


@pytest.mark.parametrize("name", MODEL_CONFIGS)
def test_named_model_has_the_published_size(name):
    with torch.device("meta"):
        model = GPT(Config.from_name(name))
        logits = model(torch.zeros(2, 8, dtype=torch.int64))
    assert model.num_parameters == PARAMETERS[name]
    assert logits.shape == (2, 8, model.config.padded_vocab_size)


def test_overrides_reach_what_follows_from_them():
    config = Config.from_name("gpt2", n_embd=64, n_head=4, vocab_size=100)
    assert (config.name, config.n_layer) == ("gpt2", 12)
    assert (config.intermediate_size, config.n_query_groups, config.padded_vocab_size) == (256, 4, 100)


@pytest.mark.parametrize(
    ("typed", "near"), [("gpt-2", "gpt2"), ("qwen2.5-0.5b", "Qwen2.5-0.5B"), ("pythia14m", "pythia-14m")]
)
def test_unknown_name_lists_near_names(typed, near):
    with pytest.raises(UsageError, match=f"got '{typed}', did you mean .*{near}.*known names: demo, gpt2"):
        Config.from_name(typed)


def test_unknown_name_near_none_lists_all():
    with pytest.raises(UsageError, match="got 'xyzzy', it is not a known model; known names: demo"):
        Config.from_name("xyzzy")


@pytest.mark.parametrize("name", ["gpt2", "Qwen2.5-7B", "Llama-3.2-1B"])
def test_save_and_load_round_trip(tmp_path, name):
    config = Config.from_name(name, n_layer=2)
    config.save(tmp_path / "model_config.yaml")
    loaded = Config.from_file(tmp_path / "model_config.yaml")
    assert loaded == config
    assert isinstance(loaded.rope_scaling, RopeScaling) == (name == "Llama-3.2-1B")


def test_every_field_is_saved(tmp_path):
    Config().save(tmp_path / "c.yaml")
    assert list(yaml.safe_load((tmp_path / "c.yaml").read_text())) == [f.name for f in dataclasses.fields(Config)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n_layers: 2", r"c\.yaml: unknown field 'n_layers'; did you mean n_layer\?"),
        ("zzz: 2", r"c\.yaml: unknown field 'zzz'; known fields: name, block_size"),
        ("- 1", r"c\.yaml: must hold a mapping of model fields, got list"),
        ("", r"c\.yaml: must hold a mapping of model fields, got NoneType"),
        ("a: [", r"c\.yaml: cannot be read as a model configuration: [^\n]*$"),
        ("n_layer: twelve", r"c\.yaml: n_layer: must be a positive whole number, got 'twelve'"),
        ("n_layer: true", r"c\.yaml: n_layer: must be a positive whole number, got True"),
        ("positions: rope\nrope_scaling: {factor: 2.0}", r"c\.yaml: .*missing"),
        ("positions: rope\nrope_scaling: {facto: 2.0}", r"rope_scaling: unknown field 'facto'; did you mean factor\?"),
        ("positions: rope\nrope_scaling: yes", r"c\.yaml: rope_scaling: must be a mapping"),
        ("rope_base: 1e6\npositions: rope", r"c\.yaml: rope_base: must be a number .*, got '1e6'"),
        ("bias: 'no'", r"c\.yaml: bias: must be true or false, got 'no'"),
    ],
)
def test_bad_file_is_named(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        Config.from_file(tmp_path / "c.yaml")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.yaml: cannot be read"):
        Config.from_file(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_layer": 0}, "n_layer: must be a positive whole number, got 0"),
        ({"n_embd": 100, "n_head": 3}, "n_embd: must be a multiple of n_head=3, got 100; or give head_size"),
        ({"head_size": 0}, "head_size: must be a positive whole number, got 0"),
        ({"family": "bert"}, "family: must be one of gpt2, gpt_neox, llama, .*, got 'bert'"),
        ({"qk_norm": 1}, "qk_norm: must be true or false, got 1"),
        ({"mlp_bias": 0}, "mlp_bias: must be true or false, got 0"),
        ({"logit_softcap": 0.0}, "logit_softcap: must be positive, got 0.0"),
        ({"attention_softcap": -1.0}, "attention_softcap: must be positive, got -1.0"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: must be positive, got 0"),
        ({"logit_scale": "big"}, "logit_scale: must be a number .*, got 'big'"),
        ({"sliding_window": 0}, "sliding_window: must be a positive whole number, got 0"),
        ({"sliding_window": 4, "sliding_window_pattern": []}, r"sliding_window_pattern: must be a list .*, got \[\]"),
        ({"sliding_window": 4, "sliding_window_pattern": [1]}, r"sliding_window_pattern: must be .*, got \[1\]"),
        ({"sliding_window_pattern": [True]}, "sliding_window_pattern: needs sliding_window"),
        ({"positions": "rope", "rope_local_base": 10.0}, "rope_local_base: needs sliding_window"),
        ({"sliding_window": 4, "rope_local_base": 10.0}, "rope_local_base: needs positions='rope'"),
        (
            {"positions": "rope", "sliding_window": 4, "rope_local_base": 1.0},
            "rope_local_base: must be greater than 1, got 1.0",
        ),
        ({"n_query_groups": 5}, "n_query_groups: must divide n_head=12, got 5"),
        ({"padded_vocab_size": 50000}, "padded_vocab_size: must be at least vocab_size=50257, got 50000"),
        ({"intermediate_size": 0}, "intermediate_size: must be a positive whole number, got 0"),
        ({"norm": "batchnorm"}, "norm: must be one of layernorm, rmsnorm, rmsnorm_unit_offset, got 'batchnorm'"),
        ({"mlp": "relu"}, "mlp: must be one of gelu, gelu_tanh, swiglu, geglu_tanh, got 'relu'"),
        ({"positions": "alibi"}, "positions: must be one of learned, rope, got 'alibi'"),
        ({"norm_eps": 0.0}, "norm_eps: must be positive, got 0.0"),
        ({"positions": "rope", "rotary_percentage": 1.5}, r"rotary_percentage: must lie in \(0, 1\], got 1.5"),
        ({"positions": "rope", "rotary_percentage": 0.05}, "got 0.05 of head size 64 = 3;"),
        ({"positions": "rope", "rope_base": 1.0}, "rope_base: must be greater than 1, got 1.0"),
        ({"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64)}, "rope_scaling: needs positions='rope'"),
    ],
)
def test_contradictions_name_the_field(fields, message):
    with pytest.raises(UsageError, match=message):
        Config(**fields)


@pytest.mark.parametrize("values", [(0.0, 1.0, 4.0, 64), (8.0, 4.0, 4.0, 64), (8.0, 1.0, 4.0, 0)])
def test_bad_rope_scaling(values):
    with pytest.raises(UsageError, match="rope_scaling"):
        RopeScaling(*values)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factor": 2.0, "rope_type": "yarn"}, "rope_scaling.rope_type: must be one of llama3, linear, got 'yarn'"),
        ({"factor": 2.0}, "rope_scaling.low_freq_factor: is missing"),
        (
            {"factor": 2.0, "low_freq_factor": 1.0, "rope_type": "linear"},
            "low_freq_factor: goes with rope_type 'llama3'",
        ),
        ({"factor": -2.0, "rope_type": "linear"}, "every value must be positive"),
    ],
)
def test_rope_scaling_takes_what_its_type_needs(fields, message):
    with pytest.raises(UsageError, match=message):
        RopeScaling(**fields)


def test_window_pattern_repeats():
    windows = {name: [Config.from_name(name).has_window(i) for i in range(7)] for name in MODEL_CONFIGS}
    assert windows["gemma-3-1b-pt"] == [True] * 5 + [False, True]
    assert windows["gemma-2-2b"] == [True, False] * 3 + [True]
    assert all(windows["Mistral-7B-v0.1"]) and not any(windows["Mistral-7B-v0.3"] + windows["gpt2"])


@pytest.mark.parametrize("name", [name for name in MODEL_CONFIGS if name != "demo"])
def test_named_model_survives_config_json(name):
    config = Config.from_name(name)
    assert Config.from_hf(config.to_hf(), name=name) == config


def test_model_without_a_family_gets_the_first_that_has_its_parts():
    assert Config.from_name("demo").to_hf()["model_type"] == "gpt2"
    assert Config.from_name("Qwen3-8B", family=None).to_hf()["model_type"] == "qwen3"
    assert (
        Config.from_name("Mistral-7B-v0.1", family=None, vocab_size=31999, padded_vocab_size=32000).to_hf()[
            "vocab_size"
        ]
        == 32000
    )
    with pytest.raises(UsageError, match="no model of transformers has these parts: llama has no qk_norm=True"):
        Config.from_name("Qwen3-8B", family="llama").to_hf()
    with pytest.raises(
        UsageError, match="gpt2 has no .*positions='rope'.*; gpt_neox has no .*; llama has no logit_scale"
    ):
        Config.from_name("Llama-2-7b", family=None, logit_scale=0.5).to_hf()
