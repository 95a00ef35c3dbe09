"""What the autograd functions of the losses share: settings, and guards around their forward and backward passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from litce.loss.options import LossOptions
from litce.loss.projection import Projection
from litce.loss.supervised_rows import SupervisedRows


@dataclass(frozen=True)
class LossSettings:
    """A loss without its tensors."""

    ignore_index: int
    options: LossOptions
    dtype: torch.dtype  # of the operands of every GEMM
    input_dtype: torch.dtype  # that hidden states are rounded to before
    vocab_size: int  # rows of the weight in use; rows after them are padding, outside the softmax
    num_supervised: int | None = None  # targets that are not ignored, or a bound of it, if the host knows it

    def rows(self, input: Tensor, target: Tensor) -> SupervisedRows:
        """Return the rows of `input` (..., D) that `target` (...) supervises."""
        return SupervisedRows(input, target, self.ignore_index, self.num_supervised)

    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        """Return the head that `weight` (V, D) and `bias` (V,) make."""
        return Projection(weight, bias, self.options, self.dtype, self.input_dtype, self.vocab_size)


def no_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context in which GEMMs keep the dtypes they are given: the losses choose them themselves."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def guarded_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Run the forward pass `(ctx, input, ...)` of an autograd function without autocast."""

    @functools.wraps(forward)
    def run(ctx: Any, input: Tensor, *args: Any) -> Any:
        with no_autocast(input.device.type):
            return forward(ctx, input, *args)

    return run


def guarded_backward(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """Run the backward pass of an autograd function without autocast, and let its gradients raise when differentiated.

    `once_differentiable` raises for an upstream gradient with a graph alone: other second derivatives, of a gradient's
    norm for example, would lose the loss's part in silence.
    """

    @functools.wraps(backward)
    def run(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        create_graph = torch.is_grad_enabled()
        with torch.no_grad(), no_autocast(upstream.device.type):
            grads = backward(ctx, upstream)
        if not create_graph:
            return grads
        sources = [tensor for tensor in (upstream, *ctx.saved_tensors) if tensor is not None and tensor.requires_grad]
        return tuple(None if grad is None else _DifferentiatedOnce.apply(grad, *sources) for grad in grads)

    return run


class _DifferentiatedOnce(torch.autograd.Function):
    """A gradient in a graph that cannot be walked back."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> None:
        raise RuntimeError(
            "trying to differentiate twice through a cross-entropy whose gradients are computed in blocks; "
            'strategy="dense" has second derivatives'
        )
