"""The public fused loss: check, plan, run, reduce."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from litce.loss.chunked import ChunkedCrossEntropy
from litce.loss.cut import CutCrossEntropy
from litce.loss.dense import dense_losses
from litce.loss.plan import DEFAULT_BUDGET_BYTES, CrossEntropyPlan, plan_cross_entropy
from litce.loss.targets import check_targets

Reduction = Literal["mean", "sum", "none"]


def linear_cross_entropy(
    input: Tensor,  # (..., D)
    linear_weight: Tensor,  # (V, D)
    target: Tensor,  # (...) integer
    *,
    linear_bias: Tensor | None = None,  # (V,)
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    token_weights: Tensor | None = None,
    strategy: Literal["auto", "dense", "chunked", "cut"] = "auto",
    chunk_size: int | Literal["auto"] = "auto",
    memory_budget_bytes: int = DEFAULT_BUDGET_BYTES,
    filter_tolerance: float = 0.0,
) -> Tensor:
    """Return `cross_entropy(linear(input, linear_weight, linear_bias), target)` without holding the logits.

    Names and order follow `torch.nn.functional.linear_cross_entropy`. The loss is fp32 whatever the operands' dtype
    (fp64 for fp64); "mean" divides by the number of supervised targets and gives 0 where there are none.

    Args:
        input: (..., D) hidden states; cast to the weight's dtype. Strided views are read in place.
        linear_weight: (V, D) weight of the head.
        target: (...) class indices in [0, V), or `ignore_index`.
        linear_bias: (V,) bias of the head.
        ignore_index: target that is not supervised; such rows are dropped before the first GEMM.
        reduction: "mean" or "sum" -> 0-dim; "none" -> (...), 0 at ignored targets.
        strategy: "dense" holds all logits; "chunked" blocks of rows, with gradients made in the forward pass (three
            GEMMs); "cut" tiles of rows x vocabulary (four GEMMs, two with a frozen weight); "auto" is the fastest that
            fits the budget.
        chunk_size: rows of logits alive at once, 0 for all of them, "auto" to fit the budget.
        memory_budget_bytes: what "auto" may use above inputs and gradients, in bytes.

    Raises:
        ValueError: for shapes, dtypes or options that do not go together, or a target outside [0, V) on the CPU.
        NotImplementedError: for an option that no strategy has yet.
        RuntimeError: from a second derivative; the loss can be differentiated once.
    """
    for name, value, default in (
        ("label_smoothing", label_smoothing, 0.0),
        ("z_loss", z_loss, 0.0),
        ("logit_softcap", logit_softcap, None),
        ("logit_scale", logit_scale, 1.0),
        ("token_weights", token_weights, None),
        ("filter_tolerance", filter_tolerance, 0.0),
    ):
        if value is not default and value != default:
            raise NotImplementedError(f"{name}={value} is not supported yet; leave it at {default}")
    plan = plan_cross_entropy(
        target.numel(),
        linear_weight.shape[0],
        linear_weight.shape[-1],
        dtype=linear_weight.dtype,
        device=linear_weight.device,
        weight_requires_grad=linear_weight.requires_grad,
        chunk_size=chunk_size,
        strategy=strategy,
        memory_budget_bytes=memory_budget_bytes,
    )
    return run_plan(
        plan, input, linear_weight, target, bias=linear_bias, ignore_index=ignore_index, reduction=reduction
    )


def run_plan(
    plan: CrossEntropyPlan,
    input: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    target: Tensor,  # (...)
    *,
    bias: Tensor | None = None,  # (V,)
    ignore_index: int = -100,
    reduction: Reduction = "sum",
) -> Tensor:
    """Return the loss by a plan made before; arguments and errors as `linear_cross_entropy`."""
    _check(input, weight, target, bias, ignore_index, reduction)
    if plan.strategy == "dense":
        input = input.to(weight.dtype)
        return _reduce(dense_losses(input, weight, bias, target, ignore_index), target, ignore_index, reduction)
    if not torch.is_grad_enabled():
        input, weight, bias = input.detach(), weight.detach(), None if bias is None else bias.detach()
    if plan.strategy == "cut" or reduction == "none":
        losses = CutCrossEntropy.apply(input, weight, bias, target, ignore_index, plan.rows, plan.vocab_tile)
        return _reduce(losses, target, ignore_index, reduction)
    scale = torch.ones((), dtype=torch.promote_types(weight.dtype, torch.float32), device=input.device)
    if reduction == "mean":
        scale /= _num_supervised(target, ignore_index)
    return ChunkedCrossEntropy.apply(input, weight, bias, target, scale, ignore_index, plan.rows)


def _reduce(losses: Tensor, target: Tensor, ignore_index: int, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / _num_supervised(target, ignore_index)


def _num_supervised(target: Tensor, ignore_index: int) -> Tensor:
    """Stays on the device: asking for the number there would stall it."""
    return (target != ignore_index).sum().clamp(min=1)


def _check(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int, reduction: str
) -> None:
    if weight.ndim != 2 or weight.shape[0] < 1:
        raise ValueError(f"linear_weight has shape {tuple(weight.shape)}; (V, D) with V >= 1 is needed")
    if input.ndim < 1 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input {tuple(input.shape)} does not fit linear_weight {tuple(weight.shape)}; the last sizes must agree"
        )
    if target.shape != input.shape[:-1]:
        raise ValueError(f"target {tuple(target.shape)} does not fit input {tuple(input.shape)}; (...) and (..., D)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear_bias {tuple(bias.shape)} does not fit linear_weight {tuple(weight.shape)}")
    for name, tensor in (("input", input), ("linear_weight", weight)):
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}; a floating-point dtype is needed")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}; choose mean, sum or none")
    check_targets(target, weight.shape[0], ignore_index)
