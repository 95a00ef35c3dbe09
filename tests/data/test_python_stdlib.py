import math
import pickle
from pathlib import Path

import jsonargparse
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from litce.args import UsageError
from litce.data import DataModule, PythonStdlib, python_stdlib
from litce.data.python_stdlib import EXCLUDED_FOLDERS, stdlib_documents, stdlib_root, train_bpe
from litce.tokenizer import Tokenizer


def text_of(tokenizer: Tokenizer, data: PythonStdlib) -> str:
    stored = torch.from_numpy(data.train_dataset().tokens.astype("int64"))
    return tokenizer.decode(stored.tolist())


def test_reads_sources_in_order_without_tests_packages_and_undecodable_files(stdlib: Path) -> None:
    names = [document.name for document in stdlib_documents(stdlib)]
    assert len(names) == 30
    assert names == sorted(names)
    assert {name.rsplit("/")[-1] for name in names} == {f"module{i:02}.py" for i in range(30)}


def test_tokens_are_the_files_with_eos_between_them(stdlib: Path) -> None:
    data = PythonStdlib(vocab_size=300)
    data.prepare()
    data.connect(None, max_seq_length=16)
    texts = {document.name: document.read() for document in stdlib_documents(stdlib)}
    trained = text_of(data.tokenizer, data).split("<|endoftext|>")
    assert trained.pop() == ""
    val_text = data.tokenizer.decode(data.val_dataset().tokens.tolist()).split("<|endoftext|>")
    assert val_text.pop() == ""
    assert len(val_text) == 1
    assert sorted(trained + val_text) == sorted(texts.values())
    assert trained == [texts[name] for name in sorted(texts) if texts[name] in trained]


def test_tokenizer_never_sees_the_validation_files(stdlib: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        python_stdlib,
        "train_bpe",
        lambda documents, size: seen.extend(d.name for d in documents) or train_bpe(documents, size),
    )
    data = PythonStdlib(vocab_size=300)
    data.connect(data.tokenizer, max_seq_length=16)
    assert len(seen) == 29
    held_out = next(d for d in stdlib_documents(stdlib) if d.name not in seen)
    assert data.tokenizer.decode(data.val_dataset().tokens.tolist()) == held_out.read() + "<|endoftext|>"


def test_cache_hit_trains_and_writes_nothing(stdlib: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = PythonStdlib(vocab_size=300)
    first.connect(None, max_seq_length=16)
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert {path.name for path in files} >= {"tokenizer.json", "train.bin", "val.bin"}

    def forbidden(*args: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(python_stdlib, "train_bpe", forbidden)
    second = PythonStdlib(vocab_size=300)
    second.prepare()
    second.connect(None, max_seq_length=16)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == files
    assert torch.equal(second.train_dataset()[3]["input_ids"], first.train_dataset()[3]["input_ids"])
    with pytest.raises(AssertionError, match="trained again"):
        PythonStdlib(vocab_size=301).prepare()
    (stdlib / "module00.py").write_text("changed = True\n")
    with pytest.raises(AssertionError, match="trained again"):
        PythonStdlib(vocab_size=300).prepare()


def test_workers_can_be_sent_the_module(stdlib: Path) -> None:
    data = PythonStdlib(vocab_size=300)
    data.connect(None, max_seq_length=16)
    before = data.train_dataset()[3]["targets"]
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy.train_dataset()[3]["targets"], before)
    assert copy.collate([copy.train_dataset()[3]])["targets"].tolist() == [before.tolist()]


def test_training_is_deterministic(stdlib: Path) -> None:
    documents = stdlib_documents(stdlib)
    assert train_bpe(documents, 320).to_str() == train_bpe(documents, 320).to_str()


def test_ids_above_16_bits_are_kept(stdlib: Path, big_tokenizer: Tokenizer) -> None:
    for path in stdlib.rglob("module*.py"):
        path.write_text("w65536 w69999 w1")
    data = PythonStdlib(vocab_size=300)
    data.connect(big_tokenizer, max_seq_length=4)
    for dataset in (data.train_dataset(), data.val_dataset()):
        assert dataset[0]["input_ids"].tolist()[:3] == [65_536, 69_999, 1]
        assert dataset[0]["targets"].tolist()[:3] == [69_999, 1, 70_000]


def test_small_sources_say_which_vocabulary_they_reach(stdlib: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = PythonStdlib(vocab_size=5000).tokenizer
    assert 257 < tokenizer.vocab_size < 1000
    output = capsys.readouterr().out
    assert "Training a tokenizer on 29 files" in output
    assert f"The tokenizer has {tokenizer.vocab_size} tokens, not the --data.vocab_size 5000" in output


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "a.py").write_text("def f(x):\n    return x\n" * 20)
    train_bpe([python_stdlib.Document("a.py", folder / "a.py")], 270).save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_survives_encoding(byte_tokenizer: Tokenizer, text: str) -> None:
    ids = byte_tokenizer.encode(text)
    assert all(0 <= i < byte_tokenizer.vocab_size for i in ids)
    assert byte_tokenizer.decode(ids) == text
    assert byte_tokenizer.encode_batch([text, text]) == [ids, ids]


@pytest.mark.parametrize(
    "text", ["def f():\n\treturn  1\r\n\n\n", "naïve 日本語 🙂 e\u0301\x00", "    ", "<|endoftext|> x"]
)
def test_code_and_unicode_survive_encoding(byte_tokenizer: Tokenizer, text: str) -> None:
    assert byte_tokenizer.decode(byte_tokenizer.encode(text)) == text


def test_unusable_libraries_and_sizes_are_refused(stdlib: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"--data\.vocab_size must be at least 257 .*got 256"):
        PythonStdlib(vocab_size=256)
    with pytest.raises(UsageError, match=r"29 files of .*python3\) has \d+ training tokens, fewer than the 1000001"):
        PythonStdlib(vocab_size=257).connect(None, max_seq_length=1_000_000)
    monkeypatch.setattr(python_stdlib, "stdlib_root", lambda: stdlib / "nowhere.zip")
    with pytest.raises(UsageError, match=r"no \.py sources in .*nowhere\.zip.*--data TextFiles"):
        PythonStdlib().prepare()


def test_command_line_takes_short_names(capsys: pytest.CaptureFixture[str]) -> None:
    def run(data: DataModule) -> DataModule:
        return data

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    with pytest.raises(SystemExit):
        jsonargparse.auto_cli(run, args=["--data.help", "PythonStdlib"], as_positional=False)
    assert "Number of tokens of the byte-level BPE" in " ".join(capsys.readouterr().out.split())

    arguments = ["--data", "PythonStdlib", "--data.vocab_size", "32768", "--data.num_workers", "1"]
    assert jsonargparse.auto_cli(run, args=arguments, as_positional=False) == PythonStdlib(
        vocab_size=32768, num_workers=1
    )


@pytest.mark.slow
def test_the_library_of_this_interpreter() -> None:
    data = PythonStdlib()
    data.prepare()
    data.connect(data.tokenizer, max_seq_length=512)
    documents = stdlib_documents(stdlib_root())
    assert all(EXCLUDED_FOLDERS.isdisjoint(document.name.split("/")) for document in documents)
    assert data.tokenizer.vocab_size == 16384
    train, val = data.train_dataset(), data.val_dataset()
    assert train.num_tokens > 1_500_000
    assert 0.02 < val.num_tokens / (train.num_tokens + val.num_tokens) < 0.06
    loss = data.unigram_loss()
    assert 6 < loss < math.log(16384)
    texts = {document.read() for document in documents}
    for text in data.tokenizer.decode(val.tokens.tolist()).split("<|endoftext|>")[:-1]:
        assert text in texts
