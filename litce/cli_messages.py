"""One line for what jsonargparse says in many: the flag, the value, and what was expected."""

import difflib
import inspect
import re
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

NAMES = {int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}

# The wordings of jsonargparse 4.41 to 4.53.
UNKNOWN_ARGUMENT = re.compile(r"unrecognized arguments: (\S+)", re.IGNORECASE)
UNKNOWN_OPTION = re.compile(
    r"(?:Group '([\w.]+)' does not accept (?:option|nested key)|Option|Key) '([\w.]+)'"
    r"(?: is not (?:accepted|expected))?"
)
REQUIRED = re.compile(r"""(?:arguments are required: |Key ")([\w.]+)(?:$|" is required)""", re.MULTILINE)
PARSER_KEY = re.compile(r'Parser key "([^"]+)"')
CLASS_PATH = re.compile(r"Problem with given class_path '([\w.]+)'")
GIVEN_VALUE = re.compile(r"Given value: (.*)")  # as typed
GOT_VALUE = re.compile(r"Got value: (.*)")  # as parsed
NESTED_ARGUMENT = re.compile(r"NestedArg\(key='([^']*)', val=(.*)\)")
EXPECTED_CLASS = re.compile(r"Expected an? <class '(?:\w+\.)*(\w+)'>\. Got value")


def explain(parser: Any, message: str) -> str:
    """The message of a failed parse by `parser` (a jsonargparse parser) in one line."""
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    keys = list(dict.fromkeys(PARSER_KEY.findall(message)))
    action = next((action for action in parser._actions if keys and action.dest == keys[0]), None)

    if found := UNKNOWN_ARGUMENT.search(message):
        flag = found[1].split("=")[0]
        return f"unknown option {flag}; {suggest(flag, flags, otherwise=f'see {parser.prog} --help')}"
    if found := REQUIRED.search(message):
        prefix = "".join(f"--{key}." for key in keys[:1])
        return f"{prefix}{found[1]} is required; see {parser.prog} --help"
    if found := UNKNOWN_OPTION.search(message):
        prefix = ".".join([*keys[:1], *([found[1]] if found[1] else [])])
        flag = f"--{prefix}.{found[2]}" if prefix else f"--{found[2]}"
        if class_path := CLASS_PATH.search(message):
            known = _parameters(action, class_path[1])
            flags = [f"--{prefix}.{name}" for name in known]
            return f"unknown option {flag} of {class_path[1].rpartition('.')[2]}; {suggest(flag, flags)}"
        return f"unknown option {flag}; {suggest(flag, flags, otherwise=f'see {parser.prog} --help')}"
    value = GIVEN_VALUE.search(message) or GOT_VALUE.search(message)
    if keys and value:
        nested = NESTED_ARGUMENT.search(message)
        if nested:
            flag, text = f"--{keys[0]}.{nested[1]}", nested[2].strip("'")
            kind = EXPECTED_CLASS.search(message)
            expected = {"int": NAMES[int], "float": NAMES[float]}.get(kind[1], kind[1]) if kind else "another value"
            return f"{flag} {text}: expected {expected}"
        return f"--{keys[0]} {value[1].strip()}: expected {describe(getattr(action, '_typehint', None))}"
    if keys and action is not None and getattr(action, "_typehint", None) is not None:
        return f"--{keys[0]}: expected {describe(action._typehint)}"
    return " ".join(message.split())


def describe(typehint: Any) -> str:
    """The values that a type hint allows, in words."""
    origin = get_origin(typehint)
    if origin is Literal:
        return ", ".join(str(value) for value in get_args(typehint))
    if origin in (Union, UnionType):
        return " or ".join(describe(part) for part in get_args(typehint))
    if inspect.isclass(typehint) and inspect.isabstract(typehint):
        return ", ".join(sorted(cls.__name__ for cls in _concrete_subclasses(typehint)))
    return NAMES.get(typehint) or str(getattr(typehint, "__name__", typehint))


def suggest(word: str, known: list[str], otherwise: str | None = None) -> str:
    """The known words near `word`; without any, `otherwise`, or all of them."""
    near = difflib.get_close_matches(word, known, n=3)
    return f"did you mean {' or '.join(near)}?" if near else otherwise or f"choose {', '.join(known)}"


def _concrete_subclasses(cls: type) -> list[type]:
    direct: list[type] = cls.__subclasses__()
    found = [sub for sub in direct if not inspect.isabstract(sub)]
    return found + [sub for parent in direct for sub in _concrete_subclasses(parent)]


def _parameters(action: Any, class_path: str) -> list[str]:
    typehint = getattr(action, "_typehint", None)
    classes = [part for part in (*get_args(typehint), typehint) if inspect.isclass(part)]
    found = (sub for cls in classes for sub in _concrete_subclasses(cls) if sub.__name__ == class_path.split(".")[-1])
    return [name for cls in found for name in inspect.signature(cls).parameters]
