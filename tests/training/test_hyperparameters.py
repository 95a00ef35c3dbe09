from pathlib import Path
from typing import Any

import yaml

from litce.args import TrainArgs
from litce.training.hyperparameters import as_hyperparameters, differences
from tests.tiny import Numbers


def test_plain_values() -> None:
    train = TrainArgs(memory_budget_bytes="1MiB")
    arguments = {"out_dir": Path("a/b"), "train": train, "data": Numbers(3), "resume": False, "betas": (1, 2)}
    values = as_hyperparameters(arguments)
    assert yaml.safe_load(yaml.safe_dump(values)) == values
    assert values["out_dir"] == "a/b" and values["betas"] == [1, 2]
    assert values["train"]["memory_budget_bytes"] == 2**20
    assert values["data"]["class_path"] == "tests.tiny.Numbers" and values["data"]["init_args"]["num_samples"] == 3


def test_differences(tmp_path: Path) -> None:
    before: dict[str, Any] = {
        "seed": 1,
        "out_dir": "a",
        "train": {"log_interval": 1, "min_lr": 0.0},
        "optimizer": "AdamW",
    }
    before["data"] = {"class_path": "X", "init_args": {"num_workers": 0, "size": 1}}
    (tmp_path / "hyperparameters.yaml").write_text(yaml.safe_dump(before))
    now: dict[str, Any] = {
        "seed": 2,
        "out_dir": "b",
        "train": {"log_interval": 2, "min_lr": 0.1},
        "optimizer": {"lr": 1.0},
    }
    now["data"] = {"class_path": "X", "init_args": {"num_workers": 2, "size": 2}}
    assert differences(tmp_path, before) == []
    assert differences(tmp_path, now) == [
        "--data.size was 1, is 2",
        "--optimizer.lr was null, is 1.0",
        "--seed was 1, is 2",
        "--train.min_lr was 0.0, is 0.1",
    ]
    assert differences(tmp_path, {**before, "optimizer": {"class_path": "SGD"}}) == [
        "--optimizer.class_path was AdamW, is SGD"
    ]
    for content in (b"", b"- 1", b"caf\xe9", b"a: ["):
        (tmp_path / "hyperparameters.yaml").write_bytes(content)
        (line,) = differences(tmp_path, now)
        assert "so changed arguments are not reported" in line
    assert "cannot be read" in differences(tmp_path / "nowhere", now)[0]
