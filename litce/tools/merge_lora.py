"""`litce merge_lora`: a checkpoint of low-rank additions and its base to one ordinary checkpoint."""

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from litce.args import UsageError
from litce.peft.lora import LoRA, merge_lora
from litce.tokenizer import FILES as TOKENIZER_FILES
from litce.training.checkpoint import (
    HYPERPARAMETERS,
    MODEL_CONFIG,
    PARTIAL,
    WEIGHTS,
    load_model,
    publish,
    require_model,
)
from litce.training.finetuned import read_method


def setup(checkpoint_dir: Path, *, out_dir: Path | None = None) -> Path:
    """Merge LoRA weights into their base and write an ordinary checkpoint, which needs neither.

    The sums are made in fp32 and rounded to the dtypes of the base once. Nothing that exists is changed.

    Args:
        checkpoint_dir: Checkpoint that LoRA finetuning wrote, such as out/finetune/demo/lora/final.
        out_dir: Folder to write; null takes the checkpoint's name with -merged beside it.

    Returns:
        The folder written.

    Raises:
        UsageError: if the checkpoint holds no LoRA weights, its base is missing, or the folder cannot be written.
    """
    require_model(checkpoint_dir)
    found = read_method(checkpoint_dir)
    if found is None or not isinstance(found[0], LoRA):
        holds = "a whole model" if found is None else f"weights of the method {found[0].name}"
        raise UsageError(f"{checkpoint_dir} holds {holds}, so there is no LoRA to merge; give what finetune_lora wrote")
    out_dir = out_dir or checkpoint_dir.with_name(f"{checkpoint_dir.resolve().name}-merged")
    if out_dir.exists():
        raise UsageError(f"--out_dir {out_dir} exists already; remove it or give another")
    model = merge_lora(load_model(checkpoint_dir))
    dtypes = _dtypes(found[1].directory / WEIGHTS)
    embedding = dtypes["transformer.wte.weight"]  # also of a head that was tied to it
    weights = {name: value.to(dtypes.get(name, embedding)).contiguous() for name, value in model.state_dict().items()}
    partial = out_dir.with_name(f".{out_dir.name}{PARTIAL}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(weights, partial / WEIGHTS)
        model.config.save(partial / MODEL_CONFIG)
        for name in (*TOKENIZER_FILES, HYPERPARAMETERS):
            if (checkpoint_dir / name).is_file():
                shutil.copyfile(checkpoint_dir / name, partial / name)
        publish(partial, out_dir)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UsageError(f"--out_dir {out_dir} cannot be written ({error})") from error
    print(f"merged {checkpoint_dir} into {out_dir}")
    return out_dir


def _dtypes(path: Path) -> dict[str, torch.dtype]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_slice(name)[:0].dtype for name in file.keys()}  # noqa: SIM118  (not iterable itself)
