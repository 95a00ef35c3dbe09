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
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "SmolLM2-135M": 134_515_008,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Llama-3.2-1B": 1_235_814_400,
    "TinyLlama-1.1B": 1_100_048_384,
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
        ({"n_embd": 100, "n_head": 3}, "n_embd: must be a multiple of n_head=3, got 100"),
        ({"n_query_groups": 5}, "n_query_groups: must divide n_head=12, got 5"),
        ({"padded_vocab_size": 50000}, "padded_vocab_size: must be at least vocab_size=50257, got 50000"),
        ({"intermediate_size": 0}, "intermediate_size: must be a positive whole number, got 0"),
        ({"norm": "batchnorm"}, "norm: must be one of layernorm, rmsnorm, got 'batchnorm'"),
        ({"mlp": "relu"}, "mlp: must be one of gelu, gelu_tanh, swiglu, got 'relu'"),
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
