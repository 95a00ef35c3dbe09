"""Finetuning: a run that starts from a checkpoint, by one of the methods of `litce.peft`."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from litce.args import UsageError
from litce.config import Config
from litce.peft.method import FinetuneMethod
from litce.tokenizer import Tokenizer
from litce.training import checkpoint
from litce.training.finetuned import Base, fingerprint, read_method
from litce.training.metrics import Summary
from litce.training.run import Task, folder_name, run


def finetune(method: FinetuneMethod, checkpoint_dir: Path, out_dir: Path | None = None, **options: Any) -> Summary:
    """Finetune the model in a checkpoint.

    Args:
        method: What is added to the model, and which of its parameters train.
        checkpoint_dir: Checkpoint to start from, with its tokenizer.
        out_dir: Folder for checkpoints and logs; null takes out/finetune/MODEL/METHOD. It has to be empty, unless the
            run in it is resumed.
        options: Those of `run`.

    Returns:
        The run in numbers.

    Raises:
        UsageError: if the arguments cannot work, before the model is built.
    """
    base = open_base(checkpoint_dir)
    config = Config.from_file(checkpoint_dir / checkpoint.MODEL_CONFIG)
    method.check(config)
    has_tokenizer = (checkpoint_dir / "tokenizer.json").is_file()
    task = Task(
        config,
        method,
        lambda gpt: checkpoint.load_weights(gpt, checkpoint_dir / checkpoint.WEIGHTS),
        tokenizer=Tokenizer(checkpoint_dir) if has_tokenizer else None,
        base=base,
        arguments={"checkpoint_dir": checkpoint_dir, **({method.name: method} if fields(method) else {})},
    )
    out_dir = out_dir or Path("out/finetune", folder_name(config.name), method.name)
    return run(task, out_dir, **options)


def open_base(checkpoint_dir: Path) -> Base:
    """The checkpoint to finetune.

    Raises:
        UsageError: if it is none, is damaged, or holds a method's own weights alone.
    """
    try:
        if found := read_method(checkpoint_dir):
            raise UsageError(
                f"{checkpoint_dir} holds the weights of {found[0].name} alone; "
                f"give the checkpoint that they add to, {found[1].directory}, or merge them first with litce merge_lora"
            )
        checkpoint.require_model(checkpoint_dir)
        checkpoint.require_weights(checkpoint_dir / checkpoint.WEIGHTS)
        digest = fingerprint(checkpoint_dir / checkpoint.WEIGHTS)
    except UsageError as error:
        raise UsageError(f"--checkpoint_dir: {error}") from error
    return Base(checkpoint_dir, digest)
