"""The jsonargparse parser of a command: built from a function's signature, and its errors in one line."""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from litce.args import UsageError
from litce.cli_messages import explain, require_values


def build_parser(name: str, function: Callable[..., Any], positional: Sequence[str] = ()) -> Any:
    """A jsonargparse parser for `function`, with `--config`; it raises instead of exiting."""
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog=f"litce {name}",
        description=(inspect.getdoc(function) or "").split("\n\n")[0],
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML file or hub name, such as pretrain/demo")
    for argument in positional:
        kind = inspect.signature(function, eval_str=True).parameters[argument].annotation
        parser.add_argument(argument, type=kind, help=_argument_help(function, argument))
    parser.add_function_arguments(function, skip=set(positional))
    return parser


def parse(parser: Any, words: list[str]) -> dict[str, Any]:
    """The arguments to call the function with.

    Raises:
        UsageError: one line that names the flag.
    """
    import argparse

    try:
        parsed = parser.parse_args(words)
        require_values(parser, parsed)
        # Renamed in jsonargparse 4.49.
        arguments = getattr(parser, "instantiate", None) or parser.instantiate_classes
        values = vars(arguments(parsed))
    except UsageError:
        raise
    except (argparse.ArgumentError, TypeError, ValueError, KeyError) as error:
        cause = _usage_error_behind(error)
        raise UsageError(str(cause) if cause else explain(parser, str(error))) from error
    return {name: value for name, value in values.items() if name != "config"}


def _usage_error_behind(error: BaseException | None) -> UsageError | None:
    while error is not None:
        if isinstance(error, UsageError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _argument_help(function: Callable[..., Any], argument: str) -> str:
    match = re.search(rf"^\s*{argument}: (.*)$", inspect.getdoc(function) or "", re.MULTILINE)
    return match[1] if match else ""
