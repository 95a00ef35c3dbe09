"""The output projection of a language model and its loss."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from litce.loss.function import no_autocast
from litce.loss.linear_cross_entropy import run_plan
from litce.loss.options import LossOptions
from litce.loss.plan import CrossEntropyPlan, plan_cross_entropy
from litce.loss.sampling import sample_tokens_chunked
from litce.loss.token_stats import TokenStats, linear_token_stats


class LMHead(nn.Linear):
    """Maps hidden states (..., D) to logits (..., V), or with targets straight to their summed loss.

    The only reader of its weight, and only inside `forward`, where wrappers that shard parameters have gathered it.

    Args:
        in_features: D.
        out_features: rows of the weight.
        bias: whether logits have a bias.
        vocab_size: rows that stand for tokens; the loss's softmax leaves out those after them. None: all.
        fp32: multiply in fp32, whatever the dtypes of weight and hidden states and under autocast too.
        options: scale and softcap of the logits, and what else the loss is made of.
        factory: `device` and `dtype`, as for `nn.Linear`.
    """

    plan: CrossEntropyPlan | None = None
    """How the loss runs; set once before training. None: planned for each call with the default budget."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        vocab_size: int | None = None,
        fp32: bool = False,
        options: LossOptions = LossOptions(),  # noqa: B008  (frozen)
        **factory: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, **factory)
        self.vocab_size = out_features if vocab_size is None else vocab_size
        self.fp32 = fp32
        self.options = options

    def projection(self) -> tuple[Tensor, Tensor | None]:
        """Return the effective weight (V, D) and bias (V,), differentiable in the head's own parameters."""
        return self.weight, self.bias

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        *,
        num_supervised: int | None = None,
        sample: float | None = None,
    ) -> Tensor:
        """Return logits (..., V) of `x` (..., D), or the fp32 sum of the losses of `targets` (...), -100 ignored.

        `num_supervised` is the number of the other targets where it is known: a GPU skips the ignored ones.
        With `sample`, tokens (...) drawn at that temperature, by torch's default generator.
        """
        weight, bias = self.projection()
        if sample is not None:
            bias = None if bias is None else bias[: self.vocab_size]
            return sample_tokens_chunked(x, weight[: self.vocab_size], sample, bias=bias, options=self.options)
        if targets is None:
            dtype = torch.float32 if self.fp32 else weight.dtype
            with no_autocast(x.device.type) if self.fp32 else nullcontext():
                logits = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
            return self.options.transform(logits)
        plan = self.plan or plan_cross_entropy(
            targets.numel(),
            *weight.shape,
            dtype=weight.dtype,
            device=weight.device,
            weight_requires_grad=weight.requires_grad,
        )
        return run_plan(
            plan,
            x,
            weight,
            targets,
            bias=bias,
            reduction="sum",
            options=self.options,
            vocab_size=self.vocab_size,
            project_in_fp32=self.fp32,
            num_supervised=num_supervised,
        )

    def token_stats(self, x: Tensor, targets: Tensor) -> TokenStats:
        """Loss, correctness, entropy and best token of each of `targets` (...), -100 ignored, behind `x` (..., D).

        A tile of logits is alive at a time. Nothing is differentiated.
        """
        weight, bias = self.projection()
        return linear_token_stats(
            x,
            weight[: self.vocab_size],
            targets,
            linear_bias=None if bias is None else bias[: self.vocab_size],
            logit_softcap=self.options.logit_softcap,
            logit_scale=self.options.logit_scale,
            project_in_fp32=self.fp32,
        )
