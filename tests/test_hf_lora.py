import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from litce.args import UsageError
from litce.config import Config
from litce.hf_lora import from_peft, to_peft
from litce.model import GPT
from litce.peft import LoRA
from litce.tools.convert_hf import convert_from_hf, convert_to_hf
from litce.tools.model_parity import CASES
from litce.training.checkpoint import MODEL_CONFIG, load_model
from litce.training.finetune import open_base
from litce.training.finetuned import read_method, write_method
from tests.peft.models import randomize

IDS = torch.arange(40).view(2, 20)
EVERYWHERE: dict[str, Any] = {"key": True, "projection": True, "mlp": True}
# Names of the layers, in the order queries, keys and values, output, MLP.
LAYERS = {
    "gpt2": ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"],
    "pythia": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    **dict.fromkeys(
        ("llama3", "qwen2.5"),
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    ),
}
on_models = pytest.mark.parametrize("case", LAYERS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a folder with a model for transformers and for litce."""
    made: dict[str, Path] = {}

    def make(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp(case)
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**CASES[case]))
            randomize(model)
            model.save_pretrained(made[case])
            convert_from_hf(made[case])
        return made[case]

    return make


def save_lora(base: Path, directory: Path, **options: Any) -> dict[str, Tensor]:
    """A checkpoint of random additions in `directory`; returns them."""
    config = Config.from_file(base / MODEL_CONFIG)
    model = GPT(config)
    lora = LoRA(**{"r": 3, "dropout": 0.0, **options})
    torch.manual_seed(1)
    lora.extend(model)
    own = {name: x.detach() for name, x in model.named_parameters() if lora.owns(name)}
    own = {name: x + 0.2 * torch.randn_like(x) for name, x in own.items()}
    directory.mkdir()
    config.save(directory / MODEL_CONFIG)
    write_method(directory, lora, open_base(base))
    save_file(own, directory / lora.weights_file)
    return own


def peft_logits(base: Path, adapter: Path) -> Tensor:
    """Of PEFT's model, which must find all tensors that it looks for, and look for all that it finds."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to True but the target module is `torch.nn.Linear`")
        model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(IDS).logits


def assert_close(got: Tensor, want: Tensor, plain: Tensor) -> None:
    """2e-5, some 100 fp32 roundings of logits that reach 10; and `plain`, without additions, is far from it."""
    assert (want - plain).abs().max() > 0.1
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


@on_models
@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 6},
        {"alpha": 5, "rslora": True, "key": True, "query": False, "projection": True},
        {"head": True, **EVERYWHERE},
        {"dora": True, "alpha": 0.5, **EVERYWHERE},
    ],
    ids=["default", "rslora", "everywhere", "dora"],
)
def test_to_peft_and_back(case: str, options: dict[str, Any], base: Any, tmp_path: Path) -> None:
    own = save_lora(base(case), tmp_path / "lora", **options)
    folder = convert_to_hf(tmp_path / "lora")
    with torch.no_grad():
        want, plain = load_model(tmp_path / "lora")(IDS), load_model(base(case))(IDS)
    assert_close(peft_logits(base(case), folder), want, plain)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base(case))

    back = convert_from_hf(folder, checkpoint_dir=base(case), out_dir=tmp_path / "back")
    assert read_method(back) == read_method(tmp_path / "lora")
    again = load_file(back / LoRA().weights_file)
    assert again.keys() == own.keys() and all(torch.equal(again[name], x) for name, x in own.items())


def test_one_addition_for_a_fused_layer() -> None:
    config = Config(family="gpt2", n_layer=1, n_head=2, n_embd=4, vocab_size=7, block_size=8)
    with torch.device("meta"):
        model = GPT(config)
    lora = LoRA(r=2, alpha=4, rslora=True)
    lora.extend(model)
    state = {name: torch.randn(x.shape) for name, x in model.named_parameters() if lora.owns(name)}
    settings, tensors = to_peft(config, lora, state, "somewhere")
    assert settings["target_modules"] == ["c_attn"] and settings["r"] == 2 and settings["lora_alpha"] == 4
    assert settings["rank_pattern"] == {"c_attn": 4}
    assert settings["alpha_pattern"] == {"c_attn": pytest.approx(4 / 2**0.5 * 4**0.5)}
    a, b = (tensors[f"base_model.model.transformer.h.0.attn.c_attn.lora_{x}.weight"] for x in "AB")
    q, v = (state[f"transformer.h.0.attn.{x}.lora_A"] for x in "qv")
    assert torch.equal(a, torch.cat([q, v]))
    none, q, v = torch.zeros(4, 2), *(state[f"transformer.h.0.attn.{x}.lora_B"] for x in "qv")
    assert torch.equal(b, torch.cat([torch.cat([q, none], 1), torch.cat([none, none], 1), torch.cat([none, v], 1)]))

    # Before the first step B is zero, which does not tell the parts.
    untrained = {name: x * name.endswith("A.weight") for name, x in tensors.items()}
    again, parts = from_peft(config, settings, untrained, lambda name: torch.zeros(()))
    assert again.r == 4 and again.key and not any(x.any() for name, x in parts.items() if name.endswith("B"))


def save_peft(base: Path, directory: Path, **options: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model = peft.get_peft_model(model, peft.LoraConfig(**{"r": 3, "task_type": "CAUSAL_LM", **options}))
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(directory)


@on_models
@pytest.mark.parametrize(
    ("num_layers", "options"),
    [
        (None, {"lora_alpha": 6}),
        (None, {"lora_alpha": 5, "use_rslora": True, "target_modules": "all-linear"}),
        (1, {"use_dora": True, "lora_alpha": 2}),
        (-1, {"use_dora": True, "layers_to_transform": [1]}),
    ],
    ids=["default", "all-linear", "dora", "one-layer"],
)
def test_from_peft_and_back(
    case: str, num_layers: int | None, options: dict[str, Any], base: Any, tmp_path: Path
) -> None:
    if case == "phi3":  # PEFT has no default
        options = {"target_modules": ["qkv_proj"], **options}
    if num_layers is not None:
        options = {**options, "target_modules": LAYERS[case][:num_layers]}
    save_peft(base(case), tmp_path / "peft", **options)
    ours = convert_from_hf(tmp_path / "peft", checkpoint_dir=base(case))
    assert ours == tmp_path / "peft"
    want = peft_logits(base(case), tmp_path / "peft")
    with torch.no_grad():
        assert_close(load_model(ours)(IDS), want, load_model(base(case))(IDS))

    if num_layers is None:
        before = load_file(tmp_path / "peft/adapter_model.safetensors")
        after = load_file(convert_to_hf(ours) / "adapter_model.safetensors")
        assert before.keys() == after.keys() and all(torch.equal(after[name], x) for name, x in before.items())


def test_a_head_that_peft_saves_with_the_base(base: Any, tmp_path: Path) -> None:
    """Named in target_modules, PEFT writes its weight and the embedding's too."""
    folder = base("qwen2.5")
    save_peft(folder, tmp_path / "peft", target_modules=["lm_head", "v_proj"], lora_dropout=0.5)
    path = tmp_path / "peft/adapter_model.safetensors"
    extra = [name for name in load_file(path) if "lora" not in name]
    assert extra
    ours = convert_from_hf(tmp_path / "peft", checkpoint_dir=folder, out_dir=tmp_path / "ours")
    want = peft_logits(folder, tmp_path / "peft")
    with torch.no_grad():
        assert_close(load_model(ours)(IDS), want, load_model(folder)(IDS))
    save_file({name: x + (name == extra[-1]) for name, x in load_file(path).items()}, path)
    with pytest.raises(UsageError, match="is not that of the checkpoint; litce's LoRA leaves it as it is"):
        convert_from_hf(tmp_path / "peft", checkpoint_dir=folder, out_dir=tmp_path / "other")


def test_the_older_name_of_a_head(base: Any, tmp_path: Path) -> None:
    own = save_lora(base("pythia"), tmp_path / "lora", head=True)
    folder = convert_to_hf(tmp_path / "lora")
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    assert "base_model.model.lm_head.lora_A.weight" in tensors
    save_file({name.replace("lm_head", "embed_out"): x for name, x in tensors.items()}, path)
    again = load_file(convert_from_hf(folder, checkpoint_dir=base("pythia")) / LoRA().weights_file)
    assert again.keys() == own.keys() and all(torch.equal(again[name], x) for name, x in own.items())


def test_ranks_that_differ(base: Any, tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj", "v_proj"], "r": 2, "rank_pattern": {"v_proj": 4}}
    save_peft(base("llama3"), tmp_path / "peft", **options, alpha_pattern={r"layers\.\d+\.self_attn\.v_proj": 16})
    ours = convert_from_hf(tmp_path / "peft", checkpoint_dir=base("llama3"), out_dir=tmp_path / "ours")
    lora = read_method(ours)[0]
    assert isinstance(lora, LoRA) and (lora.r, lora.alpha) == (4, 16)
    with torch.no_grad():
        plain = load_model(base("llama3"))(IDS)
        assert_close(load_model(ours)(IDS), peft_logits(base("llama3"), tmp_path / "peft"), plain)
    save_peft(base("llama3"), tmp_path / "scales", **options)
    with pytest.raises(UsageError, match=r"alpha / r differs between layers \(4 in .*, 2 in .*v_proj\)"):
        convert_from_hf(tmp_path / "scales", checkpoint_dir=base("llama3"))


def test_the_wider_dtype(base: Any, tmp_path: Path) -> None:
    """load_model brings the model to the dtype of the additions, which must not round it."""
    own = save_lora(base("gpt2"), tmp_path / "lora")
    path = tmp_path / "lora" / LoRA().weights_file
    save_file({name: x.bfloat16() for name, x in own.items()}, path)
    folder = convert_to_hf(tmp_path / "lora")
    assert {x.dtype for x in load_file(folder / "adapter_model.safetensors").values()} == {torch.bfloat16}
    back = convert_from_hf(folder, checkpoint_dir=base("gpt2"), out_dir=tmp_path / "back")
    again = load_file(back / LoRA().weights_file)
    assert all(x.dtype == torch.float32 and torch.equal(x, own[name].bfloat16().float()) for name, x in again.items())


@pytest.mark.parametrize(("case", "targets"), [("gpt2", {}), ("pythia", {"key": True, "value": False})])
def test_dora_on_a_part_of_a_fused_layer(case: str, targets: dict[str, bool], base: Any, tmp_path: Path) -> None:
    save_lora(base(case), tmp_path / "lora", dora=True, **targets)
    with pytest.raises(UsageError, match="lora: DoRA on .* has no counterpart in PEFT: .* merge it with litce merge"):
        convert_to_hf(tmp_path / "lora")
    assert not (tmp_path / "lora/hf").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported; only LORA is"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\] is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication .* is not supported"),
        ({"of_tomorrow": True}, "of_tomorrow True is not supported"),
        ({"r": 0}, "r 0 is no positive number"),
        ({"r": 5}, r"q_proj has .*, which the checkpoint and adapter_config.json say is .*\(5, 32\)"),
        ({"rank_pattern": {"(": 4}}, r"the pattern '\(' of r is no regular expression"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern of q_proj 'x' is no positive number"),
        ({"lora_dropout": None}, "lora_dropout None is not from 0 to below 1"),
        ({"use_dora": True}, "lora_magnitude_vector"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], message: str, base: Any, tmp_path: Path) -> None:
    folder = tmp_path / "peft"
    save_peft(base("llama3"), folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UsageError, match=f"{folder} with --checkpoint_dir .*: .*{message}") as caught:
        convert_from_hf(folder, checkpoint_dir=base("llama3"))
    assert "\n" not in str(caught.value)
    assert {file.name for file in folder.iterdir()} == {path.name, "adapter_model.safetensors", "README.md"}


def test_tensors_that_do_not_fit(base: Any, tmp_path: Path) -> None:
    save_peft(base("llama3"), tmp_path / "peft", target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(UsageError, match="for a model of llama has no place for .*embed_tokens.lora_embedding_A"):
        convert_from_hf(tmp_path / "peft", checkpoint_dir=base("llama3"))
    with pytest.raises(UsageError, match="for a model of gpt2 has no place for .*layers.0"):
        convert_from_hf(tmp_path / "peft", checkpoint_dir=base("gpt2"))
    save_peft(base("llama3"), tmp_path / "narrow", target_modules=["k_proj"])
    with pytest.raises(UsageError, match=r"k_proj has .*\(24, 3\).*, which the checkpoint .*\(12, 3\)"):
        convert_from_hf(tmp_path / "narrow", checkpoint_dir=wider(base("llama3"), tmp_path / "wider"))


def wider(base: Path, directory: Path) -> Path:
    """The same model with one group of keys and values fewer."""
    config = dataclasses.replace(Config.from_file(base / MODEL_CONFIG), n_query_groups=1)
    directory.mkdir()
    config.save(directory / MODEL_CONFIG)
    save_file(GPT(config).state_dict(), directory / "lit_model.safetensors")
    return directory
