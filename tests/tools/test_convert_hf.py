import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from litce import cli
from litce.args import UsageError
from litce.config import Config
from litce.model import GPT
from litce.peft import Adapter, AdapterV2, FinetuneMethod, Full, LoRA
from litce.tools.convert_hf import INDEX, SINGLE, convert_from_hf, convert_to_hf
from litce.tools.model_parity import CASES
from litce.training.checkpoint import WEIGHTS, load_model
from tests.storages import SeenStorages
from tests.tiny import MODEL, Numbers, finetune, pretrain, save_tokenizer


def save_reference(directory: Path, case: str, dtype: torch.dtype = torch.float32, **options) -> torch.nn.Module:
    """A random model of transformers, saved in `directory`."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**CASES[case])
    reference = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    reference.save_pretrained(directory, **options)
    return reference


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: x for path in directory.glob("model*.safetensors") for name, x in load_file(path).items()}


def rewrite(directory: Path, change) -> None:
    """Let `change` edit the tensors of the single file."""
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})


def rewrite_json(path: Path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# Fused and by head, fused and transposed, fused with gate and up, and tied.
@pytest.mark.parametrize("case", ["pythia", "gpt2", "phi3", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_shards_both_ways_keep_keys_and_bits(tmp_path, case, dtype):
    save_reference(tmp_path / "hf", case, dtype, max_shard_size="8KB")
    assert (tmp_path / "hf" / INDEX).is_file()
    ours = convert_from_hf(tmp_path / "hf", out_dir=tmp_path / "ours")
    back = convert_to_hf(ours, out_dir=tmp_path / "back", max_shard_size="16KiB")
    before, after = tensors_of(tmp_path / "hf"), tensors_of(back)
    assert before.keys() == after.keys()
    for name in before:
        assert after[name].dtype == dtype and torch.equal(before[name], after[name]), name

    index = json.loads((back / INDEX).read_text())
    assert index["weight_map"].keys() == before.keys() and len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in before.values())
    largest = max(x.nbytes for x in before.values())
    for name in set(index["weight_map"].values()):
        held = [x.nbytes for x in load_file(back / name).values()]
        assert sum(held) <= max(16 * 1024, largest)
    assert json.loads((back / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_what_a_training_run_leaves(tmp_path, case):
    """Without the original config.json, with changed weights, from the folder alone."""
    save_reference(tmp_path / "hf", case)
    ours = convert_from_hf(tmp_path / "hf", out_dir=tmp_path / "ours")
    (ours / "config.json").unlink()
    model = load_model(ours)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    save_file(model.state_dict(), ours / WEIGHTS)
    back = convert_to_hf(ours)
    assert back == ours / "hf"
    reference, report = transformers.AutoModelForCausalLM.from_pretrained(
        back, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    idx = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(idx), reference.eval()(idx).logits, rtol=0, atol=2e-5)


def test_a_model_trained_from_scratch_goes_to_transformers(tmp_path):
    config = Config(block_size=16, vocab_size=62, padded_vocab_size=64, n_layer=1, n_head=2, n_embd=16)
    torch.manual_seed(0)
    model = GPT(config)
    model.init_weights()
    save_file(model.state_dict(), tmp_path / WEIGHTS)
    config.save(tmp_path / "model_config.yaml")
    save_tokenizer(tmp_path)
    back = convert_to_hf(tmp_path, out_dir=tmp_path / "a" / "b")
    reference = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert reference.config.vocab_size == 64
    assert (reference.config.eos_token_id, reference.config.bos_token_id) == (60, None)
    assert transformers.AutoTokenizer.from_pretrained(back)("w3 w5").input_ids == [3, 5]
    idx = torch.arange(9)[None]
    torch.testing.assert_close(model(idx), reference.eval()(idx).logits, rtol=0, atol=1e-5)
    # And comes back as it was, but for the family, which is now known.
    again = convert_from_hf(back, out_dir=tmp_path / "again")
    assert Config.from_file(again / "model_config.yaml") == Config(**{**vars(config), "name": "b", "family": "gpt2"})
    assert load_model(again)(idx).equal(model(idx))


def test_files_that_come_along(tmp_path):
    hf = tmp_path / "hf"
    save_reference(hf, "llama2")
    save_tokenizer(hf)
    files = {"generation_config.json": "{}", "chat_template.jinja": "x", "tokenizer.model": "y", "README.md": "z"}
    for name, text in files.items():
        (hf / name).write_text(text)
    rewrite_json(hf / "config.json", initializer_range=0.125, torch_dtype="float32")
    ours = convert_from_hf(hf, out_dir=tmp_path / "ours")
    back = convert_to_hf(ours)
    for folder in (ours, back):
        assert {name for name in files if (folder / name).is_file()} == files.keys() - {"README.md"}
        assert (folder / "tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()
    config = json.loads((back / "config.json").read_text())
    # The original's, as the model is the same.
    assert config["initializer_range"] == 0.125 and config["dtype"] == "float32" and "torch_dtype" not in config
    # 62 ids of the 97 rows have a token.
    assert load_model(ours).config.vocab_size == 62
    assert load_model(ours).config.padded_vocab_size == config["vocab_size"] == 97


def test_tokenizer_with_more_ids_than_rows(tmp_path):
    save_reference(tmp_path, "gemma3")
    save_tokenizer(tmp_path, num_words=200)
    convert_from_hf(tmp_path)
    assert load_model(tmp_path).config.vocab_size == 97


def test_in_place_nothing_is_overwritten(tmp_path, capsys):
    save_reference(tmp_path, "llama2")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    cli.main(["convert_from_hf", str(tmp_path)])
    assert "28 tensors" not in capsys.readouterr().err
    added = {path.name for path in tmp_path.iterdir()} - before.keys()
    assert added == {WEIGHTS, "model_config.yaml"}
    assert all((tmp_path / name).read_bytes() == content for name, content in before.items())
    with pytest.raises(UsageError, match=f"holds {WEIGHTS} already; remove it, or give another --out_dir"):
        convert_from_hf(tmp_path)

    cli.main(["convert_to_hf", str(tmp_path), "--out_dir", str(tmp_path / "out"), "--max_shard_size", "10KB"])
    with pytest.raises(UsageError, match="--out_dir .*out exists; remove it"):
        convert_to_hf(tmp_path, out_dir=tmp_path / "out")
    with pytest.raises(UsageError, match="--max_shard_size ten: give a positive size"):
        convert_to_hf(tmp_path, out_dir=tmp_path / "other", max_shard_size="ten")
    assert {path.name for path in tmp_path.iterdir()} == before.keys() | added | {"out"}


def test_older_files_of_gpt2(tmp_path):
    """No prefix, as saved from the model without its head, and causal masks as buffers."""
    save_reference(tmp_path, "gpt2")

    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    original = load_file(tmp_path / SINGLE)
    rewrite(tmp_path, change)
    convert_from_hf(tmp_path)
    back = tensors_of(convert_to_hf(tmp_path))
    assert back.keys() == original.keys() and all(torch.equal(back[name], x) for name, x in original.items())


@pytest.mark.parametrize("case", ["smollm2", "pythia"])
def test_older_files_repeat_a_tied_head_and_rotary_frequencies(tmp_path, case):
    save_reference(tmp_path, case)
    embedding, head, layer = {
        "smollm2": ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn"),
        "pythia": ("gpt_neox.embed_in.weight", "embed_out.weight", "gpt_neox.layers.0.attention"),
    }[case]
    rewrite_json(tmp_path / "config.json", tie_word_embeddings=True)
    rewrite(tmp_path, lambda tensors: tensors.update({head: tensors[embedding] + 1}))
    with pytest.raises(UsageError, match=f"{head} differs from {embedding}, and tie_word_embeddings"):
        convert_from_hf(tmp_path)
    constants = {f"{layer}.rotary_emb.inv_freq": torch.ones(4)}
    rewrite(tmp_path, lambda tensors: tensors.update({head: tensors[embedding].clone(), **constants}))
    convert_from_hf(tmp_path)
    model = load_model(tmp_path)
    assert model.lm_head.weight is model.transformer.wte.weight


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("model.norm.weight", "lm_head.weight"), "missing lm_head.weight, model.norm.weight$"),
        (lambda t: t.update({"model.layers.2.x": t["lm_head.weight"] + 0}), "not known model.layers.2.x$"),
        (
            lambda t: t.update({"model.norm.bias": t.pop("model.norm.weight")}),
            "missing model.norm.weight; not known model.norm.bias$",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:96].clone()}),
            r"lm_head.weight has the shape \(96, 32\), which config.json says is \(97, 32\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
            "model.norm.weight is I8; only F64, F32, F16, BF16 are supported",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_listed(tmp_path, change, message):
    save_reference(tmp_path, "llama2")
    rewrite(tmp_path, change)
    with pytest.raises(UsageError, match=message):
        convert_from_hf(tmp_path)
    assert not list(tmp_path.glob("*lit_model*")) and not (tmp_path / "model_config.yaml").exists()


@pytest.mark.parametrize("name", ["../model-00001.safetensors", "/etc/passwd", "..", "", "a/b", "C:\\x", "..\\x"])
def test_an_index_stays_in_its_folder(tmp_path, name):
    folder = tmp_path / "hf"
    save_reference(folder, "llama2", max_shard_size="8KB")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    shutil.copy(folder / next(iter(weight_map.values())), tmp_path / "model-00001.safetensors")
    weight_map["lm_head.weight"] = name
    rewrite_json(folder / INDEX, weight_map=weight_map)
    with pytest.raises(UsageError, match="names the file .*, which is not in its folder"):
        convert_from_hf(folder)


def test_broken_folders(tmp_path):
    with pytest.raises(UsageError, match="holds no config.json"):
        convert_from_hf(tmp_path)
    save_reference(tmp_path, "llama2", max_shard_size="8KB")
    index = json.loads((tmp_path / INDEX).read_text())
    shard = tmp_path / index["weight_map"]["model.norm.weight"]
    content = shard.read_bytes()

    rewrite_json(tmp_path / INDEX, weight_map={**index["weight_map"], "model.extra": shard.name})
    with pytest.raises(UsageError, match="names tensors that are in no file: model.extra"):
        convert_from_hf(tmp_path)
    rewrite_json(tmp_path / INDEX, weight_map=7)
    with pytest.raises(UsageError, match="holds no weight_map"):
        convert_from_hf(tmp_path)
    rewrite_json(tmp_path / INDEX, **index)
    for damaged in (content[:-1], b"", b"\xff" * 100):
        shard.write_bytes(damaged)
        with pytest.raises(UsageError, match=f"{shard.name} cannot be read as safetensors"):
            convert_from_hf(tmp_path)
    shard.unlink()
    with pytest.raises(UsageError, match=f"{shard.name} cannot be read as safetensors"):
        convert_from_hf(tmp_path)
    twice = next(path for path in tmp_path.glob("model-*.safetensors"))
    shard.write_bytes(twice.read_bytes())
    with pytest.raises(UsageError, match="is in model-.* and in model-"):
        convert_from_hf(tmp_path)

    for path in tmp_path.glob("model*"):
        path.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match="save pytorch_model.bin as safetensors with save_pretrained"):
        convert_from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="config.json cannot be read as JSON"):
        convert_from_hf(tmp_path)


def test_export_needs_a_checkpoint_that_fits(tmp_path):
    with pytest.raises(UsageError, match=f"holds no {WEIGHTS}; give a folder that training or convert_from_hf wrote"):
        convert_to_hf(tmp_path)
    save_reference(tmp_path, "llama2")
    convert_from_hf(tmp_path)
    config = Config.from_file(tmp_path / "model_config.yaml")
    config.logit_scale = 0.5
    config.save(tmp_path / "model_config.yaml")
    with pytest.raises(UsageError, match="no model of transformers has these parts: llama has no logit_scale=0.5"):
        convert_to_hf(tmp_path)
    config.logit_scale, config.n_layer = 1.0, 3
    config.save(tmp_path / "model_config.yaml")
    with pytest.raises(UsageError, match=r"does not fit the configuration: missing transformer\.h\.2\.attn\.k\.weight"):
        convert_to_hf(tmp_path)
    assert not list(tmp_path.glob("*hf*"))


@pytest.mark.parametrize("case", ["gpt2", "pythia", "phi3", "llama2"])
def test_memory_holds_one_model_and_one_shard(tmp_path, case, monkeypatch):
    """Counted: what the files' tensors map, and every storage that is made of them."""
    save_reference(tmp_path / "hf", case, max_shard_size="12KB")
    size = sum(x.nbytes for x in tensors_of(tmp_path / "hf").values())
    shard = max(path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors"))
    assert shard < size / 3

    with SeenStorages() as mode:
        ours = convert_from_hf(tmp_path / "hf", out_dir=tmp_path / "ours")
    assert size / 8 < mode.peak <= size + shard

    limit = 12_000
    with SeenStorages() as mode:
        convert_to_hf(ours, out_dir=tmp_path / "back", max_shard_size=limit)
    largest = max(x.nbytes for x in tensors_of(tmp_path / "hf").values())
    # One file's tensors, and the parts of the one that is being joined.
    assert mode.peak <= max(limit, largest) + 2 * largest


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A litce checkpoint that never was one of transformers."""
    folder = tmp_path_factory.mktemp("trained")
    data = Numbers(tokenizer_folder=save_tokenizer(folder / "tokenizer"))
    return pretrain(folder / "run", data, model_config=MODEL).checkpoint_dir


def test_a_full_finetuned_checkpoint_goes_to_transformers(trained, tmp_path):
    final = finetune(Full(), trained, tmp_path / "full", optimizer={"lr": 0.1}).checkpoint_dir
    reference = transformers.AutoModelForCausalLM.from_pretrained(convert_to_hf(final)).eval()
    idx = torch.arange(8)[None]
    with torch.no_grad():
        assert (load_model(final)(idx) - load_model(trained)(idx)).abs().max() > 0.01
        torch.testing.assert_close(reference(idx).logits, load_model(final)(idx), rtol=0, atol=2e-5)


@pytest.mark.parametrize("method", [Adapter(start_layer=0), AdapterV2(start_layer=0)], ids=lambda method: method.name)
def test_an_adapter_has_no_counterpart(method: FinetuneMethod, trained, tmp_path):
    final = finetune(method, trained, tmp_path / "run").checkpoint_dir
    with pytest.raises(
        UsageError, match=f"final holds weights of the method {method.name}, which have no form .*; litce"
    ):
        convert_to_hf(final)
    assert not (final / "hf").exists()


def test_lora_commands(trained, tmp_path, capsys):
    final = finetune(LoRA(dropout=0.0), trained, tmp_path / "run", optimizer={"lr": 0.1}).checkpoint_dir
    before = {path: path.read_bytes() for path in final.rglob("*") if path.is_file()}
    capsys.readouterr()
    cli.main(["convert_to_hf", str(final), "--out_dir", str(tmp_path / "peft")])
    printed = capsys.readouterr().out
    assert f"add to {trained}; litce convert_to_hf {trained} makes that model" in printed
    assert {path.name for path in (tmp_path / "peft").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    convert_to_hf(trained)
    convert_to_hf(final, out_dir=tmp_path / "second")
    assert json.loads((tmp_path / "second/adapter_config.json").read_text())["base_model_name_or_path"] == str(
        trained / "hf"
    )
    assert before == {path: path.read_bytes() for path in final.rglob("*") if path.is_file()}
    shutil.rmtree(trained / "hf")

    # Next to the files that are there, with the base's tokenizer, and ready to use.
    cli.main(["convert_from_hf", str(tmp_path / "peft"), "--checkpoint_dir", str(trained)])
    assert (tmp_path / "peft/tokenizer.json").read_bytes() == (trained / "tokenizer.json").read_bytes()
    idx = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "peft")(idx), load_model(final)(idx))
    cli.main(["generate", str(tmp_path / "peft"), "--prompt", "w1", "--max_new_tokens", "2"])
    cli.main(["merge_lora", str(tmp_path / "peft"), "--out_dir", str(tmp_path / "merged")])
    capsys.readouterr()

    for words, message in (
        ([tmp_path / "peft", "--checkpoint_dir", trained], "holds finetune.yaml already; remove it, or give another"),
        ([tmp_path / "second"], f"holds additions to {trained}/hf alone; convert that first, and give the result as"),
        ([trained, "--checkpoint_dir", trained, "--out_dir", tmp_path / "x"], "holds no adapter_config.json, which"),
        ([tmp_path / "second", "--checkpoint_dir", final], "--checkpoint_dir: .*holds the weights of lora alone"),
        ([tmp_path / "second", "--checkpoint_dir", tmp_path / "none"], "--checkpoint_dir: .*none is not a folder"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            cli.main(["convert_from_hf", *map(str, words)])
        captured = capsys.readouterr()
        assert exit_info.value.code == 2 and captured.err.count("\n") == 1
        assert re.search(message, captured.err), captured.err
    assert {path.name for path in (tmp_path / "second").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert not (tmp_path / "x").exists()
