import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from litce.args import UsageError
from litce.data import TokenFile, token_file
from litce.data.token_file import TokenBlocks, token_dtype, unigram_loss
from litce.tokenizer import Tokenizer


def write(path: Path, ids: list[int] | np.ndarray, dtype: str = "uint16") -> Path:
    np.asarray(ids, dtype=dtype).tofile(path)
    return path


@pytest.mark.parametrize("num_tokens", [2, 8, 9, 10, 17, 100])
def test_every_token_but_the_first_is_predicted_once_from_the_one_before(tmp_path: Path, num_tokens: int) -> None:
    ids = torch.arange(1000, 1000 + num_tokens)
    blocks = TokenBlocks(write(tmp_path / "a.bin", ids.numpy()), "uint16", seq_length=8)
    samples = [blocks[i] for i in range(len(blocks))]
    inputs = torch.cat([sample["input_ids"] for sample in samples])
    targets = torch.cat([sample["targets"] for sample in samples])
    assert {tuple(sample["input_ids"].shape) for sample in samples} == {(8,)}
    assert inputs.dtype == targets.dtype == torch.int64
    supervised = targets != -100
    assert targets[supervised].tolist() == ids[1:].tolist()
    assert inputs[supervised].tolist() == ids[:-1].tolist()
    assert not inputs[~supervised].any()


def test_index_outside_is_an_error(tmp_path: Path) -> None:
    blocks = TokenBlocks(write(tmp_path / "a.bin", list(range(17))), "uint16", seq_length=8)
    assert len(blocks) == 2
    for index in (-1, 2):
        with pytest.raises(IndexError):
            blocks[index]


def test_pickling_takes_the_name_and_not_the_tokens(tmp_path: Path) -> None:
    blocks = TokenBlocks(write(tmp_path / "a.bin", np.arange(60_000)), "uint16", seq_length=8, start=3)
    before = blocks[5]
    state = pickle.dumps(blocks)
    assert len(state) < 2000
    assert torch.equal(pickle.loads(state)[5]["targets"], before["targets"])


def test_token_dtype_holds_the_largest_id() -> None:
    assert token_dtype(65_536) == "uint16"
    assert token_dtype(65_537) == "uint32"


@pytest.mark.parametrize("dtype", ["uint32", "int32", "int64"])
def test_ids_above_16_bits_are_kept(tmp_path: Path, big_tokenizer: Tokenizer, dtype: str) -> None:
    ids = [65_535, 65_536, 69_999, 0, 65_537]
    data = TokenFile(write(tmp_path / "a.bin", ids, dtype), write(tmp_path / "b.bin", ids, dtype), dtype=dtype)  # type: ignore[arg-type]
    data.connect(big_tokenizer, max_seq_length=4)
    for dataset in (data.train_dataset(), data.val_dataset()):
        assert len(dataset) == 1
        assert dataset[0]["input_ids"].tolist() == ids[:-1]
        assert dataset[0]["targets"].tolist() == ids[1:]


def test_fraction_holds_out_the_end(tmp_path: Path) -> None:
    data = TokenFile(write(tmp_path / "a.bin", list(range(100))), val_fraction=0.2)
    data.connect(None, max_seq_length=4)
    assert data.train_dataset().tokens.tolist() == list(range(80))
    assert data.val_dataset().tokens.tolist() == list(range(80, 100))
    assert data.val_dataset()[0]["targets"].tolist() == [81, 82, 83, 84]


def test_unigram_loss_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = TokenBlocks(write(tmp_path / "a.bin", [0, 1, 1, 2, 1]), "uint16", seq_length=2)
    val = TokenBlocks(write(tmp_path / "b.bin", [3, 1, 0, 3]), "uint16", seq_length=2)
    # Counts + 1 are 2, 4, 2, 1 of 5 + 4; the first 3 is read and not predicted.
    expected = -(math.log(4 / 9) + math.log(2 / 9) + math.log(1 / 9)) / 3
    assert unigram_loss(train, val, vocab_size=4) == pytest.approx(expected, rel=1e-12)
    monkeypatch.setattr(token_file, "SCAN_TOKENS", 2)
    assert unigram_loss(train, val, vocab_size=4) == pytest.approx(expected, rel=1e-12)


def test_module_knows_the_unigram_loss_with_a_tokenizer(tmp_path: Path, big_tokenizer: Tokenizer) -> None:
    data = TokenFile(write(tmp_path / "a.bin", [5] * 10), write(tmp_path / "b.bin", [5, 5, 6]))
    data.connect(None, max_seq_length=4)
    assert data.unigram_loss() is None
    data.connect(big_tokenizer, max_seq_length=4)
    total = 10 + big_tokenizer.vocab_size
    assert data.unigram_loss() == pytest.approx(-(math.log(11 / total) + math.log(1 / total)) / 2, rel=1e-12)


def test_bad_id_is_named(tmp_path: Path, big_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "SCAN_TOKENS", 8)
    ids = [1] * 50
    ids[30] = big_tokenizer.vocab_size
    data = TokenFile(write(tmp_path / "a.bin", ids, "int32"), val_fraction=0.5, dtype="int32")
    data.connect(None, max_seq_length=4)
    with pytest.raises(UsageError, match=r"a\.bin holds id 70002 at position 30.*vocabulary size 70002"):
        data.connect(big_tokenizer, max_seq_length=4)
    ids[30] = -1
    write(tmp_path / "a.bin", ids, "int32")
    with pytest.raises(UsageError, match=r"a\.bin holds id -1 at position 30"):
        data.connect(None, max_seq_length=4)


@pytest.mark.parametrize("where", [0, 30, 79, 80, 99])
def test_the_vocabulary_of_the_model_is_checked_without_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: int
) -> None:
    """In the training part, up to 79, and in the part held out."""
    monkeypatch.setattr(token_file, "SCAN_TOKENS", 8)
    ids = [1] * 100
    ids[where] = 500
    data = TokenFile(write(tmp_path / "a.bin", ids), val_fraction=0.2)
    data.connect(None, max_seq_length=4)
    data.check_vocabulary(501)
    with pytest.raises(
        UsageError, match=rf"a\.bin holds id 500 at position {where}, .*model's 500; .*vocab_size to 501"
    ):
        data.check_vocabulary(500)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"--data\.path .*a\.bin is empty"),
        (b"123", r"a\.bin has 3 bytes, no multiple of the 2 of --data\.dtype uint16"),
        (b"12" * 4, r"a\.bin has 3 training tokens, fewer than the 9 of one sequence \(--train\.max_seq_length 8"),
        (b"12" * 10, r"a\.bin has 1 validation tokens and a sequence \(--train\.max_seq_length 8\) needs at least 2"),
    ],
)
def test_unusable_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        TokenFile(path).connect(None, max_seq_length=8)


def test_missing_files_and_bad_fractions_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", list(range(100)))
    with pytest.raises(UsageError, match=r"--data\.val_path .*none\.bin is not a file"):
        TokenFile(path, tmp_path / "none.bin").connect(None, max_seq_length=8)
    with pytest.raises(UsageError, match=r"--data\.val_fraction must be between 0 and 1, got 1\.0"):
        TokenFile(path, val_fraction=1.0)
    with pytest.raises(UsageError, match="exclude each other"):
        TokenFile(path, path, val_fraction=0.1)
