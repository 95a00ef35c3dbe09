"""The arguments of a run as plain values: what `hyperparameters.yaml` holds and `--config` reads back."""

import inspect
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from litce.data.base import DataModule

# Where a run writes and how it is watched has no part in what it computes.
WITHOUT_EFFECT = ("resume", "out_dir", "logger_name", "log", "initial_checkpoint_dir")


def as_hyperparameters(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a recipe as YAML can hold them: objects as the values they were made from."""
    return {name: _plain(value) for name, value in arguments.items()}


def differences(directory: Path, hyperparameters: dict[str, Any]) -> list[str]:
    """One line for each argument that is not what it was in the run that wrote `directory`."""
    path = directory / "hyperparameters.yaml"
    try:
        before = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        return [f"{path} cannot be read ({' '.join(str(error).split())}), so changed arguments are not reported"]
    old, new = (
        _flat({name: value for name, value in values.items() if name not in WITHOUT_EFFECT})
        for values in (before, hyperparameters)
    )
    return [
        f"--{name} was {old.get(name)}, is {new.get(name)}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
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


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat
