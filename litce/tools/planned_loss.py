"""The head's loss as its plan describes it: it allocates what the loss would, and computes nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from litce.lm_head import LMHead
from litce.loss import CrossEntropyPlan
from litce.loss.chunked import held_dtype

LOSS_PART = "logits, loss blocks"


def planned_loss(head: LMHead, x: Tensor, target: Tensor, plan: CrossEntropyPlan, counter: Any) -> Tensor:
    """Return an uninitialised summed loss whose forward and backward passes allocate what `head`'s would.

    For fake tensors, whose values the loss cannot look at, and for which thousands of blocks would take long.

    Args:
        head: gives the weight (V, D) and bias (V,).
        x: hidden states (B, T, D).
        target: (B, T), all of them supervised.
        plan: of the loss over B x T rows.
        counter: an `Allocations`, which is told which buffers are the loss's.
    """
    weight, bias = head.projection()
    if plan.strategy != "dense":
        return _PlannedLoss.apply(x, weight, bias, plan, counter)
    part, counter.part = counter.part, LOSS_PART
    logits = F.linear(x.to(weight.dtype), weight, bias).flatten(0, -2)
    logits = head.options.transform(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    loss = F.cross_entropy(logits, target.flatten(), reduction="none").sum()
    counter.part = part
    return loss


class _PlannedLoss(torch.autograd.Function):
    """`apply(x, weight, bias, plan, counter)` -> 0-dim fp32, by the strategies "chunked" and "cut"."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: CrossEntropyPlan, counter: Any
    ) -> Tensor:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        ctx.plan, ctx.counter, ctx.dtype, ctx.bias = plan, counter, dtype, bias
        ctx.save_for_backward(x, weight)
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        chunked = plan.strategy == "chunked"
        input_grad = torch.empty_like(x, dtype=held_dtype(x)) if needs_input else None
        weight_grad = bias_grad = None
        transient = plan.peak_bytes
        if chunked and needs_weight:
            weight_grad = torch.empty_like(weight, dtype=dtype)
            # The plan's peak has what the fp32 sum takes beyond the gradient.
            transient -= weight.numel() * (dtype.itemsize - weight.dtype.itemsize)
        if chunked and needs_bias:
            assert bias is not None
            bias_grad = torch.empty_like(bias, dtype=dtype)
        ctx.grads = input_grad, weight_grad, bias_grad
        _allocate(counter, x, transient)
        # Cut keeps three numbers per row.
        part, counter.part = counter.part, LOSS_PART
        ctx.statistics = None if chunked else torch.empty((3, *x.shape[:-1]), dtype=dtype, device=x.device)
        counter.part = part
        return torch.empty((), dtype=dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        input_grad, weight_grad, bias_grad = ctx.grads
        ctx.grads = None
        _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if ctx.plan.strategy == "cut" and (needs_weight or needs_bias):
            weight_grad = torch.empty_like(weight) if needs_weight else None
            bias_grad = torch.empty_like(ctx.bias, dtype=ctx.dtype) if needs_bias else None
            _allocate(ctx.counter, x, ctx.plan.peak_bytes)
        return (
            None if input_grad is None else input_grad.to(x.dtype),
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if bias_grad is None else bias_grad.to(ctx.bias.dtype),
            None,
            None,
        )


def _allocate(counter: Any, like: Tensor, num_bytes: int) -> None:
    """Hold `num_bytes` for a moment."""
    part, counter.part = counter.part, LOSS_PART
    torch.empty(max(0, num_bytes), dtype=torch.uint8, device=like.device)
    counter.part = part
