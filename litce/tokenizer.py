"""Text to token ids and back, over a Hugging Face `tokenizer.json`."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from functools import cached_property
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

    def encode_pieces(self, texts: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        """Ids of texts that are given in pieces, piece by piece, so that no token reaches over a seam.

        The first piece has the ids that `encode` gives it. The others have no space in front where the tokenizer puts
        one before a text: all ids of a text decode to the whole of it.
        """
        flat = iter(self.encode_batch([piece for pieces in texts for piece in pieces]))
        encoded = [[next(flat) for _ in pieces] for pieces in texts]
        if self._without_prefix is not None:
            for pieces, ids in zip(texts, encoded, strict=True):
                for i in range(1, len(pieces)):
                    previous = next((part[-1] for part in reversed(ids[:i]) if part), None)
                    if previous is not None:
                        ids[i] = self._encode_after(previous, pieces[i])
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included, so that decoding loses nothing that a byte-level encoding kept."""
        return self.processor.decode(list(ids), skip_special_tokens=False)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a text: the end of sequence, and what generation_config.json names beside it.

        Raises:
            UsageError: generation_config.json cannot be read.
        """
        named = self._read_json("generation_config.json").get("eos_token_id")
        named = named if isinstance(named, list) else [named]
        return frozenset(i for i in (self.eos_id, *named) if isinstance(i, int))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text."""
        return frozenset(i for i, token in self.processor.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def needed_vocab_size(self) -> int:
        """Ids that a model has to have: those of text and those that begin and end one.

        Other special tokens may be missing: Gemma 3's tokenizer has one for images, which its text models lack.
        """
        ids = {*self.processor.get_vocab(with_added_tokens=True).values()} - self.special_ids
        return 1 + max(ids | {i for i in (self.bos_id, self.eos_id) if i is not None}, default=-1)

    @cached_property
    def num_bytes(self) -> list[int]:
        """Bytes of UTF-8 that each id in [0, vocab_size) stands for in a text; 0 for special tokens and holes.

        A space that the tokenizer puts before a text counts as one of it.
        """
        parts = json.dumps({key: json.loads(self.processor.to_str()).get(key) for key in ("pre_tokenizer", "decoder")})
        byte_level = '"ByteLevel"' in parts
        sizes = [0] * self.vocab_size
        for token, token_id in self.processor.get_vocab(with_added_tokens=True).items():
            if token_id in self.special_ids or token_id in (self.bos_id, self.eos_id):
                sizes[token_id] = 0
            elif token_id in self._added_ids:
                sizes[token_id] = len(token.encode())
            elif byte_level:  # a character for each byte
                sizes[token_id] = len(token)
            elif re.fullmatch("<0x[0-9A-F]{2}>", token):  # what is no character of the vocabulary, byte by byte
                sizes[token_id] = 1
            else:
                sizes[token_id] = len(token.replace("\u2581", " ").encode())  # the mark of a space
        return sizes

    @property
    def chat_template(self) -> tuple[Path, str] | None:
        """The file with the jinja template of conversations, and the template; None if the folder has none.

        Raises:
            UsageError: tokenizer_config.json cannot be read.
        """
        path = self.directory / "chat_template.jinja"
        if path.is_file():
            return path, path.read_text(encoding="utf-8")
        template = self._read_json("tokenizer_config.json").get("chat_template")
        if isinstance(template, list):
            template = {str(entry.get("name")): entry.get("template") for entry in template}.get("default")
        return (self.directory / "tokenizer_config.json", template) if isinstance(template, str) else None

    @property
    def special_tokens(self) -> dict[str, str]:
        """Text of the special tokens by their names in the configuration files, such as "eos_token"."""
        entries = {**self._read_json("special_tokens_map.json"), **self._read_json("tokenizer_config.json")}
        texts = {
            name: token.get("content") if isinstance(token, dict) else token
            for name, token in entries.items()
            if name.endswith("_token")
        }
        return {name: text for name, text in texts.items() if isinstance(text, str)}

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

    @cached_property
    def _without_prefix(self) -> HFTokenizer | None:
        """The tokenizer without the space that it puts before a text; None if it puts none."""
        state = json.loads(self.processor.to_str())
        plain = {**state, **{part: _drop_prefix(state.get(part)) for part in ("normalizer", "pre_tokenizer")}}
        return None if plain == state else HFTokenizer.from_str(json.dumps(plain))

    @cached_property
    def _prefix_after_special(self) -> bool:
        """Whether the text after a special token gets the space too."""
        return '"prepend_scheme":"first"' not in self.processor.to_str()

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self.processor.get_added_tokens_decoder())

    def _encode_after(self, previous_id: int, text: str) -> list[int]:
        """Ids of `text` behind a text that ends in `previous_id`, with the spaces of one text."""
        encoding = self.processor.encode(text, add_special_tokens=False)
        if previous_id in self._added_ids and self._prefix_after_special:
            return encoding.ids
        # Special tokens in the text part it, and what is behind the first one is as the tokenizer has it.
        first = next((i for i, token_id in enumerate(encoding.ids) if token_id in self._added_ids), len(encoding.ids))
        head = text[: encoding.offsets[first][0]] if first < len(encoding.ids) else text
        assert self._without_prefix is not None
        return self._without_prefix.encode(head, add_special_tokens=False).ids + encoding.ids[first:]

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


def _drop_prefix(part: Any) -> Any:
    """A normalizer or pre-tokenizer, as tokenizer.json describes it, that puts no space before a text."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Sequence":
        key = "normalizers" if "normalizers" in part else "pretokenizers"
        kept = [_drop_prefix(item) for item in part[key]]
        return {**part, key: [item for item in kept if item is not None]}
    if part.get("type") == "Prepend":
        return None
    if part.get("type") == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    return {**part, "add_prefix_space": False} if part.get("add_prefix_space") else part
