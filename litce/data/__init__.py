"""Data modules: where samples come from. `--data NAME` takes a class of this package."""

from litce.data.base import DataModule
from litce.data.docstrings import Docstrings
from litce.data.json_data import JSON
from litce.data.lit_data import LitData
from litce.data.python_stdlib import PythonStdlib
from litce.data.text_files import TextFiles
from litce.data.token_file import TokenFile

__all__ = ["JSON", "DataModule", "Docstrings", "LitData", "PythonStdlib", "TextFiles", "TokenFile"]
