"""Tiles of rows x vocabulary: logits never outlive their tile, two numbers per row are kept.

The forward pass works as flash attention does (Dao et al. 2022, arXiv:2205.14135): per row a running maximum, sum of
exponentials and, where the input needs a gradient, the unnormalised `sum_j exp(z_j - max) W_j`, rescaled when the
maximum grows; so the input's gradient is done after two GEMMs. The weight's gradient takes two more in the backward
pass, which recomputes the logits of each tile from the kept maximum and sum, as cut cross-entropy does (Wijmans et al.
2024, arXiv:2411.09009).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from litce.loss.chunked import held_dtype, scale_grad_
from litce.loss.projection import Projection, new_input_product, operand_dtype
from litce.loss.rows import block_max, exp_, exp_sum_, read_target_, subtract_target_
from litce.loss.supervised_rows import SupervisedRows


def cut_row_losses(
    rows: SupervisedRows, projection: Projection, block_rows: int, vocab_tile: int, need_input: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return per kept row the loss, maximum and sum of exponentials (all fp32), and the input's gradient or None.

    The input's gradient is (all rows, D), of an upstream gradient of 1 for each row.
    """
    device, dtype = rows.input.device, projection.accumulate_dtype
    vocab_size = projection.vocab_size
    losses, row_maxima, exp_sums = (torch.empty(len(rows), dtype=dtype, device=device) for _ in range(3))
    input_grad = rows.new_grad(held_dtype(rows.input)) if need_input else None
    buffer = _tile_buffer(rows, vocab_size, block_rows, vocab_tile, dtype)

    for block in rows.blocks(block_rows):
        x, target = projection.operand(rows.hidden(block)), rows.target[block]
        row_max = torch.full((len(target),), torch.finfo(dtype).min, dtype=dtype, device=device)
        exp_sum, target_logit = torch.zeros_like(row_max), torch.full_like(row_max, torch.nan)
        weighted = new_input_product(x, dtype) if need_input else None
        for start in range(0, vocab_size, vocab_tile):
            logits = projection.logits_(_tile(buffer, start, vocab_size, vocab_tile, len(target)), x, start)
            read_target_(target_logit, logits, target, start)
            new_max = torch.maximum(row_max, block_max(logits))
            shrink = exp_(row_max - new_max)
            row_max = new_max
            exp_sum = exp_sum * shrink + exp_sum_(logits, row_max)
            if weighted is not None:
                if start > 0:
                    weighted.mul_(shrink[:, None])
                projection.input_grad_(weighted, logits, start, accumulate=start > 0)
        losses[block] = exp_sum.log() - (target_logit - row_max)
        row_maxima[block], exp_sums[block] = row_max, exp_sum
        if input_grad is not None:
            assert weighted is not None
            # Targets outside the vocabulary have a NaN loss on GPUs; the clamp only keeps the gather in bounds.
            weighted.div_(exp_sum[:, None]).sub_(projection.weight[target.clamp(0, vocab_size - 1)])
            rows.write(input_grad, block, weighted)
    return losses, row_maxima, exp_sums, input_grad


def cut_weight_grads(
    rows: SupervisedRows,
    projection: Projection,
    block_rows: int,
    vocab_tile: int,
    row_maxima: Tensor,
    exp_sums: Tensor,
    upstream: Tensor,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias, in their dtypes, for `upstream` (kept rows,).

    Tile by tile of the vocabulary, each summed over all rows in fp32, so that 16-bit weights need no (V, D) fp32 copy.
    """
    device, dtype = rows.input.device, projection.accumulate_dtype
    weight, bias = projection.weight, projection.bias
    vocab_size, n_embd = weight.shape
    weight_grad = torch.empty((vocab_size, n_embd), dtype=weight.dtype, device=device) if needs[0] else None
    bias_grad = torch.zeros(vocab_size, dtype=dtype, device=device) if needs[1] else None
    buffer = _tile_buffer(rows, vocab_size, block_rows, vocab_tile, dtype)
    coefficients = upstream.to(dtype) / exp_sums

    for start in range(0, vocab_size, vocab_tile):
        stop = min(start + vocab_tile, vocab_size)
        tile_grad = None
        if weight_grad is not None:
            tile_grad = weight_grad[start:stop]
            if tile_grad.dtype != dtype:
                tile_grad = torch.empty_like(tile_grad, dtype=dtype)
            if len(rows) == 0:
                tile_grad.zero_()
        for block in rows.blocks(block_rows):
            x, target = projection.operand(rows.hidden(block)), rows.target[block]
            logits = projection.logits_(_tile(buffer, start, vocab_size, vocab_tile, len(target)), x, start)
            exp_(logits.sub_(row_maxima[block]))
            subtract_target_(logits, target, start, exp_sums[block])
            if tile_grad is not None:
                scaled = (x * coefficients[block, None]).to(projection.dtype)
                projection.weight_grad_(tile_grad, logits, scaled, accumulate=block.start > 0)
            if bias_grad is not None:
                bias_grad[start:stop].addmv_(logits, coefficients[block])
        if weight_grad is not None and tile_grad is not None and tile_grad.dtype != weight_grad.dtype:
            weight_grad[start:stop] = tile_grad
    return weight_grad, None if bias_grad is None or bias is None else bias_grad.to(bias.dtype)


class CutCrossEntropy(torch.autograd.Function):
    """`apply(input, weight, bias, target, ignore_index, rows, vocab_tile)` -> losses (...), fp32, 0 where ignored."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        block_rows: int,
        vocab_tile: int,
    ) -> Tensor:
        ctx.options = ignore_index, block_rows, vocab_tile, operand_dtype(weight)
        rows, projection = _operands(ctx, input, weight, bias, target)
        losses, row_maxima, exp_sums, ctx.input_grad = cut_row_losses(
            rows, projection, block_rows, vocab_tile, ctx.needs_input_grad[0]
        )
        ctx.save_for_backward(input, weight, bias, target, row_maxima, exp_sums)
        return scatter_rows(rows, losses).view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, target, row_maxima, exp_sums = ctx.saved_tensors
        _, block_rows, vocab_tile, _ = ctx.options
        need_input, *need_weights = ctx.needs_input_grad[:3]
        rows, projection = _operands(ctx, input, weight, bias, target)
        # The buffer is handed over, not copied: a second backward of a retained graph makes it again.
        input_grad, ctx.input_grad = ctx.input_grad, None
        if need_input and input_grad is None:
            *_, input_grad = cut_row_losses(rows, projection, block_rows, vocab_tile, True)
        upstream = upstream.reshape(-1)
        if input_grad is not None:
            input_grad = scale_grad_(input_grad, upstream[:, None], input.dtype)
            assert input_grad is not None
            input_grad = input_grad.view(input.shape)
        weight_grad = bias_grad = None
        if any(need_weights):
            kept = upstream if rows.index is None else upstream[rows.index]
            weight_grad, bias_grad = cut_weight_grads(
                rows, projection, block_rows, vocab_tile, row_maxima, exp_sums, kept, tuple(need_weights)
            )
        return input_grad, weight_grad, bias_grad, None, None, None, None


def scatter_rows(rows: SupervisedRows, values: Tensor) -> Tensor:
    """Return `values` (kept rows,) at their places among all rows, 0 at ignored ones."""
    if rows.index is None:
        return values
    out = torch.zeros(rows.num_rows, dtype=values.dtype, device=values.device)
    return out.index_copy_(0, rows.index, values)


def _operands(
    ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor
) -> tuple[SupervisedRows, Projection]:
    ignore_index, _, _, dtype = ctx.options
    return SupervisedRows(input, target, ignore_index), Projection(weight, bias, dtype)


def _tile_buffer(rows: SupervisedRows, vocab_size: int, block_rows: int, vocab_tile: int, dtype: torch.dtype) -> Tensor:
    size = min(block_rows, len(rows)) * min(vocab_tile, vocab_size)
    return torch.empty(size, dtype=dtype, device=rows.input.device)


def _tile(buffer: Tensor, start: int, vocab_size: int, vocab_tile: int, num_rows: int) -> Tensor:
    columns = min(vocab_tile, vocab_size - start)
    return buffer[: columns * num_rows].view(columns, num_rows)
