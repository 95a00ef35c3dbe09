"""The maths of one block of logits: maximum, sum of exponentials, target logit, gradient.

A block is `(v, rows)`: a tile of `v` columns of the vocabulary by some rows (tokens). Everything works in place and
leaves factors that are constant along a row to the caller, who applies them to `(rows, D)` operands of the next GEMM
instead of the whole block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Elementwise passes run over slabs of this size so that each one finds the slab of the last one in the L2 caches.
SLAB_BYTES = 2 * 2**20
LOG2_E = math.log2(math.e)


def exp_(x: Tensor) -> Tensor:
    """`x.exp_()`. On CPUs through exp2, whose vectorised kernel costs a third of exp's and has no slow range."""
    return x.mul_(LOG2_E).exp2_() if x.device.type == "cpu" else x.exp_()


def exp_sum_(block: Tensor, row_max: Tensor) -> Tensor:
    """Replace `block` (v, rows) by `exp(block - row_max)` and return its sum over the vocabulary (rows,)."""
    total = torch.zeros_like(row_max)
    step = max(1, SLAB_BYTES // max(1, block.shape[1] * block.itemsize))
    for start in range(0, block.shape[0], step):
        slab = block[start : start + step]
        total += exp_(slab.sub_(row_max)).sum(0)
    return total


def block_max(block: Tensor) -> Tensor:
    """Return the largest logit of each row (rows,), never below the least finite number.

    The bound makes `exp(-inf - max)` 0 and not NaN for a tile in which a row has only -inf.
    """
    return block.amax(0).clamp_(min=torch.finfo(block.dtype).min)


def read_target_(target_logit: Tensor, block: Tensor, target: Tensor, start: int) -> None:
    """Set `target_logit` (rows,) to the block's logit of the target for rows whose target is in the block's tile."""
    index, inside = _target_index(block, target, start)
    torch.where(inside, block.gather(0, index[None])[0], target_logit, out=target_logit)


def subtract_target_(block: Tensor, target: Tensor, start: int, amount: Tensor) -> None:
    """Subtract `amount` (rows,) from the target's entry of each row whose target is in the block's tile."""
    index, inside = _target_index(block, target, start)
    block.scatter_add_(0, index[None], torch.where(inside, -amount, 0.0)[None])


def _target_index(block: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor]:
    local = target - start
    inside = (local >= 0) & (local < block.shape[0])
    return torch.where(inside, local, 0), inside
