"""The files that `--config` names: where they are, whether they can be read, and which of them an error comes from."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from litce.args import UsageError
from litce.cli_messages import suggest


def with_config(words: Sequence[str], default: str | None) -> list[str]:
    """`words` with the files that `--config` names put first, so that every other flag overrides them.

    Raises:
        UsageError: if there is no such file.
    """
    rest: list[str] = []
    configs: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if word == "--config":
            value = next(remaining, None)
            if value is None:
                raise UsageError("--config: give a YAML file or a hub name such as pretrain/demo")
            configs.append(value)
        elif word.startswith("--config="):
            configs.append(word.removeprefix("--config="))
        else:
            rest.append(word)
    if not configs and default is not None:
        configs = [default]
    return [part for config in configs for part in ("--config", str(find_config(config)))] + rest


def find_config(name: str) -> Path:
    """The file that `--config name` means: a path, or a name in the hub.

    Raises:
        UsageError: if it is neither, with the near names.
    """
    if Path(name).is_file():
        return Path(name)
    hub = hub_dir()
    found = hub / f"{name.removesuffix('.yaml')}.yaml"
    if found.is_file() and found.resolve().is_relative_to(hub.resolve()):
        return found
    names = sorted(path.relative_to(hub).with_suffix("").as_posix() for path in hub.rglob("*.yaml"))
    raise UsageError(f"--config {name} is neither a file nor in the hub; {suggest(name, names)}")


def hub_dir() -> Path:
    """Folder of the configurations: inside the package where it was installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    return next((path for path in (package / "config_hub", package.parent / "config_hub") if path.is_dir()), package)


def read_configs(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The contents of the files that `words`, as `with_config` returns them, name; by the name to call each.

    Raises:
        UsageError: if one cannot be read as a mapping of options.
    """
    paths = [Path(value) for flag, value in zip(words, words[1:], strict=False) if flag == "--config"]
    return {_shown(path): _read(path) for path in paths}


def locate(message: str, words: Sequence[str], configs: dict[str, dict[str, Any]]) -> str:
    """`message`, after the file that the option it names first comes from, if it comes from one.

    Args:
        message: of an error; it may name an option as `--train.max_steps`.
        words: the command line, which overrides the files.
        configs: as `read_configs` returns them; the last overrides the others.
    """
    found = re.search(r"--(\w+(?:\.\w+)*)", message)
    if found is None or any(word.split("=")[0] == found[0] for word in words):
        return message
    files = [name for name, content in configs.items() if _holds(content, found[1].split("."))]
    return f"{files[-1]}: {message}" if files else message


def _read(path: Path) -> dict[str, Any]:
    name = _shown(path)
    try:
        content = yaml.safe_load(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise UsageError(f"--config {name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {name} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UsageError(f"--config {name}{where} is not YAML: {reason}") from error
    if content is None:
        raise UsageError(f"--config {name} is empty; give options such as model_name: demo")
    if not isinstance(content, dict):
        raise UsageError(f"--config {name} holds a {type(content).__name__}; give options such as model_name: demo")
    if odd := [key for key in content if not isinstance(key, str)]:
        raise UsageError(f"--config {name}: unknown option {odd[0]!r}; give options such as model_name: demo")
    return content


def _shown(path: Path) -> str:
    hub = hub_dir()
    return path.relative_to(hub.parent).as_posix() if path.is_relative_to(hub) else str(path)


def _holds(values: Any, keys: list[str]) -> bool:
    if not keys:
        return True
    if not isinstance(values, dict):
        return False
    return (keys[0] in values and _holds(values[keys[0]], keys[1:])) or _holds(values.get("init_args"), keys)
