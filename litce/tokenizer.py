"""Text to token ids and back, over a Hugging Face `tokenizer.json`."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from litce.args import UsageError

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)

# Looked up in this order when no configuration file names the token.
COMMON_EOS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>")
COMMON_BOS = ("<|begin_of_text|>", "<s>", "<bos>")


class Tokenizer:
    """The tokenizer in a folder that holds `tokenizer.json`.

    The end- and begin-of-sequence ids come from `tokenizer_config.json`, else `generation_config.json`, else from the
    special tokens that are common in language models; a tokenizer without one has None.

    Raises:
        UsageError: a file is missing or cannot be read, or a configured token is not in the vocabulary.
    """

    bos_id: int | None
    eos_id: int | None

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise UsageError(f"{path} does not exist; give --tokenizer_dir a folder that holds a tokenizer.json")
        try:
            self.processor = HFTokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises plain Exception for every kind of bad file
            raise UsageError(
                f"{path} is not a readable tokenizer.json ({error}); download or build it again"
            ) from error
        # Some published files carry the truncation of the model they were trained for, which would drop text.
        self.processor.no_truncation()
        self.processor.no_padding()
        # Not the number of entries: published vocabularies have holes.
        self.vocab_size: int = 1 + max(self.processor.get_vocab(with_added_tokens=True).values(), default=-1)
        if self.vocab_size == 0:
            raise UsageError(f"{path} has an empty vocabulary; download or build it again")
        self.eos_id = self._special_id("eos", COMMON_EOS)
        self.bos_id = self._special_id("bos", COMMON_BOS)

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of `text`, each in [0, vocab_size); nothing is added unless `bos` or `eos` asks for it.

        Raises:
            UsageError: `bos` or `eos` is asked for and the tokenizer has none.
        """
        ids = self.processor.encode(text, add_special_tokens=False).ids
        return [*([self._require("bos")] if bos else []), *ids, *([self._require("eos")] if eos else [])]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text as `encode` gives them, on all cores."""
        return [encoding.ids for encoding in self.processor.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included, so that decoding loses nothing that a byte-level encoding kept."""
        return self.processor.decode(list(ids), skip_special_tokens=False)

    @property
    def fingerprint(self) -> str:
        """Digest of everything that decides the ids of a document, as 64 hexadecimal digits."""
        digest = hashlib.sha256((self.directory / "tokenizer.json").read_bytes())
        digest.update(f"bos={self.bos_id} eos={self.eos_id}".encode())
        return digest.hexdigest()

    def save(self, directory: Path | str) -> None:
        """Copy the tokenizer's files to `directory`; a reader never sees half a file."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        if target.resolve() == self.directory.resolve():
            return
        for name in FILES:
            if (self.directory / name).is_file():
                temporary = target / f".{name}.{os.getpid()}"
                shutil.copyfile(self.directory / name, temporary)
                os.replace(temporary, target / name)

    def _require(self, kind: str) -> int:
        token_id: int | None = getattr(self, f"{kind}_id")
        if token_id is None:
            raise UsageError(
                f"the tokenizer in {self.directory} has no {kind} token; "
                f'name one as "{kind}_token" in {self.directory / "tokenizer_config.json"}'
            )
        return token_id

    def _special_id(self, kind: str, common: Sequence[str]) -> int | None:
        config = self._read_json("tokenizer_config.json")
        token = config.get(f"{kind}_token")
        if isinstance(token, dict):
            token = token.get("content")
        if token is not None:
            token_id = self.processor.token_to_id(token)
            if token_id is None:
                raise UsageError(
                    f"{self.directory / 'tokenizer_config.json'}: {kind}_token {token!r} is not in the vocabulary of "
                    "tokenizer.json; correct one of the two files"
                )
            return token_id
        # A null bos token says that the model was trained without one; generation_config.json then often repeats eos.
        if kind == "bos" and "bos_token" in config:
            return None
        token_id = self._read_json("generation_config.json").get(f"{kind}_token_id")
        if isinstance(token_id, list):
            token_id = token_id[0] if token_id else None
        if token_id is not None:
            if self.processor.id_to_token(token_id) is None:
                raise UsageError(
                    f"{self.directory / 'generation_config.json'}: {kind}_token_id {token_id} is not in the vocabulary "
                    "of tokenizer.json; correct one of the two files"
                )
            return int(token_id)
        return next((found for name in common if (found := self.processor.token_to_id(name)) is not None), None)

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        if not path.is_file():
            return {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{path} is not valid JSON ({error}); correct or remove it") from error
        if not isinstance(content, dict):
            raise UsageError(f"{path} must hold a JSON object, got {type(content).__name__}; correct or remove it")
        return content
