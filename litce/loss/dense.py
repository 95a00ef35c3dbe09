"""All logits at once, differentiated by autograd: the readable reference, and what the others are measured against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from litce.loss.function import LossSettings


def dense_losses(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, settings: LossSettings) -> Tensor:
    """Return the fp32 loss of every row, in the shape of `target`; 0 where it is `settings.ignore_index`.

    The GEMM runs in the head's dtype, or autocast's; everything after it in fp32 (fp64 for fp64 operands).
    """
    options, dtype = settings.options, settings.input_dtype
    rows = settings.rows(input, target)
    if settings.vocab_size < len(weight):
        weight, bias = weight[: settings.vocab_size], None if bias is None else bias[: settings.vocab_size]
    logits = F.linear(
        rows.hidden(slice(0, len(rows))).to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    )
    logits = options.transform(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    losses = F.cross_entropy(logits, rows.target, reduction="none", label_smoothing=options.label_smoothing)
    if options.z_loss != 0.0:
        losses = losses + options.z_loss * logits.logsumexp(-1).square()
    return rows.scatter(losses).view(target.shape)
