"""The public fused loss: check, plan, run, reduce."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from litce.loss.chunked import ChunkedCrossEntropy, RowBlocks
from litce.loss.cut import CutCrossEntropy, TileBlocks
from litce.loss.dense import dense_losses
from litce.loss.function import LossSettings, no_autocast
from litce.loss.options import LossOptions
from litce.loss.plan import DEFAULT_BUDGET_BYTES, CrossEntropyPlan, plan_cross_entropy
from litce.loss.projection import operand_dtype
from litce.loss.targets import check_num_supervised, check_operands, checked_targets, nan_beyond_bound

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
    num_supervised: int | None = None,
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
        label_smoothing: share of the target that is spread over the vocabulary, in [0, 1].
        z_loss: factor of `logsumexp(logits)**2`, added to the loss of each row.
        logit_softcap: `softcap * tanh(logits / softcap)` takes the place of the logits.
        logit_scale: factor of the logits, before the softcap.
        token_weights: (...) factor of each target's loss, differentiable; "mean" then divides by the sum of the
            supervised ones.
        strategy: "dense" holds all logits; "chunked" blocks of rows, with gradients made in the forward pass (three
            GEMMs); "cut" tiles of rows x vocabulary (four GEMMs, two with a frozen weight); "auto" is the fastest that
            fits the budget.
        chunk_size: rows of logits alive at once, 0 for all of them, "auto" to fit the budget. "dense" always holds all.
        memory_budget_bytes: what "auto" may use above inputs and gradients, in bytes.
        filter_tolerance: share of the predicted probability, averaged over the rows of a block, whose gradient may be
            dropped to save time, in [0, 1); 0 is exact. See `ColumnFilter` for the bound on the gradients.
        num_supervised: number of supervised targets, or a bound of it, if the host knows it. A GPU then skips the other
            rows; without it ignored rows cost there what others do, because counting them would wait for the GPU. A
            CPU counts them itself.

    Raises:
        ValueError: for shapes, dtypes or options that do not go together; on the CPU also for a target outside [0, V)
            and for more supervised targets than `num_supervised`. On a GPU the loss is NaN then.
        RuntimeError: from a second derivative; the loss can be differentiated once.
    """
    options = LossOptions(label_smoothing, z_loss, logit_softcap, logit_scale)
    check_operands(input, linear_weight, target, linear_bias)
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
        filter_tolerance=filter_tolerance,
    )
    return run_plan(
        plan,
        input,
        linear_weight,
        target,
        bias=linear_bias,
        ignore_index=ignore_index,
        reduction=reduction,
        options=options,
        token_weights=token_weights,
        num_supervised=num_supervised,
    )


def cut_cross_entropy(
    hidden_states: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    target_ids: Tensor,  # (...)
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    **options: Any,
) -> Tensor:
    """Return `linear_cross_entropy` by the strategy "cut"; `options` are its other keyword arguments."""
    return linear_cross_entropy(
        hidden_states, weight, target_ids, ignore_index=ignore_index, reduction=reduction, strategy="cut", **options
    )


def cut_cross_entropy_logprobs(
    hidden_states: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    target_ids: Tensor,  # (...)
    *,
    bias: Tensor | None = None,  # (V,)
    ignore_index: int = -100,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    memory_budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> Tensor:
    """Return `log p(target)` (...) of each token, fp32 and differentiable; 0 at ignored targets.

    For losses over sequences such as DPO's and PPO's: sum over the last dimension for the log-probability of a
    sequence. Arguments and errors as `linear_cross_entropy`.
    """
    return -cut_cross_entropy(
        hidden_states,
        weight,
        target_ids,
        ignore_index,
        "none",
        linear_bias=bias,
        logit_softcap=logit_softcap,
        logit_scale=logit_scale,
        memory_budget_bytes=memory_budget_bytes,
    )


@torch.compiler.disable
def run_plan(
    plan: CrossEntropyPlan,
    input: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    target: Tensor,  # (...)
    *,
    bias: Tensor | None = None,  # (V,)
    ignore_index: int = -100,
    reduction: Reduction = "sum",
    options: LossOptions = LossOptions(),  # noqa: B008  (frozen)
    token_weights: Tensor | None = None,  # (...)
    vocab_size: int | None = None,
    project_in_fp32: bool = False,
    num_supervised: int | None = None,
) -> Tensor:
    """Return the loss by a plan made before; arguments and errors as `linear_cross_entropy`.

    Args:
        vocab_size: the softmax runs over so many rows of the weight; those after them are padding. None: over all.
        project_in_fp32: hidden states and weight, of whatever dtype, are multiplied in fp32, under autocast too.

    `torch.compile` leaves a gap here: the blocks are fused by hand, and their number depends on the targets.
    """
    vocab_size = len(weight) if vocab_size is None else vocab_size
    check_operands(input, weight, target, bias)
    if token_weights is not None and token_weights.shape != target.shape:
        raise ValueError(f"token_weights {tuple(token_weights.shape)} do not fit target {tuple(target.shape)}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}; choose mean, sum or none")
    target = checked_targets(target, vocab_size, ignore_index)
    check_num_supervised(num_supervised, target, ignore_index)
    if token_weights is not None:
        token_weights = torch.where(target != ignore_index, token_weights, 0)
    if plan.filter_tolerance and (options.label_smoothing or options.z_loss):
        name = "label_smoothing" if options.label_smoothing else "z_loss"
        raise ValueError(f"filter_tolerance={plan.filter_tolerance} does not go with {name}; set one of them to 0")
    divisor = None if reduction != "mean" else _mean_divisor(target, ignore_index, token_weights)
    # Gradients made in the forward pass know neither a gradient per row nor one for the weights of the rows.
    per_row = reduction == "none" or (token_weights is not None and token_weights.requires_grad)
    settings = LossSettings(
        ignore_index,
        options,
        dtype=torch.promote_types(weight.dtype, torch.float32) if project_in_fp32 else operand_dtype(weight),
        input_dtype=torch.promote_types(weight.dtype, torch.float32) if project_in_fp32 else weight.dtype,
        vocab_size=vocab_size,
        num_supervised=num_supervised,
    )
    if plan.strategy == "chunked" and not per_row:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        row_weights = torch.ones((), dtype=dtype, device=input.device)
        if token_weights is not None:
            row_weights = token_weights.to(dtype)
        if divisor is not None:
            row_weights = row_weights / divisor
        loss = ChunkedCrossEntropy.apply(
            *_without_graph(input, weight, bias),
            target,
            row_weights,
            settings,
            RowBlocks(plan.rows, plan.lent_rows, plan.filter_tolerance),
        )
        return nan_beyond_bound(loss, num_supervised, target, ignore_index)
    if plan.strategy == "dense":
        with no_autocast(input.device.type) if project_in_fp32 else nullcontext():
            losses = dense_losses(input, weight, bias, target, settings)
    else:
        losses = CutCrossEntropy.apply(
            *_without_graph(input, weight, bias),
            target,
            settings,
            TileBlocks(plan.rows, plan.vocab_tile, plan.filter_tolerance),
        )
    losses = nan_beyond_bound(losses, num_supervised, target, ignore_index)
    if token_weights is not None:
        losses = losses * token_weights.to(losses.dtype)
    if reduction == "none":
        return losses
    return losses.sum() if divisor is None else losses.sum() / divisor


def _without_graph(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the tensors, detached under `no_grad`, so that nothing is computed for gradients nobody can ask for."""
    if torch.is_grad_enabled():
        return tensors
    return tuple(None if t is None else t.detach() for t in tensors)


def _mean_divisor(target: Tensor, ignore_index: int, token_weights: Tensor | None) -> Tensor:
    """Return the number of supervised targets or the sum of their weights, 1 for 0, without waiting for a GPU."""
    if token_weights is None:
        return (target != ignore_index).sum().clamp(min=1)
    total = token_weights.sum(dtype=torch.float32)
    return torch.where(total == 0, torch.ones_like(total), total)
