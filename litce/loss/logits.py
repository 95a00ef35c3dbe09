"""Cross-entropy of logits that already exist, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from litce.loss.function import guarded_backward, guarded_forward
from litce.loss.plan import DEFAULT_BUDGET_BYTES, auto_cross_entropy_chunk_size, check_chunk_size
from litce.loss.targets import checked_targets


def chunked_cross_entropy(
    logits: Tensor | Sequence[Tensor],
    targets: Tensor,
    chunk_size: int | Literal["auto"] = 128,
    ignore_index: int = -100,
    memory_budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> Tensor:
    """Return the mean cross-entropy over the supervised targets, fp32; 0 where there are none.

    Args:
        logits: (B, T, V) or (N, V), or a list of (B, t, V) slices along the sequence, as a chunked head returns them.
        targets: (B, T) or (N,) integers in [0, V) or `ignore_index`.
        chunk_size: rows whose fp32 softmax is alive at once; 0 means all; "auto" fits `memory_budget_bytes`.
        ignore_index: target that is not supervised.
        memory_budget_bytes: for "auto": memory above the logits and their gradient, in bytes.

    The backward pass allocates the gradient of the logits and nothing else of their size; the logits are not written
    to.

    Raises:
        ValueError: for shapes that do not match, an unusable chunk size, or a target outside [0, V) on the CPU.
    """
    slices = [logits] if isinstance(logits, Tensor) else list(logits)
    if not slices:
        raise ValueError("logits is an empty list; give at least one (B, t, V) tensor")
    vocab_size = slices[0].shape[-1]
    check_chunk_size("chunk_size", chunk_size)
    targets = checked_targets(targets, vocab_size, ignore_index)
    target_slices = _split_targets(slices, targets)
    if chunk_size == "auto":
        itemsize = max(4, slices[0].dtype.itemsize)
        chunk_size = auto_cross_entropy_chunk_size(vocab_size, itemsize, memory_budget_bytes)
    total = sum(
        LogitsCrossEntropy.apply(z.reshape(-1, vocab_size), t.reshape(-1), ignore_index, chunk_size)
        for z, t in zip(slices, target_slices, strict=True)
    )
    return total / (targets != ignore_index).sum().clamp(min=1)


def _split_targets(slices: list[Tensor], targets: Tensor) -> list[Tensor]:
    if any(z.shape[-1] != slices[0].shape[-1] or z.ndim != slices[0].ndim for z in slices):
        raise ValueError(f"logits in the list differ in vocabulary or rank: {[tuple(z.shape) for z in slices]}")
    if len(slices) == 1:
        parts = [targets]
    elif targets.shape[-1] != sum(z.shape[-2] for z in slices):
        raise ValueError(f"targets {tuple(targets.shape)} do not fit logits {[tuple(z.shape) for z in slices]}")
    else:
        parts = list(targets.split([z.shape[-2] for z in slices], dim=-1))
    for z, t in zip(slices, parts, strict=True):
        if z.shape[:-1] != t.shape:
            raise ValueError(f"targets {tuple(t.shape)} do not fit logits {tuple(z.shape)}")
    return parts


class LogitsCrossEntropy(torch.autograd.Function):
    """`apply(logits, target, ignore_index, chunk_size)` -> sum of losses of (N, V) logits, fp32."""

    @staticmethod
    @guarded_forward
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, chunk_size: int) -> Tensor:
        ctx.options = ignore_index, chunk_size
        ctx.save_for_backward(logits, target)
        total = torch.zeros((), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
        for block in _blocks(len(target), chunk_size):
            log_probs = _log_softmax(logits[block], total.dtype)
            keep = target[block] != ignore_index
            index = torch.where(keep, target[block], 0).long()
            total -= torch.where(keep, log_probs.gather(1, index[:, None])[:, 0], 0.0).sum()
        return total

    @staticmethod
    @guarded_backward
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, target = ctx.saved_tensors
        ignore_index, chunk_size = ctx.options
        grad = torch.empty_like(logits)
        for block in _blocks(len(target), chunk_size):
            probs = _log_softmax(logits[block], upstream.dtype).exp_()
            keep = target[block] != ignore_index
            index = torch.where(keep, target[block], 0).long()
            probs.scatter_add_(1, index[:, None], torch.full_like(probs[:, :1], -1.0))
            grad[block] = torch.where(keep[:, None], probs.mul_(upstream), 0.0)
        return grad, None, None, None


def _log_softmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.log_softmax(logits, dim=-1, dtype=dtype)


def _blocks(num_rows: int, chunk_size: int) -> Iterator[slice]:
    step = chunk_size or max(1, num_rows)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
