import inspect
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from litce import data as data_modules
from litce.args import TrainArgs
from litce.cli_parser import build_parser, parse
from litce.recipes import pretrain
from litce.training.loop import total_steps
from litce.training.optim import ADAMW_DEFAULTS, LearningRate

HUB = Path(__file__).parents[1] / "config_hub"
FILES = sorted(HUB.rglob("*.yaml"))
RECIPES = {"pretrain": pretrain.setup}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(HUB).with_suffix("").as_posix())
def test_configuration(path: Path) -> None:
    """Parses against the real signature, works together, and says nothing that is said already."""
    setup = RECIPES[path.parent.name]
    arguments = parse(build_parser("test", setup), ["--config", str(path)])
    train: TrainArgs = arguments["train"]
    config = pretrain.resolve_config(arguments["model_name"], arguments["model_config"], None)
    max_seq_length = pretrain.resolve_max_seq_length(train, config)
    spec = pretrain.resolve_optimizer(arguments["optimizer"])
    LearningRate(spec.lr, train.min_lr, train.lr_warmup_steps, total_steps(train, None, max_seq_length))
    assert arguments["out_dir"] is None, "the folder is named after the model"

    parameters = inspect.signature(setup).parameters
    for name, value in yaml.safe_load(path.read_text()).items():
        default = parameters[name].default
        if name == "data":
            cls = getattr(data_modules, value["class_path"] if isinstance(value, dict) else value)
            given = value.get("init_args", {}) if isinstance(value, dict) else {}
            assert_differs(name, given, {key: p.default for key, p in inspect.signature(cls).parameters.items()})
        elif name == "optimizer":
            assert_differs(name, value, {"class_path": "AdamW", **ADAMW_DEFAULTS})
        elif is_dataclass(default) and not isinstance(default, type):
            assert_differs(name, value, asdict(default))
        else:
            assert_differs(name, {name: value}, {name: default})


def assert_differs(name: str, values: dict[str, Any], defaults: dict[str, Any]) -> None:
    """No value is the default one."""
    for key, value in values.items():
        assert value != defaults.get(key, inspect.Parameter.empty), f"{name}.{key} is {value} anyway"


def test_the_hub_has_the_demo() -> None:
    assert HUB / "pretrain/demo.yaml" in FILES
