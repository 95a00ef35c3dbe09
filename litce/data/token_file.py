"""Flat files of token ids: the dataset over them, and the module that reads them as they are."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from litce.args import UsageError
from litce.data.base import IGNORE_INDEX, DataModule, Sample
from litce.tokenizer import Tokenizer

SCAN_TOKENS = 1 << 22


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest stored type that holds every id in [0, vocab_size)."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class TokenBlocks(Dataset[Sample]):
    """Tokens [start, stop) of a flat file, cut into samples of `seq_length` positions.

    Block i holds the tokens from `i * seq_length`, `seq_length + 1` of them: the last is predicted here and read as
    the first input of the next block, so each token but the very first is predicted exactly once. The last sample is
    padded to `seq_length` with id 0 and target -100.

    Only the file's name is pickled; every worker maps the file itself.
    """

    def __init__(self, path: Path, dtype: str, seq_length: int, start: int = 0, stop: int | None = None) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.seq_length = seq_length
        self.start = start
        self.stop = path.stat().st_size // self.dtype.itemsize if stop is None else stop
        self._map: NDArray[Any] | None = None

    @property
    def num_tokens(self) -> int:
        """Stored tokens, one more than are predicted."""
        return self.stop - self.start

    @property
    def tokens(self) -> NDArray[Any]:
        """The stored ids, (num_tokens,), mapped and not read."""
        if self.num_tokens == 0:  # an empty file cannot be mapped
            return np.empty(0, self.dtype)
        if self._map is None:
            self._map = np.memmap(self.path, self.dtype, mode="r")[self.start : self.stop]
        return self._map

    def __len__(self) -> int:
        return math.ceil(max(0, self.num_tokens - 1) / self.seq_length)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first = index * self.seq_length
        block = torch.from_numpy(np.array(self.tokens[first : first + self.seq_length + 1], dtype=np.int64))
        missing = self.seq_length - (len(block) - 1)
        return {
            "input_ids": torch.nn.functional.pad(block[:-1], (0, missing), value=0),
            "targets": torch.nn.functional.pad(block[1:], (0, missing), value=IGNORE_INDEX),
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}

    def scan(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Pairs of (position of the first, ids as int64) that cover the tokens once, in bounded memory."""
        for first in range(0, self.num_tokens, SCAN_TOKENS):
            yield first, np.array(self.tokens[first : first + SCAN_TOKENS], dtype=np.int64)


def require_length(train: TokenBlocks, val: TokenBlocks, train_name: str, val_name: str) -> None:
    """Refuse training data shorter than one sequence and validation data with nothing to predict.

    Raises:
        UsageError: with the number of tokens and the sequence length.
    """
    if train.num_tokens < train.seq_length + 1:
        raise UsageError(
            f"{train_name} has {train.num_tokens} training tokens, fewer than the {train.seq_length + 1} of one "
            f"sequence (--train.max_seq_length {train.seq_length}, and the token after it); lower it or give more data"
        )
    if val.num_tokens < 2:
        raise UsageError(
            f"{val_name} has {val.num_tokens} validation tokens and a sequence (--train.max_seq_length "
            f"{val.seq_length}) needs at least 2; give --data.val_path or more data"
        )


def unigram_loss(train: TokenBlocks, val: TokenBlocks, vocab_size: int) -> float:
    """Mean of -log((count(token) + 1) / (num_train_tokens + vocab_size)) over the validation targets, in nats."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for _, ids in train.scan():
        counts += np.bincount(ids, minlength=vocab_size)
    losses = np.log(train.num_tokens + vocab_size) - np.log(counts + 1.0)
    # The first token of the stream is never a target.
    total = sum(float(losses[ids[1:] if first == 0 else ids].sum()) for first, ids in val.scan())
    return total / (val.num_tokens - 1)


@dataclass
class TokenFile(DataModule):
    """Pre-tokenised data: flat binary files of token ids, memory-mapped."""

    path: Path
    """File of training token ids, one after the other, without a header"""
    val_path: Path | None = None
    """File of validation token ids; without it the end of the training file is held out"""
    val_fraction: float | None = None
    """Part of the training file's end that is held out when there is no validation file (default: 0.05)"""
    dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    """Type of a stored id"""
    num_workers: int = 0
    """Processes that read samples ahead of the training loop, 0 to read them in the loop"""

    def __post_init__(self) -> None:
        self._vocab_size: int | None = None
        self._fraction = check_val_fraction(self.val_fraction, self.val_path)

    def connect(self, tokenizer: Tokenizer | None, max_seq_length: int, seed: int = 42) -> None:
        """Map the files and check every id, against the vocabulary where a tokenizer is given.

        Raises:
            UsageError: a file is missing, empty, of a size that is no multiple of the type's, or holds a bad id.
        """
        self._vocab_size = None if tokenizer is None else tokenizer.vocab_size
        num_tokens = self._count("--data.path", self.path)
        if self.val_path is None:
            boundary = num_tokens - max(1, round(num_tokens * self._fraction))
            self._train = TokenBlocks(self.path, self.dtype, max_seq_length, stop=boundary)
            self._val = TokenBlocks(self.path, self.dtype, max_seq_length, start=boundary)
        else:
            self._count("--data.val_path", self.val_path)
            self._train = TokenBlocks(self.path, self.dtype, max_seq_length)
            self._val = TokenBlocks(self.val_path, self.dtype, max_seq_length)
        val_name = f"--data.path {self.path}" if self.val_path is None else f"--data.val_path {self.val_path}"
        require_length(self._train, self._val, f"--data.path {self.path}", val_name)
        self._largest = [self._check_ids(blocks) for blocks in (self._train, self._val)]

    def check_vocabulary(self, vocab_size: int) -> None:
        """See `DataModule.check_vocabulary`."""
        for blocks, (largest, position) in zip((self._train, self._val), self._largest, strict=True):
            if largest >= vocab_size:
                raise UsageError(
                    f"{blocks.path} holds id {largest} at position {position}, above the last of the model's "
                    f"{vocab_size}; raise --model_config.vocab_size to {largest + 1} or check --data.dtype {self.dtype}"
                )

    def train_dataset(self) -> TokenBlocks:
        """Training samples of `max_seq_length` positions."""
        return self._train

    def val_dataset(self) -> TokenBlocks:
        """Validation samples of `max_seq_length` positions."""
        return self._val

    def unigram_loss(self) -> float | None:
        """See `DataModule.unigram_loss`; None without a tokenizer, whose vocabulary size it needs."""
        return None if self._vocab_size is None else unigram_loss(self._train, self._val, self._vocab_size)

    def _count(self, flag: str, path: Path) -> int:
        if not path.is_file():
            raise UsageError(f"{flag} {path} is not a file; give a flat binary file of {self.dtype} token ids")
        size, itemsize = path.stat().st_size, np.dtype(self.dtype).itemsize
        if size == 0:
            raise UsageError(f"{flag} {path} is empty; give a flat binary file of {self.dtype} token ids")
        if size % itemsize:
            raise UsageError(
                f"{flag} {path} has {size} bytes, no multiple of the {itemsize} of --data.dtype {self.dtype}; "
                "give the type that the file was written with"
            )
        return size // itemsize

    def _check_ids(self, blocks: TokenBlocks) -> tuple[int, int]:
        """Refuse ids that no vocabulary, or not the tokenizer's, has; the largest id and its position."""
        upper = np.iinfo(np.int64).max if self._vocab_size is None else self._vocab_size
        found = (-1, 0)
        for first, ids in blocks.scan():
            bad = np.flatnonzero((ids < 0) | (ids >= upper))
            if len(bad):
                position = blocks.start + first + int(bad[0])
                limit = "" if self._vocab_size is None else f" and below the tokenizer's vocabulary size {upper}"
                raise UsageError(
                    f"{blocks.path} holds id {ids[bad[0]]} at position {position}, and ids must be at least 0{limit}; "
                    f"check --data.dtype {self.dtype} and --tokenizer_dir"
                )
            where = int(ids.argmax())
            found = max(found, (int(ids[where]), blocks.start + first + where), key=lambda pair: pair[0])
        return found


def check_val_fraction(val_fraction: float | None, val_path: Path | None) -> float:
    """The part to hold out.

    Raises:
        UsageError: the fraction is outside (0, 1), or a validation path is given too.
    """
    if val_fraction is None:
        return 0.05
    if val_path is not None:
        raise UsageError(
            f"--data.val_fraction {val_fraction} and --data.val_path {val_path} exclude each other; remove one"
        )
    if not 0 < val_fraction < 1:
        raise UsageError(f"--data.val_fraction must be between 0 and 1, got {val_fraction}; 0.05 holds out a twentieth")
    return val_fraction
