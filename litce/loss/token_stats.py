"""Loss, accuracy, entropy and best token of each row, without its logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from litce.loss.function import LossSettings, no_autocast
from litce.loss.options import LossOptions
from litce.loss.plan import DEFAULT_BUDGET_BYTES, plan_cross_entropy
from litce.loss.projection import Projection, operand_dtype, tiles
from litce.loss.rows import block_max, exp_, read_target_, slabs
from litce.loss.supervised_rows import SupervisedRows
from litce.loss.targets import check_operands, checked_targets


@dataclass(frozen=True)
class TokenStats:
    """One number per target, in its shape; 0 (`argmax`: -1) where the target is ignored."""

    loss: Tensor  # fp32, nats
    correct: Tensor  # bool: whether the target has the largest logit
    entropy: Tensor  # fp32, nats, of the predicted distribution
    argmax: Tensor  # int64


@torch.no_grad()
def linear_token_stats(
    input: Tensor,  # (..., D)
    linear_weight: Tensor,  # (V, D)
    target: Tensor,  # (...)
    *,
    linear_bias: Tensor | None = None,  # (V,)
    ignore_index: int = -100,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    memory_budget_bytes: int = DEFAULT_BUDGET_BYTES,
    project_in_fp32: bool = False,  # whatever the dtype of the weight
) -> TokenStats:
    """Return statistics of each target under `softmax(linear(input))`, a tile of logits at a time.

    The entropy is `lse - sum p z`, summed online: per row a running maximum m, `sum exp(z - m)` and
    `sum exp(z - m) (z - m)`, rescaled when the maximum grows.

    Raises:
        ValueError: as `linear_cross_entropy`.
    """
    check_operands(input, linear_weight, target, linear_bias)
    target = checked_targets(target, len(linear_weight), ignore_index)
    wide = torch.promote_types(linear_weight.dtype, torch.float32)
    settings = LossSettings(
        ignore_index,
        LossOptions(logit_softcap=logit_softcap, logit_scale=logit_scale),
        dtype=wide if project_in_fp32 else operand_dtype(linear_weight),
        input_dtype=wide if project_in_fp32 else linear_weight.dtype,
        vocab_size=len(linear_weight),
    )
    rows, projection = settings.rows(input, target), settings.projection(linear_weight, linear_bias)
    plan = plan_cross_entropy(
        len(rows),
        *linear_weight.shape,
        dtype=linear_weight.dtype,
        device=linear_weight.device,
        weight_requires_grad=False,
        strategy="cut",
        memory_budget_bytes=memory_budget_bytes,
    )
    with no_autocast(input.device.type):
        parts = [_block_stats(rows, projection, block, plan.vocab_tile) for block in rows.blocks(plan.rows)]
    dtype = projection.accumulate_dtype
    empty = [torch.zeros(0, dtype=d, device=input.device) for d in (dtype, dtype, torch.long)]
    loss, entropy, best = (torch.cat(column) for column in zip(empty, *parts, strict=True))
    argmax = rows.scatter(best + 1) - 1
    return TokenStats(
        loss=rows.scatter(loss).view(target.shape),
        correct=argmax.view(target.shape) == torch.where(target == ignore_index, -2, target),
        entropy=rows.scatter(entropy).view(target.shape),
        argmax=argmax.view(target.shape),
    )


def _block_stats(
    rows: SupervisedRows, projection: Projection, block: slice, vocab_tile: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, entropy and argmax of a block of rows."""
    x, target = projection.operand(rows.hidden(block)), rows.target[block]
    dtype = projection.accumulate_dtype
    row_max = torch.full((len(target),), torch.finfo(dtype).min, dtype=dtype, device=x.device)
    total, weighted = torch.zeros_like(row_max), torch.zeros_like(row_max)
    target_logit, best = torch.full_like(row_max, torch.nan), torch.zeros_like(target)
    for tile in tiles(projection.vocab_size, vocab_tile):
        logits = x.new_empty((tile.stop - tile.start, len(target)), dtype=dtype)
        projection.logits_(logits, x, tile.start)
        read_target_(target_logit, logits, target, tile.start)
        tile_max = block_max(logits)
        best = torch.where(tile_max > row_max, logits.argmax(0) + tile.start, best)
        new_max = torch.maximum(row_max, tile_max)
        shrink, drop = exp_(row_max - new_max), row_max - new_max
        # exp(z - new) (z - new) = shrink * exp(z - old) * ((z - old) + (old - new)); 0 * -inf is 0 here.
        weighted = shrink * weighted + torch.where(shrink > 0, shrink * total * drop, 0)
        total = shrink * total
        row_max = new_max
        for slab in slabs(logits):
            shifted = slab.sub_(row_max)
            probability = exp_(shifted.clone())
            total += probability.sum(0)
            weighted += probability.mul_(shifted.clamp_(min=torch.finfo(dtype).min)).sum(0)
    log_sum = total.log()
    return log_sum - (target_logit - row_max), log_sum - weighted / total, best
