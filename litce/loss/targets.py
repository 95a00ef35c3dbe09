"""Checks of targets, shared by every loss."""

from __future__ import annotations

import torch
from torch import Tensor


def check_targets(target: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raise ValueError for targets that are not integers or, on the CPU, outside [0, vocab_size).

    On a GPU the check would wait for the device; there a wrong target gives a NaN loss or a device assertion.
    """
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(f"target has dtype {target.dtype}; class indices are needed, in an integer dtype")
    if target.device.type != "cpu" or target.numel() == 0:
        return
    wrong = (target != ignore_index) & ((target < 0) | (target >= vocab_size))
    if bool(wrong.any()):
        position = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"target {int(target[position])} at position {list(position)} is outside [0, {vocab_size}) and is not "
            f"ignore_index={ignore_index}; is the model's vocabulary smaller than the tokenizer's?"
        )
