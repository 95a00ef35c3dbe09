"""Python source code that is on every machine: the standard library of the running interpreter."""

import json
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from litce.args import UsageError
from litce.data.text_files import (
    CACHE_FORMAT,
    Document,
    TextDataModule,
    cache_dir,
    cached_folder,
    documents_digest,
    split_documents,
)
from litce.tokenizer import Tokenizer

VAL_FRACTION = 0.05
EOS = "<|endoftext|>"

# Installed packages; tests, as much text again, some of it broken on purpose; generated tables of characters and help
# texts, which repeat themselves so much that they would flatter a loss and fill a sample.
EXCLUDED_FOLDERS = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data",
}  # fmt: skip


def stdlib_root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_documents(root: Path) -> list[Document]:
    """The non-empty UTF-8 `.py` files below `root` in the order of their paths, without packages and tests.

    Raises:
        UsageError: there are fewer than two, as where the library is zipped or stripped of its sources.
    """
    documents = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if EXCLUDED_FOLDERS.isdisjoint(name.parts) and _is_utf8_text(path):
            documents.append(Document(name.as_posix(), path))
    if len(documents) < 2:
        raise UsageError(
            f"there are no .py sources in {root}, the standard library of this interpreter (zipped or stripped?), for "
            "--data PythonStdlib and Docstrings; use --data TextFiles or JSON, or another interpreter"
        )
    return sorted(documents, key=lambda document: document.name)


def split_stdlib() -> tuple[list[Document], list[Document]]:
    """The library's training and validation files.

    Raises:
        UsageError: there are no sources.
    """
    return split_documents(stdlib_documents(stdlib_root()), VAL_FRACTION)


def _is_utf8_text(path: Path) -> bool:
    try:
        return bool(path.read_bytes().decode("utf-8"))
    except (OSError, UnicodeDecodeError):
        return False


def train_bpe(documents: Sequence[Document], vocab_size: int) -> HFTokenizer:
    """Byte-level BPE with GPT-2's split into words; id 0 is `<|endoftext|>`, then the 256 bytes, then merges."""
    tokenizer = HFTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.read() for document in documents), trainer)
    return tokenizer


@dataclass
class PythonStdlib(TextDataModule):
    """Sources of the running interpreter's standard library, with a tokenizer trained on them. Needs no download."""

    vocab_size: int = 16384
    """Number of tokens of the byte-level BPE that is trained on the training files"""
    num_workers: int = 0
    """Processes that read samples ahead of the training loop, 0 to read them in the loop"""

    def __post_init__(self) -> None:
        if self.vocab_size < 257:
            raise UsageError(
                f"--data.vocab_size must be at least 257 (256 bytes and {EOS}), got {self.vocab_size}; try 16384"
            )
        self._documents: tuple[list[Document], list[Document]] | None = None
        self._tokenizer: Tokenizer | None = None

    def prepare(self) -> None:
        """Train the tokenizer, or find it in the cache."""
        if self._tokenizer is not None:
            return
        train, _ = self._split()
        key = f"{CACHE_FORMAT}-{self.vocab_size}-{documents_digest(train)[:24]}"

        def build(folder: Path) -> None:
            size = sum(document.num_bytes for document in train)
            print(f"Training a tokenizer on {len(train)} files of Python's library, {size / 1e6:.1f} MB", flush=True)
            tokenizer = train_bpe(train, self.vocab_size)
            reached = tokenizer.get_vocab_size()
            if reached < self.vocab_size:
                print(
                    f"The tokenizer has {reached} tokens, not the --data.vocab_size {self.vocab_size} asked for: "
                    "the sources have no more pairs to merge",
                    flush=True,
                )
            tokenizer.save(str(folder / "tokenizer.json"))
            (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}), encoding="utf-8")

        self._tokenizer = Tokenizer(cached_folder(cache_dir() / "python_stdlib" / key, build))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer trained on the sources, built by `prepare` where that has not been called."""
        self.prepare()
        assert self._tokenizer is not None
        return self._tokenizer

    def connect(self, tokenizer: Tokenizer | None, max_seq_length: int, seed: int = 42) -> None:
        """Tokenize the sources with `tokenizer`, or with the module's own for None, or find them in the cache.

        Raises:
            UsageError: no sources, or fewer tokens than one sequence.
        """
        train, val = self._split()
        name = f"--data PythonStdlib ({len(train)} files of {stdlib_root()})"
        self.connect_documents(train, val, tokenizer or self.tokenizer, max_seq_length, train_name=name, val_name=name)

    def _split(self) -> tuple[list[Document], list[Document]]:
        if self._documents is None:
            self._documents = split_stdlib()
        return self._documents
