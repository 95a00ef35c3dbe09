"""The arguments of a run as plain values: what `hyperparameters.yaml` holds and `--config` reads back."""

import inspect
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from litce.args import UsageError, as_written
from litce.data.base import DataModule

# Where a run writes and how it is watched has no part in what it computes. Prefixes of flags, without the dashes.
WITHOUT_EFFECT = (
    "resume",
    "out_dir",
    "logger_name",
    "log.",
    "eval.",
    "initial_checkpoint_dir",
    "train.save_interval",
    "train.keep_",
    "train.log_interval",
    "data.num_workers",
)


def as_hyperparameters(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a recipe as YAML can hold them: objects as the values they were made from."""
    return {name: _plain(value) for name, value in arguments.items()}


def read_hyperparameters(directory: Path) -> dict[str, Any]:
    """The arguments of the run that wrote a checkpoint.

    Raises:
        UsageError: if they cannot be read.
    """
    path = directory / "hyperparameters.yaml"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds no arguments")
    return values


def differences(directory: Path, hyperparameters: dict[str, Any]) -> list[str]:
    """One line for each argument with an effect that is not what it was in the run that wrote `directory`."""
    try:
        before = read_hyperparameters(directory)
    except UsageError as error:
        return [f"{error}, so changed arguments are not reported"]
    old, new = (_flags(_with_class_path(values)) for values in (before, hyperparameters))
    return [
        f"--{name} was {as_written(old.get(name))}, is {as_written(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and not name.startswith(WITHOUT_EFFECT)
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, DataModule):
        names = inspect.signature(type(value)).parameters
        init_args = {name: _plain(getattr(value, name)) for name in names}
        return {"class_path": f"{type(value).__module__}.{type(value).__qualname__}", "init_args": init_args}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _with_class_path(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with the optimizer in one of the forms that it can be given in."""
    optimizer = values.get("optimizer")
    named = {"class_path": optimizer} if isinstance(optimizer, str) else {"class_path": "AdamW", **(optimizer or {})}
    return {**values, "optimizer": named}


def _flags(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by the flag, without dashes, that sets each."""
    flags: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flags.update(_flags(value, prefix if key == "init_args" else f"{prefix}{key}."))
        else:
            flags[f"{prefix}{key}"] = value
    return flags
