"""Instructions that are on every machine: functions of the standard library, and what they do in words."""

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from litce.args import UsageError
from litce.data.instructions import InstructionDataModule, Row, StyleOption
from litce.data.python_stdlib import VAL_FRACTION, stdlib_documents, stdlib_root
from litce.data.text_files import Document, split_documents
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
        source = textwrap.dedent("\n".join(kept)).strip()
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
            UsageError: the library has no sources or no documented functions, or what `connect_rows` raises.
        """
        documents = split_documents(stdlib_documents(stdlib_root()), VAL_FRACTION)
        train, val = (_rows(part) for part in documents)
        # The library has copies of its own functions.
        trained = {row.messages[0]["content"] for row in train}
        val = [row for row in val if row.messages[0]["content"] not in trained]
        if not train or not val:
            raise UsageError(
                f"--data Docstrings found {len(train)} documented functions to train on and {len(val)} to validate on "
                f"in {stdlib_root()}, the standard library of this interpreter; use --data JSON or another interpreter"
            )
        name = f"--data Docstrings ({stdlib_root()})"
        self.connect_rows(train, val, tokenizer, max_seq_length, train_name=name, val_name=name)


def _rows(documents: Sequence[Document]) -> list[Row]:
    pairs = {
        pair: document.name for document in documents for pair in documented_functions(document.read())
    }  # each once
    return [
        Row(name, [{"role": "user", "content": source}, {"role": "assistant", "content": docstring}])
        for (source, docstring), name in pairs.items()
    ]
