"""Which columns of a block of logits matter to the gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from litce.loss.projection import TILE_COLUMNS, Projection, tiles

# Columns are ranked by the exponent of their mass, in quarters: sorting V numbers would cost more than it saves.
STEPS_PER_OCTAVE = 4
OCTAVES = 64


@dataclass
class ColumnFilter:
    """Drops the columns of least mass from blocks of softmax gradients, for at most `tolerance` of the whole.

    The mass of a column is the mean over the block's rows of `|d loss / d logit|`, its probability times the slope of
    a softcap. The columns dropped from all tiles of one block of rows together have at most `tolerance` of it, so
    that the mean over rows of the dropped probability is at most `tolerance`, whatever the model. Hence

        mean over rows |error of d loss / d input row|  <=  tolerance * max_j |weight_j|
        sum over columns |error of d loss / d weight_j| <=  tolerance * num_rows * max_i |input_i|

    for losses that are summed. A flat distribution has no columns of little mass: there `tolerance` of them go. The
    columns of targets stay. Apple's CCE (arXiv:2411.09009) filters by the largest probability of a block instead, which
    does not bound what is dropped.

    How many columns stay decides how large the products are, so that a GPU is waited for once per block or tile. It is
    the one part of the loss that does.
    """

    tolerance: float
    vocab_size: int
    dropped: float = 0.0

    def kept(self, block: Tensor, exp_sum: Tensor, target: Tensor, start: int) -> Tensor:
        """Return the indices (kept,) of the columns of `block` (v, rows) that stay.

        `block` is a gradient times `exp_sum` (rows,), as `logits_grad_` leaves it, of the columns from `start` on. Each
        tile may drop its share of the tolerance and what the tiles before it left.
        """
        columns, rows = block.shape
        allowance = self.tolerance * (start + columns) / self.vocab_size - self.dropped
        mass = torch.nan_to_num(block @ (1.0 / (exp_sum * rows)), nan=1.0)  # keep what is not finite
        local = target - start
        mass[local[(local >= 0) & (local < columns)]] = 1.0
        bucket = (mass.clamp(2.0**-OCTAVES, 1.0).log2_() + OCTAVES).mul_(STEPS_PER_OCTAVE).long()
        totals = torch.bincount(bucket, weights=mass.double(), minlength=OCTAVES * STEPS_PER_OCTAVE + 1).cumsum(0)
        droppable = int((totals <= allowance).sum())
        if droppable > 0:
            self.dropped += float(totals[droppable - 1])
        return (bucket >= droppable).nonzero()[:, 0]


def add_filtered_grads_(
    projection: Projection,
    block: Tensor,
    start: int,
    kept: Tensor,
    input_grad: Tensor | None,
    weight_grad: Tensor | None,
    x: Tensor | None,
) -> None:
    """Add `block.T @ weight` to `input_grad` (rows, D) and `block @ x` to `weight_grad` (v, D), kept columns only."""
    for part in tiles(len(kept), TILE_COLUMNS):
        index = kept[part]
        columns = block.index_select(0, index)
        if input_grad is not None:
            weight = projection.weight.index_select(0, index + start)
            replace(projection, weight=weight).input_grad_(input_grad, columns, 0, accumulate=True)
        if weight_grad is not None and x is not None:
            product = torch.empty((len(index), x.shape[1]), dtype=weight_grad.dtype, device=x.device)
            projection.weight_grad_(product, columns, x, accumulate=False)
            weight_grad.index_add_(0, index, product)
