"""Text documents, their cache of token ids, and the module that reads a folder of them."""

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import numpy as np

from litce.args import UsageError
from litce.data.base import DataModule
from litce.data.token_file import TokenBlocks, check_val_fraction, require_length, token_dtype, unigram_loss
from litce.tokenizer import Tokenizer

CACHE_FORMAT = "v1"
MANIFEST = "manifest.json"

# Encoding holds about a hundred bytes per token, so long texts are encoded in pieces of this many characters.
PIECE_CHARS = 1 << 20
BATCH_CHARS = 1 << 22


@dataclass(frozen=True)
class Document:
    """A UTF-8 file, or its characters [start, stop)."""

    name: str
    path: Path
    start: int | None = None
    stop: int | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return self.path.stat().st_size

    def read(self) -> str:
        """The text, line ends as they are in the file.

        Raises:
            UsageError: the file is not UTF-8.
        """
        try:
            text = self.path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{self.path} is not UTF-8 (byte {error.start}); convert it, or leave it out with --data.pattern"
            ) from error
        return text[self.start : self.stop]


def split_documents(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """Training and validation documents, the latter three quarters to all of `fraction` of the bytes.

    Documents are taken in the order of the hash of their names, so the choice depends on no seed and on no machine.
    Where every one is larger than `fraction` allows, the end of the largest is held out.
    """
    order = sorted(documents, key=lambda document: hashlib.sha256(document.name.encode()).digest())
    limit = fraction * sum(document.num_bytes for document in order)
    held_out: set[str] = set()
    held_bytes = 0
    for document in order:
        if held_bytes + document.num_bytes <= limit:
            held_out.add(document.name)
            held_bytes += document.num_bytes
        # Going on would fill the last gap with whatever is tiny.
        if held_bytes >= 0.75 * limit:
            break
    if held_bytes == 0:
        largest = max(order, key=lambda document: document.num_bytes)
        start, end = _cut_end(largest, limit / max(1, largest.num_bytes))
        return [start if document is largest else document for document in documents], [end]
    return (
        [document for document in documents if document.name not in held_out],
        [document for document in documents if document.name in held_out],
    )


def _cut_end(document: Document, fraction: float) -> tuple[Document, Document]:
    text = document.read()
    middle = len(text) - round(len(text) * fraction)
    # A whole line is a better start than half a word.
    boundary = text.rfind("\n", 0, middle) + 1 or middle
    return replace(document, stop=boundary), replace(document, start=boundary)


def cache_dir() -> Path:
    """`$LITCE_CACHE`, or `~/.cache/litce`."""
    return Path(os.environ.get("LITCE_CACHE") or Path.home() / ".cache" / "litce").expanduser()


def cached_folder(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, filled by `build(temporary folder)` unless it is there and its files are those that were built.

    Processes that build at the same time each work in their own temporary folder; the first to finish wins.

    Raises:
        UsageError: the cache cannot be written.
    """
    if _is_complete(folder):
        return folder
    if folder.exists():
        print(f"{folder} is damaged and is built again", flush=True)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"the cache {folder.parent} cannot be written ({error}); set LITCE_CACHE") from error
    try:
        build(temporary)
        digests = {path.name: _file_digest(path) for path in temporary.iterdir()}
        (temporary / MANIFEST).write_text(json.dumps(digests), encoding="utf-8")
        _publish(temporary, folder)
    except OSError as error:
        raise UsageError(f"the cache {folder} cannot be built ({error}); make room or set LITCE_CACHE") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _publish(temporary: Path, folder: Path) -> None:
    for _ in range(10):
        with suppress(OSError):  # the folder exists: built by another process meanwhile, or damaged
            temporary.rename(folder)
            return
        if _is_complete(folder):
            return
        damaged = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        with suppress(FileNotFoundError):  # another process has set it aside
            folder.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    raise UsageError(f"the cache {folder} cannot be replaced; remove it or set LITCE_CACHE")


def _is_complete(folder: Path) -> bool:
    try:
        digests = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return all(_file_digest(folder / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def documents_digest(documents: Sequence[Document]) -> str:
    """Digest of the documents' contents in their order, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{_file_digest(document.path)} {document.start} {document.stop}\n".encode())
    return digest.hexdigest()


def split_text(text: str, piece_chars: int) -> Iterator[str]:
    """Pieces of at least `piece_chars` characters, cut where a lone line break is followed by a visible character.

    There a byte-level tokenizer ends a word anyway, so the ids of the pieces are those of the text.
    """
    seam = re.compile(r"(?<=\S\n)(?=\S)")
    first = 0
    while len(text) - first > piece_chars and (match := seam.search(text, first + piece_chars)):
        yield text[first : match.start()]
        first = match.start()
    if first < len(text):
        yield text[first:]


def write_tokens(documents: Sequence[Document], tokenizer: Tokenizer, path: Path) -> None:
    """Write the ids of the documents, each followed by the end-of-sequence id, in `token_dtype(vocab_size)`."""
    dtype = token_dtype(tokenizer.vocab_size)
    eos = tokenizer.encode("", eos=True)
    with path.open("wb") as file:
        for batch in _batches(documents):
            encoded = tokenizer.encode_batch([piece for piece, _ in batch])
            for ids, (_, ends_document) in zip(encoded, batch, strict=True):
                np.array(ids + eos if ends_document else ids, dtype=dtype).tofile(file)


def _batches(documents: Sequence[Document]) -> Iterator[list[tuple[str, bool]]]:
    """Lists of (piece, whether it ends its document) of about `BATCH_CHARS` characters."""
    batch: list[tuple[str, bool]] = []
    num_chars = 0
    for document in documents:
        pieces = list(split_text(document.read(), PIECE_CHARS))
        for i, piece in enumerate(pieces, start=1):
            batch.append((piece, i == len(pieces)))
            num_chars += len(piece)
            if num_chars >= BATCH_CHARS:
                yield batch
                batch, num_chars = [], 0
    if batch:
        yield batch


def tokenize_documents(train: Sequence[Document], val: Sequence[Document], tokenizer: Tokenizer) -> Path:
    """Folder of the cache with `train.bin` and `val.bin`, keyed by the texts and the tokenizer.

    Raises:
        UsageError: a document is not UTF-8, the tokenizer has no end-of-sequence token, or the cache is not writable.
    """
    parts = (CACHE_FORMAT, tokenizer.fingerprint, documents_digest(train), documents_digest(val))
    key = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:24]

    def build(folder: Path) -> None:
        size = sum(document.num_bytes for document in {d.path: d for d in (*train, *val)}.values())
        print(f"Tokenizing {len(train)} training and {len(val)} validation texts, {size / 1e6:.1f} MB", flush=True)
        write_tokens(train, tokenizer, folder / "train.bin")
        write_tokens(val, tokenizer, folder / "val.bin")

    return cached_folder(cache_dir() / "tokens" / key, build)


class TextDataModule(DataModule):
    """A module whose samples are cut from tokenized documents."""

    def connect_documents(
        self,
        train: Sequence[Document],
        val: Sequence[Document],
        tokenizer: Tokenizer,
        max_seq_length: int,
        *,
        train_name: str,
        val_name: str,
    ) -> None:
        """Build the datasets over the cached tokens; the names stand for the data in an error."""
        folder = tokenize_documents(train, val, tokenizer)
        dtype = token_dtype(tokenizer.vocab_size)
        self._vocab_size = tokenizer.vocab_size
        self._train = TokenBlocks(folder / "train.bin", dtype, max_seq_length)
        self._val = TokenBlocks(folder / "val.bin", dtype, max_seq_length)
        require_length(self._train, self._val, train_name, val_name)

    def train_dataset(self) -> TokenBlocks:
        """Training samples of `max_seq_length` positions."""
        return self._train

    def val_dataset(self) -> TokenBlocks:
        """Validation samples of `max_seq_length` positions."""
        return self._val

    def unigram_loss(self) -> float:
        """See `DataModule.unigram_loss`."""
        return unigram_loss(self._train, self._val, self._vocab_size)


@dataclass
class TextFiles(TextDataModule):
    """Text files (UTF-8), tokenized once and cached."""

    path: Path
    """Text file, or folder of text files, to train on"""
    val_path: Path | None = None
    """Text file or folder to validate on; its files are left out of training"""
    val_fraction: float | None = None
    """Part held out when there is no val_path: whole files, or the end of one where all are larger (default: 0.05)"""
    pattern: str = "**/*.txt"
    """Which files of a folder to read"""
    num_workers: int = 0
    """Processes that read samples ahead of the training loop, 0 to read them in the loop"""

    def __post_init__(self) -> None:
        self._fraction = check_val_fraction(self.val_fraction, self.val_path)
        pattern = PurePath(self.pattern)
        if not self.pattern.strip() or pattern.anchor or ".." in pattern.parts:
            raise UsageError(
                f"--data.pattern {self.pattern!r}: give a pattern of files below --data.path, such as **/*.txt"
            )

    def connect(self, tokenizer: Tokenizer | None, max_seq_length: int, seed: int = 42) -> None:
        """Tokenize the files, or find them in the cache.

        Raises:
            UsageError: no tokenizer, no files, a file that is not UTF-8, or less text than one sequence.
        """
        if tokenizer is None:
            raise UsageError("--data TextFiles needs a tokenizer; give --tokenizer_dir")
        documents = self._find("--data.path", self.path)
        if self.val_path is not None:
            val = self._find("--data.val_path", self.val_path)
            held_out = {document.path.resolve() for document in val}
            train = [document for document in documents if document.path.resolve() not in held_out]
        else:
            train, val = split_documents(documents, self._fraction)
        val_name = f"--data.path {self.path}" if self.val_path is None else f"--data.val_path {self.val_path}"
        self.connect_documents(
            train,
            val,
            tokenizer,
            max_seq_length,
            train_name=f"--data.path {self.path} ({len(train)} files)",
            val_name=f"{val_name} ({len(val)} files)",
        )

    def _find(self, flag: str, path: Path) -> list[Document]:
        if path.is_file():
            return [Document(path.name, path)]
        if not path.is_dir():
            raise UsageError(f"{flag} {path} does not exist; give a text file or a folder of text files")
        # Before Python 3.13 a pattern that ends in ** finds folders alone.
        pattern = f"{self.pattern}/*" if PurePath(self.pattern).name == "**" else self.pattern
        try:
            files = sorted({file for file in path.glob(pattern) if file.is_file()})
        except (OSError, ValueError) as error:
            raise UsageError(f"--data.pattern {self.pattern!r} cannot be searched for in {path}: {error}") from error
        if not files:
            raise UsageError(f"{flag} {path} has no file that matches --data.pattern {self.pattern!r}; change one")
        return [Document(file.relative_to(path).as_posix(), file) for file in files]
