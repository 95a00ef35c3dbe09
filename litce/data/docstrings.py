"""Instructions that are on every machine: functions of the standard library, and what they do in words."""

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from litce.data.instructions import InstructionDataModule, Row, StyleOption
from litce.data.python_stdlib import split_stdlib
from litce.data.text_files import Document
from litce.tokenizer import Tokenizer

# Characters. Shorter docstrings say no more than the name; longer functions are mostly tables and parsers.
MIN_DOCSTRING, MAX_DOCSTRING = 20, 400
MAX_SOURCE = 1200


def documented_functions(text: str) -> Iterator[tuple[str, str]]:
    """Pairs of (source without its docstring, docstring) of the functions and methods in `text`, in their order.

    Both are without indentation. Left out are those that are only documented, have lines that the docstring shares with
    other code, or are not of sensible length. Text that is no Python code has none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that Python does not know
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    # As the parser counts lines: str.splitlines would also split at form feeds.
    lines = re.split("\r\n|\r|\n", text)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for node in sorted(functions, key=lambda node: node.lineno):
        docstring = ast.get_docstring(node)
        if docstring is None or len(node.body) < 2:
            continue
        first, second = node.body[:2]
        assert first.end_lineno is not None and node.end_lineno is not None
        if first.end_lineno >= second.lineno or lines[first.lineno - 1][: first.col_offset].strip():
            continue
        kept = lines[node.lineno - 1 : first.lineno - 1] + lines[first.end_lineno : node.end_lineno]
        # Not textwrap.dedent, which does nothing where a string in the code has a line without indentation.
        indent = node.col_offset
        source = "\n".join(line[indent:] if not line[:indent].strip() else line for line in kept).strip()
        docstring = docstring.strip()
        if MIN_DOCSTRING <= len(docstring) <= MAX_DOCSTRING and len(source) <= MAX_SOURCE:
            yield source, docstring


@dataclass
class Docstrings(InstructionDataModule):
    """Functions of the running interpreter's standard library, to be described by their docstrings. Needs no download.

    The modules are split as `PythonStdlib` splits them, so a model that was trained there has not seen the functions
    that validate it here.
    """

    prompt_style: StyleOption = "default"
    """How an instruction is written: alpaca, raw, chat (the tokenizer's template), or default: alpaca"""
    mask_prompt: bool = True
    """Learn the docstrings alone; false learns the functions too"""
    num_workers: int = 0
    """Processes that read samples ahead of the training loop, 0 to read them in the loop"""

    def connect(self, tokenizer: Tokenizer | None, max_seq_length: int, seed: int = 42) -> None:
        """Find the functions and tokenize them.

        Raises:
            UsageError: the library has no sources, or what `connect_rows` raises.
        """
        train, val = (_rows(documents) for documents in split_stdlib())
        # The library has copies of its own functions.
        trained = {row.messages[0]["content"] for row in train}
        val = [row for row in val if row.messages[0]["content"] not in trained]
        name = "--data Docstrings, the standard library of this interpreter,"
        self.connect_rows(train, val, tokenizer, max_seq_length, train_name=name, val_name=name)


def _rows(documents: Sequence[Document]) -> list[Row]:
    # A dictionary, so that each pair comes once.
    pairs = {pair: document.name for document in documents for pair in documented_functions(document.read())}
    return [
        Row(name, [{"role": "user", "content": source}, {"role": "assistant", "content": docstring}])
        for (source, docstring), name in pairs.items()
    ]
