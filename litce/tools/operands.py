"""`litce bench operands`: the head's operands on real text, saved for the other benchmarks."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from litce.args import UsageError
from litce.data import DataModule
from litce.data.base import IGNORE_INDEX, make_dataloader
from litce.tokenizer import Tokenizer
from litce.training.checkpoint import load_model

Operands = tuple[Tensor, Tensor, Tensor]
NAMES = ("hidden", "weight", "target")


def setup(checkpoint_dir: Path, out: Path, data: DataModule | None = None, num_tokens: int = 2048) -> None:
    """Save hidden states, head weight and targets of validation text, as a benchmark's --operands reads them.

    A trained model's softmax has most of its mass on few tokens, random operands' has not.

    Args:
        checkpoint_dir: Folder with the model and its tokenizer, as training writes it.
        out: Safetensors file to write: hidden (N, D), weight (V, D), target (N,).
        data: Data whose validation part to read; default PythonStdlib with the checkpoint's tokenizer.
        num_tokens: N.

    Raises:
        UsageError: if the checkpoint or the data cannot be read, or have fewer tokens.
    """
    if num_tokens < 1:
        raise UsageError(f"--num_tokens {num_tokens}: must be at least 1")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: the folder {out.parent} does not exist")
    model = load_model(checkpoint_dir)
    if data is None:
        from litce.data import PythonStdlib

        data = PythonStdlib()
    data.prepare()
    data.connect(Tokenizer(checkpoint_dir), model.max_seq_length)
    loader = make_dataloader(data.val_dataset(), data, batch_size=1, shuffle=False, seed=0, rank=0, world_size=1)
    hidden, target, found = [], [], 0
    with torch.inference_mode():
        for batch in loader:
            kept = batch["targets"] != IGNORE_INDEX
            hidden.append(model.hidden_states(batch["input_ids"])[kept])
            target.append(batch["targets"][kept])
            found += len(target[-1])
            if found >= num_tokens:
                break
    if found < num_tokens:
        raise UsageError(f"--num_tokens {num_tokens}: the validation data has {found}; ask for at most as many")
    weight, _ = model.lm_head.projection()
    tensors = (torch.cat(hidden)[:num_tokens], weight.detach(), torch.cat(target)[:num_tokens])
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    save_file({name: tensor.contiguous() for name, tensor in zip(NAMES, tensors, strict=True)}, temporary)
    temporary.replace(out)
    print(f"saved N x D x V = {num_tokens} x {weight.shape[1]} x {weight.shape[0]} to {out}")


def load_operands(path: Path) -> Operands:
    """Return hidden (N, D), weight (V, D) and target (N,) of a file that `litce bench operands` wrote.

    Raises:
        UsageError: if it is none.
    """
    try:
        tensors = load_file(path)
        hidden, weight, target = (tensors[name] for name in NAMES)
    except (OSError, SafetensorError, KeyError) as error:
        raise UsageError(
            f"--operands {path} cannot be read ({error}); give a file that litce bench operands wrote"
        ) from error
    if hidden.ndim != 2 or hidden.shape[1:] != weight.shape[1:] or hidden.shape[:1] != target.shape:
        shapes = ", ".join(f"{name} {tuple(tensors[name].shape)}" for name in NAMES)
        raise UsageError(f"--operands {path} holds {shapes}; (N, D), (V, D) and (N,) are needed")
    return hidden, weight, target
