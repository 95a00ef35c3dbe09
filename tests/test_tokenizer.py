import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.processors import TemplateProcessing

from litce.args import UsageError
from litce.tokenizer import Tokenizer
from tests.tiny import save_byte_tokenizer

VOCAB = {"a": 0, "b": 1, "</s>": 2, "<s>": 3, "<end>": 9}


def write(folder: Path, vocab: dict[str, int] = VOCAB, **configs: object) -> Path:
    processor = HFTokenizer(models.WordLevel(vocab, unk_token="a"))
    processor.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(exist_ok=True)
    processor.save(str(folder / "tokenizer.json"))
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("configs", "eos", "bos"),
    [
        ({}, 2, 3),
        ({"tokenizer_config": {"eos_token": "<end>"}}, 9, 3),
        ({"tokenizer_config": {"eos_token": {"content": "<end>"}, "bos_token": {"content": "b"}}}, 9, 1),
        ({"tokenizer_config": {"eos_token": None, "bos_token": None}}, 2, None),
        ({"generation_config": {"eos_token_id": 9, "bos_token_id": 1}}, 9, 1),
        ({"generation_config": {"eos_token_id": [9, 2], "bos_token_id": None}}, 9, 3),
        (
            {"tokenizer_config": {"bos_token": None}, "generation_config": {"eos_token_id": 9, "bos_token_id": 1}},
            9,
            None,
        ),
        ({"tokenizer_config": {"eos_token": "b"}, "generation_config": {"eos_token_id": 9}}, 1, 3),
    ],
)
def test_special_ids(tmp_path: Path, configs: dict[str, object], eos: int, bos: int | None) -> None:
    tokenizer = Tokenizer(write(tmp_path, **configs))
    assert (tokenizer.eos_id, tokenizer.bos_id) == (eos, bos)


def test_encode_adds_only_what_is_asked_for(tmp_path: Path) -> None:
    processor = HFTokenizer.from_file(str(write(tmp_path) / "tokenizer.json"))
    processor.add_special_tokens([AddedToken("<s>", special=True)])
    processor.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    processor.enable_truncation(2)
    processor.enable_padding(length=8)
    processor.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(str(tmp_path))
    assert tokenizer.encode("a b b a") == [0, 1, 1, 0]
    assert tokenizer.encode("a b", bos=True, eos=True) == [3, 0, 1, 2]
    assert tokenizer.encode("", eos=True) == [2]
    assert tokenizer.encode_batch(["a b b a", "b"]) == [[0, 1, 1, 0], [1]]
    assert tokenizer.decode([3, 0, 1]) == "<s> a b"


def test_vocab_size_is_above_every_id_despite_holes(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path))
    assert tokenizer.vocab_size == 10
    processor = HFTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert processor.get_vocab_size() == 5


def test_absent_special_tokens_are_none_and_asking_for_one_is_an_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, {"a": 0, "b": 1}))
    assert tokenizer.eos_id is None
    assert tokenizer.bos_id is None
    for flags, name in (({"eos": True}, "eos"), ({"bos": True}, "bos")):
        with pytest.raises(UsageError, match=f'has no {name} token; name one as "{name}_token" in .*tokenizer_config'):
            tokenizer.encode("a", **flags)


def test_save_copies_what_the_folder_has(tmp_path: Path) -> None:
    source = write(tmp_path / "a", tokenizer_config={"eos_token": "<end>"})
    (source / "model.safetensors").write_text("not the tokenizer's")
    tokenizer = Tokenizer(source)
    tokenizer.save(tmp_path / "b" / "c")
    tokenizer.save(tmp_path / "b" / "c")
    assert {path.name for path in (tmp_path / "b" / "c").iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    copy = Tokenizer(tmp_path / "b" / "c")
    assert copy.eos_id == 9
    assert copy.fingerprint == tokenizer.fingerprint
    copy.save(copy.directory)
    assert Tokenizer(copy.directory).fingerprint == tokenizer.fingerprint


def test_fingerprint_follows_the_vocabulary_and_the_special_ids(tmp_path: Path) -> None:
    fingerprints = {
        Tokenizer(write(tmp_path / "a")).fingerprint,
        Tokenizer(write(tmp_path / "b", VOCAB | {"c": 4})).fingerprint,
        Tokenizer(write(tmp_path / "c", tokenizer_config={"eos_token": "<end>"})).fingerprint,
    }
    assert len(fingerprints) == 3


def test_unusable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none/tokenizer\.json does not exist; give --tokenizer_dir"):
        Tokenizer(tmp_path / "none")
    folder = write(tmp_path / "a", tokenizer_config={"eos_token": "<absent>"})
    with pytest.raises(UsageError, match=r"tokenizer_config\.json: eos_token '<absent>' is not in the vocabulary"):
        Tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UsageError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UsageError, match=r"tokenizer_config\.json must hold a JSON object, got list"):
        Tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    with pytest.raises(UsageError, match=r"generation_config\.json: eos_token_id 5 is not in the vocabulary"):
        Tokenizer(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(UsageError, match=r"tokenizer\.json is not a readable tokenizer\.json"):
        Tokenizer(folder)


def test_special_tokens_are_those_of_the_configuration_files(tmp_path: Path) -> None:
    configs = {
        "special_tokens_map": {"eos_token": "a", "pad_token": {"content": "b"}},
        "tokenizer_config": {"eos_token": "<end>", "bos_token": None, "add_bos_token": True},
    }
    assert Tokenizer(write(tmp_path, **configs)).special_tokens == {"eos_token": "<end>", "pad_token": "b"}


def test_pieces_are_encoded_alone_where_no_space_is_put_before_a_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path))
    assert tokenizer.encode_pieces([["a b", "b"], [], ["", "a"]]) == [[[0, 1], [1]], [], [[], [0]]]


def test_stop_ids_are_all_that_the_configuration_files_name(tmp_path: Path) -> None:
    end = {"eos_token": "<end>"}
    assert Tokenizer(write(tmp_path / "a", tokenizer_config=end)).stop_ids == {9}
    both = write(tmp_path / "b", tokenizer_config=end, generation_config={"eos_token_id": [0, 9]})
    assert Tokenizer(both).stop_ids == {0, 9}
    one = write(tmp_path / "c", tokenizer_config=end, generation_config={"eos_token_id": 1})
    assert Tokenizer(one).stop_ids == {1, 9}
    assert Tokenizer(write(tmp_path / "d", {"a": 0, "b": 1})).stop_ids == frozenset()


def bpe(kind: str) -> HFTokenizer:
    """A trained BPE, byte-level as GPT-2's, or with spaces as marks and bytes for rare characters as Llama 2's."""
    texts = ["def f(x): return día + naïve", "the theme of the thesis", "日本"] * 3
    if kind == "byte-level":
        processor = HFTokenizer(models.BPE())
        processor.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        processor.decoder = decoders.ByteLevel()
        alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<eos>"]
    else:
        processor = HFTokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        processor.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if kind == "prefix" else "never")
        processor.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
        alphabet, special = [], ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    processor.train_from_iterator(texts, trainer)
    state = json.loads(processor.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    processor = HFTokenizer.from_str(json.dumps(state))
    processor.add_tokens(["    "])
    return processor


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "prefix"])
def test_bytes_of_ids_add_up_to_those_of_the_text(tmp_path: Path, kind: str) -> None:
    bpe(kind).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    for text in ("def f(the): día 日本語", "été 🎉", "a    b"):
        ids = tokenizer.encode(text, eos=False)
        assert len(ids) < len(text.encode()) or "🎉" in text
        size = sum(tokenizer.num_bytes[i] for i in ids)
        assert size == len(text.encode()) + (kind == "prefix")
    assert tokenizer.num_bytes[tokenizer.processor.token_to_id("<eos>")] == 0


def test_a_model_may_lack_special_tokens_that_no_text_begins_or_ends_with(tmp_path: Path) -> None:
    # The bytes, <eos>, <bos> and <end>.
    for bos, needed in ((None, 257), ("<bos>", 258), ("<end>", 259)):
        tokenizer = Tokenizer(save_byte_tokenizer(tmp_path, bos=bos))
        assert tokenizer.vocab_size == 259 and tokenizer.needed_vocab_size == needed
    assert Tokenizer(write(tmp_path / "words", tokenizer_config={"eos_token": "a"})).needed_vocab_size == 10
