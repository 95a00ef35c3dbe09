import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from litce import data as data_modules
from litce.args import TrainArgs
from litce.cli_parser import build_parser, parse
from litce.config import Config
from litce.model_configs import MODEL_CONFIGS
from litce.peft.method import Full
from litce.recipes import adapter, adapter_v2, full, lora, pretrain
from litce.training.loop import total_steps
from litce.training.optim import ADAMW_DEFAULTS, LearningRate, resolve_optimizer
from litce.training.run import Task, resolve_max_seq_length, resolve_plan

HUB = Path(__file__).parents[1] / "config_hub"
FILES = sorted(HUB.rglob("*.yaml"))
METHODS = {"full": full.setup, "lora": lora.setup, "adapter": adapter.setup, "adapter_v2": adapter_v2.setup}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(HUB).with_suffix("").as_posix())
def test_configuration(path: Path) -> None:
    """Parses against the real signature, works together, and says nothing that is said already."""
    finetunes = path.relative_to(HUB).parts[0] == "finetune"
    setup = METHODS[path.stem] if finetunes else pretrain.setup
    parser = build_parser("test", setup)
    arguments = parse(parser, ["--config", str(path)])
    train: TrainArgs = arguments["train"]
    if finetunes:
        config = Config.from_name(hub_model(path.parent.name))
        method = arguments.get(path.stem, Full())
        method.check(config)
        if path.parent.name == "demo":
            assert arguments["checkpoint_dir"] == Path("out/pretrain/demo/final")
        else:
            assert arguments["checkpoint_dir"].name.lower().startswith(path.parent.name)
    else:
        config, method = pretrain.resolve_config(arguments["model_name"], arguments["model_config"], None), Full()
    task = Task(config, method, lambda gpt: None, None)
    max_seq_length = resolve_max_seq_length(train, task)
    resolve_plan(train, task, max_seq_length, arguments["precision"], torch.device("cpu"))
    spec = resolve_optimizer(arguments["optimizer"])
    LearningRate(spec.lr, train.min_lr, train.lr_warmup_steps, total_steps(train, None, max_seq_length))
    assert arguments["out_dir"] is None, "the folder is named after the model"

    defaults = vars(parser.get_defaults())
    for name, value in yaml.safe_load(path.read_text()).items():
        default = defaults[name]
        if name == "data":
            cls = getattr(data_modules, value["class_path"] if isinstance(value, dict) else value)
            given = value.get("init_args", {}) if isinstance(value, dict) else {}
            assert_differs(name, given, {key: p.default for key, p in inspect.signature(cls).parameters.items()})
        elif name == "optimizer":
            assert_differs(name, value, {"class_path": "AdamW", **ADAMW_DEFAULTS})
        elif isinstance(value, dict):
            assert_differs(name, value, vars(default))
        else:
            assert_differs(name, {name: value}, {name: default})


def hub_model(folder: str) -> str:
    return next(name for name in MODEL_CONFIGS if name.lower() == folder)


@pytest.mark.parametrize("folder", sorted(path.name for path in (HUB / "finetune").iterdir()))
def test_every_model_has_every_method(folder: str) -> None:
    assert {path.stem for path in (HUB / "finetune" / folder).iterdir()} == METHODS.keys()


def assert_differs(name: str, values: dict[str, Any], defaults: dict[str, Any]) -> None:
    """No value is the default one."""
    for key, value in values.items():
        assert value != defaults.get(key, inspect.Parameter.empty), f"{name}.{key} is {value} anyway"


def test_the_hub_has_the_demo() -> None:
    assert HUB / "pretrain/demo.yaml" in FILES and HUB / "finetune/demo/lora.yaml" in FILES
