"""Tiles of rows x vocabulary: logits never outlive their tile, two numbers per row are kept.

The forward pass works as flash attention does (Dao et al. 2022, arXiv:2205.14135): per row a running maximum, sum of
exponentials and, where the input needs a gradient, the unnormalised `sum_j exp(z_j - max) W_j`, rescaled when the
maximum grows; so the input's gradient is done after two GEMMs. The weight's gradient takes two more in the backward
pass, which recomputes the logits of each tile from the kept maximum and sum, as cut cross-entropy does (Wijmans et al.
2024, arXiv:2411.09009).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from litce.loss.chunked import held_dtype, scale_grad_
from litce.loss.column_filter import ColumnFilter, add_filtered_grads_
from litce.loss.function import LossSettings, guarded_backward, guarded_forward
from litce.loss.projection import Projection, new_input_product
from litce.loss.rows import add_exp_sum_, block_max, capped_exp_sum_, exp_, logits_grad_, read_target_, zero_target_
from litce.loss.supervised_rows import SupervisedRows


@dataclass(frozen=True)
class TileBlocks:
    """The size of a tile: `CrossEntropyPlan.rows`, `vocab_tile` and `filter_tolerance`."""

    rows: int
    vocab_tile: int
    filter_tolerance: float

    def new_filter(self, vocab_size: int) -> ColumnFilter | None:
        return ColumnFilter(self.filter_tolerance, vocab_size) if self.filter_tolerance else None


@dataclass(frozen=True)
class RowStatistics:
    """What the backward pass needs of each kept row, all (kept rows,) fp32."""

    row_max: Tensor
    exp_sum: Tensor  # sum of exp(z - row_max)
    target_logit: Tensor

    def __getitem__(self, block: slice) -> tuple[Tensor, Tensor, Tensor]:
        return self.row_max[block], self.exp_sum[block], self.target_logit[block]


def cut_row_losses(
    rows: SupervisedRows, projection: Projection, blocks: TileBlocks, need_input: bool
) -> tuple[Tensor, RowStatistics, Tensor | None]:
    """Return the losses and statistics of the kept rows, and the input's gradient (all rows, D) or None.

    The input's gradient is that of the sum of the losses.
    """
    device, dtype = rows.input.device, projection.accumulate_dtype
    vocab_size, options = projection.vocab_size, projection.options
    losses, *statistics = (torch.empty(len(rows), dtype=dtype, device=device) for _ in range(4))
    row_statistics = RowStatistics(*statistics)
    input_grad = rows.new_grad(held_dtype(rows.input)) if need_input else None
    vocab_tile = blocks.vocab_tile
    buffer = _tile_buffer(rows, vocab_size, blocks, dtype)
    uniform = projection.weight_sum() if need_input and options.label_smoothing else None

    for block in rows.blocks(blocks.rows):
        x, target = projection.operand(rows.hidden(block)), rows.target[block]
        row_max = torch.full((len(target),), torch.finfo(dtype).min, dtype=dtype, device=device)
        total, target_logit = torch.zeros_like(row_max), torch.full_like(row_max, torch.nan)
        logit_sum = torch.zeros_like(row_max) if options.label_smoothing else None
        weighted = new_input_product(x, dtype).zero_() if need_input else None
        column_filter = blocks.new_filter(vocab_size)
        if uniform is not None and options.logit_softcap is not None:
            uniform = new_input_product(x, dtype)
        for start in range(0, vocab_size, vocab_tile):
            logits = projection.logits_(_tile(buffer, start, vocab_size, vocab_tile, len(target)), x, start)
            read_target_(target_logit, logits, target, start)
            if logit_sum is not None:
                logit_sum += logits.sum(0)
            old_max = row_max
            if weighted is None:
                row_max, total = add_exp_sum_(logits, old_max, total)
                continue
            if options.logit_softcap is None:
                row_max, total = add_exp_sum_(logits, old_max, total)
            else:
                if uniform is not None:
                    projection.input_grad_(uniform, options.cap_slope(logits), start, accumulate=start > 0)
                row_max = torch.maximum(old_max, block_max(logits))
                total = total * exp_(old_max - row_max) + capped_exp_sum_(logits, row_max, options)
            if start > 0:
                weighted.mul_(exp_(old_max - row_max)[:, None])
            # Its part is added at the end: where the model is confident, little is left of probability minus 1, and a
            # 16-bit GEMM would round the probability alone by more.
            zero_target_(logits, target, start)
            if column_filter is None:
                projection.input_grad_(weighted, logits, start, accumulate=start > 0)
            else:
                # The running sum is at most the final one, so that these masses bound the final ones from above.
                kept = column_filter.kept(logits, total, target, start)
                add_filtered_grads_(projection, logits, start, kept, weighted, None, None)
        losses[block] = options.row_losses(row_max, total, target_logit, logit_sum, vocab_size)
        for column, value in zip(statistics, (row_max, total, target_logit), strict=True):
            column[block] = value
        if input_grad is not None and weighted is not None:
            softmax_scale = options.softmax_weight(row_max, total) / total
            weighted.mul_(softmax_scale[:, None])
            target_share = softmax_scale * exp_(target_logit - row_max)
            _add_constant_terms_(weighted, projection, target, target_logit, target_share, uniform)
            rows.write(input_grad, block, weighted.mul_(options.logit_scale))
    return losses, row_statistics, input_grad


def _add_constant_terms_(
    grad: Tensor,
    projection: Projection,
    target: Tensor,
    target_logit: Tensor,
    target_share: Tensor,
    uniform: Tensor | None,
) -> None:
    """Add to `grad` (rows, D) the target's part and, under label smoothing, everybody's.

    `target_share` (rows,) is the target's probability times the softmax's weight. `uniform` is the sum of the weight's
    rows, (D,), or (rows, D) where each is times its logit's slope.
    """
    options, vocab_size = projection.options, projection.vocab_size
    share = target_share - (1.0 - options.label_smoothing)
    if options.logit_softcap is not None:
        share.mul_(options.cap_slope(target_logit))
    # Targets outside the vocabulary have a NaN loss on GPUs; the clamp only keeps the gather in bounds.
    grad.addcmul_(projection.weight[target.clamp(0, vocab_size - 1)], share[:, None])
    if uniform is not None:
        grad.sub_(uniform, alpha=options.label_smoothing / vocab_size)


def cut_weight_grads(
    rows: SupervisedRows,
    projection: Projection,
    blocks: TileBlocks,
    statistics: RowStatistics,
    upstream: Tensor,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias, in their dtypes, for `upstream` (kept rows,).

    Tile by tile of the vocabulary, each summed over all rows in fp32, so that 16-bit weights need no (V, D) fp32 copy.
    """
    device, dtype = rows.input.device, projection.accumulate_dtype
    weight, bias, options = projection.weight, projection.bias, projection.options
    vocab_size, vocab_tile = projection.vocab_size, blocks.vocab_tile
    weight_grad = torch.empty(weight.shape, dtype=weight.dtype, device=device) if needs[0] else None
    if weight_grad is not None:
        weight_grad[vocab_size:].zero_()
    bias_grad = torch.zeros(len(weight), dtype=dtype, device=device) if needs[1] else None
    buffer = _tile_buffer(rows, vocab_size, blocks, dtype)
    filters = [blocks.new_filter(vocab_size) for _ in rows.blocks(blocks.rows)]
    coefficients = upstream.to(dtype) * (options.logit_scale / statistics.exp_sum)

    for start in range(0, vocab_size, vocab_tile):
        stop = min(start + vocab_tile, vocab_size)
        tile_grad = None
        if weight_grad is not None:
            tile_grad = weight_grad[start:stop]
            if tile_grad.dtype != dtype:
                tile_grad = torch.empty_like(tile_grad, dtype=dtype)
            if len(rows) == 0 or blocks.filter_tolerance:
                tile_grad.zero_()
        for block, column_filter in zip(rows.blocks(blocks.rows), filters, strict=True):
            x, target = projection.operand(rows.hidden(block)), rows.target[block]
            logits = projection.logits_(_tile(buffer, start, vocab_size, vocab_tile, len(target)), x, start)
            logits_grad_(logits, target, start, *statistics[block], options, vocab_size)
            if tile_grad is not None:
                scaled = (x * coefficients[block, None]).to(projection.dtype)
                if column_filter is None:
                    projection.weight_grad_(tile_grad, logits, scaled, accumulate=block.start > 0)
                else:
                    kept = column_filter.kept(logits, statistics.exp_sum[block], target, start)
                    add_filtered_grads_(projection, logits, start, kept, None, tile_grad, scaled)
            if bias_grad is not None:
                bias_grad[start:stop].addmv_(logits, coefficients[block])
        if weight_grad is not None and tile_grad is not None and tile_grad.dtype != weight_grad.dtype:
            weight_grad[start:stop] = tile_grad
    return weight_grad, None if bias_grad is None or bias is None else bias_grad.to(bias.dtype)


class CutCrossEntropy(torch.autograd.Function):
    """`apply(input, weight, bias, target, settings, blocks)` -> losses (...) in fp32.

    They are 0 where the target is ignored.
    """

    @staticmethod
    @guarded_forward
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        settings: LossSettings,
        blocks: TileBlocks,
    ) -> Tensor:
        ctx.settings, ctx.blocks = settings, blocks
        rows, projection = settings.rows(input, target), settings.projection(weight, bias)
        losses, kept, ctx.input_grad = cut_row_losses(rows, projection, blocks, ctx.needs_input_grad[0])
        ctx.save_for_backward(input, weight, bias, target, kept.row_max, kept.exp_sum, kept.target_logit)
        return rows.scatter(losses).view(target.shape)

    @staticmethod
    @guarded_backward
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, target, *statistics = ctx.saved_tensors
        blocks = ctx.blocks
        need_input, *need_weights = ctx.needs_input_grad[:3]
        rows, projection = ctx.settings.rows(input, target), ctx.settings.projection(weight, bias)
        # The buffer is handed over, not copied: a second backward of a retained graph makes it again.
        input_grad, ctx.input_grad = ctx.input_grad, None
        if need_input and input_grad is None:
            _, _, input_grad = cut_row_losses(rows, projection, blocks, True)
        upstream = upstream.reshape(-1)
        if input_grad is not None:
            input_grad = scale_grad_(input_grad, upstream[:, None], input.dtype)
            assert input_grad is not None
            input_grad = input_grad.view(input.shape)
        weight_grad = bias_grad = None
        if any(need_weights):
            weight_grad, bias_grad = cut_weight_grads(
                rows,
                projection,
                blocks,
                RowStatistics(*statistics),
                rows.select(upstream),
                tuple(need_weights),
            )
        return input_grad, weight_grad, bias_grad, None, None, None


def _tile_buffer(rows: SupervisedRows, vocab_size: int, blocks: TileBlocks, dtype: torch.dtype) -> Tensor:
    size = min(blocks.rows, len(rows)) * min(blocks.vocab_tile, vocab_size)
    return torch.empty(size, dtype=dtype, device=rows.input.device)


def _tile(buffer: Tensor, start: int, vocab_size: int, vocab_tile: int, num_rows: int) -> Tensor:
    columns = min(vocab_tile, vocab_size - start)
    return buffer[: columns * num_rows].view(columns, num_rows)
