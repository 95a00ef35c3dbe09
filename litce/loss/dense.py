"""All logits at once, differentiated by autograd: the readable reference, and what the others are measured against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from litce.loss.options import LossOptions


def dense_losses(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, options: LossOptions
) -> Tensor:
    """Return the fp32 loss of every row, in the shape of `target`; 0 where it is `ignore_index`.

    The GEMM runs in the dtype of its operands, or of autocast; everything after it in fp32 (fp64 for fp64 operands).
    """
    keep = target != ignore_index
    logits = F.linear(input[keep], weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * options.logit_scale
    if options.logit_softcap is not None:
        logits = options.logit_softcap * torch.tanh(logits / options.logit_softcap)
    losses = F.cross_entropy(logits, target[keep].long(), reduction="none", label_smoothing=options.label_smoothing)
    if options.z_loss != 0.0:
        losses = losses + options.z_loss * logits.logsumexp(-1).square()
    return torch.zeros(target.shape, dtype=losses.dtype, device=losses.device).masked_scatter(keep, losses)
