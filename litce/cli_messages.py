"""One line for what jsonargparse says in many: the flag, the value, and what was expected."""

import difflib
import inspect
import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from litce.args import UsageError, as_written

NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    dict: "a mapping",
    NoneType: "null",
}

# The wordings of jsonargparse 4.41 to 4.53.
UNKNOWN_ARGUMENT = re.compile(r"unrecognized arguments: (\S+)", re.IGNORECASE)
UNKNOWN_OPTION = re.compile(
    r"(?:Group '([\w.]+)' does not accept (?:option|nested key)|Option|Key) '([\w.]+)'"
    r"(?: is not (?:accepted|expected))?"
)
REQUIRED = re.compile(r"""(?:arguments are required: |Key ")([\w., ]+)(?:$|" is required)""", re.MULTILINE)
NOT_A_GROUP = re.compile(r"Unable to load config ['\"](.*?)['\"]")
PARSER_KEY = re.compile(r'Parser key "([^"]+)"')
CLASS_PATH = re.compile(r"Problem with given class_path '([\w.]+)'")
GIVEN_VALUE = re.compile(r"Given value: (.*)")  # as typed
GOT_VALUE = re.compile(r"Got value: (.*)")  # as parsed
NESTED_ARGUMENT = re.compile(r"NestedArg\(key='([^']*)', val=(.*)\)")


def explain(parser: Any, message: str) -> str:
    """The message of a failed parse by `parser` (a jsonargparse parser) in one line."""
    flags = _flags(parser)
    keys = list(dict.fromkeys(PARSER_KEY.findall(message)))
    action = next((action for action in parser._actions if keys and action.dest == keys[0]), None)

    if found := UNKNOWN_ARGUMENT.search(message):
        flag = found[1].split("=")[0]
        return f"unknown option {flag}; {suggest(flag, flags, otherwise=f'see {parser.prog} --help')}"
    if keys and (found := NOT_A_GROUP.search(message)):
        return f"--{keys[0]} {found[1]}: {_expected_group(parser, keys[0])}"
    if found := REQUIRED.search(message):
        prefix = "".join(f"--{key}." for key in keys[:1])
        names = [f"{prefix}{name}" for name in found[1].split(", ")]
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} required; see {parser.prog} --help"
    if found := UNKNOWN_OPTION.search(message):
        prefix = ".".join([*keys[:1], *([found[1]] if found[1] else [])])
        flag = f"--{prefix}.{found[2]}" if prefix else f"--{found[2]}"
        if class_path := CLASS_PATH.search(message):
            known = list(_hints(getattr(action, "_typehint", None), class_path[1]))
            near = suggest(found[2], known, prefix=f"--{prefix}.")
            return f"unknown option {flag} of {class_path[1].rpartition('.')[2]}; {near}"
        return f"unknown option {flag}; {suggest(flag, flags, otherwise=f'see {parser.prog} --help')}"
    value = GIVEN_VALUE.search(message) or GOT_VALUE.search(message)
    if keys and value:
        typehint = getattr(action, "_typehint", None)
        if nested := NESTED_ARGUMENT.search(message):
            class_path = CLASS_PATH.search(message)
            hint = _hints(typehint, class_path[1]).get(nested[1]) if class_path else typehint
            return f"--{keys[0]}.{nested[1]} {_written(nested[2])}: expected {describe(hint)}"
        return f"--{keys[0]} {_written(value[1])}: expected {describe(typehint)}"
    if keys and action is not None and getattr(action, "_typehint", None) is not None:
        return f"--{keys[0]}: expected {describe(action._typehint)}"
    return " ".join(message.split())


def require_groups(parser: Any, content: dict[str, Any]) -> None:
    """Refuse, in a configuration for `parser`, a plain value where a group of options belongs.

    Raises:
        UsageError: naming the group.
    """
    groups = {flag.split(".")[0][2:] for flag in _flags(parser) if "." in flag}
    for key in sorted(groups & content.keys()):
        if not isinstance(content[key], (dict, str)):  # a string names a file with the group's options
            raise UsageError(f"--{key} {as_written(content[key])}: {_expected_group(parser, key)}")


def require_values(parser: Any, parsed: Any) -> None:
    """Refuse null for an argument of a class, such as --data.vocab_size, that has to have a value.

    Raises:
        UsageError: naming the argument; jsonargparse lets it pass.
    """
    for action in parser._actions:
        value = parsed.get(action.dest)
        init_args = getattr(value, "init_args", None)
        if init_args is None:
            continue
        for name, hint in _hints(getattr(action, "_typehint", None), value.class_path).items():
            if name in init_args and init_args[name] is None and NoneType not in (hint, *get_args(hint)):
                raise UsageError(f"--{action.dest}.{name} null: expected {describe(hint)}")


def _expected_group(parser: Any, key: str) -> str:
    first = next((flag for flag in _flags(parser) if flag.startswith(f"--{key}.")), f"--{key}.NAME")
    return f"expected its options one by one, such as {first}"


def _flags(parser: Any) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]


def describe(typehint: Any) -> str:
    """The values that a type hint allows, in words."""
    if typehint is None:
        return "another value"
    origin = get_origin(typehint)
    if origin is Literal:
        return ", ".join(str(value) for value in get_args(typehint))
    if origin in (Union, UnionType):
        return " or ".join(describe(part) for part in get_args(typehint))
    if inspect.isclass(typehint) and inspect.isabstract(typehint):
        return ", ".join(sorted(cls.__name__ for cls in _concrete_subclasses(typehint)))
    return NAMES.get(origin or typehint) or str(getattr(typehint, "__name__", typehint))


def suggest(word: str, known: list[str], otherwise: str | None = None, prefix: str = "") -> str:
    """The known words near `word`, each after `prefix`; without any, `otherwise`, or all of them."""
    near = [f"{prefix}{name}" for name in difflib.get_close_matches(word, known, n=3)]
    return f"did you mean {' or '.join(near)}?" if near else otherwise or f"choose {', '.join(known)}"


def _concrete_subclasses(cls: type) -> list[type]:
    direct: list[type] = cls.__subclasses__()
    found = [sub for sub in direct if not inspect.isabstract(sub)]
    return found + [sub for parent in direct for sub in _concrete_subclasses(parent)]


def _hints(typehint: Any, class_path: str) -> dict[str, Any]:
    """Type hints of the parameters of the class that `class_path` names among those that `typehint` allows."""
    classes = [part for part in (*get_args(typehint), typehint) if inspect.isclass(part)]
    found = [sub for cls in classes for sub in _concrete_subclasses(cls) if sub.__name__ == class_path.split(".")[-1]]
    if not found:
        return {}
    parameters = inspect.signature(found[0], eval_str=True).parameters
    return {name: parameter.annotation for name, parameter in parameters.items()}


def _written(value: str) -> str:
    """A value of jsonargparse's messages as it is typed."""
    value = value.strip().strip("'")
    return {"None": "null", "True": "true", "False": "false"}.get(value, value)
