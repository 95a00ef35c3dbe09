"""Checks of operands and targets, shared by every loss."""

from __future__ import annotations

import torch
from torch import Tensor

from litce.loss.host_sync import is_host_readable


def checked_targets(target: Tensor, vocab_size: int, ignore_index: int) -> Tensor:
    """Return the targets as int64.

    Raises:
        ValueError: for targets that are not integers or, on the CPU, outside [0, vocab_size). On a GPU the check would
            wait for the device; there a wrong target gives a NaN loss or a device assertion.
    """
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise ValueError(f"ignore_index={ignore_index!r}; give a whole number")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(f"target has dtype {target.dtype}; class indices are needed, in an integer dtype")
    target = target.long()  # few operators take unsigned integers
    if not is_host_readable(target.device):
        return target
    wrong = (target != ignore_index) & ((target < 0) | (target >= vocab_size))
    if bool(wrong.any()):
        position = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"target {int(target[position])} at position {list(position)} is outside [0, {vocab_size}) and is not "
            f"ignore_index={ignore_index}; is the model's vocabulary smaller than the tokenizer's?"
        )
    return target


def check_num_supervised(num_supervised: int | None, target: Tensor, ignore_index: int) -> None:
    """Raise ValueError unless `num_supervised` can bound the number of supervised targets; on the CPU, unless it does.

    On a GPU `nan_beyond_bound` reports what cannot be seen here.
    """
    if num_supervised is None:
        return
    if isinstance(num_supervised, bool) or not isinstance(num_supervised, int) or num_supervised < 0:
        raise ValueError(f"num_supervised={num_supervised!r}; give a number of targets, or None where it is not known")
    if is_host_readable(target.device):
        actual = int((target != ignore_index).sum())
        if actual > num_supervised:
            raise ValueError(f"num_supervised={num_supervised}, but {actual} targets are not ignore_index")


def nan_beyond_bound(losses: Tensor, num_supervised: int | None, target: Tensor, ignore_index: int) -> Tensor:
    """Return `losses`, on a GPU NaN in their place if more targets are supervised than `num_supervised`."""
    if num_supervised is None or is_host_readable(target.device):
        return losses
    return losses.masked_fill((target != ignore_index).sum() > num_supervised, torch.nan)


def check_operands(input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError unless `input` is (..., D), `weight` (V, D), `target` (...) and `bias` (V,) or None."""
    if weight.ndim != 2 or weight.numel() == 0:
        raise ValueError(f"linear_weight has shape {tuple(weight.shape)}; (V, D) with V, D >= 1 is needed")
    if input.ndim < 1 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input {tuple(input.shape)} does not fit linear_weight {tuple(weight.shape)}; the last sizes must agree"
        )
    if target.shape != input.shape[:-1]:
        raise ValueError(f"target {tuple(target.shape)} does not fit input {tuple(input.shape)}; (...) and (..., D)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear_bias {tuple(bias.shape)} does not fit linear_weight {tuple(weight.shape)}")
    for name, tensor in (("input", input), ("linear_weight", weight)):
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}; a floating-point dtype is needed")
