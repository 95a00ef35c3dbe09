"""Softmax, loss and gradient of a block of logits on CUDA: two launches that read the block twice and write it once.

The torch operators in rows.py read or write the block six times for the same result, which on a GPU is a third of the
time of the GEMMs around them. Softcap, label smoothing and z-loss keep to rows.py. chunked.py calls it in place of
the maximum, `exp_sum_`, `read_target_` and `subtract_target_` of a block that holds the whole vocabulary:

    if options.plain_softmax and available(logits.device, logits.dtype):
        losses, row_max, total = softmax_grad_block_(logits, target)
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
    assert block.dtype == torch.float32 and block.ndim == 2 and target.shape == block.shape[1:]
    import triton

    from litce.loss.triton_kernels import softmax_grad_kernel, split_statistics_kernel

    num_columns, num_rows = block.shape
    row_max, exp_sum, target_logit = block.new_empty((3, num_rows)).unbind()
    if num_rows == 0:
        return target_logit, row_max, exp_sum
    rows = min(MAX_BLOCK_ROWS, triton.next_power_of_2(num_rows))
    columns = min(TILE_VALUES // rows, triton.next_power_of_2(num_columns))
    columns_per_split = columns * triton.cdiv(num_columns, columns * MAX_SPLITS)
    num_splits = triton.cdiv(num_columns, columns_per_split)
    split_max, split_sum = block.new_empty((2, num_splits, num_rows)).unbind()
    target = target.contiguous()
    shape = num_columns, num_rows, *block.stride(), columns_per_split
    grid = triton.cdiv(num_rows, rows), num_splits
    # Triton launches on the current device, which is not the block's where a model spans several.
    with torch.cuda.device_of(block):
        split_statistics_kernel[grid](
            block, target, split_max, split_sum, target_logit, *shape, COLUMNS=columns, ROWS=rows
        )
        softmax_grad_kernel[grid](
            block,
            target,
            split_max,
            split_sum,
            row_max,
            exp_sum,
            *shape,
            num_splits,
            SPLITS=triton.next_power_of_2(num_splits),
            COLUMNS=columns,
            ROWS=rows,
        )
    return exp_sum.log() - (target_logit - row_max), row_max, exp_sum


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
