"""Blocks of rows: the gradients are made in the forward pass, in place of the logits (three GEMMs).

The idea is Liger's fused linear cross-entropy (Hsu et al. 2024, arXiv:2410.10989); here sums are fp32, the block of
logits is the only buffer, and factors constant along a row are applied to (rows, D) operands. It needs one scalar
upstream gradient, so `reduction="none"` is served by cut.py, which recomputes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from litce.loss.options import LossOptions
from litce.loss.projection import TILE_COLUMNS, Projection, new_input_product, operand_dtype, tiles
from litce.loss.rows import exp_sum, exp_sum_, logits_grad_, read_target_, subtract_target_
from litce.loss.supervised_rows import SupervisedRows

Needs = tuple[bool, bool, bool]  # gradients of input, weight, bias
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


def chunked_loss_and_grads(
    rows: SupervisedRows, projection: Projection, row_weights: Tensor, chunk_size: int, needs: Needs
) -> tuple[Tensor, Grads]:
    """Return `sum(row_weights * loss)` (0-dim) and its gradients, `chunk_size` rows of logits at a time.

    `row_weights` is (kept rows,). The gradient of the weight is fp32; that of the input has the input's dtype (fp32
    for fp16, whose range it would underflow before a loss scaler's factor reaches it).
    """
    need_input, need_weight, need_bias = needs
    vocab_size, n_embd = projection.weight.shape
    device, dtype = rows.input.device, projection.accumulate_dtype
    loss = torch.zeros((), dtype=dtype, device=device)
    input_grad = rows.new_grad(held_dtype(rows.input)) if need_input else None
    weight_grad = torch.empty((vocab_size, n_embd), dtype=dtype, device=device) if need_weight else None
    bias_grad = torch.zeros(vocab_size, dtype=dtype, device=device) if need_bias else None
    buffer = torch.empty(vocab_size * min(chunk_size, len(rows)), dtype=dtype, device=device)

    for block in rows.blocks(chunk_size):
        x, target = projection.operand(rows.hidden(block)), rows.target[block]
        logits = buffer[: vocab_size * len(target)].view(vocab_size, -1)
        row_max = torch.full((len(target),), torch.finfo(dtype).min, dtype=dtype, device=device)
        for tile in tiles(vocab_size, TILE_COLUMNS):
            projection.logits_(logits[tile], x, tile.start)
            row_max = torch.maximum(row_max, logits[tile].amax(0))
        losses, exp_sum = losses_and_logits_grad_(logits, target, row_max, projection.options)
        loss += losses @ row_weights[block]
        if not any(needs):
            continue
        row_scale = row_weights[block] * (projection.options.logit_scale / exp_sum)
        scaled = (x * row_scale[:, None]).to(projection.dtype)
        product = new_input_product(x, dtype) if input_grad is not None else None
        for tile in tiles(vocab_size, TILE_COLUMNS):
            if product is not None:
                projection.input_grad_(product, logits[tile], tile.start, accumulate=tile.start > 0)
            if weight_grad is not None:
                projection.weight_grad_(weight_grad[tile], logits[tile], scaled, accumulate=block.start > 0)
        if input_grad is not None and product is not None:
            rows.write(input_grad, block, product.mul_(row_scale[:, None]))
        if bias_grad is not None:
            bias_grad.addmv_(logits, row_scale)

    if weight_grad is not None and len(rows) == 0:
        weight_grad.zero_()
    return loss, (input_grad, weight_grad, bias_grad)


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
    """`apply(input, weight, bias, target, row_weights, ignore_index, options, chunk_size)` -> weighted sum of losses.

    `row_weights` is 0-dim or in the shape of `target`, and gets no gradient. The result is 0-dim and fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        row_weights: Tensor,
        ignore_index: int,
        options: LossOptions,
        chunk_size: int,
    ) -> Tensor:
        ctx.settings = ignore_index, options, chunk_size, operand_dtype(weight)
        ctx.save_for_backward(input, weight, bias, target, row_weights)
        loss, ctx.grads = _run(ctx, input, weight, bias, target, row_weights)
        return loss

    @staticmethod
    @once_differentiable
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
        return input_grad, weight_grad, bias_grad, None, None, None, None, None


def _run(
    ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, row_weights: Tensor
) -> tuple[Tensor, Grads]:
    ignore_index, options, chunk_size, dtype = ctx.settings
    ctx.like = input.shape, (input.dtype, weight.dtype, None if bias is None else bias.dtype)
    rows = SupervisedRows(input, target, ignore_index)
    projection = Projection(weight, bias, options, dtype)
    needs = tuple(ctx.needs_input_grad[:3])
    return chunked_loss_and_grads(rows, projection, rows.select(row_weights), chunk_size, needs)


def scale_grad_(grad: Tensor | None, upstream: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return `grad * upstream` in `dtype`, in place where the dtype allows; `upstream` broadcasts against `grad`."""
    if grad is None:
        return None
    if upstream.device.type != "cpu" or upstream.numel() != 1 or float(upstream) != 1.0:
        grad.mul_(upstream)
    return grad.to(dtype)
