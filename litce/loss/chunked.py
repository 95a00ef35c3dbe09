"""Blocks of rows: the gradients are made in the forward pass, in place of the logits (three GEMMs).

The idea is Liger's fused linear cross-entropy (Hsu et al. 2024, arXiv:2410.10989); here sums are fp32, the block of
logits is the only buffer, and factors constant along a row are applied to (rows, D) operands. It needs one scalar
upstream gradient, so `reduction="none"` is served by cut.py, which recomputes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from litce.loss import triton_block
from litce.loss.column_filter import ColumnFilter, add_filtered_grads_
from litce.loss.function import LossSettings, guarded_backward, guarded_forward
from litce.loss.host_sync import is_host_readable
from litce.loss.options import LossOptions
from litce.loss.projection import TILE_COLUMNS, Projection, new_input_product, tiles
from litce.loss.rows import column_max, exp_sum, exp_sum_, logits_grad_, read_target_, subtract_target_
from litce.loss.supervised_rows import SupervisedRows

# A tile of logits that is copied out of lent memory.
LENT_TILE_BYTES = 4 * 2**20

Needs = tuple[bool, bool, bool]  # gradients of input, weight, bias
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class RowBlocks:
    """How the rows are cut into blocks: `CrossEntropyPlan.rows`, `lent_rows` and `filter_tolerance`."""

    rows: int
    lent_rows: int
    filter_tolerance: float


def chunked_loss_and_grads(
    rows: SupervisedRows, projection: Projection, row_weights: Tensor, blocks: RowBlocks, needs: Needs
) -> tuple[Tensor, Grads]:
    """Return `sum(row_weights * loss)` (0-dim) and its gradients, `blocks.rows` rows of logits at a time.

    `row_weights` is (kept rows,). The gradient of the weight is fp32; that of the input has the input's dtype (fp32
    for fp16, whose range it would underflow before a loss scaler's factor reaches it).

    The first `blocks.lent_rows` rows, at most D, cost no memory: until the first product is added to the weight's
    gradient, (V, D) in fp32, its memory holds their logits (V, rows).
    """
    need_input, need_weight, need_bias = needs
    vocab_size, n_embd = projection.vocab_size, projection.weight.shape[1]
    device, dtype = rows.input.device, projection.accumulate_dtype
    loss = torch.zeros((), dtype=dtype, device=device)
    input_grad = rows.new_grad(held_dtype(rows.input)) if need_input else None
    weight_grad = torch.empty(projection.weight.shape, dtype=dtype, device=device) if need_weight else None
    bias_grad = torch.zeros(len(projection.weight), dtype=dtype, device=device) if need_bias else None
    lent_rows = 0 if weight_grad is None else min(blocks.lent_rows, n_embd)
    if weight_grad is not None:
        unwritten = 0 if blocks.filter_tolerance or len(rows) == 0 else vocab_size
        weight_grad[unwritten:].zero_()
    buffer = None

    for block in rows.blocks(blocks.rows, first=lent_rows):
        x, target = projection.operand(rows.hidden(block)), rows.target[block]
        lender = weight_grad if block.start < lent_rows else None
        if lender is None and buffer is None:
            buffer = torch.empty(vocab_size * min(blocks.rows, len(rows)), dtype=dtype, device=device)
        storage = buffer if lender is None else lender.view(-1)
        assert storage is not None
        logits = storage[: vocab_size * len(target)].view(vocab_size, -1)
        losses, total = _losses_and_logits_grad(projection, x, target, logits)
        loss += rows.losses(losses, block) @ row_weights[block]
        if not any(needs):
            continue
        row_scale = row_weights[block] * (projection.options.logit_scale / total)
        if bias_grad is not None:
            bias_grad[:vocab_size].addmv_(logits, row_scale)
        scaled = (x * row_scale[:, None]).to(projection.dtype) if need_weight else x
        product = new_input_product(x, dtype).zero_() if need_input else None
        if blocks.filter_tolerance:
            kept = ColumnFilter(blocks.filter_tolerance, vocab_size).kept(logits, total, target, 0)
            add_filtered_grads_(projection, logits, 0, kept, product, weight_grad, scaled)
        else:
            _add_grads_(projection, logits, product, weight_grad, scaled, block.start, lent=lender is not None)
        if input_grad is not None and product is not None:
            rows.write(input_grad, block, product.mul_(row_scale[:, None]))

    return loss, (input_grad, weight_grad, bias_grad)


def _add_grads_(
    projection: Projection,
    logits: Tensor,
    input_grad: Tensor | None,
    weight_grad: Tensor | None,
    x: Tensor,
    first_row: int,
    *,
    lent: bool,
) -> None:
    """Add the products of `logits` (V, rows) to `input_grad` (rows, D) and `weight_grad` (V, D), which row 0 starts."""
    for tile, columns in _lent_tiles(logits) if lent else _tiles(logits, projection.tile_columns):
        if input_grad is not None:
            projection.input_grad_(input_grad, columns, tile.start, accumulate=True)
        if weight_grad is not None:
            projection.weight_grad_(weight_grad[tile], columns, x, accumulate=first_row > 0)


def _tiles(logits: Tensor, width: int) -> Iterator[tuple[slice, Tensor]]:
    for tile in tiles(len(logits), width):
        yield tile, logits[tile]


def _lent_tiles(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield copies of tiles from the last to the first, all in the same memory.

    Rows of the weight's gradient are at least as long as those of the logits in its memory, so that what is written to
    a tile of it overwrites logits of this tile and of later ones only.
    """
    columns = lent_tile_columns(logits.shape[1])
    # Allocated once: an allocator that serves a new tile before the last one is freed keeps the memory of both.
    copy = torch.empty_like(logits[:columns])
    for tile in reversed(list(tiles(len(logits), columns))):
        yield tile, copy[: tile.stop - tile.start].copy_(logits[tile])


def lent_tile_columns(num_rows: int) -> int:
    """Return the columns of a copied tile of fp32 logits."""
    return max(64, min(TILE_COLUMNS, LENT_TILE_BYTES // (4 * num_rows)))


def _losses_and_logits_grad(projection: Projection, x: Tensor, target: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the logits of `x` in `logits` (V, rows); return and leave what `losses_and_logits_grad_` does."""
    if projection.options.plain_softmax and triton_block.available(logits.device, logits.dtype):
        losses, _, total = triton_block.softmax_grad_block_(projection.logits_(logits, x, 0), target)
        return losses, total
    row_max = torch.full((len(target),), torch.finfo(logits.dtype).min, dtype=logits.dtype, device=logits.device)
    for tile in tiles(len(logits), projection.tile_columns):
        projection.logits_(logits[tile], x, tile.start)
        row_max = torch.maximum(row_max, column_max(logits[tile]))
    return losses_and_logits_grad_(logits, target, row_max, projection.options)


def losses_and_logits_grad_(
    logits: Tensor, target: Tensor, row_max: Tensor, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """Return losses and `sum exp(z - max)` (rows,) of all columns (V, rows), and leave in `logits` their gradient.

    The gradient is times the sum of exponentials, as `logits_grad_` leaves it.
    """
    target_logit = torch.full_like(row_max, torch.nan)
    read_target_(target_logit, logits, target, 0)
    if options.plain_softmax:
        total = exp_sum_(logits, row_max)
        subtract_target_(logits, target, 0, total)
        return options.row_losses(row_max, total, target_logit, None, len(logits)), total
    total = exp_sum(logits, row_max)
    logit_sum = logits.sum(0) if options.label_smoothing else None
    logits_grad_(logits, target, 0, row_max, total, target_logit, options, len(logits))
    return options.row_losses(row_max, total, target_logit, logit_sum, len(logits)), total


def held_dtype(input: Tensor) -> torch.dtype:
    """Return the dtype in which the input's gradient waits for the upstream gradient."""
    return torch.float32 if input.dtype == torch.float16 else input.dtype


class ChunkedCrossEntropy(torch.autograd.Function):
    """`apply(input, weight, bias, target, row_weights, settings, blocks)` -> weighted sum of losses.

    `row_weights` is 0-dim or in the shape of `target`, and gets no gradient. The result is 0-dim and fp32.
    """

    @staticmethod
    @guarded_forward
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        row_weights: Tensor,
        settings: LossSettings,
        blocks: RowBlocks,
    ) -> Tensor:
        ctx.settings, ctx.blocks = settings, blocks
        ctx.save_for_backward(input, weight, bias, target, row_weights)
        loss, ctx.grads = _run(ctx, input, weight, bias, target, row_weights)
        return loss

    @staticmethod
    @guarded_backward
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # The buffers are handed over, not copied: a second backward of a retained graph makes them again.
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            _, grads = _run(ctx, *ctx.saved_tensors)
        input_shape, dtypes = ctx.like
        input_grad, weight_grad, bias_grad = (scale_grad_(g, upstream, d) for g, d in zip(grads, dtypes, strict=True))
        del grads
        if input_grad is not None:
            input_grad = input_grad.view(input_shape)
        return input_grad, weight_grad, bias_grad, None, None, None, None


def _run(
    ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, row_weights: Tensor
) -> tuple[Tensor, Grads]:
    ctx.like = input.shape, (input.dtype, weight.dtype, None if bias is None else bias.dtype)
    rows, projection = ctx.settings.rows(input, target), ctx.settings.projection(weight, bias)
    needs = tuple(ctx.needs_input_grad[:3])
    return chunked_loss_and_grads(rows, projection, rows.select(row_weights), ctx.blocks, needs)


def scale_grad_(grad: Tensor | None, upstream: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return `grad * upstream` in `dtype`, in place where the dtype allows; `upstream` broadcasts against `grad`."""
    if grad is None:
        return None
    if not is_host_readable(upstream.device) or upstream.numel() != 1 or float(upstream) != 1.0:
        grad.mul_(upstream)
    return grad.to(dtype)
