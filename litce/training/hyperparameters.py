"""The arguments of a run as plain values: what `hyperparameters.yaml` holds and `--config` reads back."""

import inspect
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

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
    "train.log_interval",
    "data.num_workers",
)


def as_hyperparameters(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a recipe as YAML can hold them: objects as the values they were made from."""
    return {name: _plain(value) for name, value in arguments.items()}


def differences(directory: Path, hyperparameters: dict[str, Any]) -> list[str]:
    """One line for each argument with an effect that is not what it was in the run that wrote `directory`."""
    path = directory / "hyperparameters.yaml"
    try:
        before = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        return [f"{path} cannot be read ({' '.join(str(error).split())}), so changed arguments are not reported"]
    old, new = _flags(before), _flags(hyperparameters)
    return [
        f"--{name} was {old.get(name)}, is {new.get(name)}"
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


def _flags(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by the flag, without dashes, that sets each."""
    flags: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flags.update(_flags(value, prefix if key == "init_args" else f"{prefix}{key}."))
        else:
            flags[f"{prefix}{key}"] = value
    return flags
