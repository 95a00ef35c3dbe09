"""Softmax, loss and gradient of a block of logits on CUDA: two launches that read the block twice and write it once.

The torch operators in rows.py read or write the block six times for the same result, which on a GPU is a third of the
time of the GEMMs around them. Softcap, label smoothing and z-loss keep to rows.py.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

# Rows next to each other in memory fill whole 32-byte sectors; a program's tile is 16 values for each of 128 threads.
MAX_BLOCK_ROWS = 16
TILE_VALUES = 2048
MAX_SPLITS = 64


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether blocks of `dtype` on `device` can go through `softmax_grad_block_`: fp32, on CUDA, with triton."""
    return device.type == "cuda" and dtype == torch.float32 and _has_triton()


def softmax_grad_block_(block: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, maximum and `sum exp(z - max)` of each row, and leave the gradient of the logits in `block`.

    Args:
        block: (v, rows) fp32 logits of the whole vocabulary, of any strides; becomes
            `exp(z - max) - exp_sum * one_hot(target)`, the gradient of each row's loss times `exp_sum`.
        target: (rows,) integers; outside [0, v) gives a NaN loss and no one-hot term.

    Returns:
        `losses`, `row_max` and `exp_sum`, (rows,) fp32. `losses` is `log(exp_sum) - (z[target] - max)`. A row with NaN
        or +inf, or with nothing but -inf, has a NaN loss.
    """
    launch = _Launch(block, target)
    split_max, split_sum = launch.new_statistics(launch.num_splits)
    target_logit = launch.write_statistics(split_max, split_sum)
    row_max, exp_sum = launch.write_grad(split_max, split_sum)
    return exp_sum.log() - (target_logit - row_max), row_max, exp_sum


def add_exp_sum_(block: Tensor, row_max: Tensor, exp_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Replace a tile of logits (v, rows) by `exp(z - new maximum)`; return the new maximum and sum of each row (rows,).

    `row_max` and `exp_sum` are those of the tiles before: they enter as one more split of the vocabulary.
    """
    launch = _Launch(block, torch.full((block.shape[1],), -1, device=block.device))
    split_max, split_sum = launch.new_statistics(launch.num_splits + 1)
    split_max[-1], split_sum[-1] = row_max, exp_sum
    launch.write_statistics(split_max, split_sum)
    return launch.write_grad(split_max, split_sum)


def softmax_grad_(block: Tensor, target: Tensor, row_max: Tensor, exp_sum: Tensor) -> None:
    """Replace a tile of logits (v, rows) by `exp(z - row_max) - exp_sum * one_hot(target)`.

    `target` (rows,) counts from the tile's first column and may be outside; `row_max` and `exp_sum` are (rows,).
    """
    _Launch(block, target).write_grad(row_max.contiguous()[None], exp_sum.contiguous()[None])


class _Launch:
    """The kernels on one block (v, rows) and its targets (rows,)."""

    def __init__(self, block: Tensor, target: Tensor) -> None:
        assert block.dtype == torch.float32 and block.ndim == 2 and target.shape == block.shape[1:]
        import triton

        self.block, self.target = block, target.contiguous()
        num_columns, num_rows = block.shape
        rows = min(MAX_BLOCK_ROWS, triton.next_power_of_2(max(1, num_rows)))
        columns = min(TILE_VALUES // rows, triton.next_power_of_2(num_columns))
        columns_per_split = columns * triton.cdiv(num_columns, columns * MAX_SPLITS)
        self.num_splits = triton.cdiv(num_columns, columns_per_split)
        self.shape = num_columns, num_rows, *block.stride(), columns_per_split
        self.tile = {"COLUMNS": columns, "ROWS": rows}
        self.grid = triton.cdiv(num_rows, rows), self.num_splits

    def new_statistics(self, num_splits: int) -> tuple[Tensor, Tensor]:
        """Return uninitialised maxima and sums of exponentials (num_splits, rows)."""
        split_max, split_sum = self.block.new_empty((2, num_splits, len(self.target))).unbind()
        return split_max, split_sum

    def write_statistics(self, split_max: Tensor, split_sum: Tensor) -> Tensor:
        """Fill the first `num_splits` rows of the statistics; return the target's logits (rows,), NaN for no column."""
        from litce.loss.triton_kernels import split_statistics_kernel

        target_logit = self.block.new_empty(len(self.target))
        if target_logit.numel() > 0:
            # Triton launches on the current device, which is not the block's where a model spans several.
            with torch.cuda.device_of(self.block):
                split_statistics_kernel[self.grid](
                    self.block, self.target, split_max, split_sum, target_logit, *self.shape, **self.tile
                )
        return target_logit

    def write_grad(self, split_max: Tensor, split_sum: Tensor) -> tuple[Tensor, Tensor]:
        """Overwrite the block by the gradient; return maximum and sum (rows,) of all splits (splits, rows)."""
        import triton

        from litce.loss.triton_kernels import softmax_grad_kernel

        row_max, exp_sum = self.block.new_empty((2, len(self.target))).unbind()
        if row_max.numel() > 0:
            with torch.cuda.device_of(self.block):
                softmax_grad_kernel[self.grid](
                    self.block,
                    self.target,
                    split_max,
                    split_sum,
                    row_max,
                    exp_sum,
                    *self.shape,
                    len(split_max),
                    SPLITS=triton.next_power_of_2(len(split_max)),
                    **self.tile,
                )
        return row_max, exp_sum


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
