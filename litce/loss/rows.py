"""The maths of one block of logits: maximum, sum of exponentials, target logit, gradient.

A block is `(v, rows)`: a tile of `v` columns of the vocabulary by some rows (tokens). Everything works in place and
leaves the factor `1 / sum of exponentials` of each row to the caller, who applies it to the `(rows, D)` operand of the
next GEMM instead of the whole block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from litce.loss import triton_block
from litce.loss.options import LossOptions

# Elementwise passes run over slabs of this size so that each one finds the slab of the last one in the L2 caches. A GPU
# has no use for them but for bounding temporary copies.
SLAB_BYTES = 2 * 2**20
GPU_SLAB_BYTES = 4 * 2**20
LOG2_E = math.log2(math.e)


def exp_(x: Tensor) -> Tensor:
    """`x.exp_()`. On CPUs through exp2, whose vectorised kernel costs a third of exp's and has no slow range."""
    return x.mul_(LOG2_E).exp2_() if x.device.type == "cpu" else x.exp_()


def slabs(block: Tensor, *, in_place: bool = False) -> Iterator[Tensor]:
    """Yield views of some columns of the vocabulary each that cover `block`; `in_place` passes make no copies."""
    size = SLAB_BYTES if block.device.type == "cpu" else GPU_SLAB_BYTES
    if in_place and block.device.type != "cpu":
        size = max(1, block.nbytes)
    step = max(1, size // max(1, block.shape[1] * block.itemsize))
    for start in range(0, block.shape[0], step):
        yield block[start : start + step]


def add_exp_sum_(block: Tensor, row_max: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Replace `block` (v, rows) by `exp(block - new maximum)` and return the new maximum and sum of each row (rows,).

    `row_max` and `total`, the sum of exp(z - row_max), are those of the tiles before.
    """
    if triton_block.available(block.device, block.dtype):
        return triton_block.add_exp_sum_(block, row_max, total)
    new_max = torch.maximum(row_max, block_max(block))
    return new_max, total * exp_(row_max - new_max) + exp_sum_(block, new_max)


def exp_sum_(block: Tensor, row_max: Tensor) -> Tensor:
    """Replace `block` (v, rows) by `exp(block - row_max)` and return its sum over the vocabulary (rows,)."""
    total = torch.zeros_like(row_max)
    for slab in slabs(block, in_place=True):
        total += exp_(slab.sub_(row_max)).sum(0)
    return total


def exp_sum(block: Tensor, row_max: Tensor) -> Tensor:
    """Return `sum exp(block - row_max)` (rows,) and leave `block` as it is."""
    total = torch.zeros_like(row_max)
    for slab in slabs(block):
        total += exp_(slab - row_max).sum(0)
    return total


def capped_exp_sum_(block: Tensor, row_max: Tensor, options: LossOptions) -> Tensor:
    """As `exp_sum_`, but leave `exp(block - row_max)` times the slope of the softcap in `block`."""
    total = torch.zeros_like(row_max)
    for slab in slabs(block):
        slope = options.cap_slope(slab)
        total += exp_(slab.sub_(row_max)).sum(0)
        slab.mul_(slope)
    return total


def column_max(block: Tensor) -> Tensor:
    """Return `block.amax(0)` of a contiguous block (v, rows).

    On CPUs torch is ten times slower where a row of the block is no multiple of 32 numbers; then several are taken as
    one.
    """
    columns, rows = block.shape
    together = 32 // math.gcd(rows, 32)
    if together == 1 or columns % together or block.device.type != "cpu" or not block.is_contiguous():
        return block.amax(0)
    return block.view(-1, together * rows).amax(0).view(together, rows).amax(0)


def block_max(block: Tensor) -> Tensor:
    """Return the largest logit of each row (rows,), never below the least finite number.

    The bound makes `exp(-inf - max)` 0 and not NaN for a tile in which a row has only -inf.
    """
    return column_max(block).clamp_(min=torch.finfo(block.dtype).min)


def read_target_(target_logit: Tensor, block: Tensor, target: Tensor, start: int) -> None:
    """Set `target_logit` (rows,) to the block's logit of the target for rows whose target is in the block's tile."""
    index, inside = _target_index(block, target, start)
    torch.where(inside, block.gather(0, index[None])[0], target_logit, out=target_logit)


def subtract_target_(block: Tensor, target: Tensor, start: int, amount: Tensor) -> None:
    """Subtract `amount` (rows,) from the target's entry of each row whose target is in the block's tile."""
    index, inside = _target_index(block, target, start)
    block.scatter_add_(0, index[None], torch.where(inside, -amount, 0.0)[None])


def zero_target_(block: Tensor, target: Tensor, start: int) -> None:
    """Set the target's entry of each row whose target is in the block's tile to 0."""
    index, inside = _target_index(block, target, start)
    block.scatter_(0, index[None], block.gather(0, index[None]).masked_fill_(inside[None], 0.0))


def logits_grad_(
    block: Tensor,
    target: Tensor,
    start: int,
    row_max: Tensor,
    exp_sum: Tensor,
    target_logit: Tensor,
    options: LossOptions,
    vocab_size: int,
) -> None:
    """Replace the logits in `block` by the gradient of each row's loss with respect to them, times `exp_sum`.

    The gradient is that of the logits before the softcap (and after the scale):
    `exp_sum * (A * p - smoothing / V - (1 - smoothing) * [target]) * slope` with `A = d loss / d lse`.
    """
    if options.plain_softmax and triton_block.available(block.device, block.dtype):
        return triton_block.softmax_grad_(block, target - start, row_max, exp_sum)
    if options.plain_softmax:
        for slab in slabs(block, in_place=True):
            exp_(slab.sub_(row_max))
        return subtract_target_(block, target, start, exp_sum)
    softmax_weight = options.softmax_weight(row_max, exp_sum)
    uniform = exp_sum * (options.label_smoothing / vocab_size)
    for slab in slabs(block):
        slope = None if options.logit_softcap is None else options.cap_slope(slab)
        exp_(slab.sub_(row_max)).mul_(softmax_weight).sub_(uniform)
        if slope is not None:
            slab.mul_(slope)
    amount = exp_sum * (1.0 - options.label_smoothing)
    if options.logit_softcap is not None:
        amount = amount * options.cap_slope(target_logit)
    return subtract_target_(block, target, start, amount)


def _target_index(block: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor]:
    local = target - start
    inside = (local >= 0) & (local < block.shape[0])
    return torch.where(inside, local, 0), inside
