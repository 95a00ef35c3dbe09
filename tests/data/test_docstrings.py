import ast
import inspect
from pathlib import Path

import pytest

from litce.data import Docstrings, PythonStdlib
from litce.data.docstrings import MAX_DOCSTRING, MAX_SOURCE, MIN_DOCSTRING, documented_functions
from litce.data.python_stdlib import split_stdlib
from litce.tokenizer import Tokenizer

SOURCE = '''\
class Shelf:
    """Not a function, so it is not taken."""

    @property
    def width(self) -> int:
        """
        Width of the shelf, in
            millimetres.
        """

        # Measured once.
        text = """
no indentation
        """
        return 3 if text else 0

    def only_documented(self):
        """Has no code that could be described."""

    async def fetch(
        self, name="a",
    ):
        'A docstring between single quotation marks.'
        def inner():
            r"""Functions inside of functions count too."""
            return 1
        return inner()


def no_docstring(x):
    return "This is a text and not a docstring."
def one_line(x): "The docstring shares its line with the code."; return x
def shared(x):
    """The docstring shares its last line with code."""; return x
def short(x):
    """Too short."""
    return x
\x0c
def after_form_feed(x):
    """Lines are counted as the parser counts them."""
    return x
'''


def test_functions_are_taken_without_their_docstrings() -> None:
    pairs = list(documented_functions(SOURCE))
    assert pairs == [
        (
            'def width(self) -> int:\n\n    # Measured once.\n    text = """\nno indentation\n    """\n'
            "    return 3 if text else 0",
            "Width of the shelf, in\n    millimetres.",
        ),
        (
            'async def fetch(\n    self, name="a",\n):\n    def inner():\n        r"""Functions inside of functions '
            'count too."""\n        return 1\n    return inner()',
            "A docstring between single quotation marks.",
        ),
        ("def inner():\n    return 1", "Functions inside of functions count too."),
        ("def after_form_feed(x):\n    return x", "Lines are counted as the parser counts them."),
    ]
    assert list(documented_functions(SOURCE.replace("\n", "\r\n"))) == pairs


@pytest.mark.parametrize("text", ["print 'Python 2'", "def f(:\n", "x = '\0'", "", "x = 1", "x = '\\d'"])
def test_other_text_has_none(text: str) -> None:
    assert list(documented_functions(text)) == []


@pytest.mark.parametrize(
    ("docstring", "body", "taken"),
    [
        (MIN_DOCSTRING - 1, 10, False),
        (MIN_DOCSTRING, 10, True),
        (MAX_DOCSTRING, 10, True),
        (MAX_DOCSTRING + 1, 10, False),
        (50, MAX_SOURCE, False),
    ],
)
def test_lengths_are_sensible(docstring: int, body: int, taken: bool) -> None:
    text = f'def f():\n    """{"d" * docstring}"""\n    return "{"s" * body}"\n'
    assert len(list(documented_functions(text))) == taken


def documented(root: Path) -> None:
    for path in root.rglob("module*.py"):
        name = path.stem
        path.write_text(
            f'def {name}(x):\n    """Return what {name} makes of x."""\n    return x\n\n\n'
            'def copied(x):\n    """Return x, in every module."""\n    return x\n'
        )


def test_modules_are_split_as_the_sources_are(stdlib: Path) -> None:
    documented(stdlib)
    tokenizer = PythonStdlib(vocab_size=400).tokenizer
    data = Docstrings()
    data.connect(tokenizer, 256)
    _, val_documents = split_stdlib()
    names = {document.path.stem for document in val_documents}
    assert len(names) == 1
    for dataset, expected in ((data.train_dataset(), 30), (data.val_dataset(), 1)):
        texts = [tokenizer.decode(dataset[i]["input_ids"].tolist()) for i in range(len(dataset))]
        assert len(set(texts)) == expected  # a function that is in many modules is taken once, for training
        assert any(f"def {name}(" in text for text in texts for name in names) == (dataset is data.val_dataset())


def test_the_reply_is_the_docstring(stdlib: Path) -> None:
    documented(stdlib)
    tokenizer = PythonStdlib(vocab_size=400).tokenizer
    data = Docstrings()
    data.connect(tokenizer, 256)
    sample = data.val_dataset()[0]
    reply = sample["targets"][sample["targets"] != -100].tolist()
    _, (document,) = split_stdlib()
    name = document.path.stem
    assert tokenizer.decode(reply) == f"Return what {name} makes of x.<|endoftext|>"
    text = tokenizer.decode([*sample["input_ids"].tolist(), reply[-1]])
    assert text.startswith("Below is an instruction")
    assert text.endswith(f"def {name}(x):\n    return x\n\n### Response:\nReturn what {name} makes of x.<|endoftext|>")
    other = Docstrings()
    other.connect(tokenizer, 256, seed=7)
    assert other.val_dataset()[0]["targets"].tolist() == sample["targets"].tolist()


def test_any_tokenizer_will_do(stdlib: Path, big_tokenizer: Tokenizer) -> None:
    documented(stdlib)
    data = Docstrings(prompt_style="raw", mask_prompt=False)
    data.connect(big_tokenizer, 64)
    assert (data.train_dataset()[0]["targets"] != -100).all()


def test_the_library_of_this_interpreter() -> None:
    """Every pair of a large file is in the file, once the docstring is put back."""
    pairs = list(documented_functions(Path(inspect.__file__).read_text(encoding="utf-8")))
    assert len(pairs) > 50
    documented = {inspect.cleandoc(getattr(inspect, name).__doc__).strip() for name in ("getdoc", "isclass", "getmro")}
    assert documented <= {docstring for _, docstring in pairs}
    for source, docstring in pairs:
        (function,) = ast.parse(source).body
        assert isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        assert ast.get_docstring(function) != docstring
