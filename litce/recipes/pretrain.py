"""Train a model from scratch, or go on pretraining one."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from litce.args import UsageError
from litce.cli_messages import suggest
from litce.config import Config
from litce.model import GPT
from litce.model_configs import MODEL_CONFIGS
from litce.peft.method import Full
from litce.tokenizer import Tokenizer
from litce.training import checkpoint
from litce.training.metrics import Summary
from litce.training.run import Task, folder_name, run


def setup(
    model_name: str | None = None,
    model_config: dict[str, Any] | None = None,
    initial_checkpoint_dir: Path | None = None,
    tokenizer_dir: Path | None = None,
    out_dir: Path | None = None,
    **options: Any,
) -> Summary:
    """Train a language model from scratch, or go on pretraining one.

    Args:
        model_name: Named model to train.
        model_config: Fields of the model, such as --model_config.n_layer 4: in place of those of model_name, or all
            of them without it.
        initial_checkpoint_dir: Checkpoint whose weights to start from.
        tokenizer_dir: Folder with a tokenizer.json, for data that does not bring its own.
        out_dir: Folder for checkpoints and logs; null takes out/pretrain/NAME with the name of the model. It has to be
            empty, unless the run in it is resumed.
        options: As for `run`.

    Returns:
        What the run came to.

    Raises:
        UsageError: if the arguments cannot work, before the model is built.
    """
    config = resolve_config(model_name, model_config, initial_checkpoint_dir)

    def initialize(gpt: GPT) -> None:
        if initial_checkpoint_dir is None:
            gpt.init_weights()
        else:
            checkpoint.load_weights(gpt, initial_checkpoint_dir / checkpoint.WEIGHTS)

    task = Task(
        config,
        Full(),
        initialize,
        tokenizer=Tokenizer(tokenizer_dir) if tokenizer_dir is not None else None,
        arguments={
            "model_name": model_name,
            "model_config": model_config,
            "initial_checkpoint_dir": initial_checkpoint_dir,
            "tokenizer_dir": tokenizer_dir,
        },
    )
    return run(task, out_dir or Path("out/pretrain", folder_name(config.name)), **options)


def resolve_config(
    model_name: str | None, model_config: dict[str, Any] | None, initial_checkpoint_dir: Path | None
) -> Config:
    """The model to train: a named one, or that of the initial checkpoint, with fields of `model_config` put in.

    Raises:
        UsageError: if nothing says which model, a field is not known, or the initial checkpoint cannot be read.
    """
    if initial_checkpoint_dir is not None:
        if not (initial_checkpoint_dir / checkpoint.WEIGHTS).is_file():
            raise UsageError(
                f"--initial_checkpoint_dir {initial_checkpoint_dir} holds no {checkpoint.WEIGHTS}; "
                "give a checkpoint folder"
            )
        checkpoint.require_weights(initial_checkpoint_dir / checkpoint.WEIGHTS)
    changes, base = model_config or {}, {}
    known = [field.name for field in fields(Config)]
    for name in changes:
        if name not in known:
            raise UsageError(f"unknown option --model_config.{name}; {suggest(name, known, prefix='--model_config.')}")
    if model_name is not None:
        if model_name not in MODEL_CONFIGS:
            raise UsageError(f"--model_name {model_name} is not known; {suggest(model_name, list(MODEL_CONFIGS))}")
        base = {"name": model_name, **MODEL_CONFIGS[model_name]}
    elif initial_checkpoint_dir is not None:
        base = asdict(Config.from_file(initial_checkpoint_dir / checkpoint.MODEL_CONFIG))
    elif not changes:
        raise UsageError("--model_name: give the model to train, such as --model_name demo")
    try:
        return Config._from_dict({**base, **changes}, where="model")
    except UsageError as error:
        raise UsageError(f"--model_config.{str(error).removeprefix('model: ')}") from error
