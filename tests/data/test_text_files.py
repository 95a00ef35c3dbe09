import multiprocessing
from pathlib import Path

import pytest

from litce.args import UsageError
from litce.data import PythonStdlib, TextFiles, text_files
from litce.data.text_files import Document, cached_folder, split_documents, split_text, write_tokens
from litce.data.token_file import TokenBlocks
from litce.tokenizer import Tokenizer

EOS = 70_000


def tokens(dataset: TokenBlocks) -> list[int]:
    return dataset.tokens.tolist()


def folder_of(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    return root


def test_ids_above_16_bits_are_kept_with_eos_between_documents(tmp_path: Path, big_tokenizer: Tokenizer) -> None:
    folder = folder_of(tmp_path / "train", {"b.txt": "w65536 w69999", "a/a.txt": "w65535", "skipped.md": "w3"})
    val = folder_of(tmp_path / "val", {"c.txt": "w65537 w2"})
    data = TextFiles(folder, val)
    data.connect(big_tokenizer, max_seq_length=4)
    assert tokens(data.train_dataset()) == [65_535, EOS, 65_536, 69_999, EOS]
    assert tokens(data.val_dataset()) == [65_537, 2, EOS]
    assert data.train_dataset()[0]["targets"].tolist() == [EOS, 65_536, 69_999, EOS]


def test_validation_files_inside_the_folder_are_not_trained_on(tmp_path: Path, big_tokenizer: Tokenizer) -> None:
    folder = folder_of(tmp_path / "all", {"a.txt": "w1 w2 w3 w4", "val/b.txt": "w5 w6"})
    data = TextFiles(folder, folder / "val")
    data.connect(big_tokenizer, max_seq_length=4)
    assert tokens(data.train_dataset()) == [1, 2, 3, 4, EOS]
    assert tokens(data.val_dataset()) == [5, 6, EOS]


def test_fraction_holds_out_whole_files(tmp_path: Path, big_tokenizer: Tokenizer) -> None:
    folder = folder_of(tmp_path / "all", {f"{i}.txt": f"w{i} " * 10 for i in range(100, 140)})
    data = TextFiles(folder, val_fraction=0.1)
    data.connect(big_tokenizer, max_seq_length=4)
    trained, held_out = set(tokens(data.train_dataset())) - {EOS}, set(tokens(data.val_dataset())) - {EOS}
    assert len(held_out) in (3, 4)
    assert not trained & held_out
    assert trained | held_out == set(range(100, 140))


def test_single_file_gives_its_end_from_a_line_on(tmp_path: Path, big_tokenizer: Tokenizer) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"w{i} w{i}\n" for i in range(100, 200)))
    data = TextFiles(path, val_fraction=0.105)
    data.connect(big_tokenizer, max_seq_length=4)
    assert tokens(data.train_dataset()) == [i for i in range(100, 189) for _ in range(2)] + [EOS]
    assert tokens(data.val_dataset()) == [i for i in range(189, 200) for _ in range(2)] + [EOS]


def test_split_depends_on_names_alone(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {f"{i}.txt": "x" * (100 + i) for i in range(50)})
    documents = [Document(f"{i}.txt", folder / f"{i}.txt") for i in range(50)]
    train, val = split_documents(documents, 0.05)
    assert sorted(document.name for document in train + val) == sorted(document.name for document in documents)
    held_out = sum(document.num_bytes for document in val) / sum(document.num_bytes for document in documents)
    assert 0.0375 <= held_out <= 0.05
    assert {d.name for d in split_documents(documents[::-1], 0.05)[1]} == {d.name for d in val}


def test_files_larger_than_the_fraction_give_the_end_of_the_largest(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"a.txt": "a" * 400, "b.txt": "b\n" * 300, "c.txt": ""})
    train, val = split_documents([Document(name, folder / name) for name in ("a.txt", "b.txt", "c.txt")], 0.1)
    assert [document.read() for document in train] == ["a" * 400, "b\n" * 250, ""]
    assert [document.read() for document in val] == ["b\n" * 50]


def test_pieces_of_a_long_text_are_its_ids(stdlib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = PythonStdlib(vocab_size=300).tokenizer
    text = (Path(text_files.__file__).read_text() + "\n\n \n x\r\n\r\ny\n") * 2
    pieces = list(split_text(text, 50))
    assert len(pieces) > 15
    assert "".join(pieces) == text
    assert [i for piece in pieces for i in tokenizer.encode(piece)] == tokenizer.encode(text)
    (tmp_path / "a.txt").write_bytes(text.encode())
    monkeypatch.setattr(text_files, "PIECE_CHARS", 50)
    monkeypatch.setattr(text_files, "BATCH_CHARS", 200)
    write_tokens([Document("a", tmp_path / "a.txt")] * 2, tokenizer, tmp_path / "a.bin")
    written = TokenBlocks(tmp_path / "a.bin", "uint16", 8).tokens.tolist()
    assert written == tokenizer.encode(text, eos=True) * 2


def test_cache_is_used_until_the_text_or_the_tokenizer_changes(
    tmp_path: Path, big_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "all", {f"{i}.txt": f"w{i} " * 10 for i in range(9)})
    written: list[str] = []

    def counting(documents: list[Document], tokenizer: Tokenizer, path: Path) -> None:
        written.append(path.name)
        write_tokens(documents, tokenizer, path)

    def files_written(tokenizer: Tokenizer) -> int:
        written.clear()
        TextFiles(folder).connect(tokenizer, max_seq_length=4)
        return len(written)

    monkeypatch.setattr(text_files, "write_tokens", counting)
    assert files_written(big_tokenizer) == 2
    assert files_written(big_tokenizer) == 0
    (folder / "0.txt").write_text("w1 " * 10)
    assert files_written(big_tokenizer) == 2
    big_tokenizer.save(tmp_path / "other")
    (tmp_path / "other" / "tokenizer_config.json").write_text('{"eos_token": "w5"}')
    assert files_written(Tokenizer(tmp_path / "other")) == 2


def build_words(folder: Path, words: str = "words") -> None:
    (folder / "words").write_text(words)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("damage", ["truncate", "change", "remove", "no manifest", "torn manifest", "empty folder"])
def test_damaged_cache_is_built_again(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = cached_folder(tmp_path / "cache" / "key", build_words)
    before = contents(folder)
    if damage == "truncate":
        (folder / "words").write_text("wor")
    elif damage == "change":
        (folder / "words").write_text("sword")
    elif damage == "remove":
        (folder / "words").unlink()
    elif damage == "no manifest":
        (folder / "manifest.json").unlink()
    elif damage == "torn manifest":
        (folder / "manifest.json").write_text('{"words": "12')
    else:
        for path in folder.iterdir():
            path.unlink()
    assert contents(cached_folder(folder, build_words)) == before
    assert "key is damaged and is built again" in capsys.readouterr().out
    assert [path.name for path in folder.parent.iterdir()] == ["key"]


@pytest.mark.parametrize("damaged", [False, True])
def test_processes_that_build_at_once_both_succeed(tmp_path: Path, damaged: bool) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    folder = tmp_path / "cache" / "key"
    if damaged:
        cached_folder(folder, build_words)
        (folder / "words").write_text("sword")

    def build(temporary: Path) -> None:
        build_words(temporary)
        barrier.wait(timeout=30)

    processes = [context.Process(target=cached_folder, args=(folder, build)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (folder / "words").read_text() == "words"
    assert [path.name for path in folder.parent.iterdir()] == ["key"]


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        build_words(folder)
        raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        cached_folder(tmp_path / "cache" / "key", fail)
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match=r"the cache .*file.* cannot be written .*set LITCE_CACHE"):
        cached_folder(tmp_path / "file" / "key", build_words)


def test_unusable_input_is_refused(tmp_path: Path, big_tokenizer: Tokenizer) -> None:
    folder = folder_of(tmp_path / "all", {"a.txt": "w1 w2 w3 w4"})
    with pytest.raises(UsageError, match="give --tokenizer_dir"):
        TextFiles(folder).connect(None, 4)
    with pytest.raises(UsageError, match=r"--data\.path .*none does not exist"):
        TextFiles(tmp_path / "none").connect(big_tokenizer, 4)
    with pytest.raises(UsageError, match=r"all has no file that matches --data\.pattern '\*\.py'"):
        TextFiles(folder, pattern="*.py").connect(big_tokenizer, 4)
    with pytest.raises(UsageError, match=r"--data\.path .*all \(1 files\) has 5 training tokens, fewer than the 9"):
        TextFiles(folder, folder_of(tmp_path / "val", {"b.txt": "w1 w2"})).connect(big_tokenizer, 8)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UsageError, match=r"--data\.val_path .*empty\.txt \(1 files\) has 0 validation tokens"):
        TextFiles(folder, tmp_path / "empty.txt").connect(big_tokenizer, 4)
    (folder / "a.txt").write_bytes(b"w1 \xff")
    with pytest.raises(UsageError, match=r"a\.txt is not UTF-8 \(byte 3\); .* --data\.pattern"):
        TextFiles(folder).connect(big_tokenizer, 4)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(
        UsageError, match=r"the cache .*key cannot be built .*No space left.*; make room or set LITCE_CACHE"
    ):
        cached_folder(tmp_path / "cache" / "key", fail)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("pattern", ["", " ", "/etc/*", "../*", "a/../../*.txt", ".."])
def test_a_pattern_stays_below_the_path(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(UsageError, match=r"--data\.pattern '.*': give a pattern of files below --data\.path"):
        TextFiles(tmp_path, pattern=pattern)


@pytest.mark.parametrize("pattern", ["**", "**/*", "**/**", "*/**"])
def test_two_stars_find_the_files_of_all_folders_on_every_python(
    tmp_path: Path, big_tokenizer: Tokenizer, pattern: str
) -> None:
    files = {"a.txt": "w1 w2", "x/b.md": "w3 w4", "x/y/c": "w5 w6"}
    folder = folder_of(tmp_path / "all", files)
    found = [document.name for document in TextFiles(folder, pattern=pattern)._find("--data.path", folder)]
    assert found == sorted(name for name in files if pattern != "*/**" or "/" in name)


def test_a_pattern_that_python_cannot_search_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a**b before Python 3.13."""

    def refusing(*args: object) -> None:
        raise ValueError("Invalid pattern")

    monkeypatch.setattr(Path, "glob", refusing)
    with pytest.raises(UsageError, match=r"--data\.pattern 'a\*\*b' cannot be searched for in .*Invalid pattern"):
        TextFiles(tmp_path, pattern="a**b")._find("--data.path", tmp_path)
