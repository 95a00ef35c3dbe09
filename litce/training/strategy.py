"""The Fabric of a run: devices, precision, the strategy that joins them, and the logger."""

import importlib.util
import os
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger, Logger, TensorBoardLogger

from litce.args import LogArgs, UsageError

LoggerName = Literal["csv", "tensorboard", "wandb"]
Precision = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed"]


def build_fabric(
    *,
    precision: Precision | None,
    devices: int | Literal["auto"],
    num_nodes: int,
    loggers: list[Logger] | None = None,
    accelerator: Literal["auto", "cpu"] = "auto",
) -> Fabric:
    """A Fabric that is not launched yet: no strategy for one device, DDP for several.

    `devices` "auto" takes what torchrun started on this node, else every GPU, else one CPU process. `precision` None
    is `default_precision()`.

    Raises:
        UsageError: if the devices do not exist, or cannot compute in that precision.
    """
    if devices != "auto" and devices < 1:
        raise UsageError(f"--devices {devices}: give a number from 1 on, or auto")
    if num_nodes < 1:
        raise UsageError(f"--num_nodes {num_nodes}: must be 1 or more")
    launched = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    use_gpu = accelerator == "auto" and torch.cuda.is_available()
    found = torch.cuda.device_count() if use_gpu else 1
    if launched:
        if devices not in ("auto", launched):
            raise UsageError(f"--devices {devices} is not the {launched} processes that torchrun started; leave it out")
        devices, num_nodes = launched, int(os.environ["WORLD_SIZE"]) // launched
    elif devices == "auto":
        devices = found
    if use_gpu and devices > found:
        raise UsageError(f"--devices {devices}: this machine has {found} GPUs; give at most {found}, or auto")
    if precision == "16-mixed" and not use_gpu:  # Lightning would take bf16-mixed instead
        raise UsageError("--precision 16-mixed needs a GPU; give bf16-mixed or 32-true")
    return Fabric(
        accelerator="cuda" if use_gpu else "cpu",
        devices=devices,
        num_nodes=num_nodes,
        strategy="ddp" if devices * num_nodes > 1 else "auto",
        precision=precision or default_precision(),
        loggers=loggers,
    )


def default_precision() -> Precision:
    """bf16-mixed on a GPU that multiplies bf16, 32-true elsewhere."""
    return "bf16-mixed" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "32-true"


def weight_dtype(precision: Precision | None) -> torch.dtype:
    """Dtype in which a run with `precision` holds its weights."""
    return torch.bfloat16 if (precision or default_precision()) == "bf16-true" else torch.float32


def build_logger(name: LoggerName, out_dir: Path, log: LogArgs, hyperparameters: dict[str, Any]) -> Logger:
    """The logger `name`; files go below `out_dir/logs`.

    Raises:
        UsageError: if its package is not installed, with the command that installs it.
    """
    if name not in get_args(LoggerName):
        raise UsageError(f"--logger_name {name}: choose one of {', '.join(get_args(LoggerName))}")
    if name == "csv":
        return CSVLogger(root_dir=out_dir / "logs", name="csv")
    if importlib.util.find_spec(name) is None:
        raise UsageError(f"--logger_name {name} needs the package {name}; install it: pip install {name}")
    if name == "tensorboard":
        return TensorBoardLogger(root_dir=out_dir / "logs", name="tensorboard")
    from lightning.pytorch.loggers import WandbLogger

    return WandbLogger(
        project=log.project, name=log.run, group=log.group, save_dir=out_dir / "logs", config=hyperparameters
    )
