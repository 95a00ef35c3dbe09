import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.loggers import CSVLogger, TensorBoardLogger
from lightning.fabric.utilities.rank_zero import rank_zero_only

from litce.args import LogArgs, UsageError
from litce.training.strategy import build_fabric, build_logger, default_precision, weight_dtype


def fabric_of(**changes: Any) -> Any:
    return build_fabric(**{"precision": None, "devices": "auto", "num_nodes": 1, **changes})


def test_one_cpu_process_by_default() -> None:
    fabric = fabric_of()
    assert (fabric.world_size, fabric.device.type) == (1, "cpu")
    assert default_precision() == "32-true"
    assert type(fabric.strategy).__name__ == "SingleDeviceStrategy"


def test_several_devices_use_ddp() -> None:
    fabric = fabric_of(devices=2, num_nodes=2)
    assert fabric.world_size == 4 and type(fabric.strategy).__name__ == "DDPStrategy"


def test_torchrun_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    # Lightning keeps the rank for the whole process; this puts it back.
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    values = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1"}
    for name, value in {**values, "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    fabric = fabric_of()
    assert (fabric.world_size, fabric.global_rank) == (4, 3)
    assert fabric_of(devices=2).world_size == 4
    with pytest.raises(UsageError, match="--devices 3 is not the 2 processes"):
        fabric_of(devices=3)


@pytest.mark.parametrize("changes", [{"devices": 0}, {"devices": -1}, {"num_nodes": 0}])
def test_refused(changes: dict[str, int]) -> None:
    (name, value) = next(iter(changes.items()))
    with pytest.raises(UsageError, match=f"--{name} {value}: "):
        fabric_of(**changes)


def test_fp16_needs_a_gpu() -> None:
    with pytest.raises(UsageError, match="--precision 16-mixed needs a GPU; give bf16-mixed"):
        fabric_of(precision="16-mixed")


def test_weight_dtype() -> None:
    assert [weight_dtype(precision) for precision in ("bf16-true", "bf16-mixed", "32-true", None)] == [
        torch.bfloat16,
        torch.float32,
        torch.float32,
        torch.float32,
    ]


def test_loggers(tmp_path: Path) -> None:
    assert isinstance(build_logger("csv", tmp_path, LogArgs(), {}), CSVLogger)
    if importlib.util.find_spec("tensorboard"):
        assert isinstance(build_logger("tensorboard", tmp_path, LogArgs(), {}), TensorBoardLogger)
    with pytest.raises(UsageError, match="--logger_name csvv: choose one of csv, tensorboard, wandb"):
        build_logger("csvv", tmp_path, LogArgs(), {})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_with_its_cure(name: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=f"--logger_name {name} needs .*: pip install {name}"):
        build_logger(name, tmp_path, LogArgs(), {})
