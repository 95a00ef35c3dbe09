"""Instructions and conversations in JSON files."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litce.args import UsageError
from litce.data.instructions import InstructionDataModule, Row, StyleOption
from litce.data.token_file import check_val_fraction
from litce.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
FORM = 'a row needs "instruction" and "output" (and may have "input"), or "messages"'


@dataclass
class JSON(InstructionDataModule):
    """Instructions (rows of instruction, input, output) or conversations (rows of messages) in a JSON or JSONL file."""

    json_path: Path
    """File to train on: a list of rows, or a row per line; {"instruction", "input", "output"} or {"messages"}"""
    val_path: Path | None = None
    """File of the same form to validate on"""
    val_fraction: float | None = None
    """Part of the rows that is held out when there is no val_path (default: 0.05)"""
    prompt_style: StyleOption = "default"
    """How rows are written: alpaca, raw, chat (the tokenizer's template), or default: chat for messages, else alpaca"""
    mask_prompt: bool = True
    """Learn the replies alone; false learns the prompts too"""
    num_workers: int = 0
    """Processes that read samples ahead of the training loop, 0 to read them in the loop"""

    def __post_init__(self) -> None:
        self._fraction = check_val_fraction(self.val_fraction, self.val_path)

    def connect(self, tokenizer: Tokenizer | None, max_seq_length: int, seed: int = 42) -> None:
        """Read and tokenize the rows.

        Raises:
            UsageError: a file or a row of it is not of the form, or what `connect_rows` raises.
        """
        train, num_empty = _read("--data.json_path", self.json_path)
        if self.val_path is None:
            train, val = _split(train, self._fraction, f"--data.json_path {self.json_path}")
        else:
            val, num_empty_val = _read("--data.val_path", self.val_path)
            num_empty += num_empty_val
        self.connect_rows(
            train,
            val,
            tokenizer,
            max_seq_length,
            train_name=f"--data.json_path {self.json_path}",
            val_name=f"--data.json_path {self.json_path}"
            if self.val_path is None
            else f"--data.val_path {self.val_path}",
            num_empty=num_empty,
        )


def read_json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The values in a list, or one on each line, with the place of each; blank lines are no rows.

    Raises:
        UsageError: the file is not UTF-8 or not JSON, with the line.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 (byte {error.start}); convert it") from error
    if text.lstrip().startswith("["):
        for number, value in enumerate(_parse(text, str(path)), start=1):
            yield f"{path} row {number}", value
        return
    # Not splitlines, which also splits at characters that JSON allows inside a text.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path} line {number}", _parse(line, f"{path} line {number}")


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        raise UsageError(
            f"{place} is not valid JSON ({error.msg}, {where}); a file is a list of rows, or has a row on each line"
        ) from error
    except RecursionError as error:
        raise UsageError(f"{place} is nested too deeply; {FORM}") from error


def _read(flag: str, path: Path) -> tuple[list[Row], int]:
    """The rows of a file that have a reply, and the number of those that have none."""
    if not path.is_file():
        raise UsageError(f"{flag} {path} is not a file; give a .json or .jsonl file of instructions or messages")
    rows = [_row(place, value) for place, value in read_json_rows(path)]
    replied = [row for row in rows if row is not None]
    if not replied:
        raise UsageError(f"{flag} {path} has no row with a reply, of {len(rows)} rows; {FORM}")
    return replied, len(rows) - len(replied)


def _row(place: str, value: Any) -> Row | None:
    """The row; None if its reply is empty."""
    if not isinstance(value, dict):
        raise UsageError(f"{place} is {_kind(value)}; {FORM}")
    if "messages" in value:
        return _chat_row(place, value["messages"])
    instruction, output = (_text(place, value, key) for key in ("instruction", "output"))
    input = "" if value.get("input") is None else _text(place, value, "input")
    if not instruction.strip():
        raise UsageError(f'{place} has an empty "instruction"; write one or remove the row')
    messages = [{"role": "user", "content": instruction}, {"role": "assistant", "content": output}]
    return Row(place, messages, input) if output.strip() else None


def _chat_row(place: str, messages: Any) -> Row | None:
    if not isinstance(messages, list):
        raise UsageError(f'{place} has {_kind(messages)} as "messages"; give a list of {{"role", "content"}}')
    replies = []
    for number, message in enumerate(messages, start=1):
        name = f"{place} message {number}"
        if not isinstance(message, dict):
            raise UsageError(f'{name} is {_kind(message)}; give {{"role", "content"}}')
        role = _text(name, message, "role")
        if role not in ROLES:
            raise UsageError(f'{name} has the "role" {role!r}; give one of {", ".join(ROLES)}')
        # A call of a tool may come without words.
        calls = bool(message.get("tool_calls"))
        content = "" if calls and message.get("content") is None else _text(name, message, "content")
        if role == "assistant":
            replies.append(calls or content.strip())
    if not replies:
        raise UsageError(f'{place} has no message with the "role" assistant; add the reply or remove the row')
    return Row(place, messages, style="chat") if all(replies) else None


def _text(place: str, value: dict[str, Any], key: str) -> str:
    if key not in value:
        raise UsageError(f'{place} has no "{key}", only {", ".join(map(json.dumps, value)) or "nothing"}; {FORM}')
    text = value[key]
    if not isinstance(text, str):
        raise UsageError(f'{place} has {_kind(text)} as "{key}"; give a text')
    # JSON can escape half of a character, which no tokenizer takes.
    if re.search("[\ud800-\udfff]", text):
        raise UsageError(f'{place} has a broken character in "{key}" (half of a surrogate pair); correct it')
    return text


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _split(rows: Sequence[Row], fraction: float, name: str) -> tuple[list[Row], list[Row]]:
    """Training and validation rows: in the order of their digests, so the choice depends on no seed and on no order.

    Rows that are the same stay together.
    """
    digests = [hashlib.sha256(json.dumps([row.messages, row.input], sort_keys=True).encode()).digest() for row in rows]
    order = sorted(set(digests))
    if len(order) < 2:
        raise UsageError(
            f"{name} has {len(order)} row to train on and to validate on; give --data.val_path or more rows"
        )
    held_out = set(order[: min(len(order) - 1, max(1, round(fraction * len(order))))])
    return (
        [row for row, digest in zip(rows, digests, strict=True) if digest not in held_out],
        [row for row, digest in zip(rows, digests, strict=True) if digest in held_out],
    )
